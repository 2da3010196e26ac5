"""Which texts are nearly the same: exactly, and without comparing each with each.

Two sets of phrases that share at least a part t of all their phrases share one of the rarest
|x| - ceil(t·|x|) + 1 of either (prefix filtering: Chaudhuri, Ganti & Kaushik 2006; Bayardo, Ma &
Srikant 2007). So only texts that share such a phrase are compared, and none is missed.

A phrase is held as 64 bits: long rows have thousands each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from soulkit.data.contamination import Passage, RowMatch, Words, shingles
from soulkit.metrics.text import jaccard

Phrases = NDArray[np.int64]
"""The hashes of a text's phrases, each once, in rising order."""
_ROUNDING = 1e-9


def same_words(one: Words, other: Words, threshold: float) -> bool:
    """Whether two texts are equal, or share so much of their word triples."""
    return one == other or jaccard(shingles(one), shingles(other)) >= threshold


def near_pairs(
    left: Sequence[Words], right: Sequence[Words], threshold: float
) -> Iterator[tuple[int, int, float]]:
    """(place in `left`, place in `right`, Jaccard index of their word triples) of all pairs at or
    above `threshold`, by place; texts without any words are like none."""
    texts = [[_phrases(words) for words in side] for side in (left, right)]
    every = [*texts[0], *texts[1]]
    if not any(len(text) for text in every):
        return
    distinct, counts = np.unique(np.concatenate(every), return_counts=True)

    def rarest(text: Phrases) -> Phrases:
        size = len(text) - math.ceil(threshold * len(text) - _ROUNDING) + 1 if len(text) else 0
        commonness = counts[np.searchsorted(distinct, text)]
        return text[np.argsort(commonness, kind="stable")[:size]]

    heads = [rarest(text) for text in texts[1]]
    index = np.concatenate([*heads, np.empty(0, np.int64)])
    owners = np.repeat(np.arange(len(heads)), [len(head) for head in heads])
    order = np.argsort(index, kind="stable")
    index, owners = index[order], owners[order]
    for place, text in enumerate(texts[0]):
        head = rarest(text)
        ends = np.searchsorted(index, head, "left"), np.searchsorted(index, head, "right")
        spans = [owners[first:last] for first, last in zip(*ends, strict=True)]
        for other in np.unique(np.concatenate(spans)) if spans else ():
            share = _jaccard(text, texts[1][other], threshold)
            if share >= threshold:
                yield place, int(other), share


def _phrases(words: Words) -> Phrases:
    return np.array(sorted(map(hash, shingles(words))), dtype=np.int64)


def _jaccard(one: Phrases, other: Phrases, threshold: float) -> float:
    """The share of phrases that both have; 0 where the sizes alone keep it below `threshold`."""
    small, large = sorted((len(one), len(other)))
    if small < threshold * large - _ROUNDING:
        return 0.0
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / (small + large - both)


def row_matches(
    rows: Sequence[Passage], others: Sequence[Passage], threshold: float
) -> dict[int, list[tuple[int, RowMatch]]]:
    """Place in `rows` → those of `others` that say the same, exactly or nearly.

    As in an audit of two files: near rows are near in the whole text, and in the text without the
    columns that name an entity.
    """
    matches: dict[int, list[tuple[int, RowMatch]]] = {}
    by_words: dict[Words, list[int]] = {}
    for place, passage in enumerate(others):
        by_words.setdefault(passage.words, []).append(place)
    for place, passage in enumerate(rows):
        for other in by_words.get(passage.words, ()):
            match = RowMatch("exact", passage.source, others[other].source, 1.0)
            matches.setdefault(place, []).append((other, match))
    texts = [[passage.words for passage in part] for part in (rows, others)]
    for place, other, share in near_pairs(texts[0], texts[1], threshold):
        one, two = rows[place], others[other]
        if one.words != two.words and same_words(one.core, two.core, threshold):
            match = RowMatch("near", one.source, two.source, share)
            matches.setdefault(place, []).append((other, match))
    return matches
