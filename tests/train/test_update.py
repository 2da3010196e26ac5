"""The update equals a naive one: every sequence alone, the formulas written out.

The two forms of a batch: token after token, and a row for each sequence.

The distance to the base is measured on a fixed number of drafts, however many a step has.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from soulkit.train.config import TrainConfig
from soulkit.train.loss.losses import kl_penalty
from soulkit.train.model.packing import Pack
from soulkit.train.model.policy import Entropies, Policy, Scored
from soulkit.train.model.prepare import correction_of, lost_twins, prepare_step, sampler_ratios
from soulkit.train.model.update import (
    NotFinite,
    Tally,
    Update,
    kl_to_base,
    log_probs,
    mini_batches,
    update,
)
from soulkit.train.objectives.sequences import Span, TrainSequence
from soulkit.train.state.metrics import SamplerCorrection, SamplerGap
from soulkit.train.step import learn, with_advantages
from soulkit.types import Completion, Segment, Trace, Turn
from tests.support.methods import Numbers, batch_of, play
from tests.support.training import (
    assert_close,
    config,
    gradients,
    jolt,
    policy_of,
    random_model,
    sequence,
    span,
    step_of,
)

LOOSE = {"max_grad_norm": 1e9, "lora": {"r": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Policy:
    """For tests that do not move the weights."""
    return policy_of(folder, **LOOSE)


def still(policy: Policy) -> torch.optim.Optimizer:
    """An optimizer that leaves weights and gradients as they are."""
    return torch.optim.SGD([p for _, p in policy.trained], lr=0.0)


def update_once(
    policy: Policy, sequences: list[TrainSequence], settings: TrainConfig, **other: Any
) -> tuple[dict[str, float], dict[str, Tensor], Tally]:
    """Numbers and gradients of one update on all sequences."""
    trained = with_advantages(sequences, settings)
    prepared = other.get("prepared") or prepare_step(policy, trained, settings, sequences)
    tally = Tally()
    every = range(len(prepared.sequences))
    line = update(policy, still(policy), prepared, every, settings, tally)
    return line, gradients(policy), tally


# --- the naive implementation ---------------------------------------------------------------------


def alone(policy: Policy, one: Span) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the trained tokens, from the model's own full forward pass."""
    logits = policy.model(input_ids=torch.tensor([one.ids])).logits[0].float()
    log = torch.log_softmax(logits / policy.temperature, -1)
    at = [i for i, t in enumerate(one.trained) if t]
    chosen = torch.stack([log[i - 1, one.ids[i]] for i in at])
    return chosen, torch.stack([-(log[i - 1].exp() * log[i - 1]).sum() for i in at])


def by_hand(sequences: list[TrainSequence]) -> list[float | None]:
    """Advantages of algorithms §2, group by group."""
    values: list[float | None] = []
    for one in sequences:
        seen: dict[str, float] = {}
        for other in sequences:
            if other.group == one.group and other.reward is not None:
                seen.setdefault(other.rollout, other.reward)
        rewards = list(seen.values())
        if one.reward is None:
            values.append(None)
        elif len(rewards) < 2 or len(set(rewards)) == 1:
            values.append(0.0)
        else:
            values.append((one.reward - fmean(rewards)) / (stdev(rewards) + 1e-6))
    return values


def naive(
    policy: Policy,
    sequences: list[TrainSequence],
    settings: TrainConfig,
    old: dict[int, Tensor] | None = None,
    weights: dict[int, Tensor] | None = None,
    base: dict[int, Tensor] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients; `old`, `weights`, `base` by the sequence's index."""
    for _, parameter in policy.trained:
        parameter.grad = None
    values = by_hand(sequences)
    active = [i for i, v in enumerate(values) if v is not None and sequences[i].weight > 0]
    beside = [i for i, v in enumerate(values) if v is not None and sequences[i].counted]
    total = torch.zeros(())
    for i in active:
        one, advantage = sequences[i], values[i]
        assert advantage is not None
        log, spread = alone(policy, one.span)
        before = log.detach() if old is None else old[i]
        if settings.ratio == "sequence":
            ratio = ((log - before).mean().exp()).expand(len(log))
        else:
            ratio = (log - before).clamp(-20, 20).exp()
        inside = ratio.clamp(1 - settings.eps_low, 1 + settings.eps_high)
        loss = torch.maximum(-advantage * ratio, -advantage * inside)
        if advantage < 0 and settings.ratio == "token":
            loss = loss.clamp(max=-settings.clip_ratio_c * advantage)
        if weights is not None:
            loss = loss * weights[i]
        if base is not None:
            gap = (base[i] - log).clamp(-20, 20)
            loss = loss + settings.kl_coef * (gap.exp() - gap - 1).clamp(max=10)
        loss = loss - settings.entropy_coef * spread
        fellows = [
            sequences[k]
            for k in [*active, *beside]
            if settings.denominator == "joint" or sequences[k].component == one.component
        ]
        divisor: float = {
            "token-mean": sum(f.span.n_trained for f in fellows),
            "seq-mean-token-mean": len(fellows) * one.span.n_trained,
            "seq-mean-token-sum": len(fellows),
            "seq-mean-token-sum-norm": settings.norm_length,
        }[settings.aggregation]
        total = total + one.weight * loss.sum() / divisor
    total.backward()
    return float(total.detach()), gradients(policy)


def weighted(sequences: list[TrainSequence], **by_part: float) -> list[TrainSequence]:
    return [replace(s, weight=by_part.get(s.part, 1.0)) for s in sequences]


# --- equality -------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "separate": {"denominator": "separate"},
    "seq-mean": {"aggregation": "seq-mean-token-mean"},
    "seq-sum": {"aggregation": "seq-mean-token-sum"},
    "fixed": {"aggregation": "seq-mean-token-sum-norm", "norm_length": 50},
    "entropy": {"entropy_coef": 0.1},
    "gspo": {"ratio": "sequence", "aggregation": "seq-mean-token-mean"},
    "small batches": {"tokens_per_batch": 40},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_update_equals_the_naive_one(shared: Policy, name: str) -> None:
    settings = config(**LOOSE, **CASES[name])
    sequences = weighted(step_of(), refined=0.7)
    expected_loss, expected_grads = naive(shared, sequences, settings)
    line, grads, _ = update_once(shared, sequences, settings)
    assert line.loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    assert_close(grads, expected_grads)
    assert max(float(g.norm()) for g in expected_grads.values()) > 1e-3


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_later_updates_use_the_log_probs_from_before_the_step(folder: Path, ratio: str) -> None:
    policy = policy_of(folder, **LOOSE)
    settings = config(**LOOSE, ratio=ratio, mini_batch_prompts=1)
    sequences = step_of(2)
    with torch.no_grad():
        old = {i: alone(policy, s.span)[0] for i, s in enumerate(sequences)}
    prepared = prepare_step(policy, with_advantages(sequences, settings), settings)
    jolt(policy, 0.02, seed=5)
    expected_loss, expected_grads = naive(policy, sequences, settings, old)
    line, grads, tally = update_once(policy, sequences, settings, prepared=prepared)
    assert line.loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    assert_close(grads, expected_grads, rel=5e-5)
    assert tally.means().ratio != pytest.approx(1.0, abs=1e-4)
    if ratio == "token":
        assert (tally.means().clipped or 0) > 0


@pytest.mark.parametrize("budget", [1, 64, 200])
def test_micro_batches_do_not_show(shared: Policy, budget: int) -> None:
    sequences = step_of(3)
    whole = update_once(shared, sequences, config(**LOOSE))
    parts = update_once(shared, sequences, config(**LOOSE, tokens_per_batch=budget))
    assert parts[0].loss == pytest.approx(whole[0].loss, rel=1e-5, abs=1e-7)
    assert_close(parts[1], whole[1])


def test_joint_and_separate_denominators_differ_by_the_share_of_tokens(shared: Policy) -> None:
    base_only = weighted(step_of(1), refined=0.0)
    joint = update_once(shared, base_only, config(**LOOSE))
    apart = update_once(shared, base_only, config(**LOOSE, denominator="separate"))
    assert_close(joint[1], apart[1])  # one component: nothing to join
    every = step_of(1)
    tokens = {True: 0, False: 0}
    for s in every:
        tokens[s.part == "refined"] += s.span.n_trained
    joint_all = update_once(shared, every, config(**LOOSE))[1]
    share = tokens[False] / sum(tokens.values())
    only_fb = update_once(shared, weighted(every, draft=0.0, copy=0.0), config(**LOOSE))[1]
    sums = {n: joint[1][n] * share + only_fb[n] * (1 - share) for n in joint_all}
    assert_close(joint_all, sums, rel=1e-4)


def without_feedback(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """As Ditto gives them at λ = 0."""
    return [replace(s, weight=0.0, counted=True) if s.part == "refined" else s for s in sequences]


def test_without_the_feedback_loss_the_base_step_keeps_its_size(shared: Policy) -> None:
    """λ = 1 less λ = 0 is the feedback part alone: what the base part is divided by stays."""
    sequences = step_of(6)
    whole = update_once(shared, sequences, config(**LOOSE))
    off = update_once(shared, without_feedback(sequences), config(**LOOSE))
    half = update_once(shared, weighted(sequences, refined=0.5), config(**LOOSE))
    assert_close(half[1], {n: (whole[1][n] + off[1][n]) / 2 for n in whole[1]}, rel=1e-4)
    gone = update_once(shared, [s for s in sequences if s.part != "refined"], config(**LOOSE))
    tokens = {s.part == "refined": 0 for s in sequences}
    for s in sequences:
        tokens[s.part == "refined"] += s.span.n_trained
    share = tokens[False] / sum(tokens.values())
    assert share < 0.8
    assert off[0].loss == pytest.approx(gone[0].loss * share, rel=1e-4)
    assert_close(off[1], {n: g * share for n, g in gone[1].items()}, rel=1e-4)


def test_with_separate_denominators_what_is_not_trained_is_not_counted(shared: Policy) -> None:
    settings, sequences = config(**LOOSE, denominator="separate"), step_of(6)
    off = update_once(shared, without_feedback(sequences), settings)
    gone = update_once(shared, [s for s in sequences if s.part != "refined"], settings)
    assert off[0].loss == pytest.approx(gone[0].loss)
    assert_close(off[1], gone[1])


def test_only_copies_are_trained_but_drafts_set_their_baseline(shared: Policy) -> None:
    sequences = weighted(step_of(7), draft=0.0, refined=0.0)
    trained = with_advantages(sequences, config(**LOOSE))
    assert {s.part for s in trained} == {"copy"}
    values = dict(zip(map(id, sequences), by_hand(sequences), strict=True))
    expected_loss = [values[id(s)] for s in sequences if s.part == "copy"]
    assert [s.advantage for s in trained] == pytest.approx(expected_loss)
    assert fmean(s.advantage for s in trained) != pytest.approx(0.0, abs=1e-3)
    line, grads, _ = update_once(shared, sequences, config(**LOOSE))
    loss, expected_grads = naive(shared, sequences, config(**LOOSE))
    assert line.loss == pytest.approx(loss, rel=1e-5)
    assert_close(grads, expected_grads)


# --- who takes part -------------------------------------------------------------------------------


def test_lone_and_flat_groups_teach_nothing(shared: Policy) -> None:
    lone = [s for s in step_of(9) if s.part == "draft" and s.rollout == "0/draft"]
    flat = [replace(s, reward=0.1) for s in step_of(9) if s.part == "draft"]
    for sequences in (lone, flat):
        trained = with_advantages(sequences, config())
        assert [s.advantage for s in trained] == [0.0] * len(sequences)
        line, grads, tally = update_once(shared, sequences, config(**LOOSE))
        assert line == Update(loss=0.0, grad_norm=0.0, computed=False)
        assert all(float(g.norm()) == 0 for g in grads.values())
        surprises = [-log for s in sequences for log in s.span.sampler]
        means = tally.means()
        assert (means.clipped, means.ratio, means.kl_old) == (0.0, 1.0, 0.0)
        assert means.entropy == pytest.approx(fmean(surprises))
    raw = with_advantages(lone, config(protocol="reference"))
    assert [s.advantage for s in raw] == pytest.approx([s.reward for s in lone], rel=1e-5)


def test_silent_sequences_count_but_are_not_computed(
    shared: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud = step_of(10, examples=2)
    sequences = [replace(s, reward=0.5) if s.example_id == "x1" else s for s in loud]
    settings = config(**LOOSE)
    scored: list[int] = []
    real = Policy.score

    def count(self: Policy, pack: Any, **options: Any) -> Any:
        scored.append(len(pack.spans))
        return real(self, pack, **options)

    monkeypatch.setattr(Policy, "score", count)
    line, grads, _ = update_once(shared, sequences, settings)
    assert sum(scored) == len(sequences) / 2
    expected_loss, expected_grads = naive(shared, sequences, settings)  # computes all of them
    assert line.loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    assert_close(grads, expected_grads)


def test_mini_batches_hold_whole_examples() -> None:
    sequences = step_of(11, examples=5)
    minis = list(mini_batches(sequences, 2))
    assert [len({sequences[i].example_id for i in mini}) for mini in minis] == [2, 2, 1]
    assert sorted(i for mini in minis for i in mini) == list(range(len(sequences)))


# --- penalties and corrections --------------------------------------------------------------------


def test_the_kl_penalty_is_to_the_model_without_its_adapter(shared: Policy) -> None:
    settings = config(**LOOSE, kl_coef=0.3)
    sequences = step_of(12, examples=2)
    with torch.no_grad(), shared.model.disable_adapter():
        base = {i: alone(shared, s.span)[0] for i, s in enumerate(sequences)}
    expected_loss, expected_grads = naive(shared, sequences, settings, base=base)
    line, grads, _ = update_once(shared, sequences, settings)
    assert line.loss == pytest.approx(expected_loss, rel=1e-4)
    assert_close(grads, expected_grads, rel=2e-5)
    assert line.loss > update_once(shared, sequences, config(**LOOSE))[0].loss


@pytest.mark.parametrize("lambda_fb", [1.0, 0.0])
def test_a_copy_takes_the_sampler_weight_of_its_refined_twin(
    shared: Policy, lambda_fb: float
) -> None:
    """Also when the twin itself is not trained."""
    settings = config(**LOOSE, sampler_cap=1.5)
    sequences = weighted(step_of(13, examples=2), refined=lambda_fb)
    weights: dict[int, Tensor] = {}
    with torch.no_grad():
        for i, s in enumerate(sequences):
            twin = sequences[i + 1] if s.part == "copy" else s
            assert twin.span.sampler == s.span.sampler
            now = alone(shared, twin.span)[0]
            weights[i] = (now - torch.tensor(twin.span.sampler)).exp().clamp(max=1.5)
    expected_loss, expected_grads = naive(shared, sequences, settings, weights=weights)
    line, grads, _ = update_once(shared, sequences, settings)
    assert line.loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    assert_close(grads, expected_grads, rel=5e-5)


def user(text: str, hint: str = "") -> Segment:
    """What the actor reads, with a slot that `hint` fills."""
    return Segment("user", f"{text} {hint}".strip(), text)


R0, R1, R2 = (330, 331), (332, 333, 334), (336,)
SPLIT: dict[str, dict[str, list[tuple[list[Segment], tuple[int, ...]]]]] = {
    "two seats": {"anna": [([user("301 302", "390")], R0)], "ben": [([user("303", "391")], R0)]},
    "turns that do not continue": {
        "anna": [([user("301 302", "390")], R0), ([user("303", "390")], R1), ([user("304")], R0)]
    },
    "feedback in the newest message alone": {
        "anna": [
            ([user("301", "390")], R0),
            ([user("301"), Segment("assistant", "said", token_ids=R0), user("350", "391")], R1),
        ],
        "ben": [([user("302", "390")], R2)],
    },
}
"""Seat → its turns, each a context and what is said. In the last case the turns of a copy continue
each other, and those of the refined rollout do not."""


@pytest.mark.parametrize("lambda_fb", [1.0, 0.0])
@pytest.mark.parametrize("case", SPLIT)
def test_a_copys_tokens_take_the_weights_of_the_same_tokens(
    shared: Policy, case: str, lambda_fb: float
) -> None:
    """Whichever sequences a rollout falls into. All log-probs are equal: they tell nothing apart,
    as with rounded ones, or 0.0 of a certain token."""
    numbers, expected, traces = Numbers(), [], []
    for seat, turns in SPLIT[case].items():
        done = []
        for context, said in turns:
            prompt = numbers.prompt_ids(context)
            trained = (*[False] * len(prompt), *[True] * len(said))
            with torch.no_grad():
                now = alone(shared, Span((*prompt, *said), trained, ()))[0]
            expected.append((now + 6.0).exp().clamp(max=50.0))
            reply = Completion(text="said", prompt_ids=tuple(prompt), token_ids=said,
                               logprobs=(-6.0,) * len(said))  # fmt: skip
            done.append(Turn(tuple(context), reply))
        traces.append(Trace(seat, tuple(done)))
    record = play("x", 0, "refined", 1.0, R0)
    record = replace(record, episode=replace(record.episode, traces=tuple(traces)))
    settings = config(**LOOSE, sampler_cap=50.0, lambda_fb=lambda_fb)
    sequences = batch_of(settings, [record])
    prepared = prepare_step(shared, with_advantages(sequences, settings), settings, sequences)
    assert prepared.weights is not None
    parts = zip(prepared.sequences, prepared.weights, strict=True)
    copies = torch.cat([weights for s, weights in parts if s.part == "copy"])
    assert torch.cat(expected).unique().numel() == len(copies)  # a swap would show
    torch.testing.assert_close(copies, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_a_copy_without_a_twin_is_refused_not_weighed_one() -> None:
    copies = [s for s in step_of(14, examples=1) if s.part == "copy"]
    assert lost_twins(copies, copies) == []
    with pytest.raises(KeyError):
        sampler_ratios(copies, [torch.zeros(s.span.n_trained) for s in copies])


# --- sampler and trainer --------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [16, 1])  # one update, which fixes no old log-probs, and three
def test_the_gap_of_the_sampler_is_measured_before_the_weights_move(
    folder: Path, prompts: int
) -> None:
    policy, settings = policy_of(folder, **LOOSE), config(**LOOSE, mini_batch_prompts=prompts)
    sequences = step_of(21)
    with torch.no_grad():
        gaps = torch.cat([
            (alone(policy, s.span)[0] - torch.tensor(s.span.sampler)).abs()
            for s in sequences if s.part != "copy"  # its prompt is not what was sampled from
        ])  # fmt: skip
    moving = torch.optim.SGD([p for _, p in policy.trained], lr=1.0)
    measured = learn(policy, moving, sequences, settings).sampler
    assert measured.mean == pytest.approx(float(gaps.mean()), rel=1e-4)
    assert measured.largest == pytest.approx(float(gaps.max()), rel=1e-4)
    bare = [replace(s, span=replace(s.span, sampler=())) for s in sequences]
    assert learn(policy, still(policy), bare, settings).sampler == SamplerGap()


def test_the_correction_says_what_it_weighs(shared: Policy) -> None:
    cap, sequences = 1.5, step_of(22)
    with torch.no_grad():
        sampled = [sequences[i + 1] if s.part == "copy" else s for i, s in enumerate(sequences)]
        ratios = torch.cat([
            (alone(shared, s.span)[0] - torch.tensor(s.span.sampler)).exp() for s in sampled
        ])  # fmt: skip
    weights = ratios.clamp(max=cap)
    remarks = learn(shared, still(shared), sequences, config(**LOOSE, sampler_cap=cap)).correction
    assert remarks.weight == pytest.approx(float(weights.mean()), rel=1e-4)
    assert remarks.capped == pytest.approx(float((ratios > cap).float().mean()), rel=1e-4)
    ess = float(weights.sum()) ** 2 / (len(weights) * float((weights**2).sum()))
    assert remarks.ess == pytest.approx(ess, rel=1e-4) and 0 < remarks.ess < 1
    assert (
        learn(shared, still(shared), sequences, config(**LOOSE)).correction == SamplerCorrection()
    )


@pytest.mark.parametrize(
    ("ratios", "cap", "weight", "capped", "ess"),
    [
        ([0.5, 1.0, 2.0, 4.0], 2.0, 5.5 / 4, 1 / 4, 5.5**2 / (4 * 9.25)),
        ([1.0, 1.0], 1.0, 1.0, 0.0, 1.0),  # at the cap, and not above it
        ([0.0, 3.0], 2.0, 1.0, 1 / 2, 1 / 2),
    ],
)
def test_numbers_of_a_correction(
    ratios: list[float], cap: float, weight: float, capped: float, ess: float
) -> None:
    remarks = correction_of([torch.tensor(ratios), None], cap)
    assert (remarks.weight, remarks.capped, remarks.ess) == pytest.approx((weight, capped, ess))
    assert correction_of([None], cap) == SamplerCorrection()


def test_log_probs_that_are_known_are_not_computed_again(shared: Policy) -> None:
    settings = config(**LOOSE, mini_batch_prompts=1, only_copy=True, sampler_cap=2.0)
    sequences = weighted(step_of(23), draft=0.0, refined=0.0)
    known = {s.span.key: (torch.full((s.span.n_trained,), -7.0), torch.ones(s.span.n_trained))
             for s in sequences if s.part == "refined" or s.example_id == "x0"}  # fmt: skip
    trained = with_advantages(sequences, settings)
    prepared = prepare_step(shared, trained, settings, sequences, known=known)
    assert prepared.old is not None and prepared.weights is not None
    for one, old, weights in zip(trained, prepared.old, prepared.weights, strict=True):
        if one.example_id == "x0":
            assert bool((old == -7.0).all())
        else:
            with torch.no_grad():
                assert torch.allclose(old, alone(shared, one.span)[0], atol=1e-4)
        ratio = (-7.0 - torch.tensor(one.span.sampler)).exp()  # of the twin, which is known
        assert torch.allclose(weights, ratio.clamp(max=2.0))


# --- what must not happen -------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_leaves_the_weights(folder: Path) -> None:
    policy = policy_of(folder, **LOOSE)
    before = policy.version()
    sequences = with_advantages(step_of(15, examples=1), config())
    prepared = prepare_step(
        policy, [replace(s, advantage=math.nan) for s in sequences], config(**LOOSE)
    )
    optimizer = torch.optim.AdamW([p for _, p in policy.trained], lr=0.1)
    with pytest.raises(NotFinite):
        update(policy, optimizer, prepared, range(len(sequences)), config(**LOOSE), Tally())
    assert policy.version() == before and not optimizer.state


def test_gradients_are_clipped_to_the_norm(shared: Policy) -> None:
    settings = config(lora=LOOSE["lora"], max_grad_norm=0.01)
    line, grads, _ = update_once(shared, step_of(16), settings)
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    assert line.grad_norm > 0.01
    assert norm == pytest.approx(0.01, rel=1e-3)


def test_a_step_raises_what_was_better_than_its_group_and_lowers_the_rest(folder: Path) -> None:
    policy = policy_of(folder, **LOOSE)
    sequences = [s for s in step_of(17, examples=1, drafts=2) if s.part == "draft"]
    good, bad = (replace(s, reward=r) for s, r in zip(sequences, (1.0, 0.0), strict=True))
    with torch.no_grad():
        before = [float(alone(policy, s.span)[0].sum()) for s in (good, bad)]
    settings = config(**LOOSE)
    prepared = prepare_step(policy, with_advantages([good, bad], settings), settings)
    optimizer = torch.optim.SGD([p for _, p in policy.trained], lr=0.01)
    update(policy, optimizer, prepared, range(2), settings, Tally())
    with torch.no_grad():
        after = [float(alone(policy, s.span)[0].sum()) for s in (good, bad)]
    assert after[0] > before[0] and after[1] < before[1]


def test_one_sequence_per_rollout_and_seat_counts_once() -> None:
    """Two sequences of one rollout (two turns that do not merge) weigh like one in the mean."""
    a, b, c = [s for s in step_of(18, examples=1) if s.part == "draft"]
    twice = [
        replace(a, reward=1.0), replace(b, rollout=a.rollout, reward=1.0), replace(c, reward=0.0)
    ]  # fmt: skip
    values = [s.advantage for s in with_advantages(twice, config())]
    assert values == pytest.approx([math.sqrt(0.5), math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5)
    assert sequence(a.span, "draft", "x", 0, 1.0).component == "base"


# --- what is told of tokens -----------------------------------------------------------------------


def part_means(policy: Policy, sequences: list[TrainSequence], part: str) -> float:
    """The entropy of a part's tokens, each alone."""
    with torch.no_grad():
        spreads = [alone(policy, s.span)[1] for s in sequences if s.part == part]
    return float(torch.cat(spreads).mean())


def test_entropy_is_that_of_all_tokens_of_a_part_those_without_an_advantage_too(
    folder: Path,
) -> None:
    policy = policy_of(folder, **LOOSE)
    settings = config(**LOOSE, mini_batch_prompts=1)
    loud = step_of(19)
    sequences = [replace(s, reward=0.5) if s.example_id != "x0" else s for s in loud]
    expected = {part: part_means(policy, sequences, part) for part in ("draft", "copy", "refined")}
    means = learn(policy, still(policy), sequences, settings).means
    assert means.entropy == pytest.approx(expected["draft"], rel=1e-4)
    measured = {part: means.parts[f"{part}/entropy"] for part in expected}
    assert measured == pytest.approx(expected, rel=1e-4)
    assert means.ratio == pytest.approx(1.0, abs=1e-5) and means.clipped == 0.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["values"]),
        ({"entropy_coef": 0.1}, ["gradient"]),
        ({"mini_batch_prompts": 1, "kl_coef": 0.1}, ["values", "none", "none", "none"]),
    ],
)
def test_entropy_is_computed_once(
    folder: Path, changes: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes: old log-probs, base, updates; at the end two for the distance to the base."""
    policy, settings = policy_of(folder, **LOOSE), config(**LOOSE, **changes)
    computed: list[str] = []

    def spied(self: Policy, pack: Pack, entropy: Entropies = "none", **how: Any) -> Scored:
        computed.append(entropy)
        return score(self, pack, entropy=entropy, **how)

    score = Policy.score
    monkeypatch.setattr(Policy, "score", spied)
    sequences = [s for s in step_of(19, examples=2) if s.part == "draft"]
    assert learn(policy, still(policy), sequences, settings).means.entropy is not None
    assert computed == [*expected, "none", "none"]


def test_tokens_without_an_advantage_are_tokens_that_were_not_clipped(folder: Path) -> None:
    policy = policy_of(folder, **LOOSE)
    settings = config(**LOOSE)
    loud = [s for s in step_of(20, examples=1) if s.part == "draft"]
    flat = [replace(s, example_id="y", group=("y", "reader"), reward=0.5) for s in loud]
    prepared = prepare_step(policy, with_advantages([*loud, *flat], settings), settings)
    with torch.no_grad():
        far = {i: alone(policy, s.span)[0] + 1.0 for i, s in enumerate(loud)}
    old = [far.get(i, torch.zeros(s.span.n_trained)) for i, s in enumerate([*loud, *flat])]
    tally = Tally()
    update(policy, still(policy), replace(prepared, old=old), range(len(old)), settings, tally)
    means = tally.means()
    negative = sum(s.span.n_trained for s in prepared.sequences[: len(loud)] if s.advantage < 0)
    tokens = sum(s.span.n_trained for s in [*loud, *flat])
    assert 0 < negative < tokens / 2
    assert means.clipped == pytest.approx(negative / tokens)
    assert means.ratio == pytest.approx((1 + math.exp(-1.0)) / 2, rel=1e-4)
    later = Tally(moved=True)  # nobody computed the ratio of a token without an advantage
    update(policy, still(policy), replace(prepared, old=old), range(len(old)), settings, later)
    assert later.means().ratio == pytest.approx(math.exp(-1.0), rel=1e-4)
    assert later.means().clipped == pytest.approx(negative / tokens)


LORA = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return policy_of(random_model(tmp_path_factory.mktemp("models") / "tiny"), **LORA)


def drafts(count: int) -> list[TrainSequence]:
    """Drafts of different prompts, three trained tokens each."""
    rng = random.Random(3)
    spans = [span(rng, [rng.randrange(300, 400) for _ in range(4)], [3]) for _ in range(count)]
    return [sequence(one, "draft", f"x{i}", 0, 0.5) for i, one in enumerate(spans)]


def kl_by_hand(policy: Policy, sequences: list[TrainSequence]) -> list[float]:
    """The k3 estimate of each sequence, a mean over its tokens."""
    budget = config(**LORA).tokens_per_batch
    spans = [one.span for one in sequences]
    now = log_probs(policy, spans, budget)
    with policy.base():
        base = log_probs(policy, spans, budget)
    return [float(kl_penalty(a, b, "k3").mean()) for a, b in zip(now, base, strict=True)]


def test_the_distance_is_that_of_the_first_sixty_four_drafts(policy: Policy) -> None:
    sequences = drafts(66)
    each = kl_by_hand(policy, sequences)
    measured = kl_to_base(policy, sequences, config(**LORA))
    means = {n: sum(each[:n]) / n for n in (63, 64, 65, 66)}
    assert measured == pytest.approx(means[64], rel=1e-5)
    others = [mean for n, mean in means.items() if n != 64]
    assert all(abs(mean - means[64]) > 1e-4 * means[64] for mean in others)


def test_copies_and_refined_rollouts_are_not_measured(policy: Policy) -> None:
    sequences = drafts(2)
    other = [sequence(one.span, "refined", "y", i, 0.5) for i, one in enumerate(drafts(4)[2:])]
    assert kl_to_base(policy, other, config(**LORA)) is None
    both = kl_to_base(policy, [*other, *sequences], config(**LORA))
    assert both == pytest.approx(sum(kl_by_hand(policy, sequences)) / 2, rel=1e-5)


def test_a_model_that_is_its_own_base_has_no_distance(policy: Policy) -> None:
    full = config(full=True)
    assert kl_to_base(policy, drafts(2), full) is None
    assert torch.is_grad_enabled()
