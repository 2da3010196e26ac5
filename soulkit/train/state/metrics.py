"""The lines of `metrics.jsonl`: typed records in the program, slash names on the disk.

A step writes one line, and one more where the dev split was scored. A number that does not exist is
missing from the line. Reading takes what has the right form and leaves out the rest. Runs written
before names had slashes are read under their old names (`OLD_NAMES`), which stand nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self

from soulkit.runs.jsonl import read_jsonl
from soulkit.runs.stored import METRICS_SCHEMA, SCHEMA, refuse_other_schema


def finite(value: object) -> float | None:
    """A finite number of a file; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def whole(value: object) -> int:
    """A count of a file; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def text(value: object) -> str:
    return value if isinstance(value, str) else ""


def members(value: object) -> Mapping[str, Any]:
    """An object of a file; empty for anything else."""
    return value if isinstance(value, Mapping) else {}


def counts(value: object) -> dict[str, int]:
    return {name: whole(number) for name, number in members(value).items()}


def named_field(name: str, *, read: Callable[[Any], Any] = finite, sparse: bool = False) -> Any:
    """A field that is written as `name`; a sparse one only where it is not empty or 0."""
    empty = read(None)
    metadata = {"name": name, "read": read, "sparse": sparse}
    if isinstance(empty, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=empty, metadata=metadata)


def spread_fields(prefix: str, *, read: Callable[[Any], Any] = finite) -> Any:
    """A field whose members are written under names of their own."""
    return field(default_factory=dict, metadata={"prefix": prefix, "read": read})


SECTION = {"section": True}
"""Marks a field that is a section of its own; one that is as it was made is not written."""


class Named:
    """What a section of a line can do; its fields are made with `named` and `spread`."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        line: dict[str, Any] = {}
        for one in fields(self):  # type: ignore[arg-type]
            value, metadata = getattr(self, one.name), one.metadata
            if "prefix" in metadata:
                line |= {f"{metadata['prefix']}{name}": number for name, number in value.items()}
            elif "section" in metadata:
                line |= value.to_json() if value != type(value)() else {}
            elif value is not None and (value or not metadata["sparse"]):
                line[metadata["name"]] = _plain(value)
        return line

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        """Of a line with the names of today."""
        return cls(**{one.name: _read(one, line) for one in fields(cls)})  # type: ignore[arg-type]


def _read(one: Field[Any], line: Mapping[str, Any]) -> Any:
    metadata: Mapping[str, Any] = one.metadata
    if "section" in metadata:
        return one.default_factory.from_json(line)  # type: ignore[union-attr]
    if "prefix" in metadata:
        prefix = metadata["prefix"]
        names = [name for name in line if name.startswith(prefix)]
        return {name.removeprefix(prefix): metadata["read"](line[name]) for name in names}
    return metadata["read"](line.get(metadata["name"]))


def _plain(value: Any) -> Any:
    """Plain JSON values."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def names_of(kind: type[Named]) -> tuple[set[str], set[str]]:
    """(whole names, prefixes of open ones) under which a record of `kind` is written."""
    names: set[str] = set()
    prefixes: set[str] = set()
    for one in fields(kind):  # type: ignore[arg-type]
        if "section" in one.metadata:
            inner = names_of(one.default_factory)  # type: ignore[arg-type]
            names, prefixes = names | inner[0], prefixes | inner[1]
        elif "prefix" in one.metadata:
            prefixes.add(one.metadata["prefix"])
        else:
            names.add(one.metadata["name"])
    return names, prefixes


OLD_NAMES = {
    "lr": "optimizer/lr",
    "draft_reward": "reward/draft",
    "refined_reward": "reward/refined",
    "loo_gap": "gap/loo",
    "loo_gap_low": "gap/loo_low",
    "loo_gap_high": "gap/loo_high",
    "pair_gap": "gap/pair",
    "n_draft": "rollouts/draft",
    "n_refined": "rollouts/refined",
    "n_unscored": "rollouts/unscored",
    "response_length": "tokens/per_turn",
    "tokens": "tokens/sampled",
    "feedback_share": "feedback/share",
    "leak_share": "feedback/leak_share",
    "coaches": "feedback/coaches",
    "blind_reader": "feedback/blind_reader",
    "blind_chance": "feedback/blind_chance",
    "coach_failures": "feedback/coach_failures",
    "groups": "groups/all",
    "groups_single": "groups/single",
    "groups_flat": "groups/flat",
    "silent_share": "groups/silent_share",
    "accepted_share": "imitation/accepted",
    "loss": "loss/total",
    "grad_norm": "grad/norm",
    "updates": "optimizer/updates",
    "clip_fraction": "clip/share",
    "clip_fraction_dual": "clip/share_dual",
    "ratio_mean": "ratio/mean",
    "approx_kl": "kl/old",
    "kl": "kl/base",
    "entropy": "policy/entropy",
    "policy": "policy/version",
    "regression_nll": "nll/regression",
    "imitation_nll": "nll/imitation",
    "divergence": "divergence/teacher",
    "teacher_gap": "teacher/gap",
    "sequences": "sequences/trained",
    "canary_unscored": "canaries/unscored",
    "canary_alarm": "canaries/alarms",
    "seconds_sample": "time/sample",
    "seconds_train": "time/train",
}
OLD_GROUPS = {
    "unscored": "unscored/",
    "task_metrics": "task/",
    "leaks": "leak/",
    "trained_tokens": "trained/",
    "eval": "eval/",
}
"""Objects of old lines, whose members have names of their own now."""
OLD_PREFIXES = {"teacher_": "teacher/"}


def renamed(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line under the names of today; lines that have them already stay as they are."""
    supervised = "loss" in line and "draft_reward" not in line
    new: dict[str, Any] = {}
    for name, value in line.items():
        if name in OLD_GROUPS:
            prefix = OLD_GROUPS[name]
            new |= {f"{prefix}{member}": number for member, number in members(value).items()}
        elif supervised and name == "tokens":
            new["tokens/trained"] = value
        else:
            new[_new_name(name)] = value
    return new


def _new_name(name: str) -> str:
    prefix = next((p for p in OLD_PREFIXES if name.startswith(p)), "")
    whole = OLD_PREFIXES[prefix] + name.removeprefix(prefix) if prefix else name
    return OLD_NAMES.get(name, whole)


# --- what a line holds ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards(Named):
    """Of a step's rollouts."""

    draft: float | None = named_field("reward/draft")
    refined: float | None = named_field("reward/refined")
    loo: float | None = named_field("gap/loo")
    """Refined against the other drafts of its prompt, with its interval."""
    loo_low: float | None = named_field("gap/loo_low")
    loo_high: float | None = named_field("gap/loo_high")
    loo_clusters: int = named_field("gap/loo_clusters", read=whole, sparse=True)
    pair: float | None = named_field("gap/pair")
    """Refined against its own draft."""
    n_draft: int = named_field("rollouts/draft", read=whole)
    n_refined: int = named_field("rollouts/refined", read=whole)
    n_unscored: int = named_field("rollouts/unscored", read=whole)
    unscored: Mapping[str, int] = spread_fields("unscored/")
    """Reason → rollouts."""
    tokens_per_turn: float | None = named_field("tokens/per_turn")
    tokens: int = named_field("tokens/sampled", read=whole)
    tasks: Mapping[str, float] = spread_fields("task/")
    """`TASK/NAME` → mean of the drafts' task metric."""
    draft_by_task: Mapping[str, float | None] = spread_fields("reward/draft/")
    """Task → as above; of a mixture alone, like all that follows."""
    refined_by_task: Mapping[str, float | None] = spread_fields("reward/refined/")
    loo_by_task: Mapping[str, float | None] = spread_fields("gap/loo/")
    loo_low_by_task: Mapping[str, float | None] = spread_fields("gap/loo_low/")
    loo_high_by_task: Mapping[str, float | None] = spread_fields("gap/loo_high/")


@dataclass(frozen=True, slots=True)
class CoachCounts:
    """What a coach's texts came to."""

    checked: int = 0
    dropped: int = 0
    leaks: Mapping[str, int] = field(default_factory=dict)
    """Kind of leak → texts."""


def coaches(value: object) -> dict[str, CoachCounts]:
    return {
        author: CoachCounts(
            whole(one.get("checked")), whole(one.get("dropped")), counts(one.get("leaks"))
        )
        for author, one in members(value).items()
        if isinstance(one, Mapping)
    }


def text_members(value: object) -> dict[str, str]:
    return {name: text(one) for name, one in members(value).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackCounts(Named):
    """Who got feedback in a step, and what became of it."""

    share: float | None = named_field("feedback/share")
    leak_share: float | None = named_field("feedback/leak_share")
    distinct: float | None = named_field("feedback/distinct")
    """Different texts per draft that got feedback."""
    dropped: float | None = named_field("feedback/dropped")
    """Share of the texts that leak and are not used."""
    dropped_by: Mapping[str, float] = spread_fields("feedback/dropped/")
    """Kind of leak → its part of this share."""
    leaks: Mapping[str, int] = spread_fields("leak/")
    """`AUTHOR/KIND` → texts."""
    coaches: Mapping[str, CoachCounts] = named_field("feedback/coaches", read=coaches)
    blind_reader: float | None = named_field("feedback/blind_reader")
    blind_chance: float | None = named_field("feedback/blind_chance")
    coach_failures: int = named_field("feedback/coach_failures", read=whole)
    gated: int = named_field("feedback/gated", read=whole, sparse=True)
    missing: Mapping[str, str] = named_field("feedback/missing", read=text_members, sparse=True)
    """Task → why none of its drafts' feedback was used."""
    in_vain: int = named_field("feedback/in_vain", read=whole, sparse=True)
    """Steps in a row, so far, without any use of feedback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMeans(Named):
    """Means over tokens: of the drafts, of every part, and of each kind of loss."""

    clipped: float | None = named_field("clip/share")
    """Of all draft tokens, as the next four: those without an advantage count."""
    clipped_dual: float | None = named_field("clip/share_dual")
    ratio: float | None = named_field("ratio/mean")
    kl_old: float | None = named_field("kl/old")
    entropy: float | None = named_field("policy/entropy")
    parts: Mapping[str, float] = spread_fields("part/")
    """`PART/NAME` → the same five of the tokens of each part."""
    regression_nll: float | None = named_field("nll/regression")
    imitation_nll: float | None = named_field("nll/imitation")
    divergence: float | None = named_field("divergence/teacher")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerGap(Named):
    """How far the sampler's log-probs are from the trainer's, before the weights move."""

    mean: float | None = named_field("logprob/sampler_gap")
    """Mean absolute difference in nats, over the sampled tokens that were compared."""
    largest: float | None = named_field("logprob/sampler_gap_max")
    """Of one token."""
    unchecked: int = named_field("logprob/unchecked", read=whole, sparse=True)
    """Replies of vLLM servers that came without log-probs, so that nothing shows their weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCorrection(Named):
    """The weights of the sampler correction, over the tokens that have one; empty without it."""

    weight: float | None = named_field("correction/weight")
    """Mean weight, after the cap."""
    capped: float | None = named_field("correction/capped")
    """Share of the tokens whose ratio was above the cap."""
    ess: float | None = named_field("correction/ess")
    """Effective sample size divided by the number of tokens n: (Σw)² / (n Σw²)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned(Named):
    """What a step's updates did."""

    groups: int | None = named_field("groups/all")
    groups_single: int | None = named_field("groups/single")
    groups_flat: int | None = named_field("groups/flat")
    silent_share: float | None = named_field("groups/silent_share")
    trained: Mapping[str, int] = spread_fields("trained/")
    """Part of the loss → tokens."""
    accepted: float | None = named_field("imitation/accepted")
    teacher: Mapping[str, float] = spread_fields("teacher/")
    """What a teacher's token advantages look like."""
    means: TokenMeans = field(default_factory=TokenMeans, metadata=SECTION)
    sampler: SamplerGap = field(default_factory=SamplerGap, metadata=SECTION)
    correction: SamplerCorrection = field(default_factory=SamplerCorrection, metadata=SECTION)
    loss: float | None = named_field("loss/total")
    losses: Mapping[str, float] = spread_fields("loss/of/")
    """Source → its part of the loss of conversations, in nats per learned token of its own."""
    grad_norm: float | None = named_field("grad/norm")
    updates: int | None = named_field("optimizer/updates")
    skipped: int | None = named_field("update/skipped")
    """Updates that were not taken: something in them was not a finite number."""
    not_finite: Mapping[str, str] = named_field("update/not_finite", read=text_members, sparse=True)
    """Which mini-batch was skipped → what was not finite."""
    skipped_row: int = named_field("update/skipped_row", read=whole, sparse=True)
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


def alarms(value: object, step: int = 0) -> tuple[Alarm, ...]:
    """Alarms of a file; old lines leave the step out, which is the line's."""
    return tuple(
        Alarm(
            canary=text(one.get("canary")),
            value=finite(one.get("value")) or 0.0,
            first=finite(one.get("first")) or 0.0,
            drafts=finite(one.get("drafts")),
            why=tuple(map(str, one.get("why", ()))),
            step=whole(one.get("step", step)),
        )
        for one in (value if isinstance(value, list | tuple) else ())
        if isinstance(one, Mapping)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScores(Named):
    """What the canaries scored in a step; empty between turns."""

    means: Mapping[str, float | None] = spread_fields("canary/")
    unscored: int = named_field("canaries/unscored", read=whole, sparse=True)
    alarms: tuple[Alarm, ...] = named_field("canaries/alarms", read=alarms, sparse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonCounts(Named):
    """The conversations of a supervised step."""

    learned: Mapping[str, int] = spread_fields("lessons/of/", read=whole)
    """Source → lessons that were learned from."""
    left_out: Mapping[str, int] = spread_fields("lessons/left_out/", read=whole)
    """Reason → lessons that could not be learned from, and were replaced by the next ones."""
    shortened: int = named_field("lessons/shortened", read=whole, sparse=True)
    """Lessons that lost their oldest turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCost(Named):
    """Of weights that travel to servers, which sample with them; empty where nothing travels."""

    push_seconds: float | None = named_field("time/push")
    """Until they were proven to be there, since the step before."""
    proof: float | None = named_field("push/distance")
    """Nats by which the servers missed the trainer at the proof of the last push, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine(Named):
    """One step of a training run."""

    step: int = named_field("step", read=whole)
    lr: float | None = named_field("optimizer/lr")
    rewards: Rewards = field(default_factory=Rewards, metadata=SECTION)
    feedback: FeedbackCounts = field(default_factory=FeedbackCounts, metadata=SECTION)
    learned: Learned = field(default_factory=Learned, metadata=SECTION)
    canaries: CanaryScores = field(default_factory=CanaryScores, metadata=SECTION)
    lessons: LessonCounts = field(default_factory=LessonCounts, metadata=SECTION)
    travel: PushCost = field(default_factory=PushCost, metadata=SECTION)
    version: str = named_field("policy/version", read=text, sparse=True)
    """Hash of the weights that sampled."""
    sample_seconds: float | None = named_field("time/sample")
    train_seconds: float | None = named_field("time/train")
    dev: Mapping[str, float | None] = spread_fields("eval/")
    """Task → dev score of the moved weights, in steps that evaluate."""
    valid: Mapping[str, float | None] = spread_fields("loss/valid/")
    """Source → nats per learned token of its validation conversations, in such steps."""
    probe: Mapping[str, float | None] = spread_fields("probe/")
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


def read_line(line: Mapping[str, Any]) -> StepLine:
    """A line of any age."""
    step, new = whole(line.get("step")), renamed(line)
    if "canaries/alarms" in new:
        new["canaries/alarms"] = [asdict(one) for one in alarms(new["canaries/alarms"], step)]
    return StepLine.from_json(new)


def read_step_lines(path: Path) -> list[StepLine]:
    """The lines of a run's `metrics.jsonl`, dev scores in lines of their own; none without file.

    DataError for a line of another schema."""
    lines = read_jsonl(path)
    for number, line in enumerate(lines, 1):
        refuse_other_schema(line, METRICS_SCHEMA, f"Line {number} of '{path}'")
    return steps_of(lines)


def steps_of(lines: Iterable[Mapping[str, Any]]) -> list[StepLine]:
    return [read_line(line) for line in lines if isinstance(line.get("step"), int)]


def lines_of_step(line: StepLine) -> list[dict[str, Any]]:
    """What is appended for a step: its line, and one with what the moved weights are worth."""
    return [_noted(replace(line, dev={}, valid={}, probe={})), *dev_lines(line)]


def dev_lines(line: StepLine) -> list[dict[str, Any]]:
    """The line with a step's dev scores and validation losses, where there are any."""
    measured = StepLine(step=line.step, dev=line.dev, valid=line.valid, probe=line.probe)
    return [_noted(measured)] if line.measures else []


def _noted(line: StepLine) -> dict[str, Any]:
    return {SCHEMA: METRICS_SCHEMA, **line.to_json()}
