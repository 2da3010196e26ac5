"""OPENAI_BASE_URL says where players are asked that name no address: in every command and role.

The printed line of every provider, on a stand-in with its path, key and refusals.

`--max-cost` for servers on this machine, which may be proxies to models that cost.
"""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from soulkit.errors import ModelLoadError
from soulkit.eval.config import EvalConfig
from soulkit.models.api.addresses import OPENAI_URL
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.players.players import Players
from soulkit.models.players.settings import RoleSettings
from soulkit.runs.folder import read_config
from soulkit.train.config import TrainConfig
from tests.support.drafting import built, intent, review
from tests.support.evaluation import (
    api,
    last_message,
    oracle,
    records,
    soul,
    summary,
    three_lines,
)
from tests.support.judged import TASKS, essay, evaluated, judge, write_rows
from tests.support.prism import write_conversations
from tests.support.servers.openai_server import ScriptedServer
from tests.support.servers.providers import PATHS, ProviderServer
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
    assert "no known price for" in printed.out
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
    assert players.limits_and_prices(plain)["requests_per_minute"] == 7.0


PROVIDER_KEY = "pk0123456789abcdef0123"
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "evaluate-api-models.md"
HOSTS = {
    "api.anthropic.com": "anthropic", "generativelanguage.googleapis.com": "gemini",
    "api.deepseek.com": "deepseek", "openrouter.ai": "openrouter",
    "NAME.openai.azure.com": "azure",
}  # fmt: skip
LINES = re.findall(r"^soul eval api --base-url .*", PAGE.read_text("utf-8"), re.MULTILINE)


def host(line: str) -> str:
    return urlsplit(shlex.split(line)[4]).hostname or ""


def provider(line: str) -> str:
    by_host: Mapping[str, str] = {name.lower(): one for name, one in HOSTS.items()}
    return by_host[host(line)]


def provider_reply(body: dict[str, Any]) -> str:
    """Writes essays, and judges them in words that hold the verdict whether asked for it or not."""
    return judge()(body) if "quality" in str(body["messages"]) else essay(body)


def test_every_provider_has_a_line() -> None:
    assert sorted(map(provider, LINES)) == sorted(PATHS)


@pytest.mark.parametrize("line", LINES, ids=provider)
def test_the_printed_line(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)
    model = words[words.index("--model") + 1]
    key_name = words[words.index("--api-key-env") + 1]
    monkeypatch.setenv(key_name, PROVIDER_KEY)
    monkeypatch.setenv("MY_TITLE", "human simulators")
    with ProviderServer(provider(line), PROVIDER_KEY, oracle("tomi", 50), model) as server:
        there = urlsplit(words[4])
        words[4] = f"{server.url}{there.path.replace('DEPLOYMENT', 'D')}"
        words[4] += f"?{there.query}" if there.query else ""
        if provider(line) == "azure":  # its key's own header comes with the name of its host
            words += ["--headers", f"api-key={key_name}"]
        more = ("--limit", 3, "--backoff", 0, "--max-unscored", 0, "--out", tmp_path / "run")
        assert soul(*words[1:], *more) == 0
        assert len(server.requests) >= 4, "the question of one token, and the rows"
        if provider(line) == "openrouter":
            assert {one.get("x-title") for one in server.headers} == {"human simulators"}
    assert summary(tmp_path / "run")["tasks"]["tomi"]["value"]["mean"] == 1.0
    texts = [path.read_text("utf-8", "replace") for path in (tmp_path / "run").glob("*.*")]
    assert not any(PROVIDER_KEY in text or "human simulators" in text for text in texts)


REFUSED = {"anthropic": {"top_p"}, "gemini": {"seed"}, "deepseek": {"form:json_schema"},
           "openrouter": set(), "azure": set()}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_a_judge_there_is_read_whatever_it_refuses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", PROVIDER_KEY)
    with ProviderServer(name, PROVIDER_KEY, provider_reply) as server:
        header = ",api-key=PROVIDER_KEY" if name == "azure" else ""
        who = f"endpoint:m@{server.base_url}#PROVIDER_KEY{header}"
        book = tmp_path / "endpoints.yaml"
        book.write_text(json.dumps({"roles": {"judge": who}}))
        code = soul(
            "eval", "api", "--model", "m", "--base-url", server.base_url, "--api-key-env",
            "PROVIDER_KEY", *(("--headers", "api-key=PROVIDER_KEY") if header else ()),
            "--tasks", TASKS, "--task", "essay", "--endpoints", book, "--backoff", 0, "--data",
            f"essay={write_rows(tmp_path / 'rows.jsonl', 3)}", "--out", tmp_path / "run",
        )  # fmt: skip
        assert code == 0
        assert not any(is_list_of_one(text) for text in server.refused) or name == "gemini"
    played = records(tmp_path / "run")
    assert all(record.score.scored for record in played)
    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as db:
        lists = [json.loads(row[0]) for row in db.execute("SELECT dropped FROM calls")]
    assert {one for several in lists for one in several} == REFUSED[name]


def told_by(capsys: Any) -> tuple[str, str, str]:
    """The error that a command ended with."""
    return three_lines("\n".join(capsys.readouterr().err.splitlines()[-3:]))


def is_list_of_one(text: str) -> bool:
    return text.startswith("[")


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("wrong", ["key", "model", "credit"])
def test_what_is_wrong_there_is_told_at_once(
    name: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if (name, wrong) == ("azure", "model"):
        pytest.skip("a deployment is its path: the model's name is not read")
    monkeypatch.setenv("PROVIDER_KEY", "another-key-0123456789" if wrong == "key" else PROVIDER_KEY)
    with ProviderServer(name, PROVIDER_KEY, last_message) as server:
        server.credit = wrong != "credit"
        header = ("--headers", "api-key=PROVIDER_KEY") if name == "azure" else ()
        model = "gpt-nine" if wrong == "model" else "m"
        code = soul("eval", "api", "--model", model, "--base-url", server.base_url, *header,
                    "--api-key-env", "PROVIDER_KEY", "--task", "tomi", "--data", "synth:3",
                    "--backoff", 0, "--out", tmp_path / "run")  # fmt: skip
        assert code == 2 and server.requests == [] and len(server.refused) == 1
    error = told_by(capsys)
    words = {"key": "PROVIDER_KEY", "model": "has no model 'gpt-nine'", "credit": "no credit left"}
    assert words[wrong] in " ".join(error) and "another-key" not in " ".join(error)
    episodes = tmp_path / "run" / "episodes.jsonl"
    assert not episodes.exists() or episodes.read_text("utf-8") == ""


@pytest.mark.parametrize("name", ["anthropic", "gemini", "openrouter"])
def test_an_address_that_lacks_its_path_is_completed_in_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", PROVIDER_KEY)
    with ProviderServer(name, PROVIDER_KEY, last_message) as server:
        code = soul("eval", "api", "--model", "m", "--base-url", server.url, "--api-key-env",
                    "PROVIDER_KEY", "--task", "tomi", "--data", "synth:3", "--backoff", 0,
                    "--out", tmp_path / "run")  # fmt: skip
        assert code == 2
        way_out = f"The server answers at {server.url}{PATHS[name]}: use that address."
        assert way_out in " ".join(told_by(capsys))


CANNOT = "--max-cost does not cover "
LITTLE = 1e-4


@pytest.mark.parametrize("limit", [(), ("--max-cost", LITTLE)])
def test_a_limit_that_cannot_hold_is_said_once(
    limit: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer() as server:
        assert api(server.base_url, tmp_path / "run", *limit, n=12) == 0
        where = server.base_url.removeprefix("http://").removesuffix("/v1")
    printed = capsys.readouterr().err
    assert printed.count(CANNOT) == bool(limit)
    assert bool(limit) == (f"{CANNOT}m at {where}: " in printed)


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
    printed = capsys.readouterr().err
    assert CANNOT not in printed and "of at most 0.0001 US dollars" in printed


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
        printed = capsys.readouterr().err
        assert f"{CANNOT}j at " in printed and " and m at 127.0.0.1" not in printed
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
    printed = capsys.readouterr().err
    assert (
        printed.count(CANNOT) == 1
        and "d at 127.0.0.1" in printed
        and " and f at 127.0.0.1" in printed
    )
