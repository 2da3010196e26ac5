"""Self-check: does the scorer agree with the task's gold, and can every prompt be rendered?

Each row is played twice from a script: with the gold, which must get the maximum score, and with a
readable wrong answer, which must not. Rows that need a judge stay *unscored* unless the task
scripts the judge's answers (`Task.scripted_verdict`). Then every prompt is rendered once:

    actor, with and without feedback: previews, slot      judge: score of the gold
    partner and environment: play with scripted players   coach: critique of the wrong answer
    prompts of other calls: other_prompts

A row that raises is listed with its error; missing optional parts of a task are warnings.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from soulkit.data.files import BadRow
from soulkit.data.rows import HUMAN
from soulkit.errors import CallError, ProviderError, TaskError, UserError
from soulkit.judge.coach import LEAST_DISTINCT, distinct_share
from soulkit.models.base import Cast, Player
from soulkit.models.players.functions import error_words
from soulkit.tasks.kit.base import READABLE, Control, Rollout, Task
from soulkit.tasks.kit.loading import LoadedExamples
from soulkit.tasks.kit.registry import Registry
from soulkit.tasks.kit.user_code import checked_score
from soulkit.types import Call, Completion, Episode, Example, Feedback, Sampling, Score, Segment

ADVICE = Feedback(text="Look at it once more, and take your time.", author="check")
REPLY = "I see. What else?"
"""Reply of scripted partners and coaches."""
SHARED = ("pairwise", "shown_draft")
"""Shared prompts that a task may replace with its own."""


class GoldLines:
    """The actor's lines in a scripted episode, turn by turn.

    A call with a seat gets that seat's next line; other calls get the line of their turn.
    """

    def __init__(self, gold: Episode | None) -> None:
        traces = gold.traces if gold is not None else ()
        self._lines = {t.seat: [turn.completion.text for turn in t.turns] for t in traces}
        self._calls: Counter[str] = Counter()

    def line(self, call: Call) -> str | None:
        """The line for this call; None if the script is used up."""
        first = next(iter(self._lines), "")
        lines = self._lines.get(call.seat or first, [])
        place = self._calls[call.seat] if call.seat else call.turn
        self._calls[call.seat] += 1
        return lines[place] if place < len(lines) else None


class _ScriptedModel:
    """Fills every role: judges give the task's scripted verdicts, other roles say the lines of
    `gold` and then REPLY, or fail (`silent`)."""

    name = "script"

    def __init__(
        self, task: Task | None, gold: Episode | None = None, *, perfect: bool, silent: bool
    ) -> None:
        self.task, self.perfect, self.silent = task, perfect, silent
        self.gold, self.last = GoldLines(gold), REPLY

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        verdict = None
        if call.role == "judge" and self.task is not None:
            verdict = self.task.scripted_verdict(sampling.form, self.perfect)
        if self.silent and verdict is None:
            raise ProviderError(f"the score needs a model in the role '{call.role}'")
        if call.role == "actor":
            self.last = self.gold.line(call) or self.last
            return Completion(text=self.last)
        return Completion(text=(verdict or "") if call.role == "judge" else REPLY)

    async def close(self) -> None:
        """Nothing to close."""


def _cast_of(model: _ScriptedModel) -> Cast:
    player = Player(model)
    return Cast(actor=player, partner=player, environment=player, judges=(player,), coach=player)


def scripted_cast(task: Task, gold: Episode | None) -> Cast:
    """Players that answer every call of `task`; the actor says the lines of `gold`."""
    return _cast_of(_ScriptedModel(task, gold, perfect=True, silent=False))


def silent_cast(task: Task | None = None, perfect: bool = True) -> Cast:
    """Players that answer only judge questions for which `task` scripts a verdict; other calls
    fail."""
    return _cast_of(_ScriptedModel(task, perfect=perfect, silent=True))


# -- errors in tasks -----------------------------------------------------------------------------


async def broken_prompts(task: Task, example: Example) -> list[str]:
    """Errors in the actor's and judge's prompts, which prevent playing or scoring the row."""
    problems = [await _broken(step) for step in _openings(task, example)]
    if not any(problems):
        problems.append(await _broken(lambda: _judged(task, example)))
    return [problem for problem in problems if problem]


async def _judged(task: Task, example: Example) -> None:
    gold = task.gold(example) if task.calls(example).get("judge") else None
    if gold is not None:
        await task.score(example, gold, scripted_cast(task, gold))


def _openings(task: Task, example: Example) -> Iterator[Callable[[], Any]]:
    if (type(task).preview, type(task).previews) != (Task.preview, Task.previews):
        yield lambda: task.previews(example)
    if type(task).slot is not Task.slot:
        yield lambda: [task.slot(example, seat, ADVICE) for seat in task.acted_seats(example)]


async def broken_feedback(
    task: Task, example: Example, draft: Episode | None, score: Score | None
) -> list[str]:
    """Errors in the row's other prompts, and in rule-based feedback on `draft`."""
    steps: list[Callable[[], Any]] = [
        lambda: list(_others(task, example, draft, score)),
        lambda: task.leak_view(example),
    ]
    if {"partner", "environment"} & set(task.calls(example)):
        steps.append(lambda: task.play(example, scripted_cast(task, task.gold(example)), Rollout()))
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
    episode = task.gold(example) if control.per == "row" else draft
    if episode is None and control.per == "episode":
        return None
    return await task.controlled(control.name, example, episode, scripted_cast(task, None))


def _critique(
    task: Task, example: Example, draft: Episode, score: Score | None
) -> Awaitable[Feedback | None]:
    cast = scripted_cast(task, None)
    return task.critique(example, draft, score or _lowest(task), cast, Rollout())


def _lowest(task: Task) -> Score:
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
    """The error of a step in one line; empty if it works or its script does not apply."""
    try:
        result = step()
        if inspect.isawaitable(result):
            await result
    except CallError:
        return ""
    except UserError as error:
        return " ".join(error.lines())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any exception is a finding
        return error_words(error)
    return ""


# -- missing parts -------------------------------------------------------------------------------


def asks_coach(task: Task) -> bool:
    return "model" in task.spec.feedback.coaches


def has_no_coach_prompt(task: Task, example: Example, draft: Episode) -> bool:
    """Whether a coach would get the shared prompt, but the rows lack the columns it needs."""
    if type(task).critique is not Task.critique or not task.prompts.is_shared("coach"):
        return False
    try:
        task.prompts.render("coach", **task.coach_view(example, draft, _lowest(task)))
    except UserError:
        return True
    except (Exception, SystemExit):  # noqa: BLE001 - the critique raises it too, and reports it
        return False
    return False


def hides_gold(task: Task, example: Example) -> bool:
    """Whether feedback could reveal a gold that at least one of the actor's seats does not see."""
    views = [example.visible(seat) for seat in task.acted_seats(example)]
    golds = [name for name in task.gold_fields if not name.startswith(HUMAN)]
    rows_golds = [name for name in golds if example.fields.get(name) is not None]
    return any(name not in view for name in rows_golds for view in views)


NO_COACH = (
    "the task declares a model coach but has no coach.md, and its rows lack columns of the "
    "shared coach prompt"
)
NO_LEAK_CHECK = (
    "the leak check is off: rows have a gold that feedback could reveal, but leak_view() returns "
    "None"
)
NO_SYMBOLIC = "the task declares symbolic feedback, but explain() returns none for any wrong answer"
ALIKE = (
    "symbolic feedback has {n} different texts for {of} wrong drafts, fewer than 1 in 10: it works "
    "like a fixed sentence in the prompt; declare a model as the default coach (players: coach)"
)
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Defect:
    """A row that the check reports, and the reason."""

    source: str
    example: str
    played: str
    """The scripted answer; empty if there is none."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """The check of one task's rows."""

    task: str
    protocol: str
    data: str
    rows: int
    """Different rows that were played."""
    gold_fails: tuple[Defect, ...] = ()
    """The gold scores less than the maximum, or cannot be scripted or scored."""
    wrong_passes: tuple[Defect, ...] = ()
    wrong_unread: tuple[Defect, ...] = ()
    """The wrong answer was unreadable, so it does not test the scorer."""
    no_gold: tuple[Defect, ...] = ()
    no_wrong: tuple[Defect, ...] = ()
    unscored: tuple[Defect, ...] = ()
    breaks: tuple[Defect, ...] = ()
    """Errors that would stop a run: a prompt that cannot be rendered, feedback that raises. One
    finding per kind of error."""
    warnings: tuple[str, ...] = ()
    """What the task declares but lacks; the check passes anyway."""
    unrendered: tuple[str, ...] = ()
    """Prompt files that no row used."""
    duplicates: int = 0
    feedback_drafts: int = 0
    """Wrong drafts with rule-based feedback, at most one per row."""
    feedback_texts: int = 0
    bad: tuple[BadRow, ...] = ()
    rows_only: bool = False
    """The task has no scorer: its rows were read but not played."""

    @property
    def passed(self) -> bool:
        """Whether every gold gets the maximum score and nothing raises."""
        return not (self.gold_fails or self.breaks)


def check_task(task: Task, loaded: LoadedExamples, data: str = "") -> SelfCheck:
    """Play gold and wrong answers of every example through the task's own `score`.

    For a rows-only task, only check that its rows are readable.
    """
    rows_only = task.spec.rows_only
    rehearsed = _Rehearsed(task)
    findings = {} if rows_only else asyncio.run(_findings(task, loaded, rehearsed))
    return SelfCheck(
        task=task.name,
        protocol=task.protocol,
        data=data,
        rows=len(loaded.examples),
        breaks=() if rows_only else rehearsed.breaks(),
        warnings=() if rows_only else rehearsed.warnings(),
        unrendered=() if rows_only else tuple(task.prompts.unopened(task.spec.home.folder)),
        duplicates=loaded.duplicates,
        feedback_drafts=len(rehearsed.feedback),
        feedback_texts=len(set(rehearsed.feedback)),
        bad=loaded.bad,
        rows_only=rows_only,
        **{kind: tuple(rows) for kind, rows in findings.items()},
    )


def with_unused_prompts(checks: Sequence[SelfCheck], registry: Registry) -> list[SelfCheck]:
    """The checks, with a warning for each prompt that no row of the folder's tasks used.

    Folders with unchecked tasks are skipped.
    """
    unrendered = {check.task: check.unrendered for check in checks}
    warned = []
    for check in checks:
        folder = registry.spec(check.task).home.folder
        sharing = [name for name, spec in registry.specs.items()
                   if spec.home.folder == folder and not spec.rows_only]  # fmt: skip
        unused = tuple(
            f"the prompt '{name}' was never rendered: these rows do not need it, or it is unused"
            for name in check.unrendered
            if not check.breaks  # an error may have kept other prompts from being rendered
            and ("/" in name or all(name in unrendered.get(task, ()) for task in sharing))
        )
        warned.append(replace(check, warnings=(*check.warnings, *unused)))
    return warned


Played = tuple[Episode | None, Score | None, str]


class _Rehearsed:
    """Prompt errors and feedback collected over the rows of a task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.problems: dict[str, list[Example]] = {}
        self.rows = self.silent = self.uncoached = self.hidden = self.unguarded = 0
        self.judged = False
        self.feedback: list[str] = []
        """Rule-based feedback on wrong drafts."""

    async def before(self, example: Example) -> bool:
        """Whether the row can be played and scored."""
        return self._note(example, await broken_prompts(self.task, example))

    async def beside(self, example: Example, wrong: Played) -> None:
        task, (draft, score, _) = self.task, wrong
        if not self._note(example, await broken_feedback(task, example, draft, score)):
            return
        self.rows += 1
        self.judged |= "judge" in task.calls(example)
        if "symbolic" in task.spec.feedback.coaches:
            text = task.explain(example, draft, score)
            self.silent += not text
            if text and draft is not None and score is not None and score.scored:
                self.feedback.append(text)
        if asks_coach(task) and draft is not None:
            self.uncoached += has_no_coach_prompt(task, example, draft)
        if hides_gold(task, example):
            self.hidden += 1
            self.unguarded += task.leak_view(example) is None

    def _note(self, example: Example, problems: Sequence[str]) -> bool:
        for problem in dict.fromkeys(problems):
            self.problems.setdefault(problem, []).append(example)
        return not problems

    def breaks(self) -> tuple[Defect, ...]:
        return tuple(
            _finding(rows[0], None, f"{problem} ({len(rows)} row{'s' * (len(rows) > 1)})")
            for problem, rows in self.problems.items()
        )

    def warnings(self) -> tuple[str, ...]:
        feedback = self.task.spec.feedback
        guards = bool(feedback.coaches) and feedback.kind == "coach"
        missing = {
            NO_COACH: self.uncoached > 0,
            NO_LEAK_CHECK: guards and 0 < self.hidden == self.unguarded,
            NO_SYMBOLIC: 0 < self.rows == self.silent,
            ALIKE.format(n=len(set(self.feedback)), of=len(self.feedback)): self._rules_coach(),
        }
        return tuple(text for text, applies in missing.items() if applies)

    def _rules_coach(self) -> bool:
        """Whether the default coach is rule-based and says nearly the same about every draft."""
        share = distinct_share(self.feedback)
        default = self.task.spec.players.under(self.task.protocol, "coach") or "symbolic"
        alike = share is not None and share < LEAST_DISTINCT
        return alike and default == "symbolic" and not self.judged


async def _findings(
    task: Task, loaded: LoadedExamples, rehearsed: _Rehearsed
) -> dict[str, list[Defect]]:
    findings: dict[str, list[Defect]] = {}
    for example in loaded.examples:
        if not await rehearsed.before(example):
            continue  # its score would only reflect the broken prompt
        gold = await scripted_play(task, example, task.gold, perfect=True)
        wrong = await scripted_play(task, example, task.wrong, perfect=False)
        for outcome, verdict in ((gold, _gold), (wrong, _wrong)):
            kind, why = verdict(task, *outcome)
            if kind:
                findings.setdefault(kind, []).append(_finding(example, outcome[0], why))
        await rehearsed.beside(example, wrong)
    return findings


def _gold(task: Task, played: Episode | None, score: Score | None, why: str) -> tuple[str, str]:
    """(kind of finding, why); both empty if there is nothing to report."""
    if why:
        return "gold_fails", why
    if played is None:
        return "no_gold", "the task has no scripted gold for this row"
    if score is None or score.value is None:
        return "unscored", f"{score.reason}: {score.words}" if score else "scoring needs a model"
    fails = score.value < task.spec.metric.high - _CLOSE
    return ("gold_fails", _scored(task, score)) if fails else ("", "")


def _wrong(task: Task, played: Episode | None, score: Score | None, why: str) -> tuple[str, str]:
    if why or played is None:
        return "no_wrong", why or "the task has no scripted wrong answer for this row"
    if score is None or score.value is None:
        return "", ""  # already reported for the gold of this row
    if score.status not in READABLE:
        return "wrong_unread", _scored(task, score)
    passes = score.value >= task.spec.metric.high - _CLOSE
    return ("wrong_passes", _scored(task, score)) if passes else ("", "")


async def scripted_play(
    task: Task, example: Example, script: Callable[[Example], Episode | None], *, perfect: bool
) -> Played:
    """(episode, score, error): no score if a model is needed, no episode without a script."""
    episode = None
    try:
        episode = script(example)
        if episode is None:
            return None, None, ""
        score = await task.score(example, episode, silent_cast(task, perfect))
        return episode, checked_score(task, score), ""
    except TaskError as error:
        return episode, None, error.detail
    except CallError:
        return episode, None, ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any exception is a finding
        return episode, None, error_words(error)


def _scored(task: Task, score: Score) -> str:
    read = f", read as '{score.words}'" if score.words else ""
    return f"scored {score.value:g} of {task.spec.metric.high:g} ({score.status}{read})"


def _finding(example: Example, played: Episode | None, why: str) -> Defect:
    text = played.final.text if played is not None and played.final is not None else ""
    return Defect(example.source, example.id, text, why)
