"""What every file of the repository keeps to; the limits stand in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "soulkit"
SOURCES = sorted(PACKAGE.rglob("*.py"))

LINES_OF_A_FILE = (80, 650)
MODULES_OF_A_PACKAGE = 15
LINES_OF_A_FUNCTION = 60
FROZEN = {"soulkit/models/local/decode.py": 480}
"""Files that may be mended and not grown → most lines. What the decode loop lacks, vLLM has."""
WITH_TORCH = (PACKAGE / "train", PACKAGE / "models" / "local")
HEAVY = {"torch", "transformers", "peft", "vllm"}

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
    """Trees of the whole repository are much to look through, and none of it is garbage."""
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
    """Neither fragments nor giants; a training method may be as short as it likes."""
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


def imported_at_the_top(body: list[ast.stmt]) -> Iterator[str]:
    """First names of packages imported outside functions and outside TYPE_CHECKING."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from imported_at_the_top([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from imported_at_the_top([*node.body, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.ClassDef | ast.With):
            yield from imported_at_the_top(node.body)


def test_heavy_packages_are_loaded_late() -> None:
    early = {
        short(path): packages
        for path in SOURCES
        if not any(path.is_relative_to(room) for room in WITH_TORCH)
        if (packages := HEAVY.intersection(imported_at_the_top(tree(path).body)))
    }
    assert early == {}


def test_no_failure_is_swallowed() -> None:
    """No handler of everything whose body does nothing."""
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
    # The continuous integration may look for real data beside the checkout; nothing else may.
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
