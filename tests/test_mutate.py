"""The mutation tester: which code it changes, and when it counts a mutant as killed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "mutate"


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    loader = SourceFileLoader("mutate_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader("mutate_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate_script"] = module
    loader.exec_module(module)
    return module


def changed(mutate: ModuleType, folder: Path, source: str) -> set[tuple[str, str]]:
    (folder / "x.py").write_text(source, encoding="utf-8")
    return {(m.old, m.new) for m in mutate.mutants(folder, Path("x.py"))}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a < b", {("a < b", "(a <= b)")}),
        ("a <= b < c", {("a <= b < c", "(a < b < c)"), ("a <= b < c", "(a <= b <= c)")}),
        ("a in b and c", {("a in b and c", "(a in b or c)"), ("a in b", "(a not in b)")}),
        ("not a", {("not a", "(a)")}),
        ("a + b / c", {("a + b / c", "(a - b / c)"), ("b / c", "(b * c)")}),
        ("a = 7", {("7", "(8)")}),
        ("a = 0.5", {("0.5", "(1.0)")}),
        ("a = 0.0", {("0.0", "(1.0)")}),
        ("f(é, True)", {("True", "(False)")}),
        ("a += b", {("a += b", "a -= b")}),
    ],
)
def test_each_kind_of_change(
    mutate: ModuleType, tmp_path: Path, line: str, expected: set[tuple[str, str]]
) -> None:
    assert changed(mutate, tmp_path, f"def g():\n    {line}\n") == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""One in 20 of 3 < 4."""',
        "def f(a: Literal[1], *, b: int | None) -> tuple[int, 2]: ...",
        "a: Annotated[int, 5]",
        "@dataclass(frozen=True, slots=True)\nclass A: ...",
        'log(f"{a + 1} of {b:>{3}}")',
        "zip(a, b, strict=True)",
        "assert a < 3",
        "if TYPE_CHECKING:\n    x = 1",
        '__all__ = ["a", *b + c]',
        "Pair = tuple[int, 3] | None",
    ],
)
def test_what_computes_nothing_is_left_alone(
    mutate: ModuleType, tmp_path: Path, source: str
) -> None:
    assert changed(mutate, tmp_path, source) == set()


def test_a_mutant_is_applied_at_its_place(mutate: ModuleType, tmp_path: Path) -> None:
    source = "é = 1 < 2  # 1 < 2\n"
    (tmp_path / "x.py").write_text(source, encoding="utf-8")
    first = next(iter(mutate.mutants(tmp_path, Path("x.py"))))
    assert first.applied(source.encode()).decode() == "é = (1 <= 2)  # 1 < 2\n"
    assert first.line(tmp_path) == 1


def test_the_named_thresholds_stand_once_each_and_can_be_changed(mutate: ModuleType) -> None:
    thresholds = mutate.named(ROOT)
    assert len(thresholds) == len(mutate.NAMED)
    for mutant in thresholds:
        source = (ROOT / mutant.path).read_bytes()
        compile(mutant.applied(source), str(mutant.path), "exec")
        assert mutate.guards(ROOT, mutant.path)


def test_the_other_tests_of_a_folder_guard_its_modules_as_well(mutate: ModuleType) -> None:
    nearer = mutate.guards(ROOT, Path("soulkit/models/api/prices.py"))
    others = mutate.neighbours(ROOT, Path("soulkit/models/api/prices.py"), nearer)
    assert "tests/models/api/test_endpoint.py" in others and not set(others) & set(nearer)
    assert others[-1].startswith("tests/cli/")
    others = mutate.neighbours(ROOT, Path("soulkit/tasks/mistakes/task.py"), [])
    assert (
        others[0].startswith("tests/tasks/mistakes/") and "tests/tasks/test_contract.py" in others
    )
    folders = [Path(name).parts[1] for name in
               mutate.neighbours(ROOT, Path("soulkit/eval/run/runner.py"), [])]  # fmt: skip
    assert list(dict.fromkeys(folders)) == ["eval", "cli"]


@pytest.mark.slow
def test_a_seed_draws_the_same_wherever_files_lie(mutate: ModuleType, tmp_path: Path) -> None:
    home = tmp_path / "home"
    for folder in mutate.FOLDERS:
        shutil.copytree(ROOT / "soulkit" / folder, home / "soulkit" / folder)
    count = len(mutate.FOLDERS) + 1
    first = mutate.drawn(home, count, 0)
    assert [m.path.parts[1] for m in first] == [*mutate.FOLDERS, mutate.FOLDERS[0]]
    (home / "soulkit" / "train" / "room").mkdir()
    moved = home / next(m.path for m in first if m.path.parts[1] == "train")
    moved.rename(home / "soulkit" / "train" / "room" / moved.name)
    again = mutate.drawn(home, count, 0)
    assert [(m.path.name, m.old, m.new) for m in again] == [
        (m.path.name, m.old, m.new) for m in first
    ]
    assert mutate.drawn(home, count, 1) != again


def test_a_draw_from_one_place_stays_there(mutate: ModuleType) -> None:
    places = ["soulkit/eval/run", "soulkit/play/settings.py"]
    first = mutate.drawn(ROOT, 6, 0, places)
    assert [m.path.is_relative_to(places[i % 2]) for i, m in enumerate(first)] == [True] * 6
    with pytest.raises(ValueError, match="no Python file"):
        mutate.drawn(ROOT, 6, 0, ["soulkit/nowhere"])


def test_listed_mutants_exist_have_a_reason_and_are_not_drawn(mutate: ModuleType) -> None:
    listed = mutate.equivalent()
    files = {file for file, *_ in listed}
    paths = [path for path in (ROOT / "soulkit").rglob("*.py") if path.name in files]
    made = {m.change for path in paths for m in mutate.mutants(ROOT, path.relative_to(ROOT))}
    assert set(listed) <= made and all(map(str.strip, listed.values()))
    places = [path.relative_to(ROOT).as_posix() for path in paths]
    assert not {m.change for m in mutate.drawn(ROOT, len(made), 0, places)} & set(listed)


# Exactly two mutants.
SUM = '"""A sum."""\n\nLEAST = 3\n\n\ndef enough(n):\n    return n >= LEAST\n'
BROKEN = "def test_some():\n    assert False\n"
LOOSE = "from soulkit.judge.sums import enough\n\n\ndef test_some():\n    assert enough(9)\n"
TIGHT = f"{LOOSE}    assert enough(3) and not enough(2)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "code", "words"),
    [
        (TIGHT, 0, "2 of 2 killed"),
        (LOOSE, 1, "0 of 2 killed"),
        (BROKEN, 2, "fails without a mutant, too"),
    ],
)
def test_it_tells_dead_from_alive_and_leaves_the_checkout_alone(
    tmp_path: Path, tests: str, code: int, words: str
) -> None:
    for folder in ("judge", "metrics"):
        (tmp_path / "soulkit" / folder).mkdir(parents=True)
        for package in (tmp_path / "soulkit", tmp_path / "soulkit" / folder):
            (package / "__init__.py").touch()
    (tmp_path / "tests" / "judge").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts" / "mutate")
    sums = tmp_path / "soulkit" / "judge" / "sums.py"
    sums.write_text(SUM)
    (tmp_path / "tests" / "judge" / "test_sums.py").write_text(tests)
    command = [sys.executable, str(tmp_path / "scripts" / "mutate"), "--no-named", "--drawn", "2"]
    done = subprocess.run(
        [*command, "--python", sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout
    assert sums.read_text() == SUM


def test_the_copy_has_every_module_and_nothing_that_was_produced(
    mutate: ModuleType, tmp_path: Path
) -> None:
    mutate.copy_checkout(tmp_path / "copy")
    modules = {path.relative_to(ROOT) for path in (ROOT / "soulkit").rglob("*.py")}
    assert Path("soulkit/runs/folder.py") in modules
    assert all((tmp_path / "copy" / path).is_file() for path in modules)
    assert not {".git", "runs", ".venv"} & {path.name for path in (tmp_path / "copy").iterdir()}
