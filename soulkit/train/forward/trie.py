"""The prefix trie: sequences laid out so that every shared token stands there once (design §7).

Sequences are sorted by their ids and written one after the other, each without the prefix it shares
with the one before it. That is a depth-first walk of their trie, so the subtree of a position is
the run of positions that follows it, up to `end`. A query at q sees a key at k iff k ≤ q < end[k];
position ids are depths. Under a sliding window W also depth[q] − depth[k] < W.

Pure arithmetic on integers: no model, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

Ids = tuple[int, ...]
Pays = Callable[[int, int], bool]
"""(tokens shared with the sequence before, tokens in all) → whether to compute them once."""
Range = tuple[int, int]
"""Positions from the first number up to, and without, the second."""


@dataclass(frozen=True)
class Trie:
    """Token sequences in one row of L positions."""

    ids: np.ndarray
    """int64 [L]."""
    depth: np.ndarray
    """int64 [L]: how many tokens stand before a position on its path; the position id."""
    end: np.ndarray
    """int64 [L]: where the subtree of a position ends."""
    parent: np.ndarray
    """int64 [L]: the position before it on its path, −1 for a root."""
    last: tuple[int, ...]
    """Per sequence, the position of its last token."""
    cuts: tuple[int, ...] = field(default=())
    """Positions after which a path branches or starts anew, in order; runs between have no branch
    within."""

    def __len__(self) -> int:
        return len(self.ids)

    def path(self, sequence: int) -> np.ndarray:
        """The positions of all tokens of one sequence, from its first to its last."""
        ranges = self.ranges(self.last[sequence])
        return np.concatenate([np.arange(a, b) for a, b in ranges])

    def ranges(self, position: int) -> list[Range]:
        """The path down to `position`, itself included, as few ranges of positions."""
        result: list[Range] = []
        while position >= 0:
            start = int(self.run_start[position])
            if result and result[-1][0] == position + 1:
                result[-1] = (start, result[-1][1])
            else:
                result.append((start, position + 1))
            position = int(self.parent[start])
        return result[::-1]

    @cached_property
    def run_start(self) -> np.ndarray:
        """int64 [L]: the first position of the run (between two cuts) that a position stands in."""
        starts = np.zeros(len(self), dtype=np.int64)
        cuts = np.asarray(self.cuts[:-1], dtype=np.int64)
        starts[cuts] = cuts
        return np.maximum.accumulate(starts)

    def visible(self, queries: Range, keys: Sequence[Range], window: int | None) -> np.ndarray:
        """bool [queries, keys]: what sees what."""
        q = np.arange(*queries)[:, None]
        k = np.concatenate([np.arange(a, b) for a, b in keys])[None, :]
        seen = (k <= q) & (q < self.end[k])
        if window is not None:
            seen &= self.depth[q] - self.depth[k] < window
        return seen


def shared(a: Ids, b: Ids) -> int:
    """Length of the common prefix."""
    short = min(len(a), len(b))
    unequal = np.flatnonzero(np.asarray(a[:short]) != np.asarray(b[:short]))
    return int(unequal[0]) if len(unequal) else short


def build_trie(sequences: Sequence[Ids], pays: Pays | None = None) -> Trie:
    """The trie of `sequences`, in any order; equal ones and prefixes of others cost nothing.

    Where sharing does not pay a sequence is a root of its own. ValueError for an empty sequence,
    which has no place.
    """
    if not all(sequences):
        raise ValueError("a sequence without tokens has no place in a trie")
    order = sorted(range(len(sequences)), key=lambda i: sequences[i])
    ids: list[int] = []
    depth: list[int] = []
    parent: list[int] = []
    end: list[int] = []
    path: list[int] = []  # positions of the last written sequence
    last = [0] * len(sequences)
    cuts: set[int] = {0}
    before: Ids = ()
    for index in order:
        now = sequences[index]
        common = shared(before, now)
        if pays is not None and not pays(common, len(now)):
            common = 0
        start = len(ids)
        if common < len(now):
            for position in path[common:]:
                end[position] = start
            at = path[common - 1] if common else -1
            cuts |= {start, at + 1} if common else {start}
            new = range(start, start + len(now) - common)
            ids += now[common:]
            depth += range(common, len(now))
            parent += [at, *new[:-1]]
            end += [0] * len(new)
            path[common:] = new
            before = now
        last[index] = path[len(now) - 1]
    for position in path:
        end[position] = len(ids)
    return Trie(
        ids=np.asarray(ids, dtype=np.int64),
        depth=np.asarray(depth, dtype=np.int64),
        end=np.asarray(end, dtype=np.int64),
        parent=np.asarray(parent, dtype=np.int64),
        last=tuple(last),
        cuts=(*sorted(cuts - {len(ids)}), len(ids)),
    )
