"""Structures inside of strings: what they spell, and the first message of a stored chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from soulkit.data.literals import first_message, structure

CHAT = [{"messages": [{"role": "user", "content": "Hello"}]}]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"a": null}', {"a": None}),
        ("['a', None]", ["a", None]),
        ("['it\\'s', \"so\"]", ["it's", "so"]),
        # JSON's own escapes: a pair of surrogates is one sign, and a slash may be escaped.
        (json.dumps(["😀 é"]), ["😀 é"]),
        ('["a\\/b"]', ["a/b"]),
        ("[sic] he said", "[sic] he said"),
        ("(1, 2)", "(1, 2)"),
        ("7", "7"),
        (7, 7),
        (None, None),
    ],
)
def test_structure(value: Any, expected: Any) -> None:
    assert structure(value) == expected


@pytest.mark.parametrize(
    "chat",
    [CHAT, tuple(CHAT), json.dumps(CHAT), repr(CHAT), [json.dumps(CHAT[0])],
     [{"messages": json.dumps(CHAT[0]["messages"])}]],
)  # fmt: skip
def test_the_first_message_in_many_dresses(chat: Any) -> None:
    assert first_message(chat) == "Hello"


@pytest.mark.parametrize(
    "chat", [None, "", "text", "[1", [], {}, [None], [{}], [{"messages": []}], [{"messages": [3]}]]
)
def test_no_message_at_all(chat: Any) -> None:
    assert first_message(chat) is None


def test_a_message_without_content_is_blank() -> None:
    assert first_message([{"messages": [{"role": "user"}]}]) == ""
