"""What an audit says of rows: where the gold stands, what the prompt gives away, what clashes."""

from __future__ import annotations

from typing import Any

import pytest

from soulkit.data.files import RawRow
from soulkit.metrics.intervals import upper_tail
from soulkit.tasks.kit.loading import LoadedExamples, RowsOnly, to_examples
from soulkit.tasks.kit.row_checks import (
    WordCounts,
    audit_rows,
    bias,
    without_options,
    word_counts,
)
from soulkit.tasks.kit.spec import TaskSpec
from tests.support.road import task_of

NAMES = ("red_box", "blue_bag", "green_jar", "tin_can")
STORY = "1 Ada entered the attic.\n2 The pen is in the {}."


def hitom(gold: str, story: str, at: int = 0, n: int = 4, **more: Any) -> dict[str, Any]:
    others = [name for name in NAMES[:n] if name != gold]
    options = [*others[:at], gold, *others[at:]]
    choices = ", ".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(options))
    return {"story": story, "question": "Where is the pen really?", "choices": choices,
            "correct_answer": gold, **more}  # fmt: skip


def loaded(*rows: dict[str, Any]) -> LoadedExamples:
    return to_examples(task_of("hitom"), [RawRow(r, f"h:{i}") for i, r in enumerate(rows, 1)])


def test_the_tail_of_a_binomial() -> None:
    assert upper_tail(0, 10, 0.3) == upper_tail(3, 3, 1.0) == 1.0
    assert upper_tail(1, 10, 0.0) == 0.0
    assert upper_tail(3, 3, 0.5) == pytest.approx(0.125)
    assert upper_tail(2, 3, 0.25) == pytest.approx(3 * 0.0625 * 0.75 + 0.015625)
    assert upper_tail(3000, 6000, 0.5) == pytest.approx(0.505, abs=0.001)
    assert 0 < upper_tail(700, 1000, 0.25) < 1e-50


def test_a_gold_at_one_place_is_told_from_one_at_all_places() -> None:
    stories = [STORY.format(NAMES[i % 4]) + f"\n3 Ben saw {i} birds." for i in range(40)]
    crooked = [hitom(NAMES[i % 4], s, at=1 if i % 5 else 3) for i, s in enumerate(stories)]
    audit = audit_rows(task_of("hitom"), loaded(*crooked))
    assert audit.positions == {"B": 32, "D": 8} and audit.favourite == "B"
    assert audit.position is not None and audit.position.notable
    assert (audit.position.share, audit.position.chance) == (0.8, 0.25)
    even = [hitom(NAMES[i % 4], s, at=(i * 7) % 4) for i, s in enumerate(stories)]
    level = audit_rows(task_of("hitom"), loaded(*even)).position
    assert level is not None and not level.notable and level.share == 0.25
    assert level.p == 1.0, "adjusted for four letters, and no more than certain"


def test_rows_with_fewer_options_expect_more_of_the_first_letters() -> None:
    rows = [hitom("red_box", STORY.format("red_box") + f"\n3 Ben saw {i} birds.", n=2)
            for i in range(6)]  # fmt: skip
    position = audit_rows(task_of("hitom"), loaded(*rows)).position
    assert position is not None and position.chance == 0.5 and position.hits == 6


def test_the_longest_option_is_compared_with_chance() -> None:
    rows = [hitom("green_jar", STORY.format("green_jar") + f"\n3 Ben saw {i} birds.")
            for i in range(12)]  # fmt: skip
    longest = audit_rows(task_of("hitom"), loaded(*rows)).longest
    assert longest is not None and (longest.hits, longest.rows, longest.chance) == (12, 12, 0.25)
    assert longest.notable and longest.p == pytest.approx(0.25**12)


def test_a_gold_that_stands_alone_in_the_story_is_named() -> None:
    alone = hitom("red_box", STORY.format("red_box"))
    both = hitom("red_box", STORY.format("red_box") + "\n3 The blue_bag is in the attic.")
    absent = hitom("red_box", "1 Ada entered the attic.")
    audit = audit_rows(task_of("hitom"), loaded(alone, both, absent))
    assert audit.gold_in_prompt == 2 and audit.with_options == 3
    assert [(r.source, r.what) for r in audit.remarks] == [("h:1", "leak")]
    assert "red_box" in audit.remarks[0].detail


@pytest.mark.parametrize(
    "options",
    [
        "A. red_box, B. blue_bag, C. green_jar",
        "A. red_box\nB. blue_bag\n\nC. green_jar",
        "* red_box\n* blue_bag\n* green_jar",
        "(A) Red Box (B) Blue Bag (C) Green Jar",
        "Option C: green_jar\nOption A: red_box\nOption B: blue_bag",
    ],
)
def test_the_list_of_options_is_no_part_of_what_the_prompt_says(options: str) -> None:
    prompt = f"The pen is in the red_box.\n{options}\nAnswer with a letter."
    left = without_options(prompt, ("red_box", "blue_bag", "green_jar"))
    assert left.count("red box") == 1 and "blue bag" not in left and "green jar" not in left


def test_an_option_of_several_lines_is_taken_out_as_a_whole() -> None:
    options = ("1. Run.\n2. Rest.", "What would you like?")
    prompt = f"Run or rest?\n### Reply A\n{options[1]}\n\n### Reply B\n{options[0]}\nChoose."
    assert without_options(prompt, options) == "run or rest reply a | reply b | choose"
    inside = ("Go home", "Go home\nand sleep")  # the longer one first, or its second line stays
    assert without_options("A. Go home\nOr\nB. Go home\nand sleep\n", inside) == "| or |"


def test_an_option_that_is_quoted_elsewhere_stays() -> None:
    prompt = "red_box and then the blue_bag, or so Ada says"
    assert "blue bag" in without_options(prompt, ("red_box", "blue_bag"))


def test_one_question_with_two_golds_is_a_contradiction_and_a_repeat_is_a_duplicate() -> None:
    row = hitom("red_box", STORY.format("red_box"))
    other = {**row, "correct_answer": "blue_bag"}
    audit = audit_rows(task_of("hitom"), loaded(row, other, row))
    assert audit.duplicates == 1 and audit.rows == 2
    clashing = [r for r in audit.remarks if r.what == "contradiction"]
    assert [r.source for r in clashing] == ["h:1", "h:2"]
    assert "red_box" in clashing[0].detail and "blue_bag" in clashing[0].detail


def test_options_that_say_the_same_are_named() -> None:
    row = hitom("red_box", STORY.format("red_box"))
    twin = {**row, "choices": "A. red_box, B. Red_box, C. tin_can"}
    audit = audit_rows(task_of("hitom"), loaded(twin))
    assert [r.what for r in audit.remarks if r.what != "leak"] == ["twin_options"]


def test_percentiles_are_of_the_nearest_rank_and_a_budget_may_be_filled() -> None:
    assert word_counts([1, 2, 5, 6], 5) == WordCounts(p50=2, p95=6, max=6, over_budget=1)
    assert word_counts(list(range(1, 101)), None) == WordCounts(50, 95, 100, 0)


def test_lengths_are_of_fields_prompt_and_gold() -> None:
    audit = audit_rows(task_of("hitom"), loaded(hitom("red_box", STORY.format("red_box"))))
    assert audit.words["story"].max == 12 and audit.words["gold answer"].max == 1
    assert audit.words["prompt"].p50 > audit.words["story"].p50


def test_a_task_without_options_is_audited_for_the_rest() -> None:
    from tests.support.road import synth

    task = task_of("secret_keeper")
    rows = [RawRow(r, f"s:{i}") for i, r in enumerate(synth("secret_keeper", 5, 1))]
    audit = audit_rows(task, to_examples(task, rows))
    assert (audit.rows, audit.with_options, audit.position, audit.longest) == (5, 0, None, None)
    assert audit.remarks == () and audit.words["prompt"].max > 10


def test_what_no_row_has_is_not_counted() -> None:
    spec = TaskSpec.model_validate({"title": "T", "summary": "S", "seats": {"reader": "actor"},
                                    "columns": {"text": {"audience": ["reader"]}}})  # fmt: skip
    rows = [RawRow({"text": "Look here"}, "rows:1")]
    audit = audit_rows(RowsOnly("t", spec), to_examples(RowsOnly("t", spec), rows))
    assert audit.words == {"text": WordCounts(2, 2, 2, 0)}


def test_a_bias_knows_its_share() -> None:
    letter_bias = bias(3, 4, 0.25)
    assert letter_bias.share == 0.75 and letter_bias.p == pytest.approx(
        4 * 0.25**3 * 0.75 + 0.25**4
    )
