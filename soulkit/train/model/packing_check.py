"""Does packed attention compute what this model computes? Asked once, before anything is trained.

Three sequences from two roots, longer than any window of the model, go through it packed and one by
one. Whatever a layer does that packed attention does not know of (a window that it keeps to itself,
a bias, positions of its own) shows up here, and such a model is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from soulkit.errors import ModelLoadError
from soulkit.train.model.attention import UnpackableAttention, install_packed_attention
from soulkit.train.model.packing import Costs, HeadShape, Pack, build_trie
from soulkit.train.objectives.sequences import Span

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
