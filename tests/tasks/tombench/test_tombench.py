"""ToMBench under the paper protocol: two languages, two to four options, break-downs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from soulkit.errors import ConfigError, DataError
from soulkit.tasks.kit.loading import examples_to_inspect
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.tombench.task import ToMBench, ability_group, orders
from soulkit.types import Failure, Record, unscored
from tests.support.letters import (
    draft_of,
    record,
    released,
)
from tests.support.road import batch_values, score_text, synth_examples, task_of

ROW: dict[str, Any] = {
    "language": "en",
    "story": "Mei leaves. Tao moves the rope to the crate.",
    "question": "Where will Mei look?",
    "options_dict": {"A": "In the crate", "B": "On the hook", "C": None, "D": float("nan")},
    "correct_letter": " b ",
    "ability": "Belief: Location false beliefs",
}


def test_what_a_gap_left_behind_is_no_option() -> None:
    task = task_of("tombench")
    example = task.example(released(ROW))
    assert example.fields["options"] == {"A": "In the crate", "B": "On the hook"}
    text = task.preview(example)[0].text
    assert "\nC." not in text and "nan" not in text.lower()
    assert score_text(task, example, "<answer>D</answer>").value == 0
    assert score_text(task, example, "<answer>b</answer>").value == 1
    padded = {**ROW, "options_dict": {"A": "x", "B": "y", "C": "nan", "D": " "}}
    assert list(task.example(padded).fields["options"]) == ["A", "B"]
    named = {**ROW, "options_dict": {"A": "Nan", "B": "Ada", "C": "NaN"}}
    assert task.example(named).fields["options"] == {"A": "Nan", "B": "Ada"}


@pytest.mark.parametrize(
    "change",
    [{"correct_letter": "C"}, {"correct_letter": None}, {"options_dict": None},
     {"options_dict": {"A": "alone"}, "correct_letter": "A"}, {"options_dict": "{A"},
     {"options_dict": ["a", "b"]}, {"language": None}],
)  # fmt: skip
def test_rows_that_cannot_be_asked_are_bad(change: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        task_of("tombench").example({**released(ROW), **change})


def test_each_language_is_asked_and_taught_in_its_own_words() -> None:
    task = task_of("tombench")
    for example in synth_examples("tombench", 16):
        chinese = example.tags["language"] == "zh"
        assert ("## 问题" in task.preview(example)[0].text) == chinese
        lesson = task.explain(example, None, score_text(task, example, "hm"))
        assert any("\u4e00" <= sign <= "\u9fff" for sign in lesson) == chinese
    other = task.example({**released(ROW), "language": "German"})
    assert other.tags["language"] == "en", "every other language is asked in English"


def test_thinking_is_no_answer_here_but_in_the_reference() -> None:
    text = "<think><answer>A</answer></think><answer>B</answer>"
    values = [score_text(t, t.example(released(ROW)), text).value
              for t in (task_of("tombench"), task_of("tombench", "reference"))]  # fmt: skip
    assert values == [1.0, 0.0]


def test_break_downs() -> None:
    task = task_of("tombench")
    tags = task.example({**released(ROW), "subtask": "False Belief Task"}).tags
    assert tags == {"language": "en", "subtask": "False Belief Task", "ability": "Belief",
                    "skill": "Belief: Location false beliefs"}  # fmt: skip
    assert ability_group("Belief: Content false beliefs Belief: Second-order beliefs") == "Belief"
    assert ability_group("Belief") == "Belief" and ability_group("") == ""
    records = [
        record("a", 1.0, ability="Belief"),
        record("b", 0.0, ability="Belief"),
        record("c", 1.0, ability="Desire"),
        record("d", None, ability="Emotion"),
    ]
    assert batch_values(task, records) == {
        "macro_ability": 0.75,
        "row_accuracy": pytest.approx(2 / 3),
    }
    assert batch_values(task, []) == {}


def test_both_languages_of_a_story_are_one_cluster() -> None:
    examples = synth_examples("tombench", 16)
    for one, other in zip(examples[::2], examples[1::2], strict=True):
        assert one.cluster == other.cluster and one.id != other.id
    task = task_of("tombench")
    same = [task.example({**released(ROW), "question": q}).cluster for q in ("x?", "y?")]
    assert same[0] == same[1], "without an id the story itself is the unit"


# -- orders --------------------------------------------------------------------------------------

FOUR = {**ROW, "options_dict": {x: f"Place {x}" for x in "ABCD"}}


def test_a_row_is_asked_in_five_orders_under_paper() -> None:
    task = task_of("tombench")
    forms = task.examples(released(FOUR))
    row = task.example(released(FOUR))
    assert [e.id for e in forms] == [f"{row.id}-{i}" for i in range(5)]
    assert {e.cluster for e in forms} == {row.cluster}
    assert len({tuple(e.fields["options"].values()) for e in forms}) == 5
    for form in forms:
        assert list(form.fields["options"]) == list("ABCD") and task.gold_text(form) == "Place B"
        assert score_text(task, form, task.gold_completion(form)).value == 1
    again = task.examples(released({**FOUR, "index": 7}))
    assert [e.fields["order"] for e in again] == [e.fields["order"] for e in forms]
    (once,) = task_of("tombench", "reference").examples(released(FOUR))
    assert once.id == row.id and "order" not in draft_of(task, row, "A").notes


def test_two_options_stand_in_either_order() -> None:
    drawn = orders("AB", 5, "seed")
    assert sorted(drawn.count(o) for o in ("AB", "BA")) == [2, 3]
    assert len(set(orders("ABCD", 24, "seed"))) == 24
    gap = released({**ROW, "options_dict": {"A": "In the crate", "C": "On the hook"}})
    forms = task_of("tombench").examples({**gap, "correct_letter": "C"})
    assert {tuple(e.fields["options"]) for e in forms} == {("A", "C")}
    assert {e.fields["correct_letter"] for e in forms} == {"A", "C"}


def voted(texts: str, **changes: Any) -> list[Record]:
    """Records of FOUR in its orders; a vote is a letter of the row itself, `-` an unread reply."""
    task, ballots = task_of("tombench"), []
    for example, vote in zip(task.examples(released(FOUR)), texts, strict=True):
        letter = next((k for k, v in example.fields["options"].items() if v[-1] == vote), "none")
        episode = draft_of(task, example, letter)
        score = score_text(task, example, episode.final.text)
        fields = {"key": example.id, "task": "tombench", "example_id": example.id, "rollout": 0,
                 "kind": "draft", "episode": episode, "score": score}  # fmt: skip
        ballots.append(Record(**{**fields, **changes}))
    return ballots


@pytest.mark.parametrize(
    ("votes", "right"),
    [("BBBAC", 1), ("ABABB", 1), ("AABBC", 0), ("BACAB", 1), ("-----", 0), ("B----", 1),
     ("AB-BA", 0), ("CCCBB", 0)],
)  # fmt: skip
def test_the_majority_of_answers_stands_for_a_row(votes: str, right: float) -> None:
    means = batch_values(task_of("tombench"), list(reversed(voted(votes))))
    assert means["majority_accuracy"] == right, "on a draw the earliest vote decides"


def test_only_rows_that_were_scored_in_every_order_have_a_majority() -> None:
    task, whole = task_of("tombench"), voted("BBBBA")
    lost = replace(whole[0], score=unscored(Failure("provider_error")))
    assert "majority_accuracy" not in batch_values(task, whole[1:])
    assert "majority_accuracy" not in batch_values(task, [lost, *whole[1:]])
    refined = voted("AAAAA", kind="refined")
    assert batch_values(task, [*refined, *whole])["majority_accuracy"] == 1, "drafts alone"
    second = voted("AAAAA", rollout=1)
    assert batch_values(task, [*second, *whole])["majority_accuracy"] == 0.5
    assert "majority_accuracy" not in batch_values(task_of("tombench", "reference"), whole)


@pytest.mark.parametrize("shuffles", [0, -1, "5", 2.5, True])
def test_orders_that_are_no_number(shuffles: Any) -> None:
    spec = load_registry().spec("tombench").model_copy(update={"options": {"shuffles": shuffles}})
    with pytest.raises(ConfigError, match=rf"cannot ask in {shuffles!r} orders"):
        ToMBench("tombench", spec).examples(released(FOUR))


def test_one_order_is_the_order_of_the_row() -> None:
    spec = load_registry().spec("tombench").model_copy(update={"options": {"shuffles": 1}})
    (only,) = ToMBench("tombench", spec).examples(released(FOUR))
    assert only.fields["correct_letter"] == "B" and only.fields["order"] is None


def test_rows_are_audited_as_they_are_written() -> None:
    raw_rows = examples_to_inspect(task_of("tombench"), "synth:20", forms=False)
    played = examples_to_inspect(task_of("tombench"), "synth:20")
    assert (len(raw_rows.examples), len(played.examples)) == (20, 100)
    assert {e.id.rpartition("-")[0] for e in played.examples} == {e.id for e in raw_rows.examples}
