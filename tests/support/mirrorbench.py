"""MirrorBench's table for tests: everybody behind one HTTP server, told apart by their names."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from soulkit.models.base import Cast, Panel
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.mirrorbench.task import MirrorBench
from soulkit.types import Example, Record
from tests.support.road import player
from tests.support.servers.openai_server import ScriptedServer

Body = dict[str, Any]
Says = str | Callable[[Body], str]

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
    """Which of the questions a judge is asked."""
    prompt = prompt_of(body)
    marks = {"gteval": "<simulated ", "pairwise": "Conversation A:", "ctr": "<notes ",
             "rnr": '"verdict": "YES"'}  # fmt: skip
    return next((kind for kind, mark in marks.items() if mark in prompt), "critique")


def conversations(body: Body) -> list[tuple[str, str]]:
    """(mark, text) of the fenced conversations of a prompt, in order."""
    pattern = r"<(?:conversation|real|simulated) (\w+)>\n(.*?)\n</"
    return [(one[1], one[2]) for one in re.finditer(pattern, prompt_of(body), re.DOTALL)]


def answers(
    score: float = 0.5, wins: Says | None = None, rnr: str = "YES", ctr: str = "YES",
    why: str = "so it reads",
) -> Callable[[Body], str]:  # fmt: skip
    """A judge of known opinions; `wins` gives A, B or Tie."""

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


def in_turn(lines: Sequence[str | None], then: str = "") -> Callable[[Body], str]:
    """The lines one after the other, then always `then`."""
    waiting = iter(lines)
    return lambda _: next(waiting, then) or ""


@contextmanager
def table(
    actor: Says = "hm", judge: Says | None = None, partner: Says = "Fine.", coach: Says = "",
    panel: Panel | None = None, judges: int = 1,
) -> Iterator[tuple[Cast, list[Body]]]:  # fmt: skip
    """(cast, requests) of a running server; a text is said again and again."""
    script: Mapping[str, Says] = {
        "actor": actor, "judge": answers() if judge is None else judge, "partner": partner,
        "coach": coach,
    }  # fmt: skip

    def answer(body: Body) -> str:
        reply = script[str(body["model"]).split("-")[0]]
        return reply if isinstance(reply, str) else reply(body)

    with ScriptedServer(answer=answer) as running:

        def seat(name: str) -> Any:
            return player(running.base_url, name, max_tokens=1_000_000)

        yield Cast(
            actor=seat("actor"), partner=seat("partner"),
            judges=tuple(seat(f"judge-{i}") for i in range(judges)),
            coach=seat("coach") if coach else None, panel=panel or Panel(),
        ), running.requests  # fmt: skip


def run(cast: Cast, work: Any) -> Any:
    async def closing() -> Any:
        try:
            return await work
        finally:
            for one in cast.players:
                await one.model.close()

    return asyncio.run(closing())


def played(
    task: MirrorBench, row: Example, feedback: FeedbackPolicy | None = None, **players: Any
) -> tuple[list[Record], list[Body]]:
    """What the engine records of one row, and every request."""
    with table(**players) as (cast, requests):
        plays = run(cast, Engine(cast, feedback=feedback).run([Job(task, row)], lambda _: None))
    return list(plays), requests


def asked_of(requests: Sequence[Body], name: str) -> list[Body]:
    return [body for body in requests if str(body["model"]).startswith(name)]
