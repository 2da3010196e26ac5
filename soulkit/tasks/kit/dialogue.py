"""Conversations of one acted seat, of several (`Stage`), and `DialogueTask` for two seats.

    talk = Conversation("keeper", [opening])
    talk.hear(Line("visitor", "Hello"))
    reply = await talk.speak(cast.actor, rollout.call("actor", example, turn))
    talk.record(Line("keeper", "Good evening."), memory=reply.text)

The context is exactly what the sampler receives: the actor's own turns keep their token ids. On a
`Stage` each acted seat has its own conversation; all share one transcript, and thoughts stay
private. `partner_reply` asks a partner again if its reply is unusable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from soulkit.errors import CallError, ConfigError, PartnerError, did_you_mean
from soulkit.judge.verdict import spoken
from soulkit.models.api.wire import estimated_tokens, to_messages
from soulkit.models.base import Cast, Player
from soulkit.tasks.kit.base import Rollout, Task, dropped_note
from soulkit.types import (
    Call,
    Completion,
    Episode,
    Example,
    Failure,
    Feedback,
    Line,
    Role,
    Segment,
    Trace,
    Turn,
    Usage,
)

T = TypeVar("T")
_TIMES = {1: "", 2: ", twice"}


async def partner_reply(
    player: Player,
    context: Sequence[Segment],
    call: Call,
    read: Callable[[str], T | None],
    who: str,
    attempts: int = 2,
    *,
    trouble: Callable[[str], str] = lambda reply: "said nothing usable",
) -> tuple[T, Usage]:
    """The result of `read` on the reply's text, and the usage of all attempts together.

    `read` returns None for an unusable reply. `who` names the speaker in the error ("the partner"),
    `trouble` describes what is wrong with its last reply.

    Raises:
        PartnerError: no attempt gave a usable reply. It carries the usage of all attempts.
    """
    usage, calls = Usage(), [replace(call, sample=call.sample + i) for i in range(attempts)]
    try:
        for once in calls:
            reply = await player.complete(context, once)
            usage += reply.usage
            result = read(reply.text)
            if result is not None:
                return result, usage
        for once in calls:
            player.set_aside(context, once)
        times = _TIMES.get(attempts, f", {attempts} times")
        raise PartnerError(f"{who} {trouble(reply.text)}{times} ({reply.stop_reason})")
    except CallError as error:
        error.usage += usage
        raise


@dataclass
class Conversation:
    """A conversation as one acted seat sees it.

    `merge` joins consecutive user messages (several chat templates reject them).
    """

    seat: str
    context: list[Segment]
    merge: bool = True
    turns: list[Turn] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    notes: dict[str, Any] = field(default_factory=dict)

    def hear(self, line: Line, shown: str | None = None) -> None:
        """Add another seat's line; `shown` is what this seat sees of it (None: its text)."""
        self.lines.append(line)
        self.notify(line.text if shown is None else shown)

    def notify(self, text: str) -> None:
        """Add a user message that is not a seat's line, such as a start mark or a reminder."""
        last = self.context[-1] if self.context else None
        if self.merge and last is not None and last.role == "user" and last.bare is None:
            self.context[-1] = Segment("user", f"{last.text}\n\n{text}")
        else:
            self.context.append(Segment("user", text))

    async def speak(self, actor: Player, call: Call) -> Completion:
        """The actor's next completion, stored as a turn; call `record` afterwards."""
        reply = await actor.complete(tuple(self.context), call)
        self.usage += reply.usage
        self.take(reply)
        return reply

    def take(self, reply: Completion) -> None:
        """Store a given completion (a scripted one, say) as a turn; call `record` afterwards."""
        self.turns.append(Turn(tuple(self.context), reply))

    def record(self, line: Line, memory: str | None = None) -> None:
        """Add the line of the last completion; `memory` is how its author sees it later."""
        self.lines.append(line)
        self.remember(line.text if memory is None else memory)

    def remember(self, text: str) -> None:
        """From now on this seat sees its last completion as `text`."""
        ids = self.turns[-1].completion.token_ids
        self.context.append(Segment("assistant", text, token_ids=ids))

    def episode(
        self, example: Example, rollout: Rollout, stop: str, failure: Failure | None = None
    ) -> Episode:
        """Everything so far, as an episode."""
        return Episode(
            example_id=example.id, task=example.task, kind=rollout.kind, rollout=rollout.index,
            traces=(Trace(self.seat, tuple(self.turns)),),
            transcript=tuple(self.lines), stop=stop, failure=failure, usage=self.usage,
            notes={**self.notes, **dropped_note(turn.completion for turn in self.turns)},
        )  # fmt: skip


async def play_out(
    talk: Conversation | Stage,
    example: Example,
    rollout: Rollout,
    converse: Callable[[], Awaitable[str]],
) -> Episode:
    """The episode of `converse`, which returns the stop reason.

    A CallError leaves the episode unscored, with the lines so far: the actor does not get a 0.
    """
    try:
        stop = await converse()
    except CallError as error:
        talk.usage += error.usage
        return talk.episode(example, rollout, "failed", Failure(error.reason, error.detail))
    return talk.episode(example, rollout, stop)


def others_view(
    seat: str, opening: Sequence[Segment], lines: Sequence[Line]
) -> tuple[Segment, ...]:
    """The context of a partner: its own lines as assistant messages, all others as user messages.

    Consecutive lines of one side are joined by a blank line.
    """
    merged: list[Segment] = list(opening)
    for line in lines:
        role = "assistant" if line.seat == seat else "user"
        if merged and merged[-1].role == role:
            merged[-1] = Segment(merged[-1].role, f"{merged[-1].text}\n\n{line.text}")
        else:
            merged.append(Segment("assistant" if role == "assistant" else "user", line.text))
    return tuple(merged)


class DialogueTask(Task):
    """Two seats take turns, until the conversation ends: the partner begins, or the actor.

    The prompts are named after the seats; the actor's prompt has the feedback slot. A subclass
    defines `score`, and in `ending` the conditions that end a conversation before `max_turns`.
    """

    start = "(You meet.)"
    """The first user message of the seat that begins."""
    actor_begins = False
    default_turns = 6
    partner_attempts = 1
    """How often the partner is asked for a line until it says something."""
    plain_talk = True

    @property
    def most_turns(self) -> int:
        """The option `max_turns`: the maximum number of turns for each side."""
        return int(self.spec.options.get("max_turns", self.default_turns))

    def calls(self, example: Example) -> dict[Role, int]:
        return dict.fromkeys(sorted(set(example.seats.values())), self.most_turns)

    def partner_seat(self, example: Example) -> str:
        return next(seat for seat, role in example.seats.items() if role == "partner")

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        """The actor's opening, with the feedback slot filled and empty."""
        view, _ = self.within_budget(example.visible(seat))
        return self.prompts.opening(seat, feedback, view)

    def partner_context(self, example: Example, lines: Sequence[Line]) -> tuple[Segment, ...]:
        """The partner's context: its prompt, the start mark and the lines so far."""
        seat = self.partner_seat(example)
        view, _ = self.within_budget(example.visible(seat))
        opening = [Segment("system", self.prompts.render(seat, **view))]
        opening += [] if self.actor_begins else [Segment("user", self.start)]
        return others_view(seat, opening, lines)

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return (self.slot(example, self.acted_seat(example), None), Segment("user", self.start))

    def ending(self, example: Example, lines: Sequence[Line], turns: int) -> str | None:
        """The reason why the conversation ends once each side had `turns` turns; None if it
        continues."""
        return None

    def partner_ending(self, line: str) -> str | None:
        """The reason why the conversation ends with this line of the partner, if it follows a turn
        of the actor; None if it continues."""
        return None

    def conversation(self, example: Example, feedback: Feedback | None) -> Conversation:
        """The actor's conversation before its first turn."""
        seat = self.acted_seat(example)
        _, cuts = self.within_budget(example.visible(seat))
        talk = Conversation(seat, [self.slot(example, seat, feedback)], notes=cut_note(cuts))
        if self.actor_begins:
            talk.notify(self.start)
        return talk

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        talk = self.conversation(example, rollout.feedback)
        converse = partial(self._converse, example, cast, rollout, talk)
        return await play_out(talk, example, rollout, converse)

    async def _converse(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation
    ) -> str:
        for index in range(self.most_turns):
            if index or not self.actor_begins:
                turn = index - self.actor_begins
                line = await self._partner_line(example, cast, rollout, talk, turn)
                talk.hear(line)
                if index and (reason := self.partner_ending(line.text)):
                    return reason
            reply = await talk.speak(cast.actor, rollout.call("actor", example, index))
            talk.record(Line(talk.seat, spoken(reply.text, self.protocol)))
            if reason := self.ending(example, talk.lines, index + 1):
                return reason
        return "max_turns"

    async def _partner_line(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation, index: int
    ) -> Line:
        partner, seat = cast.player("partner"), self.partner_seat(example)
        context = self.partner_context(example, talk.lines)
        call = rollout.call("partner", example, index)
        text, usage = await partner_reply(
            partner,
            context,
            call,
            partner_words,
            f"the {seat}",
            attempts=self.partner_attempts,
            trouble=lambda reply: "said nothing",
        )
        talk.usage += usage
        return Line(seat, text)

    def scripted(
        self, example: Example, exchanges: Iterable[tuple[str, str]], feedback: Feedback | None,
        stop: str,
    ) -> Episode:  # fmt: skip
        """The episode in which partner and actor say these lines: for `gold` and `wrong`. If the
        actor begins, the first line of the partner is left out."""
        talk, other = self.conversation(example, feedback), self.partner_seat(example)
        for line, answer in exchanges:
            if talk.turns or not self.actor_begins:
                talk.hear(Line(other, line))
            talk.take(Completion(text=answer))
            talk.record(Line(talk.seat, answer))
        return talk.episode(example, Rollout(kind="gold"), stop)


def partner_words(reply: str) -> str | None:
    """The spoken part of a partner's reply, without thinking; None if there is none."""
    return spoken(reply, "paper") or None


def others_words(context: Sequence[Segment]) -> str:
    """All user messages of a context."""
    return "\n".join(segment.text for segment in context if segment.role == "user")


def cut_note(cuts: Mapping[str, int]) -> dict[str, Any]:
    """The episode note on words cut by budgets, if any."""
    return {"cut_words": dict(cuts)} if cuts else {}


@dataclass
class Stage:
    """A scene in progress: the acted seats' conversations and the shared transcript.

    Each table already holds its opening and start mark. Traces keep the order of the tables. Lines
    and notes are stored on the stage, not in the tables.
    """

    tables: Mapping[str, Conversation]
    lines: list[Line] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    notes: dict[str, Any] = field(default_factory=dict)
    _unrecorded: set[str] = field(default_factory=set, init=False, repr=False)
    """Seats whose last completion has no line yet."""

    def table(self, seat: str) -> Conversation:
        """The conversation of an acted seat; ConfigError if the stage has no such seat."""
        if seat not in self.tables:
            raise ConfigError(
                f"This stage has no seat '{seat}'.",
                f"Its seats are {', '.join(self.tables)}; other seats speak only through record().",
                f"{did_you_mean(seat, self.tables)} Correct the task's call to speak() or take().",
            )
        return self.tables[seat]

    async def speak(self, seat: str, player: Player, call: Call) -> Completion:
        """The next completion at `seat`'s table, stored as its turn; call `record` afterwards.

        A call without a seat gets this one's name, to distinguish calls in the same turn.
        """
        table = self.table(seat)
        reply = await table.speak(player, replace(call, seat=call.seat or seat))
        self.usage += reply.usage
        self._unrecorded.add(seat)
        return reply

    def take(self, seat: str, reply: Completion) -> None:
        """Store a given completion as `seat`'s turn; call `record` afterwards."""
        self.table(seat).take(reply)
        self._unrecorded.add(seat)

    def record(self, line: Line, memory: str | None = None, shown: str | None = None) -> None:
        """Add a line to the transcript and to every table.

        Its author remembers `memory` (None: the line's text); all others see `shown` (None: the
        line's text; empty: nothing). A line from before the play has no token ids.
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
        """Add a user message to all tables, such as a start mark or a reminder."""
        for table in self.tables.values():
            table.notify(text)

    def episode(
        self, example: Example, rollout: Rollout, stop: str, failure: Failure | None = None
    ) -> Episode:
        """Everything so far, as an episode with a trace for each seat that spoke."""
        traces = [Trace(seat, tuple(table.turns)) for seat, table in self.tables.items()]
        traces = [trace for trace in traces if trace.turns]
        replies = (turn.completion for trace in traces for turn in trace.turns)
        return Episode(
            example_id=example.id, task=example.task, kind=rollout.kind, rollout=rollout.index,
            traces=tuple(traces), transcript=tuple(self.lines), stop=stop, failure=failure,
            usage=self.usage, notes={**self.notes, **dropped_note(replies)},
        )  # fmt: skip


EPISODE_TOKENS, LEAST_TOKENS = 8192, 10
"""Tokens of an episode after its prompt, and the minimum left for another turn."""


def episode_tokens_left(player: Player, turns: Sequence[Turn], context: Sequence[Segment]) -> int:
    """Tokens left in the episode's budget."""
    return EPISODE_TOKENS - tokens_since(player, turns, context)


def with_reply_limit(player: Player, room: int) -> Player:
    """The player with its reply limited to `room` tokens."""
    limit = min(player.sampling.max_tokens, room)
    return replace(player, sampling=replace(player.sampling, max_tokens=limit))


def within_episode(talk: Conversation, player: Player) -> Player | None:
    """The player with its reply limited to the episode's remaining tokens; None if fewer than
    LEAST_TOKENS remain."""
    room = episode_tokens_left(player, talk.turns, talk.context)
    return None if room < LEAST_TOKENS else with_reply_limit(player, room)


def tokens_since(player: Player, turns: Sequence[Turn], context: Sequence[Segment]) -> int:
    """Tokens in `context` beyond the first turn's prompt; 0 before the first turn.

    Local models count them. For a server, its reported count covers the context up to the last
    reply. Later text is estimated at four bytes per token, and so is all text if the server reports
    no counts.
    """
    if not turns:
        return 0
    first, last = turns[0], turns[-1]
    count = getattr(player.model, "prompt_length", None)
    if count is not None:
        thinking = player.sampling.thinking
        context = player.instructions.added_to(context)
        return int(count(context, thinking)) - len(first.completion.prompt_ids)
    counted, usage = first.completion.usage.prompt_tokens, last.completion.usage
    if not counted or not usage.prompt_tokens:
        return int(_guess(context) - _guess(first.context))
    fresh = context[len(last.context) + 1 :]  # the reply itself stands between the two
    reply = usage.completion_tokens - usage.reasoning_tokens  # reasoning is in no later prompt
    return usage.prompt_tokens + reply + int(_guess(fresh)) - counted


def _guess(context: Sequence[Segment]) -> float:
    return estimated_tokens(to_messages(context), 0)
