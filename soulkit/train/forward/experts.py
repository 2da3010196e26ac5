"""Experts of the tasks as teachers: one frozen base that holds the adapter of every task.

The adapters share the base, so that a further expert costs no more memory than its own weights.
Which one reads is switched before a pass; a sequence is read by the expert of its task alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from soulkit.errors import ConfigError
from soulkit.eval.provenance import weights_print
from soulkit.models.local.loading import load_adapter
from soulkit.models.local.names import NOTE, adapter_folder
from soulkit.models.local.sampler import LocalModel
from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import Policy


def experts_of(config: TrainConfig) -> dict[str, str]:
    """Task of the run → the adapter that teaches it; empty where one teacher does for all.

    An adapter that is named for no task teaches those that have none of their own. ConfigError for
    a task without a teacher, and for a teacher of a task that is not trained.
    """
    if not config.teacher_adapters:
        return {}
    strays = sorted(config.teacher_adapters.keys() - config.tasks.keys())
    if strays:
        raise ConfigError(
            f"A teacher was named for {', '.join(strays)}, and it is not trained on.",
            f"The tasks of this run are {', '.join(config.tasks)}.",
            f"Leave out --teacher-adapter {strays[0]}=..., or add the task.",
        )
    experts = {task: config.teacher_adapters.get(task) or config.teacher_adapter
               for task in config.tasks}  # fmt: skip
    lacking = [task for task, adapter in experts.items() if adapter is None]
    if lacking:
        raise ConfigError(
            f"Nobody teaches {', '.join(lacking)}: teachers were named by task, and none for it.",
            "The student would learn the task from nobody while its prompts are sampled.",
            f"Add --teacher-adapter {lacking[0]}=ADAPTER, or a bare --teacher-adapter ADAPTER for "
            "the tasks that have none of their own.",
        )
    return {task: adapter for task, adapter in experts.items() if adapter is not None}


def load_teacher_model(config: TrainConfig, experts: Mapping[str, str]) -> tuple[Any, Any]:
    """(frozen model, tokenizer) of the teacher, with one adapter, none, or those of `experts`.

    In a model of several, the expert of task T is the adapter `adapter_names(experts)[T]`.
    """
    loaded = LocalModel.load(
        config.teacher_model or config.model,
        adapter=None if experts else config.teacher_adapter,
        device=config.device,
        dtype=config.dtype,
    )
    model = loaded.model
    for folder, name in _by_folder(experts).items():
        model = load_adapter(model, folder, name)
    if experts:
        model.set_adapter(next(iter(adapter_names(experts).values())))
        model.to(next(loaded.model.parameters()).device).eval()
    return model.requires_grad_(False), loaded.tokenizer


def adapter_names(experts: Mapping[str, str]) -> dict[str, str]:
    """Task → what its expert is called in the teacher's model; tasks may share an expert."""
    names = _by_folder(experts)
    return {task: names[adapter] for task, adapter in experts.items()}


def _by_folder(experts: Mapping[str, str]) -> dict[str, str]:
    # Numbered: PEFT takes no name with a dot, and a task may have one.
    return {folder: f"expert{i}" for i, folder in enumerate(dict.fromkeys(experts.values()))}


# --- do they fit? ---------------------------------------------------------------------------------


def check_expert(task: str, adapter: str, base: str, student: Policy) -> None:
    """ConfigError, by name, for an adapter of another base or with another tokenizer than these.

    What the adapter's folder does not say is not compared: its shapes are when it is loaded.
    """
    folder = adapter_folder(adapter)
    trained_on = _note(folder).get("base") or {}
    print_there, place = trained_on.get("weights"), Path(base).expanduser()
    if print_there and place.is_dir() and print_there != weights_print(place):
        raise ConfigError(
            f"The teacher of {task}, '{adapter}', is an adapter of another base than '{base}'.",
            f"It was trained on '{trained_on.get('model')}', whose weights are others: on top of "
            "these it would say something else than the expert did.",
            "Name the base that the experts share with --model (or --teacher-model).",
        )
    tokens = _vocabulary(folder)
    if tokens is not None and tokens != student.tokenizer.get_vocab():
        raise ConfigError(
            f"The teacher of {task}, '{adapter}', was trained with another tokenizer.",
            "The teacher reads the very token ids that the student emitted.",
            "Take experts that were trained from one base with one tokenizer.",
        )


def check_heads(teacher: Policy) -> None:
    """ConfigError where an expert changes the output layer and whole distributions are compared."""
    names = [name for name, _ in teacher.causal.get_output_embeddings().named_parameters()]
    if any("lora_" in name or "modules_to_save" in name for name in names):
        raise ConfigError(
            "One of the teachers' adapters changes the output layer.",
            "Distributions are computed for the tokens of several tasks at once, with one layer.",
            "Use the token form (opd_form token), or experts that leave the output layer alone.",
        )


def _note(folder: Path) -> dict[str, Any]:
    """What `soulkit.json` says; nothing where there is none that can be read."""
    with suppress(OSError, ValueError):
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        return note if isinstance(note, dict) else {}
    return {}


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token → id, of the tokenizer beside an adapter; None where there is none."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)).get_vocab() if file.is_file() else None
