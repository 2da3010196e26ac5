"""Near texts: their words and phrases, and that comparing all pairs finds the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.data.contamination import (
    PhraseIndex,
    Words,
    folded_words,
    near_pairs,
    phrase_jaccard,
    phrases_of,
    same_words,
)


def jaccard(one: Words, other: Words) -> float:
    """Shared runs of three words, by the definition."""
    left, right = (
        {text[i : i + 3] for i in range(max(len(text) - 2, min(len(text), 1)))}
        for text in (one, other)
    )
    return len(left & right) / len(left | right) if left | right else 1.0


def test_words_ignore_case_punctuation_and_layout() -> None:
    assert folded_words("Red_Box, «RED box»\n1.") == ("red", "box", "red", "box", "1")
    assert folded_words({"a": ["Tea?", None], "b": 2}) == ("tea", "2")
    assert folded_words("他在哪里?") == ("他", "在", "哪", "里")


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [("abcdef", "abcdxy", 2 / 6), ("ab", "ab", 1), ("ab", "ba", 0), ("", "", 1), ("", "a", 0)],
)
def test_the_similarity_is_the_share_of_common_triples(one: str, other: str, share: float) -> None:
    texts = tuple(one), tuple(other)
    assert phrase_jaccard(*map(phrases_of, texts)) == pytest.approx(share) == jaccard(*texts)
    assert same_words(*texts, 0.5) == (share >= 0.5)


@given(st.integers(0, 10_000), st.sampled_from([1e-9, 0.3, 0.5, 0.8, 0.95, 1.0]))
def test_no_near_pair_is_missed(seed: int, threshold: float) -> None:
    rng = random.Random(seed)
    texts = [tuple(rng.choices("abcd", k=rng.randrange(12))) for _ in range(24)]
    left, right = texts[:14], texts[8:]
    every = {
        (i, j): jaccard(a, b)
        for i, a in enumerate(left)
        for j, b in enumerate(right)
        if a and b and jaccard(a, b) >= threshold
    }
    assert {(i, j): share for i, j, share in near_pairs(left, right, threshold)} == every


@pytest.mark.parametrize("threshold", [0.6, 0.8, 0.9])
def test_no_near_pair_of_long_texts_of_many_lengths_is_missed(threshold: float) -> None:
    """A text, parts of it and texts with some of its words changed: half of all pairs are near."""
    rng = random.Random(7)
    words = [f"w{n}" for n in range(120)]
    texts = [tuple(words[rng.randrange(12) : 120 - rng.randrange(12)]) for _ in range(40)]
    for _ in range(40):
        copy = list(words)
        for place in rng.sample(range(120), rng.randrange(9)):
            copy[place] = f"x{rng.randrange(50)}"
        texts.append(tuple(copy))
    every = {
        (i, j)
        for i, a in enumerate(texts)
        for j, b in enumerate(texts)
        if jaccard(a, b) >= threshold
    }
    assert {(i, j) for i, j, _ in near_pairs(texts, texts, threshold)} == every
    assert 200 < len(every) < 6400


def test_a_phrase_tells_which_texts_have_it() -> None:
    texts = [phrases_of(tuple(text)) for text in ("abcd", "", "xbcd", "abcx")]
    index = PhraseIndex(texts)
    assert np.bincount(index.owners(texts[0]), minlength=4).tolist() == [2, 0, 1, 1]
    assert not len(index.owners(texts[1])) and not len(PhraseIndex([]).owners(texts[0]))
