"""Players by task, the auditor, the cost of a run before and after it: through the commands."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.evaluation import api, oracle, soul, summary, three_lines
from tests.support.servers.openai_server import ScriptedServer
from tests.support.servers.verdicts import answer


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
    tasks = json.loads((out / "provenance.json").read_text())["tasks"]
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
    assert "for one task" in three_lines(capsys.readouterr().err)[0]


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
    assert shown[0].startswith("cost of this run: about $0.") and ", at most $0." in shown[0]
    assert "nobody has agreed" in shown[1] and "--yes" in shown[3] and "--max-cost" in shown[3]
    assert api(url, out) == 2  # a price that nobody knows counts as one
    assert "no price is known of m" in capsys.readouterr().err
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
    assert "nobody has agreed" in capsys.readouterr().err
    ablate = ("train", "ablate", *command, "--methods", "grpo", "--seeds", 2)
    assert soul(*ablate) == 2
    assert "nobody has agreed" in capsys.readouterr().err
    assert soul("train", "grpo", *command, "--dry-run") == 0
    assert ", cost unknown" in capsys.readouterr().out
    assert not server.requests
