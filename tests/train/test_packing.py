"""Plans: every sequence once, within the budget, in the cheaper of the two layouts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.train.forward.packing import (
    HeadShape,
    Pack,
    in_rows,
    in_tries,
    pack_entries,
    plan_packs,
)
from soulkit.train.forward.trie import build_trie
from soulkit.train.objectives.sequences import Span

SPANS = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=9).map(
        lambda ids: Span(tuple(ids), (False, *(True,) * (len(ids) - 1)), ())
    ),
    min_size=1,
    max_size=12,
)


def span(ids: tuple[int, ...], trained: int) -> Span:
    return Span(ids, (False,) * (len(ids) - trained) + (True,) * trained, ())


def drawn(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10**9) for _ in range(n))


def grown(prompts: int, group: int, prompt: int, reply: int) -> list[Span]:
    rng = random.Random(0)
    heads = [drawn(rng, prompt) for _ in range(prompts)]
    return [span((*head, *drawn(rng, reply)), reply) for head in heads for _ in range(group)]


@given(SPANS, st.integers(1, 40), st.booleans())
def test_every_span_is_in_one_pack_within_the_budget(
    spans: list[Span], budget: int, tries: bool
) -> None:
    packs = list((in_tries if tries else in_rows)(spans, budget))
    assert sorted(i for pack in packs for i in pack.indices) == list(range(len(spans)))
    for pack in packs:
        assert pack.spans == tuple(spans[i] for i in pack.indices)
        assert pack.computed <= budget or len(pack.rows) == 1


@given(SPANS, st.booleans())
def test_entries_say_where_each_token_is_predicted(spans: list[Span], as_trie: bool) -> None:
    trie = build_trie([s.ids for s in spans]) if as_trie else None
    pack = Pack(tuple(range(len(spans))), tuple(spans), trie)
    table = pack_entries(pack)
    flat = trie.ids if trie is not None else np.full(len(pack.rows) * pack.width, -1)
    if trie is None:
        for row, one in enumerate(pack.rows):
            flat[row * pack.width : row * pack.width + len(one.ids)] = one.ids
    for index, one in enumerate(spans):
        rows = table.owner == index
        assert list(table.target[rows]) == list(one.ids[1:])
        assert list(flat[table.parent[rows]]) == list(one.ids[:-1])


def test_a_first_token_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="first token"):
        pack_entries(Pack((0,), (Span((5, 6), (True, True), ()),)))


def test_shared_prompts_are_packed_and_unrelated_short_ones_are_rows() -> None:
    shape = HeadShape()
    (pack,) = plan_packs(grown(1, 16, 1024, 32), 16384, shape)
    assert pack.trie is not None and pack.computed == 1024 + 16 * 32
    assert all(p.trie is None for p in plan_packs(grown(64, 1, 12, 4), 16384, shape))
    assert all(p.trie is None for p in plan_packs(grown(1, 16, 1024, 32), 16384, None))


def test_a_pack_ends_between_groups_rather_than_within_one() -> None:
    spans = grown(6, 4, 100, 10)  # 140 tokens a group
    packs = list(in_tries(spans, 450))
    assert [pack.computed for pack in packs] == [420, 420]


def test_a_group_larger_than_the_budget_is_cut_and_its_prompt_computed_again() -> None:
    packs = list(in_tries(grown(1, 8, 100, 50), 300))
    assert [pack.computed for pack in packs] == [300, 300]
    assert [len(pack.spans) for pack in packs] == [4, 4]


def test_equal_sequences_cost_once_in_both_layouts() -> None:
    spans = [span((1, 2, 3, 4), 2)] * 8
    assert next(in_rows(spans, 100)).computed == 4
    assert next(in_tries(spans, 100)).computed == 4


def test_conversations_that_share_a_header_are_roots_and_a_long_preface_is_shared() -> None:
    rng = random.Random(1)
    shape = HeadShape()
    header, preface = drawn(rng, 5), drawn(rng, 400)
    talks = [span((*header, *drawn(rng, 300 + 20 * i)), 9) for i in range(4)]
    (pack,) = plan_packs(talks, 4096, shape)
    assert pack.trie is not None and pack.computed == sum(len(s.ids) for s in talks)
    assert shape.cost(pack) < sum(map(shape.cost, in_tries(talks, 4096)))
    prefaced = [span((*preface, *drawn(rng, 60)), 9) for _ in range(4)]
    (pack,) = plan_packs(prefaced, 4096, shape)
    assert pack.computed == 400 + 4 * 60
