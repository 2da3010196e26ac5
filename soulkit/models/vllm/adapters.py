"""Adapters on running servers: put there under a name of their own, proven, taken away again.

    push_adapter ──▶ loaded under its name on every server
    prove_adapter ─▶ the log-probs of a prompt differ from the base's
    unload_adapter ▶ idle, the name away
    serve_adapter ─▶ the first two for an adapter that is measured

An adapter travels as a folder that every server can read, under a name and path that were never
used before: handed other weights under an old name, a server answers 200 and serves the old ones. A
name goes before its folder, since a server whose loaded folder has vanished dies.
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
"""How far the log-probs of two servers of the same weights may be apart on average, in nats: 16-bit
numbers of different devices differ by hundredths, other weights by more than a nat."""
_NO_ROUTE = (404, 405)
_OTHER_SHAPE = re.compile(r"must match the size|size mismatch|shape|target modules", re.IGNORECASE)
"""How a server says that an adapter belongs to another model."""
_RANK = re.compile(
    r"max_lora_rank|max-lora-rank|lora rank \d|enable.lora|lora is not", re.IGNORECASE
)
"""How a server says that it was started for smaller adapters, or for none."""
_DAMAGED = re.compile(
    r"deserializ|safetensor|not fully covered|header|JSON|Expecting|Unterminated", re.IGNORECASE
)
"""How a server says that it cannot read an adapter's files."""
_CHUNK = 1024 * 1024
_WHOLE = "Copy the whole folder again, or train the adapter again."
_ZEROS = b"\x00\x80"
"""The bytes of zeros, with and without a sign, in every format of numbers."""


class AdapterNotServed(ModelLoadError):
    """A server does not take an adapter, or does not compute with it."""


class NotArrived(UserError):
    """New weights were pushed, and what is served is not them: nothing may be sampled."""


def unique_name(folder: str | Path) -> str:
    """A name that no server has: soulkit, the hash of the weights, and random digits, so that two
    runs with the same adapter do not unload each other's."""
    return f"soulkit-{adapter_hash(folder)}-{secrets.token_hex(4)}"


async def push_adapter(fleet: Replicas, folder: str | Path, name: str) -> None:
    """Load an adapter folder on every living server under `name`, which must be new there.

    Raises AdapterNotServed; then, and where it is cancelled, it is taken away again wherever it was
    loaded.
    """
    source = adapter_folder(folder).resolve()
    for url, listing in (await fleet.each(MODELS)).items():
        if isinstance(listing, dict) and any(entry.id == name for entry in entries_of(listing)):
            raise AdapterNotServed(
                f"{url} serves something under the name '{name}' already.",
                "A name that is used again may answer with what was computed under the old one.",
                "Take another name, or unload that adapter there.",
            )
    try:
        replies = await fleet.each(LOAD, {"lora_name": name, "lora_path": str(source)})
        for url, reply in replies.items():
            # The name was new a moment ago: who has it has it from a request whose reply was lost.
            if isinstance(reply, ServerRefused) and "already been loaded" not in reply.message:
                raise _unloadable(url, reply, source)
    except BaseException:  # Ctrl-C among them: the servers of others stay clean
        await unload_adapter(fleet, name)
        raise
    fleet.adapters.add(name)


async def unload_adapter(fleet: Replicas, name: str) -> None:
    """Take an adapter away from every living server, when nothing is under way for it any more.

    Servers that do not have it are left alone; any other refusal raises ServerRefused.
    """
    await fleet.idle(name)
    fleet.adapters.discard(name)
    try:
        replies = await fleet.each(UNLOAD, {"lora_name": name})
    except NoServerLeft:
        return  # with the servers their adapters are gone
    for reply in replies.values():
        if isinstance(reply, ServerRefused) and reply.status not in _NO_ROUTE:
            raise reply


def _unloadable(url: str, refusal: ServerRefused, source: Path) -> AdapterNotServed:
    unread = "adapter found" in refusal.message
    if refusal.status in _NO_ROUTE and not unread:
        return no_adapters(url)
    if unread:
        return AdapterNotServed(
            f"The server at {url} cannot read the adapter's folder {source}.",
            f"It reads adapters from its own disk. It says: {refusal.message}",
            "Put the folder under the same path there, or measure it with --engine local.",
        )
    if _OTHER_SHAPE.search(refusal.message):
        return AdapterNotServed(
            f"The adapter {source} does not fit the model at {url}.",
            f"It says: {refusal.message}",
            "Name one that was trained on this model: its adapter_config.json says on which.",
        )
    return AdapterNotServed(
        f"The server at {url} does not load the adapter {source}.",
        f"It says: {refusal.message}",
        _way_to_load(refusal.message.replace(str(source), "")),
    )


def _way_to_load(message: str) -> str:
    if _RANK.search(message):
        ranks = "RANK is the adapter's own or more (8, 16, 32, 64 ...)"
        return f"Start it with {HOW_TO_START}; {ranks}."
    if _DAMAGED.search(message):
        return _WHOLE
    return "Look into the server's log, or measure the adapter with --engine local."


def no_adapters(url: str) -> AdapterNotServed:
    """The error of a server that takes no adapters while it runs."""
    return AdapterNotServed(
        f"The server at {url} takes no adapters while it runs.",
        f"It has no POST {LOAD}, or not for adapters.",
        f"Start it with {HOW_TO_START}; or let soulkit start it: --engine vllm.",
    )


# -- an adapter that is measured -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter as requests name it."""

    name: str
    lent: bool
    """Whether soulkit loaded it, and takes it away in the end; else the servers had it."""

    async def unload(self, fleet: Replicas) -> None:
        """Leave the servers as they were."""
        if self.lent:
            await unload_adapter(fleet, self.name)


async def serve_adapter(
    fleet: Replicas, base: str, folder: str | Path, prompt_ids: Sequence[int]
) -> ServedAdapter:
    """Have the adapter in `folder` served beside the model `base`, and prove that it is.

    Servers that cannot load adapters while they run may have been started with this very folder:
    then it is asked for under the name that they gave it. Raises AdapterNotServed, and
    ModelLoadError for a damaged folder before any server is asked.
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
    """What a server lists: a model, or an adapter, whose `parent` is its model."""

    id: str
    root: str
    """Where the server has it from."""
    parent: str
    max_context: int | None


def entries_of(listing: Mapping[str, Any]) -> tuple[ModelEntry, ...]:
    """The entries of a reply to GET /v1/models; what cannot be read is left out."""
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


# -- proof -----------------------------------------------------------------------------------------


Logprobs = Sequence[Sequence[float]]
"""Of each prompt, in nats at temperature 1, of its tokens but the first."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far log-probs of the same tokens are apart, in nats."""

    largest: float
    mean: float

    @classmethod
    def between(cls, one: Logprobs, other: Logprobs) -> Distance:
        """Infinite where there is nothing to compare, where a number is none, or where the two are
        not of the same tokens."""
        nowhere = cls(math.inf, math.inf)
        if not one or [len(part) for part in one] != [len(part) for part in other]:
            return nowhere
        gaps = [abs(a - b) for parts in zip(one, other, strict=True)
                for a, b in zip(*parts, strict=True)]  # fmt: skip
        if not gaps or not all(map(math.isfinite, gaps)):
            return nowhere
        return cls(max(gaps), sum(gaps) / len(gaps))

    def words(self) -> str:
        return f"{self.largest:.2g} nats at most, {self.mean:.2g} on average"


@dataclass(frozen=True, slots=True)
class PromptReading:
    """What a server says of a prompt's tokens but the first."""

    logprobs: tuple[float, ...]
    """In nats, at temperature 1."""
    gaps: tuple[float, ...]
    """Nats from each to the most likely token in its place, as far as that was asked for."""


async def prompt_logprobs(
    fleet: Replicas, name: str, prompt_ids: Sequence[int]
) -> dict[str, tuple[float, ...]]:
    """Address → log-probs of a prompt's tokens, as `read_prompt` has them."""
    readings = await read_prompt(fleet, name, prompt_ids, top=0)
    return {url: reading.logprobs for url, reading in readings.items()}


async def read_prompt(
    fleet: Replicas, name: str, prompt_ids: Sequence[int], *, top: int = 1
) -> dict[str, PromptReading]:
    """Address → log-probs of a prompt's tokens but the first (nats, temperature 1), as every living
    server computes them for the model or adapter `name`, beside the `top` most likely tokens. Such
    a request reads no prefix cache.

    Raises ServerRefused, and AdapterNotServed for a reply without them.
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
    """Raise AdapterNotServed unless servers compute with an adapter.

    Unless it is zero it has to move the log-probs of a prompt from those of `base` by more than
    they differ when the base is asked twice. What was pushed and fails is taken away again.
    """
    try:
        await _check_moves(fleet, base, name, folder, prompt_ids)
    except BaseException:  # Ctrl-C among them
        if name in fleet.adapters:
            await unload_adapter(fleet, name)
        raise


async def _check_moves(
    fleet: Replicas, base: str, name: str, folder: str | Path, prompt_ids: Sequence[int]
) -> None:
    plain = await prompt_logprobs(fleet, base, prompt_ids)
    again = await prompt_logprobs(fleet, base, prompt_ids)
    served = await prompt_logprobs(fleet, name, prompt_ids)
    check_agreement(served, f"the adapter {adapter_folder(folder)}")
    if not any_weight(folder):
        return
    for url in served.keys() & plain.keys() & again.keys():
        moved = Distance.between([plain[url]], [served[url]]).largest
        if not moved > Distance.between([plain[url]], [again[url]]).largest:
            raise AdapterNotServed(
                f"The adapter {adapter_folder(folder)} was loaded at {url}, and nothing changed.",
                "Its weights are not zero, and the log-probs of a prompt are the same with it as "
                "without it: the base model would be measured under the adapter's name.",
                "Look into the server's log, or measure the adapter with --engine local.",
            )


def check_agreement(served: Mapping[str, Sequence[float]], what: str) -> None:
    """Refuse servers that compute other log-probs of the same prompt (address → nats): what is
    asked of one may be asked of another, so they must serve the same weights.

    Raises AdapterNotServed.
    """
    (first, one), *others = served.items()
    for url, other in others:
        mean = Distance.between([one], [other]).mean
        if not mean <= AGREEMENT:
            raise AdapterNotServed(
                f"The servers at {first} and {url} do not compute the same with {what}.",
                f"Log-probs of a prompt are {mean:.2g} nats apart on average: other weights, or "
                "other numbers (dtype, quantization).",
                "Start them with the same model and the same flags, or attach one of them.",
            )


def any_weight(folder: str | Path) -> bool:
    """Whether an adapter changes anything: a LoRA whose every B is zero does not.

    Raises ModelLoadError for a file that cannot be read.
    """
    with _weights_of(folder) as (file, tensors):
        for one in tensors:
            file.seek(one.start)
            if "lora_A" not in one.name and not _all_zero(file.read, one.end - one.start):
                return True
    return False


def check_adapter_file(folder: str | Path) -> None:
    """Raise ModelLoadError where an adapter's weights are missing, cut short or no safetensors."""
    with _weights_of(folder):
        pass


@contextmanager
def _weights_of(folder: str | Path) -> Iterator[tuple[BinaryIO, Sequence[StoredTensor]]]:
    """The opened file of an adapter's weights and its tensors. ModelLoadError if it is damaged."""
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
            f"The adapter's weights {path} cannot be read.",
            f"{type(error).__name__}: {error}",
            _WHOLE,
        ) from error


def _all_zero(read: Callable[[int], bytes], size: int) -> bool:
    """Whether so many bytes are zeros; they are read in pieces."""
    while size > 0:
        piece = read(min(size, _CHUNK))
        if not piece:
            raise ValueError("the file ends before its weights do")
        if piece.strip(_ZEROS):
            return False
        size -= len(piece)
    return True


def _read_logprobs(url: str, reply: Body, prompt_ids: Sequence[int]) -> PromptReading:
    """The log-prob of each token of the prompt but the first, and how far it is from the best."""
    try:
        listed = reply["choices"][0]["prompt_logprobs"]
        first, *others = listed
        if first is not None:
            raise ValueError("a first token that has a log-prob")
        pairs = zip(prompt_ids[1:], others, strict=True)
        own = tuple(float(at[str(token)]["logprob"]) for token, at in pairs)
        best = (max(float(one["logprob"]) for one in at.values()) for at in others)
        return PromptReading(own, tuple(a - b for a, b in zip(best, own, strict=True)))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise AdapterNotServed(
            f"The server at {url} does not tell the log-probs of a prompt.",
            f"What came instead cannot be read ({type(error).__name__}), so nothing proves which "
            "weights it computes with.",
            "Attach a vLLM server of version 0.31 or newer, or take --engine local.",
        ) from None
