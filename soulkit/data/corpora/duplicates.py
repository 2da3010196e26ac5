"""Conversations that a source holds twice, and those that give rows to evaluate on away.

Duplicates: `exact` have the same words under the same roles; `near` share at least `threshold` of
the word triples of what is said (Jaccard) with one that stays, system prompts aside. Of equal rows
the first stays. The source is read three times.

Leaks count how much of one stands in the other, system prompts included:

* `holds`: the conversation has at least `threshold` of the triples of the evaluation row, or of
  what was recorded for it (its history or answer) without the aim or persona written for the row;
* `part`: the evaluation row has at least `threshold` of the triples of the conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from soulkit.data.contamination import (
    THRESHOLD,
    NearIndex,
    Passage,
    PhraseCounts,
    PhraseIndex,
    Phrases,
    RowMatch,
    check_threshold,
    folded_words,
    phrase_jaccard,
    phrases_of,
)
from soulkit.data.corpora.file_rows import source_rows
from soulkit.data.corpora.lessons import ChatRow, conversation_of
from soulkit.data.corpora.settings import AnySource, source_settings
from soulkit.data.files import BadRecord, BadRow, SourcedRow

LEAST_PHRASES = 8
"""Of a row; a shorter one is common speech, and stands in many conversations by chance."""
LEAST_OF_A_CHAT = 20
"""Phrases of a conversation that may be `part` of a row."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A row that says what an earlier one says."""

    row: str
    first: str
    kind: str
    similarity: float


@dataclass(slots=True)
class Duplicates:
    """What is double in a source."""

    rows: int = 0
    duplicates: list[Duplicate] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    """Rows without a conversation: nothing is known about those."""

    def left_out(self) -> frozenset[str]:
        """The keys of the rows that a clean file does not have."""
        return frozenset([d.row for d in self.duplicates] + [bad.source for bad in self.bad])


def find_duplicates(source: AnySource, threshold: float = THRESHOLD) -> Duplicates:
    """Every row of `source` that an earlier one makes superfluous, in file order.

    ConfigError unless 0 < threshold <= 1.
    """
    check_threshold(threshold, "Near-duplicates share at least this part of their word triples.")
    report, counts = Duplicates(), PhraseCounts(threshold)
    numbers: dict[str, int] = {}
    distinct: dict[bytes, str] = {}
    for key, conversation in _conversations(source, report):
        numbers[key] = len(numbers)
        first = distinct.setdefault(_digest(conversation), key)
        if first is key:
            counts.add(_spoken_phrases(conversation))
        else:
            report.duplicates.append(Duplicate(key, first, "exact", 1.0))
    report.duplicates += _near(source, list(distinct.values()), counts, threshold)
    report.duplicates.sort(key=lambda d: numbers[d.row])
    return report


def _conversations(source: AnySource, report: Duplicates) -> Iterator[tuple[str, ChatRow]]:
    for key, row in source_rows(source_settings(source).path):
        report.rows += 1
        try:
            yield key, _conversation(key, row)
        except BadRecord as error:
            report.bad.append(BadRow(key, str(error)))


def _conversation(key: str, row: Any) -> ChatRow:
    if isinstance(row, BadRow):
        raise BadRecord(row.why)
    return conversation_of(row, key)


def _digest(conversation: ChatRow) -> bytes:
    words = [(u.role or u.speaker, folded_words(u.text)) for u in conversation.utterances]
    return hashlib.blake2b(repr(words).encode("utf-8"), digest_size=16).digest()


def _spoken_phrases(conversation: ChatRow) -> Phrases:
    spoken = [u.text for u in conversation.utterances if u.role != "system"]
    return phrases_of(folded_words(spoken))


def _phrases_of_rows(source: AnySource, keys: Collection[str]) -> Iterator[tuple[str, Phrases]]:
    for key, row in source_rows(source_settings(source).path):
        if key in keys:
            yield key, _spoken_phrases(conversation_of(row, key))


def _near(
    source: AnySource, keys: Sequence[str], counts: PhraseCounts, threshold: float
) -> Iterator[Duplicate]:
    """Those of `keys` that are near an earlier one that stays, in file order."""
    heads = [counts.head(phrases) for _, phrases in _phrases_of_rows(source, set(keys))]
    index = NearIndex(heads)
    concerned = {
        keys[place] for place, head in enumerate(heads) if (index.candidates(head) != place).any()
    }
    phrases = dict(_phrases_of_rows(source, concerned))
    staying = np.ones(len(keys), dtype=bool)
    for place, key in enumerate(keys):
        candidates = index.candidates(heads[place]) if key in concerned else np.empty(0, np.intp)
        for other in candidates[(candidates < place) & staying[candidates]].tolist():
            share = phrase_jaccard(phrases[key], phrases[keys[other]], threshold)
            if share >= threshold:
                staying[place] = False
                yield Duplicate(key, keys[other], "near", round(share, 4))
                break


@dataclass(slots=True)
class ChatLeaks:
    """What a corpus gives away."""

    chats: int = 0
    evaluation_rows: int = 0
    short: int = 0
    matches: list[RowMatch] = field(default_factory=list)
    """For each conversation that gives something away, the row that it gives away most of."""
    evaluations: set[str] = field(default_factory=set)
    """Sources of every row that some conversation gives away."""
    bad: list[BadRow] = field(default_factory=list)

    def left_out(self) -> frozenset[str]:
        """The keys of the rows that a clean file does not have."""
        return frozenset([m.train for m in self.matches] + [bad.source for bad in self.bad])


def find_leaks(
    rows: Iterable[SourcedRow], evaluation: Sequence[Passage], threshold: float = THRESHOLD
) -> ChatLeaks:
    """Every conversation in `rows` that gives a row of `evaluation` away.

    ConfigError unless 0 < threshold <= 1.
    """
    check_threshold(threshold, "A leak is at least this part of the word triples of a row.")
    report = ChatLeaks(evaluation_rows=len(evaluation))
    texts = _EvaluationTexts(evaluation)
    report.short = len(evaluation) - len(set(texts.sources))
    for key, row in rows:
        report.chats += 1
        try:
            spoken = [u.text for u in _conversation(key, row).utterances]
        except BadRecord as error:
            report.bad.append(BadRow(key, str(error)))
            continue
        _compare(key, phrases_of(folded_words(spoken)), texts, threshold, report)
    return report


class _EvaluationTexts:
    """The texts of evaluation rows that are long enough to be looked for, by number."""

    def __init__(self, evaluation: Sequence[Passage]) -> None:
        texts = [
            (passage.source, np.unique(np.concatenate([phrases_of(words) for words in text])))
            for passage in evaluation
            for text in ((passage.words,), *passage.recorded)
            if text
        ]
        texts = [(source, phrases) for source, phrases in texts if len(phrases) >= LEAST_PHRASES]
        self.sources = [source for source, _ in texts]
        self.sizes = np.array([len(phrases) for _, phrases in texts])
        self.index = PhraseIndex([phrases for _, phrases in texts])


def _compare(
    key: str, phrases: Phrases, texts: _EvaluationTexts, threshold: float, report: ChatLeaks
) -> None:
    numbers, common = np.unique(texts.index.owners(phrases), return_counts=True)
    if not len(numbers):
        return
    held = common / texts.sizes[numbers]
    part = common / len(phrases) * (len(phrases) >= LEAST_OF_A_CHAT)
    share = np.maximum(held, part)
    report.evaluations.update(texts.sources[n] for n in numbers[share >= threshold])
    best = int(share.argmax())
    if share[best] >= threshold:
        kind = "holds" if held[best] >= threshold else "part"
        source = texts.sources[numbers[best]]
        report.matches.append(RowMatch(kind, key, source, round(float(share[best]), 4)))
