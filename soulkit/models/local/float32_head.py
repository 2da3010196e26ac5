"""The output layer of a half-precision model, with logits in float32.

A product in bfloat16 is rounded to eight bits before anybody reads it: where a model is undecided
that moves a log-prob by some hundredths of a nat, and ratios and distances are made of such log-
probs. Here the numbers of hidden states and weights are multiplied as they are and summed in
float32. The weights stay as they are, too: on a GPU the product itself gives float32, elsewhere a
block of the vocabulary at a time is widened, so that no second copy of them is ever held.

The layer changes its class, so whoever calls the model (a sampler, `generate`, a trainer) gets the
same log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 22
"""Weights that are widened at once: 16 MiB in float32."""
HALF = (torch.bfloat16, torch.float16)


def widen_head(model: Any) -> bool:
    """Give the output layer of `model` logits in float32; whether it has them from now on.

    In place, and no more than once. A layer of another kind than a plain linear one keeps its own
    arithmetic, and one whose weights are float32 has such logits already.
    """
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)  # an adapter may sit on it
    if type(head) is _wide_class():
        return True
    if type(head) is not torch.nn.Linear or head.weight.dtype not in HALF:
        return False
    head.__class__ = _wide_class()
    return True


class Float32Product(torch.autograd.Function):
    """x Wᵀ in float32, of factors in half precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """x [n, in], w [out, in] → float32 [n, out]."""
        ctx.save_for_backward(x, w)
        if w.is_cuda:
            return torch.mm(x, w.t(), out_dtype=torch.float32)
        out = x.new_empty(len(x), len(w), dtype=torch.float32)
        wide = x.float()
        for first, last in _blocks(w):
            torch.mm(wide, w[first:last].float().t(), out=out[:, first:last])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = grad_of_input(grad, w).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = (grad.t() @ x.float()).to(w.dtype)
        return dx, dw


def is_wide(head: Any) -> bool:
    """Whether `widen_head` gave this layer its arithmetic."""
    return type(head) is _wide_class()


def grad_of_input(grad: Tensor, w: Tensor) -> Tensor:
    """float32 [n, in] of grad [n, out] and w [out, in]."""
    if w.dtype == grad.dtype:
        return grad @ w
    if w.is_cuda:
        return torch.mm(grad.to(w.dtype), w, out_dtype=torch.float32)
    total = grad.new_zeros(len(grad), w.shape[1])
    for first, last in _blocks(w):
        total.addmm_(grad[:, first:last], w[first:last].float())
    return total


def _blocks(w: Tensor) -> Iterator[tuple[int, int]]:
    """Rows of `w` from … to, a BLOCK of weights each."""
    rows = max(1, BLOCK // w.shape[1])
    for first in range(0, len(w), rows):
        yield first, min(first + rows, len(w))


@cache
def _wide_class() -> type[Any]:
    class WideLinear(torch.nn.Linear):
        """A linear layer that gives float32 whatever it is made of."""

        def forward(self, x: Tensor) -> Tensor:
            if self.weight.dtype not in HALF or x.dtype != self.weight.dtype:
                return super().forward(x)
            flat = x.reshape(-1, x.shape[-1])
            out: Any = Float32Product.apply(flat, self.weight)
            if self.bias is not None:
                out = out + self.bias.float()
            return out.view(*x.shape[:-1], len(self.weight))

    return WideLinear
