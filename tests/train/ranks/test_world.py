"""Packs are divided evenly; ranks skip, end and resume together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from soulkit.train.model.packing import HeadShape, Pack, plan_packs
from soulkit.train.objectives.sequences import Span
from soulkit.train.ranks.launch import LOST
from soulkit.train.ranks.world import LEAST_TOKENS, Ranks, divide
from soulkit.train.run import train
from soulkit.train.state.stops import MOST_SKIPS
from tests.support.rank_failures import break_backward, fail
from tests.support.ranks import run_ranks
from tests.support.resuming import episodes
from tests.support.training import config, lines_of, random_model

# --- dividing -------------------------------------------------------------------------------------

COSTS = st.lists(st.floats(0.1, 1e6), max_size=40)


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 3))
def test_ranks_have_every_pack_once_and_even_loads(costs: list[int], size: int) -> None:
    """The busiest rank has at most 4/3 of what it would have in the best division."""
    places, load = divide(costs, size)
    assert sorted(i for part in places for i in part) == list(range(len(costs)))
    assert len(places) == size and load == [sum(costs[i] for i in part) for part in places]
    every = product(range(size), repeat=len(costs))
    sums = ([sum(c for c, r in zip(costs, to, strict=True) if r == i) for i in range(size)]
            for to in every)  # fmt: skip
    assert max(load) <= 4 / 3 * min(map(max, sums))


@given(COSTS, st.integers(1, 9), st.booleans())
def test_ranks_of_split_weights_have_equal_numbers_of_passes(
    costs: list[float], size: int, sharded: bool
) -> None:
    parts = [Ranks(rank, size, sharded).share(costs, float) for rank in range(size)]
    assert sorted(pack for part in parts for pack in part if pack is not None) == sorted(costs)
    if sharded:
        assert len({len(part) for part in parts}) == 1
    else:
        assert all(None not in part for part in parts)


SPANS = st.lists(st.integers(1, 300), max_size=25).map(
    lambda lengths: [
        Span((7,) * n + (i,), (False,) * n + (True,), ()) for i, n in enumerate(lengths)
    ]
)


@given(SPANS, st.integers(1, 6), st.sampled_from([16, 128, 4096]))
def test_the_best_plan_has_every_sequence_and_the_least_busiest_rank(
    spans: Sequence[Span], size: int, budget: int
) -> None:
    shape = HeadShape()

    def plan(tokens: int) -> list[Pack]:
        return plan_packs(spans, tokens, None)

    def busiest(packs: Sequence[Pack]) -> float:
        return max(divide([shape.cost(pack) for pack in packs], size)[1])

    best = Ranks(0, size).best_plan(plan, budget, shape.cost, "cpu")
    assert sorted(i for pack in best for i in pack.indices) == list(range(len(spans)))
    assert busiest(best) <= busiest(plan(budget))
    if size == 1:
        assert [pack.indices for pack in best] == [pack.indices for pack in plan(budget)]
    if len(best) == 1 and size > 1:  # no smaller pack was allowed, or none was better
        half = budget // 2
        assert half < LEAST_TOKENS["cpu"] or busiest(plan(half)) >= busiest(best)


def test_one_pack_becomes_as_many_as_there_are_ranks() -> None:
    spans = [Span(tuple(range(i, i + 60)), (True,) * 60, ()) for i in range(0, 960, 60)]
    for size in (2, 4, 8):
        world = Ranks(0, size)
        packs = world.best_plan(lambda b: plan_packs(spans, b, None), 4096, HeadShape().cost, "cpu")
        world.share(packs, HeadShape().cost)
        assert world.imbalance() == pytest.approx(1.0, abs=0.05) and world.imbalance() is None


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_broken_gradient_of_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    ended = run_ranks(2, tmp_path, break_backward, str(model), 1)
    assert ended.result, "\n".join(ended.errors)
    steps, error = ended.result
    assert [step[:3] for step in steps] == [(0, 2, 2), (0, 2, 4), (0, 1, MOST_SKIPS), (2, 0, 0)]
    assert len({version for *_, version in steps[:3]}) == 1 and steps[3][3] != steps[2][3]
    assert error == "The weights differ between rank 0 and rank 1."
    assert ended.codes == [0, LOST]  # the program of rank 0 has caught the error


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, None])
def test_an_error_on_one_rank_ends_all(tmp_path: Path, rank: int | None) -> None:
    ended = run_ranks(2, tmp_path, fail, rank, limit=60)
    where = "between commands" if rank is None else f"on rank {rank}"
    assert f"ValueError: broken {where}" in ended.errors[rank or 0]
    assert ended.codes == {0: [1, LOST], 1: [1, 1], None: [1, 0]}[rank]
    if rank == 1:
        assert "RankLost" in ended.errors[0]


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_the_same_on_any_number_of_ranks(warm: Path, tmp_path: Path) -> None:
    """Four steps in one process; and two on two ranks, then two on three."""
    settings = config(
        method="ditto", model=str(warm / "model"), data={"tomi": "synth:40"}, steps=4,
        prompts_per_step=4, group_size=4, max_tokens=12, lr=3e-4, lora={"r": 4, "alpha": 8},
        mini_batch_prompts=2, eval_every=2, dev_limit=6, sampler_cap=2.0, device="cpu",
    )  # fmt: skip
    alone, several = tmp_path / "alone", tmp_path / "several"
    train(settings, alone)
    for size, steps in ((2, 2), (3, 4)):
        part = settings.model_copy(update={"steps": steps})
        ended = run_ranks(size, tmp_path, train, part, several)
        assert ended.codes == [0] * size, "\n".join(ended.errors)
    assert said(several) == said(alone) and len(said(alone)) > 4 * 4 * 4
    model = "model/adapter_model.safetensors"
    weights, expected = load_file(several / model), load_file(alone / model)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert np.abs(weight - expected[name]).max() < 1e-5, name
    lines = [line for line in lines_of(several) if "loss/total" in line]
    assert [line["ranks/imbalance"] < 2 for line in lines] == [True] * 4


def said(run: Path) -> list[Any]:
    """What the rollouts of a run say, and their scores."""
    return [(e["key"], e["episode"]["messages"], e["score"]) for e in episodes(run)]
