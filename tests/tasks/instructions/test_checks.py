"""The checks of `instructions`, each with what it lets through and what it stops."""

from __future__ import annotations

from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.tasks.instructions.checks import KINDS, LONGEST, refuse_unreadable, unmet

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
