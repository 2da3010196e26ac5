"""Checks that loaded weights match the model they are loaded into.

Common loaders fill missing weights with random numbers and drop unknown ones, at most with a
warning. soulkit checks every load (base, adapter, teacher, resume) and names each mismatch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from soulkit.errors import ModelLoadError
from soulkit.text import counted

ADAPTER_FILE = "adapter_model.safetensors"

SHOWN = 3
"""Maximum names of weights in a message; the rest are counted."""

BLOCKS, BLOCK_BYTES = 64, 1 << 16
"""Parts of a weights file that enter its hash."""
_HEADER_BYTES = 100 * 1024 * 1024
_EXPERT = re.compile(r"(?P<list>.+\.experts)\.(?P<n>\d+)\.(?P<leaf>.+)")


def weights_misfit(
    missing: Collection[str] = (), misshapen: Collection[str] = (), foreign: Collection[str] = (),
    broken: Collection[str] = (),
) -> str:  # fmt: skip
    """What is wrong with a set of weights, by name; empty if nothing.

    `missing`: in the model but not in the file; `misshapen`: with another shape in the file;
    `foreign`: in the file but not in the model; `broken`: with numbers that are not finite.
    """
    parts = [
        f"{counted(len(names), 'weight')} {what}: {_name_list(names)}"
        for names, what in (
            (missing, "missing"),
            (misshapen, "with another shape"),
            (foreign, "not in the model"),
            (broken, "with NaN or infinities"),
        )
        if names
    ]
    return "; ".join(parts)


def misfit_of(held: Mapping[str, Any], places: Mapping[str, Any]) -> str:
    """The `weights_misfit` of the tensors `held` for the model's tensors `places`."""
    both = held.keys() & places.keys()
    return weights_misfit(
        places.keys() - held.keys(),
        [n for n in both if held[n].shape != places[n].shape],
        held.keys() - places.keys(),
        broken_weights(held),
    )


def broken_weights(tensors: Mapping[str, Any]) -> list[str]:
    """Names of tensors with a NaN or infinity. Each tensor is read once and not copied."""
    return [name for name, tensor in tensors.items() if not _is_finite(tensor.detach())]


def _is_finite(tensor: Any) -> bool:
    import torch

    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return True
    if tensor.itemsize == 1:  # float8 does not support arithmetic
        tensor = tensor.to(torch.bfloat16)
    # With a NaN in the tensor, its minimum and maximum are NaN.
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))


def _name_list(names: Collection[str]) -> str:
    first = ", ".join(sorted(names, key=_in_order)[:SHOWN])
    more = len(names) - SHOWN
    return f"{first} and {more} more" if more > 0 else first


def _in_order(name: str) -> list[str | int]:
    """Sort key that puts layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


# --- a base model ---------------------------------------------------------------------------------


def check_base(
    where: str, model: Any, report: Mapping[str, Any], revision: str | None = None
) -> None:
    """ModelLoadError unless the checkpoint `where` has every weight of `model` and no others.

    `report` is transformers' loading info, in which tied and optional weights do not count as
    missing.
    """
    missing = {*report["missing_keys"], *lost_experts(where, revision)}
    misshapen = [entry[0] for entry in report["mismatched_keys"]]
    foreign = list(_unused(model, report["unexpected_keys"]))
    broken = [] if missing or misshapen else broken_weights(dict(model.named_parameters()))
    if fault := weights_misfit(missing, misshapen, foreign, broken):
        raise not_its_weights(where, fault)


def not_its_weights(where: str, fault: str) -> ModelLoadError:
    return ModelLoadError(
        f"The checkpoint '{where}' does not match its model ({fault}).",
        "Missing weights would be random, unknown ones ignored, and non-finite ones turn every "
        "reply into nonsense, so scores would be meaningless.",
        "Download or save the whole checkpoint again, with its own config.json.",
    )


def stored_types(where: str, revision: str | None = None) -> set[str]:
    """The number types in a checkpoint's files, as named by `checkpoint_tensors`."""
    return {tensor.dtype for tensor in checkpoint_tensors(where, revision)}


def lost_experts(where: str, revision: str | None = None) -> list[str]:
    """Names of missing expert weights that a later expert of the same list has.

    transformers stacks experts in the order it finds them: after a gap, later experts move up
    without notice, or loading fails without naming the missing one.
    """
    lists: dict[str, set[tuple[int, str]]] = {}
    names = (tensor.name for tensor in checkpoint_tensors(where, revision))
    for match in filter(None, map(_EXPERT.fullmatch, names)):
        lists.setdefault(match["list"], set()).add((int(match["n"]), match["leaf"]))
    return [
        f"{name}.{number}.{leaf}"
        for name, there in lists.items()
        for leaf in {leaf for _, leaf in there}
        for number in range(max(there)[0] + 1)
        if (number, leaf) not in there
    ]


def _unused(model: Any, names: Iterable[str]) -> Iterable[str]:
    """Those of `names` that belong to a part of the model and would change its output.

    Only weights and biases of an existing layer or module. Not old buffers (an attention mask
    called `bias`), modules outside the language model (a value or draft head), or whole layers
    beyond the configured number.
    """
    import torch

    modules = dict(model.named_modules())
    lists = [(n, len(part)) for n, part in modules.items() if isinstance(part, torch.nn.ModuleList)]
    layers = tuple(f"{name}.{number}." for name, size in lists for number in range(size))
    for name in names:
        module, _, leaf = name.rpartition(".")
        mask = leaf == "bias" and module in modules and any(modules[module].children())
        present = module in modules or name.startswith(layers)
        if leaf.startswith(("weight", "bias")) and present and not mask:
            yield name


# --- an adapter -----------------------------------------------------------------------------------


def put_adapter(adapted: Any, folder: Path, name: str) -> str:
    """Load the weights of `folder` into the adapter `name`; returns their `weights_misfit`.

    Weight names of older PEFT versions are accepted, since PEFT translates them. PEFT's own errors
    are raised.
    """
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        held = set(file.keys())
    adapter_names, wide = (
        set(get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=both))
        for both in (False, True)  # an adapter may contain embeddings that it does not train
    )
    base = adapted.state_dict().keys() - wide
    if any(name not in held for name in adapter_names if not _is_tuned(adapted, name)):
        # PEFT would fail at the first missing one.
        return weights_misfit(adapter_names - held, foreign=held - wide)
    try:
        report = adapted.load_adapter(str(folder), name)
    except RuntimeError as error:
        if not (sizes := re.findall(r"size mismatch for ([^\s:]+)", str(error))):
            raise
        return weights_misfit(misshapen=[_plain(n, name) for n in sizes])
    missing = [_plain(n, name) for n in report.missing_keys]
    loaded = get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=True)
    return weights_misfit(
        missing, foreign={*report.unexpected_keys, *(held & base)} - adapter_names,
        broken=broken_weights(loaded),
    )  # fmt: skip


def _is_tuned(adapted: Any, weight: str) -> bool:
    """Whether an adapter weight belongs to its method, and is not a bias or a saved module."""
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(adapted.active_peft_config.peft_type)
    return bool(prefix) and prefix in weight


def _plain(weight: str, adapter: str) -> str:
    return weight.replace(f".{adapter}", "")


def weights_hash(folder: Path) -> str:
    """A hash that distinguishes checkpoints written to the same folder.

    Covers the name, size and sampled blocks of each weights file: training changes all weights.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for part in range(BLOCKS):
                opened.seek(size * part // BLOCKS)
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    name: str
    dtype: str
    """The number type as named by safetensors, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    end: int
    """Offset after its last byte."""


def stored_tensors(file: BinaryIO) -> list[StoredTensor]:
    """The tensors of a safetensors file, from its header. ValueError, KeyError, TypeError or
    AttributeError for any other file."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= _HEADER_BYTES:
        raise ValueError("the file has no safetensors header")
    header: Mapping[str, Any] = json.loads(file.read(length))
    return [
        StoredTensor(name, entry["dtype"], tuple(entry["shape"]),
                     *(8 + length + at for at in entry["data_offsets"]))
        for name, entry in header.items() if name != "__metadata__"
    ]  # fmt: skip


def checkpoint_tensors(where: str, revision: str | None = None) -> list[StoredTensor]:
    """The tensors of a checkpoint without those of an adapter in its folder; empty if a file is
    damaged, which its loader reports. `where`: a folder, or a Hub id downloaded at `revision`."""
    from transformers.utils import cached_file

    config = cached_file(where, "config.json", local_files_only=True, revision=revision)
    found: list[StoredTensor] = []
    for path in Path(str(config)).parent.glob("*.safetensors"):
        if path.name != ADAPTER_FILE:
            try:
                with path.open("rb") as file:
                    found += stored_tensors(file)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                return []
    return found


def cached_folder(where: str, revision: str | None) -> Path | None:
    """The folder of a Hub model in the download cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(where, "config.json", revision=revision)
    except ValueError:  # not a Hub id
        return None
    return Path(config).parent if isinstance(config, str) else None
