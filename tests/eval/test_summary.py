"""Records in, the fixed shape of summary.json out."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from soulkit.errors import DataError
from soulkit.eval.summary import Cell, Summary, summarise, unscored_share
from soulkit.metrics.intervals import estimate, suite_mean
from soulkit.runs.records import load_records
from soulkit.types import (
    BatchMetric,
    Completion,
    Episode,
    Kind,
    Record,
    Score,
    Segment,
    Trace,
    Turn,
    record_key,
)


def record(
    example: str,
    value: float | None,
    *,
    task: str = "tomi",
    rollout: int = 0,
    kind: Kind = "draft",
    step: int = 0,
    **more: object,
) -> Record:
    turn = Turn((Segment("user", "Where is the ball?"),), Completion(text="[A]", token_ids=(1, 2)))
    made = Record(
        key=record_key(step, example, rollout, kind),
        task=task,
        example_id=example,
        rollout=rollout,
        kind=kind,
        step=step,
        episode=Episode(example_id=example, task=task, traces=(Trace("reader", (turn,)),)),
        score=Score(value=value, reward=value, **_status(value)),
    )
    return replace(made, **more)  # type: ignore[arg-type]


def _status(value: float | None) -> dict[str, str]:
    return {} if value is not None else {"status": "unscored", "reason": "judge_error"}


def summary_of(records: list[Record], **more: object) -> dict[str, dict[str, dict[str, object]]]:
    totals = summarise(
        records, command="eval", model="m", protocol="paper", seconds=1.0, cost=None, **more
    )  # type: ignore[arg-type]
    tasks: dict[str, dict[str, dict[str, object]]] = totals.to_json()["tasks"]
    return tasks


def write(path: Path, records: list[Record]) -> Path:
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in records), encoding="utf-8")
    return path


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [record("a", 1.0, tags={"order": "2"}), record("b", None)]
    assert load_records(write(tmp_path / "episodes.jsonl", rows)) == rows


def test_a_later_line_with_the_same_key_wins(tmp_path: Path) -> None:
    rows = [record("a", None), record("b", 0.0), record("a", 1.0)]
    records = load_records(write(tmp_path / "episodes.jsonl", rows))
    assert [(r.example_id, r.score.value) for r in records] == [("a", 1.0), ("b", 0.0)]


def test_a_line_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "episodes.jsonl", [record("a", 1.0), record("b", 1.0)])
    path.write_bytes(path.read_bytes()[:-40])
    assert [r.example_id for r in load_records(path)] == ["a"]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "episodes.jsonl", [record("a", 1.0)])
    path.write_text('{"key": 3}\n' + path.read_text())
    with pytest.raises(DataError, match="Object 1"):
        load_records(path)
    with pytest.raises(DataError, match="no episodes"):
        load_records(tmp_path / "none.jsonl")


def test_half_a_surrogate_pair_does_not_lose_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "episodes.jsonl", [record("a", 1.0, gold="say \ud83d")])
    assert load_records(path)[0].gold == "say \ud83d"


def test_the_shape_of_the_summary() -> None:
    rows = [record("a", 1.0), record("b", 0.0), record("c", None)]
    totals = summarise(
        rows, command="eval", model="m", protocol="paper", seconds=2.5, cost=0.1
    ).to_json()
    mean = estimate([1.0, 0.0], "ab", binary=True)
    assert totals["tasks"]["tomi"]["value"] == {
        "mean": 0.5, "ci_low": mean.ci_low, "ci_high": mean.ci_high, "n_scored": 2, "n": 3,
        "n_clusters": 2, "method": "wilson-t", "variance": 0.25, "df": 1.0, "scale": (0.0, 1.0),
        "events": 1.0, "headline": True,
        "unscored": {"judge_error": 1}, "worst": pytest.approx(1 / 3), "best": pytest.approx(2 / 3),
    }  # fmt: skip
    assert totals["statuses"] == {"tomi": {"ok": 2, "unscored": 1}}
    assert (totals["seconds"], totals["cost"], totals["n"], totals["n_scored"]) == (2.5, 0.1, 3, 2)
    assert totals["unscored_share"] == pytest.approx(1 / 3)
    json.dumps(totals, allow_nan=False)


def test_a_score_that_is_no_number_is_undefined() -> None:
    rows = [record("a", 1.0), record("b", float("nan")), record("c", 0.0)]
    totals = summarise(
        rows, command="eval", model="m", protocol="paper", seconds=2.5, cost=0.1
    ).to_json()
    cell = totals["tasks"]["tomi"]["value"]
    assert (cell["mean"], cell["n_scored"], cell["n"]) == (0.5, 2, 3)
    assert cell["unscored"] == {"undefined": 1} and cell["best"] == pytest.approx(2 / 3)
    json.dumps(totals, allow_nan=False)


def test_bounds_use_the_scale_of_the_task() -> None:
    rows = [record("a", 0.5), record("b", None)]
    assert "worst" not in summary_of(rows)["tomi"]["value"]
    cell = summary_of(rows, scale={"tomi": (-1.0, 1.0)})["tomi"]["value"]
    assert (cell["worst"], cell["best"]) == (-0.25, 0.75)


def test_a_wider_scale_is_no_yes_or_no() -> None:
    rows = [record(f"e{i}", 1.0) for i in range(6)]
    shares = summary_of(rows)["tomi"]["value"]
    points = summary_of(rows, scale={"tomi": (-5.0, 5.0)})["tomi"]["value"]
    assert shares["ci_high"] == 1.0 < points["ci_high"] < 5.0  # type: ignore[operator]
    assert points["scale"] == (-5.0, 5.0) and shares["scale"] == (0.0, 1.0)


def test_break_downs_by_tag() -> None:
    rows = [record(str(i), float(i < 3), tags={"order": str(i % 2)}) for i in range(4)]
    tasks = summary_of(rows)["tomi"]
    assert tasks["value/order=0"]["mean"] == 1.0
    assert tasks["value/order=1"]["mean"] == 0.5


def test_metrics_that_only_some_episodes_carry() -> None:
    score = record("a", 1.0).score
    rows = [
        replace(record("a", 1.0), score=replace(score, metrics={"f1": 0.5, "bleu": None})),
        replace(record("b", 1.0), score=replace(score, metrics={"bleu": 0.2})),
        record("c", None),
    ]
    cells = summary_of(rows)["tomi"]
    assert (cells["f1"]["n_scored"], cells["f1"]["n"]) == (1, 1)
    assert cells["bleu"]["unscored"] == {"judge_error": 1, "undefined": 1}
    assert (cells["bleu"]["n_scored"], cells["bleu"]["n"]) == (1, 3)


def test_rollouts_of_one_example_are_one_cluster() -> None:
    rows = [record(str(i // 4), float(i % 3 == 0), rollout=i % 4) for i in range(40)]
    cell = summary_of(rows)["tomi"]["value"]
    assert (cell["n_scored"], cell["n_clusters"]) == (40, 10)


def test_refined_episodes_are_no_headline() -> None:
    rows = [record("a", 0.0), record("a", 1.0, kind="refined"), record("b", 0.0)]
    cells = summary_of(rows)["tomi"]
    assert (cells["value"]["mean"], cells["value"]["n"]) == (0.0, 2)
    assert cells["value/kind=refined"]["mean"] == 1.0


def test_batch_metrics_of_a_task_are_passed_through() -> None:
    made = {"all_correct": BatchMetric(0.25, 5, 4, "sets"), "f1": BatchMetric(None, 5, 0)}
    cells = summary_of([record("a", 1.0)], batch={"tomi": lambda batch: made})
    assert cells["tomi"]["all_correct"]["mean"] == 0.25
    assert cells["tomi"]["all_correct"]["ci_low"] is None
    assert (cells["tomi"]["all_correct"]["n_scored"], cells["tomi"]["all_correct"]["n"]) == (4, 5)
    assert cells["tomi"]["f1"]["mean"] is None


def test_all_unscored_has_no_mean() -> None:
    rows = [record("a", None), record("b", None)]
    cell = summary_of(rows, scale={"tomi": (0.0, 1.0)})["tomi"]["value"]
    assert (cell["mean"], cell["ci_low"], cell["worst"], cell["best"]) == (None, None, 0.0, 1.0)
    assert unscored_share(rows) == 1.0
    with pytest.raises(DataError):
        unscored_share([])


def test_a_cell_comes_back_from_json_as_it_was() -> None:
    rows = [record("a", 0.25), record("b", 0.5), record("c", None)]
    totals = summarise(
        rows, command="eval", model="m", protocol="paper", seconds=1.0, cost=None,
        scale={"tomi": (0.0, 1.0)},
    )  # fmt: skip
    again = Summary.from_json(json.loads(json.dumps(totals.to_json())))
    assert again.tasks == totals.tasks
    assert again.tasks["tomi"]["value"].variance == pytest.approx(0.125**2)
    assert suite_mean([again.tasks["tomi"]["value"]]).ci_low is not None


def test_a_cell_of_an_earlier_version_has_no_clusters() -> None:
    line = {"mean": 0.5, "ci_low": 0.2, "ci_high": 0.8, "n_scored": 4, "n": 4, "method": "wilson",
            "unscored": {}}  # fmt: skip
    cell = Cell.from_json(line)
    assert (cell.n_clusters, cell.variance, cell.scale, cell.events) == (0, None, None, None)
    assert cell.to_json() == line
    assert Cell.from_json({**line, "scale": [0.0], "events": "many"}).scale is None
