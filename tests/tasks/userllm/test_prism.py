"""PRISM's files as rows: which turns, which intents, and what is said where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import RawRow
from soulkit.errors import DataError
from soulkit.tasks.imports import import_rows
from soulkit.tasks.loading import to_examples
from soulkit.tasks.registry import load_registry
from tests.support.evaluation import soul
from tests.support.prism import conversation, utterances, write_conversations, write_lines

TASK = load_registry().task("userllm")


def by_id(path: Path, **options: str) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in import_rows(TASK, path, options).rows}


def test_a_conversation_gives_its_first_its_second_and_its_last_turn(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "conversations.jsonl",
        [{**conversation(n, turns=turns), "intent": f"learn about it {n}"}
         for n, turns in enumerate((1, 3))],
    )  # fmt: skip
    rows = by_id(path)
    assert list(rows) == ["c0-first", "c0-end", "c1-first", "c1-second", "c1-end"]
    assert [row["is_last_turn"] for row in rows.values()] == [False, True, False, False, True]
    lengths = [len(row["conversation_history"]) for row in rows.values()]
    assert lengths == [0, 2, 0, 2, 6]
    assert list(by_id(path, turns="second")) == ["c1-second"]


def test_the_rows_bind_and_show_the_chosen_reply_alone(tmp_path: Path) -> None:
    records = [{**conversation(n), "intent": f"learn something {n}"} for n in range(6)]
    path = write_lines(tmp_path / "conversations.jsonl", records)
    rows = import_rows(TASK, path).rows
    loaded = to_examples(TASK, [RawRow(row, str(i)) for i, row in enumerate(rows)])
    assert loaded.bad == () and len(loaded.examples) == len(rows)
    end = next(e for e in loaded.examples if e.fields["is_last_turn"])
    prompt = TASK.preview(end)[0].text
    assert "chosen." in prompt and "<|endconversation|>" in prompt
    assert all(" chosen." in line for line in prompt.splitlines() if line.startswith("Assistant: "))


def test_the_long_file_gives_the_same_rows(tmp_path: Path) -> None:
    records = [{**conversation(n), "intent": "learn"} for n in range(5)]
    long = [{**one, "intent": "learn"} for one in utterances(records)]
    wide = by_id(write_lines(tmp_path / "conversations.jsonl", records))
    tall = by_id(write_lines(tmp_path / "utterances.jsonl", long))
    same = ("intent", "conversation_history", "is_last_turn", "opening_prompt")
    assert {k: [row[n] for n in same] for k, row in tall.items()} == {
        k: [row[n] for n in same] for k, row in wide.items()
    }


def test_published_files_are_refused_with_the_command_that_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_conversations(tmp_path / "conversations.jsonl", 3)
    with pytest.raises(DataError):
        import_rows(TASK, path)
    assert soul("data", "import", "userllm", path, "-o", tmp_path / "rows.jsonl") == 2
    shown = capsys.readouterr().err
    assert "none says what its person was after" in shown
    assert f"soul data build userllm {path} --drafter WHO --filter WHO" in shown
    assert not (tmp_path / "rows.jsonl").exists()


def test_records_without_an_intent_are_named_beside_those_with_one(tmp_path: Path) -> None:
    records = [conversation(0), {**conversation(1), "intent_summary": "learn"}]
    imported = import_rows(TASK, write_lines(tmp_path / "conversations.jsonl", records))
    assert {row["id"].partition("-")[0] for row in imported.rows} == {"c1"}
    assert [one.source for one in imported.bad] == ["conversations.jsonl:1"]
    assert "soul data build" in imported.bad[0].why


def test_chats_of_another_layout_are_no_file_to_import(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "intent": "greet"}
    with pytest.raises(DataError) as refusal:
        import_rows(TASK, write_lines(tmp_path / "chats.jsonl", [chat]))
    assert "PRISM" in refusal.value.way_out
