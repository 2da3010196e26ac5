"""SimulatorArena under `--protocol reference`: the published parsing, stops and arithmetic.

A turn is the text after the first `Response:`, else `Query:` (`Message:` for documents), including
thinking; the phrase anywhere in the turn, or a tag with nothing after it, ends the conversation. So
does a silent turn of either side; the conversation is still judged, and a document is requested
even if nothing was said. The mean always has its full denominator: a part without a judge's answer,
or without data in the row, counts 0. Numbers off a scale are clipped; verdicts on features are
matched by position. There is no feedback.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from soulkit.errors import CallError
from soulkit.judge.panel import readable
from soulkit.judge.structured import VerdictShape
from soulkit.judge.verdict import fence
from soulkit.models.base import Cast, Panel
from soulkit.runs.records import drafts
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.dialogue import (
    Conversation,
    within_episode,
)
from soulkit.tasks.kit.scoring import mean_of
from soulkit.tasks.sim_arena import judging
from soulkit.tasks.sim_arena.data import FEATURES, Target, targets
from soulkit.tasks.sim_arena.judging import FULFILMENT, MATCH, Replies
from soulkit.tasks.sim_arena.play import PHRASE, Utterance
from soulkit.tasks.sim_arena.task import TOPS, SimArena, SimDoc, SimMath
from soulkit.types import (
    BatchMetric,
    Call,
    Episode,
    Example,
    Feedback,
    Line,
    Record,
    Score,
    Segment,
)

NO_ROOM = "length"
ANSWERED = "parts/answered"
"""Metric: the share of the judge questions that got an answer."""


class PublishedPerson(SimArena):
    """The differences for both tasks."""

    tags_read: tuple[str, ...]
    """The tags, in the order in which they are searched."""
    shapes = (judging.LooseLikert, judging.LooseRating)
    judges_silence = True
    needs_all = False

    # -- playing ------------------------------------------------------------------------------

    def read(self, reply: str) -> Utterance:
        return read_published(reply, self.tags_read)

    def memory(self, reply: str) -> str:
        return reply

    async def speak(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation, index: int
    ) -> str:
        actor = within_episode(talk, cast.actor)
        if actor is None:
            return NO_ROOM
        reply = await talk.speak(actor, rollout.call("actor", example, index))
        return self.take_turn(talk, reply.text)

    async def ask_partner(
        self, cast: Cast, context: Sequence[Segment], call: Call, talk: Conversation
    ) -> str | None:
        """A single attempt; thinking counts as part of the reply."""
        try:
            reply = await cast.player("partner").complete(context, call)
        except CallError as error:
            talk.usage += error.usage
            raise
        talk.usage += reply.usage
        return reply.text if reply.text.strip() else None

    # -- scoring ------------------------------------------------------------------------------

    def shape(self, name: str, example: Example) -> type[VerdictShape]:
        if name == FULFILMENT:
            return judging.loose_fulfilment(tuple(t.label for t in targets(example.fields)))
        return super().shape(name, example)

    def scaled(self, raw: Mapping[str, float]) -> dict[str, float]:
        return {name: published_norm(raw[name], TOPS[name]) or 0.0 for name in raw}

    def value(self, shares: Mapping[str, float]) -> float:
        return published_mean([shares.get(part) for part in self.parts])

    def feature_shares(
        self, example: Example, replies: Replies, panel: Panel
    ) -> Mapping[str, float]:
        """Column → share, from the first readable opinion."""
        opinions = readable(replies.get(FULFILMENT, ()))
        verdicts = [r.classification for r in opinions[0].results] if opinions else None
        return self.published_shares(targets(example.fields), verdicts)

    def published_shares(
        self, listed: Sequence[Target], verdicts: Sequence[str] | None
    ) -> dict[str, float]:
        """Column → share of its features, matched to the verdicts by position."""
        return by_position([target.column for target in listed], verdicts, self.feature_metrics)

    def coverage(self, replies: Replies) -> dict[str, float | None]:
        """The share of answered questions. A failed judge counts 0 here, so without this metric it
        would look like a bad conversation."""
        answered = [bool(readable(opinions)) for opinions in replies.values()]
        return {ANSWERED: sum(answered) / len(answered)}

    def status_of(self, turns: Sequence[Utterance]) -> str:
        return "ok"

    def told(self, lines: Iterable[Line], mark: str) -> str:
        """Lines in the format of the published prompts."""
        return fence(published_lines(lines, self.labels), mark)

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode | None:
        """None for a row that lacks a part, because it cannot reach the maximum score."""
        complete = self.tags(example.fields)["parts"] == "all"
        return super().gold(example, feedback) if complete else None

    # -- feedback -----------------------------------------------------------------------------

    def gate(self, score: Score, step: int) -> bool:
        return False

    # -- batches ------------------------------------------------------------------------------

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """The mean share of judge questions that got an answer."""
        answered = mean_of([record.score.metrics.get(ANSWERED) for record in drafts(records)])
        return {ANSWERED: answered} if answered.n_scored else {}


class SimMathReference(PublishedPerson, SimMath):
    tags_read = ("Response", "Query")

    def published_shares(
        self, listed: Sequence[Target], verdicts: Sequence[str] | None
    ) -> dict[str, float]:
        """The share of matches over all returned verdicts, regardless of their number."""
        if not verdicts:
            return {}
        return dict.fromkeys(self.feature_metrics, share_of_matches(verdicts))


class SimDocReference(PublishedPerson, SimDoc):
    tags_read = ("Message",)

    def asked(self, example: Example) -> tuple[str, ...]:
        """The judge is asked about features even if the row has none."""
        return (*super().asked(example)[:3], FULFILMENT)


# -- reading --------------------------------------------------------------------------------------


def read_published(reply: str, tags: Sequence[str]) -> Utterance:
    """The turn as the published code parses it."""
    message, tagged = reply, False
    for tag in tags:
        _, mark, rest = reply.partition(f"{tag}:")
        if mark:
            message, tagged = rest.strip(), True
            break
    if PHRASE in message.lower():
        return Utterance("", True)
    if not message:
        return Utterance("", tagged, "ok" if tagged else "empty")
    return Utterance(message)


def published_lines(lines: Iterable[Line], labels: Mapping[str, str]) -> str:
    """One utterance per line, as `- Student: ...`."""
    return "\n".join(f"- {labels.get(line.seat, line.seat)}: {line.text}" for line in lines)


# -- numbers --------------------------------------------------------------------------------------


def published_norm(raw: float | None, top: float) -> float | None:
    """`raw` / `top` clipped to [0, 1], NaN as 1; None for None."""
    if raw is None:
        return None
    return 1.0 if math.isnan(raw) else min(1.0, max(0.0, raw / top))


def published_mean(values: Sequence[float | None]) -> float:
    """The mean, with missing values as 0; 0 for no values."""
    return sum(value or 0.0 for value in values) / len(values) if values else 0.0


def share_of_matches(verdicts: Sequence[str]) -> float:
    """The share of `Match`; 0 without verdicts."""
    return sum(verdict == MATCH for verdict in verdicts) / len(verdicts) if verdicts else 0.0


def by_position(
    columns: Sequence[str], verdicts: Sequence[str] | None, known: Iterable[str] = FEATURES
) -> dict[str, float]:
    """Column → share of `Match` among the verdicts of its features, matched by position; 0 without
    verdicts."""
    pairs = list(zip(columns, verdicts or (), strict=False))
    return {
        column: share_of_matches([verdict for other, verdict in pairs if other == column])
        for column in known
    }
