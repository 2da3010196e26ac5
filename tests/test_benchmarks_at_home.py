"""A benchmark lives in its folder: no other code names one, and no folder knows another."""

from __future__ import annotations

import ast
import re
import typing
from pathlib import Path

from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.spec import HookKey
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


def test_general_code_names_no_benchmark() -> None:
    pattern = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, names()))})(?![\w-])", re.I)
    named = []
    for path in GENERAL:
        text = path.read_text(encoding="utf-8")
        for match in pattern.finditer(text):
            line = text[: match.start()].count("\n") + 1
            named.append(f"{path.relative_to(PACKAGE)}:{line}: {match[0]}")
    assert named == []


def test_general_code_imports_no_benchmark() -> None:
    homes = tuple(f"soulkit.tasks.{name}" for name in FOLDERS)
    wrong = {path: [m for m in imports(path) if m.startswith(homes)] for path in GENERAL}
    assert {path: modules for path, modules in wrong.items() if modules} == {}


def test_a_benchmark_knows_no_other() -> None:
    for folder in FOLDERS:
        others = tuple(f"soulkit.tasks.{name}." for name in FOLDERS if name != folder)
        for path in (BUILTIN / folder).rglob("*.py"):
            assert {m for m in imports(path) if m.startswith(others)} == set(), path


def test_every_folder_belongs_to_a_declared_task() -> None:
    homes = {spec.home.folder.name for spec in load_registry().specs.values()}
    assert set(FOLDERS) == homes


def test_every_function_that_a_declaration_names_is_there() -> None:
    for name, spec in load_registry().specs.items():
        for key in typing.get_args(HookKey):
            hook = spec.hook(name, key)
            assert (hook is not None) == bool(getattr(spec, key))
            flags = [option.flag for option in hook.options.values()] if hook else []
            assert all(flag.startswith("--") for flag in flags)
