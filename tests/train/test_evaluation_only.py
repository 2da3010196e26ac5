"""What is marked evaluation-only is refused by every way of training, before anything is paid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.tasks.kit.registry import load_registry
from tests.support.evaluation import soul, three_lines
from tests.support.road import synth
from tests.support.servers.openai_server import ScriptedServer

METHODS = (["train", "ditto"], ["train", "grpo"], ["train", "sft"], ["plan", "train", "ditto"])


def refused(capfd: Any, tmp_path: Path, command: list[str], *options: object) -> tuple[str, ...]:
    """The three lines of a training that must not start, with players that nobody asks."""
    with ScriptedServer(answer="hello") as server:
        out = () if command[0] == "plan" else ("--out", tmp_path / "run")
        players = () if "sft" in command else ("--partner", f"endpoint:a@{server.base_url}")
        code = soul(*command, "--model", tmp_path, *players, *options, *out, "--steps", 1)
        assert server.requests == []
    assert code == 2 and not (tmp_path / "run").exists()
    return three_lines(capfd.readouterr().err)


@pytest.mark.parametrize("command", METHODS, ids="-".join)
def test_a_marked_task_is_refused_by_name(tmp_path: Path, capfd: Any, command: list[str]) -> None:
    marked = [name for name, spec in load_registry().specs.items() if spec.evaluation_only]
    assert marked == ["instructions", "tau_usi", "agent_chat"]
    rows = ("--data", "tau_usi=synth:4", "--data", "secret_keeper=synth:4")
    what, why, fix = refused(capfd, tmp_path, command, "--task", "tau_usi", *rows[:2])
    assert "tau_usi" in what and "evaluation-only" in what and "forbid" in why
    assert "soul eval" in fix
    mixture = ("--task", "tau_usi,secret_keeper", *rows)
    what, _, fix = refused(capfd, tmp_path, command, *mixture)
    assert "tau_usi" in what and "--task secret_keeper" in fix


def test_a_comparison_of_methods_is_refused_too(tmp_path: Path, capfd: Any) -> None:
    code = soul(
        "train", "ablate", "--methods", "grpo,ditto", "--model", tmp_path, "--task", "tau_usi",
        "--data", "tau_usi=synth:4", "--steps", 1, "--seeds", 1, "--out", tmp_path / "runs",
    )  # fmt: skip
    assert code == 2 and not (tmp_path / "runs").exists()
    assert "evaluation-only" in three_lines(capfd.readouterr().err)[0]


def write_rows(path: Path, marks: list[Any]) -> Path:
    rows = [{**row, **({} if mark is None else {"evaluation_only": mark})}
            for row, mark in zip(synth("tomi", len(marks), 0), marks, strict=True)]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("mark", [True, "true", 1])
def test_marked_rows_are_refused_by_their_place(tmp_path: Path, capfd: Any, mark: Any) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [None, False, mark, None])
    what, _, _ = refused(
        capfd, tmp_path, ["train", "sft"], "--task", "tomi", "--data", f"tomi={rows}"
    )
    assert "1 of 4 rows of 'tomi'" in what and "rows.jsonl:3" in what


def test_a_comparison_of_methods_refuses_marked_rows_once(tmp_path: Path, capfd: Any) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [None, True, None])
    code = soul(
        "train", "ablate", "--methods", "grpo,ditto", "--model", "tiny", "--task", "tomi",
        "--data", f"tomi={rows}", "--steps", 1, "--seeds", 1, "--out", tmp_path / "runs",
    )  # fmt: skip
    assert code == 2 and not (tmp_path / "runs").exists()
    assert "1 of 3 rows of 'tomi'" in three_lines(capfd.readouterr().err)[0]


def test_rows_without_a_mark_are_the_same_rows(tmp_path: Path) -> None:
    task = load_registry().task("tomi")
    (row,) = synth("tomi", 1, 0)
    plain, marked = task.example(row), task.example({**row, "evaluation_only": True})
    assert plain.id == marked.id and plain.fields["evaluation_only"] is None
    assert marked.visible("reader") == plain.visible("reader")


def test_marked_rows_are_evaluated_like_any_other(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [True, True])
    with ScriptedServer(answer="<answer>A</answer>") as server:
        assert soul(
            "eval", "api", "--model", "m", "--base-url", server.base_url, "--task", "tomi",
            "--data", f"tomi={rows}", "--out", tmp_path / "run",
        ) == 0  # fmt: skip


def test_the_task_says_so(capfd: Any) -> None:
    assert soul("tasks", "show", "tau_usi") == 0
    assert "evaluation only: soul train refuses this task" in capfd.readouterr().out
    assert soul("tasks", "show", "tomi") == 0
    assert "evaluation only" not in capfd.readouterr().out.replace("evaluation_only", "")
