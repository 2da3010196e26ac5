"""Supervised training: its steps, what it is measured by on the way, and what it comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from soulkit.eval.costs import calls_by_task
from soulkit.eval.provenance import keep_provenance, note_calls
from soulkit.eval.remarks import with_calls
from soulkit.eval.summary import Cell
from soulkit.metrics.intervals import estimate
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.roles.players import Players
from soulkit.runs.records import newest_dev
from soulkit.train.material.assemble import Material, ServePlayer
from soulkit.train.sft.corpus import Validation
from soulkit.train.sft.corpus_run import (
    lesson_totals,
    loss_cells,
    rows_without_use,
    supervision,
    unmeasured,
    validation_totals,
)
from soulkit.train.sft.lessons import SupervisedStep, dev_spans
from soulkit.train.sft.measures import make_measures
from soulkit.train.sft.mixsd import read_written
from soulkit.train.sft.probe import Reinforce
from soulkit.train.sft.samples import Samples
from soulkit.train.state.held_out import with_dev
from soulkit.train.state.lines import StepLine, read_step_lines
from soulkit.train.state.loop import Loop, Measure, Show, nothing_held_out
from soulkit.train.state.players import training_provenance
from soulkit.train.state.skips import Skips
from soulkit.train.state.stops import stop_ended, with_stops
from soulkit.train.state.summary import LAST_STEPS, TrainSummary


async def supervise(
    loop: Loop, material: Material, show: Show, say: Callable[[str], None], reinforce: Reinforce,
    serve: ServePlayer | None = None,
) -> TrainSummary:  # fmt: skip
    """Take the steps of supervised training: on gold episodes, or on conversations. `reinforce`
    trains its probes, `serve` makes players behind vLLM servers."""
    stop_ended(loop)
    step: Callable[[int], Awaitable[StepLine]]
    if material.corpus is not None:
        step, validate = supervision(loop, material.corpus)
        for remark in unmeasured(material.corpus, validate):
            say(remark)
    else:
        step = SupervisedStep(loop, material.pool, Skips.of(loop.run.metrics))
        rows = dict(Counter(task.name for task, _ in material.dev))
        validate = Validation(loop.config, loop.policy, dev_spans(material.dev, loop.policy), rows)
    shown, samples = with_stops(loop, show), Samples.of(loop, material, say)
    if material.measured is None:
        measure = with_samples(samples, nothing_held_out)
        await loop.run_all(step, shown, measure, validate=validate)
        return supervised_summary(loop, material, validate.lessons)
    measures = make_measures(loop, material.measured, reinforce, say, serve)
    try:
        await hold_roll(loop, material.measured, measures.players, say)
        measure = with_samples(samples, measures.score)
        await loop.run_all(step, shown, measure, validate, measures.probe)
    finally:
        await measures.close()
    with Ledger(loop.run.ledger_path) as ledger:
        paid = ledger.totals()
        measured = material.measured
        tasks = {row.id: task.name for task, row in (*measured.pool, *measured.dev)}
        calls = calls_by_task(ledger, tasks)
    dropped = with_calls({}, calls)
    note_calls(loop.run.path, calls, dropped)
    summary = replace(
        supervised_summary(loop, material, validate.lessons), dropped_settings=dropped,
        cost=paid["cost"], unpriced_calls=paid["unpriced"],
        probes={str(line.step + 1): line.probe
                for line in read_step_lines(loop.run.metrics) if line.probe},
    )  # fmt: skip
    played = newest_dev(loop.run.path, light=True)
    return with_dev(summary, played, material.measured.tasks.values())


def with_samples(samples: Samples | None, measure: Measure) -> Measure:
    """`measure`, and the held-out conversations that are continued for readers."""
    if samples is None:
        return measure

    async def both(step: int) -> Mapping[str, float | None]:
        await samples.after(step)
        return await measure(step)

    return both


async def hold_roll(
    loop: Loop, measured: Material, players: Players, say: Callable[[str], None]
) -> None:
    """Note who plays on which rows, and ask whether they are there, before the first step."""
    record = training_provenance(measured.config, players, measured, loop.policy)
    keep_provenance(loop.run, record)
    if loop.step < loop.config.steps:
        players.say = say
        await players.roll_call.hold()


def supervised_summary(
    loop: Loop, material: Material, validated: Mapping[str, int]
) -> TrainSummary:
    """The loss over the last steps, one cell for every task of the mixture, or for every source of
    conversations; what was measured on others of them stands beside it."""
    config, lines = loop.config, read_step_lines(loop.run.metrics)
    losses = [line.learned.loss for line in lines]
    last = [loss for loss in losses if loss is not None][-LAST_STEPS:]
    mean = estimate(last, range(len(last)))
    cell = Cell(
        mean=mean.mean, ci_low=mean.ci_low, ci_high=mean.ci_high, n_scored=len(last), n=len(last)
    )
    return TrainSummary(
        command="train sft",
        model=config.model,
        protocol=config.protocol,
        seconds=loop.seconds,
        tasks={name: {"loss": cell} for name in config.tasks} or loss_cells(lines),
        suite=config.suite or "",
        left_out=material.left_out,
        steps=loop.step,
        summary_steps=len(last),
        validation=validation_totals(lines, validated),
        lessons=lesson_totals(lines),
        unusable=rows_without_use(material.corpus),
        written=read_written(loop.run.path),
    )
