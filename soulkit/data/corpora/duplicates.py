"""Conversations that a source holds twice, and those that give rows to evaluate on away.

Duplicates: `exact` are rows whose messages have the same words under the same roles; case and
punctuation aside. `near` are rows that share at least `threshold` of the word triples of what is
said (Jaccard) with one that stays; system prompts, which rows of one collection share, do not count
there. Of equal rows the first stays. Near pairs are proposed by banded minwise hashes, and
confirmed by counting in a second pass over the rows concerned.

Leaks: what counts is how much of one stands in the other, because a conversation may hold a whole
story beside much else. System prompts count: a persona or a scene may stand there.

* `holds`: the conversation has at least `threshold` of the triples of the evaluation row, or of
  what was recorded for it (the history that it continues, its answer): beside those may stand an
  aim or a persona that was written for the row, and that no conversation has;
* `part`: the evaluation row has at least `threshold` of the triples of the conversation, a longer
  one than a greeting.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from soulkit.data.contamination import (
    THRESHOLD,
    Passage,
    RowMatch,
    check_threshold,
    folded_words,
    shingles,
)
from soulkit.data.corpora.file_rows import source_rows
from soulkit.data.corpora.lessons import ChatRow, Unusable, conversation_of
from soulkit.data.corpora.settings import AnySource, source_settings
from soulkit.data.files import BadRow, SourcedRow

if TYPE_CHECKING:
    import numpy as np

    Triples = np.ndarray[Any, np.dtype[np.uint32]]

HASHES = 120
_RECALL = 0.99
"""Of the pairs at the threshold, the share that the bands propose."""
_COMPARED = 200
"""Rows that stay under one band and are compared with a new one: a template has thousands."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A row that says what an earlier one says."""

    row: str
    """`file:row`."""
    first: str
    """The row that stays."""
    kind: str
    """`exact` or `near`."""
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
    import numpy as np

    report = Duplicates()
    seen: dict[bytes, str] = {}
    keys: list[str] = []
    numbers: dict[str, int] = {}
    bands: list[Any] = []
    for key, conversation in _conversations(source, report):
        numbers[key] = len(numbers)
        first = seen.setdefault(_digest(conversation), key)
        if first is not key:
            report.duplicates.append(Duplicate(key, first, "exact", 1.0))
            continue
        keys.append(key)
        bands.append(_bands(spoken_triples(conversation), threshold))
    if len(keys) > 1:
        report.duplicates += _near(source, keys, np.stack(bands), threshold)
        report.duplicates.sort(key=lambda d: numbers[d.row])
    return report


def _conversations(source: AnySource, report: Duplicates) -> Iterator[tuple[str, ChatRow]]:
    for key, row in source_rows(source_settings(source).path):
        report.rows += 1
        try:
            if isinstance(row, BadRow):
                raise Unusable(row.why)
            yield key, conversation_of(row, key)
        except Unusable as error:
            report.bad.append(BadRow(key, str(error)))


def _digest(conversation: ChatRow) -> bytes:
    words = [(u.role or u.speaker, folded_words(u.text)) for u in conversation.utterances]
    return hashlib.blake2b(repr(words).encode("utf-8"), digest_size=16).digest()


def spoken_triples(conversation: ChatRow) -> Triples:
    """Checksums of the word triples of what is said, each once, in order; (n,), uint32."""
    spoken = [u.text for u in conversation.utterances if u.role != "system"]
    return triples_of(folded_words(spoken))


def triples_of(words: Sequence[str]) -> Triples:
    """Checksums of the word triples of a text, each once, in order; (n,), uint32."""
    import numpy as np

    checksums = [zlib.crc32(" ".join(triple).encode("utf-8")) for triple in shingles(tuple(words))]
    return np.unique(np.array(checksums, dtype=np.uint32))


def _bands(triples: Triples, threshold: float) -> Any:
    """(bands,) uint64: equal in one place where two rows may be near."""
    import numpy as np

    width = _width(threshold)
    factors, offsets = _hash_family()
    if not len(triples):
        return np.zeros(HASHES // width, dtype=np.uint64)
    hashes = (factors * triples.astype(np.uint64) + offsets) >> np.uint64(32)
    lowest = hashes.min(axis=1)[: HASHES // width * width].reshape(-1, width)
    mixed = np.zeros(len(lowest), dtype=np.uint64)
    for column in lowest.T:
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


@cache
def _hash_family() -> tuple[Any, Any]:
    """Odd factors and offsets, (HASHES, 1) uint64 each."""
    import numpy as np

    rng = np.random.default_rng(1)
    factors, offsets = rng.integers(1, 1 << 63, (2, HASHES, 1), dtype=np.uint64)
    return factors | np.uint64(1), offsets


@cache
def _width(threshold: float) -> int:
    """Hashes a band, as many as leave a pair at the threshold proposed almost surely."""
    widths = [w for w in range(1, 9) if 1 - (1 - threshold**w) ** (HASHES // w) >= _RECALL]
    return max(widths, default=1)


def _near(
    source: AnySource, keys: Sequence[str], bands: Any, threshold: float
) -> Iterator[Duplicate]:
    """Rows near one that stays, in file order; `bands` is (rows, bands)."""
    import numpy as np

    groups: list[dict[int, list[int]]] = []
    concerned: set[int] = set()
    for column in bands.T:
        values, inverse, counts = np.unique(column, return_inverse=True, return_counts=True)
        rows = np.flatnonzero(counts[inverse] > 1)
        concerned.update(rows.tolist())
        groups.append({int(values[inverse[row]]): [] for row in rows})
    places = {keys[row]: row for row in concerned}
    triples = _triples_of_rows(source, places)
    for row in sorted(concerned):
        lists = [g[band] for g, band in zip(groups, bands[row].tolist(), strict=True) if band in g]
        near = _nearest(row, {r for rows_ in lists for r in rows_[:_COMPARED]}, triples, threshold)
        if near is None:
            for staying in lists:
                staying.append(row)
        else:
            yield Duplicate(keys[row], keys[near[0]], "near", round(near[1], 4))


def _triples_of_rows(source: AnySource, places: Mapping[str, int]) -> dict[int, Triples]:
    triples: dict[int, Triples] = {}
    for key, row in source_rows(source_settings(source).path):
        if key in places:
            triples[places[key]] = spoken_triples(conversation_of(row, key))
    return triples


def _nearest(
    row: int, others: set[int], triples: Mapping[int, Triples], threshold: float
) -> tuple[int, float] | None:
    import numpy as np

    here = triples[row]
    for other in sorted(others):
        common = len(np.intersect1d(here, triples[other], assume_unique=True))
        union = len(here) + len(triples[other]) - common
        if union and common / union >= threshold:
            return other, common / union
    return None


LEAST_TRIPLES = 8
"""Of a row; a shorter one is common speech, and stands in many conversations by chance."""
LEAST_OF_A_CHAT = 20
"""Triples of a conversation that may be `part` of a row."""


@dataclass(slots=True)
class ChatLeaks:
    """What a corpus gives away."""

    chats: int = 0
    evaluation_rows: int = 0
    short: int = 0
    """Evaluation rows with too few words to be looked for."""
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
    texts = _Texts(evaluation)
    report.short = len(evaluation) - len(set(texts.sources))
    for key, row in rows:
        report.chats += 1
        try:
            triples = _triples(key, row)
        except Unusable as error:
            report.bad.append(BadRow(key, str(error)))
            continue
        _compare(key, triples, texts, threshold, report)
    return report


class _Texts:
    """The texts of evaluation rows that are long enough to be looked for, by number."""

    def __init__(self, evaluation: Sequence[Passage]) -> None:
        self.sources: list[str] = []
        """Text → the row that it is of."""
        self.sizes: list[int] = []
        """Text → its triples."""
        self.holders: dict[int, list[int]] = defaultdict(list)
        """Triple → the texts that have it."""
        for passage in evaluation:
            for text in ((passage.words,), *passage.recorded):
                self._add(passage.source, {n for w in text for n in triples_of(w).tolist()})

    def _add(self, source: str, triples: set[int]) -> None:
        if len(triples) < LEAST_TRIPLES:
            return
        for triple in triples:
            self.holders[triple].append(len(self.sources))
        self.sources.append(source)
        self.sizes.append(len(triples))


def _triples(key: str, row: Any) -> list[int]:
    if isinstance(row, BadRow):
        raise Unusable(row.why)
    conversation = conversation_of(row, key)
    return list(triples_of(folded_words([u.text for u in conversation.utterances])).tolist())


def _compare(
    key: str, triples: Sequence[int], texts: _Texts, threshold: float, report: ChatLeaks
) -> None:
    common: Counter[int] = Counter()
    for triple in triples:
        common.update(texts.holders.get(triple, ()))
    best: RowMatch | None = None
    for text, count in common.items():
        held = count / texts.sizes[text]
        part = count / len(triples) if len(triples) >= LEAST_OF_A_CHAT else 0.0
        share = max(held, part)
        if share < threshold:
            continue
        source = texts.sources[text]
        report.evaluations.add(source)
        if best is None or share > best.similarity:
            kind = "holds" if held >= threshold else "part"
            best = RowMatch(kind, key, source, round(share, 4))
    if best is not None:
        report.matches.append(best)
