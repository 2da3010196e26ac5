"""From lessons to one generalist: warm-up, two experts by Ditto, distillation by the command line.

The world is that of the benchmark in its small size: keeping secrets in a dialogue with a partner
over HTTP, and what people say by a rule that no prompt holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soulkit.runs.folder import read_jsonl
from tests.support.evaluation import ROOT, soul, visitor

pytestmark = [pytest.mark.slow, pytest.mark.torch]
SCRIPT = ROOT / "benchmarks" / "distill.py"
TASKS = ("cast_of_people", "secret_keeper")


def benchmark(*options: object) -> str:
    """What the script prints."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", *map(str, options)], text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warmed-up base and two experts."""
    out = tmp_path_factory.mktemp("world")
    printed = benchmark("--out", out, "--experts-only")
    assert "Before: warmup " in printed and all(f"experts/{task} " in printed for task in TASKS)
    return out


def test_the_generalist_beats_the_base_on_both_tasks(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "distilled"
    rows = [word for task in TASKS for split, flag in (("train", "--data"), ("test", "--held-out"))
            for word in (flag, f"{task}={world}/rows/{split}/{task}.jsonl")]  # fmt: skip
    with visitor() as url:
        command = (
            "distill", "--experts", world / "experts", *rows, "--limit", 160, "--samples", 2,
            "--epochs", 6,
            "--keep-top", 2, "--max-tokens", 12, "--option", "max_turns=5", "--exclude-overlap",
            "--lr", 1e-3, "--batch", 8,
            "--batch-size", 256, "--out", out,
            "--tasks", world / "tasks" / "tasks.yaml", "--partner", f"endpoint:visitor@{url}",
        )  # fmt: skip
        assert soul(*command) == 0
        selected = (out / "selected.jsonl").read_bytes()
        assert soul(*command) == 0  # finished: nothing is played or trained again
    assert (out / "selected.jsonl").read_bytes() == selected
    result = results(out)
    assert result.keys() == set(TASKS)
    for task, one in result.items():
        gain = one["generalist_gain"]
        assert gain["difference"] > 0.2, task
        assert gain["ci_low"] > 0, task
        assert one["kept"]["ci_low"] > 0, task
        assert 0 < one["selection"]["taken"] <= one["selection"]["sampled"] == 160 * 2
    _no_row_is_measured_and_learned(world, out)


def results(out: Path) -> dict[str, Any]:
    """Task → what the report says of it."""
    whole = json.loads((out / "summary.json").read_text(encoding="utf-8"))["distillation"]
    return {one["task"]: one for one in whole["tasks"]}


def _no_row_is_measured_and_learned(world: Path, out: Path) -> None:
    learned = {row["example_id"] for row in read_jsonl(out / "selected.jsonl")}
    measured = {
        record["example_id"]
        for task in TASKS
        for record in read_jsonl(out / "measured" / "generalist" / task / "episodes.jsonl")
    }
    assert learned and measured and not learned & measured
