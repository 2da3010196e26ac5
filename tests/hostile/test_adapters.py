"""Odd adapters: `--adapter FOLDER`, and an adapter's folder as `--model`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from soulkit.errors import ModelLoadError
from soulkit.models.local.weights import check_adapter_folder
from soulkit.serving.export import not_copied
from tests.support.hostile import Attack, seeds
from tests.support.model_folders import (
    Change,
    build_adapter,
    build_model,
    linked,
    odd_bytes,
    odd_fields,
    odd_files,
    odd_weights,
    put_copy,
    special,
    with_fields,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ON_MODEL = ("eval", "local", "--model", "model", "--adapter", "adapter", "--task",
            "cast_of_people", "--data", "synth:1", "--max-tokens", "2", "--max-unscored", "1",
            "--out", "run")  # fmt: skip
ALONE = ("eval", "local", "--model", "adapter", *ON_MODEL[6:])
EXPORT = ("export", "adapter", "--merge", "--out", "exported")
COPY = ("export", "adapter", "--adapter", "--out", "exported")
PATTERNS = (
    "(a+)+$", "(.*)*x", "([a-z._0-9]+)+!", "(?:.*?){50}y", "(", "[", "(?P<x", "\\", "*", ".*", "",
    "x" * 100_000, "(" * 5000 + ")" * 5000, "a{99999999999}", "(?=(\\w+)+#)",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("hostile")
    model = build_model(folder / "model")
    return model, build_adapter(model, folder / "adapter")


@pytest.fixture
def attack_adapters(
    folders: tuple[Path, Path], attack_all: Callable[[Attack, Iterable[Attack]], None]
) -> Callable[..., None]:
    """Run a command on damaged copies of the adapter."""

    def put(change: Change | None, folder: Path) -> None:
        put_copy(folders[0], folder / "model")
        put_copy(folders[1], folder / "adapter", change)

    def attack(changes: Iterable[tuple[str, Change]], command: tuple[str, ...] = ON_MODEL) -> None:
        attack_all(
            Attack("undamaged", command, partial(put, None)),
            (Attack(n, command, partial(put, c), canaries=("canary",)) for n, c in changes),
        )

    return attack


@pytest.mark.parametrize("part", seeds(6, quick=0))
def test_other_json_in_the_place_of_the_configuration(
    attack_adapters: Callable[..., None], part: int
) -> None:
    attack_adapters(list(odd_files(CONFIG))[part::6])


@pytest.mark.parametrize(
    "config",
    [
        {"layer_replication": [[0, 4]] * 10_000},
        {"r": 10**9},
        {"target_modules": "(a+)+$"},
        {"megatron_config": {"a": 1}},
    ],
)
def test_odd_settings_are_refused_before_peft_reads_them(
    tmp_path: Path, config: dict[str, object]
) -> None:
    """The quick part: the check that comes before torch and peft are imported."""
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (tmp_path / WEIGHTS).write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelLoadError, match="cannot be used"):
        check_adapter_folder(tmp_path, ["a" * 40 + "!"])


def _odd_settings() -> Iterator[tuple[str, Change]]:
    for key in ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern"):
        for pattern in PATTERNS:
            value = {pattern: 2} if key == "rank_pattern" else pattern
            yield f"{key}={pattern[:20]}", with_fields(CONFIG, **{key: value})
    for rank in (0, -1, 10**5, 10**9, 10**30, "2", None, 1.5, [2], True):
        yield f"r={rank}", with_fields(CONFIG, r=rank)
        yield f"alpha={rank}", with_fields(CONFIG, lora_alpha=rank)
        yield f"pattern={rank}", with_fields(CONFIG, rank_pattern={"q_proj": rank})
    for kind in ("LORA", "IA3", "PROMPT_TUNING", "XLORA", "x", "", None, 7, []):
        yield f"peft_type={kind}", with_fields(CONFIG, peft_type=kind, num_virtual_tokens=10**9)
        yield f"task_type={kind}", with_fields(CONFIG, task_type=kind)
        yield f"init={kind}", with_fields(CONFIG, init_lora_weights=kind)
    for base in (None, 7, [], "", "../x", "/nowhere", "adapter", "x" * 5000, "\x1b[31m"):
        yield f"base={str(base)[:9]!r}", with_fields(CONFIG, base_model_name_or_path=base)
    yield "megatron", with_fields(CONFIG, megatron_config={"a": 1}, megatron_core="evil")
    yield "replication", with_fields(CONFIG, layer_replication=[[0, 4]] * 10_000)
    yield "mapping", with_fields(CONFIG, auto_mapping={"base_model_class": "x",
                                                       "parent_library": "evil"})  # fmt: skip


def _with_module(change: Change) -> Change:
    """Also put a module `evil` where a command could import it."""

    def put(folder: Path) -> None:
        change(folder)
        (folder.parent / "evil.py").write_text("open('canary', 'w')\n")

    return put


@pytest.mark.parametrize("part", seeds(8, quick=0))
def test_odd_settings(attack_adapters: Callable[..., None], part: int) -> None:
    attack_adapters([(n, _with_module(c)) for n, c in list(_odd_settings())[part::8]])


@pytest.mark.hostile
def test_odd_bases(attack_adapters: Callable[..., None]) -> None:
    changes = [one for one in _odd_settings() if one[0].startswith("base=")]
    attack_adapters([*changes, *list(odd_files(CONFIG))[::3]], ALONE)


@pytest.mark.parametrize("seed", seeds(3, quick=0))
def test_odd_values_and_bytes(
    attack_adapters: Callable[..., None], folders: tuple[Path, Path], seed: int
) -> None:
    attack_adapters(odd_fields(seed, folders[1], CONFIG, 15))
    attack_adapters(odd_bytes(seed, folders[1], CONFIG, 10))


@pytest.mark.hostile
def test_odd_weights(attack_adapters: Callable[..., None]) -> None:
    attack_adapters(odd_weights(WEIGHTS))


@pytest.mark.hostile
def test_links_and_pipes(attack_adapters: Callable[..., None]) -> None:
    links = [(f"to {to}", linked(WEIGHTS, to)) for to in ("/etc/passwd", "/dev/zero", "/nowhere")]
    attack_adapters([*links, *((kind, special(WEIGHTS, kind)) for kind in ("pipe", "folder"))])


@pytest.mark.hostile
def test_export(attack_adapters: Callable[..., None]) -> None:
    changes = [*odd_files(CONFIG), *odd_weights(WEIGHTS), *_odd_settings()]
    attack_adapters(changes[::6], EXPORT)


@pytest.mark.hostile
def test_copies(attack_adapters: Callable[..., None]) -> None:
    attack_adapters([*odd_files(CONFIG), *odd_weights(WEIGHTS)], COPY)
    links = [linked(name, to) for name in (WEIGHTS, "tokenizer.json", "new.txt", "new")
             for to in ("/etc/passwd", "/etc/ssl", "/dev/zero", "/nowhere", ".", "..")]  # fmt: skip
    pipes = [special(name, "pipe") for name in (WEIGHTS, "new", "tokenizer.json")]
    attack_adapters(((str(n), change) for n, change in enumerate([*links, *pipes])), COPY)


def test_an_export_copies_no_file_from_elsewhere(tmp_path: Path) -> None:
    for place in ("adapter", "snapshots/a", "blobs", "elsewhere"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "elsewhere/secret").touch()
    (tmp_path / "adapter/training.pt").symlink_to("../elsewhere/secret")
    for name in ("secret", ""):
        link = tmp_path / "adapter/new"
        link.symlink_to(tmp_path / "elsewhere" / name)
        with pytest.raises(ModelLoadError, match="cannot be used"):
            not_copied(str(tmp_path / "adapter"), ["new", "training.pt"])
        link.unlink()
    (tmp_path / "blobs/1").touch()
    (tmp_path / "snapshots/a/model.safetensors").symlink_to("../../blobs/1")  # the Hub's cache
    assert not_copied(str(tmp_path / "snapshots/a"), ["model.safetensors", ".git"]) == {".git"}
    (tmp_path / "snapshots/a/original").mkdir()
    (tmp_path / "snapshots/a/original/params.json").symlink_to("../../../blobs/1")
    assert not not_copied(str(tmp_path / "snapshots/a/original"), ["params.json"])
    assert not not_copied("/", [])


@pytest.mark.hostile
def test_notes(attack_adapters: Callable[..., None]) -> None:
    """`soulkit.json`, which names the base and the training of an adapter."""
    for command in (ON_MODEL, EXPORT):
        attack_adapters(list(odd_files("soulkit.json"))[::4], command)
        note = {"base": {"model": 7}, "tasks": [], "method": "\x1b[31m"}
        damage = with_fields("soulkit.json", **json.loads(json.dumps(note)))
        attack_adapters([("note", damage)], command)
