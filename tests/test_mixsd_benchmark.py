"""The benchmark of facts taught without forgetting runs, and takes up what was stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ("--warmup", "1", "--texts", "1", "--most", "30", "--only", "mixsd-0.5")
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "mixsd.py"


def benchmark(*options: str) -> str:
    """What the script prints."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.torch
def test_an_arm_runs_and_the_second_call_repeats_nothing(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path), "--seeds", "0", "--steps", "1", "--every", "1", *SMALL)
    printed = benchmark(*out)
    assert "| MixSD, λ = 0.5 | 1 | " in printed and "plain" not in printed
    world = tmp_path / "seed0"
    texts = (world / "mixsd-0.5" / "written.jsonl").read_bytes()
    assert texts.count(b"\n") == 200
    again = benchmark(*out)
    # The last column but one of a line holds seconds of the arm, read from the run.
    assert again.splitlines()[1:] == printed.splitlines()[1:]
    assert (world / "mixsd-0.5" / "written.jsonl").read_bytes() == texts
    _facts_are_new(world)


def _facts_are_new(world: Path) -> None:
    """Of a taught fact the warm-up's lessons may hold the person, and values by chance alone."""
    rows = [json.loads(line) for line in (world / "rows" / "plain.jsonl").open()]
    lessons = [json.loads(line) for line in (world / "rows" / "lessons.jsonl").open()]
    answers = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in rows}
    guesses = [
        (answers[question], own.rstrip(".").split()[-1])
        for question, own in (
            (m[0]["content"], m[-1]["content"]) for m in (one["messages"] for one in lessons)
        )
        if question in answers
    ]
    right = sum(answer.split()[-1] == value for answer, value in guesses)
    assert len(guesses) > 100 and right / len(guesses) < 0.2  # a twelfth by chance
