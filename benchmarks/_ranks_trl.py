"""Ranks of TRL's trainer with accelerate (DistributedDataParallel), without soulkit.

Each rank gets an equal part of the rows, as `GRPOTrainer` divides them after generation. The work
and the settings are those of `_trl_side.py`.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _processes import Json, forget_peak, memory, place_rank, sent_bytes, serve
from _trl_side import WIDE_OPEN, Versions, _batch, _trainer
from accelerate import PartialState
from safetensors.torch import save_file


class Rank:
    """One process of a job."""

    def __init__(self, spec: Json) -> None:
        self.spec = spec
        place_rank(spec)

    def run(self, request: Json) -> Json:
        report = measured(self.spec)
        if dist.is_initialized():
            dist.destroy_process_group()
        return report


def measured(spec: Json) -> Json:
    """The numbers of every rank in every run, and the bytes between ranks in the last one."""
    state = PartialState(cpu=True)
    rows = json.loads(Path(spec["rows"]).read_text())
    new = max(len(row["ids"]) - row["trained"][0][0] for row in rows)
    micro, count = spec["micro"], len(rows) // state.num_processes
    trainer = _trainer(spec, micro, count // micro, new)
    trainer.create_optimizer()
    model = trainer.accelerator.prepare(trainer.model) if state.num_processes > 1 else trainer.model
    batch = _batch(rows, int(trainer._tokenizer.pad_token_id))
    start = state.process_index * count
    mine = {k: v if v.ndim == 0 else v[start : start + count] for k, v in batch.items()}
    sides, wire = [], 0
    for _ in range(spec["runs"]):
        _everywhere(None, state.num_processes)
        wire = sent_bytes()
        sides.append(_everywhere(_measured(trainer, model, mine, micro), state.num_processes))
        wire = sent_bytes() - wire
        if state.process_index == 0 and len(sides) == 1:  # the weights of later runs have moved
            named = trainer.model.named_parameters()
            gradients = {n: p.grad for n, p in named if p.grad is not None}
            plain = {n.replace(".default.", "."): g for n, g in gradients.items()}
            save_file(plain, spec["gradients"])
    return {"runs": sides, "wire": wire}


def _measured(trainer: Any, model: Any, batch: dict[str, torch.Tensor], micro: int) -> Json:
    """Old log-probs and the gradients of one update on this rank."""
    before = forget_peak()
    cpu, wall = time.process_time(), time.perf_counter()
    with torch.no_grad():
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        old, *_ = trainer._get_per_token_logps_and_entropies(
            model, ids, mask, batch["completion_ids"].size(1), batch_size=micro
        )
    whole, count = {**batch, "old_per_token_logps": old}, len(old)
    trainer.optimizer.zero_grad()
    for start in range(0, count, micro):
        inputs = {k: v if v.ndim == 0 else v[start : start + micro] for k, v in whole.items()}
        last = start + micro >= count
        with nullcontext() if last else trainer.accelerator.no_sync(model):
            trainer.training_step(model, inputs, None)
    trainer.accelerator.clip_grad_norm_(model.parameters(), WIDE_OPEN)
    trainer.optimizer.step()
    peak = memory("VmHWM")
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall,
            "grown": peak - before, "peak": peak}  # fmt: skip


def _everywhere(mine: Any, size: int) -> list[Any]:
    every: list[Any] = [mine] * size
    if size > 1:
        dist.all_gather_object(every, mine)
    return every


if __name__ == "__main__":
    import datasets  # noqa: F401 - import once, before forking
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    import trl.trainer.grpo_trainer  # type: ignore[import-not-found, unused-ignore]  # noqa: F401

    serve({"rank": Rank, "versions": Versions})
