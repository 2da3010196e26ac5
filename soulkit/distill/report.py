"""Results of a distillation: gains, retention, regressions and gates.

They are computed from the recorded measurements; nothing is scored here. `OUT/summary.json` has the
result under `distillation`, next to the usual cells. Gates test interval bounds, like those of
`soul compare`:

    TASK/retention>=0.6       lower bound of the share of the expert's gain that is kept
    retention>=0.6            the same for every task
    mean/retention>=0.8       the mean over the tasks
    TASK>=-0.02               generalist minus base, in the headline
    TASK/METRIC<=0.05         … in another metric
    regressions<=0            results that are significantly worse than the base's
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from soulkit.distill.config import COMMAND, DistillConfig
from soulkit.distill.expert_rows import rows_and_players_words
from soulkit.distill.experts import Expert, common_base
from soulkit.distill.measure import (
    ABILITY,
    GENERALIST,
    SIDES,
    MeasuredSide,
    Side,
    common_episodes,
    measured_folder,
    measured_tasks,
    measurements,
    read_side,
    retained_gain,
    side_difference,
    unmeasured_words,
)
from soulkit.distill.sample import spent
from soulkit.distill.select import TaskSelection, written_selection
from soulkit.errors import ConfigError, DataError, RunError, did_you_mean
from soulkit.eval.comparison.comparability import differences, read_measured
from soulkit.eval.gates import Gate, GateResult, gate_result, paired_gate, parse_gate
from soulkit.eval.results.summary import (
    VALUE,
    Cell,
    Summary,
    headline,
    recorded_summary,
    summary_line,
)
from soulkit.metrics.comparisons import PairedDifference
from soulkit.metrics.retention import Retention, macro_retention
from soulkit.runs.conditions import with_provenance
from soulkit.runs.folder import Run, read_config
from soulkit.runs.jsonl import (
    DISTILLATION_SCHEMA,
    SCHEMA,
    form_of,
    read_value,
    refuse_other_schema,
)
from soulkit.tasks.kit.spec import Metric
from soulkit.train.state.metrics import read_step_lines

KEPT, MEAN, REGRESSIONS = "retention", "mean", "regressions"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateInputs:
    """The results that gates can test."""

    kept: Mapping[str, Retention]
    """Task → retained share of its expert's gain."""
    macro: Retention
    differences: Mapping[str, Mapping[str, PairedDifference]]
    """Task → metric (empty: the headline) → generalist minus base."""
    regressions: tuple[str, ...]
    spans: Mapping[str, Mapping[str, float]]
    """Task → metric → width of its scale, if it has one."""


def parse_gates(texts: Sequence[str], tasks: Sequence[str]) -> tuple[Gate, ...]:
    """The parsed gates; ConfigError if one tests a result that is not measured."""
    gates = tuple(parse_gate(text) for text in texts)
    targets = [*tasks, MEAN, KEPT, REGRESSIONS]
    for gate in gates:
        alone = gate.target in (KEPT, REGRESSIONS) and gate.metric
        mean = gate.target == MEAN and gate.metric != KEPT
        if gate.target not in targets or alone or mean or "mean" in gate.how:
            about = f"{gate.target}/{gate.metric}" if gate.metric else gate.target
            raise ConfigError(
                f"The gate '{gate.text}' tests '{about}', which is not measured.",
                "Gates can test a task with held-out rows, mean/retention, retention or "
                "regressions.",
                did_you_mean(gate.target, targets),
            )
    return gates


def gate_results(gates: Sequence[Gate], of: GateInputs) -> tuple[GateResult, ...]:
    """The result of each gate."""
    return tuple(_result(gate, of) for gate in gates)


def _result(gate: Gate, of: GateInputs) -> GateResult:
    if gate.target == REGRESSIONS:
        number, counted = float(len(of.regressions)), replace(gate, how=("estimate",))
        return gate_result(counted, number, None, None, ", ".join(of.regressions))
    if gate.target == KEPT:
        return _every_task(gate, of.kept)
    if gate.metric == KEPT:
        kept = of.macro if gate.target == MEAN else of.kept.get(gate.target, Retention())
        return _kept(gate, kept)
    paired = of.differences.get(gate.target, {}).get(gate.metric)
    if paired is None:
        return gate_result(gate, None, None, None, "this difference was not measured")
    span = of.spans.get(gate.target, {}).get(gate.metric)
    return paired_gate(gate, paired, gate.metric or "headline", span)


def _kept(gate: Gate, kept: Retention) -> GateResult:
    why = kept.why or f"{kept.n_shared} rows"
    return gate_result(gate, kept.ratio, kept.ci_low, kept.ci_high, why)


def _every_task(gate: Gate, kept: Mapping[str, Retention]) -> GateResult:
    """The worst result over all tasks: fail, then undecided, then pass."""
    order = {"fail": 0, "undecided": 1, "pass": 2}
    results = [(task, _kept(gate, one)) for task, one in kept.items()]
    if not results:
        return gate_result(gate, None, None, None, "no task was measured")
    task, worst = min(results, key=lambda pair: order[pair[1].outcome])
    return replace(worst, why=f"{task}: {worst.why}")


MEMBER = "distillation"
"""Key of the distillation's results in `summary.json`."""
RETENTION = "retention"
_LEVEL = 0.05
ENOUGH = 0.5
"""If less than this share of an expert's gain is kept, the report describes the training."""
MOVED = 0.25
"""Relative fall of the training loss that shows that the generalist learns. On 207 samples it fell
by 10% in the training that kept nothing, and by 43% to 55% in those that kept most of the gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideMetric:
    """A metric to watch besides the headline, and its change from the base."""

    metric: str
    means: dict[str, float | None]
    """Side → mean over its scored rows."""
    paired: PairedDifference
    """Generalist minus base."""
    less_is_better: bool = False

    @property
    def worse(self) -> bool:
        return is_regression(self.paired, less_is_better=self.less_is_better)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """Results of one task: scores of the three sides on the same rows, and their differences."""

    task: str
    metric: str
    """The headline metric of all numbers, unless stated otherwise."""
    cells: dict[str, Cell]
    """Side → its headline with interval, over all its scored rows."""
    expert_gain: PairedDifference | None = None
    """Expert minus base; None without an expert, or if the sides are not comparable."""
    generalist_gain: PairedDifference | None = None
    lost: PairedDifference | None = None
    """Generalist minus expert."""
    kept: Retention = field(default_factory=Retention)
    beside: tuple[SideMetric, ...] = ()
    selection: TaskSelection | None = None
    mixed: tuple[str, ...] = ()
    """Why the sides are not comparable; empty if they are."""

    @property
    def metric_name(self) -> str:
        """Display name of the headline; the metric's key in runs of earlier versions."""
        return next((cell.name for cell in self.cells.values() if cell.name), self.metric)

    @property
    def worse(self) -> bool:
        """Whether the generalist is significantly worse than the base."""
        return self.generalist_gain is not None and is_regression(self.generalist_gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """All results of a distillation, as the report shows them."""

    base: str
    by: str
    experts: dict[str, str]
    """Task → the expert's weights, or its name on its server."""
    tasks: tuple[TaskResult, ...]
    macro: Retention
    """Unweighted mean over the tasks."""
    ability: TaskResult | None = None
    """General ability of base and generalist."""
    regressions: tuple[str, ...] = ()
    """`TASK` or `TASK METRIC` for results significantly worse than the base's."""
    gates: tuple[GateResult, ...] = ()
    shares: dict[str, float] = field(default_factory=dict)
    """Task → its share of the generalist's training rows."""
    steps: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every gate passes."""
        return all(result.outcome == "pass" for result in self.gates)


def is_regression(paired: PairedDifference, *, less_is_better: bool = False) -> bool:
    """Whether a difference is significantly negative: by its interval or, without one, by the p
    value of the sign-flip test."""
    if paired.difference is None:
        return False
    low, high, amount = paired.ci_low, paired.ci_high, paired.difference
    if less_is_better:
        low, high, amount = None if high is None else -high, None if low is None else -low, -amount
    if high is None:
        return amount < 0 and paired.p is not None and paired.p < _LEVEL
    return high < 0


# -- reading measurements --------------------------------------------------------------------------


def distilled(
    config: DistillConfig, experts: Sequence[Expert], out: Path,
    gates: Sequence[Gate] = (),
) -> Distillation:  # fmt: skip
    """The results of the runs in `out`; RunError if a measurement is missing."""
    for part in measurements(config, experts, out):
        if not (part.folder / "summary.json").is_file():
            raise RunError(
                f"The {part.side} has not been measured on '{part.task}' yet.",
                "The report needs all measurements.",
                "Run soul distill report, which plays the missing ones.",
            )
    written = written_selection(out)
    selection = written.tasks if written else {}
    tasks = tuple(
        _task_result(out, task, SIDES, selection.get(task))
        for task in measured_tasks(config, experts)
    )
    ability = None
    if config.retention and ABILITY not in {one.task for one in tasks}:
        ability = _task_result(out, ABILITY, ("base", "generalist"), None)
    macro = macro_retention([one.kept for one in tasks])
    every = (*tasks, ability) if ability else tasks
    regressions = tuple(_regressions(every))
    lines = {task: part.lines for task, part in selection.items()}
    remarks = learning_words(config, out, tasks), unmeasured_words(config, experts)
    return Distillation(
        base=common_base(experts, config), by=config.by, tasks=tasks, macro=macro, ability=ability,
        experts={e.task: str(e.folder or e.model) for e in experts}, regressions=regressions,
        gates=gate_results(gates, _gated(config, experts, every, macro, regressions)),
        shares={task: n / sum(lines.values()) for task, n in lines.items()} if lines else {},
        steps=int(summary_line(out / GENERALIST).get("steps", 0)),
        remarks=(*filter(None, remarks), *rows_and_players_words(config, experts)),
    )  # fmt: skip


def learning_words(config: DistillConfig, out: Path, tasks: Sequence[TaskResult]) -> str:
    """Possible reasons for low retention, and settings that may help; empty if at least ENOUGH of
    every gain is kept."""
    ratios = {one.task: one.kept.ratio for one in tasks}
    little = [task for task, ratio in ratios.items() if ratio is not None and ratio < ENOUGH]
    unsure = not tasks or None in ratios.values()
    losses = [line.learned.loss for line in read_step_lines(out / GENERALIST / "metrics.jsonl")]
    known = [loss for loss in losses if loss is not None]
    if not known or not (little or unsure):
        return ""
    settings = read_config(out / GENERALIST)
    kept = f"less than half of the gain is kept on {', '.join(little)}: " if little else ""
    steps = f"{len(known)} training steps at a learning rate of {settings['lr']:g}"
    if config.by == "opd":
        ways = "more --samples, a smaller --batch or a higher --lr may help"
        return f"{kept}{steps}; {ways}" if little else ""
    steps += f" (--batch {settings['sft_batch']}, --epochs {config.epochs:g})"
    first, last = loss_ends(known)
    moved = f"the training loss went from {first:.3f} to {last:.3f}"
    if last > (1 + MOVED) * first:
        rising = "a rising loss means that the learning rate is too high: lower --lr"
        return f"{kept}{moved} in {steps}; {rising}"
    if last > (1 - MOVED) * first:
        return (
            f"{kept}{moved} in {steps}; it hardly changed, so the generalist is close to its base: "
            "raise --epochs or --lr, or lower --batch"
        )
    if not little:
        return ""
    return f"{kept}{moved} in {steps}; more --epochs, --samples or --keep-top may help"


def loss_ends(losses: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last fifth of the steps (at least one step each)."""
    part = max(1, len(losses) // 5)
    return sum(losses[:part]) / part, sum(losses[-part:]) / part


def _task_result(
    out: Path, task: str, sides: Sequence[Side], selection: TaskSelection | None
) -> TaskResult:
    folders = [measured_folder(out, side, task) for side in sides]
    played = [read_side(folder, task) for folder in folders]
    cells: dict[str, Cell] = {s: headline(p.cells) for s, p in zip(sides, played, strict=True)}
    one, *others = (read_measured(folder) for folder in folders)
    mixed = [line for other in others for _, line in differences(one, other, [task]).blocking]
    result = TaskResult(task=task, metric="", cells=cells, selection=selection,
                        mixed=tuple(dict.fromkeys(mixed)))  # fmt: skip
    if mixed:
        return replace(result, kept=Retention(why="the sides were measured differently"))
    same = common_episodes(played)
    base, generalist = same[0], same[-1]
    gain = side_difference(task, base, generalist)
    result = replace(result, metric=gain.metric, generalist_gain=gain.paired,
                     beside=tuple(_beside(task, dict(zip(sides, same, strict=True)))))  # fmt: skip
    if len(same) < len(SIDES):
        return result
    return replace(
        result, expert_gain=side_difference(task, base, same[1]).paired,
        lost=side_difference(task, same[1], generalist).paired,
        kept=retained_gain(task, base, same[1], generalist),
    )  # fmt: skip


def _beside(task: str, sides: Mapping[Side, MeasuredSide]) -> list[SideMetric]:
    """The task's metrics to watch besides the headline, if the runs have them."""
    live = sides["base"].live
    terms = live.spec.metric if live is not None else None
    found: list[SideMetric] = []
    for metric in terms.beside if terms is not None else ():
        try:
            moved = side_difference(task, sides["base"], sides["generalist"], metric)
        except DataError:  # these rows do not have the metric
            continue
        means: dict[str, float | None] = {
            side: one.cells[metric].mean if metric in one.cells else None
            for side, one in sides.items()
        }
        less = terms is not None and metric in terms.less_is_better
        found.append(SideMetric(metric=metric, means=means, paired=moved.paired,
                            less_is_better=less))  # fmt: skip
    return found


def _regressions(results: Sequence[TaskResult]) -> list[str]:
    lines = []
    for result in results:
        lines += [result.task] if result.worse else []
        lines += [f"{result.task} {one.metric}" for one in result.beside if one.worse]
    return lines


def _gated(
    config: DistillConfig, experts: Sequence[Expert], results: Sequence[TaskResult],
    macro: Retention, regressions: Sequence[str],
) -> GateInputs:  # fmt: skip
    differences: dict[str, dict[str, PairedDifference]] = {}
    for result in results:
        moved = {one.metric: one.paired for one in result.beside}
        gain = dict.fromkeys(("", result.metric, result.metric_name), result.generalist_gain)
        known = {name: paired for name, paired in gain.items() if paired is not None}
        differences[result.task] = {**moved, **known}
    kept = {result.task: result.kept for result in results if "expert" in result.cells}
    # The gate `retention` tests every task, so unmeasured tasks must be listed.
    measured = measured_tasks(config, experts)
    kept |= {one.task: Retention(why="no held-out rows") for one in experts
             if one.task not in measured}  # fmt: skip
    registry = config.registry()
    spans = {task: _spans(registry.spec(task).metric, moved) for task, moved in differences.items()}
    return GateInputs(
        kept=kept, macro=macro, differences=differences, regressions=tuple(regressions), spans=spans
    )


def _spans(terms: Metric, metrics: Iterable[str]) -> dict[str, float]:
    """Metric (empty: the headline) → highest minus lowest value."""
    whole = dict.fromkeys(("", VALUE, terms.name, terms.headline), (terms.low, terms.high))
    scales = {**whole, **terms.scales}
    if terms.headline in terms.scales:
        scales[""] = terms.scales[terms.headline]
    return {name: scales[name][1] - scales[name][0] for name in metrics if name in scales}


# -- the file --------------------------------------------------------------------------------------


def distillation_values(result: Distillation) -> dict[str, Any]:
    """The results as plain JSON values, with their schema."""
    values: dict[str, Any] = form_of(Distillation).dump_python(result, mode="json")
    return {SCHEMA: DISTILLATION_SCHEMA, **values}


def write_distillation(run: Run, result: Distillation) -> None:
    """Write `summary.json`: the usual cells, and all results under `distillation`."""
    parts = [recorded_summary(file.parent) for file in sorted(run.path.rglob("summary.json"))
             if file.parent != run.path]  # fmt: skip
    cost, unpriced = spent(run.path)
    summary = Summary(
        command=COMMAND, model=result.base,
        protocol=next((part.protocol for part in parts if part.protocol), ""),
        seconds=sum(part.seconds or 0.0 for part in parts), cost=cost, unpriced_calls=unpriced,
        n=sum(one.cells["generalist"].n for one in result.tasks),
        n_scored=sum(one.cells["generalist"].n_scored for one in result.tasks),
        tasks={one.task: _cells(one) for one in result.tasks},
    )  # fmt: skip
    run.write_summary(
        with_provenance(run.path, {**summary.to_json(), MEMBER: distillation_values(result)})
    )


def _cells(result: TaskResult) -> dict[str, Cell]:
    kept, cell = result.kept, replace(result.cells["generalist"], headline=True)
    counts = {"n_scored": kept.n_shared, "n": cell.n, "n_clusters": kept.n_clusters}
    beside = Cell(mean=kept.ratio, ci_low=kept.ci_low, ci_high=kept.ci_high, method=kept.method,
                  beside=True, **cast("dict[str, Any]", counts))  # fmt: skip
    return {result.metric or "value": cell, RETENTION: beside}


def read_distillation(out: Path) -> Distillation | None:
    """The results that the report stage wrote in `out`; None before that, DataError if damaged."""
    part = summary_line(out).get(MEMBER)
    if part is None:
        return None
    file = out / "summary.json"
    refuse_other_schema(part, DISTILLATION_SCHEMA, f"The distillation part of '{file}'")
    return read_value(Distillation, part, f"The distillation part of '{file}'")
