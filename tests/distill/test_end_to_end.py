"""From lessons to one generalist: warm-up, two experts by Ditto, distillation by the command line,
as docs/distillation.md prints it.

The world is that of the benchmark in its small size: keeping secrets in a dialogue with a partner
over HTTP, and what people say by a rule that no prompt holds.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soulkit.runs.folder import read_jsonl
from tests.support.evaluation import ROOT, soul, visitor
from tests.test_printed_commands import blocks_of, lines_of

pytestmark = [pytest.mark.slow, pytest.mark.torch]
TASKS = ("cast_of_people", "secret_keeper")


VISITOR = "http://127.0.0.1:8799/v1"
"""Where the page has it."""


def walk() -> dict[str, str]:
    """How a command of the page's walk begins → its line."""
    starts = (".venv/bin/python", "soul serve", "soul distill")
    page = (ROOT / "docs" / "distillation.md").read_text(encoding="utf-8")
    section = page.split("\n## ")[1]
    lines = [line for block in blocks_of(section) for line in lines_of(block)]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 3
    return dict(zip(starts, lines, strict=True))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after the first command: a warmed-up base and two experts in runs/world."""
    desk = tmp_path_factory.mktemp("desk")
    words = shlex.split(walk()[".venv/bin/python"])
    done = subprocess.run(
        [sys.executable, str(ROOT / words[1]), *words[2:]], text=True, check=False, cwd=desk,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Before: warmup " in done.stdout
    assert all(f"experts/{task} " in done.stdout for task in TASKS)
    assert "Warning" not in done.stderr
    return desk


def test_the_walk_of_the_page_ends_in_a_generalist_that_beats_the_base(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    out, lines = Path("runs/distilled"), walk()
    with visitor() as url:
        command = shlex.split(lines["soul distill"].replace(VISITOR, url))[1:]
        assert f"endpoint:scripted-visitor@{url}" in command
        assert soul("plan", *command) == 0
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
    _no_row_is_measured_and_learned(out)


def results(out: Path) -> dict[str, Any]:
    """Task → what the report says of it."""
    whole = json.loads((out / "summary.json").read_text(encoding="utf-8"))["distillation"]
    return {one["task"]: one for one in whole["tasks"]}


def _no_row_is_measured_and_learned(out: Path) -> None:
    learned = {row["example_id"] for row in read_jsonl(out / "selected.jsonl")}
    measured = {
        record["example_id"]
        for task in TASKS
        for record in read_jsonl(out / "measured" / "generalist" / task / "episodes.jsonl")
    }
    assert learned and measured and not learned & measured
