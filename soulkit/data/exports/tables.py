"""Reads tickets (Intercom, Zendesk) and long tables with one message per row.

    conversation_id,role,text,user_id        {"id": "c1", "person": "u7", "messages": [
    c1,customer,hi,u7                    →     {"role": "user", "content": "hi"},
    c1,agent,hello,a2                          {"role": "assistant", "content": "hello"}]}

In a table whose speakers are not all in ROLES, they are names: `speaker` instead of `role`.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from soulkit.data.exports.layouts import ExportFile, Layout, ReadOptions
from soulkit.data.exports.records import (
    Row,
    attachment_kind,
    converted,
    epoch_seconds,
    has_keys,
    html_words,
    records,
    sample_of,
    spoken_message,
)
from soulkit.data.files import BadRow
from soulkit.errors import DataError, nearest

ROLES = {
    **dict.fromkeys(("user", "human", "person", "prompter", "customer", "client", "visitor",
                     "guest", "lead", "contact", "requester", "caller", "end-user"), "user"),
    **dict.fromkeys(("assistant", "agent", "admin", "bot", "chatbot", "operator", "support", "gpt",
                     "team", "representative", "model", "ai", "advisor"), "assistant"),
    "system": "system", "tool": "tool",
}  # fmt: skip
"""Words for the two sides of a conversation with an assistant."""
NOTES = "internal parts of tickets"


def _said(side: str, who: str, text: Any, time: Any, files: Any = ()) -> Row | None:
    kinds = (attachment_kind(file.get("content_type") or file.get("name")) for file in files or ())
    return spoken_message(side, who, text, time, kinds)


def _conversation(key: Any, person: Any, messages: Sequence[Row]) -> Row:
    fields = {"id": str(key or ""), "person": str(person or "")}
    return {**{name: value for name, value in fields.items() if value}, "messages": messages}


# -- tickets -------------------------------------------------------------------------------------


def _intercom(ticket: Any, options: ReadOptions) -> Iterator[Row]:
    parts = ticket["conversation_parts"]
    listed = parts.get("conversation_parts") or [] if isinstance(parts, Mapping) else parts
    messages, people = [], []
    first = {"created_at": ticket.get("created_at"), **(ticket.get("source") or {})}
    for part in (first, *(listed or ())):
        author, text = part.get("author") or {}, html_words(part.get("body") or "")
        role = ROLES.get(str(author.get("type")), "assistant")
        message = _said("role", role, text, part.get("created_at"), part.get("attachments"))
        if part.get("part_type") == "note" or message is None:
            options.left_out[NOTES] += 1
            continue
        people += [author.get("id")] if role == "user" else []
        messages.append(message)
    yield _conversation(ticket.get("id"), next(filter(None, people), ""), messages)


def _zendesk(ticket: Any, options: ReadOptions) -> Iterator[Row]:
    comments, person = ticket.get("comments") or [], ticket.get("requester_id")
    audits = ticket.get("audits") or []
    for audit in audits:
        for event in audit.get("events") or []:
            if event.get("type") == "Comment":
                comments = [*comments, {**event, "created_at": audit.get("created_at")}]
            elif event.get("field_name") == "requester_id":
                person = event.get("value")
    first = comments[0].get("author_id") if comments else None
    person = str(person or (ticket.get("requester") or {}).get("id") or first or "")
    messages = []
    for comment in comments:
        text = comment.get("plain_body") or comment.get("body")
        text = html_words(comment.get("html_body") or "") if text is None else html.unescape(text)
        role = "user" if str(comment.get("author_id")) == person else "assistant"
        text, time = text.replace("\xa0", " "), comment.get("created_at")
        message = _said("role", role, text, time, comment.get("attachments"))
        if comment.get("public") is False or message is None:
            options.left_out[NOTES] += 1
            continue
        messages.append(message)
    number = ticket.get("id") or next((audit.get("ticket_id") for audit in audits), "")
    yield _conversation(number, person, messages)


def _ticket(ticket: Any, options: ReadOptions) -> Iterator[Row]:
    return (_intercom if "conversation_parts" in ticket else _zendesk)(ticket, options)


# -- tables --------------------------------------------------------------------------------------

_NAMES = {
    "id": ("conversation_id", "chat_id", "thread_id", "session_id", "dialog_id", "dialogue_id",
           "ticket_id", "case_id", "call_id", "conv_id"),
    "role": ("role", "speaker", "author", "sender", "from", "sender_type", "author_type"),
    "text": ("text", "content", "message", "body", "utterance", "message_text"),
    "person": ("person", "user_id", "customer_id", "author_id", "sender_id"),
    "time": ("time", "timestamp", "created_at", "sent_at", "date", "datetime"),
}  # fmt: skip
"""Usual names of the columns."""


def _usual(file: ExportFile) -> dict[str, str]:
    """id, role, text, person, time → name of the column, for those that have usual names."""
    first = next((row for row in sample_of(file) if isinstance(row, Mapping)), {})
    columns = {str(name).strip().casefold().replace(" ", "_"): name for name in first}
    usual = {
        of: [columns[name] for name in names if name in columns] for of, names in _NAMES.items()
    }
    return {of: names[0] for of, names in usual.items() if names}


def _is_table(file: ExportFile) -> bool:
    columns = _usual(file)
    values = [row.get(columns.get("text")) for row in sample_of(file) if isinstance(row, Mapping)]
    return columns.keys() >= {"id", "role", "text"} and any(isinstance(v, str) for v in values)


def _columns(file: ExportFile, named: Mapping[str, str]) -> dict[str, str]:
    """The columns to read; DataError if one is missing."""
    have = list(dict.fromkeys(str(name) for row in sample_of(file) for name in row))
    columns = {**_usual(file), **named}
    wrong = [
        of for of in dict.fromkeys(("id", "role", "text", *named)) if columns.get(of) not in have
    ]
    if wrong:
        near = nearest(named.get(wrong[0], wrong[0]), have)
        raise DataError(
            f"'{file.name}' has no column for {', '.join(wrong)}.",
            f"Its columns are {', '.join(have)}.",
            f"Name one: --columns {','.join(f'{of}=COLUMN' for of in wrong)}."
            + (f" Did you mean '{near}'?" if near else ""),
        )
    return columns


def _table(files: Sequence[ExportFile], options: ReadOptions) -> Iterator[Row | BadRow]:
    """A conversation is complete, and leaves memory, when its last row is read."""
    for file in files:
        columns = _columns(file, options.columns)
        counts: Counter[int] = Counter()
        named = False
        for _, record in records(file):
            if isinstance(record, Mapping):
                counts[hash(str(record.get(columns["id"])))] += 1
                who = str(record.get(columns["role"]) or "user").strip().casefold()
                named = named or who not in ROLES
        begun: dict[str, list[Row]] = {}
        for source, record in records(file):
            if isinstance(record, BadRow):
                yield record
                continue
            if not isinstance(record, Mapping) or record.get(columns["id"]) in (None, ""):
                yield BadRow(source, f"it has no {columns['id']}")
                continue
            key = str(record[columns["id"]])
            begun.setdefault(key, []).append(dict(record))
            if len(begun[key]) == counts[hash(key)]:
                yield _from_rows(key, begun.pop(key), columns, named, source)
        for key, rows in begun.items():
            yield _from_rows(key, rows, columns, named, file.name)


def _from_rows(
    key: str, rows: Sequence[Row], columns: Mapping[str, str], named: bool, source: str
) -> Row | BadRow:
    messages: list[Row] = []
    people = []
    for row in rows:
        who = str(row.get(columns["role"]) or "").strip()
        if not who:
            return BadRow(source, f"a row of conversation '{key}' has no {columns['role']}")
        side, role = ("speaker", who) if named else ("role", ROLES[who.casefold()])
        time = row.get(columns.get("time", ""))
        messages += filter(None, [_said(side, role, row.get(columns["text"]), time)])
        people += [row.get(columns.get("person", ""))] if not named and role == "user" else []
    if all("time" in message for message in messages):
        messages.sort(key=lambda message: epoch_seconds(message["time"]))
    return _conversation(key, next(filter(None, people), ""), messages)


LAYOUTS = (
    Layout("Intercom conversations", '{"id": "1", "source": {"body": "hi"}, "conversation_parts": '
           '{"conversation_parts": [{"author": {"type": "admin"}, "body": "hello"}]}}',
           lambda file: has_keys(file, "conversation_parts", "author"),
           partial(converted, _ticket)),
    Layout("Zendesk tickets", '{"id": 1, "requester_id": 7, "comments": [{"author_id": 7, '
           '"plain_body": "hi"}]}',
           lambda file: has_keys(file, "author_id", "(?:comments|audits)"),
           partial(converted, _ticket)),
    Layout("table with one message per row", "conversation_id,role,text", _is_table, _table, True),
)  # fmt: skip
