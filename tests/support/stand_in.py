"""A CUDA device played by the CPU: wrong devices fail as they do on a GPU, numbers are real.

An `OnCard` says that it is on cuda:0 and keeps its values in a CPU tensor. While the stand-in is
installed, every operation of torch passes through `computed`, which refuses what CUDA refuses:
tensors of two devices in one operation, a generator of another device, NumPy views, and (in
deterministic mode) operations without a deterministic kernel. It shows neither CUDA's rounding, nor
its kernels, nor its memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import peft  # noqa: F401 - before there seems to be a CUDA build
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from soulkit.models.local import sampler
from soulkit.train.model import attention

aten: Any = torch.ops.aten
CARD = torch.device("cuda:0")
BETWEEN = (aten.copy_.default, aten._to_copy.default)
"""Operations that take tensors of two devices."""
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
           aten._index_put_impl_.default)  # fmt: skip
"""Operations whose second argument, the indices, may be on the CPU."""
NOT_DETERMINISTIC = (aten.cumsum.default, aten.cumsum_.default, aten.cumprod.default,
                     aten.histc.default, aten.kthvalue.default, aten.median.dim,
                     aten.put_.default)  # fmt: skip
"""Without a deterministic kernel for floating-point numbers on CUDA."""


class OnCard(torch.Tensor):
    """A tensor on the stand-in device. torch's own code sees a CPU tensor without storage."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        with torch.inference_mode(held.is_inference()):
            made: Any = torch.Tensor._make_wrapper_subclass(
                cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
                dtype=held.dtype, device="cpu",
            )  # fmt: skip
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnCard({self.held!r})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CARD

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def data(self) -> Any:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        assert isinstance(value, OnCard), "data of another device"
        self.held = value.held

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def tolist(self) -> Any:
        return self.held.tolist()

    def new_tensor(self, values: Any, dtype: Any = None, device: Any = CARD) -> Tensor:  # type: ignore[override]
        return torch.tensor(values, dtype=dtype or self.dtype, device=device)

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.to("cpu")

    def cuda(self, *_: Any) -> Tensor:  # type: ignore[override]
        return self

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        target = [*args, *kwargs.values()]
        target = [CARD if isinstance(one, OnCard) else one for one in target]
        target += [one.device for one in target if isinstance(one, Tensor)]
        device = next((torch.device(d) for d in target if isinstance(d, str | torch.device)), CARD)
        dtypes = [one for one in target if isinstance(one, torch.dtype)]
        like = [one.dtype for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        dtype = (*dtypes, *like, self.dtype)[0]
        if device.type != "cuda":
            return _Down.apply(self, dtype)
        return self if dtype == self.dtype else aten._to_copy(self, dtype=dtype)


class _Down(torch.autograd.Function):
    """Copies a tensor to the CPU."""

    @staticmethod
    def forward(ctx: Any, card: Any, dtype: torch.dtype) -> Tensor:
        ctx.dtype = card.dtype
        return card.held.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return OnCard(grad.to(ctx.dtype)), None


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation, on the stand-in device if an argument or `device` is.

    With arguments on it, a `device` of CPU is what torch's own code sees; `_Down` moves to the CPU.
    """
    device = kwargs.get("device")
    to_card = device is not None and torch.device(device).type == "cuda"
    leaves, _ = tree_flatten((args, kwargs))
    cards = [one for one in leaves if isinstance(one, OnCard)]
    if not cards and not to_card:
        return func(*args, **kwargs)
    check_devices(func, args, kwargs, bool(cards))
    plain_args, plain_kwargs = tree_map(_on_cpu, (args, kwargs))
    out = _run(func, plain_args, plain_kwargs)
    if "out" in kwargs:
        return kwargs["out"]
    if func._schema.is_mutable:  # in place; `_foreach_` operations return nothing
        return args[0] if isinstance(args[0], Tensor) else out
    return tree_map(lambda one: OnCard(one) if isinstance(one, Tensor) else one, out)


def check_devices(func: Any, args: Any, kwargs: Any, any_card: bool) -> None:
    """The RuntimeErrors of CUDA."""
    used = [*args[:1], *args[2:]] if func in INDEXED else [*args]
    leaves, _ = tree_flatten((used, kwargs))
    plain = [one for one in leaves if isinstance(one, Tensor) and not isinstance(one, OnCard)]
    if any_card and any(one.dim() for one in plain) and func not in BETWEEN:
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device")
    generator = kwargs.get("generator")
    here = {one._cdata for one in GENERATORS}  # type: ignore[attr-defined]
    if generator is not None and generator._cdata not in here:
        raise RuntimeError(f"{func}: Expected a 'cuda' device type for generator but found 'cpu'")
    exact = torch.are_deterministic_algorithms_enabled() and func in NOT_DETERMINISTIC
    if exact and args[0].is_floating_point():
        raise RuntimeError(f"{func} does not have a deterministic implementation")


def _on_cpu(one: Any) -> Any:
    if isinstance(one, OnCard):
        return one.held
    return torch.device("cpu") if isinstance(one, torch.device) else one


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    if func is aten.mm.dtype:  # only CUDA has it
        a, b, dtype = args
        if a.dtype != b.dtype or dtype not in (a.dtype, torch.float32):
            raise RuntimeError(f"mm: dtypes {a.dtype}, {b.dtype} → {dtype}")
        return a.to(dtype) @ b.to(dtype)
    return func(*args, **kwargs)


class _Card(TorchDispatchMode):
    """Active in one thread."""

    def __enter__(self) -> Any:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) moves by `to`
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def flex_by_mask(device: str) -> Callable[..., Tensor]:
    """FlexAttention as SDPA with the whole mask; the compiled kernel needs a real GPU."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float, enable_gqa: bool,
        kernel_options: Any,
    ) -> Tensor:  # fmt: skip
        length = q.shape[2]
        seen = create_mask(block_mask.mask_mod, 1, 1, length, length, device=str(q.device))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )

    return kernel


class _CardPool(ThreadPoolExecutor):
    """A pool whose threads have the device."""

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        def on_card() -> Any:
            with _Card():
                return call(*args, **kwargs)

        return super().submit(on_card)


GENERATORS: list[torch.Generator] = []
"""Generators of the device. torch wraps them anew for every operation, so addresses tell."""


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        generator = super().__new__(cls, device="cpu")
        if torch.device(device).type == "cuda":
            GENERATORS.append(generator)
        return generator


def _pad_sequence(parts: Any, batch_first: bool = False, padding_value: float = 0.0) -> Tensor:
    """torch's own makes its result where its C++ code sees the parts."""
    width = max(map(len, parts))
    rows = [torch.nn.functional.pad(part, (0, width - len(part)), value=padding_value)
            for part in parts]  # fmt: skip
    return torch.stack(rows, 0 if batch_first else 1)


CALLS: Counter[str] = Counter()
"""Calls of the functions of `torch.cuda` by name, since the stand-in was installed."""


def _answering(name: str, answer: Any) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        CALLS[name] += 1
        return answer

    return function


_to = torch.Tensor.to


def _to_the_device_of(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, where the other tensor may be on the card, which torch's C++ code does not
    see."""
    if args and isinstance(args[0], OnCard):
        return _to(tensor, CARD, args[0].dtype, *args[1:], **kwargs)
    return _to(tensor, *args, **kwargs)


@contextmanager
def stand_in() -> Iterator[None]:
    """Install the device; `torch.cuda` then reports one card with 80 GB."""
    CALLS.clear()
    GENERATORS.clear()
    size = 80 << 30
    answers = {
        "_lazy_init": None, "is_available": True, "device_count": 1, "current_device": 0,
        "synchronize": None, "empty_cache": None, "mem_get_info": (size, size),
        "get_device_name": "stand-in", "reset_peak_memory_stats": None, "max_memory_allocated": 0,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, _answering(name, answer))
        patch.setattr(attention, "flex_kernel", flex_by_mask)
        patch.setattr(torch.Tensor, "to", _to_the_device_of)
        patch.setattr(torch.nn.utils.rnn, "pad_sequence", _pad_sequence)
        patch.setattr(sampler, "ThreadPoolExecutor", _CardPool)
        patch.setattr(torch, "Generator", _Generator)
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with _Card():
                yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
