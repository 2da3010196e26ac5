"""Every method against its formula, written out from raw log-probs of single forward passes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from soulkit.runs.jsonl import read_jsonl
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import CHUNK, Policy
from soulkit.train.model.prepare import prepare_step
from soulkit.train.model.teacher import Teacher, start_ema
from soulkit.train.model.update import Tally, mini_batches, update
from soulkit.train.objectives.base import rollout_methods
from soulkit.train.run import train
from soulkit.train.step import learn, with_advantages
from soulkit.types import Failure, Record, unscored
from tests.support.cuda_ops import CudaDeterminism
from tests.support.methods import (
    D0,
    D1,
    D2,
    R0,
    R1,
    R2,
    ROLLOUTS,
    SMALL,
    Ids,
    advice,
    batch_of,
    logp,
    play,
    rows_of,
    still,
    student,
    teacher,
)
from tests.support.training import assert_close, config, gradients, jolt, random_model

SPREAD = 0.5**0.5  # sample deviation of two rewards that differ by 1
HALF = 0.5 / SPREAD
"""|advantage| in any group of two different rewards."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Policy:
    return student(folder)


@pytest.fixture(scope="module")
def other(folder: Path) -> Policy:
    return teacher(folder)


def config_of(method: str, **settings: Any) -> TrainConfig:
    return config(method=method, **{**SMALL, **settings})


# --- the formulas ---------------------------------------------------------------------------------

Part = tuple[Tensor, "float | Tensor"]
"""Log-probs of a sequence's tokens, and their advantage."""


def clipped_mean(parts: list[Part]) -> Tensor:
    """−A ρ over all tokens with ρ = 1 at the start of a step: no clip can bind there."""
    count = sum(len(log) for log, _ in parts)
    return (
        sum(((-a * (log - log.detach()).exp()).sum() for log, a in parts), torch.zeros(())) / count
    )


def token_mean(losses: list[Tensor]) -> Tensor:
    return torch.cat(losses).mean()


def drafts(policy: Policy) -> list[Part]:
    """x has rewards 0 and 1/2, y has 1 and 0: each group's advantages are ∓√(1/2)."""
    return [
        (logp(policy, "x", [D0]), -HALF), (logp(policy, "x", [D1, R2]), HALF),
        (logp(policy, "y", [D2]), HALF), (logp(policy, "y", [D1]), -HALF),
    ]  # fmt: skip


def refined(policy: Policy) -> list[Part]:
    """Rewards 1 and 1/4, in a group of their own."""
    return [(logp(policy, "x", [R0, R2], True), HALF), (logp(policy, "x", [R1], True), -HALF)]


def copies(policy: Policy) -> tuple[Tensor, Tensor]:
    return logp(policy, "x", [R0, R2]), logp(policy, "x", [R1])


def gaps(policy: Policy, reader: Policy, hinted: bool) -> list[Tensor]:
    """d_t of every draft of x that a teacher reads."""
    with torch.no_grad():
        turns: list[list[Ids]] = [[D0], [D1, R2]]
        return [logp(reader, "x", t, hinted) - logp(policy, "x", t) for t in turns]


def reverse_kl(student: Tensor, others: Tensor, k: int = 10) -> Tensor:
    """Row by row over the student's k likeliest, renormalised."""
    values = []
    for p, q in zip(student, others, strict=True):
        best = p.detach().argsort(descending=True)[:k]
        inside_p, inside_q = p[best].exp(), q[best].exp()
        a, b = inside_p / inside_p.sum(), inside_q / inside_q.sum()
        values.append((a * (a.log() - b.log())).sum())
    return torch.stack(values)


def grpo(policy: Policy, _: Policy) -> Tensor:
    return clipped_mean(drafts(policy))


def ditto(policy: Policy, _: Policy) -> Tensor:
    """x joins 0, 1/2 and the copies' 1, 1/4: mean 7/16, deviation worked out; λ_fb = 1."""
    mean = 1.75 / 4
    spread = (sum((r - mean) ** 2 for r in (0, 0.5, 1, 0.25)) / 3) ** 0.5
    first, second = copies(policy)
    joint = [
        (logp(policy, "x", [D0]), (0 - mean) / spread), (first, (1 - mean) / spread),
        (logp(policy, "x", [D1, R2]), (0.5 - mean) / spread), (second, (0.25 - mean) / spread),
    ]  # fmt: skip
    return clipped_mean([*joint, *drafts(policy)[2:], *refined(policy)])


def rltf(policy: Policy, _: Policy) -> Tensor:
    """Drafts of x have mean 1/4: A = 1 − 1/4 and 1/4 − 1/4. Seven copied tokens in all."""
    first, second = copies(policy)
    assert len(first) + len(second) == 7
    regression = (-(1 - 0.25) * first.sum() - (0.25 - 0.25) * second.sum()) / 7
    return clipped_mean([*drafts(policy), *refined(policy)]) + 0.5 * regression


def erl(policy: Policy, _: Policy) -> Tensor:
    """1 > 0 is imitated, 1/4 > 1/2 is not."""
    first, _second = copies(policy)
    return clipped_mean([*drafts(policy), *refined(policy)]) + 0.5 * -first.mean()


def critique_grpo(policy: Policy, _: Policy) -> Tensor:
    """The joint group of Ditto; copies have A π / (π + 0.1). Nineteen tokens in all."""
    mean = 1.75 / 4
    spread = (sum((r - mean) ** 2 for r in (0, 0.5, 1, 0.25)) / 3) ** 0.5
    first, second = copies(policy)
    parts = [(log, a) for (log, _), a in zip(drafts(policy), (0 - mean, 0.5 - mean), strict=False)]
    total = clipped_mean([*((log, a / spread) for log, a in parts), *drafts(policy)[2:]]) * 12
    for log, reward in ((first, 1), (second, 0.25)):
        total = total - (reward - mean) / spread * (log.exp() / (log.exp() + 0.1)).sum()
    return total / 19


def self_rewarding(policy: Policy, _: Policy) -> Tensor:
    """One pair a prompt; before the first update every margin is 0."""
    losses = []
    for (first, a), (second, _b) in (drafts(policy)[:2], drafts(policy)[2:]):
        best, worst = (first, second) if a > 0 else (second, first)
        moved = best - best.detach(), worst - worst.detach()
        losses.append(-torch.nn.functional.logsigmoid(0.1 * (moved[0].sum() - moved[1].sum())))
    return torch.stack(losses).mean()


def sdpo_token(policy: Policy, _: Policy) -> Tensor:
    parts = zip(drafts(policy)[:2], gaps(policy, policy, True), strict=True)
    return clipped_mean([(log, d.clamp(-5, 5)) for (log, _a), d in parts])


def sdpo_token_grpo(policy: Policy, _: Policy) -> Tensor:
    parts = drafts(policy)
    d = gaps(policy, policy, True)
    mixed = [(log, a + 0.1 * g.clamp(-5, 5)) for (log, a), g in zip(parts[:2], d, strict=True)]
    return clipped_mean([*mixed, *parts[2:]])


def sdpo_logits(policy: Policy, _: Policy) -> Tensor:
    losses = []
    for turns in ([D0], [D1, R2]):
        with torch.no_grad():
            read = rows_of(policy, "x", turns, True)
        losses.append(reverse_kl(rows_of(policy, "x", turns), read))
    return token_mean(losses)


def sdpo_logits_grpo(policy: Policy, other: Policy) -> Tensor:
    return sdpo_logits(policy, other) + clipped_mean(drafts(policy))


EVERY: list[tuple[str, list[Ids]]] = [
    ("x", [D0]), ("x", [D1, R2]), ("y", [D2]), ("y", [D1])
]  # fmt: skip


def opd_token(policy: Policy, other: Policy) -> Tensor:
    parts: list[Part] = []
    for example, turns in EVERY:
        log_prob = logp(policy, example, turns)
        with torch.no_grad():
            gap = logp(other, example, turns) - log_prob
        parts.append((log_prob, gap.clamp(-5, 5)))
    return clipped_mean(parts)


def opd_logits(policy: Policy, other: Policy) -> Tensor:
    losses = []
    for example, turns in EVERY:
        with torch.no_grad():
            read = rows_of(other, example, turns)
        losses.append(reverse_kl(rows_of(policy, example, turns), read))
    return token_mean(losses)


Formula = Callable[[Policy, Policy], Tensor]
CASES: dict[str, tuple[TrainConfig, Formula, dict[str, int]]] = {
    "grpo": (config_of("grpo"), grpo, {"draft": 12}),
    "ditto": (config_of("ditto"), ditto, {"draft": 12, "copy": 7, "refined": 7}),
    "rltf-sd": (config_of("rltf-sd", aux_weight=0.5), rltf,
                {"draft": 12, "refined": 7, "copy/regression": 7}),
    "erl": (config_of("erl", aux_weight=0.5), erl,
            {"draft": 12, "refined": 7, "copy/imitation": 3}),
    "critique-grpo": (config_of("critique-grpo"), critique_grpo, {"draft": 12, "copy/shaped": 7}),
    "self-rewarding": (config_of("self-rewarding"), self_rewarding, {"draft/preference": 12}),
    "sdpo-token": (config_of("sdpo-token"), sdpo_token, {"draft": 6}),
    "sdpo-token+grpo": (config_of("sdpo-token+grpo"), sdpo_token_grpo, {"draft": 12}),
    "sdpo-logits": (config_of("sdpo-logits"), sdpo_logits, {"draft/divergence": 6}),
    "sdpo-logits+grpo": (config_of("sdpo-logits+grpo"), sdpo_logits_grpo,
                         {"draft": 12, "draft/divergence": 6}),
    "opd": (config_of("opd", teacher_model="other"), opd_token, {"draft": 12}),
    "opd logits": (config_of("opd", teacher_model="other", opd_form="logits"), opd_logits,
                   {"draft/divergence": 12}),
}  # fmt: skip


def naive(policy: Policy, loss: Tensor) -> tuple[float, dict[str, Tensor]]:
    for _, parameter in policy.trained:
        parameter.grad = None
    loss.backward()
    return float(loss.detach()), gradients(policy)


def second_model(config: TrainConfig, other: Policy) -> Teacher | None:
    return Teacher(other) if config.method == "opd" else None


def test_every_method_has_a_case() -> None:
    assert {case.partition(" ")[0] for case in CASES} == set(rollout_methods())


@pytest.mark.parametrize("budget", [1, 16384])
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_its_formula(shared: Policy, other: Policy, name: str, budget: int) -> None:
    """Packed with shared prefixes, or sequence by sequence: the same numbers and gradients."""
    config, formula, tokens = CASES[name]
    assert shared.shape is not None  # shared prefixes are computed once
    config = config.model_copy(update={"tokens_per_batch": budget})
    expected_loss, expected_grads = naive(shared, formula(shared, other))
    line = learn(shared, still(shared), batch_of(config), config, second_model(config, other))
    assert line.trained == tokens
    assert line.loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    assert_close(gradients(shared), expected_grads)
    assert max(float(g.norm()) for g in expected_grads.values()) > 1e-3


@pytest.mark.parametrize("name", ["rltf-sd", "erl", "sdpo-logits+grpo"])
def test_what_is_trained_beside_the_rewards_leaves_their_step_as_it_is(
    shared: Policy, other: Policy, name: str
) -> None:
    """Weight 0: the gradient of the policy part alone, with its own denominator."""
    off = {"aux_weight": 0.0, "distill_weight": 0.0}
    config = CASES[name][0].model_copy(update=off)
    rewarded = drafts(shared) if name.startswith("sdpo") else [*drafts(shared), *refined(shared)]
    _, expected_grads = naive(shared, clipped_mean(rewarded))
    line = learn(shared, still(shared), batch_of(config), config)
    assert_close(gradients(shared), expected_grads)
    assert not any("/" in part for part in line.trained)


def test_token_advantages_are_those_of_the_start_of_the_step(folder: Path) -> None:
    """A second update uses π_old and the first teacher's reading, though the weights have moved."""
    policy, config = student(folder), config_of("sdpo-token")
    sequences = with_advantages(batch_of(config), config)
    prepared = prepare_step(policy, sequences, config)
    first = gaps(policy, policy, True)
    with torch.no_grad():
        old = [log for log, _ in drafts(policy)[:2]]
    jolt(policy, 0.02, seed=5)
    total = torch.zeros(())
    for (log, _), before, d in zip(drafts(policy)[:2], old, first, strict=True):
        ratio, a = (log - before).exp(), d.clamp(-5, 5)
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
        total = total + torch.where(a < 0, torch.minimum(loss, -10 * a), loss).sum() / 6
    expected_loss, expected_grads = naive(policy, total)
    line = update(policy, still(policy), prepared, range(len(sequences)), config, Tally())
    assert line.loss == pytest.approx(expected_loss, rel=1e-4)
    assert_close(gradients(policy), expected_grads, rel=5e-5)


def test_advantages_of_several_mini_batches_stay_with_their_sequences(folder: Path) -> None:
    policy, config = student(folder), config_of("sdpo-token+grpo", mini_batch_prompts=1)
    sequences = with_advantages(batch_of(config), config)
    prepared = prepare_step(policy, sequences, config)
    x, y = mini_batches(sequences, 1)
    assert {sequences[i].example_id for i in y} == {"y"}
    _, expected_grads = naive(policy, clipped_mean(drafts(policy)[2:]))
    update(policy, still(policy), prepared, y, config, Tally())
    assert_close(gradients(policy), expected_grads)
    assert prepared.advantages is not None and len(x) == 2


@pytest.mark.parametrize("state", ["base", "ema"])
def test_other_states_of_the_policy_teach(folder: Path, state: str) -> None:
    policy, config = student(folder), config_of("sdpo-logits", teacher=state)
    start_ema(policy)
    jolt(policy, 0.05, seed=3)
    average = student(folder)  # the weights from before
    total = []
    for turns in ([D0], [D1, R2]):
        with torch.no_grad():
            if state == "base":
                with policy.model.disable_adapter():
                    read = rows_of(policy, "x", turns, True)
            else:
                read = rows_of(average, "x", turns, True)
        total.append(reverse_kl(rows_of(policy, "x", turns), read))
    expected_loss, expected_grads = naive(policy, token_mean(total))
    prepared = prepare_step(policy, with_advantages(batch_of(config), config), config)
    line = update(policy, still(policy), prepared, range(2), config, Tally())
    assert line.loss == pytest.approx(expected_loss, rel=1e-4)
    assert_close(gradients(policy), expected_grads)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "sdpo-token+grpo", "ratio": "sequence", "aggregation": "seq-mean-token-mean"},
        {"method": "sdpo-logits+grpo", "kl_coef": 0.1, "entropy_coef": 0.1, "sampler_cap": 2.0},
        {"method": "rltf-sd", "kl_coef": 0.1, "sampler_cap": 2.0, "denominator": "separate"},
        {"method": "critique-grpo", "kl_coef": 0.1, "sampler_cap": 2.0, "denominator": "separate"},
        {"method": "sdpo-token", "estimator": "discount", "distill_centred": True},
        {"method": "sdpo-logits", "divergence": "jsd", "divergence_tail": "bucket",
         "divergence_temperature": 2.0},
        {"method": "sdpo-logits", "divergence": "forward_kl", "divergence_top_k": None},
    ],
)  # fmt: skip
def test_packs_do_not_show_whatever_is_asked_for(shared: Policy, settings: dict[str, Any]) -> None:
    results = []
    for budget in (1, 16384):
        config = config_of(**settings, tokens_per_batch=budget)
        line = learn(shared, still(shared), batch_of(config), config)
        results.append((line.loss, gradients(shared)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4, abs=1e-6)
    assert_close(results[0][1], results[1][1], rel=2e-5)


@pytest.mark.parametrize(
    "settings",
    [
        *({"method": name.partition(" ")[0], "opd_form": "logits" if " " in name else "token",
           "teacher_model": "other" if name.startswith("opd") else None} for name in CASES),
        *({"method": "sdpo-token", "estimator": e} for e in ("sum", "window", "discount")),
        {"method": "grpo", "ratio": "sequence", "kl_coef": 0.1, "entropy_coef": 0.1},
        {"method": "sdpo-logits", "divergence_tail": "bucket", "packing": "off"},
    ],
    ids=lambda settings: " ".join(str(value) for value in settings.values() if value),
)  # fmt: skip
def test_a_step_has_deterministic_kernels_on_a_gpu(
    shared: Policy, other: Policy, settings: dict[str, Any]
) -> None:
    config = config_of(**{k: v for k, v in settings.items() if v is not None})
    sequences, reader = batch_of(config), second_model(config, other)
    with CudaDeterminism() as ops:
        learn(shared, still(shared), sequences, config, reader)
    assert any(name.endswith("_backward.default") for name in ops.seen)


def test_a_vocabulary_in_many_chunks_does_not_show(
    shared: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("sdpo-logits+grpo")
    learn(shared, still(shared), batch_of(config), config)
    whole = gradients(shared)
    monkeypatch.setitem(CHUNK, "cpu", 1)  # sixteen tokens at a time, the least
    learn(shared, still(shared), batch_of(config), config)
    assert_close(gradients(shared), whole)


# --- what a step does -----------------------------------------------------------------------------


def moved(policy: Policy, records: list[Record], config: TrainConfig, measure: Callable[[], Tensor],
          reader: Teacher | None = None) -> Tensor:  # fmt: skip
    """How a real step changes a measurement."""
    optimizer = torch.optim.SGD([p for _, p in policy.trained], lr=0.01)
    with torch.no_grad():
        before = measure()
    learn(policy, optimizer, batch_of(config, records), config, reader)
    with torch.no_grad():
        return measure() - before


@pytest.mark.parametrize("method", ["grpo", "ditto"])
def test_better_drafts_become_likelier(folder: Path, method: str) -> None:
    policy, records = student(folder), ROLLOUTS[4:]
    good = moved(policy, records, config_of(method), lambda: logp(policy, "y", [D2]).sum())
    bad = moved(policy, records, config_of(method), lambda: logp(policy, "y", [D1]).sum())
    assert good > 0 > bad


def test_a_better_refined_rollout_becomes_likelier_without_the_hint(folder: Path) -> None:
    policy = student(folder)
    change = moved(
        policy, ROLLOUTS[:4], config_of("ditto"), lambda: logp(policy, "x", [R0, R2]).sum()
    )
    assert change > 0


def flat(policy: Policy) -> Tensor:
    return torch.cat([p.detach().flatten() for _, p in policy.trained])


def shaped(log_prob: Tensor, gamma: float) -> Tensor:
    return log_prob.exp() / (log_prob.exp() + gamma)


@pytest.mark.parametrize("seed", [0, 1])
def test_critique_grpo_changes_the_weights_by_its_formula(folder: Path, seed: int) -> None:
    """Two updates on random rollouts; the second uses π_old. Against autograd on raw log-probs."""
    draw = random.Random(seed)
    rewards = [draw.random() for _ in range(4)]
    records = []
    for example, ids in (("x", (D0, D1)), ("y", (D2, D0))):
        for i in range(2):
            records.append(play(example, i, "draft", rewards[i], ids[i], received=advice(example)))
            records.append(play(example, i, "refined", rewards[2 + i], (R0, R1)[i]))
    mean = sum(rewards) / 4
    spread = (sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5 + 1e-6
    a = [(r - mean) / spread for r in rewards]
    real, hand, lr = student(folder), student(folder), 0.5
    before, steps = flat(real), torch.optim.SGD([p for _, p in hand.trained], lr)
    with torch.no_grad():
        old = [logp(hand, e, [d]) for e, d in (("x", D0), ("x", D1), ("y", D2), ("y", D0))]
    for number, (example, ids) in enumerate((("x", (D0, D1)), ("y", (D2, D0)))):
        losses = []
        for i in range(2):
            ratio = (logp(hand, example, [ids[i]]) - old[2 * number + i]).exp()
            loss = torch.maximum(-a[i] * ratio, -a[i] * ratio.clamp(0.8, 1.28))
            losses.append(torch.minimum(loss, torch.tensor(-10 * a[i])) if a[i] < 0 else loss)
            losses.append(-a[2 + i] * shaped(logp(hand, example, [(R0, R1)[i]]), 0.05))
        steps.zero_grad()
        token_mean(losses).backward()
        steps.step()
    config = config_of("critique-grpo", shaping_gamma=0.05, mini_batch_prompts=1)
    learn(
        real, torch.optim.SGD([p for _, p in real.trained], lr), batch_of(config, records), config
    )
    change, expected = flat(real) - before, flat(hand) - before
    assert float((change - expected).norm() / expected.norm()) < 5e-5


@pytest.mark.parametrize("records", [
    [play("x", 0, "draft", 0.5, D0)],
    [play("x", 0, "draft", 0.5, D0, received=advice("x")), play("x", 0, "refined", 0.5, R0)],
    [replace(play("x", i, "draft", 0.5, D0), score=unscored(Failure("judge_error")))
     for i in range(2)],
    [],
], ids=["one rollout without feedback", "equal rewards", "unscored", "no rollouts"])  # fmt: skip
@pytest.mark.parametrize("method", ["critique-grpo", "self-rewarding"])
def test_the_weights_stay_where_nothing_differs(
    folder: Path, records: list[Record], method: str
) -> None:
    policy = student(folder)
    change = moved(policy, records, config_of(method), lambda: logp(policy, "x", [R0]).sum())
    assert change == 0


def test_iterations_of_self_rewarding_leave_the_average_of_other_methods(folder: Path) -> None:
    policy, config = student(folder), config_of("sdpo-token", teacher="ema", iteration_steps=2)
    start_ema(policy)
    first = {name: average.clone() for name, average in (policy.ema or {}).items()}
    optimizer = torch.optim.SGD([p for _, p in policy.trained], 0.5)
    learn(policy, optimizer, batch_of(config), config)
    assert any(not torch.equal(first[name], now) for name, now in (policy.ema or {}).items())
    assert config.reference_steps == 0


def test_a_reward_that_is_not_a_number_skips_the_update_of_a_pair(folder: Path) -> None:
    policy, config = student(folder), config_of("self-rewarding")
    records = [play("x", i, "draft", r, D0) for i, r in enumerate((0.0, float("inf")))]
    line = learn(policy, still(policy), batch_of(config, records), config)
    assert line.not_finite == {"1 of 1": "an advantage is not finite"}


@pytest.mark.parametrize(("seed", "iteration_steps"), [(0, 1), (1, 1), (0, 2), (1, 3)])
def test_self_rewarding_changes_the_weights_by_its_formula(
    folder: Path, seed: int, iteration_steps: int
) -> None:
    """Three steps of two updates on random rollouts, against DPO by autograd on raw log-probs."""
    draw, lr, beta = random.Random(seed), 0.5, 0.3
    config = config_of(
        "self-rewarding", iteration_steps=iteration_steps, preference_beta=beta,
        mini_batch_prompts=1,
    )  # fmt: skip
    turns: dict[str, list[list[Ids]]] = {"x": [[D0], [D1, R2], [R0]], "y": [[D2, R1], [D1], [D0]]}
    rewards = [{e: [draw.random() for _ in turns[e]] for e in turns} for _ in range(3)]
    real, hand, reference = student(folder), student(folder), student(folder)
    before = flat(hand)
    steps = torch.optim.SGD([p for _, p in hand.trained], lr)
    optimizer = torch.optim.SGD([p for _, p in real.trained], lr)
    for step in range(3):
        records = [play(e, i, "draft", rewards[step][e][i], *turns[e][i])
                   for e in turns for i in range(3)]  # fmt: skip
        if step % iteration_steps == 0:
            for (_, p), (_, now) in zip(reference.trained, hand.trained, strict=True):
                p.data.copy_(now.detach())
            if iteration_steps > 1:
                start_ema(real)
        losses = []
        for e in turns:
            ranked = sorted(range(3), key=rewards[step][e].__getitem__)
            best, worst = (logp(hand, e, turns[e][i]).sum() for i in (ranked[-1], ranked[0]))
            with torch.no_grad():
                ref_best, ref_worst = (
                    logp(reference, e, turns[e][i]).sum() for i in (ranked[-1], ranked[0])
                )
            margin = beta * (best - ref_best - worst + ref_worst)
            loss = torch.log1p(torch.exp(-margin))
            steps.zero_grad()
            loss.backward()
            steps.step()
            losses.append(float(loss.detach()))
        line = learn(real, optimizer, batch_of(config, records), config)
        assert line.loss == pytest.approx(sum(losses) / 2, rel=1e-4)
        assert line.means.preference_margin is not None and line.groups == 2
    change, expected = flat(real) - before, flat(hand) - before
    assert float((change - expected).norm() / expected.norm()) < 5e-5


@pytest.mark.parametrize("gain", [1.0, -1.0])
def test_rltf_moves_copies_with_their_gain(folder: Path, gain: float) -> None:
    """All drafts alike and all refined alike: nothing but the regression has a gradient."""
    low, high = (0.0, 1.0) if gain > 0 else (1.0, 0.0)
    records = [play("x", i, "draft", low, D0, received=advice("x")) for i in range(2)]
    records += [play("x", i, "refined", high, R0) for i in range(2)]
    policy = student(folder)
    change = moved(policy, records, config_of("rltf-sd"), lambda: logp(policy, "x", [R0]).sum())
    assert change * gain > 0


def test_erl_imitates_what_it_accepts_and_nothing_else(folder: Path) -> None:
    policy = student(folder)
    records = [
        play("x", 0, "draft", 0.5, D0, received=advice("x")),
        play("x", 0, "refined", 0.75, R0),
    ]
    change = moved(policy, records, config_of("erl"), lambda: logp(policy, "x", [R0]).sum())
    assert change > 0
    none = moved(
        policy, records, config_of("erl", accept_from=0.8), lambda: logp(policy, "x", [R0])
    )
    assert bool((none == 0).all())


@pytest.mark.parametrize("gain", [1.0, 0.0])
def test_critique_grpo_moves_copies_with_their_place_in_the_joint_group(
    folder: Path, gain: float
) -> None:
    """Equal rewards, or a single draft without feedback, change nothing."""
    records = [play("x", i, "draft", 0.5, D0, received=advice("x")) for i in range(2)]
    records += [play("x", 0, "refined", 0.5 + gain / 2, R0)]
    policy, config = student(folder), config_of("critique-grpo")
    change = moved(policy, records, config, lambda: logp(policy, "x", [R0]).sum())
    assert change > 0 if gain else change == 0
    alone = moved(policy, records[:1], config, lambda: logp(policy, "x", [R0, D0]).sum())
    assert alone == 0


@pytest.mark.parametrize("method", ["sdpo-token", "sdpo-token+grpo", "opd"])
def test_tokens_that_the_teacher_likes_better_become_likelier(
    folder: Path, other: Policy, method: str
) -> None:
    policy = student(folder)
    config = config_of(method, distill_weight=1.0, teacher_model="other")
    records = [play("x", i, "draft", 0.0, D0, received=advice("x")) for i in range(2)]
    reader = second_model(config, other)
    with torch.no_grad():
        gap = logp(reader.policy if reader else policy, "x", [D0], reader is None) - logp(
            policy, "x", [D0]
        )
    change = moved(policy, records, config, lambda: logp(policy, "x", [D0]), reader)
    assert float((gap.clamp(-5, 5) * change).sum()) > 0


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_distributions_come_closer(folder: Path, other: Policy, kind: str) -> None:
    policy = student(folder)
    config = config_of("opd", teacher_model="other", opd_form="logits", divergence=kind)

    def apart() -> Tensor:
        student, read = rows_of(policy, "x", [D0]), rows_of(other, "x", [D0])
        return (student.exp() * (student - read)).sum() + (read.exp() * (read - student)).sum()

    assert moved(policy, ROLLOUTS[:1], config, apart, Teacher(other)) < 0


# --- what is logged -------------------------------------------------------------------------------


def test_a_line_says_what_the_teacher_did(shared: Policy, other: Policy) -> None:
    token = learn(shared, still(shared), batch_of(config_of("sdpo-token")), config_of("sdpo-token"))
    want = torch.cat(gaps(shared, shared, True))
    assert token.teacher["gap"] == pytest.approx(float(want.mean()), rel=1e-4)
    assert token.teacher["adv_abs_mean"] == pytest.approx(
        float(want.clamp(-5, 5).abs().mean()), rel=1e-4
    )
    config = config_of("sdpo-logits")
    logits = learn(shared, still(shared), batch_of(config), config)
    want = sdpo_logits(shared, other).detach()
    assert logits.means.divergence == pytest.approx(float(want), rel=1e-4)
    plain = learn(shared, still(shared), batch_of(config_of("grpo")), config_of("grpo"))
    assert not plain.teacher and plain.means.divergence is None and plain.accepted is None


def test_the_accepted_share_is_of_refined_rollouts(shared: Policy) -> None:
    def share(**settings: Any) -> float | None:
        config = config_of("erl", **settings)
        return learn(shared, still(shared), batch_of(config), config).accepted

    assert share() == 0.5 and share(accept_from=0.25) == 1.0 and share(accept_from=2.0) == 0.0


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that has begun to learn the form of Hi-ToM's answers."""
    out = tmp_path_factory.mktemp("warm") / "sft"
    settings = config(
        method="sft", full=True, model="tiny", tasks={"hitom": 1.0}, data={"hitom": "synth:60"},
        steps=15, sft_batch=6, lr=3e-3, where={"length": "1", "deception": "False"},
    )  # fmt: skip
    train(settings, out)
    return str(out / "model")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [m for m in rollout_methods() if m not in ("grpo", "self-rewarding")]
)
def test_two_steps_of_a_run(reader: str, tmp_path: Path, method: str) -> None:
    """From rows to a saved adapter, with everything on that goes together."""
    settings = config(
        method=method, model=reader, tasks={"hitom": 1.0}, data={"hitom": "synth:60"},
        where={"length": "1", "deception": "False"}, steps=2, prompts_per_step=2, group_size=2,
        max_tokens=8, mini_batch_prompts=1, lr=1e-3, lora={"r": 4, "alpha": 8}, teacher="ema",
        teacher_model=reader, show_draft=True, sampler_cap=2.0, kl_coef=0.01,
        shuffle_feedback=method in ("erl", "sdpo-token"),
    )  # fmt: skip
    train(settings, tmp_path / "run")
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    trained = [name for line in lines for name in line if name.startswith("trained/")]
    assert trained and all(line.get(name, 1) > 0 for line in lines for name in trained)
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()
    assert {line["rollouts/refined"] > 0 for line in lines} == {
        method in ("ditto", "rltf-sd", "erl", "critique-grpo")
    }
    if "token" in method or method == "opd":
        assert all("teacher/gap" in line for line in lines)
    if "logits" in method:
        assert all(line["divergence/teacher"] >= 0 for line in lines)
    if method == "erl":
        assert all(0 <= line["imitation/accepted"] <= 1 for line in lines)
