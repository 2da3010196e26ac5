"""Fused modules compute what PEFT's and transformers' own do; the benchmark counts what is done.

Packing is invisible to every method: one update gives the gradients of one row at a time.

The step is prepared, the weights move a little (so that ratios are not 1 and clips bind), then the
gradients of one update are compared. The reference puts every sequence into a pack of its own, a
padded row, for the student and its teacher alike.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu_step
from soulkit.train.config import TrainConfig
from soulkit.train.model import fused
from soulkit.train.model.fused import LoraProduct, compile_modules, fuse, fuse_lora, fused_parts
from soulkit.train.model.packing import Pack, in_tries
from soulkit.train.model.policy import Policy, load_policy
from soulkit.train.model.prepare import Prepared, prepare_step
from soulkit.train.model.teacher import Teacher, start_ema
from soulkit.train.model.update import Tally, update
from soulkit.train.objectives.base import rollout_methods
from soulkit.train.objectives.sequences import Span
from soulkit.train.step import with_advantages
from soulkit.types import Record
from tests.support.methods import SMALL, advice, batch_of, play
from tests.support.shapes import build
from tests.support.training import assert_close, config, gradients, jolt, policy_of, step_of

ALL = ("lora", "norm", "mlp")
LORA: dict[str, Any] = {"r": 4, "alpha": 12}


def trained(policy: Policy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of a packed step and the gradients of a weighted sum of them."""
    policy.model.zero_grad(set_to_none=True)
    [pack] = in_tries([s.span for s in step_of()], 1 << 20)
    scored = policy.score(pack)
    (scored.log_prob * torch.linspace(-1, 1, len(scored.log_prob))).sum().backward()
    return scored.log_prob.detach(), gradients(policy)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3", "qwen3-vl"])
@pytest.mark.parametrize("again", [False, True])
def test_fused_modules_are_exact(kind: str, again: bool, tmp_path: Path) -> None:
    folder = build(kind, tmp_path / kind)
    policy = policy_of(folder, lora=LORA, fused="off", activation_checkpointing=again)
    plain, expected = trained(policy)
    counts = fuse(policy.decoder, ALL)
    assert counts["lora"] == sum("lora_A" in name for name, _ in policy.trained)
    # Gemma's norms add one to their factor and its gate is a GELU: both stay as they are.
    assert (counts["norm"] > 0, counts["mlp"] > 0) == (
        (False, False) if "gemma" in kind else (True,) * 2
    )
    log_prob, grads = trained(policy)
    torch.testing.assert_close(log_prob, plain, rtol=1e-5, atol=1e-5)
    assert_close(grads, expected)


def test_the_adapter_can_still_be_switched_off_and_saved(tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "qwen3")
    policy = policy_of(folder, lora=LORA, fused="off")
    policy.save(tmp_path / "before")
    with policy.base():
        before, _ = base_scores(policy)
    fuse(policy.decoder, ALL)
    with policy.base():
        after, _ = base_scores(policy)
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    policy.save(tmp_path / "after")
    name = "adapter_model.safetensors"
    assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


@torch.no_grad()
def base_scores(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    [pack] = in_tries([s.span for s in step_of()], 1 << 20)
    scored = policy.score(pack, entropy="values")
    return scored.log_prob, scored.entropy


def test_later_weights_are_used(tmp_path: Path) -> None:
    """Fusing reads the factors at every call: an optimizer moves them in place."""
    folder = build("qwen3", tmp_path / "qwen3")
    plain, fused = (
        policy_of(folder, lora=LORA, fused="off"),
        policy_of(folder, lora=LORA, fused="off"),
    )
    fuse(fused.decoder, ALL)
    for policy in (plain, fused):
        jolt(policy, 0.1, seed=9)
    torch.testing.assert_close(base_scores(fused)[0], base_scores(plain)[0], rtol=1e-5, atol=1e-5)


def test_a_product_that_is_wrong_is_noticed_though_the_adapter_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LoraProduct.apply
    folder = build("qwen3", tmp_path / "model")
    policy = load_policy(config(fused="off"), folder)
    before = policy.version()
    with monkeypatch.context() as patch:
        patch.setattr(LoraProduct, "apply", lambda *a: plain(*a[:-1], 3 * a[-1]))
        assert fuse(policy.decoder, ["lora"]) == {"lora": 0}
    assert fuse(policy.decoder, ["lora"])["lora"] > 0
    assert policy.version() == before


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_compiled_modules_are_exact_and_leave_sampling_alone(again: bool, tmp_path: Path) -> None:
    """With the graphs of torch.compile, run without generated code: that takes minutes to make."""
    folder = build("qwen3-sliding", tmp_path / "qwen3")
    policy = policy_of(folder, lora=LORA, fused="off", activation_checkpointing=again)
    plain, expected = trained(policy)
    completions = sampled(policy)
    assert fuse_lora(policy.decoder) > 0
    layers = len(policy.decoder.layers)
    assert compile_modules(policy.decoder, backend="aot_eager") == 4 * layers
    log_prob, grads = trained(policy)
    torch.testing.assert_close(log_prob, plain, rtol=1e-5, atol=1e-5)
    assert_close(grads, expected)
    assert counters["stats"]["unique_graphs"] > 0
    assert sampled(policy, 1) == completions[:-5]
    graphs = counters["stats"]["unique_graphs"]
    # Reading the prompt goes through norms and feed-forward; the tokens after it do not.
    assert sampled(policy) == completions
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["modules", "compile"])
def test_modules_stay_plain_where_torch_cannot_compile(
    setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one line per part. The C++ compiler that torch needs on a CPU is missing here."""
    torch._dynamo.reset()
    # The norms and feed-forward parts are compiled on a GPU only.
    monkeypatch.setattr(fused, "_kernel", lambda function, device: torch.compile(function))
    folder = build("qwen3", tmp_path / "qwen3")
    plain, expected = trained(policy_of(folder, lora=LORA, fused="off"))
    with inductor.patch({"cpp.cxx": ("/nowhere/c++",)}):
        policy = policy_of(folder, lora=LORA, fused=setting)
    parts = {"modules": ["norm", "mlp"], "compile": ["compile"]}[setting]
    assert [line.split("(")[1].split(")")[0] for line in policy.remarks] == parts
    assert all("torch.compile fails here" in line for line in policy.remarks)
    assert all(module._compiled_call_impl is None for module in policy.decoder.modules())
    log_prob, grads = trained(policy)
    torch.testing.assert_close(log_prob, plain, rtol=1e-5, atol=1e-5)
    assert_close(grads, expected)


@pytest.mark.slow
def test_compiled_modules_with_other_results_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *args: [2 * out for out in graph.forward(*args)]

    torch._dynamo.reset()
    policy = policy_of(build("qwen3", tmp_path / "qwen3"), lora=LORA, fused="off")
    lines: list[str] = []
    monkeypatch.setattr(fused, "compile_modules", partial(compile_modules, backend=wrong))
    assert fuse(policy.decoder, ["compile"], lines.append) == {"compile": 0}
    assert len(lines) == 1 and "results differ" in lines[0]
    assert all(module._compiled_call_impl is None for module in policy.decoder.modules())


def test_gradients_that_are_rounded_are_reported(tmp_path: Path) -> None:
    """No kernel of a CPU multiplies bfloat16 to float32. The meta device knows such a product."""
    folder = build("qwen3", tmp_path / "qwen3")
    assert policy_of(folder, lora=LORA).remarks == []
    [line] = policy_of(folder, lora=LORA, dtype="bfloat16").remarks
    assert "gradients of the adapter are rounded" in line
    half, meta = torch.bfloat16, torch.device("meta")
    a, b = (torch.ones(s, dtype=half, device="meta") for s in ((8, 5), (5, 6)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_WIDE", set())
        assert not fused.has_wide_product(torch.device("cpu"), half)
        assert fused.has_wide_product(meta, half)
        product = fused._product(a, b, torch.float32)
        assert (product.shape, product.dtype) == ((8, 6), torch.float32)


@torch.no_grad()
def sampled(policy: Policy, tokens: int = 6) -> list[int]:
    ids = torch.tensor([[300, 301, 302, 303]])
    return policy.model.generate(input_ids=ids, max_new_tokens=tokens, do_sample=False)[0].tolist()


def test_what_a_setting_stands_for() -> None:
    assert fused_parts("off") == ()
    assert fused_parts("auto") == ("lora",)
    assert fused_parts("auto", "cuda") == ALL
    assert fused_parts("modules") == ALL
    assert fused_parts("compile") == ("lora", "compile")


@pytest.mark.parametrize("bias", [False, True])
def test_the_product_has_the_gradients_of_autograd(bias: bool) -> None:
    random_ = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random_, dtype=torch.float64)

    x, a, b = (t.requires_grad_() for t in (some(2, 5, 7), some(3, 7), some(4, 3)))
    w, c = some(4, 7), some(4) if bias else None
    assert torch.autograd.gradcheck(
        lambda *t: LoraProduct.apply(t[0], w, c, *t[1:], 0.7), (x, a, b)
    )


def test_bfloat16_keeps_to_its_rounding() -> None:
    """Against float32, the fused product errs no more than PEFT's order of operations."""
    random_ = torch.Generator().manual_seed(1)
    x, w = (torch.randn(s, generator=random_).bfloat16() for s in ((64, 256), (128, 256)))
    a, b = (torch.randn(s, generator=random_) * 0.2 for s in ((8, 256), (128, 8)))
    wide = x.float() @ w.float().t() + 2.0 * (x.float() @ a.t()) @ b.t()
    peft = ((x @ w.t()) + 2.0 * (x.float() @ a.t()) @ b.t()).bfloat16()
    fused = LoraProduct.apply(x, w, None, a, b, 2.0)
    assert fused.dtype == torch.bfloat16
    assert (fused.float() - wide).norm() <= 1.5 * (peft.float() - wide).norm()


# --- the benchmark --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, 1, 3])
def test_counted_products_are_those_that_run(rows: int | None) -> None:
    """All matrix products but attention's, which SDPA does on more pairs than see each other.

    Of the plain modules: torch does not count products in place.
    """
    variant = gpu_step.Variant("plain", rows=rows)
    step = gpu_step.Step(gpu_step.SMALL, variant)
    config = step.policy.decoder.config
    channels = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    pairs = sum(gpu_step.tokens_and_pairs(pack)[1] for pack in step.packs())
    with FlopCounterMode(display=False) as counter:
        step()
    done = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in done.items() if "attention" not in str(op))
    assert products == gpu_step.work_of(step, variant).model - 12 * pairs * channels


def test_visible_pairs_are_those_of_the_mask() -> None:
    [pack] = in_tries([s.span for s in step_of()], 1 << 20)
    assert pack.trie is not None
    whole = (0, len(pack.trie))
    pairs = int(pack.trie.visible(whole, [whole], None).sum())
    assert gpu_step.tokens_and_pairs(pack) == (len(pack.trie), pairs)


@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    names = "fused,fused+checkpointing,rows4+fused+checkpointing"
    command = [sys.executable, "-m", "benchmarks.gpu_step", "--small", "--only", names]
    subprocess.run([*command, "--repeats", "1", "--json", str(out)], check=True, timeout=600)
    numbers = json.loads(out.read_text())
    packed, again, rows = numbers["measured"]
    assert numbers["not_measured"] == {}
    assert packed["computed"] == again["computed"] == 96 + 4 * 16 < rows["computed"]
    assert all(0 < line["mfu"] < line["hfu"] for line in numbers["measured"])


OTHER: dict[str, Any] = {"teacher_model": "another"}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((method, OTHER if method == "opd" else {}) for method in rollout_methods()),
    ("opd", OTHER | {"opd_form": "logits"}),
    ("ditto", {"ratio": "sequence"}),
    ("ditto", {"aggregation": "seq-mean-token-mean", "denominator": "separate"}),
    ("ditto", {"kl_coef": 0.1, "entropy_coef": 0.05}),
    ("ditto", {"sampler_cap": 2.0}),
    ("sdpo-token", {"estimator": "discount", "teacher": "ema"}),
    ("sdpo-logits", {"teacher": "base", "divergence": "jsd", "divergence_tail": "bucket"}),
]
NAMES = [" ".join([method, *map(str, more.values())]) for method, more in CASES]
BUDGETS = (30, 10_000)


def rollouts() -> list[Record]:
    """Of each example four drafts and their refined rollouts, in two turns of some length each;
    rollouts 0 and 1 say the same at first, 2 and 3 the same throughout."""
    rng = random.Random(0)

    def random_turn(n: int) -> list[int]:
        return [rng.randrange(400, 420) for _ in range(n)]

    made = []
    for example in ("x", "y"):
        first, second = random_turn(7), random_turn(5)
        for number in range(4):
            rewards = rng.random(), rng.random()
            turns = (first, second if number > 1 else random_turn(6))
            draft = play(example, number, "draft", rewards[0], *turns, received=advice(example))
            better = (turns[0], random_turn(4)) if number % 2 else (random_turn(8), random_turn(3))
            made += [draft, play(example, number, "refined", rewards[1], *better)]
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3-sliding", tmp_path_factory.mktemp("kinds") / "model")


@contextmanager
def laid_out(policies: Sequence[Policy], *, tries: bool) -> Iterator[None]:
    """Within it the policies lay out tries, or each sequence as a row of its own."""

    def packs(spans: Sequence[Span], budget: int, *, divided: bool = True) -> list[Pack]:
        if tries:
            return list(in_tries(spans, budget))
        return [Pack((index,), (span,)) for index, span in enumerate(spans)]

    for policy in policies:
        policy.packs = packs  # type: ignore[method-assign]
    try:
        yield
    finally:
        for policy in policies:
            del policy.packs  # the class's own shows again


def prepared(policy: Policy, other: Policy, settings: TrainConfig) -> Prepared:
    sequences = with_advantages(batch_of(settings, rollouts()), settings)
    reader = Teacher(other) if settings.method == "opd" else None
    return prepare_step(policy, sequences, settings, sequences, reader)


def grads_of(policy: Policy, step: Prepared, settings: TrainConfig) -> dict[str, torch.Tensor]:
    still = torch.optim.SGD([p for _, p in policy.trained], lr=0.0)
    everything = range(len(step.sequences))
    line = update(policy, still, step, everything, settings, Tally())
    assert line.grad_norm > 0
    return gradients(policy)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_packing_does_not_show_in_a_methods_gradients(
    folder: Path, case: tuple[str, dict[str, Any]]
) -> None:
    method, more = case
    # Old log-probs are asked for, as in a step of several updates.
    settings = config(method=method, **SMALL, mini_batch_prompts=1, **more)
    policy, other = policy_of(folder, **SMALL), policy_of(folder, **SMALL)
    jolt(other, 0.1, seed=4)
    start_ema(policy)
    outcomes = []
    both = (policy, other)
    weights = {name: p.detach().clone() for name, p in policy.trained}
    for tries, budget in ((False, 1), *((True, b) for b in BUDGETS)):
        budgeted = settings.model_copy(update={"tokens_per_batch": budget})
        with torch.no_grad():
            for name, parameter in policy.trained:
                parameter.copy_(weights[name])
        with laid_out(both, tries=tries):
            step = prepared(policy, other, budgeted)
            jolt(policy, 0.02, seed=3)
            outcomes.append(grads_of(policy, step, budgeted))
    for one in outcomes[1:]:
        assert_close(one, outcomes[0])
