"""How varied the words of a user are, beside those of the people of the same data set.

    MATTR    moving-average type-token ratio, window 50        higher: more varied
    HD-D     share of types expected in a sample of 42         higher: more varied
    Yule's K repetition, times 10,000                          higher: more repeated

They are taken over the user's messages joined by blanks, in o200k tokens. The z-score of a
conversation is (value − mean) / standard deviation over the people of its subset in the whole data
set, whichever rows of it are played: that is why the people's numbers are put into every example
when the rows are read (`with_people`). Without the tokenizer, with fewer than two people, or where
all of them are alike, a z-score is None. Whoever says nothing counts as 0, and has a z-score.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from soulkit.metrics.ngrams import hdd, mattr, subword_tokens, yules_k, z_score
from soulkit.runs.records import drafts
from soulkit.types import BatchMetric, Example, Record

MEASURES = ("mattr", "hdd", "yules_k")
WINDOW, SAMPLE = 50, 42
PEOPLE = "people"
"""The field of an example that holds its subset's people: measure → (mean, standard deviation)."""
UNIT = "conversations"
Spread = tuple[float, float]


def word_measures(texts: Sequence[str]) -> dict[str, float | None]:
    """Measure → its value over these messages; None for each where there is no tokenizer."""
    tokens = subword_tokens(" ".join(text for text in texts if text))
    if tokens is None:
        return dict.fromkeys(MEASURES)
    return dict(of_tokens(tokens))


def of_tokens(tokens: Sequence[Any]) -> dict[str, float]:
    """Measure → its value; 0 for each where there is no token."""
    return {
        "mattr": mattr(tokens, WINDOW), "hdd": hdd(tokens, SAMPLE), "yules_k": yules_k(tokens),
    }  # fmt: skip


# -- the people of a data set --------------------------------------------------------------------


def with_people(examples: Sequence[Example]) -> list[Example]:
    """The examples of a whole data set, each with the numbers of the people of its subset."""
    groups: dict[str | None, list[dict[str, float | None]]] = defaultdict(list)
    for example in examples:
        groups[example.fields["subset"]].append(word_measures(user_texts(example.fields["turns"])))
    people = {subset: spreads(values) for subset, values in groups.items()}
    return [
        replace(example, fields={**example.fields, PEOPLE: people[example.fields["subset"]]})
        for example in examples
    ]


def spreads(people: Sequence[Mapping[str, float | None]]) -> dict[str, Spread | None]:
    """Measure → (mean, sample standard deviation); None for fewer than two or all alike."""
    by_measure: dict[str, Spread | None] = {}
    for measure in MEASURES:
        values = [v for one in people if (v := one.get(measure)) is not None]
        deviation = stdev(values) if len(values) > 1 else 0.0
        by_measure[measure] = (fmean(values), deviation) if deviation > 0 else None
    return by_measure


def user_texts(turns: Sequence[Mapping[str, str]]) -> list[str]:
    """What the user of a recorded conversation wrote, all of it."""
    return [turn["content"] for turn in turns if turn["role"] == "user"]


# -- one conversation, and many ------------------------------------------------------------------


def lexical_metrics(texts: Sequence[str], fields: Mapping[str, Any]) -> dict[str, float | None]:
    """`lexical/mattr` and `lexical/mattr_z` …, of one conversation."""
    people = fields.get(PEOPLE) or {}
    metrics: dict[str, float | None] = {}
    for measure, value in word_measures(texts).items():
        spread = people.get(measure)
        standing = None if value is None or spread is None else z_score(value, *spread)
        metrics |= {f"lexical/{measure}": value, f"lexical/{measure}_z": standing}
    return metrics


def subset_means(records: Sequence[Record]) -> dict[str, BatchMetric]:
    """`lexical/mattr_z/<subset>` …: mean z-scores, without a scale since they have no ends."""
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
