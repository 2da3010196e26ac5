"""Attention over a packed trie, as an attention function that transformers calls in every layer.

`install_packed_attention` registers it and selects it for a decoder. Without a `packed` argument
it is transformers' own SDPA, so the sampler and padded rows are unaffected. With one, the layer's
queries attend in rectangles (`packing.py`): each is a call of SDPA with an additive mask or the
causal kernel. On a GPU, one FlexAttention call with a block mask does the same. Each layer passes
its own sliding window. Layers that pass unsupported arguments (soft caps, sinks, biases) are
refused; `check_packing` compares hidden states to find all other differences.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from soulkit.errors import ModelLoadError, SoulError
from soulkit.models.local.decode import head_sizes
from soulkit.train.model.packing import (
    AttentionBlock,
    Costs,
    HeadShape,
    Pack,
    Trie,
    build_trie,
    plan_blocks,
)
from soulkit.train.objectives.sequences import Span

NAME = "soulkit_trie"
FLEX_BLOCK = 128
"""Block size of FlexAttention; packs are padded to a multiple of it."""

_UNKNOWN = ("softcap", "s_aux", "position_bias", "sinks")


class UnpackableAttention(SoulError):
    """A layer's attention has a feature that packed attention does not support."""


@dataclass(frozen=True, slots=True)
class _Rectangles:
    """One plan as tensors."""

    lengths: list[int]
    """Number of queries of each rectangle; together they cover all positions."""
    pieces: list[int]
    """Lengths of the runs of keys; every rectangle sees whole runs."""
    blocks: list[tuple[list[int], Tensor | None]]
    """Per rectangle: the runs it sees, and its additive mask (None: causal)."""


class Packed:
    """The attention of one pack on one device. Plans and masks are cached per window."""

    def __init__(
        self, trie: Trie, *, costs: Costs | None = None, kernel: Literal["sdpa", "flex"] = "sdpa",
        length: int | None = None,
    ) -> None:  # fmt: skip
        """`length`: number of positions including padding; padding attends to itself."""
        self.trie, self.kernel, self.costs = trie, kernel, costs or Costs()
        self.length = length or len(trie)
        self._plans: dict[Any, Any] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None
    ) -> Tensor:
        """[1, heads, L, width] of queries, keys and values (fewer heads) → [1, heads, L, width]."""
        if self.kernel == "flex":
            return self._flex(query, key, value, window, scale)
        place = (window, query.device, query.dtype)
        if place not in self._plans:
            self._plans[place] = rectangles(self.trie, self.costs, window, query)
        plan: _Rectangles = self._plans[place]
        # Split once instead of slicing: the gradient of a slice is as long as the whole tensor.
        keys, values = key.split(plan.pieces, 2), value.split(plan.pieces, 2)
        outs = []
        for (pieces, mask), q in zip(plan.blocks, query.split(plan.lengths, 2), strict=True):
            k, v = (_beside([x[p] for p in pieces]) for x in (keys, values))
            k, v = _for_heads(q, k, v, mask)
            outs.append(
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
                    enable_gqa=k.shape[1] != q.shape[1],
                )
            )  # fmt: skip
        return _beside(outs)

    def _flex(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None
    ) -> Tensor:
        place = (window, query.device)
        if place not in self._plans:
            self._plans[place] = block_mask(self.trie, self.length, window, query.device)
        # Without this option the kernel checks the end of every block.
        whole = {"IS_DIVISIBLE": True} if self.length % FLEX_BLOCK == 0 else None
        return flex_kernel(query.device.type)(
            query, key, value, block_mask=self._plans[place], scale=scale,
            enable_gqa=key.shape[1] != query.shape[1], kernel_options=whole,
        )  # fmt: skip


def _beside(parts: Any) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _for_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values for SDPA, repeated for every head of the queries if it needs that."""
    times = q.shape[1] // k.shape[1]
    if times == 1 or shares_keys(q.device.type, q.dtype, masked=mask is not None):
        return k, v
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def shares_keys(device: str, dtype: torch.dtype, *, masked: bool) -> bool:
    """Whether SDPA has a fast kernel for fewer key heads than query heads: on a GPU only for 16-bit
    numbers without a mask. Otherwise it holds the scores of all pairs and heads in memory."""
    return device == "cpu" or (not masked and dtype.itemsize == 2)


def rectangles(trie: Trie, costs: Costs, window: int | None, like: Tensor) -> _Rectangles:
    """The cheapest rectangles for one window; masks have the device and dtype of `like`."""
    _, blocks = plan_blocks(trie, costs, window)
    edges = sorted({0, len(trie)} | {e for block in blocks for r in block.keys for e in r})
    place = {edge: i for i, edge in enumerate(edges)}
    return _Rectangles(
        lengths=[block.n_queries for block in blocks],
        pieces=[b - a for a, b in pairwise(edges)],
        blocks=[
            ([p for a, b in block.keys for p in range(place[a], place[b])],
             None if block.causal else _mask(trie, block, window, like))
            for block in blocks
        ],
    )  # fmt: skip


def _mask(trie: Trie, block: AttentionBlock, window: int | None, like: Tensor) -> Tensor:
    """Additive mask [queries, keys]. SDPA would convert a boolean one again in every layer."""
    seen = torch.from_numpy(trie.visible(block.queries, block.keys, window))
    mask = torch.zeros(seen.shape, dtype=like.dtype)
    return mask.masked_fill_(~seen, -torch.inf).to(like.device)


def block_mask(trie: Trie, length: int, window: int | None, device: torch.device) -> Any:
    """The same mask for FlexAttention, over `length` positions; padding attends to itself.

    Equal to torch's `create_block_mask`, which needs ten bytes for each of the length² pairs.
    """
    from torch.nn.attention.flex_attention import BlockMask

    pad = np.arange(len(trie), length + -length % FLEX_BLOCK)
    ends, depths = np.append(trie.end, pad + 1), np.append(trie.depth, 0 * pad)
    some, every = _visible_blocks(trie, ends, depths, window)
    end, depth = (torch.from_numpy(x[:length]).to(device, torch.int32) for x in (ends, depths))
    # A tensor, because a captured number that changes between calls cannot be compiled.
    out_of_reach = None if window is None else depth - window

    def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = (k <= q) & (q < end[k])
        if out_of_reach is not None:
            visible = visible & (depth[k] > out_of_reach[q])
        return visible

    blocks = *_in_order(some & ~every), *_in_order(every)
    settings = {"BLOCK_SIZE": FLEX_BLOCK, "mask_mod": is_visible, "seq_lengths": (length, length)}
    return BlockMask.from_kv_blocks(*blocks, **settings).to(device)


def _visible_blocks(
    trie: Trie, ends: np.ndarray, depths: np.ndarray, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """bool [blocks of queries, blocks of keys], twice: a pair is visible; all pairs are.

    `ends` and `depths` include padding to whole blocks. All positions of a run have the same end,
    so the deepest key that a run has in a block is the last one to leave the window.
    """
    end, depth = (x.reshape(-1, FLEX_BLOCK) for x in (ends, depths))
    first = np.arange(0, len(ends), FLEX_BLOCK)[:, None]
    earlier, reach = first > first.T, window or len(ends) + 1
    apart = depth.max(1)[:, None] - depth.min(1)
    every = earlier & (end.min(1) >= first + FLEX_BLOCK) & (apart < reach)
    padding = np.arange(len(trie), len(ends))
    starts = np.unique(np.concatenate([trie.cuts[:-1], first[:, 0], padding]))
    deepest = depths[np.append(starts[1:], len(ends)) - 1]
    # The first `inside` queries of a block are in the subtree of a run.
    inside = np.clip(ends[starts] - first, 0, FLEX_BLOCK)
    shallowest = np.take_along_axis(np.minimum.accumulate(depth, 1), np.maximum(inside, 1) - 1, 1)
    seen = (inside > 0) & (shallowest - deepest < reach)
    some = earlier & np.logical_or.reduceat(seen, np.searchsorted(starts, first[:, 0]), 1)
    return some | np.eye(len(first), dtype=bool), every


def _in_order(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
    """int32 [1, 1, rows], [1, 1, rows, columns]: the number of chosen blocks; they come first."""
    order = np.argsort(~blocks, axis=1, kind="stable")
    count, index = (torch.from_numpy(x.astype(np.int32)) for x in (blocks.sum(1), order))
    return count[None, None], index[None, None]


def allow_forms(limit: int = 64) -> None:
    """Allow compiled variants: with and without gradients, windows, fixed lengths. Beyond the limit
    torch silently runs plain modules, or FlexAttention with all pairwise scores in memory."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)


@cache
def flex_kernel(device: str) -> Callable[..., Any]:
    """FlexAttention, compiled on a GPU; elsewhere its slow form without a backward pass."""
    from torch.nn.attention.flex_attention import flex_attention

    if device != "cuda":
        return flex_attention
    allow_forms()
    return torch.compile(flex_attention, fullgraph=True)


def try_flex(decoder: Any, device: torch.device) -> None:
    """Run FlexAttention forward and backward with the heads of `decoder`. Whether its kernels work
    depends on the device, the dtype and the width of the heads."""
    heads, keys, width = head_sizes(decoder.config)
    scale = next((m.scaling for m in decoder.modules() if hasattr(m, "scaling")), width**-0.5)
    like = {"dtype": next(decoder.parameters()).dtype, "device": device, "requires_grad": True}
    # Strides as in a model, so that this form is compiled once.
    q, k, v = (
        torch.ones(1, FLEX_BLOCK, n, width, **like).transpose(1, 2) for n in (heads, keys, keys)
    )
    packed = Packed(build_trie([(0,) * FLEX_BLOCK]), kernel="flex")
    packed(q, k, v, None, scale).sum().backward()


def flex_compilations() -> int:
    """How often FlexAttention was compiled in this process: with and without gradients and for
    every kind of mask, once for the first length and once for all others."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch.nn.attention.flex_attention import flex_attention

    return len(_debug_get_cache_entry_list(flex_attention))


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, scaling: float | None = None, sliding_window: int | None = None,
    packed: Packed | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function: [1, heads, L, width] → [1, L, heads, width].

    UnpackableAttention for a layer with features that packed attention does not support.
    """
    if packed is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        kwargs |= {"scaling": scaling, "sliding_window": sliding_window}
        if attention_mask is None and query.shape[2] > 1:
            key, value = _for_heads(query, key, value, None)
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    extras = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if extras:
        raise UnpackableAttention(f"{type(module).__name__} uses {', '.join(extras)}")
    out = packed(query, key, value, sliding_window, scaling)
    return out.transpose(1, 2).contiguous(), None


def install_packed_attention(decoder: Any) -> None:
    """Make `decoder` use packed attention in every layer.

    UnpackableAttention if its attention is not SDPA, which packed attention replaces.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    chosen = getattr(decoder.config, "_attn_implementation", None)
    if chosen == NAME:
        return
    if chosen != "sdpa":
        raise UnpackableAttention(f"its attention is '{chosen}', not sdpa")
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    decoder.config._attn_implementation = NAME


# --- comparison with the model's own attention ----------------------------------------------------


ROUNDING = 2.0
"""Packed hidden states may be this many times as far from plain ones as rounding moves those.

On a CPU, healthy models of 36 random layers in bfloat16 stay below 0.8. A leaked key or a window
that is off by one gives 4 or more in most of them; one missing key may hide in bfloat16."""

FLOOR = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative distance that is always allowed, by dtype."""

SHORTEST = 48
"""Length of the longest probe sequence for a model without sliding window."""


def check_packing(
    decoder: Any, states: Callable[[Pack], list[Tensor]], shape: HeadShape, turn: int | None
) -> None:
    """ModelLoadError if packed and plain hidden states of `decoder` differ by more than rounding.

    `states` returns the hidden states of a pack at every depth, [positions, width].
    """
    if others := unknown_layers(decoder):
        raise _refused(f"this model has unsupported layers: {others}")
    try:
        install_packed_attention(decoder)
        distances = packing_distances(decoder, states, probe_spans(decoder, shape, turn))
    except (UnpackableAttention, TypeError, NotImplementedError) as error:
        raise _refused(str(error)) from error
    floor = FLOOR.get(next(decoder.parameters()).dtype, FLOOR[torch.bfloat16])
    for depth, (off, noise) in enumerate(distances):
        if not off <= max(ROUNDING * noise, floor):
            raise _refused(
                f"after {depth} layers its hidden states differ by a relative error of {off:.2g}, "
                f"while rounding explains {noise:.2g}"
            )


def unknown_layers(decoder: Any) -> str:
    """Layer types other than full and sliding-window attention, as words.

    The probe may be too short to find their differences (chunks of 8192 tokens, for example).
    """
    kinds = getattr(decoder.config.get_text_config(), "layer_types", None) or ()
    return ", ".join(sorted(set(kinds) - {"full_attention", "sliding_attention"}))


@torch.no_grad()
def packing_distances(
    decoder: Any, states: Callable[[Pack], list[Tensor]], spans: tuple[Span, ...]
) -> list[tuple[float, float]]:
    """By depth, the largest relative distances from the hidden states of each of `spans` alone:
    of the packed ones, and of those in padded rows with other rounding."""
    everything = tuple(range(len(spans)))
    rows, trie = Pack(everything, spans), build_trie([span.ids for span in spans])
    packed = states(Pack(everything, spans, trie))
    with _rounded_embeddings(decoder):
        padded = states(rows)
    worst = torch.zeros(2, len(packed))
    for index, span in enumerate(spans):
        alone, first = states(Pack((index,), (span,))), index * rows.width
        path = torch.from_numpy(trie.path(index))
        off = [_apart(a[path], b) for a, b in zip(packed, alone, strict=True)]
        noise = [_apart(a[first:][: len(b)], b) for a, b in zip(padded, alone, strict=True)]
        worst = torch.maximum(worst, torch.tensor([off, noise]))
    return [(float(off), float(noise)) for off, noise in worst.T]


@contextmanager
def _rounded_embeddings(decoder: Any) -> Iterator[None]:
    """Context in which one of 32 embedding values is smaller by a unit in the last place, because
    two orders of computation may agree in all layers if their kernels are the same."""

    def smaller(module: Any, inputs: Any, output: Tensor) -> Tensor:
        chosen = torch.randint(32, output.shape, generator=torch.Generator().manual_seed(0)) == 0
        return output * (1 - chosen.to(output) * torch.finfo(output.dtype).eps / 2)

    handle = decoder.get_input_embeddings().register_forward_hook(smaller)
    try:
        yield
    finally:
        handle.remove()


def probe_spans(decoder: Any, shape: HeadShape, turn: int | None) -> tuple[Span, ...]:
    """Two sequences that share most of a prefix longer than any window, and an unrelated one.

    Windows longer than the context are ignored. `turn` is the length from which the model encodes
    positions differently.
    """
    windows = [w for w, _ in shape.windows if w is not None]
    limit = getattr(decoder.config, "max_position_embeddings", None) or 1 << 20
    limit = min(limit, turn or limit)
    length = min(max([SHORTEST, *(w + 16 for w in windows if w < limit)]), limit)
    random_ = random.Random(0)
    words = decoder.get_input_embeddings().weight.shape[0]

    def some(n: int, first: int) -> tuple[int, ...]:
        return (first, *(random_.randrange(words) for _ in range(n - 1)))

    trunk, tail = some(length - 8, 0), length // 2
    ids = ((*trunk, *some(8, 1)), (*trunk[: length - 12], *some(12, 2)), some(tail, 3))
    return tuple(Span(i, (False, *(True,) * (len(i) - 1)), ()) for i in ids)


def _apart(a: Tensor, b: Tensor) -> float:
    a, b = a.float(), b.float()
    # The embedding of a padding token may be zero.
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).max())


def shape_of(decoder: Any, kernel: Literal["sdpa", "flex"]) -> HeadShape:
    """Input of the cost model: relative cost of linear layers, and sliding windows."""
    names = ("q_proj", "qkv_proj", "c_attn")
    layers = [m for m in decoder.modules()
              if hasattr(m, "layer_idx") and any(hasattr(m, name) for name in names)]  # fmt: skip
    config = decoder.config
    # If all layers are alike, some families (Mistral, Phi-3) only store the window here.
    mixed = getattr(config, "layer_types", None)
    common = None if mixed else getattr(config, "sliding_window", None) or None
    windows = [getattr(layer, "sliding_window", common) for layer in layers] or [common]
    shares = {w: windows.count(w) / len(windows) for w in dict.fromkeys(windows)}
    heads, _, width = head_sizes(config)
    channels = heads * width
    weights = sum(
        p.numel() for n, p in decoder.named_parameters()
        if p.ndim == 2 and "lora_" not in n and "embed" not in n
    ) / len(windows)  # fmt: skip
    # Forward and backward to the inputs, including the adapter: 5.2 FLOPs per weight. Attention:
    # 14 FLOPs per pair and channel, at 70 % of the speed of matrix products.
    linear = 5.2 * weights / (19.6 * channels)
    costs = Costs(linear=linear) if kernel == "sdpa" else Costs(linear=linear, copy=0.0, call=0.0)
    return HeadShape(costs, tuple(shares.items()))


def _refused(why: str) -> ModelLoadError:
    return ModelLoadError(
        "This model's attention does not support packed sequences.",
        f"Packing must give the same results as unpacked sequences, but {why}.",
        "Train it with --packing off, which gives every sequence its own row.",
    )
