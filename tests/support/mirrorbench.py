"""MirrorBench's players for tests behind one HTTP server, distinguished by model name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from soulkit.models.base import Cast
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.mirrorbench.task import MirrorBench
from soulkit.types import Example, Record
from tests.support import table as tables
from tests.support.servers.openai_server import Body
from tests.support.table import Says, recorded

TURNS = [
    {"role": "user", "content": "whats the cheapest way to get to Lyon by train"},
    {"role": "assistant", "content": "Book early; the slow trains cost least."},
    {"role": "user", "content": "ok and with my bike??"},
    {"role": "assistant", "content": "Bicycles need a ticket of their own."},
]
ROW = {"task_description": "Somebody in a hurry asks about trains to Lyon.", "turns": TURNS,
       "dataset": "oasst1", "conversation_id": "c1", "metadata": {}}  # fmt: skip


def mirrorbench(protocol: str = "paper", **options: Any) -> MirrorBench:
    task = load_registry().task("mirrorbench", protocol, options=options)  # type: ignore[arg-type]
    assert isinstance(task, MirrorBench)
    return task


def example(protocol: str = "paper", **changes: Any) -> Example:
    return mirrorbench(protocol).example({**ROW, **changes})


def prompt_of(body: Body) -> str:
    return str(body["messages"][0]["content"])


def kind_of(body: Body) -> str:
    """The kind of question that a judge is asked."""
    prompt = prompt_of(body)
    marks = {"gteval": "<simulated ", "pairwise": "Conversation A:", "ctr": "<notes ",
             "rnr": '"verdict": "YES"'}  # fmt: skip
    return next((kind for kind, mark in marks.items() if mark in prompt), "critique")


def conversations(body: Body) -> list[tuple[str, str]]:
    """(label, text) of the fenced conversations in a prompt, in order."""
    pattern = r"<(?:conversation|real|simulated) (\w+)>\n(.*?)\n</"
    return [(one[1], one[2]) for one in re.finditer(pattern, prompt_of(body), re.DOTALL)]


def answers(
    score: float = 0.5, wins: Says | None = None, rnr: str = "YES", ctr: str = "YES",
    why: str = "so it reads",
) -> Callable[[Body], str]:  # fmt: skip
    """A judge with known verdicts; `wins` is A, B or Tie."""

    def answer(body: Body) -> str:
        kind = kind_of(body)
        if kind == "critique":
            return "- short\n- no greeting"
        side = wins(body) if callable(wins) else wins or "Tie"
        shapes = {
            "gteval": {"reasoning": why, "score": score},
            "pairwise": {"reasoning": why, "verdict": side},
            "rnr": {"reasoning": why, "verdict": rnr},
            "ctr": {"critique": why, "explanation": why, "verdict": ctr},
        }
        return json.dumps(shapes[kind])

    return answer


def players(**says: Any) -> dict[str, Any]:
    """The usual players of a conversation, with these replaced."""
    return {"actor": "hm", "partner": "Fine.", "judge": answers(), **says}


def table(**says: Any) -> AbstractContextManager[tuple[Cast, list[Body]]]:
    return tables.table(**players(**says))


def played(
    task: MirrorBench, row: Example, feedback: FeedbackPolicy | None = None, **says: Any
) -> tuple[list[Record], list[Body]]:
    """The records of one row, and all requests."""
    return recorded(task, row, feedback, **players(**says))
