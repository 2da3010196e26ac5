"""Essays for a model without any skill, as writer and as judge.

The grade is the length of the judge's reply, and a reply that reaches the limit counts as finished.
"""

from __future__ import annotations

from dataclasses import replace

from soulkit.judge.panel import judge_call
from soulkit.models.base import Cast
from soulkit.tasks import Rollout
from soulkit.types import Episode, Example, Score, Segment
from tests.support.judged_task.essay import Essay


class Graded(Essay):  # type: ignore[misc, valid-type]
    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        episode: Episode = await super().play(example, cast, rollout)
        (trace,) = episode.traces
        (turn,) = trace.turns
        whole = replace(turn, completion=replace(turn.completion, stop_reason="stop"))
        return replace(episode, stop="stop", traces=(replace(trace, turns=(whole,)),))

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        text = " ".join(line.text for line in episode.transcript)
        judge = cast.judges[0]
        judge = replace(judge, sampling=replace(judge.sampling, max_tokens=8))
        call = judge_call(episode, purpose="grade")
        reply = await judge.complete((Segment("user", f"Grade this: {text}"),), call)
        grade = min(len(reply.text) / 100, 1.0)
        return Score(value=grade, reward=grade)
