"""Builds the parameters of API requests, and interprets refusals and rate limits.

Pure functions without network: each quirk of a server is handled and tested in one place. For
request bodies and replies see protocol.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from soulkit.models.api.protocol import whole_text
from soulkit.types import Call, Sampling, Segment

_FIELD_OF = {"max_completion_tokens": "max_tokens", "chat_template_kwargs": "thinking"}
"""Parameter names that differ from their `Sampling` field."""
FORMAT = "response_format"
RUNGS = ("json_schema", "json_object")
"""Ways to request a JSON form, best first; after the last one, none is requested."""
_ABOUT_FORM = re.compile(
    r"response[ _]?format|json[ _]?schema|json[ _]?object|json[ _]?mode|structured[ _]?output"
    r"|guided[ _](?:json|decoding)|\bgrammar\b|invalid schema"
    r"|must contain the word .{0,2}json",
    re.IGNORECASE,
)
_UNSUPPORTED = re.compile(
    r"unsupported|(?:not|n't) (?:\w+ )?(?:support|permit|allow|recogni)|no longer supported"
    r"|unknown|unrecogni[sz]ed|unexpected|deprecated|extra_forbidden|extra inputs",
    re.IGNORECASE,
)
_THIS_FORM = re.compile(
    r"invalid (?:json )?schema|schema (?:contains|uses|has)|features?\b|must contain the word",
    re.IGNORECASE,
)
_TOGETHER = re.compile(
    r"\bboth\b|\btogether\b|same time|simultaneous|only one|\beither\b|combin|exclusive"
    r"|conjunction",
    re.IGNORECASE,
)
NEUTRAL: Mapping[str, Any] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Values of sampling parameters that have no effect, sent so that a server does not fill in its
own. Older servers of these kinds do not accept a `top_k` of 0."""
_ALSO_NEUTRAL: Mapping[str, Any] = {"top_k": 0, "repeat_penalty": 1.0}
"""Neutral values by the names of llama.cpp."""
RESERVED = 1024
"""Maximum tokens reserved for a reply. Few replies use their whole limit, and reserving all of it
would let few calls run at once."""
_TOO_LONG = re.compile(
    r"context[ _-]?(?:length|window|size)|prompt is too long|input is too long"
    r"|too many (?:input |prompt )?tokens|reduce the length of",
    re.IGNORECASE,
)
_ABOUT_REPLY = re.compile(r"max_\w*tokens|completion|output tokens|\brequested\b", re.IGNORECASE)
_REPLY_TOO_LONG = re.compile(
    r"(?:max_\w*tokens|(?:completion|output) tokens)[^.]*(?:too (?:large|long|high|big)|at most"
    r"|exceed|less than or equal|greater than|valid range|maximum allowed| > )"
    r"|at most [\d,]+ (?:completion|output) tokens",
    re.IGNORECASE,
)
"""Matches errors about a reply limit that is out of range."""
_CONTEXT = re.compile(r"context (?:length|window|size)\D{0,40}(\d[\d,]*)", re.IGNORECASE)
_PROMPT = re.compile(
    r"(\d[\d,]*) (?:in the (?:messages|prompt|input)|(?:input|prompt) tokens"
    r"|tokens (?:from|in) the (?:input|messages|prompt))",
    re.IGNORECASE,
)
_CAP = re.compile(
    r"(?:at most|less than or equal to|maximum[\w ]{0,40}|\[\s*\d+\s*,| > )\W{0,4}(\d[\d,]*)",
    re.IGNORECASE,
)

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "milli": 1e-3, "s": 1, "m": 60, "h": 3600,
          "d": 86400}  # fmt: skip
_DURATION_PART = re.compile(
    rf"({_NUMBER.pattern}) ?(milli|[nuµm]?s|[mhd])"
    r"(?:sec(?:ond)?s?|ec(?:ond)?s?|in(?:ute)?s?|(?:ou)?rs?|ays?)?(?![a-z])"
)
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern},? ?)+")
_WAIT_IN_WORDS = re.compile(rf"(?:try again|retry)(?: again)? (?:in|after) ({_DURATION.pattern})")
_RESET = re.compile(r"x-rate-?limit-reset(?:-\w+)*|(?:anthropic-)?ratelimit-(?:\w+-)*reset")
"""Headers that say when a limit is reset."""
_UNIX_TIME = 1e9
"""Larger numbers are Unix times, not waits: this would be a wait of 30 years."""


def to_messages(context: Sequence[Segment]) -> list[dict[str, str]]:
    """Role and text per segment, without empty system segments, which some servers refuse."""
    segments = [s for s in context if s.text or s.role != "system"]
    return [{"role": s.role, "content": whole_text(s.text)} for s in segments]


def estimated_tokens(messages: Sequence[Mapping[str, str]], max_tokens: int) -> float:
    """Estimated tokens of a request before the server counts them: four bytes per token, a few
    tokens per message, and the reply."""
    size = sum(len(m["content"].encode("utf-8", "replace")) for m in messages)
    return size / 4 + 4 * len(messages) + min(max_tokens, RESERVED)


def parameters(sampling: Sampling, call: Call) -> dict[str, Any]:
    """The sampling parameters by their API names, without unset ones."""
    wire: dict[str, Any] = {
        "temperature": sampling.temperature,
        # Always sent: some servers fill it in from the model's generation config.
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
    }
    if sampling.top_k:
        wire["top_k"] = sampling.top_k
    if sampling.min_p:
        wire["min_p"] = sampling.min_p
    if sampling.seed is not None:
        wire["seed"] = sent_seed(sampling.seed, call)
    if sampling.stop:
        wire["stop"] = list(sampling.stop)
    if sampling.reasoning_effort is not None:
        wire["reasoning_effort"] = sampling.reasoning_effort
    if sampling.thinking is not None:
        budget = {} if sampling.thinking else {"thinking_budget": 0}
        wire["chat_template_kwargs"] = {"enable_thinking": sampling.thinking} | budget
    if sampling.form is not None:
        # Schema names allow only these characters, at most 64.
        name = re.sub(r"[^\w-]", "_", sampling.form.name, flags=re.ASCII)[:64] or "reply"
        schema = {"name": name, "strict": True, "schema": json.loads(sampling.form.schema)}
        wire[FORMAT] = {"type": RUNGS[0], RUNGS[0]: schema}
    return wire


def sent_seed(seed: int, call: Call) -> int:
    """The seed for the server; rollouts of one example have different seeds."""
    text = json.dumps([seed, call.identity()], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def as_sent(
    sampling: Sampling, beside: Mapping[str, Any], dropped: Collection[str]
) -> dict[str, Any]:
    """The parameters that a recorded call was sent with: `sampling` and `beside` without the
    parameters that the server refused. Seeds differ per call and are not listed; a form is listed
    as its rung."""
    settings = {**parameters(sampling, Call(role="actor", example_id="")), **beside}
    sent = {n: v for n, v in settings.items() if not {n, _FIELD_OF.get(n, n)} & set(dropped)}
    if "seed" in sent:
        sent["seed"] = "one per call"
    if FORMAT in sent:
        rung = next((name for name in RUNGS if f"form:{name}" not in dropped), None)
        sent |= {FORMAT: rung}
    return {name: value for name, value in sent.items() if value is not None}


def without(settings: Mapping[str, Any], refused: set[str]) -> dict[str, Any]:
    """`settings` without the parameters that the server refuses. A refused `max_tokens` is sent
    under its newer name, a refused form one rung lower."""
    sent = {name: value for name, value in settings.items() if name not in refused}
    if "max_tokens" in refused and "max_completion_tokens" not in refused:
        sent["max_completion_tokens"] = settings["max_tokens"]
    if FORMAT in settings:
        # The best rung that is not refused, neither for all forms nor for this one.
        name = settings[FORMAT][RUNGS[0]]["name"]
        rung = next((r for r in RUNGS if not refused & {f"form:{r}", f"form:{r}:{name}"}), None)
        if rung is None:
            del sent[FORMAT]
        elif rung != RUNGS[0]:
            sent[FORMAT] = {"type": rung}
    return sent


def dropped_fields(settings: Mapping[str, Any], sent: Mapping[str, Any]) -> tuple[str, ...]:
    """Sorted `Sampling` fields that were requested but not sent."""
    carried = {_FIELD_OF.get(name, name) for name in sent} | {FORMAT}
    gone = {_FIELD_OF.get(name, name) for name in settings} - carried
    return tuple(sorted(gone | _dropped_rungs(settings, sent)))


def _dropped_rungs(settings: Mapping[str, Any], sent: Mapping[str, Any]) -> set[str]:
    if FORMAT not in settings:
        return set()
    sent_rung = sent[FORMAT]["type"] if FORMAT in sent else None
    return {f"form:{rung}" for rung in RUNGS[: RUNGS.index(sent_rung) if sent_rung else None]}


def too_long(text: str) -> bool:
    """Whether an error's code, type and message say that the prompt exceeds the context."""
    return _TOO_LONG.search(text) is not None


def offered_room(message: str, limit: int, *, overflow: bool) -> int:
    """Reply tokens to request instead of `limit` if the server does not allow such a long reply.

    0 if the message is about something else. `overflow`: whether the message is about the context.
    Uses the token counts in the message, else a limit that it names, else half of `limit`.
    """
    message = message[:2000]
    context, prompt = _CONTEXT.search(message), _PROMPT.search(message)
    if overflow and context and prompt:
        room = _number(context) - _number(prompt)
        return room if 0 < room < limit else 0
    if not (_ABOUT_REPLY if overflow else _REPLY_TOO_LONG).search(message):
        return 0
    caps = [number for match in _CAP.finditer(message) if 0 < (number := _number(match)) < limit]
    return caps[0] if caps and not overflow else limit // 2


def _number(match: re.Match[str]) -> int:
    return int(next(part for part in match.groups() if part).replace(",", "")[:12])


def refused_name(code: str, param: str, message: str, sent: Mapping[str, Any]) -> str:
    """The parameter that the server refuses; empty if the error is about something else.

    A value out of range also names its parameter but is the caller's mistake, and dropping the
    parameter would hide it. The message must therefore say that it is not supported. There are two
    exceptions: forms, since a simpler request fixes any problem with them, and neutral values,
    which the user did not request and some servers reject (a `top_p` of 1, or one together with a
    temperature).
    """
    neutral = _neutral_name(param, message, sent)
    if neutral:
        return neutral
    # `param` may be a path: `body.seed`, `chat_template_kwargs.enable_thinking`.
    named = next((name for name in re.findall(r"\w+", param) if name in sent), "")
    about_form = FORMAT in sent and _ABOUT_FORM.search(f"{code} {param} {message}")
    if about_form and named in ("", FORMAT):
        return FORMAT
    if not _UNSUPPORTED.search(f"{code} {message}"):
        return ""
    if param:
        return named
    return next(iter(_places(message, sent)), "")


def _neutral_name(param: str, message: str, sent: Mapping[str, Any]) -> str:
    """The parameter that the error is about, if it has its neutral value; else empty."""
    words = (*NEUTRAL.items(), *_ALSO_NEUTRAL.items())
    idle = {name for name, value in words if name in sent and sent[name] == value}
    # Ignore a quoted request (`"top_p": 1.0`), which names every parameter.
    places = _places(re.sub(r"""["']\w+["']\s*:""", "", message), sent)
    first = [name for name in re.findall(r"\w+", param) if name in sent] if param else places[:1]
    if first and first[0] in idle:
        return first[0]
    others = [name for name in places if name in idle]
    return others[0] if first and others and _TOGETHER.search(message) else ""


def _places(message: str, sent: Mapping[str, Any]) -> list[str]:
    places = {name: re.search(rf"\b{name}\b", message) for name in sent}
    return sorted(
        (name for name, match in places.items() if match),
        key=lambda name: match.start() if (match := places[name]) else 0,
    )


def refused_rung(
    code: str, message: str, settings: Mapping[str, Any], sent: Mapping[str, Any]
) -> str:
    """The entry to remember for a refused form: `form:RUNG` if the server does not support the
    rung, `form:RUNG:NAME` if it only cannot enforce the schema of this form."""
    rung = f"form:{sent[FORMAT]['type']}"
    everywhere = _UNSUPPORTED.search(f"{code} {message}") and not _THIS_FORM.search(message)
    return rung if everywhere else f"{rung}:{settings[FORMAT][RUNGS[0]]['name']}"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds from `retry-after-ms` or `Retry-After` (number or date); None without either."""
    milliseconds = headers.get("retry-after-ms", "").strip()[:80]
    if _NUMBER.fullmatch(milliseconds):
        return float(milliseconds) / 1000
    return _wait_of(headers.get("retry-after", ""))


def rate_limit_wait(headers: Mapping[str, str], message: str = "") -> float | None:
    """Seconds that a 429 asks to wait; None if it states no wait above 0.

    In order: `retry-after-ms` and `Retry-After`, the reset headers, the message ("try again in
    6m0s"). If there are several reset headers, the longest one whose limit is used up (`remaining`
    is 0 or less) applies; if none is used up, the shortest.

    Sources: the rate-limit pages of OpenAI, Azure OpenAI, Anthropic, Groq and OpenRouter.
    """
    in_words = _WAIT_IN_WORDS.search(message.lower())
    waits = (
        retry_after(headers),
        _reset_wait(headers),
        _wait_of(in_words[1]) if in_words else None,
    )
    return next((wait for wait in waits if wait), None)


def _reset_wait(headers: Mapping[str, str]) -> float | None:
    names = [name for name in headers if _RESET.fullmatch(name)]
    waits = {name: wait for name in names if (wait := _wait_of(headers[name]))}
    left = {name: headers.get(name.replace("reset", "remaining"), "").strip() for name in waits}
    used_up = [waits[n] for n, value in left.items() if re.fullmatch(r"-\d+|0+(?:\.0+)?", value)]
    return max(used_up) if used_up else min(waits.values(), default=None)


def _wait_of(value: str) -> float | None:
    """Seconds from now (0 for the past), from a number of seconds, a Unix time in seconds or
    milliseconds, a duration (`6m0s`, `20ms`) or a date. None for anything else."""
    value, now = value.strip()[:80], datetime.now(UTC)
    if _NUMBER.fullmatch(value):
        number = float(value)
        if number < _UNIX_TIME:
            return number
        return max(0.0, (number / 1000 if number > 100 * _UNIX_TIME else number) - now.timestamp())
    if _DURATION.fullmatch(value):
        return sum(float(n) * _UNITS[unit] for n, unit in _DURATION_PART.findall(value))
    try:
        iso = re.match(r"\d{4}-\d\d-\d\d", value)
        when = datetime.fromisoformat(value) if iso else parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - now).total_seconds())
