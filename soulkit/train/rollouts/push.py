"""The trained adapter on vLLM servers: written, loaded, proven to be there, sampled from.

    write pushes/NAME ──▶ load NAME on every server ──▶ prove it ──▶ let the name before fall idle,
                                                        unload it, delete its folder

A name and a folder are never used twice: a server has cached what it computed under an old name.
The folder stays as long as its name: a server whose loaded folder has vanished dies. The proof:
servers give the log-probs of some prompts under the adapter's name, and the trainer's own forward
pass is the measure, to `EXACT` nats in float32. In narrower numbers the two differ by more than a
step moves; so a *probe adapter* with large random B factors shows once, before the first push, that
adapters reach the computation. A push that cannot be proven ends the run.
"""

from __future__ import annotations

import math
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from soulkit.errors import ConfigError, SoulError
from soulkit.models.base import TrainedWeights
from soulkit.models.local.journal import Journal, JournalKey
from soulkit.models.local.loading import ADAPTER, save_adapter
from soulkit.models.vllm.adapters import (
    AdapterNotServed,
    Logprobs,
    NotArrived,
    prompt_logprobs,
    push_adapter,
    unload_adapter,
)
from soulkit.models.vllm.adapters import Distance as Distance
from soulkit.models.vllm.capabilities import EXACT, GROSS
from soulkit.models.vllm.client import ServerRefused
from soulkit.models.vllm.model import VllmModel
from soulkit.models.vllm.replicas import Replicas
from soulkit.reporting import Reporter
from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import log_probs
from soulkit.train.objectives.sequences import Span
from soulkit.train.setup.rows import TaskRows
from soulkit.train.state.checkpoint import remove_folder, replace_folder
from soulkit.types import Call, Completion, Sampling, Segment

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
class LogprobProbe:
    """What the trainer says of a few prompts."""

    policy: Policy
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, policy: Policy, pool: TaskRows, limit: int | None) -> LogprobProbe:
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

    def probe(self) -> ProbeAdapter:
        """The least probe adapter that moves the trainer by more than twice `MOVED`.

        One that moves it by less where none does so much: `passes` is then never true.
        """
        before = self.logprobs()
        probing = ProbeAdapter(SMALLEST, before, before)
        for doubling in range(DOUBLINGS):
            spread = SMALLEST * 2**doubling
            with random_factors(self.policy, spread):
                probing = ProbeAdapter(spread, before, self.logprobs())
            if 2 * MOVED < probing.moved.largest < math.inf:
                break
        return probing


@dataclass(frozen=True, slots=True)
class ProbeAdapter:
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
def random_factors(policy: Policy, spread: float) -> Iterator[None]:
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


PUSHES = "pushes"
"""In the run's folder of servers: the adapters that they have loaded."""
LARGEST_RANK = 512
"""Of an adapter that vLLM loads."""


@dataclass
class Pusher:
    """Brings the weights of `touchstone.policy` to the servers of one run.

    `folder` is where pushed adapters stand; every server has to see it under the same path.
    """

    fleet: Replicas
    touchstone: LogprobProbe
    folder: Path
    reporter: Reporter
    name: str = ""
    """Of the adapter that is served; empty before the first push."""
    version: str = ""
    """Hash of its weights."""
    seconds: float = 0.0
    """What pushes have taken since somebody set it to 0."""
    distance: Distance | None = None
    """How far the farthest server was from the trainer at the last push."""
    _unswept: bool = field(default=True, repr=False)

    async def __call__(self, weights: TrainedWeights) -> tuple[str, str]:
        """(name, version) under which the servers compute with these weights; nothing is sent where
        they do already. Raises NotArrived, AdapterNotServed, NoServerLeft."""
        start, version = time.monotonic(), weights.version()
        if version == self.version:
            return self.name, version
        if self._unswept:
            await self._sweep()
            await self._probe()
            self._unswept = False
        name = await self._push(version)
        try:
            self.distance = await self._prove(name)
        except Exception:
            await self._take_away(name)
            raise
        before, self.name, self.version = self.name, name, version
        if before:
            await self._take_away(before)
        self.seconds += time.monotonic() - start
        return name, version

    async def close(self) -> None:
        """Take away what is served. Where that fails, the next run's first push does it."""
        name, self.name, self.version = self.name, "", ""
        try:
            if name:
                await self._take_away(name)
        except SoulError as error:
            self.reporter.note(f"the adapter {name} was left on its servers: {error}")

    async def _push(self, label: str) -> str:
        """Write the adapter as it is now, and have every server load it; returns its name."""
        name = f"soulkit-{label}-{secrets.token_hex(4)}"
        model = self.touchstone.policy.model
        replace_folder(self.folder / name, lambda aside: save_adapter(model, aside))
        try:
            await push_adapter(self.fleet, self.folder / name, name)
        except AdapterNotServed:  # after anything else somebody may have it: `_sweep` comes first
            remove_folder(self.folder / name)
            raise
        return name

    async def _take_away(self, name: str) -> None:
        await unload_adapter(self.fleet, name)
        remove_folder(self.folder / name)

    async def _sweep(self) -> None:
        """Take away what a killed run has left on servers that outlived it."""
        for leftover in sorted(self.folder.glob("*")):
            if leftover.name.startswith("."):  # never had its name
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                await self._take_away(leftover.name)

    # --- proof ------------------------------------------------------------------------------------

    async def _probe(self) -> None:
        """Show that adapters are computed with; NotArrived, with the server's name, if not."""
        probing = self.touchstone.probe()
        with random_factors(self.touchstone.policy, probing.spread):
            name = await self._push("probe")
        try:
            for url, served in (await self._served(name)).items():
                if not probing.passes(served):
                    raise _not_followed(url, probing.moved, Distance.between(probing.after, served))
        finally:
            await self._take_away(name)

    async def _prove(self, name: str) -> Distance:
        """The farthest server's distance; NotArrived where one has other weights."""
        trainer, farthest = self.touchstone.logprobs(), Distance(0.0, 0.0)
        for url, served in (await self._served(name)).items():
            apart = Distance.between(trainer, served)
            if not self.touchstone.passes(apart):
                raise _not_proven(url, apart, self.touchstone)
            farthest = max(farthest, apart, key=lambda one: one.largest)
        return farthest

    async def _served(self, name: str) -> dict[str, list[tuple[float, ...]]]:
        """Address → log-probs under `name`; NotArrived where a server does not give them."""
        # One after the other: a server with adapters that runs on a CPU (vLLM 0.32) dies when the
        # prompts of two such requests share a batch.
        prompts = self.touchstone.prompts
        try:
            answers = [await prompt_logprobs(self.fleet, name, prompt) for prompt in prompts]
        except ServerRefused as refusal:
            raise NotArrived(
                f"A server took the adapter {name} and does not tell what it computes with it.",
                f"It says: {refusal}. Without log-probs of prompts nobody can tell whose weights "
                "sample.",
                _LOOK,
            ) from refusal
        return {url: [answer[url] for answer in answers if url in answer]
                for url in self.fleet.urls}  # fmt: skip


def rank_of(policy: Policy) -> int:
    """The largest rank in the adapter that is trained."""
    config = policy.model.peft_config[ADAPTER]
    return max(int(config.r), *map(int, (config.rank_pattern or {}).values()), 1)


def check_adapter(policy: Policy) -> None:
    """ConfigError for an adapter of a form that vLLM does not compute."""
    config, rank = policy.model.peft_config[ADAPTER], rank_of(policy)
    problems = {
        f"its rank is {rank}, and vLLM takes {LARGEST_RANK} at most": rank > LARGEST_RANK,
        "it holds whole modules beside its factors": bool(config.modules_to_save),
        "it is a DoRA": config.use_dora,
        "it has biases": config.bias != "none" or config.lora_bias,
    }
    reasons = [reason for reason, there in problems.items() if there]
    if reasons:
        raise ConfigError(
            f"The adapter that is trained cannot be sampled by vLLM: {'; '.join(reasons)}.",
            "Servers would refuse it at the first push, when the run has begun.",
            "Train another adapter (--lora-r, or without --adapter), or use --engine local.",
        )


_LOOK = "Look into the server's log, or use --engine local, which samples with the trained weights."


def _not_followed(url: str, moved: Distance, apart: Distance) -> NotArrived:
    return NotArrived(
        f"Adapters do not reach what is served at {url}.",
        f"One with large random weights moves the trainer's log-probs by {moved.words()}, and the "
        f"server's are then {apart.words()} from the trainer's: it computes with another base, or "
        "leaves part of the adapter out.",
        f"Serve the base of this run, with --enable-lora, in the trainer's numbers. {_LOOK}",
    )


def _not_proven(url: str, apart: Distance, touchstone: LogprobProbe) -> NotArrived:
    return NotArrived(
        f"The weights that were pushed to {url} cannot be proven to be there.",
        f"Log-probs of prompts are {apart.words()} from the trainer's, where {touchstone.bound} "
        f"are allowed in {touchstone.policy.computed}: rollouts would come from other weights.",
        f"Serve the base of this run in {touchstone.policy.computed}. {_LOOK}",
    )


class ServedPolicy:
    """A Sampler whose weights travel to servers before it samples with them.

    With a `journal`, every reply is recorded before anybody sees it, and what is recorded of the
    same weights is not sampled again. Close it before its servers.
    """

    def __init__(self, model: VllmModel, pusher: Pusher, journal: Journal | None = None) -> None:
        self.model, self.pusher, self.journal = model, pusher, journal
        self.name, self.policy_version = model.name, ""

    @property
    def context_limit(self) -> int | None:
        """Tokens of a prompt with its reply; None: not known."""
        return self.model.context_limit

    def prompt_length(self, context: Sequence[Segment], thinking: bool | None = None) -> int:
        """Tokens of the prompt that `context` becomes."""
        return self.model.prompt_length(context, thinking)

    async def take(self, weights: TrainedWeights) -> None:
        """Sample with these weights from now on; returns once they are proven to be there.

        Raises UserErrors where they are not (`push.py`), and then samples with nothing new.
        """
        served, version = await self.pusher(weights)
        self.model.use(served, version)
        self.policy_version = version

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """One reply; raises as the servers' model does."""
        if self.journal is None:
            return await self.model.complete(context, sampling, call)
        ids = self.model.codec.prompt_ids(context, sampling.thinking)
        key = JournalKey(call, sampling, tuple(ids), self.policy_version)
        recorded_reply = self.journal.one(key)
        if recorded_reply is not None:
            return recorded_reply
        reply = await self.model.complete(context, sampling, call)
        self.journal.write([key], [reply])
        return reply

    async def close(self) -> None:
        """Take the weights away from the servers, and close the connections to them."""
        try:
            await self.pusher.close()
        finally:
            await self.model.close()
