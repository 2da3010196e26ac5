"""`soul eval api --batch`: what it costs, what it refuses, and that it comes to the live road's
table whatever ends the process."""

from __future__ import annotations

import json
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.eval.run.session import check_open_batches
from soulkit.models.api import batches
from tests.support.evaluation import (
    api,
    oracle,
    soul,
    start,
    summary,
    three_lines,
    value,
)
from tests.support.judged import TASKS, essay, judge, write_rows
from tests.support.servers.batch_server import BatchServer

PRICES = ("--price-in", 1, "--price-out", 10)
BATCH = ("--batch", "--batch-poll", 0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "TICK_S", 0.005)


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    command = ("api", "--model", "m", "--base-url", "https://probe.example/v1", "--task", "tomi",
               "--data", "synth:500", *PRICES)  # fmt: skip
    assert soul("plan", "eval", *command, *arguments, "--json") == 0
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def test_the_plan_of_500_rows_is_half_as_dear(capsys: pytest.CaptureFixture[str]) -> None:
    live, batch = plan(capsys), plan(capsys, "--batch")
    assert live["cost"] > 0
    assert batch["cost"] == pytest.approx(live["cost"] / 2)
    assert batch["cost_limit"] == pytest.approx(live["cost_limit"] / 2)
    assert plan(capsys, "--batch-judges")["cost"] == pytest.approx(live["cost"])


def test_the_plan_says_that_a_wave_may_take_a_day(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("plan", "eval", "api", "--model", "m", "--base-url", "https://probe.example/v1",
               "--task", "tomi", "--data", "synth:3", *PRICES)  # fmt: skip
    assert soul(*command, "--batch") == 0
    assert "batch calls at a lower price: endpoint:m@https" in capsys.readouterr().err
    assert soul(*command) == 0
    assert "by batch" not in capsys.readouterr().err


def test_a_price_file_may_say_another_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("prices: [{model: m, in: 1, out: 10, batch: 0.25}]")
    command = ("plan", "eval", "api", "--model", "m", "--base-url", "https://probe.example/v1",
               "--task", "tomi", "--data", "synth:10", "--prices", file, "--json")  # fmt: skip
    costs = []
    for more in ((), ("--batch",)):
        assert soul(*command, *more) == 0
        costs.append(json.loads(capsys.readouterr().out)["cost"])
    assert costs[1] == pytest.approx(costs[0] / 4)


def test_the_cost_is_said_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-nobody-0123456789")
    assert api("https://probe.example/v1", tmp_path / "run", *PRICES, "--batch") == 2
    said_first = capsys.readouterr().err.splitlines()[0]
    assert said_first.startswith("cost of this run: about $")
    assert "batch calls at a lower price: endpoint:m@https://probe.example/v1" in said_first
    assert not (tmp_path / "run").exists()


def test_dialogues_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with BatchServer() as server:
        partner = f"endpoint:p@{server.base_url}"
        assert api(server.base_url, tmp_path / "run", "--batch", "--task", "tomi,secret_keeper",
                   "--partner", partner, task="tomi") == 2  # fmt: skip
        assert not server.requests
    what, _, fix = three_lines(capsys.readouterr().err)
    assert "secret_keeper" in what and "tomi" not in what
    assert "--task tomi" in fix and "--batch-judges" in fix


def test_a_batch_needs_the_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert api("http://127.0.0.1:9/v1", tmp_path / "run", "--batch", "--ledger", "off") == 2
    assert "ledger" in " ".join(three_lines(capsys.readouterr().err))


def judged(body: dict[str, Any]) -> str:
    """The actor's essay, or what a judge says of it."""
    return essay(body) if body["model"] == "m" else judge()(body)


def judge_at(server: BatchServer) -> tuple[str, str]:
    return "--judge", f"endpoint:j@{server.base_url}"


def essays(server: BatchServer, out: Path, rows: Path, *arguments: object) -> int:
    return soul(
        "eval", "api", "--model", "m", "--base-url", server.base_url, "--out", out,
        "--tasks", TASKS, "--task", "essay", "--data", f"essay={rows}", *PRICES, *arguments,
    )  # fmt: skip


def test_actor_and_judges_go_in_two_waves(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 9)
    with BatchServer(answer=judged) as server:
        assert essays(server, tmp_path / "batch", rows, *judge_at(server), *BATCH) == 0
        models = [batch.lines[0]["body"]["model"] for batch in server.batches]
        assert models[0] == "m" and set(models[1:]) == {"j"}
        assert set(server.paid.values()) == {1}
        assert {body["model"] for body in server.live} == {"m", "j"}
        assert essays(server, tmp_path / "live", rows, *judge_at(server)) == 0
    assert summary(tmp_path / "batch")["tasks"] == summary(tmp_path / "live")["tasks"]
    assert soul("compare", tmp_path / "live", tmp_path / "batch") == 0
    noted = summary(tmp_path / "batch")["provenance"]["batches"]
    assert [one["status"] for one in noted] == ["completed"] * len(server.batches)


def test_judges_alone_may_go_by_batch(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 7)
    with BatchServer(answer=judged) as server:
        assert essays(server, tmp_path / "run", rows, *judge_at(server), "--batch-judges",
                      *BATCH[1:]) == 0  # fmt: skip
        live = [body["model"] for body in server.live]
        assert live.count("m") == 7
        assert {line["body"]["model"] for b in server.batches for line in b.lines} == {"j"}


def test_a_player_may_be_kept_out_of_batches(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 5)
    with BatchServer(answer=judged) as server:
        file = tmp_path / "endpoints.yaml"
        player = {"model": "j", "base_url": server.base_url, "by_batch": False}
        file.write_text(json.dumps({"endpoints": {"own": player}}))
        assert essays(server, tmp_path / "run", rows, "--endpoints", file, "--judge", "own",
                      *BATCH) == 0  # fmt: skip
        assert [body["model"] for body in server.live].count("j") == 5
        assert {line["body"]["model"] for b in server.batches for line in b.lines} == {"m"}


def test_a_live_run_may_be_finished_by_batch(tmp_path: Path) -> None:
    with BatchServer(answer=oracle("tomi", 8)) as server:
        whole = 0.5 * 8 * 1e-5  # less than eight rows cost
        assert api(server.base_url, tmp_path / "run", *PRICES, "--max-cost", whole,
                   "--concurrency", 1, n=8) == 2  # fmt: skip
        before = len(server.live)
        assert 0 < before < 8
        assert api(server.base_url, tmp_path / "run", *PRICES, *BATCH, n=8) == 0
        assert len(server.live) + len(server.paid) == 8
    assert value(tmp_path / "run")["mean"] == 1.0


def test_what_a_batch_holds_is_not_paid_for_live_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def service(request: str, index: int) -> str:
        return "unknown" if lost and request == "GET /batches/ID" else ""

    lost = True
    with BatchServer(answer=oracle("tomi", 4), service=service) as server:
        out = tmp_path / "run"
        assert api(server.base_url, out, *PRICES, *BATCH, n=4) == 2
        assert "cannot find the batch batch_0" in capsys.readouterr().err
        assert api(server.base_url, out, *PRICES, n=4) == 2
        what, why, fix = three_lines(capsys.readouterr().err)
        assert "batch_0 (3 requests to m)" in what and "charged again" in why
        assert "--batch" in fix and str(out / "batches.json") in fix
        lost = False
        assert api(server.base_url, out, *PRICES, *BATCH, n=4) == 0
        assert len(server.live) == 1 and set(server.paid.values()) == {1}
        assert api(server.base_url, out, *PRICES, n=4) == 0
        assert len(server.live) == 1


OPEN: dict[str, tuple[dict[str, object], str, str, bool]] = {
    "live, created": ({}, "m", "created", True),
    "live, ended": ({}, "m", "ended", True),
    "live, not sent": ({}, "m", "uploaded", False),
    "live, used": ({}, "m", "used", False),
    "by batch": ({"batch": True}, "m", "created", False),
    "by batch, of another model": ({"batch": True}, "other", "created", True),
    "replayed": ({"ledger": "replay", "ledger_file": "l.sqlite"}, "m", "created", False),
}
"""Settings, model and stage of a batch that was left, and whether it would be paid for twice."""


@pytest.mark.parametrize("case", OPEN)
def test_only_batches_that_nobody_would_fetch_stop_a_run(case: str, tmp_path: Path) -> None:
    settings, model, stage, stops = OPEN[case]
    config = EvalConfig.model_validate({
        "kind": "api", "model": "m", "base_url": "http://127.0.0.1:9/v1", "tasks": ("tomi",),
        **settings,
    })  # fmt: skip
    check_open_batches(config, tmp_path)
    book = batches.BatchBook(tmp_path)
    state = book.add("http://127.0.0.1:9/v1", model, [b"{}"], 0.0)
    book.save(replace(state, stage=stage, batch_id="b"))
    with pytest.raises(ConfigError, match="has open batches") if stops else nullcontext():
        check_open_batches(config, tmp_path)


# -- 500 rows, killed twice ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_its_batch_and_says_so(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    waiting = ("validating", *["in_progress"] * 100_000)
    with BatchServer(answer=oracle("tomi", 12), states=waiting) as server:
        command = ("eval", "api", "--model", "m", "--base-url", server.base_url, "--task", "tomi",
                   "--data", "synth:12", "--out", tmp_path / "run", *BATCH)  # fmt: skip
        process = start(*command)
        server.wait_for(lambda: server.requests["GET /batches/ID"] > 2)
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == code
        assert (
            "batch batch_0 of m (11 requests) continues at" in err
            and f"--out {tmp_path / 'run'}" in err
        )
        server.states = waiting[:1]
        assert soul(*command) == 0
        assert len(server.batches) == 1 and set(server.paid.values()) == {1}
    assert value(tmp_path / "run")["mean"] == 1.0
