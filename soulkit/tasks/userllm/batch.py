"""UserLLM over a batch and over the drafts of a row: what no message has alone.

The headline is the mean over the three sources. Of PRISM it is the mean of four parts, two of which
exist only over many messages: how unlike each other first messages are, and how well ends are found
(F1). Whoever says one bland thing to everybody has neither. `tasks.yaml` declares both means by
their parts; here the parts are computed.

    first_turn_diversity  1 − mean pairwise Jaccard of first messages, of one rollout
    own_words             1 − share of a message's words of content that stand in the intent
    termination_f1        ending, of later messages, with "end" as the positive class
    human_share           1 − share judged machine-written

A message that failed (nothing said, refused, cut) counts 0 in each of them, and as the wrong way of
going on; what a part cannot say anything about, such as the words of a bare ending, it leaves out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean

from soulkit.metrics.diversity import jaccard
from soulkit.runs.records import drafts
from soulkit.tasks.base import READABLE
from soulkit.tasks.batches import macro, mean_of
from soulkit.tasks.userllm.fields import PRISM, SOURCES, UserMessage, read_reply
from soulkit.tasks.userllm.metrics import (
    NOVELTY,
    bag_of_words,
    first_turn_diversity,
    prism_value,
    termination_scores,
    variety,
)
from soulkit.types import BatchMetric, Protocol, Record

UNIT = "messages"
Ends = list[tuple[bool, bool]]
"""(whether it was ended, whether it should have been) of messages."""


def paper_batch(records: Sequence[Record]) -> dict[str, BatchMetric]:
    """The numbers that the headline and PRISM's are means of, and what these two count."""
    main = drafts(records)
    by_source = {name: [r for r in main if r.tags.get("source") == name] for name in SOURCES}
    parts = _prism_parts(by_source[PRISM])
    heads = {
        f"headline/{name}": _counted(rows) if name == PRISM else _mean_value(rows)
        for name, rows in by_source.items()
    }
    metrics = {"macro_source": _counted(main), **heads, **parts}
    return {name: metric for name, metric in metrics.items() if metric.n}


def published_batch(records: Sequence[Record]) -> dict[str, BatchMetric]:
    """What the published aggregation would say: scores of single messages, averaged by source."""
    by_source = macro(records, "source")
    prism = [r for r in drafts(records) if r.tags.get("source") == PRISM]
    first = [r for r in prism if r.tags.get("turn") == "first"]
    diversity = _over_rollouts(first, first_turn_diversity)
    metrics = {"first_turn_diversity": diversity, **_ending(prism)}
    rows = {} if by_source is None else {"macro_source": by_source}
    return rows | {name: metric for name, metric in metrics.items() if metric.value is not None}


def _mean_value(rows: Sequence[Record]) -> BatchMetric:
    return mean_of([r.score.value for r in rows], UNIT)


def _counted(rows: Sequence[Record]) -> BatchMetric:
    """What a declared mean counts; its value comes from its parts."""
    return BatchMetric(None, len(rows), sum(r.score.scored for r in rows), UNIT, 0.0, 1.0)


# -- PRISM ---------------------------------------------------------------------------------------


def _prism_parts(prism: Sequence[Record]) -> dict[str, BatchMetric]:
    first = [r for r in prism if r.tags.get("turn") == "first"]
    later = [r for r in prism if r.tags.get("turn") != "first"]
    return {
        "first_turn_diversity": _over_rollouts(first, variety),
        "own_words": _part(prism, _own_words),
        **_ending(later),
        "human_share": _part(prism, lambda r: r.score.metrics.get("ai_detector")),
    }


def _own_words(record: Record) -> float | None:
    overlap = record.score.metrics.get("intent_decomposition")
    return None if overlap is None else 1 - overlap


def _part(records: Iterable[Record], number: Callable[[Record], float | None]) -> BatchMetric:
    """The mean over the messages that a part applies to, unscored ones counted."""
    values: list[float | None] = []
    for record in records:
        value = 0.0 if record.score.status not in READABLE else number(record)
        if not record.score.scored:
            values.append(None)
        elif value is not None:
            values.append(value)
    return mean_of(values, UNIT)


def _over_rollouts(
    first: Sequence[Record], diversity: Callable[[Iterable[str]], float | None]
) -> BatchMetric:
    """Diversity within each rollout of a step: the messages of one row are meant to be alike."""
    texts: dict[tuple[int, int], list[str]] = defaultdict(list)
    scored = [record for record in first if record.score.scored]
    for record in scored:
        readable = record.score.status in READABLE
        texts[record.step, record.rollout].append(message_of(record).text if readable else "")
    values = [value for group in texts.values() if (value := diversity(group)) is not None]
    mean = fmean(values) if values else None
    return BatchMetric(mean, len(first), len(scored), UNIT, 0.0, 1.0)


def _ending(records: Sequence[Record]) -> dict[str, BatchMetric]:
    """Precision, recall and F1 of ending: where none was or should have been, there is no number.

    Messages stay out of which nobody knows whether they should have ended.
    """
    ends, lost = _ends(records)
    predicted, due = [p for p, _ in ends], [t for _, t in ends]
    precision, recall, both = termination_scores(predicted, due)
    numbers = {
        "termination_precision": precision if any(predicted) else None,
        "termination_recall": recall if any(due) else None,
        "termination_f1": both if any(predicted) or any(due) else None,
    }
    n = len(ends) + lost
    return {k: BatchMetric(v, n, len(ends), UNIT, 0.0, 1.0) for k, v in numbers.items()}


def _ends(records: Iterable[Record]) -> tuple[Ends, int]:
    """(ends, how many unscored messages of known truth there are beside them)."""
    ends, lost = [], 0
    for record in records:
        due = _due(record)
        if due is None:
            continue
        if not record.score.scored:
            lost += 1
            continue
        readable = record.score.status in READABLE
        ends.append((message_of(record).ended if readable else not due, due))
    return ends, lost


def _due(record: Record) -> bool | None:
    """Whether the message should have ended the conversation; None where nobody knows."""
    if "last" in record.tags:
        return record.tags["last"] == "yes"
    right = record.score.metrics.get("termination")  # of runs from before there was the tag
    return None if right is None else message_of(record).ended == bool(right)


# -- texts ---------------------------------------------------------------------------------------


def message_of(record: Record) -> UserMessage:
    """What a message says; nothing where there is none."""
    lines = record.episode.transcript
    return _read(lines[-1].text, record.score.protocol) if lines else UserMessage("", False)


@lru_cache(maxsize=1 << 14)
def _read(text: str, protocol: Protocol) -> UserMessage:
    return read_reply(text, protocol)


# -- the drafts of a row -------------------------------------------------------------------------


def with_novelty(records: Sequence[Record]) -> list[Record]:
    """The rollouts of one row with what a first message is paid for being unlike the others.

    `novelty` is the mean over the row's other drafts of 1 − Jaccard, another part of the reward,
    for drafts and refined rollouts alike. A row with fewer than two drafts that say something has
    none. Scores (`value`) stay: in evaluation a row has no group.
    """
    bags = {
        r.rollout: bag
        for r in records
        if r.kind == "draft" and _counts(r) and (bag := bag_of_words(message_of(r).text))
    }
    if len(bags) < 2:
        return list(records)
    return [_paid(record, bags) if _counts(record) else record for record in records]


def _counts(record: Record) -> bool:
    """Whether it is a first message of PRISM that could be scored."""
    first = record.tags.get("source") == PRISM and record.tags.get("turn") == "first"
    return first and record.score.scored and record.score.status in READABLE


def _paid(record: Record, bags: Mapping[int, frozenset[str]]) -> Record:
    bag = bag_of_words(message_of(record).text)
    novelty = fmean(1 - jaccard(bag, other) for i, other in bags.items() if i != record.rollout)
    metrics = {**record.score.metrics, NOVELTY: novelty}
    return replace(
        record, score=replace(record.score, metrics=metrics, reward=prism_value(metrics))
    )
