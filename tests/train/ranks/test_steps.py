"""A step has the same numbers and moves the weights alike, however many ranks take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from soulkit.train.objectives.base import rollout_methods
from tests.support.rank_steps import Case, Taken, take_steps
from tests.support.ranks import run_ranks
from tests.support.training import policy_of, random_model

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.1, "entropy_coef": 0.05, "mini_batch_prompts": 1},
    "ditto": {"sampler_cap": 2.0, "mini_batch_prompts": 1, "denominator": "separate"},
    "ditto copies": {"only_copy": True},
    "ditto drafts": {"lambda_fb": 0.0, "max_grad_norm": 0.1},
    "rltf-sd": {"aux_weight": 0.5, "ratio": "sequence", "sampler_cap": 2.0},
    "erl": {"aux_weight": 0.5, "aggregation": "seq-mean-token-mean"},
    "critique-grpo": {"mini_batch_prompts": 1, "sampler_cap": 2.0},
    "self-rewarding": {"mini_batch_prompts": 1, "iteration_steps": 2},
    "sdpo-token": {"teacher": "ema", "ema_tau": 0.3, "mini_batch_prompts": 1},
    "sdpo-token+grpo": {"teacher": "base", "distill_centred": True, "sampler_cap": 2.0},
    "sdpo-logits": {"teacher": "ema", "ema_tau": 0.3, "mini_batch_prompts": 1},
    "sdpo-logits+grpo": {"kl_coef": 0.1, "entropy_coef": 0.05, "sampler_cap": 2.0},
    "opd": {"mini_batch_prompts": 1},
    "opd logits": {"opd_form": "logits", "divergence": "jsd", "divergence_tail": "bucket"},
    "sft": {},
}
"""Every method, with settings that go through every exchange between ranks."""


ACCEPTED = [name for name in METHODS if "logits" not in name]
"""Methods for split weights."""


def settings_of(name: str, **more: Any) -> dict[str, Any]:
    return {"method": name.partition(" ")[0], **METHODS[name], **more}


CASES = {
    **{f"{name}, packed": Case(settings_of(name)) for name in METHODS},
    "default pass": Case(settings_of("ditto", tokens_per_batch=None)),
    "known log-probs": Case(settings_of("ditto"), checked=True),
    "infinite loss": Case(settings_of("ditto", mini_batch_prompts=1), broken="y"),
    "resumed moments": Case(settings_of("ditto"), resumed=True),
    "resumed average": Case(settings_of("sdpo-token"), resumed=True),
    "conversations": Case(settings_of("sft", sft_prompt_weight=0.3), sources=True),
    **{f"{name}, plain": Case(settings_of(name, packing="off")) for name in METHODS},
    **{f"{name}, sharded": Case(settings_of(name, shard=True)) for name in ACCEPTED},
    **{f"{name}, sharded and plain": Case(settings_of(name, shard=True, packing="off"))
       for name in ("ditto", "sft")},
    "all weights": Case(settings_of("erl", full=True)),
    "all weights, sft": Case(settings_of("sft", full=True)),
    "checkpointed": Case(settings_of("grpo", activation_checkpointing="on")),
}  # fmt: skip


def test_every_method_has_a_case() -> None:
    assert {name.partition(" ")[0] for name in METHODS} == {*rollout_methods(), "sft"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a student and of a teacher."""
    folder = tmp_path_factory.mktemp("models")
    student = random_model(folder / "student")
    policy_of(student, move=0.1, full=True).save(folder / "teacher")
    return str(student), str(folder / "teacher")


Steps = Callable[[int], dict[str, Taken]]


@pytest.fixture(scope="module")
def steps(models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """The steps of all cases, taken by a number of ranks."""
    model, other = models
    cases = {name: replace(case, settings={**case.settings, "teacher_model": other})
             for name, case in CASES.items()}  # fmt: skip

    @cache
    def taken(size: int) -> dict[str, Taken]:
        if size == 1:
            return take_steps(cases, model)
        ended = run_ranks(size, tmp_path_factory.mktemp("ranks"), take_steps, cases, model)
        assert ended.codes == [0] * size, "\n".join(ended.errors)
        print(f"{size} ranks: {ended.seconds:.0f} s")
        return ended.result

    return taken


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_the_steps_of_one_process(steps: Steps, size: int, name: str) -> None:
    """The metrics of a step within 1e-6, the weights within 1e-4 of their change."""
    (lines, change, imbalance, skipped), expected = steps(size)[name], steps(1)[name]
    assert lines[0] == pytest.approx(expected.lines[0], rel=1e-6, abs=1e-6)
    assert lines[1] == pytest.approx(expected.lines[1], rel=1e-5, abs=1e-5)
    assert np.linalg.norm(change - expected.change) <= 1e-4 * np.linalg.norm(expected.change)
    assert np.abs(expected.change).max() > 1e-4
    assert skipped == expected.skipped and any(skipped) is bool(CASES[name].broken)
    assert 1 <= imbalance[1] < size  # several ranks had packs
    if not CASES[name].resumed:
        assert imbalance[0] == pytest.approx(imbalance[1])  # of equal steps
