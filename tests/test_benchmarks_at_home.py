"""A benchmark lives in its folder: no other code names one, and no folder knows another."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.user_code import BUILTIN

PACKAGE = BUILTIN.parent
FOLDERS = sorted(
    path.name
    for path in BUILTIN.iterdir()
    if path.name != "kit" and (path / "__init__.py").is_file()
)
GENERAL = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if not {*(BUILTIN / name for name in FOLDERS), PACKAGE / "demo"} & {*path.parents}
)
WORDS = {"instructions", "mistakes", "templates", "tom"}
"""Names of folders and tasks that are words of their own."""


def names() -> list[str]:
    declared = {*load_registry().specs, *FOLDERS, "hi-tom", "paratomi", "userllm", "usersim"}
    return sorted(declared - WORDS)


def imports(path: Path) -> set[str]:
    """The modules that a file names in an import, wherever in it the import stands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    whole = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    froms = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    return whole | {f"{n.module}.{alias.name}" for n in froms for alias in n.names}


@pytest.mark.parametrize("path", GENERAL, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_general_code_names_no_benchmark(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, names()))})(?![\w-])", re.I)
    named = {f"line {text[: m.start()].count(chr(10)) + 1}: {m[0]}" for m in pattern.finditer(text)}
    assert named == set()


@pytest.mark.parametrize("path", GENERAL, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_general_code_imports_no_benchmark(path: Path) -> None:
    homes = tuple(f"soulkit.tasks.{name}" for name in FOLDERS)
    assert {m for m in imports(path) if m.startswith(homes)} == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_benchmark_knows_no_other(folder: str) -> None:
    others = tuple(f"soulkit.tasks.{name}." for name in FOLDERS if name != folder)
    for path in (BUILTIN / folder).rglob("*.py"):
        assert {m for m in imports(path) if m.startswith(others)} == set(), path


def test_every_folder_belongs_to_a_declared_task() -> None:
    homes = {spec.home.folder.name for spec in load_registry().specs.values()}
    assert set(FOLDERS) == homes


@pytest.mark.parametrize("name", sorted(load_registry().specs))
def test_every_function_that_a_declaration_names_is_there(name: str) -> None:
    spec = load_registry().spec(name)
    for key in ("synth", "importer", "builder", "audit", "scripted_partner"):
        hook = spec.hook(name, key)
        assert (hook is not None) == bool(getattr(spec, key))
        assert hook is None or all(option.flag.startswith("--") for option in hook.options.values())
