"""A judge that knows no language is read all the same, because vLLM holds it to its schema."""

from __future__ import annotations

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
        "--task", "held", "--data", f"held={rows}", "--judge", judge, "--max-unscored", 1,
        *arguments,
    )  # fmt: skip


def test_every_verdict_of_a_random_judge_is_read(
    vllm_python: str, tiny_model: Path, tmp_path: Path
) -> None:
    here = ("--vllm-python", vllm_python)
    assert judged(tmp_path / "run", tiny_model, "vllm", f"vllm:{tiny_model}", *here) == 0
    assert value(tmp_path / "run", "held")["n_scored"] == N
    verdicts = [verdict for r in records(tmp_path / "run") for verdict in r.score.verdicts]
    assert [verdict.replies for verdict in verdicts] == [1] * N, "read at once, every one"
    assert {tuple(verdict.said) for verdict in verdicts} == {("quality", "style")}
    logs = list((tmp_path / "run" / "vllm").glob("*.log"))
    assert len(logs) == 1, "actor and judge are one model: one server"


def test_without_its_schema_none_is(tiny_model: Path, tmp_path: Path) -> None:
    assert judged(tmp_path / "run", tiny_model, "local", f"local:{tiny_model}") == 0
    assert value(tmp_path / "run", "held")["unscored"] == {"judge_error": N}
