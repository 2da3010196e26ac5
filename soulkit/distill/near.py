"""Which texts are nearly the same: exactly, and without comparing each with each.

Two sets of phrases that share at least a part t of all their phrases share one of the rarest
|x| - ceil(t·|x|) + 1 of either (prefix filtering: Chaudhuri, Ganti & Kaushik 2006; Bayardo, Ma &
Srikant 2007). So only texts that share such a phrase are compared, and none is missed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from soulkit.data.contamination import Passage, RowMatch, Shingles, Words, shingles
from soulkit.metrics.diversity import jaccard

_ROUNDING = 1e-9


def same_words(one: Words, other: Words, threshold: float) -> bool:
    """Whether two texts are equal, or share so much of their word triples."""
    return one == other or jaccard(shingles(one), shingles(other)) >= threshold


def near_pairs(
    left: Sequence[Shingles], right: Sequence[Shingles], threshold: float
) -> Iterator[tuple[int, int, float]]:
    """(place in `left`, place in `right`, Jaccard index) of all pairs at or above `threshold`, by
    place; texts without any phrase are like none."""
    commonness = Counter(phrase for text in (*left, *right) for phrase in text)
    index: dict[object, list[int]] = {}
    for place, text in enumerate(right):
        for phrase in _rarest(text, commonness, threshold):
            index.setdefault(phrase, []).append(place)
    for place, text in enumerate(left):
        phrases = _rarest(text, commonness, threshold)
        for other in sorted({o for phrase in phrases for o in index.get(phrase, ())}):
            share = jaccard(text, right[other])
            if share >= threshold:
                yield place, other, share


def _rarest(text: Shingles, commonness: Counter[Words], threshold: float) -> list[Words]:
    """The phrases of which a text that is as near must have one; rarest first, then by spelling."""
    count = len(text) - math.ceil(threshold * len(text) - _ROUNDING) + 1
    return sorted(text, key=lambda phrase: (commonness[phrase], phrase))[: count if text else 0]


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
    texts = [[shingles(passage.words) for passage in part] for part in (rows, others)]
    for place, other, share in near_pairs(texts[0], texts[1], threshold):
        one, two = rows[place], others[other]
        if one.words != two.words and same_words(one.core, two.core, threshold):
            match = RowMatch("near", one.source, two.source, share)
            matches.setdefault(place, []).append((other, match))
    return matches
