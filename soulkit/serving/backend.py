"""What answers the chat requests of a server: a local model, a vLLM server, or a script.

The HTTP application (app.py) checks addresses, keys, limits and the shape of a body, and passes the
body on as it came. A backend answers with OpenAI's `chat.completion.chunk` objects; `BoundBackend`
(bound.py) wraps another one and makes its model a person.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from threading import Thread
from typing import Any, ClassVar, Literal, Protocol
from uuid import uuid4

Ending = Literal["marker", "tool", "finish"]
"""How a person ends a conversation; see bound.py."""
SystemPolicy = Literal["refuse", "ignore", "append"]
"""What happens to a client's system prompt: it is refused, or left out, or follows the person's."""
Body = Mapping[str, Any]
"""The JSON object of a request to `/v1/chat/completions`; `model` and `messages` are checked."""
Chunk = dict[str, Any]
"""An OpenAI `chat.completion.chunk`. A choice's last chunk has its `finish_reason`; the very last
chunk has no choices and the `usage`."""


class RequestError(Exception):
    """A request that cannot be answered, told to the client as an OpenAI error object."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None,
                 code: str | None = None) -> None:  # fmt: skip
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def payload(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class ChatBackend(Protocol):
    """Answers chat requests for one model."""

    name: str
    """Id of the model in `/v1/models`."""

    @property
    def context_limit(self) -> int | None:
        """Maximum tokens of prompt and reply together; None: unknown."""

    def chunks(self, body: Body, conversation: str) -> AsyncIterator[Chunk]:
        """The reply, piece by piece. `conversation` identifies the conversation, if the client has
        named it, else it is empty.

        RequestError before the first chunk if the request cannot be answered. Closing the iterator
        cancels the generation at once.
        """

    async def close(self) -> None:
        """Stop generating and free the model."""


TEXT_ONLY = ("functions", "function_call", "response_format", "logprobs", "top_logprobs")
"""Settings, besides tools, that need more than a line of text."""


def refuse_settings(body: Body, names: Sequence[str], why: str) -> None:
    """RequestError for tools and for the first of these settings that a body has."""
    for name in (*names, "tools"):
        if body.get(name):
            raise RequestError(
                f"'{name}' is not supported: {why}.", param=name, code="unsupported_value"
            )


def text_of(message: Mapping[str, Any], where: str) -> str:
    """The text of a message, whose content is a text, null or a list of texts; RequestError if a
    part is something else."""
    content = message.get("content")
    content = "" if content is None else content
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"Part {number} of {where}.content is no text.",
                               param=f"{where}.content")  # fmt: skip
    return "\n".join(part["text"] for part in parts)


Speak = Callable[[Sequence[Mapping[str, str]]], str]
"""Returns the next line of a conversation given as chat messages."""

REFUSALS = (ValueError, LookupError, TypeError, AttributeError)
"""Errors of a script that the messages of a request may cause."""
MOST_CALLS = 256
"""Calls of a script at the same time, with those whose clients have left."""


class ScriptBackend:
    """The scripted partner of a task, a function of the messages."""

    context_limit: ClassVar[int | None] = None

    def __init__(self, name: str, speak: Speak) -> None:
        self.name, self.speak = name, speak
        self._calls = 0

    async def chunks(self, body: Body, conversation: str) -> AsyncIterator[Chunk]:
        """One chunk with the line; usage counts words."""
        refuse_settings(body, TEXT_ONLY, "a script gives one line of text")
        line = await self._said(deepcopy(body["messages"]))
        words_of_line = len(line.split())
        words = sum(len(str(m.get("content")).split()) for m in body["messages"])
        head = chunk_head(self.name)
        delta = {"role": "assistant", "content": line}
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]}
        yield {**head, "choices": [], "usage": usage_of(words, words_of_line)}

    async def _said(self, messages: Any) -> str:
        """The script's line. RequestError if it fails, or if too many calls have not ended."""
        if self._calls >= MOST_CALLS:
            raise RequestError(f"The script is busy with {self._calls} requests.", status=503)
        loop, said = asyncio.get_running_loop(), asyncio.Future[Any]()

        def ended(result: Any, error: BaseException | None) -> None:
            self._calls -= 1
            if said.cancelled():
                return
            if _is_text(result):
                said.set_result(result)
            elif error is None or isinstance(error, REFUSALS):
                odd = f"its line is no valid text ({type(result).__name__})"
                why = repr(error) if error else odd
                refusal = RequestError(f"The script cannot answer this request: {why}.")
                refusal.__cause__ = error
                said.set_exception(refusal)
            else:
                failure = RuntimeError(f"the script ended with {error!r}")
                failure.__cause__ = error
                said.set_exception(failure)

        def call() -> None:
            result, error = None, None
            try:
                result = self.speak(messages)
            except BaseException as failure:  # noqa: BLE001 - also what ends a program
                error = failure
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(ended, result, error)

        # A daemon: a script that hangs must not keep the server from ending.
        Thread(target=call, daemon=True).start()
        self._calls += 1
        return str(await said)

    async def close(self) -> None:
        """A script holds nothing."""


def _is_text(value: Any) -> bool:
    """Whether this is text without unpaired surrogates."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def chunk_head(model: str, created: int = 0) -> dict[str, Any]:
    """The fields that all chunks of one reply share."""
    name = f"chatcmpl-{uuid4().hex}"
    return {"id": name, "object": "chat.completion.chunk", "created": created, "model": model}


def usage_of(prompt: int, reply: int) -> dict[str, int]:
    """OpenAI's usage object for these numbers of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


async def assembled(chunks: AsyncIterator[Chunk]) -> dict[str, Any]:
    """The chunks of a reply as one `chat.completion`."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in chunks:
        whole |= {key: value for key, value in chunk.items() if value is not None}
        for piece in chunk["choices"]:
            choice = choices.setdefault(
                piece["index"], {"message": {"role": "assistant", "content": ""}}
            )
            _join(choice, {("message" if k == "delta" else k): v for k, v in piece.items()})
    ordered = [choices[number] for number in sorted(choices)]
    return {**whole, "object": "chat.completion", "choices": ordered}


def _join(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add a piece: texts are joined, and lists extended. A tool call comes in one piece."""
    for key, value in piece.items():
        before: Any = whole.get(key)
        if isinstance(value, dict):
            whole[key] = dict(before or {})
            _join(whole[key], value)
        elif key in JOINED and before is not None and value is not None:
            whole[key] = before + value
        elif value is not None or key not in whole:
            whole[key] = value


LISTS = ("tool_calls", "token_ids")
JOINED = ("content", "refusal", "reasoning", "reasoning_content", *LISTS)
"""Texts and lists that come in pieces; `content` is also the list of log-probs."""
