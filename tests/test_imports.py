"""What importing may cost: no torch outside the training code, nothing heavy at the door."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import soulkit

ROOT = Path(soulkit.__file__).parent
OPTIONAL = {"torch", "transformers", "peft", "vllm", "matplotlib", "tensorboard", "trackio"}
OPTIONAL |= {"wandb", "liger_kernel", "safetensors"}


def loaded_by(statement: str, *names: str) -> list[str]:
    code = f"import sys\n{statement}\nprint(*[m for m in {names!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_package_and_its_lowest_layers_are_light() -> None:
    statement = "import soulkit, soulkit.types, soulkit.errors, soulkit.text, soulkit.runs.folder"
    heavy = ("torch", "transformers", "openai", "datasets", "pyarrow", "numpy", "pydantic", "rich")
    assert loaded_by(statement, *heavy) == []


def test_settings_come_without_torch() -> None:
    names = ("torch", "transformers", "openai", "datasets", "numpy")
    assert loaded_by("import soulkit.config", *names) == []


def test_the_openai_package_waits_for_a_batch() -> None:
    """It takes as long to import as everything else together; calls do without it."""
    modules = (
        "soulkit.cli.app, soulkit.cli.eval, soulkit.eval.run.runner, soulkit.models.api.endpoint"
    )
    batch = "soulkit.models.api.batch_endpoint, soulkit.models.api.probing"
    assert loaded_by(f"import {modules}, {batch}", "openai") == []


def at_import_time(tree: ast.Module) -> set[str]:
    """First names of the packages that a module imports when it is itself imported."""
    packages: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
        lazy = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        if not isinstance(node, lazy) and not _types_only(node):
            waiting.extend(ast.iter_child_nodes(node))
    return packages


def _types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def test_optional_packages_are_imported_inside_functions() -> None:
    wrong = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("train/", "models/local/")):
            continue
        early = at_import_time(ast.parse(path.read_text(encoding="utf-8"))) & OPTIONAL
        if early:
            wrong[name] = early
    assert wrong == {}


def test_the_finder_of_imports_sees_what_it_should() -> None:
    tree = ast.parse(
        "import a.b\nfrom c import d\nif x:\n    import e\n"
        "if TYPE_CHECKING:\n    import f\ndef g():\n    import h\nclass K:\n    import i\n"
    )
    assert at_import_time(tree) == {"a", "c", "e", "i"}


NEED_TORCH = ("train", "models.local", "distill.run", "demo.training")
"""Packages and modules that may need torch when they are imported."""
IMPORT_ALL = """
import importlib, pkgutil, soulkit
for module in pkgutil.walk_packages(soulkit.__path__, "soulkit."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError:
        print(module.name)
"""


def test_everything_else_is_imported_without_torch() -> None:
    """Also what the other modules import of `train`: a report, a plan, a rescoring."""
    path = os.pathsep.join([str(ROOT.parent / "tests" / "without_torch"), str(ROOT.parent)])
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    names = [name.removeprefix("soulkit.") for name in done.stdout.split()]
    assert "train.step" in names, "torch was found"
    assert [name for name in names if not f"{name}.".startswith(tuple(f"{one}." for one in
            NEED_TORCH))] == []  # fmt: skip
    light = ("train.ablate", "train.ends", "train.config", "train.planning", "train.state.recorded")
    assert set(light) & set(names) == set()
