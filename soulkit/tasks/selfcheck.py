"""Does a task's scorer agree with its own gold? Every row is answered twice by script, without a
model: once with the gold, which must score the maximum, and once with a readable wrong answer,
which must not.

Example: a Hi-ToM row whose options are `A. red_box, B. blue_bag` and whose gold is `red_box` is
answered with `<answer>A</answer>` and `<answer>B</answer>`. A gold that fails means that no model
could be right about that row; a wrong answer that passes, that any model could.

What only a judge model can score is *unscored* here, unless the task says what a judge would
answer (`Task.verdict`): then prompts, parsing and arithmetic are checked, and a judge's taste is
not. A task that breaks on a row has that row named with the error, because one such row would end a
real run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from soulkit.data.files import BadRow
from soulkit.errors import CallError, ProviderError
from soulkit.models.base import Cast, Player
from soulkit.tasks.base import READABLE, Task
from soulkit.tasks.loading import Loaded
from soulkit.types import Call, Completion, Episode, Example, Sampling, Score, Segment

_CLOSE = 1e-9
"""A maximum that was computed may miss its number by this much."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A row that the check names, and why."""

    source: str
    """Where the row stands: `file:number`."""
    example: str
    played: str
    """The scripted answer, empty where there is none."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """The check of one task's rows."""

    task: str
    protocol: str
    data: str
    """Where the rows came from."""
    rows: int
    """Different rows that were played."""
    gold_fails: tuple[Finding, ...] = ()
    """The gold scores less than the maximum, or cannot be scripted or scored."""
    wrong_passes: tuple[Finding, ...] = ()
    wrong_unread: tuple[Finding, ...] = ()
    """The wrong answer could not be read, so it shows nothing about the scoring."""
    no_gold: tuple[Finding, ...] = ()
    no_wrong: tuple[Finding, ...] = ()
    unscored: tuple[Finding, ...] = ()
    """Rows whose score needs a model."""
    duplicates: int = 0
    bad: tuple[BadRow, ...] = ()
    rows_only: bool = False
    """The task has no scorer: its rows were read, and nothing was played."""


class _NoModel:
    """Takes every seat and answers nobody, but for the verdicts that a task has scripted: what else
    needs it stays unscored."""

    name = "none"

    def __init__(self, task: Task | None, perfect: bool) -> None:
        self.task, self.perfect = task, perfect

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        if call.role == "judge" and self.task is not None:
            form = sampling.form.name if sampling.form is not None else ""
            verdict = self.task.verdict(form, self.perfect)
            if verdict is not None:
                return Completion(text=verdict)
        raise ProviderError(f"the score needs a model in the role '{call.role}'")

    async def close(self) -> None:
        """There is nothing to close."""


def check_task(task: Task, loaded: Loaded, data: str = "") -> SelfCheck:
    """Play gold and wrong answers of every example through the task's own `score`.

    Of a rows-only task only the reading of the rows is checked.
    """
    findings_by_kind = {} if task.spec.rows_only else asyncio.run(_findings(task, loaded))
    return SelfCheck(
        task=task.name,
        protocol=task.protocol,
        data=data,
        rows=len(loaded.examples),
        duplicates=loaded.duplicates,
        bad=loaded.bad,
        rows_only=task.spec.rows_only,
        **{kind: tuple(findings) for kind, findings in findings_by_kind.items()},
    )


_CheckOutcome = tuple[str, Finding | None]


async def _findings(task: Task, loaded: Loaded) -> dict[str, list[Finding]]:
    findings: dict[str, list[Finding]] = {}
    for example in loaded.examples:
        for check in (_check_gold, _check_wrong):
            kind, finding = await check(task, example)
            if finding is not None:
                findings.setdefault(kind, []).append(finding)
    return findings


async def _check_gold(task: Task, example: Example) -> _CheckOutcome:
    played, score, why = await scripted_play(task, example, task.gold, perfect=True)
    if why:
        return "gold_fails", _finding(example, played, why)
    if played is None:
        return "no_gold", _finding(example, None, "the task has no scripted gold for it")
    if score is None or score.value is None:
        return "unscored", _finding(example, played, _needs(score))
    if score.value < task.spec.metric.high - _CLOSE:
        return "gold_fails", _finding(example, played, _scored(task, score))
    return "", None


async def _check_wrong(task: Task, example: Example) -> _CheckOutcome:
    played, score, why = await scripted_play(task, example, task.wrong, perfect=False)
    if why or played is None:
        reason = why or "the task has no scripted wrong answer for it"
        return "no_wrong", _finding(example, played, reason)
    if score is None or score.value is None:
        return "", None  # the gold of the same row says that it needs a model
    if score.status not in READABLE:
        return "wrong_unread", _finding(example, played, _scored(task, score))
    if score.value >= task.spec.metric.high - _CLOSE:
        return "wrong_passes", _finding(example, played, _scored(task, score))
    return "", None


async def scripted_play(
    task: Task, example: Example, script: Callable[[Example], Episode | None], *, perfect: bool
) -> tuple[Episode | None, Score | None, str]:
    """(episode, score, what broke): no score where a model is needed, no episode without script."""
    episode = None
    try:
        episode = script(example)
        if episode is None:
            return None, None, ""
        return episode, await task.score(example, episode, nobody(task, perfect)), ""
    except CallError:
        return episode, None, ""
    except Exception as error:  # noqa: BLE001 - whatever a row breaks is the finding, told by name
        return episode, None, f"{type(error).__name__}: {error}"


def nobody(task: Task | None = None, perfect: bool = True) -> Cast:
    silent = Player(_NoModel(task, perfect))
    return Cast(actor=silent, partner=silent, environment=silent, judges=(silent,), coach=silent)


def _needs(score: Score | None) -> str:
    return f"{score.reason}: {score.words}" if score is not None else "its score needs a model"


def _scored(task: Task, score: Score) -> str:
    read = f", read as '{score.words}'" if score.words else ""
    return f"scored {score.value:g} of {task.spec.metric.high:g} ({score.status}{read})"


def _finding(example: Example, played: Episode | None, why: str) -> Finding:
    text = played.final.text if played is not None and played.final is not None else ""
    return Finding(example.source, example.id, text, why)
