"""Evaluations of base, experts and generalist on the same held-out rows, and their gains.

    OUT/measured/base/TASK  ·  OUT/measured/expert/TASK  ·  OUT/measured/generalist/TASK

All runs are greedy with one reply per row, so that only the weights differ. Gains over the base use
the task's headline and only rows that have a score on all sides. The headline is the mean score, or
a metric over all rows, whose interval comes from leaving out one cluster at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from soulkit.data.rows import first_rows
from soulkit.distill.config import DistillConfig
from soulkit.distill.experts import Expert, common_base
from soulkit.distill.sample import (
    folder_weights,
    named_rows,
    refuse_other_weights,
    sample_config,
)
from soulkit.errors import RunError, UserError
from soulkit.eval.comparison.contrasts import (
    HEADLINE,
    VALUE,
    Contrast,
    TaskPair,
    contrast,
    episode_key,
    lost_in_all,
    shared_batches,
)
from soulkit.eval.config import EvalConfig
from soulkit.eval.results.batch_statistics import NOTHING
from soulkit.eval.results.recorded import recorded_cells, recorded_tasks
from soulkit.eval.results.summary import Cell, cluster_of, metric_values, recorded_summary
from soulkit.eval.run.actor import local_model
from soulkit.eval.run.runner import prepare, run_eval
from soulkit.metrics.intervals import Interval
from soulkit.metrics.retention import Gains, Retention, batch_gains, paired_gains, retention
from soulkit.models.local.footprint import free_memory
from soulkit.models.vllm.manager import VllmServers
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run, is_run
from soulkit.runs.records import drafts, load_records
from soulkit.tasks.kit.base import Task
from soulkit.types import Record

if TYPE_CHECKING:
    from soulkit.models.local.sampler import LocalModel


MEASURED, GENERALIST = "measured", "generalist"
MODEL = "model"
ABILITY, ABILITY_ROWS = "instructions", "synth:40"
"""The task that measures general ability, and its rows."""

Side = Literal["base", "expert", "generalist"]
SIDES: tuple[Side, ...] = ("base", "expert", "generalist")

_GREEDY: dict[str, Any] = {
    "split": "test", "repeats": 1, "temperature": 0.0, "where": {}, "example": (),
}  # fmt: skip
"""Settings that differ from sampling; --where and --example only select training rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One evaluation that a report needs."""

    side: Side
    task: str
    config: EvalConfig
    folder: Path

    @property
    def finished(self) -> bool:
        return is_complete(self.folder)


def is_complete(folder: Path) -> bool:
    """Whether every row of the evaluation in a folder has a score."""
    try:
        summary = recorded_summary(folder)
    except UserError:
        return False
    return is_run(folder) and 0 < summary.n == summary.n_scored


def measured_folder(out: Path, side: Side, task: str) -> Path:
    """The run of one side on one task."""
    return out / MEASURED / side / task


def generalist_weights(out: Path) -> Path:
    """Folder in which training saves the generalist's adapter."""
    return out / GENERALIST / MODEL


def measured_tasks(config: DistillConfig, experts: Sequence[Expert]) -> list[str]:
    """The experts' tasks with held-out rows."""
    return [
        expert.task for expert in experts
        if config.held_out_source(expert.task) or (expert.rows and expert.rows.held_out)
    ]  # fmt: skip


def unmeasured_words(config: DistillConfig, experts: Sequence[Expert]) -> str:
    """A remark on tasks without held-out rows; empty if there are none."""
    there = measured_tasks(config, experts)
    lacking = [expert.task for expert in experts if expert.task not in there]
    if not lacking:
        return ""
    return (
        f"without held-out rows, no retention is measured: {', '.join(lacking)} "
        "(add --held-out TASK=ROWS)"
    )


def measurements(
    config: DistillConfig, experts: Sequence[Expert], out: Path
) -> list[Measurement]:  # fmt: skip
    """Every evaluation that the report needs; the generalist's come last."""
    base, weights = common_base(experts, config), generalist_weights(out)
    there = [expert for expert in experts if expert.task in measured_tasks(config, experts)]
    beside = config.retention and ABILITY not in [expert.task for expert in there]
    of_base = _here(base, None)
    of_generalist = _here(base, str(weights))

    def of_side(side: Side, actor: dict[str, Any]) -> list[Measurement]:
        made = [_on_held_out(config, one) for one in there]
        made += [_on_ability(config, experts[0])] if beside else []
        return [_measurement(out, side, one.model_copy(update=actor)) for one in made]

    with_experts = [_measurement(out, "expert", _on_held_out(config, one)) for one in there]
    return [*of_side("base", of_base), *with_experts, *of_side("generalist", of_generalist)]


def _measurement(out: Path, side: Side, config: EvalConfig) -> Measurement:
    task = config.tasks[0]
    return Measurement(side=side, task=task, config=config,
                       folder=measured_folder(out, side, task))  # fmt: skip


def _here(model: str, adapter: str | None) -> dict[str, Any]:
    """Settings for a local model instead of an expert, which may be served."""
    served = ("base_url", "api_key_env", "headers", "api_version", "price_in", "price_out")
    fields = EvalConfig.model_fields
    usual = {name: fields[name].get_default(call_default_factory=True) for name in served}
    return {**usual, "kind": "local", "model": model, "adapter": adapter}


def _on_held_out(config: DistillConfig, expert: Expert) -> EvalConfig:
    rows = {"data": {expert.task: config.held_out_source(expert.task)},
            "limit": config.held_out_limit}  # fmt: skip
    if expert.rows is not None and expert.rows.held_out:
        rows = named_rows(expert, first_rows(expert.rows.held_out, config.held_out_limit, str))
    return sample_config(config, expert).model_copy(update={**_GREEDY, **rows})


def _on_ability(config: DistillConfig, expert: Expert) -> EvalConfig:
    """The evaluation of general ability, without players and options."""
    return sample_config(config, expert).model_copy(update={
        **_GREEDY, "tasks": (ABILITY,), "data": {ABILITY: ABILITY_ROWS}, "option": {},
        "task_players": {}, "hack_penalty": None, "assistant": None, "limit": None,
    })  # fmt: skip


# -- playing ---------------------------------------------------------------------------------------


def measure(
    config: DistillConfig, experts: Sequence[Expert], out: Path, *,
    limited: Callable[[Measurement], EvalConfig] = lambda part: part.config,
    servers: VllmServers | None = None, reporter: Reporter = SILENT,
) -> None:  # fmt: skip
    """Play the missing measurements. `limited` limits each run's cost to the rest of the budget.

    RunError without a generalist, ConfigError for problems with rows, players or models, before
    anything is played.
    """
    parts = measurements(config, experts, out)
    if not generalist_weights(out).is_dir():
        raise RunError(
            f"There is no generalist in '{out}' yet.",
            "The report compares it with base and experts.",
            "Run soul distill train first, or soul distill without a stage for all stages.",
        )
    left = [part for part in parts if not _reused(part)]
    for part in left:
        prepare(part.config)
    if len(left) < len(parts):
        reporter.note(f"{len(parts) - len(left)} of {len(parts)} measurements are already finished")
    last = LastLoaded()
    for part in left:
        reporter.note(f"measuring {part.side} on {part.task}")
        run_eval(
            limited(part), part.folder, load=last.load, servers=servers, reporter=reporter
        )  # fmt: skip


class LastLoaded:
    """Loads a model once for consecutive runs with it, and holds only one model at a time."""

    def __init__(self) -> None:
        self._name: tuple[str, str | None] | None = None
        self._model: LocalModel | None = None

    def load(self, config: EvalConfig) -> LocalModel:
        """The model of this configuration; all of them may only differ in tasks and model names."""
        name = config.model, config.adapter
        if self._model is None or self._name != name:
            self._model = None
            free_memory()
            self._name, self._model = name, local_model(config)
            return self._model
        self._model = self._model.anew()
        return self._model


def _reused(part: Measurement) -> bool:
    """Whether the run is finished; RunError if it has other settings or weights."""
    if not is_run(part.folder):
        return False
    config = part.config
    Run.open(part.folder, config.command, config.identity())
    if config.kind == "local":
        weights = folder_weights(config.model, config.adapter)
        refuse_other_weights(part.folder, weights, f"the {part.side}")
    return part.finished


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSide:
    """The results of one side's run on one task."""

    records: Sequence[Record]
    """Only drafts."""
    cells: Mapping[str, Cell]
    live: Task | None


def read_side(folder: Path, task: str) -> MeasuredSide:
    """The results of the run in `folder`, with the task's code if that is trusted."""
    records = drafts(load_records(folder / "episodes.jsonl", light=True))
    return MeasuredSide(
        records=[record for record in records if record.task == task],
        cells=recorded_cells(folder).get(task, {}), live=recorded_tasks(folder, [task]).get(task),
    )  # fmt: skip


def common_episodes(sides: Sequence[MeasuredSide]) -> list[MeasuredSide]:
    """The sides' results; an episode that is unscored on one side counts as lost on all sides."""
    episodes = lost_in_all([side.records for side in sides])
    return [replace(side, records=same) for side, same in zip(sides, episodes, strict=True)]


def side_difference(
    task: str, a: MeasuredSide, b: MeasuredSide, metric: str = HEADLINE
) -> Contrast:
    """The difference B − A in a metric; DataError if A or B lacks the metric."""
    return contrast(_pair(task, a, b), metric)


def _pair(task: str, a: MeasuredSide, b: MeasuredSide) -> TaskPair:
    return TaskPair(task=task, a=a.records, b=b.records, live_a=a.live, live_b=b.live,
                    recorded=(a.cells, b.cells))  # fmt: skip


def retained_gain(
    task: str, base: MeasuredSide, expert: MeasuredSide, generalist: MeasuredSide
) -> Retention:
    """The share of the expert's gain in the headline that the generalist keeps."""
    sides = (base, expert, generalist)
    metric = side_difference(task, base, generalist).metric
    scale = _pair(task, base, generalist).scale(metric)
    if metric == VALUE:
        return retention(_of_episodes(sides, scale))
    gains = _of_batches(metric, sides, scale)
    return retention(gains, method="fieller-jackknife")


def _of_episodes(sides: Sequence[MeasuredSide], scale: Interval | None) -> Gains | None:
    clusters: dict[Hashable, Hashable] = {
        episode_key(record): cluster_of(record) for side in sides for record in side.records
    }
    values: list[dict[Hashable, float | None]] = [
        {episode_key(record): value for record, value in metric_values(side.records, VALUE)}
        for side in sides
    ]
    base, expert, generalist = values
    return paired_gains(base, expert, generalist, clusters, scale=scale)


def _of_batches(
    metric: str, sides: Sequence[MeasuredSide], scale: Interval | None
) -> Gains | None:  # fmt: skip
    batches = shared_batches([(side.live, side.records, ()) for side in sides])
    clusters = NOTHING.union(*(batch.of_metric(metric).clusters for batch in batches))
    batches = [batch.within(clusters) for batch in batches]
    lacking = {one.missing for batch in batches if (one := batch.metrics().get(metric))}
    if len(batches) < len(sides) or len({b.n_parts for b in batches}) > 1 or len(lacking) > 1:
        return None
    shared = sum(record.score.scored for record in sides[0].records)
    base, expert, generalist = (partial(batch.value, metric) for batch in batches)
    gains = batch_gains(
        base, expert, generalist, batches[0].n_parts, n_shared=shared, scale=scale
    )  # fmt: skip
    return None if gains is None else replace(gains, n_clusters=batches[0].n_clusters)
