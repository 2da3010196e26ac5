"""Finds training rows that repeat evaluation rows: exactly, nearly, or by a shared entity.

Only text that the seats of a task may read is compared (never the gold answer):

* `exact`: both rows have the same words, ignoring case and punctuation.
* `near`: they share at least `threshold` of their word triples ("phrases", Jaccard), in the full
  text and in the text without entity columns.
* an entity kind (`persona`, `character`, `scenario`): the rows share a value of a column that
  `tasks.yaml` marks with `entity`.

Near pairs are found exactly, with prefix filtering (`near_pairs`).
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from soulkit.data.files import RawRow
from soulkit.data.literals import texts_of
from soulkit.errors import ConfigError, did_you_mean

THRESHOLD = 0.8
PHRASE_WORDS = 3
"""Word count of a phrase; benchmark rows are too short for longer ones."""

# In scripts without spaces between words, each character counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_ROUNDING = 1e-9
_COUNTERS = 1 << 24
"""Phrases may share a counter: the rarity order must be the same for all texts, not exact."""

Words = tuple[str, ...]
Phrases = NDArray[np.int64]


def check_threshold(threshold: float, meaning: str) -> None:
    """ConfigError, with `meaning` as the reason, unless 0 < threshold <= 1."""
    if not 0 < threshold <= 1:
        raise ConfigError(
            f"The threshold {threshold:g} is out of range.",
            meaning,
            f"Set a number above 0 and at most 1, such as {THRESHOLD:g}.",
        )


def folded_words(value: Any) -> Words:
    """The words of all texts in a value, case-folded, without punctuation."""
    text = unicodedata.normalize("NFKC", " ".join(texts_of(value))).casefold()
    return tuple(WORD.findall(text))


def phrases_of(words: Words) -> Phrases:
    """The phrases of a text; a shorter text is one phrase, an empty text has none."""
    last = max(len(words) - PHRASE_WORDS + 1, min(len(words), 1))
    return np.array(
        sorted({hash(words[i : i + PHRASE_WORDS]) for i in range(last)}), dtype=np.int64
    )


def phrase_jaccard(one: Phrases, other: Phrases, threshold: float = 0.0) -> float:
    """The share of phrases that both texts have (Jaccard); 1 if both are empty.

    Returns 0 early when the sizes alone put it below `threshold`.
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
    """Whether two texts are equal or near duplicates."""
    return one == other or phrase_jaccard(phrases_of(one), phrases_of(other)) >= threshold


def near_pairs(
    left: Sequence[Words], right: Sequence[Words], threshold: float
) -> Iterator[tuple[int, int, float]]:
    """Yield (index in `left`, index in `right`, similarity) of all near pairs, in order.

    Texts without words are never near. Prefix filtering (Chaudhuri, Ganti & Kaushik 2006; Xiao
    et al. 2011) misses no pair: a shorter text x and a longer one y share at least 2t/(1+t)·|x|
    phrases and at least t·|y|, so one of the rarest |x| - ⌈2t/(1+t)·|x|⌉ + 1 of x is one of the
    rarest |y| - ⌈t·|y|⌉ + 1 of y.
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
    """The rarest phrases of a text, without those that occur in no other text."""

    short: Phrases
    """For comparison with longer texts."""
    long: Phrases
    """For comparison with shorter texts."""


class PhraseCounts:
    """Phrase frequencies over all texts of a comparison. Add every text before reading heads."""

    def __init__(self, threshold: float) -> None:
        self._lengths = 2 * threshold / (1 + threshold), threshold
        self._counts = np.zeros(_COUNTERS, dtype=np.int32)

    def add(self, text: Phrases) -> None:
        np.add.at(self._counts, text & (_COUNTERS - 1), 1)

    def head(self, text: Phrases) -> Head:
        """The head of an added text."""
        counts = self._counts[text & (_COUNTERS - 1)]
        ordered = text[np.argsort(counts, kind="stable")]
        alone = int((counts == 1).sum())
        short, long = (
            len(text) - math.ceil(share * len(text) - _ROUNDING) + 1 for share in self._lengths
        )
        return Head(ordered[alone:short].copy(), ordered[alone:long].copy())


class PhraseIndex:
    """Maps phrases to the texts that contain them."""

    def __init__(self, texts: Sequence[Phrases]) -> None:
        phrases = np.concatenate([np.empty(0, np.int64), *texts])
        owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        order = np.argsort(phrases, kind="stable")
        self._phrases, self._owners = phrases[order], owners[order]

    def owners(self, phrases: Phrases) -> NDArray[np.intp]:
        """Indices of the texts that contain any of `phrases`; a text is repeated for each match."""
        first = np.searchsorted(self._phrases, phrases, "left")
        last = np.searchsorted(self._phrases, phrases, "right")
        spans = [self._owners[a:b] for a, b in zip(first, last, strict=True) if a < b]
        return np.concatenate([np.empty(0, np.intp), *spans])


class NearIndex:
    """Finds the texts that may be near duplicates of another text."""

    def __init__(self, heads: Sequence[Head]) -> None:
        self._short = PhraseIndex([head.short for head in heads])
        self._long = PhraseIndex([head.long for head in heads])

    def candidates(self, head: Head) -> NDArray[np.intp]:
        """Indices of the texts that may be near the text with this head, in order."""
        pairs = self._long.owners(head.short), self._short.owners(head.long)
        places = np.sort(np.concatenate(pairs))
        return places[np.diff(places, prepend=-1) > 0]  # far faster than np.unique


# -- two files -----------------------------------------------------------------------------------

ROW_KINDS = ("exact", "near")
"""Kinds of overlap that concern a whole row; excluded by default."""

_NAME_MARK = "#"
"""Prefix of the placeholder for a name; words never start with it."""


@dataclass(frozen=True, slots=True)
class Passage:
    """The text of one row that its seats may read."""

    source: str
    task: str
    words: Words
    core: Words
    """The words outside entity columns; all words if there are none."""
    entities: frozenset[tuple[str, str]]
    recorded: tuple[tuple[Words, ...], ...] = ()
    """Recorded texts of the row (a history or an answer), which were not written for the row."""


@dataclass(frozen=True, slots=True)
class RowMatch:
    """A training row and the evaluation row that is most similar to it."""

    kind: str
    train: str
    evaluation: str
    similarity: float
    """Jaccard index of the word triples, 1 for `exact`."""


@dataclass(frozen=True, slots=True)
class SharedEntity:
    """An entity that occurs in both files."""

    kind: str
    value: str
    train: tuple[str, ...]
    evaluation: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The overlap between a training file and an evaluation file."""

    train_rows: int
    evaluation_rows: int
    threshold: float
    kinds: tuple[str, ...]
    matches: tuple[RowMatch, ...]
    """At most one per training row."""
    reached: Mapping[str, int]
    """Kind → number of evaluation rows that overlap with a training row."""
    shared: tuple[SharedEntity, ...]

    def touched(self, kind: str) -> frozenset[str]:
        """Sources of the training rows with this kind of overlap."""
        if kind in ROW_KINDS:
            return frozenset(m.train for m in self.matches if m.kind == kind)
        return frozenset(source for s in self.shared if s.kind == kind for source in s.train)


# -- words -------------------------------------------------------------------------------------


def entity_values(value: Any, task: str) -> set[str]:
    """The entities in one column: each item of a list, else the whole value.

    A value without letters is an id within its data set, so the task name is put in front.
    """
    items = value if isinstance(value, list | tuple) else [value]
    texts = {" ".join(folded_words(item)) for item in items} - {""}
    return {text if re.search(r"[^\W\d]", text) else f"{task} {text}" for text in texts}


# -- comparing -----------------------------------------------------------------------------------


def find_overlap(
    train: Sequence[Passage],
    evaluation: Sequence[Passage],
    *,
    threshold: float = THRESHOLD,
    entities: Sequence[str] = (),
) -> Overlap:
    """The overlap between the rows of two files.

    ConfigError unless 0 < threshold <= 1.
    """
    check_threshold(
        threshold, "It is the minimum share of word triples that near-duplicates have in common."
    )
    matches = row_matches(train, evaluation, threshold)
    pairs = [match for of_row in matches.values() for _, match in of_row]
    shared = _shared_entities(train, evaluation)
    reached = {k: len({p.evaluation for p in pairs if p.kind == k}) for k in ROW_KINDS}
    for kind in entities:
        reached[kind] = len({e for s in shared if s.kind == kind for e in s.evaluation})
    return Overlap(
        train_rows=len(train), evaluation_rows=len(evaluation), threshold=threshold,
        kinds=(*ROW_KINDS, *entities), matches=_best_matches(pairs), reached=reached, shared=shared,
    )  # fmt: skip


def row_matches(
    rows: Sequence[Passage], others: Sequence[Passage], threshold: float
) -> dict[int, list[tuple[int, RowMatch]]]:
    """Index in `rows` → the exact and near duplicates among `others`.

    Near rows are near in the full text and in the text without entity columns.
    """
    matches: dict[int, list[tuple[int, RowMatch]]] = {}
    by_words: dict[Words, list[int]] = {}
    for place, passage in enumerate(others):
        by_words.setdefault(passage.words, []).append(place)
    for place, passage in enumerate(rows):
        for other in by_words.get(passage.words, ()):
            match = RowMatch("exact", passage.source, others[other].source, 1.0)
            matches.setdefault(place, []).append((other, match))
    left, right = ([passage.words for passage in side] for side in (rows, others))
    for place, other, share in near_pairs(left, right, threshold):
        passage, near = rows[place], others[other]
        if passage.words != near.words and same_words(passage.core, near.core, threshold):
            match = RowMatch("near", passage.source, near.source, share)
            matches.setdefault(place, []).append((other, match))
    return matches


def _best_matches(pairs: Iterable[RowMatch]) -> tuple[RowMatch, ...]:
    """The strongest match per training row: `exact` before `near`, then the highest similarity."""
    best: dict[str, RowMatch] = {}
    for pair in pairs:
        strongest = best.get(pair.train)
        if strongest is None or _strength(pair) > _strength(strongest):
            best[pair.train] = pair
    return tuple(best.values())


def _strength(match: RowMatch) -> tuple[bool, float]:
    return match.kind == "exact", match.similarity


def _shared_entities(
    train: Sequence[Passage], evaluation: Sequence[Passage]
) -> tuple[SharedEntity, ...]:
    train_sources, eval_sources = _by_entity(train), _by_entity(evaluation)
    common = sorted(train_sources.keys() & eval_sources.keys())
    return tuple(
        SharedEntity(*key, tuple(train_sources[key]), tuple(eval_sources[key])) for key in common
    )


def _by_entity(passages: Sequence[Passage]) -> dict[tuple[str, str], list[str]]:
    sources: dict[tuple[str, str], list[str]] = {}
    for passage in passages:
        for entity in passage.entities:
            sources.setdefault(entity, []).append(passage.source)
    return sources


# -- equal up to names -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowTexts:
    """The texts of one row that its seats may read, with original capitalisation."""

    source: str
    cluster: str
    texts: tuple[str, ...]
    telling: tuple[str, ...] = ()
    """Texts that identify the row's cluster. If one is only a name, that name distinguishes
    clusters and is compared like any other word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenamedRows:
    """Rows of different clusters that differ only in names."""

    rows: int
    clusters: int
    distinct: int
    """Number of different rows when names are ignored."""
    example: tuple[str, str]


def find_renamed(rows: Sequence[RowTexts]) -> RenamedRows | None:
    """The rows that differ from a row of another cluster only in names, or None.

    A name is a word that `rows` always capitalise, or a number directly after one ("Room 12"). Each
    name is replaced by its order of first appearance, so who does what still counts. Rows that
    consist only of names match nothing. Scripts without capital letters have no names here.
    """
    words_used = {word for row in rows for text in row.texts for word in _cased_words(text)}
    common = {word.casefold() for word in words_used if not word[0].isupper()}
    names = {word for word in words_used if word[0].isupper() and word.casefold() not in common}
    clusters: dict[bytes, dict[str, str]] = {}
    sources: dict[bytes, set[str]] = {}
    for row in rows:
        words = _without_names(row, names)
        if all(word.startswith(_NAME_MARK) for word in words):
            continue
        form = hashlib.sha256(" ".join(words).encode()).digest()
        clusters.setdefault(form, {}).setdefault(row.cluster, row.source)
        sources.setdefault(form, set()).add(row.source)
    shared = [form for form, by_cluster in clusters.items() if len(by_cluster) > 1]
    if not shared:
        return None
    first, second, *_ = clusters[shared[0]].values()
    return RenamedRows(
        rows=len(frozenset[str]().union(*(sources[form] for form in shared))),
        clusters=len({cluster for form in shared for cluster in clusters[form]}),
        distinct=len(shared),
        example=(first, second),
    )


def _cased_words(text: str) -> list[str]:
    return WORD.findall(unicodedata.normalize("NFKC", text))


def _are_names(words: Sequence[str], names: Collection[str]) -> list[bool]:
    flags: list[bool] = []
    for word in words:
        flags.append(word in names or (word[0].isdigit() and bool(flags) and flags[-1]))
    return flags


def _without_names(row: RowTexts, names: Collection[str]) -> Words:
    telling = (_cased_words(text) for text in row.telling)
    names_only = {word for words in telling if all(_are_names(words, names)) for word in words}
    order: dict[str, str] = {}
    left: list[str] = []
    for words in map(_cased_words, row.texts):
        for word, is_name in zip(words, _are_names(words, names), strict=True):
            plain = word.casefold()
            if is_name and word not in names_only:
                plain = order.setdefault(plain, f"{_NAME_MARK}{len(order)}")
            left.append(plain)
    return tuple(left)


# -- the clean file ------------------------------------------------------------------------------


def clean_rows(
    rows: Sequence[RawRow], overlap: Overlap, drop: Collection[str] = ROW_KINDS
) -> list[RawRow]:
    """The training rows without the kinds of overlap in `drop`; ConfigError for an unknown kind."""
    if not drop:
        raise ConfigError(
            "--drop needs at least one kind of overlap.",
            "It selects the overlapping rows that --exclude removes.",
            f"Choose from {', '.join(overlap.kinds)}, or omit --drop.",
        )
    for kind in drop:
        if kind not in overlap.kinds:
            raise ConfigError(
                f"'{kind}' is not a kind of overlap for these tasks.",
                f"Available: {', '.join(overlap.kinds)}.",
                did_you_mean(kind, overlap.kinds),
            )
    excluded_sources = frozenset[str]().union(*(overlap.touched(kind) for kind in drop))
    return [row for row in rows if row.source not in excluded_sources]
