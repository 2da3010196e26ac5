"""Rules for every file of the repository; CONTRIBUTING.md lists the limits.

Imports: no torch outside the training code, no slow imports at start-up.

A benchmark's code is in its folder: no other code names a benchmark, and no folder uses another.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.spec import HookKey
from soulkit.tasks.kit.user_code import BUILTIN

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "soulkit"
SOURCES = sorted(PACKAGE.rglob("*.py"))

LINES_OF_A_FILE = (80, 650)
MODULES_OF_A_PACKAGE = 15
LINES_OF_A_FUNCTION = 60
FROZEN = {"soulkit/models/local/decode.py": 480}
"""Files that may be fixed but not extended → maximum lines. vLLM has what the decode loop lacks."""

# Spelled in two parts, so that this file does not mention what it forbids.
FOREIGN = {
    "a private path": re.compile("/wor" + "k/"),
    "the folder beside the repository": re.compile(r"\.\./shar" + "ed"),
    "how the code was written": re.compile(r"\b(?:issue|session)\s+(?:no\.?\s*)?#?\d", re.I),
    "who wrote the code": re.compile(r"\bsub-?age" + r"nts?\b", re.I),
}
SECRETS = {
    "an OpenAI key": r"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{20,}",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{30,}",
    "an AWS key": r"\bAKIA[0-9A-Z]{16}\b",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}


@pytest.fixture(scope="module", autouse=True)
def _no_search_for_garbage() -> Iterator[None]:
    """Pause the garbage collector: the syntax trees of the repository are many and all in use."""
    gc.disable()
    yield
    gc.enable()


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


def tracked() -> list[Path]:
    """Text files that belong to the repository; those not yet added count as well."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this copy is no git checkout")
    paths = [ROOT / name for name in done.stdout.decode().split("\0") if name]
    binary = {".png", ".jpg", ".gif", ".parquet", ".safetensors", ".sqlite"}
    return [p for p in paths if p.is_file() and p.suffix not in binary]


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_a_module_covers_a_subject_and_can_be_read_in_one_sitting() -> None:
    """Modules are neither too short nor too long; a training method may be short."""
    least, most = LINES_OF_A_FILE
    lines = {short(path): text(path).count("\n") for path in SOURCES}
    assert {name: n for name, n in lines.items() if n > most} == {}
    short_by_nature = re.compile(r"/(?:__init__|__main__|version)\.py$|/train/objectives/")
    fragments = {n: k for n, k in lines.items() if k < least and not short_by_nature.search(n)}
    assert fragments == {}


def test_a_package_reads_like_a_table_of_contents() -> None:
    """Apart from the command line, which has one module for each command."""
    modules = Counter(short(p.parent) for p in SOURCES if p.name != "__init__.py")
    del modules["soulkit/cli"]
    assert {room: n for room, n in modules.items() if n > MODULES_OF_A_PACKAGE} == {}


def test_imports_go_in_no_circle() -> None:
    """Those inside functions and for the type checker count as well."""
    graph = grimp.build_graph("soulkit", cache_dir=None)
    order = TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )
    order.prepare()  # CycleError, with the circle, where there is one


def test_what_is_frozen_does_not_grow() -> None:
    lines = {name: text(ROOT / name).count("\n") for name in FROZEN}
    assert {name: n for name, n in lines.items() if n > FROZEN[name]} == {}


def test_functions_stay_short() -> None:
    long = {
        f"{short(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= LINES_OF_A_FUNCTION
    }
    assert long == {}


def test_every_module_says_what_it_is_for() -> None:
    bare = [short(p) for p in SOURCES if text(p).strip() and ast.get_docstring(tree(p)) is None]
    assert bare == ["soulkit/__init__.py"] or bare == []


def test_only_the_command_line_prints() -> None:
    printing = [
        f"{short(path)}:{node.lineno}"
        for path in SOURCES
        if not path.is_relative_to(PACKAGE / "cli")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert printing == []


def test_no_failure_is_swallowed() -> None:
    """No `except` for all exceptions has an empty body."""
    silent = [
        f"{short(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
    ]
    assert silent == []


def test_models_bring_no_code_and_files_no_pickle() -> None:
    risky = re.compile(
        r"trust_remote_code\s*=\s*True|^\s*(?:import|from) pickle|weights_only=False"
    )
    assert [short(p) for p in SOURCES if re.search(risky, text(p))] == []


@pytest.mark.parametrize("what", FOREIGN)
def test_the_repository_stands_on_its_own(what: str) -> None:
    # Only the CI script may look for real data next to the checkout.
    places = [
        short(path)
        for path in tracked()
        if short(path) != ".ci/run" and FOREIGN[what].search(text(path))
    ]
    assert places == []


def test_no_secret_is_written_down() -> None:
    kinds = {what: re.compile(pattern) for what, pattern in SECRETS.items()}
    places = {
        f"{short(path)}: {what}"
        for path in tracked()
        for what, pattern in kinds.items()
        # Tests of the scanners need keys that look real.
        if pattern.search(text(path)) and not path.is_relative_to(ROOT / "tests")
    }
    assert places == set()


# --- imports --------------------------------------------------------------------------------------

OPTIONAL = {"torch", "transformers", "peft", "vllm", "matplotlib", "tensorboard", "trackio"}
OPTIONAL |= {"wandb", "liger_kernel", "safetensors"}
LIGHT = (
    ("soulkit", "soulkit."),
    ("soulkit.types, soulkit.errors, soulkit.text, soulkit.runs.folder",
     "torch transformers openai datasets pyarrow numpy pydantic rich"),
    ("soulkit.config", "torch transformers openai datasets numpy"),
    # The openai package takes as long to import as everything else, and calls do not need it.
    ("soulkit.cli.app, soulkit.cli.eval, soulkit.eval.run.runner, soulkit.models.api.endpoint, "
     "soulkit.models.api.batch_endpoint, soulkit.models.api.probing", "openai torch"),
)  # fmt: skip
"""Modules to import in order, and the packages that must not be loaded after each."""


def test_the_lower_layers_are_light() -> None:
    lines = ["import sys"]
    for modules, heavy in LIGHT:
        test = f"m.startswith({heavy!r})" if heavy.endswith(".") else f"m in {heavy.split()}"
        lines += [f"import {modules}", f"print(*[m for m in sys.modules if {test}])"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["soulkit.version", "", "", ""]


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
    early = {
        short(path): packages
        for path in SOURCES
        if not short(path).startswith(("soulkit/train/", "soulkit/models/local/"))
        if (packages := at_import_time(tree(path)) & OPTIONAL)
    }
    assert early == {}


def test_the_finder_of_imports_sees_what_it_should() -> None:
    tree = ast.parse(
        "import a.b\nfrom c import d\nif x:\n    import e\n"
        "if TYPE_CHECKING:\n    import f\ndef g():\n    import h\nclass K:\n    import i\n"
    )
    assert at_import_time(tree) == {"a", "c", "e", "i"}


NEED_TORCH = ("train", "models.local", "distill.run")
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
    path = os.pathsep.join([str(ROOT / "tests" / "without_torch"), str(ROOT)])
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


# --- benchmarks -----------------------------------------------------------------------------------

FOLDERS = sorted(
    path.name
    for path in BUILTIN.iterdir()
    if path.name != "kit" and (path / "__init__.py").is_file()
)
GENERAL = sorted(
    path
    for path in SOURCES
    if not {*(BUILTIN / name for name in FOLDERS), PACKAGE / "demo"} & {*path.parents}
)
WORDS = {"instructions", "mistakes", "templates", "tom"}
"""Names of folders and tasks that are also ordinary words."""


def names() -> list[str]:
    declared = {*load_registry().specs, *FOLDERS, "hi-tom", "paratomi", "userllm", "usersim"}
    return sorted(declared - WORDS)


def imports(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in the file."""
    nodes = list(ast.walk(tree(path)))
    whole = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    froms = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    return whole | {f"{n.module}.{alias.name}" for n in froms for alias in n.names}


def test_general_code_names_no_benchmark() -> None:
    pattern = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, names()))})(?![\w-])", re.I)
    named = []
    for path in GENERAL:
        for match in pattern.finditer(text(path)):
            line = text(path)[: match.start()].count("\n") + 1
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
