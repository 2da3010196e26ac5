"""Records in, the fixed shape of summary.json out.

Which number of a task is its headline, and how surely a number over a batch is known.

A run's tasks as a suite: groups, axis means, the suite mean, and what is missing.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from soulkit.errors import DataError
from soulkit.eval.results.batch_statistics import MAX_PARTS, LeaveOneOut, summary_terms
from soulkit.eval.results.cells import SuiteLine, suite_lines
from soulkit.eval.results.summary import (
    NO_ROW_COUNTS,
    Cell,
    Cells,
    Condenser,
    Summary,
    cluster_of,
    headline,
    headline_name,
    summarise,
    unscored_share,
)
from soulkit.metrics.intervals import estimate, suite_mean
from soulkit.metrics.student import t_quantile
from soulkit.play.engine import Job, record_of
from soulkit.runs.records import RecordWriter, drafts, load_records
from soulkit.tasks.kit.scoring import mean_of
from soulkit.tasks.kit.selfcheck import scripted_play
from soulkit.tasks.kit.spec import Suite
from soulkit.types import (
    BatchMetric,
    Completion,
    Episode,
    Failure,
    Kind,
    Line,
    Record,
    Score,
    Segment,
    Trace,
    Turn,
    Verdict,
    record_key,
    unscored,
)
from tests.support.road import makeable, synth_examples, task_of


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
    writer = RecordWriter(path)
    writer.write(*records)
    writer.close()
    return path


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [record("a", 1.0, tags={"order": "2"}), record("b", None)]
    assert load_records(write(tmp_path / "episodes.jsonl", rows)) == rows


def test_a_later_line_with_the_same_key_wins(tmp_path: Path) -> None:
    rows = [record("a", None), record("b", 0.0), record("a", 1.0)]
    records = load_records(write(tmp_path / "episodes.jsonl", rows))
    assert [(r.example_id, r.score.value) for r in records] == [("a", 1.0), ("b", 0.0)]


def with_reply(one: Record, text: str, stop: str, words: str) -> Record:
    turn = Turn((), Completion(text=text, stop_reason=stop, dropped=("seed",)))
    said = {"overall": {"reasoning": f"{text} {words}", "score": 3}, "label": "good"}
    score = replace(one.score, words=words, verdicts=(Verdict(judge="j", purpose="p", said=said),))
    episode = replace(one.episode, traces=(Trace("reader", (turn,)),), transcript=(
        Line("reader", text),))  # fmt: skip
    return replace(one, key=f"{one.key}/{len(text)}/{words[:9]}", episode=episode, score=score)


@pytest.mark.parametrize("name", makeable())
def test_small_records_have_the_same_summary(name: str) -> None:
    task, records = task_of(name), list[Record]()
    for example in synth_examples(name, 1):
        for rollout, script in enumerate((task.gold, task.wrong)):
            played, score, _ = asyncio.run(
                scripted_play(task, example, script, perfect=not rollout)
            )
            if played is not None:
                job, lost = Job(task, example, rollout), unscored(Failure("judge_error"))
                records.append(record_of(job, job.rollout(0), played, score or lost))
    for text in ("A", "", " " * 99, "long " * 99, "<think>" + "long " * 99):
        for stop in ("stop", "length", "content_filter"):
            words = [f"{'the same start ' * 9} {number}" for number in range(2)]
            records += [with_reply(records[0], text, stop, one) for one in words]
    small, more = Condenser(lambda _: task.batch_reads_texts), summary_terms([task])
    full, less = (
        summarise(rows, command="eval", model="m", protocol="paper", seconds=1, cost=None, **more)
        for rows in (records, [small(one) for one in records])
    )
    assert less == full and full.tasks[name]


def test_small_records_do_not_grow_with_their_texts() -> None:
    text = "word " * 200_000
    small, prompt = Condenser(lambda _: False), Segment("user", text)
    long = with_reply(record("a", 1.0, prompt=text, gold=text), text, "stop", text)
    turn = replace(long.episode.traces[0].turns[0], context=(prompt,))
    episode = replace(long.episode, traces=(Trace("reader", (turn,)),), notes={"seen": [text]})
    one, other = (small(replace(long, key=key, episode=episode)) for key in "ab")
    assert len(repr(one)) < 3000 and one.score is other.score
    assert one.episode.traces is other.episode.traces


def test_a_line_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "episodes.jsonl", [record("a", 1.0), record("b", 1.0)])
    path.write_bytes(path.read_bytes()[:-40])
    assert [r.example_id for r in load_records(path)] == ["a"]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "episodes.jsonl", [record("a", 1.0)])
    path.write_text('{"key": 3}\n' + path.read_text())
    with pytest.raises(DataError, match="Line 1"):
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


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"scale": [0.0]}, r"tasks\.tomi\.value\.scale"),
        ({"events": "many"}, r"tasks\.tomi\.value\.events"),
        ({"n": None}, r"tasks\.tomi\.value\.n"),
    ],
)
def test_a_damaged_number_is_refused_by_name(damage: dict[str, object], words: str) -> None:
    line = summary(rows(0.0, 1.0)).to_json()
    line["tasks"]["tomi"]["value"] |= damage
    with pytest.raises(DataError, match=words):
        Summary.from_json(line)


def test_a_task_of_losses_alone_has_no_headline() -> None:
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

    many = rows(*(i % 7 / 7 for i in range(MAX_PARTS + 50)))
    cell = summary(many, batch={"tomi": counted}).tasks["tomi"]["mean"]
    assert (
        len(asked) == MAX_PARTS + 1
        and max(asked) == MAX_PARTS + 50
        and min(asked) == MAX_PARTS + 48
    )
    assert cell.n_clusters == MAX_PARTS + 50 and cell.df == MAX_PARTS - 1
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


SUITE = Suite(
    members=("a", "b", "both", "d"),
    groups={"both": ("c1", "c2")},
    axes={"X": ("a", "both"), "Y": ("b", "d")},
    average="macro",
)
MEANS = {"a": 0.2, "b": 0.4, "c1": 0.5, "c2": 0.9, "d": 0.6}


def cell(mean: float | None, *, n: int = 20, scored: int | None = None, **more: object) -> Cell:
    counted = n if scored is None else scored
    return Cell(
        mean=mean, n=n, n_scored=counted, n_clusters=n, variance=0.01, df=19.0, scale=(0.0, 1.0),
        headline=True, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def played(**changes: Cell | None) -> Cells:
    cells = {name: cell(mean) for name, mean in MEANS.items()} | changes
    return {name: {"value": one} for name, one in cells.items() if one is not None}


def lines(tasks: Cells, suite: Suite = SUITE) -> dict[str, SuiteLine]:
    return {line.name: line for line in suite_lines(suite, tasks, lambda task: (0.0, 1.0))}


def test_lines_stand_in_published_order_with_the_means_behind_them() -> None:
    rows = suite_lines(SUITE, played(), lambda task: None)
    assert [(row.name, row.level) for row in rows] == [
        ("a", "task"), ("b", "task"), ("both", "group"), ("c1", "part"), ("c2", "part"),
        ("d", "task"), ("X", "axis"), ("Y", "axis"), ("all", "suite"),
    ]  # fmt: skip
    assert [row.axis for row in rows[:6]] == ["X", "Y", "X", "X", "X", "Y"]


def test_every_member_counts_alike() -> None:
    rows = lines(played(a=cell(0.2, n=1000)))
    both = fmean((0.5, 0.9))
    assert rows["both"].cell.mean == pytest.approx(both)
    assert rows["X"].cell.mean == pytest.approx(fmean((0.2, both)))
    assert rows["all"].cell.mean == pytest.approx(fmean((0.2, 0.4, both, 0.6)))
    assert (rows["all"].cell.n_scored, rows["all"].cell.n) == (1080, 1080)
    assert rows["all"].coverage == "4 of 4" and rows["all"].missing == ()
    assert rows["all"].cell.worst is None and rows["all"].cell.best is None


def test_tasks_are_strata() -> None:
    """Variances are added: the group's is 0.01 / 2, the suite's the sum of four over 16."""
    rows = lines(played())
    assert rows["both"].cell.variance == pytest.approx(0.01 / 2)
    assert rows["all"].cell.variance == pytest.approx((3 * 0.01 + 0.01 / 2) / 16)
    low, high = rows["all"].cell.ci_low, rows["all"].cell.ci_high
    assert low is not None and high is not None and rows["all"].cell.mean is not None
    assert 0 < low < rows["all"].cell.mean < high < 1
    half = math.sqrt((3 * 0.01 + 0.01 / 2) / 16)
    assert 1.9 * half < (high - low) / 2 < 2.2 * half


def test_without_a_member_there_is_no_average_only_bounds() -> None:
    rows = lines(played(d=None))
    assert rows["X"].cell.mean is not None and rows["X"].cell.worst is None
    for name, known, total in (("Y", 0.4, 2), ("all", 0.2 + 0.4 + 0.7, 4)):
        missing = rows[name].cell
        assert missing.mean is None and missing.ci_low is None
        assert (missing.worst, missing.best) == pytest.approx((known / total, (known + 1) / total))
        assert rows[name].missing == ("d",)
    assert rows["all"].coverage == "3 of 4" and rows["d"].cell == Cell()
    assert (rows["all"].cell.n_scored, rows["all"].cell.n) == (80, 80)


def test_a_group_without_one_of_its_tasks_has_no_mean() -> None:
    rows = lines(played(c2=None))
    assert rows["both"].cell.mean is None and rows["both"].missing == ("c2",)
    assert (rows["both"].cell.worst, rows["both"].cell.best) == pytest.approx((0.25, 0.75))
    assert rows["X"].missing == ("both",)
    assert (rows["X"].cell.worst, rows["X"].cell.best) == pytest.approx((0.225, 0.475))


def test_what_is_unscored_widens_the_bounds_and_leaves_the_mean() -> None:
    lost = cell(0.6, n=20, scored=15, worst=0.45, best=0.7, unscored={"judge_error": 5})
    rows = lines(played(d=lost))
    whole = rows["all"].cell
    assert whole.mean == pytest.approx(fmean((0.2, 0.4, 0.7, 0.6)))
    assert (whole.worst, whole.best) == pytest.approx(
        (fmean((0.2, 0.4, 0.7, 0.45)), fmean((0.2, 0.4, 0.7, 0.7)))
    )
    assert (whole.n_scored, whole.n, whole.unscored) == (95, 100, {"judge_error": 5})
    nothing = lines(played(d=cell(None, scored=0, worst=0.0, best=1.0)))["all"].cell
    assert nothing.mean is None and (nothing.n_scored, nothing.n) == (80, 100)
    assert (nothing.worst, nothing.best) == pytest.approx((1.3 / 4, 2.3 / 4))


def test_what_is_truncated_widens_the_bounds_though_it_is_scored() -> None:
    whole = lines(played(d=cell(0.6, worst=0.6, best=0.9)))["all"].cell
    assert whole.mean is not None and whole.n_scored == whole.n
    assert (whole.worst, whole.best) == pytest.approx((whole.mean, whole.mean + 0.3 / 4))


def test_the_scale_of_the_run_goes_before_the_declared_one() -> None:
    wide = Cell(mean=None, n=3, scale=(-5.0, 5.0), headline=True)
    bounds = lines(played(d=wide))["Y"].cell
    assert (bounds.worst, bounds.best) == pytest.approx((-2.3, 2.7))
    nowhere = suite_lines(SUITE, played(d=None), lambda task: None)[-1].cell
    assert nowhere.mean is None and nowhere.worst is nowhere.best is None


def test_means_without_variances_have_no_interval() -> None:
    rows = lines({
        name: {"value": Cell(mean=mean, n=4, n_scored=4, headline=True)}
        for name, mean in MEANS.items()
    })  # fmt: skip
    assert rows["all"].cell.mean == pytest.approx(fmean((0.2, 0.4, 0.7, 0.6)))
    assert rows["all"].cell.ci_low is None and rows["all"].cell.variance is None


def test_a_plain_list_has_no_mean() -> None:
    rows = suite_lines(Suite(members=("a", "b")), played(), lambda task: None)
    assert [row.level for row in rows] == ["task", "task"]
