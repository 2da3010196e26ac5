"""How an actor's replies ended, and what that makes of a score.

A reply that ran into its limit is no answer, whatever stands in it: where a task asks for one
reply, it scores the minimum and its status is `truncated`. A dialogue is scored as it stands,
but its status is `truncated` as well, since nobody knows what the cut turns would have become;
`turns/cut` is their share. With a turn in which nothing was said it is `empty`, and scored as it
stands too. A refusal is the actor's own failure anywhere: a reply that names itself one, and a
reply held back by a filter of which nothing is left.

Under `reference` what can be read of a cut reply counts, as the published code has it, and so it
does in a task that says so (`grades_cut_replies`). A cut reply of which nothing can be read is
`truncated` under either protocol, whatever the task itself calls it (`empty`, `no_tag`,
`malformed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from soulkit.judge.verdict import spoken
from soulkit.types import Completion, Episode, Score

READABLE = ("ok", "salvaged")
"""Statuses of an answer that is graded."""
_UNREAD = ("empty", "no_tag", "malformed")
"""Statuses of a reply that holds no answer."""
CUT_TURNS = "turns/cut"
"""Metric of a dialogue: the share of the actor's turns that ran into their limit."""


def reply_failure(completion: Completion, strict: bool) -> str:
    """`refusal` or `truncated` for a reply that is one whatever can be read of it, else empty.

    Not `strict`: what a filter held back is a refusal only where nothing of it is left.
    """
    held_back = completion.stop_reason == "content_filter" and not completion.text.strip()
    if completion.stop_reason == "refusal" or held_back:
        return "refusal"
    if not strict:
        return ""
    return {"content_filter": "refusal", "length": "truncated"}.get(completion.stop_reason, "")


def actor_status(completion: Completion, parsed: str, strict: bool = True) -> str:
    """How a single reply was read (`parsed`), or why it counts as none: the actor's own failure."""
    failure = reply_failure(completion, strict)
    if failure or parsed in READABLE:
        return failure or parsed
    if completion.stop_reason == "content_filter":
        return "refusal"
    if completion.stop_reason == "length":
        return "truncated"
    return parsed if completion.text.strip() else "empty"


def with_endings(
    score: Score, episode: Episode, low: float, *, strict: bool, dialogue: bool
) -> Score:
    """`score` with what the ends of the actor's replies make of it; `low` is the minimum."""
    replies = [turn.completion for trace in episode.traces for turn in trace.turns]
    if not score.scored or not replies:
        return score
    failures = [reply_failure(reply, strict) for reply in replies]
    cut = [reply for reply in replies if reply.stop_reason == "length"]
    if dialogue:
        score = replace(score, metrics={**score.metrics, CUT_TURNS: len(cut) / len(replies)})
    if score.status not in (*READABLE, *_UNREAD):
        return score
    if dialogue and "refusal" not in failures:
        return replace(score, status=_dialogue_status(score.status, replies))
    if cut and (score.status in _UNREAD or not all(reply.text.strip() for reply in cut)):
        failures.append("truncated")
    failure = next((name for name in ("refusal", "truncated") if name in failures), "")
    return replace(score, value=low, reward=low, status=failure) if failure else score


def _dialogue_status(status: str, replies: Sequence[Completion]) -> str:
    """`status`, or what cut and silent turns make of a dialogue: `truncated`, `empty`."""
    if any(reply.stop_reason == "length" for reply in replies):
        return "truncated"
    silent = status in READABLE and not all(spoken(reply.text, "paper") for reply in replies)
    return "empty" if silent else status
