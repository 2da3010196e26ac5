"""Advantages of rollouts and tokens. Shapes are [batch][token]; nothing carries a gradient.

* Group advantages (GRPO and its relatives) compare the members of a group. Methods differ only in
  the group keys: GRPO groups by prompt; Ditto puts drafts and copies of a prompt into one group
  and feedback-conditioned sequences into another; several acted characters add their role.
* Distillation advantages are log-ratios of teacher to student per token, with four ways to credit
  a token for what follows it.

Statistics use double precision: in float32, the rounding error of a mean divided by epsilon (1e-6)
would give visible advantages to a group of equal rewards.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, get_args

import torch
from torch import Tensor

from soulkit.errors import ConfigError, did_you_mean

StdMode = Literal["group", "batch", "none"]
"""Divisor of a centred reward: the group's spread, the batch's, or none (Dr. GRPO)."""

Singleton = Literal["zero", "raw"]
"""Advantage of a group with one rollout: 0 (protocol `paper`) or the raw reward (`reference`)."""

Estimator = Literal["local", "sum", "discount", "window"]
"""How far ahead a token's distillation advantage looks."""

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One trained sequence in the group statistics.

    Sequences of one rollout share `rollout` and count once per group; `reward` is None if the
    episode is unscored.
    """

    group: Hashable
    rollout: str
    reward: float | None
    play: Hashable = None
    """Identifies the rollout across groups if it has sequences in several (several acted seats, or
    copies and refined rollouts); None: no rollout is in two groups."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Counts of groups with and without a learning signal, among groups with a scored rollout."""

    groups: int
    singletons: int
    """Groups with one scored rollout."""
    flat: int
    """Groups with two or more rollouts and equal rewards."""

    @property
    def silent_share(self) -> float | None:
        """Share of groups without a learning signal; None if there is no group."""
        return (self.singletons + self.flat) / self.groups if self.groups else None


def singleton_of(protocol: str) -> Singleton:
    """How a protocol treats a group with one rollout."""
    return "raw" if protocol == "reference" else "zero"


def group_advantages(
    entries: Sequence[GroupMember],
    *,
    epsilon: float = EPSILON,
    std: StdMode = "group",
    singleton: Singleton = "zero",
) -> list[float | None]:
    """Â = (r − mean) / (std + ε) within each group; one value per entry, None if unscored.

    Source: algorithms §2 (GRPO, multi-sequence rollouts). The standard deviation is the sample one
    (n−1). A rollout counts once per group, with the reward of its first scored entry; unscored
    entries are ignored. `std="batch"` divides by the spread of all scored rollouts of the batch,
    each counted once; `std="none"` does not divide. A group with one scored rollout gets 0
    (`singleton="zero"`) or is treated as if its mean were 0 and its spread 1 (`"raw"`).

    Raises ConfigError for an unknown option and ValueError for a reward that is not finite.
    """
    _check("std", std, get_args(StdMode))
    _check("singleton", singleton, get_args(Singleton))
    groups = _rewards_by_group(entries)
    batch_spread = _spread(_rewards_of_plays(entries))
    scales = {
        key: _centre_and_scale(rewards, std, epsilon, batch_spread)
        for key, rewards in groups.items()
    }
    values: list[float | None] = []
    for entry in entries:
        if entry.reward is None:
            values.append(None)
        elif len(groups[entry.group]) == 1:
            values.append(_lone_value(entry.reward, std, epsilon, singleton))
        else:
            mean, scale = scales[entry.group]
            values.append((entry.reward - mean) / scale)
    return values


def group_stats(entries: Sequence[GroupMember]) -> GroupStats:
    """Counts of groups with one rollout and with equal rewards, logged in every step."""
    groups = _rewards_by_group(entries)
    singletons = sum(len(rewards) == 1 for rewards in groups.values())
    flat = sum(len(r) > 1 and min(r) == max(r) for r in groups.values())
    return GroupStats(len(groups), singletons, flat)


def spread_over_tokens(values: Sequence[float | None], mask: Tensor) -> Tensor:
    """The row's advantage at every trained token, 0 elsewhere.

    Raises ValueError if an unscored row has trained tokens: drop such rows first.
    """
    rows = []
    for value, row in zip(values, mask, strict=True):
        if value is None and bool((row != 0).any()):
            raise ValueError("an unscored sequence has trained tokens; drop it before training")
        rows.append(row * (0.0 if value is None else value))
    return torch.stack(rows) if rows else mask.clone()


def distill_advantages(
    teacher: Tensor,
    student: Tensor,
    mask: Tensor,
    *,
    estimator: Estimator = "local",
    clip: float = 5.0,
    discount: float = 0.99,
    window: int = 32,
    normalize: bool = False,
    groups: Sequence[Hashable] | None = None,
    taught: Sequence[float] | None = None,
    singleton: Singleton = "zero",
) -> Tensor:
    """Per-token advantages from d_t = log π_T(y_t) − log π_θ(y_t), in nats: [batch][token].

    Source: algorithms §4 (`sdpo-token`, `opd`). Over the trained tokens of a row:
    `local` A_t = d_t; `sum` A_t = Σ_{u≥t} d_u; `discount` A_t = Σ_{u≥t} γ^{u−t} d_u; `window` the
    sum of the next `window` terms, d_t included (0 = all). Discount and window skip tokens outside
    the mask. With `normalize`, the mean over the row (or over all trained tokens of its group, if
    `groups` gives one key per row) is subtracted; then A is clipped to ±`clip`. `taught` is 0 for
    rows without a teacher: they get 0 and are left out of means. A *group* with one token follows
    `singleton`. Raises ConfigError for an unknown estimator or a negative window.
    """
    _check("estimator", estimator, get_args(Estimator))
    _check("singleton", singleton, get_args(Singleton))
    _check_window(window)
    used = mask != 0
    if taught is not None:
        used = used & (torch.as_tensor(taught, device=mask.device) != 0).unsqueeze(-1)
    ratio = (teacher - student).detach().double()
    rows = [
        _look_ahead(r[u], estimator, discount, window) for r, u in zip(ratio, used, strict=True)
    ]
    if normalize:
        rows = _subtract_means(rows, groups, singleton)
    result = torch.zeros_like(ratio)
    for out, row_used, row in zip(result, used, rows, strict=True):
        out[row_used] = row.clamp(-clip, clip)
    return result.to(teacher.dtype)


def combine(
    advantages: Tensor,
    distilled: Tensor,
    mask: Tensor,
    *,
    weight: float = 0.1,
    taught: Sequence[float] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """A + weight · A_distill, and metrics of both parts.

    Source: algorithms §4 (`sdpo-token+grpo`, `opd`; `distill_weight`). Metrics of the distilled
    part are over trained tokens of taught rows and missing if there are none; the spread is the
    sample standard deviation, missing for a single token.
    """
    used = mask != 0
    rows = torch.ones(len(mask)) if taught is None else torch.as_tensor(taught)
    part = distilled[used & (rows.to(mask.device) != 0).unsqueeze(-1)].double()
    base = advantages[used].double()
    metrics = {"samples": float((rows != 0).sum())}
    if base.numel():
        metrics["grpo_adv_abs_mean"] = float(base.abs().mean())
    if part.numel():
        absolute = float(part.abs().mean())
        metrics |= {"adv_mean": float(part.mean()), "adv_abs_mean": absolute}
        metrics |= {"adv_max": float(part.max()), "adv_min": float(part.min())}
        metrics["weighted_adv_abs_mean"] = weight * absolute
    if part.numel() > 1:
        metrics["adv_std"] = float(part.std())
    return advantages + weight * distilled, metrics


# --- group statistics -----------------------------------------------------------------------------


def _rewards_by_group(entries: Sequence[GroupMember]) -> dict[Hashable, list[float]]:
    seen: dict[Hashable, dict[str, float]] = {}
    for entry in entries:
        if entry.reward is None:
            continue
        if not math.isfinite(entry.reward):
            raise ValueError(f"reward of rollout {entry.rollout!r} is {entry.reward}")
        seen.setdefault(entry.group, {}).setdefault(entry.rollout, entry.reward)
    return {key: list(rollouts.values()) for key, rollouts in seen.items()}


def _rewards_of_plays(entries: Sequence[GroupMember]) -> list[float]:
    """One reward for every scored rollout of the batch."""
    rewards: dict[Hashable, float] = {}
    for entry in entries:
        if entry.reward is not None:
            play = (entry.group, entry.rollout) if entry.play is None else entry.play
            rewards.setdefault(play, entry.reward)
    return list(rewards.values())


def _spread(rewards: Sequence[float]) -> float:
    return stdev(rewards) if len(rewards) > 1 else 0.0


def _centre_and_scale(
    rewards: Sequence[float], std: StdMode, epsilon: float, batch_spread: float
) -> tuple[float, float]:
    # Equal rewards must give exactly 0: the rounding error would be divided by epsilon.
    mean = rewards[0] if min(rewards) == max(rewards) else fmean(rewards)
    if std == "none":
        return mean, 1.0
    return mean, (batch_spread if std == "batch" else _spread(rewards)) + epsilon


def _lone_value(reward: float, std: StdMode, epsilon: float, singleton: Singleton) -> float:
    if singleton == "zero":
        return 0.0
    return reward if std == "none" else reward / (1.0 + epsilon)


# --- distillation ---------------------------------------------------------------------------------


def _look_ahead(ratio: Tensor, estimator: Estimator, discount: float, window: int) -> Tensor:
    """`ratio` holds the trained tokens of one row, without gaps."""
    if estimator == "local":
        return ratio
    if estimator == "discount":
        return _discounted(ratio, discount)
    tail = _discounted(ratio, 1.0)  # torch.cumsum has no deterministic CUDA kernel
    if estimator == "sum" or window == 0 or window >= len(ratio):
        return tail
    beyond = torch.zeros_like(tail)
    beyond[:-window] = tail[window:]
    return tail - beyond


def _discounted(ratio: Tensor, discount: float) -> Tensor:
    # Recursive, because a ratio of cumulative sums divides by discount**t, which underflows.
    values: list[float] = ratio.tolist()
    for t in range(len(values) - 2, -1, -1):
        values[t] += discount * values[t + 1]
    return ratio.new_tensor(values)


def _subtract_means(
    rows: Sequence[Tensor], groups: Sequence[Hashable] | None, singleton: Singleton
) -> list[Tensor]:
    keys: Sequence[Hashable] = range(len(rows)) if groups is None else groups
    members: dict[Hashable, list[Tensor]] = {}
    for key, row in zip(keys, rows, strict=True):
        members.setdefault(key, []).append(row)
    means: dict[Hashable, Tensor | float] = {}
    for key, parts in members.items():
        tokens = torch.cat(parts)
        lone = tokens.numel() == 1 and groups is not None and singleton == "raw"
        means[key] = 0.0 if lone or not tokens.numel() else tokens.mean()
    return [row - means[key] for key, row in zip(keys, rows, strict=True)]


def _check(name: str, value: str, values: Sequence[str]) -> None:
    if value not in values:
        raise ConfigError(
            f"'{value}' is not a value of '{name}'.",
            f"It chooses how advantages are computed; its values are {', '.join(values)}.",
            did_you_mean(value, values),
        )


def _check_window(window: int) -> None:
    if window < 0:
        raise ConfigError(
            f"The distillation window is {window}, which is negative.",
            "The window is the number of trained tokens that an advantage looks ahead.",
            "Use 1 for only the token itself, a larger number, or 0 for all remaining tokens.",
        )
