"""Recorded chats in every layout that is read are the same chats."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.chats import Chat, read_chats
from soulkit.errors import DataError
from tests.support.prism import conversation, utterances, write_lines

TALK = [("user", "hi, which bread?"), ("assistant", "Rye."), ("user", "and why"),
        ("assistant", "It keeps.")]  # fmt: skip
PLAIN = [{"role": role, "content": text} for role, text in TALK]


def only(path: Path) -> Chat:
    chats, bad = read_chats(path)
    assert bad == [] and len(chats) == 1
    return chats[0]


NESTED: dict[str, Any] = {"role": "prompter", "text": TALK[0][1], "replies": [
    {"role": "assistant", "text": "Cake.", "rank": 1},
    {"role": "assistant", "text": "Rye.", "rank": 0, "replies": [
        {"role": "prompter", "text": "and why", "replies": [
            {"role": "assistant", "text": "It keeps."}]}]}]}  # fmt: skip
FLAT: list[dict[str, Any]] = [
    {"message_id": "m1", "parent_id": None, "role": "prompter", "text": TALK[0][1]},
    {"message_id": "m2", "parent_id": "m1", "role": "assistant", "text": "Cake.", "rank": 1},
    {"message_id": "m3", "parent_id": "m1", "role": "assistant", "text": "Rye.", "rank": 0},
    {"message_id": "m4", "parent_id": "m3", "role": "prompter", "text": "and why"},
    {"message_id": "m5", "parent_id": "m4", "role": "assistant", "text": "It keeps."},
]
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": [{"role": "system", "content": "be brief"}, *PLAIN]}],
    "conversation": [{"conversation_hash": "x", "conversation": PLAIN}],
    "from and value": [{"conversations": [
        {"from": "human" if role == "user" else "gpt", "value": text} for role, text in TALK]}],
    "turns as JSON text": [{"turns": json.dumps(PLAIN)}],
    "parts": [{"messages": [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]}
                            for m in PLAIN]}],
    "tree": [{"message_tree_id": "t", "prompt": NESTED}],
    "flat tree": FLAT,
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_messages(tmp_path: Path, layout: str) -> None:
    assert list(only(write_lines(tmp_path / "chats.jsonl", LAYOUTS[layout])).messages) == PLAIN


def test_of_several_replies_the_one_that_went_on_is_kept(tmp_path: Path) -> None:
    records = [conversation(n) for n in range(12)]
    wide = read_chats(write_lines(tmp_path / "conversations.jsonl", records))[0]
    for record, chat in zip(records, wide, strict=True):
        assert chat.key == record["conversation_id"] and chat.person == record["user_id"]
        replies = [m["content"] for m in chat.messages if m["role"] == "assistant"]
        assert len(replies) == record["conversation_turns"]
        assert all(reply.endswith("chosen.") for reply in replies)


def test_the_long_form_is_the_same_whatever_the_order_of_its_records(tmp_path: Path) -> None:
    records = [conversation(n) for n in range(12)]
    long = utterances(records)
    random.Random(3).shuffle(long)
    wide = read_chats(write_lines(tmp_path / "conversations.jsonl", records))[0]
    tall = read_chats(write_lines(tmp_path / "utterances.jsonl", long))[0]
    assert {c.key: c.messages for c in tall} == {c.key: c.messages for c in wide}


def test_messages_of_one_role_in_a_row_are_one(tmp_path: Path) -> None:
    talk = [PLAIN[0], {"role": "user", "content": "please"}, PLAIN[1]]
    chat = only(write_lines(tmp_path / "chats.jsonl", [{"messages": talk}]))
    assert [m["content"] for m in chat.messages] == ["hi, which bread?\nplease", "Rye."]


BAD = {
    "blank": ([*PLAIN, {"role": "user", "content": "  "}], "message 5"),
    "stranger": ([{"role": "narrator", "content": "Once."}], "the speaker of"),
    "one-sided": ([PLAIN[1]], "it has no user message"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_record_without_a_chat_is_named(tmp_path: Path, kind: str) -> None:
    messages, why = BAD[kind]
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": PLAIN}, {"messages": messages}])
    chats, bad = read_chats(path)
    assert len(chats) == 1
    assert [one.source for one in bad] == ["chats.jsonl:2"] and why in bad[0].why


def test_a_file_without_any_chat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        read_chats(write_lines(tmp_path / "rows.jsonl", [{"question": "Who?"}]))
    assert "contains no chat" in refusal.value.what and "messages" in refusal.value.way_out


def test_a_circle_of_messages_comes_to_an_end(tmp_path: Path) -> None:
    ring = [*FLAT[:1], {"message_id": "m1", "parent_id": "m1", "role": "assistant", "text": "a"}]
    first, second = only(write_lines(tmp_path / "ring.jsonl", ring)).messages
    assert first == PLAIN[0] and second["content"] == "a"
