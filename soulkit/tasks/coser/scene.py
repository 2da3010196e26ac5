"""A scene of a book under way: whoever is named speaks, everybody hears it, somebody is named next.

Each character has a table of its own with its profile, its thoughts and its memory; what it says
reaches the others without its thoughts. The environment is asked afresh whenever its turn comes,
and so is the predictor of the next speaker after every message; neither knows anybody's thoughts.

A message is at most `heard_words` long to other ears, so that k contexts of 20 rounds stay within
bounds; judges read up to `line_words` of it. What is cut is counted by speaker.

    the first message       the first speaker of the row's list, or the recorded messages that the
                            row continues from, which nobody trains on
    then, round by round    until the predictor ends it, a character says nothing, or rounds are up
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from soulkit.judge.transcripts import transcript
from soulkit.judge.verdict import spoken
from soulkit.models.base import Cast, Player
from soulkit.tasks.base import Rollout
from soulkit.tasks.budgets import first_words
from soulkit.tasks.coser.circumstance import ENVIRONMENT, dialogue, opener, speakers
from soulkit.tasks.coser.speakers import END, UNCLEAR, Candidates, candidates
from soulkit.tasks.coser.speech import audible, words_out_loud
from soulkit.tasks.dialogue import others_view
from soulkit.tasks.partners import partner_reply
from soulkit.tasks.stage import Stage
from soulkit.types import Completion, Example, Line, Segment

if TYPE_CHECKING:
    from soulkit.tasks.coser.task import Coser

START = "(The scene begins.)"
PREDICTIONS = 2
"""So often the predictor is asked for a usable name."""


@dataclass
class SceneBook:
    """What was said in a scene so far, and how it reaches whom."""

    task: Coser
    example: Example
    stage: Stage

    def replay(self) -> tuple[int, str]:
        """(the first round that is played, who speaks in it), once the recorded messages that the
        row continues from stand at every table."""
        fields = self.example.fields
        lines, count = dialogue(fields), int(fields.get("continue_from") or 0)
        for line in lines[:count]:
            self.record(line.seat, self.audible_text(line.seat, line.text), line.text)
        if not count:
            return 0, opener(fields)
        self.stage.notes["replayed"] = count
        return count, lines[count].seat

    def audible_text(self, seat: str, text: str) -> str:
        """What everybody hears of a message of `seat`."""
        if seat == ENVIRONMENT:
            return words_out_loud(text, seat)
        return audible(text, seat, self.task.protocol)

    def public_text(self, line: Line) -> str:
        """A line as the others' tables have it; empty where nothing was to be heard."""
        return f"{line.seat}: {self._short(line.text)}" if line.text else ""

    def record(self, seat: str, text: str, memory: str | None = None) -> None:
        """A message, brought to every table."""
        line = Line(seat, first_words(text, self.task.line_words))
        if len(text.split()) > self.task.heard_words:
            counts = self.stage.notes.setdefault("cut_lines", {})
            counts[seat] = counts.get(seat, 0) + 1
        self.stage.record(line, memory=memory, shown=self.public_text(line))

    def _short(self, text: str) -> str:
        return first_words(text, self.task.heard_words)


@dataclass
class BookScene(SceneBook):
    """A scene under way."""

    cast: Cast
    rollout: Rollout
    silence: str = field(default="empty", init=False)
    """Why the scene ends where a turn was none."""

    async def play(self) -> str:
        """Round by round to the end, whose reason is returned."""
        first, speaker = self.replay()
        rounds = self.task.rounds(self.rollout.kind)
        for index in range(first, rounds):
            if not await self._turn(speaker, index):
                return self.silence
            self.stage.notes["rounds"] = index + 1
            if index + 1 == rounds:
                break
            following = await self.following(speaker, index)
            if following is None:
                return "silence"
            if following == END:
                return "ended"
            speaker = following
        return "max_rounds"

    # -- turns ------------------------------------------------------------------------------------

    async def _turn(self, speaker: str, index: int) -> bool:
        """Whether anything came of the turn."""
        if speaker == ENVIRONMENT:
            return await self.surroundings(index)
        return await self.character(speaker, index)

    async def character(self, seat: str, index: int) -> bool:
        """The actor's turn as one of the characters; one without a word ends the scene."""
        call = self.rollout.call("actor", self.example, index, seat=seat)
        reply = await self.stage.speak(seat, self.actor(seat), call)
        if not self.words_left(reply):
            return False
        self.record(seat, self.audible_text(seat, reply.text), self._memory(reply))
        return True

    def actor(self, seat: str) -> Player:
        """Who speaks for a character, as this turn is sampled."""
        return self.cast.actor

    def words_left(self, reply: Completion) -> str:
        """What a reply says once thinking is taken out, thoughts of the character included."""
        return spoken(reply.text, "paper")

    def _memory(self, reply: Completion) -> str:
        """What the author sees of its reply later: ids as they are, text without end cut."""
        return reply.text if reply.token_ids else first_words(reply.text, self.task.line_words)

    async def surroundings(self, index: int) -> bool:
        """What happens around the characters; PartnerError when nothing comes twice."""
        call = self.rollout.call("environment", self.example, index, purpose="environment")
        text, usage = await partner_reply(
            self.cast.player("environment"), self.surroundings_context(), call, self._happening,
            "the environment",
        )  # fmt: skip
        self.stage.usage += usage
        self.record(ENVIRONMENT, text)
        return True

    def _happening(self, reply: str) -> str | None:
        return words_out_loud(reply, ENVIRONMENT) or None

    def surroundings_context(self) -> tuple[Segment, ...]:
        """The scene from the side of the environment."""
        prompt = self.task.surroundings_prompt(self.example)
        lines = [
            line if line.seat == ENVIRONMENT else Line(line.seat, self.public_text(line))
            for line in self.stage.lines if line.text
        ]  # fmt: skip
        return others_view(ENVIRONMENT, [Segment("system", prompt), Segment("user", START)], lines)

    # -- who is next ------------------------------------------------------------------------------

    def candidates(self, current: str, index: int) -> Candidates:
        fields = self.example.fields
        preferred = [*fields["major_characters"], ENVIRONMENT]
        return candidates(speakers(fields), preferred, current, index)

    async def following(self, current: str, index: int) -> str | None:
        """Who speaks next, END where nobody does; None where silence ends the scene."""
        options = self.candidates(current, index)
        answer = await self._predicted(options, index)
        return self.settled(answer, options, index)

    def settled(self, answer: str | None, options: Candidates, index: int) -> str:
        """The predictor's answer, or a draw in its place, which is counted unless it was wished."""
        counts = self.stage.notes.setdefault("next_speaker", {"asked": 0, "fallback": 0})
        counts["asked"] += 1
        if answer in (*options.names, *((END,) if options.may_end else ())):
            return str(answer)
        counts["fallback"] += answer != UNCLEAR
        return options.draw(self.rollout.rng(self.example, f"next_speaker/{index}"))

    async def _predicted(self, options: Candidates, index: int) -> str | None:
        """What the predictor answers; None when nothing of it could be used."""
        prompt = self.task.predictor_prompt(
            self.example, self.heard_so_far(), speakers(self.example.fields), options.answers
        )
        player = self.cast.player("environment").with_form(options.form())
        for sample in range(PREDICTIONS):
            call = self.rollout.call(
                "environment", self.example, index, sample, purpose="next_speaker"
            )
            reply = await player.complete((Segment("user", prompt),), call)
            self.stage.usage += reply.usage
            answer = options.read(reply.text, prompt)
            if answer is not None:
                return answer
        return None

    def heard_so_far(self) -> str:
        """The fenced transcript of the scene, each message as the others heard it."""
        lines = [Line(line.seat, self._short(line.text)) for line in self.stage.lines if line.text]
        return transcript(lines)
