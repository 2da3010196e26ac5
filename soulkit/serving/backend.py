"""What answers the chat requests of a server: a local model, a vLLM server, or a script.

The HTTP application (app.py) checks addresses, keys, limits and the shape of a body, and passes the
body on as it came. A backend answers with OpenAI's `chat.completion.chunk` objects; `BoundBackend`
(bound.py) wraps another one and makes its model a person.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol
from uuid import uuid4

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


Speak = Callable[[Sequence[Mapping[str, str]]], str]
"""Returns the next line of a conversation given as chat messages."""


class ScriptBackend:
    """The scripted partner of a task, a function of the messages."""

    context_limit: ClassVar[int | None] = None

    def __init__(self, name: str, speak: Speak) -> None:
        self.name, self.speak = name, speak

    async def chunks(self, body: Body, conversation: str) -> AsyncIterator[Chunk]:
        """One chunk with the line; usage counts words."""
        try:
            line = self.speak(body["messages"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RequestError(f"The script cannot answer this request: {error!r}.") from error
        words = sum(len(str(m.get("content")).split()) for m in body["messages"])
        head = chunk_head(self.name)
        delta = {"role": "assistant", "content": line}
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]}
        yield {**head, "choices": [], "usage": usage_of(words, len(line.split()))}

    async def close(self) -> None:
        """A script holds nothing."""


def chunk_head(model: str, created: int = 0) -> dict[str, Any]:
    """The fields that all chunks of one reply share."""
    name = f"chatcmpl-{uuid4().hex}"
    return {"id": name, "object": "chat.completion.chunk", "created": created, "model": model}


def usage_of(prompt: int, reply: int) -> dict[str, int]:
    """OpenAI's usage object for these numbers of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}
