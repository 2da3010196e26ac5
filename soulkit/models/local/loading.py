"""Finds, loads and saves models and adapters, on disk and on the Hub, and reads their licences.

A name is a local folder or `owner/name@revision` on the Hub. A name that looks like a mistyped
folder is never looked up there, since a stranger may own a model of that name. Only safetensors
are read, and no code from a model's folder is run. Every path error is a ModelLoadError that names
what is missing. A checkpoint that also reads images is loaded whole, so that it can be saved whole;
only its language part is prompted and trained.

A saved folder contains weights, configuration, tokenizer with chat template, and `soulkit.json`
with the training data of the weights. An adapter names its base by Hub id and commit, or by path.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from soulkit.api_keys import printable, remember, shown_address
from soulkit.errors import ModelLoadError, SoulError
from soulkit.models.local.quantize import (
    Quantize,
    is_quantised,
    keep_differentiable,
    loading_arguments,
    require_package,
)
from soulkit.models.local.threads import local_processes
from soulkit.models.local.weights import (
    ADAPTER_FILE,
    check_adapter_folder,
    check_base,
    check_folder_files,
    check_hub_files,
    check_size,
    file_hash,
    json_object,
    lost_experts,
    not_its_weights,
    put_adapter,
    weights_misfit,
)
from soulkit.parse import parse_yaml
from soulkit.runs.jsonl import write_json

if TYPE_CHECKING:
    import torch


ADAPTER_CONFIG = "adapter_config.json"
NOTE = "soulkit.json"
"""Saved with the weights: their training data, method and base."""

_HUB_NAME = re.compile(r"(?P<id>\w[\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>\w[\w./+-]*))?")


class ModelPlace(NamedTuple):
    """Location of a model or adapter; `where` is the name that Hugging Face libraries accept."""

    where: str
    """A folder, or a Hub id without revision."""
    revision: str | None = None
    """The requested Hub revision; None for the latest and for folders."""

    def __str__(self) -> str:
        return f"{self.where}@{self.revision}" if self.revision else self.where

    @property
    def on_hub(self) -> bool:
        return not Path(self.where).is_dir()


def model_place(name: str | Path, what: str = "model") -> ModelPlace:
    """The local folder or Hub model `name`; `what` is its kind, for messages.

    ModelLoadError for a file, for a revision of a local folder, and for a name that looks like a
    missing folder: it is a Path, is not owner/name, has a parent that exists, or resembles a model
    folder. The error suggests the most similar folder.
    """
    place = Path(name).expanduser()
    if place.is_dir():
        return ModelPlace(str(place))
    if place.exists():
        raise ModelLoadError(
            f"'{name}' is a file, not {_article(what)}.",
            "A model is a folder with its configuration, weights and tokenizer.",
            f"Use the folder that contains the file, perhaps '{place.parent}'.",
        )
    match = None if isinstance(name, Path) else _HUB_NAME.fullmatch(name)
    if match is None or (match["revision"] is None and _reads_like_a_folder(place)):
        raise _no_folder(name, place, what, on_hub=match is not None)
    if Path(match["id"]).is_dir():  # Hugging Face libraries would load it and ignore the revision
        raise ModelLoadError(
            f"'{name}' is {_article(what)} on the Hub, but there is also a folder '{match['id']}'.",
            "A folder has no revisions, and Hugging Face libraries would load it instead.",
            f"Use the folder as '{match['id']}', or run the command in another directory.",
        )
    return ModelPlace(match["id"], match["revision"])


def hub_cache() -> Path:
    """The download cache of the Hub client."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub")


def _article(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _reads_like_a_folder(place: Path) -> bool:
    """Whether its parent exists, or a model's folder has a similar name."""
    if place.parent != Path() and place.parent.is_dir():
        return True
    near = _near(place)
    return bool(near) and any((Path(near) / n).is_file() for n in ("config.json", ADAPTER_CONFIG))


def _no_folder(name: str | Path, place: Path, what: str, *, on_hub: bool) -> ModelLoadError:
    near = _near(place)
    hint = f"Did you mean '{near}'?" if near else "Check the path."
    why = (
        "The name looks like a local folder, so the Hub was not asked."
        if on_hub
        else "The name is not a valid Hub id either."
    )
    hub = f"{name}@main" if on_hub else "owner/name or owner/name@revision"
    return ModelLoadError(
        f"There is no folder '{name}'.", why, f"{hint} To use {_article(what)} on the Hub, "
        f"write {hub}."
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
    """The folder of an adapter; a Hub adapter is first downloaded to the client's cache.

    ModelLoadError for a missing folder, and if the Hub does not have or give the adapter."""
    place = model_place(name, "adapter")
    return _fetched(place) if place.on_hub else Path(place.where)


@cache  # keeps one commit for the whole process, whatever is pushed meanwhile
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
                f"'{place}' on the Hub is not a PEFT adapter.",
                f"It has no {ADAPTER_CONFIG} or no {ADAPTER_FILE}.",
                "Use a repository saved by PEFT, or a local adapter folder.",
            ) from error
        raise hub_unreachable(f"adapter '{place}'", error) or ModelLoadError(
            f"The adapter '{place}' cannot be downloaded from the Hub.",
            f"The Hub client says: {first_line(error)}",
            "Check the name, the revision and HF_TOKEN, or use a local folder.",
        ) from error
    return config.parent


def hub_unreachable(what: str, error: BaseException) -> ModelLoadError | None:
    """The error if the Hub could not be asked for `what` ("model 'owner/name'"), else None."""
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
        f"The {what} is not on this machine, and the Hub cannot be reached at "
        f"{shown_address(constants.ENDPOINT)}.",
        "The name may be correct: the Hub was not asked, or did not answer.",
        f"{offline or 'Check the network (HF_ENDPOINT sets a mirror)'}, or use a local folder.",
    )


def first_line(error: BaseException, *, hub: bool = True) -> str:
    """The first line of a library's error, with keys masked, including the Hub token."""
    if hub:
        from huggingface_hub import get_token

        remember(get_token() or "")
    return (printable(str(error)).strip().splitlines() or [type(error).__name__])[0]


ADAPTER = "policy"
"""PEFT's name for the adapter."""

ITS_BASE = (
    "Use the base named in its adapter_config.json, and the adapter's folder as it was saved."
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def pick_device(name: str) -> torch.device:
    """The torch device; `auto` is a GPU if there is one. ModelLoadError if it does not work.

    Each process of a training job has the GPU with its number on this machine.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if local_processes() == 1:
            return torch.device(name)
    if name == "cuda" and local_processes() > 1 and torch.cuda.device_count() > 1:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
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
        f"'{name}' is not a valid number format.",
        "Weights are stored and multiplied in this format.",
        "Use auto, float32, bfloat16 or float16.",
    )


def locate(path: str | Path) -> ModelPlace:
    """A checked local folder, or a Hub model; ModelLoadError as in `model_place`."""
    place = model_place(path)
    if not place.on_hub:
        _check_folder(Path(place.where))
    return place


def _check_folder(folder: Path) -> None:
    names = {p.name for p in folder.iterdir()}
    if "config.json" not in names and ADAPTER_CONFIG in names:
        raise ModelLoadError(
            f"'{folder}' contains an adapter, not a model.",
            "An adapter changes a base model, which must be loaded first.",
            "Use the base model as the model and this folder as its adapter.",
        )
    missing = [] if "config.json" in names else ["the configuration (config.json)"]
    if not any(n.endswith(".safetensors") for n in names):
        missing.append("the weights (*.safetensors)")
    if not names.intersection(_TOKENIZER_FILES):
        missing.append("the tokenizer (tokenizer.json)")
    if missing:
        raise ModelLoadError(
            f"'{folder}' is not a complete model: it lacks {' and '.join(missing)}.",
            "Only safetensors weights are read, since other formats can run code.",
            "Save model and tokenizer there with save_pretrained, or download the folder again.",
        )
    check_folder_files(folder)


@contextmanager
def loading(what: str, *, adapter: bool = False) -> Iterator[None]:
    """Turn a library's errors while it loads `what`, even Rust's panics, into ModelLoadErrors."""
    try:
        yield
    except SoulError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise hub_unreachable(what, error) or ModelLoadError(
            f"The {what} {'does not fit this model' if adapter else 'cannot be loaded'}.",
            f"{'PEFT' if adapter else 'transformers'} says: {first_line(error)[:300]}",
            ITS_BASE if adapter else "Check the folder or Hub id. The model must be a causal "
            "language model that needs no code of its own.",
        ) from error  # fmt: skip


def quieten() -> None:
    """Turn off transformers' progress bars, its length warnings, and one PEFT warning.

    soulkit checks lengths itself; the PEFT warning is only about a name in transformers. Download
    bars stay on in a terminal, unless HF_HUB_DISABLE_PROGRESS_BARS is set.
    """
    import logging as standard
    import warnings

    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    standard.getLogger("bitsandbytes").setLevel(standard.ERROR)  # PEFT imports it if it is there
    logging.disable_progress_bar()  # the hub's bars as well
    if sys.stderr.isatty() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        enable_progress_bars()
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)


def load_base(
    where: str | ModelPlace, device: torch.device, dtype: str, quantize: Quantize = "none"
) -> tuple[Any, Any]:
    """(model, tokenizer); `dtype` auto is float32 on a CPU, else the checkpoint's own.

    The model has a language-model head, and may have a vision tower. Its configuration's
    `_name_or_path` is the Hub id, with `_commit_hash`, or an absolute folder. ModelLoadError if it
    cannot be loaded or its weights do not match the model.
    """
    require_package(quantize)
    quieten()
    place = ModelPlace(where) if isinstance(where, str) else where
    kind = _dtype(dtype, device)
    # Absolute, so that a later reference to the base works from any directory.
    name = place.where if place.on_hub else str(Path(place.where).resolve())
    with loading(f"model '{place}'"):
        commit, hub, config, tokenizer = _without_weights(place, name)
        revision = hub["revision"]
        quantised = loading_arguments(str(place), config, device, kind) if quantize == "nf4" else {}
        check_size(str(place), auto_class(config), config, revision)
        try:
            model, report = auto_class(config).from_pretrained(
                name, config=config, use_safetensors=True, **{"dtype": kind, **quantised}, **hub,
                output_loading_info=True, ignore_mismatched_sizes=True,  # they are named below
            )  # fmt: skip
        except RuntimeError as error:
            if fault := weights_misfit(lost_experts(name, revision)):
                raise not_its_weights(str(place), fault) from error
            raise
    _check_alone(str(place), model)
    model.config._commit_hash = commit  # newer versions of transformers do not set it
    _check_scales(str(place), model)
    keep_differentiable(model)
    check_base(name, model, report, revision)
    return model, tokenizer


def load_tokenizer(place: ModelPlace) -> tuple[Any, str | None]:
    """(tokenizer, Hub commit or None) of a model, without loading its weights.

    ModelLoadError if it cannot be read.
    """
    quieten()
    with loading(f"tokenizer of '{place}'"):
        commit, _, _, tokenizer = _without_weights(place, place.where)
    return tokenizer, commit


def _without_weights(place: ModelPlace, name: str) -> tuple[str | None, dict[str, Any], Any, Any]:
    """(Hub commit or None, arguments to load the rest, configuration, tokenizer)."""
    from transformers import AutoConfig

    commit = check_hub_files(place.where, place.revision or "main") if place.on_hub else None
    hub = {"revision": commit or place.revision or "main", "trust_remote_code": False}
    config = AutoConfig.from_pretrained(name, **hub)
    return commit, hub, config, _tokenizer(name, config, hub)


def _tokenizer(name: str, config: Any, hub: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, **hub)
    if tokenizer.chat_template is None and _reads_more_than_text(config):
        # Older image-text checkpoints store the template in a separate file.
        template = checkpoint_json(name, "chat_template.json", hub["revision"]).get("chat_template")
        tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def _check_scales(where: str, model: Any) -> None:
    """ModelLoadError for integer weights without scales."""
    if is_quantised(model) == "8-bit integers":
        raise ModelLoadError(
            f"The checkpoint '{where}' contains 8-bit integers without a quantization_config.",
            "Without it, the integers would be used as the weights themselves.",
            "Use a checkpoint whose config.json has one, or a bfloat16 checkpoint.",
        )


def _check_alone(where: str, model: Any) -> None:
    """ModelLoadError if transformers has also loaded an adapter from the model's folder."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelLoadError(
            f"'{where}' contains an adapter in addition to the model.",
            "transformers would apply it automatically, without checking its weights.",
            "Move the adapter's files to a separate folder, and pass that as the adapter.",
        )


def auto_class(config: Any) -> Any:
    """The Auto class that loads all weights of a checkpoint with this configuration."""
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
    """The object in a JSON file of a folder or Hub model; empty if there is no such file."""
    from transformers.utils import cached_file

    place = cached_file(
        where, file, revision=revision or "main", _raise_exceptions_for_missing_entries=False
    )
    return json_object(Path(place)) if place else {}


def lora_targets(model: Any) -> str:
    """`target_modules` for PEFT: every linear layer of the language part, except its head.

    `all-linear` for a text-only model. For one that also reads images, a regular expression over
    full module names that excludes the vision tower and its projector.
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
    """Make only the language part and its head trainable; no change to a text-only model."""
    if not _reads_more_than_text(model.config):
        return
    model.requires_grad_(False)
    model.get_decoder().requires_grad_(True)
    model.get_output_embeddings().requires_grad_(True)


def _reads_more_than_text(config: Any) -> bool:
    return config.get_text_config(decoder=True) is not config


def load_adapter(model: Any, adapter: str | Path, name: str = ADAPTER) -> Any:
    """Add the adapter to the model under `name`, frozen, next to existing adapters.

    `adapter` is a folder, or `owner/name@revision` on the Hub. ModelLoadError if it lacks weights
    or has others.
    """
    adapter = adapter_folder(adapter)
    lacks = [n for n in (ADAPTER_CONFIG, ADAPTER_FILE) if not (adapter / n).exists()]
    if lacks:
        raise ModelLoadError(
            f"'{adapter}' is not an adapter: it lacks {' and '.join(lacks)}.",
            "An adapter is a folder saved by PEFT, with its weights in safetensors.",
            "Use the adapter's folder, for example one under a run's checkpoints.",
        )
    check_folder_files(adapter)
    with loading(f"adapter '{adapter}'", adapter=True):
        check_adapter_folder(adapter, [name for name, _ in model.named_modules()])
        adapted = _with_places(model, adapter, name)
        fault = put_adapter(adapted, adapter, name)
    if fault:
        raise ModelLoadError(
            f"The adapter '{adapter}' does not fit this model.",
            f"Its weights do not match this model: {fault}.",
            ITS_BASE,
        )
    return adapted


def _with_places(model: Any, adapter: Path, name: str) -> Any:
    """The model with an empty adapter as configured in the folder."""
    from peft import PeftConfig, PeftModel
    from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING

    config = PeftConfig.from_pretrained(str(adapter))
    config.inference_mode = True
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
        model.set_adapter(name)  # only the active adapter is checked after loading
        return model
    kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)
    return kind(model, config, adapter_name=name)


def adapter_hash(adapter: str | Path) -> str:
    """First 16 hex digits of the sha256 of the adapter's weights. ModelLoadError for no file."""
    return file_hash(adapter_folder(adapter) / ADAPTER_FILE)


def save_model(
    model: Any, tokenizer: Any, folder: Path, note: Mapping[str, Any] | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Save the adapter of `model` (or all weights if it has none) and all files needed to use it.
    `weights`: the weights of a model that does not hold them whole."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_peft(model):
        save_adapter(model, folder)
    else:
        model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
    _save_tokenizer(tokenizer, folder)
    if note is not None:
        write_json(folder / NOTE, note)
    modes_by_umask(folder)


def is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config")


def base_of(model: Any) -> dict[str, str]:
    """`model`: Hub id or absolute folder of the base; `revision`: its Hub commit."""
    base = model.get_base_model() if is_peft(model) else model
    name = str(base.config.name_or_path)
    if not name or Path(name).is_dir():
        return {"model": str(Path(name).resolve()) if name else ""}
    commit = getattr(base.config, "_commit_hash", None)
    return {"model": name, **({"revision": str(commit)} if commit else {})}


def save_adapter(model: Any, folder: Path) -> None:
    """Save the adapter in `folder` itself; PEFT would use a subfolder for a named adapter."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    # Embeddings are never adapted; asking PEFT to find out would look up the base on the Hub.
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[ADAPTER])
    if isinstance(config.target_modules, set):  # the order of a set differs between processes
        config.target_modules = sorted(config.target_modules)
    # A continued adapter would otherwise name the base of its first training.
    base = base_of(model)
    config.base_model_name_or_path, config.revision = base["model"], base.get("revision")
    config.save_pretrained(folder)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:  # padding and truncation of the last batch would be saved as well
        fast.no_padding()
        fast.no_truncation()
    tokenizer.save_pretrained(folder)


def modes_by_umask(folder: Path) -> None:
    """Give every file under `folder` the default mode; safetensors writes 0600."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


LICENCE_FIELDS = ("license", "license_name", "license_link")
"""Licence fields of a model card's front matter."""
UNSTATED = {"license": "other", "license_name": "as-the-base-model"}


def base_licence(model: str, revision: str | None = None) -> dict[str, str]:
    """The licence fields of the model card of a folder or Hub model; UNSTATED if it has none."""
    front = front_matter(_card(model, revision))
    stated = {name: front[name] for name in LICENCE_FIELDS if isinstance(front.get(name), str)}
    return stated if "license" in stated else dict(UNSTATED)


def _card(model: str, revision: str | None) -> Path | None:
    folder = Path(model)
    if folder.is_dir() or not model:
        return folder / "README.md"
    from huggingface_hub import hf_hub_download

    with suppress(OSError, ValueError):  # includes errors of the Hub client: no readable card
        return Path(hf_hub_download(model, "README.md", revision=revision))
    return None


def front_matter(card: Path | None) -> dict[str, Any]:
    """The YAML object at the start of a model card; empty if there is none."""
    try:
        text = card.read_text(encoding="utf-8")[:100_000] if card is not None else ""
        loaded = parse_yaml(text.split("---", 2)[1]) if text.startswith("---") else {}
    except (OSError, ValueError, IndexError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
