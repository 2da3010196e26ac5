"""The didactic example runs, is short, and shares its arithmetic with the trainer."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "minimal_ditto.py"


@pytest.mark.slow
@pytest.mark.torch
def test_the_example_runs() -> None:
    options = ["--steps", "2", "--warm-up", "12", "--rows", "240", "--prompts", "4"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options, "--group-size", "4"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
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
        "soulkit.tasks.tom.explain.explain",
        "soulkit.tasks.tom.generate.synth_rows",
        "soulkit.models.local.tiny.build_tiny",
        "soulkit.train.loss.advantage.GroupMember",
        "soulkit.train.loss.advantage.group_advantages",
        "soulkit.train.loss.losses.aggregate",
        "soulkit.train.loss.losses.clipped_loss",
        "soulkit.train.loss.losses.nll_loss",
    }


GUIDE = EXAMPLE.parents[1] / "docs" / "training.md"


def table_of(section: str) -> dict[str, list[str]]:
    """Names in the first column of a section's table → the other cells."""
    text = GUIDE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name: cells for first, *cells in rows for name in re.findall(r"`([^`]+)`", first)}


def test_the_guide_lists_every_setting_with_its_default() -> None:
    from soulkit.train.config import LoraSettings, TrainConfig

    table = table_of("Settings")
    adapter = {f"lora.{name}": field for name, field in LoraSettings.model_fields.items()}
    settings = {**TrainConfig.model_fields, **adapter}
    del settings["lora"]
    assert sorted(table) == sorted(settings)
    for name, field in settings.items():
        default = field.default
        shown = table[name][1].split("; sft: ")[0]  # which has its own
        if isinstance(default, bool):
            assert shown in {True: ("on", "true"), False: ("off", "false")}[default], name
        elif isinstance(default, int | float):
            assert float(shown) == default, name
        elif isinstance(default, str):
            assert shown == default, name


@pytest.mark.torch
def test_the_guide_explains_every_metric() -> None:
    from soulkit.train.state.metrics import StepLine, names_of
    from tests.train.test_train_run import STEP_KEYS

    names, prefixes = names_of(StepLine)
    table = set(table_of("Metrics"))
    open_names = {name for name in table if name.startswith(prefixes)}
    assert table - open_names == names
    assert {prefix for prefix in prefixes for name in table if name.startswith(prefix)} == set(
        prefixes
    )
    assert {name for name in STEP_KEYS if not name.startswith(prefixes)} <= names
