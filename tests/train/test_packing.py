"""Plans: every sequence once, within the budget, in the cheaper of the two layouts.

The trie holds every prefix once, and its visibility is 'what stands on my path'.

Packing is invisible: log-probs, entropies and gradients are those of one sequence at a time.

Random forests of sequences go through `Policy.packs` and `Policy.score` and, each alone, through a
plain call of the model (`one_by_one.py`). Every (sequence, token) has a weight of its own on its
log-prob and on its entropy, so that an entry which is lost, doubled or swapped shows.

FlexAttention over packs: the same visibility, values and gradients as the other kernel.

On a CPU its plain form runs forward only. The tests in `tests/gpu` compare gradients of compiled
FlexAttention, packed SDPA and one sequence at a time.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from soulkit.errors import ConfigError, ModelLoadError
from soulkit.models.local.tiny import tiny_tokenizer
from soulkit.train.model import attention as attention_module
from soulkit.train.model import fused as fused_module
from soulkit.train.model import packing
from soulkit.train.model import policy as policy_module
from soulkit.train.model.attention import (
    FLEX_BLOCK,
    Packed,
    block_mask,
    flex_compilations,
    packing_distances,
    shares_keys,
)
from soulkit.train.model.packing import (
    Costs,
    HeadShape,
    Ids,
    Pack,
    Trie,
    build_trie,
    common_prefix,
    in_rows,
    in_tries,
    pack_entries,
    plan_blocks,
    plan_packs,
)
from soulkit.train.model.policy import Policy
from soulkit.train.objectives.sequences import Span
from soulkit.train.run import refuse_untrainable
from tests.support.one_by_one import Outcome, one_by_one, packed
from tests.support.shapes import LONG, WINDOW, WORDS, build
from tests.support.training import assert_close, config, policy_of

SPANS = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=9).map(
        lambda ids: Span(tuple(ids), (False, *(True,) * (len(ids) - 1)), ())
    ),
    min_size=1,
    max_size=12,
)


def span(ids: tuple[int, ...], trained: int) -> Span:
    return Span(ids, (False,) * (len(ids) - trained) + (True,) * trained, ())


def random_ids(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10**9) for _ in range(n))


def grown_spans(prompts: int, group: int, prompt: int, reply: int) -> list[Span]:
    rng = random.Random(0)
    heads = [random_ids(rng, prompt) for _ in range(prompts)]
    return [span((*head, *random_ids(rng, reply)), reply) for head in heads for _ in range(group)]


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
    (pack,) = plan_packs(grown_spans(1, 16, 1024, 32), 16384, shape)
    assert pack.trie is not None and pack.computed == 1024 + 16 * 32
    assert all(p.trie is None for p in plan_packs(grown_spans(64, 1, 12, 4), 16384, shape))
    assert all(p.trie is None for p in plan_packs(grown_spans(1, 16, 1024, 32), 16384, None))


def test_a_pack_ends_between_groups_rather_than_within_one() -> None:
    spans = grown_spans(6, 4, 100, 10)  # 140 tokens a group
    packs = list(in_tries(spans, 450))
    assert [pack.computed for pack in packs] == [420, 420]


def test_a_pack_with_enough_tokens_ends_where_it_shares_little() -> None:
    spans = grown_spans(6, 4, 100, 10)  # 140 tokens a group
    assert [p.computed for p in in_tries(spans, 1000, enough=200)] == [280, 280, 280]
    header = random_ids(random.Random(9), 5)
    headed = [span((*header, *s.ids), 10) for s in spans]
    for enough in (141, 200):  # five of 145 tokens are no small part
        assert [p.computed for p in in_tries(headed, 1000, enough=enough)] == [285, 285, 285]
    assert [p.computed for p in in_tries(headed, 10_000)] == [5 + 6 * 140]
    (whole,) = in_tries(grown_spans(1, 16, 100, 10), 1000, enough=200)
    assert whole.computed == 260


def test_a_group_larger_than_the_budget_is_cut_and_its_prompt_computed_again() -> None:
    packs = list(in_tries(grown_spans(1, 8, 100, 50), 300))
    assert [pack.computed for pack in packs] == [300, 300]
    assert [len(pack.spans) for pack in packs] == [4, 4]


def test_equal_sequences_cost_once_in_both_layouts() -> None:
    spans = [span((1, 2, 3, 4), 2)] * 8
    assert next(in_rows(spans, 100)).computed == 4
    assert next(in_tries(spans, 100)).computed == 4


def test_conversations_that_share_a_header_are_roots_and_a_long_preface_is_shared() -> None:
    rng = random.Random(1)
    shape = HeadShape()
    header, preface = random_ids(rng, 5), random_ids(rng, 400)
    talks = [span((*header, *random_ids(rng, 300 + 20 * i)), 9) for i in range(4)]
    (pack,) = plan_packs(talks, 4096, shape)
    assert pack.trie is not None and pack.computed == sum(len(s.ids) for s in talks)
    assert shape.cost(pack) < sum(map(shape.cost, in_tries(talks, 4096)))
    prefaced = [span((*preface, *random_ids(rng, 60)), 9) for _ in range(4)]
    (pack,) = plan_packs(prefaced, 4096, shape)
    assert pack.computed == 400 + 4 * 60


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
    assert common_prefix((1, 2, 3), (1, 2, 4)) == 2
    assert common_prefix((1, 2), (1, 2, 4)) == 2
    assert common_prefix((), (1,)) == 0
    assert common_prefix((2,), (1,)) == 0


def test_an_empty_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty sequence"):
        build_trie([(1,), ()])


FAMILIES = (
    "qwen3", "qwen3-tied", "qwen3-sliding", "llama", "mistral", "phi3", "gemma3", "gemma3-vl",
    "qwen3-vl", "qwen3-vl-tied",
)  # fmt: skip
LORA: dict[str, Any] = {"lora": {"r": 4, "alpha": 8}}
FULL: dict[str, Any] = {"full": True, "method": "sft"}
WEIGHTS = {"lora": LORA, "full": FULL}
BUDGETS = (1, 24, 60, 10_000)
FIRST = 300
"""The smallest id that the random sequences use."""

Load = Callable[..., Policy]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """(kind, **settings) → its policy, built once; the adapter is not zero."""
    out = tmp_path_factory.mktemp("kinds")

    @cache
    def folder(kind: str) -> Path:
        return build(kind, out / kind)

    policies: dict[str, Policy] = {}

    def policy(kind: str, **more: Any) -> Policy:
        key = f"{kind} {sorted(more.items())}"
        if key not in policies:
            move = 0.01 if more.get("full") else 0.05
            policies[key] = policy_of(folder(kind), move=move, **more)
        return policies[key]

    return policy


# --- random forests -------------------------------------------------------------------------------


def ids_of(rng: random.Random, length: int, symbols: int) -> tuple[int, ...]:
    return tuple(FIRST + rng.randrange(symbols) for _ in range(length))


def grown_records(
    rng: random.Random, before: Sequence[Span], shortest: int, longest: int, symbols: int
) -> Span:
    """One more sequence: a new root, or made from one that is already there."""
    how = rng.choice(("root", "branch", "branch", "prefix", "equal", "extend"))
    length = rng.randint(shortest, longest)
    if how == "root" or not before:
        return trained_somewhere(rng, ids_of(rng, length, symbols))
    old = rng.choice(before).ids
    cut = rng.randint(shortest, len(old))
    tail = ids_of(rng, max(1, length - cut), symbols)
    made = {
        "branch": (*old[:cut], *tail),
        "prefix": old[:cut],
        "equal": old,
        "extend": (*old, *tail),
    }[how]
    return trained_somewhere(rng, made)


def trained_somewhere(rng: random.Random, ids: tuple[int, ...]) -> Span:
    """A reply at the end, turns in the middle as in a dialogue, or every token but the first."""
    how = rng.choice(("reply", "turns", "all"))
    start = rng.randrange(1, len(ids))
    if how == "reply":
        trained = [False] * start + [True] * (len(ids) - start)
    elif how == "turns":
        turn = rng.randint(1, 4)
        trained = [False] + [(i // turn) % 2 == 0 for i in range(1, len(ids))]
        trained[-1] = True
    else:
        trained = [False] + [True] * (len(ids) - 1)
    return Span(ids, tuple(trained), ())


@st.composite
def forests(
    draw: st.DrawFn, least: int = 1, most: int = 9, shortest: int = 2, longest: int = 4 * WINDOW
) -> list[Span]:
    """Sequences over few different ids, so that prefixes meet by chance as well."""
    count = draw(st.integers(least, most))
    symbols = draw(st.sampled_from((2, 3, 40)))
    rng = random.Random(draw(st.integers(0, 2**32)))
    spans: list[Span] = []
    for _ in range(count):
        spans.append(grown_records(rng, spans, shortest, longest, symbols))
    rng.shuffle(spans)
    return spans


steps = forests(least=6, most=12, shortest=8)
"""Forests with tokens enough that no gradient is a rest of rounding: float32 has seven digits."""


def chain(lengths: Sequence[int]) -> list[Span]:
    """Sequences each of which is a prefix of the next."""
    rng = random.Random(3)
    ids = ids_of(rng, max(lengths), 30)
    return [trained_somewhere(rng, ids[:n]) for n in lengths]


def two_seats() -> list[Span]:
    """One dialogue that two characters act: each has its own prompt and trains its own turns."""
    rng = random.Random(5)
    turns = [ids_of(rng, n, 30) for n in (4, 6, 3, 5)]
    spans = []
    for seat in (0, 1):
        ids, trained = list(ids_of(rng, 9, 30)), [False] * 9
        for number, turn in enumerate(turns):
            ids += turn
            trained += [number % 2 == seat] * len(turn)
        spans.append(Span(tuple(ids), tuple(trained), ()))
    # The first dialogue as a third seat sees it: equal ids, other trained tokens.
    other = tuple(i > 0 and not t for i, t in enumerate(spans[0].trained))
    return [*spans, Span(spans[0].ids, other, ())]


FIXED: dict[str, list[Span]] = {
    "chain": chain((4, 8, 17, 30)),
    "equal": [chain((20,))[0]] * 5,
    "seats": two_seats(),
    "drafts": [
        Span((*range(400, 420), *ids_of(random.Random(n), 6, 30)), (False,) * 20 + (True,) * 6, ())
        for n in range(8)
    ],
    "strangers": [trained_somewhere(random.Random(n), (500 + n, *range(300, 312))) for n in (0, 1)],
}


# --- the comparison -------------------------------------------------------------------------------


def random_weights(spans: Sequence[Span], seed: int) -> list[torch.Tensor]:
    random_ = torch.Generator().manual_seed(seed)
    return [torch.randn(s.n_trained, generator=random_) for s in spans]


def assert_same(actual: Outcome, expected: Outcome) -> None:
    for a, b in zip(actual.log_prob, expected.log_prob, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-5)
    for a, b in zip(actual.entropy, expected.entropy, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-5)
    # Of many drawn spans one came out at 1.1e-5: these models take norms in float32 in any dtype.
    assert_close(actual.grads, expected.grads, rel=3e-5)


def assert_exact(policy: Policy, spans: Sequence[Span], budget: int) -> None:
    w, v = random_weights(spans, 1), random_weights(spans, 2)
    assert_same(packed(policy, spans, w, v, budget), one_by_one(policy, spans, w, v))


SMALL = Costs(linear=100.0, causal=0.1, copy=0.0, call=0.5)
"""Calls and copies that cost next to nothing: attention is cut into many small rectangles."""


@contextmanager
def as_tries(policy: Policy, costs: Costs | None = None) -> Iterator[None]:
    """Within it the policy lays out tries, even where its cost model would take padded rows.

    `costs` are those of the plans of attention; SMALL ones also cut long runs of tokens.
    """

    def packs(spans: Sequence[Span], budget: int) -> list[Pack]:
        return list(in_tries(spans, budget))

    assert policy.shape is not None
    settings = policy.shape, packing.CHUNKS
    policy.packs = packs  # type: ignore[method-assign]
    policy.shape = replace(policy.shape, costs=costs or policy.shape.costs)
    packing.CHUNKS = (8, 4, 3) if costs is SMALL else packing.CHUNKS
    try:
        yield
    finally:
        del policy.packs  # the class's own shows again
        policy.shape, packing.CHUNKS = settings


def settings_of(examples: int, *, fixed: bool) -> settings:
    """`fixed`: the same examples every time, and no search for a smaller one that fails."""
    return settings(
        max_examples=examples, deadline=None, derandomize=fixed, database=None,
        phases=[Phase.generate] if fixed else [Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


def holds(policy: Policy, spans: st.SearchStrategy[list[Span]], how: settings) -> None:
    """Whatever `spans` draws, a trie and one by one agree."""

    @given(spans, st.sampled_from(BUDGETS), st.sampled_from((None, SMALL)))
    @how
    def check(some: list[Span], budget: int, costs: Costs | None) -> None:
        with as_tries(policy, costs):
            assert_exact(policy, some, budget)

    check()


@pytest.mark.parametrize(
    ("kind", "weights"), [*((kind, "lora") for kind in FAMILIES), ("qwen3", "full")]
)
def test_a_trie_is_as_good_as_one_by_one(load: Load, kind: str, weights: str) -> None:
    holds(load(kind, **WEIGHTS[weights]), steps, settings_of(2, fixed=True))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_any_trie_is_when_rounding_is_out_of_the_way(load: Load, kind: str) -> None:
    policy = load(kind, dtype="float64", **LORA)
    holds(policy, forests(), settings_of(6, fixed=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "weights"), [("qwen3-sliding", LORA), ("phi3", LORA), ("gemma3-vl", FULL)]
)
def test_all_tries_are_when_rounding_is_out_of_the_way(
    load: Load, kind: str, weights: dict[str, Any]
) -> None:
    policy = load(kind, dtype="float64", **weights)
    holds(policy, forests(most=16, longest=12 * WINDOW), settings_of(30, fixed=False))


@pytest.mark.parametrize(("kind", "budget"), [("qwen3", 30), ("gemma3", 10_000)])
@pytest.mark.parametrize("name", FIXED)
def test_the_shapes_of_real_steps_are_exact(load: Load, name: str, kind: str, budget: int) -> None:
    policy = load(kind, **LORA)
    assert_exact(policy, FIXED[name], budget)
    for costs in (None, SMALL):
        with as_tries(policy, costs):
            assert_exact(policy, FIXED[name], budget)


@pytest.mark.parametrize("kind", ["qwen3-sliding", "qwen3-vl"])
@pytest.mark.parametrize("weights", ["lora", "full"])
def test_activations_computed_again_change_nothing(load: Load, kind: str, weights: str) -> None:
    again = load(kind, activation_checkpointing=True, **WEIGHTS[weights])
    assert again.recomputed
    holds(again, steps, settings_of(3, fixed=True))


def test_a_window_is_respected_far_beyond_its_length(load: Load) -> None:
    """Branches and roots many windows long, with turns trained throughout."""
    rng = random.Random(11)
    trunk = ids_of(rng, 9 * WINDOW, 40)
    cuts = (3, WINDOW, WINDOW + 1, 5 * WINDOW, 9 * WINDOW - 1)
    spans = [trained_somewhere(rng, (*trunk[:cut], *ids_of(rng, 5 * WINDOW, 40))) for cut in cuts]
    for kind in ("qwen3-sliding", "gemma3", "mistral"):
        policy = load(kind, **LORA)
        for costs in (None, SMALL):
            with as_tries(policy, costs):
                assert_exact(policy, [*spans, FIXED["strangers"][0]], 10_000)


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_a_long_sequence_does_not_change_how_short_ones_are_read(load: Load, packing: str) -> None:
    policy = load("phi3-long", packing=packing, **LORA)
    spans = chain((LONG - 8, LONG, LONG + 1, 3 * LONG))
    for budget in (60, 10_000):
        assert_exact(policy, [*spans, *FIXED["drafts"]], budget)


@pytest.mark.parametrize("kind", ["mistral", "phi3", "qwen3-sliding", "gemma3"])
def test_the_probe_is_longer_than_the_window_wherever_a_family_keeps_it(
    load: Load, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "SHORTEST", 1)
    policy = load(kind, **LORA)
    assert policy.shape is not None and WINDOW in [window for window, _ in policy.shape.windows]
    spans = attention_module.probe_spans(policy.decoder, policy.shape, policy.turn)
    assert max(len(span.ids) for span in spans) > WINDOW


def test_the_plan_that_the_cost_model_picks_is_exact_either_way(load: Load) -> None:
    policy = load("qwen3", **LORA)
    long = [Span((*range(100, 500), 500 + n), (False,) * 400 + (True,), ()) for n in range(4)]
    short = FIXED["strangers"]
    assert [p.trie is not None for p in policy.packs(long, 10_000)] == [True]
    assert all(p.trie is None for p in policy.packs(short, 10_000))
    for spans in (long, short):
        assert_exact(policy, spans, 10_000)


@pytest.mark.parametrize("kind", FAMILIES)
def test_hidden_states_and_logits_give_the_log_probs(load: Load, kind: str) -> None:
    policy, spans = load(kind, **LORA), FIXED["seats"]
    with torch.no_grad(), as_tries(policy):
        (pack,) = policy.packs(spans, 10_000)
        log = torch.log_softmax(policy.logits(policy.hidden(pack)), -1)
        targets = [i for s in pack.spans for i, t in zip(s.ids, s.trained, strict=True) if t]
        log_probs = log.gather(1, torch.tensor(targets)[:, None]).squeeze(1)
        torch.testing.assert_close(log_probs, policy.score(pack).log_prob, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bloom", "gemma2"])
def test_a_model_that_cannot_be_packed_is_refused_and_trains_in_rows(load: Load, kind: str) -> None:
    with pytest.raises(ModelLoadError, match="packed sequences") as caught:
        load(kind, **LORA)
    assert "eager" in caught.value.why and "--packing off" in caught.value.way_out
    policy = load(kind, packing="off", **LORA)
    for budget in (40, 10_000):
        assert_exact(policy, FIXED["drafts"], budget)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("qwen3-next", "linear"), ("qwen3.5", "linear"), ("llama4", "chunked")],
)
def test_a_model_with_other_layers_than_attention_trains_in_rows(
    load: Load, kind: str, layers: str
) -> None:
    """With one line about it; a request for a kernel of packed attention is refused."""
    policy = load(kind, **LORA)
    [line] = policy.remarks
    assert line.startswith("packing is off") and f"{layers}_attention" in line
    assert all(pack.trie is None for pack in policy.packs(FIXED["drafts"], 10_000))
    for budget in (40, 10_000):
        assert_exact(policy, FIXED["drafts"], budget)
    with pytest.raises(ModelLoadError, match="packed sequences") as caught:
        load(kind, attention="sdpa", **LORA)
    assert f"{layers}_attention" in caught.value.why


# --- the probe ------------------------------------------------------------------------------------


def random_base(layers: int, dtype: torch.dtype, seed: int, std: float | None = None) -> Any:
    """A narrow model whose layers are random, in alternation with and without a window."""
    kinds = ["full_attention", "sliding_attention"] * (layers // 2)
    shape = Qwen3Config(
        vocab_size=len(tiny_tokenizer(WORDS)), hidden_size=64, intermediate_size=192,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        layer_types=kinds, use_sliding_window=True, sliding_window=32, tie_word_embeddings=False,
        max_position_embeddings=4096,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(shape)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=std or parameter.shape[1] ** -0.5)
    return model.to(dtype)


def probed(model: Any) -> Policy:
    return Policy(model, tiny_tokenizer(WORDS), packing="auto", fused="off")


@pytest.mark.parametrize(("seed", "std"), [(0, None), (1, 0.02), (0, 0.2), (1, 0.2), (2, 0.3)])
def test_a_healthy_deep_model_in_bfloat16_passes(seed: int, std: float | None) -> None:
    """With room to spare. In the last three, 36 layers make rounding grow beyond 5 %, with packing
    or (on other processors) without it."""
    policy = probed(random_base(36, torch.bfloat16, seed, std))
    assert policy.shape is not None
    spans = attention_module.probe_spans(policy.decoder, policy.shape, None)
    distances = packing_distances(policy.decoder, policy._states_by_depth, spans)
    assert len(distances) == 1 + 36 + 1
    assert all(off <= 1.2 * noise for off, noise in distances)
    assert min(noise for _, noise in distances) > 0
    assert (max(distances[-1]) > 0.05) is (std in (0.2, 0.3))


Seen = Callable[[np.ndarray, Trie, int | None], np.ndarray]


def shifted(seen: np.ndarray, by: int) -> np.ndarray:
    """Keys `by` positions before their queries are hidden if they are visible, else visible."""
    return seen ^ np.eye(len(seen), k=-by, dtype=bool)


def last_pair(seen: np.ndarray, trie: Trie, window: int | None) -> np.ndarray:
    """One query in the whole pack does not see one of its keys."""
    query = trie.last[0]
    key = np.flatnonzero(seen[query])[-5]
    return seen & ~((np.arange(len(seen)) == query)[:, None] & (np.arange(len(seen)) == key))


def windowed(by: int | None) -> Seen:
    def seen_in(seen: np.ndarray, trie: Trie, window: int | None) -> np.ndarray:
        wider = None if by is None or window is None else window + by
        return trie.visible((0, len(trie)), [(0, len(trie))], wider)

    return seen_in


WRONG: dict[str, Seen] = {
    "sees the next token": lambda seen, *_: shifted(seen, -1),
    "misses the previous token": lambda seen, *_: shifted(seen, 1),
    "misses one token once": last_pair,
    "sees other branches": lambda seen, trie, window: np.tril(np.ones_like(seen)),
    "no window": windowed(None),
    "window too wide by one": windowed(1),
    "window too narrow by one": windowed(-1),
}


BASES = [
    (36, torch.bfloat16, None), (36, torch.bfloat16, 0.02), (36, torch.bfloat16, 0.2),
    (36, torch.float32, 0.02), (2, torch.bfloat16, None), (2, torch.float16, 0.02),
    (2, torch.float64, None),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "dtype", "std"), BASES)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_mask_is_refused(
    wrong: str, dtype: torch.dtype, layers: int, std: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(self: Packed, q: Any, k: Any, v: Any, window: int | None, scale: Any) -> Any:
        whole = (0, len(self.trie))
        seen = WRONG[wrong](self.trie.visible(whole, [whole], window), self.trie, window)
        mask = torch.from_numpy(seen)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)

    monkeypatch.setattr(Packed, "__call__", attend)
    with pytest.raises(ModelLoadError, match="packed sequences") as caught:
        probed(random_base(layers, dtype, 0, std))
    assert "rounding explains" in caught.value.why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wrong_positions_are_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Policy._trie_inputs

    def by_row(self: Policy, pack: Pack) -> dict[str, Any]:
        inputs = plain(self, pack)
        return inputs | {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}

    monkeypatch.setattr(Policy, "_trie_inputs", by_row)
    with pytest.raises(ModelLoadError, match="packed sequences"):
        probed(random_base(36, dtype, 0))


def test_flex_that_fails_on_a_gpu_gives_way_to_sdpa_unless_it_is_asked_for() -> None:
    """Here every call fails, because this build of torch has no CUDA."""
    decoder, gpu = random_base(2, torch.bfloat16, 0).get_decoder(), torch.device("cuda")
    if torch.cuda.is_available():
        pytest.skip("needs a machine where FlexAttention fails")
    kernel, line = policy_module._kernel("auto", decoder, gpu)
    assert kernel == "sdpa" and "FlexAttention does not work" in line and "CUDA" in line
    assert policy_module._kernel("sdpa", decoder, gpu) == ("sdpa", "")
    with pytest.raises(ModelLoadError, match="FlexAttention") as caught:
        policy_module._kernel("flex", decoder, gpu)
    assert "--attention sdpa" in caught.value.way_out


CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 4, 2, 16
WINDOWS = (None, 1, 5, 30)

ids = st.lists(st.integers(0, 2), min_size=1, max_size=60).map(tuple)


@st.composite
def tries(draw: st.DrawFn) -> Trie:
    """Sequences over three ids, so that prefixes meet, some of them behind a longer common head."""
    heads: list[Ids] = [(), draw(ids), draw(ids) * 2]
    tails = draw(st.lists(st.tuples(st.sampled_from(heads), ids), min_size=1, max_size=5))
    return build_trie([(*head, *tail) for head, tail in tails])


def padded(trie: Trie) -> int:
    return -(-len(trie) // FLEX_BLOCK) * FLEX_BLOCK


def dense_mask(trie: Trie, window: int | None, length: int) -> torch.Tensor:
    """bool [length, length]: `Trie.visible` with padding that sees itself."""
    seen = torch.eye(length, dtype=torch.bool)
    n = len(trie)
    seen[:n, :n] = torch.from_numpy(trie.visible((0, n), [(0, n)], window))
    return seen


@settings(max_examples=25, deadline=None)
@given(tries(), st.sampled_from(WINDOWS))
def test_the_block_mask_is_the_visibility_of_the_trie(trie: Trie, window: int | None) -> None:
    length = padded(trie)
    mask, expected = block_mask(trie, length, window, CPU), dense_mask(trie, window, length)
    dense = create_mask(mask.mask_mod, 1, 1, length, length, device="cpu")[0, 0]
    assert torch.equal(dense, expected)
    blocks = expected.view(length // FLEX_BLOCK, FLEX_BLOCK, -1, FLEX_BLOCK).any(3).any(1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks)


@pytest.mark.parametrize("seed", range(30))
def test_the_block_mask_is_the_one_of_torch(seed: int) -> None:
    """All its tensors, those of the backward pass included, in tries of up to 30 blocks."""
    rng = random.Random(seed)
    heads = [ids_of(rng, rng.randint(1, 500), 2) for _ in range(3)]
    sequences = []
    for _ in range(rng.randint(1, 12)):
        head = rng.choice(heads)
        tail = ids_of(rng, rng.choice((1, 5, 130, 300)), 3)
        sequences.append((*head[: rng.randint(1, len(head))], *tail))
    trie = build_trie(sequences, rng.choice((None, lambda common, length: common > 50)))
    for window in (None, rng.choice((1, 2, 7, 100)), rng.choice((127, 128, 129, 400, 10_000))):
        for length in (len(trie), padded(trie), len(trie) + rng.randrange(300)):
            ours = block_mask(trie, length, window, CPU)
            torchs = create_block_mask(
                ours.mask_mod, None, None, length, length, device="cpu", BLOCK_SIZE=FLEX_BLOCK
            )
            assert ours.seq_lengths == torchs.seq_lengths
            assert ours.BLOCK_SIZE == torchs.BLOCK_SIZE
            for name in type(ours)._TENSOR_ATTRS:
                a, b = getattr(ours, name), getattr(torchs, name)
                assert (a is None) == (b is None), name
                if a is not None:
                    assert a.dtype == b.dtype
                    assert torch.equal(a, b), (name, window, length)


@pytest.mark.parametrize("window", [None, 1024])
def test_the_block_mask_of_a_long_pack_needs_little_memory(window: int | None) -> None:
    """A dense boolean mask of 65,536 positions has 4 GiB."""
    rng = random.Random(0)
    talks = [random_ids(rng, 4000) for _ in range(8)]
    trie = build_trie([(*talk, *random_ids(rng, 512)) for talk in talks for _ in range(8)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mask = block_mask(trie, 1 << 16, window, CPU)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB
    pairs = np.minimum(trie.depth + 1, window or len(trie)).sum()
    blocks = int((mask.kv_num_blocks + mask.full_kv_num_blocks).sum())
    assert pairs / FLEX_BLOCK**2 < blocks < 1.3 * pairs / FLEX_BLOCK**2 + 3 * 512


@pytest.mark.slow
def test_flex_is_compiled_twice_per_kind_of_mask_and_its_gradients_are_those_of_sdpa(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first length has its own kernel. Torch refuses gradients on a CPU, though its graphs
    without generated code compute them."""
    torch._dynamo.reset()
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    kernel = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(attention_module, "flex_kernel", lambda device: kernel)
    rng, compilations = random.Random(0), []
    for tokens in (60, 700, 130, 1500, 90, 400, 257, 1000):
        head = ids_of(rng, tokens // 3, 40)
        trie = build_trie([(*head, *ids_of(rng, tokens // 6, 40)) for _ in range(4)])
        for window in (None, 50):
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients):
                    flex, sdpa = (attended(trie, kind, window) for kind in ("flex", "sdpa"))
                torch.testing.assert_close(flex, sdpa, rtol=1e-4, atol=1e-5)
        compilations.append(flex_compilations())
    assert compilations[1] <= 8
    assert compilations[1:] == compilations[1:2] * 7, compilations


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("fused", ["auto", "compile"])
def test_a_policy_trains_the_same_with_both_kernels(
    fused: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch refuses gradients of FlexAttention on a CPU, though its graphs without generated code
    compute them."""
    torch._dynamo.reset()
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    kernel = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(attention_module, "flex_kernel", lambda device: kernel)
    compiled = partial(fused_module.compile_modules, backend="aot_eager")
    monkeypatch.setattr(fused_module, "compile_modules", compiled)
    folder, spans = build("qwen3-sliding", tmp_path / "model"), forest(3)
    w, v = random_weights(spans, 1), random_weights(spans, 2)
    plain, flex = (
        policy_of(
            folder, move=0.05, attention=kind, fused=parts, activation_checkpointing=more, **LORA
        )
        for kind, parts, more in (("sdpa", "off", False), ("flex", fused, again))
    )
    expected, actual = (packed(policy, spans, w, v, 1 << 20) for policy in (plain, flex))
    assert all(pack.trie is not None for pack in flex.packs(spans, 1 << 20))
    assert flex_compilations() > 0 and not flex.remarks
    assert_same(actual, expected)


def attended(trie: Trie, kernel: Any, window: int | None) -> list[torch.Tensor]:
    """The attention of random queries, keys and values, and their gradients if enabled."""
    length, random_ = padded(trie), torch.Generator().manual_seed(0)
    shapes = ((1, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    inputs = [torch.randn(s, generator=random_).requires_grad_() for s in shapes]
    cut = [x if kernel == "flex" else x[:, :, : len(trie)] for x in inputs]
    q, k, v = cut if torch.is_grad_enabled() else [x.detach() for x in cut]
    out = Packed(trie, kernel=kernel, length=length)(q, k, v, window, 0.3)[:, :, : len(trie)]
    if not torch.is_grad_enabled():
        return [out]
    weights = torch.randn(out.shape, generator=random_)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(tries(), st.sampled_from(WINDOWS), st.integers(0, 99))
def test_flex_equals_sdpa_and_the_rectangles(trie: Trie, window: int | None, seed: int) -> None:
    n, length = len(trie), padded(trie)
    random_ = torch.Generator().manual_seed(seed)
    shapes = ((1, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q, k, v = (torch.randn(shape, generator=random_) for shape in shapes)
    mask = block_mask(trie, length, window, CPU)
    flex = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, scale=0.3)
    seen = dense_mask(trie, window, length)
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(flex, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(flex[:, :, n:], v[:, :, n:].repeat_interleave(2, 1))
    rectangles = Packed(trie)(q[:, :, :n], k[:, :, :n], v[:, :, :n], window, 0.3)
    torch.testing.assert_close(flex[:, :, :n], rectangles, rtol=1e-5, atol=1e-5)
    from_pack = Packed(trie, kernel="flex", length=length)(q, k, v, window, 0.3)
    assert torch.equal(from_pack, flex)


# --- policies -------------------------------------------------------------------------------------


def forest(seed: int, longest: int = 40, heads: int = 2, each: int = 4) -> list[Span]:
    """Replies of different lengths to a few prompts, one reply being the start of another."""
    rng, spans = random.Random(seed), []
    for _ in range(heads):
        prompt = tuple(rng.randrange(300, 340) for _ in range(rng.randint(longest // 2, longest)))
        replies = [
            tuple(rng.randrange(300, 340) for _ in range(rng.randint(2, longest)))
            for _ in range(each)
        ]
        for reply in (*replies, replies[0][: len(replies[0]) // 2 or 1]):
            trained = (False,) * len(prompt) + (True,) * len(reply)
            spans.append(Span((*prompt, *reply), trained, ()))
    return spans


def pack_of(spans: Sequence[Span]) -> Pack:
    [pack] = in_tries(spans, 1 << 20)
    return pack


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-sliding", "gemma3"])
def test_a_policy_reads_the_same_with_both_kernels(kind: str, tmp_path: Path) -> None:
    folder, spans = build(kind, tmp_path / kind), forest(3)
    scores = []
    for attention in ("sdpa", "flex"):
        policy = policy_of(folder, attention=attention, lora={"r": 4, "alpha": 8})
        assert policy.kernel == attention
        with torch.no_grad():
            scores.append(policy.score(pack_of(spans), entropy="values"))
    torch.testing.assert_close(scores[0].log_prob, scores[1].log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[0].entropy, scores[1].entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3-sliding", "gemma3"])
def test_repeated_keys_change_nothing(
    load: Load, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU needs them where it would otherwise hold the scores of all pairs in memory."""
    half, single = torch.bfloat16, torch.float32
    assert shares_keys("cuda", half, masked=False)
    assert not shares_keys("cuda", half, masked=True)
    assert not shares_keys("cuda", single, masked=False)
    heads: list[tuple[int, int]] = []
    plain = F.scaled_dot_product_attention

    def spied(q: Any, k: Any, v: Any, **how: Any) -> Any:
        heads.append((q.shape[1], k.shape[1]))
        return plain(q, k, v, **how)

    policy = load(kind, **LORA)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    for shares in (True, False):
        monkeypatch.setattr(
            attention_module, "shares_keys", lambda *_, masked, shares=shares: shares
        )
        heads.clear()
        for costs in (None, SMALL):
            with as_tries(policy, costs):
                assert_exact(policy, FIXED["seats"], 10_000)
        assert all(q == k for q, k in heads) is not shares


def test_flex_attention_on_a_cpu_is_refused_before_anything_is_sampled() -> None:
    chosen = {"attention": "flex", "device": "cpu"}
    with pytest.raises(ConfigError, match="--attention flex cannot train on a CPU"):
        refuse_untrainable(config(**chosen))
    refuse_untrainable(config(**chosen, packing="off"))
