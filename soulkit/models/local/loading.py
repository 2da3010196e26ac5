"""Loading a model folder, a hub model or an adapter, or saying what is missing.

Only safetensors are read and no code of a model's folder is run. Every mistake a user can make
with a path becomes a ModelLoadError that names what is missing and the way out.

A checkpoint that also reads images (Qwen3-VL, Gemma 3) is loaded whole, so that its own parameter
names stay and what is saved fits what was loaded; only its language part is prompted and trained.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.errors import ModelLoadError
from soulkit.models.local.names import (
    ADAPTER_CONFIG,
    ModelPlace,
    adapter_folder,
    commit_of,
    first_line,
    hub_unreachable,
    model_place,
)
from soulkit.models.local.weights import (
    ADAPTER_FILE,
    check_base,
    lost_experts,
    not_its_weights,
    put_adapter,
    stored_types,
    weights_misfit,
)

if TYPE_CHECKING:
    import torch

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
    from transformers import AutoConfig

    quieten()
    place = ModelPlace(where) if isinstance(where, str) else where
    kind = _dtype(dtype, device)
    # From an absolute folder, whatever names its base later can be read from anywhere.
    name = place.where if place.on_hub else str(Path(place.where).resolve())
    hub: dict[str, Any] = {"revision": place.revision or "main", "trust_remote_code": False}
    try:
        commit = _commit(place) if place.on_hub else None
        hub["revision"] = commit or hub["revision"]  # all of it from one commit
        config = AutoConfig.from_pretrained(name, **hub)
        tokenizer = _tokenizer(name, config, hub)
        model, report = auto_class(config).from_pretrained(
            name, config=config, dtype=kind, use_safetensors=True, **hub,
            output_loading_info=True, ignore_mismatched_sizes=True,  # they are named below
        )  # fmt: skip
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        experts = lost_experts(name, hub["revision"]) if isinstance(error, RuntimeError) else []
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
    check_base(name, model, report, hub["revision"])
    return model, tokenizer


def load_tokenizer(place: ModelPlace) -> tuple[Any, str | None]:
    """(tokenizer, commit of the hub or None) of a model whose weights are elsewhere.

    Raises ModelLoadError where it cannot be read.
    """
    from transformers import AutoConfig

    quieten()
    hub: dict[str, Any] = {"revision": place.revision or "main", "trust_remote_code": False}
    try:
        commit = _commit(place) if place.on_hub else None
        hub["revision"] = commit or hub["revision"]
        config = AutoConfig.from_pretrained(place.where, **hub)
        return _tokenizer(place.where, config, hub), commit
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise hub_unreachable(f"tokenizer of '{place}'", error) or ModelLoadError(
            f"The tokenizer of '{place}' cannot be loaded.",
            f"transformers says: {first_line(error)}",
            "Check the folder or the hub name.",
        ) from error


def _tokenizer(name: str, config: Any, hub: dict[str, Any]) -> Any:
    """The tokenizer with the chat template, wherever the checkpoint keeps that."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, **hub)
    if tokenizer.chat_template is None and _reads_more_than_text(config):
        tokenizer.chat_template = _processor_template(name, hub["revision"])
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


def _processor_template(where: str, revision: str) -> str | None:
    """The chat template that older image-text checkpoints keep beside the tokenizer, if any."""
    from transformers.utils import cached_file

    file = cached_file(
        where, "chat_template.json", revision=revision,
        _raise_exceptions_for_missing_entries=False,
    )  # fmt: skip
    if file is None:
        return None
    settings = json.loads(Path(file).read_text(encoding="utf-8"))
    template = settings.get("chat_template") if isinstance(settings, dict) else None
    return template if isinstance(template, str) else None


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


def freeze_beside_language(model: Any) -> None:
    """Leaves only the language part and its head trainable; a text-only model stays as it is."""
    if not _reads_more_than_text(model.config):
        return
    model.requires_grad_(False)
    model.get_decoder().requires_grad_(True)
    model.get_output_embeddings().requires_grad_(True)


def _reads_more_than_text(config: Any) -> bool:
    """Whether the language part has a configuration of its own inside `config`."""
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
