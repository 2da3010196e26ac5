"""`--max-cost` for servers on this machine, which may be proxies to models that cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.drafting import built, intent, review
from tests.support.evaluation import api, soul
from tests.support.judged import TASKS, essay, evaluated, judge, write_rows
from tests.support.prism import write_conversations
from tests.support.servers.openai_server import ScriptedServer

CANNOT = "--max-cost cannot hold for "
LITTLE = 1e-4


@pytest.mark.parametrize("limit", [(), ("--max-cost", LITTLE)])
def test_a_limit_that_cannot_hold_is_said_once(
    limit: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer() as server:
        assert api(server.base_url, tmp_path / "run", *limit, n=12) == 0
        where = server.base_url.removeprefix("http://").removesuffix("/v1")
    said = capsys.readouterr().err
    assert said.count(CANNOT) == bool(limit)
    assert bool(limit) == (f"{CANNOT}m at {where}: " in said)


@pytest.mark.parametrize("way", ["options", "prices"])
def test_a_named_price_makes_the_limit_hold(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("prices: [{model: m, host: 127.0.0.1, in: 1, out: 2}]")
    with ScriptedServer() as server:
        named = ("--price-in", 1, "--price-out", 2)
        words = named if way == "options" else ("--prices", prices)
        limited = ("--max-cost", LITTLE, "--concurrency", 1)
        assert api(server.base_url, tmp_path / "run", *words, *limited, n=60) == 2
        assert 0 < len(server.requests) < 60
    said = capsys.readouterr().err
    assert CANNOT not in said and "US dollars of the 0.0001 that it may cost" in said


def test_a_price_in_the_endpoints_file_makes_the_limit_hold_for_a_judge(tmp_path: Path) -> None:
    rows, endpoints = write_rows(tmp_path / "rows.jsonl", 30), tmp_path / "endpoints.yaml"
    with ScriptedServer(answer=judge()) as server:
        named = f"{{model: j, base_url: '{server.base_url}', price_in: 1, price_out: 2}}"
        endpoints.write_text(f"endpoints: {{dear: {named}}}")
        words = ("--tasks", TASKS, "--task", "essay", "--data", f"essay={rows}", "--concurrency", 1,
                 "--endpoints", endpoints, "--judge", "dear", "--max-cost", LITTLE)  # fmt: skip
        with ScriptedServer(answer=essay) as actor:
            where = ("--model", "m", "--base-url", actor.base_url, "--out", tmp_path / "run")
            assert soul("eval", "api", *where, *words) == 2
        assert 0 < len(server.requests) < 30


def test_a_judge_on_this_machine_is_named_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    with ScriptedServer(answer=judge()) as server:
        evaluated(tmp_path / "run", rows, server.base_url, "--max-cost", 5, "--price-in", 0,
                  "--price-out", 0)  # fmt: skip
        said = capsys.readouterr().err
        assert f"{CANNOT}j at " in said and " and m at 127.0.0.1" not in said
        other = ("--judge", f"endpoint:k@{server.base_url}", "--max-cost", 5)
        for command in (("judge", "check"), ("rescore",)):
            ask = ("--ask",) if command == ("rescore",) else ()
            out = ("--out", tmp_path / command[0])
            assert soul(*command, tmp_path / "run", *ask, *other, *out) == 0
            assert capsys.readouterr().err.count(f"{CANNOT}k at ") == 1, command


def test_models_that_draft_rows_on_this_machine_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_conversations(tmp_path / "conversations.jsonl", 4), tmp_path / "rows.jsonl"
    with ScriptedServer(answer=intent) as drafter, ScriptedServer(answer=lambda b: review()) as two:
        assert built("userllm", source, out, drafter, two, "--max-cost", 5) == 0
    said = capsys.readouterr().err
    assert said.count(CANNOT) == 1 and "d at 127.0.0.1" in said and " and f at 127.0.0.1" in said
