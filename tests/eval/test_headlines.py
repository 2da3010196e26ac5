"""Which number of a task is its headline, and how surely a number over a batch is known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from soulkit.eval.batch import PARTS, LeaveOneOut, summary_terms
from soulkit.eval.summary import (
    NO_ROW_COUNTS,
    Cell,
    Summary,
    cluster_of,
    headline,
    headline_name,
    summarise,
)
from soulkit.metrics.student import t_quantile
from soulkit.runs.records import drafts
from soulkit.tasks.batches import mean_of
from soulkit.types import BatchMetric, Record
from tests.eval.test_summary import record
from tests.support.road import synth_examples, task_of

Metrics = Mapping[str, BatchMetric]


def spread(records: Sequence[Record]) -> Metrics:
    """Highest less lowest score: it exists only over a batch."""
    values = [r.score.value for r in drafts(records) if r.score.value is not None]
    value = max(values) - min(values) if values else None
    n = len(drafts(records))
    return {"spread": BatchMetric(value, n, len(values), "replies", 0.0, 1.0)}


def mean(records: Sequence[Record]) -> Metrics:
    values = [r.score.value for r in records if r.score.value is not None]
    return {"mean": BatchMetric(fmean(values) if values else None, len(records), len(values))}


def summary(records: list[Record], **terms: object) -> Summary:
    return summarise(
        records, command="eval api", model="m", protocol="paper", seconds=1.0, cost=None, **terms
    )  # type: ignore[arg-type]


def rows(*values: float | None) -> list[Record]:
    return [record(f"e{i}", value) for i, value in enumerate(values)]


def test_the_declared_headline_is_marked_and_nothing_else_is() -> None:
    terms = {"batch": {"tomi": spread}, "headlines": {"tomi": "spread"}}
    cells = summary(rows(0.0, 0.5, 1.0), **terms).tasks["tomi"]
    assert [name for name, cell in cells.items() if cell.headline] == ["spread"]
    assert headline(cells).mean == 1.0 and (headline(cells).unit, headline(cells).n) == (
        "replies", 3,
    )  # fmt: skip
    cells = summary(rows(0.0, 0.5, 1.0), batch={"tomi": spread}).tasks["tomi"]
    assert headline_name(cells) == "value" and headline(cells).mean == 0.5


def test_a_summary_of_an_earlier_version_has_value_for_its_headline() -> None:
    cells = {"value": Cell(mean=0.25, n=4), "all_correct": Cell(mean=0.5, n=4, method="batch")}
    assert headline_name(cells) == "value" and headline(cells).mean == 0.25
    assert cells["all_correct"].of_batch and not cells["value"].of_batch
    assert headline_name({"loss": Cell(mean=2.0)}) == "" and headline({}) == Cell()


def test_a_headline_survives_the_file() -> None:
    terms = {"batch": {"tomi": spread}, "headlines": {"tomi": "spread"}}
    whole = replace(
        summary(rows(0.0, 0.5, 1.0, None), **terms), suite="mine", left_out={"hitom": "no rows"}
    )
    again = Summary.from_json(json.loads(json.dumps(whole.to_json())))
    assert again == replace(whole, prompts=again.prompts, statuses=again.statuses)
    assert again.left_out == {"hitom": "no rows"} and headline(again.tasks["tomi"]).worst == 0.0


def test_a_declared_headline_that_cannot_be_computed_is_no_other_number() -> None:
    lost = [record("a", 1.0), record("b", None)]
    cells = summary(lost, headlines={"tomi": "joint"}).tasks["tomi"]
    assert headline_name(cells) == "joint" and cells["value"].mean == 1.0
    assert headline(cells) == Cell(n=2, unscored={"judge_error": 1, "undefined": 1}, headline=True)


@pytest.mark.parametrize("words", ["none of these rows asks for it", ""])
def test_a_headline_over_no_row_says_why_and_nothing_is_missing(words: str) -> None:
    """A row that could have counted and has no score is missing, though."""

    def joint(records: Sequence[Record]) -> Metrics:
        return {"joint": BatchMetric(None, 0, 0, not_applicable=words)}

    terms = {"batch": {"tomi": joint}, "headlines": {"tomi": "joint"}}
    whole = summary(rows(0.0, 1.0), **terms)
    cell = headline(Summary.from_json(json.loads(json.dumps(whole.to_json()))).tasks["tomi"])
    assert cell == headline(whole.tasks["tomi"]) and cell.headline
    assert cell.not_applicable == (words or NO_ROW_COUNTS)
    assert (cell.mean, cell.n, cell.n_scored, cell.n_clusters, cell.unscored) == (None, 0, 0, 0, {})
    played_nothing = summary([], **terms).tasks["tomi"]
    assert headline(played_nothing).not_applicable == ""
    missing = {"joint": lambda records: {"joint": BatchMetric(None, 2, 0, not_applicable=words)}}
    lost = summary(rows(0.0, 1.0), batch={"tomi": missing["joint"]}, headlines={"tomi": "joint"})
    assert headline(lost.tasks["tomi"]).not_applicable == ""


def test_a_mean_over_the_batch_has_the_interval_of_its_clusters() -> None:
    """The jackknife of a plain mean over equal clusters is the variance of their means."""
    values = (0.1, 0.4, 0.35, 0.8, 0.6)
    cell = summary(rows(*values), batch={"tomi": mean}).tasks["tomi"]["mean"]
    centre = fmean(values)
    variance = sum((v - centre) ** 2 for v in values) / (5 * 4)
    assert cell.variance == pytest.approx(variance) and cell.n_clusters == 5
    half = t_quantile(4.0) * math.sqrt(variance)
    assert (cell.ci_low, cell.ci_high) == pytest.approx((centre - half, centre + half))


def test_a_number_with_units_missing_could_lie_anywhere_on_its_scale() -> None:
    cell = summary(rows(0.25, 0.5, None), batch={"tomi": spread}).tasks["tomi"]["spread"]
    assert (cell.worst, cell.best, cell.n_scored, cell.n) == (0.0, 1.0, 2, 3)
    # Two texts without a score more would make the interval no narrower.
    more = summary(rows(0.25, 0.5, None, None, None), batch={"tomi": spread})
    assert more.tasks["tomi"]["spread"].variance == cell.variance and cell.n_clusters == 2
    assert cell.unscored == {"undefined": 1} and cell.scale == (0.0, 1.0)


def test_a_mean_over_units_has_the_bounds_of_a_mean() -> None:
    made = {"rows": mean_of([0.25, 0.75, None, None], "rows")}
    cell = summary(rows(0.5), batch={"tomi": lambda batch: made}).tasks["tomi"]["rows"]
    assert (cell.mean, cell.worst, cell.best) == (0.5, 0.25, 0.75)
    none = {"rows": mean_of([None, None], "rows", (-1.0, 1.0))}
    lost = summary(rows(0.5), batch={"tomi": lambda batch: none}).tasks["tomi"]["rows"]
    assert (lost.mean, lost.worst, lost.best) == (None, -1.0, 1.0)


def test_a_large_batch_is_asked_a_bounded_number_of_times() -> None:
    asked: list[int] = []

    def counted(records: Sequence[Record]) -> Metrics:
        asked.append(len(records))
        return mean(records)

    many = rows(*(i % 7 / 7 for i in range(PARTS + 50)))
    cell = summary(many, batch={"tomi": counted}).tasks["tomi"]["mean"]
    assert len(asked) == PARTS + 1 and max(asked) == PARTS + 50 and min(asked) == PARTS + 48
    assert cell.n_clusters == PARTS + 50 and cell.df == PARTS - 1
    plain = summary(many).tasks["tomi"]["value"]
    assert cell.variance == pytest.approx(plain.variance, rel=0.25)


def test_a_jackknife_leaves_out_no_more_than_one() -> None:
    batch = LeaveOneOut(mean, rows(0.0, 0.5, 1.0), cluster_of)
    assert batch.value("mean", [0, 1, 2]) == 0.5 and batch.value("mean", [1, 2]) == 0.75
    assert batch.value("other", [0, 1, 2]) is None
    with pytest.raises(ValueError, match="one part at a time"):
        batch.value("mean", [0])


def test_reference_has_the_mean_of_its_scores_for_its_headline() -> None:
    paper, reference = task_of("alignx_demo"), task_of("alignx_demo", "reference")
    assert summary_terms([paper])["headlines"] == {"alignx_demo": paper.spec.metric.headline}
    assert summary_terms([reference])["headlines"] == {}
    examples = synth_examples("alignx_demo", 4)
    values = [1.0, 0.0] * len(examples)
    records = [
        replace(record(example.id, value), task="alignx_demo")
        for example, value in zip(examples, values, strict=False)
    ]
    assert reference.headline(records) == pytest.approx(fmean(values[: len(records)]))
    declared = paper.batch_metrics(records)[paper.spec.metric.headline].value
    assert paper.headline(records) == declared
    assert reference.headline([]) is None
