"""The scripts in `benchmarks/` use what the package has: nothing else notices when a name goes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from soulkit.data.files import read_rows
from soulkit.tasks.registry import load_registry

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))


def imports_of_the_package(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import from soulkit, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("soulkit"):
            yield from ((node.module or "", alias.name) for alias in node.names)


def is_there(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name) or bool(import_module(f"{module}.{name}"))
    except ImportError:
        return False


@pytest.mark.torch
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_a_benchmark_imports_is_there(path: Path) -> None:
    missing = [
        f"{module}.{name}"
        for module, name in imports_of_the_package(path)
        if not is_there(module, name)
    ]
    assert missing == []


@pytest.mark.torch
def test_what_the_distillation_holds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/benchmarks.md says: new combinations of cues, secrets known under other names."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    distill = import_module("distill")
    size = distill.Size(experts=dict.fromkeys((distill.KEEPER, distill.CAST), 0))
    world = distill.World(tmp_path, seed=0, size=size, partner="")
    world.write_rows()
    registry = load_registry(world.tasks_file)
    clusters: dict[tuple[str, str], set[str]] = {}
    for name in (distill.CAST, distill.KEEPER):
        task = registry.task(name)
        for split in ("train", "test"):
            examples = [task.example(row.fields) for row in read_rows(world.rows(name, split))[0]]
            clusters[name, split] = {example.cluster for example in examples}
    assert len(clusters[distill.CAST, "test"]) == 26
    assert not clusters[distill.CAST, "train"] & clusters[distill.CAST, "test"]
    assert len(clusters[distill.KEEPER, "test"]) == 60
    assert clusters[distill.KEEPER, "test"] <= clusters[distill.KEEPER, "train"]
    # The gates against duplicates are those of `soul distill`.
    assert "near" not in distill.DISTILLED
