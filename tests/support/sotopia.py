"""Sotopia's table for tests: three players behind one HTTP server, told apart by their names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from soulkit.models.base import Cast, Panel
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.tasks.sotopia.actions import Action
from soulkit.tasks.sotopia.scores import DIMENSIONS
from soulkit.tasks.sotopia.task import Sotopia
from soulkit.types import Example, Record
from tests.support.road import player, run, task_of
from tests.support.servers.openai_server import ScriptedServer

Body = dict[str, Any]
Says = Callable[[Body], str]

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


def in_turn(lines: Sequence[str | None], then: str = "") -> Says:
    """The lines one after the other, then always `then`."""
    waiting = iter(lines)
    return lambda _: next(waiting, then) or ""


def judged(rating: str | Says = "", audit: str | Says = LOW) -> Says:
    """A judge that tells its two questions apart by their prompts."""

    def say(body: Body) -> str:
        prompt = str(body["messages"][0]["content"])
        answer = audit if "risk_level" in prompt else rating or ratings()
        return answer if isinstance(answer, str) else answer(body)

    return say


@contextmanager
def table(
    actor: str | Says = LINE, partner: str | Says = LINE, judge: str | Says = "",
    *, panel: Panel | None = None, judges: int = 1, coach: str | Says = "", **server: Any,
) -> Iterator[tuple[Cast, list[Body]]]:  # fmt: skip
    """(cast, requests) of a running server; a text is said again and again."""
    players = {"actor": actor, "partner": partner, "judge": judge or judged(), "coach": coach}

    def answer(body: Body) -> str:
        reply = players[str(body["model"]).split("-")[0]]
        return reply if isinstance(reply, str) else reply(body)

    with ScriptedServer(answer=answer, **server) as running:

        def seat(name: str) -> Any:
            return player(running.base_url, name, max_tokens=10_000_000)

        yield Cast(
            actor=seat("actor"), partner=seat("partner"),
            judges=tuple(seat(f"judge-{i}") for i in range(judges)),
            coach=seat("coach") if coach else None, panel=panel or Panel(),
        ), running.requests  # fmt: skip


def record(
    row: Example | None = None, protocol: str = "paper", feedback: FeedbackPolicy | None = None,
    **players: Any,
) -> Record:  # fmt: skip
    return records(row, protocol, feedback, **players)[0]


def records(
    row: Example | None = None, protocol: str = "paper", feedback: FeedbackPolicy | None = None,
    **players: Any,
) -> list[Record]:  # fmt: skip
    """What the engine records of one scene."""
    with table(**players) as (cast, _):
        job = Job(sotopia(protocol), row or example(protocol))
        plays = run(cast, Engine(cast, feedback=feedback).run([job], lambda record: None))
    return list(plays)


def scored(
    protocol: str, actor: Sequence[str], kind: str = "draft", hack_penalty: str = "train",
    **players: Any,
) -> Any:  # fmt: skip
    """The Score of a scripted scene, by judges behind HTTP; raises what scoring raises."""
    task, row = sotopia(protocol), example(protocol)
    task.hack_penalty = hack_penalty
    episode = replace(task.scripted(row, actor), kind=kind)  # type: ignore[arg-type]
    with table(**players) as (cast, _):
        return run(cast, task.score(row, episode, cast))


def raw(score: Any) -> dict[str, Any]:
    return {name: score.metrics[name] for name in DIMENSIONS}


LEAVE = Action("leave").json()


def speak(text: str) -> str:
    return Action("speak", text).json()
