"""A tiny model folder and an adapter for it, and damaged copies of them for tests/hostile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.hostile import mutations, seeded

Change = Callable[[Path], object]
"""Damages a copy of the folder."""

ODD_FILES: dict[str, bytes] = {
    "null": b"null", "list": b"[]", "text": b'"x"', "number": b"7", "true": b"true",
    "object": b"{}", "empty": b"", "blank": b" \n", "zeros": b"\0" * 64, "deep": b"[" * 100_000,
    "deep-objects": b'{"a":' * 100_000, "digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    "twice": b'{"a": 1, "a": 2}', "latin": b'{"model_type": "\xe9"}', "pickle": b"\x80\x04K\x01.",
    "objects": b'[{"model_type": "qwen3"}]', "yaml": b"model_type: qwen3\n", "python": b"{'a': 1}",
}  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 10**6, 10**9, 10**12, 10**30, 1.5, -0.0, 1e308, "", "x", "\x1b[31m",
    "../../x", "\u202e", "a" * 10_000, [], [1], ["a"], [[]], {}, {"": 1}, {"a": {"b": []}},
)  # fmt: skip


def build_model(folder: Path) -> Path:
    """An untrained model of one million parameters."""
    from soulkit.models.local.tiny import build_tiny

    return build_tiny(folder, ["the cat sat on a mat said yes no hello who are you"])


def build_adapter(model: Path, folder: Path) -> Path:
    """A LoRA adapter of rank 2 for the model in the folder `model`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from soulkit.models.local.loading import ADAPTER, save_adapter

    base = AutoModelForCausalLM.from_pretrained(model)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    folder.mkdir()
    save_adapter(get_peft_model(base, config, adapter_name=ADAPTER), folder)
    return folder


def put_copy(source: Path, target: Path, change: Change | None = None) -> None:
    """Copy a folder (unchanged files as hard links), and damage the copy."""
    target.mkdir()
    for file in source.iterdir():
        os.link(file, target / file.name)
    if change is not None:
        change(target)


def replaced(name: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)

    return change


def with_fields(name: str, **fields: Any) -> Change:
    """Set fields of a JSON file."""

    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        replaced(name, json.dumps({**content, **fields}).encode())(folder)

    return change


def linked(name: str, to: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return change


def special(name: str, kind: str) -> Change:
    """A pipe or a folder in the place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (os.mkfifo if kind == "pipe" else os.mkdir)(folder / name)

    return change


def odd_files(name: str) -> Iterator[tuple[str, Change]]:
    """Every kind of wrong content in the place of one JSON file."""
    for kind, content in ODD_FILES.items():
        yield f"{name}-{kind}", replaced(name, content)
    for to in ("/etc/passwd", "/dev/zero", "/nowhere", name):
        yield f"{name}-to-{to}", linked(name, to)
    for kind in ("pipe", "folder"):
        yield f"{name}-{kind}", special(name, kind)


def odd_fields(seed: int, source: Path, name: str, count: int) -> Iterator[tuple[str, Change]]:
    """One odd value in the place of a random field of a JSON file, at any depth."""
    rng = seeded(f"{seed}-{name}")
    for number in range(count):
        content = json.loads((source / name).read_text())
        places = list(_places(content))
        holder, key = rng.choice(places)
        holder[key] = value = rng.choice(ODD)
        text = json.dumps(content).encode()
        yield f"{name}-{number}-{key}={str(value)[:20]!r}", replaced(name, text)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value[:8])
    for key, part in list(inner):
        yield value, key
        if isinstance(part, dict | list):
            yield from _places(part)


def odd_bytes(seed: int, source: Path, name: str, count: int) -> Iterator[tuple[str, Change]]:
    """Damaged bytes of one file."""
    for kind, content in mutations(seed, (source / name).read_bytes(), count):
        yield f"{name}-{kind}", replaced(name, content)


def with_tensors(name: str, alter: Callable[[dict[str, Any]], object]) -> Change:
    """Rewrite a safetensors file with altered tensors."""

    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / name)
        alter(tensors)
        (folder / name).unlink()
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return change


def odd_weights(name: str) -> Iterator[tuple[str, Change]]:
    """Weights that are empty, cut, zeros, not finite, or of other shapes and names."""
    import torch

    for kind, content in (
        ("empty", b""), ("zeros", b"\0" * 4096), ("text", b"hello" * 100),
        ("huge-header", b"\xff" * 64), ("pickle", b"\x80\x04K\x01."),
    ):  # fmt: skip
        yield f"{name}-{kind}", replaced(name, content)
    for share in (0.01, 0.5, 0.99):
        yield f"{name}-cut-{share}", _cut(name, share)
    for header in (b"[]", b"null", b"7", b'{"a": 1}', b'{"a": {}}', b"{" * 5000,
                   b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
                   b'{"a": {"dtype": "F32", "shape": [99999999999], "data_offsets": [0, 4]}}',
                   b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", null]}}',
                   b'{"a": {"dtype": "X9", "shape": "x", "data_offsets": []}}'):  # fmt: skip
        content = len(header).to_bytes(8, "little") + header + b"\0" * 4
        yield f"{name}-header-{header[:12]!r}", replaced(name, content)
    for kind, fill in (("nan", float("nan")), ("infinite", float("inf")), ("all-zero", 0.0)):
        yield (
            f"{name}-{kind}",
            with_tensors(name, lambda t, f=fill: [x.fill_(f) for x in t.values()]),
        )

    def first(tensors: dict[str, Any]) -> str:
        return sorted(tensors)[0]

    yield f"{name}-shape", with_tensors(name, lambda t: t.update({first(t): torch.zeros(3, 3)}))
    yield f"{name}-scalar", with_tensors(name, lambda t: t.update({first(t): torch.zeros(())}))
    yield f"{name}-none", with_tensors(name, lambda t: t.clear())
    yield f"{name}-missing", with_tensors(name, lambda t: t.pop(first(t)))
    yield f"{name}-names", with_tensors(name, lambda t: t.update({"\x1b[31m..": torch.zeros(2)}))
    yield f"{name}-long-name", with_tensors(name, lambda t: t.update({"x" * 9999: torch.zeros(2)}))
    yield (
        f"{name}-whole",
        with_tensors(name, lambda t: t.update({k: v.to(torch.int64) for k, v in t.items()})),
    )
    yield (
        f"{name}-double",
        with_tensors(name, lambda t: t.update({k: v.double() for k, v in t.items()})),
    )


def _cut(name: str, share: float) -> Change:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        replaced(name, content[: int(len(content) * share)])(folder)

    return change
