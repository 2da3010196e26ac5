"""MirrorBench's controls: two real users, two simulated ones, and scores read between them.

    human_human   the real user beside themselves (gteval, pairwise), and alone (rnr, ctr); a row
    proxy_proxy   the simulated user beside themselves (gteval, pairwise); a draft

A judge's number s becomes (s − PP) / (HH − PP), cut off at 0 and 1, where HH and PP are the means
of the controls. Where HH does not lie LEAST_GAP above PP, which for `pairwise` is the usual case
(both are near one half), noise would decide between 0 and 1: the calibrated number is then
undefined, and the anchors say why. The published rule divides by at least 1e-6 instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from soulkit.runs.records import drafts
from soulkit.tasks.batches import mean_of
from soulkit.tasks.controls import Control
from soulkit.tasks.mirrorbench.questions import CALLS, COMPARING, PARTS
from soulkit.types import BatchMetric, ControlRecord, Record

HUMAN, PROXY = "human_human", "proxy_proxy"
ASKED = {HUMAN: PARTS, PROXY: COMPARING}
"""Control → the parts it has numbers for."""
LEAST_GAP = 0.05
"""HH − PP below which a score between them means nothing."""
UNIT = "conversations"

CONTROLS = (
    Control(HUMAN, "row", {"judge": sum(CALLS[part] for part in ASKED[HUMAN])}, CALLS["pairwise"]),
    Control(
        PROXY, "episode", {"judge": sum(CALLS[part] for part in ASKED[PROXY])}, CALLS["pairwise"]
    ),
)


def calibrated_metrics(
    records: Sequence[Record], controls: Sequence[ControlRecord]
) -> dict[str, BatchMetric]:
    """`human_human/gteval` …, the anchors, and `calibrated/gteval` …, the scores between them."""
    metrics: dict[str, BatchMetric] = {}
    for name, parts in ASKED.items():
        of_control = [one for one in controls if one.name == name]
        for part in parts if of_control else ():
            metrics[f"{name}/{part}"] = mean_of(
                [one.score.metrics.get(part) for one in of_control], UNIT
            )
    for part in COMPARING:
        human, proxy = metrics.get(f"{HUMAN}/{part}"), metrics.get(f"{PROXY}/{part}")
        if human is not None and proxy is not None:
            metrics[f"calibrated/{part}"] = _calibrated(records, part, human.value, proxy.value)
    return metrics


def _calibrated(
    records: Sequence[Record], part: str, human: float | None, proxy: float | None
) -> BatchMetric:
    main = drafts(records)
    scores = [value for one in main if (value := one.score.metrics.get(part)) is not None]
    value = None
    if human is not None and proxy is not None and scores and human - proxy >= LEAST_GAP:
        value = fmean(between_anchors(score, human, proxy) for score in scores)
    n_scored = 0 if value is None else len(scores)
    return BatchMetric(value, len(main), n_scored, UNIT, 0.0, 1.0)


def undefined_remarks(values: Mapping[str, float | None]) -> Iterator[str]:
    """A line for each calibrated number that is undefined because of where its anchors stand."""
    for part in COMPARING:
        human, proxy = values.get(f"{HUMAN}/{part}"), values.get(f"{PROXY}/{part}")
        if human is not None and proxy is not None and human - proxy < LEAST_GAP:
            yield (
                f"calibrated/{part} is undefined: {HUMAN} ({human:.2f}) does not lie {LEAST_GAP:g} "
                f"above {PROXY} ({proxy:.2f}), so that noise would decide"
            )


def between_anchors(score: float, human: float, proxy: float) -> float:
    """Where a score lies between the two anchors, in [0, 1]; `human` is the higher one."""
    return min(1.0, max(0.0, (score - proxy) / (human - proxy)))
