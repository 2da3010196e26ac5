"""What a server that somebody else started is and can: asked before anything is played.

    who is there ─▶ which model ─▶ prompted with ids? ─▶ whose log-probs? ─▶ adapters?

Requests of one token show what a server can do. What would make numbers of another meaning is
refused: no ids, another tokenizer, several servers with different weights. Log-probs are
*processed* where the distances between the top ones double at temperature 0.5, else *raw*. Adapters
can be loaded where the path for it answers a GET with 405. Where weights are to be verified, the
log-probs of a few prompts are compared with the folder's own forward pass: they agree to `EXACT`
nats in float32, and to `GROSS` in 16-bit numbers, which shows only that the model is the right one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from soulkit.errors import MissingPackage, ModelLoadError
from soulkit.models.api.addresses import read_key
from soulkit.models.codec import Codec, least_limit
from soulkit.models.vllm.adapters import (
    LOAD,
    MODELS,
    Distance,
    Logprobs,
    ModelEntry,
    PromptReading,
    check_agreement,
    entries_of,
    prompt_logprobs,
    read_prompt,
)
from soulkit.models.vllm.client import COMPLETIONS_PATH, Address, LogprobsMode, ServerRefused
from soulkit.models.vllm.replicas import Body, Replicas
from soulkit.trust import SERVERS_KEY
from soulkit.types import Segment

PROBE_TEXT = (
    "Where is the apple? Anna put 3 of them into the box at 17:05, \"then\" left; nobody saw it.\n"
    "\tCafé, naïve, 2 × 3 = 6, 你好 — that's all."
)  # fmt: skip
PROBE_TOKENS = 64
TOP = 5
"""Log-probs of the most likely tokens that are asked for; servers give 20 by default."""
LEAST_SPREAD = 1e-3
"""Nats between the first and the last of them, below which nothing can be told from them."""
_ROUNDING = 1e-3
"""Nats, and shares of one, by which rounded log-probs may be off."""
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_HOW = "--generation-config vllm --logprobs-mode processed_logprobs"
_OTHER_WAY = "name it as endpoint:MODEL@URL, or measure it with soul eval api"


Basis = Literal["", "declared", "verified"]
"""How a run knows with which weights an attached server computes: it was told, or it compared them.
Empty for weights that soulkit loaded or served itself."""


class IncompatibleServer(ModelLoadError):
    """A running server cannot stand in for the model that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCapabilities:
    """What a server, or each of several, can do."""

    served: str
    """The base model's name there."""
    version: str
    """Of vLLM; several, parted by commas, where servers differ. Empty: not known."""
    max_context: int | None = None
    """Tokens of prompt and reply; the smallest of several servers'."""
    prompt_ids: bool = True
    """Whether it is prompted with ids and answers with ids."""
    logprobs: LogprobsMode = "processed"
    adapters: bool = False
    """Whether it loads adapters while it runs."""
    forms: bool | None = None
    """Whether it holds replies to a schema; None: not asked yet."""
    basis: Basis = ""
    remarks: tuple[str, ...] = ()
    """Lines for whoever attaches: what was taken for what, and what is missing."""


def attached_addresses(urls: Iterable[str]) -> tuple[Address, ...]:
    """Running servers as they are asked, with the key in VLLM_API_KEY where there is one.

    ModelLoadError where what stands there can be none.
    """
    key = read_key(SERVERS_KEY, optional=True)
    return tuple(Address(url, key) for url in urls)


def probe_ids(codec: Codec) -> tuple[int, ...]:
    """The prompt that servers are examined with: at most PROBE_TOKENS, the last one the highest id
    of a word. Ids of special tokens may stand for images, which a server then looks for."""
    special = codec.tokenizer.added_tokens_decoder
    words = (one for one in codec.tokenizer.get_vocab().values() if one not in special)
    return (*_encode(codec)[: PROBE_TOKENS - 1], max(words))


async def probe_servers(fleet: Replicas, model: str, codec: Codec) -> ServerCapabilities:
    """What all servers of the fleet are and can, for the weights of `model` and its `codec`.

    Raises IncompatibleServer, AdapterNotServed where they disagree, and NoServerLeft.
    """
    await _all_there(fleet)
    entries = await _base_models(fleet, model)
    served = _one_name(entries)
    ids = probe_ids(codec)
    mode = await _read_ids(fleet, served, ids)
    await _same_tokens(fleet, served, codec)
    if len(fleet.urls) > 1:
        check_agreement(await prompt_logprobs(fleet, served, ids), f"'{served}'")
    replies = (await fleet.each("/version")).values()
    versions = {str(reply.get("version") or "") for reply in replies if isinstance(reply, dict)}
    return ServerCapabilities(
        served=served,
        version=", ".join(sorted(versions - {""})),
        max_context=least_limit(*(entry.max_context for entry in entries.values())),
        logprobs=mode,
        adapters=all(_status(one) == 405 for one in (await fleet.each(LOAD)).values()),
        remarks=(*_taken_for(entries, model), *_about(mode), *_short(entries, codec)),
    )


# -- who is there ----------------------------------------------------------------------------------


async def _all_there(fleet: Replicas) -> None:
    silent = await fleet.silent()
    if silent:
        raise IncompatibleServer(
            f"No vLLM server answers at {', '.join(silent)}.",
            "Nothing came back from its /health, or that its engine is dead.",
            "Wait until it has started, check the address, or leave it out.",
        )


async def _base_models(fleet: Replicas, model: str) -> dict[str, ModelEntry]:
    entries = {}
    for url, listing in (await fleet.each(MODELS)).items():
        if isinstance(listing, ServerRefused):
            raise _unlisted(url, listing)
        entries[url] = _base_model(url, entries_of(listing), model)
    return entries


def _unlisted(url: str, refusal: ServerRefused) -> IncompatibleServer:
    if refusal.status in (401, 403):
        there = "is set" if os.environ.get(SERVERS_KEY) else "is not set"
        return IncompatibleServer(
            f"The server at {url} refuses the key: {refusal.message}",
            f"The key of servers that are attached is read from {SERVERS_KEY}, which {there}.",
            f"Run: export {SERVERS_KEY}=... with the key that the server was started with.",
        )
    return IncompatibleServer(
        f"The server at {url} has no list of models: {refusal}",
        "It is no vLLM server, or the address is not its own.",
        "Give its address without a path, as vllm@http://host:8000.",
    )


def _base_model(url: str, entries: Sequence[ModelEntry], model: str) -> ModelEntry:
    """The one that is `model`, or else the only one. Its other names count as one."""
    bases = [entry for entry in entries if not entry.parent]
    same = [entry for entry in bases if _is(entry, model)]
    roots = {entry.root or entry.id for entry in bases}
    if same or (len(roots) == 1 and not _hub_names_differ(min(roots), model)):
        return (same or bases)[0]
    names = ", ".join(_name_and_place(entry) for entry in bases) or "nothing"
    raise IncompatibleServer(
        f"The server at {url} does not serve '{model}'.",
        f"It serves {names}.",
        "Attach a server that was started with this model (or with --served-model-name, where it "
        "has another name there), or name the model that it serves.",
    )


def _is(entry: ModelEntry, model: str) -> bool:
    """Whether a server's model goes by the name of `model`, or comes from the same place."""
    name = model.partition("@")[0] if not Path(model).exists() else str(Path(model).resolve())
    return model in (entry.id, entry.root) or name in (entry.id, entry.root)


def _hub_names_differ(root: str, model: str) -> bool:
    """Whether a server's only model and `model` are models of the hub with different names."""
    names = [one.partition("@")[0] for one in (root, model)]
    on_hub = all(_HUB_NAME.fullmatch(one) and not Path(one).exists() for one in names)
    return on_hub and len({one.rpartition("/")[2].lower() for one in names}) > 1


def _name_and_place(entry: ModelEntry) -> str:
    """`base (from owner/name)`."""
    return f"{entry.id} (from {entry.root})" if entry.root not in ("", entry.id) else entry.id


def _one_name(entries: Mapping[str, ModelEntry]) -> str:
    (first, entry), *others = entries.items()
    for url, other in others:
        if other.id != entry.id:
            raise IncompatibleServer(
                f"The servers at {first} and {url} serve '{entry.id}' and '{other.id}'.",
                "One request may go to either, so the model must have one name on both.",
                "Start them with the same model and the same --served-model-name.",
            )
    return entry.id


def _taken_for(entries: Mapping[str, ModelEntry], model: str) -> tuple[str, ...]:
    return tuple(
        f"{url} calls its model '{entry.id}'"
        + (f" (from {entry.root})" if entry.root not in ("", entry.id) else "")
        + f"; it is taken for {model}"
        for url, entry in entries.items()
        if not _is(entry, model)
    )


def _short(entries: Mapping[str, ModelEntry], codec: Codec) -> tuple[str, ...]:
    """A line for every server whose context is shorter than the model's."""
    limit = codec.context_limit
    return tuple(
        f"{url} was started with --max-model-len {entry.max_context}, and the model holds {limit}: "
        f"a prompt and its reply have {entry.max_context} tokens together; longer prompts are left "
        "unscored, longer replies are cut"
        for url, entry in entries.items()
        if limit is not None and entry.max_context is not None and entry.max_context < limit
    )


# -- ids -------------------------------------------------------------------------------------------


def _encode(codec: Codec) -> list[int]:
    return list(codec.tokenizer.encode(PROBE_TEXT, add_special_tokens=False))


async def _same_tokens(fleet: Replicas, served: str, codec: Codec) -> None:
    """Refuse a server that splits words otherwise; many have no way of saying how they do."""
    question: Body = {"model": served, "prompt": PROBE_TEXT, "add_special_tokens": False}
    ids = _encode(codec)
    for url, reply in (await fleet.each("/tokenize", question)).items():
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        if isinstance(tokens, list) and tokens != ids:
            raise _other_tokenizer(url, "The same text becomes other ids there.")


def _other_tokenizer(url: str, why: str) -> IncompatibleServer:
    return IncompatibleServer(
        f"The server at {url} has another tokenizer than the model that was asked for.",
        f"{why} Ids that are sent would mean other words there.",
        "Attach a server of this model, or name the model that it serves.",
    )


def _question(served: str, ids: Sequence[int], temperature: float) -> Body:
    return {
        "model": served, "prompt": list(ids), "max_tokens": 1, "seed": 1,
        "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "return_token_ids": True, "logprobs": TOP, "return_tokens_as_token_ids": True,
    }  # fmt: skip


async def _read_ids(fleet: Replicas, served: str, ids: Sequence[int]) -> LogprobsMode:
    warm = await _choices(fleet, _question(served, ids, 1.0))
    for url, choice in warm.items():
        emitted = choice.get("token_ids")
        are_ids = isinstance(emitted, list) and emitted and all(type(e) is int for e in emitted)
        if choice.get("prompt_token_ids") != list(ids) or not are_ids:
            raise _no_ids(url, "Its reply does not name the ids of the prompt and of the answer.")
    cold = await _choices(fleet, _question(served, ids, 0.5))
    modes = {logprobs_mode(_top(warm[url]), _top(cold[url])) for url in cold}
    worst: tuple[LogprobsMode, ...] = ("none", "raw", "processed")
    return next((mode for mode in worst if mode in modes), "none")


async def _choices(fleet: Replicas, question: Body) -> dict[str, Mapping[str, Any]]:
    """Address → the only choice of a reply; without log-probs where a server gives none."""
    replies = await fleet.each(COMPLETIONS_PATH, question)
    if any(_status(reply) in (400, 422) for reply in replies.values()):
        plain = {name: question[name] for name in question if name != "logprobs"}
        replies |= await fleet.each(COMPLETIONS_PATH, plain)
    choices: dict[str, Mapping[str, Any]] = {}
    for url, reply in replies.items():
        if isinstance(reply, ServerRefused):
            if "vocabulary" in reply.message:
                raise _other_tokenizer(url, f"It says: {reply.message}")
            raise _no_ids(url, f"It says: {reply}")
        listed = reply.get("choices")
        first = listed[0] if isinstance(listed, list) and listed else None
        choices[url] = first if isinstance(first, dict) else {}
    return choices


def _status(reply: Body | ServerRefused) -> int:
    return reply.status if isinstance(reply, ServerRefused) else 200


def _no_ids(url: str, why: str) -> IncompatibleServer:
    return IncompatibleServer(
        f"The server at {url} does not answer prompts of ids with ids.",
        f"{why} Replies would have to be tokenised again, which is not always the same.",
        f"Attach a vLLM server of version 0.31 or newer; any other server: {_OTHER_WAY}.",
    )


# -- log-probs and adapters ------------------------------------------------------------------------


def logprobs_mode(warm: Mapping[str, float], cold: Mapping[str, float]) -> LogprobsMode:
    """Of which distribution a server's log-probs are, from the top ones at temperature 1 and 0.5
    (token → nats). Where they are too close to tell, the more cautious answer."""
    both = [token for token in warm if token in cold]
    if len(both) < 2 or not (_add_up(warm) and _add_up(cold)):
        return "none"
    most, least = max(both, key=lambda t: warm[t]), min(both, key=lambda t: warm[t])
    spread = warm[most] - warm[least]
    if spread < LEAST_SPREAD or cold[most] - cold[least] <= 1.5 * spread:
        return "raw"
    return "processed" if _normalised(warm, cold[most] - 2 * warm[most]) else "none"


def _add_up(nats: Mapping[str, float]) -> bool:
    """Whether these can be log-probs of tokens that exclude each other; logits hardly ever are."""
    return all(one <= _ROUNDING for one in nats.values()) and (
        sum(map(math.exp, nats.values())) <= 1 + _ROUNDING
    )


def _normalised(warm: Mapping[str, float], shift: float) -> bool:
    """Whether halving the temperature moved what doubled as far as it moves log-probs, and left it
    not in its place, as it does logits.

    Log-probs move by -log of the sum of p². Those of the tokens that are not among the top ones are
    not known, but none of them is more likely than the last of these.
    """
    top = sorted((math.exp(nats) for nats in warm.values()), reverse=True)[:TOP]
    most = sum(p * p for p in top) + top[-1] * max(0.0, 1 - sum(top))
    return shift >= -math.log(min(1.0, most)) / 2 - _ROUNDING


def _top(choice: Mapping[str, Any]) -> dict[str, float]:
    try:
        top = choice["logprobs"]["top_logprobs"][0]
        return {str(token): float(nats) for token, nats in top.items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return {}


def _about(mode: LogprobsMode) -> tuple[str, ...]:
    if mode == "processed":
        return ()
    which = (
        "log-probs before temperature (raw): they are used at temperature 0 and 1 alone"
        if mode == "raw" else "no log-probs that could be used: replies carry none"
    )  # fmt: skip
    return (f"the server gives {which}; start it with {_HOW} to have all of them",)


# -- weights ---------------------------------------------------------------------------------------


EXACT = 1e-4
"""Nats between two computations of the same weights at any token, in float32."""
GROSS = 0.25
"""Nats between them on average, in narrower numbers."""
LONGEST = 256
"""Tokens of a compared prompt at most."""
QUESTIONS = (
    "Say in one sentence what you would do on a free afternoon, and why.",
    "Mara lends her bicycle to Tom. He brings it back with a flat tyre and says nothing. The next "
    "morning she finds it. What does she think, what does she say to him, and what does he answer?",
)
_GRID, _OFF_GRID = 4096, 0.02
"""16-bit logits differ by multiples of 1/4096 of a nat; float32 log-probs do so by chance."""


@dataclass(frozen=True, slots=True)
class FolderReading:
    """What the weights of a folder say of the compared prompts."""

    what: str
    """The model, with its adapter."""
    logprobs: Logprobs
    computed: str
    """In which numbers: `float32`."""


def compared_prompts(codec: Codec, limit: int | None) -> tuple[tuple[int, ...], ...]:
    """Ids of the prompts that are compared, each with room for one more token within `limit`."""
    most = LONGEST if limit is None else min(LONGEST, limit - 1)
    plain = codec.tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    asked = [codec.prompt_ids([Segment("user", text)]) for text in QUESTIONS]
    return tuple(tuple(ids[-most:]) for ids in (plain, *asked))


def read_folder(
    model: str, adapter: Path | None, prompts: Sequence[Sequence[int]], *, device: str, dtype: str
) -> FolderReading:
    """Log-probs of the prompts by a model's own forward pass in this process.

    MissingPackage without torch, ModelLoadError for weights that cannot be loaded.
    """
    try:
        import torch
    except ImportError as error:
        purpose = "--verify-weights, which computes with the model's folder on this machine"
        raise MissingPackage("torch", purpose) from error
    from soulkit.models.local.sampler import LocalModel

    loaded = LocalModel.load(model, adapter=adapter, device=device, dtype=dtype)
    logprobs = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=loaded.model.device)
            nats = loaded.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            picked = nats.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            logprobs.append(picked.tolist())
    numbers = next(loaded.model.parameters()).dtype
    what = model if adapter is None else f"{model} with the adapter {adapter}"
    return FolderReading(what, logprobs, str(numbers).removeprefix("torch."))


async def compare_weights(
    fleet: Replicas, name: str, prompts: Sequence[Sequence[int]], folder: FolderReading
) -> str:
    """Compare every server of the fleet, asked under `name`, with a folder; a line that says how
    far the farthest one is from it. IncompatibleServer where one is too far."""
    lines: dict[str, list[PromptReading]] = {}
    try:
        for prompt in prompts:  # one at a time: see Pusher
            for url, reading in (await read_prompt(fleet, name, prompt)).items():
                lines.setdefault(url, []).append(reading)
    except ServerRefused as refusal:
        raise IncompatibleServer(
            f"A server does not tell the log-probs of prompts under the name '{name}'.",
            f"It says: {refusal}. Without them its weights cannot be compared with {folder.what}.",
            "Attach a vLLM server of version 0.31 or newer, or leave out --verify-weights.",
        ) from refusal
    farthest, exact = Distance(0.0, 0.0), True
    for url, readings in lines.items():
        apart = Distance.between(folder.logprobs, [one.logprobs for one in readings])
        alike = folder.computed == "float32" and not _is_coarse(readings)
        if not (apart.largest <= EXACT if alike else apart.mean <= GROSS):
            raise _other_weights(url, folder, apart, alike)
        farthest, exact = max(farthest, apart, key=lambda one: one.largest), exact and alike
    remark = "" if exact else "; in 16-bit numbers this shows a gross difference only"
    return f"weights of {folder.what} verified at {', '.join(lines)}: {farthest.words()}{remark}"


def _is_coarse(readings: Sequence[PromptReading]) -> bool:
    """Whether a server's log-probs lie on the grid of 16-bit logits."""
    steps = [gap * _GRID for one in readings for gap in one.gaps if gap > 0]
    on_grid = sum(abs(step - round(step)) <= _OFF_GRID for step in steps)
    return 2 * on_grid > len(steps)


def _other_weights(
    url: str, folder: FolderReading, apart: Distance, alike: bool
) -> IncompatibleServer:
    bound = f"{EXACT:g} nats at any token" if alike else f"{GROSS:g} nats on average"
    return IncompatibleServer(
        f"The server at {url} does not compute with the weights of {folder.what}.",
        f"Log-probs of prompts differ by {apart.words()}, and {bound} are allowed here.",
        "Name the folder that the server was started with, or start the server with this one"
        + (" in the same numbers (--dtype float32)." if alike else "."),
    )
