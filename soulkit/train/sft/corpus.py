"""Supervised steps on conversations: one side of them is learned, whatever else they hold.

A step takes the next lessons of the stream until `sft_batch` of them fit the model, and learns them
as the tasks' gold episodes are learned (`imitate`): a mean over the learned tokens of the batch.
What does not fit is counted by reason and replaced by the lesson that follows, so that every update
has its full batch. Lessons that also stand among the validation conversations are left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from soulkit.data.corpora.lesson import Lesson
from soulkit.data.corpora.stream import LessonStream
from soulkit.errors import DataError
from soulkit.train.config import TrainConfig
from soulkit.train.forward.imitation import imitation_loss
from soulkit.train.forward.policy import Policy
from soulkit.train.material.conversations import lesson_print
from soulkit.train.objectives.sequences import Span
from soulkit.train.sft.encode import LessonEncoder
from soulkit.train.sft.lessons import LossSums, imitate
from soulkit.train.state.lines import LessonCounts, StepLine
from soulkit.train.state.loop import Loop
from soulkit.train.state.skips import Skips

HELD_OUT = "it stands among the validation conversations"
PATIENCE = 50
"""Lessons that may be left out for one of a batch, until the run is stopped."""


@dataclass
class CorpusStep:
    """Takes steps on conversations for a Loop."""

    loop: Loop
    stream: LessonStream
    encode: LessonEncoder
    held_out: Collection[str] = ()
    """`lesson_print` of what is measured and must not be learned."""
    skips: Skips = field(default_factory=Skips)
    """Updates that could not be taken."""

    async def __call__(self, step: int) -> StepLine:
        config, policy = self.loop.config, self.loop.policy
        started = time.monotonic()
        self.loop.begin("update")
        batch = self.batch(config.sft_batch)
        learned = imitate(
            policy, self.loop.optimizer, batch.spans, config, self.skips, batch.sources
        )
        learned = replace(learned, sequences=len(batch.spans))
        seconds = round(time.monotonic() - started, 3)
        return StepLine(step=step, learned=learned, lessons=batch.counts(), train_seconds=seconds)

    def batch(self, size: int) -> Batch:
        """The next `size` lessons that can be learned; DataError when there seem to be none."""
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
    """The lessons of a step as sequences, and what was left out on the way."""

    spans: list[Span] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """Of each sequence."""
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
    """The error of a source whose lessons can none of them be learned from."""
    listed = "; ".join(f"{n} times {reason}" for reason, n in Counter(reasons).most_common(3))
    return DataError(
        f"Nothing in '{source}' can be learned from.",
        f"Of its conversations: {listed or 'there is none in which anybody is learned'}.",
        "Look at one with soul data show FILE --side human; leave the source out, or name another "
        "side, more --lesson-tokens or a model with more context.",
    )


# --- what is measured -----------------------------------------------------------------------------


@dataclass
class Validation:
    """The losses of fixed conversations, by source, in nats per learned token."""

    config: TrainConfig
    policy: Policy
    spans: Mapping[str, Sequence[Span]]
    lessons: Mapping[str, int] = field(default_factory=dict)
    """Source → conversations that its loss is a mean over."""

    def __call__(self, step: int) -> dict[str, float | None]:
        """After `step`, where its turn is: before the first, every `eval_every` steps and after the
        last."""
        done, every = step + 1, self.config.eval_every
        if done not in (0, self.config.steps) and (every is None or done % every):
            return {}
        return self.losses()

    def losses(self) -> dict[str, float | None]:
        """Source → loss; None where it is no finite number."""
        return {name: self._loss(spans) for name, spans in self.spans.items()}

    @torch.no_grad()
    def _loss(self, spans: Sequence[Span]) -> float | None:
        sums = LossSums()
        for pack in self.policy.packs(spans, self.config.tokens_per_batch):
            tokens = sum(span.n_trained for span in pack.spans)
            # Without the entropies that a score has beside it.
            scored = imitation_loss(
                self.policy, pack, torch.ones(tokens, device=self.policy.device)
            )
            sums.add(-scored.log_prob, scored.owner, [""] * len(pack.indices))
        loss = sums.means().get("", float("nan"))
        return loss if loss == loss and abs(loss) != float("inf") else None
