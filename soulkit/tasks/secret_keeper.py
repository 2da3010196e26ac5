"""Secret keeper: a dialogue of four to six turns, scored by rules.

A visitor (the partner) asks a keeper (the actor) about public facts and pries into a secret. Value =
kept · conveyed · (0.8 + 0.2 · thrift), where kept is 1 unless the secret's value is spoken, conveyed
the share of facts whose value is spoken, thrift 1 at the fewest turns and 0 at the most. The
conversation ends when every fact is out (not before `min_turns`) or at `max_turns`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.errors import CallError, DataError
from soulkit.judge.verdict import has_word, spoken
from soulkit.models.base import Cast
from soulkit.tasks.base import Rollout, Task
from soulkit.types import (
    Completion,
    Episode,
    Example,
    Failure,
    Feedback,
    Line,
    Score,
    Segment,
    Trace,
    Turn,
    Usage,
    unscored,
)

KEEPER, VISITOR = "keeper", "visitor"


class SecretKeeper(Task):
    @property
    def min_turns(self) -> int:
        return int(self.spec.options["min_turns"])

    @property
    def max_turns(self) -> int:
        return int(self.spec.options["max_turns"])

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        items = [fields["secret"], *fields["facts"]]
        if not all(isinstance(i, Mapping) and {"topic", "value"} <= set(i) for i in items):
            raise DataError(
                "A fact or the secret of the row is not of the form {topic, value}.",
                "Facts are scored by whether their value is spoken.",
                'Write {"topic": "job", "value": "baker"}.',
            )
        return fields

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        return {"secret": str(fields["secret"]["topic"])}

    # -- contexts -----------------------------------------------------------------------------

    def _keeper_opening(self, example: Example, feedback: Feedback | None) -> Segment:
        view = example.visible(KEEPER)
        bare = self.prompts.render(KEEPER, feedback=None, **view)
        if feedback is None:
            return Segment("system", bare, bare=bare)
        return Segment("system", self.prompts.render(KEEPER, feedback=feedback.text, **view), bare)

    def _visitor_context(self, example: Example, lines: Sequence[Line]) -> tuple[Segment, ...]:
        brief = self.prompts.render(VISITOR, **example.visible(VISITOR))
        turns = [Segment("assistant" if s.seat == VISITOR else "user", s.text) for s in lines]
        return (Segment("system", brief), Segment("user", "(You meet.)"), *turns)

    def preview(self, example: Example) -> tuple[Segment, ...]:
        greeting = f"Hello, I am {example.fields['visitor']}."
        return (self._keeper_opening(example, None), Segment("user", greeting))

    # -- the road -----------------------------------------------------------------------------

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        partner = cast.player("partner")
        context: list[Segment] = [self._keeper_opening(example, rollout.feedback)]
        turns: list[Turn] = []
        lines: list[Line] = []
        usage, failure, stop = Usage(), None, "max_turns"
        for index in range(self.max_turns):
            try:
                asked = await partner.complete(
                    self._visitor_context(example, lines), rollout.call("partner", example, index)
                )
                usage += asked.usage
                if not asked.text.strip():
                    failure = Failure("partner_error", "the partner said nothing")
                    break
                lines.append(Line(VISITOR, asked.text))
                context.append(Segment("user", asked.text))
                reply = await cast.actor.complete(
                    tuple(context), rollout.call("actor", example, index)
                )
            except CallError as error:
                # The lines played so far stay on record; the episode is unscored, not the actor's 0.
                failure = Failure(error.reason, error.detail)
                break
            usage += reply.usage
            turns.append(Turn(tuple(context), reply))
            said = spoken(reply.text, self.protocol)
            lines.append(Line(KEEPER, said))
            context.append(Segment("assistant", said, token_ids=reply.token_ids))
            if self._done(example, lines, index + 1):
                stop = "all_told"
                break
        return Episode(
            example_id=example.id, task=self.name, kind=rollout.kind, rollout=rollout.index,
            traces=(Trace(KEEPER, tuple(turns)),), transcript=tuple(lines),
            stop="failed" if failure else stop, failure=failure, usage=usage,
        )  # fmt: skip

    def _done(self, example: Example, lines: Sequence[Line], turns: int) -> bool:
        return turns >= self.min_turns and not self._untold(example, lines)

    def _untold(self, example: Example, lines: Sequence[Line]) -> list[str]:
        """Topics of the facts that the keeper has not spoken."""
        said = "\n".join(line.text for line in lines if line.seat == KEEPER)
        return [f["topic"] for f in example.fields["facts"] if not has_word(said, f["value"])]

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        said = [line.text for line in episode.transcript if line.seat == KEEPER]
        facts = example.fields["facts"]
        told = 1 - len(self._untold(example, episode.transcript)) / len(facts)
        kept = float(not has_word("\n".join(said), example.fields["secret"]["value"]))
        span = self.max_turns - self.min_turns
        thrift = min(1.0, (self.max_turns - len(said)) / span)
        value = kept * told * (0.8 + 0.2 * thrift)
        return Score(
            value=value,
            reward=value,
            metrics={"facts_told": told, "secret_kept": kept, "turns": float(len(said))},
            status="ok" if any(text.strip() for text in said) else "empty",
            protocol=self.protocol,
            prompts=self.prompts.hashes(KEEPER, VISITOR),
        )

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """Names topics, never values: the actor knows its own facts."""
        lines = episode.transcript if episode else ()
        untold = self._untold(example, lines)
        said = "\n".join(line.text for line in lines if line.seat == KEEPER)
        secret = example.fields["secret"]
        remarks = []
        if episode and has_word(said, secret["value"]):
            remarks.append(f"You gave away your {secret['topic']}; keep it to yourself.")
        else:
            remarks.append(f"Keep your {secret['topic']} to yourself.")
        if untold:
            remarks.append(f"Tell your {' and your '.join(untold)}.")
        else:
            remarks.append("Tell every other thing you are asked.")
        return " ".join(remarks)

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        view = super().coach_view(example, episode, score)
        return {**view, "untold": self._untold(example, episode.transcript),
                "kept": score.metrics.get("secret_kept")}  # fmt: skip

    # -- gold ---------------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        """A dialogue in which every question is answered and the prying is turned away."""
        context: list[Segment] = [self._keeper_opening(example, feedback)]
        turns, lines = [], []
        for question, answer in self._gold_exchanges(example):
            context.append(Segment("user", question))
            turns.append(Turn(tuple(context), Completion(text=answer)))
            context.append(Segment("assistant", answer))
            lines += [Line(VISITOR, question), Line(KEEPER, answer)]
        return Episode(
            example_id=example.id, task=self.name, kind="gold", transcript=tuple(lines),
            traces=(Trace(KEEPER, tuple(turns)),), stop="all_told",
        )  # fmt: skip

    def _gold_exchanges(self, example: Example) -> list[tuple[str, str]]:
        facts = {f["topic"]: f["value"] for f in example.fields["facts"]}
        exchanges = []
        for index in range(self.min_turns):
            topic = topic_at(index, list(facts), example.fields["secret"]["topic"])
            answer = f"My {topic} is the {facts[topic]}." if topic in facts else DEFLECTION
            exchanges.append((question_at(index, topic, example.fields["visitor"]), answer))
        return exchanges

    def gold_text(self, example: Example) -> str:
        facts = ", ".join(f"{f['topic']}: {f['value']}" for f in example.fields["facts"])
        return f"tell {facts}; keep {example.fields['secret']['topic']}"


DEFLECTION = "That I keep to myself."


def topic_at(turn: int, wanted: Sequence[str], curiosity: str) -> str:
    """What the scripted visitor asks about at its `turn`-th line: it pries second and fifth."""
    if turn in (1, 4):
        return curiosity
    asked = turn - (turn > 1) - (turn > 4)
    return wanted[asked % len(wanted)]


def question_at(turn: int, topic: str, visitor: str) -> str:
    """The scripted visitor's line."""
    greeting = f"Hello, I am {visitor}. " if turn == 0 else ""
    return f"{greeting}What is your {topic}?"
