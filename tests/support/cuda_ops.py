"""Finds operations that have no deterministic CUDA kernel, without a GPU.

On a CPU every operation is deterministic, so `torch.use_deterministic_algorithms` raises nothing
there. `CudaDeterminism` records what torch dispatches and refuses the operations that torch's
documentation says raise on a GPU, backward passes included.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ALWAYS = {
    "nll_loss_forward", "nll_loss2d_forward", "histc", "put_", "put", "median.dim",
    "nanmedian.dim", "kthvalue", "_ctc_loss_backward", "max_unpool2d", "max_unpool3d",
    "cumprod", "logcumsumexp", "multinomial", "_cdist_backward",
}  # fmt: skip
"""Some of these raise in certain cases only; nothing here needs them."""


class CudaDeterminism(TorchDispatchMode):
    """Raises AssertionError for an operation without a deterministic CUDA kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        self.seen.add(name)
        assert not _raises(name, args, kwargs or {}), f"{name} raises on a GPU"
        return func(*args, **(kwargs or {}))


def _raises(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    plain, _, form = name.partition(".")
    if plain in ("cumsum", "cumsum_"):
        first: Tensor = args[0]
        return (kwargs.get("dtype") or first.dtype).is_floating_point
    if plain == "bincount":
        return (len(args) > 1 and args[1] is not None) or kwargs.get("weights") is not None
    if plain in ("scatter_reduce", "scatter_reduce_", "index_reduce", "index_reduce_"):
        return "prod" in (*args, *kwargs.values())
    if plain.endswith("_backward"):
        return any(part in plain for part in ("pool", "upsample", "grid_sampler", "reflection_pad"))
    return plain in ALWAYS or f"{plain}.{form}" in ALWAYS
