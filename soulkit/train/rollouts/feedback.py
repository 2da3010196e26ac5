"""Outcomes of a step's feedback, and the control experiment that shuffles feedback.

For every scored draft, feedback was *used*, or the draft was *gated* (feedback was not requested,
or the reward is full), or feedback was *missing*, for the first of these reasons that holds:

    unscored   the refined rollout has no score          unmarked  its prompt has no filled slot
    leaks      the feedback gives the answer away        failed    the call to the coach failed
    silent     the coach returned no feedback            unshared  no other draft had feedback

The step line counts consecutive steps in which feedback was missing and none was used, so that a
resumed run continues the count; gated steps do not change it. At `STEPS_IN_VAIN` the run stops.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from soulkit.errors import TaskError, UserError
from soulkit.models.base import Player
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.kit.base import Task
from soulkit.train.config import TrainConfig
from soulkit.train.objectives.base import Objective
from soulkit.train.state.metrics import FeedbackCounts, StepLine, read_step_lines
from soulkit.types import COACH_FAILURE, Feedback, Record, Segment


def swap_feedback(drafts: Sequence[Record], key: str) -> list[Feedback | None]:
    """Give each draft's usable feedback to a draft of another example; None if there is none.
    Examples rotate in random order; feedback is reused if one example has most of it."""
    usable = [i for i, d in enumerate(drafts) if d.received is not None and d.received.usable]
    by_example: dict[str, list[int]] = {}
    for i in usable:
        by_example.setdefault(drafts[i].example_id, []).append(i)
    groups = list(by_example.values())
    random.Random(key).shuffle(groups)
    ordered = [i for group in groups for i in group]
    shift = max((len(group) for group in groups), default=0)
    swapped: list[Feedback | None] = [None] * len(drafts)
    if len(groups) > 1:
        for place, i in enumerate(ordered):
            turned = ordered[(place + shift) % len(ordered) :] + ordered
            others = (k for k in turned if drafts[k].example_id != drafts[i].example_id)
            swapped[i] = drafts[next(others)].received
    return swapped


def with_swapped(drafts: Sequence[Record], key: str) -> list[Record]:
    """The drafts with the feedback that `swap_feedback` gives them, task by task."""
    groups = (
        [d for d in drafts if d.task == task] for task in dict.fromkeys(d.task for d in drafts)
    )
    return [
        replace(draft, received=feedback)
        for group in groups
        for draft, feedback in zip(group, swap_feedback(group, key), strict=True)
    ]


STEPS_IN_VAIN = 3
"""Number of consecutive steps without usable feedback after which a run stops."""

REASONS = {
    "leaks": "{n} of {of} feedback texts leak the answer",
    "silent": "the coach gave no feedback on {n} of {of} drafts",
    "failed": "the coach failed on {n} of {of} drafts",
    "unscored": "{n} of {of} refined rollouts have no score",
    "unmarked": "{n} of {of} feedback texts are missing from the prompt",
    "unshared": "no other draft had feedback to swap for {n} of {of} drafts",
}


def feedback_policy(
    config: TrainConfig, blind_reader: Player | None = None, task: str = ""
) -> FeedbackPolicy:
    """The rules for feedback on drafts of the run, or of one task: when, which kind, and how leaks
    are handled."""
    return FeedbackPolicy(
        when=config.feedback_when,
        coach=config.named("coach", task),
        leak_check=config.leak_check or "drop",
        blind_reader=blind_reader,
        show_draft=config.show_draft,
        worked_examples=config.worked_examples,
    )


def slot_is_filled(context: Iterable[Segment]) -> bool:
    """Whether a message has feedback in its slot and a known text without it, as copies need."""
    return any(s.bare is not None and s.bare != s.text for s in context)


@dataclass(slots=True)
class FeedbackOutcome:
    """Counts of used and missing feedback for the drafts of one task in one step."""

    used: int = 0
    gated: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    leaks: Counter[str] = field(default_factory=Counter)
    """Kinds of leaks among missing feedback."""

    def sentence(self) -> str:
        """The reasons as text, such as `16 of 16 feedback texts leak the answer (gold_text)`."""
        of = self.missing.total()
        parts = [
            form.format(n=n, of=of) for why, form in REASONS.items() if (n := self.missing[why])
        ]
        kinds = f" ({', '.join(sorted(self.leaks))})" if self.leaks else ""
        return ", ".join([parts[0] + kinds, *parts[1:]])


def feedback_outcomes(
    records: Sequence[Record], read: Sequence[Record], tasks: Mapping[str, Task],
    policies: Mapping[str, FeedbackPolicy], refines: bool,
) -> dict[str, FeedbackOutcome]:  # fmt: skip
    """Task → outcome of a step's scored drafts; `read` are the records as a teacher reads them
    (with swapped feedback if it is shuffled)."""
    refined = {_place(r): r for r in records if r.kind == "refined"}
    usable = {_place(r) for r in read if r.received is not None and r.received.usable}
    ends: dict[str, FeedbackOutcome] = {}
    for draft in records:
        if draft.kind != "draft" or not draft.score.scored:
            continue
        outcome, task = ends.setdefault(draft.task, FeedbackOutcome()), tasks[draft.task]
        why = _missing(draft, refined.get(_place(draft)), _place(draft) in usable, refines)
        if not why:
            outcome.used += 1
        elif _gated(draft, task, policies[draft.task]):
            outcome.gated += 1
        else:
            outcome.missing[why] += 1
            if why == "leaks" and draft.received is not None:
                outcome.leaks[draft.received.leak] += 1
    return ends


def _place(record: Record) -> tuple[str, int]:
    return record.example_id, record.rollout


def _missing(draft: Record, refined: Record | None, usable: bool, refines: bool) -> str:
    if refined is not None:
        turns = (turn for trace in refined.episode.traces for turn in trace.turns)
        if not refined.score.scored:
            return "unscored"
        return "" if any(slot_is_filled(turn.context) for turn in turns) else "unmarked"
    if usable and not refines:
        return ""
    if draft.received is not None:
        return "unshared" if draft.received.usable else "leaks"
    return "failed" if COACH_FAILURE in draft.episode.notes else "silent"


def _gated(draft: Record, task: Task, policy: FeedbackPolicy) -> bool:
    reward = draft.score.reward
    full = reward is not None and reward >= task.spec.metric.high
    try:
        return full or not policy.wants(task, draft.score, draft.step)
    except TaskError:  # the critique failed in the same way: `failed`
        return False


@dataclass
class FeedbackMonitor:
    """Checks in every step that feedback is used."""

    refines: bool
    policies: Mapping[str, FeedbackPolicy]
    """Task → rules for feedback on its drafts."""
    tasks: Mapping[str, Task]
    streak: int = 0
    """Consecutive steps so far without usable feedback."""

    @classmethod
    def of(
        cls, config: TrainConfig, objective: Objective, tasks: Mapping[str, Task], metrics: Path
    ) -> Self | None:
        """The monitor of a run; None for methods without feedback. A resumed run reads its count
        from the metrics file `metrics`."""
        if not objective.uses_feedback:
            return None
        streak = newest_rollout_line(metrics).feedback.in_vain
        policies = {name: feedback_policy(config, task=name) for name in tasks}
        return cls(objective.refines, policies, tasks, streak)

    def look(
        self, counts: FeedbackCounts, records: Sequence[Record], read: Sequence[Record]
    ) -> FeedbackCounts:
        """The step's counts with gated and missing feedback and the current streak added."""
        ends = feedback_outcomes(records, read, self.tasks, self.policies, self.refines)
        missing = any(one.missing for one in ends.values())
        if any(one.used for one in ends.values()):
            self.streak = 0
        elif missing:
            self.streak += 1
        gated = sum(one.gated for one in ends.values())
        unused = {name: self._remark(name, one) for name, one in ends.items()
                  if one.missing and not one.used}  # fmt: skip
        return replace(counts, gated=gated, missing=unused, in_vain=self.streak)

    def _remark(self, name: str, outcome: FeedbackOutcome) -> str:
        verb, where = "was refined" if self.refines else "has a teacher", f" for {name}"
        return f"no draft {verb}{where * (len(self.tasks) > 1)}: {outcome.sentence()}"


def newest_rollout_line(metrics: Path) -> StepLine:
    """The step line of a run's newest rollout step; empty before the first."""
    return next((line for line in reversed(read_step_lines(metrics)) if line.played), StepLine())


def feedback_in_vain(method: str, line: StepLine) -> UserError | None:
    """The error that stops a run after the step in `line`; None if the run may continue."""
    streak, missing = line.feedback.in_vain, line.feedback.missing
    if streak < STEPS_IN_VAIN or not missing:
        return None
    return UserError(
        f"{streak} steps in a row had no usable feedback; in the last one "
        f"{'; '.join(missing.values())}.",
        f"'{method}' learns from feedback and cannot work without it.",
        "The weights so far are saved. Read the feedback ('received' in episodes.jsonl) and fix "
        "its cause, then run the same command to resume; a different --coach needs a new --out.",
    )
