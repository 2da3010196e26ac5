"""Group and distillation advantages: worked examples, invariants, a naive second implementation.

Group advantages against the conformance vectors.

Distillation advantages against the conformance vectors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soulkit.errors import ConfigError, UserError
from soulkit.train.loss.advantage import (
    GroupMember,
    Singleton,
    StdMode,
    combine,
    distill_advantages,
    group_advantages,
    group_stats,
    spread_over_tokens,
)
from tests.support.vectors import Vector, assert_tensor, conformance


def entries(*rows: tuple[str, str, float | None]) -> list[GroupMember]:
    return [GroupMember(*row) for row in rows]


def floats(values: list[float | None]) -> list[float]:
    assert all(v is not None for v in values)
    return [v for v in values if v is not None]


SCENES = (("a", 0), ("b", 1), ("c", 5))
PAIR = entries(("x", "a", 1.0), ("x", "b", 0.0))


def test_two_rollouts_by_hand() -> None:
    # mean 1/2, sample deviation sqrt(1/2): +-(1/2) / sqrt(1/2)
    assert floats(group_advantages(PAIR, epsilon=0.0)) == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(0.5)]
    )


def test_a_millionth_is_added_to_the_spread() -> None:
    # Rewards 0 and 1: mean 1/2, sample deviation sqrt(1/2).
    high = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert floats(group_advantages(PAIR)) == pytest.approx([high, -high], rel=1e-9)
    tiny = entries(("x", "a", 1e-6), ("x", "b", 0.0))
    high = 0.5e-6 / (math.sqrt(0.5) * 1e-6 + 1e-6)
    assert floats(group_advantages(tiny)) == pytest.approx([high, -high], rel=1e-9)
    alone = entries(("x", "a", 3.0))
    assert floats(group_advantages(alone, singleton="raw")) == pytest.approx(
        [3.0 / (1.0 + 1e-6)], rel=1e-9
    )


def test_without_std_only_the_mean_goes() -> None:
    assert group_advantages(PAIR, std="none") == [0.5, -0.5]


def test_batch_std_uses_every_scored_rollout_once() -> None:
    batch = [
        *PAIR,
        GroupMember("y", "a", 4.0),
        GroupMember("y", "b", 2.0),
        GroupMember("y", "b", 2.0),
    ]
    spread = statistics.stdev([1.0, 0.0, 4.0, 2.0])
    expected = [0.5, -0.5, 1.0, -1.0, -1.0]
    assert floats(group_advantages(batch, std="batch", epsilon=0.0)) == pytest.approx(
        [e / spread for e in expected]
    )


def test_batch_std_takes_a_rollout_of_several_seats_once() -> None:
    one_seat = [GroupMember("ann", r, float(reward), ("e", r)) for r, reward in SCENES]
    other = [GroupMember("bo", r, float(reward), ("e", r)) for r, reward in SCENES[1:]]
    whole = floats(group_advantages([*one_seat, *other], std="batch", epsilon=0.0))
    spread = statistics.stdev([0.0, 1.0, 5.0])
    assert whole == pytest.approx([x / spread for x in (-2.0, -1.0, 3.0, -2.0, 2.0)])


def test_unscored_leaves_the_group_before_any_statistic() -> None:
    with_gap = [PAIR[0], GroupMember("x", "c", None), PAIR[1]]
    first, gap, second = group_advantages(with_gap)
    assert gap is None
    assert [first, second] == group_advantages(PAIR)


def test_a_group_left_with_one_scored_rollout_is_a_singleton() -> None:
    rows = entries(("x", "a", 0.8), ("x", "b", None))
    assert group_advantages(rows) == [0.0, None]
    assert group_advantages(rows, singleton="raw", std="none") == [0.8, None]
    raw = group_advantages(rows, singleton="raw", epsilon=1e-6)[0]
    assert raw == pytest.approx(0.8 / (1 + 1e-6), rel=1e-12)


def test_many_sequences_of_one_rollout_count_once() -> None:
    rows = [PAIR[0], *[PAIR[1]] * 3]
    values = floats(group_advantages(rows))
    once = floats(group_advantages(PAIR))
    assert values == [once[0], once[1], once[1], once[1]]


def test_two_sequences_of_a_single_rollout_are_still_a_singleton() -> None:
    assert group_advantages([PAIR[0], PAIR[0]]) == [0.0, 0.0]


def test_copies_move_the_base_group_and_not_the_feedback_group() -> None:
    drafts = entries(("base", "d0", 0.0), ("base", "d1", 0.4))
    copies = entries(("base", "r0", 1.0), ("base", "r1", 0.6))
    refined = entries(("feedback", "r0", 1.0), ("feedback", "r1", 0.6))
    values = group_advantages([*drafts, *copies, *refined], std="none")
    assert floats(values) == pytest.approx([-0.5, -0.1, 0.5, 0.1, 0.2, -0.2])


def test_equal_rewards_give_exactly_zero() -> None:
    # 0.1 + 0.2 has no exact mean in floating point; divided by epsilon the rest would show.
    rows = entries(*[("x", str(i), 0.1 + 0.2) for i in range(7)])
    assert group_advantages(rows, epsilon=1e-12) == [0.0] * 7


def test_group_stats_counts_silent_groups() -> None:
    rows = [*PAIR, *entries(("y", "a", 1.0)), *entries(("z", "a", 1.0), ("z", "b", 1.0))]
    stats = group_stats([*rows, GroupMember("unscored", "a", None)])
    assert (stats.groups, stats.singletons, stats.flat) == (3, 1, 1)
    assert stats.silent_share == pytest.approx(2 / 3)
    assert group_stats([]).silent_share is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="rollout 'a'"):
        group_advantages([GroupMember("x", "a", bad)])


def test_unknown_options_name_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        group_advantages(PAIR, std="grup")  # type: ignore[arg-type]
    assert "group" in caught.value.way_out
    with pytest.raises(ConfigError):
        distill_advantages(*[torch.ones(1, 1)] * 3, estimator="window", window=-1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.floats(-5, 5), st.floats(0.5, 3))
def test_shift_does_nothing_and_the_sum_is_zero(
    rewards: list[float], shift: float, scale: float
) -> None:
    def advantages(values: list[float]) -> list[float]:
        rows = [GroupMember("x", str(i), v) for i, v in enumerate(values)]
        return floats(group_advantages(rows, std="none"))

    base = advantages(rewards)
    assert sum(base) == pytest.approx(0, abs=1e-9)
    moved = advantages([r * scale + shift for r in rewards])
    assert moved == pytest.approx([b * scale for b in base], abs=1e-9)


def test_spread_over_tokens_refuses_trained_tokens_without_a_score() -> None:
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert spread_over_tokens([2.0, -1.0], mask).tolist() == [[2.0, 0.0], [-1.0, -1.0]]
    assert spread_over_tokens([None], torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]
    with pytest.raises(ValueError, match="unscored"):
        spread_over_tokens([None, 1.0], mask)


# --- distillation ---------------------------------------------------------------------------------


def naive(ratio: list[float], mask: list[int], horizon: int, discount: float) -> list[float]:
    """Straight from the formula, with positions of trained tokens looked up one by one."""
    trained = [i for i, m in enumerate(mask) if m]
    result = [0.0] * len(ratio)
    for rank, i in enumerate(trained):
        ahead = trained[rank : rank + horizon]
        result[i] = sum(discount**k * ratio[j] for k, j in enumerate(ahead))
    return result


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-4, 4), st.integers(0, 1)), min_size=1, max_size=12),
    st.sampled_from(["local", "sum", "discount", "window"]),
    st.integers(1, 5),
)
def test_estimators_equal_the_naive_sums(
    tokens: list[tuple[float, int]], estimator: str, window: int
) -> None:
    ratio, mask = [t[0] for t in tokens], [t[1] for t in tokens]
    horizon = {"local": 1, "window": window}.get(estimator, len(ratio))
    expected = naive(ratio, mask, horizon, 0.7 if estimator == "discount" else 1.0)
    advantages = distill_advantages(
        torch.tensor([ratio], dtype=torch.float64),
        torch.zeros(1, len(ratio), dtype=torch.float64),
        torch.tensor([mask]),
        estimator=estimator,  # type: ignore[arg-type]
        discount=0.7,
        window=window,
        clip=1e9,
    )
    assert advantages[0].tolist() == pytest.approx(expected, abs=1e-9)


def test_long_rows_keep_the_scale_of_the_discount() -> None:
    ones = torch.ones(1, 400)
    advantages = distill_advantages(ones, 0 * ones, ones, estimator="discount", discount=0.1)
    assert advantages[0, :390].tolist() == pytest.approx([1 / 0.9] * 390, rel=1e-6)


def test_the_final_clip_comes_last() -> None:
    teacher = torch.tensor([[4.0, 4.0, -1.0]])
    advantages = distill_advantages(
        teacher, torch.zeros(1, 3), torch.ones(1, 3), estimator="sum", clip=5.0
    )
    assert advantages.tolist() == [[5.0, 3.0, -1.0]]


def test_normalising_by_row_or_group_skips_rows_without_teacher() -> None:
    teacher = torch.tensor([[1.0, 3.0], [5.0, 7.0], [90.0, 90.0]])
    rest = (torch.zeros(3, 2), torch.ones(3, 2))
    by_row = distill_advantages(teacher, *rest, normalize=True, taught=[1, 1, 0])
    assert by_row.tolist() == [[-1.0, 1.0], [-1.0, 1.0], [0.0, 0.0]]
    by_group = distill_advantages(
        teacher, *rest, normalize=True, groups=["x", "x", "x"], taught=[1, 1, 0]
    )
    assert by_group.tolist() == [[-3.0, -1.0], [1.0, 3.0], [0.0, 0.0]]


def test_a_group_of_one_token() -> None:
    one = torch.ones(1, 1)
    options: dict[str, Any] = {"normalize": True, "groups": ["x"]}
    assert distill_advantages(2 * one, 0 * one, one, **options).item() == 0.0
    raw = distill_advantages(2 * one, 0 * one, one, **options, singleton="raw")
    assert raw.item() == 2.0


def test_no_gradient_leaves() -> None:
    student = torch.zeros(1, 2, requires_grad=True)
    advantages = distill_advantages(torch.ones(1, 2), student, torch.ones(1, 2))
    assert not advantages.requires_grad


def test_combine_without_a_taught_row_changes_nothing() -> None:
    advantages = torch.tensor([[1.0, -2.0]])
    mixed, metrics = combine(advantages, torch.zeros(1, 2), torch.ones(1, 2), taught=[0])
    assert mixed.tolist() == advantages.tolist()
    assert metrics == {"samples": 0.0, "grpo_adv_abs_mean": 1.5}


BUILT = {"grpo", "grpo_vectorized", "foldgrpo"}


def spread_group_advantages(
    rewards: Tensor,
    mask: Tensor,
    *,
    prompts: Sequence[str],
    rollouts: Sequence[str] | None,
    roles: Sequence[str | None] | None,
    epsilon: float,
    std: StdMode,
    singleton: Singleton,
) -> Tensor:
    """Group advantages of token-level rewards, spread over the trained tokens: [batch][token].

    A row's reward is the sum over all its tokens, trained or not: it belongs
    to the sequence, wherever it was written. The group key is (prompt, role), no role and an empty
    one being the same; without `rollouts` every row is its own rollout.
    """
    rollouts = rollouts if rollouts is not None else [str(i) for i in range(len(prompts))]
    roles = roles if roles is not None else [None] * len(prompts)
    totals: list[float] = rewards.detach().sum(-1).tolist()
    entries = [
        GroupMember((prompt, role or ""), str(rollout), total)
        for prompt, role, rollout, total in zip(prompts, roles, rollouts, totals, strict=True)
    ]
    values = group_advantages(entries, epsilon=epsilon, std=std, singleton=singleton)
    return spread_over_tokens(values, mask.to(rewards.dtype))


@conformance("train.advantage", built=BUILT)
def test_advantage(vector: Vector) -> None:
    data = vector.input
    dtype = getattr(torch, data["dtype"])
    rollouts = data.get("gen_uid") if data["estimator"] == "foldgrpo" else None
    advantages = spread_group_advantages(
        torch.tensor(data["token_level_rewards"], dtype=dtype),
        torch.tensor(data["response_mask"]),
        prompts=data["index"],
        rollouts=rollouts,
        roles=data.get("agent_role"),
        epsilon=data["epsilon"],
        std="group" if data["norm_adv_by_std"] else "none",
        singleton="raw",
    )
    assert advantages.dtype == dtype
    assert_tensor(advantages, vector.expected["advantages"], data["dtype"])


DISTILLATION_QUIRKS = {
    "discount-underflow": "the recursion has no power of gamma to divide by",
    "group-normalisation-crashes": "a group without taught tokens has nothing to subtract",
}
METRICS = {
    "opd/n_opd_samples": "samples",
    "opd/adv_mean": "adv_mean",
    "opd/adv_abs_mean": "adv_abs_mean",
    "opd/adv_std": "adv_std",
    "opd/adv_max": "adv_max",
    "opd/adv_min": "adv_min",
    "opd/alpha_adv_abs_mean": "weighted_adv_abs_mean",
    "opd/grpo_adv_abs_mean": "grpo_adv_abs_mean",
}
CONFIG = {
    "opd_clip": "clip",
    "opd_estimator": "estimator",
    "opd_discount": "discount",
    "opd_window": "window",
    "opd_normalize": "normalize",
}


@conformance("train.opd", differ=DISTILLATION_QUIRKS)
def test_opd(vector: Vector) -> None:
    check = _combine if vector.family == "combine" else _plain
    if vector.raises:
        with pytest.raises(UserError):
            check(vector)
    else:
        check(vector)


def _distilled(data: Any, **options: Any) -> torch.Tensor:
    dtype = getattr(torch, data["dtype"])
    return distill_advantages(
        torch.tensor(data["teacher_log_prob"], dtype=dtype),
        torch.tensor(data["student_log_prob"], dtype=dtype),
        torch.tensor(data["response_mask"]),
        groups=data.get("index"),
        taught=data["opd_mask"],
        singleton="raw",
        **options,
    )


def _plain(vector: Vector) -> None:
    names = ("estimator", "clip", "discount", "window", "normalize")
    result = _distilled(vector.input, **{n: vector.input[n] for n in names})
    assert_tensor(result, vector.expected["advantages"], vector.input["dtype"])


def _combine(vector: Vector) -> None:
    data, config = vector.input, vector.input["config"]
    distilled = _distilled(data, **{CONFIG[k]: v for k, v in config.items() if k in CONFIG})
    advantages = torch.tensor(data["advantages"], dtype=distilled.dtype)
    weight = {"weight": config["opd_alpha"]} if "opd_alpha" in config else {}
    mask = torch.tensor(data["response_mask"])
    result, metrics = combine(advantages, distilled, mask, taught=data["opd_mask"], **weight)
    assert_tensor(result, vector.expected["advantages"], data["dtype"])
    expected = {METRICS[k]: v for k, v in vector.expected["metrics"].items()}
    assert_tensor(metrics, expected, data["dtype"], at="metrics")
