"""Supervised steps on gold episodes or conversations: token-mean cross-entropy (algorithms §5).

Gold episodes come from the tasks; with feedback in the prompt they teach an actor to use it. A step
on conversations takes lessons from the stream until `sft_batch` of them fit. Lessons that do not
fit, or are also validation conversations, are counted by reason and replaced by the next ones.

`Policy.score` must support any use of its log-probs, so its backward pass recomputes logits. Here
the loss is a weighted sum: the logits of a chunk give its loss and its gradient at once, without
recomputing and without entropies.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from soulkit.data.corpora.lessons import Lesson
from soulkit.data.corpora.stream import LessonStream
from soulkit.errors import ConfigError, DataError
from soulkit.metrics.intervals import Estimate, jackknife
from soulkit.models.local.float32_head import grad_of_input, is_wide
from soulkit.play.settings import has_tags
from soulkit.tasks.kit.base import Task
from soulkit.train.config import TrainConfig
from soulkit.train.model.packing import Pack, pack_entries
from soulkit.train.model.policy import Policy
from soulkit.train.model.update import NotFinite, take_step
from soulkit.train.objectives.sequences import Span, gold_spans
from soulkit.train.ranks.world import on_all_ranks, ranks
from soulkit.train.setup.feedback_check import lesson_feedback
from soulkit.train.setup.rows import TaskRows, batch, lesson_print, no_gold_words
from soulkit.train.sft.encode import LessonEncoder
from soulkit.train.state.loop import Loop
from soulkit.train.state.metrics import Learned, LessonCounts, StepLine
from soulkit.train.state.stops import Skips
from soulkit.types import Example, Feedback


@dataclass(frozen=True, slots=True)
class Imitated:
    """The loss of a pack and its log-probs, flat, sequence after sequence."""

    loss: Tensor
    """−Σ w·log π, with gradient."""
    log_prob: Tensor
    """[n_trained], in nats, detached."""
    owner: Tensor
    """[n_trained]: index of the token's sequence in the pack."""


def imitation_loss(policy: Policy, pack: Pack, weights: Tensor) -> Imitated:
    """The weighted cross-entropy of `pack`.

    `weights` float32 [n_trained], one per trained token, sequence after sequence.
    """
    head = policy.causal.get_output_embeddings() if policy.gathers else None
    plain = type(head) is torch.nn.Linear or is_wide(head)
    if head is None or not plain or head.bias is not None:
        scored = policy.score(pack)
        loss = -(scored.log_prob * weights).sum()
        return Imitated(loss, scored.log_prob.detach(), scored.owner)
    places = pack_entries(pack)
    target, owner = (torch.from_numpy(x).to(policy.device) for x in (places.target, places.owner))
    # Under no_grad, a Function still reports that its inputs need gradients.
    head_weight = head.weight if torch.is_grad_enabled() else head.weight.detach()
    hidden = policy.hidden(pack)
    loss, log_prob = _WeightedNll.apply(hidden, head_weight, target, weights, policy)
    return Imitated(loss, log_prob, owner)


class _WeightedNll(torch.autograd.Function):
    """−Σ w·log softmax(h Wᵀ / T)[target], chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, target: Tensor, weights: Tensor, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        """hidden [n, width], head [vocabulary, width] → (loss, log-probs [n])."""
        moves_hidden, moves_head = ctx.needs_input_grad[:2]
        to_hidden = torch.empty_like(hidden) if moves_hidden else None
        to_head = torch.zeros(head.shape, device=head.device) if moves_head else None
        log_probs, first = [], 0
        for h, t, w in policy.chunks(hidden, target, weights):
            logits = policy.logits(h)
            picked = t[:, None]
            norm = torch.logsumexp(logits, -1, keepdim=True)
            log_probs.append((logits.gather(1, picked) - norm)[:, 0])
            if moves_hidden or moves_head:
                slope = logits.sub_(norm).exp_()
                slope.scatter_add_(1, picked, slope.new_full(picked.shape, -1.0))
                slope *= (w / policy.temperature)[:, None]
            if to_hidden is not None:
                to_hidden[first : first + len(h)] = grad_of_input(slope, head)
            if to_head is not None:
                to_head.addmm_(slope.t(), h.float())
            first += len(h)
        ctx.slopes = to_hidden, None if to_head is None else to_head.to(head.dtype)
        log_prob = torch.cat(log_probs)
        ctx.mark_non_differentiable(log_prob)
        return -(log_prob * weights).sum(), log_prob

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_loss = grads[0]
        scaled = (None if s is None else s.mul_(of_loss.to(s.dtype)) for s in ctx.slopes)
        return (*scaled, None, None, None)


@dataclass
class SupervisedStep:
    """Takes SFT steps for a Loop."""

    loop: Loop
    pool: TaskRows
    skips: Skips = field(default_factory=Skips)
    """Counts skipped updates."""

    async def __call__(self, step: int) -> StepLine:
        config, policy = self.loop.config, self.loop.policy
        started = time.monotonic()
        self.loop.reporter.phase("update")
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
    """Feedback for a lesson if its row is selected or falls into the random share; else None."""
    always = config.sft_feedback_always
    if rng.random() >= config.sft_feedback and not (always and has_tags(example, always)):
        return None
    return lesson_feedback(task, example, config, rng)


def perfect_spans(
    task: Task, example: Example, feedback: Feedback | None, policy: Policy
) -> list[Span]:
    """The trained sequences of one gold episode."""
    episode = task.gold(example, feedback)
    if episode is None:
        raise ConfigError(*no_gold_words(task.name))
    return gold_spans(episode, policy.renderer, policy.encode_reply)


def dev_spans(dev: TaskRows, policy: Policy) -> dict[str, list[Span]]:
    """Task → the sequences of its held-out gold episodes, without feedback."""
    by_task: dict[str, list[Span]] = {}
    for task, example in dev:
        by_task.setdefault(task.name, []).extend(perfect_spans(task, example, None, policy))
    return by_task


def check_lessons(policy: Policy, limit: int | None, pool: TaskRows) -> None:
    """DataError if a gold episode does not fit the model's context of `limit` tokens."""
    lengths = [
        len(span.ids)
        for task, example in pool
        for span in perfect_spans(task, example, None, policy)
    ]
    longer = sum(limit is not None and length > limit for length in lengths)
    if longer:
        raise DataError(
            f"{longer} of {len(lengths)} lessons do not fit: the longest has {max(lengths)} "
            f"tokens, and the model's context is {limit}.",
            "The model cannot read tokens beyond its context.",
            "Use shorter rows, or a model with a longer context.",
        )


@on_all_ranks
def imitate(
    policy: Policy, optimizer: torch.optim.Optimizer, spans: Sequence[Span], config: TrainConfig,
    skips: Skips | None = None, sources: Sequence[str] = (),
) -> Learned:  # fmt: skip
    """One optimizer step on the mean negative log-likelihood of the replies, in nats per token.

    `sources` gives the source of each span; the loss is then also returned by source. The mean of
    the prompts is added with weight `sft_prompt_weight`, but `loss` only covers the replies. A step
    whose loss or gradient is not finite is skipped; `skips` counts them.
    """
    skips = skips or Skips()
    replies = sum(span.n_trained for span in spans)
    prompts = sum(len(span.ids) - 1 for span in spans) - replies
    used = [_whole(span) for span in spans] if config.sft_prompt_weight else list(spans)
    optimizer.zero_grad(set_to_none=True)
    total, sums, world = 0.0, LossSums(), ranks()
    for pack in policy.divided(used, config.tokens_per_batch):
        is_reply = _reply_mask([spans[i] for i in pack.indices], pack.spans).to(policy.device)
        weight = torch.where(is_reply, 1 / replies, config.sft_prompt_weight / max(prompts, 1))
        scored = imitation_loss(policy, pack, weight)
        scored.loss.backward()
        losses = -scored.log_prob[is_reply]
        total += float(losses.sum()) / replies
        if sources:
            sums.add(losses, scored.owner[is_reply], [sources[i] for i in pack.indices])
    world.add_gradients(policy.trained)
    (total, sums), *others = world.gather((total, sums))
    for total_there, sums_there in others:
        total += total_there
        sums.take(sums_there)
    balance = world.imbalance()
    seen = Learned(tokens=replies, sequences=len(spans), skipped=0, imbalance=balance)
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
    """Sums of token losses by source."""

    nats: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)

    def add(self, losses: Tensor, owner: Tensor, sources: Sequence[str]) -> None:
        """Add the tokens of a pack: losses [n], and their indices into `sources` [n]."""
        owner = owner.cpu()  # index_add is deterministic on the CPU
        sums = torch.zeros(len(sources), dtype=torch.float64)
        sums.index_add_(0, owner, losses.double().cpu())
        counts = torch.bincount(owner, minlength=len(sources)).tolist()
        for source, nats, tokens in zip(sources, sums.tolist(), counts, strict=True):
            self.nats[source] += nats
            self.tokens[source] += tokens

    def take(self, other: LossSums) -> None:
        """Add the sums of another rank."""
        self.nats.update(other.nats)
        self.tokens.update(other.tokens)

    def means(self) -> dict[str, float]:
        """Source → nats per token."""
        return {name: self.nats[name] / n for name, n in self.tokens.items() if n}

    def estimate(self) -> Estimate:
        """Nats per token over all sources, with a jackknife interval over sources."""
        names = [name for name, n in self.tokens.items() if n]

        def mean(chosen: Sequence[int]) -> float:
            nats = math.fsum(self.nats[names[i]] for i in chosen)
            return nats / sum(self.tokens[names[i]] for i in chosen)

        return jackknife(mean, len(names))


def _whole(span: Span) -> Span:
    return replace(span, trained=(False, *(True,) * (len(span.ids) - 1)))


def _reply_mask(spans: Sequence[Span], used: Sequence[Span]) -> Tensor:
    """For each token trained in `used`, whether `spans` trains it."""
    flags = [
        reply
        for span, whole in zip(spans, used, strict=True)
        for reply, trained in zip(span.trained, whole.trained, strict=True)
        if trained
    ]
    return torch.tensor(flags, dtype=torch.bool)


HELD_OUT = "it stands among the validation conversations"
PATIENCE = 50
"""The run stops if more than this many lessons per batch element are left out."""


@dataclass
class CorpusStep:
    """Takes steps on conversations for a Loop."""

    loop: Loop
    stream: LessonStream
    encode: LessonEncoder
    held_out: Collection[str] = ()
    """`lesson_print` of validation conversations, which are not trained on."""
    skips: Skips = field(default_factory=Skips)
    """Counts skipped updates."""

    async def __call__(self, step: int) -> StepLine:
        config, policy = self.loop.config, self.loop.policy
        started = time.monotonic()
        self.loop.reporter.phase("update")
        batch = self.batch(config.sft_batch)
        learned = imitate(
            policy, self.loop.optimizer, batch.spans, config, self.skips, batch.sources
        )
        seconds = round(time.monotonic() - started, 3)
        return StepLine(step=step, learned=learned, lessons=batch.counts(), train_seconds=seconds)

    def batch(self, size: int) -> Batch:
        """The next `size` usable lessons; DataError if too many are left out before that."""
        batch, before = Batch(), self.encode.shortened
        while (missing := size - batch.learned.total()) > 0:
            for lesson in self.stream.take(missing):
                batch.add(lesson, HELD_OUT if self.is_held_out(lesson) else self.encode(lesson))
            if batch.left_out.total() > PATIENCE * size:
                raise nothing_learned(", ".join(sorted(batch.names)), batch.left_out)
        batch.shortened = self.encode.shortened - before
        return batch

    def is_held_out(self, lesson: Lesson) -> bool:
        return bool(self.held_out) and lesson_print(lesson) in self.held_out


@dataclass
class Batch:
    """The lessons of a step as sequences, and counts of those left out."""

    spans: list[Span] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """Source of each sequence."""
    learned: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    names: set[str] = field(default_factory=set)
    shortened: int = 0

    def add(self, lesson: Lesson, spans: Sequence[Span] | str) -> None:
        """Add a lesson's sequences, or the reason why it has none."""
        self.names.add(lesson.source)
        if isinstance(spans, str):
            self.left_out[spans] += 1
            return
        self.spans += spans
        self.sources += [lesson.source] * len(spans)
        self.learned[lesson.source] += 1

    def counts(self) -> LessonCounts:
        return LessonCounts(
            learned=dict(sorted(self.learned.items())),
            left_out=dict(sorted(self.left_out.items())),
            shortened=self.shortened,
        )


def nothing_learned(source: str, reasons: Mapping[str, int]) -> DataError:
    """The error for sources without usable lessons."""
    listed = "; ".join(f"{reason} ({n} times)" for reason, n in Counter(reasons).most_common(3))
    return DataError(
        f"No conversation in '{source}' can be used for training.",
        f"Reasons: {listed or 'none of them has a reply of the trained side'}.",
        "Check one with soul data show FILE --side human; then remove the source, or choose "
        "another --side, more --lesson-tokens or a model with a longer context.",
    )


# --- validation -----------------------------------------------------------------------------------


@dataclass
class Validation:
    """Losses on fixed conversations by source, in nats per trained token, with intervals over
    people."""

    config: TrainConfig
    policy: Policy
    spans: dict[str, list[Span]]
    lessons: dict[str, int] = field(default_factory=dict)
    """Source → number of its conversations."""
    people: dict[str, list[str]] = field(default_factory=dict)
    """Source → the person of each sequence; without them there is no interval."""

    def __call__(self, step: int) -> dict[str, Any]:
        """The fields of a StepLine after `step` if due: before the first step, every `eval_every`
        steps and after the last; else empty."""
        done, every = step + 1, self.config.eval_every
        if done not in (0, self.config.steps) and (every is None or done % every):
            return {}
        losses = self.losses()
        ends = {"valid_low": "ci_low", "valid_high": "ci_high"}
        return {
            "valid": {name: one.mean for name, one in losses.items()},
            **{kind: {name: value for name, one in losses.items()
                      if (value := getattr(one, end)) is not None} for kind, end in ends.items()},
        }  # fmt: skip

    def losses(self) -> dict[str, Estimate]:
        """Source → loss; its mean is None if it is not finite."""
        budget = self.config.tokens_per_batch
        return {
            name: nll_sums(self.policy, spans, budget, self.people.get(name, ())).estimate()
            for name, spans in self.spans.items()
        }


@on_all_ranks
@torch.no_grad()
def nll_sums(
    policy: Policy, spans: Sequence[Span], budget: int | None, people: Sequence[str] = ()
) -> LossSums:
    """Sums of −log π of the trained tokens in nats, by the person of each sequence."""
    sums, world = LossSums(), ranks()
    for pack in policy.divided(spans, budget):
        tokens = sum(span.n_trained for span in pack.spans)
        # Unlike Policy.score, this does not compute entropies.
        scored = imitation_loss(policy, pack, torch.ones(tokens, device=policy.device))
        sums.add(
            -scored.log_prob, scored.owner, [people[i] if people else "" for i in pack.indices]
        )
    world.imbalance()  # that of a validation belongs to no step
    sums, *others = world.gather(sums)
    for there in others:
        sums.take(there)
    return sums
