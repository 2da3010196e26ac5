"""A judged task as small as one can be: quality from 0 to 10, and a style by name."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from soulkit.judge.panel import combined, opinions, readable
from soulkit.judge.structured import VerdictShape, question
from soulkit.judge.verdict import fence
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import Rollout, Task
from soulkit.types import (
    Episode,
    Example,
    Feedback,
    Line,
    Role,
    Score,
    Segment,
    Trace,
    Turn,
    unscored,
)


class Quality(VerdictShape):
    reasoning: str
    score: int = Field(ge=0, le=10)


class Opinion(VerdictShape):
    quality: Quality
    style: Literal["plain", "lively"]


class Essay(Task):
    def calls(self, example: Example) -> dict[Role, int]:
        return {"actor": 1, "judge": 1}

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        bare = self.prompts.render("user", feedback=None, **example.visible(seat))
        if feedback is None:
            return Segment("user", bare, bare=bare)
        full = self.prompts.render("user", feedback=feedback.text, **example.visible(seat))
        return Segment("user", full, bare=bare)

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return (self.slot(example, "writer", None),)

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        context = (self.slot(example, "writer", rollout.feedback),)
        reply = await cast.actor.complete(context, rollout.call("actor", example))
        return Episode(
            example_id=example.id, task=self.name, kind=rollout.kind, rollout=rollout.index,
            traces=(Trace("writer", (Turn(context, reply),)),),
            transcript=(Line("writer", reply.text),), stop=reply.stop_reason, usage=reply.usage,
        )  # fmt: skip

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        text = "\n".join(line.text for line in episode.transcript)
        if not text.strip():  # the actor's own failure is no judge's business
            return Score(value=0.0, reward=0.0, metrics={"quality": None}, status="empty")
        view: dict[str, Any] = example.visible("judge")
        prompt = self.prompts.render("judge", essay=fence(text, "essay"), **view)
        found = await opinions(cast, question("score", prompt, Opinion), episode)
        points = [opinion.quality.score / 10 for opinion in readable(found)]
        value = combined(points, cast.panel.combine)
        return Score(
            value=value, reward=value, metrics={"quality": value},
            verdicts=tuple(o.verdict() for o in found), prompts=self.prompts.hashes("judge"),
        )  # fmt: skip

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        return "Say more about it."
