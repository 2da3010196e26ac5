"""Text metrics: lexical diversity, word overlap, and similarity to a reference.

* `jaccard`, `token_f1`: shared words, as sets or as question-answering benchmarks count them
* `mattr`, `hdd`, `yules_k`: diversity of tokens (McCarthy & Jarvis 2010, Yule 1944)
* `bleu`: sacrebleu's sentence BLEU, `case:lc|eff:yes|tok:13a|smooth:exp`
* `rouge_l`: F1 of the longest common subsequence of words (`rougeL`, not `rougeLsum`),
rouge-score's
  words, no stemming
* `subword_tokens`: ids of `o200k_base`, whose vocabulary comes with the package bpe-openai

`bleu` and `rouge_l` need the extra `metrics`. Without the package a metric is None, never 0, and
the reason is logged once."""

from __future__ import annotations

import logging
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soulkit.errors import MissingPackage

Bag = frozenset[str]
_ROWS = 1000
"""Number of texts compared with all others at a time; limits memory."""


def jaccard(one: Set[Any], other: Set[Any]) -> float:
    """Size of the intersection / size of the union, in [0, 1]; 1 for two empty sets."""
    union = len(one | other)
    return len(one & other) / union if union else 1.0


def mean_jaccard(bags: Iterable[Bag]) -> float | None:
    """The mean Jaccard over all pairs, in [0, 1]; None for fewer than two texts.

    Equal bags are grouped, and the rest is computed with matrix products: a thousand messages take
    a few hundredths of a second."""
    counted = Counter(bags)
    n = counted.total()
    if n < 2:
        return None
    weights = np.array(list(counted.values()), dtype=np.float64)
    alike = float((weights * (weights - 1) / 2).sum()) + _between(list(counted), weights)
    return alike / (n * (n - 1) / 2)


def _between(bags: Sequence[Bag], weights: NDArray[np.float64]) -> float:
    """Weighted sum of the Jaccard over pairs of different bags."""
    vectors, sizes = _vectors(bags), np.array([len(bag) for bag in bags], dtype=np.float64)
    total = 0.0
    for start in range(0, len(bags), _ROWS):
        part = slice(start, start + _ROWS)
        shared = (vectors[part] @ vectors.T).astype(np.float64)
        union = sizes[part, None] + sizes[None, :] - shared
        alike = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
        np.fill_diagonal(alike[:, start:], 0.0)  # no pairs of a bag with itself
        total += float(weights[part] @ alike @ weights)
    return total / 2


def _vectors(bags: Sequence[Bag]) -> NDArray[np.float32]:
    """0/1 matrix [bags, words] of the words that several bags contain."""
    common = Counter(word for bag in bags for word in bag)
    column = {word: i for i, word in enumerate(w for w, count in common.items() if count > 1)}
    vectors = np.zeros((len(bags), len(column)), dtype=np.float32)
    for row, bag in enumerate(bags):
        for word in bag:
            if word in column:
                vectors[row, column[word]] = 1
    return vectors


# Like \b(a|an|the)\b, but many times faster because it starts with a letter.
_ARTICLES = re.compile(r"(?:a(?<!\w\w)n?|t(?<!\w\w)he)\b")
_NO_MARKS = str.maketrans("", "", string.punctuation)


def answer_words(text: str) -> list[str]:
    """Words in lower case, without English articles and without ASCII punctuation."""
    return _ARTICLES.sub(" ", text.lower()).translate(_NO_MARKS).split()


def token_f1(gold: str, answer: str) -> float:
    """F1 of the words of both with multiplicity, in [0, 1]; 0 if either has none."""
    return overlap_f1(answer_words(gold), answer_words(answer))


def overlap_f1(gold: Iterable[str], answer: Iterable[str]) -> float:
    """F1 of two lists of words with multiplicity, in [0, 1]; 0 if either is empty."""
    gold_counts, answer_counts = Counter(gold), Counter(answer)
    shared = (gold_counts & answer_counts).total()
    if not shared:
        return 0.0
    precision, recall = shared / answer_counts.total(), shared / gold_counts.total()
    return 2 * precision * recall / (precision + recall)


log = logging.getLogger(__name__)
Tokens = Sequence[Hashable]
WINDOW = 50
SAMPLE = 42
ENCODING = "o200k_base"
_PIECE = 40_000
"""Characters to encode at a time; the package rejects more than 200,000 tokens at once."""


# -- diversity -----------------------------------------------------------------------------------


def mattr(tokens: Tokens, window: int = WINDOW) -> float:
    """Moving-average type-token ratio, in (0, 1], or 0 without tokens: the mean share of different
    tokens over all windows, or of the whole text if it is shorter.

    ValueError for a window below 1.
    """
    if not tokens:
        return 0.0
    if window < 1:
        raise ValueError(f"the window must be at least 1 token, not {window}")
    size = min(window, len(tokens))
    counts = Counter(tokens[:size])
    types = total = len(counts)
    for leaving, entering in zip(tokens, tokens[size:], strict=False):
        counts[leaving] -= 1
        types -= counts[leaving] == 0
        types += counts[entering] == 0
        counts[entering] += 1
        total += types
    return total / ((len(tokens) - size + 1) * size)


def hdd(tokens: Tokens, sample: int = SAMPLE) -> float:
    """Expected share of different tokens in `sample` tokens drawn without replacement, in (0, 1],
    or 0 without tokens.

    A shorter text is used whole. ValueError for a sample below 1.
    """
    if not tokens:
        return 0.0
    if sample < 1:
        raise ValueError(f"the sample must be at least 1 token, not {sample}")
    n = len(tokens)
    size = min(sample, n)
    draws = math.comb(n, size)
    frequencies = Counter(Counter(tokens).values())
    present = sum(
        types * (1 - math.comb(n - frequency, size) / draws)
        for frequency, types in frequencies.items()
    )
    return present / size


def yules_k(tokens: Tokens) -> float:
    """Yule's K, 10,000 · (Σ f² − N) / N²: 0 if every token occurs once, just below 10,000 for one
    repeated token. Higher means *less* diversity."""
    if not tokens:
        return 0.0
    n = len(tokens)
    squares = sum(count * count for count in Counter(tokens).values())
    return 10_000 * (squares - n) / (n * n)


def z_score(value: float, mean: float, deviation: float) -> float | None:
    """(value − mean) / deviation; None if the deviation is 0."""
    return (value - mean) / deviation if deviation > 0 else None


# -- similarity ----------------------------------------------------------------------------------


def bleu(reference: str, hypothesis: str) -> float | None:
    """BLEU of `hypothesis`, in [0, 1]; 0 if it is empty or shares no word.

    None for a blank reference, or without the package.
    """
    metric = _bleu()
    if metric is None or not reference.strip():
        return None
    score = metric.sentence_score(hypothesis, [reference]).score / 100
    _forget(metric.tokenizer)
    return min(float(score), 1.0)


def rouge_l(reference: str, hypothesis: str) -> float | None:
    """F1 of the longest common subsequence of words, in [0, 1]; 0 if they share none.

    Words are runs of a–z and 0–9. None for a reference without words (for example in another
    script), or without the package.
    """
    words = _rouge_words()
    gold = words(reference) if words is not None else []
    if words is None or not gold:
        return None
    others = words(hypothesis)
    return 2 * common_length(gold, others) / (len(gold) + len(others))


def common_length(one: Tokens, other: Tokens) -> int:
    """Length of the longest common subsequence, with the bit-parallel algorithm of Hyyrö (2004)."""
    places: dict[Hashable, int] = {}
    for place, token in enumerate(one):
        places[token] = places.get(token, 0) | 1 << place
    full = (1 << len(one)) - 1
    row = full
    for token in other:
        matches = row & places.get(token, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(one) - row.bit_count()


# -- tokens --------------------------------------------------------------------------------------


def subword_tokens(text: str) -> list[int] | None:
    """The token ids of `text` in ENCODING, with special tokens as plain text; None without the
    package."""
    encoding = _encoding()
    if encoding is None:
        return None
    ids: list[int] = []
    start = 0
    while start < len(text):
        end = start + _PIECE
        if end < len(text):  # a space belongs to the next word
            blank = text.rfind(" ", start + 1, end)
            end = blank if blank > start else end
        ids += encoding.encode_ordinary(text[start:end])
        start = end
    return ids


# -- packages ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _bleu() -> Any:
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        _say_undefined("sacrebleu", "BLEU")
        return None
    return BLEU(effective_order=True, lowercase=True, tokenize="13a")


def _forget(tokenizer: Any) -> None:
    """Clear sacrebleu's cache of up to 65,536 tokenised texts, which are whole dialogues here."""
    for each in (tokenizer, getattr(tokenizer, "_post_tokenizer", None)):
        memory: Any = vars(type(each)).get("__call__")
        if hasattr(memory, "cache_clear"):
            memory.cache_clear()


@lru_cache(maxsize=1)
def _rouge_words() -> Callable[[str], list[str]] | None:
    try:
        from rouge_score.tokenize import tokenize
    except ImportError:
        _say_undefined("rouge_score", "ROUGE-L")
        return None
    return lambda text: tokenize(text, None)


@lru_cache(maxsize=1)
def _encoding() -> Any:
    try:
        import bpe_openai
    except ImportError:
        _say_undefined("bpe_openai", "counting subword tokens")
        return None
    return bpe_openai.get_encoding(ENCODING)


def _say_undefined(package: str, use: str) -> None:
    """Log why a metric has no value; only once, because callers are cached."""
    log.warning("%s", " ".join(MissingPackage(package, f"{use}; it stays undefined").lines()))
