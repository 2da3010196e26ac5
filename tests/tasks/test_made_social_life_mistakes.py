"""Made rows of social_r1, lifechoices and mistakes: gold, solvability, layouts, prefixes."""

from __future__ import annotations

import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import flatten, write_rows
from soulkit.tasks.lifechoices import rows as lives
from soulkit.tasks.loading import load_examples
from soulkit.tasks.mistakes import rows as pupils
from soulkit.tasks.selfcheck import check_task
from soulkit.tasks.social_r1 import rows as scenes
from soulkit.tasks.social_r1.task import split_prompt
from tests.support.road import synth, synth_examples, task_of

NAMES = ("social_r1", "lifechoices", "mistakes")
NESTED = "Multiple Choice Question"


@pytest.mark.parametrize("protocol", ["paper", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_gold_is_best_and_wrong_is_not_on_every_row(
    name: str, protocol: str, tmp_path: Path
) -> None:
    task = task_of(name, protocol)
    path = tmp_path / "rows.jsonl"
    write_rows(path, synth(name, 150, 4), data_source=name)
    check = check_task(task, load_examples(task, [path]))
    assert check.rows + check.duplicates == 150 and not check.bad
    assert not check.gold_fails + check.wrong_passes + check.wrong_unread + check.no_wrong
    assert not check.no_gold + check.unscored


@pytest.mark.parametrize("name", NAMES)
def test_fewer_rows_are_the_beginning_of_more(name: str) -> None:
    assert synth(name, 20, 3) == synth(name, 40, 3)[:20]
    assert synth(name, 20, 3) != synth(name, 20, 4)
    letters = Counter(task_of(name).gold_letter(e) for e in synth_examples(name, 200))
    assert min(letters[x] for x in "ABC") > 30, "no letter is a good guess"


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_of_a_row_is_the_same_example(name: str, tmp_path: Path) -> None:
    task, rows = task_of(name), synth(name, 12, 8)
    union = dict.fromkeys(("history", "choices_x", "story_id", "r_min", "conversations"))
    ids = {task.example(row).id for row in rows}
    packed = {**rows[0], **({NESTED: json.dumps(rows[0][NESTED])} if NESTED in rows[0] else {})}
    assert task.example(packed).id == task.example(rows[0]).id
    for wrapped in (
        [{"extra_info": {**union, **row}} for row in rows],
        [{"extra_info": json.dumps({**union, **row})} for row in rows],
        [{"extra_info": {"raw": json.dumps(row), **union}} for row in rows],
    ):
        marked = [{"prompt": [], "data_source": name, **row} for row in wrapped]
        assert {task.example(flatten(row)).id for row in marked} == ids
    for suffix in ("jsonl", "parquet"):
        path = tmp_path / f"rows.{suffix}"
        write_rows(path, rows, data_source=name)
        assert {e.id for e in load_examples(task, [path]).examples} == ids


# -- what makes a row solvable -------------------------------------------------------------------


def test_scenes_show_the_gold_once_among_different_options() -> None:
    for row in synth("social_r1", 120, 5):
        scene = split_prompt(row["prompt_text"])
        assert len(set(scene.options.values())) == len(scene.options) in (3, 4)
        assert (
            f"{row['answer_letter']}. {scene.options[row['answer_letter']]}" == row["answer_text"]
        )
        assert "{" not in row["prompt_text"] + row["why"]
    assert {row["kind"] for row in synth("social_r1", 12, 5)} == set(scenes.KINDS)


def drives_shown(memory: str, name: str, friend: str) -> list[str]:
    """The drives whose deeds a memory tells, in its order."""
    drives = {}
    for drive, deeds in lives.TEXTS["drives"].items():
        for deed in deeds:
            at = memory.find(deed.format(n=name, f=friend))
            if at >= 0:
                drives[at] = drive
    return [drives[at] for at in sorted(drives)]


def test_the_last_drive_that_a_memory_shows_is_the_gold() -> None:
    for row in synth("lifechoices", 90, 6):
        nested, name = row[NESTED], row["character_name"].split()[0]
        friend = row["input_text"].split(". ")[1].split()[0]
        shown = drives_shown(row["input_text"], name, friend)
        assert len(set(shown)) == (2 if row["kind"] == "changed" else 1)
        gold = nested["Options"]["ABCD".index(nested["Correct Answer"])]
        acts = [s["acts"] for s in lives.TEXTS["situations"] if gold_of(s["acts"], shown[-1], gold)]
        assert acts, f"{gold!r} is what the drive '{shown[-1]}' does"
        assert len(set(nested["Options"])) == 4


def gold_of(acts: dict[str, str], drive: str, gold: str) -> bool:
    """Whether `gold` is what `drive` does, whoever the people are."""
    pieces = [p for p in acts[drive].replace("}", "{").split("{") if len(p) > 1]
    return all(piece in gold for piece in pieces)


def test_every_drive_has_an_act_in_every_situation() -> None:
    assert all(set(s["acts"]) == set(lives.TEXTS["drives"]) for s in lives.TEXTS["situations"])


def test_wrong_rules_lead_to_their_options() -> None:
    for row in synth("mistakes", 240, 7):
        texts = [row[f"Answer{x}Text"] for x in "ABCD"]
        assert len(set(texts)) == 4 and row["TargetOption"] != row["CorrectAnswer"]
        assert row["TargetAnswer"] == row[f"Answer{row['TargetOption']}Text"]
    kinds = {row["MisconceptionId"] // 10 for row in synth("mistakes", 12, 7)}
    assert len(kinds) == len(pupils._KINDS)


CHECKED: dict[str, Any] = {
    "Calculates strictly from left to right, whatever the operations are": lambda a, b, c: (
        (a + b) * c
    ),
    "Multiplies the base by the exponent": lambda a, b: a * b,
    "Leaves out the halving when finding the area of a triangle": lambda a, b: a * b,
    "Gives the area where the perimeter is asked for": lambda a, b: a * b,
    "Drops one of two minus signs that follow each other": lambda a, b: a - b,
}


def test_results_follow_from_the_numbers_of_the_question() -> None:
    seen = set()
    for row in synth("mistakes", 400, 7):
        rule = CHECKED.get(row["MisconceptionName"])
        if rule is not None:
            numbers = [int(x) for x in re.findall(r"\d+", row["QuestionText"])]
            assert Fraction(row["TargetAnswer"]) == rule(*numbers)
            seen.add(row["MisconceptionName"])
    assert seen == set(CHECKED)
