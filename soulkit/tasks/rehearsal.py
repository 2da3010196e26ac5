"""Every prompt of a row is rendered once, without a model: what a run would stop at, found before.

    the actor's first prompts, and the same with feedback in the slot    previews, slot
    what a judge is asked about the gold                                 score
    what a partner or environment is told                                play, with scripted players
    what a coach is asked about the wrong answer                         critique
    what the task says is asked elsewhere                                other_prompts

Which files were rendered on the way is noted by the task's PromptFolder.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from soulkit.data.rows import HUMAN
from soulkit.errors import CallError, UserError
from soulkit.models.base import Cast, Player
from soulkit.tasks.base import Rollout, Task
from soulkit.tasks.controls import Control
from soulkit.tasks.guarding import error_words
from soulkit.types import Call, Completion, Episode, Example, Feedback, Sampling, Score, Segment

ADVICE = Feedback(text="Look at it once more, and take your time.", author="check")
REPLY = "I see. What else?"
"""What scripted partners say; a coach may say it as well."""
SHARED = ("pairwise", "shown_draft")
"""Prompts that every task has and may have its own of."""


class Recital:
    """What the actor says in a scripted episode, turn by turn.

    A call that names its seat gets that seat's next line; others the line of their turn.
    """

    def __init__(self, gold: Episode | None) -> None:
        traces = gold.traces if gold is not None else ()
        self._lines = {t.seat: [turn.completion.text for turn in t.turns] for t in traces}
        self._calls: Counter[str] = Counter()

    def line(self, call: Call) -> str | None:
        """The line for this call; None where the script has none left."""
        first = next(iter(self._lines), "")
        lines = self._lines.get(call.seat or first, [])
        place = self._calls[call.seat] if call.seat else call.turn
        self._calls[call.seat] += 1
        return lines[place] if place < len(lines) else None


class _Script:
    """Takes every seat: the actor says the gold's lines, a judge what the task has scripted."""

    name = "script"

    def __init__(self, task: Task, gold: Episode | None) -> None:
        self.task, self.recital, self.last = task, Recital(gold), REPLY

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        if call.role == "actor":
            self.last = self.recital.line(call) or self.last
            return Completion(text=self.last)
        if call.role == "judge":
            return Completion(text=self.task.scripted_verdict(sampling.form, perfect=True) or "")
        return Completion(text=REPLY)

    async def close(self) -> None:
        """There is nothing to close."""


def _cast(task: Task, gold: Episode | None) -> Cast:
    player = Player(_Script(task, gold))
    return Cast(actor=player, partner=player, environment=player, judges=(player,), coach=player)


# -- what breaks ---------------------------------------------------------------------------------


async def breaks_before_scoring(task: Task, example: Example) -> list[str]:
    """What keeps a row from being played or scored at all: the actor's and the judge's prompts."""
    problems = [await _broken(step) for step in _openings(task, example)]
    if not any(problems):
        problems.append(await _broken(lambda: _judged(task, example)))
    return [problem for problem in problems if problem]


async def _judged(task: Task, example: Example) -> None:
    gold = task.gold(example) if task.calls(example).get("judge") else None
    if gold is not None:
        await task.score(example, gold, _cast(task, gold))


def _openings(task: Task, example: Example) -> Iterator[Callable[[], Any]]:
    """The actor's prompts. A task that defines none is for evaluations that never plan."""
    if (type(task).preview, type(task).previews) != (Task.preview, Task.previews):
        yield lambda: task.previews(example)
    if type(task).slot is not Task.slot:
        yield lambda: [task.slot(example, seat, ADVICE) for seat in task.acted_seats(example)]


async def breaks_beside_scoring(
    task: Task, example: Example, draft: Episode | None, score: Score | None
) -> list[str]:
    """What breaks in the other prompts of a row, and in feedback on `draft` by rules."""
    steps: list[Callable[[], Any]] = [
        lambda: list(_others(task, example, draft, score)),
        lambda: task.leak_view(example),
    ]
    if {"partner", "environment"} & set(task.calls(example)):
        steps.append(lambda: task.play(example, _cast(task, task.gold(example)), Rollout()))
    if asks_coach(task) and draft is not None and not has_no_coach_prompt(task, example, draft):
        steps.append(lambda: _critique(task, example, draft, score))
    if "symbolic" in task.spec.feedback.coaches:
        steps.append(lambda: task.explain(example, draft, score))
    steps += [partial(_control, task, control, example, draft) for control in task.controls]
    problems = [await _broken(step) for step in steps]
    return [problem for problem in problems if problem]


async def _control(
    task: Task, control: Control, example: Example, draft: Episode | None
) -> Score | None:
    """Asks about a control; without a draft there is none of an episode."""
    episode = task.gold(example) if control.per == "row" else draft
    if episode is None and control.per == "episode":
        return None
    return await task.controlled(control.name, example, episode, _cast(task, None))


def _critique(
    task: Task, example: Example, draft: Episode, score: Score | None
) -> Awaitable[Feedback | None]:
    cast = _cast(task, None)
    return task.critique(example, draft, score or _lowest(task), cast, Rollout())


def _lowest(task: Task) -> Score:
    """The score of a draft that only a model could score."""
    low = task.spec.metric.low
    return Score(value=low, reward=low, protocol=task.protocol)


def _others(
    task: Task, example: Example, draft: Episode | None, score: Score | None
) -> Iterator[tuple[str, str]]:
    if draft is not None:
        yield from task.other_prompts(example, draft, score or _lowest(task))
    values = {
        "title": task.spec.title, "summary": task.spec.summary,
        "seat": " and ".join(task.acted_seats(example)), "setting": "(what the judge may see)",
        "a": REPLY, "b": REPLY, "draft": REPLY, "feedback": ADVICE.text,
    }  # fmt: skip
    for name in SHARED:
        if not task.prompts.is_shared(name):
            yield name, task.prompts.render(name, **values)


async def _broken(step: Callable[[], Any]) -> str:
    """What a step raises, in one line; empty where it works or only its script was of no use."""
    try:
        result = step()
        if inspect.isawaitable(result):
            await result
    except CallError:
        return ""
    except UserError as error:
        return " ".join(error.lines())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever breaks is the finding
        return error_words(error)
    return ""


# -- what is missing -----------------------------------------------------------------------------


def asks_coach(task: Task) -> bool:
    return "model" in task.spec.feedback.coaches


def has_no_coach_prompt(task: Task, example: Example, draft: Episode) -> bool:
    """Whether a coach would be asked with the shared prompt, which needs columns of stories."""
    if type(task).critique is not Task.critique or not task.prompts.is_shared("coach"):
        return False
    try:
        task.prompts.render("coach", **task.coach_view(example, draft, _lowest(task)))
    except UserError:
        return True
    except (Exception, SystemExit):  # noqa: BLE001 - the critique breaks on it as well, and is named for it
        return False
    return False


def hides_gold(task: Task, example: Example) -> bool:
    """Whether a row has a gold that the actor does not see, in one of its seats at least, so that
    feedback could tell it."""
    views = [example.visible(seat) for seat in task.acted_seats(example)]
    golds = [name for name in task.gold_fields if not name.startswith(HUMAN)]
    rows_golds = [name for name in golds if example.fields.get(name) is not None]
    return any(name not in view for name in rows_golds for view in views)
