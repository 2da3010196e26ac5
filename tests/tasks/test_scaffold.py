"""`soul tasks new`: what it writes is an example under another name, and works at once."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from soulkit.tasks.scaffold import TEMPLATES, template_files
from tests.support.evaluation import soul, summary, three_lines
from tests.support.servers.openai_server import ScriptedServer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_templates_are_the_examples(kind: str) -> None:
    example = EXAMPLES / TEMPLATES[kind].task
    files = template_files(kind)
    assert {"tasks.yaml", "task.py", "rows.py", "rows.jsonl", "README.md"} <= set(files)
    for path, text in files.items():
        assert text == (example / path).read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    folder = f"soulkit/tasks/templates/{kind}"
    assert packaged[f"examples/{TEMPLATES[kind].task}"] == folder


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_new_task_is_the_example_with_its_name(kind: str, capfd: Any) -> None:
    assert soul("tasks", "new", "night_bus", "--kind", kind) == 0
    example, printed = TEMPLATES[kind], capfd.readouterr().out
    for path, text in template_files(kind).items():
        words = text.replace(example.task, "night_bus").replace(example.cls, "NightBus")
        assert Path("night_bus", path).read_text(encoding="utf-8") == words
    next_steps = printed.partition("next:\n")[2].splitlines()
    assert [line.split()[:2] for line in next_steps] == [
        ["soul", "tasks"], ["soul", "data"], ["soul", "eval"],
    ]  # fmt: skip


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_new_task_passes_its_check_and_makes_rows(kind: str, tmp_path: Path, capfd: Any) -> None:
    lab = tmp_path / "lab"
    tasks = ("--tasks", lab / "tasks.yaml")
    assert soul("tasks", "new", "episode", "--kind", kind, "--out", lab) == 0
    capfd.readouterr()
    assert soul("tasks", "check", "episode", *tasks, "--json") == 0
    (checked,) = json.loads(capfd.readouterr().out)["tasks"]
    counts = {k: v for k, v in checked.items() if isinstance(v, list)}
    assert checked["rows"] > 90 and set(map(len, counts.values())) == {0}, counts
    assert soul("data", "synth", "episode", "-n", 5, "-o", "rows.jsonl", *tasks) == 0
    assert soul("tasks", "check", "episode", *tasks, "--data", "rows.jsonl") == 0
    assert soul("tasks", "check", "episode", *tasks, "--data", lab / "rows.jsonl") == 0


def test_a_new_task_can_be_evaluated(tmp_path: Path) -> None:
    assert soul("tasks", "new", "night_bus", "--out", tmp_path / "lab") == 0
    with ScriptedServer(answer=lambda body: "<answer>B</answer>") as server:
        where = ("--tasks", tmp_path / "lab" / "tasks.yaml", "--task", "night_bus")
        model = ("--model", "m", "--base-url", server.base_url, "--out", tmp_path / "run")
        assert soul("eval", "api", *where, "--data", "night_bus=synth:9", *model) == 0
    cell = summary(tmp_path / "run")["tasks"]["night_bus"]["value"]
    assert cell["n_scored"] == 9 and 0 < cell["mean"] < 1


def test_two_new_tasks_stand_beside_each_other(tmp_path: Path) -> None:
    files: list[object] = []
    for name in ("one", "two"):
        assert soul("tasks", "new", name) == 0
        files += ["--tasks", tmp_path / name / "tasks.yaml"]
    assert soul("tasks", "check", "one", "two", *files) == 0


@pytest.mark.parametrize(
    "name", ["3x", "my-task", "class", "tomi", "größe", "a b", "", "yes", "null"]
)
def test_bad_names_are_refused(name: str, capfd: Any) -> None:
    assert soul("tasks", "new", name, "--out", "folder") == 2
    three_lines(capfd.readouterr().err)
    assert not Path("folder").exists()


def test_nothing_is_written_over(capfd: Any) -> None:
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    Path("file").write_text("mine")
    for place in ("full", "file"):
        assert soul("tasks", "new", "night_bus", "--out", place) == 2
        assert place in three_lines(capfd.readouterr().err)[0]
    assert [path.name for path in Path("full").iterdir()] == ["notes.txt"]
    Path("empty").mkdir()
    assert soul("tasks", "new", "night_bus", "--out", "empty") == 0


def test_an_unknown_kind_is_refused(capfd: Any) -> None:
    assert soul("tasks", "new", "night_bus", "--kind", "chois") == 2
    assert "'choice'" in three_lines(capfd.readouterr().err)[2]
