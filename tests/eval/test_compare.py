"""Paired comparisons of two run folders.

What is compared: headlines, break-downs, numbers over a batch, suites, and gates on them.

The difference of two runs over a suite stays where differences can be.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from soulkit.cli import report as cli
from soulkit.errors import ConfigError, DataError, RunError
from soulkit.eval.comparison.compare import compare_runs
from soulkit.eval.comparison.contrasts import TaskPair, contrast, metric_names, suite_differences
from soulkit.eval.gates import Gate, gate_result, parse_gate, unseen_interval
from soulkit.eval.results.batch_statistics import summary_terms
from soulkit.eval.results.summary import metric_values, summarise
from soulkit.metrics.comparisons import PairedDifference, paired_difference
from soulkit.report.findings import comparison_blocks
from soulkit.report.grid import parts_text
from soulkit.report.tables import report_parts
from soulkit.runs.records import load_records
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.spec import Suite
from soulkit.types import Episode, Record, Score, Verdict, record_key
from tests.support.evaluation import soul, three_lines, write_records


def run(path: Path, values: dict[str, float | None], task: str = "tomi", **score: object) -> Path:
    rows = []
    for example, value in values.items():
        made = Score(value=value, reward=value, reason="" if value is not None else "judge_error")
        rows.append(
            Record(
                key=record_key(0, example, 0, "draft"),
                task=task,
                example_id=example,
                rollout=0,
                kind="draft",
                episode=Episode(example_id=example, task=task),
                score=replace(made, **score),  # type: ignore[arg-type]
            )
        )
    return write_records(path, rows)


def test_only_episodes_that_both_scored_count(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {"1": 0.0, "2": 0.0, "3": None, "4": 1.0})
    b = run(tmp_path / "b", {"1": 1.0, "2": 0.0, "3": 1.0, "5": 0.0})
    (task,) = compare_runs(a, b).tasks
    assert task.paired.difference == 0.5
    assert (task.paired.n_shared, task.paired.n_only_a, task.paired.n_only_b) == (2, 1, 2)
    assert (task.n_a, task.n_b) == (4, 4)


def test_p_values_are_adjusted_over_tasks(tmp_path: Path) -> None:
    for task, gain in (("tomi", 0.5), ("hitom", 0.0), ("coser", 0.5)):
        rows = {f"{task}{i}": 0.0 for i in range(10)}
        run(tmp_path / "a", rows, task)
        run(tmp_path / "b", dict.fromkeys(rows, gain), task)
    by_task = {t.task: t for t in compare_runs(tmp_path / "a", tmp_path / "b").tasks}
    raw = 2 / 2**10
    assert by_task["tomi"].paired.p == raw
    assert by_task["tomi"].p_holm == pytest.approx(3 * raw)
    assert by_task["hitom"].p_holm == 1.0


def test_other_prompts_are_refused_and_named(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {"1": 0.0, "2": 1.0}, prompts={"tomi/actor": "aa"})
    b = run(tmp_path / "b", {"1": 1.0, "2": 1.0}, prompts={"tomi/actor": "bb"})
    with pytest.raises(RunError, match="prompt 'tomi/actor' differs"):
        compare_runs(a, b)
    assert compare_runs(a, b, allow_mixed=True).mixed == ("tomi: prompt 'tomi/actor' differs",)


def test_a_template_of_a_rare_branch_is_no_difference(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {"1": 0.0, "2": 1.0}, prompts={"judge": "x"})
    b = run(tmp_path / "b", {"1": 1.0, "2": 1.0}, prompts={"judge": "x", "judge_again": "y"})
    assert compare_runs(a, b).mixed == ()


def test_whoever_answered_a_question_is_named_by_the_episodes(tmp_path: Path) -> None:
    services = [Verdict(judge=f"detector http://{host}", purpose="detector") for host in "xy"]
    runs = [
        run(tmp_path / v.judge[-1], {"1": 0.0, "2": 1.0}, "userllm", verdicts=(v,))
        for v in services
    ]
    for path in runs:
        (path / "config.yaml").write_text("{judge: ['endpoint:j@http://h/v1'], protocol: paper}")
    line = "judge of 'detector' detector http://x vs detector http://y"
    with pytest.raises(RunError, match=line):
        compare_runs(*runs)
    assert compare_runs(*runs, allow_mixed=True).mixed == (f"userllm: {line}",)
    assert compare_runs(runs[0], runs[0]).mixed == ()


def trained(path: Path, values: list[float]) -> Path:
    """A training with one draft a step, of another row each."""
    lines = [
        Record(key=record_key(step, str(step % 3), 0, "draft"), task="tomi", rollout=0, step=step,
               example_id=str(step % 3), kind="draft", score=Score(value=value, reward=value),
               episode=Episode(example_id=str(step % 3), task="tomi"))
        for step, value in enumerate(values)
    ]  # fmt: skip
    write_records(path, lines)
    (path / "config.yaml").write_text("{method: grpo, model: m, data: {tomi: rows.jsonl}}")
    tasks = {"tomi": {"rows": {"0": "a", "1": "b", "2": "c"}}}
    record = {"players": {}, "tasks": tasks, "material": {}}
    (path / "conditions.json").write_text(json.dumps(record))
    (path / "summary.json").write_text(json.dumps({"summary_steps": min(10, len(values))}))
    return path


def test_drafts_are_those_of_the_steps_that_a_report_shows(tmp_path: Path) -> None:
    a = trained(tmp_path / "a", [1.0] * 2 + [0.25, 0.75] * 5)
    b = trained(tmp_path / "b", [0.0] * 2 + [0.5, 1.0] * 5)
    comparison = compare_runs(a, b)
    (task,) = comparison.tasks
    assert (task.paired.mean_a, task.paired.mean_b, task.paired.n_shared) == (0.5, 0.75, 10)
    assert any("over training drafts, last steps: 10" in line for line in comparison.remarks)
    longer = trained(tmp_path / "c", [0.0] * 14)
    comparison = compare_runs(a, longer)
    assert comparison.tasks[0].paired.n_shared == 12
    assert any(
        "over training drafts, all steps that both runs completed" in line
        for line in comparison.remarks
    )


def test_nothing_in_common_is_an_error(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {"1": 0.0})
    with pytest.raises(RunError, match="no task in common"):
        compare_runs(a, run(tmp_path / "b", {"1": 0.0}, "hitom"))
    with pytest.raises(RunError, match="No episode is scored in both"):
        compare_runs(a, run(tmp_path / "c", {"2": 0.0}))
    with pytest.raises(DataError, match="f1"):
        compare_runs(a, a, "f1")


def test_another_metric(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {"1": 0.0, "2": 0.0}, metrics={"f1": 0.2})
    b = run(tmp_path / "b", {"1": 0.0, "2": 0.0}, metrics={"f1": 0.5})
    (task,) = compare_runs(a, b, "f1").tasks
    assert task.paired.difference == pytest.approx(0.3)


def test_the_nearest_metric_is_looked_for_in_every_task(tmp_path: Path) -> None:
    for side in "ab":
        run(tmp_path / side, {"1": 0.5, "2": 1.0})
        run(tmp_path / side, {"3": 0.5, "4": 1.0}, "sotopia", metrics={"secret": -1.0})
    for name in ("secrets", "secret/"):
        with pytest.raises(DataError, match="for any of sotopia, tomi") as error:
            compare_runs(tmp_path / "a", tmp_path / "b", name)
        assert "'secret'" in error.value.way_out


def test_a_damaged_summary_is_no_reason_to_stop(tmp_path: Path) -> None:
    a, b = (run(tmp_path / side, {"1": 0.5, "2": 1.0}) for side in "ab")
    (a / "summary.json").write_text('{"tasks": {')
    assert compare_runs(a, b).tasks[0].paired.difference == 0.0


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {str(i): 0.0 for i in range(8)})
    b = run(tmp_path / "b", {str(i): 1.0 for i in range(8)})
    app = Typer()
    app.command()(cli.compare_command)
    shown = CliRunner().invoke(app, [str(a), str(b)])
    assert shown.exit_code == 0, shown.output
    assert "tomi" in shown.stdout and "+1.000" in shown.stdout
    # Σ d² of the two corners is 2: 1 ± t(7) √2 / 8, cut at 1.
    assert "[+0.582, +1.000]" in shown.stdout and "0.0008" in shown.stdout
    machine = CliRunner().invoke(app, [str(a), str(b), "--json"])
    assert json.loads(machine.stdout)["tasks"][0]["difference"] == 1.0


def test_p_is_of_the_interval_and_holms_stands_apart(tmp_path: Path) -> None:
    for task, gains in (("tomi", (0.4, 0.2, 0.5, 0.3)), ("hitom", (0.1, -0.3, 0.2, 0.1))):
        rows = {f"{task}{i}": 0.0 for i in range(4)}
        run(tmp_path / "a", rows, task)
        run(tmp_path / "b", dict(zip(rows, gains, strict=True)), task)
    hitom, tomi = compare_runs(tmp_path / "a", tmp_path / "b").as_dict()["tasks"]
    assert tomi["ci_low"] > 0 and tomi["p"] < 0.05 and tomi["p_holm"] == 2 * tomi["p"]
    assert hitom["ci_low"] < 0 < hitom["ci_high"] and hitom["p"] >= 0.05
    assert (tomi["n_clusters"], tomi["method"], tomi["df"]) == (4, "cr2-t", pytest.approx(3))


def test_a_tiny_p_value_is_not_printed_as_zero(tmp_path: Path) -> None:
    rows = {f"tomi{i}": 0.0 for i in range(16)}
    gains = {name: 0.5 + 0.01 * i for i, name in enumerate(rows)}
    comparison = compare_runs(run(tmp_path / "a", rows), run(tmp_path / "b", gains))
    assert 0 < comparison.as_dict()["tasks"][0]["p"] < 0.0001
    shown = parts_text(report_parts(comparison_blocks(comparison)))
    assert shown.count("<0.0001") == 2 and "0.0000" not in shown


def named(path: Path, gains: float) -> Path:
    """Episodes of two tasks; ToMi calls its mean score accuracy, Sotopia mean_score."""
    for example in "1234":
        tags = {"order": "2" if example in "34" else "1"}
        run(path, {f"t{example}": float(example in "12") / 2 + gains}, "tomi")
        run(path, {f"s{example}": 0.1 + gains}, "sotopia")
        lines = (path / "episodes.jsonl").read_text().splitlines()
        tagged = [json.dumps(json.loads(line) | {"tags": tags}) for line in lines[-2:]]
        (path / "episodes.jsonl").write_text("\n".join([*lines[:-2], *tagged]) + "\n")
    return path


@pytest.mark.parametrize("summary", [True, False])
@pytest.mark.parametrize(
    ("metric", "tasks"),
    [
        ("headline", {"sotopia": "mean_score", "tomi": "accuracy"}),
        ("value", {"sotopia": "mean_score", "tomi": "accuracy"}),
        ("accuracy", {"tomi": "accuracy"}),
        ("mean_score", {"sotopia": "mean_score"}),
        ("accuracy/order=2", {"tomi": "accuracy/order=2"}),
        ("value/order=2", {"sotopia": "mean_score/order=2", "tomi": "accuracy/order=2"}),
    ],
)
def test_a_metric_has_the_name_that_its_task_declares(
    metric: str, tasks: dict[str, str], summary: bool, tmp_path: Path
) -> None:
    a, b = (named(tmp_path / side, gain) for side, gain in (("a", 0.0), ("b", 0.1)))
    for path in (a, b) if summary else ():
        records = load_records(path / "episodes.jsonl")
        tasks_played = [load_registry().task(name) for name in ("tomi", "sotopia")]
        made = summarise(records, command="eval api", model="m", protocol="paper", seconds=1.0,
                         cost=None, **summary_terms(tasks_played))  # fmt: skip
        (path / "summary.json").write_text(json.dumps(made.to_json()))
    compared = compare_runs(a, b, metric)
    assert {t.task: t.metric for t in compared.tasks} == tasks
    shown = parts_text(report_parts(comparison_blocks(compared)))
    assert f"metric: {', '.join(tasks.values())}" in shown and "headline" not in shown


def test_what_the_only_task_lacks_is_said_of_that_task(tmp_path: Path) -> None:
    for side in "ab":
        path = run(tmp_path / side, {"1": 0.5, "2": 1.0})
        made = summarise(
            load_records(path / "episodes.jsonl"), command="eval api", model="m", protocol="paper",
            seconds=1.0, cost=None, **summary_terms([load_registry().task("tomi")]),
        ).to_json()  # fmt: skip
        made["tasks"]["tomi"]["value"]["not_applicable"] = "no row counts"
        (path / "summary.json").write_text(json.dumps(made))
    with pytest.raises(DataError, match=r"of the task 'tomi' does not apply in .*: no row counts"):
        compare_runs(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("metric", "near"),
    [
        ("acuracy", "accuracy"),
        ("mean_scor", "mean_score"),
        ("accuracy/order=3", "accuracy/order=2"),
    ],
)
def test_a_mistyped_metric_is_answered_with_the_name_that_is_meant(
    metric: str, near: str, tmp_path: Path
) -> None:
    a, b = (named(tmp_path / side, 0.0) for side in "ab")
    with pytest.raises(DataError) as caught:
        compare_runs(a, b, metric)
    fix = caught.value.way_out
    assert f"Did you mean '{near}'?" in fix and "breakdowns: accuracy, mean_score." in fix


def test_a_recorded_metric_keeps_its_name_before_the_declared_one(tmp_path: Path) -> None:
    """A score that records `accuracy` itself: then the mean score has no name but `value`."""
    a, b = (run(tmp_path / side, {str(i): 0.0 for i in range(8)}, metrics={"accuracy": value})
            for side, value in (("a", 0.25), ("b", 0.75)))  # fmt: skip
    (whole,), (own,) = (compare_runs(a, b, name).tasks for name in ("headline", "accuracy"))
    assert (whole.metric, whole.paired.difference) == ("value", 0.0)
    assert (own.metric, own.paired.difference) == ("accuracy", 0.5)


def record(task: str, example: str, value: float | None, **other: Any) -> Record:
    score = Score(value=value, reward=value, reason="" if value is not None else "judge_error")
    kind, rollout = other.pop("kind", "draft"), other.pop("rollout", 0)
    return Record(
        key=record_key(0, example, rollout, kind), task=task, example_id=example, rollout=rollout,
        kind=kind, episode=Episode(example_id=example, task=task),
        score=replace(score, metrics=other.pop("metrics", {})), **other,
    )  # fmt: skip


def recorded_run(path: Path, *rows: Record) -> Path:
    return write_records(path, rows)


def tomi(name: str, values: list[float | None], **other: Any) -> list[Record]:
    """Rows of a task without a headline of its own, half of them of order 1 and half of order 2."""
    return [
        record(name, f"{name}{i}", value, tags={"order": str(1 + i % 2)}, **other)
        for i, value in enumerate(values)
    ]


# -- break-downs ---------------------------------------------------------------------------------


def test_a_break_down_is_the_difference_of_its_own_rows(tmp_path: Path) -> None:
    a = recorded_run(tmp_path / "a", *tomi("tomi", [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]))
    b = recorded_run(tmp_path / "b", *tomi("tomi", [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
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
        sides[side] = recorded_run(tmp_path / side, *drafts, *after)
    (quoted,) = compare_runs(sides["a"], sides["b"], "judge/quoted/order=2").tasks
    assert quoted.paired.difference == 0.5 and quoted.paired.n_shared == 2
    (seen,) = compare_runs(sides["a"], sides["b"], "value/kind=refined").tasks
    assert seen.paired.difference == 1.0 and seen.paired.n_shared == 4
    (drafted,) = compare_runs(sides["a"], sides["b"], "value").tasks
    assert drafted.paired.difference == 0.0


def test_a_metric_of_one_task_leaves_the_others_out_by_name(tmp_path: Path) -> None:
    for side in "ab":
        recorded_run(tmp_path / side, *tomi("tomi", [0.0, 1.0], metrics={"f1": 0.5}))
        recorded_run(tmp_path / side, *tomi("paratomi", [0.0, 1.0]))
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
    a = recorded_run(tmp_path / "a", *forms([*ones, (0.0, 0.0), (None, 0.0)]))
    b = recorded_run(tmp_path / "b", *forms([*ones, (1.0, 0.0), (1.0, 1.0)]))
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
    a = recorded_run(tmp_path / "a", *forms([(x, x) for x, _ in signs]))
    b = recorded_run(tmp_path / "b", *forms([(y, y) for _, y in signs]))
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
            recorded_run(tmp_path / "ab"[side], *rows)
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
    assert "no mean (hitom missing); it would be between" in " ".join(
        capfd.readouterr().out.split()
    )


# -- gates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("sotopia/secret>=-0.2",
         Gate("sotopia/secret>=-0.2", "sotopia", "secret", ">=", -0.2)),
        (" tomi > 0 ", Gate("tomi > 0", "tomi", "", ">", 0.0)),
        ("tomi/value/order=2<=.1", None),
        ("sotopia/judge/quoted<=0.05",
         Gate("sotopia/judge/quoted<=0.05", "sotopia", "judge/quoted", "<=", 0.05)),
        ("tomi", None), ("tomi>=", None), (">=1", None), ("tomi>=x", None), ("tomi/>=1", None),
        ("tomi==1", None), ("tomi>=1e999", None),
    ],
)  # fmt: skip
def test_reading_a_gate(text: str, gate: Gate | None) -> None:
    if text == "tomi/value/order=2<=.1":
        assert parse_gate(text).metric == "value/order=2"
    elif gate is not None:
        assert parse_gate(text) == gate
    else:
        with pytest.raises(ConfigError, match="is not a valid gate"):
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
    gate = Gate("g", "tomi", "", sign, -0.2)
    assert gate_result(gate, 0.0, low, high).outcome == outcome


def test_equal_differences_everywhere_still_leave_the_unseen() -> None:
    low, high = unseen_interval(0.0, 40, 1.0)
    assert low == -high == pytest.approx(-(1 - 0.025 ** (1 / 40)))
    assert unseen_interval(0.25, 40, 1.0)[0] < 0.25 < unseen_interval(0.25, 4000, 1.0)[1] + 0.01


def test_gates_set_the_exit_code(tmp_path: Path, capfd: Any) -> None:
    noise = [0.0, 0.1, 0.0, -0.1] * 10
    a = recorded_run(tmp_path / "a", *tomi("tomi", [0.5] * 40, metrics={"hacked": 0.0}))
    b = recorded_run(
        tmp_path / "b", *tomi("tomi", [0.5 + n for n in noise], metrics={"hacked": 0.0})
    )
    assert soul("compare", a, b, "--gate", "tomi>=-0.1", "--gate", "tomi<0.1") == 0
    assert "gate tomi>=-0.1: pass" in " ".join(capfd.readouterr().out.split())
    assert soul("compare", a, b, "--gate", "tomi>=-0.1", "--gate", "tomi>=0.01", "--json") == 1
    comparison = json.loads(capfd.readouterr().out)
    assert [g["outcome"] for g in comparison["gates"]] == ["pass", "undecided"]
    assert comparison["passed"] is False
    assert soul("compare", a, b, "--gate", "tomi>=0.2") == 1
    assert "gate tomi>=0.2: fail" in " ".join(capfd.readouterr().out.split())
    for wrong, word in (
        ("tomy>=0", "tomy"),
        ("tomi/hackd>=0", "hackd"),
        ("tomi", "not a valid gate"),
    ):
        capfd.readouterr()
        assert soul("compare", a, b, "--gate", wrong) == 2
        assert word in three_lines(capfd.readouterr().err)[0]


def test_a_gate_on_a_suite(tmp_path: Path, capfd: Any) -> None:
    a, b, file = suite_runs(tmp_path, "tomi", "hitom", "alignx_demo", "alignx_pair")
    words = ("compare", a, b, "--tasks", file)
    assert soul(*words, "--gate", "mine>=0.1") == 0
    assert soul(*words, "--gate", "mine>=0.9") == 1
    fewer = recorded_run(tmp_path / "fewer", *(r for r in load_records(b / "episodes.jsonl")
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
    assert "'soul-10', but --suite is 'mine'" in lines[0] and "leave out --suite" in lines[2]


LEVELS_SUITE = Suite(members=("a", "b"), axes={"X": ("a", "b")}, average="macro")


def difference(*values: float) -> PairedDifference:
    """B minus A in as many clusters, of scores from 0 to 1."""
    keys = {i: i for i in range(len(values))}
    return paired_difference(
        dict.fromkeys(keys, 0.0), dict(enumerate(values)), keys, scale=(0.0, 1.0)
    )


def test_no_interval_is_wider_than_the_scale() -> None:
    parts = {"a": difference(0.0, 1.0), "b": difference(1.0, 0.9)}
    for mean in suite_differences(LEVELS_SUITE, parts, lambda task: 1.0):
        assert mean.paired.difference == pytest.approx(0.725)
        assert mean.paired.ci_high == 1.0 and mean.paired.ci_low is not None
        assert -1.0 <= mean.paired.ci_low < 0.725
    (axis, _) = suite_differences(LEVELS_SUITE, parts, lambda task: None)  # nobody knows the scale
    assert axis.paired.ci_high is not None and axis.paired.ci_high > 1.0
    lost = {**parts, "b": replace(parts["b"], difference=None)}
    (axis, _) = suite_differences(LEVELS_SUITE, lost, lambda task: 1.0)
    assert axis.paired.ci_low is axis.paired.difference is None
    assert (axis.worst, axis.best) == pytest.approx((-0.25, 0.75))
