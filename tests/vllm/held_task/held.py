"""The judged example with a verdict of a number and a word."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

import tests
from soulkit.judge.panel import combined, opinions, readable
from soulkit.judge.structured import VerdictShape, question
from soulkit.judge.verdict import fence
from soulkit.models.base import Cast
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Episode, Example, Score

EXAMPLE = Path(tests.__path__[0]).parent / "examples" / "judged_task" / "tasks.yaml"
Judged = type(load_registry(EXAMPLE).task("judged_task"))


class Rating(VerdictShape):
    quality: int = Field(ge=0, le=10)
    style: Literal["plain", "lively"]


class Held(Judged):  # type: ignore[misc, valid-type]
    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        text = fence(episode.transcript[-1].text, "essay")
        prompt = self.prompts.render("judge", essay=text, **example.visible("judge"))
        verdicts = await opinions(cast, question("score", prompt, Rating), episode)
        points = [rating.quality / 10 for rating in readable(verdicts)]
        value = combined(points, cast.panel.combine)
        return Score(
            value=value, reward=value, metrics={"quality": value},
            verdicts=tuple(v.verdict() for v in verdicts), prompts=self.prompts.hashes("judge"),
        )  # fmt: skip
