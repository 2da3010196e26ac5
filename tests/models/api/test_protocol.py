"""A second kind of API server is one object: body, parse and error; everything else stays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from soulkit.errors import ProviderError
from soulkit.models.api import protocol
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.probing import EndpointRefused, Preflight
from soulkit.models.api.protocol import ApiError, ApiProtocol, Unreadable, WireReply, parse_reply
from soulkit.models.ledger.ledger import Ledger
from soulkit.types import Call, Completion, Sampling, Segment
from tests.support.reporting import Heard

CALL = Call(role="judge", example_id="e1")
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


@contextmanager
def server(*statuses: int) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Answers with these statuses in turn, then with 200; its address and what it was sent."""
    left, got = list(statuses), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append((self.path, body))
            status = left.pop(0) if left else 200
            if status != 200:
                reply: Any = {"problem": {"kind": "odd", "words": f"it is {status}"}}
            else:
                parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
                usage = {"input_tokens": 7, "output_tokens": 2}
                reply = {"type": "message", "content": parts, "usage": usage}
            self.answer(status, reply)

        def do_GET(self) -> None:
            self.answer(404, {})

        def answer(self, status: int, reply: Any) -> None:
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1", got
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def ask(url: str, **settings: Any) -> Completion:
    async def once() -> Completion:
        model = Endpoint(model="m", base_url=url, backoff_s=0.0, protocol=MESSAGES, **settings)
        try:
            return await model.complete(CONTEXT, Sampling(max_tokens=9), CALL)
        finally:
            await model.close()

    return asyncio.run(once())


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PROTOCOLS", (*protocol.PROTOCOLS, MESSAGES))


def test_a_call_goes_there_and_its_reply_is_read_paid_and_kept(tmp_path: Path) -> None:
    with server(500) as (url, got), Ledger(tmp_path / "l.sqlite") as ledger:
        reply = ask(url, ledger=ledger, price_in=1.0, price_out=1.0)
        assert ask(url, ledger=ledger) == reply
    assert reply.text == "Hi there" and reply.usage.cost == 9e-6
    assert [path for path, _ in got] == ["/v1/messages"] * 2, "once again after the fault"
    assert got[-1][1]["system"] == "Be short." and got[-1][1]["max_tokens"] == 9


def test_a_refusal_is_told_in_the_servers_words() -> None:
    with server(400) as (url, _), pytest.raises(ProviderError, match="HTTP 400 odd: it is 400"):
        ask(url)
    with server(401) as (url, _), pytest.raises(EndpointRefused, match="refuses the key"):
        ask(url, preflight=Preflight())


def test_the_question_before_a_run_is_of_its_form() -> None:
    lines: list[str] = []
    with server() as (url, got):
        ask(url, preflight=Preflight(Heard(lines)))
    assert [path for path, _ in got] == ["/v1/messages"] * 2
    assert lines[0].startswith("answered: m at")


def test_a_stored_reply_is_read_by_the_protocol_that_can() -> None:
    chat = '{"choices": [{"message": {"content": "a"}}]}'
    assert parse_reply(chat).text == "a"
    usage = {"input_tokens": 1, "output_tokens": 1}
    other = {"type": "message", "content": [{"type": "text", "text": "b"}], "usage": usage}
    assert parse_reply(json.dumps(other)).text == "b"
    with pytest.raises(Unreadable):
        parse_reply('{"type": "other"}')
