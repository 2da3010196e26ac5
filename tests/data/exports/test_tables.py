"""Tickets of Intercom and Zendesk, and tables with one message per row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from soulkit.data.exports.layouts import ReadOptions
from soulkit.data.exports.reading import recognise
from soulkit.data.files import BadRow
from soulkit.errors import DataError

Row = dict[str, Any]


def imported(path: Path, layout: str, **columns: str) -> list[Any]:
    options = ReadOptions(columns=columns)
    export = recognise(path, options)
    assert [one.name.split()[0] for one in export.parts] == [layout]
    return list(export.rows(options))


def said(row: Row) -> list[str]:
    """Lines such as `user: hi [image]`."""
    return [
        " ".join([f"{m.get('role', m.get('speaker'))}: {m['content']}",
                  *(f"[{kind}]" for kind in m.get("attachments", ()))])
        for m in row["messages"]
    ]  # fmt: skip


# -- tickets -------------------------------------------------------------------------------------

INTERCOM = {
    "type": "conversation", "id": "401", "created_at": 1704448800,
    "source": {"type": "conversation", "id": "1", "body": "<p>Hi &amp; hello,<br>it broke</p>",
               "author": {"type": "user", "id": "u7", "name": "Mia"}, "attachments": []},
    "conversation_parts": {"type": "conversation_part.list", "conversation_parts": [
        {"part_type": "comment", "body": "<p>Which one?</p>", "created_at": 1704448860,
         "author": {"type": "bot", "id": "b1"}},
        {"part_type": "note", "body": "<p>angry</p>", "author": {"type": "admin", "id": "a2"}},
        {"part_type": "assignment", "body": None, "author": {"type": "admin", "id": "a2"}},
        {"part_type": "comment", "body": "<p>This</p><p><b>one</b></p>", "created_at": 1704448920,
         "author": {"type": "lead", "id": "u7"}, "attachments": [{"content_type": "image/png"}]},
    ]},
}  # fmt: skip


@pytest.mark.parametrize("wrapped", [True, False])
def test_intercom_conversations(tmp_path: Path, wrapped: bool) -> None:
    value = {"type": "conversation.list", "conversations": [INTERCOM]} if wrapped else INTERCOM
    (tmp_path / "a.json").write_text(json.dumps(value))
    (row,) = imported(tmp_path / "a.json", "Intercom")
    assert (row["id"], row["person"]) == ("401", "u7")
    assert said(row) == ["user: Hi & hello,\nit broke", "assistant: Which one?",
                         "user: This\none [image]"]  # fmt: skip
    assert row["messages"][0]["time"] == "2024-01-05T10:00:00+00:00"


def comment(author: int, text: str, **more: Any) -> Row:
    return {"id": 1, "type": "Comment", "author_id": author, "body": text, "public": True,
            "plain_body": text.replace("  ", "&nbsp;"), **more}  # fmt: skip


SAYS = [comment(7, "It  broke"), comment(2, "internal", public=False), comment(2, "Try again")]
ZENDESK: dict[str, Any] = {
    "tickets.json": {"tickets": [{"id": 5, "requester_id": 7, "subject": "x", "comments": SAYS}]},
    "export.jsonl": {"id": 5, "requester": {"id": 7}, "comments": SAYS},
    "audits.json": {"audits": [
        {"id": 1, "ticket_id": 5, "author_id": 7, "created_at": "2024-01-05T10:00:00Z", "events": [
            SAYS[0], {"type": "Create", "field_name": "requester_id", "value": "7"}]},
        {"id": 2, "ticket_id": 5, "created_at": "2024-01-05T10:01:00Z", "events": SAYS[1:]}]},
}  # fmt: skip


@pytest.mark.parametrize("name", ZENDESK)
def test_zendesk_tickets(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps(ZENDESK[name]))
    (row,) = imported(tmp_path / name, "Zendesk")
    assert (row["id"], row["person"]) == ("5", "7")
    assert said(row) == ["user: It broke", "assistant: Try again"]


def test_a_ticket_of_another_form_is_named(tmp_path: Path) -> None:
    odd = [{"comments": [{"author_id": 1}]}, {"comments": 3, "author_id": 1}, INTERCOM]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, odd)))
    rows = imported(tmp_path / "a.jsonl", "Intercom")
    assert [isinstance(row, BadRow) for row in rows] == [True, False]


# -- tables --------------------------------------------------------------------------------------

ROWS = [
    ("c1", "customer", "hi", "u7", "2024-01-05 10:00:00"),
    ("c2", "customer", 'a, "b"\nc', "u8", "2024-01-05 10:00:00"),
    ("c1", "customer", "bye", "u7", "2024-01-05 10:02:00"),
    ("c1", "Agent", "hello", "a1", "2024-01-05 10:01:00"),
    ("c2", "agent", "yes", "a1", "2024-01-05 10:03:00"),
]
NAMES = ("id", "role", "text", "person", "time")
USUAL = ("Conversation ID", "role", "text", "user_id", "timestamp")


def table(path: Path, names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Path:
    """Write .csv, .tsv, .parquet or .jsonl."""
    records = [dict(zip(names, row, strict=True)) for row in rows]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, records)))
    else:
        mark = "," if path.suffix == ".csv" else "\t"
        quoted = [[f'"{cell.replace(chr(34), chr(34) * 2)}"' for cell in row] for row in rows]
        path.write_text("\n".join(mark.join(row) for row in [list(names), *quoted]))
    return path


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "jsonl"])
@pytest.mark.parametrize("named", [True, False])
def test_a_table_is_grouped_by_conversation(tmp_path: Path, ending: str, named: bool) -> None:
    names = ("a", "b", "c", "d", "e") if named else USUAL
    columns = dict(zip(NAMES, names, strict=True)) if named else {}
    path = table(tmp_path / f"a.{ending}", names, ROWS)
    rows = imported(path, "table", **columns)
    assert [(row["id"], row["person"]) for row in rows] == [("c1", "u7"), ("c2", "u8")]
    assert said(rows[0]) == ["user: hi", "assistant: hello", "user: bye"]
    assert said(rows[1]) == ['user: a, "b"\nc', "assistant: yes"]
    assert rows[0]["messages"][1]["time"] == "2024-01-05T10:01:00"


def test_other_roles_are_speakers_in_the_whole_table(tmp_path: Path) -> None:
    rows = [row if n else ("c1", "Mia", *row[2:]) for n, row in enumerate(ROWS)]
    first, second = imported(table(tmp_path / "a.csv", USUAL, rows), "table")
    assert said(first) == ["Mia: hi", "Agent: hello", "customer: bye"] and "person" not in first
    assert said(second)[1] == "agent: yes"


def test_a_row_without_a_speaker_and_columns_that_are_missing(tmp_path: Path) -> None:
    rows = [*ROWS, ("", "agent", "x", "", ""), ("c3", "", "x", "", "")]
    path = table(tmp_path / "a.csv", USUAL, rows)
    assert [row.why for row in imported(path, "table") if isinstance(row, BadRow)] == [
        "it has no Conversation ID",
        "a row of conversation 'c3' has no role",
    ]
    with pytest.raises(DataError, match="no column for role") as wrong:
        imported(path, "table", role="rol")
    assert wrong.value.way_out == "Name one: --columns role=COLUMN. Did you mean 'role'?"
    path = table(tmp_path / "b.csv", ("a", "b", "c", "d", "e"), ROWS)
    with pytest.raises(DataError, match="no column for id, text"):
        imported(path, "table", role="b")
