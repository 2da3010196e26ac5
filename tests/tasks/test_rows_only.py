"""Tasks without a class: their rows are read, and nothing starts when one is to be played."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.cli import app as cli
from soulkit.data.files import RawRow
from soulkit.errors import ConfigError
from soulkit.tasks.audit import audit_rows
from soulkit.tasks.loading import to_examples
from soulkit.tasks.registry import load_registry
from soulkit.tasks.rows_only import RowsOnly
from soulkit.tasks.selfcheck import check_task
from soulkit.types import Episode
from tests.support.road import EVERY, NO_ONE, ROLLOUT, task_of

LIGHTS: dict[str, Any] = {
    "title": "Lights",
    "summary": "Is it red or green?",
    "seats": {"driver": "actor"},
    "unpack": ["scene"],
    "columns": {
        "street": {"audience": ["driver"]},
        "cars": {"type": "any", "audience": ["driver"]},
        "hour": {"type": "int", "required": False, "audience": [], "identity": False},
        "said": {"audience": ["gold"]},
    },
    "cluster": ["street"],
    "tags": {"hour": "hour"},
}
ROW = {"street": "Long Lane", "cars": [{"seats": 2}], "said": "Go!"}
RUN = ("--model", "m", "--base-url", "http://127.0.0.1:9/v1")


@pytest.fixture
def tasks_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump({"tasks": {"lights": LIGHTS}, "suites": {"mine": ["tomi", "lights"]}})
    )
    return path


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: object) -> list[str]:
        capsys.readouterr()
        assert cli.main([str(argument) for argument in arguments]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        messages = output.err.splitlines()
        assert [line.partition(":")[0] for line in messages] == ["error", "why", "fix"]
        return messages

    return run


def examples_of(task: Any, *rows: dict[str, Any]) -> Any:
    return to_examples(task, [RawRow(row, f"f:{i}") for i, row in enumerate(rows, 1)])


# -- reading -------------------------------------------------------------------------------------


def test_a_task_without_a_class_binds_rows(tasks_file: Path) -> None:
    task = load_registry(tasks_file).task("lights")
    assert isinstance(task, RowsOnly) and task.spec.rows_only
    example = task.example({**ROW, "hour": 7})
    assert example.visible("driver") == {"street": "Long Lane", "cars": [{"seats": 2}]}
    assert example.tags == {"hour": "7"} and example.cluster
    assert task.preview(example) == () and task.gold_text(example) == "Go!"


def test_objects_and_their_json_text_are_one_row(tasks_file: Path) -> None:
    task = load_registry(tasks_file).task("lights")
    inner = {"street": "Long Lane", "cars": [{"seats": 2, "of": "Zoë 😀"}]}
    shapes: list[dict[str, Any]] = [
        inner,
        {"scene": inner},
        {"scene": {**inner, "hour": None}, "hour": 7},
        {"scene": json.dumps(inner)},
        {"scene": json.dumps({**inner, "cars": json.dumps(inner["cars"])})},
        {**inner, "cars": repr(inner["cars"]), "scene": None},
    ]
    examples = [task.example({**shape, "said": "Go!"}) for shape in shapes]
    assert len({example.id for example in examples}) == 1
    assert examples[2].tags == {"hour": "7"}, "an absent value hides nothing"


def test_what_is_checked_without_playing(tasks_file: Path) -> None:
    task = load_registry(tasks_file).task("lights")
    loaded = examples_of(task, ROW, ROW, {**ROW, "said": "Stop!"}, {"scene": "red"})
    checked = check_task(task, loaded)
    assert checked.rows_only and (checked.rows, checked.duplicates, len(checked.bad)) == (2, 1, 1)
    assert not checked.no_gold + checked.no_wrong + checked.gold_fails
    audited = audit_rows(task, loaded)
    assert {r.what for r in audited.remarks} == {"contradiction"}, "equal views, different golds"
    assert "prompt" not in audited.words and "gold answer" in audited.words
    other = examples_of(task, ROW, {**ROW, "street": "Short Lane", "said": "Stop!"})
    assert audit_rows(task, other).remarks == ()


# -- refusing ------------------------------------------------------------------------------------


def test_playing_and_scoring_are_refused(tasks_file: Path) -> None:
    task = load_registry(tasks_file).task("lights")
    example = task.example(ROW)
    episode = Episode(example_id=example.id, task="lights")
    for attempt in (task.play(example, NO_ONE, ROLLOUT), task.score(example, episode, NO_ONE)):
        with pytest.raises(ConfigError, match="'lights' cannot be played"):
            asyncio.run(attempt)


def test_eval_refuses_before_anything_starts(tasks_file: Path, lines, tmp_path: Path) -> None:
    out = tmp_path / "run"
    where = ("--tasks", tasks_file, "--out", out, *RUN)
    error, why, fix = lines("eval", "api", "--task", "lights", *where)
    assert "The task 'lights' cannot be played" in error and "soul data" in why
    assert "tomi" in fix and "lights" not in fix
    error, _, fix = lines("eval", "api", "--suite", "mine", *where)
    assert "no class that plays lights; no rows of tomi" in error and "--playable" in fix
    rows = ("--data", "tomi=synth:2")
    error, _, fix = lines("eval", "api", "--suite", "mine", *where, *rows)
    assert "Of the suite 'mine', the task 'lights'" in error
    assert "--playable" in fix and fix.endswith("--task tomi")
    error, _, _ = lines("eval", "local", "--task", "lights", "--tasks", tasks_file, "--out", out,
                        "--model", tmp_path / "no_such_model")  # fmt: skip
    assert "no class that plays lights; no model" in error, "all that is missing is named"
    assert not out.exists()


@pytest.mark.torch
@pytest.mark.parametrize("method", ["sft", "grpo", "ditto"])
def test_training_refuses_before_anything_starts(
    tasks_file: Path, lines, tmp_path: Path, method: str
) -> None:
    out = tmp_path / "run"
    error, _, fix = lines(
        "train", method, "--task", "lights", "--tasks", tasks_file, "--out", out,
        "--model", tmp_path / "no_such_model",
    )  # fmt: skip
    assert "'lights' cannot be played" in error and "tomi" in fix
    assert not out.exists()


@pytest.mark.torch
def test_a_comparison_of_methods_refuses_before_its_first_run(
    tasks_file: Path, lines, tmp_path: Path
) -> None:
    out = tmp_path / "comparison"
    error, _, _ = lines(
        "train", "ablate", "--methods", "grpo,ditto", "--task", "lights", "--tasks", tasks_file,
        "--model", tmp_path / "no_such_model", "--out", out,
    )  # fmt: skip
    assert "'lights' cannot be played" in error and not out.exists()


# -- telling -------------------------------------------------------------------------------------


def test_lists_say_rows_only(tasks_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tasks", "list", "--tasks", str(tasks_file), "--json"]) == 0
    listed = {t["name"]: t["rows_only"] for t in json.loads(capsys.readouterr().out)["tasks"]}
    assert listed["lights"] and not listed["tomi"]
    assert cli.main(["tasks", "show", "lights", "--tasks", str(tasks_file)]) == 0
    assert "rows only: they can be read and checked" in capsys.readouterr().out
    assert cli.main(["tasks", "show", "tomi"]) == 0
    assert "rows only" not in capsys.readouterr().out


def test_the_check_says_what_it_did_not_play(capsys: pytest.CaptureFixture[str]) -> None:
    rows_only = [name for name in EVERY if load_registry().spec(name).rows_only]
    if not rows_only:
        pytest.skip("every built-in task can be played")
    assert cli.main(["tasks", "check", rows_only[0], "--data", "synth:4"]) == 0
    assert "rows only; this version reads them" in capsys.readouterr().out
    assert check_task(task_of("tomi"), examples_of(task_of("tomi"))).rows_only is False
