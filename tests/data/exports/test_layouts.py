"""Every layout is recognised without an option, and read to the same messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.corpora.stream import read_lessons
from soulkit.data.exports import assistants, datasets
from soulkit.data.exports.layouts import ReadOptions
from soulkit.data.exports.reading import LAYOUTS, import_chats, recognise
from soulkit.data.files import BadRow
from soulkit.errors import DataError
from tests.support.exports import CHATGPT, CLAUDE, REPLIES, REPLY, SAMPLES, THANKS, TREE, USER


def rows(path: Path, **options: Any) -> list[dict[str, Any]]:
    everything = list(recognise(path).rows(ReadOptions(**options)))
    assert not [row for row in everything if isinstance(row, BadRow)]
    return everything  # type: ignore[return-value]


def talk(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m.get("speaker") or m["role"], m["content"]) for m in row["messages"]]


@pytest.mark.parametrize("form", ["file", "folder", "zip"])
@pytest.mark.parametrize("case", SAMPLES)
def test_the_layout_is_recognised_and_read(tmp_path: Path, case: str, form: str) -> None:
    sample = SAMPLES[case]
    if form == "file" and sample.conversations > 1 and len(sample.files) > 1:
        pytest.skip("its files belong together")
    path = sample.write(tmp_path / "x", form)
    assert [layout.name for layout in recognise(path).parts] == [sample.layout]
    read = rows(path)
    assert len(read) == sample.conversations and talk(read[0]) == sample.talk
    assert len({row["id"] for row in read}) == len(read)


@pytest.mark.parametrize("form", ["file", "zip", "folder"])
@pytest.mark.parametrize("case", SAMPLES)
def test_training_takes_the_file_itself(tmp_path: Path, case: str, form: str) -> None:
    sample = SAMPLES[case]
    path = sample.write(tmp_path / "x", form)
    side = "human" if any(who == "user" for who, _ in sample.talk) else sample.talk[-1][0]
    lesson = next(iter(read_lessons(str(path), side=side)))
    words = [s.text for s, learned in zip(lesson.segments, lesson.trained, strict=True) if learned]
    assert words == [text for who, text in sample.talk if who in (side, "user")]


def test_every_layout_has_a_sample() -> None:
    names = {layout.name for layout in (*assistants.LAYOUTS, *datasets.LAYOUTS)}
    assert names <= {sample.layout for sample in SAMPLES.values()}
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


def test_chatgpt_keeps_attachments_times_and_calls_and_counts_what_it_hides(tmp_path: Path) -> None:
    options = ReadOptions()
    path = SAMPLES["ChatGPT"].write(tmp_path, "zip")
    (row,) = recognise(path).rows(options)
    assert isinstance(row, dict)
    first, call = row["messages"][:2]
    assert first["attachments"] == ["image", "file"] and first["time"].startswith("2023-11-14T22")
    assert (
        call["tool_calls"] == [{"function": {"name": "browser", "arguments": "search('rye')"}}]
        and row["messages"][2]["name"] == "browser"
    )
    assert options.left_out == {
        "reasoning": 1, "custom instructions": 1, "empty conversations": 1,
    }  # fmt: skip
    assert recognise(path).skipped == {"json": 2, "html": 1, "png": 1}


BRANCHES = {
    "ChatGPT": ([CHATGPT], [[USER, "", "3 hits", REPLY, THANKS], [USER, "Cake."]]),
    "tree": ([TREE], [[USER, REPLY, THANKS], [USER, "Cake."]]),
    "replies": (REPLIES, [[USER, REPLY, THANKS, "Yes."], [USER, "Cake."]]),
    "Claude": (
        [{**CLAUDE, "chat_messages": [
            {"uuid": "1", "sender": "human", "text": USER, "parent_message_uuid": "0"},
            {"uuid": "2", "sender": "assistant", "text": "Cake.", "parent_message_uuid": "1"},
            {"uuid": "3", "sender": "assistant", "text": REPLY, "parent_message_uuid": "1"}]}],
        [[USER, REPLY], [USER, "Cake."]]),
}  # fmt: skip


@pytest.mark.parametrize("case", BRANCHES)
def test_regenerated_replies_are_read_with_branches_only(tmp_path: Path, case: str) -> None:
    records, expected = BRANCHES[case]
    (tmp_path / "a.json").write_text(json.dumps(records))
    texts = [[t for _, t in talk(row)] for row in rows(tmp_path / "a.json", branches=True)]
    assert texts == expected
    assert [[t for _, t in talk(row)] for row in rows(tmp_path / "a.json")] == expected[:1]


def test_a_tree_of_three_hundred_nested_replies_is_one_conversation(tmp_path: Path) -> None:
    reply: dict[str, Any] = {"role": "assistant", "text": "end", "replies": []}
    for n in range(299, 0, -1):
        role = "prompter" if n % 2 == 0 else "assistant"
        reply = {"role": role, "text": f"{n}", "replies": [reply]}
    tree = {"prompt": {"role": "prompter", "text": "0", "replies": [reply]}}
    (tmp_path / "a.jsonl").write_text(json.dumps(tree))
    (row,) = rows(tmp_path / "a.jsonl")
    assert len(row["messages"]) == 301
    lesson = next(iter(read_lessons(str(tmp_path / "a.jsonl"), side="human")))
    assert sum(lesson.trained) == 150


def test_ids_are_unique_and_the_same_again(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}] * 2
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ids = [row["id"] for row in rows(tmp_path / "a.jsonl")]
    assert len(set(ids)) == 4 and ids == [row["id"] for row in rows(tmp_path / "a.jsonl")]


def test_what_is_malformed_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([CHATGPT, {"title": "x", "mapping": 3}, "y"]))
    done = import_chats(tmp_path / "a.json", tmp_path / "out.jsonl")
    assert done.conversations == 1 and [bad.source for bad in done.bad] == ["a.json:2", "a.json:3"]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("record", "near"),
    [
        ({"chat": [{"role": "user", "content": "hi"}]}, "messages: "),
        ({"uuid": "c", "messages_of_chat": [{"sender": "human", "text": "x"}]}, "Claude export: "),
        ({"prompt": "a", "reply_text": "b"}, "prompt and completion: "),
    ],
)
def test_an_unknown_layout_is_answered_with_the_nearest(
    tmp_path: Path, record: dict[str, Any], near: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(DataError) as refusal:
        recognise(tmp_path / "a.jsonl")
    assert near in refusal.value.why and "--columns id=" in refusal.value.way_out
