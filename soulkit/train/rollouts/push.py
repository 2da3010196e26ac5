"""Pushes the trained adapter to vLLM servers, verifies it and samples from it.

    write pushes/NAME ──▶ load NAME on every server ──▶ verify it ──▶ wait until the old adapter is
                                                        idle, unload it, delete its folder

Names are never reused, because servers cache results by name. The folder of a loaded adapter must
stay, because a server crashes without it. To verify a push, the servers' log-probs of some prompts
are compared with the trainer's, up to `EXACT` nats in float32. In lower precision the rounding
error is larger than the effect of a step, so a *probe adapter* with large random B factors shows
before the first push that adapters have an effect. An unverified push ends the run.

Servers may sleep during an update. After every wake the probe runs again and the adapter is pushed
under a new name, because in some versions of vLLM adapters silently have no effect after a wake.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from soulkit.errors import ConfigError, SoulError
from soulkit.models.base import TrainedWeights
from soulkit.models.local.journal import Journal, JournalKey
from soulkit.models.local.loading import ADAPTER, save_adapter
from soulkit.models.local.quantize import is_quantised
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
from soulkit.models.vllm.command import RANKS
from soulkit.models.vllm.model import VllmModel
from soulkit.models.vllm.replicas import Replicas
from soulkit.models.vllm.server import VllmServer
from soulkit.reporting import Reporter
from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import log_probs
from soulkit.train.objectives.sequences import Span
from soulkit.train.ranks.world import on_all_ranks
from soulkit.train.setup.rows import TaskRows
from soulkit.train.state.checkpoint import remove_folder, replace_folder
from soulkit.types import Call, Completion, Sampling, Segment

PROMPTS = 3
"""Number of the run's prompts used to verify a push."""
LONGEST = 1024
"""Maximum length of such a prompt; its last tokens are used."""
MOVED = 1.0
"""Nats by which the probe adapter must change the log-prob of some token."""
MISSED = 0.25
"""Allowed mean error of a server, as a share of the probe's mean change."""
QUANTISED = 0.06
"""Allowed mean distance of a server from a trainer with a quantised base, in 16-bit numbers."""
SMALLEST, DOUBLINGS = 0.05, 6
"""Initial spread of the probe's B factors, and how often it may be doubled."""


@dataclass(frozen=True, slots=True)
class LogprobProbe:
    """The trainer's log-probs of a few prompts."""

    policy: Policy
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, policy: Policy, pool: TaskRows, limit: int | None) -> LogprobProbe:
        """Prompts of the run's rows, cut to their last tokens to fit a context of `limit`."""
        most = LONGEST if limit is None else min(LONGEST, limit - 1)
        prompts = []
        for task, example in pool[:: max(len(pool) // PROMPTS, 1)][:PROMPTS]:
            context = next(iter(task.previews(example).values()))
            prompts.append(tuple(policy.renderer.prompt_ids(context)[-most:]))
        return cls(policy, tuple(dict.fromkeys(prompts)))

    @on_all_ranks
    def logprobs(self, spread: float | None = None) -> list[list[float]]:
        """Log-probs of the prompts with the current weights, or with the probe adapter of this
        spread."""
        spans = [Span(ids, (False, *[True] * (len(ids) - 1)), ()) for ids in self.prompts]
        usual, self.policy.temperature = self.policy.temperature, 1.0
        try:
            with nullcontext() if spread is None else random_factors(self.policy, spread):
                return [part.tolist() for part in log_probs(self.policy, spans, None)]
        finally:
            self.policy.temperature = usual

    @property
    def exact(self) -> bool:
        """Whether server and trainer compute in float32."""
        return self.policy.computed == "float32"

    @property
    def mean(self) -> float:
        """The allowed mean distance in 16-bit numbers."""
        return QUANTISED if is_quantised(self.policy.causal) else GROSS

    @property
    def bound(self) -> str:
        """The bound that `passes` checks, as text."""
        return f"{EXACT:g} nats at any token" if self.exact else f"{self.mean:g} nats on average"

    def passes(self, apart: Distance) -> bool:
        """Whether log-probs at this distance may come from the same weights."""
        return apart.largest <= EXACT if self.exact else apart.mean <= self.mean

    def probe(self) -> ProbeAdapter:
        """The smallest probe adapter that changes the trainer's log-probs by over twice `MOVED`.

        If none does, the last one tried.
        """
        before = self.logprobs()
        probing = ProbeAdapter(SMALLEST, before, before)
        for doubling in range(DOUBLINGS):
            spread = SMALLEST * 2**doubling
            probing = ProbeAdapter(spread, before, self.logprobs(spread))
            if 2 * MOVED < probing.moved.largest < math.inf:
                break
        return probing


@dataclass(frozen=True, slots=True)
class ProbeAdapter:
    """A probe adapter: spread of its B factors, and the trainer's log-probs before and after."""

    spread: float
    before: Logprobs
    after: Logprobs

    @property
    def moved(self) -> Distance:
        return Distance.between(self.before, self.after)

    def passes(self, served: Logprobs) -> bool:
        """Whether a server's log-probs changed like the trainer's."""
        moved, apart = self.moved, Distance.between(self.after, served)
        return MOVED < moved.largest < math.inf and apart.mean <= MISSED * moved.mean


@contextmanager
def random_factors(policy: Policy, spread: float) -> Iterator[None]:
    """Context in which the adapter's B factors are fixed normal draws of width `spread`; the
    weights are always restored."""
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


PUSHES = "pushes"
"""Folder of loaded adapters, inside the run's server folder."""
SLEEP, WAKE = "/sleep?level=1", "/wake_up"
"""Level 2 would also drop the weights, which vLLM cannot reload while it serves adapters."""
_LOOK = "Check the server's log, or use --engine local, which samples with the trained weights."


@dataclass
class Pusher:
    """Pushes the weights of `touchstone.policy` to the servers of one run.

    `folder` holds the pushed adapters. Every server must see it under the same path; those in
    `servers` get a copy if they do not.
    """

    fleet: Replicas
    touchstone: LogprobProbe
    folder: Path
    reporter: Reporter
    sleeps: bool = False
    """Whether the servers can release their memory during an update."""
    servers: Sequence[VllmServer] = ()
    name: str = ""
    """Name of the served adapter; empty before the first push."""
    version: str = ""
    """Hash of its weights."""
    seconds: float = 0.0
    """Total time of pushes since it was last reset to 0."""
    distance: Distance | None = None
    """Largest distance between a server and the trainer at the last push."""
    asleep: bool = False
    """Whether the servers have released their memory."""
    _unswept: bool = field(default=True, repr=False)

    async def __call__(self, weights: TrainedWeights) -> tuple[str, str]:
        """Push these weights unless the servers have them; returns (adapter name, version).
        Raises NotArrived, AdapterNotServed, NoServerLeft."""
        start, version = time.monotonic(), weights.version()
        if version == self.version and not self.asleep:
            return self.name, version
        if self._unswept:
            await self._sweep()
            await self._probe()
            self._unswept = False
        if self.asleep:
            await self.wake()
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

    async def sleep(self) -> None:
        """Let servers started for it release their memory until the next push. No request may be
        running."""
        if self.sleeps and not self.asleep:
            await self._order(SLEEP)
            self.asleep = True

    async def wake(self) -> None:
        """Wake the servers and verify that they apply adapters, as `_probe` does."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the servers need this memory again
        await self._order(WAKE)
        self.asleep = False
        try:
            await self._probe()
        except NotArrived as error:
            why = f"It has just woken up (--vllm-sleep). {error.why}"
            way = "Leave out --vllm-sleep, or use another version of vLLM."
            raise NotArrived(error.what, why, way) from error

    async def _order(self, path: str) -> None:
        """POST to every server; NotArrived if one refuses."""
        for url, reply in (await self.fleet.each(path, {})).items():
            if isinstance(reply, ServerRefused):
                raise NotArrived(
                    f"The server at {url} refuses POST {path}.",
                    f"It replied: {reply}",
                    "Leave out --vllm-sleep.",
                )

    async def close(self) -> None:
        """Unload the served adapter. If that fails, the first push of the next run unloads it."""
        name, self.name, self.version = self.name, "", ""
        try:
            if name and self.asleep:  # the server ends with the run
                self._remove(name)
            elif name:
                await self._take_away(name)
        except SoulError as error:
            self.reporter.note(f"the adapter {name} was not unloaded from its servers: {error}")

    async def _push(self, label: str) -> str:
        """Write the current adapter and load it on every server; returns its name."""
        name = f"soulkit-{label}-{secrets.token_hex(4)}"
        model = self.touchstone.policy.model
        replace_folder(self.folder / name, lambda aside: save_adapter(model, aside))
        for server in self.servers:
            await asyncio.to_thread(server.send, (self.folder / name).resolve())
        try:
            await push_adapter(self.fleet, self.folder / name, name)
        except AdapterNotServed:  # after other errors a server may have loaded it; see `_sweep`
            self._remove(name)
            raise
        return name

    async def _take_away(self, name: str) -> None:
        await unload_adapter(self.fleet, name)
        self._remove(name)

    def _remove(self, name: str) -> None:
        for server in self.servers:
            server.remove((self.folder / name).resolve())
        remove_folder(self.folder / name)

    async def _sweep(self) -> None:
        """Unload adapters that a killed run left on its servers."""
        for leftover in sorted(self.folder.glob("*")):
            if leftover.name.startswith("."):  # incomplete, never loaded
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                await self._take_away(leftover.name)

    # --- verification -----------------------------------------------------------------------------

    async def _probe(self) -> None:
        """Verify that servers apply adapters; NotArrived names a server that does not."""
        probing = self.touchstone.probe()
        with random_factors(self.touchstone.policy, probing.spread):
            name = await self._push("probe")
        try:
            for url, served in (await self._served(name)).items():
                if not probing.passes(served):
                    apart = Distance.between(probing.after, served)
                    raise NotArrived(
                        f"The server at {url} does not apply LoRA adapters correctly.",
                        "A test adapter changes the trainer's log-probs by "
                        f"{probing.moved.words()}, but the server's log-probs with it differ from "
                        f"the trainer's by {apart.words()}: the server uses a different base, or "
                        "ignores part of the adapter.",
                        "Serve the base of this run with --enable-lora, in the trainer's dtype. "
                        + _LOOK,
                    )
        finally:
            await self._take_away(name)

    async def _prove(self, name: str) -> Distance:
        """Largest distance of a server from the trainer; NotArrived if one has other weights."""
        trainer, farthest = self.touchstone.logprobs(), Distance(0.0, 0.0)
        for url, served in (await self._served(name)).items():
            apart = Distance.between(trainer, served)
            if not self.touchstone.passes(apart):
                dtype, bound = self.touchstone.policy.computed, self.touchstone.bound
                raise NotArrived(
                    f"The server at {url} does not sample with the weights that were pushed to it.",
                    f"Its log-probs of prompts differ from the trainer's by {apart.words()}; in "
                    f"{dtype}, {bound} is allowed.",
                    f"Serve the base of this run in {dtype}. {_LOOK}",
                )
            farthest = max(farthest, apart, key=lambda one: one.largest)
        return farthest

    async def _served(self, name: str) -> dict[str, list[tuple[float, ...]]]:
        """Address → log-probs with adapter `name`; NotArrived if a server does not return them."""
        # One at a time: on a CPU, vLLM 0.32 with adapters crashes if two of them share a batch.
        prompts = self.touchstone.prompts
        try:
            answers = [await prompt_logprobs(self.fleet, name, prompt) for prompt in prompts]
        except ServerRefused as refusal:
            raise NotArrived(
                f"A server loaded the adapter {name} but does not return log-probs of prompts.",
                f"It replied: {refusal}. Without log-probs, soul cannot verify which weights the "
                "server samples with.",
                _LOOK,
            ) from refusal
        return {url: [answer[url] for answer in answers if url in answer]
                for url in self.fleet.urls}  # fmt: skip


def rank_of(policy: Policy) -> int:
    """The largest rank in the trained adapter."""
    config = policy.model.peft_config[ADAPTER]
    return max(int(config.r), *map(int, (config.rank_pattern or {}).values()), 1)


def check_adapter(policy: Policy) -> None:
    """ConfigError for an adapter that vLLM does not support."""
    config, rank = policy.model.peft_config[ADAPTER], rank_of(policy)
    problems = {
        f"its rank is {rank}, and vLLM supports at most {RANKS[-1]}": rank > RANKS[-1],
        "it trains whole modules (modules_to_save)": bool(config.modules_to_save),
        "it uses DoRA": config.use_dora,
        "it has biases": config.bias != "none" or config.lora_bias,
    }
    reasons = [reason for reason, there in problems.items() if there]
    if reasons:
        raise ConfigError(
            f"vLLM cannot sample with the trained adapter: {'; '.join(reasons)}.",
            "Servers would reject this adapter at the first push, after the run has started.",
            "Train another adapter (--lora-r, or without --adapter), or use --engine local.",
        )


class ServedPolicy:
    """A Sampler that pushes its weights to servers and samples there.

    With a `journal`, every reply is recorded before it is returned, and replies recorded for the
    same weights are reused. Close it before its servers.
    """

    def __init__(self, model: VllmModel, pusher: Pusher, journal: Journal | None = None) -> None:
        self.model, self.pusher, self.journal = model, pusher, journal
        self.name, self.policy_version = model.name, ""

    @property
    def context_limit(self) -> int | None:
        """Maximum tokens in a prompt and its reply together; None if unknown."""
        return self.model.context_limit

    def prompt_length(self, context: Sequence[Segment], thinking: bool | None = None) -> int:
        """Number of tokens of the prompt for `context`."""
        return self.model.prompt_length(context, thinking)

    async def take(self, weights: TrainedWeights) -> None:
        """Sample with these weights from now on; returns once the push is verified.

        Raises UserErrors if it is not, and keeps the old weights.
        """
        served, version = await self.pusher(weights)
        self.model.use(served, version)
        self.policy_version = version

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """One reply; raises the errors of the servers' model."""
        if self.journal is None:
            return await self.model.complete(context, sampling, call)
        ids = self.model.codec.prompt_ids(context, sampling.thinking)
        key = JournalKey(call, sampling, tuple(ids), self.policy_version)
        recorded_reply = self.journal.one(key)
        if recorded_reply is not None:
            return recorded_reply
        reply = await self.model.complete(context, sampling, call)
        await self.journal.record(key, reply)
        return reply

    async def close(self) -> None:
        """Unload the weights from the servers and close the connections."""
        try:
            await self.pusher.close()
        finally:
            await self.model.close()
