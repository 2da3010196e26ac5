"""Rows tried by script before a run: drafts that nobody sampled, plays in which no model speaks.

Everything here is deterministic and asks nobody. What a task breaks on is left out, because the
run meets it in its own words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from soulkit.errors import UserError
from soulkit.models.base import Cast, Player
from soulkit.tasks.base import Rollout, Task
from soulkit.tasks.guarding import checked_episode
from soulkit.tasks.rehearsal import Recital
from soulkit.tasks.selfcheck import scripted_play
from soulkit.types import (
    Call,
    Completion,
    Episode,
    Example,
    Feedback,
    Line,
    Sampling,
    Score,
    Segment,
    Trace,
    Turn,
)


async def play_drafts(task: Task, example: Example) -> list[tuple[Episode, Score]]:
    """A wrong, a perfect and an empty episode with their scores, as far as the task has them.

    What only a judge could score is taken with the lowest and the highest score that there are, and
    so is what the rules take for perfect although it is not.
    """
    pairs: list[tuple[Episode, Score]] = []
    for script, perfect in ((task.wrong, False), (task.gold, True), (_mute(task), False)):
        episode, score, _ = await scripted_play(task, example, script, perfect=perfect)
        if episode is not None:
            pairs += [(episode, one) for one in _scores(task, score, perfect)]
    return pairs


def _scores(task: Task, score: Score | None, perfect: bool) -> Sequence[Score]:
    value = None if score is None else score.value
    if score is None or value is None or (value >= task.spec.metric.high and not perfect):
        return extremes(task)
    return [score]


def extremes(task: Task) -> tuple[Score, Score]:
    """The lowest and the highest score of a task, made up."""
    low, high = task.spec.metric.low, task.spec.metric.high
    worst = Score(value=low, reward=low, protocol=task.protocol)
    return worst, replace(worst, value=high, reward=high)


def _mute(task: Task) -> Callable[[Example], Episode]:
    """A script of an actor that says nothing, in any of its seats."""

    def script(example: Example) -> Episode:
        contexts, silence = task.previews(example), Completion(text="")
        return Episode(
            example_id=example.id, task=task.name,
            traces=tuple(Trace(seat, (Turn(c, silence),)) for seat, c in contexts.items()),
            transcript=tuple(Line(seat, "") for seat in contexts),
        )  # fmt: skip

    return script


async def turns(
    task: Task, example: Example, feedback: Feedback | None
) -> list[tuple[str, tuple[Segment, ...]]]:
    """(seat, context) of every turn of the actor, who speaks the gold; empty where it cannot be
    played so."""
    rollout = Rollout(kind="refined" if feedback else "draft", feedback=feedback)
    try:
        episode = await task.play(example, _reciters(task, example), rollout)
        episode = checked_episode(task, episode)
    except UserError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001 - the run meets it with real replies, or not
        return []
    return [(trace.seat, turn.context) for trace in episode.traces for turn in trace.turns]


def _reciters(task: Task, example: Example) -> Cast:
    actor, other = Player(_Reciter(task.gold(example))), Player(_Reciter(None))
    return Cast(actor=actor, partner=other, environment=other, judges=(other,), coach=other)


class _Reciter:
    """Says its lines, a turn each, and agrees when there are none left."""

    name = "none"

    def __init__(self, gold: Episode | None) -> None:
        self.recital = Recital(gold)

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        line = self.recital.line(call)
        return Completion(text="Yes." if line is None else line)

    async def close(self) -> None:
        """There is nothing to close."""
