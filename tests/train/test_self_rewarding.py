"""Self-rewarding as a command: the actor judges, and the reference is as old as the iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import judged
from tests.support.training import lines_of, random_model, soul

GRADED = Path(judged.__file__).parent / "graded_task" / "tasks.yaml"


@pytest.mark.slow
def test_a_margin_starts_at_zero_in_every_iteration(tmp_path: Path) -> None:
    """One update a step: in the first step of an iteration the weights are the reference."""
    rows = judged.write_rows(tmp_path / "rows.jsonl", 6)
    done = soul(
        "train", "self-rewarding", "--model", random_model(tmp_path / "model"), "--tasks", GRADED,
        "--task", "graded", "--data", f"graded={rows}", "--prompts", 2, "--group-size", 3,
        "--max-tokens", 8, "--lr", 1e-2, "--lora-r", 4, "--steps", 4, "--iteration-steps", 3,
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert done == 0
    margins = [line["preference/margin"] for line in lines_of(tmp_path / "run")]
    assert [abs(margin) > 1e-4 for margin in margins] == [False, True, True, False]
    assert {line["groups/all"] for line in lines_of(tmp_path / "run")} == {2}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ("--judge", "endpoint:j@http://127.0.0.1:9/v1"),
            "cannot train on graded: its judge is endpoint:j@",
        ),
        (("--judge", "graded=endpoint:j@http://127.0.0.1:9/v1"), "its judge is endpoint:j@"),
        (
            ("--task", "tomi", "--data", "synth:4"),
            "cannot train on tomi: it is scored without a judge",
        ),
        (("--set", "teacher=base"), "--set teacher has no effect"),
        (("--group-size", 1), "does not work with --group-size 1"),
        (("--set", "kl_coef=0.1", "--set", "ratio=sequence"), "does not work with kl_coef, ratio"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, more: tuple[Any, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = judged.write_rows(tmp_path / "rows.jsonl", 6)
    start = ("--tasks", GRADED, "--model", "unused")
    task = () if "--task" in more else ("--task", "graded", "--data", f"graded={rows}")
    assert soul("train", "self-rewarding", *start, *task, *more, "--dry-run") == 2
    assert words in capsys.readouterr().err
