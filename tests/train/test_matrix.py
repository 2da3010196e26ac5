"""`soul train matrix`: every training evaluated like the base model, nothing paid twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.cli.train import settings_of
from soulkit.eval.comparison.compare import TaskDifference
from soulkit.metrics.comparisons import PairedDifference
from soulkit.report.exports.matrix import regressed, transfer_text
from soulkit.train.ablate import FINAL, parse_arm, plan_matrix
from tests.support.training import random_model, soul


def matrix(tmp_path: Path, *more: Any, train: str = "tomi,paratomi", suite: str = "pair") -> int:
    """Trainings on made rows, with rows for each task in a settings file."""
    suites = {"pair": ["tomi", "paratomi"], "trio": ["tomi", "paratomi", "hitom"]}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"suites": suites}))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({
        "data": dict.fromkeys(suites["trio"], "synth:24"), "prompts_per_step": 2, "group_size": 2,
        "max_tokens": 6, "lora": {"r": 2}, "steps": 1, "tasks_file": str(tmp_path / "tasks.yaml"),
    }))  # fmt: skip
    file = tmp_path / "final.yaml"
    if not file.exists():
        file.write_text(yaml.safe_dump({"data": "synth:8", "max_tokens": 6}))
    return soul(
        "train", "matrix", "--train", train, "--eval", suite, "--config", tmp_path / "config.yaml",
        "--model", tmp_path / "tiny", "--final-eval", file, "--out", tmp_path / "out", *more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("train", "suite", "settings", "words"),
    [
        ("tomi,hitom", "pair", {}, "'hitom' in --train is not in the suite"),
        ("tomi,tomy", "pair", {}, "Did you mean 'tomi'?"),
        ("tomi,tomi", "pair", {}, "several different tasks"),
        ("tomi", "pair", {}, "several different tasks"),
        (" , ", "pair", {}, "several different tasks"),
        ("tomi,paratomi", "pare", {}, "no suite named 'pare'"),
        ("tomi,paratomi", "pair", {"task": "tomi"}, "sets 'tasks'"),
        ("tomi,paratomi", "pair", {"max_tokens": 6}, "evaluation has rows of its own"),
    ],
)  # fmt: skip
def test_a_wrong_matrix_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], train: str, suite: str,
    settings: dict[str, Any], words: str,
) -> None:  # fmt: skip
    if settings:
        (tmp_path / "final.yaml").write_text(yaml.safe_dump(settings))
    assert matrix(tmp_path, "--dry-run", train=train, suite=suite) == 2
    lines = capsys.readouterr().err.splitlines()[-3:]
    assert [line.partition(": ")[0] for line in lines] == ["error", "why", "fix"]
    assert words in " ".join(lines) and not (tmp_path / "out").exists()


def test_a_row_for_each_task_and_for_all_but_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each training has only its tasks and their rows; all evaluations are the same."""
    assert matrix(tmp_path, "--dry-run", "--json", train="tomi,paratomi,hitom", suite="trio") == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    ends = [one["episodes"] for one in tasks if "final evaluation" in one["task"]]
    assert ends == [8 * 7] * 3  # six trainings and the base model
    flags = settings_of("grpo", {"config": tmp_path / "config.yaml", "model": str(tmp_path)})
    runs = plan_matrix(
        "tomi,paratomi,hitom", "trio", parse_arm("grpo:kl_coef=0.01"), tmp_path / "out",
        tmp_path / "config.yaml", flags, final_eval=tmp_path / "final.yaml", trust=False,
        force_mixed=False, planned=True,
    )  # fmt: skip
    assert {run.arm.spelling: [*run.config.tasks] for run in runs} == {
        "only:tomi": ["tomi"], "only:paratomi": ["paratomi"], "only:hitom": ["hitom"],
        "all-but:tomi": ["paratomi", "hitom"], "all-but:paratomi": ["tomi", "hitom"],
        "all-but:hitom": ["tomi", "paratomi"],
    }  # fmt: skip
    for run in runs:
        assert run.config.data.keys() == run.config.tasks.keys() and run.config.kl_coef == 0.01
        assert run.final is not None and run.final.suite == "trio"
    finals = [run.final.identity() | {"adapter": ""} for run in runs if run.final]
    assert finals == [finals[0]] * 6


@pytest.mark.parametrize(
    ("low", "high", "less", "worse"),
    [(-0.3, -0.1, False, True), (-0.3, 0.1, False, False), (0.1, 0.3, False, False),
     (0.1, 0.3, True, True), (-0.3, -0.1, True, False), (None, None, False, False)],
)  # fmt: skip
def test_a_regression_is_a_whole_interval_on_the_worse_side(
    low: float | None, high: float | None, less: bool, worse: bool
) -> None:
    paired = PairedDifference(
        mean_a=0.5, mean_b=0.4, difference=-0.1, ci_low=low, ci_high=high, p=0.5, n_shared=7,
        n_only_a=0, n_only_b=1, n_clusters=4,
    )  # fmt: skip
    cell = TaskDifference(
        task="t", metric="m", paired=paired, p_holm=0.5, n_a=8, n_b=8, less_is_better=less
    )
    assert regressed(cell) == worse
    assert "(7/8)" in transfer_text(cell) and ("regression" in transfer_text(cell)) == worse


@pytest.mark.slow
def test_a_matrix_resumes_and_shows_every_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model(tmp_path / "tiny", max_context=2048)
    assert matrix(tmp_path) == 0
    text = " ".join(capsys.readouterr().out.split())
    out = tmp_path / "out"
    content = json.loads((out / "report" / "matrix.json").read_text())
    assert list(content["rows"]) == ["only:tomi", "only:paratomi"]
    for row in content["rows"].values():
        assert [(one["task"], one["n_shared"]) for one in row["tasks"]] == [
            ("paratomi", 8), ("tomi", 8)
        ]  # fmt: skip
    assert "base model (scores)" in text and "only:tomi" in text
    assert "Paired differences" in (out / "report" / "index.html").read_text()
    kept = (out / "only-tomi" / "seed_0" / "model", out / "base" / FINAL / "episodes.jsonl")
    lost = out / "only-paratomi" / "seed_0" / FINAL
    before = [path.stat().st_mtime_ns for path in kept]
    lines = (lost / "episodes.jsonl").read_text().splitlines(keepends=True)
    (lost / "episodes.jsonl").write_text("".join(lines[:5]))
    (lost / "summary.json").unlink()
    assert matrix(tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"].keys() == content["rows"].keys()
    assert [path.stat().st_mtime_ns for path in kept] == before
    assert len((lost / "episodes.jsonl").read_text().splitlines()) == 16
