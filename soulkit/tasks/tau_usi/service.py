"""The service that a customer calls: its agent, the agent's tool calls, the runtime.

A message of the agent holds at most one call; text that resembles a call is a format error.

    <function=find_member><parameter=name>Ada Amsel</parameter></function>

A runtime (POST /create, /step, /reward, /ping) keeps the state of an episode, so a call without an
answer may or may not have been executed. It is never repeated in the same environment. Instead, the
earlier calls are replayed in a new one, which must give the same answers. An unreachable server is
retried for `wait_s` seconds; all episodes share this limit. A failure is a PartnerError and leaves
the episode unscored. The ledger stores each answer under the calls that led to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from soulkit.errors import ModelLoadError, PartnerError
from soulkit.judge.verdict import spoken
from soulkit.models.api import transport
from soulkit.models.api.addresses import checked_url
from soulkit.models.api.replies import clean_detail
from soulkit.models.base import Player
from soulkit.models.ledger.ledger import Ledger, LedgerEntry, request_key, request_of
from soulkit.parse import ParseError, json_or_none, parse_json
from soulkit.tasks.kit.dialogue import partner_reply
from soulkit.tasks.tau_usi.desk import DOMAIN, Desk, desk
from soulkit.types import Call, Sampling, Segment, Usage

OPEN, CLOSE = "<function=", "</function>"
PARAMETER, END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[\w.-]{1,100}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A valid tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FormatError:
    """Why a message is neither a call nor speech."""

    why: str


def read_agent_message(
    text: str, tools: Sequence[Mapping[str, Any]]
) -> ToolCall | FormatError | str:
    """The parsed message of an agent: a call, a malformed call, or speech to the customer."""
    if OPEN not in text and CLOSE not in text:
        return text.strip()
    try:
        name, body = _call_parts(text)
        schema = _schema(name, tools)
        return ToolCall(name, _arguments(body, schema))
    except ValueError as error:
        return FormatError(str(error))


def _call_parts(text: str) -> tuple[str, str]:
    """(name, text between head and end) of the only call."""
    if text.count(OPEN) != 1 or text.count(CLOSE) != 1:
        raise ValueError(f"a message holds one call, from {OPEN}NAME> to {CLOSE}")
    _, _, rest = text.partition(OPEN)
    inside, end, behind = rest.partition(CLOSE)
    if not end or behind.strip():
        raise ValueError(f"nothing may stand behind {CLOSE}")
    name, mark, body = inside.partition(">")
    if not mark or not _NAME.fullmatch(name.strip()):
        raise ValueError(f"the head of a call is {OPEN}NAME>")
    return name.strip(), body


def _schema(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Parameter → its JSON Schema; ValueError for an undeclared tool."""
    declared = {str(d.get("name")): d for d in map(declaration, tools)}
    if name not in declared:
        raise ValueError(f"there is no tool '{name}'; there are {', '.join(declared) or 'none'}")
    parameters = declared[name].get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def declaration(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name, description and parameters of a tool, in either of the common formats."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def _arguments(body: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    place = _past_space(body, 0)
    while place < len(body):
        if not body.startswith(PARAMETER, place):
            raise ValueError(f"between the parameters stands '{body[place : place + 40].rstrip()}'")
        end = body.find(END, place)
        head = body[place + len(PARAMETER) : end] if end >= 0 else ""
        name, mark, value = head.partition(">")
        if not (mark and _NAME.fullmatch(name.strip())):
            raise ValueError(f"a parameter is written {PARAMETER}NAME>VALUE{END}")
        if name.strip() in arguments:
            raise ValueError(f"the parameter '{name.strip()}' stands twice")
        arguments[name.strip()] = _value(value.strip(), schema.get(name.strip()))
        place = _past_space(body, end + len(END))
    return arguments


def _past_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in (None, "string"):
        return text
    try:
        return parse_json(text, strict=False)
    except ParseError:
        return text


STEP_S, PING_S = 600.0, 5.0
"""Timeouts in seconds: creating an environment takes minutes, a ping is immediate."""
MAX_BYTES = 10_000_000
RECOVERIES = 3
"""How often the environment of one episode may be lost."""
_AWAY = (502, 503, 504)
_SAMPLING = Sampling(temperature=0.0)
"""Nothing is sampled, but the ledger's key needs a value."""


class Unreached(Exception):
    """No answer came, so the call may or may not have been executed."""


class Refused(Exception):
    """The server answered, but not with what was requested."""


@dataclass
class RuntimeServer:
    """A runtime behind HTTP. `wait_s`: seconds to wait for an unreachable server."""

    url: str
    wait_s: float = 30.0
    pause_s: float = 0.5
    """Pause between two attempts to reach it."""
    _down_since: float | None = None
    _reached: bool = False

    async def ask(
        self, path: str, body: Mapping[str, Any], timeout_s: float = STEP_S
    ) -> dict[str, Any]:
        """The JSON object of the server's answer. Raises Unreached or Refused."""
        import httpx2 as errors

        url = checked_url(self.url)
        try:
            async with (
                asyncio.timeout(timeout_s),
                transport.make_client(url, timeout_s, 1) as client,
            ):
                received = await transport.post(client, f"{url}{path}", {}, body, MAX_BYTES)
        except (TimeoutError, errors.HTTPError) as error:
            if isinstance(error, errors.ConnectError) and not self._reached:
                # The connection was refused at once and never worked: waiting would not help.
                raise PartnerError(f"no service answers at {self.url}") from error
            raise Unreached(clean_detail(f"{type(error).__name__} at {path}")) from error
        except transport.TooLong as error:
            raise Refused(f"the answer to {path} is longer than {MAX_BYTES} bytes") from error
        if received.status in _AWAY:
            raise Unreached(f"HTTP {received.status} at {path}")
        self._down_since, self._reached = None, True
        if received.status != 200:
            raise Refused(f"HTTP {received.status} at {path}: {clean_detail(received.text)}")
        return _object(received.text, path)

    async def wait(self, error: Unreached) -> None:
        """Pause before the next attempt; PartnerError if the server was away too long."""
        now = time.monotonic()
        self._down_since = now if self._down_since is None else self._down_since
        if now - self._down_since >= self.wait_s:
            raise PartnerError(f"the service at {self.url} cannot be reached: {error}")
        await asyncio.sleep(self.pause_s)

    async def present(self) -> bool:
        """Whether a runtime answers at this address."""
        try:
            await self.ask("/ping", {"runtime_id": ""}, PING_S)
        except (Unreached, PartnerError):
            return False
        except Refused:
            return True  # it answers, but does not know this environment
        return True


def _object(text: str, path: str) -> dict[str, Any]:
    value = json_or_none(text)
    if not isinstance(value, dict):
        raise Refused(f"the answer to {path} is not a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Meta:
    """The metadata of a fresh environment."""

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
    """A desk in the built-in domain, in this process."""

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
    """Every call so far, with its answer."""
    _past: Any = field(default_factory=hashlib.sha256)
    """A running hash of the same, so that thousands of steps stay linear."""
    _asked: int = 0

    async def open(self) -> Meta:
        return meta_of(_decoded(await self._kept("/create", {}, self._create)))

    async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = {"name": name, "arguments": dict(arguments)}
        text = await self._kept("/step", call, lambda: self._live("/step", call))
        self._steps.append((call, text))
        self._past.update(json.dumps([call, text], sort_keys=True).encode() + b"\n")
        return text

    async def reward(self) -> float:
        text = await self._kept("/reward", {}, lambda: self._live("/reward"))
        try:
            number = float(parse_json(text))
        except (ValueError, TypeError):
            number = math.nan
        if not math.isfinite(number):
            raise PartnerError(f"the service returned no reward: {text[:100]}")
        return number

    # -- the ledger --

    async def _kept(self, path: str, call: Mapping[str, Any], ask: Any) -> str:
        """The text of the answer to `path`, from the ledger if it is recorded there."""
        self._asked += 1
        content = {
            "path": path,
            "params": self.params,
            "call": call,
            "after": self._past.hexdigest(),
        }
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
                raise PartnerError("the service created an environment without a runtime_id")
            return _text(reply.get("meta_info"))

    async def _live(self, path: str, call: Mapping[str, Any] | None = None) -> str:
        for _ in range(RECOVERIES + 1):
            try:
                if not self.runtime_id:
                    await self._restore()
                return await self._send(path, call)
            except Unreached as error:
                self.runtime_id = ""  # the call may or may not have been executed
                await self.server.wait(error)
            except Refused as error:
                if await self._exists():
                    raise PartnerError(f"the service refused: {error}") from error
                self.runtime_id = ""
        raise PartnerError(f"the service lost the environment {RECOVERIES + 1} times")

    async def _send(self, path: str, call: Mapping[str, Any] | None) -> str:
        body = {"runtime_id": self.runtime_id}
        if call is not None:
            body["params"] = json.dumps(dict(call), sort_keys=True)
        reply = await self.server.ask(path, body)
        field_name = path.removeprefix("/") if call is None else "result"
        if reply.get(field_name) is None:
            raise PartnerError(f"the service's answer to {path} has no '{field_name}'")
        return _text(reply[field_name])

    async def _restore(self) -> None:
        """Recreate the lost environment by replay; PartnerError if an answer differs."""
        await self._create()
        for call, answer in self._steps:
            if await self._send("/step", call) != answer:
                raise PartnerError(f"'{call['name']}' gave another answer when it was replayed")

    async def _exists(self) -> bool:
        try:
            reply = await self.server.ask("/ping", {"runtime_id": self.runtime_id}, PING_S)
        except (Unreached, Refused):
            return False
        return bool(reply.get("exists", True))


def _entry(name: str, call: Call, text: str, seconds: float) -> LedgerEntry:
    """In the format of a chat completion, readable by everything that reads ledgers."""
    message = {"role": "assistant", "content": text}
    reply = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]})
    return LedgerEntry(
        model=name, call=call, reply=reply, prompt_tokens=0, completion_tokens=0, cost=0.0,
        seconds=seconds, attempts=1, created=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )  # fmt: skip


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _decoded(text: str) -> Mapping[str, Any]:
    value = json_or_none(text)
    if not isinstance(value, dict):
        raise PartnerError("the service's description of a fresh environment is unreadable")
    return value


def meta_of(info: Mapping[str, Any]) -> Meta:
    """The metadata that a service sent; missing parts are empty."""
    tools = info.get("tools_info") or ()
    parts = [tool for tool in tools if isinstance(tool, Mapping)] if tools else []
    return Meta(str(info.get("instruction") or ""), str(info.get("wiki") or ""), tuple(parts))


def service_of(
    env_name: str, task_index: int, server: RuntimeServer, call: Call, ledger: Ledger | None
) -> Service:
    """The service of a row: in this process for the built-in domain, else in the runtime."""
    if env_name == DOMAIN:
        return MadeService(desk(task_index))
    return RuntimeService(server, {"env_name": env_name, "task_index": task_index}, call, ledger)


def require_runtime(server: RuntimeServer, task: str) -> None:
    """ModelLoadError if no runtime answers."""
    if not asyncio.run(server.present()):
        raise ModelLoadError(
            f"No service of '{task}' answers at {server.url}.",
            "The agent looks up customers and changes their orders there, so no row can be played "
            "without it.",
            "Start a runtime and name it with --option runtime_url=URL. Rows of the domain "
            f"{DOMAIN} need none: --data {task}=synth:20",
        )


GREETING = "Hello, you have reached the service desk. What can I do for you today?"


@dataclass
class ServiceAgent:
    """A running agent. Its context is private: the customer sees only what it says."""

    player: Player
    service: Service
    meta: Meta
    context: list[Segment]
    call_of: Callable[[int], Call]
    """The call of its n-th message."""
    complaint: Callable[[str], str]
    """Its prompt after a message in the wrong format."""
    most_rounds: int
    usage: Usage = field(default_factory=Usage)
    messages: int = 0
    tool_calls: int = 0
    format_errors: int = 0

    async def answer(self, words: str) -> str:
        """The agent's reply to the customer, after its tool calls.

        PartnerError if it says nothing or only calls tools.
        """
        self.context.append(Segment("user", words))
        for _ in range(self.most_rounds + 1):
            text = await self._message()
            self.context.append(Segment("assistant", text))
            act = read_agent_message(text, self.meta.tools)
            if isinstance(act, str):
                return act
            self.context.append(await self._told(act))
        raise PartnerError(f"the agent called tools {self.most_rounds} times without a reply")

    async def _message(self) -> str:
        call = self.call_of(self.messages)
        self.messages += 1
        text, usage = await partner_reply(
            self.player, tuple(self.context), call, lambda t: spoken(t, "paper") or None,
            "the agent",
        )  # fmt: skip
        self.usage += usage
        return text

    async def _told(self, act: ToolCall | FormatError) -> Segment:
        if isinstance(act, FormatError):
            self.format_errors += 1
            return Segment("user", self.complaint(act.why))
        self.tool_calls += 1
        return Segment("system", await self.service.step(act.name, act.arguments))


def tool_lines(meta: Meta) -> list[str]:
    """The tools as the agent sees them, one per line."""
    shown = ("name", "description", "parameters")
    return [
        json.dumps({key: tool[key] for key in shown if key in tool}, ensure_ascii=False)
        for tool in map(declaration, meta.tools)
    ]
