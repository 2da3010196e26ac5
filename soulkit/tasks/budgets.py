"""Word budgets of lists: what a prompt keeps of many short texts.

A long text is cut at its end, or at its start where its end says most. A list has two better ways.
Examples of equal standing share their budget fairly, so that one long post does not push out the
others; a history loses its oldest entries, because the newest say most about what comes next.

Example: texts of 3, 40 and 50 words with 63 words between them keep 3, 30 and 30.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

MARK = "[...]"
"""Stands where words were left out."""


def total_words(texts: Iterable[str]) -> int:
    """White-space words of all texts together."""
    return sum(len(text.split()) for text in texts)


def first_words(text: str, count: int) -> str:
    """The first `count` words as they stand, and a mark when there were more."""
    # No list of all words: it would take fifty times the memory of a long text. Most texts fit, and
    # to see that is ten times as fast without the places of their words.
    if count > 0 and len(text.split(None, count)) <= count:
        return text
    ends = [word.end() for word in islice(re.finditer(r"\S+", text), max(count, 0) + 1)]
    if len(ends) <= count:
        return text
    return f"{text[: ends[count - 1]]} {MARK}" if count > 0 else MARK


def last_words(text: str, count: int) -> str:
    """The last `count` words as they stand, behind a mark when there were more."""
    starts = deque((word.start() for word in re.finditer(r"\S+", text)), maxlen=max(count, 0) + 1)
    if len(starts) <= count:
        return text
    return f"{MARK} {text[starts[1] :]}" if count > 0 else MARK


def fair_cap(lengths: Sequence[int], budget: int) -> int:
    """The largest cap under which texts of these lengths, in words, fit the budget together."""
    words_left = budget
    for place, length in enumerate(sorted(lengths)):
        share = words_left // (len(lengths) - place)
        if length > share:
            return share
        words_left -= length
    return max(lengths, default=0)


def share_fairly(
    items: Sequence[Mapping[str, str]], budget: int | None
) -> tuple[tuple[Mapping[str, str], ...], int]:
    """(items whose texts fit the budget together, words cut); every item stays."""
    texts = [text for item in items for text in item.values()]
    total = total_words(texts)
    if budget is None or total <= budget:
        return tuple(items), 0
    cap = fair_cap([len(text.split()) for text in texts], budget)
    fitted = tuple({k: first_words(text, cap) for k, text in item.items()} for item in items)
    return fitted, sum(max(len(text.split()) - cap, 0) for text in texts)


def keep_latest(entries: Sequence[str], budget: int | None) -> tuple[tuple[str, ...], int]:
    """(the last entries that fit the budget, words cut); the very last is cut to fit if it must."""
    total = total_words(entries)
    if budget is None or total <= budget:
        return tuple(entries), 0
    latest: list[str] = []
    words_left = budget
    for entry in reversed(entries):
        length = len(entry.split())
        if length > words_left:
            break
        latest.insert(0, entry)
        words_left -= length
    if latest:
        return tuple(latest), total - total_words(latest)
    return (first_words(entries[-1], budget),), total - budget
