"""A scene with several acted seats: each has a conversation of its own, all share one transcript.

What a seat says is heard at every other table, as much of it as everybody may hear; what its author
remembers stands at its own table alone, thoughts included. A seat without a table (an environment,
a partner that is asked afresh each turn) is heard like any other.

    stage = Stage({seat: Conversation(seat, [opening(seat)]) for seat in seats})
    reply = await stage.speak("ann", cast.actor, rollout.call("actor", example, turn, seat="ann"))
    stage.record(Line("ann", text), memory=reply.text, shown=without_thoughts(text))
    stage.record(Line("environment", "A door slams."))
    return stage.episode(example, rollout, "max_turns")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from soulkit.errors import ConfigError, did_you_mean
from soulkit.models.base import Player
from soulkit.tasks.base import Rollout, dropped_note
from soulkit.tasks.dialogue import Conversation
from soulkit.types import (
    Call,
    Completion,
    Episode,
    Example,
    Failure,
    Line,
    Segment,
    Trace,
    Usage,
)


@dataclass
class Stage:
    """A scene under way: the acted seats' conversations, and what everybody heard.

    The tables are taken as they are, openings and start marks included; their order is that of the
    traces. A table's own lines and notes stay empty: the stage keeps them for all.
    """

    tables: Mapping[str, Conversation]
    lines: list[Line] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    notes: dict[str, Any] = field(default_factory=dict)
    _unrecorded: set[str] = field(default_factory=set, init=False, repr=False)
    """Seats whose last completion has come to no line yet."""

    def table(self, seat: str) -> Conversation:
        """The conversation of an acted seat; ConfigError where nobody sits there."""
        if seat not in self.tables:
            raise ConfigError(
                f"Nobody sits at '{seat}' on this stage.",
                f"Its seats are {', '.join(self.tables)}; others speak through record() alone.",
                f"{did_you_mean(seat, self.tables)} Mend it where the task calls speak or take.",
            )
        return self.tables[seat]

    async def speak(self, seat: str, player: Player, call: Call) -> Completion:
        """The next completion at `seat`'s table, kept as its turn; follow with `record`.

        A call that names no seat is named here: two seats of one turn are two calls.
        """
        table = self.table(seat)
        reply = await table.speak(player, replace(call, seat=call.seat or seat))
        self.usage += reply.usage
        self._unrecorded.add(seat)
        return reply

    def take(self, seat: str, reply: Completion) -> None:
        """Keep a completion as `seat`'s turn, a scripted one for instance; then `record`."""
        self.table(seat).take(reply)
        self._unrecorded.add(seat)

    def record(self, line: Line, memory: str | None = None, shown: str | None = None) -> None:
        """One line of the transcript, brought to every table.

        Its author's own table has `memory` (None: the line's text) as its assistant's words; all
        others hear `shown` (None: the line's text; empty: nothing). Of an author that did not speak
        (a line that was there before the play) the words carry no ids, and never train.
        """
        self.lines.append(line)
        self._remember(line.seat, line.text if memory is None else memory)
        public = line.text if shown is None else shown
        for seat, table in self.tables.items():
            if seat != line.seat and public:
                table.notify(public)

    def _remember(self, seat: str, text: str) -> None:
        table = self.tables.get(seat)
        if table is None:
            return
        if seat in self._unrecorded:
            self._unrecorded.remove(seat)
            table.remember(text)
        else:
            table.context.append(Segment("assistant", text))

    def notify(self, text: str) -> None:
        """A user message to all tables that is nobody's line: a start mark, a reminder."""
        for table in self.tables.values():
            table.notify(text)

    def episode(
        self, example: Example, rollout: Rollout, stop: str, failure: Failure | None = None
    ) -> Episode:
        """Everything that happened so far, as a record: a trace for each seat that spoke."""
        traces = [Trace(seat, tuple(table.turns)) for seat, table in self.tables.items()]
        traces = [trace for trace in traces if trace.turns]
        replies = (turn.completion for trace in traces for turn in trace.turns)
        return Episode(
            example_id=example.id, task=example.task, kind=rollout.kind, rollout=rollout.index,
            traces=tuple(traces), transcript=tuple(self.lines), stop=stop, failure=failure,
            usage=self.usage, notes={**self.notes, **dropped_note(replies)},
        )  # fmt: skip
