"""`--dev-judge`: dev scores by a judge outside the training, and a stop when both judges part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.report.load import load_runs
from soulkit.report.training import learning_charts
from soulkit.runs.records import DEV_JUDGED, load_records
from soulkit.train.state.metrics import read_step_lines
from soulkit.train.state.stops import dev_score
from tests.support import judged
from tests.support.servers.openai_server import Body, Fault, ScriptedServer
from tests.support.training import CTRL_C, soul

ROWS, DEV = 30, 11


class Apart:
    """Two judges: from one dev evaluation to the next j gives a point more, and k one less."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, body: Body) -> str:
        rounds = self.asked.count("k") // DEV  # j is asked first in every evaluation
        self.asked.append(body["model"])
        return judged.opinion(2 + rounds if body["model"] == "j" else 8 - rounds)


def train(model: Path, folder: Path, url: str, *more: Any) -> int:
    """A training on essays, with the judge j, that writes to `folder`/run."""
    book = {name: {"model": name, "base_url": url} for name in "jk"}
    (folder / "book.yaml").write_text(yaml.safe_dump({"endpoints": book}))
    rows = judged.write_rows(folder / "rows.jsonl", ROWS)
    return soul(
        "train", "grpo", "--model", model, "--tasks", judged.TASKS, "--task", "essay", "--data",
        f"essay={rows}", "--endpoints", folder / "book.yaml", "--judge", "j", "--prompts", 1,
        "--group-size", 2, "--max-tokens", 24, "--lora-r", 2, "--backoff", 0, "--checkpoint-every",
        1, "--set", "dev_share=0.33", "--yes", "--out", folder / "run", *more,
    )  # fmt: skip


APART = ("--dev-judge", "k", "--eval-every", 1, "--steps", 4)
STOPPED = (*APART, "--stop-gap", 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dev-judge", "j", "--eval-every", 1), "is also the judge"),
        (("--dev-judge", "actor", "--eval-every", 1), "is also the trained model"),
        (("--dev-judge", "k"), "--dev-judge needs --eval-every"),
        (("--stop-gap", 2, "--eval-every", 1), "--stop-gap needs both"),
    ],
)
def test_a_judge_that_trains_or_has_nothing_to_judge_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[Any, ...], words: str
) -> None:
    assert train(tmp_path, tmp_path, "http://127.0.0.1:9/v1", "--dry-run", *options) == 2
    lines = capsys.readouterr().err.splitlines()[-3:]
    assert [line.partition(": ")[0] for line in lines] == ["error", "why", "fix"]
    assert words in " ".join(lines)


def test_a_task_without_a_judge_leaves_it_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = ("--dev-judge", "endpoint:k@http://127.0.0.1:9/v1", "--eval-every", 1)
    assert soul("train", "grpo", "--task", "tomi", "--data", "synth:24", "--dry-run", *judge) == 2
    assert "has no task" in capsys.readouterr().err


def test_the_mean_over_tasks_has_the_scores_of_the_dev_judge_where_there_are_some() -> None:
    assert dev_score({"a": 0.5, "b": 0.25}) == 0.375
    assert dev_score({"a": 0.5, "a/dev_judge": 0.0, "b": 0.5}) == 0.25
    assert dev_score({"a": 0.5, "a/dev_judge": None}) is None and dev_score({}) is None


@pytest.mark.slow
def test_a_run_stops_when_its_judge_rises_and_the_other_falls(
    tmp_path: Path, warm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, judges = tmp_path / "run", Apart()
    with ScriptedServer(answer=judges) as server:
        assert train(warm / "model", tmp_path, server.base_url, *STOPPED) == 1
        streams = capsys.readouterr()
        words = " ".join(streams.err.split())
        assert "Since step 0 the dev score has risen by 0.2" in words
        assert "but fallen by 0.2" in words and f"({DEV} rows, p 0.001)" in words
        assert f"dev judge, essay: {DEV} of {DEV} scored" in words
        lines = [line for line in read_step_lines(run / "metrics.jsonl") if line.dev]
        assert [line.step for line in lines] == [0, 1, 2]
        assert [line.dev["essay/dev_judge"] for line in lines] == pytest.approx([0.8, 0.7, 0.6])
        assert [line.dev["essay"] for line in lines] == pytest.approx([0.2, 0.3, 0.4])
        assert judges.asked.count("k") == 3 * DEV
        assert train(warm / "model", tmp_path, server.base_url, *APART) == 0
    assert judges.asked.count("k") == 4 * DEV
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best_step"] == 1 and summary["best_dev"] == pytest.approx(0.8)
    assert (run / "best").is_dir()
    charts = {chart.title: chart for chart in learning_charts(load_runs([run]))}
    labels = [
        c.label for panel in charts["Evaluation during training"].panels for c in panel.curves
    ]
    assert labels == ["essay", "essay/dev_judge"]


@pytest.mark.slow
def test_a_killed_run_stops_at_the_same_step_and_pays_nothing_twice(
    tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from soulkit.train.rollouts.play import DevScores

    judges, kept = Apart(), DevScores._kept
    with ScriptedServer(answer=judges) as server:
        with monkeypatch.context() as patch:

            def die(self: DevScores, task: Any, records: Any, log: Path | None) -> Any:
                if log and log.name == DEV_JUDGED and records[0].step == 1:
                    raise CTRL_C  # all verdicts are there, but not on disk
                return kept(self, task, records, log)

            patch.setattr(DevScores, "_kept", die)
            assert train(warm / "model", tmp_path, server.base_url, *STOPPED) == 130
        assert judges.asked.count("k") == 2 * DEV
        assert train(warm / "model", tmp_path, server.base_url, *STOPPED) == 1
    assert judges.asked.count("k") == 3 * DEV
    lines = [line for line in read_step_lines(tmp_path / "run" / "metrics.jsonl") if line.dev]
    assert [line.dev["essay/dev_judge"] for line in lines] == pytest.approx([0.8, 0.7, 0.6])
    assert len(load_records(tmp_path / "run" / DEV_JUDGED)) == 3 * DEV


@pytest.mark.slow
def test_a_dev_judge_that_fails_is_named_and_stops_nothing(
    tmp_path: Path, warm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(index: int, body: Body) -> Fault | None:
        return Fault.status_error(500) if body["model"] == "k" else None

    with ScriptedServer(answer=Apart(), script=fault) as server:
        assert train(warm / "model", tmp_path, server.base_url, *STOPPED, "--max-attempts", 1) == 0
    assert re.search(rf"dev judge, essay: {DEV} of {DEV} \w+_error", capsys.readouterr().err)
    lines = [line for line in read_step_lines(tmp_path / "run" / "metrics.jsonl") if line.dev]
    assert [line.dev["essay/dev_judge"] for line in lines] == [None] * 4
