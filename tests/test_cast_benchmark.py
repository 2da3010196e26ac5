"""The benchmark of feedback runs, takes up what was stopped, and reports what is finished."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from soulkit.data.files import read_rows
from soulkit.runs.folder import read_jsonl
from soulkit.train.material.assemble import gather_material

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "cast_of_people.py"
SMALL = ("--seeds", "1", "--hard-seeds", "0", "--warmup", "3", "--steps", "2", "--every", "1")


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
def test_two_arms_run_and_the_second_call_repeats_nothing(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    first = benchmark(*SMALL, *out, "--only", "ditto")
    assert "| Ditto, G = 8, exact reward | 1 | " in first and "SFT" not in first
    world = tmp_path / "values8" / "seed0"
    lines = (world / "ditto" / "metrics.jsonl").read_bytes()
    both = benchmark(*SMALL, *out, "--only", "ditto,sft")
    assert "| SFT on gold (upper line) | 1 | " in both
    assert (world / "ditto" / "metrics.jsonl").read_bytes() == lines
    sampled = [
        line for line in read_jsonl(world / "ditto" / "metrics.jsonl") if "reward/draft" in line
    ]
    assert [n["rollouts/draft"] + n["rollouts/refined"] for n in sampled] == [1024, 1024]
    figure = tmp_path / "curves.svg"
    printed = benchmark("--report", str(tmp_path), "--figure", str(figure))
    assert (
        "8 values a cue (512 combinations)" in printed and figure.read_text().count("</svg>") == 1
    )
    _sides_are_apart(world)


def _sides_are_apart(world: Path) -> None:
    """What is measured: combinations that no arm trains on, and those that all do, other names."""

    def cues(rows: object) -> set[tuple[object, ...]]:
        return {tuple(r.fields[n] for n in ("job", "town", "pet")) for r in rows}  # type: ignore[attr-defined]

    measured, train = (read_rows(world / "rows" / f"{n}.jsonl")[0] for n in ("measured", "train"))
    by_kind = {
        kind: [r for r in measured if r.fields["kind"] == kind] for kind in ("seen", "unseen")
    }
    assert [len(rows) for rows in by_kind.values()] == [256, 256]
    assert cues(by_kind["seen"]) <= cues(train) and not cues(by_kind["unseen"]) & cues(train)
    assert not {r.fields["name"] for r in by_kind["seen"]} & {r.fields["name"] for r in train}
    # The arms of reinforcement hold the same combinations out by themselves.
    from soulkit.train.config import TrainConfig

    config = TrainConfig.load(world / "ditto" / "config.yaml", env={}, trust=True)
    pool = gather_material(config).pool
    assert cues([example for _, example in pool]) == cues(train)
    assert len({example.id for _, example in pool}) == len(train)
