"""The forty instructions and their checks: what each check lets through and what it stops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from soulkit.cli.app import main
from soulkit.errors import DataError
from soulkit.tasks.instructions.task import KINDS, LONGEST, refuse_unreadable, unmet
from soulkit.tasks.kit.loading import examples_to_inspect
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.selfcheck import check_task, silent_cast
from soulkit.types import Completion, Episode, Example, Line, Score, Trace, Turn
from tests.support.road import synth, task_of

NAME = "instructions"


def scored(example: Example, reply: str, stop: str = "stop") -> Score:
    task = task_of(NAME)
    completion = Completion(text=reply, stop_reason=stop)
    trace = Trace("writer", (Turn(task.preview(example), completion),))
    episode = Episode(
        example_id=example.id, task=NAME, kind="draft", rollout=0, traces=(trace,),
        transcript=(Line("writer", reply),), stop=stop,
    )  # fmt: skip
    return asyncio.run(task.judged(example, episode, silent_cast()))


def test_the_forty_are_the_same_whatever_seed_and_split() -> None:
    task = task_of(NAME)
    ids = {example.id for example in examples_to_inspect(task, "synth:40", 0).examples}
    assert len(ids) == 40
    for number, seed in ((40, 7), (1000, 0)):
        assert {e.id for e in examples_to_inspect(task, f"synth:{number}", seed).examples} == ids
    assert synth(NAME, 5, 3) == synth(NAME, 40, 3)[:5]


def test_every_gold_keeps_to_its_instruction_and_no_wrong_one_does() -> None:
    task = task_of(NAME)
    check = check_task(task, examples_to_inspect(task, "synth:40", 0), "synth:40")
    assert check.rows == 40 and check.passed
    assert not (check.wrong_passes or check.wrong_unread or check.no_gold or check.no_wrong)
    assert not (check.unscored or check.warnings or check.unrendered or check.bad)


def test_one_missed_check_costs_the_row_and_is_named() -> None:
    task = task_of(NAME)
    row = next(r for r in synth(NAME, 40, 0) if r["instruction"].startswith("Write a note"))
    example = task.example(row)
    whole = scored(example, row["reply"])
    assert (whole.value, whole.metrics["checks"], whole.words, whole.status) == (1, 1, "", "ok")
    missed = scored(example, row["reply"].replace("ladder", "saw"))
    assert (missed.value, missed.metrics["checks"], missed.words) == (0, 0.5, "contains")


TRIED = [
    ("Write a warning sign", ["WET FLOOR!"], ["Wet floor", "CAREFUL"]),
    ("List exactly five", ["- a\r\n- b\r\n- c\r\n- d\r\n- e\r\n\r\n"],
     ["* a\n* b\n* c\n* d\n* e", "Sure:\n- a\n- b\n- c\n- d\n- e"]),
    ("Name six different", ["Apple\nBanana\nCherry\nFig\nKiwi\nPear\n"],
     ["apple\n" * 6, "- apple\n- banana\n- cherry\n- fig\n- kiwi\n- pear"]),
    ("Give three reasons", ["Why?\n\n- a\n- b\n- c"], ["- a\n- b\n- c\nThat is why."]),
    ("Rank three ways", ["1. a\n2. b\n3. c\n\nThat is all."],
     ["So:\n1. a\n2. b\n3. That is all.", "1. a\n2. b\n3. c\nWell, that is all."]),
    ("Name the four seasons", ['["Spring", "Summer", "Fall", "Winter"]',
                               '```json\n["spring", "summer", "autumn", "winter"]\n```'],
     ['["a", "b", "c", "d"]', '["summer", "spring", "autumn", "winter"]']),
    ("Give the first five", ["[1,4,9,16,25]"], ["[25, 16, 9, 4, 1]", "[true, 4, 9, 16, 25]"]),
    ("A guest called Tom", ['{"nights": 2, "guest": "Tom", "day": "Friday"}'],
     ['{"guest": "Friday", "day": "Tom", "nights": 2}',
      '{"guest": "Tom 2", "day": "Friday", "nights": 3}']),
    ("Write one sentence of four", ["Six sun-burnt sailors slept."], ["So. So. So. So."]),
    ("Write a short notice", ["# Fleas!\n\nCome. Buy."], ["# Fleas\n\nCome. Buy. Leave."]),
    ("What might a ship's", ["“Land!”", '"Land!"'], ["Land!", "'Land!'"]),
    ("Compare a bicycle",
     ["| | bike | car |\n|---|---|---|\n| wheels | 2 | 4 |\n| fuel | no | yes |"],
     ["| | bike | car |\n|---|---|---|\n| wheels | 2 | 4 |"]),
    ("Interview a beekeeper", ["Why bees?\n\nWhen?\n\nHow many?"], ["Why? When? How?\nSo.\nYes."]),
]  # fmt: skip


@pytest.mark.parametrize(("begins", "good", "bad"), TRIED, ids=[row[0] for row in TRIED])
def test_what_keeps_to_an_instruction_counts_and_what_only_looks_like_it_does_not(
    begins: str, good: list[str], bad: list[str]
) -> None:
    row = next(r for r in synth(NAME, 40, 0) if r["instruction"].startswith(begins))
    assert [text for text in good if unmet(row["checks"], text)] == []
    assert [text for text in bad if not unmet(row["checks"], text)] == []


def test_replies_that_are_none_score_nothing_with_a_status() -> None:
    example = task_of(NAME).example(synth(NAME, 1, 0)[0])
    assert (scored(example, "").status, scored(example, "<think>a</think>").status) == (
        "empty", "empty",
    )  # fmt: skip
    cut = scored(example, synth(NAME, 1, 0)[0]["reply"], stop="length")
    assert (cut.value, cut.metrics["checks"], cut.status) == (0, 0, "truncated")
    thoughts = "<think>thirty words, then</think>\n" + synth(NAME, 1, 0)[0]["reply"]
    assert scored(example, thoughts).value == 1


def test_it_stands_in_no_mean_of_the_benchmarks_and_is_never_trained_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry = load_registry()
    assert [name for name in registry.suites if NAME in registry.suite(name)] == ["general"]
    train = ["train", "sft", "--model", "tiny", "--full", "--task", NAME, "--data", "synth:40"]
    assert main([*train, "--dry-run"]) == 2
    assert NAME in capsys.readouterr().err


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"kind": "words", "least": 2, "most": 3}, ["a b", "one - two"], ["a", "a b c d", ""]),
    ({"kind": "sentences", "least": 2, "most": 2},
     ["Yes. No.", 'He said "no!" I left', "Is it… 3.5 metres?"], ["Yes.", "a. b. c."]),
    ({"kind": "sentences", "least": 4}, ["One. Two. Three. Four."], ["1. One. \n2) Two."]),
    ({"kind": "lines", "least": 2, "most": 2}, ["a\n\nb"], ["a", "a\nb\nc"]),
    ({"kind": "paragraphs", "count": 2}, ["a\nb\n\n\nc"], ["a\nb", "a\n\nb\n\nc"]),
    ({"kind": "characters", "most": 3}, ["abc"], ["abcd", ""]),
    ({"kind": "words_a_line", "count": 2}, ["a b\nc d"], ["a b\nc", ""]),
    ({"kind": "words_a_sentence", "most": 2}, ["One two. Three."], ["One two three.", ""]),
    ({"kind": "upper"}, ["WET!", "NO. 9"], ["Wet", "9", ""]),
    ({"kind": "lower"}, ["wet.", "no. 9"], ["Wet", "9", ""]),
    ({"kind": "capitals"}, ['The "Big" 9 Élan'], ["The big", ""]),
    ({"kind": "without_characters", "characters": "e,"}, ["a dog"], ["An Elk", "a, b", ""]),
    ({"kind": "begin_with", "letter": "s"}, ["Seven (small) ships!", "Sun-burnt “sailors”"],
     ["seven old", ""]),
    ({"kind": "spells", "letters": "AB"}, ["apple\nBee", "**A**pple\n“Bee”"],
     ["apple\nbee\ncow", "ab"]),
    ({"kind": "contains", "words": ["cat", "oak"]}, ["An oak, a CAT."], ["cats and oaks", "cat"]),
    ({"kind": "without", "words": ["cat"]}, ["a category"], ["Cat!", ""]),
    ({"kind": "times", "word": "cat", "count": 2}, ["Cat, cat; cats"], ["cat", "cat cat cat"]),
    ({"kind": "marks", "mark": "?", "count": 1}, ["a?"], ["a", "a??"]),
    ({"kind": "no_word_twice"}, ["one two"], ["one, One", ""]),
    ({"kind": "starts", "words": "Once"}, ["Once upon", "Once", "Once, a"],
     ["once", "So Once", "Oncelers", "Once's"]),
    ({"kind": "starts", "words": "# "}, ["# a"], ["#a"]),
    ({"kind": "ends", "words": "end."}, ["the end."], ["end", "end. "[:3]]),
    ({"kind": "bullets", "count": 2}, ["- a\n- b", "- a\r\n\r\n- b\r\n\r\n"],
     ["- a", "- a\n- b\nc", "-a\n-b", "- a\n- ", "* a\n* b", "• a\n• b", "1. a\n2. b"]),
    ({"kind": "bullets", "count": 2, "before": 1}, ["So:\n- a\n- b"],
     ["So:", "- a\n- b", "- a\n- b\nSo", "- a\nSo\n- b", "So:\n- a\n- b\n- c", ""]),
    ({"kind": "numbered", "count": 2}, ["1. a\n2. b"],
     ["1. a\n3. b", "2. a\n1. b", "x\n1. a\n2. b", "1) a\n2) b", "1. a\n1. b", "²\n2. b"]),
    ({"kind": "numbered", "count": 1, "after": 1}, ["1. a\nEnd."],
     ["1. a", "End.\n1. a", "1. a\n2. b"]),
    ({"kind": "last_line", "words": "End."}, ["a\nEnd."], ["a End.", "End.\na", ""]),
    ({"kind": "lines_end", "mark": "?"}, ["a?\nb?"], ["a?\nb", ""]),
    ({"kind": "in_order"}, ["apple\nBee\ncow", "açaí\napple"], ["bee\napple", "apple"]),
    ({"kind": "title", "most": 2}, ["# A\n\nb", "# A!\n\nB.\nC."],
     ["A\n\nb", "# A\nb", "# A", "# A\n\n", "", "# A\n\nB. C. D."]),
    ({"kind": "quoted"}, ['"Yes!"', "“Yes!”"],
     ['"Yes" and "no"', "Yes", '""', '"', '"Yes”', "“a “b”"]),
    ({"kind": "table", "columns": 2, "rows": 1},
     ["|a|b|\n|---|:-:|\n|1|2|", "| | b |\n|-|-|\n| 1 | a \\| b |", "a|b\n---|---\n1|2"],
     ["|a|b|\n|1|2|\n|3|4|", "|a|\n|-|\n|1|", "|a|b|\n|-|-|\n|1||", "|a|b|\n|::|-|\n|1|2|",
      "```\n|a|b|\n|-|-|\n|1|2|\n```", ""]),
    ({"kind": "json_object", "keys": {"a": "integer", "b": "list of strings"}},
     ['{"a": 1, "b": ["x"]}', '```json\n{"b": ["x"], "a": 1}\n```'],
     ['{"a": true, "b": ["x"]}',
      '{"a": 1, "b": []}', '{"a": 1, "b": [""]}', '{"a": 1.0, "b": ["x"]}',
      '{"a": 1, "b": ["x"], "c": 2}', '{"a": 1, "a": 1, "b": ["x"]}', 'Here: {"a": 1, "b": ["x"]}',
      "[" * 40_000, '{"a": NaN, "b": ["x"]}', '{"a": ' + "9" * 5000 + "}", "[1]"]),
    ({"kind": "json_list", "count": 2, "of": "integer"}, ["[1, 4]"],
     ["[1]", "[1, 4.0]", '"14"', "1"]),
    ({"kind": "json_value", "value": {"a": 1, "b": "x"}}, ['{"b": "x", "a": 1}'],
     ['{"a": true, "b": "x"}', '{"a": 1.0, "b": "x"}', '{"a": 1, "b": "X"}', '[1, "x"]',
     "null", ""]),
    ({"kind": "json_begins", "value": "spring"}, ['["Spring", "a"]'],
     ['["a", "spring"]', '"spring"', "[]", "[1]", '{"spring": 1}']),
]  # fmt: skip


def test_every_kind_is_tried() -> None:
    assert {check["kind"] for check, _, _ in CASES} == set(KINDS)


@pytest.mark.parametrize(("check", "good", "bad"), CASES, ids=lambda case: str(case)[:40])
def test_what_meets_a_check_and_what_does_not(
    check: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    refuse_unreadable([check])
    assert [text for text in good if unmet([check], text)] == []
    assert [text for text in bad if not unmet([check], text)] == []


def test_beyond_its_bound_a_reply_meets_nothing() -> None:
    check = {"kind": "words", "least": 1}
    assert unmet([check], "a " * (LONGEST // 2)) == []
    assert unmet([check], "a " * LONGEST) == ["words"]


@pytest.mark.parametrize("checks", [
    [], "words", None, [{"kind": "tone"}], [{"kind": "words", "fewest": 3}], [{"least": 3}],
    [{"kind": "characters", "most": "three"}], [{"kind": "contains", "words": [3]}],
    [{"kind": "contains", "words": "cat"}], [{"kind": ["words"]}], [{"kind": {}}],
    [{"kind": "json_list", "count": 2, "of": "strng"}],
    [{"kind": "json_object", "keys": {"a": "b"}}],
    [{"kind": "json_object", "keys": {"a": 3}}], [{"kind": "json_object", "keys": ["a"]}],
])  # fmt: skip
def test_checks_that_cannot_be_used_are_refused(checks: Any) -> None:
    with pytest.raises(DataError, match="cannot be used"):
        refuse_unreadable(checks)


@pytest.mark.parametrize(
    "piece", ["a. ", "word ", '["', "-", "\n", "| ", '"', "...)))", "```\n", "1. x\n", "É", "\0"]
)
def test_no_text_breaks_a_check(piece: str) -> None:
    text = piece * (5_000 // len(piece))
    for check, _, _ in CASES:
        assert unmet([check], text) in ([], [check["kind"]])
