"""UserLLM's metrics of how user-like a simulated user is: per reply, per row and per batch.

    first_turn_diversity  1 − mean pairwise Jaccard similarity of one rollout's first messages
    own_words             1 − share of a message's content words that occur in the intent
    termination_f1        ending, of later messages, with "end" as the positive class
    human_share           1 − share judged machine-written

PRISM's headline is the mean of these four; a failed message counts 0 in each. Role adherence:
naming some of a quiz's choices is answering, naming all of them repeats the question (`reference`:
all 0, three or more 1). Words follow the definition of the `regex` package, without needing it.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean

from soulkit.judge.verdict import named_options, plain
from soulkit.metrics.text import jaccard, mean_jaccard
from soulkit.runs.records import drafts
from soulkit.tasks.kit.base import READABLE
from soulkit.tasks.kit.scoring import macro, mean_of
from soulkit.tasks.userllm.fields import PRISM, SOURCES, UserMessage, read_reply
from soulkit.text import SignTable
from soulkit.types import BatchMetric, Protocol, Record

NOVELTY = "novelty"
"""How different a first message is from the other drafts of its row, if there are any."""
Tokenizer = Callable[[str | None], list[str]]

STOP_WORDS = frozenset(
    ("a", "an", "and", "are", "as", "at", "be", "but", "by", "can", "could", "did", "do", "does",
     "for", "from", "had", "has", "have", "how", "i", "if", "in", "into", "is", "it", "its", "me",
     "might", "my", "of", "on", "or", "our", "should", "so", "that", "the", "their", "them", "then",
     "there", "these", "they", "this", "to", "us", "was", "we", "were", "what", "when", "where",
     "which", "who", "why", "will", "with", "would", "you", "your")
)  # fmt: skip
_JOINERS = "\u200c\u200d"
_CIRCLED = ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))
"""Letters in circles and squares: symbols that count as letters."""
_NOT_ALNUM = re.compile(r"[^a-z0-9]+")


# -- words ---------------------------------------------------------------------------------------


def tokenize(text: str | None) -> list[str]:
    """Lower-case words; every punctuation mark or symbol outside a word is a token of its own."""
    return (text or "").lower().translate(_SIGNS).split()


def _is_word(sign: str) -> bool:
    kind = unicodedata.category(sign)
    if kind[0] in "LM" or kind in ("Nd", "Nl", "Pc"):
        return True
    circled = kind == "So" and any(low <= ord(sign) <= high for low, high in _CIRCLED)
    return circled or sign in _JOINERS


def _spaced(sign: str) -> str:
    """The sign itself within words, padded with spaces if it is a token, else a space."""
    if _is_word(sign):
        return sign
    return f" {sign} " if unicodedata.category(sign)[0] in "PS" else " "


_SIGNS = SignTable(_spaced)


def content_words(text: str | None, words: Tokenizer = tokenize) -> set[str]:
    """The words without stop words and punctuation."""
    return {word for word in set(words(text)) if word not in STOP_WORDS and word.isalnum()}


# -- one reply -----------------------------------------------------------------------------------


def intent_overlap(intent: str | None, reply: str | None, words: Tokenizer = tokenize) -> float:
    """|intent ∩ reply| / |reply| over content words, in [0, 1]; 0 if either has none."""
    intent_words, reply_words = content_words(intent, words), content_words(reply, words)
    return (
        len(intent_words & reply_words) / len(reply_words) if intent_words and reply_words else 0.0
    )


def goal_keywords(intent: str) -> list[str]:
    """The content words in an intent that have more than two letters, in alphabetical order."""
    return sorted(word for word in content_words(intent) if len(word) > 2)


def choice_form(text: str) -> str:
    """The form in which the published score compares texts: ASCII words between spaces."""
    return _NOT_ALNUM.sub(" ", f" {text.lower()} ")


def choices_named(choices: Sequence[str], reply: str, protocol: Protocol) -> tuple[str, ...]:
    """The choices that occur in a reply as whole words.

    `paper` matches longer choices first, so that "department store" does not also match "store",
    and supports every script.
    """
    if protocol == "paper":
        names = named_options(reply, choices)
        return tuple(choice for choice in choices if plain(choice) in names)
    text = choice_form(reply)
    return tuple(c for c in choices if choice_form(c).strip() and choice_form(c) in text)


def role_adherence(choices: Sequence[str], reply: str, protocol: Protocol) -> float:
    """1 for a reply that does not answer the quiz, else 0."""
    count = len(choices_named(choices, reply, protocol))
    if protocol == "paper":
        return float(count == 0 or count == len(choices))
    if not choices or count == len(choices):
        return 0.0
    return float(count not in (1, 2))


def prism_parts(intent: str, message: UserMessage, last: bool | None) -> dict[str, float | None]:
    """The parts of a PRISM score that need no judge; None if a part does not apply.

    A reply that only ends the conversation has no text to compare with the intent. `last` is None,
    and termination does not apply, if the row does not say whether this is the last turn, and for a
    first message, which never ends a conversation.
    """
    return {
        "intent_decomposition": intent_overlap(intent, message.text) if message.text else None,
        "termination": None if last is None else float(message.ended == last),
    }


def prism_value(metrics: Mapping[str, float | None]) -> float | None:
    """The mean of the parts that apply (low overlap is good); None if none does."""
    overlap = metrics.get("intent_decomposition")
    components = [None if overlap is None else 1 - overlap]
    components += [metrics.get(name) for name in ("termination", "ai_detector", NOVELTY)]
    values = [value for value in components if value is not None]
    return sum(values) / len(values) if values else None


# -- a batch -------------------------------------------------------------------------------------


def first_turn_diversity(texts: Iterable[str]) -> float | None:
    """1 − mean pairwise Jaccard similarity of the texts; None for fewer than two with words."""
    similarity = mean_jaccard(bag for text in texts if (bag := bag_of_words(text)))
    return None if similarity is None else 1 - similarity


def variety(texts: Iterable[str]) -> float | None:
    """Like `first_turn_diversity`, but every text counts; an empty text equals all others.

    None for fewer than two texts.
    """
    bags = [bag_of_words(text) for text in texts]
    full = [bag for bag in bags if bag]
    pairs = len(bags) * (len(bags) - 1) / 2
    if not pairs:
        return None
    different = len(full) * (len(full) - 1) / 2 * (1 - (mean_jaccard(full) or 0.0))
    return different / pairs


@lru_cache(maxsize=1 << 14)
def bag_of_words(text: str) -> frozenset[str]:
    """The set of words and marks of a text; cached, because batch metrics reuse texts."""
    return frozenset(tokenize(text))


def termination_scores(
    predicted: Sequence[bool], labels: Sequence[bool]
) -> tuple[float, float, float]:
    """(precision, recall, F1) of ending conversations; each is 0 if it is undefined."""
    hits = sum(p and w for p, w in zip(predicted, labels, strict=True))
    precision = hits / sum(predicted) if any(predicted) else 0.0
    recall = hits / sum(labels) if any(labels) else 0.0
    both = precision + recall
    return precision, recall, 2 * precision * recall / both if both else 0.0


UNIT = "messages"
Ends = list[tuple[bool, bool]]
"""(was ended, should have been ended) for each message."""


def paper_batch(records: Sequence[Record]) -> dict[str, BatchMetric]:
    """The parts of the headline and of PRISM's mean, and the counts for both means."""
    main = drafts(records)
    by_source = {name: [r for r in main if r.tags.get("source") == name] for name in SOURCES}
    parts = _prism_parts(by_source[PRISM])
    heads = {
        f"headline/{name}": _counted(rows)
        if name == PRISM
        else mean_of([r.score.value for r in rows], UNIT)
        for name, rows in by_source.items()
    }
    metrics = {"macro_source": _counted(main), **heads, **parts}
    return {name: metric for name, metric in metrics.items() if metric.n}


def published_batch(records: Sequence[Record]) -> dict[str, BatchMetric]:
    """The metrics of the published aggregation: message scores, averaged by source."""
    by_source = macro(records, "source")
    prism = [r for r in drafts(records) if r.tags.get("source") == PRISM]
    first = [r for r in prism if r.tags.get("turn") == "first"]
    diversity = _over_rollouts(first, first_turn_diversity)
    metrics = {"first_turn_diversity": diversity, **_ending(prism)}
    rows = {} if by_source is None else {"macro_source": by_source}
    return rows | {name: metric for name, metric in metrics.items() if metric.value is not None}


def _counted(rows: Sequence[Record]) -> BatchMetric:
    """The counts of a declared mean; its value comes from its parts."""
    return BatchMetric(None, len(rows), sum(r.score.scored for r in rows), UNIT, 0.0, 1.0)


# -- PRISM ---------------------------------------------------------------------------------------


def _prism_parts(prism: Sequence[Record]) -> dict[str, BatchMetric]:
    first = [r for r in prism if r.tags.get("turn") == "first"]
    later = [r for r in prism if r.tags.get("turn") != "first"]
    return {
        "first_turn_diversity": _over_rollouts(first, variety),
        "own_words": _mean_part(prism, _own_words),
        **_ending(later),
        "human_share": _mean_part(prism, lambda r: r.score.metrics.get("ai_detector")),
    }


def _own_words(record: Record) -> float | None:
    overlap = record.score.metrics.get("intent_decomposition")
    return None if overlap is None else 1 - overlap


def _mean_part(records: Iterable[Record], number: Callable[[Record], float | None]) -> BatchMetric:
    """The mean over the messages that a part applies to; unscored ones are counted."""
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
    """Diversity within each rollout of a step, because messages of one row should be similar."""
    texts: dict[tuple[int, int], list[str]] = defaultdict(list)
    scored = [record for record in first if record.score.scored]
    for record in scored:
        readable = record.score.status in READABLE
        texts[record.step, record.rollout].append(message_of(record).text if readable else "")
    values = [value for group in texts.values() if (value := diversity(group)) is not None]
    mean = fmean(values) if values else None
    return BatchMetric(mean, len(first), len(scored), UNIT, 0.0, 1.0)


def _ending(records: Sequence[Record]) -> dict[str, BatchMetric]:
    """Precision, recall and F1 of ending; no value if no message was or should have been ended.

    Messages with an unknown right ending are left out.
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
    """(ends, number of unscored messages with a known right ending)."""
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
    """Whether the message should have ended the conversation; None if unknown."""
    if "last" in record.tags:
        return record.tags["last"] == "yes"
    right = record.score.metrics.get("termination")  # a first message, under `reference`
    return None if right is None else message_of(record).ended == bool(right)


# -- texts ---------------------------------------------------------------------------------------


def message_of(record: Record) -> UserMessage:
    """The parsed message of a record; empty if there is none."""
    lines = record.episode.transcript
    return _cached_reply(lines[-1].text, record.score.protocol) if lines else UserMessage("", False)


@lru_cache(maxsize=1 << 14)
def _cached_reply(text: str, protocol: Protocol) -> UserMessage:
    return read_reply(text, protocol)


# -- the drafts of a row -------------------------------------------------------------------------


def with_novelty(records: Sequence[Record]) -> list[Record]:
    """The rollouts of one row, with `novelty` added to the parts of a first message's reward.

    `novelty` is the mean of 1 − Jaccard over the row's other drafts, for drafts and for refined
    rollouts. A row with fewer than two non-empty drafts has none. Scores (`value`) do not
    change: in evaluation a row has no group.
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
    first = record.tags.get("source") == PRISM and record.tags.get("turn") == "first"
    return first and record.score.scored and record.score.status in READABLE


def _paid(record: Record, bags: Mapping[int, frozenset[str]]) -> Record:
    bag = bag_of_words(message_of(record).text)
    novelty = fmean(1 - jaccard(bag, other) for i, other in bags.items() if i != record.rollout)
    metrics = {**record.score.metrics, NOVELTY: novelty}
    return replace(
        record, score=replace(record.score, metrics=metrics, reward=prism_value(metrics))
    )
