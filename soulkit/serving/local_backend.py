"""Answers chat requests with a model on this machine.

Settings that this server does not support are refused by name if their value would change the
reply. Sampling defaults are neutral: the model's generation_config is never used. Random numbers
depend on the prompt and on `seed`, so equal requests get equal replies, up to rounding.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from soulkit.errors import CallError, ContextOverflow, ModelLoadError
from soulkit.serving.backend import Body, Chunk, RequestError, chunk_head, usage_of
from soulkit.types import MAX_TOKENS, Call, Sampling, Segment

if TYPE_CHECKING:
    from soulkit.models.codec import Codec
    from soulkit.models.local.sampler import LocalModel

ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
}  # fmt: skip
NUMBERS: Mapping[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 100), "top_p": (float, 1e-6, 1), "min_p": (float, 0, 1),
    "top_k": (int, -1, 2**31), "seed": (int, -(2**63), 2**64), "n": (int, 1, 128),
    "max_tokens": (int, 1, 2**31), "max_completion_tokens": (int, 1, 2**31),
}  # fmt: skip
"""Name of a setting → its type, least and greatest value."""
NO_EFFECT = frozenset({
    "model", "messages", "stream", "stream_options", "user", "metadata", "store", "service_tier",
    "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",
    "parallel_tool_calls", "request_id", "priority", "logprobs", "stop", "response_format",
    "chat_template_kwargs", *NUMBERS,
})  # fmt: skip
"""Settings that are read elsewhere, and those that do not change the reply."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "repeat_penalty": (1,), "length_penalty": (1,), "typical_p": (1,), "min_tokens": (0,),
    "best_of": (1,), "top_logprobs": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "modalities": (["text"],),
    "use_beam_search": (False,), "ignore_eos": (False,), "echo": (False,), "verbosity": ("medium",),
    "add_generation_prompt": (True,), "continue_final_message": (False,),
    "skip_special_tokens": (True,), "include_reasoning": (True,),
}  # fmt: skip
"""Settings that are not supported → the values that leave the reply as it is; null always does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A body as prompt and settings."""

    context: tuple[Segment, ...]
    ids: list[int]
    sampling: Sampling
    room: int
    """Maximum tokens of the reply: what was requested, or what the context leaves."""
    choices: int
    logprobs: bool

    @classmethod
    def read(cls, body: Body, codec: Codec) -> ChatRequest:
        """RequestError for wrong values, unsupported settings and messages that do not fit."""
        for name, value in body.items():
            supported = name in NO_EFFECT or value is None or value in NEUTRAL.get(name, ())
            if not supported:
                raise _wrong(name, f"{name} = {_short(value)} is not supported.")
        numbers = {name: _number(body, name) for name in NUMBERS}
        limits = {numbers["max_tokens"], numbers["max_completion_tokens"]} - {None}
        if len(limits) > 1:
            raise _wrong("max_tokens", "max_tokens and max_completion_tokens differ. Send one.")
        logprobs = body.get("logprobs")
        if logprobs not in (None, True, False):
            raise _wrong("logprobs", f"logprobs must be true or false, not {_short(logprobs)}.")
        sampling = Sampling.first_of(
            {"max_tokens": next(iter(limits), None), "stop": _stop(body.get("stop")),
             "thinking": _thinking(body), "top_k": max(0, numbers["top_k"] or 0)},
            {name: numbers[name] for name in ("temperature", "top_p", "min_p", "seed")},
        )  # fmt: skip
        if "thinking" in codec.dropped(sampling):
            raise _wrong("chat_template_kwargs.enable_thinking",
                         "The model's chat template cannot turn reasoning on or off.")  # fmt: skip
        context = _messages(body.get("messages"))
        try:
            ids = codec.prompt_ids(context, sampling.thinking)
        except ModelLoadError as error:
            raise _wrong(
                "messages", f"The chat template refuses these messages: {error}"
            ) from error
        return cls(context=context, ids=ids, sampling=sampling, choices=numbers["n"] or 1,
                   room=_room(codec, len(ids), next(iter(limits), None)),
                   logprobs=bool(logprobs))  # fmt: skip


def _wrong(param: str, message: str, code: str | None = None) -> RequestError:
    return RequestError(message, param=param, code=code)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _number(body: Body, name: str) -> Any:
    value, (kind, low, high) = body.get(name), NUMBERS[name]
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or kind(value) != value:
        what = "an integer" if kind is int else "a number"
        raise _wrong(name, f"{name} must be {what} from {low} to {high}, not {_short(value)}.")
    return kind(value)


def _stop(value: Any) -> tuple[str, ...] | None:
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise _wrong("stop", "stop must be a string or a list of strings, none of them empty.")
    return tuple(strings) or None


def _thinking(body: Body) -> bool | None:
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise _wrong("chat_template_kwargs", "chat_template_kwargs must be an object.")
    for name in options.keys() - {"enable_thinking", "thinking_budget"}:
        raise _wrong(f"chat_template_kwargs.{name}", f"The option {_short(name)} is not supported.")
    thinking, budget = options.get("enable_thinking"), options.get("thinking_budget")
    if thinking not in (None, True, False) or (budget is not None and (thinking or budget != 0)):
        raise _wrong("chat_template_kwargs", "Only enable_thinking can be set: true or false.")
    return thinking


def _messages(messages: Any) -> tuple[Segment, ...]:
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "messages must be a list of at least one message.")
    return tuple(_message(message, f"messages[{at}]") for at, message in enumerate(messages))


def _message(message: Any, at: str) -> Segment:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{at}.role", f"{at}.role must be one of {', '.join(ROLES)}, not "
                     f"{_short(role)}.")  # fmt: skip
    for name in ("tool_calls", "function_call", "audio", "refusal"):
        if message.get(name):
            raise _wrong(f"{at}.{name}", f"{at}.{name} is not supported.")
    content = message.get("content")
    content = "" if content is None else content
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise _wrong(f"{at}.content", f"Part {number} of {at}.content is no text.")
    return Segment(ROLES[role], "\n".join(part["text"] for part in parts))


def _room(codec: Codec, prompt: int, limit: int | None) -> int:
    """Maximum tokens of the reply. Without a limit, a reply may fill the context."""
    whole = codec.context_limit
    if limit is None:
        limit = MAX_TOKENS if whole is None else max(1, whole - prompt)
    try:
        return codec.room(prompt, limit)
    except ContextOverflow as error:
        message = (f"This model's maximum context length is {whole} tokens, but the messages have "
                   f"{prompt} tokens and the reply needs some more.")  # fmt: skip
        raise _wrong("messages", message, "context_length_exceeded") from error


class LocalBackend:
    """A `ChatBackend` of a local model. The model is closed with it."""

    def __init__(self, model: LocalModel) -> None:
        self.model, self.name = model, model.name

    @property
    def context_limit(self) -> int | None:
        """Maximum tokens of prompt and reply together; None: unknown."""
        return self.model.context_limit

    async def chunks(self, body: Body, conversation: str) -> AsyncIterator[Chunk]:
        """See `ChatBackend`."""
        request = ChatRequest.read(body, self.model.codec)
        digest = hashlib.sha256(f"{self.name}{request.ids}".encode()).hexdigest()
        calls = [Call(role="actor", example_id=digest, rollout=i) for i in range(request.choices)]
        head = chunk_head(self.name, int(time.time()))
        try:
            replies = await asyncio.gather(*(
                self.model.complete(request.context, request.sampling, call) for call in calls
            ))  # fmt: skip
        except CallError as error:
            raise RequestError(error.detail, status=500) from error
        for index, reply in enumerate(replies):
            delta = {"role": "assistant", "content": reply.text}
            if reply.reasoning:
                delta["reasoning_content"] = reply.reasoning
            choice = {"index": index, "delta": delta, "finish_reason": reply.stop_reason}
            yield {**head, "choices": [choice]}
        tokens = sum(len(reply.token_ids) for reply in replies)
        yield {**head, "choices": [], "usage": usage_of(len(request.ids), tokens)}

    async def close(self) -> None:
        """Stop generating and free the model."""
        await self.model.close()
