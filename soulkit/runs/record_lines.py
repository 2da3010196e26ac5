"""The lines of `episodes.jsonl`: a Record in which every message is stored once.

    contexts: every turn with its whole context ──▶ messages, each once, and references to them

A scene of n turns has n contexts of up to n messages. Usually the context of a turn is that of the
previous turn, its reply, and new messages; then the turn only refers to its own reply. Otherwise it
stores how many messages it shares with the previous turn, and which others it saw.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from soulkit.types import (
    Completion,
    Episode,
    Failure,
    Feedback,
    Kind,
    Line,
    Score,
    Segment,
    Trace,
    Turn,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWords:
    """The part of a message that light reading needs."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLine(MessageWords):
    """A message in the context or the reply of a seat."""

    role: Literal["system", "user", "assistant"]
    slot: tuple[int, int] | None = None
    """The character range (from, to) of feedback in `text`; without it the feedback slot is empty.
    None if there is no slot, or if `bare` is set."""
    bare: str | None = None
    """The message with an empty slot, if it is not simply `text` without a character range."""
    token_ids: tuple[int, ...] = ()
    """The ids that the actor emitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """The part of a turn that light reading needs."""

    reply: int
    """Number of the message that the actor emitted."""
    usage: Usage = field(default_factory=Usage)
    stop_reason: str = "stop"
    reasoning: str = ""
    dropped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    policy: str = ""
    server: str = ""
    """Address of the vLLM server that sampled the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLine(TurnFacts):
    """A turn of a seat.

    By default its context is that of the previous turn, the previous reply, and the messages up to
    its own reply that no earlier turn has; `shared` and `adds` override this.
    """

    shared: int | None = None
    """Number of leading messages of the previous turn (context and reply) in its context …"""
    adds: tuple[int, ...] | None = None
    """… followed by these messages."""
    shared_ids: int = 0
    """Number of leading prompt ids that equal the prompt and reply ids of the previous turn."""
    prompt_ids: tuple[int, ...] = ()
    """The remaining prompt ids."""
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    seat: str
    turns: tuple[TurnFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLine:
    """The turns of one acted seat."""

    seat: str
    turns: tuple[TurnLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptLine:
    """A line of the transcript, as text or as the number of a message."""

    seat: str
    text: str | None = None
    message: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeHead:
    """An episode without its messages and turns."""

    example_id: str | None = None
    """This field and those up to `step` default to the record's values."""
    task: str | None = None
    kind: Kind | None = None
    rollout: int | None = None
    step: int | None = None
    stop: str = "done"
    failure: Failure | None = None
    usage: Usage = field(default_factory=Usage)
    notes: Mapping[str, Any] = field(default_factory=dict)
    transcript: tuple[TranscriptLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts(EpisodeHead):
    """An episode for light reading."""

    messages: tuple[MessageWords, ...] = ()
    traces: tuple[TraceFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLine(EpisodeHead):
    """One episode."""

    messages: tuple[MessageLine, ...] = ()
    """All messages in contexts and replies of the acted seats, each once."""
    traces: tuple[TraceLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHead:
    """A record without its episode."""

    key: str
    """`step/example_id/rollout/kind`, unique in a run; a later line replaces an earlier one."""
    schema: Literal["soulkit/episodes@1"]
    task: str
    example_id: str
    rollout: int
    kind: Kind
    step: int = 0
    cluster: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    """The user's own file that the row was made from; empty for other rows."""
    score: Score
    given: Feedback | None = None
    """The feedback that this (refined) episode was conditioned on."""
    received: Feedback | None = None
    """The feedback on this (draft) episode."""
    gold: str = ""
    prompt: str | None = None
    """The actor's first prompt; absent if it equals the context of its first turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFacts(RecordHead):
    episode: EpisodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLine(RecordHead):
    """One line of `episodes.jsonl` or `dev.jsonl`."""

    episode: EpisodeLine


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreFacts:
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteFacts:
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFacts:
    """The part of a line that a resumed run needs."""

    key: str
    score: ScoreFacts
    episode: NoteFacts = NoteFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLine:
    """One line of `controls.jsonl`."""

    schema: Literal["soulkit/controls@1"]
    task: str
    example_id: str
    rollout: int
    name: str
    score: Score
    cluster: str = ""


_SHORT = 16
"""Lines of a transcript up to this many characters are stored as text."""


def first_prompts(episode: Episode) -> str:
    """The actor's first prompt as text; for several seats, each with a heading."""
    prompts = {
        trace.seat: "\n\n".join(segment.text for segment in trace.turns[0].context)
        for trace in episode.traces
        if trace.turns
    }
    if len(prompts) < 2:
        return "".join(prompts.values())
    return "\n\n".join(f"=== {seat} ===\n{prompt}" for seat, prompt in prompts.items())


# -- from contexts to messages ---------------------------------------------------------------------


@dataclass
class MessageTable:
    """The messages of an episode, numbered as they first appear."""

    segments: list[Segment] = field(default_factory=list)
    places: dict[Segment, list[int]] = field(default_factory=dict)

    def place(self, segment: Segment, taken: Container[int]) -> int:
        """The number of an equal message that is not in `taken`, else of a new message, so that a
        repeated text gets two messages."""
        places = self.places.setdefault(segment, [])
        for number in places:
            if number not in taken:
                return number
        places.append(len(self.segments))
        self.segments.append(segment)
        return places[-1]

    def turn(self, turn: Turn, before: Sequence[int]) -> tuple[TurnLine, list[int]]:
        """The turn, and the message numbers of its context and reply; `before` are the previous
        turn's."""
        known, shared = len(self.segments), _common(self.segments, before, turn.context)
        seen = list(before[:shared])
        taken = set(seen)
        for segment in turn.context[shared:]:
            seen.append(self.place(segment, taken))
            taken.add(seen[-1])
        reply = self.place(_reply(turn.completion), taken)
        usual = shared == len(before) and [*seen[shared:], reply] == list(
            range(known, known + len(seen) - shared + 1)
        )
        line = TurnLine(
            reply=reply, shared=None if usual else shared,
            adds=None if usual else tuple(seen[shared:]), **_facts(turn.completion),
        )  # fmt: skip
        return line, [*seen, reply]


def cut_turns(episode: Episode) -> tuple[list[MessageLine], list[TraceLine]]:
    """The messages of an episode, and its turns with references to them."""
    table, traces = MessageTable(), []
    for trace in episode.traces:
        before: list[int] = []
        ids: tuple[int, ...] = ()
        turns = []
        for turn in trace.turns:
            line, before = table.turn(turn, before)
            prompt = turn.completion.prompt_ids
            shared = _common_start(prompt, ids)
            turns.append(_with_ids(line, shared, prompt[shared:], turn.completion.logprobs))
            ids = (*prompt, *turn.completion.token_ids)
        traces.append(TraceLine(seat=trace.seat, turns=tuple(turns)))
    return [_message(segment) for segment in table.segments], traces


def cut_lines(lines: Sequence[Line], messages: Sequence[MessageLine]) -> list[TranscriptLine]:
    """The transcript, with numbers of messages in place of their texts."""
    places = {message.text: number for number, message in reversed(list(enumerate(messages)))}
    return [
        TranscriptLine(seat=line.seat, message=places[line.text])
        if len(line.text) > _SHORT and line.text in places
        else TranscriptLine(seat=line.seat, text=line.text)
        for line in lines
    ]


def _common_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the common prefix of two sequences."""
    if one[: len(other)] == other:
        return len(other)
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _common(segments: Sequence[Segment], before: Sequence[int], context: Sequence[Segment]) -> int:
    """The number of leading messages that two turns have in common."""
    pairs = zip(before, context, strict=False)
    return next(
        (place for place, (number, segment) in enumerate(pairs) if segments[number] != segment),
        min(len(before), len(context)),
    )


def _reply(completion: Completion) -> Segment:
    return Segment("assistant", completion.text, token_ids=completion.token_ids)


_SAME = ("usage", "stop_reason", "reasoning", "dropped", "ignored", "policy", "server")
"""Fields with the same name in turns on disk and completions."""


def _facts(one: Completion | TurnFacts) -> dict[str, Any]:
    return {name: getattr(one, name) for name in _SAME}


def _with_ids(
    line: TurnLine, shared: int, prompt: tuple[int, ...], logprobs: tuple[float, ...]
) -> TurnLine:
    return TurnLine(
        reply=line.reply, shared=line.shared, adds=line.adds, shared_ids=shared, prompt_ids=prompt,
        logprobs=logprobs, **_facts(line),
    )  # fmt: skip


def _message(segment: Segment) -> MessageLine:
    slot = _slot(segment.text, segment.bare)
    return MessageLine(
        role=segment.role, text=segment.text, token_ids=segment.token_ids, slot=slot,
        bare=segment.bare if slot is None else None,
    )  # fmt: skip


def _slot(text: str, bare: str | None) -> tuple[int, int] | None:
    """The character range (from, to) without which `text` equals `bare`; None if there is none."""
    if bare is None or len(bare) > len(text):
        return None
    size = len(text) - len(bare)
    start = _common_start(text, bare) if size else 0
    return (start, start + size) if text[:start] + text[start + size :] == bare else None


# -- and back --------------------------------------------------------------------------------------


def whole_traces(line: EpisodeLine) -> tuple[Trace, ...]:
    """The traces of an episode with whole contexts, which share message objects.

    ValueError for an invalid reference or slot.
    """
    segments = [_segment(message) for message in line.messages]
    known, traces = 0, []
    for trace in line.traces:
        before: list[int] = []
        ids: tuple[int, ...] = ()
        turns = []
        for turn in trace.turns:
            seen = _seen(turn, before, known, len(segments))
            reply = segments[turn.reply]
            if not 0 <= turn.shared_ids <= len(ids):
                raise ValueError(
                    f"a turn shares {turn.shared_ids} ids with a turn of {len(ids)} ids"
                )
            prompt = (*ids[: turn.shared_ids], *turn.prompt_ids)
            completion = Completion(
                text=reply.text, token_ids=reply.token_ids, prompt_ids=prompt,
                logprobs=turn.logprobs, **_facts(turn),
            )  # fmt: skip
            turns.append(Turn(tuple(segments[number] for number in seen), completion))
            before, ids = [*seen, turn.reply], (*prompt, *reply.token_ids)
            known = max(known, *(number + 1 for number in before))
        traces.append(Trace(trace.seat, tuple(turns)))
    return tuple(traces)


def _seen(turn: TurnLine, before: Sequence[int], known: int, count: int) -> list[int]:
    """Message numbers in the context of a turn; `known` of `count` messages are from earlier
    turns."""
    shared = len(before) if turn.adds is None else turn.shared or 0
    if not 0 <= shared <= len(before):
        raise ValueError(f"a turn shares {shared} messages with a turn of {len(before)}")
    missing = [n for n in (turn.reply, *(turn.adds or ())) if not 0 <= n < count]
    if missing:
        raise ValueError(f"a turn refers to message {missing[0]}, but there are {count}")
    return [*before[:shared], *(range(known, turn.reply) if turn.adds is None else turn.adds)]


def _segment(message: MessageLine) -> Segment:
    bare, text = message.bare, message.text
    if message.slot is not None:
        start, end = message.slot
        if not 0 <= start <= end <= len(text):
            raise ValueError(f"a message of {len(text)} characters has a slot {message.slot}")
        bare = text[:start] + text[end:]
    return Segment(message.role, text, bare, message.token_ids)


def short_traces(line: EpisodeFacts) -> tuple[Trace, ...]:
    """The traces of an episode without contexts, token ids and log-probs."""
    texts = [message.text for message in line.messages]
    return tuple(
        Trace(trace.seat, tuple(
            Turn((), Completion(text=_text(texts, turn.reply), **_facts(turn)))
            for turn in trace.turns
        ))
        for trace in line.traces
    )  # fmt: skip


def whole_lines(line: EpisodeLine | EpisodeFacts) -> tuple[Line, ...]:
    """The transcript as text; ValueError for a line that refers to a missing message."""
    texts = [message.text for message in line.messages]
    return tuple(
        Line(one.seat, one.text or "" if one.message is None else _text(texts, one.message))
        for one in line.transcript
    )


def _text(texts: Sequence[str], number: int) -> str:
    if not 0 <= number < len(texts):
        raise ValueError(f"a line refers to message {number}, but there are {len(texts)}")
    return texts[number]
