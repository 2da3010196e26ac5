"""The schema question: does a server hold a reply to the form that it is sent?

Some take a schema with HTTP 200 and do nothing about it; every verdict is then as well-formed as
the model happens to be. One reply shows which it is: the only text that the schema allows is a word
that answers nothing and that no model would say by chance. The form is the word alone, not an
object around it, because a model may fill an object's white space for ever.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.models.api import http
from soulkit.models.api.access import Access
from soulkit.models.api.address import PATH
from soulkit.models.api.pool import ClientPool
from soulkit.models.api.wire import (
    Unreadable,
    WireReply,
    json_or_none,
    parameters,
    parse_reply,
    to_messages,
)
from soulkit.types import Call, Form, Sampling, Segment

WORD = "qvx7zk"
FORM = Form("schema_question", json.dumps({"enum": [WORD]}, separators=(",", ":")))
MAX_TOKENS = 32
MAX_BYTES = 1024 * 1024
ASKED_FOR_FORMS = ("judge", "auditor", "coach", "environment", "filter", "drafter")
"""Roles whose replies may be asked for in a form."""


def schema_question() -> tuple[Sequence[Segment], Sampling, Call]:
    """What is asked, how, and as which call: greedily, and without thinking before it."""
    context = [Segment("user", "Which day comes after Monday? Reply with one word.")]
    sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS, seed=0, thinking=False, form=FORM)
    return context, sampling, Call(role="judge", example_id=FORM.name)


def follows_schema(text: str) -> bool | None:
    """Whether a reply's text shows that the schema was followed; None where it says nothing."""
    answer = text.rpartition("</think>")[2].strip()
    if not answer:
        return None
    return bool(json_or_none(answer) == WORD)


def schema_words(holds: bool) -> str:
    """The outcome, as half a sentence about the server."""
    if holds:
        return "it holds replies to a schema"
    return "it holds no reply to a schema: whoever reads them checks their form"


async def ask_schema(
    access: Access, model: str, beside: Mapping[str, Any], pool: ClientPool, timeout_s: float
) -> tuple[bool | None, WireReply | None]:
    """The question, put to a chat server with `beside` among its parameters: whether it follows a
    schema (None: it did not show), and the reply for whoever counts the money."""
    import httpx2 as errors

    context, sampling, call = schema_question()
    body = {
        "model": model, "messages": to_messages(context), **parameters(sampling, call), **beside,
    }  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s), pool.client() as client:
            url = access.url(PATH)
            received = await http.post(client, url, access.headers, body, MAX_BYTES)
    except (TimeoutError, errors.HTTPError, http.TooLong):
        return None, None
    if not 200 <= received.status < 300:
        return None, None  # what it refuses of a form is found out, and said, as for any other
    try:
        reply = parse_reply(received.text)
    except Unreadable:
        return None, None
    return follows_schema(reply.text), reply
