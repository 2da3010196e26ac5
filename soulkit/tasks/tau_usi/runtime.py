"""The service that a customer calls: a runtime behind HTTP, or a made desk in this process.

    POST /create  {"env_type": "tau", "params": "{\\"env_name\\": ..., \\"task_index\\": ...}"}
                  → {"runtime_id": ..., "meta_info": "{instruction, wiki, tools_info}"}
    POST /step    {"runtime_id": ..., "params": "{\\"name\\": ..., \\"arguments\\": {...}}"}
                  → {"result": ...}
    POST /reward  {"runtime_id": ...} → {"reward": ...}
    POST /ping    {"runtime_id": ...} → {"exists": ...}

A runtime holds the state of an episode, so a call that got no answer may have been carried out or
not. It is never sent again to the same environment: a new one is created, the earlier calls are
replayed in it, and each must answer as it did before. A server that cannot be reached is tried for
`wait_s` seconds, counted once for everybody, and then every call fails at once. Whatever fails is a
PartnerError: the episode is unscored, never 0.

Answers are kept in the ledger under what led to them, so that an episode that is taken up again
asks the runtime for nothing it has answered, and a replay touches no network.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from soulkit.errors import ModelLoadError, PartnerError
from soulkit.models.api import http
from soulkit.models.api.address import checked_url
from soulkit.models.api.faults import clean_detail
from soulkit.models.ledger.ledger import Ledger, LedgerEntry, request_key, request_of
from soulkit.tasks.tau_usi.desk import DOMAIN, Desk, desk
from soulkit.types import Call, Sampling

STEP_S, PING_S = 600.0, 5.0
"""Seconds for one answer: environments are made in minutes, a sign of life in no time."""
MAX_BYTES = 10_000_000
RECOVERIES = 3
"""So often may one episode's environment be lost."""
_AWAY = (502, 503, 504)
_SAMPLING = Sampling(temperature=0.0)
"""Nothing is sampled; the ledger's key wants some."""


class Unreached(Exception):
    """No answer came: nobody knows whether the call was carried out."""


class Refused(Exception):
    """The server answered, and not with what was asked for."""


@dataclass
class RuntimeServer:
    """A runtime behind HTTP. `wait_s`: seconds for which a server that is away is waited for."""

    url: str
    wait_s: float = 30.0
    pause_s: float = 0.5
    """Between two attempts to reach it."""
    _down_since: float | None = None
    _reached: bool = False

    async def ask(
        self, path: str, body: Mapping[str, Any], timeout_s: float = STEP_S
    ) -> dict[str, Any]:
        """The object that the server answers with; Unreached, Refused."""
        import httpx2 as errors

        url = checked_url(self.url)
        try:
            async with asyncio.timeout(timeout_s), http.make_client(url, timeout_s, 1) as client:
                received = await http.post(client, f"{url}{path}", {}, body, MAX_BYTES)
        except (TimeoutError, errors.HTTPError) as error:
            self._refuse_strange(error)
            raise Unreached(clean_detail(f"{type(error).__name__} at {path}")) from error
        except http.TooLong as error:
            raise Refused(f"the answer to {path} is longer than {MAX_BYTES} bytes") from error
        if received.status in _AWAY:
            raise Unreached(f"HTTP {received.status} at {path}")
        self._down_since, self._reached = None, True
        if received.status != 200:
            raise Refused(f"HTTP {received.status} at {path}: {clean_detail(received.text)}")
        return _object(received.text, path)

    def _refuse_strange(self, error: Exception) -> None:
        """PartnerError where nothing listens and nothing ever did: there is nobody to wait for."""
        import httpx2 as errors

        if isinstance(error, errors.ConnectError) and not self._reached:
            raise PartnerError(f"nobody answers as the service at {self.url}") from error

    async def wait(self, error: Unreached) -> None:
        """Pause before the next attempt; PartnerError once the server has been away too long."""
        now = time.monotonic()
        self._down_since = now if self._down_since is None else self._down_since
        if now - self._down_since >= self.wait_s:
            raise PartnerError(f"the service at {self.url} cannot be reached: {error}")
        await asyncio.sleep(self.pause_s)

    async def present(self) -> bool:
        """Whether a runtime answers there."""
        try:
            await self.ask("/ping", {"runtime_id": ""}, PING_S)
        except (Unreached, PartnerError):
            return False
        except Refused:
            return True  # it answers, and knows no such environment
        return True


def _object(text: str, path: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused(f"the answer to {path} is no JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Meta:
    """What a service says of a fresh environment."""

    instruction: str
    wiki: str
    tools: tuple[Mapping[str, Any], ...]


class Service(Protocol):
    """The service of one episode."""

    async def open(self) -> Meta: ...

    async def step(self, name: str, arguments: Mapping[str, Any]) -> str: ...

    async def reward(self) -> float: ...


@dataclass
class MadeService:
    """A made desk, in this process."""

    desk: Desk

    async def open(self) -> Meta:
        return meta_of(self.desk.meta())

    async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self.desk.step(name, arguments)

    async def reward(self) -> float:
        return self.desk.reward()


@dataclass
class RuntimeService:
    """One episode's environment in a runtime."""

    server: RuntimeServer
    params: Mapping[str, Any]
    """`env_name` and `task_index`."""
    call: Call
    ledger: Ledger | None = None
    runtime_id: str = ""
    _steps: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Every call so far and what was answered."""
    _asked: int = 0

    async def open(self) -> Meta:
        return meta_of(_decoded(await self._kept("/create", {}, self._create)))

    async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = {"name": name, "arguments": dict(arguments)}
        text = await self._kept("/step", call, lambda: self._live("/step", call))
        self._steps.append((call, text))
        return text

    async def reward(self) -> float:
        text = await self._kept("/reward", {}, lambda: self._live("/reward"))
        try:
            number = float(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            number = math.nan
        if not math.isfinite(number):
            raise PartnerError(f"the service gives no reward: {text[:100]}")
        return number

    # -- the ledger --

    async def _kept(self, path: str, call: Mapping[str, Any], ask: Any) -> str:
        """The text that `path` answers with, from the ledger where it stands there."""
        self._asked += 1
        content = {"path": path, "params": self.params, "call": call, "after": self._history()}
        messages = [{"role": "user", "content": json.dumps(content, sort_keys=True)}]
        url = checked_url(self.server.url)
        name, request = f"runtime {url}", request_of(url, messages, _SAMPLING)
        numbered = replace(self.call, turn=self._asked)
        key = request_key(request, name, numbered)
        entry = self.ledger.lookup(key, model=name, call=numbered) if self.ledger else None
        if entry is not None:
            return str(json.loads(entry.reply)["choices"][0]["message"]["content"])
        started = time.perf_counter()
        text: str = await ask()
        if self.ledger is not None:
            seconds = time.perf_counter() - started
            self.ledger.store(key, _entry(name, numbered, text, seconds), request)
        return text

    def _history(self) -> str:
        """What led here, in short: another history is another question."""
        return hashlib.sha256(json.dumps(self._steps, sort_keys=True).encode()).hexdigest()

    # -- the network --

    async def _create(self) -> str:
        body = {"env_type": "tau", "params": json.dumps(dict(self.params))}
        while True:
            try:
                reply = await self.server.ask("/create", body)
            except Unreached as error:
                await self.server.wait(error)
                continue
            except Refused as error:
                raise PartnerError(f"the service refused: {error}") from error
            self.runtime_id = str(reply.get("runtime_id") or "")
            if not self.runtime_id:
                raise PartnerError("the service made an environment without a runtime_id")
            return _text(reply.get("meta_info"))

    async def _live(self, path: str, call: Mapping[str, Any] | None = None) -> str:
        """What the environment answers, one made anew where it was lost."""
        for _ in range(RECOVERIES + 1):
            try:
                if not self.runtime_id:
                    await self._restore()
                return await self._send(path, call)
            except Unreached as error:
                self.runtime_id = ""  # nobody knows whether the call was carried out
                await self.server.wait(error)
            except Refused as error:
                if await self._exists():
                    raise PartnerError(f"the service refused: {error}") from error
                self.runtime_id = ""
        raise PartnerError(f"the service lost the environment {RECOVERIES + 1} times")

    async def _send(self, path: str, call: Mapping[str, Any] | None) -> str:
        body = {"runtime_id": self.runtime_id}
        reply = await self.server.ask(path, body if call is None else _with_call(body, call))
        field_name = path.removeprefix("/") if call is None else "result"
        if reply.get(field_name) is None:
            raise PartnerError(f"the answer of the service to {path} has no '{field_name}'")
        return _text(reply[field_name])

    async def _restore(self) -> None:
        """A fresh environment in the state of the lost one; PartnerError when it is another."""
        await self._create()
        for call, before in self._steps:
            if await self._send("/step", call) != before:
                raise PartnerError(f"'{call['name']}' answered otherwise when it was replayed")

    async def _exists(self) -> bool:
        try:
            reply = await self.server.ask("/ping", {"runtime_id": self.runtime_id}, PING_S)
        except (Unreached, Refused):
            return False
        return bool(reply.get("exists", True))


def _with_call(body: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "params": json.dumps(dict(call), sort_keys=True)}


def _entry(name: str, call: Call, text: str, seconds: float) -> LedgerEntry:
    """In the shape of a chat completion, so that whatever reads ledgers can read it."""
    message = {"role": "assistant", "content": text}
    reply = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]})
    return LedgerEntry(
        model=name, call=call, reply=reply, prompt_tokens=0, completion_tokens=0, cost=0.0,
        seconds=seconds, attempts=1, created=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )  # fmt: skip


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _decoded(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise PartnerError("the service says nothing readable of a fresh environment")
    return value


def meta_of(info: Mapping[str, Any]) -> Meta:
    """What a service said, as far as it is there."""
    tools = info.get("tools_info") or ()
    parts = [tool for tool in tools if isinstance(tool, Mapping)] if tools else []
    return Meta(str(info.get("instruction") or ""), str(info.get("wiki") or ""), tuple(parts))


def service_of(
    env_name: str, task_index: int, server: RuntimeServer, call: Call, ledger: Ledger | None
) -> Service:
    """The service of a row: made here for the made domain, else in the runtime."""
    if env_name == DOMAIN:
        return MadeService(desk(task_index))
    return RuntimeService(server, {"env_name": env_name, "task_index": task_index}, call, ledger)


def refuse_absent(server: RuntimeServer, task: str) -> None:
    """ModelLoadError where no runtime answers."""
    if not asyncio.run(server.present()):
        raise ModelLoadError(
            f"Nobody answers as the service of '{task}' at {server.url}.",
            "Its agent looks customers up and changes their orders there, so that no row can be "
            "played without it.",
            "Start a runtime and name it: --option runtime_url=URL. Rows of the domain "
            f"{DOMAIN} need none: --data {task}=synth:20",
        )
