"""What answers the chat requests of a server: a local model, a vLLM server, or a script.

The HTTP application (app.py) checks addresses, keys, limits and the shape of a body, and passes the
body on as it came. A backend answers with OpenAI's `chat.completion.chunk` objects; `BoundBackend`
(bound.py) wraps another one and makes its model a person.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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


class ScriptBackend:
    """The scripted partner of a task, a function of the messages."""

    context_limit: ClassVar[int | None] = None

    def __init__(self, name: str, speak: Speak) -> None:
        self.name, self.speak = name, speak

    async def chunks(self, body: Body, conversation: str) -> AsyncIterator[Chunk]:
        """One chunk with the line; usage counts words."""
        refuse_settings(body, TEXT_ONLY, "a script gives one line of text")
        try:
            line = await asyncio.to_thread(self.speak, body["messages"])
            words_of_line = len(line.split())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestError(f"The script cannot answer this request: {error!r}.") from error
        words = sum(len(str(m.get("content")).split()) for m in body["messages"])
        head = chunk_head(self.name)
        delta = {"role": "assistant", "content": line}
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]}
        yield {**head, "choices": [], "usage": usage_of(words, words_of_line)}

    async def close(self) -> None:
        """A script holds nothing."""


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
        elif key in _JOINED and before is not None and value is not None:
            whole[key] = before + value
        elif value is not None or key not in whole:
            whole[key] = value


_JOINED = ("content", "refusal", "reasoning", "reasoning_content", "tool_calls", "token_ids")
"""Texts and lists that come in pieces; `content` is also the list of log-probs."""
