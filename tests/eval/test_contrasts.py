"""What is compared: headlines, break-downs, numbers over a batch, suites, and gates on them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError, DataError
from soulkit.eval.compare import compare_runs
from soulkit.eval.contrasts import TaskPair, contrast, metric_names
from soulkit.eval.gates import ComparisonGate, gate_result, parse_gate, unseen_interval
from soulkit.eval.summary import metric_values
from soulkit.runs.records import load_records
from soulkit.tasks.registry import load_registry
from soulkit.types import Episode, Record, Score, record_key
from tests.support.evaluation import soul, three_lines


def record(task: str, example: str, value: float | None, **other: Any) -> Record:
    score = Score(value=value, reward=value, reason="" if value is not None else "judge_error")
    kind, rollout = other.pop("kind", "draft"), other.pop("rollout", 0)
    return Record(
        key=record_key(0, example, rollout, kind), task=task, example_id=example, rollout=rollout,
        kind=kind, episode=Episode(example_id=example, task=task),
        score=replace(score, metrics=other.pop("metrics", {})), **other,
    )  # fmt: skip


def run(path: Path, *rows: Record) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    with (path / "episodes.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    return path


def tomi(name: str, values: list[float | None], **other: Any) -> list[Record]:
    """Rows of a task without a headline of its own, half of them of order 1 and half of order 2."""
    return [
        record(name, f"{name}{i}", value, tags={"order": str(1 + i % 2)}, **other)
        for i, value in enumerate(values)
    ]


# -- break-downs ---------------------------------------------------------------------------------


def test_a_break_down_is_the_difference_of_its_own_rows(tmp_path: Path) -> None:
    a = run(tmp_path / "a", *tomi("tomi", [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]))
    b = run(tmp_path / "b", *tomi("tomi", [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
    (first,) = compare_runs(a, b, "value/order=1").tasks
    (second,) = compare_runs(a, b, "value/order=2").tasks
    assert first.paired.difference == pytest.approx(2 / 3)
    assert second.paired.difference == pytest.approx(-1 / 3)
    assert (first.metric, first.paired.n_shared, first.n_a) == ("accuracy/order=1", 3, 3)
    with pytest.raises(DataError, match="order=3") as error:
        compare_runs(a, b, "value/order=3")
    assert "accuracy/order=" in error.value.way_out


def test_a_break_down_of_another_metric_and_of_what_saw_feedback(tmp_path: Path) -> None:
    sides = {}
    for side, refined, f1 in (("a", 0.0, 0.25), ("b", 1.0, 0.75)):
        drafts = tomi("tomi", [0.5] * 4, metrics={"judge/quoted": f1})
        after = [record("tomi", r.example_id, refined, kind="refined") for r in drafts]
        sides[side] = run(tmp_path / side, *drafts, *after)
    (quoted,) = compare_runs(sides["a"], sides["b"], "judge/quoted/order=2").tasks
    assert quoted.paired.difference == 0.5 and quoted.paired.n_shared == 2
    (seen,) = compare_runs(sides["a"], sides["b"], "value/kind=refined").tasks
    assert seen.paired.difference == 1.0 and seen.paired.n_shared == 4
    (drafted,) = compare_runs(sides["a"], sides["b"], "value").tasks
    assert drafted.paired.difference == 0.0


def test_a_metric_of_one_task_leaves_the_others_out_by_name(tmp_path: Path) -> None:
    for side in "ab":
        run(tmp_path / side, *tomi("tomi", [0.0, 1.0], metrics={"f1": 0.5}))
        run(tmp_path / side, *tomi("paratomi", [0.0, 1.0]))
    comparison = compare_runs(tmp_path / "a", tmp_path / "b", "f1")
    assert [t.task for t in comparison.tasks] == ["tomi"]
    assert "no metric 'f1': paratomi" in comparison.remarks


# -- numbers over a batch --------------------------------------------------------------------------


def forms(
    values: list[tuple[float | None, float | None]], task: str = "alignx_demo"
) -> list[Record]:
    """Rows in both orders; the forms of a row share its cluster."""
    return [
        record(task, f"{task}{i}-{form}", value, cluster=f"{task}{i}")
        for i, pair in enumerate(values)
        for form, value in zip("ab", pair, strict=True)
    ]


def test_a_headline_over_a_batch_is_compared_on_what_both_scored(tmp_path: Path) -> None:
    ones: list[tuple[float | None, float | None]] = [(1.0, 1.0)] * 6
    a = run(tmp_path / "a", *forms([*ones, (0.0, 0.0), (None, 0.0)]))
    b = run(tmp_path / "b", *forms([*ones, (1.0, 0.0), (1.0, 1.0)]))
    (task,) = compare_runs(a, b).tasks
    assert task.metric == "row_accuracy"
    # The last row is whole in B only: it counts in neither, not even with the form both scored.
    assert task.paired.mean_a == pytest.approx(6 / 7)
    assert task.paired.mean_b == pytest.approx(6.5 / 7)
    assert (task.paired.n_shared, task.paired.n_only_b) == (15, 1)
    assert task.paired.n_clusters == 7
    (value,) = compare_runs(a, b, "value").tasks
    assert value.metric == "accuracy" and value.paired.mean_a == pytest.approx(12 / 15)


def test_the_jackknife_of_a_mean_is_the_interval_of_a_mean(tmp_path: Path) -> None:
    """Rows of one form each: the number over the batch is a plain mean of paired differences."""
    signs = [(1.0, 0.0)] * 3 + [(0.0, 1.0)] * 8 + [(1.0, 1.0)] * 5
    a = run(tmp_path / "a", *forms([(x, x) for x, _ in signs]))
    b = run(tmp_path / "b", *forms([(y, y) for _, y in signs]))
    (over_rows,) = compare_runs(a, b).tasks
    (over_forms,) = compare_runs(a, b, "value").tasks
    assert over_rows.paired.difference == pytest.approx(over_forms.paired.difference)
    assert over_forms.paired.variance is not None and over_forms.paired.unseen > 0
    seen = over_forms.paired.variance - over_forms.paired.unseen
    assert over_rows.paired.variance == pytest.approx(seen)


def test_a_task_whose_code_is_not_at_hand_is_compared_by_its_values(tmp_path: Path) -> None:
    rows = tomi("essay", [0.0, 1.0, 0.0])
    pair = TaskPair(task="essay", a=rows, b=rows)
    assert contrast(pair).metric == "value" and pair.scale("value") is None
    assert metric_names(pair) == ["value", "value/order=1", "value/order=2"]
    live = load_registry().task("alignx_demo")
    known = TaskPair(
        task="alignx_demo", a=forms([(1, 0)]), b=forms([(1, 0)]), live_a=live, live_b=live
    )
    assert "consistency" in metric_names(known) and known.headline == "row_accuracy"


# -- suites ----------------------------------------------------------------------------------------

SUITE = """
suites:
  mine:
    members: [tomi, hitom, alignx]
    groups: {alignx: [alignx_demo, alignx_pair]}
    axes: {COG: [tomi, hitom], EVAL: [alignx]}
    average: macro
"""


def suite_runs(tmp_path: Path, *tasks: str) -> tuple[Path, Path, Path]:
    file = tmp_path / "tasks.yaml"
    file.write_text(SUITE)
    values = {"tomi": (0.0, 1.0), "hitom": (1.0, 0.5), "alignx_demo": (0.5, 0.5),
              "alignx_pair": (0.0, 1.0)}  # fmt: skip
    for side in (0, 1):
        for task in tasks:
            level = values[task][side]
            cases = [level, level, max(0.0, level - 0.25), level] * 3
            rows = forms([(v, v) for v in cases], task) if "align" in task else tomi(task, [*cases])
            run(tmp_path / "ab"[side], *rows)
    return tmp_path / "a", tmp_path / "b", file


def test_a_suite_is_the_mean_of_its_members_with_signs_counted(tmp_path: Path, capfd: Any) -> None:
    a, b, file = suite_runs(tmp_path, "tomi", "hitom", "alignx_demo", "alignx_pair")
    assert soul("compare", a, b, "--suite", "mine", "--tasks", file, "--json") == 0
    comparison = json.loads(capfd.readouterr().out)
    means = {mean["name"]: mean for mean in comparison["means"]}
    tasks = {task["task"]: task["difference"] for task in comparison["tasks"]}
    assert list(tasks) == ["tomi", "hitom", "alignx_demo", "alignx_pair"]
    group = (tasks["alignx_demo"] + tasks["alignx_pair"]) / 2
    assert means["alignx"]["difference"] == pytest.approx(group)
    assert means["COG"]["difference"] == pytest.approx((tasks["tomi"] + tasks["hitom"]) / 2)
    whole = (tasks["tomi"] + tasks["hitom"] + group) / 3
    assert means["all"]["difference"] == pytest.approx(whole)
    assert (means["all"]["better"], means["all"]["worse"], means["all"]["members"]) == (2, 1, 3)
    assert soul("compare", a, b, "--suite", "mine", "--tasks", file) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "all: 2 of 3 members better, 1 worse" in shown and "alignx (group)" in shown


def test_a_suite_without_a_member_has_no_mean_but_bounds(tmp_path: Path, capfd: Any) -> None:
    a, b, file = suite_runs(tmp_path, "tomi", "alignx_demo", "alignx_pair")
    registry = load_registry(file)
    comparison = compare_runs(a, b, suite="mine", registry=registry)
    (*_, whole) = comparison.means
    assert whole.missing == ("hitom",) and whole.paired.difference is None
    parts = [mean.paired.difference or 0.0 for mean in comparison.means if mean.name == "alignx"]
    total = parts[0] + (comparison.tasks[0].paired.difference or 0.0)
    assert whole.worst == pytest.approx((total - 1) / 3)
    assert whole.best == pytest.approx((total + 1) / 3)
    assert soul("compare", a, b, "--suite", "mine", "--tasks", file) == 0
    assert "no mean without hitom, between" in " ".join(capfd.readouterr().out.split())


# -- gates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("sotopia/secret>=-0.2",
         ComparisonGate("sotopia/secret>=-0.2", "sotopia", "secret", ">=", -0.2)),
        (" tomi > 0 ", ComparisonGate("tomi > 0", "tomi", "", ">", 0.0)),
        ("tomi/value/order=2<=.1", None),
        ("sotopia/judge/quoted<=0.05",
         ComparisonGate("sotopia/judge/quoted<=0.05", "sotopia", "judge/quoted", "<=", 0.05)),
        ("tomi", None), ("tomi>=", None), (">=1", None), ("tomi>=x", None), ("tomi/>=1", None),
        ("tomi==1", None), ("tomi>=1e999", None),
    ],
)  # fmt: skip
def test_reading_a_gate(text: str, gate: ComparisonGate | None) -> None:
    if text == "tomi/value/order=2<=.1":
        assert parse_gate(text).metric == "value/order=2"
    elif gate is not None:
        assert parse_gate(text) == gate
    else:
        with pytest.raises(ConfigError, match="is no gate"):
            parse_gate(text)


@pytest.mark.parametrize(
    ("sign", "low", "high", "outcome"),
    [
        (">=", -0.2, 0.3, "pass"), (">", -0.2, 0.3, "undecided"), (">=", -0.21, 0.3, "undecided"),
        (">=", -0.9, -0.21, "fail"), (">=", None, None, "undecided"),
        ("<=", -0.9, -0.2, "pass"), ("<", -0.9, -0.2, "undecided"), ("<=", -0.1, 0.1, "fail"),
        ("<=", -0.3, -0.1, "undecided"),
    ],
)  # fmt: skip
def test_a_gate_asks_the_whole_interval(
    sign: str, low: float | None, high: float | None, outcome: str
) -> None:
    gate = ComparisonGate("g", "tomi", "", sign, -0.2)
    assert gate_result(gate, 0.0, low, high).outcome == outcome


def test_equal_differences_everywhere_still_leave_the_unseen() -> None:
    low, high = unseen_interval(0.0, 40, 1.0)
    assert low == -high == pytest.approx(-(1 - 0.025 ** (1 / 40)))
    assert unseen_interval(0.25, 40, 1.0)[0] < 0.25 < unseen_interval(0.25, 4000, 1.0)[1] + 0.01


def test_gates_set_the_exit_code(tmp_path: Path, capfd: Any) -> None:
    noise = [0.0, 0.1, 0.0, -0.1] * 10
    a = run(tmp_path / "a", *tomi("tomi", [0.5] * 40, metrics={"hacked": 0.0}))
    b = run(tmp_path / "b", *tomi("tomi", [0.5 + n for n in noise], metrics={"hacked": 0.0}))
    assert soul("compare", a, b, "--gate", "tomi>=-0.1", "--gate", "tomi<0.1") == 0
    assert "gate tomi>=-0.1: pass" in " ".join(capfd.readouterr().out.split())
    assert soul("compare", a, b, "--gate", "tomi>=-0.1", "--gate", "tomi>=0.01", "--json") == 1
    comparison = json.loads(capfd.readouterr().out)
    assert [g["outcome"] for g in comparison["gates"]] == ["pass", "undecided"]
    assert comparison["passed"] is False
    assert soul("compare", a, b, "--gate", "tomi>=0.2") == 1
    assert "gate tomi>=0.2: fail" in " ".join(capfd.readouterr().out.split())
    for wrong, word in (("tomy>=0", "tomy"), ("tomi/hackd>=0", "hackd"), ("tomi", "no gate")):
        capfd.readouterr()
        assert soul("compare", a, b, "--gate", wrong) == 2
        assert word in three_lines(capfd.readouterr().err)[0]


def test_a_gate_on_a_suite(tmp_path: Path, capfd: Any) -> None:
    a, b, file = suite_runs(tmp_path, "tomi", "hitom", "alignx_demo", "alignx_pair")
    words = ("compare", a, b, "--tasks", file)
    assert soul(*words, "--gate", "mine>=0.1") == 0
    assert soul(*words, "--gate", "mine>=0.9") == 1
    fewer = run(tmp_path / "fewer", *(r for r in load_records(b / "episodes.jsonl")
                                      if r.task != "hitom"))  # fmt: skip
    capfd.readouterr()
    assert soul("compare", a, fewer, "--tasks", file, "--gate", "mine>=-1") == 1
    assert "undecided, no interval (hitom missing)" in " ".join(capfd.readouterr().out.split())


def test_values_that_are_compared_are_those_that_the_summary_counts(tmp_path: Path) -> None:
    rows = tomi("tomi", [0.0, None, 1.0, 1.0])
    pair = TaskPair(task="tomi", a=rows, b=rows)
    assert contrast(pair, "value").n_a == len(metric_values(rows, "value")) == 4
    assert contrast(pair, "value").paired.n_shared == 3


def test_a_gate_on_another_suite_than_the_compared_one_is_refused(
    tmp_path: Path, capfd: Any
) -> None:
    a, b, file = suite_runs(tmp_path, "tomi", "hitom", "alignx_demo", "alignx_pair")
    gate = ("--suite", "mine", "--tasks", file, "--gate", "soul-10>=-1")
    assert soul("compare", a, b, *gate) == 2
    lines = capfd.readouterr().err.splitlines()
    assert "'soul-10', and only 'mine' is compared" in lines[0] and "leave --suite out" in lines[2]
