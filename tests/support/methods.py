"""Rollouts made of plain ids, so that tests can write out the formula of every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.objectives.base import make_objective
from soulkit.train.objectives.sequences import TrainSequence
from soulkit.types import (
    Completion,
    Episode,
    Feedback,
    Kind,
    Record,
    Score,
    Segment,
    Trace,
    Turn,
    record_key,
)
from tests.support.training import jolt, policy_of

Ids = Sequence[int]
SMALL: dict[str, Any] = {"max_grad_norm": 1e9, "lora": {"r": 4, "alpha": 8}}
PROMPTS = {"x": "301 302 303", "y": "311 312"}
HINTS = {"x": "390 391", "y": "395"}
BETWEEN = 350
"""The partner's ids between two turns."""


class Numbers:
    """A renderer: the numbers in the messages are the ids, and the actor's turns keep their ids."""

    def prompt_ids(self, context: Sequence[Segment]) -> list[int]:
        return [i for s in context for i in (s.token_ids or map(int, s.text.split()))]

    def bare(self, context: Sequence[Segment]) -> tuple[Segment, ...]:
        return tuple(s if s.bare is None else replace(s, text=s.bare) for s in context)


def slot(record: Record, seat: str, feedback: Feedback) -> Segment:
    bare = PROMPTS[record.example_id]
    return Segment("user", f"{bare} {feedback.text}", bare)


def advice(example: str, leak: str = "") -> Feedback:
    return Feedback(text=HINTS[example], author="symbolic", leak=leak)


def play(
    example: str,
    rollout: int,
    kind: Kind,
    reward: float,
    *turns: Ids,
    received: Feedback | None = None,
) -> Record:
    """A rollout with these actor turns; a refined one has the example's hint in its prompt."""
    hint = advice(example)
    bare = PROMPTS[example]
    opening = f"{bare} {hint.text}" if kind == "refined" else bare
    context, done = [Segment("user", opening, bare)], []
    for ids in turns:
        reply = Completion(
            text="said", prompt_ids=tuple(Numbers().prompt_ids(context)), token_ids=tuple(ids),
            logprobs=(-1.0,) * len(ids),
        )  # fmt: skip
        done.append(Turn(tuple(context), reply))
        context += [Segment("assistant", "said", token_ids=reply.token_ids),
                    Segment("user", str(BETWEEN))]  # fmt: skip
    episode = Episode(
        example_id=example, task="tomi", kind=kind, rollout=rollout,
        traces=(Trace("reader", tuple(done)),),
    )  # fmt: skip
    return Record(
        key=record_key(0, example, rollout, kind), task="tomi", example_id=example,
        rollout=rollout, kind=kind, episode=episode, score=Score(value=reward, reward=reward),
        received=received, given=hint if kind == "refined" else None,
    )  # fmt: skip


D0, D1, D2 = (320, 321, 322), (323, 324), (325, 326, 327, 328)
"""The ids of the drafts; `D2` belongs to example y."""
R0, R1, R2 = (330, 331), (332, 333, 334, 335), (336,)

ROLLOUTS = [
    play("x", 0, "draft", 0.0, D0, received=advice("x")),
    play("x", 0, "refined", 1.0, R0, R2),
    play("x", 1, "draft", 0.5, D1, R2, received=advice("x")),
    play("x", 1, "refined", 0.25, R1),
    play("y", 0, "draft", 1.0, D2, received=advice("y", leak="gold_text")),
    play("y", 1, "draft", 0.0, D1),
]
"""x: two drafts with feedback, both refined, one of each in two turns. y: two drafts without
usable feedback, one because it leaked."""


def batch_of(config: TrainConfig, records: Sequence[Record] = ROLLOUTS) -> list[TrainSequence]:
    return make_objective(config).sequences(records, Numbers(), slot)


def conversation(example: str, turns: Sequence[Ids], hinted: bool) -> tuple[list[int], list[int]]:
    """Ids of a whole conversation and positions of the actor's ids, computed independently."""
    ids = [int(w) for w in PROMPTS[example].split()]
    ids += [int(w) for w in HINTS[example].split()] if hinted else []
    places: list[int] = []
    for index, turn in enumerate(turns):
        ids += [BETWEEN] if index else []
        places += range(len(ids), len(ids) + len(turn))
        ids += turn
    return ids, places


def rows_of(policy: Policy, example: str, turns: Sequence[Ids], hinted: bool = False) -> Tensor:
    """Log-probs [n, vocabulary] that predict the actor's ids, from a full forward pass."""
    ids, places = conversation(example, turns, hinted)
    logits = policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits / policy.temperature, -1)[[p - 1 for p in places]]


def logp(policy: Policy, example: str, turns: Sequence[Ids], hinted: bool = False) -> Tensor:
    """Log-probs [n] of the actor's ids."""
    emitted = torch.tensor([i for turn in turns for i in turn])
    return rows_of(policy, example, turns, hinted).gather(-1, emitted[:, None]).squeeze(-1)


def student(folder: Path, **settings: Any) -> Policy:
    return policy_of(folder, **{**SMALL, **settings})


def teacher(folder: Path) -> Policy:
    """A teacher for on-policy distillation: a frozen copy of the base with changed weights."""
    other = policy_of(folder, **SMALL)
    jolt(other, 0.1, seed=9)
    other.model.requires_grad_(False)
    return other


def still(policy: Policy) -> torch.optim.Optimizer:
    """An optimizer that leaves all weights unchanged."""
    return torch.optim.SGD([p for _, p in policy.trained], lr=0.0)
