"""Contexts as they stood on disk before messages did: in lines that name no schema.

A turn holds only the messages that are new, and under `shared` how many it has in common with the
turn before:

    {"context": [system, line], ...}    {"shared": 2, "context": [own line, line], ...}

A line without `shared` holds its contexts whole, as all did once. In memory turns have whole
contexts, whose messages are the same objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from soulkit.types import Episode, Segment, Trace, Turn

SHARED = "shared"


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


def _whole_turns(trace: Trace, shared: Sequence[Any]) -> Iterator[Turn]:
    previous: tuple[Segment, ...] = ()
    for number, (turn, count) in enumerate(zip(trace.turns, shared, strict=True)):
        if not isinstance(count, int) or not 0 <= count <= len(previous):
            raise ValueError(f"turn {number} of '{trace.seat}' shares {count!r} messages")
        whole = Turn((*previous[:count], *turn.context), turn.completion)
        previous = whole.context
        yield whole
