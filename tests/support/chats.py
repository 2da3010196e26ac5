"""Chats made for tests: a person with a taste and an assistant, in any number."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PEOPLE = ("ann", "bob", "cleo", "dan", "eve", "finn")
TASTES = ("tea", "soup", "trains", "rain", "bread", "jazz", "maps", "chess")


def chat(number: int, seed: int = 0) -> dict[str, Any]:
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


def write_chats(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chats_file(path: Path, count: int, seed: int = 0) -> Path:
    """`count` chats, others for every seed."""
    return write_chats(path, (chat(number, seed) for number in range(count)))
