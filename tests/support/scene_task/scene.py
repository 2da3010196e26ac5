"""Three guests and the room they sit in: one actor plays all guests, rules look at what was said.

Between turns the environment is asked twice: what happens, and who speaks next. Thoughts stand in
brackets; nobody else hears them. A row may have an opening line of Ann's that nobody acts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from soulkit.judge.leaks import LeakView
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import Rollout, Task
from soulkit.tasks.kit.dialogue import (
    Conversation,
    Stage,
    others_view,
    partner_reply,
    partner_words,
    play_out,
)
from soulkit.types import (
    Completion,
    Episode,
    Example,
    Feedback,
    Line,
    Score,
    Segment,
    unscored,
)

START = "(Everybody sits down.)"
_THOUGHT = re.compile(r"\[[^\]]*\]?")


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    return [_row(i, seed) for i in range(n)]


def _row(i: int, seed: int) -> dict[str, Any]:
    secrets = {f"{s}_secret": f"the {s} key {seed}{i} is hidden" for s in ("ann", "bo", "cy")}
    opening = {"opening": "I am glad that you came."} if i % 2 else {}
    return {"place": f"table {i}", **secrets, **opening}


def aloud(text: str) -> str:
    """What is heard of a reply."""
    return _THOUGHT.sub("", text).strip()


class Dinner(Task):
    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        place, secret = example.fields["place"], example.visible(seat)[f"{seat}_secret"]
        bare = self.prompts.render("guest", seat=seat, place=place, secret=secret, feedback=None)
        if feedback is None:
            return Segment("system", bare, bare=bare)
        full = self.prompts.render(
            "guest", seat=seat, place=place, secret=secret, feedback=feedback.text
        )
        return Segment("system", full, bare=bare)

    def stage(self, example: Example, feedback: Feedback | None) -> Stage:
        """Everybody at the table, before the first turn that is acted."""
        seats = self.acted_seats(example)
        stage = Stage({s: Conversation(s, [self.slot(example, s, feedback)]) for s in seats})
        stage.notify(START)
        if example.fields.get("opening"):
            stage.record(Line("ann", example.fields["opening"]))
        return stage

    def previews(self, example: Example) -> Mapping[str, tuple[Segment, ...]]:
        tables = self.stage(example, None).tables
        return {seat: tuple(table.context) for seat, table in tables.items()}

    def public_words(self, line: Line) -> str:
        return aloud(line.text)

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        stage = self.stage(example, rollout.feedback)
        return await play_out(
            stage, example, rollout, lambda: self._dine(example, cast, rollout, stage)
        )

    async def _dine(self, example: Example, cast: Cast, rollout: Rollout, stage: Stage) -> str:
        speaker = "bo"
        for turn in range(int(self.spec.options["max_turns"])):
            reply = await stage.speak(
                speaker, cast.actor, rollout.call("actor", example, turn, seat=speaker)
            )
            self._tell(stage, speaker, reply)
            event = await self._room(example, cast, rollout, stage, turn, "room")
            stage.record(Line("room", event))
            speaker = await self._room(example, cast, rollout, stage, turn, "next")
        return "max_turns"

    def _tell(self, stage: Stage, speaker: str, reply: Completion) -> None:
        words = aloud(reply.text)
        shown = f"{speaker}: {words}" if words else ""
        stage.record(Line(speaker, reply.text), memory=reply.text, shown=shown)

    async def _room(
        self, example: Example, cast: Cast, rollout: Rollout, stage: Stage, turn: int, purpose: str
    ) -> str:
        """What the environment says for one of its purposes."""
        guests = self.acted_seats(example)
        brief = self.prompts.render(
            purpose, place=example.fields["place"], guests=", ".join(guests)
        )
        lines = [Line(line.seat, aloud(line.text) or "(silence)") for line in stage.lines]
        call = rollout.call("environment", example, turn, seat="room", purpose=purpose)

        def read(text: str) -> str | None:
            words = partner_words(text)
            return words if purpose == "room" or words in guests else None

        context = others_view("room", [Segment("system", brief)], lines)
        answer, usage = await partner_reply(
            cast.player("environment"), context, call, read, "the room"
        )
        stage.usage += usage
        return answer

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """The share of turns in which something was said aloud."""
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        turns = [turn for trace in episode.traces for turn in trace.turns]
        value = sum(bool(aloud(t.completion.text)) for t in turns) / len(turns)
        return Score(value=value, reward=value, protocol=self.protocol)

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str:
        return "Speak aloud, and ask the others something."

    def leak_view(self, example: Example) -> LeakView:
        seats = self.acted_seats(example)
        return LeakView(
            private_by_seat={s: (example.fields[f"{s}_secret"],) for s in seats},
            public=example.fields["place"],
        )

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        stage = self.stage(example, feedback)
        for speaker, words in (
            ("bo", "Good day."),
            ("ann", "[So late.] Sit down."),
            ("bo", "Yes."),
        ):
            reply = Completion(text=words)
            stage.take(speaker, reply)
            self._tell(stage, speaker, reply)
        return stage.episode(example, Rollout(kind="gold"), "over")
