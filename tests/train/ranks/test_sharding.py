"""Weights that are split over the ranks (FSDP2) train as in one process."""

from __future__ import annotations

from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from soulkit.errors import ConfigError
from soulkit.models.local.footprint import footprint
from soulkit.train.config import TrainConfig
from soulkit.train.memory import AT_ONCE, PassChoice, training_memory
from soulkit.train.model.policy import Policy
from soulkit.train.model.teacher import teacher_of
from soulkit.train.objectives.base import make_objective
from soulkit.train.ranks.follower import load_student, load_teachers, make_optimizer, same_state
from soulkit.train.ranks.world import RankError, alone, on_all_ranks, ranks
from soulkit.train.run import refuse_untrainable
from soulkit.train.sft.steps import imitate, nll_sums
from soulkit.train.state.checkpoint import Position, load_checkpoint, save_checkpoint
from soulkit.train.state.metrics import StepLine
from soulkit.train.step import learn
from tests.support.methods import ROLLOUTS, SMALL, batch_of
from tests.support.ranks import run_ranks
from tests.support.shapes import build
from tests.support.training import config, jolt, random_model

SPLIT = {"shard": True, "device": "cpu", "tokens_per_batch": 24, "lr": 1e-3}
CASES: dict[str, dict[str, Any]] = {
    "packed": {"method": "ditto", "sampler_cap": 2.0, "mini_batch_prompts": 1},
    "plain": {"method": "ditto", "packing": "off", "mini_batch_prompts": 1},
    "recomputed": {"method": "ditto", "kl_coef": 0.1, "activation_checkpointing": "on"},
    "average": {"method": "sdpo-token", "teacher": "ema", "mini_batch_prompts": 1},
    "teacher": {"method": "opd", "mini_batch_prompts": 1},
    "fused": {"method": "ditto", "fused": "modules"},
    **({"nf4": {"method": "ditto", "quantize": "nf4"}} if find_spec("bitsandbytes") else {}),
}
FULL = {**SPLIT, "method": "sft", "full": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of a model whose output layer shares the embeddings, and of one with its own output
    layer and a vision tower."""
    folder = tmp_path_factory.mktemp("models")
    words = [f"{a}{b}" for a in ascii_lowercase for b in ascii_lowercase]
    other = build("qwen3-vl", folder / "visual", words)
    return [str(random_model(folder / "tied")), str(other)]


@pytest.mark.slow
def test_split_weights_train_as_in_one_process(models: list[str], tmp_path: Path) -> None:
    """The metrics of the first step within 1e-6, the change of the weights within 1e-4. With all
    weights trained, checkpoints resume on other numbers of ranks."""
    ended = run_ranks(2, tmp_path, train_all, models, tmp_path)
    assert ended.result, "\n".join(ended.errors)
    taken, unequal = ended.result
    for name, (got, expected) in taken.items():
        assert got["share"] < 0.75 < expected["share"] == 1, name
        for key, value in expected["numbers"].items():
            near = 1e-6 if key[0] == "0" else 1e-5  # AdamW amplifies rounding
            assert got["numbers"][key] == pytest.approx(value, rel=near, abs=near), (name, key)
        off = np.linalg.norm(got["change"] - expected["change"])
        assert off < 1e-4 * np.linalg.norm(expected["change"]), name
    assert unequal and ended.codes != [0, 0], "unequal numbers of passes must end the job"
    again = run_ranks(3, tmp_path, resume_all, models, tmp_path)
    assert again.codes == [0, 0, 0], "\n".join(again.errors)
    for name, losses in again.result.items():
        whole = taken[name][1]["numbers"]
        assert losses == pytest.approx([whole["second"], whole["valid"]], rel=1e-5)
        assert resume(name, tmp_path) == pytest.approx(losses, rel=1e-5), "in one process"


# --- what rank 0 runs -----------------------------------------------------------------------------


def train_all(models: list[str], folder: Path) -> tuple[dict[str, Any], str]:
    """Case → its numbers on all ranks and on this one alone; the error without empty passes."""
    taken = {}
    for model in models:
        for name in CASES if model == models[0] else ("packed", "recomputed"):
            case = config(**SMALL | SPLIT | CASES[name], teacher_model=models[0])
            taken[f"{name}, {Path(model).name}"] = twice(rollout_steps, case, model)
        taken[model] = twice(supervised_steps, config(**FULL, model=model), model, folder)
    case = config(**SMALL | SPLIT | CASES["packed"])
    policy = student(case, models[0])
    without_empty_passes()
    try:
        learn(policy, make_optimizer(policy, case), batch_of(case, ROLLOUTS), case)
    except (RuntimeError, RankError) as error:
        return taken, repr(error)
    return taken, ""


@on_all_ranks
def without_empty_passes() -> None:
    from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=10), _get_default_group())
    Policy.empty_pass = lambda self: None


def twice(take: Any, *args: Any) -> tuple[Any, Any]:
    """What `take` returns on all ranks, and on this one alone."""
    with alone():
        expected = take(*args)
    return take(*args), expected


def student(case: TrainConfig, model: str) -> Policy:
    again = case.activation_checkpointing == "on"
    return load_student(case, model, PassChoice(checkpointing=again, tokens=64, memory=None))


def rollout_steps(case: TrainConfig, model: str) -> dict[str, Any]:
    """Two steps of a method."""
    policy, objective = student(case, model), make_objective(case)
    teacher = teacher_of(case, objective, policy, load_teachers(case, objective, policy))
    optimizer = make_optimizer(policy, case)
    jolt(policy, 0.05, seed=1)
    same_state(policy, optimizer)
    start, numbers = flat(policy), dict[str, Any]()
    for step in range(2):
        learned = learn(policy, optimizer, batch_of(case, ROLLOUTS), case, teacher)
        line = StepLine(step=step, learned=learned).to_json()
        numbers |= {f"{step}/{name}": value for name, value in line.items() if "ranks" not in name}
    return {"numbers": numbers, "change": flat(policy) - start, "share": share(policy)}


def supervised_steps(case: TrainConfig, model: str, folder: Path) -> dict[str, Any]:
    """Two steps on all weights, with a checkpoint between them; the saved weights."""
    policy, out = student(case, model), folder / Path(model).name / str(ranks().size)
    optimizer, start = make_optimizer(policy, case), load_file(Path(model) / "model.safetensors")
    first = imitate(policy, optimizer, spans(), case)
    save_checkpoint(out, policy, optimizer, Position(1, 0, 0, policy.version()))
    second = imitate(policy, optimizer, spans(), case)
    policy.save(out / "model")
    saved = load_file(out / "model" / "model.safetensors")
    assert saved.keys() == start.keys()
    numbers = {"0/loss": first.loss, "0/norm": first.grad_norm, "second": second.loss,
               "valid": nll_sums(policy, spans(), 24).estimate().mean}  # fmt: skip
    change = np.concatenate([(saved[name] - start[name]).flatten() for name in start])
    return {"numbers": numbers, "change": change, "share": share(policy)}


def resume_all(models: list[str], folder: Path) -> dict[str, list[Any]]:
    return {model: resume(model, folder) for model in models}


def resume(model: str, folder: Path) -> list[Any]:
    """The loss of the second step, and after it, from the checkpoint that two ranks wrote."""
    case = config(**FULL, model=model)
    policy = student(case, model)
    optimizer = make_optimizer(policy, case)
    load_checkpoint(folder / Path(model).name / "2" / "step_000001", policy, optimizer)
    same_state(policy, optimizer)
    return [
        imitate(policy, optimizer, spans(), case).loss,
        nll_sums(policy, spans(), 24).estimate().mean,
    ]


def spans() -> list[Any]:
    return [one.span for one in batch_of(config(**SMALL), ROLLOUTS)]


def flat(policy: Policy) -> np.ndarray:
    return torch.cat([p.detach().flatten() for _, p in policy.trained]).numpy()


def share(policy: Policy) -> float:
    """Share of the weights that this rank has."""
    here = (getattr(p, "to_local", lambda p=p: p)().numel() for p in policy.model.parameters())
    return sum(here) / sum(p.numel() for p in policy.model.parameters())


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "ditto"},
        {"method": "sdpo-logits", "engine": "vllm"},
        {"method": "opd", "engine": "vllm", "opd_form": "logits", "teacher_model": "a/b"},
        {"method": "sft", "deterministic": True},
        {"method": "sft", "fused": "compile"},
        {"method": "sft", "retention": True},
        {"method": "sft", "probe_every": 2},
        {"method": "sft", "eval_every": 2, "eval_task": "tomi"},
        {"method": "sft", "eval_every": 2, "show_samples": 2},
        {"method": "sft", "objective": "mixsd", "tasks": {}, "corpora": [{"path": "facts.jsonl"}]},
    ],
    ids=str,
)
def test_settings_that_need_a_whole_model_are_refused(settings: dict[str, Any]) -> None:
    chosen = {"device": "cpu", "gpus": 2, **settings}
    with pytest.raises(ConfigError, match="--shard does not work with"):
        refuse_untrainable(config(**chosen, shard=True))
    refuse_untrainable(config(**chosen))
    refuse_untrainable(config(**chosen | {"gpus": 1}, shard=True))  # one rank has all weights


@pytest.mark.parametrize("full", [False, True])
def test_a_plan_divides_split_weights(full: bool) -> None:
    model = footprint("Qwen/Qwen3-8B")
    assert model is not None
    settings = config(method="sft", full=full, gpus=4)
    terms: dict[str, Any] = {"tokens": 4096, "checkpointing": True, "kind": "cuda"}
    whole = training_memory(settings, model, **terms)
    split = training_memory(settings.model_copy(update={"shard": True}), model, **terms)
    # Counted on the meta device: the output layer, the adapter and its AdamW state stay whole.
    counted = {False: (5.03e9, 1.397e9), True: (0, 40.23e9)}[full]
    layers = AT_ONCE * (8 if full else 2) * (model.parameters - 151_936 * 4096) // 36
    assert (split.weights - layers, split.trained) == pytest.approx(counted, rel=1e-2, abs=1e7)
    assert (whole.activations, whole.logits) == (split.activations, split.logits)
