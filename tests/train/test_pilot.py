"""A pilot of a training: drafts of its first step, which the training does not play again."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from soulkit.runs.jsonl import read_jsonl
from soulkit.train.pilot import pilot_jobs
from soulkit.train.rollouts.play import step_jobs
from soulkit.train.setup.data import load_training_data
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import config, random_model, soul

PARTNER = "Hm, tell me a little more about it then, would you?"


def answer(body: dict[str, Any]) -> str:
    """Lines of a partner, and feedback of a varying length."""
    if body["model"] == "p":
        return PARTNER
    return "Say less. " * random.Random(json.dumps(body["messages"])).randrange(1, 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny", max_context=2048)


# Four steps of six rows play each of the 24 rows once, so the tasks have the planned shares.
def command(model: Path, server: ScriptedServer, folder: Path, *more: object) -> tuple[Any, ...]:
    url = server.base_url.replace("127.0.0.1", "0.0.0.0")
    prices = folder / "prices.yaml"
    prices.write_text(json.dumps({"prices": [{"model": m, "in": 2, "out": 8} for m in "pc"]}))
    return ("train", "ditto", "--model", model, "--task", "tomi,secret_keeper", "--data",
            "tomi=synth:12", "--data", "secret_keeper=synth:12",
            "--partner", f"endpoint:p@{url}", "--coach", f"endpoint:c@{url}",
            "--prices", prices, "--steps", 4, "--prompts", 6, "--group-size", 2, "--max-tokens", 6,
            "--set", "mini_batch_prompts=3", "--device", "cpu", "--yes", *more)  # fmt: skip


@pytest.mark.slow
def test_a_pilot_is_the_start_of_its_training(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    out = tmp_path / "run"
    with ScriptedServer(answer=answer) as server:
        started = command(model, server, tmp_path, "--out", out)
        assert soul("plan", *started, "--json") == 0
        assumed = json.loads(capfd.readouterr().out)
        assert not server.requests and not out.exists()
        assert soul("plan", *started, "--pilot", 6, "--json") == 0
        plan = json.loads(capfd.readouterr().out)
        assert soul("plan", *started, "--pilot", 7) == 2
        assert "more than the 6 rows of a step" in capfd.readouterr().err
        pilot, first = plan["pilot"], list(server.requests)
        assert (pilot["rows"], pilot["tasks"], pilot["folder"]) == (6, 2, str(out))
        assert soul(*started) == 0
        assert soul("plan", *started, "--pilot", 2) == 2
        assert "has already taken steps" in capfd.readouterr().err
        summary = json.loads((out / "summary.json").read_text())
        paid = sum(one["calls"] for of in summary["costs"].values() for one in of.values())
        assert len(server.requests) == paid > len(first)  # no reply was asked for twice
    low, high = plan["cost_range"]
    true = summary["cost"]
    assert low <= true <= high and low < plan["cost"] < high
    assert abs(plan["cost"] - true) < abs(assumed["cost"] - true)
    assert [line["step"] for line in read_jsonl(out / "metrics.jsonl")] == [0, 1, 2, 3]


def test_pilot_rows_are_the_first_drafts_of_the_first_step() -> None:
    rows = {"tomi": "synth:12", "secret_keeper": "synth:12"}
    settings = config(
        tasks={"tomi": 1.0, "secret_keeper": 1.0}, data=rows, prompts_per_step=8,
        group_size=3, partner="actor",
    )  # fmt: skip
    pool = load_training_data(settings).pool
    chosen = pilot_jobs(settings, pool, 4)
    assert [job.index for job in chosen] == [0] * 4
    assert {job.task.name for job in chosen} == {"tomi", "secret_keeper"}
    every = {(job.example.id, job.index) for job in step_jobs(settings, pool, 0)}
    assert {(job.example.id, job.index) for job in chosen} <= every
    assert pilot_jobs(settings, pool, 3) == chosen[:3]
