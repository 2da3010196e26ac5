"""The printed line of every provider, on a stand-in with its path, key and refusals."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.evaluation import last_message, oracle, records, soul, summary, three_lines
from tests.support.judged import TASKS, essay, judge, write_rows
from tests.support.servers.providers import PATHS, ProviderServer

KEY = "pk0123456789abcdef0123"
PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
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


def everybody(body: dict[str, Any]) -> str:
    """Writes essays, and judges them in words that hold the verdict whether asked for it or not."""
    return judge()(body) if "quality" in str(body["messages"]) else essay(body)


def test_every_provider_has_a_line() -> None:
    assert sorted(map(provider, LINES)) == sorted(PATHS)


@pytest.mark.parametrize("line", LINES, ids=provider)
def test_the_printed_line(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)
    model = words[words.index("--model") + 1]
    key_name = words[words.index("--api-key-env") + 1]
    monkeypatch.setenv(key_name, KEY)
    monkeypatch.setenv("MY_TITLE", "human simulators")
    with ProviderServer(provider(line), KEY, oracle("tomi", 50), model) as server:
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
    assert not any(KEY in text or "human simulators" in text for text in texts)


REFUSED = {"anthropic": {"top_p"}, "gemini": {"seed"}, "deepseek": {"form:json_schema"},
           "openrouter": set(), "azure": set()}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_a_judge_there_is_read_whatever_it_refuses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    with ProviderServer(name, KEY, everybody) as server:
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
    monkeypatch.setenv("PROVIDER_KEY", "another-key-0123456789" if wrong == "key" else KEY)
    with ProviderServer(name, KEY, last_message) as server:
        server.credit = wrong != "credit"
        header = ("--headers", "api-key=PROVIDER_KEY") if name == "azure" else ()
        model = "gpt-nine" if wrong == "model" else "m"
        code = soul("eval", "api", "--model", model, "--base-url", server.base_url, *header,
                    "--api-key-env", "PROVIDER_KEY", "--task", "tomi", "--data", "synth:3",
                    "--backoff", 0, "--out", tmp_path / "run")  # fmt: skip
        assert code == 2 and server.requests == [] and len(server.refused) == 1
    told = told_by(capsys)
    words = {"key": "PROVIDER_KEY", "model": "has no model 'gpt-nine'", "credit": "no credit left"}
    assert words[wrong] in " ".join(told) and "another-key" not in " ".join(told)
    episodes = tmp_path / "run" / "episodes.jsonl"
    assert not episodes.exists() or episodes.read_text("utf-8") == ""


@pytest.mark.parametrize("name", ["anthropic", "gemini", "openrouter"])
def test_an_address_that_lacks_its_path_is_completed_in_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    with ProviderServer(name, KEY, last_message) as server:
        code = soul("eval", "api", "--model", "m", "--base-url", server.url, "--api-key-env",
                    "PROVIDER_KEY", "--task", "tomi", "--data", "synth:3", "--backoff", 0,
                    "--out", tmp_path / "run")  # fmt: skip
        assert code == 2
        way_out = f"It answers at {server.url}{PATHS[name]}: give that address."
        assert way_out in " ".join(told_by(capsys))
