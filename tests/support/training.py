"""Helpers for training tests: a small real model, a policy on it, and handmade sequences."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from soulkit.models.local.tiny import build_tiny
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy, load_policy
from soulkit.train.objectives.sequences import Part, Span, TrainSequence
from soulkit.train.run import tiny_model_texts
from soulkit.train.setup.data import load_training_data
from soulkit.types import Example

# Two threads of one machine that others use are slower than one; runs read the variable.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
"""Its files beside saved weights."""

CTRL_C = KeyboardInterrupt
"""Raised by this name: `raise KeyboardInterrupt` outside soulkit is an error of the user's code."""
SHARP = 1.6
"""Factor on the random weights, so that the model's choices are far from uniform."""


def config(**settings: Any) -> TrainConfig:
    plain: dict[str, Any] = {"method": "ditto", "model": "unused", "tasks": {"tomi": 1.0}}
    return TrainConfig.model_validate(plain | settings)


def rows(name: str, count: int) -> tuple[Task, list[Example]]:
    """Generated rows of a task."""
    settings = config(method="sft", tasks={name: 1.0}, data={name: f"synth:{count}"})
    pool = load_training_data(settings).pool
    return load_registry().task(name), [example for _, example in pool]


def random_model(folder: Path, max_context: int = 1024) -> Path:
    """A model with random weights and the vocabulary of tomi and secret_keeper; it is always the
    same and is built once per test run."""
    shutil.copytree(_made_model(max_context), folder, dirs_exist_ok=True)
    return folder


@cache
def _made_model(max_context: int) -> Path:
    folder = Path(tempfile.mkdtemp()) / "model"
    atexit.register(shutil.rmtree, folder.parent)
    data = {"tomi": "synth:40", "secret_keeper": "synth:30"}
    settings = config(method="sft", tasks={"tomi": 1.0, "secret_keeper": 1.0}, data=data)
    build_tiny(folder, tiny_model_texts(load_training_data(settings).pool), max_context=max_context)
    weights = load_file(folder / "model.safetensors")
    sharp = {k: v * SHARP if v.ndim == 2 else v for k, v in weights.items()}
    save_file(sharp, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def policy_of(folder: Path, *, move: float = 0.05, **settings: Any) -> Policy:
    """A policy with a non-zero adapter: its B factors are random with scale `move`."""
    policy = load_policy(config(**settings), folder)
    jolt(policy, move, seed=1)
    return policy


def jolt(policy: Policy, width: float, seed: int) -> None:
    """Change every trained weight a little."""
    random_ = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.trained:
            noise = torch.randn(parameter.shape, generator=random_) * width
            parameter.add_(noise.to(parameter.device))


def span(rng: random.Random, prompt: Sequence[int], replies: Sequence[int]) -> Span:
    """A prompt and replies of the given lengths, separated by untrained turns of three ids."""
    ids, trained = list(prompt), [False] * len(prompt)
    for index, length in enumerate(replies):
        between = 3 if index else 0
        ids += [rng.randrange(300, 400) for _ in range(between + length)]
        trained += [False] * between + [True] * length
    sampler = tuple(-rng.random() * 4 for _ in range(sum(replies)))
    return Span(tuple(ids), tuple(trained), sampler)


def sequence(
    spanned: Span, part: Part, example: str, rollout: int, reward: float | None, weight: float = 1.0
) -> TrainSequence:
    kind = "draft" if part == "draft" else "refined"
    group = (example, "reader", *(("feedback",) if part == "refined" else ()))
    return TrainSequence(spanned, part, example, group, f"{rollout}/{kind}", reward, weight)


def step_of(seed: int = 0, examples: int = 3, drafts: int = 3) -> list[TrainSequence]:
    """Drafts, copies and refined rollouts of mixed lengths, some with two turns."""
    rng, sequences = random.Random(seed), []
    for number in range(examples):
        name = f"x{number}"
        bare = [rng.randrange(300, 400) for _ in range(4 + 5 * number)]
        hint = [rng.randrange(300, 400) for _ in range(6)]
        for rollout in range(drafts):
            turns = [rng.randrange(2, 7) for _ in range(rng.choice((1, 1, 2)))]
            draft = span(rng, bare, turns)
            sequences.append(sequence(draft, "draft", name, rollout, rng.random()))
            refined = span(rng, [*bare, *hint], turns)
            reward = rng.random()
            tail = len(bare) + len(hint)
            copy = Span((*bare, *refined.ids[tail:]), refined.trained[len(hint) :], refined.sampler)
            sequences.append(sequence(copy, "copy", name, rollout, reward))
            sequences.append(sequence(refined, "refined", name, rollout, reward))
    return sequences


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in policy.trained}


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], rel: float = 1e-5) -> None:
    """Per tensor ‖a − b‖ ≤ rel · ‖b‖, with an absolute floor of 1e-8."""
    assert a.keys() == b.keys()
    for name, expected in b.items():
        off = float((a[name] - expected).norm())
        assert off <= rel * float(expected.norm()) + 1e-8, (name, off, float(expected.norm()))


def soul(*arguments: object) -> int:
    """Run the command line in this process and return its exit code."""
    from soulkit.cli.app import main

    return main([str(a) for a in arguments])


def warm_model(out: Path) -> Path:
    """A tiny model that has learned the answer format with `soul train sft`."""
    data = ("--data", "tomi=synth:200", "--data", "secret_keeper=synth:40")
    code = soul(
        "train", "sft", "--model", "tiny", "--full", "--task", "tomi,secret_keeper", *data,
        "--steps", 40, "--batch", 12, "--lr", 3e-3, "--set", "lr_schedule=constant",
        "--set", "warmup_steps=0", "--out", out,
    )  # fmt: skip
    assert code == 0
    return out


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without measured times."""
    from soulkit.runs.jsonl import read_jsonl

    lines = []
    for line in read_jsonl(run / "metrics.jsonl"):
        lines.append({k: v for k, v in line.items() if not k.startswith("time/")})
    return lines
