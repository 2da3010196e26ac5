"""A judge that knows no language is read all the same, because vLLM holds it to its schema."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests.support.evaluation import records, soul, value
from tests.support.judged import write_rows

pytestmark = [pytest.mark.vllm, pytest.mark.torch]

TASKS = Path(__file__).parent / "held_task" / "tasks.yaml"
N = 12


def judged(out: Path, model: Path, engine: str, judge: str, *arguments: object) -> int:
    rows = write_rows(out.with_suffix(".jsonl"), N)
    return soul(
        "eval", "local", "--model", model, "--engine", engine, "--out", out, "--tasks", TASKS,
        "--task", "held", "--data", f"held={rows}", "--judge", judge, "--dtype", "float32",
        *arguments,
    )  # fmt: skip


def replies_of_judges(out: Path) -> list[str]:
    with sqlite3.connect(out / "ledger.sqlite") as db:
        rows = db.execute("SELECT response FROM calls WHERE role = 'judge'").fetchall()
    return [json.loads(row[0])["text"] for row in rows]


def test_every_verdict_of_a_random_judge_is_read(
    vllm_python: str, tiny_model: Path, tmp_path: Path
) -> None:
    here = ("--vllm-python", vllm_python)
    assert judged(tmp_path / "run", tiny_model, "vllm", f"vllm:{tiny_model}", *here) == 0
    cell = value(tmp_path / "run", "held")
    assert (cell["n"], cell["n_scored"]) == (N, N)
    assert [r.score.metrics["judge/reasked"] for r in records(tmp_path / "run")] == [0.0] * N
    logs = list((tmp_path / "run" / "vllm").glob("*.log"))
    assert len(logs) == 1, "actor and judge are one model: one server"


def test_without_its_schema_none_is(tiny_model: Path, tmp_path: Path) -> None:
    assert judged(
        tmp_path / "run", tiny_model, "local", f"local:{tiny_model}", "--max-unscored", 1
    ) == 0  # fmt: skip
    assert value(tmp_path / "run", "held")["unscored"] == {"judge_error": N}
