"""Players behind one scripted server, distinguished by model name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from soulkit.models.base import Cast, Panel, Player
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.tasks.kit.base import Task
from soulkit.types import Episode, Example, Record, Score
from tests.support.road import NO_ONE, player, run
from tests.support.servers.openai_server import Body, ScriptedServer

Says = str | Callable[[Body], str]
"""What a player says: the same text every time, or a text for each request."""


@contextmanager
def table(
    *, judges: int = 1, panel: Panel | None = None, script: Any = None, **says: Says | None
) -> Iterator[tuple[Cast, list[Body]]]:
    """(cast, requests) of a running server; the cast has only the given seats.

    Seats are `actor`, `partner`, `environment`, `judge`, `auditor` and `coach`.
    """
    present = {seat: words for seat, words in says.items() if words is not None}

    def answer(body: Body) -> str:
        return said(present[str(body["model"]).split("-")[0]], body)

    with ScriptedServer(answer=answer, script=script) as server:

        def seat(name: str) -> Player | None:
            there = name.split("-")[0] in present
            return player(server.base_url, name, max_tokens=10_000_000) if there else None

        bench = [seat(f"judge-{i}") for i in range(judges)]
        yield Cast(
            actor=seat("actor") or NO_ONE.actor, partner=seat("partner"),
            environment=seat("environment"), coach=seat("coach"), panel=panel or Panel(),
            judges=tuple(one for one in bench if one),
            auditors=tuple(one for one in [seat("auditor")] if one),
        ), server.requests  # fmt: skip


def said(words: Says, body: Body) -> str:
    return words if isinstance(words, str) else words(body)


def in_turn(lines: Sequence[str | None], then: str = "") -> Callable[[Body], str]:
    """Replies with the lines in order, then always with `then`."""
    waiting = iter(lines)
    return lambda _: next(waiting, then) or ""


def recorded(
    task: Task, row: Example, feedback: FeedbackPolicy | None = None, seed: int = 0, **players: Any
) -> tuple[list[Record], list[Body]]:
    """The records of one row, and all requests."""
    with table(**players) as (cast, requests):
        engine = Engine(cast, feedback=feedback, seed=seed)
        return list(run(cast, engine.run([Job(task, row)], lambda record: None))), requests


def scored(task: Task, row: Example, episode: Episode, **players: Any) -> Score:
    """The score of an episode by judges over HTTP; exceptions of scoring propagate."""
    with table(**players) as (cast, _):
        score: Score = run(cast, task.score(row, episode, cast))
        return score


def asked_of(requests: Sequence[Body], name: str) -> list[Body]:
    """The requests to one player."""
    return [body for body in requests if str(body["model"]).startswith(name)]
