"""Humanual: processed rows of its six sets, and the file of posts that comes with its code.

    {"persona": "...", "prompt": [{"role": "poster", "content": "...", "metadata": {...}}],
     "completion": "...", "user_id": "...", "post_id": "..."}

A row needs who writes (persona), what they saw (prompt) and what they wrote (completion). Scraped
records without a persona, and `reddit_post_dict_testset.json`, which holds posts and no replies,
lack one or two of them: each of their records is listed as unusable, because a reply made up here
would be no human's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow, parse_row_json, read_bytes
from soulkit.data.literals import structure
from soulkit.tasks.importing import BadRecord, Imported, need, of_shape, rows_from

_DOMAINS = ("book", "chat", "email", "news", "opinion", "politics")
TASKS = tuple(f"humanual_{domain}" for domain in _DOMAINS)
LICENCE = "not stated with the texts; see the terms of Humanual and of the sites they come from"
_KEPT = ("id", "dataset", "category", "user_id", "post_id", "turn_id", "split_type")
_FIELDS = ("prompt", "completion")


def import_humanual(path: Path) -> Imported:
    """Rows of a processed file, or the posts of the post file as records that are no rows."""
    posts = _posts(path)
    if posts is not None:
        return posts
    raw, bad = of_shape(path, _FIELDS, "Give rows with persona, prompt and completion.")
    rows = rows_from(raw, bad, _row)
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=_notes(len(rows), bad))


def _row(raw: RawRow, index: int) -> dict[str, Any]:
    persona, completion = need(raw, "persona", "completion")
    columns = {name: raw.fields[name] for name in _KEPT if name in raw.fields}
    return {
        "persona": persona,
        "prompt": _prompt(raw.fields.get("prompt")),
        "completion": completion,
        **columns,
        "index": index,
        "provenance": raw.source,
        "licence": LICENCE,
    }


def _prompt(value: Any) -> str:
    """JSON text of the messages without their metadata, or the plain text that the prompt is."""
    messages = structure(value)
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        messages = [
            {"role": str(m.get("role") or "user"), "content": m["content"]} for m in messages
        ]
        return json.dumps(messages, ensure_ascii=False)
    if isinstance(value, str) and value.strip():
        return value
    raise BadRecord("its prompt is neither text nor a list of messages with content")


def _is_message(value: Any) -> bool:
    content = value.get("content") if isinstance(value, Mapping) else None
    return isinstance(content, str) and bool(content.strip())


def _posts(path: Path) -> Imported | None:
    """Every post of the post file as a record that is no row; None for any other file."""
    if path.suffix.lower() != ".json":
        return None
    try:
        value = parse_row_json(read_bytes(path).decode("utf-8-sig"))
    except ValueError:
        return None  # the reader of rows says what is wrong with it
    posts = isinstance(value, Mapping) and value and all(map(_is_post, value.values()))
    if not posts:
        return None
    why = "it is a post without anybody's reply: there is no completion, and no persona"
    bad = tuple(BadRow(f"{path.name}: {key}", why) for key in value)
    return Imported(rows=(), bad=bad)


def _is_post(value: Any) -> bool:
    return isinstance(value, Mapping) and "post" in value and "completion" not in value


def _notes(rows: int, bad: list[BadRow]) -> tuple[str, ...]:
    without = sum("'persona'" in b.why for b in bad)
    lacking = f"{without} records have no persona: only the processed sets carry one."
    return (f"{rows} rows; metadata of messages is left out.", *([lacking] if without else []))
