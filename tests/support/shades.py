"""Helpers for tests of feedback in training: rows of the shade task, scripted coaches, and the
command line with a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from soulkit.runs.jsonl import read_jsonl
from tests.support.evaluation import replaced
from tests.support.training import soul

TASKS = Path(__file__).parent / "shade_task" / "tasks.yaml"
SHADES = ("amber", "cobalt", "olive")
SMALL = ("--prompts", 2, "--group-size", 4, "--max-tokens", 8, "--lora-r", 2, "--steps", 4)


def write_rows(path: Path, count: int) -> Path:
    """Write `count` rows with different speakers, whose shades take turns."""
    rows = [
        {"said": f"Speaker {n} points.", "shades": SHADES, "meant": SHADES[n % 3]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_coach(path: Path, *, leaks: bool) -> Path:
    """Write the script of a coach that gives away every answer, or none."""
    rules = [{"when": f"Speaker {n} ", "say": f"It is {SHADES[n % 3]}."} for n in range(30)]
    script: dict[str, Any] = {"rules": rules} if leaks else {"replies": ["Look at the light."]}
    path.write_text(yaml.safe_dump(script), encoding="utf-8")
    return path


def shade_options(folder: Path, *names: str, rows: int = 12) -> list[Any]:
    """The options to train on tasks of the shade file, with rows from `folder`."""
    data = [x for name in names for x in
            ("--data", f"{name}={write_rows(folder / f'{name}.jsonl', rows)}")]  # fmt: skip
    return ["--tasks", TASKS, "--task", ",".join(names), *data]


def train(method: str, model: Path, out: Path, *options: Any) -> int:
    return soul("train", method, "--model", model, *replaced((*SMALL, "--out", out), options))


def steps_of(out: Path) -> list[dict[str, Any]]:
    """The metrics lines of a run's rollout steps."""
    return [line for line in read_jsonl(out / "metrics.jsonl") if "reward/draft" in line]
