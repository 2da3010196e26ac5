"""Ranks of soulkit: old log-probs and one update on the sequences of a file.

Rank 0 leads and the other ranks follow, as in `soul train`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from _processes import Json, Versions, forget_peak, memory, place_rank, sent_bytes, serve
from _soulkit_side import Compare, Make, _policy, _sequence, save_gradients

from soulkit.train.model.prepare import Prepared, log_probs
from soulkit.train.model.update import Tally, update
from soulkit.train.ranks.follower import follow, leading, make_optimizer
from soulkit.train.ranks.launch import place_in_job
from soulkit.train.ranks.world import on_all_ranks, ranks


class Rank:
    """One process of a job."""

    def __init__(self, spec: Json) -> None:
        self.spec = spec
        place_rank(spec)

    def run(self, request: Json) -> Json:
        if place_in_job()[0]:
            follow()
            return {}
        with leading():
            return measured(self.spec)


@on_all_ranks
def measured(spec: Json) -> Json:
    """The numbers of every rank in every run, and the bytes between ranks in the last one."""
    world = ranks()
    world.sharded = world.size > 1 and spec["settings"].get("shard", False)
    policy, config = _policy(spec)
    optimizer = make_optimizer(policy, config)
    sequences = [_sequence(row) for row in json.loads(Path(spec["rows"]).read_text())]
    spans, chosen = [s.span for s in sequences], range(len(sequences))
    runs: list[list[Any]] = []
    for _ in range(spec["runs"]):
        world.imbalance()
        world.gather(None)
        wire, start = sent_bytes(), forget_peak()
        cpu, wall = time.process_time(), time.perf_counter()
        old = log_probs(policy, spans, config.tokens_per_batch)
        prepared = Prepared(sequences=sequences, old=old, weights=None, base=None)
        update(policy, optimizer, prepared, chosen, config, Tally())
        peak = memory("VmHWM")
        mine = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall,
                "grown": peak - start, "peak": peak, "imbalance": world.imbalance()}  # fmt: skip
        runs.append(world.gather(mine))
        wire = sent_bytes() - wire
        if world.rank == 0 and len(runs) == 1:  # the weights of later runs have moved
            gradients = {n: p.grad for n, p in policy.trained if p.grad is not None}
            save_gradients(gradients, spec["gradients"])
    return {"runs": runs, "wire": wire}


if __name__ == "__main__":
    import peft  # noqa: F401 - import once, before forking
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    serve({"rank": Rank, "make": Make, "compare": Compare, "versions": Versions})
