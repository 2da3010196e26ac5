"""Checks that the decode loop (`decode.py`) gives the log-probs of the model's plain forward pass.

The loop runs on two prompts of unequal length, and its log-probs are compared with those of one
plain pass per reply. In half precision, rounding in deep models exceeds any fixed bound, so the
allowed difference is a multiple of that between two plain passes. The second one has further tokens
after the reply, which are invisible to it but change the order of sums.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from soulkit.models.local.decode import Windows, decode_batch
from soulkit.models.local.draw import Draw
from soulkit.types import Sampling

log = logging.getLogger(__name__)

PROBE_WINDOW = 1024
"""The longer prompt exceeds an attention window of at most this many tokens."""
FURTHER = 32
"""Tokens after a reply in the second plain pass."""
ALLOWED, ALLOWED_HALF = {torch.float64: 1e-3, torch.float32: 1e-3}, 0.02
"""Difference in nats that is always allowed."""
MULTIPLE = 3
"""Allowed difference / difference between two plain passes. With 4 to 36 random layers in bfloat16,
the loop was at most 1.2 times as far away."""
_REPORTED: set[str] = set()
"""Names of the models that `report_generate` has reported."""


def report_generate(name: str, fault: str) -> None:
    """Say once that a model is sampled with `generate`, and what that costs."""
    if name in _REPORTED:
        return
    _REPORTED.add(name)
    log.warning(
        "%s: replies are generated with transformers' `generate`, because %s. This is slower: it "
        "computes the prompt anew for every draft, and ended rows until the whole batch ends.",
        name, fault,
    )  # fmt: skip


def loop_fault(model: Any, windows: Windows) -> str:
    """Why the decode loop cannot sample from `model`; empty if it can."""
    try:
        off, noise = _differences(model, windows)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError,
            NotImplementedError) as error:  # fmt: skip
        line = (str(error).splitlines() or [""])[0]
        return f"it does not accept the loop's masks and positions ({type(error).__name__}: {line})"
    allowed = ALLOWED.get(next(model.parameters()).dtype, ALLOWED_HALF)
    # A model that computes no numbers is not the loop's fault; its replies will be errors.
    if off <= max(allowed, MULTIPLE * noise) or math.isnan(noise):
        return ""
    return (f"the loop's log-probs differ from those of a plain forward pass by {off:.2g}, two "
            f"plain passes only by {noise:.2g}")  # fmt: skip


def _differences(model: Any, windows: Windows) -> tuple[float, float]:
    """Largest difference between the loop and a plain pass, and between two plain passes."""
    spans = [windows.only, *(windows.by_kind or {}).values()]
    longest = max([s for s in spans if s is not None and s <= PROBE_WINDOW], default=6)
    vocabulary = model.config.get_text_config().vocab_size
    long, short = ([i * k % vocabulary for i in range(1, n)] for k, n in ((7, longest + 4), (3, 6)))
    prompts, device = [long, short, long, long], next(model.parameters()).device
    wide = torch.float32 if device.type == "mps" else torch.float64
    spread = torch.linspace(0.05, 0.95, 4 * len(prompts)).reshape(len(prompts), 4)
    draw = Draw(spread.to(device, wide), Sampling())
    replies = decode_batch(model, windows, prompts, draw, lambda row, _: row == 2, 0)
    noted = torch.tensor([logprob for row in replies.logprobs for logprob in row])
    rows = list(zip(prompts, replies.ids, strict=True))
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    further = min(FURTHER, max(0, (context or 1 << 20) - len(long) - 4))
    plain = torch.cat([_plain(model, prompt, reply, []) for prompt, reply in rows])
    again = torch.cat([_plain(model, prompt, reply, long[:1] * further) for prompt, reply in rows])
    return float((noted - plain).abs().max()), float((again - plain).abs().max())


@torch.inference_mode()
def _plain(model: Any, prompt: Sequence[int], reply: Sequence[int], after: list[int]) -> Tensor:
    """Log-probs of the reply's tokens, from one forward pass over prompt, reply and `after`."""
    device, start = next(model.parameters()).device, len(prompt)
    ids = torch.tensor([[*prompt, *reply, *after]], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : start + len(reply) - 1]
    chosen = ids[0, start : start + len(reply), None]
    return torch.log_softmax(logits.float(), -1).gather(1, chosen)[:, 0].cpu()
