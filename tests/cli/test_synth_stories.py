"""`soul data synth TASK --stories N`: stories of every kind with all their questions."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from soulkit.tasks.tom.stories.generate import rows_for_stories
from tests.support.evaluation import soul, three_lines
from tests.support.road import synth


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_two_hundred_stories_of_every_kind_are_six_thousand_questions() -> None:
    assert soul("data", "synth", "hitom", "--stories", 200, "--seed", 2) == 0
    lines = Path("hitom_synth_6000_s2.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kinds = Counter((r["question_order"], r["story_length"], r["deception"]) for r in rows)
    assert len(rows) == 6000 and len(kinds) == 30 and set(kinds.values()) == {200}
    stories = Counter(row["story"] for row in rows)
    assert len(stories) == 1200 and set(stories.values()) == {5}
    assert all(f". {row['correct_answer']}" in row["choices"] for row in rows)


@pytest.mark.parametrize("task", ["tomi", "paratomi"])
def test_story_types_and_questions_come_equally_often(task: str) -> None:
    rows = synth(task, rows_for_stories(task, 2), 0)
    assert len(rows) == 36 and set(Counter(r["story_type"] for r in rows).values()) == {12}
    assert Counter(row["order"] for row in rows) == {0: 12, 1: 12, 2: 12}


def test_paraphrased_stories_say_the_same_thing_in_many_ways() -> None:
    rows = synth("paratomi", 180, 0)
    words = Counter(s.split()[1] for row in rows for s in row["story"] if "strolled" not in s)
    assert len(words) > 30
    assert len({tuple(row["story"]) for row in rows}) == 180


def test_fewer_stories_are_the_beginning_of_more() -> None:
    assert (
        synth("hitom", rows_for_stories("hitom", 1), 4)
        == synth("hitom", rows_for_stories("hitom", 2), 4)[:30]
    )


@pytest.mark.parametrize(
    "arguments",
    [("hitom", "--stories", "2", "-n", "5"), ("hitom", "--stories", "0"),
     ("secret_keeper", "--stories", "2"), ("nothing", "--stories", "2")],
)  # fmt: skip
def test_what_has_no_stories_says_so(
    arguments: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert soul("data", "synth", *arguments) == 2
    assert all(three_lines(capfd.readouterr().err))


def test_only_stories_are_counted_in_kinds() -> None:
    with pytest.raises(ValueError, match="not for 'coser'"):
        rows_for_stories("coser", 1)  # type: ignore[arg-type]
