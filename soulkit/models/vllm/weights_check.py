"""Whether attached servers compute with the weights of a folder: both read the same prompts.

What a server lists proves nothing: one with other weights and the same tokenizer answers every
request. So the log-probs of a few prompts are compared with those of the folder's own forward pass,
on this machine. Where both compute in float32 they agree to `EXACT` nats. In 16-bit numbers they
do not, and `GROSS` shows only that the model is the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from soulkit.errors import MissingPackage
from soulkit.models.codec import Codec
from soulkit.models.vllm.adapters import Distance, Logprobs, PromptReading, read_prompt
from soulkit.models.vllm.capabilities import PROBE_TEXT, IncompatibleServer
from soulkit.models.vllm.client import ServerRefused
from soulkit.models.vllm.replicas import Replicas
from soulkit.types import Segment

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
    """Whether a server computes logits in 16 bits, by the differences between the log-probs of two
    tokens in the same place. Where it tells none, it does not."""
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
