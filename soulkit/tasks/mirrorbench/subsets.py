"""Where a MirrorBench row comes from: its subset, and the topic that it shares with others.

`dataset` says the subset; a row without it is told by the pattern of its `conversation_id`:

    clariq-448 → clariq     486f...b246::dolly-v2-12b → chatbot_arena
    qulac-14   → qulac      a UUID                    → oasst1

ClariQ took over the topics of Qulac with their numbers and added more, so rows of both with one
`topic_id` are about one topic. In Chatbot Arena two models answer one question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def subset_of(row: Mapping[str, Any]) -> str | None:
    """The subset of a row, None when neither its `dataset` nor its id tells."""
    named = str(row.get("dataset") or "").strip().lower()
    if named:
        return named
    key = str(row.get("conversation_id") or "")
    prefix = next((name for name in ("clariq", "qulac") if key.startswith(f"{name}-")), None)
    if prefix is None and "::" in key:
        return "chatbot_arena"
    return prefix or ("oasst1" if _UUID.fullmatch(key) else None)


def topic_of(row: Mapping[str, Any]) -> str | None:
    """What names the topic of a row, else its conversation; None when neither is known."""
    metadata = row.get("metadata")
    about = metadata if isinstance(metadata, Mapping) else {}
    if about.get("topic_id") is not None and subset_of(row) in ("clariq", "qulac"):
        number = str(about["topic_id"]).strip().removesuffix(".0")
        return f"search topic {number}"
    key = str(row.get("conversation_id") or "").partition("::")[0].strip()
    return f"conversation {key}" if key else None
