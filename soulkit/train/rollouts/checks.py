"""What a step's rollouts must be before anything is learned from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from soulkit.errors import CallError, ProviderError, SoulError, TaskError
from soulkit.types import Record


class StaleRollout(SoulError):
    """A rollout carries the hash of other weights than the trainer's."""


def refuse_stale(records: Sequence[Record], version: str) -> None:
    """On-policy means: every trained token was sampled by the weights that are about to move."""
    for record in records:
        for trace in record.episode.traces:
            for turn in trace.turns:
                if turn.completion.policy != version:
                    raise StaleRollout(
                        f"{record.key} was sampled by '{turn.completion.policy}', not '{version}'"
                    )


def with_reward(record: Record) -> Record:
    """The record; unscored where its score has no reward: nothing can be learned from it."""
    score = record.score
    if not score.scored or score.reward is not None:
        return record
    why = score.reason or "no_reward"
    words = "; ".join(v.problem for v in score.verdicts if v.problem) or score.words
    lost = replace(score, value=None, status="unscored", reason=why, words=words)
    return replace(record, score=lost)


def silence(records: Sequence[Record]) -> CallError | None:
    """Why a step has nothing to learn from, or has no feedback at all; None when it has.

    A run that went on would spend hours on a dead server, or be another method than was asked for.
    """
    drafts = [r for r in records if r.kind == "draft"]
    scored = [r for r in drafts if r.score.scored]
    if drafts and not scored:
        last = drafts[-1].score
        return _of_reason(last.reason)(
            f"None of {len(drafts)} drafts was scored, the last for {last.reason}: {last.words}"
        )
    failed = [r.episode.notes.get("coach_failure") for r in scored]
    if failed and all(failed):
        return _of_reason(str(failed[-1]).partition(":")[0])(
            f"The coach failed on all of {len(failed)} drafts, the last time with {failed[-1]}"
        )
    return None


def _of_reason(reason: str) -> type[CallError]:
    return TaskError if reason == TaskError.reason else ProviderError
