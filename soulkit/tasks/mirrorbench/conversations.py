"""Recorded conversations of MirrorBench: subsets, played messages, lexical diversity.

The subset of a row without `dataset` follows from its `conversation_id`: clariq-448, qulac-14,
486f...b246::dolly-v2-12b (chatbot_arena), or a UUID (oasst1). `paper` plays every non-empty message
except an assistant's last one; `reference` plays the first ten messages.

    MATTR    moving-average type-token ratio, window 50        higher: more varied
    HD-D     expected share of types in a sample of 42         higher: more varied
    Yule's K repetition, times 10,000                          higher: more repeated

They are computed on the user's messages in o200k tokens. A z-score is (value − mean) / standard
deviation over all people of the subset; None without a tokenizer or with fewer than two people.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from soulkit.data.chats import ChatMessage
from soulkit.judge.verdict import remove_think, spoken
from soulkit.metrics.text import hdd, mattr, subword_tokens, yules_k, z_score
from soulkit.runs.records import drafts
from soulkit.types import BatchMetric, Example, Line, Protocol, Record

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def subset_of(row: Mapping[str, Any]) -> str | None:
    """The subset of a row, from its `dataset` or its id; None if neither names one."""
    named = str(row.get("dataset") or "").strip().lower()
    if named:
        return named
    key = str(row.get("conversation_id") or "")
    prefix = next((name for name in ("clariq", "qulac") if key.startswith(f"{name}-")), None)
    if prefix is None and "::" in key:
        return "chatbot_arena"
    return prefix or ("oasst1" if _UUID.fullmatch(key) else None)


def topic_of(row: Mapping[str, Any]) -> str | None:
    """The topic of a row, else its conversation; None if neither is known."""
    metadata = row.get("metadata")
    about = metadata if isinstance(metadata, Mapping) else {}
    if about.get("topic_id") is not None and subset_of(row) in ("clariq", "qulac"):
        number = str(about["topic_id"]).strip().removesuffix(".0")
        return f"search topic {number}"
    key = str(row.get("conversation_id") or "").partition("::")[0].strip()
    return f"conversation {key}" if key else None


USER, ASSISTANT = "user", "assistant"
_LABEL = re.compile(r"\s*user:\s*", re.IGNORECASE)


def played_messages(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages that `paper` plays: non-empty, without an assistant's last one."""
    messages = [turn for turn in turns if turn["role"] in (USER, ASSISTANT)]
    messages = [message for message in messages if message["content"].strip()]
    while messages and messages[-1]["role"] == ASSISTANT:
        messages.pop()
    return messages


def first_messages(turns: Sequence[ChatMessage], most: int) -> list[ChatMessage]:
    """The messages that `reference` plays and judges: the first `most`, without an assistant's
    last one."""
    messages = list(turns[:most])
    if messages and messages[-1]["role"] == ASSISTANT:
        messages.pop()
    return messages


def as_lines(messages: Sequence[ChatMessage]) -> list[Line]:
    return [Line(message["role"], message["content"]) for message in messages]


def read_message(text: str, protocol: Protocol) -> tuple[str, str]:
    """(the simulated user's message, status): `ok`, `salvaged` if it started with a label, or
    `empty`.

    `reference` removes a label before it looks for thinking, and keeps unclosed thinking.
    """
    if protocol == "reference":
        label = _LABEL.match(text)
        message = remove_think(text[label.end() :] if label else text)
        return message, "ok" if message else "empty"
    answer = spoken(text, "paper")
    label = _LABEL.match(answer)
    message = answer[label.end() :].strip() if label else answer
    return message, "empty" if not message else "salvaged" if label else "ok"


def conversation_text(turns: Sequence[Mapping[str, object]]) -> str:
    """`ROLE: content` per line, the format of the judge prompt in `reference`."""
    return "\n".join(f"{str(t.get('role', 'unknown')).upper()}: {t.get('content')}" for t in turns)


MEASURES = ("mattr", "hdd", "yules_k")
WINDOW, SAMPLE = 50, 42
PEOPLE = "people"
"""The field with the statistics of the subset's people: measure → (mean, standard deviation)."""
UNIT = "conversations"
Spread = tuple[float, float]


def word_measures(texts: Sequence[str]) -> dict[str, float | None]:
    """Measure → its value over these messages; all None without a tokenizer."""
    tokens = subword_tokens(" ".join(text for text in texts if text))
    if tokens is None:
        return dict.fromkeys(MEASURES)
    return dict(of_tokens(tokens))


def of_tokens(tokens: Sequence[Any]) -> dict[str, float]:
    """Measure → its value; all 0 without tokens."""
    return {
        "mattr": mattr(tokens, WINDOW), "hdd": hdd(tokens, SAMPLE), "yules_k": yules_k(tokens),
    }  # fmt: skip


# -- the people of a data set --------------------------------------------------------------------


def with_people(examples: Sequence[Example]) -> list[Example]:
    """The examples of a whole data set, each extended by statistics over the people in its
    subset."""
    groups: dict[str | None, list[dict[str, float | None]]] = defaultdict(list)
    for example in examples:
        groups[example.fields["subset"]].append(word_measures(user_texts(example.fields["turns"])))
    people = {subset: spreads(values) for subset, values in groups.items()}
    return [
        replace(example, fields={**example.fields, PEOPLE: people[example.fields["subset"]]})
        for example in examples
    ]


def spreads(people: Sequence[Mapping[str, float | None]]) -> dict[str, Spread | None]:
    """Measure → (mean, sample standard deviation); None for fewer than two values, or if all are
    equal."""
    by_measure: dict[str, Spread | None] = {}
    for measure in MEASURES:
        values = [v for one in people if (v := one.get(measure)) is not None]
        deviation = stdev(values) if len(values) > 1 else 0.0
        by_measure[measure] = (fmean(values), deviation) if deviation > 0 else None
    return by_measure


def user_texts(turns: Sequence[Mapping[str, str]]) -> list[str]:
    """All messages of the user in a recorded conversation."""
    return [turn["content"] for turn in turns if turn["role"] == "user"]


# -- one conversation, and many ------------------------------------------------------------------


def lexical_metrics(texts: Sequence[str], fields: Mapping[str, Any]) -> dict[str, float | None]:
    """`lexical/mattr` and `lexical/mattr_z` etc. of one conversation."""
    people = fields.get(PEOPLE) or {}
    metrics: dict[str, float | None] = {}
    for measure, value in word_measures(texts).items():
        spread = people.get(measure)
        standing = None if value is None or spread is None else z_score(value, *spread)
        metrics |= {f"lexical/{measure}": value, f"lexical/{measure}_z": standing}
    return metrics


def subset_means(records: Sequence[Record]) -> dict[str, BatchMetric]:
    """`lexical/mattr_z/<subset>` etc.: mean z-scores, which have no fixed scale."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in drafts(records):
        if "subset" in record.tags:
            groups[record.tags["subset"]].append(record)
    return {
        f"lexical/{measure}_z/{subset}": _mean(group, f"lexical/{measure}_z")
        for subset, group in sorted(groups.items())
        for measure in MEASURES
    }


def _mean(records: Sequence[Record], metric: str) -> BatchMetric:
    values = [v for record in records if (v := record.score.metrics.get(metric)) is not None]
    mean = fmean(values) if values else None
    return BatchMetric(mean, len(records), len(values), UNIT, is_mean=True)
