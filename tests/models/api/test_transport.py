"""What a server may send back, and whose settings keep a request from being sent at all."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ModelLoadError, ProviderError
from soulkit.models.api import endpoint
from soulkit.models.api.addresses import open_access
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.probing import offered_models
from soulkit.models.api.transport import ClientPool, make_client
from soulkit.models.ledger.ledger import Ledger
from soulkit.types import Completion, Segment
from tests.models import asking
from tests.support.servers.openai_server import Body, Fault, ScriptedServer, completion

KEY = "sk-test-0123456789abcdef"


def ask(url: str, text: str = "hello", **settings: Any) -> Completion:
    base: dict[str, Any] = {"model": "m", "base_url": url, "backoff_s": 0.0, "max_attempts": 2}
    return asking.ask(Endpoint(**(base | settings)), context=(Segment("user", text),))


def failure_text(fault: Fault) -> tuple[str, int]:
    """The error that a server's every reply leads to, and the requests that were made."""
    with ScriptedServer(script=lambda index, body: fault) as server:
        with pytest.raises(ProviderError) as caught:
            ask(server.base_url)
        return str(caught.value), len(server.requests)


@contextmanager
def dripping() -> Iterator[str]:
    """The address of a server whose reply does not end, a byte at a time."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                while not over.wait(0.02):
                    connection.sendall(b" ")

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        over.set()
        thread.join(60)


def test_the_time_of_an_attempt_and_of_a_list_of_models_is_bounded() -> None:
    """Each read is in time, and there is no end of them."""
    with dripping() as url, pytest.raises(ProviderError, match=r"within 0\.2 s"):
        ask(url, timeout_s=0.2, max_attempts=1)

    async def offered(url: str) -> list[str]:
        pool = ClientPool(lambda n: make_client(url, 0.2, n), 1)
        try:
            return await offered_models(open_access(url, "NO_KEY"), pool, 0.2)
        finally:
            await pool.close()

    with dripping() as url:
        assert asyncio.run(offered(url)) == []


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_nobody_is_sent_on_to_another_server(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with ScriptedServer(answer="from elsewhere") as other:
        where = f"{other.base_url}/chat/completions?key={KEY}"
        text, requests = failure_text(Fault(status=status, raw=b"", headers={"Location": where}))
        assert not other.requests
    assert requests == 1
    assert f"HTTP {status} redirects to {other.base_url}" in text and "not followed" in text
    assert KEY not in text


@pytest.mark.parametrize("status", [200, 500])
def test_a_reply_without_end_is_cut_off(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BYTES", 1 << 20)
    text, requests = failure_text(Fault(status=status, raw=b" " * (3 << 20)))
    assert requests == 1
    assert text == "m: the reply is longer than 1 MB"


def test_a_packed_reply_counts_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BYTES", 1 << 20)
    bomb = zlib.compress(b" " * (16 << 20), 9, wbits=31)
    assert len(bomb) < 1 << 15
    text, _ = failure_text(Fault(raw=bomb, headers={"Content-Encoding": "gzip"}))
    assert text == "m: the reply is longer than 1 MB"
    twice = gzip.compress(gzip.compress(json.dumps(completion({}, "yes")).encode()))
    text, _ = failure_text(Fault(raw=twice, headers={"Content-Encoding": "gzip, gzip"}))
    assert text == "m: the reply is longer than 1 MB"
    honest = gzip.compress(json.dumps(completion({}, "yes")).encode())
    fault = Fault(raw=honest, headers={"Content-Encoding": "gzip"})
    with ScriptedServer(script={0: fault}) as server:
        assert ask(server.base_url).text == "yes"


@pytest.mark.parametrize("charset", ["rot13", "idna", "bogus", "utf-16"])
def test_json_is_utf8_whatever_the_header_says(charset: str) -> None:
    raw = json.dumps(completion({}, "größer"), ensure_ascii=False).encode()
    headers = {"Content-Type": f"application/json; charset={charset}"}
    with ScriptedServer(script={0: Fault(raw=raw, headers=headers)}) as server:
        assert ask(server.base_url).text == "größer"


def test_half_a_character_in_a_prompt_is_no_crash() -> None:
    with ScriptedServer() as server:
        assert ask(server.base_url, "a\ud83d b\0 größer 😀").text == "You said: a� b\0 größer 😀"


@pytest.mark.parametrize("count", [-5, 10**30, True, 2.5, "7"])
def test_token_counts_that_are_none(count: Any, tmp_path: Path) -> None:
    """They are not known: no cost is made up, and a ledger can hold the reply."""

    def script(index: int, body: Body) -> Fault:
        usage = {"prompt_tokens": count, "completion_tokens": 1}
        return Fault.reply(completion(body, "yes") | {"usage": usage})

    with ScriptedServer(script=script) as server, Ledger(tmp_path / "l.sqlite") as ledger:
        reply = ask(server.base_url, ledger=ledger, price_in=1.0, price_out=1.0)
    assert reply.text == "yes"
    assert reply.usage.prompt_tokens == 0 and reply.usage.cost is None


@pytest.mark.parametrize(
    ("reason", "stop"), [("\ud800", "�"), ({"a": 1}, "unknown"), (None, "unknown")]
)
def test_odd_stop_reasons_can_be_written(reason: Any, stop: str) -> None:
    body = {"choices": [{"message": {"content": "yes"}, "finish_reason": reason}]}
    with ScriptedServer(script={0: Fault.reply(body)}) as server:
        reply = ask(server.base_url)
    assert reply.stop_reason == stop


@pytest.mark.parametrize(
    ("code", "text", "requests"),
    [
        (7, "HTTP 200 with an error: busy (after 2 attempts)", 2),
        (1302, "HTTP 200 with an error: busy (after 2 attempts)", 2),
        (True, "HTTP 200 with an error: busy (after 2 attempts)", 2),
        ("503", "HTTP 503 busy (after 2 attempts)", 2),
        (403, "HTTP 403 busy", 1),
    ],
)
def test_codes_of_errors_are_statuses_only_where_they_are(
    code: Any, text: str, requests: int
) -> None:
    assert failure_text(Fault.reply({"error": {"code": code, "message": "busy"}})) == (
        f"m: {text}", requests,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks9://127.0.0.1:1"),
        ("HTTPS_PROXY", "http://[::1"),
        ("SSL_CERT_FILE", "/nowhere/certificates.pem"),
    ],
)
def test_settings_of_the_machine_that_allow_no_connection(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(ModelLoadError) as caught:
        ask("https://models.example.invalid/v1")
    assert "models.example.invalid" in caught.value.what
    assert name in caught.value.way_out
    assert KEY not in "".join(caught.value.lines())


def test_a_refused_key_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actor and judge may have keys of their own: the error says which one was not taken."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with ScriptedServer(require_key="another-key-entirely") as server:
        with pytest.raises(ProviderError, match="read from JUDGE_KEY") as caught:
            ask(server.base_url, api_key_env="JUDGE_KEY")
        assert len(server.requests) == 1
    assert KEY not in str(caught.value)
