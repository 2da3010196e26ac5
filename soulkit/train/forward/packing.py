"""Which token sequences go through the model together, and how they are laid out.

Two layouts. A *trie* (`trie.py`) computes every shared token once and needs no padding; its
attention runs in rectangles (`blocks.py`). *Rows* are the ordinary padded batch, one sequence a
row, which is cheaper when many short sequences share nothing. Both plans are made and the cheaper
one is used; either way the loss belongs to (sequence, token), so nothing else can tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from soulkit.train.forward.blocks import Costs, plan_blocks
from soulkit.train.forward.trie import Pays, Trie, build_trie, shared
from soulkit.train.objectives.sequences import Span


@dataclass(frozen=True)
class Pack:
    """One forward pass: `spans[i]` is number `indices[i]` of the spans that were planned."""

    indices: tuple[int, ...]
    spans: tuple[Span, ...]
    trie: Trie | None = None
    """None: padded rows, one per different sequence."""

    @cached_property
    def rows(self) -> list[Span]:
        """The different sequences, by their first occurrence."""
        return list({span.ids: span for span in self.spans}.values())

    @property
    def computed(self) -> int:
        """Tokens that the model computes, padding included."""
        if self.trie is not None:
            return len(self.trie)
        return len(self.rows) * max(len(span.ids) for span in self.rows)

    @property
    def width(self) -> int:
        """Length of a row."""
        return len(self.trie) if self.trie is not None else max(len(s.ids) for s in self.rows)


@dataclass(frozen=True, slots=True)
class Entries:
    """The trained tokens of a pack, flat, sequence after sequence."""

    parent: np.ndarray
    """int64 [n_trained]: the flat position row · width + column, whose logits
    predict the token."""
    target: np.ndarray
    """int64 [n_trained]: the token."""
    owner: np.ndarray
    """int64 [n_trained]: index of the sequence in the pack."""


def pack_entries(pack: Pack) -> Entries:
    """Where the logits of each trained token stand. ValueError for a trained first token."""
    place = {span.ids: row for row, span in enumerate(pack.rows)}
    parents, targets, owners = [], [], []
    for index, span in enumerate(pack.spans):
        tokens = np.flatnonzero(span.trained)
        if len(tokens) and tokens[0] == 0:
            raise ValueError("a first token cannot be trained: nothing predicts it")
        if pack.trie is None:
            path = place[span.ids] * pack.width + np.arange(len(span.ids))
        else:
            path = pack.trie.path(index)
        parents.append(path[tokens - 1])
        targets.append(np.asarray(span.ids)[tokens])
        owners.append(np.full(len(tokens), index))
    return Entries(*(np.concatenate(x).astype(np.int64) for x in (parents, targets, owners)))


DEFAULT_COSTS = Costs()


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What the cost model knows of a model."""

    costs: Costs = DEFAULT_COSTS
    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    """Sliding window (None: full attention) → share of the layers that have it."""

    def cost(self, pack: Pack) -> float:
        """Forward and backward of a pack, in masked pairs of one layer."""
        linear = self.costs.linear * pack.computed
        if pack.trie is None:
            pairs = len(pack.rows) * pack.width**2 * self.costs.causal
            return linear + self.costs.call + pairs
        trie = pack.trie
        return linear + sum(
            share * plan_blocks(trie, self.costs, window)[0] for window, share in self.windows
        )


def plan_packs(spans: Sequence[Span], budget: int, shape: HeadShape | None) -> list[Pack]:
    """`spans` as packs of at most `budget` computed tokens (or one sequence).

    `shape` None: padded rows always.
    """
    rows = list(in_rows(spans, budget))
    if shape is None or not spans:
        return rows
    tries = list(in_tries(spans, budget, shape.costs.pays))
    cheaper = sum(map(shape.cost, tries)) < sum(map(shape.cost, rows))
    return tries if cheaper else rows


def in_rows(spans: Sequence[Span], budget: int) -> Iterator[Pack]:
    """Sequences of like length together; equal ones are one row."""
    order = sorted(range(len(spans)), key=lambda i: (-len(spans[i].ids), spans[i].ids))
    batch: list[int] = []
    rows = 0
    for index in order:
        new = not batch or spans[batch[-1]].ids != spans[index].ids
        if new and batch and (rows + 1) * len(spans[batch[0]].ids) > budget:
            yield _pack(spans, batch, trie=False)
            batch, rows = [], 0
        batch.append(index)
        rows += new
    if batch:
        yield _pack(spans, batch, trie=False)


def in_tries(spans: Sequence[Span], budget: int, pays: Pays | None = None) -> Iterator[Pack]:
    """Sequences in the order of their ids, so that those that share a prefix stand together.

    A prefix that does not pay (None: every one does) is not shared.

    A full pack ends where the least is shared across its end, looked for in its second half: what
    is shared there will be computed again in the next one.
    """
    order = sorted(range(len(spans)), key=lambda i: spans[i].ids)
    overlap = [0, *(_overlap(spans[a], spans[b], pays) for a, b in pairwise(order))]
    first = 0
    while first < len(order):
        last = _fill(spans, order, overlap, first, budget)
        yield _pack(spans, order[first:last], trie=True, pays=pays)
        first = last


def _overlap(a: Span, b: Span, pays: Pays | None) -> int:
    common = shared(a.ids, b.ids)
    return common if pays is None or pays(common, len(b.ids)) else 0


def _fill(
    spans: Sequence[Span], order: list[int], overlap: list[int], first: int, budget: int
) -> int:
    """Where the pack that begins at `first` ends."""
    used = [0]  # tokens of order[first : first + i]
    for at in range(first, len(order)):
        length = len(spans[order[at]].ids)
        used.append(used[-1] + length - (overlap[at] if at > first else 0))
        if used[-1] > budget and at > first:
            ends = [e for e in range(first + 1, at + 1) if used[e - first] * 2 >= used[at - first]]
            return min(reversed(ends), key=lambda end: overlap[end])
    return len(order)


def _pack(
    spans: Sequence[Span], batch: Sequence[int], *, trie: bool, pays: Pays | None = None
) -> Pack:
    chosen = tuple(spans[i] for i in batch)
    laid = build_trie([span.ids for span in chosen], pays) if trie else None
    return Pack(tuple(batch), chosen, laid)
