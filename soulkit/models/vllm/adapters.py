"""Adapters on running servers: put there under a name of their own, proven, taken away again.

An adapter travels as a folder that every server can read, under a name and a path that were never
used before: a server that is handed other weights under an old name and path answers with status
200 and serves what it had computed with the old ones. A name goes before its folder, since a server
whose loaded folder has vanished dies; and a name goes only when nothing is under way for it.

    push_adapter ──▶ loaded under its name on every server
    prove_adapter ─▶ what it does to the log-probs of a prompt is there (evaluation)
    WeightCanary ──▶ the log-probs of a prompt are those of the weights that were pushed (training)
    unload_adapter ▶ idle, the name away

That a server lists an adapter proves nothing about what it computes with; log-probs do.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.errors import ModelLoadError, UserError
from soulkit.models.local.loading import adapter_hash
from soulkit.models.local.names import adapter_folder
from soulkit.models.local.weights import ADAPTER_FILE
from soulkit.models.vllm.client import ServerRefused
from soulkit.models.vllm.fleet import Body, Fleet

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
COMPLETIONS = "/v1/completions"
HOW_TO_START = "--enable-lora --max-lora-rank RANK, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"  # noqa: E501
EXACT, GROSS = 1e-4, 0.5
"""How far log-probs may be off: of float32 numbers, and of 16-bit ones, in nats."""
_CONFIG = "adapter_config.json"
_HEADER_BYTES = 100 * 1024 * 1024
_CHUNK = 1024 * 1024
_ZEROS = b"\x00\x80"
"""The bytes of zeros, with and without a sign, in every format of numbers."""


class AdapterNotServed(ModelLoadError):
    """A server does not take an adapter, or does not compute with it."""


class NotArrived(UserError):
    """New weights were pushed, and what is served is not them: nothing may be sampled."""


def unique_name(folder: str | Path, stem: str = "soulkit") -> str:
    """A name that no server has: the stem, the hash of the weights, and random digits, so that two
    runs with the same adapter do not unload each other's."""
    return f"{stem}-{adapter_hash(folder)}-{secrets.token_hex(4)}"


def copied_adapter(folder: str | Path, place: Path) -> Path:
    """A copy of what servers read of an adapter, in a new folder `place`.

    Whoever trains on, or tidies up, in the original folder then changes nothing that is served.
    """
    source = adapter_folder(folder)
    place.mkdir(parents=True)
    for name in (_CONFIG, ADAPTER_FILE):
        shutil.copyfile(source / name, place / name)
    return place


async def push_adapter(fleet: Fleet, folder: str | Path, name: str) -> None:
    """Load an adapter folder on every living server under `name`, which must be new there.

    Raises AdapterNotServed, when it has been taken away again where it was loaded.
    """
    source = adapter_folder(folder).resolve()
    body: Body = {"lora_name": name, "lora_path": str(source)}
    replies = await fleet.each(LOAD, body)
    refusals = {url: r for url, r in replies.items() if isinstance(r, ServerRefused)}
    if refusals:
        await fleet.each(UNLOAD, {"lora_name": name})
        url, refusal = next(iter(refusals.items()))
        raise _unloadable(url, refusal, source)


async def unload_adapter(fleet: Fleet, name: str) -> None:
    """Take an adapter away from every living server, when nothing is under way for it any more.

    Servers that have lost it already are left alone; any other refusal raises ServerRefused.
    """
    await fleet.idle(name)
    for reply in (await fleet.each(UNLOAD, {"lora_name": name})).values():
        if isinstance(reply, ServerRefused) and reply.status != 404:
            raise reply


# -- proof -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightCanary:
    """A prompt, and what its tokens' log-probs are under the weights that were pushed."""

    prompt_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token but the first, in nats, at temperature 1."""

    def gap(self, served: Sequence[float]) -> float:
        """The largest difference to what a server computed, in nats."""
        if len(served) != len(self.logprobs):
            return float("inf")
        return largest_gap(self.logprobs, served)

    async def prove(self, fleet: Fleet, name: str, limit: float = EXACT) -> float:
        """The largest gap over all living servers under the adapter `name`.

        Raises NotArrived beyond `limit` nats.
        """
        served = await prompt_logprobs(fleet, name, self.prompt_ids)
        gaps = {url: self.gap(logprobs) for url, logprobs in served.items()}
        url = max(gaps, key=lambda at: gaps[at])
        if not gaps[url] <= limit:
            raise NotArrived(
                f"The weights that were pushed to {url} as '{name}' are not what it serves.",
                f"Log-probs of a known prompt differ by {gaps[url]:.3g} nats from the trainer's, "
                f"more than {limit:g}: rollouts would come from another policy.",
                "Look into the server's log; --engine local samples with the trained weights "
                "themselves.",
            )
        return gaps[url]


def largest_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two equally long lists of log-probs, in nats; infinite where one
    of them is no number."""
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max((gap if gap == gap else float("inf") for gap in gaps), default=0.0)


async def prompt_logprobs(
    fleet: Fleet, name: str, prompt_ids: Sequence[int]
) -> dict[str, tuple[float, ...]]:
    """Address → log-probs of a prompt's tokens but the first (nats, temperature 1), as every living
    server computes them for the model or adapter `name`. Such a request reads no prefix cache.

    Raises ServerRefused, and AdapterNotServed for a reply without them.
    """
    body: Body = {
        "model": name, "prompt": list(prompt_ids), "max_tokens": 1, "temperature": 0.0,
        "prompt_logprobs": 0,
    }  # fmt: skip
    replies = await fleet.everywhere(COMPLETIONS, body)
    return {url: _read_logprobs(url, reply, prompt_ids) for url, reply in replies.items()}


async def prove_adapter(
    fleet: Fleet, base: str, name: str, folder: str | Path, prompt_ids: Sequence[int]
) -> float:
    """How far an adapter moves the log-probs of a prompt from those of `base`, in nats, at least.

    An adapter that is not zero has to move them, and by more than they differ when the base is
    asked twice; raises AdapterNotServed otherwise. One that is zero moves nothing: 0 then.
    """
    moved = await _moves(fleet, base, name, prompt_ids)
    if not any_weight(folder):
        return 0.0
    again = await _moves(fleet, base, base, prompt_ids)
    for url, gap in moved.items():
        if not gap > again.get(url, 0.0):
            raise AdapterNotServed(
                f"The adapter {adapter_folder(folder)} was loaded at {url}, and nothing changed.",
                "Its weights are not zero, and the log-probs of a prompt are the same with it as "
                "without it: the base model would be measured under the adapter's name.",
                "Look into the server's log, or measure the adapter with --engine local.",
            )
    return min(moved.values())


async def _moves(
    fleet: Fleet, base: str, name: str, prompt_ids: Sequence[int]
) -> dict[str, float]:
    """Address → the largest difference that `name` makes to the base's log-probs."""
    plain = await prompt_logprobs(fleet, base, prompt_ids)
    with_it = await prompt_logprobs(fleet, name, prompt_ids)
    return {url: largest_gap(plain[url], with_it[url]) for url in with_it if url in plain}


def any_weight(folder: str | Path) -> bool:
    """Whether an adapter changes anything: a LoRA whose every B is zero does not.

    Raises ModelLoadError for a file that cannot be read.
    """
    path = adapter_folder(folder) / ADAPTER_FILE
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _HEADER_BYTES:
                raise ValueError("no safetensors header")
            header: Mapping[str, Any] = json.loads(file.read(length))
            for weights_name, place in header.items():
                if weights_name == "__metadata__" or "lora_A" in weights_name:
                    continue
                start, end = place["data_offsets"]
                file.seek(8 + length + start)
                if not _all_zero(file.read, end - start):
                    return True
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(
            f"The adapter's weights {path} cannot be read.",
            f"{type(error).__name__}: {error}",
            "Take a folder that was written whole, or train the adapter again.",
        ) from error
    return False
