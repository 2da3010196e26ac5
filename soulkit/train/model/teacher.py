"""Teachers: models whose distributions the student follows token by token (algorithms §4).

A self-teacher is the policy itself in another state: its current weights (`live`), the frozen base
(`base`) or a moving average of its trained weights (`ema`). States are entered, never copied into a
second model: the adapter is switched off, or the parameters point at the average for a while. The
average is taken of the LoRA factors A and B, which approximates the average of their product.

On-policy distillation has a second, frozen model instead. It may hold the adapter of an expert for
every task; the adapters share the base, so a further expert costs only its own weights. A sequence
is read by the expert of its task alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from soulkit.errors import ConfigError
from soulkit.models.local.loading import NOTE, adapter_folder, load_adapter
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.weights import weights_hash
from soulkit.train.config import TrainConfig
from soulkit.train.model.packing import Pack
from soulkit.train.model.policy import Policy
from soulkit.train.objectives.base import Objective
from soulkit.train.objectives.sequences import Span


def task_teachers(config: TrainConfig) -> dict[str, str]:
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
    if print_there and place.is_dir() and print_there != weights_hash(place):
        raise ConfigError(
            f"The teacher of {task}, '{adapter}', is an adapter of another base than '{base}'.",
            f"It was trained on '{trained_on.get('model')}', whose weights are others.",
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


State = Literal["live", "base", "ema"]


@dataclass(frozen=True, slots=True)
class Teacher:
    """A policy in one of its states. Nothing it gives carries a gradient.

    Where it holds experts, `tasks` says of every span whose expert reads it; KeyError for a task
    that has none.
    """

    policy: Policy
    state: State = "live"

    @contextmanager
    def reading(self, expert: str = "") -> Iterator[None]:
        """Within it the policy is the teacher, with the adapter `expert` where it holds several."""
        with torch.no_grad(), teaching(self.policy, self.state):
            if expert:
                self.policy.model.set_adapter(expert)
                self.policy.model.requires_grad_(False)  # PEFT now means to train it
            yield

    def log_probs(
        self, spans: Sequence[Span], budget: int | None, tasks: Sequence[str] = ()
    ) -> list[Tensor]:
        """Per span, log-probs [n_trained] of its trained tokens."""
        return self.scores(spans, budget, tasks)[0]

    def scores(
        self, spans: Sequence[Span], budget: int | None, tasks: Sequence[str] = ()
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Per span, log-probs and entropies, both [n_trained], of one pass."""
        logs: list[Tensor] = [torch.empty(0)] * len(spans)
        spreads = list(logs)
        for expert, pack, places in self._passes(spans, budget, tasks):
            with self.reading(expert):
                scored = self.policy.score(pack)
            for row, index in enumerate(places):
                logs[index] = scored.log_prob[scored.owner == row]
                spreads[index] = scored.entropy[scored.owner == row]
        return logs, spreads

    def hidden(
        self, spans: Sequence[Span], budget: int | None, tasks: Sequence[str] = ()
    ) -> Tensor:
        """Hidden states [n_trained of all, width] at the trained tokens' parents, span by span."""
        states: list[Tensor] = [torch.empty(0)] * len(spans)
        for expert, pack, places in self._passes(spans, budget, tasks):
            lengths = [span.n_trained for span in pack.spans]
            with self.reading(expert):
                parts = self.policy.hidden(pack).split(lengths)
            for index, part in zip(places, parts, strict=True):
                states[index] = part
        return torch.cat(states)

    def _passes(
        self, spans: Sequence[Span], budget: int | None, tasks: Sequence[str]
    ) -> Iterator[tuple[str, Pack, list[int]]]:
        for expert, places in self._readers(len(spans), tasks).items():
            for pack in self.policy.packs([spans[i] for i in places], budget):
                yield expert, pack, [places[i] for i in pack.indices]

    def _readers(self, count: int, tasks: Sequence[str]) -> dict[str, list[int]]:
        """The adapter that reads → the places of its spans; one nameless reader without experts."""
        if not self.policy.experts:
            return {"": list(range(count))}
        readers: dict[str, list[int]] = {}
        for place, task in enumerate(tasks):
            readers.setdefault(self.policy.experts[task], []).append(place)
        return readers

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocabulary], divided by the temperature, of hidden states [n, width]."""
        with self.reading():
            return self.policy.logits(hidden)


# --- states of the policy -------------------------------------------------------------------------


@contextmanager
def teaching(policy: Policy, state: State) -> Iterator[None]:
    """Within it the policy is its own teacher; its weights are put back whatever happens."""
    if state == "live":
        yield
    elif state == "base":
        with policy.base():
            yield
    else:
        with _averaged(policy):
            yield


@contextmanager
def _averaged(policy: Policy) -> Iterator[None]:
    average = _average_of(policy)
    current = {name: parameter.data for name, parameter in policy.trained}
    try:
        for name, parameter in policy.trained:
            parameter.data = average[name]
        yield
    finally:
        for name, parameter in policy.trained:
            parameter.data = current[name]


def start_ema(policy: Policy) -> None:
    """Start the moving average as a copy of the trained weights, A and B included."""
    policy.ema = {name: parameter.detach().clone() for name, parameter in policy.trained}


@torch.no_grad()
def move_ema(policy: Policy, tau: float) -> None:
    """teacher ← (1−τ) teacher + τ student on every trained tensor; once per optimizer update."""
    average = _average_of(policy)
    for name, parameter in policy.trained:
        average[name].lerp_(parameter.detach(), tau)


def _average_of(policy: Policy) -> dict[str, Tensor]:
    if policy.ema is None:
        raise ConfigError(
            "The teacher is to be a moving average, and none was started.",
            "It begins as a copy of the student before the first update.",
            "Call start_ema(policy) before training, or use another teacher.",
        )
    return policy.ema


# --- who teaches ----------------------------------------------------------------------------------


def load_teacher(config: TrainConfig, objective: Objective, student: Policy) -> Policy | None:
    """The second model of `opd`, frozen; None for methods that have none.

    Raises ConfigError when the student cannot be taught in the way that was asked for, or when the
    two models do not share their tokens.
    """
    check_student(config, objective, student)
    if objective.reader != "other":
        return None
    experts, base = task_teachers(config), config.teacher_model or config.model
    for task, adapter in experts.items():
        check_expert(task, adapter, base, student)
    model, tokenizer = load_teacher_model(config, experts)
    teacher = Policy(
        model, tokenizer, config.temperature,
        packing=config.packing, attention=config.attention, thinking=config.thinking,
    )  # fmt: skip
    teacher.experts = adapter_names(experts)
    check_tokens(student, teacher)
    if objective.logits:
        check_width(student, teacher)
        _check_gathers(teacher)
        if experts:
            check_heads(teacher)
    return teacher


def check_student(config: TrainConfig, objective: Objective, student: Policy) -> None:
    """ConfigError when the asked-for teaching does not fit the policy."""
    check_settings(config, objective)
    if objective.logits:
        _check_gathers(student)


def check_settings(config: TrainConfig, objective: Objective) -> None:
    """ConfigError for a teacher that cannot be: before any model is loaded."""
    if objective.reader == "other":
        task_teachers(config)
    if objective.reader == "self" and config.teacher == "base" and config.full:
        raise ConfigError(
            "The base was to be the teacher while all weights are trained.",
            "The base is the model without its adapter, and here there is no adapter.",
            "Train an adapter, or use --teacher live or --teacher ema.",
        )


def _check_gathers(policy: Policy) -> None:
    if not policy.gathers:
        raise ConfigError(
            "The distributions of this model cannot be compared.",
            "Its logits are scaled or capped, so distributions cannot be computed in parts.",
            "Use the token form: sdpo-token, or opd with opd_form token.",
        )


def check_tokens(student: Policy, teacher: Policy) -> None:
    """ConfigError unless both tokenizers give every id the same token."""
    vocabulary, other = student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if vocabulary == other:
        return
    differing = sum(other.get(token) != index for token, index in vocabulary.items())
    differing += len(other.keys() - vocabulary.keys())
    raise ConfigError(
        f"Teacher and student do not share a vocabulary: {differing} tokens differ.",
        "The teacher reads the very token ids that the student emitted.",
        "Choose a teacher of the same family, with the same tokenizer.",
    )


def check_width(student: Policy, teacher: Policy) -> None:
    """ConfigError unless both output layers have the same size (some are padded)."""
    sizes = [p.causal.get_output_embeddings().weight.shape[0] for p in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"The student's output layer has {sizes[0]} rows and the teacher's {sizes[1]}.",
            "Their distributions are compared outcome by outcome.",
            "Choose a teacher with an equal output layer, or the token form (opd_form token).",
        )


def teacher_of(
    config: TrainConfig, objective: Objective, student: Policy, other: Policy | None
) -> Teacher:
    """Who teaches in this run: the second model where a method has one, else the student's state.

    ConfigError when a second model is needed and not there.
    """
    if other is None and objective.reader == "other":
        raise ConfigError(
            "The method 'opd' has no second model to learn from.",
            "The student would be its own teacher and learn nothing.",
            "Load one with load_teacher(config, objective, policy) and hand it on.",
        )
    return Teacher(student, config.teacher) if other is None else Teacher(other)
