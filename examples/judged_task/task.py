"""A few sentences, rated by a judge: quality from 0 to 10, and the name of the style."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from soulkit.judge.leaks import LeakView
from soulkit.judge.panel import combined, opinions, readable
from soulkit.judge.structured import VerdictShape, question
from soulkit.judge.verdict import fence, spoken
from soulkit.models.base import Cast
from soulkit.tasks import Rollout, Task
from soulkit.types import (
    Completion,
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

WRITER = "writer"
RUBRIC = ("reasoning", "quality score", "points out of ten")
"""Terms of the judge's question: feedback that uses them is about the judge, not the text."""


class Quality(VerdictShape):
    reasoning: str
    score: int = Field(ge=0, le=10)


class Opinion(VerdictShape):
    """What the judge answers; a reply of any other form is asked for again."""

    quality: Quality
    style: Literal["plain", "lively"]


class JudgedTask(Task):
    def calls(self, example: Example) -> dict[Role, int]:
        return {"actor": 1, "judge": 1}

    # -- play ---------------------------------------------------------------------------------

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        """The prompt with feedback; `bare` is the same prompt without it."""
        bare = self.prompts.render("user", feedback=None, **example.visible(seat))
        if feedback is None:
            return Segment("user", bare, bare=bare)
        full = self.prompts.render("user", feedback=feedback.text, **example.visible(seat))
        return Segment("user", full, bare=bare)

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return (self.slot(example, WRITER, None),)

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        context = (self.slot(example, WRITER, rollout.feedback),)
        reply = await cast.actor.complete(context, rollout.call("actor", example))
        return Episode(
            example_id=example.id, task=self.name, kind=rollout.kind, rollout=rollout.index,
            traces=(Trace(WRITER, (Turn(context, reply),)),),
            transcript=(Line(WRITER, spoken(reply.text, "paper")),), stop=reply.stop_reason,
            usage=reply.usage,
        )  # fmt: skip

    # -- score --------------------------------------------------------------------------------

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        text = "\n".join(line.text for line in episode.transcript)
        if not text.strip():  # the actor's own failure: the judge is not asked
            return Score(value=0.0, reward=0.0, status="empty")
        view: dict[str, Any] = example.visible("judge")
        prompt = self.prompts.render("judge", essay=fence(text, "essay"), **view)
        verdicts = await opinions(cast, question("score", prompt, Opinion), episode)
        points = [opinion.quality.score / 10 for opinion in readable(verdicts)]
        value = combined(points, cast.panel.combine)
        return Score(
            value=value, reward=value,
            verdicts=tuple(v.verdict() for v in verdicts), prompts=self.prompts.hashes("judge"),
        )  # fmt: skip

    # -- feedback -----------------------------------------------------------------------------

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str:
        return "Say more about it."

    def leak_view(self, example: Example) -> LeakView:
        return LeakView(question=example.fields["topic"], rubric=RUBRIC)

    # -- self-checks --------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        text = (
            f"I keep thinking about {example.fields['topic']}: it was nobody's plan, and it came."
        )
        return self._scripted(example, text, feedback)

    def wrong(self, example: Example) -> Episode:
        return self._scripted(example, "No idea.", None)

    def verdict(self, form: str, perfect: bool) -> str:
        """The judge's scripted answer on `gold` (`perfect`) or on `wrong`, for self-checks."""
        quality = {"reasoning": "as the script has it", "score": 10 if perfect else 2}
        return json.dumps({"quality": quality, "style": "lively" if perfect else "plain"})

    def _scripted(self, example: Example, text: str, feedback: Feedback | None) -> Episode:
        turn = Turn((self.slot(example, WRITER, feedback),), Completion(text=text))
        return Episode(
            example_id=example.id, task=self.name, kind="gold", traces=(Trace(WRITER, (turn,)),),
            transcript=(Line(WRITER, text),), stop="stop",
        )  # fmt: skip
