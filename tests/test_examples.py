"""The didactic example runs, is short, and shares its arithmetic with the trainer."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "minimal_ditto.py"


def test_the_example_runs() -> None:
    options = ["--steps", "2", "--warm-up", "12", "--rows", "240", "--prompts", "4"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options, "--group-size", "4"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"ditto +(\d+)  draft reward ([\d.]+)  refined reward ([\d.]+)", done.stdout)
    assert [step for step, _, _ in shown] == ["1", "2"]
    assert all(0 <= float(r) <= 1 for _, *rewards in shown for r in rewards)
    assert "loss" in done.stdout


def test_the_example_is_one_short_file_without_the_engine() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300
    assert "simplified" in (ast.get_docstring(ast.parse(source)) or "")
    imported = {
        f"{node.module}.{name.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("soulkit")
        for name in node.names
    }
    assert imported == {
        "soulkit.data.stories.explain.explain",
        "soulkit.data.stories.generate.synth_rows",
        "soulkit.models.tiny.build_tiny",
        "soulkit.train.advantage.Entry",
        "soulkit.train.advantage.group_advantages",
        "soulkit.train.loss.aggregate",
        "soulkit.train.loss.clipped_loss",
        "soulkit.train.loss.nll_loss",
    }
