"""Shared words of two short answers, as question-answering benchmarks count them.

Example: `the cat sat` against `a cat sat down` shares two words of two and of three: F1 0.8.
"""

from __future__ import annotations

import re
import string
from collections import Counter

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
