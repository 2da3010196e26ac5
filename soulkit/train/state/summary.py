"""The `summary.json` of a training run: means over the last steps, totals over all steps.

General ability before and after is compared row by row with a paired interval; a loss whose
interval excludes zero is called a regression. If a run has a dev score, that is the headline,
because the drafts of the last steps come from changing weights and from training rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

from soulkit.eval.results.batch_statistics import summary_terms
from soulkit.eval.results.summary import DEV, Cell, Summary, headline, headline_shown, summarise
from soulkit.metrics.comparisons import PairedDifference, paired_difference
from soulkit.metrics.intervals import (
    Interval,
    estimate,
    estimate_text,
    interval_remark,
    number,
    signed,
)
from soulkit.runs.jsonl import form_of, read_value, sparse
from soulkit.tasks.kit.base import Task
from soulkit.train.state.metrics import (
    Alarm,
    CoachCounts,
    LessonCounts,
    Rewards,
    StepLine,
    unfolded,
)
from soulkit.types import LeakCheck, Record


class RunTotals:
    """Totals of a run, as part of its summary."""

    __slots__ = ()
    SPARSE: ClassVar[frozenset[str]] = frozenset()
    """Members that are left out if they have their defaults."""

    def to_json(self) -> dict[str, Any]:
        kind: Any = type(self)
        values = form_of(kind).dump_python(self, mode="json")
        shown = sparse(self, always=values.keys() - self.SPARSE)
        return {name: value for name, value in values.items() if name in shown}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        return read_value(cls, line, "The summary")


UNMEASURED = "the initial weights were not measured before training changed them"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbilityTotals(RunTotals):
    """General ability before and after a run, over all rows of the general suite."""

    before: Cell = field(default_factory=Cell)
    after: Cell = field(default_factory=Cell)
    difference: float | None = None
    """After minus before, over rows scored in both."""
    ci_low: float | None = None
    ci_high: float | None = None
    p: float | None = None
    n_shared: int = 0
    n_clusters: int = 0
    method: str = ""

    @property
    def regression(self) -> bool:
        """Whether general ability dropped significantly."""
        return self.ci_high is not None and self.ci_high < 0

    def to_json(self) -> dict[str, Any]:
        cells = {"before": self.before.to_json(), "after": self.after.to_json()}
        return {**RunTotals.to_json(self), **cells}

    def words(self) -> str:
        """`0.525 to 0.400 (40/40, 40/40 scored), −0.125 [−0.231, −0.019], 40 clusters`."""
        numbers = " to ".join(number(cell.mean) for cell in (self.before, self.after))
        scored = ", ".join(f"{cell.n_scored}/{cell.n}" for cell in (self.before, self.after))
        parts = [f"{numbers} ({scored} scored)"]
        if self.difference is not None:
            parts.append(estimate_text(self.difference, self.ci_low, self.ci_high, signed))
            parts.append(interval_remark(self.n_clusters, self.method))
        return ", ".join(filter(None, parts))

    def remarks(self) -> list[str]:
        """Remarks printed at the end of the run."""
        if not self.before.n:
            return [f"general ability before training is unknown: {UNMEASURED}"]
        if self.regression:
            return [f"general ability dropped during training: {self.words()}"]
        return []


def ability_totals(
    before: Sequence[Record], after: Sequence[Record], tasks: Sequence[Task]
) -> AbilityTotals:
    """The two means and their difference; an empty cell if not measured."""
    scales = {(task.spec.metric.low, task.spec.metric.high) for task in tasks}
    scale = scales.pop() if len(scales) == 1 else None
    paired = asdict(_difference(before, after, scale))
    shared = AbilityTotals.__dataclass_fields__.keys() & paired.keys()
    return AbilityTotals(
        before=_cell(before, scale), after=_cell(after, scale),
        **{name: paired[name] for name in shared},
    )  # fmt: skip


def _cell(records: Sequence[Record], scale: Interval | None) -> Cell:
    if not records:
        return Cell()
    values = [record.score.value for record in records]
    mean = asdict(estimate(values, [record.cluster for record in records], scale=scale))
    unscored = Counter(record.score.reason for record in records if record.score.value is None)
    return Cell(**mean, unscored=dict(unscored))


def _difference(
    before: Sequence[Record], after: Sequence[Record], scale: Interval | None
) -> PairedDifference:
    values: list[dict[Hashable, float | None]] = [
        {one.example_id: one.score.value for one in side} for side in (before, after)
    ]
    clusters: Mapping[Hashable, Hashable] = {
        record.example_id: record.cluster for record in (*before, *after)
    }
    return paired_difference(values[0], values[1], clusters, scale=scale)


LAST_STEPS = 10
"""Number of last steps over which a run's result is averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackTotals(RunTotals):
    """Feedback counts of a whole run."""

    SPARSE = frozenset({"gated", "distinct", "leak_check"})

    drafts: int = 0
    coach_failures: int = 0
    coaches: Mapping[str, CoachCounts] = field(default_factory=dict)
    gated: int = 0
    """Drafts for which no feedback was requested."""
    distinct: float | None = None
    """Distinct texts per draft with feedback within a step, averaged over all texts."""
    leak_check: LeakCheck = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryTotals(RunTotals):
    """Canary scores of a whole run; canary → score."""

    SPARSE = frozenset({"unscored"})

    first: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    alarms: int = 0
    newest: tuple[Alarm, ...] = ()
    unscored: int = 0
    """Scorings without a verdict."""


@dataclass(frozen=True, slots=True)
class ValidationTotals(RunTotals):
    """Losses on validation conversations by source, in nats per trained token."""

    steps: int = 0
    """Steps done when the newest were measured."""
    first: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    lowest: Mapping[str, float] = field(default_factory=dict)
    lessons: Mapping[str, int] = field(default_factory=dict)
    """Conversations that each is a mean over."""
    people: Mapping[str, int] = field(default_factory=dict)
    """People who wrote them; conversations of unknown people count as one each."""
    low: Mapping[str, float] = field(default_factory=dict)
    high: Mapping[str, float] = field(default_factory=dict)
    """95 % interval of the newest, over people."""


def first_and_last(
    measured: Iterable[Mapping[str, float | None]],
) -> tuple[dict[str, float], dict[str, float]]:
    """The first and the last known value of each name."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for values in measured:
        known = {name: value for name, value in values.items() if value is not None}
        first, last = known | first, last | known
    return first, last


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTotals(RunTotals):
    """Texts that a model wrote to train on (objective mixsd)."""

    facts: int = 0
    texts: int = 0
    """Texts to train on."""
    tokens: int = 0
    """Tokens of these texts."""
    tokens_by_expert: int = 0
    """Tokens sampled with the fact in the context."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Reason → rows without texts and texts that are not used."""

    def words(self) -> str:
        """`12 about 3 facts, 0.52 of their tokens with the fact in context; 2 × the text …`."""
        share = (
            f", {self.tokens_by_expert / self.tokens:.2f} of their tokens" if self.tokens else ""
        )
        seen = f"{share} with the fact in context" if share else ""
        reasons = [f"{n:,} × {reason}" for reason, n in self.left_out.items()]
        return "; ".join([f"{self.texts:,} about {self.facts:,} facts{seen}", *reasons])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary(Summary):
    """A summary with the fields that only training has."""

    steps: int = 0
    summary_steps: int = 0
    """Number of last steps that the means are over."""
    rewards: Rewards = field(default_factory=Rewards)
    """The two mean rewards and the leave-one-out gap."""
    feedback: FeedbackTotals | None = None
    canaries: CanaryTotals | None = None
    retention: AbilityTotals | None = None
    """General ability before and after, if measured."""
    probes: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Steps done → `TASK/before` and `TASK/after` of the probe of those weights."""
    calls: Mapping[str, Any] = field(default_factory=dict)
    """Role → calls, tokens and cost of the whole run, from the ledger."""
    dev_steps: int | None = None
    """Steps done when the dev score of the headline was measured."""
    best_step: int | None = None
    """Steps done at the best checkpoint."""
    best_dev: float | None = None
    best_valid: float | None = None
    """Mean validation loss at the best checkpoint, if that is its ranking key."""
    best_checkpoint: str = ""
    kept_step: int | None = None
    """With --max-exposure: steps done at the weights in `model/`."""
    kept_exposure: float | None = None
    """Their median exposure in bits."""
    validation: ValidationTotals | None = None
    """Only for training on conversations, like the next two."""
    lessons: LessonCounts = field(default_factory=LessonCounts)
    unusable: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Source → reason → number of unusable rows."""
    written: WrittenTotals | None = None
    """Texts that the model wrote, with objective mixsd."""

    def to_json(self) -> dict[str, Any]:
        line = Summary.to_json(self)
        for name, value in sparse(self, always=("steps", "summary_steps")).items():
            if name not in Summary.__dataclass_fields__:
                line[name] = value.to_json() if hasattr(value, "to_json") else value
        if self.feedback is not None:
            line["calls"] = dict(self.calls)
        return {**line, "rewards": _headline(self.rewards)} if "rewards" in line else line

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        named = {
            name: unfolded(kind, line[name])
            for name, kind in (("rewards", Rewards), ("lessons", LessonCounts)) if name in line
        }  # fmt: skip
        return read_value(cls, {**line, **named}, "The summary")


def _headline(rewards: Rewards) -> dict[str, Any]:
    line = rewards.to_json()
    numbers = ("reward/draft", "reward/refined", "gap/loo", "gap/loo_low", "gap/loo_high")
    by_task = tuple(f"{name}/" for name in numbers)
    names = {*numbers, "gap/loo_clusters"}
    return {name: line[name] for name in line if name in names or name.startswith(by_task)}


def feedback_totals(
    lines: Sequence[StepLine], leak_check: LeakCheck | None = None
) -> FeedbackTotals:
    """Sums over a run's step lines."""
    coach: dict[str, CoachCounts] = {}
    for line in lines:
        for author, more in line.feedback.coaches.items():
            coach[author] = _added(coach.get(author, CoachCounts()), more)
    return FeedbackTotals(
        drafts=sum(line.rewards.n_draft for line in lines),
        coach_failures=sum(line.feedback.coach_failures for line in lines),
        coaches=coach,
        gated=sum(line.feedback.gated for line in lines),
        distinct=_distinct(lines),
        leak_check=leak_check or "drop",
    )


def _distinct(lines: Sequence[StepLine]) -> float | None:
    shares = [
        (line.feedback.distinct, sum(one.checked for one in line.feedback.coaches.values()))
        for line in lines
        if line.feedback.distinct is not None
    ]
    texts = sum(n for _, n in shares)
    return sum(share * n for share, n in shares) / texts if texts else None


def _added(one: CoachCounts, more: CoachCounts) -> CoachCounts:
    leaks = dict(Counter(one.leaks) + Counter(more.leaks))
    return CoachCounts(one.checked + more.checked, one.dropped + more.dropped, leaks)


def canary_totals(lines: Sequence[StepLine]) -> CanaryTotals | None:
    """First and last scores, alarms, and the number of canaries without verdict; None if no canary
    was scored."""
    first, last = first_and_last(line.canaries.means for line in lines)
    raised = [alarm for line in lines for alarm in line.canaries.alarms]
    unscored = sum(line.canaries.unscored for line in lines)
    if not last and not unscored:
        return None
    newest = tuple(alarm for alarm in raised if alarm.step == raised[-1].step)
    return CanaryTotals(
        first=first, last=last, alarms=len(raised), newest=newest, unscored=unscored
    )


def with_dev(
    summary: TrainSummary, records: Sequence[Record], tasks: Iterable[Task]
) -> TrainSummary:
    """`summary` with headlines over `records`, the newest dev episodes; unchanged if there are
    none."""
    if not records:
        return summary
    played = {record.task for record in records}
    scored = summarise(
        records, command=summary.command, model=summary.model, protocol=summary.protocol,
        seconds=0.0, cost=None, training=True,
        **summary_terms(task for task in tasks if task.name in played),
    )  # fmt: skip
    cells = {task: dict(of_task) for task, of_task in summary.tasks.items()}
    for task, of_dev in scored.tasks.items():
        drafts = cells.get(task, {})
        cells[task] = {name: replace(cell, headline=False) for name, cell in drafts.items()}
        cells[task][DEV] = replace(headline(of_dev), headline=True, name=headline_shown(of_dev))
    return replace(summary, tasks=cells, dev_steps=records[0].step + 1)


def without_dev(summary: TrainSummary) -> TrainSummary:
    """`summary` without the dev score of its last evaluation."""
    tasks = {
        task: {name: cell for name, cell in cells.items() if name != DEV}
        for task, cells in summary.tasks.items()
    }
    return replace(summary, tasks=tasks, dev_steps=None)
