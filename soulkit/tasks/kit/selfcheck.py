"""Self-check: does a task's scorer agree with its own gold, and does every prompt of a row render?

Every row is answered twice by script: with the gold, which must score the maximum, and with a
readable wrong answer, which must not. What only a judge can score is *unscored*, unless the task
says what a judge would answer (`Task.scripted_verdict`). Then every prompt is rendered once:

    actor, with and without feedback: previews, slot      judge: score of the gold
    partner and environment: play with scripted players   coach: critique of the wrong answer
    what the task says is asked elsewhere: other_prompts

A row on which the task breaks is named with the error; what a task lacks is a warning.
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
from soulkit.tasks.kit.base import READABLE, Control, Rollout, Task
from soulkit.tasks.kit.loading import LoadedExamples
from soulkit.tasks.kit.registry import Registry
from soulkit.tasks.kit.user_code import checked_score, error_words
from soulkit.types import Call, Completion, Episode, Example, Feedback, Sampling, Score, Segment

ADVICE = Feedback(text="Look at it once more, and take your time.", author="check")
REPLY = "I see. What else?"
"""What scripted partners say; a coach may say it as well."""
SHARED = ("pairwise", "shown_draft")
"""Prompts that every task has and may have its own of."""


class GoldLines:
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


class _ScriptedModel:
    """Fills every role. A judge gives the task's scripted verdicts; the rest is answered by the
    lines of `gold` and by REPLY, or not at all (`silent`)."""

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
        """There is nothing to close."""


def _cast_of(model: _ScriptedModel) -> Cast:
    player = Player(model)
    return Cast(actor=player, partner=player, environment=player, judges=(player,), coach=player)


def scripted_cast(task: Task, gold: Episode | None) -> Cast:
    """Players that answer every question of `task`, the actor with the lines of `gold`."""
    return _cast_of(_ScriptedModel(task, gold, perfect=True, silent=False))


def silent_cast(task: Task | None = None, perfect: bool = True) -> Cast:
    """Players that answer nothing but questions to a judge whose verdicts `task` has scripted."""
    return _cast_of(_ScriptedModel(task, perfect=perfect, silent=True))


# -- what breaks ---------------------------------------------------------------------------------


async def broken_prompts(task: Task, example: Example) -> list[str]:
    """What keeps a row from being played or scored at all: the actor's and the judge's prompts."""
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
    """What breaks in the other prompts of a row, and in feedback on `draft` by rules."""
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
    """Whether feedback could tell the actor a gold that it does not see in one of its seats."""
    views = [example.visible(seat) for seat in task.acted_seats(example)]
    golds = [name for name in task.gold_fields if not name.startswith(HUMAN)]
    rows_golds = [name for name in golds if example.fields.get(name) is not None]
    return any(name not in view for name in rows_golds for view in views)


NO_COACH = (
    "a model coach is declared and has no prompt: the task has no coach.md of its own, and the "
    "shared one needs columns that its rows do not have"
)
NO_LEAK_CHECK = (
    "the leak check is off: rows have a gold that feedback could give away, and leak_view() gives "
    "None"
)
NO_SYMBOLIC = (
    "symbolic feedback is declared, and explain() says nothing about a wrong answer of any row"
)
ALIKE = (
    "symbolic feedback has {n} different texts on {of} wrong drafts, fewer than 1 in 10: it works "
    "like a fixed sentence in the prompt; name a model that coaches by default (players: coach)"
)
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Finding:
    """A row that the check names, and why."""

    source: str
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
    breaks: tuple[Finding, ...] = ()
    """What a run would stop at: a prompt that cannot be rendered, feedback that raises. One for
    each way in which it breaks."""
    warnings: tuple[str, ...] = ()
    """What the task declares and does not have; the check passes all the same."""
    unrendered: tuple[str, ...] = ()
    """Files in the task's prompts folder that no row needed."""
    duplicates: int = 0
    feedback_drafts: int = 0
    """Wrong drafts that the task's rules have feedback on, one of each row at most."""
    feedback_texts: int = 0
    bad: tuple[BadRow, ...] = ()
    rows_only: bool = False
    """The task has no scorer: its rows were read, and nothing was played."""

    @property
    def passed(self) -> bool:
        """Whether a right answer can be right: every gold scores the maximum, nothing breaks."""
        return not (self.gold_fails or self.breaks)


def check_task(task: Task, loaded: LoadedExamples, data: str = "") -> SelfCheck:
    """Play gold and wrong answers of every example through the task's own `score`.

    Of a rows-only task only the reading of the rows is checked.
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
    """The checks, with a warning for each prompt that no row of any task of its folder needed.

    Prompts of a folder with unchecked tasks are left out.
    """
    unrendered = {check.task: check.unrendered for check in checks}
    warned = []
    for check in checks:
        folder = registry.spec(check.task).home.folder
        sharing = [name for name, spec in registry.specs.items()
                   if spec.home.folder == folder and not spec.rows_only]  # fmt: skip
        unused = tuple(
            f"the prompt '{name}' was never rendered: no row here needs it, or nothing does"
            for name in check.unrendered
            if not check.breaks  # what broke kept others from being rendered
            and ("/" in name or all(name in unrendered.get(task, ()) for task in sharing))
        )
        warned.append(replace(check, warnings=(*check.warnings, *unused)))
    return warned


Played = tuple[Episode | None, Score | None, str]


class _Rehearsed:
    """What the prompts and the feedback of one task's rows came to."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.problems: dict[str, list[Example]] = {}
        self.rows = self.silent = self.uncoached = self.hidden = self.unguarded = 0
        self.judged = False
        self.feedback: list[str] = []
        """By rules, on wrong drafts."""

    async def before(self, example: Example) -> bool:
        """Whether the row can be played and scored at all."""
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

    def breaks(self) -> tuple[Finding, ...]:
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
        """Whether rules coach where nobody is named, and say nearly the same of every draft."""
        share = distinct_share(self.feedback)
        default = self.task.spec.players.under(self.task.protocol, "coach") or "symbolic"
        alike = share is not None and share < LEAST_DISTINCT
        return alike and default == "symbolic" and not self.judged


async def _findings(
    task: Task, loaded: LoadedExamples, rehearsed: _Rehearsed
) -> dict[str, list[Finding]]:
    findings: dict[str, list[Finding]] = {}
    for example in loaded.examples:
        if not await rehearsed.before(example):
            continue  # whatever it scored would be about the broken prompt
        gold = await scripted_play(task, example, task.gold, perfect=True)
        wrong = await scripted_play(task, example, task.wrong, perfect=False)
        for outcome, verdict in ((gold, _gold), (wrong, _wrong)):
            kind, why = verdict(task, *outcome)
            if kind:
                findings.setdefault(kind, []).append(_finding(example, outcome[0], why))
        await rehearsed.beside(example, wrong)
    return findings


def _gold(task: Task, played: Episode | None, score: Score | None, why: str) -> tuple[str, str]:
    """(kind of finding, why); both empty where there is nothing to find."""
    if why:
        return "gold_fails", why
    if played is None:
        return "no_gold", "the task has no scripted gold for it"
    if score is None or score.value is None:
        return "unscored", f"{score.reason}: {score.words}" if score else "its score needs a model"
    fails = score.value < task.spec.metric.high - _CLOSE
    return ("gold_fails", _scored(task, score)) if fails else ("", "")


def _wrong(task: Task, played: Episode | None, score: Score | None, why: str) -> tuple[str, str]:
    if why or played is None:
        return "no_wrong", why or "the task has no scripted wrong answer for it"
    if score is None or score.value is None:
        return "", ""  # the gold of the same row says that it needs a model
    if score.status not in READABLE:
        return "wrong_unread", _scored(task, score)
    passes = score.value >= task.spec.metric.high - _CLOSE
    return ("wrong_passes", _scored(task, score)) if passes else ("", "")


async def scripted_play(
    task: Task, example: Example, script: Callable[[Example], Episode | None], *, perfect: bool
) -> Played:
    """(episode, score, what broke): no score where a model is needed, no episode without script."""
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
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a row breaks is the finding
        return episode, None, error_words(error)


def _scored(task: Task, score: Score) -> str:
    read = f", read as '{score.words}'" if score.words else ""
    return f"scored {score.value:g} of {task.spec.metric.high:g} ({score.status}{read})"


def _finding(example: Example, played: Episode | None, why: str) -> Finding:
    text = played.final.text if played is not None and played.final is not None else ""
    return Finding(example.source, example.id, text, why)
