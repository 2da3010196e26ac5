"""Three people look for a cat. One actor plays all of them; a judge reads what they say aloud.

Each person has a separate conversation and a thought that the prompts of the others cannot contain.
The stage delivers every spoken line to all of them. After each round, the environment (a model, or
the script in partner.py) says what happens. The judge answers two questions about the scene,
`voices` and `knowing`; the value is the mean of their points. The control `people` asks the same
questions about the scene that people wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from soulkit.errors import DataError
from soulkit.judge.leaks import LeakView
from soulkit.judge.panel import ask_several, pooled
from soulkit.judge.structured import JudgeQuestion, VerdictShape, question
from soulkit.judge.verdict import spoken, transcript
from soulkit.models.base import Cast
from soulkit.tasks import (
    Control,
    Conversation,
    Rollout,
    Stage,
    Task,
    mean_of,
    others_view,
    partner_reply,
    partner_words,
    play_out,
)
from soulkit.types import (
    BatchMetric,
    Completion,
    ControlRecord,
    Episode,
    Example,
    Feedback,
    Line,
    Record,
    Role,
    Score,
    Segment,
    unscored,
)

STREET = "street"
START = "(You all meet.)"
ASKED = ("voices", "knowing")
RUBRIC = ("reasoning", "three different people", "read each other's minds")
"""Terms of the judge's questions: feedback that uses them is about the judge, not the scene."""
_THOUGHT = re.compile(r"\[[^\]]*\]?")


class Points(VerdictShape):
    """What the judge answers; a reply of any other form is asked for again."""

    reasoning: str
    score: int = Field(ge=0, le=10)


class MyScene(Task):
    controls = (Control("people", "row", {"judge": len(ASKED)}),)

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        seats = {line.partition(":")[0] for line in fields["written"]}
        if not seats or not seats <= set(self.spec.seats):
            raise DataError(
                "The row's 'written' is not a scene of these seats.",
                f"It has lines of: {', '.join(sorted(seats)) or 'none'}.",
                f"Begin each line with one of {', '.join(self.spec.seats)} and a colon.",
            )
        return fields

    def calls(self, example: Example) -> dict[Role, int]:
        rounds = int(self.spec.options["rounds"])
        lines = rounds * len(self.acted_seats(example))
        return {"actor": lines, "environment": rounds, "judge": len(ASKED)}

    # -- contexts -----------------------------------------------------------------------------

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        """A person's brief with feedback; `bare` is the same brief without it."""
        view = example.visible(seat)
        facts = {"seat": seat, "cat": view["cat"], "place": view["place"]}
        facts["thought"] = view[f"{seat}_thought"]  # KeyError for the thought of another seat
        bare = self.prompts.render("person", feedback=None, **facts)
        if feedback is None:
            return Segment("system", bare, bare=bare)
        full = self.prompts.render("person", feedback=feedback.text, **facts)
        return Segment("system", full, bare=bare)

    def stage(self, example: Example, feedback: Feedback | None) -> Stage:
        """The conversations of all three before the first line."""
        seats = self.acted_seats(example)
        stage = Stage({s: Conversation(s, [self.slot(example, s, feedback)]) for s in seats})
        stage.notify(START)
        return stage

    def previews(self, example: Example) -> Mapping[str, tuple[Segment, ...]]:
        tables = self.stage(example, None).tables
        return {seat: tuple(table.context) for seat, table in tables.items()}

    # -- play ---------------------------------------------------------------------------------

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        stage = self.stage(example, rollout.feedback)
        return await play_out(
            stage, example, rollout, lambda: self._act(example, cast, rollout, stage)
        )

    async def _act(self, example: Example, cast: Cast, rollout: Rollout, stage: Stage) -> str:
        for turn in range(int(self.spec.options["rounds"])):
            for seat in stage.tables:
                call = rollout.call("actor", example, turn, seat=seat)
                reply = await stage.speak(seat, cast.actor, call)
                self._tell(stage, seat, reply.text)
            self._tell(stage, STREET, await self._event(example, cast, rollout, stage, turn))
        return "max_rounds"

    def _tell(self, stage: Stage, seat: str, text: str) -> None:
        """Record a line: the others get only the spoken part, the author remembers all of it."""
        words = _THOUGHT.sub("", spoken(text, self.protocol)).strip()
        stage.record(Line(seat, words), memory=text, shown=words and f"{seat}: {words}")

    async def _event(
        self, example: Example, cast: Cast, rollout: Rollout, stage: Stage, turn: int
    ) -> str:
        """The next event. PartnerError (the episode is unscored) if two replies are unusable."""
        brief = self.prompts.render(STREET, **example.visible(STREET))
        lines = [Line(line.seat, f"{line.seat}: {line.text}") for line in stage.lines]
        context = others_view(STREET, [Segment("system", brief)], lines)
        call = rollout.call("environment", example, turn, seat=STREET, purpose="event")
        player = cast.player("environment")
        event, usage = await partner_reply(player, context, call, partner_words, "the street")
        stage.usage += usage
        return event

    # -- score --------------------------------------------------------------------------------

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        seats = self.acted_seats(example)
        if not any(line.seat in seats and line.text for line in episode.transcript):
            return Score(value=0.0, reward=0.0, status="empty", protocol=self.protocol)
        opinions = await ask_several(cast, self._questions(example, episode), episode)
        points = {
            name: pooled(several, lambda answer: answer.score / 10, cast.panel.combine)
            for name, several in opinions.items()
        }
        value = sum(points.values()) / len(points)
        return Score(
            value=value, reward=value, metrics=points, protocol=self.protocol,
            verdicts=tuple(o.verdict() for several in opinions.values() for o in several),
            prompts=self.prompts.hashes("person", STREET, *ASKED),
        )  # fmt: skip

    def _questions(self, example: Example, episode: Episode) -> list[JudgeQuestion[Points]]:
        view = example.visible("judge")
        view["thoughts"] = {s: view[f"{s}_thought"] for s in self.acted_seats(example)}
        view["transcript"] = transcript(line for line in episode.transcript if line.text)
        return [question(name, self.prompts.render(name, **view), Points) for name in ASKED]

    # -- controls -----------------------------------------------------------------------------

    async def control(
        self, name: str, example: Example, episode: Episode | None, cast: Cast
    ) -> Score:
        """The judge's score for the scene that people wrote."""
        return await self.score(example, episode or self.gold(example), cast)

    def calibrate(
        self, records: Sequence[Record], controls: Sequence[ControlRecord]
    ) -> dict[str, BatchMetric]:
        """The actor's mean score divided by that of the written scenes."""
        plain = mean_of([record.score.value for record in records])
        people = mean_of([control.score.value for control in controls])
        share = plain.value / people.value if plain.value is not None and people.value else None
        return {"share_of_people": BatchMetric(share, plain.n, plain.n_scored)}

    # -- feedback -----------------------------------------------------------------------------

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str:
        """Advice on how to speak; it reveals no thought."""
        lines = [line for line in episode.transcript if line.seat != STREET] if episode else []
        if any(not line.text for line in lines):
            return "Somebody said nothing aloud: every line needs words outside the brackets."
        return "Give each of you a wish of their own, and let it show in how they speak."

    def leak_view(self, example: Example) -> LeakView:
        """All three read the same feedback, so it must contain none of their thoughts."""
        seats, fields = self.acted_seats(example), example.fields
        written = "\n".join(line.partition(": ")[2] for line in fields["written"])
        return LeakView(
            private_by_seat={seat: (fields[f"{seat}_thought"],) for seat in seats},
            rubric=RUBRIC, reference=written, public=f"{fields['cat']} {fields['place']}",
        )  # fmt: skip

    # -- self-checks --------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        """The scene that people wrote."""
        lines = (line.partition(": ") for line in example.fields["written"])
        return self._scripted(example, [(seat, text) for seat, _, text in lines], feedback)

    def wrong(self, example: Example) -> Episode:
        return self.canary(example, "I am here to help. What can I do for you?")

    def canary(self, example: Example, text: str) -> Episode:
        """Every line of all three is this text."""
        return self._scripted(example, [(seat, text) for seat in self.acted_seats(example)])

    def verdict(self, form: str, perfect: bool) -> str:
        """The judge's scripted answer on `gold` (`perfect`) or on `wrong`, for self-checks."""
        return json.dumps({"reasoning": "as the script has it", "score": 10 if perfect else 1})

    def _scripted(
        self, example: Example, lines: Iterable[tuple[str, str]], feedback: Feedback | None = None
    ) -> Episode:
        stage = self.stage(example, feedback)
        for seat, text in lines:
            if seat in stage.tables:
                stage.take(seat, Completion(text=text))
            self._tell(stage, seat, text)
        return stage.episode(example, Rollout(kind="gold"), "max_rounds")
