"""A judged task whose points are read between two anchors, for the tests of controls."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from soulkit.judge.panel import opinions, pooled
from soulkit.judge.structured import VerdictShape, question
from soulkit.judge.verdict import fence
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import Control
from soulkit.tasks.kit.scoring import mean_of
from soulkit.types import (
    BatchMetric,
    Completion,
    ControlRecord,
    Episode,
    Example,
    Feedback,
    Line,
    Record,
    Score,
    Trace,
    Turn,
)
from tests.support.judged_task.essay import Essay

HUMAN, PROXY = "human_human", "proxy_proxy"


class Alike(VerdictShape):
    alike: int = Field(ge=0, le=10)


class Anchored(Essay):  # type: ignore[misc, valid-type]
    controls = (Control(HUMAN, "row", {"judge": 2}), Control(PROXY, "episode", {"judge": 2}))

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        text = str(example.fields["human"])
        turn = Turn(self.preview(example), Completion(text=text))
        return Episode(
            example_id=example.id, task=self.name, kind="gold",
            traces=(Trace("writer", (turn,)),), transcript=(Line("writer", text),),
        )  # fmt: skip

    async def control(
        self, name: str, example: Example, episode: Episode | None, cast: Cast
    ) -> Score:
        assert episode is not None
        text = "\n".join(line.text for line in episode.transcript)
        prompt = self.prompts.render(
            "alike", topic=example.fields["topic"], first=fence(text, "one"),
            second=fence(text, "two"),
        )  # fmt: skip
        replies = await opinions(cast, question("alike", prompt, Alike), episode)
        value = pooled(replies, lambda reply: reply.alike / 10, cast.panel.combine)
        return Score(
            value=value, reward=value, verdicts=tuple(reply.verdict() for reply in replies),
            prompts=self.prompts.hashes("alike"),
        )  # fmt: skip

    def calibrate(
        self, records: Sequence[Record], controls: Sequence[ControlRecord]
    ) -> dict[str, BatchMetric]:
        anchors = {
            name: mean_of([c.score.value for c in controls if c.name == name], name)
            for name in (HUMAN, PROXY)
        }
        plain = mean_of([record.score.value for record in records])
        high, low = anchors[HUMAN].value, anchors[PROXY].value
        value = None
        if plain.value is not None and high is not None and low is not None and high > low:
            value = min(max((plain.value - low) / (high - low), 0.0), 1.0)
        calibrated = BatchMetric(value, plain.n, plain.n_scored, low=0.0, high=1.0)
        named = {f"anchor/{name}": anchor for name, anchor in anchors.items()}
        return {"calibrated": calibrated, **named}
