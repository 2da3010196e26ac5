"""Players by task, the auditor, the cost of a run before and after it: through the commands.

Every way to fill a role, through the commands: checkpoints, scripts, the actor itself, names.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.runs.records import load_records
from soulkit.tasks.secret_keeper.task import visitor_line
from soulkit.text import dollars
from tests.support.evaluation import api, keeper, oracle, soul, summary, three_lines, visitor
from tests.support.servers.answers import answer
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import random_model


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer=answer) as running:
        yield running


def judged(server: ScriptedServer, out: Path, *options: object) -> int:
    """Two judged tasks, everybody on one server and told apart by name."""
    return api(server.base_url, out, "--partner", f"endpoint:p@{server.base_url}",
               "--max-tokens", 60, *options, task="sotopia,userllm", n=6)  # fmt: skip


def calls(out: Path) -> Counter[tuple[str, str]]:
    """(role, model) → calls in the ledger."""
    db = sqlite3.connect(out / "ledger.sqlite")
    return Counter((str(role), str(model)) for role, model in db.execute(
        "SELECT role, model FROM calls"))  # fmt: skip


# --- by task --------------------------------------------------------------------------------------


def test_players_by_task_on_the_command_line(server: ScriptedServer, tmp_path: Path) -> None:
    out, at = tmp_path / "run", f"@{server.base_url}"
    everybody = ("--judge", f"endpoint:j{at}", "--judge", f"userllm=endpoint:u{at}",
                 "--auditor", f"sotopia=endpoint:w{at}")  # fmt: skip
    assert judged(server, out, *everybody) == 0
    asked = calls(out)
    assert {key for key in asked if key[0] not in ("actor", "partner")} == {
        ("judge", "j"), ("judge", "u"), ("auditor", "w")
    }  # fmt: skip
    settings = yaml.safe_load((out / "config.yaml").read_text())
    assert settings["task_players"]["userllm"]["judge"][0]["model"] == "u"
    assert [judge["model"] for judge in settings["judge"]] == ["j"]
    tasks = json.loads((out / "conditions.json").read_text())["tasks"]
    assert [p["model"] for p in tasks["userllm"]["players"]["judge"]] == ["u"]
    assert [p["model"] for p in tasks["sotopia"]["players"]["auditor"]] == ["w"]
    assert tasks["sotopia"]["samples"] == {"score": 1, "audit": 1}
    before = len(server.requests)
    assert judged(server, out, *everybody) == 0  # the same command, the same run
    assert len(server.requests) == before


def test_a_run_with_other_players_is_refused_in_a_few_words(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A player more is a dozen settings: the refusal names who it is."""
    out, at = tmp_path / "run", f"@{server.base_url}"
    assert judged(server, out, "--judge", f"endpoint:j{at}") == 0
    capsys.readouterr()
    more = ("--judge", f"sotopia=endpoint:k{at}", "--auditor", f"sotopia=endpoint:w{at}")
    assert judged(server, out, "--judge", f"endpoint:j{at}", *more) == 2
    what = three_lines(capsys.readouterr().err)[0]
    assert '.model: (unset) -> "k"' in what and '.model: (unset) -> "w"' in what
    assert what.count("->") == 8 and "more" in what


def test_an_endpoints_file_names_players_of_tasks(server: ScriptedServer, tmp_path: Path) -> None:
    book = tmp_path / "endpoints.yaml"
    entry = {"model": "j", "base_url": server.base_url}
    book.write_text(json.dumps({
        "endpoints": {"one": entry, "two": {**entry, "model": "k"}},
        "roles": {"judge": "one"}, "tasks": {"userllm": {"judge": "two"}},
    }))  # fmt: skip
    assert judged(server, tmp_path / "run", "--endpoints", book) == 0
    asked = calls(tmp_path / "run")
    assert asked["judge", "j"] and asked["judge", "k"]
    assert ("auditor", "j") not in asked  # a judge that stands in asks as the judge that it is


def test_a_check_takes_no_judge_of_one_task(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    who = f"endpoint:j@{server.base_url}"
    assert judged(server, tmp_path / "run", "--judge", who) == 0
    capsys.readouterr()
    assert soul("judge", "check", tmp_path / "run", "--judge", f"userllm={who}") == 2
    assert "for a single task" in three_lines(capsys.readouterr().err)[0]


# --- what it came to ------------------------------------------------------------------------------


def test_costs_are_recorded_by_task_and_role(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, book = tmp_path / "run", tmp_path / "endpoints.yaml"
    entry = {"model": "j", "base_url": server.base_url, "price_in": 100.0, "price_out": 200.0}
    book.write_text(json.dumps({"endpoints": {"dear": entry}}))
    prices = ("--price-in", 1000, "--price-out", 1000)
    assert judged(server, out, "--endpoints", book, "--judge", "dear", *prices) == 0
    line = summary(out)
    costs: dict[str, dict[str, dict[str, Any]]] = line["costs"]
    assert set(costs) == {"sotopia", "userllm"}
    assert set(costs["sotopia"]) == {"actor", "judge", "partner"}
    assert costs["sotopia"]["partner"]["cost"] is None  # no price is known of it
    by_role = Counter(role for role, _ in calls(out).elements())
    for role in ("actor", "judge"):
        assert sum(one[role]["calls"] for one in costs.values()) == by_role[role]
    paid = sum(one["cost"] or 0.0 for roles in costs.values() for one in roles.values())
    assert paid == pytest.approx(line["cost"]) and line["cost"] > 0
    capsys.readouterr()
    assert soul("report", out) == 0
    shown = capsys.readouterr().out
    assert "actor $" in shown and "judge $" in shown and "cost by task" not in shown
    assert soul("report", out, "--details") == 0
    assert "cost by task and role" in capsys.readouterr().out


# --- what it will cost ----------------------------------------------------------------------------


@pytest.fixture
def paid(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ScriptedServer, str]]:
    """A server and an address of it that does not look like this machine's own."""
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    with ScriptedServer(answer=oracle("tomi", 6)) as running:
        yield running, running.base_url.replace("127.0.0.1", "0.0.0.0")


def test_nothing_is_paid_for_that_nobody_agreed_to(
    paid: tuple[ScriptedServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = paid
    out, price = tmp_path / "run", ("--price-in", 1, "--price-out", 2)
    assert api(url, out, *price) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("cost of this run: about $0.") and " if replies are " in shown[0]
    assert (
        "the cost is not confirmed" in shown[1] and "--yes" in shown[3] and "--max-cost" in shown[3]
    )
    assert api(url, out) == 2  # a price that nobody knows counts as one
    assert "no price for m" in capsys.readouterr().err
    assert not server.requests and not out.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--price-in", 1, "--price-out", 2, "--yes"),
        ("--price-in", 1, "--price-out", 2, "--max-cost", 5),
        ("--price-in", 0, "--price-out", 0),
    ],
)
def test_a_cost_is_confirmed_bounded_or_nothing(
    paid: tuple[ScriptedServer, str], tmp_path: Path, words: tuple[object, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    server, url = paid
    assert api(url, tmp_path / "run", *words) == 0
    assert ("cost of this run" in capsys.readouterr().err) == (words[1] != 0)
    played = len(server.requests)
    assert played == 6
    # What is done is not to be paid for again: nobody has to agree to it.
    assert api(url, tmp_path / "run", *words[:4]) == 0 and len(server.requests) == played
    assert "cost of this run" not in capsys.readouterr().err


def test_training_asks_before_anything_is_loaded(
    paid: tuple[ScriptedServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = paid
    (tmp_path / "no-model").mkdir()  # whoever loaded it would say that it is empty
    command = ("--model", tmp_path / "no-model", "--task", "sotopia", "--data", "sotopia=synth:8",
               "--steps", 2, "--prompts", 2, "--partner", f"endpoint:p@{url}",
               "--judge", f"endpoint:j@{url}", "--out", tmp_path / "run")  # fmt: skip
    assert soul("train", "grpo", *command) == 2
    assert "the cost is not confirmed" in capsys.readouterr().err
    ablate = ("train", "ablate", *command, "--methods", "grpo", "--seeds", 2)
    assert soul(*ablate) == 2
    assert "the cost is not confirmed" in capsys.readouterr().err
    assert soul("train", "grpo", *command, "--dry-run") == 0
    assert "\ncost unknown\n" in capsys.readouterr().out
    assert not server.requests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny", max_context=2048)


def play(model: Path, out: Path, partner: str, *more: object) -> int:
    return soul("eval", "local", "--model", model, "--task", "secret_keeper", "--data", "synth:2",
                "--max-tokens", 8, "--max-unscored", 1, "--out", out, "--partner", partner,
                *more)  # fmt: skip


def script(folder: Path) -> Path:
    file = folder / "visitor.yaml"
    file.write_text(json.dumps({"name": "visitor", "replies": ["Hello.", "What is your job?"]}))
    return file


def test_a_scripted_partner(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "run"
    assert play(model, out, f"scripted:{script(tmp_path)}") == 0
    for record in load_records(out / "episodes.jsonl"):
        questions = [line.text for line in record.episode.transcript if line.seat == "visitor"]
        assert questions == ["Hello."] + ["What is your job?"] * (len(questions) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["actor", "local"])
def test_the_actor_and_another_checkpoint_as_partners(
    tmp_path: Path, model: Path, who: str
) -> None:
    out = tmp_path / "run"
    partner = "actor" if who == "actor" else f"local:{model}"
    config = tmp_path / "config.yaml"
    config.write_text(f"partner: {{kind: {who}, model: '{model}', max_tokens: 6}}\n")
    code = soul(
        "eval",
        "local",
        "--model",
        model,
        "--task",
        "secret_keeper",
        "--data",
        "synth:2",
        "--max-tokens",
        8,
        "--config",
        config,
        "--max-unscored",
        1,
        "--out",
        out,
    )
    assert code == 0
    lines = [line for r in load_records(out / "episodes.jsonl") for line in r.episode.transcript]
    assert {line.seat for line in lines} <= {"visitor", "keeper"} and lines
    again = tmp_path / "again"  # a greedy-free pair of samplers is drawn by seed all the same
    assert play(model, again, partner, "--config", config) == 0


def test_a_limit_on_the_cost_stops_the_run_and_a_larger_one_finishes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    prices = ("--price-in", 1000, "--price-out", 1000)
    with visitor() as url, ScriptedServer(answer=keeper) as server:
        book = tmp_path / "endpoints.yaml"
        entry = {"model": "p", "base_url": url, "price_in": 0.0, "price_out": 0.0}
        book.write_text(json.dumps({"endpoints": {"asker": entry}}))
        options = ("--endpoints", book, "--partner", "asker", *prices, "--concurrency", 1)
        small = api(server.base_url, out, *options, "--max-cost", 0.5, task="secret_keeper", n=4)
        message = capsys.readouterr().err
        assert small == 2 and "--max-cost" in message and "0.5" in message
        before = len(server.requests)
        assert 0 < before < 16
        assert (
            api(server.base_url, out, *options, "--max-cost", 500, task="secret_keeper", n=4) == 0
        )
        # The call that met the limit was never made, so nothing is asked twice.
        assert len(server.requests) == 16
    assert len(load_records(out / "episodes.jsonl")) == 4


def test_a_cost_that_leaves_calls_out_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with visitor() as url, ScriptedServer(answer=keeper) as server:
        options = ("--partner", f"endpoint:p@{url}", "--price-in", 1, "--price-out", 1)
        assert api(server.base_url, out, *options, task="secret_keeper", n=1) == 0
        calls = len(server.requests)
    numbers = json.loads((out / "summary.json").read_text())
    assert numbers["cost"] > 0 and 0 < numbers["unpriced_calls"] <= calls
    assert (
        f"at least {dollars(numbers['cost'])}, {numbers['unpriced_calls']} calls"
        in capsys.readouterr().out
    )


# --- replies of no use ----------------------------------------------------------------------------


def test_a_reply_of_no_use_is_asked_for_again_and_stays_for_a_replay(tmp_path: Path) -> None:
    out, well = tmp_path / "run", False

    def partner(body: dict[str, Any]) -> str:
        return visitor_line(body["messages"]) if well or len(body["messages"]) < 4 else "  "

    with ScriptedServer(answer=partner) as other, ScriptedServer(answer=keeper) as server:

        def played(folder: Path, *more: object) -> int:
            options = ("--partner", f"endpoint:p@{other.base_url}", *more)
            return api(server.base_url, folder, *options, task="secret_keeper", n=2)

        assert played(out) == 1
        lost = load_records(out / "episodes.jsonl")
        assert {r.score.reason for r in lost} == {"partner_error"}
        before = len(other.requests), len(server.requests)
        again = ("--ledger", "replay", "--ledger-file", out / "ledger.sqlite")
        assert played(tmp_path / "copy", *again) == 1
        assert (len(other.requests), len(server.requests)) == before
        well = True
        assert played(out) == 0
        # What was said before the empty line is paid for once.
        assert (len(other.requests), len(server.requests)) == (2 * (4 + 1), 2 * 4)
        assert soul("ledger", "verify", out) == 0
        assert played(tmp_path / "whole", *again) == 0
        assert len(server.requests) == 2 * 4


def test_an_unreadable_verdict_is_asked_for_again(tmp_path: Path) -> None:
    out, well = tmp_path / "run", False

    def played(body: dict[str, Any]) -> str:
        if body["model"] == "m":
            return "hm, that is not what i meant"
        return answer(body) if well else "hard to say"

    with ScriptedServer(answer=played) as server:
        judge = ("--judge", f"endpoint:j@{server.base_url}")
        assert api(server.base_url, out, *judge, task="userllm") == 1
        lost = [r for r in load_records(out / "episodes.jsonl") if not r.score.scored]
        assert lost and {r.score.reason for r in lost} == {"judge_error"}
        well = True
        assert api(server.base_url, out, *judge, task="userllm") == 0
        assert soul("ledger", "verify", out) == 0
