"""What a training on conversations will take, before anything is loaded, and whether it can fit.

Rows are counted, tokens are estimated: the lessons of a sample are written as the model reads them,
by its own tokenizer where that is a file beside it, else by their words. Memory and time are those
of `models/local/footprint.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soulkit.data.corpora.lessons import Lesson
from soulkit.errors import ConfigError
from soulkit.eval.planning import assumed, number_bytes
from soulkit.models.local.memory import Footprint, context_of, device_speed, footprint, free_bytes
from soulkit.play.plan import TOKENS_PER_WORD, Machine
from soulkit.train.config import TOKENS_PER_BATCH, TrainConfig
from soulkit.train.setup.conversations import Corpus
from soulkit.train.sft.run import beyond_context

PER_MESSAGE = 5
"""Tokens that a chat template puts around a message, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """What is known of a source."""

    source: str
    rows: int | None
    """None where nobody knows."""
    ratio: float
    tokens_per_lesson: float
    """Mean over the sample, cut to the limit of a lesson."""
    learned_share: float
    """Of its tokens, those with a loss."""

    @property
    def lessons_per_pass(self) -> float | None:
        """Lessons of one pass of the mixture."""
        return None if self.rows is None else self.rows * self.ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusPlan:
    """What `--dry-run` and `soul plan` print of a training on conversations."""

    sources: tuple[SourcePlan, ...]
    steps: int
    batch: int
    tokens: int
    """That the whole run reads, about."""
    learned_tokens: int
    validation: int
    """Conversations that are measured each time."""
    measurements: int
    machine: Machine | None

    @property
    def steps_per_pass(self) -> int | None:
        """Steps until every source was taken `ratio` times; None where a size is not known."""
        lessons = [one.lessons_per_pass for one in self.sources]
        known = [one for one in lessons if one is not None]
        return -(-round(sum(known)) // self.batch) if len(known) == len(lessons) else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "steps_per_pass": self.steps_per_pass}


def corpus_plan(config: TrainConfig, corpus: Corpus) -> CorpusPlan:
    """The plan of a run; ConfigError where its preset cannot fit."""
    counter = token_counter(config.model)
    limit = config.lesson_tokens or context_of(Path(config.model).expanduser())
    sources = tuple(
        _source_plan(label, corpus, one.ratio, counter, limit)
        for label, one in zip(corpus.samples, config.corpora, strict=True)
    )
    weights = [one.lessons_per_pass or 1.0 for one in sources]
    lessons = config.steps * config.sft_batch
    mean = _mean([one.tokens_per_lesson for one in sources], weights)
    learned = _mean([one.tokens_per_lesson * one.learned_share for one in sources], weights)
    measured = sum(map(len, corpus.validation.values()))
    turns = max(config.steps // config.eval_every, 1) if config.eval_every else 1
    return CorpusPlan(
        sources=sources,
        steps=config.steps,
        batch=config.sft_batch,
        tokens=round(lessons * mean),
        learned_tokens=round(lessons * learned),
        validation=measured,
        measurements=turns if measured else 0,
        machine=_machine(config, lessons * mean + turns * measured * mean / 3),
    )


def _source_plan(
    label: str, corpus: Corpus, ratio: float, counter: TokenCounter, limit: int | None
) -> SourcePlan:
    sizes = [counter.sizes(lesson) for lesson in corpus.samples[label]]
    total = sum(min(size, limit or size) for size, _ in sizes)
    learned = sum(part for _, part in sizes) / max(sum(size for size, _ in sizes), 1)
    return SourcePlan(
        source=label, rows=corpus.stream.sizes[label], ratio=ratio,
        tokens_per_lesson=total / max(len(sizes), 1), learned_share=learned,
    )  # fmt: skip


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


# --- tokens ---------------------------------------------------------------------------------------


class TokenCounter:
    """Counts the tokens of texts, without torch: by a tokenizer's file, else by words."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        if self._tokenizer is None:
            return round(len(text.split()) * TOKENS_PER_WORD)
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def sizes(self, lesson: Lesson) -> tuple[int, int]:
        """(tokens, learned tokens) of a lesson, about."""
        counts = [len(s.token_ids) or self.count(s.text) for s in lesson.segments]
        learned = sum(n + 1 for n, one in zip(counts, lesson.trained, strict=True) if one)
        return sum(counts) + PER_MESSAGE * len(counts), learned


def token_counter(model: str) -> TokenCounter:
    """That of the model in a folder, as far as its tokenizer is one file there."""
    file = Path(model).expanduser() / "tokenizer.json"
    if not file.is_file():
        return TokenCounter()
    from tokenizers import Tokenizer

    return TokenCounter(Tokenizer.from_file(str(file)))


# --- memory and time ------------------------------------------------------------------------------


def _machine(config: TrainConfig, tokens: float) -> Machine | None:
    model = footprint(Path(config.model).expanduser())
    if model is None:
        return None
    kind, speed = device_speed(config.device)
    words = assumed(model, kind, speed.flops)
    seconds = model.seconds(0, 0, tokens, 1, speed)
    return Machine(memory=training_memory(config, model), seconds=seconds, words=words)


def training_memory(config: TrainConfig, model: Footprint) -> int:
    """Bytes of weights, gradients, AdamW's moments and the activations of the largest pass."""
    kind, _ = device_speed(config.device)
    itemsize = 4 if config.full else number_bytes(config.dtype, kind, model)
    budget = config.tokens_per_batch or TOKENS_PER_BATCH[kind]
    # A lesson that is longer than the budget is a pass of its own.
    tokens = max(budget, config.lesson_tokens or 0)
    if config.activation_checkpointing:  # one layer's activations, and the input of every layer
        tokens = round(tokens * (1 / model.layers + 1 / 14))
    extra = model.training_bytes(tokens, config.lora.r, itemsize, config.full)
    # What is trained in full is among its weights already: 16 bytes hold the weight itself.
    return extra + (0 if config.full else model.parameters * itemsize)


def refuse_unfitting(config: TrainConfig) -> None:
    """ConfigError, with figures, where lessons are longer than the model's context, or where a
    preset needs more memory than its device has."""
    folder = Path(config.model).expanduser()
    context, model = context_of(folder), footprint(folder)
    if config.lesson_tokens and context and config.lesson_tokens > context:
        raise beyond_context(config.lesson_tokens, context, config)
    if config.preset is None or model is None:
        return
    needed, free = training_memory(config, model), free_bytes(config.device)
    if free is not None and needed > free:
        raise _too_large(config, needed, free)


def _too_large(config: TrainConfig, needed: int, free: int) -> ConfigError:
    what = "all weights" if config.full else "an adapter"
    ways = ["--lora trains an adapter"] if config.full else []
    ways += [] if config.activation_checkpointing else ["--activation-checkpointing keeps less"]
    return ConfigError(
        f"The preset {config.preset} cannot fit: training {what} of '{config.model}' on lessons of "
        f"{config.lesson_tokens:,} tokens takes about {_gib(needed)}, and {_gib(free)} are free.",
        "Weights, gradients, AdamW's two moments and the activations of one lesson have to be "
        "there at once.",
        f"{'; '.join([*ways, 'fewer --lesson-tokens'])}; or take a smaller model or a larger "
        "device.",
    )


def _gib(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB"


def learned_text(plan: CorpusPlan) -> Iterable[str]:
    """The lines of a plan below its table."""
    per_pass = plan.steps_per_pass
    passes = f", {plan.steps / per_pass:.2f} passes over the rows" if per_pass else ""
    yield f"{plan.steps:,} steps of {plan.batch:,} conversations{passes}"
    yield (
        f"about {plan.tokens:,} tokens, {plan.learned_tokens:,} of them with a loss: an estimate "
        "from the first conversations of each source"
    )
    if plan.validation:
        times = "once" if plan.measurements == 1 else f"{plan.measurements} times"
        yield f"{plan.validation:,} validation conversations, measured {times}"
