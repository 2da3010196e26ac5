"""The lines of `metrics.jsonl`: typed records in the program, slash names on the disk.

A step writes one line, and one more where the dev split was scored. A number that does not exist is
missing from the line.
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
"""Metadata of a field that is a record: its fields are written among those of the one that holds
it, and not at all while it is as it was made."""


def named_field(name: str, default: Any = None, *, sparse: bool = False) -> Any:
    """A field that is written as `name` unless it is None; a sparse one unless it is empty, too."""
    metadata = {"name": name, "sparse": sparse}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def open_fields(prefix: str) -> Any:
    """A mapping whose members are written under names of their own."""
    return field(default_factory=dict, metadata={"prefix": prefix})


class Flat:
    """A record that is written as one object without objects for its sections."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        kind: Any = type(self)
        return _flat(kind, form_of(kind).dump_python(self, mode="json"))

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        """DataError for a member of another type."""
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
    """Field → plain value, of an object with the names of a record's fields."""
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
    """(whole names, prefixes of open ones) under which a record of `kind` is written."""
    about = [one.metadata for one in fields(kind)]
    sections: list[Any] = [one.default_factory for one in fields(kind) if "section" in one.metadata]
    parts = [names_of(one) for one in sections]
    names = {one["name"] for one in about if "name" in one}.union(*(part[0] for part in parts))
    prefixes = [one["prefix"] for one in about if "prefix" in one]
    return frozenset(names), (*prefixes, *(prefix for part in parts for prefix in part[1]))


# --- what a line holds ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards(Flat):
    """Of a step's rollouts."""

    draft: float | None = named_field("reward/draft")
    refined: float | None = named_field("reward/refined")
    loo: float | None = named_field("gap/loo")
    """Refined against the other drafts of its prompt, with its interval."""
    loo_low: float | None = named_field("gap/loo_low")
    loo_high: float | None = named_field("gap/loo_high")
    loo_clusters: int = named_field("gap/loo_clusters", 0, sparse=True)
    pair: float | None = named_field("gap/pair")
    """Refined against its own draft."""
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
    """Task → as above; of a mixture alone, like all that follows."""
    refined_by_task: Mapping[str, float | None] = open_fields("reward/refined/")
    loo_by_task: Mapping[str, float | None] = open_fields("gap/loo/")
    loo_low_by_task: Mapping[str, float | None] = open_fields("gap/loo_low/")
    loo_high_by_task: Mapping[str, float | None] = open_fields("gap/loo_high/")


@dataclass(frozen=True, slots=True)
class CoachCounts:
    """What a coach's texts came to."""

    checked: int = 0
    dropped: int = 0
    leaks: Mapping[str, int] = field(default_factory=dict)
    """Kind of leak → texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackCounts(Flat):
    """Who got feedback in a step, and what became of it."""

    share: float | None = named_field("feedback/share")
    leak_share: float | None = named_field("feedback/leak_share")
    distinct: float | None = named_field("feedback/distinct")
    """Different texts per draft that got feedback."""
    dropped: float | None = named_field("feedback/dropped")
    """Share of the texts that leak and are not used."""
    dropped_by: Mapping[str, float] = open_fields("feedback/dropped/")
    """Kind of leak → its part of this share."""
    leaks: Mapping[str, int] = open_fields("leak/")
    """`AUTHOR/KIND` → texts."""
    coaches: Mapping[str, CoachCounts] = named_field("feedback/coaches", {})
    blind_reader: float | None = named_field("feedback/blind_reader")
    blind_chance: float | None = named_field("feedback/blind_chance")
    coach_failures: int = named_field("feedback/coach_failures", 0)
    gated: int = named_field("feedback/gated", 0, sparse=True)
    missing: Mapping[str, str] = named_field("feedback/missing", {}, sparse=True)
    """Task → why none of its drafts' feedback was used."""
    in_vain: int = named_field("feedback/in_vain", 0, sparse=True)
    """Steps in a row, so far, without any use of feedback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMeans(Flat):
    """Means over tokens: of the drafts, of every part, and of each kind of loss."""

    clipped: float | None = named_field("clip/share")
    """Of all draft tokens, as the next four: those without an advantage count."""
    clipped_dual: float | None = named_field("clip/share_dual")
    ratio: float | None = named_field("ratio/mean")
    kl_old: float | None = named_field("kl/old")
    entropy: float | None = named_field("policy/entropy")
    parts: Mapping[str, float] = open_fields("part/")
    """`PART/NAME` → the same five of the tokens of each part."""
    regression_nll: float | None = named_field("nll/regression")
    imitation_nll: float | None = named_field("nll/imitation")
    divergence: float | None = named_field("divergence/teacher")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerGap(Flat):
    """How far the sampler's log-probs are from the trainer's, before the weights move."""

    mean: float | None = named_field("logprob/sampler_gap")
    """Mean absolute difference in nats, over the sampled tokens that were compared."""
    largest: float | None = named_field("logprob/sampler_gap_max")
    """Of one token."""
    unchecked: int = named_field("logprob/unchecked", 0, sparse=True)
    """Replies of vLLM servers that came without log-probs, so that nothing shows their weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCorrection(Flat):
    """The weights of the sampler correction, over the tokens that have one; empty without it."""

    weight: float | None = named_field("correction/weight")
    """Mean weight, after the cap."""
    capped: float | None = named_field("correction/capped")
    """Share of the tokens whose ratio was above the cap."""
    ess: float | None = named_field("correction/ess")
    """Effective sample size divided by the number of tokens n: (Σw)² / (n Σw²)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned(Flat):
    """What a step's updates did."""

    groups: int | None = named_field("groups/all")
    groups_single: int | None = named_field("groups/single")
    groups_flat: int | None = named_field("groups/flat")
    silent_share: float | None = named_field("groups/silent_share")
    trained: Mapping[str, int] = open_fields("trained/")
    """Part of the loss → tokens."""
    accepted: float | None = named_field("imitation/accepted")
    teacher: Mapping[str, float] = open_fields("teacher/")
    """What a teacher's token advantages look like."""
    means: TokenMeans = field(default_factory=TokenMeans, metadata=SECTION)
    sampler: SamplerGap = field(default_factory=SamplerGap, metadata=SECTION)
    correction: SamplerCorrection = field(default_factory=SamplerCorrection, metadata=SECTION)
    loss: float | None = named_field("loss/total")
    losses: Mapping[str, float] = open_fields("loss/of/")
    """Source → its part of the loss of conversations, in nats per learned token of its own."""
    grad_norm: float | None = named_field("grad/norm")
    updates: int | None = named_field("optimizer/updates")
    skipped: int | None = named_field("update/skipped")
    """Updates that were not taken: something in them was not a finite number."""
    not_finite: Mapping[str, str] = named_field("update/not_finite", {}, sparse=True)
    """Which mini-batch was skipped → what was not finite."""
    skipped_row: int = named_field("update/skipped_row", 0, sparse=True)
    """Updates in a row, so far, that were skipped."""
    kl_base: float | None = named_field("kl/base")
    tokens: int | None = named_field("tokens/trained")
    sequences: int | None = named_field("sequences/trained")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A canary that scores too much."""

    canary: str
    value: float
    first: float
    """What it scored at first."""
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
    """What the canaries scored in a step; empty between turns."""

    means: Mapping[str, float | None] = open_fields("canary/")
    unscored: int = named_field("canaries/unscored", 0, sparse=True)
    alarms: tuple[Alarm, ...] = named_field("canaries/alarms", (), sparse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonCounts(Flat):
    """The conversations of a supervised step."""

    learned: Mapping[str, int] = open_fields("lessons/of/")
    """Source → lessons that were learned from."""
    left_out: Mapping[str, int] = open_fields("lessons/left_out/")
    """Reason → lessons that could not be learned from, and were replaced by the next ones."""
    shortened: int = named_field("lessons/shortened", 0, sparse=True)
    """Lessons that lost their oldest turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCost(Flat):
    """Of weights that travel to servers, which sample with them; empty where nothing travels."""

    push_seconds: float | None = named_field("time/push")
    """Until they were proven to be there, since the step before."""
    proof: float | None = named_field("push/distance")
    """Nats by which the servers missed the trainer at the proof of the last push, at most."""


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
    """Hash of the weights that sampled."""
    sample_seconds: float | None = named_field("time/sample")
    train_seconds: float | None = named_field("time/train")
    dev: Mapping[str, float | None] = open_fields("eval/")
    """Task → dev score of the moved weights, in steps that evaluate."""
    valid: Mapping[str, float | None] = open_fields("loss/valid/")
    """Source → nats per learned token of its validation conversations, in such steps."""
    probe: Mapping[str, float | None] = open_fields("probe/")
    """`TASK/before` and `TASK/after` → dev score of the moved weights, and of what a short
    reinforcement made of them."""

    @property
    def measures(self) -> bool:
        """Whether it says what the moved weights are worth: a line of its own beside the step's."""
        return bool(self.dev or self.valid or self.probe)

    @property
    def played(self) -> bool:
        """Whether rollouts were sampled in this step: not a supervised one."""
        return self.rewards != Rewards()


def read_step_lines(path: Path) -> list[StepLine]:
    """The lines of a run's `metrics.jsonl`, dev scores in lines of their own; none without file.

    DataError for a line of another schema, or with names that no line has."""
    lines = read_jsonl(path)
    for number, line in enumerate(lines, 1):
        where = f"Line {number} of '{path}'"
        refuse_other_schema(line, METRICS_SCHEMA, where)
        names, prefixes = names_of(StepLine)
        strange = [n for n in line if n not in (*names, SCHEMA) and not n.startswith(prefixes)]
        if strange and SCHEMA not in line:
            raise DataError(
                f"{where} was written by an earlier version of soulkit: it has '{strange[0]}'.",
                "Its numbers have other names now.",
                "Read it with the version that wrote it, or train again.",
            )
    return steps_of(lines)


def steps_of(lines: Iterable[Mapping[str, Any]]) -> list[StepLine]:
    return [StepLine.from_json(line) for line in lines if isinstance(line.get("step"), int)]


def lines_of_step(line: StepLine) -> list[dict[str, Any]]:
    """What is appended for a step: its line, and one with what the moved weights are worth."""
    return [_noted(replace(line, dev={}, valid={}, probe={})), *dev_lines(line)]


def dev_lines(line: StepLine) -> list[dict[str, Any]]:
    """The line with a step's dev scores and validation losses, where there are any."""
    measured = StepLine(step=line.step, dev=line.dev, valid=line.valid, probe=line.probe)
    return [_noted(measured)] if line.measures else []


def _noted(line: StepLine) -> dict[str, Any]:
    return {SCHEMA: METRICS_SCHEMA, **line.to_json()}
