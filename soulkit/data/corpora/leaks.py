"""Conversations to train on that give rows to evaluate on away.

Word triples are compared, as in `contamination`, but what counts is how much of one stands in the
other, because a conversation may hold a whole story beside much else:

* `holds`: the conversation has at least `threshold` of the triples of the evaluation row;
* `part`: the evaluation row has at least `threshold` of the triples of the conversation, a longer
  one than a greeting.

System prompts count: a persona or a scene may stand there. The conversations stream by; in memory
are the triples of the evaluation rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from soulkit.data.contamination import (
    THRESHOLD,
    Passage,
    RowMatch,
    check_threshold,
    folded_words,
)
from soulkit.data.corpora.duplicates import triples_of
from soulkit.data.corpora.messages import Unusable, conversation_of
from soulkit.data.files import BadRow, SourcedRow

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
    sizes: list[int] = []
    holders: dict[int, list[int]] = defaultdict(list)
    for place, passage in enumerate(evaluation):
        triples = triples_of(passage.words).tolist()
        sizes.append(len(triples))
        report.short += len(triples) < LEAST_TRIPLES
        if len(triples) >= LEAST_TRIPLES:
            for triple in triples:
                holders[triple].append(place)
    for key, row in rows:
        report.chats += 1
        try:
            triples = _triples(key, row)
        except Unusable as error:
            report.bad.append(BadRow(key, str(error)))
            continue
        _compare(key, triples, evaluation, sizes, holders, threshold, report)
    return report


def _triples(key: str, row: Any) -> list[int]:
    if isinstance(row, BadRow):
        raise Unusable(row.why)
    conversation = conversation_of(row, key)
    return list(triples_of(folded_words([u.text for u in conversation.utterances])).tolist())


def _compare(
    key: str, triples: Sequence[int], evaluation: Sequence[Passage], sizes: Sequence[int],
    holders: dict[int, list[int]], threshold: float, report: ChatLeaks,
) -> None:  # fmt: skip
    common: Counter[int] = Counter()
    for triple in triples:
        common.update(holders.get(triple, ()))
    best: RowMatch | None = None
    for place, count in common.items():
        held = count / sizes[place]
        part = count / len(triples) if len(triples) >= LEAST_OF_A_CHAT else 0.0
        share = max(held, part)
        if share < threshold:
            continue
        source = evaluation[place].source
        report.evaluations.add(source)
        if best is None or share > best.similarity:
            kind = "holds" if held >= threshold else "part"
            best = RowMatch(kind, key, source, round(share, 4))
    if best is not None:
        report.matches.append(best)
