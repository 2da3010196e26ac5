"""Finds repeated conversations in a source, and conversations that leak evaluation rows.

Duplicates: `exact` have the same words under the same roles; `near` share at least `threshold` of
their word triples (Jaccard, without system prompts) with a conversation that is kept. Of equal rows
the first is kept. The source is read three times.

Leaks are measured by containment, system prompts included:

* `holds`: the conversation contains at least `threshold` of the triples of the evaluation row, or
  of its recorded part (history or answer) without the aim or persona written for the row;
* `part`: the evaluation row contains at least `threshold` of the triples of the conversation.
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
    entity_values,
    folded_words,
    phrase_jaccard,
    phrases_of,
)
from soulkit.data.corpora.file_rows import source_rows
from soulkit.data.corpora.lessons import ChatRow, conversation_of
from soulkit.data.corpora.settings import AnySource, source_settings
from soulkit.data.files import BadRecord, BadRow, SourcedRow

LEAST_PHRASES = 8
"""Minimum phrases of a row; shorter rows occur in many conversations by chance."""
LEAST_OF_A_CHAT = 20
"""Minimum phrases of a conversation that may count as `part` of a row."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A row that repeats an earlier one."""

    row: str
    first: str
    kind: str
    similarity: float


@dataclass(slots=True)
class Duplicates:
    """The duplicates in a source."""

    rows: int = 0
    duplicates: list[Duplicate] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    """Rows without a conversation; they are not compared."""

    def left_out(self) -> frozenset[str]:
        """The keys of the rows that a clean file omits."""
        return frozenset([d.row for d in self.duplicates] + [bad.source for bad in self.bad])


def find_duplicates(source: AnySource, threshold: float = THRESHOLD) -> Duplicates:
    """Every row of `source` that repeats an earlier one, in file order.

    ConfigError unless 0 < threshold <= 1.
    """
    check_threshold(
        threshold, "It is the minimum share of word triples that near-duplicates have in common."
    )
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
            yield key, _conversation(row)
        except BadRecord as error:
            report.bad.append(BadRow(key, str(error)))


def _conversation(row: Any) -> ChatRow:
    if isinstance(row, BadRow):
        raise BadRecord(row.why)
    return conversation_of(row)


def _digest(conversation: ChatRow) -> bytes:
    words = [(u.role or u.speaker, folded_words(u.text)) for u in conversation.utterances]
    return hashlib.blake2b(repr(words).encode("utf-8"), digest_size=16).digest()


def _spoken_phrases(conversation: ChatRow) -> Phrases:
    spoken = [u.text for u in conversation.utterances if u.role != "system"]
    return phrases_of(folded_words(spoken))


def _phrases_of_rows(source: AnySource, keys: Collection[str]) -> Iterator[tuple[str, Phrases]]:
    for key, row in source_rows(source_settings(source).path):
        if key in keys:
            yield key, _spoken_phrases(conversation_of(row))


def _near(
    source: AnySource, keys: Sequence[str], counts: PhraseCounts, threshold: float
) -> Iterator[Duplicate]:
    """The rows in `keys` that are near an earlier kept row, in file order."""
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
    """The evaluation rows that a corpus leaks."""

    chats: int = 0
    evaluation_rows: int = 0
    short: int = 0
    matches: list[RowMatch] = field(default_factory=list)
    """Per leaking conversation, the evaluation row that it covers most."""
    evaluations: set[str] = field(default_factory=set)
    """Sources of all leaked evaluation rows."""
    people: set[str] = field(default_factory=set)
    """Persons of evaluation rows who also have conversations in the corpus."""
    bad: list[BadRow] = field(default_factory=list)

    def left_out(self) -> frozenset[str]:
        """The keys of the rows that a clean file omits."""
        return frozenset([m.train for m in self.matches] + [bad.source for bad in self.bad])


def find_leaks(
    rows: Iterable[SourcedRow], evaluation: Sequence[Passage], threshold: float = THRESHOLD
) -> ChatLeaks:
    """Every conversation in `rows` that leaks a row of `evaluation`.

    ConfigError unless 0 < threshold <= 1.
    """
    check_threshold(
        threshold, "It is the minimum share of a row's word triples that counts as a leak."
    )
    report = ChatLeaks(evaluation_rows=len(evaluation))
    texts = _EvaluationTexts(evaluation)
    report.short = len(evaluation) - len(set(texts.sources))
    tasks = {passage.task for passage in evaluation}
    people = {name for p in evaluation for kind, name in p.entities if kind == "person"}
    for key, row in rows:
        report.chats += 1
        try:
            conversation = _conversation(row)
        except BadRecord as error:
            report.bad.append(BadRow(key, str(error)))
            continue
        spoken = [u.text for u in conversation.utterances]
        if people and any(entity_values(conversation.person, t) & people for t in tasks):
            report.people.add(conversation.person)
        _compare(key, phrases_of(folded_words(spoken)), texts, threshold, report)
    return report


class _EvaluationTexts:
    """The texts of evaluation rows that are long enough to compare, by number."""

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
