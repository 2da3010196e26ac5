"""How replies end, and what that makes of a score."""

from __future__ import annotations

import pytest

from soulkit.tasks.kit.scoring import CUT_TURNS, actor_status, with_endings
from soulkit.types import Completion, Episode, Score, Trace, Turn

Reply = tuple[str, str]
LOW, VALUE = -1.0, 0.5


def ended(status: str, *replies: Reply, strict: bool, dialogue: bool = False) -> Score:
    turns = [Turn((), Completion(text=text, stop_reason=stop)) for text, stop in replies]
    episode = Episode(example_id="e", task="t", traces=(Trace("a", tuple(turns)),))
    score = Score(value=VALUE, reward=VALUE, status=status)
    return with_endings(score, episode, LOW, strict=strict, dialogue=dialogue)


@pytest.mark.parametrize(("reply", "parsed", "strict", "loose"), [
    (("I say A.", "stop"), "ok", "ok", "ok"),
    (("I say A.", "stop"), "no_tag", "no_tag", "no_tag"),
    (("I say A", "length"), "ok", "truncated", "ok"),
    (("I say A", "length"), "salvaged", "truncated", "salvaged"),
    (("I say", "length"), "no_tag", "truncated", "truncated"),
    (("I say", "length"), "malformed", "truncated", "truncated"),
    ((" ", "length"), "empty", "truncated", "truncated"),
    (("I say A", "content_filter"), "ok", "refusal", "ok"),
    ((" ", "content_filter"), "empty", "refusal", "refusal"),
    (("No.", "refusal"), "ok", "refusal", "refusal"),
])  # fmt: skip
def test_a_single_reply(reply: Reply, parsed: str, strict: str, loose: str) -> None:
    for is_strict, status in ((True, strict), (False, loose)):
        score = ended(parsed, reply, strict=is_strict)
        assert score.status == status
        failed = status in ("truncated", "refusal")
        assert score.value == score.reward == (LOW if failed else VALUE)
        assert CUT_TURNS not in score.metrics
        completion = Completion(text=reply[0], stop_reason=reply[1])
        assert actor_status(completion, parsed, is_strict) == status


def test_a_cut_reply_without_a_word_is_truncated_however_it_was_scored() -> None:
    assert ended("ok", (" ", "length"), strict=False).status == "truncated"


def test_what_somebody_else_said_of_a_score_stays() -> None:
    for strict in (True, False):
        score = ended("forged", ("I say A", "length"), strict=strict)
        assert (score.status, score.value) == ("forged", VALUE)


@pytest.mark.parametrize(("replies", "status", "cut"), [
    ([("Hello.", "stop"), ("Bye.", "stop")], "ok", 0.0),
    ([("Hello.", "stop"), ("By", "length")], "truncated", 0.5),
    ([("<think>Hm</think>", "stop"), ("Bye.", "stop")], "empty", 0.0),
    ([("", "length"), ("Bye.", "stop")], "truncated", 0.5),
    ([("No.", "refusal"), ("By", "length")], "refusal", 0.5),
])  # fmt: skip
def test_a_dialogue_is_scored_as_it_stands(replies: list[Reply], status: str, cut: float) -> None:
    score = ended("ok", *replies, strict=True, dialogue=True)
    assert (score.status, score.metrics[CUT_TURNS]) == (status, cut)
    assert score.value == (LOW if status == "refusal" else VALUE)
