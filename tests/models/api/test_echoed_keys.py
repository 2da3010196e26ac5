"""Servers that say keys back: no record, no error and no line on a screen holds them."""

from __future__ import annotations

import asyncio
import base64
import html
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from soulkit.api_keys import holds_key
from soulkit.errors import ModelLoadError, ProviderError, UnreadableVerdict
from soulkit.models.api.detector import Detector
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.transport import make_client
from soulkit.models.ledger.ledger import Ledger
from soulkit.types import Call, Completion, Sampling, Segment
from tests.support.evaluation import api, oracle, records
from tests.support.servers.detector_server import DetectorServer
from tests.support.servers.openai_server import Fault, ScriptedServer

KEY, OTHER = "sk-echo-0123456789abcdef", "gw/other+key/9876543210=="
CALL = Call(role="judge", example_id="e1")


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OTHER_KEY", OTHER)


def ask(model: Endpoint) -> Completion:
    async def once() -> Completion:
        try:
            return await model.complete((Segment("user", "hello"),), Sampling(), CALL)
        finally:
            await model.close()

    return asyncio.run(once())


def in_json(key: str) -> str:
    return "".join(f"\\u{ord(c):04x}" for c in key)


def reply(content: str, **more: str) -> bytes:
    """A completion, its strings as they stand here."""
    fields = "".join(f', "{name}": "{value}"' for name, value in more.items())
    return (
        f'{{"choices": [{{"index": 0, "finish_reason": "stop", "message": '
        f'{{"role": "assistant", "content": {content}{fields}}}}}]}}'
    ).encode()


REPLIES: dict[str, Callable[[str], bytes]] = {
    "escaped": lambda k: reply(f'"it is {in_json(k)}"'),
    "one letter escaped": lambda k: reply(f'"it is {in_json(k[0])}{k[1:]}"'),
    "reasoning": lambda k: reply('"well"', reasoning_content=f"it is {in_json(k)}"),
    "refusal": lambda k: reply("null", refusal=f"not with {in_json(k)}"),
    "parts": lambda k: reply(
        f'[{{"type": "text", "text": "{k[:9]}"}}, {{"type": "text", "text": "{k[9:]}"}}]'
    ),
    "HTML": lambda k: reply(json.dumps("".join(f"&#{ord(c)};" for c in k))),
    "address": lambda k: reply(json.dumps(f"https://x/?k={quote(k, safe='')}")),
    "base64": lambda k: reply(json.dumps(base64.b64encode(f"Bearer {k}".encode()).decode())),
    "lines": lambda k: reply(json.dumps(f"{k[:10]}\n{k[10:]}")),
    "elsewhere": lambda k: reply('"well", "name": "' + in_json(k) + '"'),
    "name of a field": lambda k: reply('"well", "' + in_json(k) + '": 1'),
}


@pytest.mark.parametrize("key", [KEY, OTHER])
@pytest.mark.parametrize("form", REPLIES)
def test_a_reply_is_kept_without_the_key(form: str, key: str, tmp_path: Path) -> None:
    """A server of one key may know the other one: a gateway in front of both, for instance."""
    fault = Fault(raw=REPLIES[form](key))
    with ScriptedServer(script=lambda i, body: fault) as server:
        Endpoint(model="o", base_url=server.base_url, api_key_env="OTHER_KEY")
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            got = ask(Endpoint(model="m", base_url=server.base_url, ledger=ledger))
        with Ledger(tmp_path / "ledger.sqlite", "replay") as ledger:
            again = ask(Endpoint(model="m", base_url=server.base_url, ledger=ledger))
    assert (again.text, again.reasoning) == (got.text, got.reasoning)
    for text in (got.text, got.reasoning):
        assert key not in text and not holds_key(html.unescape(text))
    assert "[key]" in got.text + got.reasoning or "well" in got.text
    for file in tmp_path.iterdir():
        content = file.read_bytes().decode("utf-8", "ignore")
        assert key not in content and in_json(key) not in content
        assert base64.b64encode(key.encode()).decode()[:16] not in content


ERRORS: dict[str, Callable[[str], Fault]] = {
    "escaped": lambda k: Fault(
        status=401, raw=f'{{"error": {{"message": "bad key {in_json(k)}"}}}}'.encode()
    ),
    "HTML page": lambda k: Fault(
        status=403, raw=("<p>" + "".join(f"&#{ord(c)};" for c in k) + "</p>").encode()
    ),
    "in the kind": lambda k: Fault(
        status=400, raw=f'{{"error": {{"message": "no", "type": "{in_json(k)}"}}}}'.encode()
    ),
    "redirect": lambda k: Fault(
        status=307, raw=b"", headers={"Location": f"https://x/?key={quote(k, safe='')}"}
    ),
    "status 200": lambda k: Fault(raw=f'{{"error": {{"message": "bad {in_json(k)}"}}}}'.encode()),
    "no JSON": lambda k: Fault(raw=f"your key {in_json(k)} is bad".encode()),
    "no choices": lambda k: Fault(raw=f'{{"your key": "{in_json(k)}"}}'.encode()),
    "cut where it stands": lambda k: Fault.status_error(403, "x" * 195 + in_json(k)),
    "its first half": lambda k: Fault.status_error(403, f"bad key {k[: len(k) // 2 + 2]}..."),
}


@pytest.mark.parametrize("form", ERRORS)
def test_an_error_is_told_without_the_key(form: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "soulkit")
    fault = ERRORS[form](OTHER)
    with (
        ScriptedServer(script=lambda i, body: fault) as server,
        pytest.raises(ProviderError) as caught,
    ):
        ask(Endpoint(model="m", base_url=server.base_url, api_key_env="OTHER_KEY", backoff_s=0.0,
                     max_attempts=2))  # fmt: skip
    messages = caught.value.detail + caplog.text
    assert (
        not holds_key(messages)
        and OTHER[:8] not in messages
        and in_json(OTHER)[:40] not in messages
    )


def test_a_run_holds_no_key_and_prints_none(tmp_path: Path, capfd: Any) -> None:
    """The actor repeats its key, escaped; every third time its server complains of it instead."""
    gold = oracle("tomi", 6)

    def script(index: int, body: dict[str, Any]) -> Fault:
        if index % 3 == 2:
            return ERRORS["escaped"](KEY)
        return Fault(raw=reply(json.dumps(gold(body))[:-1] + f' {in_json(KEY)}"'))

    with ScriptedServer(script=script) as server:
        soul_code = api(server.base_url, tmp_path / "run", "--max-unscored", 1)
        assert soul_code == 0
    assert len(records(tmp_path / "run")) == 6
    printed = capfd.readouterr()
    texts = [printed.out, printed.err]
    texts += [f.read_bytes().decode("utf-8", "ignore") for f in tmp_path.rglob("*") if f.is_file()]
    assert not any(KEY in text or in_json(KEY) in text for text in texts)
    assert any("[key]" in text for text in texts)


def test_debug_shows_no_key_either(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    """A traceback ends in the words of a library, which may quote a server's."""
    from soulkit.eval.run import runner

    def broken(config: Any) -> None:
        try:
            raise ValueError(f"the server said {in_json(KEY)}")
        except ValueError as error:
            raise ModelLoadError("It broke.", f"It said {KEY}.", "Mend it.") from error

    monkeypatch.setattr(runner, "check_endpoints", broken)
    with ScriptedServer() as server:
        Endpoint(model="m", base_url=server.base_url)  # reads the key
        assert api(server.base_url, tmp_path / "run", "--debug") == 2
    err = capfd.readouterr().err
    assert "Traceback" in err and "the server said [key]" in err and "why: It said [key]." in err
    assert not holds_key(err)


def test_a_proxys_password_is_not_shown(monkeypatch: Any) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "odd://me:hunter2hunter2@proxy:1")
    with pytest.raises(ModelLoadError) as caught:
        make_client("https://example.org/v1", 1.0, 1)
    assert "hunter2" not in " ".join(caught.value.lines())


# -- the detector ----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 400])
def test_a_detector_may_escape_the_key(status: int, tmp_path: Path) -> None:
    raw = f'{{"fraction_human": 0.5, "echo": "{in_json(KEY)}"}}'
    path = tmp_path / "ledger.sqlite"
    with DetectorServer([(status, raw)]) as server, Ledger(path) as ledger:
        detector = Detector(url=server.url, key_env="OPENAI_API_KEY", backoff_s=0.0)
        share = detector.human("hey", CALL, ledger)
        if status == 200:
            assert asyncio.run(share) == 0.5
        else:
            with pytest.raises(UnreadableVerdict) as caught:
                asyncio.run(share)
            assert not holds_key(caught.value.detail) and "[key]" in caught.value.detail
    for file in tmp_path.iterdir():
        assert not holds_key(file.read_bytes().decode("utf-8", "ignore"))
