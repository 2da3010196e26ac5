"""Checks the files of a model or adapter, and that its weights match the model.

Loaders fail in many ways on files of other shapes, so these are checked before they read them.
Common loaders fill missing weights with random numbers and drop unknown ones, at most with a
warning. soulkit checks every load (base, adapter, teacher, resume) and names each mismatch.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from soulkit.errors import ModelLoadError
from soulkit.models.local.threads import trial
from soulkit.parse import FILE_BYTES, ParseError, open_regular, parse_json, read_limited
from soulkit.text import byte_size, counted

ADAPTER_FILE = "adapter_model.safetensors"

SHOWN = 3
"""Maximum names of weights in a message; the rest are counted."""

BLOCKS, BLOCK_BYTES = 64, 1 << 16
"""Parts of a weights file that enter its hash."""
_HEADER_BYTES = 100 * 1024 * 1024
_SMALL = 1024
"""A rank that fits any adapter."""
_SPARE = 50_000_000
"""Numbers that a model may have in addition to its stored weights, such as masks."""
_EXPERT = re.compile(r"(?P<list>.+\.experts)\.(?P<n>\d{1,4})\.(?P<leaf>.+)")


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


# --- files ----------------------------------------------------------------------------------------

_TEXTS = (".jinja", ".txt", ".model")
_READ = (".json", ".safetensors", *_TEXTS)
_ON_HUB = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
           "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
           "tokenizer.model", "chat_template.jinja", "chat_template.json")  # fmt: skip
_OBJECTS = ("config.json", "index.json", "tokenizer.json", "tokens.json", "tokens_map.json",
            "template.json", "vocab.json")  # fmt: skip
"""Ends of the names of JSON files that loaders read; all of them contain an object."""
_WITH_IDS = ("tokenizer.json", "vocab.json", "added_tokens.json")
_COUNT = re.compile(r"n(um)?_(.*_)?(layer|block|expert|label)s?")
_MOST_PARTS, _MOST, _MOST_TOKENS, _MOST_MODULES = 4096, 2**40, 10_000_000, 250_000
"""Maximum number of layers, labels, or experts of a layer; of any other number; of the id of a
token; and of the modules and parameters of a model."""


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model; ModelLoadError for anything else."""
    with _opened(path):
        content = parse_json(read_limited(path), strict=False)
    if not isinstance(content, dict):
        raise unusable(path, "it does not contain a JSON object")
    return content


def check_folder_files(folder: Path) -> None:
    """ModelLoadError if a file that loaders read is not a regular file, or not what they expect."""
    files = (*folder.iterdir(), *folder.glob("additional_chat_templates/*.jinja"))
    for path in sorted(one for one in files if one.name.endswith(_READ)):
        with _opened(path), open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > FILE_BYTES and path.suffix in _TEXTS:
                raise ParseError(f"it is larger than {byte_size(FILE_BYTES)}")
        content = json_object(path) if path.name.endswith(_OBJECTS) else {}
        for name, value in _leaves(content) if path.name == "config.json" else ():
            most = _MOST_PARTS if _COUNT.fullmatch(name) else _MOST
            if isinstance(value, int) and value > most:
                raise unusable(path, f"'{name[:60]}' is {value}, more than {most}")
            if name.endswith("_implementation") and "/" in str(value):
                raise unusable(path, f"its '{name[:60]}' names code on the Hub")
        for name, number in _token_ids(content) if path.name in _WITH_IDS else ():
            if isinstance(number, int) and number > _MOST_TOKENS:
                raise unusable(path, f"the id of the token {name[:60]!r} is {number}")
        for _, file in _leaves(content.get("weight_map")):
            if (file and Path(str(file)).suffix != ".safetensors") or "/" in str(file):
                raise unusable(path, f"it names '{str(file)[:80]}', but only safetensors files of "
                               "this folder are read, since others can run code")  # fmt: skip


def check_hub_files(where: str, revision: str) -> str | None:
    """Download and check the files of a Hub model that loaders read before its weights. Returns its
    current commit; None if the client does not report it."""
    from transformers.utils import cached_file

    folder = Path(str(cached_file(where, "config.json", revision=revision))).parent
    commit = commit_of(folder) or None
    for name in _ON_HUB:
        cached_file(where, name, revision=commit or revision,
                    _raise_exceptions_for_missing_entries=False)  # fmt: skip
    check_folder_files(folder)
    return commit


def file_hash(path: Path) -> str:
    """First 16 hex digits of the sha256 of a file; ModelLoadError if it cannot be read."""
    with _opened(path), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


@contextmanager
def _opened(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise unusable(path, getattr(error, "strerror", None) or str(error)) from error


def unusable(path: Path, why: str) -> ModelLoadError:
    """The error for a file of a model or adapter."""
    why = f"{why[:1].upper()}{why[1:]}."
    return ModelLoadError(f"'{path}' cannot be used.", why, "Download or save the folder again.")


def _token_ids(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of the ids in a vocabulary, or in the tokens that tokenizer.json adds to it."""
    model = content.get("model", content)
    yield from _leaves(model.get("vocab", model) if isinstance(model, dict) else ())
    yield from _leaves(content.get("added_tokens"))


def _leaves(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of all values that are not lists or objects, at any depth."""
    if not isinstance(content, dict | list):
        yield name, content
        return
    for key, part in content.items() if isinstance(content, dict) else ((name, x) for x in content):
        yield from _leaves(part, key)


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


def check_size(where: str, kind: Any, config: Any, revision: str | None) -> None:
    """ModelLoadError if the model of a configuration is much larger than its stored weights, before
    it takes memory. `kind`: its Auto class."""
    import torch
    from torch.nn.modules import module as hooks

    parts = count()

    def one_more(*_: object) -> None:
        if next(parts) > _MOST_MODULES:
            raise not_its_weights(where, f"config.json asks for over {_MOST_MODULES:,} parts")

    with ExitStack() as stack, torch.device("meta"):
        for register in (
            hooks.register_module_module_registration_hook,
            hooks.register_module_parameter_registration_hook,
        ):
            stack.callback(register(one_more).remove)
        empty = kind.from_config(copy.deepcopy(config))
    size = sum(part.numel() for part in (*empty.parameters(), *empty.buffers()))
    stored = sum(math.prod(one.shape) for one in checkpoint_tensors(where, revision))
    packed = 16 if getattr(config, "quantization_config", None) else 1
    if stored and size > 2 * packed * stored + _SPARE:
        raise not_its_weights(
            where, f"it has {stored:,} weights, and config.json asks for {size:,}"
        )


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
    lost = (
        f"{name}.{number}.{leaf}"
        for name, there in lists.items()
        for leaf in {leaf for _, leaf in there}
        for number in range(max(there)[0] + 1)
        if (number, leaf) not in there
    )
    return [*islice(lost, 10_000)]


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


def check_adapter_folder(folder: Path, modules: Collection[str]) -> None:
    """ModelLoadError if an adapter's configuration imports code, is much larger than its weights,
    or has patterns that take too long to compare with the names of the model's `modules`."""
    path = folder / "adapter_config.json"
    config = json_object(path)
    if config.get("megatron_config"):
        raise unusable(path, "its 'megatron_config' imports a module by name")
    with open_regular(folder / ADAPTER_FILE) as file:
        stored = max((n for one in stored_tensors(file) for n in one.shape), default=0)
    if sum(n for _, n in _leaves(config.get("layer_replication")) if isinstance(n, int)) > _SMALL:
        raise unusable(path, f"its 'layer_replication' makes more than {_SMALL} layers")
    for name, number in _leaves({k: v for k, v in config.items() if "alpha" not in k}):
        if isinstance(number, int) and not -1 <= number <= max(stored, _SMALL):
            raise unusable(path, f"'{name[:60]}' is {number}, which does not fit its weights")
    keys = ("target_modules", "exclude_modules", "target_parameters", "layers_pattern")
    values = [config.get(key) for key in keys]
    values += [list(config.get(key) or ()) for key in ("rank_pattern", "alpha_pattern")]
    patterns = [text for _, text in _leaves(values)]
    if why := trial(lambda: [re.fullmatch(f"(.*\\.)?({p})", m) for p in patterns for m in modules]):
        raise unusable(path, f"a pattern in it cannot be used: {why}")


def check_adapter_weights(folder: Path) -> None:
    """ModelLoadError if the weights of an adapter cannot be read or are not finite."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / ADAPTER_FILE
    with _opened(path):
        with open_regular(path) as file:
            stored = stored_tensors(file)
        try:
            fault = weights_misfit(broken=broken_weights(load_file(path)))
        except SafetensorError as error:
            raise ParseError(f"safetensors reports: {error}") from error
        if fault or not stored:
            raise ParseError(fault or "it has no weights")


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
        with _opened(file), open_regular(file) as opened:
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
    """The tensors of a safetensors file, from its header. ValueError for any other file."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= _HEADER_BYTES:
        raise ValueError("the file has no safetensors header")
    header: Mapping[str, Any] = parse_json(file.read(length), strict=False)
    try:
        return [
            StoredTensor(name, str(entry["dtype"]), tuple(map(int, entry["shape"])),
                         *(8 + length + at for at in entry["data_offsets"]))
            for name, entry in header.items() if name != "__metadata__"
        ]  # fmt: skip
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError("its safetensors header is damaged") from error


def checkpoint_tensors(where: str, revision: str | None = None) -> list[StoredTensor]:
    """The tensors of a checkpoint without those of an adapter in its folder; empty if a file is
    damaged, which its loader reports. `where`: a folder, or a Hub id downloaded at `revision`."""
    from transformers.utils import cached_file

    config = cached_file(where, "config.json", local_files_only=True, revision=revision)
    found: list[StoredTensor] = []
    for path in Path(str(config)).parent.glob("*.safetensors"):
        if path.name != ADAPTER_FILE:
            try:
                with open_regular(path) as file:
                    found += stored_tensors(file)
            except (OSError, ValueError):
                return []
    return found


def commit_of(folder: Path) -> str:
    """The commit of a folder in the Hub client's cache; empty for any other folder."""
    in_cache = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models-")
    return folder.name if in_cache else ""


def cached_folder(where: str, revision: str | None) -> Path | None:
    """The folder of a Hub model in the download cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(where, "config.json", revision=revision)
    except ValueError:  # not a Hub id
        return None
    return Path(config).parent if isinstance(config, str) else None
