"""The trained adapter goes to the servers: a folder and a name of its own, loaded, proven.

    write pushes/NAME ──▶ load NAME on every server ──▶ prove it ──▶ let the name before fall idle,
                                                        unload it, delete its folder

A name and a folder are never used twice: what a server has computed under an old name it serves
again for new weights. The folder stays as long as its name, since a server whose loaded folder has
vanished dies; so pushes have folders of their own, which no pruning of checkpoints reaches. What a
killed run has left is taken away, name first, before the next run's first push.

A push that cannot be proven ends the run: rollouts would come from other weights than those that
are about to move, and nothing would show it.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from soulkit.errors import ConfigError, SoulError
from soulkit.models.base import TrainedWeights
from soulkit.models.local.loading import ADAPTER
from soulkit.models.local.saving import save_adapter
from soulkit.models.vllm.adapters import (
    AdapterNotServed,
    NotArrived,
    prompt_logprobs,
    push_adapter,
    unload_adapter,
)
from soulkit.models.vllm.fleet import Fleet
from soulkit.train.forward.policy import Policy
from soulkit.train.pushes.touchstone import Distance, Touchstone, drawn_factors
from soulkit.train.state.checkpoint import remove_folder, replace_folder

PUSHES = "pushes"
"""In the run's folder of servers: the adapters that they have loaded."""
LARGEST_RANK = 512
"""Of an adapter that vLLM loads."""


@dataclass
class Pusher:
    """Brings the weights of `touchstone.policy` to the servers of one run.

    `folder` is where pushed adapters stand; every server has to see it under the same path.
    """

    fleet: Fleet
    touchstone: Touchstone
    folder: Path
    say: Callable[[str], None]
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
            self.say(f"the adapter {name} was left on its servers: {error}")

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
        """The name first, then its folder."""
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
        with drawn_factors(self.touchstone.policy, probing.spread):
            name = await self._push("probe")
        try:
            for url, served in (await self._served(name)).items():
                if not probing.passes(served):
                    raise _not_followed(url, probing.moved, Distance.between(probing.after, served))
        finally:
            await self._take_away(name)

    async def _prove(self, name: str) -> Distance:
        """The farthest server's distance; NotArrived where one does not compute with the weights as
        they are."""
        trainer, farthest = self.touchstone.logprobs(), Distance(0.0, 0.0)
        for url, served in (await self._served(name)).items():
            apart = Distance.between(trainer, served)
            if not self.touchstone.passes(apart):
                raise _not_proven(url, apart, self.touchstone)
            farthest = max(farthest, apart, key=lambda one: one.largest)
        return farthest

    async def _served(self, name: str) -> dict[str, list[tuple[float, ...]]]:
        """Address → log-probs of the touchstone's prompts under `name`."""
        # One after the other: a server with adapters that runs on a CPU (vLLM 0.32) dies when the
        # prompts of two such requests share a batch.
        prompts = self.touchstone.prompts
        answers = [await prompt_logprobs(self.fleet, name, prompt) for prompt in prompts]
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


def _not_proven(url: str, apart: Distance, touchstone: Touchstone) -> NotArrived:
    return NotArrived(
        f"The weights that were pushed to {url} cannot be proven to be there.",
        f"Log-probs of prompts are {apart.words()} from the trainer's, where {touchstone.bound} "
        f"are allowed in {touchstone.policy.computed}: rollouts would come from other weights.",
        f"Serve the base of this run in {touchstone.policy.computed}. {_LOOK}",
    )
