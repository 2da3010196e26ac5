"""CoSER's players for tests: actor, environment, predictor and critics behind one HTTP server.

The environment and the speaker predictor are one model; the prompt distinguishes them. The
dimension in the prompt distinguishes the critics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from soulkit.models.base import Cast
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.coser.judging import ASPECTS, scripted_verdict
from soulkit.tasks.coser.task import Coser
from soulkit.types import Example, Record
from tests.support import table as tables
from tests.support.road import task_of
from tests.support.servers.openai_server import Body
from tests.support.table import Says, recorded, said, table

SCENE: dict[str, Any] = {
    "book": "The Ferry House",
    "scenario": "A storm keeps Lene and Jost in the ferry house, and the boat is loose.",
    "topic": "the boat",
    "plot": {
        "summary": "Lene admits that she cut the rope, and Jost forgives her before daybreak.",
        "key_characters": [
            {"name": "Lene", "description": "A ferrywoman of few words.",
             "summary": "Lene confesses quietly at the stove."},
            {"name": "Jost", "description": "The old smith.",
             "summary": "Jost burns his complaint."},
        ],
    },
    "character_profiles": {"Lene": "Lene says little and means it.", "Jost": "Jost talks a lot."},
    "key_characters": [
        {"name": "Lene", "thought": "Nobody may learn that the axe under my bench is wet."},
        {"name": "Jost", "motivation": "My daughter waits at Norden pier with the doctor's bill."},
    ],
    "speaking_characters_w_env": ["Lene", "Jost"],
    "major_characters": ["Lene", "Jost"],
    "dialogues": [
        {"character": "Lene", "message": "[He suspects something.] Sit down, it will pass."},
        {"character": "Jost", "message": "(shakes his coat) The rope was new, Lene."},
        {"character": "Environment", "message": "Something heavy knocks against the wall."},
        {"character": "Lene", "message": "Then it was badly tied."},
    ],
    "tag": "ood",
}  # fmt: skip


def coser(protocol: str = "paper") -> Coser:
    task = task_of("coser", protocol)
    assert isinstance(task, Coser)
    return task


def scene_row(protocol: str = "paper", **changes: Any) -> Example:
    """The scene, with parts of its circumstances replaced."""
    return coser(protocol).example({"circumstance": {**SCENE, **changes}})


def critics(
    severities: Mapping[str, int] | None = None, why: str = "So it is."
) -> Callable[[Body], str]:
    """Critics with a severity per dimension, given as flaws of severity five or less."""
    weights = dict.fromkeys(ASPECTS, 0) | dict(severities or {})

    def say(body: Body) -> str:
        form = body["response_format"]["json_schema"]["schema"]["title"]
        if form == "Marks":
            return scripted_verdict(form, perfect=True) or ""
        slug = slug_of(body)
        parts = [5] * (weights[slug] // 5) + [weights[slug] % 5] * bool(weights[slug] % 5)
        flaws = [{"instance": "here", "type": ASPECTS[slug].kinds[0], "severity": n} for n in parts]
        verdict = {"reasoning": why, "flaws": flaws}
        return json.dumps(verdict | ({} if form == "Flaws" else {"repetitions": []}))

    return say


def slug_of(body: Body) -> str:
    """The dimension that a critic is asked about."""
    match = re.search(r"in no other: (.*)\.", str(body["messages"][0]["content"]))
    assert match is not None
    return next(slug for slug, aspect in ASPECTS.items() if aspect.title == match[1])


def names(order: Sequence[str], then: str = "") -> Callable[[Body], str]:
    """A predictor that names these speakers in order, then always `then`."""
    waiting = iter(order)
    return lambda _: json.dumps({"reason": "so", "next_speaker": next(waiting, then)})


def whose_turn(body: Body) -> bool:
    """Whether a prompt asks for the next speaker (not for an event)."""
    return "Say who should speak or act next" in str(body["messages"][0]["content"])


def players(predictor: Says = "", surroundings: Says = "Wind.", **says: Any) -> dict[str, Any]:
    """The usual players of a scene, with these replaced."""

    def environment(body: Body) -> str:
        return said(predictor if whose_turn(body) else surroundings, body)

    return {"actor": "(nods) Well.", "judge": critics(), "environment": environment, **says}


def book_table(**says: Any) -> AbstractContextManager[tuple[Cast, list[Body]]]:
    return table(**players(**says))


def scene_records(
    row: Example | None = None, protocol: str = "paper", feedback: FeedbackPolicy | None = None,
    seed: int = 0, **says: Any,
) -> list[Record]:  # fmt: skip
    """The records of one scene."""
    scene = row or scene_row(protocol)
    return recorded(coser(protocol), scene, feedback, seed, **players(**says))[0]


def scored(example: Example, lines: Sequence[Any], protocol: str = "paper", **says: Any) -> Any:
    """The Score of a scripted scene; exceptions of scoring propagate."""
    task = coser(protocol)
    return tables.scored(task, example, task.scripted(example, lines), **players(**says))
