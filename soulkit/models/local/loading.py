"""Models and adapters on disk and on the hub: finding, loading and saving them, and their licences.

A name is a folder here, or `owner/name@revision` of the hub. A name that reads like a mistyped
folder is never looked up there, since a stranger may own a model of that name. Only safetensors are
read and no code of a model's folder is run. Every mistake with a path is a ModelLoadError that
names what is missing. A checkpoint that also reads images is loaded whole, so that what is saved
fits what was loaded; only its language part is prompted and trained.

A saved folder holds weights, configuration, tokenizer with chat template, and `soulkit.json`, which
says what the weights were trained on. An adapter names its base by hub id and commit, or path.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from soulkit.api_keys import printable, remember, shown_address
from soulkit.errors import ModelLoadError
from soulkit.models.local.weights import (
    ADAPTER_FILE,
    check_base,
    lost_experts,
    not_its_weights,
    put_adapter,
    stored_types,
    weights_misfit,
)
from soulkit.runs.jsonl import write_json

if TYPE_CHECKING:
    import torch


ADAPTER_CONFIG = "adapter_config.json"
NOTE = "soulkit.json"
"""Beside saved weights: what they were trained on, how, and from which base."""

_HUB_NAME = re.compile(r"(?P<id>\w[\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>\w[\w./+-]*))?")


class ModelPlace(NamedTuple):
    """Where a model or an adapter lies; `where` alone is what the hub's libraries call it."""

    where: str
    """A folder, or the hub's id without a revision."""
    revision: str | None = None
    """What was asked for of a hub's; None for its newest and for every folder."""

    def __str__(self) -> str:
        return f"{self.where}@{self.revision}" if self.revision else self.where

    @property
    def on_hub(self) -> bool:
        return not Path(self.where).is_dir()


def model_place(name: str | Path, what: str = "model") -> ModelPlace:
    """The folder that is there, or the hub's; `what` is looked for.

    ModelLoadError, with the nearest folder, for a file and for what reads like a folder that is
    not there: a Path, no owner/name, a name in a folder that exists, a slip of a model beside it;
    and for a revision of a folder.
    """
    place = Path(name).expanduser()
    if place.is_dir():
        return ModelPlace(str(place))
    if place.exists():
        raise ModelLoadError(
            f"'{name}' is a file, not {_article(what)}.",
            "A model is a folder with its configuration, weights and tokenizer.",
            f"Name the folder that holds it, perhaps '{place.parent}'.",
        )
    match = None if isinstance(name, Path) else _HUB_NAME.fullmatch(name)
    if match is None or (match["revision"] is None and _reads_like_a_folder(place)):
        raise _no_folder(name, place, what, on_hub=match is not None)
    if Path(match["id"]).is_dir():  # the hub's libraries would take it and pass the revision over
        raise ModelLoadError(
            f"'{name}' names {_article(what)} of the hub, and there is a folder '{match['id']}'.",
            "The folder has no revisions, and the hub's libraries would load it instead.",
            f"Name the folder as '{match['id']}', or start where there is no such folder.",
        )
    return ModelPlace(match["id"], match["revision"])


def hub_cache() -> Path:
    """Where the hub's client keeps what it downloads."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub")


def _article(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _reads_like_a_folder(place: Path) -> bool:
    """Whether its parent is there, or a model's folder has nearly this name."""
    if place.parent != Path() and place.parent.is_dir():
        return True
    near = _near(place)
    return bool(near) and any((Path(near) / n).is_file() for n in ("config.json", ADAPTER_CONFIG))


def _no_folder(name: str | Path, place: Path, what: str, *, on_hub: bool) -> ModelLoadError:
    near = _near(place)
    hint = f"Did you mean '{near}'?" if near else "Check the path."
    why = (
        "It reads like a folder beside others here, and the hub was not asked."
        if on_hub
        else "It does not read like a model of the hub either."
    )
    hub = f"{name}@main" if on_hub else "owner/name or owner/name@revision"
    return ModelLoadError(
        f"There is no folder '{name}'.", why, f"{hint} {_article(what).capitalize()} of the hub "
        f"is named as {hub}."
    )  # fmt: skip


def _near(place: Path) -> str:
    there = next((one for one in chain(place.parents, [Path()]) if one.is_dir()), Path())
    part, *rest = place.relative_to(there).parts
    with suppress(OSError):
        names = [path.name for path in there.iterdir() if path.is_dir()]
        for name in difflib.get_close_matches(part, names, n=1, cutoff=0.5):
            whole = there.joinpath(name, *rest)
            return str(whole if whole.is_dir() else there / name)
    return ""


# --- adapters -------------------------------------------------------------------------------------


def adapter_folder(name: str | Path) -> Path:
    """The folder of an adapter; one of the hub is downloaded to the cache of its client first.

    ModelLoadError for a folder that is not there, and for what the hub does not have or give.
    """
    place = model_place(name, "adapter")
    return _fetched(place) if place.on_hub else Path(place.where)


def commit_of(folder: Path) -> str:
    """The commit that a folder in the cache of the hub's client is of; empty for any other."""
    in_cache = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models-")
    return folder.name if in_cache else ""


@cache  # one commit for the whole of a process, whatever is pushed meanwhile
def _fetched(place: ModelPlace) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        config = Path(hf_hub_download(place.where, ADAPTER_CONFIG, revision=place.revision))
        commit = config.parent.name
        hf_hub_download(place.where, ADAPTER_FILE, revision=commit)
        with suppress(EntryNotFoundError):
            hf_hub_download(place.where, NOTE, revision=commit)
    except (OSError, ValueError) as error:  # errors of the hub's client are OSErrors
        lacks = isinstance(error, EntryNotFoundError)
        if lacks and not isinstance(error, LocalEntryNotFoundError):
            raise ModelLoadError(
                f"The hub's '{place}' is no adapter that can be read.",
                f"It lacks {ADAPTER_CONFIG} or {ADAPTER_FILE}.",
                "Name a repository that PEFT saved there, or an adapter's folder on this machine.",
            ) from error
        raise hub_unreachable(f"adapter '{place}'", error) or ModelLoadError(
            f"The adapter '{place}' cannot be had from the hub.",
            f"Its client says: {first_line(error)}",
            "Check the name, the revision and HF_TOKEN, or name a folder on this machine.",
        ) from error
    return config.parent


def hub_unreachable(what: str, error: BaseException) -> ModelLoadError | None:
    """The error of `what` ("model 'owner/name'") where the hub could not be asked for it, else
    None."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    causes: list[BaseException] = [error]
    while deeper := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(deeper)
    unreached = (LocalEntryNotFoundError, OfflineModeIsEnabled)
    answered = any(isinstance(one, HfHubHTTPError) for one in causes)
    if answered or not any(isinstance(one, unreached) for one in causes):
        return None
    offline = "HF_HUB_OFFLINE forbids requests. Unset it" if constants.HF_HUB_OFFLINE else ""
    return ModelLoadError(
        f"The {what} is not on this machine, and the hub cannot be reached at "
        f"{shown_address(constants.ENDPOINT)}.",
        "Its name may be right: the hub was not asked, or did not answer.",
        f"{offline or 'Check the network (HF_ENDPOINT names a mirror)'}, or name a folder on this "
        "machine.",
    )


def first_line(error: BaseException, *, hub: bool = True) -> str:
    """What a library says, in short and without keys, that of the `hub` among them."""
    if hub:
        from huggingface_hub import get_token

        remember(get_token() or "")
    return (printable(str(error)).strip().splitlines() or [type(error).__name__])[0]


ADAPTER = "policy"
"""The name under which PEFT holds the adapter."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU when there is one. ModelLoadError for a device that does not work."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ModelLoadError(
            f"The device '{name}' cannot be used.",
            f"torch says: {first_line(error, hub=False)}",
            "Use auto, cpu, or a device that this machine has, such as cuda:0.",
        ) from error


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    import torch

    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
        return dtype
    raise ModelLoadError(
        f"'{name}' is no number type for a model.",
        "The weights are kept and multiplied in it.",
        "Use auto, float32, bfloat16 or float16.",
    )


def locate(path: str | Path) -> ModelPlace:
    """A checked local folder, or the hub's; ModelLoadError as of `model_place`."""
    place = model_place(path)
    if not place.on_hub:
        _check_folder(Path(place.where))
    return place


def _check_folder(folder: Path) -> None:
    names = {p.name for p in folder.iterdir()}
    if "config.json" not in names and ADAPTER_CONFIG in names:
        raise ModelLoadError(
            f"'{folder}' holds an adapter, not a model.",
            "An adapter is a change to a base model, which must be loaded first.",
            "Name the base model as the model and this folder as its adapter.",
        )
    missing = [] if "config.json" in names else ["the configuration (config.json)"]
    if not any(n.endswith(".safetensors") for n in names):
        missing.append("the weights (*.safetensors)")
    if not names.intersection(_TOKENIZER_FILES):
        missing.append("the tokenizer (tokenizer.json)")
    if missing:
        raise ModelLoadError(
            f"'{folder}' is no complete model: it lacks {' and '.join(missing)}.",
            "Weights in any other format than safetensors are not read, since they can run code.",
            "Save model and tokenizer there with save_pretrained, or download the folder again.",
        )


def quieten() -> None:
    """Keep transformers' progress bars, its remarks on lengths, and one warning out of our output.

    The lengths are checked here; the warning is about a name that PEFT uses inside transformers.
    Bars of downloads stay in a terminal, unless HF_HUB_DISABLE_PROGRESS_BARS says no.
    """
    import warnings

    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()  # the hub's bars as well
    if sys.stderr.isatty() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        enable_progress_bars()
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)


def load_base(where: str | ModelPlace, device: torch.device, dtype: str) -> tuple[Any, Any]:
    """(model, tokenizer); `dtype` auto is float32 on a CPU, else the checkpoint's own.

    The model has a language-model head; it may have a vision tower beside its language part. Its
    configuration's `_name_or_path` is the hub's id, with `_commit_hash`, or an absolute folder.
    Raises ModelLoadError, also when the checkpoint does not hold the weights of its model.
    """
    from safetensors import SafetensorError

    quieten()
    place = ModelPlace(where) if isinstance(where, str) else where
    kind = _dtype(dtype, device)
    # From an absolute folder, whatever names its base later can be read from anywhere.
    name = place.where if place.on_hub else str(Path(place.where).resolve())
    revision = place.revision or "main"
    try:
        commit, hub, config, tokenizer = _without_weights(place, name)
        revision = hub["revision"]
        model, report = auto_class(config).from_pretrained(
            name, config=config, dtype=kind, use_safetensors=True, **hub,
            output_loading_info=True, ignore_mismatched_sizes=True,  # they are named below
        )  # fmt: skip
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        experts = lost_experts(name, revision) if isinstance(error, RuntimeError) else []
        if fault := weights_misfit(experts):
            raise not_its_weights(str(place), fault) from error
        raise hub_unreachable(f"model '{place}'", error) or ModelLoadError(
            f"The model '{place}' cannot be loaded.",
            f"transformers says: {first_line(error)}",
            "Check the folder or the hub name, and that the model is a causal language model "
            "which needs no code of its own.",
        ) from error
    _check_alone(str(place), model)
    model.config._commit_hash = commit  # newer versions of transformers keep none
    _check_scales(str(place), model)
    check_base(name, model, report, revision)
    return model, tokenizer


def load_tokenizer(place: ModelPlace) -> tuple[Any, str | None]:
    """(tokenizer, commit of the hub or None) of a model whose weights are elsewhere.

    Raises ModelLoadError where it cannot be read.
    """
    quieten()
    try:
        commit, _, _, tokenizer = _without_weights(place, place.where)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise hub_unreachable(f"tokenizer of '{place}'", error) or ModelLoadError(
            f"The tokenizer of '{place}' cannot be loaded.",
            f"transformers says: {first_line(error)}",
            "Check the folder or the hub name.",
        ) from error
    return tokenizer, commit


def _without_weights(place: ModelPlace, name: str) -> tuple[str | None, dict[str, Any], Any, Any]:
    """(commit of the hub or None, how the rest is loaded from it, configuration, tokenizer)."""
    from transformers import AutoConfig

    commit = _commit(place) if place.on_hub else None
    hub = {"revision": commit or place.revision or "main", "trust_remote_code": False}
    config = AutoConfig.from_pretrained(name, **hub)
    return commit, hub, config, _tokenizer(name, config, hub)


def _tokenizer(name: str, config: Any, hub: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, **hub)
    if tokenizer.chat_template is None and _reads_more_than_text(config):
        # Older image-text checkpoints keep it beside the tokenizer.
        template = checkpoint_json(name, "chat_template.json", hub["revision"]).get("chat_template")
        tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def _commit(place: ModelPlace) -> str | None:
    """The commit that a hub's model stands at now; None where its client does not say."""
    from transformers.utils import cached_file

    config = cached_file(place.where, "config.json", revision=place.revision or "main")
    return commit_of(Path(str(config)).parent) or None


def is_quantised(model: Any) -> str:
    """How the weights of a loaded base are packed (`fp8`, `8-bit integers`); empty for plain
    ones."""
    settings = getattr(model.config, "quantization_config", None)
    if settings is not None:
        read = settings if isinstance(settings, dict) else settings.to_dict()
        return str(read.get("quant_method", "quantised"))
    kinds = stored_types(model.config._name_or_path, model.config._commit_hash)
    if kinds & {"I8", "U8"}:
        return "8-bit integers"
    return "float8" if any(kind.startswith("F8") for kind in kinds) else ""


def _check_scales(where: str, model: Any) -> None:
    """ModelLoadError for integers that nobody says how to scale."""
    if is_quantised(model) == "8-bit integers":
        raise ModelLoadError(
            f"The checkpoint '{where}' holds 8-bit integers, and does not say what they stand for.",
            "Without its quantization_config they would be read as the weights themselves.",
            "Use a checkpoint whose config.json has it, or one in bfloat16.",
        )


def _check_alone(where: str, model: Any) -> None:
    """ModelLoadError for a model that transformers has loaded with an adapter of its folder."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelLoadError(
            f"'{where}' holds an adapter beside the model.",
            "It would be put on the model unasked, and its weights go unchecked.",
            "Move the adapter's files into a folder of their own, and name that as the adapter.",
        )


def auto_class(config: Any) -> Any:
    """The Auto class that loads a checkpoint of this configuration with all of its weights."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    kind = type(config)
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM
    # Some families have a text-only class for the same configuration; the checkpoint says which.
    multimodal = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind].__name__ in (config.architectures or ())
    text_only = kind in MODEL_FOR_CAUSAL_LM_MAPPING and not multimodal
    return AutoModelForCausalLM if text_only else AutoModelForImageTextToText


def checkpoint_json(where: str, file: str, revision: str | None) -> Mapping[str, Any]:
    """The object in a JSON file of a folder or of a hub's model; empty where it has no such
    file."""
    from transformers.utils import cached_file

    place = cached_file(
        where, file, revision=revision or "main", _raise_exceptions_for_missing_entries=False
    )
    read = json.loads(Path(place).read_text(encoding="utf-8")) if place else {}
    return read if isinstance(read, dict) else {}


def lora_targets(model: Any) -> str:
    """`target_modules` for PEFT: every linear layer of the language part, but never its head.

    `all-linear` for a text-only model; a regular expression over full module names, which spares
    the vision tower and what merges its output, for one that also reads images.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    if not _reads_more_than_text(model.config):
        return "all-linear"
    decoder = model.get_decoder()
    where = next(name for name, module in model.named_modules() if module is decoder)
    linear = (torch.nn.Linear, Conv1D)
    names = [name for name, module in decoder.named_modules() if isinstance(module, linear)]
    leaves = sorted({re.escape(name.rpartition(".")[2]) for name in names})
    return rf"{re.escape(where)}\..*\b(?:{'|'.join(leaves)})"


def freeze_all_but_language(model: Any) -> None:
    """Leaves only the language part and its head trainable; a text-only model stays as it is."""
    if not _reads_more_than_text(model.config):
        return
    model.requires_grad_(False)
    model.get_decoder().requires_grad_(True)
    model.get_output_embeddings().requires_grad_(True)


def _reads_more_than_text(config: Any) -> bool:
    return config.get_text_config(decoder=True) is not config


def load_adapter(model: Any, adapter: str | Path, name: str = ADAPTER) -> Any:
    """The model with the adapter on top, under `name`, frozen; beside those it has already.

    A folder, or `owner/name@revision` of the hub. ModelLoadError unless it holds every weight of
    the adapter and no other.
    """
    from safetensors import SafetensorError

    adapter = adapter_folder(adapter)
    lacks = [n for n in (ADAPTER_CONFIG, ADAPTER_FILE) if not (adapter / n).is_file()]
    if lacks:
        raise ModelLoadError(
            f"'{adapter}' is no adapter: it lacks {' and '.join(lacks)}.",
            "An adapter is a folder as PEFT saves it, with its weights in safetensors.",
            "Name the adapter's folder, for example one under a run's checkpoints.",
        )
    try:
        adapted = _with_places(model, adapter, name)
        fault = put_adapter(adapted, adapter, name)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise _unfit(adapter, f"PEFT says: {first_line(error, hub=False)}") from error
    if fault:
        raise _unfit(adapter, f"Its weights are not those of this model: {fault}.")
    return adapted


def _with_places(model: Any, adapter: Path, name: str) -> Any:
    """The model with an adapter as the folder's configuration says, not yet with its weights."""
    from peft import PeftConfig, PeftModel
    from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING

    config = PeftConfig.from_pretrained(str(adapter))
    config.inference_mode = True
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
        model.set_adapter(name)  # what is loaded is checked as the active one
        return model
    kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)
    return kind(model, config, adapter_name=name)


def _unfit(adapter: Path, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"The adapter '{adapter}' does not fit this model.",
        why,
        "Use the base model that is named in its adapter_config.json, and the adapter's folder as "
        "it was saved.",
    )


def adapter_hash(adapter: str | Path) -> str:
    """16 hexadecimal digits of the sha256 of the adapter's weights."""
    with (adapter_folder(adapter) / ADAPTER_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def save_model(
    model: Any, tokenizer: Any, folder: Path, note: Mapping[str, Any] | None = None
) -> None:
    """The adapter of `model` (or, where it has none, all weights) with all it takes to use it."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_peft(model):
        save_adapter(model, folder)
    else:
        model.save_pretrained(folder)
    _save_tokenizer(tokenizer, folder)
    if note is not None:
        write_json(folder / NOTE, note)
    modes_by_umask(folder)


def is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config")


def base_of(model: Any) -> dict[str, str]:
    """`model`: the hub's id or the absolute folder of the base; `revision`: the hub's commit."""
    base = model.get_base_model() if is_peft(model) else model
    name = str(base.config.name_or_path)
    if not name or Path(name).is_dir():
        return {"model": str(Path(name).resolve()) if name else ""}
    commit = getattr(base.config, "_commit_hash", None)
    return {"model": name, **({"revision": str(commit)} if commit else {})}


def save_adapter(model: Any, folder: Path) -> None:
    """Adapter files in `folder` itself: PEFT would put a named adapter into a folder below it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    # Linear layers alone are adapted; asking PEFT to find out would look the base up on the hub.
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[ADAPTER])
    if isinstance(config.target_modules, set):  # its order changes from process to process
        config.target_modules = sorted(config.target_modules)
    # An adapter that was trained further came with the base of whoever trained it first.
    base = base_of(model)
    config.base_model_name_or_path, config.revision = base["model"], base.get("revision")
    config.save_pretrained(folder)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:  # how the last batch was padded or cut would be saved as well
        fast.no_padding()
        fast.no_truncation()
    tokenizer.save_pretrained(folder)


def modes_by_umask(folder: Path) -> None:
    """Every file below `folder` is as readable as any new file here; safetensors writes 0600."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


LICENCE_FIELDS = ("license", "license_name", "license_link")
"""Of a model card's front matter, as the hub calls them."""
UNSTATED = {"license": "other", "license_name": "as-the-base-model"}


def base_licence(model: str, revision: str | None = None) -> dict[str, str]:
    """The licence fields of the card of a folder or a hub's model; UNSTATED where none says it."""
    front = _front_matter(_card(model, revision))
    stated = {name: front[name] for name in LICENCE_FIELDS if isinstance(front.get(name), str)}
    return stated if "license" in stated else dict(UNSTATED)


def _card(model: str, revision: str | None) -> Path | None:
    folder = Path(model)
    if folder.is_dir() or not model:
        return folder / "README.md"
    from huggingface_hub import hf_hub_download

    with suppress(OSError, ValueError):  # those of the hub's client, too: there is no card to read
        return Path(hf_hub_download(model, "README.md", revision=revision))
    return None


def _front_matter(card: Path | None) -> dict[str, Any]:
    import yaml

    try:
        text = card.read_text(encoding="utf-8")[:100_000] if card is not None else ""
        loaded = yaml.safe_load(text.split("---", 2)[1]) if text.startswith("---") else {}
    except (OSError, ValueError, IndexError, RecursionError, yaml.YAMLError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
