"""Output layer of a half-precision model with float32 logits.

A bfloat16 product is rounded to eight bits, which can move a log-prob by a few hundredths of a nat;
ratios and distances are computed from such log-probs. This layer multiplies hidden states and
weights as they are and sums in float32. The weights are not copied: on a GPU the product itself
returns float32, elsewhere one block of the vocabulary at a time is converted to float32.

The layer's class is replaced, so that every caller of the model (a sampler, `generate`, a trainer)
gets the same log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 22
"""Number of weights widened at once: 16 MiB in float32."""
HALF = (torch.bfloat16, torch.float16)


def widen_head(model: Any) -> bool:
    """Make the output layer of `model` return float32 logits; returns whether it now does.

    Works in place and may be called twice. Layers other than a plain linear one, and layers with
    float32 weights, stay as they are.
    """
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)  # the layer under an adapter
    if type(head) is _wide_class():
        return True
    if type(head) is not torch.nn.Linear or head.weight.dtype not in HALF:
        return False
    head.__class__ = _wide_class()
    return True


class Float32Product(torch.autograd.Function):
    """x Wᵀ in float32, for half-precision factors."""

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
    """Whether `widen_head` has replaced this layer."""
    return type(head) is _wide_class()


def grad_of_input(grad: Tensor, w: Tensor) -> Tensor:
    """The gradient of the input: float32 [n, in] from grad [n, out] and w [out, in]."""
    if w.dtype == grad.dtype:
        return grad @ w
    if w.is_cuda:
        return torch.mm(grad.to(w.dtype), w, out_dtype=torch.float32)
    total = grad.new_zeros(len(grad), w.shape[1])
    for first, last in _blocks(w):
        total.addmm_(grad[:, first:last], w[first:last].float())
    return total


def _blocks(w: Tensor) -> Iterator[tuple[int, int]]:
    """Row ranges of `w` with about BLOCK weights each."""
    rows = max(1, BLOCK // w.shape[1])
    for first in range(0, len(w), rows):
        yield first, min(first + rows, len(w))


@cache
def _wide_class() -> type[Any]:
    class WideLinear(torch.nn.Linear):
        """A linear layer with float32 output for half-precision input and weights."""

        def forward(self, x: Tensor) -> Tensor:
            if self.weight.dtype not in HALF or x.dtype != self.weight.dtype:
                return super().forward(x)
            flat = x.reshape(-1, x.shape[-1])
            out: Any = Float32Product.apply(flat, self.weight)
            if self.bias is not None:
                out = out + self.bias.float()
            return out.view(*x.shape[:-1], len(self.weight))

    return WideLinear
