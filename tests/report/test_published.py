"""How the measurements behind published figures differ from a run's, as far as it is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from soulkit.report.load import load_runs
from soulkit.report.published import (
    CAVEAT,
    publications,
    published_differences,
    published_footnote,
    with_conditions,
)

PAPER = {"fantom": "gpt-5-nano", "coser": "gpt-5.4", "mirrorbench": "gpt-5.4"}


def judged(folder: Path, judges: dict[str, str], *, roles: tuple[str, ...] = ("judge",)) -> Path:
    """A run of several tasks, `judges` naming each task's own."""
    folder.mkdir()
    players = {task: [{"kind": "endpoint", "model": who}] for task, who in judges.items()}
    tasks = {task: {"roles": roles, "rows": {"a": "1"}, "players": {"judge": players[task]}}
             for task in judges}  # fmt: skip
    union = [player for several in players.values() for player in several]
    (folder / "conditions.json").write_text(
        json.dumps({"players": {"judge": union}, "tasks": tasks})
    )
    (folder / "config.yaml").write_text("kind: api\nmodel: m\nprotocol: paper\n")
    cells = {task: {"value": {"mean": 0.5, "n": 1, "n_scored": 1}} for task in judges}
    (folder / "summary.json").write_text(json.dumps({"command": "eval api", "tasks": cells}))
    return folder


def differences(*folders: Path) -> str:
    sides = with_conditions(load_runs(folders))
    tasks = dict.fromkeys(task for run, _ in sides for task in run.tasks)
    return published_differences(publications()[0], tasks, sides)


@pytest.mark.parametrize(
    ("played", "expected"),
    [
        (PAPER, ""),
        ({"coser": "gpt-5.4"}, ""),
        ({"coser": "mine"}, "judge gpt-5.4, this run: mine"),
        ({**PAPER, "mirrorbench": "gpt-5-nano"},
         "judge gpt-5.4, this run: gpt-5-nano (mirrorbench)"),
        ({**PAPER, "fantom": "mine", "sotopia": "mine"},
         "judge gpt-5-nano, this run: mine (fantom, sotopia)"),
    ],
)  # fmt: skip
def test_the_judge_of_a_task_is_compared_and_not_all_judges_of_the_run(
    played: dict[str, str], expected: str, tmp_path: Path
) -> None:
    assert differences(judged(tmp_path / "run", played)) == expected


def test_no_judge_is_compared_where_none_is_asked(tmp_path: Path) -> None:
    assert differences(judged(tmp_path / "run", {"coser": "mine"}, roles=("actor",))) == ""


def test_runs_that_differ_are_named(tmp_path: Path) -> None:
    one, two = (judged(tmp_path / n, {"coser": j}) for n, j in (("a", "gpt-5.4"), ("b", "x")))
    assert differences(one, two) == "b: judge gpt-5.4, this run: x"


def test_a_source_that_names_no_judge_differs(tmp_path: Path) -> None:
    sides = with_conditions(load_runs([judged(tmp_path / "run", {"coser": "mine"})]))
    table = replace(publications()[0], judges={})
    assert published_differences(table, ["coser"], sides) == "judge not stated, this run: mine"


def test_a_known_difference_is_named_below_the_column(tmp_path: Path) -> None:
    found = differences(judged(tmp_path / "run", {"hitom": "gpt-5-nano", "userllm": "gpt-5-nano"}))
    assert "Pangram" in found and "LLM judge" in found and found.endswith("(userllm)")
    below = published_footnote([("Ditto paper", found)])
    assert below.startswith(CAVEAT) and found in below
    assert differences(judged(tmp_path / "other", {"hitom": "gpt-5-nano"})) == ""
    assert published_footnote([]) == ""
