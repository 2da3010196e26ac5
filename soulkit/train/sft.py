"""Supervised steps: negative log-likelihood of perfect episodes, token-mean (algorithms §5).

The perfect episodes are the tasks' own `gold`; with feedback in the prompt they teach an actor to
use it, without they teach it the task.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from soulkit.errors import ConfigError
from soulkit.tasks.base import Task
from soulkit.train.config import TrainConfig
from soulkit.train.loop import Loop, StepMetrics
from soulkit.train.policy import Policy
from soulkit.train.sampling import Pool, batch
from soulkit.train.sequences import Span, gold_spans
from soulkit.train.update import NotFinite, micro_batches
from soulkit.types import Example, Feedback


def lesson(
    task: Task, example: Example, with_feedback: bool, policy: Policy, rng: random.Random
) -> list[Span]:
    """The trained sequences of one perfect episode."""
    feedback = None
    if with_feedback:
        text = task.rehearse(example, rng)
        feedback = Feedback(text=text, author="symbolic") if text else None
    episode = task.gold(example, feedback)
    if episode is None:
        raise ConfigError(
            f"Task '{task.name}' has no gold episodes to imitate.",
            "Supervised training needs the perfect answer of each row.",
            "Train it with grpo or ditto, or define gold() in the task.",
        )
    return gold_spans(episode, policy.renderer, policy.encode_reply)


def imitate(
    policy: Policy, optimizer: torch.optim.Optimizer, spans: Sequence[Span], config: TrainConfig
) -> dict[str, float]:
    """One optimizer step on the mean negative log-likelihood of all trained tokens, in nats."""
    tokens = sum(span.n_trained for span in spans)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for indices in micro_batches(spans, config.tokens_per_batch):
        scored = policy.score([spans[i] for i in indices])
        loss = -scored.log_prob.sum() / tokens
        loss.backward()
        total += float(loss.detach())
    norm = float(
        torch.nn.utils.clip_grad_norm_([p for _, p in policy.trained], config.max_grad_norm)
    )
    if not (total == total and norm < float("inf")):
        raise NotFinite(f"loss {total}, gradient norm {norm}")
    optimizer.step()
    return {"loss": total, "grad_norm": norm, "tokens": float(tokens)}


@dataclass
class SupervisedStep:
    """Takes SFT steps for a Loop. `pools` are (rows, with feedback) and share each batch evenly."""

    loop: Loop
    pools: Sequence[tuple[Pool, bool]]

    async def __call__(self, step: int) -> StepMetrics:
        config = self.loop.config
        started = time.monotonic()
        share = max(1, config.sft_batch // len(self.pools))
        rng = random.Random(f"{config.seed}/{step}/lessons")
        spans = [
            span
            for pool, with_feedback in self.pools
            for task, example in batch(pool, share, step, config.seed)
            for span in lesson(task, example, with_feedback, self.loop.policy, rng)
        ]
        line = imitate(self.loop.policy, self.loop.optimizer, spans, config)
        seconds = round(time.monotonic() - started, 3)
        return {**line, "lr": config.lr, "sequences": len(spans), "seconds_train": seconds}
