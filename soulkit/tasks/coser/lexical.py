"""BLEU and ROUGE-L as the reference implementation has them without optional packages.

Words are runs of letters, digits and underscores in small letters. BLEU takes orders 1 to 4, fewer
for a text that is shorter, and is 0 where any order has no match; ROUGE-L is the F1 of the longest
common subsequence. On the recorded side each message bears its speaker's name, on the played side
none does, which depresses both: `paper` compares the messages alone (metrics/ngrams.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from soulkit.metrics.ngrams import common_length

MOST_ORDERS = 4


def plain_bleu(reference: str, hypothesis: str) -> float:
    """Unsmoothed BLEU of one text against another, 0 to 1; 0 where either is empty."""
    gold, words = _words(reference), _words(hypothesis)
    if not gold or not words:
        return 0.0
    orders = range(1, min(MOST_ORDERS, len(words)) + 1)
    shares = [_precision(gold, words, order) for order in orders]
    if not all(shares):
        return 0.0
    brevity = 1.0 if len(words) >= len(gold) else math.exp(1 - len(gold) / len(words))
    return brevity * math.exp(sum(map(math.log, shares)) / len(shares))


def plain_rouge_l(reference: str, hypothesis: str) -> float:
    """F1 of the longest common subsequence of words, 0 to 1; 0 where either is empty."""
    gold, words = _words(reference), _words(hypothesis)
    common = common_length(gold, words)
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _precision(gold: Sequence[str], words: Sequence[str], order: int) -> float:
    total = len(words) - order + 1
    counts = Counter(tuple(words[i : i + order]) for i in range(total))
    limits = Counter(tuple(gold[i : i + order]) for i in range(len(gold) - order + 1))
    return sum(min(count, limits[gram]) for gram, count in counts.items()) / total
