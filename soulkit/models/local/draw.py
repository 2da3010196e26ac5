"""Draws each token from one number of its row's random stream, by inverting the cumulative
probabilities.

Equal random numbers and logits give equal tokens on every device. `torch.cumsum` has no
deterministic CUDA kernel for floating-point numbers, so `place_of` adds up blocks of the vocabulary
first and cumulates only the sums and the block that contains the token.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from soulkit.types import Call, Sampling

BLOCK = 128
"""Tokens per block. Most vocabularies are a multiple of it and need no padding."""


def uniforms(seed: int | None, call: Call, n: int) -> np.ndarray:
    """The first `n` random numbers in [0, 1) of one generation's stream (float64).

    Equal seeds and calls give equal numbers on every machine; None counts as a seed.
    """
    parts = (seed, call.role, call.example_id, call.rollout, call.kind, call.turn, call.sample)
    # Without seat and purpose, the stream equals that of older versions.
    beside = (call.seat, call.purpose) if call.seat or call.purpose else ()
    digest = hashlib.sha256("\x1f".join(map(str, (*parts, call.step, *beside))).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16]))).random(n)


class Draw:
    """Draws each row's next token from that row's next random number.

    `logprobs` are those of logits / temperature in float32, before top_k and the like; at
    temperature 0 (greedy) those of the plain logits. As a logits processor of `generate`, it sets
    the logits of all other tokens to -inf.
    """

    def __init__(self, uniform: Tensor, sampling: Sampling) -> None:
        """`uniform` is float64 [rows, steps]."""
        self.uniform, self.sampling, self.temperature = uniform, sampling, sampling.temperature
        self.noted: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` [rows, vocabulary] → the same shape, with only the drawn token finite."""
        # `generate` may run one step past the end before it notices that all rows have ended.
        step = min(len(self.noted), self.uniform.shape[1] - 1)
        drawn, logprobs = self.pick(scores, self.uniform[:, step])
        self.noted.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn[:, None], 0.0)

    def logprobs(self) -> Tensor:
        """float32 [rows, steps], on the CPU."""
        return torch.stack(self.noted, dim=1).cpu()

    def pick(self, scores: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and log-probs, both [n], for logits [n, vocabulary] and uniform numbers [n]."""
        logits = scores.float()
        if self.temperature > 0:
            logits = logits / self.temperature
        logits = torch.log_softmax(logits, dim=-1)
        if self.temperature > 0:
            drawn = self._invert(logits, uniform[:, None])
        else:
            drawn = logits.argmax(-1, keepdim=True)
        return drawn.squeeze(1), logits.gather(1, drawn).squeeze(1)

    def _invert(self, logprobs: Tensor, uniform: Tensor) -> Tensor:
        order, cut = None, self.sampling
        if over := -logprobs.shape[1] % BLOCK:  # padded before the copy in float64
            logprobs = F.pad(logprobs, (0, over), value=-torch.inf)
        probs = logprobs.to(uniform.dtype).exp_()
        if cut.cuts:  # min_p, then top_k, then top_p of what is left, as vLLM does
            probs, order = probs.sort(dim=-1, descending=True, stable=True)
            probs = probs * (probs >= cut.min_p * probs[:, :1])
            probs[:, cut.top_k or probs.shape[1] :] = 0
            if cut.top_p < 1:
                left: Any = probs.sum(-1, keepdim=True) if cut.top_k or cut.min_p else 1.0
                last = place_of(probs, torch.full_like(uniform, cut.top_p) * left)
                probs = probs * (torch.arange(probs.shape[1], device=probs.device) <= last)
        at = place_of(probs, uniform * probs.sum(-1, keepdim=True))
        return at if order is None else order.gather(1, at)


def place_of(weights: Tensor, target: Tensor) -> Tensor:
    """The first place [n, 1] where the cumulative sum of `weights` [n, k · BLOCK] exceeds `target`
    [n, 1], else the last one. Its weight is positive."""
    blocks = weights.unflatten(1, (-1, BLOCK))
    block, rest = _exceeds(blocks.sum(-1), target)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    return block * BLOCK + _exceeds(inside, rest)[0]


def _exceeds(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first place [n, 1] where the cumulative sum exceeds `target`, and `target` minus the sum
    before that place."""
    sums, reach = weights, 1
    while reach < weights.shape[1]:  # afterwards a sum spans twice as many weights
        sums, reach = sums + F.pad(sums[:, :-reach], (reach, 0)), 2 * reach
    # Rounding must not choose a weight of 0 or put `target` at or above the last sum.
    possible = sums * (weights > 0)
    most = possible.amax(-1, keepdim=True) * (1 - torch.finfo(sums.dtype).eps)
    at = (possible > torch.minimum(target, most)).int().argmax(-1, keepdim=True)
    return at, (target - (sums - weights).gather(1, at)).clamp_min(0)
