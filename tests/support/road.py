"""Helpers for end-to-end tests: rows, replies, and players over real HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import RawRow
from soulkit.errors import DataError
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.base import Cast, Player
from soulkit.tasks.kit import importing
from soulkit.tasks.kit.base import Rollout, Task
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.importing import Imported
from soulkit.tasks.kit.made_rows import Split, made_rows, make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Completion, Episode, Example, Line, Record, Sampling, Score, Trace, Turn
from tests.support.servers import openai_server as scripted

EVERY = tuple(load_registry().specs)
TASKS = tuple(name for name in EVERY if not load_registry().spec(name).rows_only)
"""Tasks that can be played."""
CHOICES = ("hitom", "paratomi", "tomi")


def batch_values(task: Task, records: Sequence[Record]) -> dict[str, float]:
    """The batch metrics that exist, without their counts."""
    metrics = task.batch_metrics(records)
    return {name: one.value for name, one in metrics.items() if one.value is not None}


def synth(name: str, n: int, seed: int) -> list[dict[str, Any]]:
    """Generated rows of a built-in task."""
    return make_rows(task_of(name), n, seed)


def makeable() -> list[str]:
    """The built-in tasks that can generate rows."""
    return load_registry().with_hook("synth")


def importable() -> list[str]:
    """The built-in tasks that import original files."""
    return load_registry().with_hook("importer")


def synth_rows(name: str, spec: str, seed: int, split: Split) -> list[RawRow]:
    """The rows of `synth:N` for a built-in task."""
    return made_rows(task_of(name), spec, seed, split)


def build_rows(name: str, path: Path, names: Path | None = None) -> Imported:
    """Rows of a built-in task from several original files."""
    return importing.build_rows(
        task_of(name), path, {} if names is None else {"--names": str(names)}
    )


def original(name: str) -> Path:
    """A file or folder of a release; the test is skipped if there is no copy."""
    path = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere") / name
    if not path.exists():
        pytest.skip(f"no original file {name} ($SOULKIT_TEST_DATA)")
    return path


def import_rows(name: str, path: Path, half: str | None = None) -> Imported:
    """The rows of an original file of a built-in task."""
    return importing.import_rows(task_of(name), path, {} if half is None else {"--half": half})


def task_of(name: str, protocol: str = "paper") -> Any:
    return load_registry().task(name, protocol)  # type: ignore[arg-type]


def synth_examples(name: str, n: int = 60, protocol: str = "paper", seed: int = 5) -> list[Example]:
    """Generated rows as examples, without those that `reference` cannot score."""
    task, examples = task_of(name, protocol), []
    for row in synth(name, n, seed):
        try:
            examples.append(task.example(row))
        except DataError:
            if protocol == "paper":
                raise
    return examples


def episode_of(task: ChoiceTask, example: Example, text: str, stop: str = "stop") -> Episode:
    """The episode in which the actor answers `text`."""
    completion = Completion(text=text, stop_reason=stop)
    context = task.context(example, None)
    seat = task.acted_seat(example)
    return Episode(
        example_id=example.id,
        task=task.name,
        traces=(Trace(seat, (Turn(context, completion),)),),
        transcript=(Line(seat, text),),
        stop=stop,
    )


def score_text(task: ChoiceTask, example: Example, text: str, stop: str = "stop") -> Score:
    return asyncio.run(task.score(example, episode_of(task, example, text, stop), NO_ONE))


def player(base_url: str, name: str = "scripted", **sampling: Any) -> Player:
    endpoint = Endpoint(model=name, base_url=base_url, max_attempts=1, backoff_s=0.0)
    return Player(endpoint, replace(Sampling(), **sampling))


@contextmanager
def played_by(answer: Any, **server: Any) -> Iterator[Player]:
    """A player whose replies come from `answer` (a text, or a function of the request)."""
    with scripted.ScriptedServer(answer=answer, **server) as running:
        yield player(running.base_url)


# The tasks here are scored by rules; a model that is never asked needs no server behind it.
NO_ONE = Cast(actor=player("http://127.0.0.1:9/v1"))
ROLLOUT = Rollout()


async def _closing(cast: Cast, work: Any) -> Any:
    try:
        return await work
    finally:
        for one in cast.players:
            await one.model.close()


def run(cast: Cast, work: Any) -> Any:
    """Run `work` and return its result; closes the models of the cast."""
    return asyncio.run(_closing(cast, work))
