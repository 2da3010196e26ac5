"""Packing: which token sequences share a forward pass, and how they are laid out.

A trie computes shared prefixes once, without padding. Padded rows are cheaper for short sequences
that share nothing. Both are planned and the cheaper one is used; results do not depend on it.

Trie: sequences are sorted and written without the prefix shared with the previous one. The subtree
of a position is the run of positions up to `end`, so a query at q sees a key at k iff
k ≤ q < end[k]; position ids are depths. A sliding window W also needs depth[q] − depth[k] < W.

Rectangles: instead of one dense mask, queries are cut into runs that see only their path and
themselves. Small rectangles cost calls and copies, large ones masked pairs; the cheapest are used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from soulkit.train.objectives.sequences import Span

Ids = tuple[int, ...]
Pays = Callable[[int, int], bool]
"""(tokens shared with the previous sequence, total tokens) → whether to share them."""
Range = tuple[int, int]
"""Positions from the first number up to but not including the second."""


@dataclass(frozen=True)
class Trie:
    """Token sequences in one row of L positions."""

    ids: np.ndarray
    """int64 [L]."""
    depth: np.ndarray
    """int64 [L]: number of tokens before a position on its path; the position id."""
    end: np.ndarray
    """int64 [L]: end of the subtree of a position."""
    parent: np.ndarray
    """int64 [L]: the previous position on the path, −1 for a root."""
    last: tuple[int, ...]
    """Per sequence, the position of its last token."""
    cuts: tuple[int, ...] = field(default=())
    """Sorted boundaries of runs: positions at which a path branches or starts."""

    def __len__(self) -> int:
        return len(self.ids)

    def path(self, sequence: int) -> np.ndarray:
        """The positions of all tokens of one sequence, in order."""
        ranges = self.ranges(self.last[sequence])
        return np.concatenate([np.arange(a, b) for a, b in ranges])

    def ranges(self, position: int) -> list[Range]:
        """The path up to and including `position`, as ranges of positions."""
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
        """int64 [L]: first position of the run (between two cuts) that contains a position."""
        starts = np.zeros(len(self), dtype=np.int64)
        cuts = np.asarray(self.cuts[:-1], dtype=np.int64)
        starts[cuts] = cuts
        return np.maximum.accumulate(starts)

    def visible(self, queries: Range, keys: Sequence[Range], window: int | None) -> np.ndarray:
        """bool [queries, keys]: which query sees which key."""
        q = np.arange(*queries)[:, None]
        k = np.concatenate([np.arange(a, b) for a, b in keys])[None, :]
        seen = (k <= q) & (q < self.end[k])
        if window is not None:
            seen &= self.depth[q] - self.depth[k] < window
        return seen


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the common prefix."""
    short = min(len(a), len(b))
    unequal = np.flatnonzero(np.asarray(a[:short]) != np.asarray(b[:short]))
    return int(unequal[0]) if len(unequal) else short


def build_trie(sequences: Sequence[Ids], pays: Pays | None = None) -> Trie:
    """The trie of `sequences`, in any order; duplicates and prefixes of others cost nothing.

    A sequence for which sharing does not pay becomes a root. ValueError for an empty sequence.
    """
    if not all(sequences):
        raise ValueError("cannot put an empty sequence into a trie")
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
        common = common_prefix(before, now)
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


CHUNKS = (512, 256, 128)
"""Lengths into which a long run may be cut, to mask fewer pairs."""

MOST_PAIRS = 1 << 24
"""Largest number of pairs in one masked rectangle, whose mask is kept in memory."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in units of one masked query-key pair in one layer, forward and backward.

    The defaults were measured on a CPU (AVX-512, float32, head size 32); `linear` depends on the
    model's shape.
    """

    linear: float = 800.0
    """A token in the linear layers."""
    causal: float = 0.48
    """A pair in the causal kernel, which skips the upper half."""
    copy: float = 12.0
    """Copying one key and value."""
    call: float = 2500.0
    """A kernel call."""

    def pays(self, common: int, length: int) -> bool:
        """Whether sharing the first `common` tokens of a sequence is cheaper than a new root.

        After a shared prefix every pair is computed with a mask, while a root uses the causal
        kernel. Long sequences that share only a header are therefore roots. If calls cost nothing
        (FlexAttention skips masked pairs), sharing always pays.
        """
        if not self.call or common == length:
            return True
        alone = self.linear * common + self.causal * length**2
        tail = length - common
        return alone > min(self._masked(common, tail, c) for c in (tail, *CHUNKS) if c <= tail)

    def _masked(self, common: int, tail: int, chunk: int) -> float:
        """Cost of a tail after a prefix, in rectangles of `chunk` queries."""
        calls = -(-tail // chunk)
        keys = calls * common + chunk * calls * (calls + 1) / 2
        return keys * (chunk + self.copy) + self.call * calls


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """One rectangle. `causal`: queries attend to themselves and earlier queries."""

    queries: Range
    keys: tuple[Range, ...]
    causal: bool = False

    @property
    def n_queries(self) -> int:
        return self.queries[1] - self.queries[0]

    @property
    def n_keys(self) -> int:
        return sum(b - a for a, b in self.keys)


@dataclass(frozen=True, slots=True)
class _Plan:
    cost: float
    blocks: tuple[AttentionBlock, ...]

    def __add__(self, other: _Plan) -> _Plan:
        return _Plan(self.cost + other.cost, self.blocks + other.blocks)


def plan_blocks(
    trie: Trie, costs: Costs, window: int | None = None
) -> tuple[float, list[AttentionBlock]]:
    """The cost in pairs, and rectangles that cover all positions, in the order of their queries.

    `window` is the sliding window of the planned layers.
    """
    return _Planner(trie, costs, window or sys.maxsize).plan()


class _Planner:
    def __init__(self, trie: Trie, costs: Costs, window: int) -> None:
        self.trie, self.costs, self.window = trie, costs, window
        self.starts = [int(c) for c in trie.cuts[:-1]]
        self.stops = [int(c) for c in trie.cuts[1:]]
        self.children = self._children()

    def plan(self) -> tuple[float, list[AttentionBlock]]:
        """Plan from the last run to the first, because children come after their parents."""
        best: dict[int, _Plan] = {}
        for node in reversed(range(len(self.starts))):
            start, end = self.starts[node], self._end(node)
            apart = self._run(node) + self._group([(c, best.pop(c)) for c in self.children[node]])
            whole = self._dense(start, end)
            best[node] = whole if whole.cost < apart.cost else apart
        roots = [n for n, start in enumerate(self.starts) if self.trie.parent[start] < 0]
        groups = self._group([(root, best[root]) for root in roots])
        return groups.cost, list(groups.blocks)

    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in self.starts]
        place = {start: node for node, start in enumerate(self.starts)}
        for node, start in enumerate(self.starts):
            parent = int(self.trie.parent[start])
            if parent >= 0:
                children[place[int(self.trie.run_start[parent])]].append(node)
        return children

    def _end(self, node: int) -> int:
        return int(self.trie.end[self.starts[node]])

    def _group(self, siblings: Sequence[tuple[int, _Plan]]) -> _Plan:
        """Merge the rectangles of neighbouring subtrees where that is cheaper."""
        runs: list[tuple[int, _Plan]] = []
        for node, alone in siblings:
            if runs:
                start, before = runs[-1]
                together = self._dense(start, self._end(node))
                if together.cost < before.cost + alone.cost:
                    runs[-1] = (start, together)
                    continue
            runs.append((self.starts[node], alone))
        return sum((plan for _, plan in runs), _Plan(0.0, ()))

    def _run(self, node: int) -> _Plan:
        """The rectangles of a run without branches: one, or several if that is cheaper."""
        start, stop = self.starts[node], self.stops[node]
        lengths = [stop - start]
        if self.trie.parent[start] >= 0 or stop - start > self.window:
            lengths += [c for c in CHUNKS if c < stop - start]
        plans = [
            sum(
                (self._dense(a, min(a + length, stop), start) for a in range(start, stop, length)),
                _Plan(0.0, ()),
            )
            for length in lengths
        ]
        return min(plans, key=lambda plan: plan.cost)

    def _dense(self, start: int, end: int, run: int | None = None) -> _Plan:
        """Queries [start, end) over the path to `start` (from `run` on in the run) and themselves.

        Keys that are outside the window of every query are left out.
        """
        above = self.trie.ranges(int(self.trie.parent[start]))
        keys = self._in_window(above, start)
        one_run = run is not None or self._is_run(start, end)
        if not keys and one_run and end - start <= self.window:
            pairs = self.costs.causal * (end - start) ** 2
            return _Plan(
                self.costs.call + pairs, (AttentionBlock((start, end), ((start, end),), True),)
            )
        block = AttentionBlock((start, end), _joined([*keys, (start, end)]))
        pairs = block.n_queries * block.n_keys
        if pairs > MOST_PAIRS and block.n_queries > CHUNKS[-1]:
            return _Plan(float("inf"), ())
        copies = block.n_keys * self.costs.copy if len(block.keys) > 1 else 0.0
        return _Plan(self.costs.call + copies + pairs, (block,))

    def _is_run(self, start: int, end: int) -> bool:
        return int(self.trie.run_start[end - 1]) == int(self.trie.run_start[start])

    def _in_window(self, ranges: list[Range], start: int) -> list[Range]:
        """The part of a path that the next query, at `start`, can see."""
        drop = int(self.trie.depth[start]) - self.window + 1
        inside: list[Range] = []
        for a, b in ranges:
            cut = min(max(drop, 0), b - a)
            drop -= b - a
            if cut < b - a:
                inside.append((a + cut, b))
        return inside


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The ranges, with adjacent ones merged."""
    joined: list[Range] = []
    for a, b in ranges:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return tuple(joined)


@dataclass(frozen=True)
class Pack:
    """One forward pass: `spans[i]` is the planned span with index `indices[i]`."""

    indices: tuple[int, ...]
    spans: tuple[Span, ...]
    trie: Trie | None = None
    """None: padded rows, one per distinct sequence."""

    @cached_property
    def rows(self) -> list[Span]:
        """The distinct sequences, in order of first occurrence."""
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
    """The trained tokens of a pack, flattened, sequence after sequence."""

    parent: np.ndarray
    """int64 [n_trained]: the flat position, row · width + column, that predicts the token."""
    target: np.ndarray
    """int64 [n_trained]: the token."""
    owner: np.ndarray
    """int64 [n_trained]: index of the sequence in the pack."""


def pack_entries(pack: Pack) -> Entries:
    """The positions of the logits of each trained token. ValueError for a trained first token."""
    place = {span.ids: row for row, span in enumerate(pack.rows)}
    parents, targets, owners = [], [], []
    for index, span in enumerate(pack.spans):
        tokens = np.flatnonzero(span.trained)
        if len(tokens) and tokens[0] == 0:
            raise ValueError("the first token cannot be trained, because no logits predict it")
        if pack.trie is None:
            path = place[span.ids] * pack.width + np.arange(len(span.ids))
        else:
            path = pack.trie.path(index)
        parents.append(path[tokens - 1])
        targets.append(np.asarray(span.ids)[tokens])
        owners.append(np.full(len(tokens), index))
    return Entries(*(np.concatenate(x).astype(np.int64) for x in (parents, targets, owners)))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Properties of a model that the cost model uses."""

    costs: Costs = field(default_factory=Costs)
    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    """(sliding window or None for full attention, share of the layers with it)."""

    def cost(self, pack: Pack) -> float:
        """Cost of a pack, forward and backward, in masked pairs in one layer."""
        linear = self.costs.linear * pack.computed
        if pack.trie is None:
            pairs = len(pack.rows) * pack.width**2 * self.costs.causal
            return linear + self.costs.call + pairs
        trie = pack.trie
        return linear + sum(
            share * plan_blocks(trie, self.costs, window)[0] for window, share in self.windows
        )


ENOUGH = {"cpu": 2048}
"""Tokens that keep a device busy, if larger packs are slower: a CPU's caches do not hold them."""


def plan_packs(
    spans: Sequence[Span], budget: int, shape: HeadShape | None, enough: int = sys.maxsize
) -> list[Pack]:
    """Packs of `spans` with at most `budget` computed tokens each, or with one longer sequence.

    With `shape` None, every pack has padded rows. A pack exceeds `enough` tokens only to share
    more.
    """
    rows = list(in_rows(spans, min(budget, enough)))
    if shape is None or not spans:
        return rows
    tries = list(in_tries(spans, budget, shape.costs.pays, enough))
    cheaper = sum(map(shape.cost, tries)) < sum(map(shape.cost, rows))
    return tries if cheaper else rows


def in_rows(spans: Sequence[Span], budget: int) -> Iterator[Pack]:
    """Packs of sequences with similar lengths; equal sequences share a row."""
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


SMALL_PART = 1 / 32
"""Part of a pack with enough tokens that may be computed again in the next one."""


def in_tries(
    spans: Sequence[Span], budget: int, pays: Pays | None = None, enough: int = sys.maxsize
) -> Iterator[Pack]:
    """Packs of sequences sorted by their ids, so that shared prefixes are adjacent.

    With `pays` None, every prefix is shared. A full pack ends at the point in its second half where
    the shared prefix is shortest, because the next pack computes that prefix again. A pack with
    `enough` tokens ends where that prefix is a small part of it, usually between two groups.
    """
    order = sorted(range(len(spans)), key=lambda i: spans[i].ids)
    overlap = [0, *(_overlap(spans[a], spans[b], pays) for a, b in pairwise(order))]
    first = 0
    while first < len(order):
        last = _fill(spans, order, overlap, first, budget, enough)
        yield _pack(spans, order[first:last], trie=True, pays=pays)
        first = last


def _overlap(a: Span, b: Span, pays: Pays | None) -> int:
    common = common_prefix(a.ids, b.ids)
    return common if pays is None or pays(common, len(b.ids)) else 0


def _fill(
    spans: Sequence[Span], order: list[int], overlap: list[int], first: int, budget: int,
    enough: int,
) -> int:  # fmt: skip
    """Where the pack that begins at `first` ends."""
    used = [0]  # tokens of order[first : first + i]
    for at in range(first, len(order)):
        if used[-1] >= enough and overlap[at] <= SMALL_PART * used[-1]:
            return at
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
