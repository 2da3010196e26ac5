"""Tasks of installed packages, through the real command with a folder of packages of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluation import summary, three_lines
from tests.support.servers.openai_server import ScriptedServer

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "my_task"
MARK = "import pathlib; pathlib.Path({!r}).open('a').write(__name__ + ' ')\n"


class Site:
    """A folder as `pip install --target` leaves it, whose packages say when they are imported."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marks = folder / "site", folder / "imported.txt"
        self.runs = folder

    def package(self, name: str = "my_lab.game", task: str = "game") -> Path:
        """The example as a package, every file of which leaves a mark."""
        folder = self.folder.joinpath(*name.split("."))
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        for file in folder.rglob("*.py"):
            future = "from __future__ import annotations\n"
            file.write_text(file.read_text().replace(future, future + self.mark))
        for above in (folder, *folder.parents[: name.count(".")]):
            (above / "__init__.py").write_text(self.mark)
        declared = folder / "tasks.yaml"
        tasks = declared.read_text().partition("tasks:\n")[2]
        declared.write_text("tasks:\n" + tasks.replace("my_task:", f"{task}:"))
        return folder

    @property
    def mark(self) -> str:
        return MARK.format(str(self.marks))

    def offer(self, distribution: str = "my-lab", **entries: str) -> None:
        """Note that a distribution offers tasks, as an installer would."""
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        lines = "".join(f"{task} = {package}\n" for task, package in entries.items())
        (info / "entry_points.txt").write_text(f"[soulkit.tasks]\n{lines}")

    def imported(self) -> set[str]:
        """The modules that were imported since this was last asked."""
        names = set(self.marks.read_text().split()) if self.marks.exists() else set()
        self.marks.unlink(missing_ok=True)
        return names

    def soul(self, *arguments: object) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "soulkit.cli.app", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}", "COLUMNS": "200"},
            cwd=self.runs, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def game(site: Site) -> Site:
    site.package()
    site.offer(game="my_lab.game")
    return site


def test_it_is_listed_and_nothing_of_it_is_imported(game: Site) -> None:
    code, out, _ = game.soul("tasks", "list")
    assert code == 0 and "installed: game (my-lab)" in out
    listed = json.loads(game.soul("tasks", "list", "--json")[1])["installed"]
    assert listed == [{"task": "game", "package": "my_lab.game", "distribution": "my-lab"}]
    assert game.soul("tasks", "check", "tomi", "--data", "synth:2")[0] == 0
    code, _, err = game.soul("tasks", "show", "gama")
    assert code == 2 and "'game'" in three_lines(err)[2]
    assert game.imported() == set()


def test_its_modules_are_imported_when_they_are_needed(game: Site) -> None:
    code, out, _ = game.soul("tasks", "show", "game")
    assert code == 0 and "What was meant" in out and "listener (actor)" in out
    assert "my_lab.game.task" not in game.imported()
    assert game.soul("tasks", "check", "game", "--data", "synth:5")[0] == 0
    assert game.imported() == {"my_lab", "my_lab.game", "my_lab.game.task", "my_lab.game.rows"}


@pytest.mark.slow
def test_it_brings_all_that_a_built_in_task_brings(game: Site) -> None:
    rows = game.runs / "rows.jsonl"
    assert game.soul("data", "synth", "game", "-n", 6, "-o", rows)[0] == 0
    assert game.soul("data", "check", rows, "--task", "game")[0] == 0
    code, out, _ = game.soul("data", "audit", "game", rows, "--json")
    assert code == 0 and json.loads(out)["overall"] == {"agreed": 6, "total": 6}
    record = {"scene": "It snows.", "line": {"by": "Lien", "text": "Were you raised in a tent?"},
              "right": "Shut the window.", "wrong": ["Go camping.", "Tell me more."]}  # fmt: skip
    (game.runs / "original.json").write_text(json.dumps([record]))
    assert (
        game.soul("data", "import", "game", game.runs / "original.json", "-o", "one.jsonl")[0] == 0
    )
    (row,) = map(json.loads, (game.runs / "one.jsonl").read_text().splitlines())
    assert (row["speaker"], row["meant"]) == ("Lien", "Shut the window.")


@pytest.mark.slow
def test_it_is_evaluated_alone_and_in_a_suite(game: Site) -> None:
    suites = game.runs / "own.yaml"
    suites.write_text("suites: {both: [game, tomi]}\n")
    with ScriptedServer(answer=lambda body: "<answer>A</answer>") as server:
        model = ("--model", "m", "--base-url", server.base_url, "--limit", 4)
        alone = ("--task", "game", "--data", "game=synth:4", "--out", game.runs / "alone")
        code, _, err = game.soul("eval", "api", *model, *alone)
        assert code == 0, err
        both = (
            "--suite",
            "both",
            "--tasks",
            suites,
            "--data",
            "game=synth:4",
            "--data",
            "tomi=synth:4",
        )
        code, _, err = game.soul("eval", "api", *model, *both, "--out", game.runs / "both")
        assert code == 0, err
    assert set(summary(game.runs / "alone")["tasks"]) == {"game"}
    assert set(summary(game.runs / "both")["tasks"]) == {"game", "tomi"}
    game.imported()
    code, out, _ = game.soul("tasks", "list", "--tasks", suites, "--suite", "both")
    assert code == 0 and "game, tomi" in out and "installed: game (my-lab)" in out
    code, out, err = game.soul("compare", game.runs / "alone", game.runs / "alone")
    assert "game" in out + err and game.imported() == set()


@pytest.mark.slow
def test_a_built_in_name_wins_and_says_so_when_it_is_used(site: Site) -> None:
    site.package("my_lab.tomi", "tomi")
    site.offer(tomi="my_lab.tomi")
    code, out, err = site.soul("tasks", "check", "tomi", "hitom", "--data", "synth:3")
    assert code == 0 and "tomi" in out
    (line,) = err.splitlines()
    assert line.startswith("task 'tomi': using the one that comes with soulkit")
    assert "'my-lab'" in line
    assert site.soul("tasks", "check", "hitom", "--data", "synth:3")[2] == ""
    code, out, err = site.soul("tasks", "list")
    assert "installed: tomi (my-lab)" in out and err == "" and site.imported() == set()


@pytest.mark.slow
def test_a_task_of_ones_own_file_wins_too(game: Site) -> None:
    folder = game.runs / "own"
    assert game.soul("tasks", "new", "game", "--python", "--out", folder)[0] == 0
    tasks = ("--tasks", folder / "tasks.yaml")
    code, _, err = game.soul("tasks", "check", "game", *tasks, "--data", "synth:3")
    assert code == 0 and "of your tasks file" in err and "'my-lab'" in err
    assert game.imported() == set()


# --- broken packages ------------------------------------------------------------------------------


def lost_declaration(site: Site) -> None:
    (site.package() / "tasks.yaml").unlink()


def other_task(site: Site) -> None:
    site.package(task="chess")


def bad_declaration(site: Site) -> None:
    (site.package() / "tasks.yaml").write_text("tasks: {game: {titel: x}}\n")


def lost_package(site: Site) -> None:
    (site.folder / "my_lab").mkdir(parents=True)


def broken_above(site: Site) -> None:
    site.package()
    (site.folder / "my_lab" / "__init__.py").write_text("raise RuntimeError('no licence found')\n")


def a_module(site: Site) -> None:
    (site.folder / "my_lab").mkdir(parents=True)
    (site.folder / "my_lab" / "game.py").write_text("")


BREAKS: dict[Any, str] = {
    lost_declaration: "There is no tasks.yaml", other_task: "declares chess",
    bad_declaration: "tasks.game: the key 'title' is missing", lost_package: "not a package",
    broken_above: "no licence found", a_module: "not a package",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("break_it", BREAKS)
def test_a_broken_package_is_refused_by_its_distribution(break_it: Any, site: Site) -> None:
    break_it(site)
    site.offer(game="my_lab.game")
    assert "installed: game (my-lab)" in site.soul("tasks", "list")[1]
    code, _, err = site.soul("tasks", "check", "game")
    what, why, fix = three_lines(err)
    assert code == 2 and "'my-lab'" in what and "'game'" in what
    assert BREAKS[break_it] in why and "'my-lab'" in fix


@pytest.mark.parametrize(("file", "command"), [
    ("task.py", ("tasks", "check", "game", "--data", "synth:2")),
    pytest.param("rows.py", ("data", "synth", "game", "-n", 2), marks=pytest.mark.slow),
    pytest.param("importer.py", ("data", "import", "game", "x.json"), marks=pytest.mark.slow),
])  # fmt: skip
def test_a_module_that_breaks_is_refused_by_its_distribution(
    file: str, command: tuple[object, ...], game: Site
) -> None:
    (game.folder / "my_lab" / "game" / file).write_text("raise RuntimeError('no licence found')\n")
    (game.runs / "x.json").write_text("[{}]")
    code, _, err = game.soul(*command)
    what, why, _ = three_lines(err)
    assert code == 2 and "'my-lab'" in what and "RuntimeError: no licence found" in why


def test_one_name_in_two_distributions_is_refused(game: Site) -> None:
    game.offer("their-lab", game="their_lab.game")
    code, _, err = game.soul("tasks", "check", "game")
    assert code == 2 and "'my-lab', 'their-lab'" in three_lines(err)[0]
    assert game.imported() == set()
