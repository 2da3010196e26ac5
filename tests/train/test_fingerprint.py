"""A resume finds the rows, the models and the arithmetic it was started with, or it is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from soulkit.errors import RunError
from soulkit.eval.run.provenance import row_hashes
from soulkit.runs.conditions import Conditions, CorpusFacts, MaterialFacts, TaskFacts
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import read_value
from soulkit.train.setup.rows import TrainingData, mixture
from soulkit.train.state.fingerprint import (
    SAMPLED,
    _sample,
    check_material,
    deterministic,
    material_conditions,
    model_print,
    prompts_hash,
)
from tests.support.road import synth
from tests.support.training import config, policy_of, random_model, rows, soul

SMALL = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


def write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Two supervised steps in `run`, on `model` and the rows of `rows.jsonl`."""
    home = tmp_path_factory.mktemp("trained")
    shutil.copytree(base, home / "model")
    write_rows(home / "rows.jsonl", synth("tomi", 12, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert again() == 0
    return home


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the current folder."""
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "home"))
    return tmp_path / "home"


def again() -> int:
    return soul("train", "sft", "--model", "model", "--task", "tomi", "--data", "tomi=rows.jsonl",
                "--steps", 2, "--batch", 2, "--lora-r", 4, "--set", "deterministic=true",
                "--out", "run")  # fmt: skip


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the same command says now; the run is left as it was."""
    metrics = (folder / "run/metrics.jsonl").read_bytes()
    weights = (folder / "run/model/adapter_model.safetensors").read_bytes()
    capsys.readouterr()
    assert again() == 2
    assert (folder / "run/metrics.jsonl").read_bytes() == metrics
    assert (folder / "run/model/adapter_model.safetensors").read_bytes() == weights
    message = capsys.readouterr().err
    assert "--out" in message
    return message


def test_the_same_rows_and_model_are_taken_up(run: Path) -> None:
    before = (run / "run/conditions.json").read_bytes()
    assert again() == 0
    assert (run / "run/conditions.json").read_bytes() == before


def test_other_rows_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rows = run / "rows.jsonl", synth("tomi", 12, 3)
    write_rows(path, rows[:11])
    message = refused(run, capsys)
    assert "'tomi' had 12 training rows" in message and "has 11 now" in message
    write_rows(path, [*rows[:11], *synth("tomi", 1, 99)])
    assert "'tomi' still has 12 training rows, but not the same ones" in refused(run, capsys)
    write_rows(path, rows)
    assert again() == 0


def test_another_base_model_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "model" / "model.safetensors"
    tensors = load_file(file)
    name = max(tensors, key=lambda n: tensors[n].numel())
    tensors[name] += 0.001
    save_file(tensors, file, metadata={"format": "pt"})
    message = refused(run, capsys)
    assert "The base model 'model' has changed" in message and "set of weights" in message


def test_another_number_of_threads_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads + 1))
    try:
        message = refused(run, capsys)
    finally:
        torch.set_num_threads(threads)
    assert f"threads {threads}" in message and f"--threads {threads}" in message


@pytest.mark.parametrize("text", [None, "{"], ids=["missing", "torn"])
def test_a_run_that_does_not_know_its_material_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    path = run / "run/conditions.json"
    path.unlink() if text is None else path.write_text(text)
    words = "does not record its rows" if text is None else "conditions.json' cannot be read"
    assert words in refused(run, capsys)


def test_another_teacher_is_refused(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wise = tmp_path / "wise"
    shutil.copytree(base, wise)
    command = ("train", "opd", "--model", base, "--task", "tomi", "--data", "tomi=synth:6",
               "--steps", 1, "--prompts", 2, "--group-size", 2, "--max-tokens", 4, "--lora-r", 4,
               "--set", f"teacher_model={wise}", "--out", tmp_path / "run")  # fmt: skip
    assert soul(*command) == 0 and soul(*command) == 0
    tensors = load_file(wise / "model.safetensors")
    changed = {name: t * 1.01 for name, t in tensors.items()}
    save_file(changed, wise / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert soul(*command) == 2
    assert f"The teacher '{wise}' has changed" in capsys.readouterr().err


# --- the parts ------------------------------------------------------------------------------------


@pytest.fixture
def begun(base: Path) -> dict[str, Any]:
    """The conditions of a training of four rows and two dev rows, as they are on disk."""
    task, examples = rows("tomi", 6)
    model = model_print(policy_of(base, **SMALL))
    facts = TaskFacts(
        rows=row_hashes(examples[2:]), prompts=prompts_hash(task, examples[2:]),
        dev_rows=row_hashes(examples[:2]), dev_prompts=prompts_hash(task, examples[:2]),
    )  # fmt: skip
    material = MaterialFacts(
        model=model, adapter="a", teacher=dict(model), teacher_adapter="t",
        teacher_adapters={"tomi": "s"},
        machine={"threads": 1, "device": "cpu", "kernels": "AVX2", "torch": "2"},
        corpora={"chats": CorpusFacts(rows=3, sha256="1")},
        validation={"chats": CorpusFacts(rows=1, sha256="2")},
    )  # fmt: skip
    return Conditions(players={}, tasks={"tomi": facts}, material=material).as_dict()


TOMI, OTHER_MODEL = ("tasks", "tomi"), "base model 'base' has changed .* different "
REFUSALS: dict[tuple[str, ...], tuple[Any, str]] = {
    (*TOMI, "rows"): ({"a": "1"}, "'tomi' had 4 training rows .* and has 1 now"),
    (*TOMI, "prompts"): ("x", "prompts of the training rows of task 'tomi' have changed"),
    (*TOMI, "dev_prompts"): ("x", "prompts of the dev rows of task 'tomi' have changed"),
    (*TOMI, "dev_rows"): ({"a": "1", "b": "2"}, "'tomi' still has 2 dev rows"),
    ("corpora", "chats", "rows"): (4, "'chats' had 3 training rows .* and has 4 now"),
    ("corpora", "chats", "sha256"): ("x", "'chats' still has 3 training rows"),
    ("validation", "chats", "sha256"): ("x", "'chats' still has 1 dev rows"),
    ("model", "layout"): ("x", f"{OTHER_MODEL}shape"),
    ("model", "types"): ("x", f"{OTHER_MODEL}dtype"),
    ("model", "weights"): ("x", f"{OTHER_MODEL}set of weights"),
    ("model", "settings"): ("x", f"{OTHER_MODEL}configuration"),
    ("model", "tokenizer"): ("x", f"{OTHER_MODEL}tokenizer"),
    ("model", "template"): ("x", f"{OTHER_MODEL}chat template"),
    ("teacher", "weights"): ("x", "teacher 'wise' has changed .* different set of weights"),
    ("adapter",): ("x", "adapter 'start' have changed"),
    ("teacher_adapter",): ("x", "teacher's adapter 'expert' have changed"),
    ("teacher_adapters", "tomi"): ("x", "teacher of tomi, 'sage' have changed"),
    ("machine", "threads"): (2, "with threads 1 .--threads 1., but now it is 2"),
    ("machine", "device"): ("x", "with device cpu, but now it is x"),
    ("machine", "kernels"): ("x", "with kernels AVX2, but now it is x"),
    ("machine", "torch"): ("x", "with torch 2, but now it is x"),
}


@pytest.mark.parametrize("keys", REFUSALS, ids=".".join)
def test_every_difference_has_its_name(
    tmp_path: Path, begun: dict[str, Any], keys: tuple[str, ...]
) -> None:
    def of(record: dict[str, Any]) -> Conditions:
        return read_value(Conditions, record, "it")

    settings = config(
        model="base", adapter="start", teacher_model="wise", teacher_adapter="expert",
        teacher_adapters={"tomi": "sage"},
    )  # fmt: skip
    run = Run(path=tmp_path, command="train opd", resumed=False)
    check_material(run, of(begun), settings)
    check_material(run, of(begun), settings)
    now = json.loads(json.dumps(begun))
    *path, last = keys
    place = now if keys[0] == "tasks" else now["material"]
    for key in path:
        place = place[key]
    place[last], words = REFUSALS[keys]
    with pytest.raises(RunError, match=words) as raised:
        check_material(run, of(now), settings)
    assert all(raised.value.lines())


def test_the_order_of_the_rows_counts(tmp_path: Path, begun: dict[str, Any]) -> None:
    facts = begun["tasks"]["tomi"]
    turned = {**facts, "rows": dict(reversed(facts["rows"].items()))}
    before, now = (
        read_value(Conditions, {**begun, "tasks": {"tomi": one}}, "it") for one in (facts, turned)
    )
    run, settings = Run(path=tmp_path, command="train sft", resumed=False), config(model="base")
    check_material(run, before, settings)
    with pytest.raises(RunError, match="still has 4 training rows, but not the same ones"):
        check_material(run, now, settings)


def test_how_often_rows_are_taken_is_recorded(base: Path) -> None:
    task, examples = rows("tomi", 3)
    settings, policy = config(model=str(base)), policy_of(base, **SMALL)

    def facts(ratio: float) -> TaskFacts:
        pool = mixture({"tomi": task}, {"tomi": examples}, {"tomi": ratio}, 0)
        data = TrainingData({"tomi": task}, pool, [], settings)
        return material_conditions(settings, data, policy, None).of_task("tomi")

    assert [facts(ratio).taken for ratio in (1 / 3, 1.0, 5 / 3, 2.0)] == [0, 0, 5, 6]
    assert facts(1.0).rows == facts(2.0).rows and len(facts(1.0).rows) == 3


def test_the_print_of_a_model_is_that_of_its_base(base: Path) -> None:
    policy = policy_of(base, move=0.05, **SMALL)
    bare = policy_of(base, move=0.0, method="sft", full=True)
    assert model_print(policy) == model_print(bare)
    policy.tokenizer(["a", "longer one"], padding=True, truncation=True, max_length=4)
    assert model_print(policy) == model_print(bare)  # how a batch was padded is no part of it


def test_equal_weights_that_are_read_in_another_way_are_another_model(
    base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    before = model_print(policy_of(base, **SMALL))
    assert model_print(policy_of(folder, **SMALL)) == before  # where it lies does not matter
    settings = json.loads((folder / "config.json").read_text())
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 77.0}
    (folder / "config.json").write_text(json.dumps(settings))
    after = model_print(policy_of(folder, **SMALL))
    assert {name for name in before if before[name] != after[name]} == {"settings"}


def test_a_sample_spreads_over_the_columns_of_a_matrix() -> None:
    wide = torch.arange(4096 * 4096, dtype=torch.int32).reshape(4096, 4096)
    picked = torch.frombuffer(bytearray(_sample(wide)), dtype=torch.int32)
    assert len(picked) == SAMPLED and len(set((picked % 4096).tolist())) > 0.6 * SAMPLED
    assert len(_sample(torch.ones(7, dtype=torch.bfloat16))) == 14


def test_deterministic_kernels_are_for_the_run_alone() -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    before = torch.are_deterministic_algorithms_enabled(), os.environ.get(name)
    with pytest.raises(ZeroDivisionError), deterministic(True):
        assert torch.are_deterministic_algorithms_enabled() and os.environ[name]
        raise ZeroDivisionError
    assert (torch.are_deterministic_algorithms_enabled(), os.environ.get(name)) == before
    with deterministic(False):
        assert torch.are_deterministic_algorithms_enabled() == before[0]
