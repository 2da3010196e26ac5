"""Helpers for tests with several acted seats: the dinner task, and servers that play it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.made_rows import made_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Example

TASKS = Path(__file__).parent / "scene_task" / "tasks.yaml"
GUESTS = ("ann", "bo", "cy")
Body = dict[str, Any]


def dinner(count: int) -> tuple[Task, tuple[Example, ...]]:
    """The task and this many rows; every second row begins with a line by Ann."""
    task = load_registry(TASKS).task("dinner")
    raw = made_rows(task, f"synth:{count}", 0, "test")
    return task, to_examples(task, raw).examples


def body_text(body: Body) -> str:
    return "\n".join(str(message["content"]) for message in body["messages"])


def guest_of(body: Body) -> str | None:
    """The guest that a prompt is for; None for the room."""
    match = re.match(r"You are (ann|bo|cy),", str(body["messages"][0]["content"]))
    return match[1] if match else None


def guest(body: Body) -> str:
    """Says its name and turn, with a private thought that no other player may see."""
    name = guest_of(body)
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    return f"[{name} thinks of plan-{name}-{turn}.] I am {name}, line {turn}."


def room(order: Sequence[str] = ("ann", "bo", "ann", "bo")) -> Callable[[Body], str]:
    """An event in each turn; `order` determines the next speaker."""

    def answer(body: Body) -> str:
        if "Who speaks next" not in str(body["messages"][0]["content"]):
            return "A chair creaks."
        spoken = body_text(body).count("A chair creaks.")
        return order[(spoken - 1) % len(order)]

    return answer


def private_strings(example: Example) -> Mapping[str, tuple[str, ...]]:
    """Guest → its private strings: its secret and its thoughts."""
    return {g: (str(example.fields[f"{g}_secret"]), f"plan-{g}-") for g in GUESTS}
