"""The trie holds every prefix once, and its visibility is 'what stands on my path'."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.train.forward.blocks import Costs, plan_blocks
from soulkit.train.forward.trie import Trie, build_trie, shared

SEQUENCES = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=9
)
COSTS = [Costs(call=0, copy=0), Costs(call=1e9), Costs(call=20, copy=1), Costs()]


@given(SEQUENCES)
def test_every_prefix_stands_once_and_paths_spell_the_sequences(
    sequences: list[tuple[int, ...]],
) -> None:
    trie = build_trie(sequences)
    assert len(trie) == len({s[:i] for s in sequences for i in range(1, len(s) + 1)})
    for index, sequence in enumerate(sequences):
        path = trie.path(index)
        assert tuple(trie.ids[path]) == sequence
        assert list(trie.depth[path]) == list(range(len(sequence)))
        assert list(trie.parent[path]) == [-1, *path[:-1]]


@given(SEQUENCES, st.one_of(st.none(), st.integers(1, 6)))
def test_a_position_sees_its_own_path_and_nothing_else(
    sequences: list[tuple[int, ...]], window: int | None
) -> None:
    trie = build_trie(sequences)
    for index in range(len(sequences)):
        path = [int(p) for p in trie.path(index)]
        at = path[-1]
        seen = trie.visible((at, at + 1), [(0, len(trie))], window)[0]
        assert list(np.flatnonzero(seen)) == path[-(window or len(path)) :]


def whole(trie: Trie, window: int | None, costs: Costs) -> np.ndarray:
    """The visibility that the rectangles of a plan add up to."""
    mask = np.zeros((len(trie), len(trie)), dtype=bool)
    for block in plan_blocks(trie, costs, window)[1]:
        keys = np.concatenate([np.arange(a, b) for a, b in block.keys])
        seen = trie.visible(block.queries, block.keys, window)
        if block.causal:
            assert block.keys == (block.queries,)
            seen = np.tril(np.ones_like(seen))
        mask[np.arange(*block.queries)[:, None], keys[None]] = seen
    return mask


@given(SEQUENCES, st.one_of(st.none(), st.integers(1, 6)), st.sampled_from(COSTS))
def test_rectangles_show_each_query_exactly_what_it_sees(
    sequences: list[tuple[int, ...]], window: int | None, costs: Costs
) -> None:
    trie = build_trie(sequences)
    blocks = plan_blocks(trie, costs, window)[1]
    assert [q for b in blocks for q in range(*b.queries)] == list(range(len(trie)))
    everything = trie.visible((0, len(trie)), [(0, len(trie))], window)
    assert (whole(trie, window, costs) == everything).all()


def test_a_chain_without_branches_is_one_causal_rectangle() -> None:
    trie = build_trie([tuple(range(700))])
    ((block,), cost) = plan_blocks(trie, Costs())[1], plan_blocks(trie, Costs())[0]
    assert block.causal and block.queries == (0, 700)
    assert cost == pytest.approx(2500 + 0.48 * 700**2)


def test_leaves_do_not_pay_for_each_other_when_they_are_long() -> None:
    prompt = tuple(range(100))
    leaves = [(*prompt, *range(1000 * i, 1000 * i + 400)) for i in range(1, 5)]
    blocks = plan_blocks(build_trie(leaves), Costs())[1]
    assert max(b.n_keys for b in blocks) <= 500
    assert sum(b.n_queries * b.n_keys for b in blocks) < 0.6 * 1700**2


def test_a_window_leaves_out_keys_that_nobody_sees() -> None:
    prompt = tuple(range(300))
    leaves = [(*prompt, *range(1000 * i, 1000 * i + 8)) for i in range(1, 4)]
    blocks = plan_blocks(build_trie(leaves), Costs(call=0, copy=0), window=16)[1]
    assert all(b.n_keys <= 16 + b.n_queries for b in blocks)


def test_common_prefixes() -> None:
    assert shared((1, 2, 3), (1, 2, 4)) == 2
    assert shared((1, 2), (1, 2, 4)) == 2
    assert shared((), (1,)) == 0
    assert shared((2,), (1,)) == 0


def test_an_empty_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        build_trie([(1,), ()])
