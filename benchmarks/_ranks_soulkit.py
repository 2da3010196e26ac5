"""One rank of soulkit: old log-probs and one update on the sequences of a file.

    python -c "import _ranks_soulkit; _ranks_soulkit.main()" SPEC

Rank 0 leads and the other ranks follow, as in `soul train`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _processes import Json, Versions, forget_peak, memory
from _soulkit_side import _config, _policy, _sequence, save_gradients

from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import Prepared, log_probs
from soulkit.train.model.update import Tally, update
from soulkit.train.ranks.follower import follow, leading
from soulkit.train.ranks.world import is_follower, on_all_ranks, ranks


def main() -> None:
    spec = json.loads(sys.argv[1])
    if is_follower():
        follow()
        return
    base, adapter = Path(spec["folder"]) / "model", Path(spec["folder"]) / "adapter"
    with leading():
        report = measured(spec)
    print(json.dumps(report | {"versions": Versions({}).run({})}))


@on_all_ranks
def measured(spec: Json) -> Json:
    """The numbers of every rank in every run, and the bytes between ranks in the last one."""
    policy, config = _policy(spec)
    sequences = [_sequence(row) for row in json.loads(Path(spec["rows"]).read_text())]
    optimizer = torch.optim.AdamW([p for _, p in policy.trained], lr=config.lr)
    runs, wire = [], 0
    for _ in range(spec["runs"]):
        ranks().gather(None)
        ranks().imbalance()
        wire, start = sent_bytes(), forget_peak()
        cpu, wall = time.process_time(), time.perf_counter()
        old = log_probs(policy, [s.span for s in sequences], config.tokens_per_batch)
        prepared = Prepared(sequences=sequences, old=old, weights=None, base=None)
        update(policy, optimizer, prepared, range(len(sequences)), config, Tally())
        peak = memory("VmHWM")
        mine = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall,
                "grown": peak - start, "peak": peak, "imbalance": ranks().imbalance()}  # fmt: skip
        runs.append(ranks().gather(mine))
        wire = sent_bytes() - wire
    if ranks().rank == 0:
        gradients = {n: p.grad for n, p in policy.trained if p.grad is not None}
        save_gradients(gradients, spec["gradients"])
    return {"runs": runs, "wire": wire}
