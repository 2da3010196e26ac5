"""Loads a base in 4-bit NF4 with bitsandbytes, and says how a loaded base is quantised.

The weights of linear layers take about 4.1 bits each (double quantisation). Embeddings, norms and
the output layer keep 16 or 32 bits. Every product unpacks its weights first, so a step needs less
memory and more time.

An adapter that was trained on such a base also corrects its rounding errors. On the full base it is
a slightly different model, so a note saved with it names its base.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from soulkit.errors import MissingPackage, ModelLoadError
from soulkit.models.local.weights import stored_types
from soulkit.text import one_line

if TYPE_CHECKING:
    import torch

Quantize = Literal["none", "nf4"]
PACKAGE = "bitsandbytes"
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes per weight in 4 bits: a scale of 8 bits for 64 weights, one of 32 bits for 256 of these."""


def require_package(quantize: Quantize) -> None:
    """MissingPackage if bitsandbytes is needed and not installed."""
    if quantize != "none" and find_spec(PACKAGE) is None:
        raise MissingPackage(PACKAGE, f"--quantize {quantize}")


def loading_arguments(
    where: str, config: Any, device: torch.device, dtype: torch.dtype | str
) -> dict[str, Any]:
    """Arguments for `from_pretrained` that quantise to NF4 while loading; `dtype` auto is bfloat16.

    ModelLoadError for a checkpoint that is already quantised.
    """
    import torch

    if (stored := getattr(config, "quantization_config", None)) is not None:
        raise ModelLoadError(
            f"'{where}' is already quantised ({_method(stored)}).",
            "--quantize nf4 converts full weights while it loads them.",
            "Use the model in bfloat16 or float32, or leave out --quantize.",
        )
    _import_package()
    from transformers import BitsAndBytesConfig

    number = torch.bfloat16 if isinstance(dtype, str) else dtype
    kind = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=number,
    )
    return {"dtype": number, "quantization_config": kind, "device_map": {"": device}}


def _import_package() -> None:
    """Import bitsandbytes without the kernel that it would otherwise fetch from the Hub for some
    CPUs: soulkit runs no downloaded code."""
    fetcher = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:
        raise ModelLoadError(
            f"The package '{PACKAGE}' is installed, but cannot be imported.",
            one_line(f"{type(error).__name__}: {error}", 200),
            "Install a version that fits this machine and this torch, or leave out --quantize.",
        ) from error
    finally:
        del sys.modules["kernels"]
        if fetcher is not None:
            sys.modules["kernels"] = fetcher


def keep_differentiable(model: Any) -> None:
    """Keep bitsandbytes from packing weights anew for some CPUs.

    A forward pass without gradients would pack them in place, in bfloat16; later passes of a
    training would then have no gradient through the base.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantised(model: Any) -> str:
    """The quantisation of a loaded base (`nf4`, `fp8`, `8-bit integers`); empty if there is
    none."""
    if (settings := getattr(model.config, "quantization_config", None)) is not None:
        return _method(settings)
    kinds = stored_types(model.config._name_or_path, model.config._commit_hash)
    if kinds & {"I8", "U8"}:
        return "8-bit integers"
    return "float8" if any(kind.startswith("F8") for kind in kinds) else ""


def _method(settings: Any) -> str:
    read = settings if isinstance(settings, dict) else settings.to_dict()
    if read.get("load_in_4bit"):
        return str(read.get("bnb_4bit_quant_type", "4-bit"))
    return str(read.get("quant_method", "quantised"))


def base_remark(note: Path, quantize: Quantize) -> str:
    """A line if an adapter's base was quantised otherwise in its training; else empty. `note` is
    the file saved with the adapter; without it, nothing is compared."""
    try:
        trained = json.loads(note.read_text(encoding="utf-8"))["base"].get("quantize", "none")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    if trained == quantize:
        return ""
    before, now = (
        "the full base" if one == "none" else f"a base in {one}" for one in (trained, quantize)
    )
    return (
        f"the adapter was trained on {before}; this run uses {now} (to use the same: "
        f"--quantize {trained})"
    )
