"""Supervised training: checks, steps, measurements and summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from soulkit.data.corpora.lessons import Lesson
from soulkit.eval.results.summary import Cell
from soulkit.eval.results.warnings import calls_by_task, with_calls
from soulkit.eval.run.provenance import note_calls, write_conditions
from soulkit.metrics.intervals import estimate
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.local.sampler import context_limit
from soulkit.models.players.players import Players
from soulkit.runs.records import newest_dev
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.objectives.sequences import Span
from soulkit.train.setup.data import ServePlayer
from soulkit.train.setup.rows import Corpus, TrainingData, beyond_context
from soulkit.train.sft.encode import LessonEncoder
from soulkit.train.sft.exposure import ExposureLimit
from soulkit.train.sft.measures import Reinforce, Samples, make_measures
from soulkit.train.sft.mixsd import read_written
from soulkit.train.sft.steps import (
    CorpusStep,
    SupervisedStep,
    Validation,
    dev_spans,
    nothing_learned,
)
from soulkit.train.state.fingerprint import with_players
from soulkit.train.state.loop import Loop, nothing_held_out
from soulkit.train.state.metrics import LessonCounts, StepLine, read_step_lines
from soulkit.train.state.stops import Skips
from soulkit.train.state.summary import (
    LAST_STEPS,
    TrainSummary,
    ValidationTotals,
    first_and_last,
    with_dev,
)

LOOKED_AT = 50
"""Number of lessons per source that are encoded before the start; one of them must fit."""
WORDS_OF = 2000
"""Number of lessons per source whose words a tiny model learns."""


def encoder_for(policy: Policy, config: TrainConfig) -> LessonEncoder:
    """The encoder of lessons, limited to `lesson_tokens` or the model's context; ConfigError if the
    former exceeds the latter."""
    context = context_limit(policy.model, None)
    asked_for = config.lesson_tokens
    if asked_for and context and asked_for > context:
        raise beyond_context(asked_for, context, config)
    return LessonEncoder(policy.renderer, policy.encode_reply, asked_for or context)


def check_corpus(config: TrainConfig, policy: Policy, corpus: Corpus) -> None:
    """DataError for a training or validation source without usable lessons."""
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


def corpus_texts(corpus: Corpus) -> list[str]:
    """Texts of the first lessons of each source, with the words that a tiny model must know."""
    texts = {segment.text for lesson in corpus.lessons for segment in lesson.segments}
    for lessons in corpus.stream.heads(WORDS_OF).values():
        texts |= {segment.text for lesson in lessons for segment in lesson.segments}
    return sorted(texts)


def corpus_supervision(loop: Loop, corpus: Corpus) -> tuple[CorpusStep, Validation]:
    """The step and the validation of a run on conversations."""
    config, policy = loop.config, loop.policy
    encode = encoder_for(policy, config)
    step = CorpusStep(loop, corpus.stream, encode, corpus.held_out, Skips.of(loop.run.metrics))
    validation = Validation(config, policy, {}, {}, {})
    for name, lessons in corpus.validation.items():
        fitting = [(one, s) for one in lessons if not isinstance(s := encode(one), str)]
        validation.spans[name] = [span for _, spans in fitting for span in spans]
        validation.people[name] = [one.person or one.key for one, spans in fitting for _ in spans]
        validation.lessons[name] = len(fitting)
    return step, validation


def encode_lessons(lessons: Sequence[Lesson], encode: LessonEncoder) -> list[list[Span]]:
    """The sequences of the lessons that fit, lesson by lesson."""
    several = [encode(lesson) for lesson in lessons]
    return [spans for spans in several if not isinstance(spans, str)]


def unmeasured_conversations(corpus: Corpus, validation: Validation) -> list[str]:
    """Remarks about validation conversations that cannot be measured."""
    lost = {name: len(some) - validation.lessons[name] for name, some in corpus.validation.items()}
    return [
        f"{count} of the {len(corpus.validation[name])} validation conversations in '{name}' "
        "cannot be measured: too long, or refused by the model's chat template"
        for name, count in lost.items()
        if count
    ]


# --- records --------------------------------------------------------------------------------------


def loss_cells(lines: Sequence[StepLine]) -> dict[str, dict[str, Cell]]:
    """Source → its training loss over the last steps that used it, with interval."""
    by_source: dict[str, list[float]] = {}
    for line in lines:
        for name, loss in line.learned.losses.items():
            by_source.setdefault(name, []).append(loss)
    return {name: {"loss": _loss_cell(losses)} for name, losses in sorted(by_source.items())}


def _loss_cell(losses: Sequence[float]) -> Cell:
    last = losses[-LAST_STEPS:]
    mean = estimate(last, range(len(last)))
    return Cell(
        mean=mean.mean, ci_low=mean.ci_low, ci_high=mean.ci_high, n_scored=len(last), n=len(last)
    )


def lesson_totals(lines: Sequence[StepLine]) -> LessonCounts:
    """Counts of trained and left-out lessons of the whole run."""
    learned: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for line in lines:
        learned.update(line.lessons.learned)
        left_out.update(line.lessons.left_out)
    shortened = sum(line.lessons.shortened for line in lines)
    return LessonCounts(learned=dict(learned), left_out=dict(left_out), shortened=shortened)


def validation_totals(lines: Sequence[StepLine], validation: Validation) -> ValidationTotals | None:
    """The first, newest and lowest validation loss by source; None without measurements."""
    measured = [line for line in lines if line.valid]
    if not measured:
        return None
    newest, (first, last) = measured[-1], first_and_last(line.valid for line in measured)
    known = [(name, loss) for line in measured for name, loss in line.valid.items()]
    lowest = {name: min(n for one, n in known if one == name and n is not None) for name in last}
    people = {name: len(set(several)) for name, several in validation.people.items()}
    low, high = (first_and_last([ends])[1] for ends in (newest.valid_low, newest.valid_high))
    return ValidationTotals(
        newest.step + 1, first, last, lowest, validation.lessons, people, low, high
    )


async def supervise(
    loop: Loop, material: TrainingData, reinforce: Reinforce, serve: ServePlayer | None = None
) -> TrainSummary:
    """Run supervised training on gold episodes or conversations. `reinforce` trains its probes,
    `serve` creates players on vLLM servers."""
    loop.refuse_ended()
    step: Callable[[int], Awaitable[StepLine]]
    if material.corpus is not None:
        step, validate = corpus_supervision(loop, material.corpus)
        loop.limit = ExposureLimit.of(loop.config, loop.run.path, loop.policy)
        for remark in unmeasured_conversations(material.corpus, validate):
            loop.reporter.note(remark)
    else:
        step = SupervisedStep(loop, material.pool, Skips.of(loop.run.metrics))
        rows = dict(Counter(task.name for task, _ in material.dev))
        validate = Validation(loop.config, loop.policy, dev_spans(material.dev, loop.policy), rows)
    samples = Samples.of(loop, material)
    measured = material.measured
    measures = make_measures(loop, measured, reinforce, serve) if measured else None

    async def measure(number: int) -> Mapping[str, float | None]:
        if samples is not None:
            await samples.after(number)
        return await measures.score(number) if measures else {}

    try:
        if measures is not None:
            await note_players(loop, measures.measured, measures.players)
        probe = measures.probe if measures else nothing_held_out
        await loop.run_all(step, measure, validate, probe)
    finally:
        if measures is not None:
            await measures.close()
    if measured is None:
        return supervised_summary(loop, material, validate)
    with Ledger(loop.run.ledger_path) as ledger:
        paid = ledger.totals()
        tasks = {row.id: task.name for task, row in (*measured.pool, *measured.dev)}
        calls = calls_by_task(ledger, tasks)
    dropped = with_calls({}, calls)
    note_calls(loop.run.path, calls, dropped)
    summary = replace(
        supervised_summary(loop, material, validate), dropped_settings=dropped,
        cost=paid["cost"], unpriced_calls=paid["unpriced"],
        probes={str(line.step + 1): line.probe
                for line in read_step_lines(loop.run.metrics) if line.probe},
    )  # fmt: skip
    played = newest_dev(loop.run.path, light=True)
    return with_dev(summary, played, measured.tasks.values())


async def note_players(loop: Loop, measured: TrainingData, players: Players) -> None:
    """Record the players and their rows, and check that they respond, before the first step."""
    conditions = with_players(loop.run, measured.config, players, measured, loop.policy)
    write_conditions(loop.run, conditions)
    if loop.step < loop.config.steps:
        await players.preflight.hold()


def supervised_summary(loop: Loop, material: TrainingData, validation: Validation) -> TrainSummary:
    """The loss over the last steps by task or source of conversations; the validation losses."""
    config, lines = loop.config, read_step_lines(loop.run.metrics)
    losses = [line.learned.loss for line in lines]
    unusable = material.corpus.stream.unusable if material.corpus else {}
    cell = _loss_cell([loss for loss in losses if loss is not None])
    return TrainSummary(
        command="train sft",
        model=config.model,
        protocol=config.protocol,
        seconds=loop.seconds,
        tasks={name: {"loss": cell} for name in config.tasks} or loss_cells(lines),
        suite=config.suite or "",
        left_out=material.left_out,
        steps=loop.step,
        summary_steps=cell.n,
        validation=validation_totals(lines, validation),
        lessons=lesson_totals(lines),
        unusable={source: dict(why) for source, why in unusable.items() if why},
        written=read_written(loop.run.path),
    )
