"""What the seats of an episode saw and said, once: messages, and turns that refer to them.

    contexts: every turn with all that it saw ──▶ messages, each once, and where a turn's are

A scene of n turns has n contexts of up to n messages. Nearly always a turn saw what the turn before
it saw and said, and then messages that nobody had before: then it only names its reply. Else it
says how many messages it shares with the turn before, and which others it saw.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from soulkit.runs.lines import (
    EpisodeFacts,
    EpisodeLine,
    MessageLine,
    TraceLine,
    TranscriptLine,
    TurnFacts,
    TurnLine,
)
from soulkit.types import Completion, Episode, Line, Segment, Trace, Turn

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
