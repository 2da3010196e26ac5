"""What a training on conversations has that one on tasks has not: its checks, prints and summary.

`train` of run.py does the rest for both: policy, optimizer, checkpoints, tracker, skips, threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from soulkit.data.corpora.lesson import Lesson
from soulkit.errors import ConfigError
from soulkit.eval.summary import Cell
from soulkit.metrics.intervals import estimate
from soulkit.models.local.sampler import context_limit
from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import Policy
from soulkit.train.material.conversations import Corpus
from soulkit.train.objectives.sequences import Span
from soulkit.train.sft.corpus import CorpusStep, Validation, nothing_learned
from soulkit.train.sft.encode import LessonEncoder
from soulkit.train.state.lines import LessonCounts, StepLine
from soulkit.train.state.loop import Loop
from soulkit.train.state.skips import Skips
from soulkit.train.state.summary import LAST_STEPS, ValidationTotals

LOOKED_AT = 50
"""Lessons of each source that are encoded before the start: one of them must fit."""
WORDS_OF = 2000
"""Lessons of each source whose words a tiny model gets."""


def encoder_for(policy: Policy, config: TrainConfig) -> LessonEncoder:
    """What makes sequences of lessons, within `lesson_tokens` and the model's context; ConfigError
    when the first is more than the second."""
    context = context_limit(policy.model, None)
    asked_for = config.lesson_tokens
    if asked_for and context and asked_for > context:
        raise beyond_context(asked_for, context, config)
    return LessonEncoder(policy.renderer, policy.encode_reply, asked_for or context)


def beyond_context(tokens: int, context: int, config: TrainConfig) -> ConfigError:
    """The error of lessons that are longer than a model reads."""
    preset = f" (preset {config.preset})" if config.preset else ""
    return ConfigError(
        f"Lessons of {tokens:,} tokens were asked for{preset}, and the context of "
        f"'{config.model}' holds {context:,}.",
        "Beyond it the model has no positions that mean anything.",
        f"Write --lesson-tokens {context}: older turns then leave; or take a model with more "
        "context.",
    )


def check_corpus(config: TrainConfig, policy: Policy, corpus: Corpus) -> None:
    """DataError for a source, learned or measured, of which no lesson can be used."""
    encode = encoder_for(policy, config)
    for name, lessons in (*corpus.samples.items(), *corpus.validation.items()):
        reasons: Counter[str] = Counter()
        for lesson in lessons[:LOOKED_AT]:
            spans = encode(lesson)
            if not isinstance(spans, str):
                break
            reasons[spans] += 1
        else:
            raise nothing_learned(name, reasons)


def words_of_corpus(corpus: Corpus) -> list[str]:
    """Texts with the words that a tiny model has to know, of the first lessons of each source."""
    texts = {segment.text for lesson in corpus.lessons for segment in lesson.segments}
    for lessons in corpus.stream.heads(WORDS_OF).values():
        texts |= {segment.text for lesson in lessons for segment in lesson.segments}
    return sorted(texts)


def supervision(loop: Loop, corpus: Corpus) -> tuple[CorpusStep, Validation]:
    """What takes the steps of a run on conversations, and what measures it."""
    config, policy = loop.config, loop.policy
    encode = encoder_for(policy, config)
    step = CorpusStep(loop, corpus.stream, encode, corpus.held_out, Skips.of(loop.run.metrics))
    spans, counts = {}, {}
    for name, lessons in corpus.validation.items():
        fitting = encoded(lessons, encode)
        spans[name], counts[name] = [span for one in fitting for span in one], len(fitting)
    return step, Validation(config, policy, spans, counts)


def encoded(lessons: Sequence[Lesson], encode: LessonEncoder) -> list[list[Span]]:
    """The sequences of those lessons that fit, lesson by lesson."""
    several = [encode(lesson) for lesson in lessons]
    return [spans for spans in several if not isinstance(spans, str)]


def unmeasured(corpus: Corpus, validation: Validation) -> list[str]:
    """What is said of validation conversations that cannot be measured."""
    lost = {name: len(some) - validation.lessons[name] for name, some in corpus.validation.items()}
    return [
        f"{count} of the {len(corpus.validation[name])} validation conversations in '{name}' "
        "cannot be measured: too long, or refused by the model's chat template"
        for name, count in lost.items()
        if count
    ]


# --- what is recorded -----------------------------------------------------------------------------


def loss_cells(lines: Sequence[StepLine]) -> dict[str, dict[str, Cell]]:
    """Source → its training loss over the last steps that had some of it, with its interval."""
    by_source: dict[str, list[float]] = {}
    for line in lines:
        for name, loss in line.learned.losses.items():
            by_source.setdefault(name, []).append(loss)
    cells = {}
    for name, losses in sorted(by_source.items()):
        last = losses[-LAST_STEPS:]
        mean = estimate(last, range(len(last)))
        cells[name] = {"loss": Cell(mean=mean.mean, ci_low=mean.ci_low, ci_high=mean.ci_high,
                                    n_scored=len(last), n=len(last))}  # fmt: skip
    return cells


def lesson_totals(lines: Sequence[StepLine]) -> LessonCounts:
    """What a whole run learned and left out."""
    learned: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for line in lines:
        learned.update(line.lessons.learned)
        left_out.update(line.lessons.left_out)
    shortened = sum(line.lessons.shortened for line in lines)
    return LessonCounts(learned=dict(learned), left_out=dict(left_out), shortened=shortened)


def validation_totals(
    lines: Sequence[StepLine], lessons: Mapping[str, int]
) -> ValidationTotals | None:
    """The first, the newest and the lowest loss of each of `lessons`; None without any."""
    measured = [line for line in lines if line.valid]
    if not measured:
        return None
    return ValidationTotals.of([(line.step, line.valid) for line in measured], lessons)


def rows_without_use(corpus: Corpus | None) -> dict[str, dict[str, int]]:
    """Source → reason → rows that are no lesson, where there are any."""
    unusable = corpus.stream.unusable if corpus else {}
    return {source: reasons for source, reasons in unusable.items() if reasons}
