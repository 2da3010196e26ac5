"""Whether weights that were read are those of the model they were put into.

Loaders of the field fill what a checkpoint lacks with random numbers, and drop what has no place,
with a remark at most. Here every road by which weights come in asks the same question, and what
does not fit is named: base, adapter, teacher, and what a resume puts back.
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
"""Names of weights in a message; the others are counted."""

BLOCKS, BLOCK_BYTES = 64, 1 << 16
"""What is read of a file of weights to know it again."""
_HEADER_BYTES = 100 * 1024 * 1024
_EXPERT = re.compile(r"(?P<list>.+\.experts)\.(?P<n>\d+)\.(?P<leaf>.+)")


def weights_misfit(
    missing: Collection[str] = (), misshapen: Collection[str] = (), foreign: Collection[str] = (),
    broken: Collection[str] = (),
) -> str:  # fmt: skip
    """What is wrong with a set of weights, by name; empty when nothing is.

    `missing` the model has and the file lacks; `misshapen` have another shape in the file;
    `foreign` stand in the file, and the model has no place for them; `broken` hold numbers that are
    not finite.
    """
    parts = [
        f"{counted(len(names), 'weight')} {what}: {_name_list(names)}"
        for names, what in (
            (missing, "missing"),
            (misshapen, "of another shape"),
            (foreign, "foreign"),
            (broken, "with NaN or infinities"),
        )
        if names
    ]
    return "; ".join(parts)


def misfit_of(held: Mapping[str, Any], places: Mapping[str, Any]) -> str:
    """`weights_misfit` of tensors by name: names and shapes must be those of `places`, and their
    numbers finite."""
    both = held.keys() & places.keys()
    return weights_misfit(
        places.keys() - held.keys(),
        [n for n in both if held[n].shape != places[n].shape],
        held.keys() - places.keys(),
        broken_weights(held),
    )


def broken_weights(tensors: Mapping[str, Any]) -> list[str]:
    """The names of those that hold a NaN or an infinity; each is read once, and not copied."""
    return [name for name, tensor in tensors.items() if not _is_finite(tensor.detach())]


def _is_finite(tensor: Any) -> bool:
    import torch

    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return True
    if tensor.itemsize == 1:  # float8 has no arithmetic of its own
        tensor = tensor.to(torch.bfloat16)
    # The least and the greatest of numbers with a NaN among them are NaN.
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))


def _name_list(names: Collection[str]) -> str:
    first = ", ".join(sorted(names, key=_in_order)[:SHOWN])
    more = len(names) - SHOWN
    return f"{first} and {more} more" if more > 0 else first


def _in_order(name: str) -> list[str | int]:
    """Layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


# --- a base model ---------------------------------------------------------------------------------


def check_base(
    where: str, model: Any, report: Mapping[str, Any], revision: str | None = None
) -> None:
    """ModelLoadError unless the checkpoint `where` had every weight of `model`, and used them all.

    `report` is what transformers tells of loading: tied weights and what a family may lack are
    not missing there.
    """
    missing = {*report["missing_keys"], *lost_experts(where, revision)}
    misshapen = [entry[0] for entry in report["mismatched_keys"]]
    foreign = list(_unused(model, report["unexpected_keys"]))
    broken = [] if missing or misshapen else broken_weights(dict(model.named_parameters()))
    if fault := weights_misfit(missing, misshapen, foreign, broken):
        raise not_its_weights(where, fault)


def not_its_weights(where: str, fault: str) -> ModelLoadError:
    return ModelLoadError(
        f"The checkpoint '{where}' does not hold the weights of its model ({fault}).",
        "What it lacks would be random numbers, what has no place would be left out, what is not "
        "finite makes every reply nonsense, and the score would be another model's.",
        "Download or save the whole checkpoint again, with the config.json that belongs to it.",
    )


def stored_types(where: str, revision: str | None = None) -> set[str]:
    """The kinds of numbers in the files of a checkpoint, as `checkpoint_tensors` reads them."""
    return {tensor.dtype for tensor in checkpoint_tensors(where, revision)}


def lost_experts(where: str, revision: str | None = None) -> list[str]:
    """Weights of experts that a later expert of the same list has, by name.

    transformers stacks experts in the order in which it finds them, so that those behind a gap move
    up unseen, or it stops without a name.
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
    """Those of `names` that belong to what the model has, and would change what that computes.

    Only weights and biases in a layer or module that is there. Older buffers (the mask that is the
    `bias` of a whole attention), modules beside the language model (a value head, a draft head),
    and whole layers beyond those that the configuration asks for are left out knowingly.
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
    """Loads the weights of `folder` into the adapter `name` of `adapted`; their `weights_misfit`.

    What PEFT translates (names of older versions) fits. Its own errors pass.
    """
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        held = set(file.keys())
    adapter_names, wide = (
        set(get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=both))
        for both in (False, True)  # embeddings may stand in an adapter that does not train them
    )
    base = adapted.state_dict().keys() - wide
    if any(name not in held for name in adapter_names if not _is_tuned(adapted, name)):
        # PEFT would stop at the first of them.
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
    """Whether a weight of the adapter is one of its method, not a bias or a module saved whole."""
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(adapted.active_peft_config.peft_type)
    return bool(prefix) and prefix in weight


def _plain(weight: str, adapter: str) -> str:
    return weight.replace(f".{adapter}", "")


def weights_hash(folder: Path) -> str:
    """What tells a checkpoint from one that was written to the same place since.

    Of each file of weights its size, its head and blocks all over it: training moves everything.
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
    """As safetensors calls it: BF16."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    end: int
    """The byte behind it."""


def stored_tensors(file: BinaryIO) -> list[StoredTensor]:
    """The tensors in a safetensors file, by its header alone. ValueError, KeyError, TypeError or
    AttributeError for another file."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= _HEADER_BYTES:
        raise ValueError("no safetensors header")
    header: Mapping[str, Any] = json.loads(file.read(length))
    return [
        StoredTensor(name, entry["dtype"], tuple(entry["shape"]),
                     *(8 + length + at for at in entry["data_offsets"]))
        for name, entry in header.items() if name != "__metadata__"
    ]  # fmt: skip


def checkpoint_tensors(where: str, revision: str | None = None) -> list[StoredTensor]:
    """The tensors of a checkpoint, of an adapter beside it none; empty where a file is damaged,
    which its loader reports. `where` is a folder or a hub id that was downloaded at `revision`."""
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
