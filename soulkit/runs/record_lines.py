"""A line of `episodes.jsonl` on disk: a Record in which every text stands once.

    contexts: every turn with all that it saw ──▶ messages, each once, and where a turn's are

A scene of n turns has n contexts of up to n messages. Nearly always a turn saw what the turn
before it saw and said, and then new messages: then it only names its reply.
Else it says how many messages it shares with the turn before, and which others it saw.
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
    """What a reader of scores wants of a message."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLine(MessageWords):
    """A message that a seat saw or said."""

    role: Literal["system", "user", "assistant"]
    slot: tuple[int, int] | None = None
    """The characters of `text` (from, to) that are feedback: without them it is the same message
    with its feedback slot empty. None: it has no slot, or `bare` says what it is without."""
    bare: str | None = None
    """The message with its slot empty, where that is not `text` with characters left out."""
    token_ids: tuple[int, ...] = ()
    """The ids that the actor emitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """What a reader of scores wants of a turn."""

    reply: int
    """The message that the actor emitted."""
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

    It saw what the turn before it saw and said, and then the messages up to its own reply that no
    turn before it has; unless `shared` and `adds` say otherwise.
    """

    shared: int | None = None
    """It saw so many of the messages that the turn before it saw and said, from the first …"""
    adds: tuple[int, ...] | None = None
    """… and then these."""
    shared_ids: int = 0
    """So many prompt ids come first that the turn before it had as prompt and reply."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt ids that follow."""
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
    """A line of the transcript, in words of its own or in those of a message."""

    seat: str
    text: str | None = None
    message: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeHead:
    """An episode without its messages and turns."""

    example_id: str | None = None
    """This and what follows up to `step`: the record's where it is not there."""
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
    """An episode for readers of scores."""

    messages: tuple[MessageWords, ...] = ()
    traces: tuple[TraceFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLine(EpisodeHead):
    """What happened in one play of one example."""

    messages: tuple[MessageLine, ...] = ()
    """All that the acted seats saw and said, each message once."""
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
    """The file of somebody's own that the row was made of; empty for any other row."""
    score: Score
    given: Feedback | None = None
    """The feedback this (refined) episode was conditioned on."""
    received: Feedback | None = None
    """The feedback this (draft) episode earned."""
    gold: str = ""
    prompt: str | None = None
    """What the actor first saw; not there where that is what its first turns saw."""


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
class KeyFacts:
    """What a resumed run wants of a line."""

    key: str
    score: ScoreFacts


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
"""Characters up to which a line of a transcript stands for itself: no reference is shorter."""


def first_prompts(episode: Episode) -> str:
    """What the actor first saw, for readers; of several seats each under its name."""
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
        """The number of an equal message that is not `taken`, else of a new one: who says a thing
        twice has two messages."""
        places = self.places.setdefault(segment, [])
        for number in places:
            if number not in taken:
                return number
        places.append(len(self.segments))
        self.segments.append(segment)
        return places[-1]

    def turn(self, turn: Turn, before: Sequence[int]) -> tuple[TurnLine, list[int]]:
        """(the turn, what it saw and said); `before` is what the turn before it saw and said."""
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
    """The messages of an episode, and its turns as they refer to them."""
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
    """The transcript, with the numbers of messages in place of their words."""
    places = {message.text: number for number, message in reversed(list(enumerate(messages)))}
    return [
        TranscriptLine(seat=line.seat, message=places[line.text])
        if len(line.text) > _SHORT and line.text in places
        else TranscriptLine(seat=line.seat, text=line.text)
        for line in lines
    ]


def _common_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many members two sequences have in common, from the first."""
    if one[: len(other)] == other:
        return len(other)
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _common(segments: Sequence[Segment], before: Sequence[int], context: Sequence[Segment]) -> int:
    """How many messages two turns have in common, from the first."""
    pairs = zip(before, context, strict=False)
    return next(
        (place for place, (number, segment) in enumerate(pairs) if segments[number] != segment),
        min(len(before), len(context)),
    )


def _reply(completion: Completion) -> Segment:
    return Segment("assistant", completion.text, token_ids=completion.token_ids)


_SAME = ("usage", "stop_reason", "reasoning", "dropped", "ignored", "policy", "server")
"""What turns on disk and completions call alike."""


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
    """The characters (from, to) without which `text` is `bare`; None where there are no such."""
    if bare is None or len(bare) > len(text):
        return None
    size = len(text) - len(bare)
    start = _common_start(text, bare) if size else 0
    return (start, start + size) if text[:start] + text[start + size :] == bare else None


# -- and back --------------------------------------------------------------------------------------


def whole_traces(line: EpisodeLine) -> tuple[Trace, ...]:
    """The traces of an episode with whole contexts, whose messages are the same objects.

    Raises ValueError for a turn or slot that names what is not there.
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
                raise ValueError(f"a turn shares {turn.shared_ids} ids with one of {len(ids)}")
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
    """What a turn saw, by number; `known` messages belong to turns before it, of `count`."""
    shared = len(before) if turn.adds is None else turn.shared or 0
    if not 0 <= shared <= len(before):
        raise ValueError(f"a turn shares {shared} messages with one that has {len(before)}")
    missing = [n for n in (turn.reply, *(turn.adds or ())) if not 0 <= n < count]
    if missing:
        raise ValueError(f"a turn names message {missing[0]}, of {count}")
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
    """The traces of an episode without what turns saw, ids and log-probs."""
    texts = [message.text for message in line.messages]
    return tuple(
        Trace(trace.seat, tuple(
            Turn((), Completion(text=_text(texts, turn.reply), **_facts(turn)))
            for turn in trace.turns
        ))
        for trace in line.traces
    )  # fmt: skip


def whole_lines(line: EpisodeLine | EpisodeFacts) -> tuple[Line, ...]:
    """The transcript in words; ValueError for a line that names a message which is not there."""
    texts = [message.text for message in line.messages]
    return tuple(
        Line(one.seat, one.text or "" if one.message is None else _text(texts, one.message))
        for one in line.transcript
    )


def _text(texts: Sequence[str], number: int) -> str:
    if not 0 <= number < len(texts):
        raise ValueError(f"message {number} is named, of {len(texts)}")
    return texts[number]
