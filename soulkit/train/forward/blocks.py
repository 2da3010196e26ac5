"""Attention over a trie as a few rectangles: which queries look at which keys in one call.

A dense mask over a whole pack would pay for every pair of unrelated branches. Instead the queries
are cut into runs, and each run sees only its path and itself: a rectangle of the mask. Many small
rectangles cost calls and copies of the path, few large ones cost masked pairs; a walk over the
trie, from the leaves up, takes whichever is cheaper. A sequence without branches is one causal
rectangle, which needs no mask at all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from soulkit.train.forward.trie import Range, Trie

CHUNKS = (512, 256, 128)
"""Lengths into which a long run below others may be cut, so that less of its mask is empty."""

MOST_PAIRS = 1 << 24
"""Pairs of one masked rectangle; its mask is kept in memory."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What things cost, in masked query-key pairs of one layer, forward and backward.

    The defaults were measured on a CPU (AVX-512, float32, heads of 32); `linear` depends on the
    model's shape.
    """

    linear: float = 800.0
    """A token's way through the linear layers."""
    causal: float = 0.48
    """A pair under the causal kernel, which skips the upper half."""
    copy: float = 12.0
    """One key and value put beside others."""
    call: float = 2500.0

    def pays(self, common: int, length: int) -> bool:
        """Whether a sequence had better share its first `common` tokens than be a root.

        What follows a shared prefix attends under a mask, for which every pair is paid; a root has
        the causal kernel. So conversations that have their header in common are roots. Where calls
        cost nothing (FlexAttention skips what is masked) any token saved is a gain.
        """
        if not self.call or common == length:
            return True
        tail = length - common
        alone = self.linear * common + self.causal * length**2
        return alone > tail * length + self.copy * length


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """One rectangle. `causal`: keys are the queries themselves, each sees those before it."""

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
    """(cost in pairs, rectangles in the order of their queries, which together are all positions).

    `window` is the sliding window of the layers that the plan is for.
    """
    return _Planner(trie, costs, window or sys.maxsize).plan()


class _Planner:
    def __init__(self, trie: Trie, costs: Costs, window: int) -> None:
        self.trie, self.costs, self.window = trie, costs, window
        self.starts = [int(c) for c in trie.cuts[:-1]]
        self.stops = [int(c) for c in trie.cuts[1:]]
        self.children = self._children()

    def plan(self) -> tuple[float, list[AttentionBlock]]:
        """From the last run to the first: children stand after their parents."""
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
        """Neighbouring subtrees share one rectangle where that is cheaper than one each."""
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
        """The rectangles of a run without branches: whole, or cut where that wastes less."""
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

        Under a window the keys that no query can see are left out.
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
        """The part of a path that a query right behind it, at `start`, can see."""
        drop = int(self.trie.depth[start]) - self.window + 1
        inside: list[Range] = []
        for a, b in ranges:
            cut = min(max(drop, 0), b - a)
            drop -= b - a
            if cut < b - a:
                inside.append((a + cut, b))
        return inside


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same with neighbours made one."""
    joined: list[Range] = []
    for a, b in ranges:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return tuple(joined)
