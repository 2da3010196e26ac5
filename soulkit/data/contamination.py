"""Do rows to train on say what rows to evaluate on say?

Three answers, each about what the seats of a task may read (the gold is no part of it):

* `exact`: a training row and an evaluation row have the same words; case and punctuation aside.
* `near`: at least `threshold` of their word triples are shared (Jaccard), in the whole text and in
  the text without the columns that name an entity. So the same long persona with another question
  is no near-duplicate, and neither is one question put to two personas.
* an entity by its kind (`persona`, `character`, `scenario`): the rows share the value of a column
  that `tasks.yaml` marks with `entity`. Such rows may differ in everything else, but a model that
  has seen the person in training is no stranger to them.

Example: {"persona": "A nurse from Leeds.", "question": "How do you take your tea?"} trained on, and
the same with "Do you like tea?" evaluated: neither `exact` nor `near`, but one shared `persona`.

Near pairs are proposed by MinHash LSH and confirmed by the true Jaccard index, so none is false;
with 128 permutations weighted towards recall, one at the threshold is seldom missed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soulkit.data.files import RawRow
from soulkit.errors import ConfigError, MissingPackage, did_you_mean
from soulkit.metrics.diversity import jaccard

THRESHOLD = 0.8
SHINGLE = 3
"""Words in a row that are compared as one; benchmark rows are too short for longer ones."""
PERMUTATIONS = 128
STRICTEST_INDEX = 0.95
"""Near 1 the index has too few bands to be built; a lower one only proposes more to confirm."""
ROW_KINDS = ("exact", "near")
"""The kinds of overlap that are about a row as a whole: what is excluded unless told otherwise."""

# Scripts without blanks between words: each sign counts as a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")

Words = tuple[str, ...]
Shingles = frozenset[Words]


@dataclass(frozen=True, slots=True)
class Passage:
    """What the seats may read of one row."""

    source: str
    """`file:number`, unique within a file."""
    task: str
    words: Words
    core: Words
    """The words outside entity columns; all words where nothing else is left."""
    entities: frozenset[tuple[str, str]]
    """(kind, value as words)."""


@dataclass(frozen=True, slots=True)
class RowMatch:
    """A training row with the evaluation row that is most like it."""

    kind: str
    """`exact` or `near`."""
    train: str
    evaluation: str
    similarity: float
    """Jaccard index of their word triples, 1 for `exact`."""


@dataclass(frozen=True, slots=True)
class Shared:
    """An entity that rows of both files name."""

    kind: str
    value: str
    train: tuple[str, ...]
    """Sources of the training rows that name it."""
    evaluation: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What two files have in common."""

    train_rows: int
    evaluation_rows: int
    threshold: float
    kinds: tuple[str, ...]
    """Every kind that was looked for: `exact`, `near` and the entities of the tasks."""
    matches: tuple[RowMatch, ...]
    """One for each training row that has any."""
    reached: Mapping[str, int]
    """Kind → evaluation rows that some training row gives away."""
    shared: tuple[Shared, ...]

    def touched(self, kind: str) -> frozenset[str]:
        """Sources of the training rows with an overlap of `kind`."""
        if kind in ROW_KINDS:
            return frozenset(m.train for m in self.matches if m.kind == kind)
        return frozenset(source for s in self.shared if s.kind == kind for source in s.train)


# -- words -------------------------------------------------------------------------------------


def folded_words(value: Any) -> Words:
    """The words of every text in a value, in one case, without punctuation."""
    text = unicodedata.normalize("NFKC", " ".join(_texts(value))).casefold()
    return tuple(_WORD.findall(text))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif value is not None:
        yield str(value)


def entity_values(value: Any, task: str) -> set[str]:
    """The entities that one column names: each item of a list, else the value as a whole.

    A value without letters is a number that only its own data set gives: the task stands before it.
    """
    items = value if isinstance(value, list | tuple) else [value]
    texts = {" ".join(folded_words(item)) for item in items} - {""}
    return {text if re.search(r"[^\W\d]", text) else f"{task} {text}" for text in texts}


# -- comparing -----------------------------------------------------------------------------------


def check_threshold(threshold: float, meaning: str) -> None:
    """ConfigError with its `meaning` unless 0 < threshold <= 1."""
    if not 0 < threshold <= 1:
        raise ConfigError(
            f"A threshold of {threshold:g} is no share.",
            meaning,
            f"Give a number above 0 and up to 1, such as {THRESHOLD:g}.",
        )


def find_overlap(
    train: Sequence[Passage],
    evaluation: Sequence[Passage],
    *,
    threshold: float = THRESHOLD,
    entities: Sequence[str] = (),
) -> Overlap:
    """What the rows of two files have in common.

    ConfigError unless 0 < threshold <= 1, MissingPackage without datasketch.
    """
    check_threshold(threshold, "Near-duplicates share at least this part of their word triples.")
    pairs = [*_exact_matches(train, evaluation), *_near_matches(train, evaluation, threshold)]
    shared = _shared_entities(train, evaluation)
    reached = {k: len({p.evaluation for p in pairs if p.kind == k}) for k in ROW_KINDS}
    for kind in entities:
        reached[kind] = len({e for s in shared if s.kind == kind for e in s.evaluation})
    return Overlap(
        train_rows=len(train), evaluation_rows=len(evaluation), threshold=threshold,
        kinds=(*ROW_KINDS, *entities), matches=_best_matches(pairs), reached=reached, shared=shared,
    )  # fmt: skip


def _exact_matches(train: Sequence[Passage], evaluation: Sequence[Passage]) -> Iterator[RowMatch]:
    by_words: dict[Words, list[str]] = {}
    for passage in evaluation:
        by_words.setdefault(passage.words, []).append(passage.source)
    for passage in train:
        for source in by_words.get(passage.words, ()):
            yield RowMatch("exact", passage.source, source, 1.0)


def _near_matches(
    train: Sequence[Passage], evaluation: Sequence[Passage], threshold: float
) -> Iterator[RowMatch]:
    try:
        from datasketch import MinHashLSH
    except ImportError as error:
        raise MissingPackage("datasketch", "finding near-duplicates") from error
    share = min(threshold, STRICTEST_INDEX)
    index = MinHashLSH(threshold=share, num_perm=PERMUTATIONS, weights=(0.1, 0.9))
    for number, passage in enumerate(evaluation):
        index.insert(number, _signature(shingles(passage.words)))
    for passage in train:
        candidates = index.query(_signature(shingles(passage.words)))
        for other in (evaluation[number] for number in sorted(candidates)):
            similarity = _similarity_above(passage, other, threshold)
            if similarity is not None:
                yield RowMatch("near", passage.source, other.source, similarity)


def _similarity_above(one: Passage, other: Passage, threshold: float) -> float | None:
    """How near two different passages are, None when they are not near enough or the same."""
    if one.words == other.words:
        return None
    if jaccard(shingles(one.core), shingles(other.core)) < threshold:
        return None
    similarity = jaccard(shingles(one.words), shingles(other.words))
    return similarity if similarity >= threshold else None


def shingles(words: Words) -> Shingles:
    """Every run of SHINGLE words; a shorter text is one shingle, an empty one has none."""
    last = max(len(words) - SHINGLE + 1, min(len(words), 1))
    return frozenset(words[i : i + SHINGLE] for i in range(last))


def _signature(phrases: Shingles) -> Any:
    from datasketch import MinHash

    signature = MinHash(num_perm=PERMUTATIONS, seed=1)
    signature.update_batch([" ".join(words).encode("utf-8") for words in phrases])
    return signature


def _best_matches(pairs: Iterable[RowMatch]) -> tuple[RowMatch, ...]:
    """The strongest match of each training row: `exact` before `near`, then the most alike."""
    best: dict[str, RowMatch] = {}
    for pair in pairs:
        strongest = best.get(pair.train)
        if strongest is None or _strength(pair) > _strength(strongest):
            best[pair.train] = pair
    return tuple(best.values())


def _strength(match: RowMatch) -> tuple[bool, float]:
    return match.kind == "exact", match.similarity


def _shared_entities(train: Sequence[Passage], evaluation: Sequence[Passage]) -> tuple[Shared, ...]:
    train_sources, eval_sources = _by_entity(train), _by_entity(evaluation)
    common = sorted(train_sources.keys() & eval_sources.keys())
    return tuple(
        Shared(*key, tuple(train_sources[key]), tuple(eval_sources[key])) for key in common
    )


def _by_entity(passages: Sequence[Passage]) -> dict[tuple[str, str], list[str]]:
    sources: dict[tuple[str, str], list[str]] = {}
    for passage in passages:
        for entity in passage.entities:
            sources.setdefault(entity, []).append(passage.source)
    return sources


# -- the clean file ------------------------------------------------------------------------------


def clean_rows(
    rows: Sequence[RawRow], overlap: Overlap, drop: Collection[str] = ROW_KINDS
) -> list[RawRow]:
    """The training rows without an overlap of the kinds in `drop`; ConfigError for another kind."""
    if not drop:
        raise ConfigError(
            "No kind of overlap was named.",
            "--drop says which overlapping rows --exclude leaves out.",
            f"Name some of {', '.join(overlap.kinds)}, or leave --drop out.",
        )
    for kind in drop:
        if kind not in overlap.kinds:
            raise ConfigError(
                f"'{kind}' is no kind of overlap here.",
                f"The tasks of these rows know: {', '.join(overlap.kinds)}.",
                did_you_mean(kind, overlap.kinds),
            )
    excluded_sources = frozenset[str]().union(*(overlap.touched(kind) for kind in drop))
    return [row for row in rows if row.source not in excluded_sources]
