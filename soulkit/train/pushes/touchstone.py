"""Proof that servers compute with the weights that are trained: both read the same prompts.

A server that lists an adapter need not use it, and the hash of a file says nothing of what is
served. So servers are asked what the tokens of some prompts of the run are worth under the name of
the adapter, and the trainer's own forward pass is the measure. In float32 the two agree to `EXACT`
nats. In narrower numbers they do not, and one step of training moves less than they differ: there
the answer shows that the model is the right one, and no more. That adapters reach the computation
at all is therefore shown once, before the first push, in whatever numbers: a *probe adapter*, whose
B factors are drawn at random and large, moves a token in the trainer by more than `MOVED` nats, and
has to move the servers alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from soulkit.models.vllm.verify import EXACT, GROSS, Logprobs
from soulkit.models.vllm.verify import Distance as Distance
from soulkit.train.forward.policy import Policy
from soulkit.train.forward.prepare import log_probs
from soulkit.train.material.sampling import TaskRows
from soulkit.train.objectives.sequences import Span

PROMPTS = 3
"""Prompts of the run that are read."""
LONGEST = 1024
"""Tokens of such a prompt at most: its last ones."""
MOVED = 1.0
"""Nats by which the probe adapter has to move a token."""
MISSED = 0.25
"""Share of the probe's mean movement by which a server may be off on average."""
SMALLEST, DOUBLINGS = 0.05, 6
"""Spread of the probe's B factors at first, and how often it may be doubled."""


@dataclass(frozen=True, slots=True)
class Touchstone:
    """What the trainer says of a few prompts."""

    policy: Policy
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, policy: Policy, pool: TaskRows, limit: int | None) -> Touchstone:
        """Prompts of the run's rows, of which a context of `limit` tokens holds the end."""
        most = LONGEST if limit is None else min(LONGEST, limit - 1)
        prompts = []
        for task, example in pool[:: max(len(pool) // PROMPTS, 1)][:PROMPTS]:
            context = next(iter(task.previews(example).values()))
            prompts.append(tuple(policy.renderer.prompt_ids(context)[-most:]))
        return cls(policy, tuple(dict.fromkeys(prompts)))

    def logprobs(self) -> list[list[float]]:
        """By the trained weights as they are now."""
        spans = [Span(ids, (False, *[True] * (len(ids) - 1)), ()) for ids in self.prompts]
        with _at_temperature(self.policy, 1.0):
            return [part.tolist() for part in log_probs(self.policy, spans, None)]

    @property
    def exact(self) -> bool:
        """Whether server and trainer compute in float32."""
        return self.policy.computed == "float32"

    @property
    def bound(self) -> str:
        """What `passes` asks for, in words."""
        return f"{EXACT:g} nats at any token" if self.exact else f"{GROSS:g} nats on average"

    def passes(self, apart: Distance) -> bool:
        """Whether weights that are so far apart may be called the same."""
        return apart.largest <= EXACT if self.exact else apart.mean <= GROSS

    def probe(self) -> Probing:
        """The least probe adapter that moves the trainer by more than twice `MOVED`.

        One that moves it by less where none does so much: `passes` is then never true.
        """
        before = self.logprobs()
        probing = Probing(SMALLEST, before, before)
        for doubling in range(DOUBLINGS):
            spread = SMALLEST * 2**doubling
            with drawn_factors(self.policy, spread):
                probing = Probing(spread, before, self.logprobs())
            if 2 * MOVED < probing.moved.largest < math.inf:
                break
        return probing


@dataclass(frozen=True, slots=True)
class Probing:
    """A probe adapter: the spread of its B factors, and what the trainer says without and with."""

    spread: float
    before: Logprobs
    after: Logprobs

    @property
    def moved(self) -> Distance:
        return Distance.between(self.before, self.after)

    def passes(self, served: Logprobs) -> bool:
        """Whether a server was moved as the trainer was."""
        moved, apart = self.moved, Distance.between(self.after, served)
        return MOVED < moved.largest < math.inf and apart.mean <= MISSED * moved.mean


@contextmanager
def drawn_factors(policy: Policy, spread: float) -> Iterator[None]:
    """Within it the adapter's B factors are normal and `spread` wide, always the same ones; the
    weights are put back whatever happens."""
    factors = [parameter for name, parameter in policy.trained if ".lora_B." in name]
    before = [parameter.data for parameter in factors]
    draws = torch.Generator().manual_seed(len(factors))
    try:
        for parameter in factors:
            noise = torch.randn(parameter.shape, generator=draws) * spread
            parameter.data = noise.to(parameter.device, parameter.dtype)
        yield
    finally:
        for parameter, data in zip(factors, before, strict=True):
            parameter.data = data


@contextmanager
def _at_temperature(policy: Policy, temperature: float) -> Iterator[None]:
    usual = policy.temperature
    policy.temperature = temperature
    try:
        yield
    finally:
        policy.temperature = usual
