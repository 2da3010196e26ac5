"""Supervised steps: negative log-likelihood of perfect episodes, token-mean (algorithms §5).

The perfect episodes are the tasks' own `gold`; with feedback in the prompt they teach an actor to
use it, without they teach it the task.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from soulkit.errors import ConfigError, DataError
from soulkit.play.settings import has_tags
from soulkit.tasks.base import Task
from soulkit.train.config import TrainConfig
from soulkit.train.forward.imitation import imitation_loss
from soulkit.train.forward.policy import Policy
from soulkit.train.forward.update import NotFinite, take_step
from soulkit.train.material.feasible import rehearsed
from soulkit.train.material.sampling import TaskRows, batch
from soulkit.train.objectives.sequences import Span, gold_spans
from soulkit.train.state.lines import Learned, StepLine
from soulkit.train.state.loop import Loop
from soulkit.train.state.skips import Skips
from soulkit.types import Example, Feedback


@dataclass
class SupervisedStep:
    """Takes SFT steps for a Loop."""

    loop: Loop
    pool: TaskRows
    skips: Skips = field(default_factory=Skips)
    """Updates that could not be taken."""

    async def __call__(self, step: int) -> StepLine:
        config, policy = self.loop.config, self.loop.policy
        started = time.monotonic()
        self.loop.begin("update")
        rng = random.Random(f"{config.seed}/{step}/lessons")
        spans = [
            span
            for task, example in batch(self.pool, config.sft_batch, step, config.seed)
            for span in perfect_spans(
                task, example, feedback_for(task, example, config, rng), policy
            )
        ]
        learned = imitate(policy, self.loop.optimizer, spans, config, self.skips)
        seconds = round(time.monotonic() - started, 3)
        return StepLine(step=step, learned=learned, train_seconds=seconds)


def feedback_for(
    task: Task, example: Example, config: TrainConfig, rng: random.Random
) -> Feedback | None:
    """Feedback as RL will give it, in the rows and the share of prompts that are to have it."""
    always = config.sft_feedback_always
    if rng.random() >= config.sft_feedback and not (always and has_tags(example, always)):
        return None
    return rehearsed(task, example, config, rng)


def perfect_spans(
    task: Task, example: Example, feedback: Feedback | None, policy: Policy
) -> list[Span]:
    """The trained sequences of one perfect episode."""
    episode = task.gold(example, feedback)
    if episode is None:
        raise ConfigError(
            f"Task '{task.name}' has no gold episodes to imitate.",
            "Supervised training needs the perfect answer of each row.",
            "Train it with grpo or ditto, or define gold() in the task.",
        )
    return gold_spans(episode, policy.renderer, policy.encode_reply)


def dev_spans(dev: TaskRows, policy: Policy) -> dict[str, list[Span]]:
    """Task → the sequences of its held-out perfect episodes, without feedback."""
    by_task: dict[str, list[Span]] = {}
    for task, example in dev:
        by_task.setdefault(task.name, []).extend(perfect_spans(task, example, None, policy))
    return by_task


def check_lessons(policy: Policy, limit: int | None, pool: TaskRows) -> None:
    """DataError when a perfect episode does not fit the model's context of `limit` tokens."""
    lengths = [
        len(span.ids)
        for task, example in pool
        for span in perfect_spans(task, example, None, policy)
    ]
    longer = sum(limit is not None and length > limit for length in lengths)
    if longer:
        raise DataError(
            f"{longer} of {len(lengths)} lessons do not fit: the longest has {max(lengths)} "
            f"tokens, and the model's context holds {limit}.",
            "Beyond it the model has no positions that mean anything.",
            "Use shorter rows, or a model with more context.",
        )


def imitate(
    policy: Policy, optimizer: torch.optim.Optimizer, spans: Sequence[Span], config: TrainConfig,
    skips: Skips | None = None, sources: Sequence[str] = (),
) -> Learned:  # fmt: skip
    """One optimizer step on the replies' mean negative log-likelihood, in nats per token.

    `sources` says where each of the spans is from, and the loss is also given by source.
    With `sft_prompt_weight` w the prompts' own mean is added w times. `loss` is the replies' alone.
    A step whose loss or gradient is not finite is not taken; `skips` counts those of a run.
    """
    skips = skips or Skips()
    replies = sum(span.n_trained for span in spans)
    prompts = sum(len(span.ids) - 1 for span in spans) - replies
    used = [_whole(span) for span in spans] if config.sft_prompt_weight else list(spans)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    sums = LossSums()
    for pack in policy.packs(used, config.tokens_per_batch):
        is_reply = _reply_mask([spans[i] for i in pack.indices], pack.spans).to(policy.device)
        weight = torch.where(is_reply, 1 / replies, config.sft_prompt_weight / max(prompts, 1))
        scored = imitation_loss(policy, pack, weight)
        scored.loss.backward()
        losses = -scored.log_prob[is_reply]
        total += float(losses.sum()) / replies
        if sources:
            sums.add(losses, scored.owner[is_reply], [sources[i] for i in pack.indices])
    seen = Learned(tokens=replies, sequences=len(spans), skipped=0)
    try:
        norm = take_step(policy, optimizer, total, config)
    except NotFinite as error:
        skips.another()
        reasons = {"1 of 1": str(error)}
        return replace(seen, updates=0, skipped=1, not_finite=reasons, skipped_row=skips.row)
    skips.none()
    return replace(seen, loss=total, losses=sums.means(), grad_norm=norm)


@dataclass
class LossSums:
    """Sums of tokens' losses by source."""

    nats: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)

    def add(self, losses: Tensor, owner: Tensor, sources: Sequence[str]) -> None:
        """Add the tokens of a pack: their losses [n], and which of `sources` each is from [n]."""
        owner = owner.cpu()  # where adding by index has one order
        sums = torch.zeros(len(sources), dtype=torch.float64)
        sums.index_add_(0, owner, losses.double().cpu())
        counts = torch.bincount(owner, minlength=len(sources)).tolist()
        for source, nats, tokens in zip(sources, sums.tolist(), counts, strict=True):
            self.nats[source] += nats
            self.tokens[source] += tokens

    def means(self) -> dict[str, float]:
        """Source → nats per token."""
        return {name: self.nats[name] / n for name, n in self.tokens.items() if n}


def _whole(span: Span) -> Span:
    """Every token trained but the first, which nothing precedes."""
    return replace(span, trained=(False, *(True,) * (len(span.ids) - 1)))


def _reply_mask(spans: Sequence[Span], used: Sequence[Span]) -> Tensor:
    """Over the tokens trained in `used`: whether `spans` trains them."""
    flags = [
        reply
        for span, whole in zip(spans, used, strict=True)
        for reply, trained in zip(span.trained, whole.trained, strict=True)
        if trained
    ]
    return torch.tensor(flags, dtype=torch.bool)
