"""A Sotopia scene under way: two sides in strict alternation, agent1 first.

The actor has a `Conversation`; the partner is asked afresh each turn with the scene as its own side
knows it, its earlier actions in the form that is asked for. Both read the same prompt template,
each with its own goal and profile.

20 turns of both together. Whoever leaves ends the scene, and so do more than two turns in a row, of
all or of one side, in which nothing was done; a partner that says nothing usable twice, or would
leave before the actor's first turn, breaks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from soulkit.models.base import Cast, Player
from soulkit.tasks.base import READABLE, Rollout
from soulkit.tasks.dialogue import Conversation, others_view, others_words
from soulkit.tasks.partners import partner_reply
from soulkit.tasks.sotopia.actions import (
    LEAVE,
    MAX_CHARS,
    NONE,
    Action,
    read_action,
)
from soulkit.types import Example, Line, Segment

if TYPE_CHECKING:
    from soulkit.tasks.sotopia.task import Sotopia

SEATS = ("agent1", "agent2")
START = "(The scene begins.)"


@dataclass
class Scene:
    """A scene under way: the actor's conversation, and what everybody did."""

    task: Sotopia
    example: Example
    cast: Cast
    rollout: Rollout
    talk: Conversation
    done: list[tuple[str, Action]] = field(default_factory=list)
    silence: str = "empty"
    """Why the scene ended where a turn was none."""

    async def play(self) -> str:
        """Turn by turn to the end, whose reason is returned."""
        for index in range(self.task.max_turns):
            seat = SEATS[index % 2]
            acting = self._act if seat == self.talk.seat else self._answer
            action = await acting(seat, index)
            if action is None:
                return self.silence
            self.done.append((seat, action))
            if action.kind == LEAVE and index >= self.task.leave_from:
                return "left"
            if self._stale(seat):
                return "stale"
        return "max_turns"

    def actor(self) -> Player:
        """Who speaks for the actor's seat, as this turn is sampled."""
        return self.cast.actor

    async def _act(self, seat: str, index: int) -> Action | None:
        """The actor's turn; None when it fell silent and that ends the scene."""
        call = self.rollout.call("actor", self.example, index)
        context = tuple(self.talk.context)
        reply = await self.talk.speak(self.actor(), call)
        action = self._read(seat, reply.text, context)
        if action is None:
            return None
        # A reply that never stopped would stand in every later context; ids are kept as they are.
        short = bool(reply.token_ids) or len(reply.text) <= MAX_CHARS
        self._note_cut(seat, action)
        line = self.task.line(self.example, seat, action)
        self.talk.record(line, memory=reply.text if short else action.json())
        return action

    async def _answer(self, seat: str, index: int) -> Action | None:
        """The partner's turn: a reply that says nothing is asked for once more."""
        partner, context = self.cast.player("partner"), self._partner_context(seat)

        def read(reply: str) -> Action | None:
            action = self._read(seat, reply, context)
            return action if action is not None and self._usable(action) else None

        def trouble(reply: str) -> str:
            return self._trouble(self._read(seat, reply, context))

        call = self.rollout.call("partner", self.example, index)
        action, usage = await partner_reply(
            partner, context, call, read, "the partner", trouble=trouble
        )
        self.talk.usage += usage
        return self._hear(seat, action)

    def _hear(self, seat: str, action: Action) -> Action:
        """What the partner did, brought into the actor's conversation."""
        self._note_cut(seat, action)
        line = self.task.line(self.example, seat, action)
        self.talk.hear(line, self.task.public_line(self.example, seat, action))
        return action

    def _usable(self, action: Action) -> bool:
        """A partner that leaves before the actor's first turn leaves nothing to rate."""
        at_once = action.kind == LEAVE and not self.talk.turns
        return action.status in READABLE and not at_once

    def _trouble(self, action: Action | None) -> str:
        if action is not None and action.kind == LEAVE:
            return "left before the actor's first turn"
        return "said nothing usable"

    def _read(self, seat: str, reply: str, context: Sequence[Segment]) -> Action | None:
        """What was done; None where falling silent ends the scene."""
        name = self.task.names(self.example)[seat]
        return read_action(reply, self.task.protocol, name, others_words(context))

    def _partner_context(self, seat: str) -> tuple[Segment, ...]:
        """The partner's own actions in the form that is asked for, the actor's as heard."""
        opening = (self.task.slot(self.example, seat, None), Segment("user", START))
        lines = [
            Line(
                who,
                action.json() if who == seat else self.task.public_line(self.example, who, action),
            )
            for who, action in self.done
        ]
        return others_view(seat, opening, lines)

    def _note_cut(self, seat: str, action: Action) -> None:
        """Lines that were cut before anybody heard them, by seat."""
        if action.cut:
            counts = self.talk.notes.setdefault("cut_lines", {})
            counts[seat] = counts.get(seat, 0) + 1

    def _stale(self, seat: str) -> bool:
        """Whether more than `stale_turns` turns in a row, of all or of this seat, did nothing."""
        everybody = [action.kind for _, action in self.done]
        seat_kinds = [action.kind for who, action in self.done if who == seat]
        limit = self.task.stale_turns + 1
        return any(kinds[-limit:] == [NONE] * limit for kinds in (everybody, seat_kinds))
