"""Teachers: models whose distributions the student learns, token by token (algorithms §4).

A self-teacher is the policy in another state: current weights (`live`), frozen base (`base`) or
moving average of the trained weights (`ema`). There is no second model: the adapter is switched
off, or the parameters temporarily point to the average. Averaging the LoRA factors A and B
approximates the average of their product.

On-policy distillation uses a second, frozen model. It may have one expert adapter per task; they
share the base, so each only adds its own weights. The expert for a task scores its sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from soulkit.errors import ConfigError
from soulkit.models.local.loading import NOTE, adapter_folder, load_adapter, pick_device
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.weights import weights_hash
from soulkit.runs.jsonl import read_object
from soulkit.train.config import TrainConfig
from soulkit.train.model.packing import Pack
from soulkit.train.model.policy import Entropies, Policy
from soulkit.train.objectives.base import Objective
from soulkit.train.objectives.sequences import Span
from soulkit.train.ranks.sharding import load_on_ranks
from soulkit.train.ranks.world import on_all_ranks, ranks


def task_teachers(config: TrainConfig) -> dict[str, str]:
    """Task of the run → its teacher adapter; empty if one teacher serves all tasks.

    An adapter named without a task teaches the tasks that have none. ConfigError for a task without
    a teacher, and for a teacher of a task that is not trained.
    """
    if not config.teacher_adapters:
        return {}
    strays = sorted(config.teacher_adapters.keys() - config.tasks.keys())
    if strays:
        raise ConfigError(
            f"--teacher-adapter names {', '.join(strays)}, which this run does not train on.",
            f"This run trains on {', '.join(config.tasks)}.",
            f"Remove --teacher-adapter {strays[0]}=..., or add the task with --task.",
        )
    experts = {task: config.teacher_adapters.get(task) or config.teacher_adapter
               for task in config.tasks}  # fmt: skip
    lacking = [task for task, adapter in experts.items() if adapter is None]
    if lacking:
        raise ConfigError(
            f"There is no teacher for {', '.join(lacking)}.",
            "Teachers were named by task, so every task needs one.",
            f"Add --teacher-adapter {lacking[0]}=ADAPTER, or --teacher-adapter ADAPTER for all "
            "tasks that have no adapter.",
        )
    return {task: adapter for task, adapter in experts.items() if adapter is not None}


def _frozen_model(config: TrainConfig, experts: Mapping[str, str]) -> tuple[Any, Any]:
    """The teacher's frozen model and tokenizer, with one adapter, none, or those of `experts`.

    With several, the expert on task T is the adapter `adapter_names(experts)[T]`.
    """
    loaded = LocalModel.load(
        config.teacher_model or config.model,
        adapter=None if experts else config.teacher_adapter,
        device=config.device,
        dtype=config.dtype,
        quantize="none" if config.teacher_model else config.quantize,
        move=not ranks().sharded,
    )
    model = loaded.model
    for folder, name in _by_folder(experts).items():
        model = load_adapter(model, folder, name)
    if experts:
        model.set_adapter(next(iter(adapter_names(experts).values())))
        model.to(next(loaded.model.parameters()).device).eval()
    return model.requires_grad_(False), loaded.tokenizer


def adapter_names(experts: Mapping[str, str]) -> dict[str, str]:
    """Task → name of its expert in the teacher model; tasks may share an expert."""
    names = _by_folder(experts)
    return {task: names[adapter] for task, adapter in experts.items()}


def _by_folder(experts: Mapping[str, str]) -> dict[str, str]:
    # Numbered, because PEFT forbids dots in names and task names may contain them.
    return {folder: f"expert{i}" for i, folder in enumerate(dict.fromkeys(experts.values()))}


# --- checks ---------------------------------------------------------------------------------------


def check_expert(task: str, adapter: str, base: str, student: Policy) -> None:
    """ConfigError if the base or tokenizer of an expert adapter differs from the student's.

    Properties that the adapter's folder does not record are not compared here.
    """
    folder = adapter_folder(adapter)
    trained_on = read_object(folder / NOTE).get("base") or {}
    print_there, place = trained_on.get("weights"), Path(base).expanduser()
    if print_there and place.is_dir() and print_there != weights_hash(place):
        raise ConfigError(
            f"The {task} teacher '{adapter}' was not trained on the base '{base}'.",
            f"It is an adapter for '{trained_on.get('model')}', which has different weights.",
            "Set --model (or --teacher-model) to the base of the experts.",
        )
    tokens = _vocabulary(folder)
    if tokens is not None and tokens != student.tokenizer.get_vocab():
        raise ConfigError(
            f"The {task} teacher '{adapter}' was trained with a different tokenizer.",
            "The teacher reads the token ids that the student sampled.",
            "Use experts that share the base and the tokenizer of the student.",
        )


def check_heads(teacher: Policy) -> None:
    """ConfigError if an expert changes the output layer, for methods that compare distributions."""
    names = [name for name, _ in teacher.causal.get_output_embeddings().named_parameters()]
    if any("lora_" in name or "modules_to_save" in name for name in names):
        raise ConfigError(
            "One of the teacher adapters changes the output layer.",
            "Distributions for several tasks are computed together, with one output layer.",
            "Use --opd-form token, or experts that do not change the output layer.",
        )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token → id of the tokenizer saved with an adapter; None if there is none."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)).get_vocab() if file.is_file() else None


State = Literal["live", "base", "ema"]


@dataclass(frozen=True, slots=True)
class Teacher:
    """A policy in one of its states. Its outputs carry no gradient.

    With experts, `tasks` names the task of every span; KeyError for a task without an expert.
    """

    policy: Policy
    state: State = "live"

    @contextmanager
    def reading(self, expert: str = "") -> Iterator[None]:
        """Context in which the policy is the teacher, with the adapter `expert` if given."""
        with torch.no_grad(), teaching(self.policy, self.state):
            if expert:
                self.policy.model.set_adapter(expert)
                self.policy.model.requires_grad_(False)  # set_adapter enables gradients
            yield

    def log_probs(
        self, spans: Sequence[Span], budget: int | None, tasks: Sequence[str] = ()
    ) -> list[Tensor]:
        """Per span, log-probs [n_trained] of its trained tokens."""
        return self.scores(spans, budget, tasks)[0]

    @on_all_ranks
    def scores(
        self,
        spans: Sequence[Span],
        budget: int | None,
        tasks: Sequence[str] = (),
        entropy: Entropies = "none",
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Per span, log-probs and entropies (NaN unless requested), both [n_trained]."""
        world, scores = ranks(), dict[int, tuple[Tensor, Tensor]]()
        passes = list(self._passes(spans, budget, tasks))
        for one in world.share(passes, lambda one: self.policy.cost(one[1])):
            expert, pack, places = one or ("", None, [])
            with self.reading(expert):
                if pack is None:
                    self.policy.empty_pass()
                    continue
                scored = self.policy.score(pack, entropy=entropy)
            for row, index in enumerate(places):
                tokens = scored.owner == row
                scores[index] = scored.log_prob[tokens], scored.entropy[tokens]
        if world.size > 1:
            parts = world.gather({i: (a.cpu(), b.cpu()) for i, (a, b) in scores.items()})
            device = self.policy.device
            for part in parts:
                scores |= {i: (a.to(device), b.to(device)) for i, (a, b) in part.items()}
        logs = [scores[i][0] for i in range(len(spans))]
        return logs, [scores[i][1] for i in range(len(spans))]

    def hidden(
        self, spans: Sequence[Span], budget: int | None, tasks: Sequence[str] = ()
    ) -> Tensor:
        """Hidden states [total n_trained, width] at the trained tokens' parents, span by span."""
        states: list[Tensor] = [torch.empty(0)] * len(spans)
        for expert, pack, places in self._passes(spans, budget, tasks, divided=False):
            lengths = [span.n_trained for span in pack.spans]
            with self.reading(expert):
                parts = self.policy.hidden(pack).split(lengths)
            for index, part in zip(places, parts, strict=True):
                states[index] = part
        return torch.cat(states)

    def _passes(
        self, spans: Sequence[Span], budget: int | None, tasks: Sequence[str], *,
        divided: bool = True,
    ) -> Iterator[tuple[str, Pack, list[int]]]:  # fmt: skip
        for expert, places in self._readers(len(spans), tasks).items():
            for pack in self.policy.packs([spans[i] for i in places], budget, divided=divided):
                yield expert, pack, [places[i] for i in pack.indices]

    def _readers(self, count: int, tasks: Sequence[str]) -> dict[str, list[int]]:
        """Adapter → indices of its spans; the key is "" if there are no experts."""
        if not self.policy.experts:
            return {"": list(range(count))}
        readers: dict[str, list[int]] = {}
        for place, task in enumerate(tasks):
            readers.setdefault(self.policy.experts[task], []).append(place)
        return readers

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits / temperature, float32 [n, vocabulary], from hidden states [n, width]."""
        with self.reading():
            return self.policy.logits(hidden)


# --- states of the policy -------------------------------------------------------------------------


@contextmanager
def teaching(policy: Policy, state: State) -> Iterator[None]:
    """Context in which the policy is its own teacher; its weights are always restored."""
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
    average = policy.ema
    assert average is not None, "start_ema comes before training"
    current = {name: parameter.data for name, parameter in policy.trained}
    try:
        for name, parameter in policy.trained:
            parameter.data = average[name]
        yield
    finally:
        for name, parameter in policy.trained:
            parameter.data = current[name]


@on_all_ranks
def start_ema(policy: Policy) -> None:
    """Start the moving average, or a reference, as a copy of the trained weights (A and B)."""
    policy.ema = {name: parameter.detach().clone() for name, parameter in policy.trained}


@torch.no_grad()
def move_ema(policy: Policy, tau: float) -> None:
    """teacher ← (1−τ) teacher + τ student on every trained tensor; once per optimizer update."""
    assert policy.ema is not None, "start_ema comes before training"
    for name, parameter in policy.trained:
        policy.ema[name].lerp_(parameter.detach(), tau)


# --- choosing the teacher -------------------------------------------------------------------------


def load_teacher(config: TrainConfig, objective: Objective, student: Policy) -> Policy | None:
    """The frozen teacher model of `opd`; None for other methods.

    Raises ConfigError if the settings do not fit the student or the two models have different
    tokens.
    """
    check_student(config, objective, student)
    if objective.reader != "other":
        return None
    experts, base = task_teachers(config), config.teacher_model or config.model
    for task, adapter in experts.items():
        check_expert(task, adapter, base, student)
    load = partial(_frozen_model, config, experts)
    model, tokenizer = load_on_ranks(load, pick_device(config.device))
    teacher = Policy(
        model, tokenizer, config.temperature,
        packing=config.packing, attention=config.attention, thinking=config.thinking,
        tokens=student.tokens,
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
    """ConfigError if the settings of the teacher do not fit the student."""
    check_settings(config, objective)
    if objective.logits:
        _check_gathers(student)


def check_settings(config: TrainConfig, objective: Objective) -> None:
    """ConfigError for an impossible teacher, before any model is loaded."""
    if objective.reader == "other":
        task_teachers(config)
    if objective.reader == "self" and config.teacher == "base" and config.full:
        raise ConfigError(
            "--teacher base does not work with --full.",
            "The base is the model without its adapter, and with --full there is no adapter.",
            "Train an adapter, or use --teacher live or --teacher ema.",
        )


def _check_gathers(policy: Policy) -> None:
    if not policy.gathers:
        raise ConfigError(
            "This model does not support methods that compare whole distributions.",
            "It scales or caps its logits, so distributions cannot be computed in parts.",
            "Use the token form: sdpo-token, or opd with --opd-form token.",
        )


def check_tokens(student: Policy, teacher: Policy) -> None:
    """ConfigError unless both tokenizers have the same tokens and ids."""
    vocabulary, other = student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if vocabulary == other:
        return
    differing = sum(other.get(token) != index for token, index in vocabulary.items())
    differing += len(other.keys() - vocabulary.keys())
    raise ConfigError(
        f"Teacher and student have different vocabularies: {differing} tokens differ.",
        "The teacher reads the token ids that the student sampled.",
        "Choose a teacher of the same family, with the same tokenizer.",
    )


def check_width(student: Policy, teacher: Policy) -> None:
    """ConfigError unless both output layers have the same size (some are padded)."""
    sizes = [p.causal.get_output_embeddings().weight.shape[0] for p in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"The student's output layer has {sizes[0]} rows and the teacher's {sizes[1]}.",
            "Their distributions are compared token by token.",
            "Choose a teacher with an output layer of the same size, or use --opd-form token.",
        )


def teacher_of(
    config: TrainConfig, objective: Objective, student: Policy, other: Policy | None
) -> Teacher:
    """The teacher of this run: the second model if the method has one, else the student."""
    assert other is not None or objective.reader != "other", "the method needs a teacher model"
    return Teacher(student, config.teacher) if other is None else Teacher(other)
