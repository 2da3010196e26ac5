"""Draws each token from one number of its row's random stream, by inverting the cumulative
probabilities.

Equal random numbers and logits give equal tokens on every device. `torch.cumsum` has a
deterministic CUDA kernel only for integers, so probabilities are summed as multiples of 1 / WHOLE.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from soulkit.types import Call, Sampling

WHOLE = 1 << 52
"""The integer for probability 1. Integers up to twice this are exact in float64."""


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
        probs = logprobs.to(uniform.dtype).exp_()
        if cut.cuts:  # min_p, then top_k, then top_p of what is left, as vLLM does
            probs, order = probs.sort(dim=-1, descending=True, stable=True)
            probs = probs * (probs >= cut.min_p * probs[:, :1])
            probs[:, cut.top_k or probs.shape[1] :] = 0
        weights = probs.mul_(WHOLE).long()
        sums = weights.cumsum(-1)
        if cut.cuts and cut.top_p < 1:
            left = sums[:, -1:] if cut.top_k or cut.min_p else torch.full_like(sums[:, -1:], WHOLE)
            weights = weights * (sums - weights < left.to(uniform.dtype) * cut.top_p)
            sums = weights.cumsum(-1)
        last = sums[:, -1:]
        target = torch.minimum((last * uniform).long(), last - 1)  # below `last` after rounding
        at = torch.searchsorted(sums, target, right=True)
        return at if order is None else order.gather(1, at)
