"""Which source comes next, and which rows a share of a source is made of.

Sources take turns by their weights: row k of a source with weight w is due at (k + phase) / w, and
whatever is due first comes next. So over any stretch every source has its share to within a row,
whatever the seed; the seed only sets the phases.

A ratio below 1 is a fixed part of the rows: of every thousand in file order the same ones, drawn by
the seed, in every pass. A ratio above 1 needs no draw: passes follow one another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

BLOCK_ROWS = 1000


class Turns:
    """The endless order of sources with these weights; `taken` rows of each are out already."""

    def __init__(self, weights: Sequence[float], seed: int, taken: Sequence[int] = ()) -> None:
        rng = random.Random(f"{seed}/turns")
        self._weights = list(weights)
        self._phases = [rng.random() for _ in weights]
        self.taken = list(taken) or [0] * len(weights)

    def next(self) -> int:
        """The place of the source whose row comes next."""
        due = [
            (count + phase) / weight
            for count, phase, weight in zip(self.taken, self._phases, self._weights, strict=True)
        ]
        place = due.index(min(due))
        self.taken[place] += 1
        return place


class Part:
    """The fixed part of a source that a ratio below 1 leaves; everything from 1 on."""

    def __init__(self, ratio: float, span: int | None, salt: str) -> None:
        """Ordinals lie below `span`, None where nobody knows; `salt` tells sources and seeds apart.

        Among ordinals that no row has (the end of a window with blank lines) a block's part may
        hold a few rows more or fewer.
        """
        self._ratio, self._span, self._salt = ratio, span, salt

    def __contains__(self, ordinal: int) -> bool:
        """Whether the row at this place (from 0) of the source is in it."""
        if self._ratio >= 1:
            return True
        block, place = divmod(ordinal, BLOCK_ROWS)
        first = block * BLOCK_ROWS
        known = self._span is not None and ordinal < self._span
        rest = min((self._span or 0) - first, BLOCK_ROWS) if known else BLOCK_ROWS
        quota = int((first + rest) * self._ratio) - int(first * self._ratio)
        if block == 0:  # a part of few rows is never empty
            quota = max(quota, 1)
        return place in _drawn(self._salt, block, rest, quota)


@lru_cache(maxsize=256)
def _drawn(salt: str, block: int, rows: int, quota: int) -> frozenset[int]:
    return frozenset(random.Random(f"{salt}/{block}").sample(range(rows), quota))
