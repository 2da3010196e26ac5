"""How unlike each other texts are, as sets of words.

Jaccard of two sets is |a ∩ b| / |a ∪ b|: 1 for the same words, 0 for none in common. Two sets
without any word say the same, which is nothing: 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bag = frozenset[str]
_ROWS = 1000
"""So many texts are compared with all others at a time, which bounds the memory."""


def jaccard(one: Set[Any], other: Set[Any]) -> float:
    """Shared among all, in [0, 1]; 1 for two empty sets."""
    union = len(one | other)
    return len(one & other) / union if union else 1.0


def mean_jaccard(bags: Iterable[Bag]) -> float | None:
    """The mean over all pairs, in [0, 1]; None for fewer than two texts.

    Texts of the same words are counted, not compared; the others are compared by products of their
    word vectors: a thousand messages take some hundredths of a second.
    """
    counted = Counter(bags)
    n = counted.total()
    if n < 2:
        return None
    weights = np.array(list(counted.values()), dtype=np.float64)
    alike = float((weights * (weights - 1) / 2).sum()) + _between(list(counted), weights)
    return alike / (n * (n - 1) / 2)


def _between(bags: Sequence[Bag], weights: NDArray[np.float64]) -> float:
    """Σ over pairs of different bags of the Jaccard, each pair as often as it stands."""
    vectors, sizes = _vectors(bags), np.array([len(bag) for bag in bags], dtype=np.float64)
    total = 0.0
    for start in range(0, len(bags), _ROWS):
        part = slice(start, start + _ROWS)
        shared = (vectors[part] @ vectors.T).astype(np.float64)
        union = sizes[part, None] + sizes[None, :] - shared
        alike = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
        np.fill_diagonal(alike[:, start:], 0.0)  # a bag is no pair with itself
        total += float(weights[part] @ alike @ weights)
    return total / 2


def _vectors(bags: Sequence[Bag]) -> NDArray[np.float32]:
    """[bags, words] 0 or 1, for words that several bags have: no other is shared."""
    common = Counter(word for bag in bags for word in bag)
    column = {word: i for i, word in enumerate(w for w, count in common.items() if count > 1)}
    vectors = np.zeros((len(bags), len(column)), dtype=np.float32)
    for row, bag in enumerate(bags):
        for word in bag:
            if word in column:
                vectors[row, column[word]] = 1
    return vectors
