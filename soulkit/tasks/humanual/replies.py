"""What a row of Humanual and a reply to it say: a text from messages, a comment from its tag.

A prompt is a text, a list of {"role", "content"}, or the JSON text of such a list. Under `paper`
the speakers of several messages are named; `reference` joins what they said and drops who said it.

    [{"role": "poster", "content": "Is it me?"}, {"role": "mara", "content": "no"}]
    → "poster: Is it me?\\n\\nmara: no"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from soulkit.data.literals import structure
from soulkit.judge.verdict import spoken
from soulkit.types import Protocol

_OPENING = re.compile(r"<\s*response\s*>", re.IGNORECASE)
_CLOSING = re.compile(r"<\s*/\s*response\s*>", re.IGNORECASE)


def context_text(prompt: Any, protocol: Protocol) -> str:
    """What the person saw, as text; empty for nothing that could be read."""
    messages = structure(prompt)
    if isinstance(messages, list | tuple):
        objects = [m if isinstance(m, Mapping) else {"content": m} for m in messages]
        return _joined(objects, protocol)
    if protocol == "paper" and isinstance(messages, Mapping):
        return _joined([messages], protocol)
    return "" if prompt is None else str(prompt)


def _joined(messages: list[Mapping[str, Any]], protocol: Protocol) -> str:
    texts = [str(message.get("content") or "") for message in messages]
    if protocol == "reference":
        return "\n".join(texts)
    pairs = [
        (str(m.get("role") or "user"), text.strip())
        for m, text in zip(messages, texts, strict=True)
    ]
    pairs = [(role, text) for role, text in pairs if text]
    if len(pairs) == 1:
        return pairs[0][1]
    return "\n\n".join(f"{role}: {text}" for role, text in pairs)


def field_text(text: str | None, field: str) -> str:
    """The published reading: what stands in the first tag of that name, else the whole text."""
    whole = text or ""
    opening = re.search(re.escape(f"<{field}>"), whole, re.IGNORECASE)
    if opening is not None:
        # At least one sign stands between the two, be it the rest of a second mark.
        closing = re.compile(re.escape(f"</{field}>"), re.IGNORECASE)
        end = closing.search(whole, opening.end() + 1)
        if end is not None:
            return whole[opening.end() : end.start()].strip()
    return whole.strip()


def read_comment(text: str, protocol: Protocol) -> tuple[str, str]:
    """(the comment, status) of a completion.

    `paper`: the last tag decides, so that a model may correct itself. `salvaged`: one of its marks
    is missing, or both are and the whole text is the comment. `empty`: nothing is left. `reference`
    calls anything `ok`.
    """
    remainder = spoken(text, protocol)
    if protocol == "reference":
        return field_text(remainder, "response"), "ok"
    *before, last = _OPENING.split(remainder)
    inside, *after = _CLOSING.split(last)
    comment = inside.strip()
    if not comment:
        return "", "empty"
    return comment, "ok" if before and after else "salvaged"
