"""Loads adapters on running servers under unique names, verifies them, and unloads them.

    push_adapter ──▶ loaded under its name on every server
    prove_adapter ─▶ log-probs of a prompt differ from the base model's
    unload_adapter ▶ waits until it is idle, then removes the name
    serve_adapter ─▶ the first two, for an adapter that is evaluated

An adapter is a folder that every server can read, with a name and path that were never used before:
given new weights under an old name, a server answers 200 and keeps the old ones. The name is
removed before its folder, since a server dies if a loaded folder disappears.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from soulkit.errors import ModelLoadError, UserError
from soulkit.models.local.loading import adapter_folder, adapter_hash
from soulkit.models.local.weights import ADAPTER_FILE, StoredTensor, stored_tensors
from soulkit.models.vllm.client import COMPLETIONS_PATH, ServerRefused
from soulkit.models.vllm.replicas import Body, NoServerLeft, Replicas

MODELS = "/v1/models"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
HOW_TO_START = (
    "--enable-lora --max-lora-rank RANK and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
)
AGREEMENT = 0.1
"""Maximum mean difference in nats between log-probs of two servers with the same weights. 16-bit
numbers differ by hundredths across devices, other weights by more than a nat."""
_NO_ROUTE = (404, 405)
_OTHER_SHAPE = re.compile(r"must match the size|size mismatch|shape|target modules", re.IGNORECASE)
"""Error messages for an adapter that belongs to another model."""
_RANK = re.compile(
    r"max_lora_rank|max-lora-rank|lora rank \d|enable.lora|lora is not", re.IGNORECASE
)
"""Error messages of a server started for smaller adapters, or for none."""
_DAMAGED = re.compile(
    r"deserializ|safetensor|not fully covered|header|JSON|Expecting|Unterminated", re.IGNORECASE
)
"""Error messages for adapter files that cannot be read."""
_CHUNK = 1024 * 1024
_WHOLE = "Copy the whole folder again, or train the adapter again."
_ZEROS = b"\x00\x80"
"""Bytes of zeros, with and without a sign, in all number formats."""


class AdapterNotServed(ModelLoadError):
    """A server rejects an adapter, or does not use it."""


class NotArrived(UserError):
    """The servers do not use the weights that were pushed, so nothing may be sampled."""


def unique_name(folder: str | Path) -> str:
    """A unique name: soulkit, the hash of the weights, and random digits, so that two runs with the
    same adapter do not unload each other's."""
    return f"soulkit-{adapter_hash(folder)}-{secrets.token_hex(4)}"


async def push_adapter(fleet: Replicas, folder: str | Path, name: str) -> None:
    """Load an adapter folder on every living server under `name`, which must be new there.

    AdapterNotServed on failure. On failure or cancellation, servers unload it again.
    """
    source = adapter_folder(folder).resolve()
    for url, listing in (await fleet.each(MODELS)).items():
        if isinstance(listing, dict) and any(entry.id == name for entry in entries_of(listing)):
            raise AdapterNotServed(
                f"The server at {url} already serves a model or adapter named '{name}'.",
                "A reused name may return results computed with the old weights.",
                "Use another name, or unload that adapter from the server.",
            )
    try:
        replies = await fleet.each(LOAD, {"lora_name": name, "lora_path": str(source)})
        for url, reply in replies.items():
            # The name was new, so a server that has it got it from a request whose reply was lost.
            if isinstance(reply, ServerRefused) and "already been loaded" not in reply.message:
                raise _unloadable(url, reply, source)
    except BaseException:  # also on Ctrl-C, since the servers may belong to others
        await unload_adapter(fleet, name)
        raise
    fleet.adapters.add(name)


async def unload_adapter(fleet: Replicas, name: str) -> None:
    """Unload an adapter from every living server once no request uses it.

    Servers without it are skipped; any other refusal raises ServerRefused.
    """
    await fleet.idle(name)
    fleet.adapters.discard(name)
    try:
        replies = await fleet.each(UNLOAD, {"lora_name": name})
    except NoServerLeft:
        return  # no servers, no adapters
    for reply in replies.values():
        if isinstance(reply, ServerRefused) and reply.status not in _NO_ROUTE:
            raise reply


def _unloadable(url: str, refusal: ServerRefused, source: Path) -> AdapterNotServed:
    unread = "adapter found" in refusal.message
    if refusal.status in _NO_ROUTE and not unread:
        return no_adapters(url)
    if unread:
        return AdapterNotServed(
            f"The server at {url} cannot read the adapter folder {source}.",
            f"It reads adapters from its own disk. Its answer: {refusal.message}",
            "Put the folder under the same path there, or evaluate it with --engine local.",
        )
    if _OTHER_SHAPE.search(refusal.message):
        return AdapterNotServed(
            f"The adapter {source} does not fit the model at {url}.",
            f"The server's answer: {refusal.message}",
            "Use an adapter for this model; its base is named in its adapter_config.json.",
        )
    return AdapterNotServed(
        f"The server at {url} cannot load the adapter {source}.",
        f"The server's answer: {refusal.message}",
        _way_to_load(refusal.message.replace(str(source), "")),
    )


def _way_to_load(message: str) -> str:
    if _RANK.search(message):
        ranks = "RANK is at least the adapter's rank (8, 16, 32, 64 ...)"
        return f"Start the server with {HOW_TO_START}; {ranks}."
    if _DAMAGED.search(message):
        return _WHOLE
    return "Check the server's log, or evaluate the adapter with --engine local."


def no_adapters(url: str) -> AdapterNotServed:
    """The error for a server that cannot load adapters at run time."""
    return AdapterNotServed(
        f"The server at {url} cannot load adapters while it runs.",
        f"It has no POST {LOAD}, or it was started without adapters.",
        f"Start it with {HOW_TO_START}; or let soulkit start it: --engine vllm.",
    )


# -- adapters to evaluate --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter under its served name."""

    name: str
    lent: bool
    """Whether soulkit loaded it and unloads it at the end; False if the servers had it."""

    async def unload(self, fleet: Replicas) -> None:
        """Restore the servers' previous state."""
        if self.lent:
            await unload_adapter(fleet, self.name)


async def serve_adapter(
    fleet: Replicas, base: str, folder: str | Path, prompt_ids: Sequence[int]
) -> ServedAdapter:
    """Serve the adapter in `folder` next to the model `base`, and verify that it is used.

    If a server cannot load adapters at run time but was started with this folder, the server's own
    name for it is used. AdapterNotServed on failure; ModelLoadError for a damaged folder.
    """
    check_adapter_file(folder)
    name, lent = unique_name(folder), True
    try:
        await push_adapter(fleet, folder, name)
    except AdapterNotServed:
        name, lent = await _served_name(fleet, folder), False
        if not name:
            raise
    await prove_adapter(fleet, base, name, folder, prompt_ids)
    return ServedAdapter(name, lent)


async def _served_name(fleet: Replicas, folder: str | Path) -> str:
    path = str(adapter_folder(folder).resolve())
    names: list[set[str]] = []
    for listing in (await fleet.each(MODELS)).values():
        listed = entries_of(listing) if isinstance(listing, dict) else ()
        names.append({entry.id for entry in listed if entry.parent and entry.root == path})
    return min(set.intersection(*names), default="")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model or adapter in a server's list; `parent` is an adapter's model."""

    id: str
    root: str
    """Where the server loaded it from."""
    parent: str
    max_context: int | None


def entries_of(listing: Mapping[str, Any]) -> tuple[ModelEntry, ...]:
    """The entries of a reply to GET /v1/models, without unreadable ones."""
    listed = listing.get("data")
    entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return tuple(
        ModelEntry(
            id=str(one["id"]),
            root=str(one.get("root") or ""),
            parent=str(one.get("parent") or ""),
            max_context=limit
            if type(limit := one.get("max_model_len")) is int and limit > 0
            else None,
        )
        for one in entries
        if one.get("id")
    )


# -- verification ----------------------------------------------------------------------------------


Logprobs = Sequence[Sequence[float]]
"""Per prompt, log-probs of its tokens except the first, in nats at temperature 1."""


@dataclass(frozen=True, slots=True)
class Distance:
    """The difference between log-probs of the same tokens, in nats."""

    largest: float
    mean: float

    @classmethod
    def between(cls, one: Logprobs, other: Logprobs) -> Distance:
        """The distance between two results; infinite if there is nothing to compare, a value is not
        finite, or the numbers of tokens differ."""
        nowhere = cls(math.inf, math.inf)
        if not one or [len(part) for part in one] != [len(part) for part in other]:
            return nowhere
        gaps = [abs(a - b) for parts in zip(one, other, strict=True)
                for a, b in zip(*parts, strict=True)]  # fmt: skip
        if not gaps or not all(map(math.isfinite, gaps)):
            return nowhere
        return cls(max(gaps), sum(gaps) / len(gaps))

    def words(self) -> str:
        return f"at most {self.largest:.2g} nats, {self.mean:.2g} on average"


@dataclass(frozen=True, slots=True)
class PromptReading:
    """A server's log-probs of all tokens of a prompt except the first."""

    logprobs: tuple[float, ...]
    """In nats, at temperature 1."""
    gaps: tuple[float, ...]
    """Nats from each token to the most likely one at its position, if requested."""


async def prompt_logprobs(
    fleet: Replicas, name: str, prompt_ids: Sequence[int]
) -> dict[str, tuple[float, ...]]:
    """Address → log-probs of a prompt's tokens, as in `read_prompt`."""
    readings = await read_prompt(fleet, name, prompt_ids, top=0)
    return {url: reading.logprobs for url, reading in readings.items()}


async def read_prompt(
    fleet: Replicas, name: str, prompt_ids: Sequence[int], *, top: int = 1
) -> dict[str, PromptReading]:
    """Address → log-probs of a prompt's tokens except the first, from every living server for the
    model or adapter `name`, with the `top` most likely tokens. Does not use the prefix cache.

    Raises ServerRefused, and AdapterNotServed for a reply without log-probs.
    """
    body: Body = {
        "model": name, "prompt": list(prompt_ids), "max_tokens": 1, "temperature": 0.0,
        "prompt_logprobs": top,
    }  # fmt: skip
    replies = await fleet.everywhere(COMPLETIONS_PATH, body)
    return {url: _read_logprobs(url, reply, prompt_ids) for url, reply in replies.items()}


async def prove_adapter(
    fleet: Replicas, base: str, name: str, folder: str | Path, prompt_ids: Sequence[int]
) -> None:
    """Raise AdapterNotServed unless the servers use an adapter.

    An adapter that is not zero must change the log-probs of a prompt by more than they vary
    between two requests to the base model. A pushed adapter that fails is unloaded.
    """
    try:
        plain = await prompt_logprobs(fleet, base, prompt_ids)
        again = await prompt_logprobs(fleet, base, prompt_ids)
        served = await prompt_logprobs(fleet, name, prompt_ids)
        check_agreement(served, f"the adapter {adapter_folder(folder)}")
        for url in served.keys() & plain.keys() & again.keys() if any_weight(folder) else ():
            moved = Distance.between([plain[url]], [served[url]]).largest
            if not moved > Distance.between([plain[url]], [again[url]]).largest:
                raise AdapterNotServed(
                    f"The adapter {adapter_folder(folder)} was loaded at {url} but has no effect.",
                    "Its weights are not zero, yet the log-probs of a prompt are the same with and "
                    "without it, so the base model would be evaluated instead.",
                    "Check the server's log, or evaluate the adapter with --engine local.",
                )
    except BaseException:  # also on Ctrl-C
        if name in fleet.adapters:
            await unload_adapter(fleet, name)
        raise


def check_agreement(served: Mapping[str, Sequence[float]], what: str) -> None:
    """Reject servers with different log-probs (address → nats) for one prompt: any of them may get
    any request, so they must serve the same weights.

    Raises AdapterNotServed.
    """
    (first, one), *others = served.items()
    for url, other in others:
        mean = Distance.between([one], [other]).mean
        if not mean <= AGREEMENT:
            raise AdapterNotServed(
                f"The servers at {first} and {url} give different results with {what}.",
                f"Log-probs of a prompt differ by {mean:.2g} nats on average: other weights or "
                "another number format (dtype, quantization).",
                "Start them with the same model and flags, or attach only one of them.",
            )


def any_weight(folder: str | Path) -> bool:
    """Whether an adapter has any effect: a LoRA with only zeros in B has none.

    ModelLoadError if the file cannot be read.
    """
    with _weights_of(folder) as (file, tensors):
        for one in tensors:
            file.seek(one.start)
            if "lora_A" not in one.name and not _all_zero(file.read, one.end - one.start):
                return True
    return False


def check_adapter_file(folder: str | Path) -> None:
    """ModelLoadError if an adapter's weights are missing, truncated or not safetensors."""
    with _weights_of(folder):
        pass


@contextmanager
def _weights_of(folder: str | Path) -> Iterator[tuple[BinaryIO, Sequence[StoredTensor]]]:
    """The open weights file of an adapter, and its tensors. ModelLoadError if it is damaged."""
    path = adapter_folder(folder) / ADAPTER_FILE
    try:
        with path.open("rb") as file:
            tensors = stored_tensors(file)
            needed, size = max((one.end for one in tensors), default=8), path.stat().st_size
            if size < needed:
                raise ValueError(f"the file has {size} of {needed} bytes")
            yield file, tensors
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(
            f"The adapter weights {path} cannot be read.",
            f"{type(error).__name__}: {error}",
            _WHOLE,
        ) from error


def _all_zero(read: Callable[[int], bytes], size: int) -> bool:
    """Whether the next `size` bytes are all zero, read in pieces."""
    while size > 0:
        piece = read(min(size, _CHUNK))
        if not piece:
            raise ValueError("the file ends before its weights do")
        if piece.strip(_ZEROS):
            return False
        size -= len(piece)
    return True


def _read_logprobs(url: str, reply: Body, prompt_ids: Sequence[int]) -> PromptReading:
    """Log-probs of the prompt's tokens except the first, and their distance from the best."""
    try:
        listed = reply["choices"][0]["prompt_logprobs"]
        first, *others = listed
        if first is not None:
            raise ValueError("the first token has a log-prob")
        pairs = zip(prompt_ids[1:], others, strict=True)
        own = tuple(float(at[str(token)]["logprob"]) for token, at in pairs)
        best = (max(float(one["logprob"]) for one in at.values()) for at in others)
        return PromptReading(own, tuple(a - b for a, b in zip(best, own, strict=True)))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise AdapterNotServed(
            f"The server at {url} does not return the log-probs of a prompt.",
            f"Its reply cannot be read ({type(error).__name__}), so soulkit cannot verify which "
            "weights it uses.",
            "Attach a vLLM server of version 0.31 or newer, or use --engine local.",
        ) from None
