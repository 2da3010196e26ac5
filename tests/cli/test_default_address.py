"""OPENAI_BASE_URL says where players are asked that name no address: in every command and role."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.errors import ModelLoadError
from soulkit.eval.config import EvalConfig
from soulkit.eval.rescore import recorded_eval
from soulkit.models.api.address import OPENAI_URL, as_recorded
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.roles.players import Players
from soulkit.models.roles.settings import RoleSettings
from soulkit.runs.folder import read_config
from soulkit.train.config import TrainConfig
from tests.support.evaluation import oracle, paid, soul, three_lines
from tests.support.judged import TASKS, essay, judge, write_rows
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import random_model

KEY = "gw-0123456789abcdef0123"
VARIABLE = "OPENAI_BASE_URL"
TOMI = ("--task", "tomi", "--data", "synth:4", "--backoff", 0)


def everybody(body: dict[str, Any]) -> str:
    """Writes essays and judges them; whoever reads a story is told to look again."""
    if not re.search(r"topic:? (?:topic )?[0-9]", str(body["messages"][0]["content"])):
        return "Look again at who was there."
    return judge()(body) if "response_format" in body else essay(body)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """A server that is named in the environment alone, with its key."""
    with ScriptedServer(answer=everybody, require_key=KEY) as server:
        monkeypatch.setenv(VARIABLE, f"  {server.base_url}/\n")
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield server


def servers(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("server ")]


def essays(folder: Path, *arguments: object) -> int:
    """`soul eval api` on a judged task; nobody has an address."""
    rows = write_rows(folder / "rows.jsonl", 4)
    return soul("eval", "api", "--model", "m", "--tasks", TASKS, "--task", "essay", "--backoff", 0,
                "--data", f"essay={rows}", "--judge", "endpoint:j", *arguments)  # fmt: skip


# -- every command, every player -------------------------------------------------------------------


def test_an_evaluation_asks_there_says_so_and_records_it(
    gateway: ScriptedServer, tmp_path: Path, capfd: Any
) -> None:
    run = tmp_path / "run"
    assert essays(tmp_path, "--out", run) == 0
    assert {body["model"] for body in gateway.requests} == {"m", "j"}
    assert set(gateway.authorizations) == {f"Bearer {KEY}"}
    assert servers(capfd.readouterr().err) == [f"server {gateway.base_url}: actor m, judge j"]
    settings = read_config(run)
    assert settings["base_url"] == settings["judge"][0]["base_url"] == gateway.base_url
    with sqlite3.connect(run / "ledger.sqlite") as db:
        addresses = {
            json.loads(row[0])["base_url"] for row in db.execute("SELECT body FROM settings")
        }
    assert addresses == {gateway.base_url}


def test_a_named_address_is_asked_and_nobody_else(
    gateway: ScriptedServer, tmp_path: Path, capfd: Any
) -> None:
    with ScriptedServer(answer=oracle("tomi", 4)) as named_server:
        out = ("--out", tmp_path / "run")
        address = ("--base-url", named_server.base_url)
        assert soul("eval", "api", "--model", "m", *address, *TOMI, *out) == 0
        assert len(named_server.requests) == 4 and gateway.requests == gateway.listings == []
        assert servers(capfd.readouterr().err) == [f"server {named_server.base_url}: actor m"]
    assert read_config(tmp_path / "run")["base_url"] == named_server.base_url


def test_each_distinct_server_has_one_line(
    gateway: ScriptedServer, tmp_path: Path, capfd: Any
) -> None:
    with ScriptedServer(answer=everybody) as named_server:
        more = ("--judge", f"endpoint:k@{named_server.base_url}", "--judge", "endpoint:j2")
        assert essays(tmp_path, *more, "--out", tmp_path / "run") == 0
    assert servers(capfd.readouterr().err) == [
        f"server {gateway.base_url}: actor m, judge j, judge j2",
        f"server {named_server.base_url}: judge k",
    ]


def test_an_entry_of_the_endpoints_file_without_an_address(
    gateway: ScriptedServer, tmp_path: Path
) -> None:
    book = {"endpoints": {"nano": {"model": "j3"}, "same": {"model": "j4", "base_url": None}},
            "roles": {"judge": [{"use": "nano", "temperature": 0.5}, "same"]}}  # fmt: skip
    file = tmp_path / "endpoints.yaml"
    file.write_text(json.dumps(book))
    rows = write_rows(tmp_path / "rows.jsonl", 2)
    assert soul("eval", "api", "--model", "m", "--tasks", TASKS, "--task", "essay",
                "--data", f"essay={rows}", "--endpoints", file,
                "--out", tmp_path / "run") == 0  # fmt: skip
    assert {body["model"] for body in gateway.requests} == {"m", "j3", "j4"}
    judges = read_config(tmp_path / "run")["judge"]
    assert [one["base_url"] for one in judges] == [gateway.base_url] * 2


def test_training_asks_judge_coach_and_blind_reader_there(
    gateway: ScriptedServer, tmp_path: Path, capfd: Any
) -> None:
    model = random_model(tmp_path / "model")
    small = ("--prompts", 1, "--group-size", 2, "--max-tokens", 8, "--lora-r", 4, "--steps", 1)
    assert soul("train", "ditto", "--model", model, "--task", "tomi", "--data", "tomi=synth:8",
                "--coach", "endpoint:wise", "--blind-reader", "endpoint:reader", *small,
                "--out", tmp_path / "run") == 0  # fmt: skip
    assert {body["model"] for body in gateway.requests} == {"wise", "reader"}
    names = "coach wise, blind_reader reader"
    assert servers(capfd.readouterr().err) == [f"server {gateway.base_url}: {names}"]
    settings = read_config(tmp_path / "run")
    assert settings["coach"]["base_url"] == settings["blind_reader"]["base_url"] == gateway.base_url


@pytest.mark.slow
def test_a_comparison_says_it_once(gateway: ScriptedServer, tmp_path: Path, capfd: Any) -> None:
    model = random_model(tmp_path / "model")
    small = ("--prompts", 1, "--group-size", 2, "--max-tokens", 8, "--lora-r", 4, "--steps", 1)
    assert soul("train", "ablate", "--methods", "ditto,erl", "--seeds", 1, "--model", model,
                "--task", "tomi", "--data", "tomi=synth:8", "--coach", "endpoint:wise", *small,
                "--out", tmp_path / "runs") == 0  # fmt: skip
    assert servers(capfd.readouterr().err) == [f"server {gateway.base_url}: coach wise"]
    assert {body["model"] for body in gateway.requests} == {"wise"}


def test_a_check_of_judges_asks_there(gateway: ScriptedServer, tmp_path: Path, capfd: Any) -> None:
    assert essays(tmp_path, "--out", tmp_path / "run") == 0
    capfd.readouterr()
    before = len(gateway.requests)
    check = ("judge", "check", tmp_path / "run", "--samples", 1, "--no-pairs")
    assert soul(*check, "--judge", "endpoint:k", "--out", tmp_path / "check") == 0
    assert {body["model"] for body in gateway.requests[before:]} == {"k"}
    assert servers(capfd.readouterr().err) == [f"server {gateway.base_url}: judge k"]
    assert read_config(tmp_path / "check")["judge"][0]["base_url"] == gateway.base_url


def test_the_runs_own_judge_is_checked_where_it_was_asked(
    gateway: ScriptedServer, tmp_path: Path, monkeypatch: Any
) -> None:
    assert essays(tmp_path, "--out", tmp_path / "run") == 0
    before = len(gateway.requests)
    with ScriptedServer(answer=everybody) as other:
        monkeypatch.setenv(VARIABLE, other.base_url)
        check = ("judge", "check", tmp_path / "run", "--samples", 1, "--no-pairs")
        assert soul(*check, "--out", tmp_path / "check") == 0
        assert other.requests == [] and len(gateway.requests) == before + 4


def test_a_plan_prices_and_names_the_server(
    gateway: ScriptedServer, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    """What a gateway takes for gpt-4o is not what OpenAI takes."""
    arguments = ("plan", "eval", "api", "--model", "gpt-4o", "--task", "secret_keeper",
             "--data", "synth:4", "--partner", "endpoint:gpt-4o-mini")  # fmt: skip
    assert soul(*arguments) == 0
    printed = capfd.readouterr()
    assert f"endpoint:gpt-4o-mini@{gateway.base_url}" in printed.out.replace("\n", "")
    assert "no price is known of" in printed.out
    assert servers(printed.err) == [f"server {gateway.base_url}: actor gpt-4o, partner gpt-4o-mini"]
    elsewhere = gateway.base_url.replace("127.0.0.1", "0.0.0.0")  # no address of this machine
    monkeypatch.setenv(VARIABLE, elsewhere)
    assert soul("eval", "api", "--model", "gpt-4o", *TOMI, "--max-cost", 1) == 2
    assert elsewhere in three_lines(capfd.readouterr().err)[0]
    monkeypatch.delenv(VARIABLE)
    assert soul(*arguments) == 0
    printed = capfd.readouterr()
    assert "no price" not in printed.out and f"server {OPENAI_URL}: actor" in printed.err


def test_a_replay_names_no_server(gateway: ScriptedServer, tmp_path: Path, capfd: Any) -> None:
    assert essays(tmp_path, "--out", tmp_path / "run") == 0
    before = len(gateway.requests), len(gateway.listings)
    capfd.readouterr()
    ledger = ("--ledger", "replay", "--ledger-file", tmp_path / "run" / "ledger.sqlite")
    assert essays(tmp_path, *ledger, "--out", tmp_path / "again") == 0
    assert servers(capfd.readouterr().err) == []
    assert (len(gateway.requests), len(gateway.listings)) == before


# -- taking up and reading again -------------------------------------------------------------------


def test_a_run_is_not_taken_up_under_another_address(
    gateway: ScriptedServer, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    run = tmp_path / "run"
    assert essays(tmp_path, "--out", run) == 0
    with ScriptedServer(answer=everybody) as other:
        for address in (other.base_url, ""):
            monkeypatch.setenv(VARIABLE, address)
            capfd.readouterr()
            assert essays(tmp_path, "--out", run) == 2
            what = three_lines(capfd.readouterr().err)[0]
            assert f'base_url: "{gateway.base_url}" -> "{address or OPENAI_URL}"' in what
            assert f'judge[0].base_url: "{gateway.base_url}" -> ' in what
        assert other.requests == []
    monkeypatch.setenv(VARIABLE, gateway.base_url)
    assert essays(tmp_path, "--out", run) == 0


def without_addresses(run: Path) -> None:
    """As the version before would have written it."""
    settings = read_config(run)
    settings["base_url"] = settings["judge"][0]["base_url"] = None
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    (run / "provenance.json").unlink()


def test_a_folder_without_addresses_is_openais_own(
    gateway: ScriptedServer, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    run = tmp_path / "run"
    assert essays(tmp_path, "--out", run) == 0
    without_addresses(run)
    capfd.readouterr()
    assert essays(tmp_path, "--out", run) == 2
    what = three_lines(capfd.readouterr().err)[0]
    assert f'base_url: "{OPENAI_URL}" -> "{gateway.base_url}"' in what
    with Ledger(run / "ledger.sqlite", "replay") as ledger:
        recorded = recorded_eval(run, trust=True).cast(ledger)
    models = [player.model for player in recorded.players]
    assert {m.base_url for m in models if isinstance(m, Endpoint)} == {OPENAI_URL}
    monkeypatch.delenv(VARIABLE)
    calls = len(paid(run))
    assert essays(tmp_path, "--out", run) == 0  # all is scored: taken up, and nobody is asked
    assert len(paid(run)) == calls


def test_a_run_is_rescored_under_any_address(
    gateway: ScriptedServer, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    assert essays(tmp_path, "--out", tmp_path / "run") == 0
    before = len(gateway.requests)
    capfd.readouterr()
    for number, address in enumerate(("", "http://127.0.0.1:9/v1", "no address")):
        monkeypatch.setenv(VARIABLE, address)
        out = tmp_path / f"new{number}"
        assert soul("rescore", tmp_path / "run", "--out", out, "--json") == 0
        report = json.loads(capfd.readouterr().out)
        assert (report["changed"], report["misses"]) == (0, 0)
    assert len(gateway.requests) == before


# -- what the variable may hold --------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_variable_is_none(text: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(VARIABLE, text)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert Endpoint(model="m").base_url == OPENAI_URL
    assert RoleSettings(model="m").base_url == OPENAI_URL
    assert RoleSettings(model="m", base_url="").base_url == OPENAI_URL
    assert EvalConfig(kind="api", model="m", tasks=("tomi",)).base_url == OPENAI_URL
    assert EvalConfig(kind="local", model="m", tasks=("tomi",)).base_url is None
    assert RoleSettings(kind="local", model="m").base_url is None


SECRETS = ("hunter2hunter2", "sk-0123456789abcdef0123")


@pytest.mark.parametrize(
    "address",
    [
        "gateway/v1", "localhost:8000", "ftp://gateway/v1", "http://", "http://[x", "http://h:99999",
        "http://two words/v1", f"http://me:{SECRETS[0]}@gateway/v1", f"http://{SECRETS[1]}@gateway/",
        f"https://gateway/v1?api_key={SECRETS[1]}", f"https://gateway/v1#{SECRETS[1]}",
        SECRETS[1], f"me:{SECRETS[0]}@gateway/v1", f"htp://gateway/v1?key={SECRETS[0]}",
    ],
)  # fmt: skip
def test_what_is_no_address_is_told_by_the_variables_name(
    address: str, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv(VARIABLE, address)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    flags = {"model": str(tmp_path), "tasks": {"tomi": 1.0}, "method": "ditto"}
    for command in (
        ("eval", "api", "--model", "m", *TOMI, "--out", tmp_path / "run"),
        ("plan", "eval", "api", "--model", "m", *TOMI),
        ("train", "ditto", "--model", "m", "--task", "tomi", "--coach", "endpoint:c",
         "--out", tmp_path / "run"),
        ("eval", "local", "--model", "m", *TOMI, "--judge", "endpoint:j", "--debug"),
    ):  # fmt: skip
        assert soul(*command) == 2
        err = capfd.readouterr().err
        lines = [line for line in err.splitlines() if line[:6] in ("error:", "why: ", "fix: ")]
        assert VARIABLE in err and not any(secret in err for secret in SECRETS)
        assert "--debug" in command or len(three_lines(err)) == 3 == len(err.splitlines())
        assert lines
    assert not (tmp_path / "run").exists()
    with pytest.raises(ModelLoadError, match=VARIABLE):
        TrainConfig.load(env={}, flags={**flags, "judge": ["endpoint:j"]})
    # Who names an address does not need the variable.
    assert Endpoint(model="m", base_url="http://localhost:1/v1").base_url == "http://localhost:1/v1"
    assert TrainConfig.load(env={}, flags=flags).coach is None


def test_equal_players_share_one_endpoint_however_they_are_written(
    gateway: ScriptedServer,
) -> None:
    plain = RoleSettings(model="m", requests_per_minute=9.0)
    named = RoleSettings(model="m", base_url=f"{gateway.base_url}/", requests_per_minute=7.0)
    players = Players(settings_of_all=[plain, named])
    assert players.model("judge", plain) is players.model("partner", named)
    assert players._terms(plain)["requests_per_minute"] == 7.0


def test_records_are_read_with_the_address_of_their_time(gateway: ScriptedServer) -> None:
    with as_recorded():
        assert RoleSettings(model="m").base_url == OPENAI_URL
        named = RoleSettings(model="m", base_url=gateway.base_url)
    assert named.base_url == RoleSettings(model="m").base_url == gateway.base_url
