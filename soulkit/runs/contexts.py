"""What a seat saw, once in a record: each turn's context begins with that of the turn before it.

A scene of k characters and n rounds has n contexts of up to n messages. On disk a turn holds only
the messages that are new, and under `shared` how many it has in common with the turn before:

    {"context": [system, heard], ...}    {"shared": 2, "context": [own line, heard], ...}

A line without `shared` holds its contexts whole, as all did once. In memory turns have whole
contexts, whose messages are the same objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from soulkit.types import Episode, Segment, Trace, Turn

SHARED = "shared"


def cut_contexts(episode: Episode) -> tuple[Episode, list[list[int]]]:
    """(the episode whose turns hold new messages alone, how many each turn leaves out)."""
    counts = [list(_shared_counts(trace)) for trace in episode.traces]
    traces = tuple(
        Trace(trace.seat, tuple(
            Turn(turn.context[count:], turn.completion)
            for turn, count in zip(trace.turns, shared, strict=True)
        ))
        for trace, shared in zip(episode.traces, counts, strict=True)
    )  # fmt: skip
    return replace(episode, traces=traces), counts


def note_counts(line: dict[str, Any], counts: Sequence[Sequence[int]]) -> None:
    """Writes into the line of a cut episode what its turns leave out."""
    for trace, shared in zip(line["traces"], counts, strict=True):
        for turn, count in zip(trace["turns"], shared, strict=True):
            if count:
                turn[SHARED] = count


def whole_contexts(episode: Episode, line: Mapping[str, Any]) -> Episode:
    """The episode of `line`, which was read from it, with its contexts whole.

    Raises ValueError for a turn that shares more than the one before it has.
    """
    counts = [
        [turn.get(SHARED, 0) for turn in trace.get("turns", ())] for trace in line.get("traces", ())
    ]
    if not any(map(any, counts)):
        return episode
    traces = (
        Trace(trace.seat, tuple(_whole_turns(trace, shared)))
        for trace, shared in zip(episode.traces, counts, strict=True)
    )
    return replace(episode, traces=tuple(traces))


def _shared_counts(trace: Trace) -> Iterator[int]:
    previous: tuple[Segment, ...] = ()
    for turn in trace.turns:
        pairs = zip(previous, turn.context, strict=False)
        yield next(
            (place for place, (one, other) in enumerate(pairs) if one != other),
            min(len(previous), len(turn.context)),
        )
        previous = turn.context


def _whole_turns(trace: Trace, shared: Sequence[Any]) -> Iterator[Turn]:
    previous: tuple[Segment, ...] = ()
    for number, (turn, count) in enumerate(zip(trace.turns, shared, strict=True)):
        if not isinstance(count, int) or not 0 <= count <= len(previous):
            raise ValueError(f"turn {number} of '{trace.seat}' shares {count!r} messages")
        whole = Turn((*previous[:count], *turn.context), turn.completion)
        previous = whole.context
        yield whole
