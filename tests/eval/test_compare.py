"""Paired comparisons of two run folders."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from soulkit.cli import compare as cli
from soulkit.errors import DataError, RunError
from soulkit.eval.batch import summary_terms
from soulkit.eval.compare import compare_runs
from soulkit.eval.summary import summarise
from soulkit.report.differences import comparison_parts
from soulkit.report.table import parts_text
from soulkit.runs.records import load_records
from soulkit.tasks.registry import load_registry
from soulkit.types import Episode, Record, Score, Verdict, record_key


def run(path: Path, values: dict[str, float | None], task: str = "tomi", **score: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
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
    with (path / "episodes.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(r)) + "\n" for r in rows)
    return path


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


def test_other_protocols_are_refused(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {"1": 0.0}, protocol="paper")
    b = run(tmp_path / "b", {"1": 1.0}, protocol="reference")
    with pytest.raises(RunError, match="protocol paper against reference"):
        compare_runs(a, b)


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
    line = "judge of 'detector' detector http://x against detector http://y"
    with pytest.raises(RunError, match=line):
        compare_runs(*runs)
    assert compare_runs(*runs, allow_mixed=True).mixed == (f"userllm: {line}",)
    assert compare_runs(runs[0], runs[0]).mixed == ()


def test_an_unrecorded_judge_of_a_judged_task_is_refused(tmp_path: Path) -> None:
    verdicts = (Verdict(judge="j", purpose="score"),)
    a, b = (run(tmp_path / n, {"1": 0.0, "2": 1.0}, "essay", verdicts=verdicts) for n in "ab")
    with pytest.raises(RunError, match="essay: judge not recorded"):
        compare_runs(a, b)
    (a / "config.yaml").write_text("judge: ['endpoint:j@http://h/v1']")
    with pytest.raises(RunError, match="judge endpoint:j@http://h/v1 against one that is not"):
        compare_runs(a, b)
    (b / "config.yaml").write_text("judge: ['endpoint:j@http://h/v1/']")
    assert compare_runs(a, b).mixed == ()


def test_finished_runs_of_other_rows_are_refused(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {"1": 0.0, "2": 0.0, "3": 1.0})
    b = run(tmp_path / "b", {"2": 1.0, "3": 0.0})
    assert compare_runs(a, b).mixed == ()  # both may have been cut short
    (b / "summary.json").write_text("{}")
    assert compare_runs(b, a, allow_mixed=True).mixed == ()
    (b / "summary.json").write_text('{"n": 2, "n_scored": 2}')
    with pytest.raises(RunError, match="tomi: rows 3 against 2, 2 in both"):
        compare_runs(a, b)
    shorter = run(tmp_path / "c", {"3": 1.0})
    comparison = compare_runs(shorter, b)
    assert "tomi: A is unfinished and does not record its rows" in comparison.remarks


def test_a_training_is_compared_with_no_evaluation(tmp_path: Path) -> None:
    a, b = (run(tmp_path / name, {"1": 0.0, "2": 1.0}) for name in "ab")
    (a / "config.yaml").write_text("{kind: api, model: m}")
    (b / "config.yaml").write_text("{method: grpo, model: m, data: {tomi: rows.jsonl}}")
    with pytest.raises(RunError, match="rows of an evaluation against training rows"):
        compare_runs(a, b)
    (a / "config.yaml").write_text("{method: grpo, model: m, data: {tomi: others.jsonl}}")
    with pytest.raises(RunError, match=r"rows of others\.jsonl against rows\.jsonl"):
        compare_runs(a, b)


def trained(path: Path, values: list[float]) -> Path:
    """A training with one draft a step, of another row each."""
    path.mkdir()
    lines = [
        Record(key=record_key(step, str(step % 3), 0, "draft"), task="tomi", rollout=0, step=step,
               example_id=str(step % 3), kind="draft", score=Score(value=value, reward=value),
               episode=Episode(example_id=str(step % 3), task="tomi"))
        for step, value in enumerate(values)
    ]  # fmt: skip
    (path / "episodes.jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in lines))
    (path / "config.yaml").write_text("{method: grpo, model: m, data: {tomi: rows.jsonl}}")
    (path / "summary.json").write_text(json.dumps({"summary_steps": min(10, len(values))}))
    return path


def test_drafts_are_those_of_the_steps_that_a_report_shows(tmp_path: Path) -> None:
    a = trained(tmp_path / "a", [1.0] * 2 + [0.25, 0.75] * 5)
    b = trained(tmp_path / "b", [0.0] * 2 + [0.5, 1.0] * 5)
    comparison = compare_runs(a, b)
    (task,) = comparison.tasks
    assert (task.paired.mean_a, task.paired.mean_b, task.paired.n_shared) == (0.5, 0.75, 10)
    assert any("while training, last steps: 10" in line for line in comparison.remarks)
    longer = trained(tmp_path / "c", [0.0] * 14)
    comparison = compare_runs(a, longer)
    assert comparison.tasks[0].paired.n_shared == 12
    assert any("while training, all steps that both did" in line for line in comparison.remarks)


def test_nothing_in_common_is_an_error(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {"1": 0.0})
    with pytest.raises(RunError, match="no task in common"):
        compare_runs(a, run(tmp_path / "b", {"1": 0.0}, "hitom"))
    with pytest.raises(RunError, match="No episode"):
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
        with pytest.raises(DataError, match="of any of sotopia, tomi") as error:
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
    app.command()(cli.command)
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
    shown = parts_text(comparison_parts(compared))
    assert f"metric {', '.join(tasks.values())}" in shown and "headline" not in shown


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
    assert f"Did you mean '{near}'?" in fix and "break-downs: accuracy, mean_score." in fix


def test_a_recorded_metric_keeps_its_name_before_the_declared_one(tmp_path: Path) -> None:
    """A score that records `accuracy` itself: then the mean score has no name but `value`."""
    a, b = (run(tmp_path / side, {str(i): 0.0 for i in range(8)}, metrics={"accuracy": value})
            for side, value in (("a", 0.25), ("b", 0.75)))  # fmt: skip
    (whole,), (own,) = (compare_runs(a, b, name).tasks for name in ("headline", "accuracy"))
    assert (whole.metric, whole.paired.difference) == ("value", 0.0)
    assert (own.metric, own.paired.difference) == ("accuracy", 0.5)
