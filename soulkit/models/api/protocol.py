"""API protocols: the path of requests, their bodies, and how replies are parsed.

`CHAT` is the only protocol so far: chat completions, as in OpenAI, vLLM and most other servers. To
add one, subclass `ApiProtocol` and add an instance to PROTOCOLS.

Servers agree on little beyond `choices[0].message`, so parsing is lenient. A reply that cannot be
parsed raises `Unreadable` instead of becoming an empty answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soulkit.api_keys import holds_key, masked, masked_json
from soulkit.errors import SoulError
from soulkit.parse import json_or_none

_USAGE = ("usage", "usageMetadata", "usage_metadata")
"""Keys of a reply that may hold its token counts."""
_DETAILS = (
    "completion_tokens_details", "output_tokens_details", "prompt_tokens_details",
    "input_tokens_details",
)  # fmt: skip
"""Parts of the usage in which some servers put counts."""
_MOST_TOKENS = 10**12
"""Larger token counts are ignored; the ledger cannot store arbitrary integers."""
_FIELD_CHARS = 220
"""Maximum characters of an error's code or type."""
ERROR_CHARS = 4000
"""Characters kept from the start and from the end of an error text; patterns see both."""
_STOPS = {
    "max_tokens": "length", "model_length": "length", "max_output_tokens": "length",
    "safety": "content_filter",
}  # fmt: skip
"""Other names for a reply that was truncated or withheld."""


@dataclass(frozen=True, slots=True)
class WireReply:
    """A parsed reply; token counts are None if the server gave none."""

    text: str
    reasoning: str
    stop_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    """Tokens billed as output: the reply and its reasoning."""
    cached_tokens: int = 0
    """Prompt tokens that the server had cached."""
    reasoning_tokens: int = 0
    """Reasoning tokens among the completion tokens, as far as known."""


class Unreadable(SoulError):
    """A reply with status 200 that contains no completion."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """The parsed body of an error."""

    message: str
    code: str = ""
    kind: str = ""
    param: str = ""
    """The parameter at fault, if the server names one."""


class ApiProtocol:
    """Chat completions; also reads replies of plain completions. Other protocols are subclasses."""

    path = "/chat/completions"
    """Path of requests below the base URL."""

    def body(
        self, model: str, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The body of one request. `parameters` use the names of `wire.parameters`."""
        return {"model": model, "messages": messages, **parameters}

    def parse(self, raw: str) -> WireReply:
        """Parse a reply. Raises `Unreadable` if it contains no completion."""
        body = json_or_none(raw)
        if not isinstance(body, dict):
            raise Unreadable("empty body" if not raw.strip() else "no JSON object")
        choices = body.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise Unreadable("no choices")
        message = choices[0].get("message")
        if isinstance(choices[0].get("text"), str):  # plain completion of prompt ids
            message = {"content": choices[0]["text"]}
        if not isinstance(message, dict):
            raise Unreadable("no message")
        prompt_tokens, completion_tokens, reasoning_tokens, cached_tokens = _counts(body)
        content = message.get("content")
        text, declined = _text(content), _text(message.get("refusal")) or _text(content, "refusal")
        stop = _text(choices[0].get("finish_reason"))
        stop = _STOPS.get(stop.lower(), stop)
        return WireReply(
            # A refusal is what the model said to its user: the actor's words, not an error.
            text=text or declined,
            reasoning=_text(message.get("reasoning_content")) or _text(message.get("reasoning")),
            stop_reason="refusal" if declined and not text else stop or "unknown",
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
            reasoning_tokens=reasoning_tokens,
        )

    def with_words(self, raw: str, text: str, reasoning: str) -> str:
        """The raw reply with its text and reasoning replaced."""
        body = json.loads(raw)
        body["choices"][0]["message"] |= {"content": text, "reasoning_content": reasoning}
        return json.dumps(body)

    def error(self, body: object) -> ApiError:
        """Parse an error, given as a JSON value or as plain text."""
        if isinstance(body, list) and len(body) == 1:  # Google
            body = body[0]
        if isinstance(body, dict):
            body = body.get("error", body)
        fields: Mapping[str, Any] = body if isinstance(body, dict) else {}
        code, kind, param = (str(fields.get(name) or "") for name in ("code", "type", "param"))
        return ApiError(error_message(body), code[:_FIELD_CHARS], kind[:_FIELD_CHARS], param)


CHAT = ApiProtocol()
PROTOCOLS = (CHAT,)


def parse_reply(raw: str) -> WireReply:
    """Parse a stored reply, trying every protocol. Raises `Unreadable`."""
    problem = Unreadable("no protocol")
    for protocol in PROTOCOLS:
        try:
            return protocol.parse(raw)
        except Unreadable as error:
            problem = error
    raise problem


def safe_reply(raw: str, protocol: ApiProtocol = CHAT) -> tuple[str, WireReply]:
    """(reply with all keys masked, parsed reply). Raises `Unreadable`."""
    raw = masked_json(raw)
    answer = protocol.parse(raw)
    if holds_key(answer.text) or holds_key(answer.reasoning):  # a key split over several parts
        raw = protocol.with_words(raw, masked(answer.text), masked(answer.reasoning))
        answer = protocol.parse(raw)
    return raw, answer


def error_message(body: object) -> str:
    """The message in an error body of any shape. Only the middle of a long message is cut: servers
    that quote the prompt give the reason before or after it."""
    message = body.get("message") if isinstance(body, dict) else None
    if isinstance(body, str):
        text = body.strip()
    else:
        text = str(message) if message else json.dumps(body) if body else ""
    if len(text) > 2 * ERROR_CHARS:
        text = f"{text[:ERROR_CHARS]} ... {text[-ERROR_CHARS:]}"
    return text or "no error body"


def _counts(body: Mapping[str, Any]) -> tuple[int | None, int | None, int, int]:
    """Billed tokens: prompt, completion with reasoning, reasoning alone, cached prompt tokens.

    Most servers count reasoning within the completion. Google and xAI leave it out: then the total
    exceeds prompt plus completion, or the reasoning exceeds the completion. Google's own names
    (`thoughtsTokenCount`) mean reasoning that is left out, unless a total says otherwise.
    Anthropic's own counts leave cached tokens out of the prompt.

    Sources: the usage pages of OpenAI, Google (Gemini API), xAI, Anthropic, DeepSeek, OpenRouter.
    """
    usage: Mapping[str, Any] = next(
        (body[name] for name in _USAGE if isinstance(body.get(name), dict)), {}
    )
    places = [usage, *(part for name in _DETAILS if isinstance(part := usage.get(name), dict))]

    def most(*names: str) -> int | None:
        found = [_count(place.get(name)) for place in places for name in names]
        return max((count for count in found if count is not None), default=None)

    prompt = most("prompt_tokens", "input_tokens", "promptTokenCount", "prompt_token_count")
    reply = most(
        "completion_tokens", "output_tokens", "candidatesTokenCount", "candidates_token_count"
    )
    total = most("total_tokens", "totalTokenCount", "total_token_count")
    thoughts = most("thoughtsTokenCount", "thoughts_token_count") or 0
    reasoning = max(thoughts, most("reasoning_tokens") or 0)
    cached = most("cached_tokens", "prompt_cache_hit_tokens", "cachedContentTokenCount") or 0
    read, written = (most(f"cache_{kind}_input_tokens") or 0 for kind in ("read", "creation"))
    if prompt is None:
        return None, reply, reasoning, 0
    if reply is None:  # the reply is only reasoning
        reply = None if total is None else max(0, total - prompt)
        return prompt, reply, min(reasoning, reply or 0), cached
    beyond = 0 if total is None else total - prompt - reply
    if read + written and ("input_tokens" in usage if total is None else beyond >= read + written):
        prompt, cached = prompt + read + written, max(cached, read)
        beyond -= read + written
    if reasoning > reply or (thoughts and total is None):
        beyond = max(beyond, reasoning)
    return prompt, reply + max(0, beyond), max(reasoning, beyond), cached


def _text(content: object, kind: str = "text") -> str:
    """The text of a message: a string, a list of typed parts (of which `kind`), or null."""
    if isinstance(content, list):
        return "".join(_text(part.get(kind)) for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        return ""
    # A character cut at the length limit arrives as half of a surrogate pair.
    return whole_text(content)


def whole_text(text: str) -> str:
    """`text` without lone surrogates, which files and requests cannot contain."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_TOKENS:
        return None
    return value
