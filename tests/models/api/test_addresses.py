"""How servers are reached: headers by names of variables, Azure, the account at OpenAI.

A second kind of API server is one object: body, parse and error; everything else stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from soulkit.api_keys import masked
from soulkit.errors import ConfigError, ModelLoadError, ProviderError
from soulkit.models.api import protocol
from soulkit.models.api.addresses import (
    OPENAI_URL,
    Access,
    account_headers,
    open_access,
    split_version,
    wants_key,
)
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.probing import EndpointRefused, Preflight
from soulkit.models.api.protocol import ApiError, ApiProtocol, Unreadable, WireReply, parse_reply
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.players.settings import RoleSettings, parse_spec
from soulkit.runs.folder import refuse_secrets
from soulkit.trust import acting_settings, reach_of
from soulkit.types import Completion, Sampling, Segment
from tests.models import asking
from tests.support.reporting import Heard
from tests.support.servers.loopback import Asked, JsonServer, Reply
from tests.support.servers.providers import AZURE_VERSION, ProviderServer

KEY = "ak0123456789abcdef0123"
ELSEWHERE = "https://gateway.example.org/v1"
DEPLOYMENT = "https://x.openai.azure.com/openai/deployments/d"


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "OPENAI_API_KEY": KEY, "TEAM": "team 7", "OTHER": "zz9876543210fedcba98",
        "OPENAI_ORG_ID": "org-1", "OPENAI_PROJECT_ID": "proj-1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ABSENT", raising=False)


def headers(base_url: str | None, *arguments: Any, **options: Any) -> dict[str, str]:
    return dict(open_access(base_url, "OPENAI_API_KEY", *arguments, **options).headers)


def test_the_account_goes_where_players_are_asked_that_name_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account = {"OpenAI-Organization": "org-1", "OpenAI-Project": "proj-1"}
    assert headers(None) == headers(OPENAI_URL) == {"Authorization": f"Bearer {KEY}", **account}
    assert headers(ELSEWHERE) == {"Authorization": f"Bearer {KEY}"}
    monkeypatch.setenv("OPENAI_BASE_URL", ELSEWHERE)
    assert headers(ELSEWHERE).keys() > account.keys(), "the user's own default"
    assert headers(OPENAI_URL) == {"Authorization": f"Bearer {KEY}"}
    monkeypatch.setenv("OPENAI_BASE_URL", "nonsense")
    assert account_headers(ELSEWHERE) == {}
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.delenv("OPENAI_ORG_ID")
    named = {"openai-project": "TEAM"}
    assert headers(None, named) == {"Authorization": f"Bearer {KEY}", "openai-project": "team 7"}


def test_headers_have_their_values_from_variables_and_some_stand_in_for_the_key() -> None:
    assert headers(ELSEWHERE, {"X-Team": "TEAM"})["X-Team"] == "team 7"
    assert headers(ELSEWHERE, {"api-key": "OTHER"}) == {"api-key": "zz9876543210fedcba98"}
    assert headers(ELSEWHERE, {"AUTHORIZATION": "TEAM"}) == {"AUTHORIZATION": "team 7"}
    assert not wants_key(ELSEWHERE, {"Api-Key": "OTHER"}) and wants_key(ELSEWHERE, {"X": "TEAM"})
    assert masked("you sent zz9876543210fedcba98") == "you sent [key]"
    shown = repr(open_access(ELSEWHERE, "OPENAI_API_KEY", {"api-key": "OTHER"}))
    assert "zz98" not in shown and "gateway" in shown
    with pytest.raises(ModelLoadError, match="'ABSENT' is not set"):
        headers(ELSEWHERE, {"X-Team": "ABSENT"})
    assert headers(ELSEWHERE, {"X-Team": "ABSENT"}, keyless=True)["X-Team"] == ""


@pytest.mark.parametrize(
    "wrong",
    [{"X Team": "TEAM"}, {"X:": "TEAM"}, {"": "TEAM"}, {"Host": "TEAM"}, {"content-length": "TEAM"},
     {"X-Key": "sk-0123456789abcdef0123"}, {"X-Key": "a value"}, {"X-Key": ""},
     {"X-Key": "TEAM", "x-key": "TEAM"}],
)  # fmt: skip
def test_what_can_be_no_header_is_refused_and_no_value_repeated(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError) as caught:
        RoleSettings(model="m", headers=wrong)
    message = caught.value.errors(include_input=False)[0]["msg"]
    assert not any(value and value in message for value in wrong.values() if value != "TEAM")


def test_a_run_folder_holds_names_of_variables_only() -> None:
    refuse_secrets({"headers": {"X-Api-Key": "MY_KEY", "api-key": "AZURE_KEY"}})
    for value in ("gsk_4f09aB17cD22eF93", "not a name"):
        with pytest.raises(ConfigError, match="seems to contain a secret"):
            refuse_secrets({"judge": [{"headers": {"X-Api-Key": value}}]})


def test_azure_wants_its_key_under_another_name_and_a_version() -> None:
    access = open_access(DEPLOYMENT, "OPENAI_API_KEY", api_version="2024-10-21")
    assert dict(access.headers) == {"api-key": KEY}
    assert access.url("/models") == f"{DEPLOYMENT}/models?api-version=2024-10-21"
    newer = open_access("https://x.openai.azure.com/openai/v1/", "OPENAI_API_KEY")
    assert (
        newer.url("/x") == "https://x.openai.azure.com/openai/v1/x" and "api-key" in newer.headers
    )
    with pytest.raises(ModelLoadError, match="no api-version"):
        open_access(DEPLOYMENT, "OPENAI_API_KEY")
    assert isinstance(newer, Access) and "Bearer" in headers("https://openai.azure.com.evil.org")[
        "Authorization"]  # fmt: skip


def test_an_address_as_azure_shows_it_is_taken_apart() -> None:
    whole = f"{DEPLOYMENT}/chat/completions?api-version=2024-10-21"
    assert split_version(whole) == (DEPLOYMENT, "2024-10-21")
    assert split_version(f"{DEPLOYMENT}?key=k") == (f"{DEPLOYMENT}?key=k", None)
    player = RoleSettings.model_validate(f"endpoint:m@{whole}#OTHER,X-Team=TEAM")
    assert (player.base_url, player.api_version) == (DEPLOYMENT, "2024-10-21")
    assert (player.api_key_env, player.headers) == ("OTHER", {"X-Team": "TEAM"})
    with pytest.raises(ValidationError, match="the api_version setting differs"):
        RoleSettings(model="m", base_url=whole, api_version="2025-01-01")
    with pytest.raises((ValidationError, ModelLoadError)):
        RoleSettings(model="m", base_url=f"{DEPLOYMENT}?api-version=1&key=k")


def test_players_are_written_with_headers_behind_their_key() -> None:
    assert parse_spec("endpoint:m#,A=B,C=D") == {
        "kind": "endpoint", "model": "m", "headers": {"A": "B", "C": "D"}
    }  # fmt: skip
    assert parse_spec("endpoint:m@http://h/v1#K")["api_key_env"] == "K"
    assert not {"headers", "api_version"} & RoleSettings(model="m").model_dump().keys()
    dumped = RoleSettings(model="m", headers={"A": "B"}, api_version="1").model_dump(mode="json")
    assert RoleSettings(**dumped).headers == {"A": "B"} and dumped["api_version"] == "1"


def test_whose_values_go_where_is_shown() -> None:
    shown = reach_of(
        {"headers": {"X": "SECRET_ONE"}, "judge": "endpoint:j@http://h.example#K,X=TWO"}
    )
    assert shown.keys == ["SECRET_ONE", "K", "TWO"]
    file = {"base_url": "http://h.example", "headers": {"A": "ONE"}}
    assert acting_settings(file, {"headers": {"B": "TWO"}})["headers"] == {"A": "ONE", "B": "TWO"}


@pytest.mark.parametrize("named", [{"api-key": "OPENAI_API_KEY"}, {"API-Key": "OPENAI_API_KEY"}])
def test_a_deployment_answers(named: dict[str, str]) -> None:
    with ProviderServer("azure", KEY, lambda body: "hello") as server:
        base_url, version = split_version(server.base_url)
        model = Endpoint(model="m", base_url=base_url, headers=named, api_version=version)
        assert asking.ask(model).text == "hello" and version == AZURE_VERSION
        assert not any("authorization" in sent for sent in server.headers)


CONTEXT = (Segment("system", "Be short."), Segment("user", "hello"))


class Messages(ApiProtocol):
    """An interface of another form: the system text apart, typed parts, its own counts."""

    path = "/messages"

    def body(
        self, model: str, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        system = " ".join(m["content"] for m in messages if m["role"] == "system")
        talk = [dict(m) for m in messages if m["role"] != "system"]
        return {"model": model, "system": system, "messages": talk, **parameters}

    def parse(self, raw: str) -> WireReply:
        body = protocol.json_or_none(raw)
        if not isinstance(body, dict) or body.get("type") != "message":
            raise Unreadable("no message")
        text = "".join(part["text"] for part in body["content"])
        usage = body["usage"]
        return WireReply(text, "", "stop", usage["input_tokens"], usage["output_tokens"])

    def with_words(self, raw: str, text: str, reasoning: str) -> str:
        return json.dumps({**json.loads(raw), "content": [{"type": "text", "text": text}]})

    def error(self, body: object) -> ApiError:
        error = body.get("problem", {}) if isinstance(body, dict) else {}
        return ApiError(str(error.get("words") or body), kind=str(error.get("kind") or ""))


MESSAGES = Messages()


class MessagesServer(JsonServer):
    """Answers with these statuses in turn, then with 200; keeps what it was sent."""

    def __init__(self, *statuses: int) -> None:
        super().__init__()
        self.left, self.got = list(statuses), list[tuple[str, Any]]()

    def answer(self, asked: Asked) -> Reply:
        if asked.method == "GET":
            return Reply(404)
        self.got.append((asked.target, asked.body))
        status = self.left.pop(0) if self.left else 200
        if status != 200:
            return Reply(status, {"problem": {"kind": "odd", "words": f"it is {status}"}})
        parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
        usage = {"input_tokens": 7, "output_tokens": 2}
        return Reply(200, {"type": "message", "content": parts, "usage": usage})


def ask(server: MessagesServer, **settings: Any) -> Completion:
    usual: dict[str, Any] = {"model": "m", "base_url": f"{server.url}/v1", "backoff_s": 0.0}
    model = Endpoint(**usual, protocol=MESSAGES, **settings)
    return asking.ask(model, Sampling(max_tokens=9), context=CONTEXT)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PROTOCOLS", (*protocol.PROTOCOLS, MESSAGES))


def test_a_call_goes_there_and_its_reply_is_read_paid_and_kept(tmp_path: Path) -> None:
    with MessagesServer(500) as server, Ledger(tmp_path / "l.sqlite") as ledger:
        reply = ask(server, ledger=ledger, price_in=1.0, price_out=1.0)
        assert ask(server, ledger=ledger) == reply
    assert reply.text == "Hi there" and reply.usage.cost == 9e-6
    assert [path for path, _ in server.got] == ["/v1/messages"] * 2, "once again after the fault"
    assert server.got[-1][1]["system"] == "Be short." and server.got[-1][1]["max_tokens"] == 9


def test_a_refusal_is_told_in_the_servers_words() -> None:
    with (
        MessagesServer(400) as server,
        pytest.raises(ProviderError, match="HTTP 400 odd: it is 400"),
    ):
        ask(server)
    with MessagesServer(401) as server, pytest.raises(EndpointRefused, match="rejects the key"):
        ask(server, preflight=Preflight())


def test_the_question_before_a_run_is_of_its_form() -> None:
    lines: list[str] = []
    with MessagesServer() as server:
        ask(server, preflight=Preflight(Heard(lines)))
    assert [path for path, _ in server.got] == ["/v1/messages"] * 2
    assert lines[0].startswith("answered: m at")


def test_a_stored_reply_is_read_by_the_protocol_that_can() -> None:
    chat = '{"choices": [{"message": {"content": "a"}}]}'
    assert parse_reply(chat).text == "a"
    usage = {"input_tokens": 1, "output_tokens": 1}
    other = {"type": "message", "content": [{"type": "text", "text": "b"}], "usage": usage}
    assert parse_reply(json.dumps(other)).text == "b"
    with pytest.raises(Unreadable):
        parse_reply('{"type": "other"}')
