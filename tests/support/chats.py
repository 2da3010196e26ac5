"""Conversations for tests, and files of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from soulkit.data.corpora.lessons import Lesson, LessonShape, conversation_of, lesson_from

Row = dict[str, Any]


def said_by(*turns: str) -> list[dict[str, str]]:
    """Messages from strings such as `"user: hi"`."""
    pairs = (turn.partition(": ") for turn in turns)
    return [{"role": role, "content": text} for role, _, text in pairs]


def chat(number: int, **more: Any) -> Row:
    """A conversation that is unique to this number."""
    turns = said_by(f"user: question {number}", f"assistant: answer {number}", "user: thanks")
    return {"messages": turns, **more}


def jsonl(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    """Write a .jsonl file; rows that are strings are written unchanged."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[Row], group: int = 1000) -> Path:
    """Write a Parquet file with this many rows per row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def lesson(row: Any, side: str = "human", **shape: Any) -> Lesson:
    """The lesson of one row."""
    return lesson_from(conversation_of(row), LessonShape(side, **shape), "s", "f:1")


def lines(made: Lesson) -> list[str]:
    """Lines such as `assistant* hi`: role, a star if the turn is trained, text."""
    return [
        f"{s.role}{'*' if learned else ''} {s.text}"
        for s, learned in zip(made.segments, made.trained, strict=True)
    ]


# -- a person with a taste and an assistant -------------------------------------------------------

PEOPLE = ("ann", "bob", "cleo", "dan", "eve", "finn")
TASTES = ("tea", "soup", "trains", "rain", "bread", "jazz", "maps", "chess")


def person_chat(number: int, seed: int = 0) -> Row:
    """Two or three turns of a person; every fifth chat ends with a long one."""
    rng = random.Random(f"{seed}/{number}")
    name, taste, other = rng.choice(PEOPLE), rng.choice(TASTES), rng.choice(TASTES)
    lines = [
        ("system", f"You are {name}, who likes {taste}."),
        ("user", f"hi i am {name} and i like {taste}"),
        ("assistant", f"hello {name} , what about {other} ?"),
        ("user", f"{other} is fine but {taste} is better , number {number}"),
    ]
    if number % 5 == 0:
        lines += [("assistant", "i see ."), ("user", "bye " * (1 + number % 40))]
    return {"messages": [{"role": role, "content": text} for role, text in lines]}


def chats_file(path: Path, count: int, seed: int = 0) -> Path:
    """Write `count` chats that depend on the seed."""
    return jsonl(path, (person_chat(number, seed) for number in range(count)))
