"""Episodes of a training run are scored again: drafts and refined ones, by rows found by id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soulkit.runs.folder import read_environment
from soulkit.runs.records import load_records
from tests.support.evaluation import three_lines
from tests.support.judged import TASKS, judge, write_rows
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import random_model, soul


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    model = random_model(folder / "model")
    done = soul(
        "train", "ditto", "--model", model, "--task", "tomi", "--data", "tomi=synth:40",
        "--prompts", 2, "--group-size", 2, "--max-tokens", 8, "--lora-r", 4, "--steps", 2,
        "--out", folder / "run",
    )  # fmt: skip
    assert done == 0
    return folder / "run"


def test_a_training_run_is_rescored(trained: Path, tmp_path: Path, capfd) -> None:
    old = load_records(trained / "episodes.jsonl")
    assert {r.kind for r in old} == {"draft", "refined"}
    capfd.readouterr()
    assert soul("rescore", trained, "--out", tmp_path / "new", "--json") == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["episodes"], report["changed"], report["misses"]) == (len(old), 0, 0)
    assert load_records(tmp_path / "new" / "episodes.jsonl") == old
    assert read_environment(tmp_path / "new")["command"] == "rescore train ditto"
    assert soul("rescore", tmp_path / "new", "--out", tmp_path / "newer") == 0
    assert soul("report", tmp_path / "new") == 0


def test_settings_of_another_version_are_refused(trained: Path, tmp_path: Path, capfd) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("environment.json", "episodes.jsonl"):
        (copy / name).write_bytes((trained / name).read_bytes())
    (copy / "config.yaml").write_text((trained / "config.yaml").read_text() + "mood: good\n")
    capfd.readouterr()
    assert soul("rescore", copy, "--out", tmp_path / "new") == 2
    assert "cannot be used (mood" in three_lines(capfd.readouterr().err)[0]


def test_a_judged_training_is_rescored_twice(tmp_path: Path, capfd) -> None:
    """The second time the judge's replies are found through the run that was rescored first."""
    rows = write_rows(tmp_path / "rows.jsonl", 6)
    with ScriptedServer(answer=judge()) as server:
        assert soul(
            "train", "grpo", "--model", random_model(tmp_path / "model"), "--tasks", TASKS,
            "--task", "essay", "--data", f"essay={rows}",
            "--judge", f"endpoint:j@{server.base_url}", "--steps", 1,
            "--prompts", 2, "--group-size", 2, "--max-tokens", 8, "--lora-r", 4,
            "--out", tmp_path / "a", "--limit", 4,
        ) == 0  # fmt: skip
    rows.write_text(rows.read_text() + '{"topic": "topic 50"}\n{"topic": "topic 51"}\n')
    for old, new in ("ab", "bc"):
        capfd.readouterr()
        assert soul("rescore", tmp_path / old, "--out", tmp_path / new) == 0
        assert "the score of 0 of 4 episodes changed" in capfd.readouterr().out
    assert soul("ledger", "stats", tmp_path / "c") == 0
    assert "judge" in capfd.readouterr().out
