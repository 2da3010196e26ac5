"""soulkit's contenders: the shared model, one optimizer step, sampling."""

from __future__ import annotations

import asyncio
import itertools
import json
import string
from pathlib import Path
from typing import Any

import torch
from _cases import VOCABULARY, Row
from _processes import CLOCKS, Json, Versions, serve
from safetensors.torch import save_file

from soulkit.models.local.footprint import footprint, free_bytes
from soulkit.models.local.tiny import build_tiny
from soulkit.train.config import TrainConfig
from soulkit.train.memory import choose_pass
from soulkit.train.model.policy import Policy, load_policy
from soulkit.train.model.prepare import Prepared, log_probs
from soulkit.train.model.update import Tally, update
from soulkit.train.objectives.sequences import Span, TrainSequence
from soulkit.types import Call, Sampling, Segment

WIDE_OPEN = 1e9
"""A gradient norm that is never reached, so that gradients are compared unclipped."""


class Make:
    """Saves `model` and `adapter` to a folder; the adapter is not zero, so all gradients exist."""

    def __init__(self, spec: Json) -> None:
        self.folder = Path(spec["folder"])

    def run(self, request: Json) -> Json:
        letters = string.ascii_lowercase[:16]
        words = ["".join(w) for w in itertools.product(letters, repeat=3)]
        base = self.folder / "model"
        build_tiny(base, words[: VOCABULARY - _smallest()], size="5m", max_context=8192)
        policy = load_policy(_config({}, base, None), base)
        random_ = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, parameter in policy.trained:
                parameter.add_(torch.randn(parameter.shape, generator=random_) * 0.02)
        policy.save(self.folder / "adapter")
        trained = sum(p.numel() for _, p in policy.trained)
        everything = sum(p.numel() for p in policy.model.parameters())
        return {"parameters": everything - trained, "trained": trained}


def _smallest() -> int:
    from soulkit.models.local.tiny import tiny_tokenizer

    return len(tiny_tokenizer(["abc"])) - 1


def _config(changes: Json, base: Path, adapter: Path | None) -> TrainConfig:
    settings: dict[str, Any] = {
        "method": "grpo", "model": str(base), "tasks": {"tomi": 1.0}, "device": "cpu",
        "adapter": None if adapter is None else str(adapter), "max_grad_norm": WIDE_OPEN,
    }  # fmt: skip
    return TrainConfig.model_validate(settings | changes)


def _policy(spec: Json) -> tuple[Policy, TrainConfig]:
    torch.set_num_threads(spec["threads"])
    base, adapter = Path(spec["folder"]) / "model", Path(spec["folder"]) / "adapter"
    config = _config(spec.get("settings", {}), base, adapter)
    choice = choose_pass(config, footprint(str(base)), "cpu", free_bytes("cpu"))
    policy = load_policy(config, base, choice)
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return policy, config


class Step:
    """Old log-probs and one optimizer update on the sequences of a file."""

    def __init__(self, spec: Json) -> None:
        self.clock = spec["clock"]
        self.policy, self.config = _policy(spec)
        self.sequences = [_sequence(row) for row in json.loads(Path(spec["rows"]).read_text())]
        parameters = [p for _, p in self.policy.trained]
        self.optimizer = torch.optim.AdamW(parameters, lr=self.config.lr)

    def run(self, request: Json) -> Json:
        clock = CLOCKS[self.clock]
        start = clock()
        spans = [s.span for s in self.sequences]
        old = log_probs(self.policy, spans, self.config.tokens_per_batch)
        middle = clock()
        prepared = Prepared(sequences=self.sequences, old=old, weights=None, base=None)
        chosen = range(len(self.sequences))
        step = update(self.policy, self.optimizer, prepared, chosen, self.config, Tally())
        end = clock()
        if "gradients" in request:
            gradients = {n: p.grad for n, p in self.policy.trained if p.grad is not None}
            save_gradients(gradients, request["gradients"])
        return {"old": middle - start, "step": end - middle, "loss": step.loss}


def save_gradients(gradients: dict[str, torch.Tensor], path: str) -> None:
    """Save gradients under names that do not depend on the adapter's name."""
    plain = {n.replace(".policy.", "."): g.contiguous() for n, g in gradients.items()}
    save_file(plain, path)


def _sequence(row: Row) -> TrainSequence:
    trained = [False] * len(row["ids"])
    for start, end in row["trained"]:
        trained[start:end] = [True] * (end - start)
    example, part = f"x{row['example']}", row["part"]
    group = (example, "actor", *(("feedback",) if part == "refined" else ()))
    return TrainSequence(
        Span(tuple(row["ids"]), tuple(trained), ()), part, example, group,
        f"{row['rollout']}/{'draft' if part == 'draft' else 'refined'}",
        row["reward"], advantage=row["advantage"],
    )  # fmt: skip


class Compare:
    """The difference of two gradient files: of all tensors as one vector, and of the worst one."""

    def __init__(self, spec: Json) -> None:
        self.wanted = spec["wanted"]

    def run(self, request: Json) -> Json:
        from safetensors.torch import load_file

        expected, actual = load_file(self.wanted), load_file(request["found"])
        if expected.keys() != actual.keys():
            raise ValueError(f"other tensors: {sorted(expected.keys() ^ actual.keys())[:4]}")
        off = {n: float((actual[n] - w).norm()) for n, w in expected.items()}
        size = {n: float(w.norm()) for n, w in expected.items()}
        whole = sum(v * v for v in off.values()) / sum(v * v for v in size.values())
        return {"whole": whole**0.5, "worst": max(off[n] / size[n] for n in off)}


class Sample:
    """`samples` replies to one prompt of `prompt` tokens through `Policy.sampler`."""

    def __init__(self, spec: Json) -> None:
        self.spec, self.clock = spec, spec["clock"]
        self.policy, _ = _policy(spec)
        self.model = self.policy.sampler(spec["samples"])
        words = [f"{a}{b}{c}" for a, b, c in itertools.product("abcdefgh", repeat=3)]
        short = self.model.prompt_length((Segment("user", words[0]),)) - 1
        text = " ".join(words[i % len(words)] for i in range(spec["prompt"] - short))
        self.context = (Segment("user", text),)
        self.prompt = self.policy.renderer.prompt_ids(self.context)
        if len(self.prompt) != spec["prompt"]:
            raise ValueError(f"the prompt has {len(self.prompt)} tokens")

    def run(self, request: Json) -> Json:
        clock = CLOCKS[self.clock]
        start = clock()
        wave = asyncio.run(self._wave(request["round"]))
        seconds = clock() - start
        if "prompt" in request:
            Path(request["prompt"]).write_text(json.dumps(self.prompt))
        return {"seconds": seconds, "tokens": wave}

    async def _wave(self, step: int) -> int:
        sampling = Sampling(max_tokens=self.spec["new"], seed=0)
        calls = [
            Call(role="actor", example_id="x", rollout=i, step=step)
            for i in range(self.spec["samples"])
        ]
        waits = [self.model.complete(self.context, sampling, call) for call in calls]
        return sum(len(done.token_ids) for done in await asyncio.gather(*waits))


if __name__ == "__main__":
    import peft  # noqa: F401 - import once, before forking
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    serve({"make": Make, "step": Step, "sample": Sample, "compare": Compare, "versions": Versions})
