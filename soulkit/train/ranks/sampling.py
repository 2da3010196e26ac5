"""Local sampling on all ranks: each one generates a part of every batch with its own weights.

Rank 0 forms the batches, which may be as many times larger as there are ranks, and records the
replies. The random numbers of a reply depend on its call, not on its rank, so replies are those of
one process, up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from soulkit.models.local.batching import EXPECTED, GenerationRequest
from soulkit.models.local.sampler import LocalModel
from soulkit.train.ranks.world import on_all_ranks, ranks
from soulkit.types import Completion

PART = "sampler"
"""Name of a rank's sampler for its parts among the objects that every rank has."""
LOOK_S = 0.5
"""Seconds between checks whether rank 0 still wants the replies."""


class SplitModel(LocalModel):
    """A LocalModel on rank 0 whose batches all ranks generate."""

    def __init__(self, policy: Any, **settings: Any) -> None:
        super().__init__(policy.model, policy.tokenizer, **settings)
        self.policy, self.copies = policy, ranks().size

    def _generate(self, batch: list[GenerationRequest], version: str) -> list[Completion]:
        alone: Any = {"future": None, "participant": None}  # objects of this process
        plain = [replace(request, **alone) for request in batch]
        parts = generate_parts(self.policy, plain, version, self.batch_size, self.deterministic)
        if errors := [part for part in parts if isinstance(part, str)]:
            raise RuntimeError("; ".join(errors))
        return [reply for part in parts for reply in part if isinstance(reply, Completion)]

    async def close(self) -> None:
        """As in LocalModel. If nobody waits for the running batch, it ends on all ranks."""
        await super().close()
        running = [request for queue in self._queues.values() for request in queue.serving]
        if running and all(request.future.done() for request in running):
            ranks().cancel()


def rank_sampler(policy: Any, **settings: Any) -> LocalModel:
    """A sampler with the weights of the Policy `policy`, on all ranks if there are several."""
    if ranks().size > 1:
        return SplitModel(policy, **settings)
    return LocalModel(policy.model, policy.tokenizer, **settings)


class _Part(LocalModel):
    """The sampler of one rank, for its part of a batch."""

    _due = 0.0
    """When to check next."""

    def _give_up(self, batch: list[GenerationRequest]) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + LOOK_S
            if ranks().cancelled():
                raise RuntimeError("the model was closed")


@on_all_ranks
def generate_parts(
    policy: Any, batch: list[GenerationRequest], version: str, most: int, deterministic: bool
) -> list[list[Completion] | str]:
    """The replies to each rank's part of `batch`, in order, or its error."""
    world = ranks()
    part = world.shared.get(PART)
    if part is None or part.model is not policy.model:
        part = _Part(policy.model, policy.tokenizer, max_context=policy.max_context)
        world.shared[PART] = part
    part.deterministic = deterministic
    mine = batch[divide_rows([one.size(EXPECTED) for one in batch], world.size, most)[world.rank]]
    done: list[Completion] | str
    try:
        with torch.cuda.device_of(next(policy.model.parameters())):  # not yet set in this thread
            done = part._generate(mine, version) if mine else []
    except Exception as error:  # noqa: BLE001 - the others wait for this rank, rank 0 raises it
        done = f"{type(error).__name__} on rank {world.rank}: {error}"
    return world.gather(done)


def divide_rows(work: Sequence[float], parts: int, most: int) -> list[slice]:
    """`parts` slices of nearly equal `work` and at most `most` rows. They are consecutive, so that
    rows with the same prompt stay together."""
    middles, edges = np.cumsum(work) - np.asarray(work) / 2, [0]
    for part in range(1, parts):
        even = int(np.searchsorted(middles, sum(work) * part / parts))
        least = max(edges[-1], len(work) - (parts - part) * most)
        edges.append(min(max(even, least), edges[-1] + most))
    return [slice(a, b) for a, b in pairwise([*edges, len(work)])]
