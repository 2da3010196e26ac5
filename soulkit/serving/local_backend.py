"""Answers chat requests with a model on this machine, token by token.

Settings that this server does not support are refused by name if their value would change the
reply. Sampling defaults are neutral: the model's generation_config is never used. Random numbers
depend on the prompt and on `seed`, so equal requests get equal replies, up to rounding.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from soulkit.errors import ContextOverflow, ModelLoadError, ProviderError
from soulkit.models.codec import reasoning_and_text
from soulkit.models.local.chat_template import END_OF_THINKING, START_OF_THINKING
from soulkit.serving.backend import Body, Chunk, RequestError, chunk_head, text_of, usage_of
from soulkit.types import MAX_TOKENS, Call, Sampling, Segment

if TYPE_CHECKING:
    from soulkit.models.codec import Codec
    from soulkit.models.local.continuous import Row, SchemaRule
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
MOST_STOPS, LONGEST_STOP = 16, 256
BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token that is one byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A body as prompt and settings."""

    ids: list[int]
    sampling: Sampling
    room: int
    """Maximum tokens of the reply: what was requested, or what the context leaves."""
    choices: int
    logprobs: bool
    streams: bool
    schema: Any
    """JSON schema that the reply must follow; None: any text."""

    @classmethod
    def read(cls, body: Body, codec: Codec) -> ChatRequest:
        """RequestError for wrong values, unsupported settings and messages that do not fit."""
        for name, value in body.items():
            supported = name in NO_EFFECT or value is None or value in NEUTRAL.get(name, ())
            if not supported:
                raise _wrong(name, f"{name} = {_short(value)} is not supported.")
        numbers = {name: _number(body, name) for name in NUMBERS}
        limit, logprobs = numbers["max_tokens"], body.get("logprobs")
        if limit and numbers["max_completion_tokens"] not in (None, limit):
            raise _wrong("max_tokens", "max_tokens and max_completion_tokens differ. Send one.")
        if logprobs not in (None, True, False):
            raise _wrong("logprobs", f"logprobs must be true or false, not {_short(logprobs)}.")
        sampling = Sampling.first_of(
            {"stop": _stop(body.get("stop")), "thinking": _thinking(body),
             "top_k": max(0, numbers["top_k"] or 0)},
            {name: numbers[name] for name in ("temperature", "top_p", "min_p", "seed")},
        )  # fmt: skip
        if "thinking" in codec.dropped(sampling):
            raise _wrong("chat_template_kwargs.enable_thinking",
                         "The model's chat template cannot turn reasoning on or off.")  # fmt: skip
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _wrong("messages", "messages must be a list of at least one message.")
        context = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
        whole = codec.context_limit
        if whole and max(len(context), sum(len(s.text) for s in context) / codec.longest) > whole:
            raise _too_long(whole, "are longer")  # known before a template takes minutes and GB
        try:
            "".join(one.text for one in context).encode()  # fails for a lone surrogate
            ids = codec.prompt_ids(context, sampling.thinking)
        except (ModelLoadError, UnicodeError) as error:
            raise _wrong("messages", f"The messages cannot be a prompt: {error}") from error
        room = _room(codec, len(ids), limit or numbers["max_completion_tokens"])
        return cls(ids=ids, sampling=sampling, room=room, choices=numbers["n"] or 1,
                   logprobs=bool(logprobs), streams=bool(body.get("stream")),
                   schema=_schema(body.get("response_format")))  # fmt: skip


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
    strings = value or [] if not isinstance(value, str) else [value]
    good = isinstance(strings, list) and all(isinstance(s, str) and s for s in strings)
    if not good or len(strings) > MOST_STOPS or max(map(len, strings), default=0) > LONGEST_STOP:
        raise _wrong("stop", f"stop must be a string or a list of at most {MOST_STOPS} strings, "
                     f"each of 1 to {LONGEST_STOP} characters.")  # fmt: skip
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


def _schema(form: Any) -> Any:
    kind = form.get("type") if isinstance(form, dict) else form
    if kind in (None, "text"):
        return None
    inside = form.get("json_schema") if kind == "json_schema" else {"schema": {"type": "object"}}
    if kind not in ("json_schema", "json_object") or not isinstance(inside, dict):
        raise _wrong("response_format", f"response_format {_short(form)} is not supported.")
    schema = inside.get("schema")
    if not isinstance(schema, dict | bool):
        raise _wrong("response_format", "response_format.json_schema.schema must be a JSON schema.")
    # llguidance needs an object.
    return schema if isinstance(schema, dict) else {} if schema else {"not": {}}


def _message(message: Any, at: str) -> Segment:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{at}.role", f"{at}.role must be one of {', '.join(ROLES)}, not "
                     f"{_short(role)}.")  # fmt: skip
    for name in ("tool_calls", "function_call", "audio", "refusal"):
        if message.get(name):
            raise _wrong(f"{at}.{name}", f"{at}.{name} is not supported.")
    return Segment(ROLES[role], text_of(message, at))


def _room(codec: Codec, prompt: int, limit: int | None) -> int:
    """Maximum tokens of the reply. Without a limit, a reply may fill the context."""
    whole = codec.context_limit
    if limit is None:
        limit = MAX_TOKENS if whole is None else max(1, whole - prompt)
    try:
        return codec.room(prompt, limit)
    except ContextOverflow as error:
        raise _too_long(whole, f"have {prompt} tokens and the reply needs some more") from error


def _too_long(whole: int | None, how: str) -> RequestError:
    message = f"This model's maximum context length is {whole} tokens, but the messages {how}."
    return _wrong("messages", message, "context_length_exceeded")


def _failure(error: Exception) -> RequestError:
    from soulkit.models.local.continuous import SchemaTooComplex

    if isinstance(error, ProviderError):  # closed
        return RequestError(error.detail, status=503)
    if isinstance(error, SchemaTooComplex):
        return _wrong("response_format", f"The schema cannot be enforced: {error}")
    return RequestError(f"The model failed: {type(error).__name__}: {error}", status=500)


class ReplyStream:
    """Converts the tokens of a row into the deltas of one choice.

    Text is held back while a later token may change it: incomplete characters, white space, and
    what may become a stop string or a reasoning tag.
    """

    def __init__(self, row: Row, codec: Codec, *, index: int, logprobs: bool) -> None:
        self.row, self.codec, self.index, self.logprobs = row, codec, index, logprobs
        self.marks = (*row.sampling.stop, START_OF_THINKING, END_OF_THINKING)
        self.opens = codec.opens_thinking(row.prompt)
        self.sent: tuple[str, str] | None = None
        """Reasoning and text so far; None before the first delta."""
        self.count = 0
        """Number of tokens whose log-probs have been sent."""
        self.text, self.start, self.skip = "", 0, 0
        """Text that no token changes any more, and the first of the ids that are decoded again,
        the first `skip` characters of which are part of it."""

    def choice(self) -> dict[str, Any] | None:
        """The next entry of `choices`; None if there is nothing to send."""
        row, finish = self.row, None
        if row.done:  # looked at before the ids, which the worker thread appends
            reply = self.codec.completion(row.prompt, row.ids, (), room=len(row.uniform),
                                          stop=row.sampling.stop)  # fmt: skip
            by_rule = row.rule is not None and len(row.ids) < len(row.uniform)
            parts, finish = (reply.reasoning, reply.text), "stop" if by_rule else reply.stop_reason
        else:
            parts = reasoning_and_text(self._settled(list(row.ids)), self.opens)
        delta = {"role": "assistant", "content": ""} if self.sent is None else {}
        for name, part, sent in zip(("reasoning_content", "content"), parts, self.sent or ("", ""),
                                    strict=True):  # fmt: skip
            if len(part) > len(sent):
                delta[name] = part[len(sent) :]
        notes = self._logprobs() if self.logprobs else []
        if not (any(delta.values()) or notes or finish):
            return None
        self.sent = parts
        choice: dict[str, Any] = {"index": self.index, "delta": delta, "finish_reason": finish}
        return choice | ({"logprobs": {"content": notes}} if self.logprobs else {})

    def _settled(self, ids: list[int]) -> str:
        # Further bytes may turn a valid character into an invalid one.
        while ids and BYTE.fullmatch(self.codec.tokenizer.convert_ids_to_tokens(ids[-1]) or ""):
            ids.pop()
        window = self.codec.text(ids[self.start :])
        text = self.text + window[self.skip :]
        if len(ids) - self.start > 32:
            start = len(ids) - 16
            tail, head = (self.codec.text(ids[start:end]) for end in (None, start + 8))
            if window.endswith(tail) and tail.startswith(head) and head == head.rstrip("\ufffd \n"):
                self.text, self.start, self.skip = text.removesuffix(tail) + head, start, len(head)
        text = text[: min((at for s in self.row.sampling.stop if (at := text.find(s)) >= 0),
                          default=None)].rstrip("\ufffd \t\r\n")  # fmt: skip
        held = (n for mark in self.marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
        return text[: len(text) - max(held, default=0)]

    def _logprobs(self) -> list[dict[str, Any]]:
        new = slice(self.count, len(self.row.logprobs))
        self.count = new.stop
        pairs = zip(self.row.ids[new], self.row.logprobs[new], strict=True)
        words = [(self.codec.tokenizer.decode([i]), logprob) for i, logprob in pairs
                 if i not in self.codec.end_ids]  # fmt: skip
        return [{"token": word, "logprob": logprob, "bytes": list(word.encode()),
                 "top_logprobs": []} for word, logprob in words]  # fmt: skip


class LocalBackend:
    """A `ChatBackend` of a local model, which is closed with it."""

    def __init__(self, model: LocalModel) -> None:
        from soulkit.models.local.continuous import ContinuousBatching

        self.model, self.name, self.engine = model, model.name, ContinuousBatching(model)
        self.context_limit = model.context_limit

    async def chunks(self, body: Body, conversation: str) -> AsyncIterator[Chunk]:
        """See `ChatBackend`."""
        # In a thread, since long prompts and schemas take a while.
        request, rows = await asyncio.to_thread(self._rows, body)
        streams = [ReplyStream(row, self.model.codec, index=i, logprobs=request.logprobs)
                   for i, row in enumerate(rows)]  # fmt: skip
        head = chunk_head(self.name, int(time.time()))
        try:
            self.engine.submit(rows)
            while streams:
                await rows[0].changed.wait()
                rows[0].changed.clear()
                for stream in list(streams):
                    choice = stream.choice()
                    if stream.row.error is not None:
                        raise _failure(stream.row.error)
                    if choice is not None:
                        if choice["finish_reason"]:
                            streams.remove(stream)
                        yield {**head, "choices": [choice]}
        except ProviderError as error:
            raise _failure(error) from error
        finally:
            for row in rows:
                row.cancelled = True
        usage = usage_of(len(request.ids), sum(len(row.ids) for row in rows))
        yield {**head, "choices": [], "usage": usage}

    def _rows(self, body: Body) -> tuple[ChatRequest, list[Row]]:
        from soulkit.models.local.continuous import Row
        from soulkit.models.local.draw import uniforms

        request = ChatRequest.read(body, self.model.codec)
        prompt = hashlib.sha256(f"{self.name}{request.ids}".encode()).hexdigest()
        changed, seed = asyncio.Event(), request.sampling.seed
        return request, [
            Row(
                request.ids, request.sampling,
                uniforms(seed, Call(role="actor", example_id=prompt, rollout=i), request.room),
                streams=request.streams, rule=self._rule(request), changed=changed,
            )
            for i in range(request.choices)
        ]  # fmt: skip

    def _rule(self, request: ChatRequest) -> SchemaRule | None:
        if request.schema is None:
            return None
        from llguidance import LLMatcher

        from soulkit.models.local.continuous import SchemaRule

        # Without a limit, a model may write white space for ever.
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(request.schema), overrides={"whitespace_pattern": "[ \\n]{0,16}"}
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            problem = matcher.get_error().partition("\n")[0]
            raise _wrong("response_format", f"The schema cannot be enforced: {problem}")
        codec = self.model.codec
        return SchemaRule(matcher, codec, thinks=codec.opens_thinking(request.ids))

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer
        from tokenizers import normalizers, pre_tokenizers

        codec, size = self.model.codec, self.model.model.config.get_text_config().vocab_size
        ends, probe = sorted(codec.end_ids), '{"name": ["a", 1]}'
        tokenizer: Any = from_tokenizer(codec.tokenizer, size, ends)
        if tokenizer.decode_str(tokenizer.tokenize_str(probe)) != probe:
            # It changes spaces, so llguidance must not ask it how a fixed text is written.
            plain = deepcopy(codec.tokenizer)
            plain.backend_tokenizer.normalizer = normalizers.Sequence([])
            plain.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
            tokenizer = from_tokenizer(plain, size, ends)
        return tokenizer

    async def close(self) -> None:
        """Stop generating and free the model."""
        self.engine.close()
        await self.model.close()
