"""Teachers: who tells the student, token by token, what it would have said (algorithms §4).

A self-teacher is the policy itself in another state: its current weights (`live`), the frozen base
(`base`) or a moving average of its trained weights (`ema`). States are entered, never copied into a
second model: the adapter is switched off, or the parameters point at the average for a while. The
average is taken of the LoRA factors A and B, which approximates the average of their product.
On-policy distillation has a second, frozen model instead, which may hold an expert for every task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from soulkit.errors import ConfigError
from soulkit.train.config import TrainConfig
from soulkit.train.forward.experts import (
    adapter_names,
    check_expert,
    check_heads,
    experts_of,
    load_teacher_model,
)
from soulkit.train.forward.packing import Pack
from soulkit.train.forward.policy import Policy
from soulkit.train.objectives.base import Objective
from soulkit.train.objectives.sequences import Span

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
        """Every pack with its reader and the places of its spans."""
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
    experts, base = experts_of(config), config.teacher_model or config.model
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
        experts_of(config)
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
            "Its output is not its output layer applied to the last hidden state (the logits are "
            "scaled or capped on the way), so whole distributions cannot be computed in parts.",
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
