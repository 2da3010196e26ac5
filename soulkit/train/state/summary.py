"""What a training run's `summary.json` says: means over the last steps, totals over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from soulkit.eval.summary import Summary
from soulkit.train.state.ability import AbilityTotals
from soulkit.train.state.lines import (
    Alarm,
    CoachCounts,
    LessonCounts,
    Rewards,
    StepLine,
    alarms,
    coaches,
    renamed,
)
from soulkit.train.state.named import counts, finite, members, text, whole
from soulkit.types import LeakCheck

LEAK_CHECKS: Mapping[str, LeakCheck] = {"off": "off", "log": "log", "drop": "drop"}
LAST_STEPS = 10
"""Steps at the end of a training that its result is a mean over; the curves have all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackTotals:
    """Of a whole run."""

    drafts: int = 0
    coach_failures: int = 0
    coaches: Mapping[str, CoachCounts] = field(default_factory=dict)
    gated: int = 0
    """Drafts that were to have no feedback."""
    distinct: float | None = None
    """Different texts in a step per draft that got feedback, the mean over all texts."""
    leak_check: LeakCheck = "drop"

    def to_json(self) -> dict[str, Any]:
        empty = {"gated": not self.gated, "distinct": self.distinct is None,
                 "leak_check": self.leak_check == "drop"}  # fmt: skip
        return {name: value for name, value in asdict(self).items() if not empty.get(name)}

    @classmethod
    def from_json(cls, value: object) -> Self:
        line = members(value)
        return cls(
            drafts=whole(line.get("drafts")),
            coach_failures=whole(line.get("coach_failures")),
            coaches=coaches(line.get("coaches")),
            gated=whole(line.get("gated")),
            distinct=finite(line.get("distinct")),
            leak_check=LEAK_CHECKS.get(text(line.get("leak_check")), "drop"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryTotals:
    """Of a whole run; canary → score."""

    first: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    alarms: int = 0
    newest: tuple[Alarm, ...] = ()
    unscored: int = 0
    """Scorings without a verdict."""

    def to_json(self) -> dict[str, Any]:
        line = {**asdict(self), "newest": [asdict(alarm) for alarm in self.newest]}
        return line if self.unscored else {n: line[n] for n in line if n != "unscored"}

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        line = members(value)
        if not line:
            return None
        return cls(
            first=_numbers(line.get("first")),
            last=_numbers(line.get("last")),
            alarms=whole(line.get("alarms")),
            newest=alarms(line.get("newest")),
            unscored=whole(line.get("unscored")),
        )


@dataclass(frozen=True, slots=True)
class ValidationTotals:
    """Losses on validation conversations by source, in nats per learned token."""

    steps: int = 0
    """Steps done when the newest were measured."""
    first: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    lowest: Mapping[str, float] = field(default_factory=dict)
    lessons: Mapping[str, int] = field(default_factory=dict)
    """Conversations that each is a mean over."""

    @classmethod
    def of(
        cls, measured: Sequence[tuple[int, Mapping[str, float | None]]], lessons: Mapping[str, int]
    ) -> Self:
        """Of (step, source → loss), in the order of the steps."""
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        lowest: dict[str, float] = {}
        for _, several in measured:
            losses = {name: loss for name, loss in several.items() if loss is not None}
            first = losses | first
            last |= losses
            lowest |= {name: min(loss, lowest.get(name, loss)) for name, loss in losses.items()}
        return cls(measured[-1][0] + 1, first, last, lowest, lessons)

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        line = members(value)
        if not line:
            return None
        first, last, lowest = (_numbers(line.get(name)) for name in ("first", "last", "lowest"))
        return cls(whole(line.get("steps")), first, last, lowest, counts(line.get("lessons")))


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTotals:
    """Texts that a model wrote itself, to learn them."""

    facts: int = 0
    texts: int = 0
    """Those that are learned."""
    tokens: int = 0
    """Of theirs."""
    tokens_by_expert: int = 0
    """Of these, those that were drawn with the fact in view."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Reason → rows about which nothing was written, and texts that are not learned."""

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        line = members(value)
        if not line:
            return None
        numbers = ("facts", "texts", "tokens", "tokens_by_expert")
        left_out = counts(line.get("left_out"))
        return cls(**{name: whole(line.get(name)) for name in numbers}, left_out=left_out)

    def words(self) -> str:
        """`12 about 3 facts, 0.52 of their tokens with the fact in view; 2 × the text is empty`."""
        share = (
            f", {self.tokens_by_expert / self.tokens:.2f} of their tokens" if self.tokens else ""
        )
        seen = f"{share} with the fact in view" if share else ""
        reasons = [f"{n:,} × {reason}" for reason, n in self.left_out.items()]
        return "; ".join([f"{self.texts:,} about {self.facts:,} facts{seen}", *reasons])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary(Summary):
    """A summary, and what only training has."""

    steps: int = 0
    summary_steps: int = 0
    """Steps at the end that the means are over."""
    rewards: Rewards = field(default_factory=Rewards)
    """The two mean rewards and the leave-one-out gap."""
    feedback: FeedbackTotals | None = None
    canaries: CanaryTotals | None = None
    retention: AbilityTotals | None = None
    """General ability before and after, where a run measures it."""
    probes: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Steps done → `TASK/before` and `TASK/after` of the probe of those weights."""
    calls: Mapping[str, Any] = field(default_factory=dict)
    """Role → calls, tokens and cost of the whole run, as the ledger adds them up."""
    dev_steps: int | None = None
    """Steps done when the held-out rows were scored that the headline is over."""
    best_step: int | None = None
    """Steps done at the checkpoint with the best dev score, as its name counts them."""
    best_dev: float | None = None
    best_valid: float | None = None
    """Mean validation loss at that checkpoint, where it is the best for that."""
    best_checkpoint: str = ""
    validation: ValidationTotals | None = None
    """Of a training on conversations, as the next two."""
    lessons: LessonCounts = field(default_factory=LessonCounts)
    unusable: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Source → reason → rows that are no lesson."""
    written: WrittenTotals | None = None
    """What the model wrote itself, with the objective mixsd."""

    def to_json(self) -> dict[str, Any]:
        line = {**Summary.to_json(self), "steps": self.steps, "summary_steps": self.summary_steps}
        if self.rewards != Rewards():
            line["rewards"] = _headline(self.rewards)
        if self.feedback is not None:
            line |= {"feedback": self.feedback.to_json(), "calls": dict(self.calls)}
        if self.canaries is not None:
            line["canaries"] = self.canaries.to_json()
        if self.retention is not None:
            line["retention"] = self.retention.to_json()
        if self.probes:
            line["probes"] = {step: dict(scores) for step, scores in self.probes.items()}
        if self.validation is not None:
            line["validation"] = asdict(self.validation)
        if self.lessons != LessonCounts():
            line["lessons"] = self.lessons.to_json()
        if self.unusable:
            line["unusable"] = {name: dict(reasons) for name, reasons in self.unusable.items()}
        if self.written is not None:
            line["written"] = asdict(self.written)
        if self.dev_steps is not None:
            line["dev_steps"] = self.dev_steps
        if self.best_step is not None:
            line["best_step"] = self.best_step
            if self.best_valid is None:
                line["best_dev"] = self.best_dev
            else:
                line["best_valid"] = self.best_valid
            line["best_checkpoint"] = self.best_checkpoint
        return line

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        base = Summary.from_json(line)
        return cls(
            **{name: getattr(base, name) for name in Summary.__dataclass_fields__},
            steps=whole(line.get("steps")),
            summary_steps=whole(line.get("summary_steps")),
            rewards=Rewards.from_json(renamed(members(line.get("rewards")))),
            feedback=FeedbackTotals.from_json(line["feedback"]) if "feedback" in line else None,
            canaries=CanaryTotals.from_json(line.get("canaries")),
            retention=AbilityTotals.from_json(line.get("retention")),
            probes={
                step: {name: finite(score) for name, score in members(scores).items()}
                for step, scores in members(line.get("probes")).items()
            },
            calls=members(line.get("calls")),
            dev_steps=whole(line["dev_steps"]) if "dev_steps" in line else None,
            best_step=whole(line["best_step"]) if "best_step" in line else None,
            best_dev=finite(line.get("best_dev")),
            best_valid=finite(line.get("best_valid")),
            best_checkpoint=text(line.get("best_checkpoint")),
            validation=ValidationTotals.from_json(line.get("validation")),
            lessons=LessonCounts.from_json(members(line.get("lessons"))),
            unusable={n: counts(one) for n, one in members(line.get("unusable")).items()},
            written=WrittenTotals.from_json(line.get("written")),
        )


def _headline(rewards: Rewards) -> dict[str, Any]:
    """The numbers that a summary repeats of the rewards."""
    line = rewards.to_json()
    numbers = ("reward/draft", "reward/refined", "gap/loo", "gap/loo_low", "gap/loo_high")
    by_task = tuple(f"{name}/" for name in numbers)
    names = {*numbers, "gap/loo_clusters"}
    return {name: line[name] for name in line if name in names or name.startswith(by_task)}


def _numbers(value: object) -> dict[str, float]:
    return {
        name: number for name, one in members(value).items() if (number := finite(one)) is not None
    }


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
    leaks = dict(one.leaks)
    for kind, number in more.leaks.items():
        leaks[kind] = leaks.get(kind, 0) + number
    return CoachCounts(one.checked + more.checked, one.dropped + more.dropped, leaks)


def canary_totals(lines: Sequence[StepLine]) -> CanaryTotals | None:
    """First and last scores, the number of alarms and the newest ones, and how many canaries got no
    verdict; None when none was scored."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for line in lines:
        scores = {name: mean for name, mean in line.canaries.means.items() if mean is not None}
        first = scores | first
        last |= scores
    raised = [alarm for line in lines for alarm in line.canaries.alarms]
    unscored = sum(line.canaries.unscored for line in lines)
    if not last and not unscored:
        return None
    newest = tuple(alarm for alarm in raised if alarm.step == raised[-1].step)
    return CanaryTotals(
        first=first, last=last, alarms=len(raised), newest=newest, unscored=unscored
    )
