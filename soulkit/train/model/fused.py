"""Fused kernels: the same functions with fewer passes over memory. Only known modules are replaced.

* `lora`: the second product writes s·(x Aᵀ)Bᵀ into the output of the frozen layer. PEFT casts x to
  float32, keeps that copy for the backward pass and passes over the output five times. Here the
  factors are cast to the dtype of x and their gradients are summed in float32.
* `norm`, `mlp`: one kernel each for the RMS norm and for silu(gate) · up.
* `compile`: torch.compile for attention and feed-forward modules (instead of `norm` and `mlp`);
  packed attention is not compiled.

Modules change their class, not their weights, so saving and loading still work. Each changed module
is compared with the original on random inputs and reverted if it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from soulkit.models.local.decode import CACHE_NAMES
from soulkit.text import one_line
from soulkit.train.model.attention import NAME, allow_forms, packed_attention
from soulkit.train.ranks.sharding import whole_parts

FusedPart = Literal["lora", "norm", "mlp", "compile"]
FuseSetting = Literal["auto", "off", "modules", "compile"]

APART = "soulkit_trie_apart"
"""Name of packed attention when called from compiled modules."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest relative distance to the original module, by dtype of its input."""


def fused_parts(setting: FuseSetting, device: str = "cpu") -> tuple[FusedPart, ...]:
    """The parts that a setting selects on a kind of device; `auto` selects what measurably helps:
    `lora` on a CPU, all modules on a GPU."""
    if setting == "auto" and device == "cuda":
        setting = "modules"
    choices: dict[FuseSetting, tuple[FusedPart, ...]] = {
        "off": (), "auto": ("lora",), "modules": ("lora", "norm", "mlp"),
        "compile": ("lora", "compile"),
    }  # fmt: skip
    return choices[setting]


def fuse(
    decoder: Any, parts: Collection[FusedPart], note: Callable[[str], object] = lambda line: None
) -> dict[str, int]:
    """Change the modules of `decoder` in place; return the number of changes by part.

    A part that torch.compile cannot compile here stays as it is; `note` gets a line about it.
    """
    changes: dict[FusedPart, Callable[[Any], int]] = {
        "lora": fuse_lora, "norm": fuse_norms, "mlp": fuse_mlps, "compile": compile_modules,
    }  # fmt: skip
    dtype, device = (x := next(decoder.parameters())).dtype, x.device
    wide = dtype == torch.float32 or has_wide_product(device, dtype)
    counts: dict[str, int] = {}
    for name in parts:
        try:
            counts[name] = sum(map(changes[name], whole_parts(decoder)))
        except Exception as error:
            if name == "lora":  # nothing is compiled
                raise
            counts[name] = 0
            why = one_line(f"{type(error).__name__}: {error}", 200)
            note(f"not fused ({name}), because torch.compile fails here: {why}")
    if counts.get("lora") and not wide:
        note(
            "gradients of the adapter are rounded to the dtype of the base, because this device "
            "has no product with float32 output"
        )
    return counts


# --- adapted linear layers ------------------------------------------------------------------------


class LoraProduct(torch.autograd.Function):
    """x Wᵀ + bias + s·(x Aᵀ)Bᵀ with W and bias frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        """x [..., in], w [out, in], a [r, in], b [out, r] → [..., out] in the dtype of x."""
        flat = x.reshape(-1, x.shape[-1])
        low = flat @ a.to(x.dtype).t()
        out = F.linear(flat, w, bias)
        out.addmm_(low, b.to(x.dtype).t(), alpha=scale)
        ctx.save_for_backward(flat, low, w, a, b)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, low, w, a, b = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        back = (grad @ b.to(grad.dtype)).mul_(ctx.scale)
        dx = da = db = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ w).addmm_(back, a.to(grad.dtype)).view(ctx.shape)
        if ctx.needs_input_grad[3]:
            da = _product(back.t(), flat, a.dtype)
        if ctx.needs_input_grad[4]:
            db = _product(grad.t(), low, b.dtype).mul_(ctx.scale)
        return dx, None, None, da, db, None


_WIDE: set[tuple[str, torch.dtype]] = set()
"""Devices and dtypes of factors whose product can have the dtype float32."""


def has_wide_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of `dtype` to float32 on `device`; if so, it is used."""
    try:
        factor = torch.ones(16, 16, dtype=dtype, device=device)
        torch.mm(factor, factor, out_dtype=torch.float32)
    except (RuntimeError, TypeError):  # no such kernel, or an old torch
        return False
    _WIDE.add((device.type, dtype))
    return True


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in `dtype`, accumulated in it if the device supports that."""
    if dtype == torch.float32 and (a.device.type, a.dtype) in _WIDE:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def fuse_lora(decoder: Any) -> int:
    """Use `LoraProduct` in the adapted linear layers of `decoder`; returns how many."""
    from peft.tuners.lora import Linear

    layers = [m for m in decoder.modules() if type(m) is Linear and _is_plain_lora(m)]
    return sum(map(_fused_lora, layers))


@torch.no_grad()
def _fused_lora(layer: Any) -> bool:
    # B of a new adapter is zero, so the comparison needs random values.
    (name,) = (n for n in layer.active_adapters if n in layer.lora_A)
    b, base = layer.lora_B[name].weight, layer.base_layer
    before, inputs = b.clone(), _random((1, 4, base.in_features), base.weight)
    b.copy_(0.1 * _random(tuple(b.shape), b))
    try:
        return _changed(layer, _fused_lora_class(), inputs)
    finally:
        b.copy_(before)


def _is_plain_lora(layer: Any) -> bool:
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    return (
        type(layer.base_layer) is torch.nn.Linear
        and len(active) == 1
        and not layer.lora_variant
        # Another adapter may be activated later, so all of them must be plain.
        and all(part.bias is None for part in layer.lora_B.values())
        and all(getattr(part, "p", 0.0) == 0.0 for part in layer.lora_dropout.values())
    )


@cache
def _fused_lora_class() -> type[Any]:
    from peft.tuners.lora import Linear

    class FusedLora(Linear):
        """PEFT's layer with a fused forward pass for one active adapter."""

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            names = [name for name in self.active_adapters if name in self.lora_A]
            base = self.base_layer
            plain = self.disable_adapters or self.merged or args or kwargs
            if plain or len(names) != 1 or x.dtype != base.weight.dtype:
                return super().forward(x, *args, **kwargs)
            a, b = self.lora_A[names[0]].weight, self.lora_B[names[0]].weight
            return LoraProduct.apply(x, base.weight, base.bias, a, b, self.scaling[names[0]])

    return FusedLora


# --- elementwise chains ---------------------------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@cache
def _kernel(function: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True) if device == "cuda" else function


def fuse_norms(decoder: Any) -> int:
    """Use one kernel for RMS norms with a plain factor; returns how many."""
    norms = [m for m in decoder.modules() if _is_norm(m)]
    return sum(
        _changed(n, _fused_norm_class(n.__class__), _random((1, 4, len(n.weight)), n.weight))
        for n in norms
    )


def _is_norm(module: Any) -> bool:
    has = (getattr(module, name, None) is not None for name in ("variance_epsilon", "weight"))
    return type(module).__name__.endswith("RMSNorm") and all(has)


@cache
def _fused_norm_class(plain: Any) -> type[Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if _is_decoding(x):
            return plain.forward(self, x)
        kernel = _kernel(_rms_norm, x.device.type)
        # Flattened to rows, so that only one input shape is compiled.
        rows = x.reshape(-1, x.shape[-1])
        return kernel(rows, self.weight, self.variance_epsilon).view(x.shape)

    return type(f"Fused{plain.__name__}", (plain,), {"forward": forward})


def fuse_mlps(decoder: Any) -> int:
    """Use one kernel between the products of gated SiLU feed-forward modules; returns how many."""
    gated = [m for m in decoder.modules() if _is_gated(m)]
    return sum(_changed(mlp, _fused_mlp_class(mlp.__class__), _inputs_of_mlp(mlp)) for mlp in gated)


def _is_gated(module: Any) -> bool:
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(isinstance(getattr(module, n, None), torch.nn.Module) for n in names) and type(
        module.act_fn
    ).__name__ in ("SiLU", "SiLUActivation")


@cache
def _fused_mlp_class(plain: Any) -> type[Any]:
    def forward(self: Any, x: Tensor) -> Any:
        if _is_decoding(x):
            return plain.forward(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        width = gate.shape[-1]
        kernel = _kernel(_gated, x.device.type)
        product = kernel(gate.view(-1, width), up.view(-1, width))
        return self.down_proj(product.view(*x.shape[:-1], width))

    return type(f"Fused{plain.__name__}", (plain,), {"forward": forward})


def _inputs_of_mlp(mlp: Any) -> Tensor:
    layer = getattr(mlp.gate_proj, "base_layer", mlp.gate_proj)
    # Quantised weights have another shape and dtype than their inputs.
    dtype = getattr(layer, "compute_dtype", None) or layer.weight.dtype
    return _random((1, 4, layer.in_features), layer.weight.new_empty(0, dtype=dtype))


def _is_decoding(x: Tensor) -> bool:
    """Whether a sampler feeds one new token per row, where fusing saves nothing."""
    return x.dim() < 3 or x.shape[1] == 1


# --- whole modules --------------------------------------------------------------------------------


def compile_modules(decoder: Any, backend: str = "inductor") -> int:
    """Compile the modules of every layer of `decoder` with torch.compile; returns how many.

    Whole layers are not compiled, because activation checkpointing may recompute them. If a trial
    fails or its result differs, nothing is compiled and the error is raised.
    """
    allow_forms()
    plain, attention = _trial(decoder), decoder.config._attn_implementation
    children = [child for layer in decoder.layers for child in layer.children()]
    parts = [child for child in children if any(True for _ in child.parameters())]
    _set_attention_apart(decoder)
    for module in parts:
        module.compile(backend=backend)
        module._compiled_call_impl = _unless_sampling(module, module._compiled_call_impl)
    try:
        if not _is_near(_trial(decoder), plain):
            raise RuntimeError("the results differ from those of the plain modules")
    except Exception:
        decoder.config._attn_implementation = attention
        for module in parts:
            module._compiled_call_impl = None
        raise
    return len(parts)


def _trial(decoder: Any) -> Tensor:
    """The output of the first layer for a few tokens, after a forward and a backward pass."""
    outputs: list[Any] = []
    handle = decoder.layers[0].register_forward_hook(lambda *call: outputs.append(call[-1]))
    trained = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    try:
        with torch.enable_grad():
            ids = torch.arange(8, device=next(decoder.parameters()).device)[None]
            states = decoder(input_ids=ids, use_cache=False)[0]
            if trained:
                torch.autograd.grad(states.float().sum(), trained, allow_unused=True)
    finally:
        handle.remove()
    return (outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]).detach()


def _unless_sampling(module: Any, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, except during sampling with a cache, whose length changes with every token."""

    def call(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        cached = any(kwargs.get(name) is not None for name in CACHE_NAMES)
        sampling = cached or _is_decoding(x)
        return (module._call_impl if sampling else compiled)(*args, **kwargs)

    return call


def _set_attention_apart(decoder: Any) -> None:
    """Exclude packed attention from compilation: it builds masks with NumPy and compiles its own
    kernel."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if decoder.config._attn_implementation == NAME:
        AttentionInterface.register(APART, torch.compiler.disable(packed_attention))
        AttentionMaskInterface.register(APART, sdpa_mask)
        decoder.config._attn_implementation = APART


# --- comparison -----------------------------------------------------------------------------------


@torch.no_grad()
def _changed(module: Any, fused: type[Any], x: Tensor) -> bool:
    """Change the class of `module` to `fused` if its output stays the same; returns whether."""
    plain_class, plain, same = type(module), module(x), False
    module.__class__ = fused
    try:
        same = _is_near(module(x), plain)
    finally:
        if not same:
            module.__class__ = plain_class
    return same


def _is_near(output: Tensor, plain: Tensor) -> bool:
    off = float((output.float() - plain.float()).norm() / plain.float().norm().clamp_min(1e-30))
    bound = TOLERANCE.get(plain.dtype, TOLERANCE[torch.bfloat16])
    return output.dtype == plain.dtype and off <= bound


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)
