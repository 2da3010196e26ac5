"""The lines of `metrics.jsonl`: typed records in memory, names with slashes on disk.

A step writes one line, and a second one if its weights were measured. Missing numbers are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from soulkit.errors import DataError
from soulkit.runs.jsonl import (
    METRICS_SCHEMA,
    SCHEMA,
    form_of,
    read_jsonl,
    read_value,
    refuse_other_schema,
)

# --- records with a name for every field ----------------------------------------------------------

SECTION = {"section": True}
"""Metadata of a field that is a record: its fields are merged into the parent's, and left out while
they have their defaults."""


def named_field(name: str, default: Any = None, *, sparse: bool = False) -> Any:
    """A field that is written as `name` unless it is None, or unless it is empty if `sparse`."""
    metadata = {"name": name, "sparse": sparse}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def open_fields(prefix: str) -> Any:
    """A mapping whose members are written as `prefix` + key."""
    return field(default_factory=dict, metadata={"prefix": prefix})


class Flat:
    """A record that is written as one flat JSON object."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        kind: Any = type(self)
        return _flat(kind, form_of(kind).dump_python(self, mode="json"))

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        """The record that a line holds; DataError for a value of the wrong type."""
        return read_value(cls, unfolded(cls, line), "A record of metrics.jsonl")


def _flat(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for one in fields(kind):
        value, metadata = values[one.name], one.metadata
        if "prefix" in metadata:
            line |= {f"{metadata['prefix']}{name}": number for name, number in value.items()}
        elif "section" in metadata:
            inner: Any = one.default_factory
            line |= _flat(inner, value) if value != _as_made(inner) else {}
        elif value is not None and (value or not metadata["sparse"]):
            line[metadata["name"]] = value
    return line


@cache
def _as_made(kind: Any) -> Any:
    return form_of(kind).dump_python(kind(), mode="json")


def unfolded(kind: Any, line: Mapping[str, Any]) -> dict[str, Any]:
    """Field → plain value, from a flat object keyed by the names in the file."""
    values: dict[str, Any] = {}
    for one in fields(kind):
        metadata = one.metadata
        if "prefix" in metadata:
            prefix = metadata["prefix"]
            names = [name for name in line if name.startswith(prefix)]
            values[one.name] = {name.removeprefix(prefix): line[name] for name in names}
        elif "section" in metadata:
            values[one.name] = unfolded(one.default_factory, line)
        elif metadata["name"] in line:
            values[one.name] = line[metadata["name"]]
    return values


@cache
def names_of(kind: Any) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names and prefixes under which the fields of `kind` are written."""
    about = [one.metadata for one in fields(kind)]
    sections: list[Any] = [one.default_factory for one in fields(kind) if "section" in one.metadata]
    parts = [names_of(one) for one in sections]
    names = {one["name"] for one in about if "name" in one}.union(*(part[0] for part in parts))
    prefixes = [one["prefix"] for one in about if "prefix" in one]
    return frozenset(names), (*prefixes, *(prefix for part in parts for prefix in part[1]))


# --- contents of a line ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards(Flat):
    """Rewards and counts of a step's rollouts."""

    draft: float | None = named_field("reward/draft")
    refined: float | None = named_field("reward/refined")
    loo: float | None = named_field("gap/loo")
    """Leave-one-out gap: refined reward minus the other drafts of its prompt, with interval."""
    loo_low: float | None = named_field("gap/loo_low")
    loo_high: float | None = named_field("gap/loo_high")
    loo_clusters: int = named_field("gap/loo_clusters", 0, sparse=True)
    pair: float | None = named_field("gap/pair")
    """Refined reward minus its own draft."""
    n_draft: int = named_field("rollouts/draft", 0)
    n_refined: int = named_field("rollouts/refined", 0)
    n_unscored: int = named_field("rollouts/unscored", 0)
    unscored: Mapping[str, int] = open_fields("unscored/")
    """Reason → rollouts."""
    tokens_per_turn: float | None = named_field("tokens/per_turn")
    tokens: int = named_field("tokens/sampled", 0)
    tasks: Mapping[str, float] = open_fields("task/")
    """`TASK/NAME` → mean of the drafts' task metric."""
    draft_by_task: Mapping[str, float | None] = open_fields("reward/draft/")
    """Task → as above; only in mixtures, like the following fields."""
    refined_by_task: Mapping[str, float | None] = open_fields("reward/refined/")
    loo_by_task: Mapping[str, float | None] = open_fields("gap/loo/")
    loo_low_by_task: Mapping[str, float | None] = open_fields("gap/loo_low/")
    loo_high_by_task: Mapping[str, float | None] = open_fields("gap/loo_high/")
    loo_by_dimension: Mapping[str, float | None] = open_fields("gap/dimension/")
    """`TASK/NAME` → the gap in a dimension that judges rate."""
    loo_low_by_dimension: Mapping[str, float | None] = open_fields("gap/dimension_low/")
    loo_high_by_dimension: Mapping[str, float | None] = open_fields("gap/dimension_high/")
    scored_by_dimension: Mapping[str, int] = open_fields("gap/dimension_scored/")
    n_by_dimension: Mapping[str, int] = open_fields("gap/dimension_n/")
    """Refined rollouts of the task; those whose gap is known are `scored`."""


@dataclass(frozen=True, slots=True)
class CoachCounts:
    """Counts of a coach's feedback texts."""

    checked: int = 0
    dropped: int = 0
    leaks: Mapping[str, int] = field(default_factory=dict)
    """Kind of leak → texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackCounts(Flat):
    """Counts and shares of a step's feedback."""

    share: float | None = named_field("feedback/share")
    leak_share: float | None = named_field("feedback/leak_share")
    distinct: float | None = named_field("feedback/distinct")
    """Distinct texts per draft with feedback."""
    dropped: float | None = named_field("feedback/dropped")
    """Share of texts that were dropped because they leak."""
    dropped_by: Mapping[str, float] = open_fields("feedback/dropped/")
    """Kind of leak → its part of this share."""
    leaks: Mapping[str, int] = open_fields("leak/")
    """`AUTHOR/KIND` → texts."""
    coaches: Mapping[str, CoachCounts] = named_field("feedback/coaches", {})
    blind_reader: float | None = named_field("feedback/blind_reader")
    blind_chance: float | None = named_field("feedback/blind_chance")
    about: Mapping[str, float] = open_fields("feedback/about/")
    """`TASK/NAME` → share of texts that mention a judged dimension."""
    coach_failures: int = named_field("feedback/coach_failures", 0)
    gated: int = named_field("feedback/gated", 0, sparse=True)
    missing: Mapping[str, str] = named_field("feedback/missing", {}, sparse=True)
    """Task → why no feedback on its drafts was used."""
    in_vain: int = named_field("feedback/in_vain", 0, sparse=True)
    """Consecutive steps so far without usable feedback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMeans(Flat):
    """Means over tokens of drafts, of every part, and of each kind of loss."""

    clipped: float | None = named_field("clip/share")
    """Share of all draft tokens, including those without advantage; also for the next four."""
    clipped_dual: float | None = named_field("clip/share_dual")
    ratio: float | None = named_field("ratio/mean")
    kl_old: float | None = named_field("kl/old")
    entropy: float | None = named_field("policy/entropy")
    parts: Mapping[str, float] = open_fields("part/")
    """`PART/NAME` → the same five numbers over the tokens of each part."""
    regression_nll: float | None = named_field("nll/regression")
    imitation_nll: float | None = named_field("nll/imitation")
    divergence: float | None = named_field("divergence/teacher")
    preference_margin: float | None = named_field("preference/margin")
    """Mean over pairs of DPO's margin m, before each update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerGap(Flat):
    """Gap between the log-probs of sampler and trainer, before the first update of the step."""

    mean: float | None = named_field("logprob/sampler_gap")
    """Mean absolute difference in nats, over the compared tokens."""
    largest: float | None = named_field("logprob/sampler_gap_max")
    """Largest difference of a token."""
    unchecked: int = named_field("logprob/unchecked", 0, sparse=True)
    """Replies of vLLM servers without log-probs, whose weights cannot be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCorrection(Flat):
    """Statistics of the sampler correction's weights; empty without correction."""

    weight: float | None = named_field("correction/weight")
    """Mean weight, after the cap."""
    capped: float | None = named_field("correction/capped")
    """Share of tokens whose ratio was above the cap."""
    ess: float | None = named_field("correction/ess")
    """Effective sample size divided by the number of tokens n: (Σw)² / (n Σw²)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned(Flat):
    """Results of a step's updates."""

    groups: int | None = named_field("groups/all")
    groups_single: int | None = named_field("groups/single")
    groups_flat: int | None = named_field("groups/flat")
    silent_share: float | None = named_field("groups/silent_share")
    trained: Mapping[str, int] = open_fields("trained/")
    """Part of the loss → tokens."""
    accepted: float | None = named_field("imitation/accepted")
    teacher: Mapping[str, float] = open_fields("teacher/")
    """Statistics of the teacher's token advantages."""
    means: TokenMeans = field(default_factory=TokenMeans, metadata=SECTION)
    sampler: SamplerGap = field(default_factory=SamplerGap, metadata=SECTION)
    correction: SamplerCorrection = field(default_factory=SamplerCorrection, metadata=SECTION)
    loss: float | None = named_field("loss/total")
    losses: Mapping[str, float] = open_fields("loss/of/")
    """Source of conversations → its loss, in nats per trained token."""
    grad_norm: float | None = named_field("grad/norm")
    updates: int | None = named_field("optimizer/updates")
    skipped: int | None = named_field("update/skipped")
    """Updates that were skipped because of a non-finite number."""
    not_finite: Mapping[str, str] = named_field("update/not_finite", {}, sparse=True)
    """Skipped mini-batch → what was not finite."""
    skipped_row: int = named_field("update/skipped_row", 0, sparse=True)
    """Consecutive skipped updates so far."""
    kl_base: float | None = named_field("kl/base")
    tokens: int | None = named_field("tokens/trained")
    sequences: int | None = named_field("sequences/trained")
    imbalance: float | None = named_field("ranks/imbalance")
    """Cost of the busiest rank / mean over the ranks; None in a process alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """An alarm about a canary score or a watched metric."""

    canary: str
    value: float
    first: float
    """Its first value."""
    drafts: float | None
    """Mean of the step's drafts."""
    why: tuple[str, ...] = ()
    step: int = 0

    def words(self) -> str:
        """`12: keywords scores 0.80 (0.10 at first, drafts 0.55)`."""
        drafts = "" if self.drafts is None else f", drafts {self.drafts:.2f}"
        return (
            f"{self.step}: {self.canary} scores {self.value:.2f} "
            f"({self.first:.2f} at first{drafts})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScores(Flat):
    """Canary scores of a step; empty if none were due."""

    means: Mapping[str, float | None] = open_fields("canary/")
    unscored: int = named_field("canaries/unscored", 0, sparse=True)
    alarms: tuple[Alarm, ...] = named_field("canaries/alarms", (), sparse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonCounts(Flat):
    """Counts of the conversations of a supervised step."""

    learned: Mapping[str, int] = open_fields("lessons/of/")
    """Source → lessons that were trained on."""
    left_out: Mapping[str, int] = open_fields("lessons/left_out/")
    """Reason → lessons that were left out and replaced by the next ones."""
    shortened: int = named_field("lessons/shortened", 0, sparse=True)
    """Lessons that lost their oldest turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCost(Flat):
    """Cost of pushing weights to servers; empty if no servers sample."""

    push_seconds: float | None = named_field("time/push")
    """Seconds to push and verify the weights, since the previous step."""
    proof: float | None = named_field("push/distance")
    """Largest gap in nats between servers and trainer when the last push was verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine(Flat):
    """One step of a training run."""

    step: int = named_field("step", 0)
    lr: float | None = named_field("optimizer/lr")
    rewards: Rewards = field(default_factory=Rewards, metadata=SECTION)
    feedback: FeedbackCounts = field(default_factory=FeedbackCounts, metadata=SECTION)
    learned: Learned = field(default_factory=Learned, metadata=SECTION)
    canaries: CanaryScores = field(default_factory=CanaryScores, metadata=SECTION)
    lessons: LessonCounts = field(default_factory=LessonCounts, metadata=SECTION)
    push: PushCost = field(default_factory=PushCost, metadata=SECTION)
    version: str = named_field("policy/version", "", sparse=True)
    """Hash of the sampling weights."""
    sample_seconds: float | None = named_field("time/sample")
    train_seconds: float | None = named_field("time/train")
    dev: Mapping[str, float | None] = open_fields("eval/")
    """Task → dev score of the weights after the step, if evaluated; `TASK/dev_judge` → the same by
    --dev-judge."""
    valid: Mapping[str, float | None] = open_fields("loss/valid/")
    """Source → validation loss in nats per trained token, if measured."""
    valid_low: Mapping[str, float | None] = open_fields("loss/valid_low/")
    valid_high: Mapping[str, float | None] = open_fields("loss/valid_high/")
    """Its 95 % interval over people."""
    exposure: float | None = named_field("memory/exposure", sparse=True)
    """Median exposure of the canaries planted once, in bits, at a checkpoint with a limit on it."""
    probe: Mapping[str, float | None] = open_fields("probe/")
    """`TASK/before` and `TASK/after` → dev scores before and after the probe."""

    @property
    def measures(self) -> bool:
        """Whether the step has measurements, which are written to a second line."""
        return bool(self.dev or self.valid or self.probe or self.exposure is not None)

    @property
    def played(self) -> bool:
        """Whether rollouts were sampled in this step (not in supervised steps)."""
        return self.rewards != Rewards()


def read_step_lines(path: Path) -> list[StepLine]:
    """The lines of a run's `metrics.jsonl`, dev scores in separate lines; empty without a file.

    DataError for a line with a different schema or unknown names."""
    lines = read_jsonl(path)
    for number, line in enumerate(lines, 1):
        where = f"Line {number} of '{path}'"
        refuse_other_schema(line, METRICS_SCHEMA, where)
        names, prefixes = names_of(StepLine)
        strange = [n for n in line if n not in (*names, SCHEMA) and not n.startswith(prefixes)]
        if strange and SCHEMA not in line:
            raise DataError(
                f"{where} was written by an earlier version of soulkit: it has '{strange[0]}'.",
                "The metrics have been renamed since then.",
                "Read it with the version that wrote it, or train again.",
            )
    return steps_of(lines)


def steps_of(lines: Iterable[Mapping[str, Any]]) -> list[StepLine]:
    return [StepLine.from_json(line) for line in lines if isinstance(line.get("step"), int)]


def lines_of_step(line: StepLine) -> list[dict[str, Any]]:
    """The lines to append for a step: its own line and one with measurements."""
    own = replace(line, dev={}, valid={}, valid_low={}, valid_high={}, probe={}, exposure=None)
    return [_noted(own), *dev_lines(line)]


def dev_lines(line: StepLine) -> list[dict[str, Any]]:
    """The line with a step's dev scores and validation losses, if there are any."""
    measured = StepLine(
        step=line.step, dev=line.dev, valid=line.valid, valid_low=line.valid_low,
        valid_high=line.valid_high, probe=line.probe, exposure=line.exposure,
    )  # fmt: skip
    return [_noted(measured)] if line.measures else []


def _noted(line: StepLine) -> dict[str, Any]:
    return {SCHEMA: METRICS_SCHEMA, **line.to_json()}
