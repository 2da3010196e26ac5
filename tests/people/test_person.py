"""The person of a conversation, from the file to splits, rows, losses, intervals and pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import read_rows
from tests.support.chats import jsonl
from tests.support.evaluation import soul


def talk(person: str | None, number: int, column: str = "user_id") -> dict[str, Any]:
    """A conversation about a thing that occurs in no other."""
    texts = (f"hi my radio {number} hums near the {number}th shelf of my shed", "turn it off",
             f"tried that with radio {number}, no luck at all", "let it dry")  # fmt: skip
    roles = ("user", "assistant") * 2
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    return {**({column: person} if person else {}), "messages": messages}


def people_of(path: Path) -> set[str]:
    return {str(row.fields.get("user_id")) for row in read_rows(path)[0]}


@pytest.mark.parametrize("by", [(), ("--by", "person")])
def test_a_person_is_on_one_side_whatever_the_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], by: Sequence[str]
) -> None:
    rows = [talk(f"p{n % 8}", n) for n in range(40)]
    nameless = [{"id": f"c{n // 2}", **talk(None, 100 + n)} for n in range(20)]
    chats = jsonl(tmp_path / "chats.jsonl", [*rows, *nameless])
    assert soul("data", "split", chats, *by, "--share", 0.3, "-o", tmp_path / "parts") == 0
    train, held_out = (tmp_path / "parts" / f"{name}.jsonl" for name in ("train", "held_out"))
    assert people_of(train) & people_of(held_out) <= {"None"}
    ids = [{row.fields.get("id") for row in read_rows(path)[0]} for path in (train, held_out)]
    assert ids[0] & ids[1] <= {None}  # rows without a person stay with their conversation
    assert len(read_rows(train)[0]) + len(read_rows(held_out)[0]) == 60
    shown = capsys.readouterr()
    assert " people → " in shown.out and "20 conversations name no person" in shown.err


def test_rows_that_are_no_conversations_need_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", [{"job": "baker"}, {"job": "miner"}])
    assert soul("data", "split", rows, "-o", tmp_path / "parts") == 2
    assert "--by NAME,NAME" in capsys.readouterr().err and not (tmp_path / "parts").exists()


def test_a_person_on_both_sides_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = jsonl(tmp_path / "chats.jsonl", [talk(f"p{n}", n) for n in range(6)])
    rows = [{"source": "prism", "intent": f"mend thing {n}", "conversation_history": "",
             "opening_prompt": "hm", "person": p} for n, p in enumerate(("p2", "p9"))]  # fmt: skip
    rows_file = jsonl(tmp_path / "rows.jsonl", rows)
    call = ("data", "contamination", chats, rows_file, "--chats", "--task", "userllm")
    assert soul(*call) == 0
    assert "in both the training data and the evaluation rows: 1 (p2)" in capsys.readouterr().out
    assert soul(*call, "--json") == 0
    assert json.loads(capsys.readouterr().out)["people"] == ["p2"]
