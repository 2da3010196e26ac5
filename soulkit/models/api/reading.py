"""From a reply that was paid for to a Completion, and what of the request it shows was ignored.

What was read is derived anew at every look-up, so a repaired reader also repairs old entries.

A server may take a parameter with HTTP 200 and do nothing about it. What one reply can show is
recorded in `Completion.ignored`: a form that was sent and that the reply does not have (`form`),
and a seed that the server names in its reply and that is another one (`seed`). Whether a seed was
followed cannot be seen from one reply; where the server names none, nothing is said. Log-probs are
never asked of an API.

A reply that ended for its length with fewer tokens than were asked for was ended by a limit of the
server: its context was full, or it gives no longer replies (`overflow_words`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soulkit.keys import masked
from soulkit.models.api.wire import (
    RUNGS,
    WireReply,
    json_or_none,
    parse_reply,
    sent_seed,
)
from soulkit.models.ledger.ledger import LedgerEntry
from soulkit.types import Completion, Form, Sampling, Usage

NEAR_TOKENS, NEAR_SHARE = 8, 64
"""Servers count by rules of their own: a context counts as full when at most so many tokens were
left, and a reply as long as was asked for when it lacks at most this part of it (1/64)."""
_UNFINISHED = ("length", "content_filter", "refusal")
"""Replies that end so show nothing about their form."""


def read_completion(entry: LedgerEntry, sampling: Sampling) -> Completion:
    """The completion in a reply that was asked for with `sampling`. Raises `Unreadable`."""
    answer = parse_reply(entry.reply)
    # Entries of earlier versions may lack the reasoning among their completion tokens.
    whole = answer.completion_tokens == entry.completion_tokens
    usage = Usage(
        calls=1,
        prompt_tokens=entry.prompt_tokens,
        completion_tokens=entry.completion_tokens,
        seconds=entry.seconds,
        cost=entry.cost,
        reasoning_tokens=answer.reasoning_tokens if whole else 0,
    )
    return Completion(
        text=answer.text,
        stop_reason=_ending(answer, entry.completion_tokens, sampling),
        reasoning=answer.reasoning,
        usage=usage,
        dropped=entry.dropped,
        ignored=ignored_fields(entry, answer, sampling),
    )


def _ending(answer: WireReply, tokens: int, sampling: Sampling) -> str:
    """How a reply ended; one that used up its limit was cut, where the server does not say."""
    used_up = answer.stop_reason == "unknown" and tokens >= sampling.max_tokens
    return "length" if used_up else answer.stop_reason


def overflow_words(
    entry: LedgerEntry, reply: Completion, sampling: Sampling, context: int | None, longest: float
) -> str:
    """At which limit of its own the server ended a reply; empty where it did not, or did not count.

    `context` is what the server says that prompt and reply may have together, in tokens; `longest`
    the tokens that it gives any reply, infinite where it did not say.
    """
    if reply.stop_reason != "length":
        return ""
    tokens, asked = parse_reply(entry.reply).completion_tokens, sampling.max_tokens
    if tokens is None or tokens >= asked:
        return ""
    full = context is not None and entry.prompt_tokens + tokens + NEAR_TOKENS >= context
    if not full and (not tokens or asked - tokens <= max(1, asked // NEAR_SHARE)):
        return ""
    limit, way_out = "the server does not say at which limit", "Start it with more context, or ask"
    if full:
        limit = f"the server holds {context} tokens of prompt and reply together"
    elif tokens + NEAR_TOKENS >= longest:
        limit, way_out = f"the server gives no reply of more than {longest:.0f} tokens", "Ask"
    return (
        f"the server cut the reply after {tokens} of the {asked} tokens asked for (prompt: "
        f"{entry.prompt_tokens} tokens); {limit}. {way_out} for shorter replies"
    )


def read_older_completion(entry: LedgerEntry, sampling: Sampling) -> Completion:
    """Of an entry that was there before: earlier versions kept keys that a server had escaped."""
    completion = read_completion(entry, sampling)
    return replace(
        completion,
        text=masked(completion.text),
        reasoning=masked(completion.reasoning),
        stop_reason=masked(completion.stop_reason),
    )


def ignored_fields(entry: LedgerEntry, answer: WireReply, sampling: Sampling) -> tuple[str, ...]:
    """The `Sampling` fields that were sent and that the reply shows were not followed, sorted."""
    form = sampling.form is not None and _lacks_form(answer, sampling.form, entry.dropped)
    seed = "seed" not in entry.dropped and _other_seed(entry, sampling)
    return (*(("form",) if form else ()), *(("seed",) if seed else ()))


def _lacks_form(answer: WireReply, form: Form, dropped: tuple[str, ...]) -> bool:
    """Whether a whole reply is not the object that the server was told to hold it to."""
    rung = next((name for name in RUNGS if f"form:{name}" not in dropped), None)
    if rung is None:
        return False
    return lacks_form(answer.text, answer.stop_reason, form, shaped=rung == RUNGS[0])


def lacks_form(text: str, stop_reason: str, form: Form, *, shaped: bool = True) -> bool:
    """Whether a whole reply is no JSON object, or (`shaped`) none of the form's shape."""
    text = text.rpartition("</think>")[2].strip()
    if stop_reason in _UNFINISHED or not text:
        return False
    value = json_or_none(text)
    if not isinstance(value, dict):
        return True
    return shaped and not _has_shape(value, json_or_none(form.schema))


def _has_shape(value: Mapping[str, Any], schema: Any) -> bool:
    """Whether an object has the keys that its schema asks for, and no others where it says so."""
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    required = schema.get("required", ()) if isinstance(schema, dict) else ()
    closed = isinstance(schema, dict) and schema.get("additionalProperties") is False
    return set(required) <= set(value) and (not closed or set(value) <= set(properties))


def _other_seed(entry: LedgerEntry, sampling: Sampling) -> bool:
    """Whether the reply names the seed that it was sampled with, and it is not the one sent."""
    if sampling.seed is None or '"seed"' not in entry.reply:
        return False
    body = json_or_none(entry.reply)
    choices = body.get("choices") if isinstance(body, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else {}
    places = (body, first) if isinstance(first, dict) else (body,)
    seeds = [place["seed"] for place in places if isinstance(place, dict) and "seed" in place]
    numbers = [seed for seed in seeds if isinstance(seed, int) and not isinstance(seed, bool)]
    return bool(numbers) and sent_seed(sampling.seed, entry.call) not in numbers
