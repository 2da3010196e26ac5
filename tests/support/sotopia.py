"""Sotopia's players for tests behind one HTTP server, distinguished by model name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from soulkit.models.base import Cast
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.sotopia.actions import Action
from soulkit.tasks.sotopia.judging import DIMENSIONS
from soulkit.tasks.sotopia.task import Sotopia
from soulkit.types import Example, Record
from tests.support import table as tables
from tests.support.road import task_of
from tests.support.servers.openai_server import Body
from tests.support.table import Says, recorded, said

ROW = {
    "scenario": "Agent1 wants to sell an old piano to Agent2 at a garage sale.",
    "agent1_name": "Maya Lind",
    "agent2_name": "Omar Haddad",
    "agent1_background": "Maya is a tired music teacher.",
    "agent2_background": "Omar runs a small cafe and sleeps badly since the fire.",
    "agent1_goal": "Sell for at least 300",
    "agent2_goal": "Pay at most 250, since rent is due on Friday",
    "relationship": "strangers",
}
LINE = Action("speak", "Shall we look at it together?").json()
GOOD = {"believability": 8, "relationship": 2, "knowledge": 4, "secret": 0, "social_rules": 0,
        "financial_and_material_benefits": 1, "goal": 7}  # fmt: skip
LOW = json.dumps({"risk_level": "low", "reason": "ordinary play"})


def sotopia(protocol: str = "paper") -> Sotopia:
    task = task_of("sotopia", protocol)
    assert isinstance(task, Sotopia)
    return task


def example(protocol: str = "paper", **changes: Any) -> Example:
    return sotopia(protocol).example({**ROW, **changes})


def ratings(scores: dict[str, Any] | None = None, why: str = "it shows", **changes: Any) -> str:
    marks = {**(scores or GOOD), **changes}
    return json.dumps({name: {"reasoning": why, "score": mark} for name, mark in marks.items()})


def judged(rating: Says = "", audit: Says = LOW) -> Callable[[Body], str]:
    """A judge that recognises its two questions by their prompts."""

    def say(body: Body) -> str:
        prompt = str(body["messages"][0]["content"])
        return said(audit if "risk_level" in prompt else rating or ratings(), body)

    return say


def players(**says: Any) -> dict[str, Any]:
    """The usual players of a scene, with these replaced."""
    return {"actor": LINE, "partner": LINE, "judge": judged(), **says}


def table(**says: Any) -> AbstractContextManager[tuple[Cast, list[Body]]]:
    return tables.table(**players(**says))


def record(
    row: Example | None = None, protocol: str = "paper", feedback: FeedbackPolicy | None = None,
    **says: Any,
) -> Record:  # fmt: skip
    return records(row, protocol, feedback, **says)[0]


def records(
    row: Example | None = None, protocol: str = "paper", feedback: FeedbackPolicy | None = None,
    **says: Any,
) -> list[Record]:  # fmt: skip
    """The records of one scene."""
    scene = row or example(protocol)
    return recorded(sotopia(protocol), scene, feedback, **players(**says))[0]


def scored(
    protocol: str, actor: Sequence[str], kind: str = "draft", hack_penalty: str = "train",
    **says: Any,
) -> Any:  # fmt: skip
    """The Score of a scripted scene by judges over HTTP; exceptions of scoring propagate."""
    task, row = sotopia(protocol), example(protocol)
    task.hack_penalty = hack_penalty
    episode = replace(task.scripted(row, actor), kind=kind)  # type: ignore[arg-type]
    return tables.scored(task, row, episode, **players(**says))


def raw(score: Any) -> dict[str, Any]:
    return {name: score.metrics[name] for name in DIMENSIONS}


LEAVE = Action("leave").json()


def speak(text: str) -> str:
    return Action("speak", text).json()
