"""Rewards within a row and numbers over all rows of a step, in a training run over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.runs.folder import read_jsonl
from soulkit.runs.records import load_records
from soulkit.tasks.userllm.fields import PRISM
from soulkit.train.rollouts.watched import CanaryWatch
from soulkit.train.state.lines import CanaryScores
from soulkit.types import Episode, Line, Record, Score
from tests.support.road import task_of
from tests.support.servers.openai_server import Body, ScriptedServer
from tests.support.training import soul


def first_message(row: int, text: str, rollout: int = 0) -> Record:
    episode = Episode(example_id=str(row), task="userllm", transcript=(Line("user", text),))
    score = Score(value=1.0, reward=1.0, metrics={"ai_detector": 1.0, "intent_decomposition": 0.0})
    return Record(key=f"{row}/{rollout}", task="userllm", example_id=str(row), rollout=rollout,
                  kind="draft", episode=episode, score=score,
                  tags={"source": PRISM, "turn": "first"})  # fmt: skip


def watch(**tasks: Any) -> CanaryWatch:
    return CanaryWatch(tasks or {"userllm": task_of("userllm")}, margin=0.1)


def test_rows_that_become_alike_raise_an_alarm() -> None:
    one = watch()
    lively = [first_message(i, text) for i, text in enumerate(("a b", "c d", "e f"))]
    bland = [first_message(i, "hey there you") for i in range(3)]
    scores = one.look(0, lively, CanaryScores())
    assert scores.means == {"first_turn_diversity": 1.0} and not scores.alarms
    scores = one.look(1, bland, CanaryScores(means={"keywords": 0.2}))
    assert scores.means == {"keywords": 0.2, "first_turn_diversity": 0.0}
    (alarm,) = scores.alarms
    assert (alarm.why, alarm.value, alarm.first, alarm.step) == (("fell",), 0.0, 1.0, 1)


def test_what_is_watched_is_named_by_its_task_and_needs_rows() -> None:
    several = watch(userllm=task_of("userllm"), tomi=task_of("tomi"))
    rows = [first_message(i, text) for i, text in enumerate(("a b", "c d"))]
    means = several.look(0, rows, CanaryScores()).means
    assert means == {"userllm/first_turn_diversity": 1.0}
    assert several.look(1, [], CanaryScores()) == CanaryScores()
    assert watch(tomi=task_of("tomi")).look(0, rows, CanaryScores()) == CanaryScores()


@pytest.mark.slow
def test_a_run_pays_first_messages_for_being_unlike_and_rescoring_knows_it(tmp_path: Path) -> None:
    def judge(body: Body) -> str:
        return "REFUSED" if "REFUSED" in body["messages"][0]["content"] else "HUMAN"

    warm, out = tmp_path / "warm", tmp_path / "run"
    rows = ("--task", "userllm", "--data", "userllm=synth:30")
    assert soul("train", "sft", "--full", "--model", "tiny", *rows, "--steps", 40, "--lr", 3e-3,
                "--out", warm, "--json") == 0  # fmt: skip
    with ScriptedServer(answer=judge) as server:
        code = soul(
            "train", "grpo", "--model", warm / "model", *rows, "--steps", 2,
            "--judge", f"endpoint:j@{server.base_url}",
            "--prompts", 12, "--group-size", 3, "--max-tokens", 64, "--lora-r", 4, "--out", out,
            "--json",
        )  # fmt: skip
    assert code == 0
    lines = [line for line in read_jsonl(out / "metrics.jsonl") if "reward/draft" in line]
    assert all(0 <= line["canary/first_turn_diversity"] <= 1 for line in lines) and len(lines) == 2
    records = load_records(out / "episodes.jsonl")
    paid = [r for r in records if "novelty" in r.score.metrics]
    assert paid and all(r.tags["turn"] == "first" for r in paid)
    again = tmp_path / "again"
    assert soul("rescore", out, "--out", again, "--json") == 0
    rewards = [{r.key: r.score.reward for r in load_records(f / "episodes.jsonl")}
               for f in (out, again)]  # fmt: skip
    assert rewards[0] == rewards[1]
    assert json.loads((again / "rescore.json").read_text())["changed"] == 0
