"""One side of a conversation under way: what a seat sees, what it emitted, what was heard.

A dialogue task seats the actor at a `Table`, hears the others into it and lets the actor speak. The
context is exactly what the sampler gets: the actor's own turns carry the ids that it emitted, so
nothing is re-tokenised, and the others' words stand in user messages that never train.

    table = Table("keeper", [opening])
    table.hear(Line("visitor", "Hello"))
    reply = await table.speak(cast.actor, rollout.call("actor", example, turn))
    table.said(Line("keeper", "Good evening."), keep=reply.text)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soulkit.errors import CallError
from soulkit.models.base import Player
from soulkit.tasks.base import Rollout, dropped_note
from soulkit.types import (
    Call,
    Completion,
    Episode,
    Example,
    Failure,
    Line,
    Segment,
    Trace,
    Turn,
    Usage,
)


@dataclass
class Table:
    """A conversation from the view of one acted seat.

    `merge` joins user messages that follow each other (several chat templates refuse them apart).
    """

    seat: str
    context: list[Segment]
    merge: bool = True
    turns: list[Turn] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    notes: dict[str, Any] = field(default_factory=dict)

    def hear(self, line: Line, shown: str | None = None) -> None:
        """Another seat's line; `shown` is what this seat sees of it (None: its text)."""
        self.lines.append(line)
        self.tell(line.text if shown is None else shown)

    def tell(self, text: str) -> None:
        """A user message that is nobody's line: a start mark, a reminder."""
        last = self.context[-1] if self.context else None
        if self.merge and last is not None and last.role == "user" and last.bare is None:
            self.context[-1] = Segment("user", f"{last.text}\n\n{text}")
        else:
            self.context.append(Segment("user", text))

    async def speak(self, actor: Player, call: Call) -> Completion:
        """The actor's next completion, kept as a turn; follow with `said` or `told`."""
        context = tuple(self.context)
        reply = await actor.complete(context, call)
        self.usage += reply.usage
        self.turns.append(Turn(context, reply))
        return reply

    def said(self, line: Line, keep: str | None = None) -> None:
        """What the last completion came to: its line, and the text that its author sees later."""
        self.lines.append(line)
        reply = self.turns[-1].completion
        text = line.text if keep is None else keep
        self.context.append(Segment("assistant", text, token_ids=reply.token_ids))

    def episode(
        self, example: Example, rollout: Rollout, stop: str, failure: Failure | None = None
    ) -> Episode:
        """Everything that happened so far, as a record."""
        return Episode(
            example_id=example.id, task=example.task, kind=rollout.kind, rollout=rollout.index,
            traces=(Trace(self.seat, tuple(self.turns)),),
            transcript=tuple(self.lines), stop=stop, failure=failure, usage=self.usage,
            notes={**self.notes, **dropped_note(turn.completion for turn in self.turns)},
        )  # fmt: skip


async def play_out(
    table: Table, example: Example, rollout: Rollout, converse: Callable[[], Awaitable[str]]
) -> Episode:
    """The episode of `converse`, which returns why it stopped.

    A CallError leaves the lines so far on record and the episode unscored: it is not the actor's 0.
    """
    try:
        stop = await converse()
    except CallError as error:
        return table.episode(example, rollout, "failed", Failure(error.reason, error.detail))
    return table.episode(example, rollout, stop)


def others_view(
    seat: str, opening: Sequence[Segment], lines: Sequence[Line]
) -> tuple[Segment, ...]:
    """The context of a partner: its own lines as the assistant's, everybody else's as the user's.

    Lines of the same side that follow each other are joined by a blank line.
    """
    merged: list[Segment] = list(opening)
    for line in lines:
        role = "assistant" if line.seat == seat else "user"
        if merged and merged[-1].role == role:
            merged[-1] = Segment(merged[-1].role, f"{merged[-1].text}\n\n{line.text}")
        else:
            merged.append(Segment("assistant" if role == "assistant" else "user", line.text))
    return tuple(merged)


def others_words(context: Sequence[Segment]) -> str:
    """What a seat was told so far, by whomever."""
    return "\n".join(segment.text for segment in context if segment.role == "user")


def cut_note(cuts: Mapping[str, int]) -> dict[str, Any]:
    """The note on words that budgets cut, if any."""
    return {"cut_words": dict(cuts)} if cuts else {}
