"""Attention over a packed trie, as an attention function that transformers calls in every layer.

`install_packed_attention` registers it and selects it for a decoder. Without a `packed` argument
it is transformers' own SDPA, so that the sampler and padded rows run as before. With one, the
layer's queries attend in rectangles (`packing.py`), each a call of SDPA with a boolean mask's
additive form or the causal kernel; on a GPU one FlexAttention call with a block mask does the
same. The layer tells its sliding window itself, so layers of both kinds get their own plan. What
a layer adds that this function does not know (soft caps, sinks, biases) is refused; what it does
not tell is found by `check_packing`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from soulkit.errors import ModelLoadError, SoulError
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
"""FlexAttention works in blocks of so many positions; packs are padded to a multiple of it."""

FLEX_FORMS = 64
"""Compiled forms of the kernel: with and without gradients, windows, fixed and free lengths."""

_UNKNOWN = ("softcap", "s_aux", "position_bias", "sinks")


class UnpackableAttention(SoulError):
    """A layer's attention does something that packed attention does not."""


@dataclass(frozen=True, slots=True)
class _Rectangles:
    """One plan, ready for tensors."""

    lengths: list[int]
    """Of the queries of each rectangle, which together are all positions."""
    pieces: list[int]
    """Lengths of the runs of keys; every rectangle sees some of them, whole."""
    blocks: list[tuple[list[int], Tensor | None]]
    """Per rectangle: its pieces, and its additive mask (None: causal)."""


class Packed:
    """The attention of one pack on one device. Plans and masks are made once per window."""

    def __init__(
        self,
        trie: Trie,
        *,
        costs: Costs | None = None,
        kernel: Literal["sdpa", "flex"] = "sdpa",
        length: int | None = None,
    ) -> None:
        """`length`: positions with padding, at least those of `trie`; padding sees itself."""
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
        grouped = key.shape[1] != query.shape[1]
        # Split once, not sliced per rectangle: the gradient of a slice is as long as the whole.
        keys, values = key.split(plan.pieces, 2), value.split(plan.pieces, 2)
        outs = []
        for (pieces, mask), q in zip(plan.blocks, query.split(plan.lengths, 2), strict=True):
            k, v = (_beside([x[p] for p in pieces]) for x in (keys, values))
            outs.append(
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
                )
            )
        return _beside(outs)

    def _flex(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None
    ) -> Tensor:
        place = (window, query.device)
        if place not in self._plans:
            self._plans[place] = block_mask(self.trie, self.length, window, query.device)
        # Without being told, a kernel for any length checks the end of every block.
        whole = {"IS_DIVISIBLE": True} if self.length % FLEX_BLOCK == 0 else None
        return flex_kernel(query.device.type)(
            query, key, value, block_mask=self._plans[place], scale=scale,
            enable_gqa=key.shape[1] != query.shape[1], kernel_options=whole,
        )  # fmt: skip


def _beside(parts: Any) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def rectangles(trie: Trie, costs: Costs, window: int | None, like: Tensor) -> _Rectangles:
    """The cheapest rectangles for one window, with masks of the device and type of `like`."""
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
    """Additive [queries, keys]. SDPA would make it of a boolean one again in every layer."""
    seen = torch.from_numpy(trie.visible(block.queries, block.keys, window))
    mask = torch.zeros(seen.shape, dtype=like.dtype)
    return mask.masked_fill_(~seen, -torch.inf).to(like.device)


def block_mask(trie: Trie, length: int, window: int | None, device: torch.device) -> Any:
    """FlexAttention's mask of the same visibility over `length` positions; padding sees itself."""
    from torch.nn.attention.flex_attention import create_block_mask

    pad = torch.arange(len(trie), length)
    end = torch.cat([torch.from_numpy(trie.end), pad + 1]).to(device, torch.int32)
    depth = torch.cat([torch.from_numpy(trie.depth), torch.zeros_like(pad)]).to(device, torch.int32)
    # A tensor: a captured number that changes from call to call cannot be compiled.
    out_of_reach = None if window is None else depth - window

    def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = (k <= q) & (q < end[k])
        if out_of_reach is not None:
            visible = visible & (depth[k] > out_of_reach[q])
        return visible

    return create_block_mask(
        is_visible, None, None, length, length, device=device, BLOCK_SIZE=FLEX_BLOCK
    )


@cache
def flex_kernel(device: str) -> Callable[..., Any]:
    """FlexAttention, compiled where there is a GPU; elsewhere its plain form, which has no speed
    and no backward pass of its own."""
    from torch.nn.attention.flex_attention import flex_attention

    if device != "cuda":
        return flex_attention
    import torch._dynamo

    # Past the limit torch would run the plain form, which holds the scores of all pairs at once.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FLEX_FORMS)
    return torch.compile(flex_attention, fullgraph=True)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: Packed | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: [1, heads, L, width] → [1, L, heads, width].

    UnpackableAttention for a layer with something that packed attention does not compute.
    """
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kwargs |= {"scaling": scaling, "sliding_window": sliding_window}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    extras = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if extras:
        raise UnpackableAttention(f"{type(module).__name__} uses {', '.join(extras)}")
    out = packed(query, key, value, sliding_window, scaling)
    return out.transpose(1, 2).contiguous(), None


def install_packed_attention(decoder: Any) -> None:
    """Make `decoder` use this function in every layer.

    UnpackableAttention when its attention is not SDPA, which this function stands in for.
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


# --- does it compute what this model computes? ----------------------------------------------------


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative distance of the last hidden states, by the type of the weights."""

SHORTEST = 48
"""Tokens of the longest probe sequence where a model has no window."""


def check_packing(
    decoder: Any, states: Callable[[Pack], Tensor], shape: HeadShape, turn: int | None
) -> None:
    """ModelLoadError when packed and plain hidden states of `decoder` differ; `states` gives those
    of a pack, [positions, width]."""
    others = unknown_layers(decoder.config)
    if others:
        raise _refused(f"it has layers of another kind: {', '.join(others)}")
    try:
        install_packed_attention(decoder)
        off = packing_distance(states, probe_spans(decoder, shape, turn))
    except (UnpackableAttention, TypeError, NotImplementedError) as error:
        raise _refused(str(error)) from error
    dtype = next(decoder.parameters()).dtype
    if not off <= TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]):
        raise _refused(f"its hidden states differ by {off:.2g} of their size")


def unknown_layers(config: Any) -> list[str]:
    """Kinds of layers that neither attend to everything before them nor in a sliding window.

    Their reach may be longer than the probe's sequences (chunks of 8192, say).
    """
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return sorted(set(kinds) - {"full_attention", "sliding_attention"})


@torch.no_grad()
def packing_distance(states: Callable[[Pack], Tensor], spans: tuple[Span, ...]) -> float:
    """Largest relative distance between packed and plain hidden states of `spans`."""
    trie = build_trie([span.ids for span in spans])
    packed = states(Pack(tuple(range(len(spans))), spans, trie))
    worst = 0.0
    for index, span in enumerate(spans):
        plain = states(Pack((index,), (span,)))
        worst = max(worst, _apart(packed[torch.from_numpy(trie.path(index))], plain))
    return worst


def probe_spans(decoder: Any, shape: HeadShape, turn: int | None) -> tuple[Span, ...]:
    """Two sequences that share most of a prefix longer than any window, and one of another root.

    Windows that no sequence can outgrow do not count. `turn` is the length past which the model
    reads positions in another way.
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
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())


def shape_of(decoder: Any, kernel: Literal["sdpa", "flex"]) -> HeadShape:
    """What the cost model needs: the layers' width in pairs of attention, and their windows."""
    layers = [m for m in decoder.modules() if hasattr(m, "layer_idx") and _attends(m)]
    config = decoder.config
    # Where all layers are of one kind, some families (Mistral, Phi-3) keep the window here alone.
    mixed = getattr(config, "layer_types", None)
    common = None if mixed else getattr(config, "sliding_window", None) or None
    windows = [getattr(layer, "sliding_window", common) for layer in layers] or [common]
    shares = {w: windows.count(w) / len(windows) for w in dict.fromkeys(windows)}
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    weights = sum(
        p.numel() for n, p in decoder.named_parameters()
        if p.ndim == 2 and "lora_" not in n and "embed" not in n
    ) / len(windows)  # fmt: skip
    # Forward and backward to the inputs, with the adapter's share: 5.2 FLOPs a weight. Attention:
    # 14 FLOPs a pair and channel, at 70 % of the rate of matrix products.
    linear = 5.2 * weights / (19.6 * heads * head)
    costs = Costs(linear=linear) if kernel == "sdpa" else Costs(linear=linear, copy=0.0, call=0.0)
    return HeadShape(costs, tuple(shares.items()))


def _attends(module: Any) -> bool:
    return hasattr(module, "q_proj") or hasattr(module, "qkv_proj") or hasattr(module, "c_attn")


def _refused(why: str) -> ModelLoadError:
    return ModelLoadError(
        "This model's attention cannot run on packed sequences.",
        f"Packing must compute exactly what the model computes, and {why}.",
        "Train it with --packing off: every sequence then is a row of its own.",
    )
