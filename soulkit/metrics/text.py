"""How varied the words of a text are, and how much two texts share.

Shared words: as sets (`jaccard`; 1 for two sets without any word), and of two short answers as
question-answering benchmarks count them (`token_f1`).

Variety (of any hashable tokens, 0.0 for none; McCarthy & Jarvis 2010, Yule 1944):

* `mattr`: the mean share of different tokens over all windows of 50.
* `hdd`: the share of different tokens to be expected in 42 of them drawn without replacement.
* `yules_k`: repetition, 10,000 · (Σ f² − N) / N²; higher means *less* variety.

Likeness of a text to a reference, in [0, 1], where the extra `metrics` is installed:

* `bleu`: sacrebleu's sentence BLEU, `case:lc|eff:yes|tok:13a|smooth:exp`: of a text of three words
  the orders 1 to 3 count, and where some order has no match, the product is small, not zero.
* `rouge_l`: F1 of the longest common subsequence of the words of the whole texts (`rougeL`, not
  `rougeLsum`: line breaks mean nothing), rouge-score's words, no stemming.

`subword_tokens` are the ids of `o200k_base`, whose vocabulary comes with the package bpe-openai.
What a missing package leaves undefined is None, never 0; the reason is logged once.
"""

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


# As \b(a|an|the)\b, but a letter is looked for first: that is many times quicker.
_ARTICLES = re.compile(r"(?:a(?<!\w\w)n?|t(?<!\w\w)he)\b")
_NO_MARKS = str.maketrans("", "", string.punctuation)


def answer_words(text: str) -> list[str]:
    """Words in lower case, without English articles and without ASCII punctuation."""
    return _ARTICLES.sub(" ", text.lower()).translate(_NO_MARKS).split()


def token_f1(gold: str, answer: str) -> float:
    """F1 of the words of both, in [0, 1], repeated words counted; 0 when either has none."""
    gold_counts, answer_counts = Counter(answer_words(gold)), Counter(answer_words(answer))
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
"""Characters that are encoded at a time: the package refuses more than 200,000 tokens at once."""


# -- variety -------------------------------------------------------------------------------------


def mattr(tokens: Tokens, window: int = WINDOW) -> float:
    """Moving-average type-token ratio, in (0, 1]; of a text no longer than `window` its plain one.

    Raises ValueError for a window below 1.
    """
    if not tokens:
        return 0.0
    if window < 1:
        raise ValueError(f"a window of {window} tokens holds none")
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
    """Expected share of different tokens among `sample` drawn without replacement, in (0, 1].

    A text of fewer tokens is drawn whole. Raises ValueError for a sample below 1.
    """
    if not tokens:
        return 0.0
    if sample < 1:
        raise ValueError(f"a sample of {sample} tokens holds none")
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
    """Yule's K, from 0 (every token once) to just below 10,000 (one token over and over)."""
    if not tokens:
        return 0.0
    n = len(tokens)
    squares = sum(count * count for count in Counter(tokens).values())
    return 10_000 * (squares - n) / (n * n)


def z_score(value: float, mean: float, deviation: float) -> float | None:
    """How many deviations `value` lies above `mean`; None where there is no deviation at all."""
    return (value - mean) / deviation if deviation > 0 else None


# -- likeness ------------------------------------------------------------------------------------


def bleu(reference: str, hypothesis: str) -> float | None:
    """BLEU of `hypothesis`, in [0, 1]; 0 when it is empty or shares no word.

    None for a blank reference, or without the package.
    """
    metric = _bleu()
    if metric is None or not reference.strip():
        return None
    score = metric.sentence_score(hypothesis, [reference]).score / 100
    _forget(metric.tokenizer)
    return min(float(score), 1.0)


def rouge_l(reference: str, hypothesis: str) -> float | None:
    """F1 of the longest common subsequence of words, in [0, 1]; 0 when they share none.

    Words are runs of a–z and 0–9. None for a reference without any (a text in another script, say),
    or without the package.
    """
    words = _rouge_words()
    gold = words(reference) if words is not None else []
    if words is None or not gold:
        return None
    others = words(hypothesis)
    return 2 * common_length(gold, others) / (len(gold) + len(others))


def common_length(one: Tokens, other: Tokens) -> int:
    """Length of the longest common subsequence.

    One bit for each token of `one` (Hyyrö 2004): some ten milliseconds for thousands of words,
    where a table takes seconds.
    """
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
    """The ids of `text` in ENCODING, marks of special tokens as plain text; None without the
    package."""
    encoding = _encoding()
    if encoding is None:
        return None
    ids: list[int] = []
    start = 0
    while start < len(text):
        end = start + _PIECE
        if end < len(text):  # a blank belongs to the word after it
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
    """Empty sacrebleu's memory of tokenised texts: 65,536 of them, whole dialogues here."""
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
        _say_undefined("bpe_openai", "what is counted in subword tokens")
        return None
    return bpe_openai.get_encoding(ENCODING)


def _say_undefined(package: str, use: str) -> None:
    """Why a metric has no value: once, since whoever asks for the package is cached."""
    log.warning("%s", " ".join(MissingPackage(package, f"{use}; it stays undefined").lines()))
