"""A chat-completions server that follows a script, on a real loopback socket.

    with ScriptedServer(answer=lambda body: "B", script={0: Fault.status_error(500)}) as server:
        Endpoint(model="m", base_url=server.base_url)

`answer` says what to reply; `script` maps a request's index (or a callable of index and body) to a
`Fault`. Run it as a process of its own, to kill it, with

    python -m tests.support.servers.openai_server --profile plain --port 0 --answer hello

which prints its base URL on the first line. Profiles: `plain`; `strict-reasoning` (refuses
temperature, max_tokens and logprobs as reasoning APIs do); `thinking` (spends its first words in
`reasoning_content`, so that a small limit leaves no content).
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

from soulkit.models.api.probing import QUESTION

CHAT = "/chat/completions"
Body = dict[str, Any]
Answer = Callable[[Body], str]
Count = Callable[[str], int]
Profile = Literal["plain", "strict-reasoning", "thinking"]
PROFILES: tuple[Profile, ...] = ("plain", "strict-reasoning", "thinking")
THOUGHT = "first I weigh what was said and then I decide what to answer"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one request; without `status` or `raw` the usual answer is sent."""

    status: int = 200
    raw: bytes | None = None
    """The exact body, sent with an honest length."""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    cut_after: int | None = None
    """Promise the whole body, send this many bytes, close the connection."""
    hang_up: bool = False
    """Close the connection before the first byte."""

    @classmethod
    def status_error(
        cls,
        status: int,
        message: str = "scripted fault",
        *,
        kind: str = "server_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Fault:
        error = {"message": message, "type": kind, "param": param, "code": code}
        return cls(status=status, raw=_dump({"error": error}), headers=headers or {})

    @classmethod
    def rate_limited(cls, retry_after: str) -> Fault:
        return cls.status_error(
            429, "slow down", kind="rate_limit_error", headers={"Retry-After": retry_after}
        )

    @classmethod
    def slow(cls, seconds: float) -> Fault:
        return cls(delay_s=seconds)

    @classmethod
    def truncated_json(cls) -> Fault:
        return cls(raw=b'{"id": "x", "choices": [{"index": 0, "mess')

    @classmethod
    def cut_midway(cls, after: int = 20) -> Fault:
        return cls(cut_after=after)

    @classmethod
    def closed(cls) -> Fault:
        return cls(hang_up=True)

    @classmethod
    def reply(cls, body: Any) -> Fault:
        """A successful reply with this very JSON value."""
        return cls(raw=_dump(body))


Script = Mapping[int, Fault] | Callable[[int, Body], Fault | None]


class ScriptedServer:
    """Serves `/v1/chat/completions` and `/v1/models` in threads of its own until it is left."""

    def __init__(
        self,
        *,
        profile: Profile = "plain",
        answer: Answer | str | None = None,
        script: Script | None = None,
        require_key: str | None = None,
        delay_s: float = 0.0,
        host: str = "127.0.0.1",
        port: int = 0,
        models: Fault | Callable[[], Fault | None] | None = None,
        owner: str = "tests",
        count: Count | None = None,
        on_probe: Callable[[Body], Fault | None] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if profile not in PROFILES:
            raise ValueError(f"unknown profile {profile!r}")
        self.profile = profile
        self.requests: list[Body] = []
        """The bodies of all chat requests, refused ones included, in order of arrival."""
        self.authorizations: list[str] = []
        self.probes: list[Body] = []
        """The bodies of the questions that are put before a run; no script is about them."""
        self.listings: list[str] = []
        """The Authorization header of every request for the list of models."""
        self.count = count or words
        """Tokens of a text, for `usage`."""
        self.on_probe = on_probe
        """What goes wrong with the question before a run."""
        self.paths: tuple[str, ...] = ()
        """The only paths of chat requests; empty: whatever ends like one."""
        self.models, self.owner = models, owner
        """What goes wrong with the list of models, and who is named as their owner in it."""
        self.extra = extra or {}
        """Path of the server itself → the JSON value that a GET gets."""
        self.max_in_flight = 0
        self._answer: Answer = _answerer(answer)
        self._script = script or {}
        self._require_key, self._delay_s = require_key, delay_s
        self._in_flight = 0
        self._lock = threading.Lock()
        self._http = _Http((host, port), self)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.001,), daemon=True)
        self._stopped = False

    @property
    def base_url(self) -> str:
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening; later connections are refused."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        self._http.shutdown()
        self._http.server_close()

    def wait_for(self, count: int, timeout_s: float = 600.0) -> None:
        """Return once `count` requests have arrived; TimeoutError otherwise."""
        end = time.monotonic() + timeout_s
        while len(self.requests) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"only {len(self.requests)} of {count} requests came")
            time.sleep(0.005)

    def _arrive(self, body: Body, authorization: str) -> int:
        with self._lock:
            self.requests.append(body)
            self.authorizations.append(authorization)
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
            return len(self.requests) - 1

    def _leave(self) -> None:
        with self._lock:
            self._in_flight -= 1

    def _respond(self, index: int, body: Body, authorization: str) -> Fault:
        fault = self._fault(index, body) or Fault()
        time.sleep(self._delay_s + fault.delay_s)
        if fault.hang_up or fault.raw is not None:
            return fault
        refusal = self._refuse(body, authorization)
        if refusal is not None:
            return refusal
        thinking = self.profile == "thinking"
        reply = completion(body, self._answer(body), thinking=thinking, count=self.count)
        return Fault(
            status=fault.status,
            raw=_dump(reply),
            headers=fault.headers,
            cut_after=fault.cut_after,
        )

    def _fault(self, index: int, body: Body) -> Fault | None:
        if callable(self._script):
            return self._script(index, body)
        return self._script.get(index)

    def _refuse(self, body: Body, authorization: str) -> Fault | None:
        if self._require_key is not None and authorization != f"Bearer {self._require_key}":
            # Some providers quote what they were sent, so this one does too.
            return Fault.status_error(
                401, f"Bad key: {authorization}", kind="auth_error", code="invalid_api_key"
            )
        return _strict_refusal(body) if self.profile == "strict-reasoning" else None


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: ScriptedServer) -> None:
        self.owner = owner
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in mid-answer is part of the tests, not a fault to print."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body in one packet: two small ones wait 40 ms for each other (Nagle).
    wbufsize = -1
    server: _Http

    def do_POST(self) -> None:
        owner = self.server.owner
        raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        there = self.path in owner.paths if owner.paths else self.path.endswith(CHAT)
        if not there:
            self._send(Fault.status_error(404, f"no such path {self.path}"))
            return
        body, authorization = json.loads(raw), self.headers.get("Authorization", "")
        if is_probe(body):
            with owner._lock:
                owner.probes.append(body)
            fault = owner.on_probe(body) if owner.on_probe is not None else None
            refusal = fault or owner._refuse(body, authorization)
            self._send(refusal or Fault.reply(completion(body, "yes")))
            return
        index = owner._arrive(body, authorization)
        try:
            response = owner._respond(index, body, authorization)
        finally:
            owner._leave()
        self._send(response)

    def do_GET(self) -> None:
        owner = self.server.owner
        if self.path.endswith("/models"):
            with owner._lock:
                owner.listings.append(self.headers.get("Authorization", ""))
            fault = (owner.models() if callable(owner.models) else owner.models) or Fault()
            time.sleep(fault.delay_s)
            model = {"id": "scripted", "object": "model", "created": 0, "owned_by": owner.owner}
            whole = Fault.reply({"object": "list", "data": [model]})
            self._send(fault if fault.hang_up or fault.raw is not None else whole)
        elif self.path in owner.extra:
            self._send(Fault.reply(owner.extra[self.path]))
        else:
            self._send(Fault.status_error(404, f"no such path {self.path}"))

    def _send(self, response: Fault) -> None:
        if response.hang_up:
            self.close_connection = True
            return
        content = response.raw or b""
        self.send_response(response.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: response.cut_after])
        self.wfile.flush()
        if response.cut_after is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: tests read `requests` instead of a log."""


def is_probe(body: Body) -> bool:
    """Whether a request is the question that every server is asked before a run."""
    return [m.get("content") for m in body.get("messages", [])] == [QUESTION]


def words(text: str) -> int:
    return len(text.split())


def completion(
    body: Body, text: str, *, thinking: bool = False, count: Count = words
) -> dict[str, Any]:
    """A reply to `body` that says `text`; a token is a word, and the limit cuts. `count` says what
    the usage tells of a text."""
    limit = body.get("max_tokens") or body.get("max_completion_tokens")
    thought = THOUGHT.split() if thinking and _thinks(body) else []
    content, stop = text, "stop"
    if limit is not None and len(thought) + len(text.split()) > limit:
        content = " ".join(text.split()[: max(0, limit - len(thought))])
        thought, stop = thought[:limit], "length"
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        message["reasoning_content"] = " ".join(thought)
    choice = {"index": 0, "message": message, "finish_reason": stop}
    return {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model", ""),
        "choices": [choice],
        "usage": _usage(body, len(thought) + count(content), count),
    }


def _usage(body: Body, spoken: int, count: Count) -> dict[str, int]:
    prompt = sum(count(str(m.get("content") or "")) for m in body.get("messages", []))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": spoken,
        "total_tokens": prompt + spoken,
    }


def _thinks(body: Body) -> bool:
    return bool(body.get("chat_template_kwargs", {}).get("enable_thinking", True))


def _strict_refusal(body: Body) -> Fault | None:
    if "temperature" in body:
        message = "Unsupported parameter: this model takes no 'temperature'."
        return _refused(message, "temperature", "unsupported_parameter")
    if "max_tokens" in body:
        message = "Unsupported parameter: 'max_tokens'; this model reads 'max_completion_tokens'."
        return _refused(message, "max_tokens", "unsupported_parameter")
    if "logprobs" in body:
        return _refused("This model cannot give 'logprobs'.", "logprobs", "unsupported_parameter")
    return None


def _refused(message: str, param: str, code: str) -> Fault:
    return Fault.status_error(400, message, kind="invalid_request_error", code=code, param=param)


def _answerer(answer: Answer | str | None) -> Answer:
    if answer is None:
        return echo
    return answer if callable(answer) else lambda _: answer


def echo(body: Body) -> str:
    """The default answer: the last user message, said back."""
    lines = [str(m["content"]) for m in body.get("messages", []) if m.get("role") == "user"]
    return f"You said: {lines[-1]}" if lines else "You said nothing."


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve scripted chat completions.")
    parser.add_argument("--profile", choices=PROFILES, default="plain")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--answer", help="what to reply; without it the last message is echoed")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each reply")
    args = parser.parse_args()
    server = ScriptedServer(
        profile=args.profile,
        answer=args.answer,
        delay_s=args.delay,
        host=args.host,
        port=args.port,
    )
    with server:
        print(server.base_url, flush=True)
        server._thread.join()


if __name__ == "__main__":
    main()
