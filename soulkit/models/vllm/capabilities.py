"""Checks servers that soulkit did not start, before anything is played.

    server up? ─▶ which model? ─▶ token ids? ─▶ which log-probs? ─▶ adapters?

One-token requests show what a server supports. Servers with unusable results are rejected: no token
ids, another tokenizer, or different weights on several servers. Log-probs are *processed* if the
distances between the top ones double at temperature 0.5, else *raw*. Adapters are supported if
their path answers GET with 405. To verify weights, the log-probs of a few prompts are compared with
a forward pass of the folder: they must agree within `EXACT` nats in float32, and within `GROSS` in
16-bit numbers, which only shows that the model is the right one.
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
"""Number of most likely tokens requested; servers allow 20 by default."""
LEAST_SPREAD = 1e-3
"""Minimum nats between the first and the last of them; below it, nothing can be concluded."""
_ROUNDING = 1e-3
"""Tolerance for rounded log-probs, in nats, and for sums of probabilities."""
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_HOW = "--generation-config vllm --logprobs-mode processed_logprobs"
_OTHER_WAY = "use endpoint:MODEL@URL, or evaluate it with soul eval api"


Basis = Literal["", "declared", "verified"]
"""How the weights of an attached server were verified: not at all (declared) or by comparison.
Empty for weights that soulkit loaded or served itself."""


class IncompatibleServer(ModelLoadError):
    """A running server cannot be used for the requested model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCapabilities:
    """What a server, or every server of a fleet, supports."""

    served: str
    """The base model's served name."""
    version: str
    """vLLM's version, or several separated by commas. Empty: unknown."""
    max_context: int | None = None
    """Maximum tokens of prompt and reply; the minimum over all servers."""
    logprobs: LogprobsMode = "processed"
    adapters: bool = False
    """Whether it can load adapters at run time."""
    forms: bool | None = None
    """Whether it enforces a JSON schema; None: not checked yet."""
    basis: Basis = ""
    remarks: tuple[str, ...] = ()
    """Lines to print: assumptions about the model, and missing features."""


def attached_addresses(urls: Iterable[str]) -> tuple[Address, ...]:
    """Addresses of running servers, with the key in VLLM_API_KEY if it is set.

    ModelLoadError if the key cannot be sent.
    """
    key = read_key(SERVERS_KEY, optional=True)
    return tuple(Address(url, key) for url in urls)


def probe_ids(codec: Codec) -> tuple[int, ...]:
    """The prompt that servers are checked with: at most PROBE_TOKENS ids, ending in the highest id
    of a word. Special tokens are avoided: a server may look for images in their place."""
    special = codec.tokenizer.added_tokens_decoder
    words = (one for one in codec.tokenizer.get_vocab().values() if one not in special)
    return (*_encode(codec)[: PROBE_TOKENS - 1], max(words))


async def probe_servers(fleet: Replicas, model: str, codec: Codec) -> ServerCapabilities:
    """Check all servers of the fleet for the weights of `model` with its `codec`.

    Raises IncompatibleServer, AdapterNotServed if they disagree, and NoServerLeft.
    """
    if silent := await fleet.silent():
        raise IncompatibleServer(
            f"No vLLM server answers at {', '.join(silent)}.",
            "Its /health gave no answer, or reported that its engine is dead.",
            "Wait until the server has started, check its address, or remove it.",
        )
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
        served=served, version=", ".join(sorted(versions - {""})),
        max_context=least_limit(*(entry.max_context for entry in entries.values())), logprobs=mode,
        adapters=all(_status(one) == 405 for one in (await fleet.each(LOAD)).values()),
        remarks=(*_taken_for(entries, model), *_about(mode), *_short(entries, codec)),
    )  # fmt: skip


# -- servers and models ----------------------------------------------------------------------------


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
            f"The server at {url} rejects the key: {refusal.message}",
            f"The key for attached servers is read from {SERVERS_KEY}, which {there}.",
            f"Run: export {SERVERS_KEY}=... with the key that the server was started with.",
        )
    return IncompatibleServer(
        f"The server at {url} has no list of models: {refusal}",
        "It is not a vLLM server, or the address is wrong.",
        "Use its address without a path, such as vllm@http://host:8000.",
    )


def _base_model(url: str, entries: Sequence[ModelEntry], model: str) -> ModelEntry:
    """The entry for `model`, or else the only model, which may have several names."""
    bases = [entry for entry in entries if not entry.parent]
    same = [entry for entry in bases if _is(entry, model)]
    roots = {entry.root or entry.id for entry in bases}
    if same or (len(roots) == 1 and not _hub_names_differ(min(roots), model)):
        return (same or bases)[0]
    names = ", ".join(_name_and_place(entry) for entry in bases) or "nothing"
    raise IncompatibleServer(
        f"The server at {url} does not serve '{model}'.",
        f"It serves {names}.",
        "Attach a server that was started with this model (with --served-model-name if it has "
        "another name there), or use the model that it serves.",
    )


def _is(entry: ModelEntry, model: str) -> bool:
    """Whether a server's model has the name of `model` or was loaded from the same place."""
    name = model.partition("@")[0] if not Path(model).exists() else str(Path(model).resolve())
    return model in (entry.id, entry.root) or name in (entry.id, entry.root)


def _hub_names_differ(root: str, model: str) -> bool:
    """Whether a server's only model and `model` are Hub models with different names."""
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
                "A request may go to either server, so the model must have the same name on both.",
                "Start them with the same model and the same --served-model-name.",
            )
    return entry.id


def _taken_for(entries: Mapping[str, ModelEntry], model: str) -> tuple[str, ...]:
    return tuple(
        f"{url} calls its model {_name_and_place(entry)}; soulkit assumes it is {model}"
        for url, entry in entries.items()
        if not _is(entry, model)
    )


def _short(entries: Mapping[str, ModelEntry], codec: Codec) -> tuple[str, ...]:
    """One line per server with less context than the model."""
    limit = codec.context_limit
    return tuple(
        f"{url} was started with --max-model-len {entry.max_context}, less than the model's "
        f"context of {limit} tokens: longer prompts stay unscored, and longer replies are cut"
        for url, entry in entries.items()
        if limit is not None and entry.max_context is not None and entry.max_context < limit
    )


# -- token ids -------------------------------------------------------------------------------------


def _encode(codec: Codec) -> list[int]:
    return list(codec.tokenizer.encode(PROBE_TEXT, add_special_tokens=False))


async def _same_tokens(fleet: Replicas, served: str, codec: Codec) -> None:
    """Reject a server that tokenises differently. Servers without /tokenize are accepted."""
    question: Body = {"model": served, "prompt": PROBE_TEXT, "add_special_tokens": False}
    ids = _encode(codec)
    for url, reply in (await fleet.each("/tokenize", question)).items():
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        if isinstance(tokens, list) and tokens != ids:
            raise _other_tokenizer(url, "It converts the same text to other ids.")


def _other_tokenizer(url: str, why: str) -> IncompatibleServer:
    return IncompatibleServer(
        f"The server at {url} has a different tokenizer than the requested model.",
        f"{why} Token ids from soulkit would mean other words there.",
        "Attach a server that serves the requested model, or request the model of this one.",
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
            raise _no_ids(url, "Its reply lacks the ids of the prompt or of the answer.")
    cold = await _choices(fleet, _question(served, ids, 0.5))
    modes = {logprobs_mode(_top(warm[url]), _top(cold[url])) for url in cold}
    worst: tuple[LogprobsMode, ...] = ("none", "raw", "processed")
    return next((mode for mode in worst if mode in modes), "none")


async def _choices(fleet: Replicas, question: Body) -> dict[str, Mapping[str, Any]]:
    """Address → first choice of each reply; without log-probs if a server gives none."""
    replies = await fleet.each(COMPLETIONS_PATH, question)
    if any(_status(reply) in (400, 422) for reply in replies.values()):
        plain = {name: question[name] for name in question if name != "logprobs"}
        replies |= await fleet.each(COMPLETIONS_PATH, plain)
    choices: dict[str, Mapping[str, Any]] = {}
    for url, reply in replies.items():
        if isinstance(reply, ServerRefused):
            if "vocabulary" in reply.message:
                raise _other_tokenizer(url, f"Its answer: {reply.message}")
            raise _no_ids(url, f"Its answer: {reply}")
        listed = reply.get("choices")
        first = listed[0] if isinstance(listed, list) and listed else None
        choices[url] = first if isinstance(first, dict) else {}
    return choices


def _status(reply: Body | ServerRefused) -> int:
    return reply.status if isinstance(reply, ServerRefused) else 200


def _no_ids(url: str, why: str) -> IncompatibleServer:
    return IncompatibleServer(
        f"The server at {url} does not accept and return token ids.",
        f"{why} Replies would have to be tokenised again, which can change them.",
        f"Attach a vLLM server of version 0.31 or newer; for any other server, {_OTHER_WAY}.",
    )


# -- log-probs and adapters ------------------------------------------------------------------------


def logprobs_mode(warm: Mapping[str, float], cold: Mapping[str, float]) -> LogprobsMode:
    """The distribution of a server's log-probs, from its top ones (token → nats) at temperature 1
    and 0.5. Returns the more cautious answer if they are too close to tell."""
    both = [token for token in warm if token in cold]
    if len(both) < 2 or not (_add_up(warm) and _add_up(cold)):
        return "none"
    most, least = max(both, key=lambda t: warm[t]), min(both, key=lambda t: warm[t])
    spread = warm[most] - warm[least]
    if spread < LEAST_SPREAD or cold[most] - cold[least] <= 1.5 * spread:
        return "raw"
    return "processed" if _normalised(warm, cold[most] - 2 * warm[most]) else "none"


def _add_up(nats: Mapping[str, float]) -> bool:
    """Whether these can be log-probs of exclusive tokens; logits hardly ever can."""
    return all(one <= _ROUNDING for one in nats.values()) and (
        sum(map(math.exp, nats.values())) <= 1 + _ROUNDING
    )


def _normalised(warm: Mapping[str, float], shift: float) -> bool:
    """Whether halving the temperature shifted the doubled values as it shifts log-probs, rather
    than not at all, as with logits.

    Log-probs shift by -log of the sum of p². Tokens outside the top ones are unknown, but none is
    more likely than the last of these.
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
        "log-probs before temperature (raw), which are only used at temperature 0 and 1"
        if mode == "raw" else "no usable log-probs, so replies have none"
    )  # fmt: skip
    return (
        f"the server returns {which}; start it with {_HOW} to get log-probs at every temperature",
    )


# -- weights ---------------------------------------------------------------------------------------


EXACT = 1e-4
"""Maximum difference in nats at any token between computations in float32."""
GROSS = 0.25
"""Maximum mean difference in nats in narrower number formats."""
LONGEST = 256
"""Maximum tokens of a compared prompt."""
QUESTIONS = (
    "Say in one sentence what you would do on a free afternoon, and why.",
    "Mara lends her bicycle to Tom. He brings it back with a flat tyre and says nothing. The next "
    "morning she finds it. What does she think, what does she say to him, and what does he answer?",
)
_GRID, _OFF_GRID = 4096, 0.02
"""16-bit logits differ by multiples of 1/4096 of a nat; float32 log-probs only by chance."""


@dataclass(frozen=True, slots=True)
class FolderReading:
    """Log-probs of the compared prompts, computed from a folder."""

    what: str
    """The model, with its adapter."""
    logprobs: Logprobs
    computed: str
    """Number format of the computation: `float32`."""


def compared_prompts(codec: Codec, limit: int | None) -> tuple[tuple[int, ...], ...]:
    """Ids of the prompts to compare, each with room for one more token within `limit`."""
    most = LONGEST if limit is None else min(LONGEST, limit - 1)
    plain = codec.tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    asked = [codec.prompt_ids([Segment("user", text)]) for text in QUESTIONS]
    return tuple(tuple(ids[-most:]) for ids in (plain, *asked))


def read_folder(
    model: str, adapter: Path | None, prompts: Sequence[Sequence[int]], *, device: str, dtype: str
) -> FolderReading:
    """Log-probs of the prompts from a forward pass in this process.

    MissingPackage without torch; ModelLoadError for weights that cannot be loaded.
    """
    try:
        import torch
    except ImportError as error:
        purpose = "--verify-weights, which runs the model's folder on this machine"
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
    """Compare every server of the fleet, under `name`, with a folder; returns a line with the
    largest difference. IncompatibleServer if it is too large."""
    lines: dict[str, list[PromptReading]] = {}
    try:
        for prompt in prompts:  # one at a time: see Pusher
            for url, reading in (await read_prompt(fleet, name, prompt)).items():
                lines.setdefault(url, []).append(reading)
    except ServerRefused as refusal:
        raise IncompatibleServer(
            f"A server does not return the log-probs of prompts for '{name}'.",
            f"Its answer: {refusal}. Without log-probs, its weights cannot be compared with "
            f"{folder.what}.",
            "Attach a vLLM server of version 0.31 or newer, or remove --verify-weights.",
        ) from refusal
    farthest, exact = Distance(0.0, 0.0), True
    for url, readings in lines.items():
        apart = Distance.between(folder.logprobs, [one.logprobs for one in readings])
        alike = folder.computed == "float32" and not _is_coarse(readings)
        if not (apart.largest <= EXACT if alike else apart.mean <= GROSS):
            raise _other_weights(url, folder, apart, alike)
        farthest, exact = max(farthest, apart, key=lambda one: one.largest), exact and alike
    remark = "" if exact else "; in 16-bit numbers only large differences show"
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
        f"The server at {url} does not use the weights of {folder.what}.",
        f"Log-probs of prompts differ by {apart.words()}; the maximum is {bound}.",
        "Use the folder that the server was started with, or start the server with this one"
        + (" in the same number format (--dtype float32)." if alike else "."),
    )
