"""Does a task's scorer agree with its own gold? Every row is answered twice by script, without a
model: once with the gold, which must score the maximum, and once with a readable wrong answer,
which must not.

Example: a row whose options are `A. red_box, B. blue_bag` and whose gold is `red_box` is
answered with `<answer>A</answer>` and `<answer>B</answer>`. A gold that fails means that no model
could be right about that row; a wrong answer that passes, that any model could.

What only a judge model can score is *unscored* here, unless the task says what a judge would
answer (`Task.verdict`): then prompts, parsing and arithmetic are checked, and a judge's taste is
not. A task that breaks on a row has that row named with the error, because one such row would end a
real run.

On the way every prompt of a row is rendered (rehearsal.py), and what a task promises and does not
have is told as a warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from soulkit.data.files import BadRow
from soulkit.errors import CallError, ProviderError, TaskError
from soulkit.judge.coach import LEAST_DISTINCT, distinct_share
from soulkit.models.base import Cast, Player
from soulkit.tasks.base import READABLE, Task
from soulkit.tasks.guarding import checked_score, error_words
from soulkit.tasks.loading import Loaded
from soulkit.tasks.registry import Registry
from soulkit.tasks.rehearsal import (
    asks_coach,
    breaks_before_scoring,
    breaks_beside_scoring,
    has_no_coach_prompt,
    hides_gold,
)
from soulkit.types import Call, Completion, Episode, Example, Sampling, Score, Segment

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
    """Different texts among this feedback."""
    bad: tuple[BadRow, ...] = ()
    rows_only: bool = False
    """The task has no scorer: its rows were read, and nothing was played."""

    @property
    def passed(self) -> bool:
        """Whether a right answer can be right: every gold scores the maximum, nothing breaks."""
        return not (self.gold_fails or self.breaks)


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
            verdict = self.task.scripted_verdict(sampling.form, self.perfect)
            if verdict is not None:
                return Completion(text=verdict)
        raise ProviderError(f"the score needs a model in the role '{call.role}'")

    async def close(self) -> None:
        """There is nothing to close."""


def check_task(task: Task, loaded: Loaded, data: str = "") -> SelfCheck:
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
        **{kind: tuple(several) for kind, several in findings.items()},
    )


def with_unused(checks: Sequence[SelfCheck], registry: Registry) -> list[SelfCheck]:
    """The checks, with a warning for each prompt that no row of any task of its folder needed.

    Tasks may share a folder: where one of them was not checked, nobody knows.
    """
    unrendered = {check.task: check.unrendered for check in checks}
    warned = []
    for check in checks:
        beside = _housemates(check.task, registry)
        unused = tuple(
            f"the prompt '{name}' was never rendered: no row here needs it, or nothing does"
            for name in check.unrendered
            if not check.breaks  # what broke kept others from being rendered
            and ("/" in name or all(name in unrendered.get(task, ()) for task in beside))
        )
        warned.append(replace(check, warnings=(*check.warnings, *unused)))
    return warned


def _housemates(task: str, registry: Registry) -> list[str]:
    """The playable tasks that live in the folder of `task`, itself included."""
    folder = registry.spec(task).home.folder
    specs = registry.specs.items()
    return [name for name, spec in specs if spec.home.folder == folder and not spec.rows_only]


_CheckOutcome = tuple[str, Finding | None]
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
        return self._note(example, await breaks_before_scoring(self.task, example))

    async def beside(self, example: Example, wrong: Played) -> None:
        task, (draft, score, _) = self.task, wrong
        if not self._note(example, await breaks_beside_scoring(task, example, draft, score)):
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
            _finding(rows[0], None, f"{problem} ({_rows(rows)})")
            for problem, rows in self.problems.items()
        )

    def warnings(self) -> tuple[str, ...]:
        feedback = self.task.spec.feedback
        guards = bool(feedback.coaches) and feedback.kind == "coach"
        missing = {
            NO_COACH: self.uncoached > 0,
            NO_LEAK_CHECK: guards and 0 < self.hidden == self.unguarded,
            NO_SYMBOLIC: 0 < self.rows == self.silent,
            self._alike(): self._rules_coach(),
        }
        return tuple(text for text, applies in missing.items() if applies)

    def _alike(self) -> str:
        return ALIKE.format(n=len(set(self.feedback)), of=len(self.feedback))

    def _rules_coach(self) -> bool:
        """Whether rules coach where nobody is named, and say nearly the same of every draft."""
        share = distinct_share(self.feedback)
        default = self.task.spec.players.under(self.task.protocol, "coach") or "symbolic"
        alike = share is not None and share < LEAST_DISTINCT
        return alike and default == "symbolic" and not self.judged


def _rows(rows: Sequence[Example]) -> str:
    return "1 row" if len(rows) == 1 else f"{len(rows)} rows"


async def _findings(task: Task, loaded: Loaded, rehearsed: _Rehearsed) -> dict[str, list[Finding]]:
    findings: dict[str, list[Finding]] = {}
    for example in loaded.examples:
        if not await rehearsed.before(example):
            continue  # whatever it scored would be about the broken prompt
        gold = await scripted_play(task, example, task.gold, perfect=True)
        wrong = await scripted_play(task, example, task.wrong, perfect=False)
        for kind, finding in (_gold(task, example, gold), _wrong(task, example, wrong)):
            if finding is not None:
                findings.setdefault(kind, []).append(finding)
        await rehearsed.beside(example, wrong)
    return findings


def _gold(task: Task, example: Example, outcome: Played) -> _CheckOutcome:
    played, score, why = outcome
    if why:
        return "gold_fails", _finding(example, played, why)
    if played is None:
        return "no_gold", _finding(example, None, "the task has no scripted gold for it")
    if score is None or score.value is None:
        return "unscored", _finding(example, played, _needs(score))
    if score.value < task.spec.metric.high - _CLOSE:
        return "gold_fails", _finding(example, played, _scored(task, score))
    return "", None


def _wrong(task: Task, example: Example, outcome: Played) -> _CheckOutcome:
    played, score, why = outcome
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
) -> Played:
    """(episode, score, what broke): no score where a model is needed, no episode without script."""
    episode = None
    try:
        episode = script(example)
        if episode is None:
            return None, None, ""
        score = await task.score(example, episode, nobody(task, perfect))
        return episode, checked_score(task, score), ""
    except TaskError as error:
        return episode, None, error.detail
    except CallError:
        return episode, None, ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a row breaks is the finding
        return episode, None, error_words(error)


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
