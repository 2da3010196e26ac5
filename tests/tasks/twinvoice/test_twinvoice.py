"""TwinVoice under the paper protocol: long histories, lessons, break-downs."""

from __future__ import annotations

from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.tasks.twinvoice.task import DIMENSIONS, misfit
from tests.support.letters import (
    draft_of,
)
from tests.support.road import batch_values, score_text, synth_examples, task_of

ROW: dict[str, Any] = {
    "user_id": "u7",
    "dimension": "Social",
    "history": ["rain again. great.", "who reads manuals", "coffee first"],
    "anchor_post": "The bus was on time.",
    "choices": ["Lovely news!", "a miracle. sure.", "I beg to differ, sir.", "Yay, buses!!"],
    "answer_idx": 1,
}


@pytest.mark.parametrize(
    ("inside", "value", "status"),
    [("B", 1, "ok"), ("B. a miracle. sure.", 1, "salvaged"), ("A", 0, "ok"),
     ("E", 0, "malformed"), ("a miracle. sure.", 0, "malformed")],
)  # fmt: skip
def test_ways_to_answer(inside: str, value: float, status: str) -> None:
    task = task_of("twinvoice")
    text = f"<reasoning>dry</reasoning> <answer>{inside}</answer>"
    grade = score_text(task, task.example(ROW), text)
    assert (grade.value, grade.status) == (value, status)


@pytest.mark.parametrize("place", [-1, 4, 1.5, True, "two", None])
def test_a_gold_without_a_place_is_a_bad_row(place: Any) -> None:
    with pytest.raises(DataError):
        task_of("twinvoice").example({**ROW, "answer_idx": place})


def test_the_reference_counts_from_the_end_and_reads_whole_numbers_only() -> None:
    task = task_of("twinvoice", "reference")
    assert task.gold_letter(task.example({**ROW, "answer_idx": -1})) == "D"
    for place in (4, -5, 1.0, "1"):
        with pytest.raises(DataError):
            task.example({**ROW, "answer_idx": place})


@pytest.mark.parametrize("choices", [["one"], ["x", "", "y", "z"], "no list", []])
def test_too_few_reactions_are_a_bad_row(choices: Any) -> None:
    with pytest.raises(DataError):
        task_of("twinvoice").example({**ROW, "choices": choices})


def test_of_a_long_history_the_latest_entries_are_shown_and_the_cut_is_noted() -> None:
    task = task_of("twinvoice")
    many = task.example({**ROW, "history": [f"entry-{i} is short" for i in range(40)]})
    text = task.preview(many)[0].text
    assert "- entry-10 is" in text and "entry-9 is" not in text and "- entry-39 is" in text
    assert draft_of(task, many, "B").notes["cut_words"] == {"conversation_history": 30}
    endless = task.example({**ROW, "conversation_history": ["old", "word " * 3100]})
    assert len(task.preview(endless)[0].text.split()) < 3200
    assert draft_of(task, endless, "B").notes["cut_words"] == {"conversation_history": 101}
    long = task.example({**ROW, "history": [f"{i} " + "w " * 1000 for i in range(5)]})
    assert sum(f"- {i} w" in task.preview(long)[0].text for i in range(5)) == 2
    huge = task.example({**ROW, "history": ["w " * 5000]})
    assert task.preview(huge)[0].text.count("w w w") > 100, "the last entry is always shown"


def test_each_dimension_has_its_words_and_nothing_known_is_said() -> None:
    task = task_of("twinvoice")
    openings = {
        task.preview(task.example({**ROW, "dimension": d}))[0].text[:60] for d in DIMENSIONS
    }
    assert len(openings) == 3
    bare = task.example({k: v for k, v in ROW.items() if k not in ("history", "dimension")})
    assert "(nothing is known)" in task.preview(bare)[0].text
    assert "dimension" not in bare.tags


def test_people_without_a_name_are_told_apart_by_their_history() -> None:
    task = task_of("twinvoice")
    nameless = {k: v for k, v in ROW.items() if k != "user_id"}
    one, same = (task.example({**nameless, "anchor_post": a}) for a in ("x", "y"))
    other = task.example({**nameless, "history": ["another person"]})
    assert one.cluster == same.cluster != other.cluster
    assert task.example(ROW).cluster == task.example({**ROW, "history": ["new"]}).cluster


def test_what_does_not_fit_is_told_without_its_direction() -> None:
    history = ["ok then", "fine by me", "no idea", "sure thing"]
    assert misfit("MARVELLOUS NEWS!!", history) == "how loudly this person writes"
    assert misfit("word " * 40, history) == "how long this person's sentences run"
    assert misfit("so. " * 30, history) == "how much this person says at once"
    assert misfit("fair enough", history) is None
    assert misfit("WHAT!!", history[:2]) is None, "two entries are too few to go by"


def test_a_lesson_on_a_wrong_draft_says_where_to_look() -> None:
    task = task_of("twinvoice")
    example = task.example({**ROW, "history": ["ok then", "fine by me", "no idea", "sure thing"]})
    score = score_text(task, example, "<answer>D</answer>")
    assert "how loudly" in task.explain(example, None, score)


def test_break_downs_and_the_mean_over_dimensions() -> None:
    from tests.support.letters import record

    examples = synth_examples("twinvoice", 18)
    pairs = {(e.tags["dimension"], e.tags["capability"]) for e in examples}
    assert len(pairs) == 18
    task = task_of("twinvoice")
    records = [record("a", 1.0, dimension="social"), record("b", 0.0, dimension="social"),
               record("c", 1.0, dimension="narrative"), record("d", None, dimension="narrative"),
               record("e", 0.0, dimension="narrative", kind="refined")]  # fmt: skip
    assert batch_values(task, records) == {"macro_dimension": 0.75}
    assert batch_values(task, []) == {}
