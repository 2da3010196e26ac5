"""Naming rules: few bare participles, and each public name is defined once."""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PARTICIPLES = {
    "found", "said", "asked", "told", "mine", "theirs",
    "heard", "given", "known", "wanted", "kept", "own",
}  # fmt: skip
"""Participles that are too vague as names; recorded fields with such a name may stay."""
SHARE = 0.005
"""Of all bindings of a folder, at most."""

ROLES = {
    "app": "the commands of a group: cli/app.py looks for it in every file of a command",
    "command": "the only command of its file, found in the same way",
    "make_command": "builds a single command from settings, found in the same way",
    "group": "builds the options of a command from its settings, found in the same way",
    "show": "the command `show` of its group: Typer calls a command after its function",
    "rows": "the generated rows of a benchmark, named in its declaration",
}
"""Public names that several modules define because they implement the same interface."""


@pytest.fixture(scope="module", autouse=True)
def _no_search_for_garbage() -> Iterator[None]:
    """Pause the garbage collector: the syntax trees of the repository are many and all in use."""
    gc.disable()
    yield
    gc.enable()


def bindings(path: Path) -> Iterator[tuple[str, int]]:
    """(name, line) of every variable and parameter that a file binds."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name, ctx=ast.Store(), lineno=line) | ast.arg(arg=name, lineno=line):
                yield name, line


def public_names(path: Path) -> set[str]:
    """The classes and functions at the top of a module that others may use."""
    return {
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    }


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", ["soulkit", "tests"])
def test_variables_say_what_they_hold(folder: str) -> None:
    total, places = 0, []
    for path in python_files(folder):
        for name, line in bindings(path):
            total += 1
            if name in PARTICIPLES:
                places.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    share = len(places) / total
    listing = "\n".join(places)
    assert share < SHARE, f"{len(places)} of {total} names ({100 * share:.2f} %):\n{listing}"


def test_a_public_name_stands_for_one_thing() -> None:
    modules = defaultdict(list)
    for path in python_files("soulkit"):
        for name in public_names(path):
            modules[name].append(str(path.relative_to(ROOT)))
    several = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert {name: paths for name, paths in several.items() if name not in ROLES} == {}
