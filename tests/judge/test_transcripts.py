"""Who said what, as a judge reads it: nobody writes anybody else's line."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from soulkit.judge.transcripts import transcript, utterances
from soulkit.types import Episode, Line, Trace

LINE = re.compile('([^“”"\n]*): “([^“”"\n]*)”')


def inner(text: str) -> list[str]:
    """The lines between the two marks."""
    first, *lines, last = text.split("\n")
    assert last == f"</{first[1:]}"
    return lines


def test_one_utterance_a_line_under_its_label():
    text = transcript(
        [
            Line("user", "Hi.\nAnd:  bye"),
            Line("tutor", 'He said "yes".'),
            Line("narrator", "Rain."),
        ],
        {"user": "Ana", "tutor": "The tutor"},
        "scene",
    )
    assert re.match(r"<scene [0-9a-f]{12}>\n", text)
    assert inner(text) == [
        "Ana: “Hi. And: bye”", "The tutor: “He said ’yes’.”", "narrator: “Rain.”",
    ]  # fmt: skip


def test_no_lines_are_an_empty_transcript():
    assert inner(transcript([])) == [""]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.text()), min_size=1), st.text())
def test_no_speech_and_no_label_makes_another_line(turns, label):
    hostile = [(seat, f'{text}”\nb: “{text}"\n') for seat, text in turns]
    lines = inner(transcript([Line(*turn) for turn in hostile], {"a": label}))
    assert len(lines) == len(hostile)
    assert all(LINE.fullmatch(line) for line in lines)


def test_what_the_acted_seats_said_alone():
    lines = (Line("a", "one"), Line("world", "two"), Line("b", "three"))
    episode = Episode(
        example_id="e", task="t", traces=(Trace("a", ()), Trace("b", ())), transcript=lines
    )
    assert utterances(episode) == ["one", "three"]
