"""Which texts are nearly the same: exactly, and without comparing each with each.

Texts are compared by their phrases: every run of three words, in one case, without punctuation. Two
texts are near when they share at least the part t of all their phrases (Jaccard). Prefix filtering
(Chaudhuri, Ganti & Kaushik 2006; Xiao et al. 2011) finds all such pairs: a shorter text x and a
longer one y share at least 2t/(1+t)·|x| phrases, and at least t·|y|. So the rarest phrase that both
have is one of the rarest |x| - ⌈2t/(1+t)·|x|⌉ + 1 of x and one of the rarest |y| - ⌈t·|y|⌉ + 1 of
y. Only texts that share such a phrase are compared, and none is missed.

A phrase is held as 64 bits: long rows have thousands each.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from soulkit.data.literals import texts_of
from soulkit.errors import ConfigError

THRESHOLD = 0.8
PHRASE_WORDS = 3
"""Benchmark rows are too short for longer phrases."""

# Scripts without blanks between words: each sign counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_ROUNDING = 1e-9
_COUNTERS = 1 << 24
"""Phrases share counters: the order of rarity must be the same for all texts, not exact."""

Words = tuple[str, ...]
Phrases = NDArray[np.int64]
"""The hashes of a text's phrases, each once, in rising order."""


def check_threshold(threshold: float, meaning: str) -> None:
    """ConfigError with its `meaning` unless 0 < threshold <= 1."""
    if not 0 < threshold <= 1:
        raise ConfigError(
            f"A threshold of {threshold:g} is no share.",
            meaning,
            f"Give a number above 0 and up to 1, such as {THRESHOLD:g}.",
        )


def folded_words(value: Any) -> Words:
    """The words of every text in a value, in one case, without punctuation."""
    text = unicodedata.normalize("NFKC", " ".join(texts_of(value))).casefold()
    return tuple(WORD.findall(text))


def phrases_of(words: Words) -> Phrases:
    """The phrases of a text; a shorter text is one phrase, an empty one has none."""
    last = max(len(words) - PHRASE_WORDS + 1, min(len(words), 1))
    return np.array(
        sorted({hash(words[i : i + PHRASE_WORDS]) for i in range(last)}), dtype=np.int64
    )


def phrase_jaccard(one: Phrases, other: Phrases, threshold: float = 0.0) -> float:
    """The share of phrases that both texts have (Jaccard); 1 for two texts without any.

    0 where the sizes alone keep it below `threshold`.
    """
    short, long = sorted((one, other), key=len)
    if not len(long):
        return 1.0
    if len(short) < threshold * len(long) - _ROUNDING:
        return 0.0
    places = np.searchsorted(long, short)
    common = np.count_nonzero(long.take(places, mode="clip") == short)
    return common / (len(short) + len(long) - common)


def same_words(one: Words, other: Words, threshold: float) -> bool:
    """Whether two texts are equal or near."""
    return one == other or phrase_jaccard(phrases_of(one), phrases_of(other)) >= threshold


def near_pairs(
    left: Sequence[Words], right: Sequence[Words], threshold: float
) -> Iterator[tuple[int, int, float]]:
    """(place in `left`, place in `right`, similarity) of all near pairs, by place.

    Texts without any words are near none.
    """
    texts, others = ([phrases_of(words) for words in side] for side in (left, right))
    counts = PhraseCounts(threshold)
    for text in (*texts, *others):
        counts.add(text)
    index = NearIndex([counts.head(text) for text in others])
    for place, text in enumerate(texts):
        for other in index.candidates(counts.head(text)):
            share = phrase_jaccard(text, others[other], threshold)
            if share >= threshold:
                yield place, int(other), share


class Head(NamedTuple):
    """The rarest phrases of a text, without those that no other text has."""

    short: Phrases
    """For a comparison with longer texts."""
    long: Phrases
    """For a comparison with shorter texts."""


class PhraseCounts:
    """How rare phrases are, once all texts of a comparison were added."""

    def __init__(self, threshold: float) -> None:
        self._lengths = 2 * threshold / (1 + threshold), threshold
        self._counts = np.zeros(_COUNTERS, dtype=np.int32)

    def add(self, text: Phrases) -> None:
        np.add.at(self._counts, text & (_COUNTERS - 1), 1)

    def head(self, text: Phrases) -> Head:
        """The head of a text that was added."""
        counts = self._counts[text & (_COUNTERS - 1)]
        ordered = text[np.argsort(counts, kind="stable")]
        alone = int((counts == 1).sum())
        short, long = (
            len(text) - math.ceil(share * len(text) - _ROUNDING) + 1 for share in self._lengths
        )
        return Head(ordered[alone:short].copy(), ordered[alone:long].copy())


class PhraseIndex:
    """Which of some texts have a phrase."""

    def __init__(self, texts: Sequence[Phrases]) -> None:
        phrases = np.concatenate([np.empty(0, np.int64), *texts])
        owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        order = np.argsort(phrases, kind="stable")
        self._phrases, self._owners = phrases[order], owners[order]

    def owners(self, phrases: Phrases) -> NDArray[np.intp]:
        """The places of texts with some of `phrases`, once for each that a text has."""
        first = np.searchsorted(self._phrases, phrases, "left")
        last = np.searchsorted(self._phrases, phrases, "right")
        spans = [self._owners[a:b] for a, b in zip(first, last, strict=True) if a < b]
        return np.concatenate([np.empty(0, np.intp), *spans])


class NearIndex:
    """Which of some texts may be near another one."""

    def __init__(self, heads: Sequence[Head]) -> None:
        self._short = PhraseIndex([head.short for head in heads])
        self._long = PhraseIndex([head.long for head in heads])

    def candidates(self, head: Head) -> NDArray[np.intp]:
        """The places of those that may be near the text with this head, in order."""
        pairs = self._long.owners(head.short), self._short.owners(head.long)
        places = np.sort(np.concatenate(pairs))
        return places[np.diff(places, prepend=-1) > 0]  # far faster than np.unique
