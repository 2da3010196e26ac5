"""Is B better than A, and how surely?

Two runs are compared on the very episodes that both scored, pair by pair: the same example and
rollout number (and training step, where there are several). That takes the difficulty of the rows
out of the difference, and keeps a run with many unscored episodes from winning by what it lost.
Runs that were measured under other conditions (`comparability.py`) are refused unless mixing them
is asked for by name, and then the result says so.

What is compared of a task is its headline unless a metric is named; a suite adds means over tasks
(`contrasts.py`), a gate says how far a difference may go (`gates.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from soulkit.errors import ConfigError, DataError, RunError, did_you_mean
from soulkit.eval.comparison.comparability import (
    MeasuredRun,
    SharedRows,
    differences,
    read_measured,
    shared_rows,
)
from soulkit.eval.comparison.contrasts import (
    HEADLINE,
    Contrast,
    MeanDifference,
    TaskPair,
    contrast,
    suite_differences,
    unknown_metric,
)
from soulkit.eval.comparison.gates import ComparisonGate, GateResult, gate_result, paired_gate
from soulkit.eval.results.recorded import recorded_cells, recorded_tasks, summary_steps
from soulkit.eval.results.summary import DEV, records_by_task
from soulkit.eval.run.resume import SharedControls, shared_controls
from soulkit.metrics.comparisons import PairedDifference, holm
from soulkit.runs.conditions import provenance_of
from soulkit.runs.records import load_records, newest_dev
from soulkit.tasks.kit.registry import Registry, load_registry
from soulkit.tasks.kit.scoring import without_origins
from soulkit.tasks.kit.spec import Metric
from soulkit.types import Record

DRAFTS = "means over drafts while training, {steps}; a training's own headline is its dev score"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDifference:
    """B minus A on one task."""

    task: str
    metric: str
    """What was compared, as the task calls it: its headline where no metric was named."""
    paired: PairedDifference
    p_holm: float | None
    """`paired.p`, adjusted for the number of tasks compared (Holm)."""
    n_a: int
    """Episodes of A that the metric applies to, scored or not."""
    n_b: int
    over: tuple[str, ...] = ()
    """Of a mean over parts that not both runs have: the parts that they share, which it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `soul compare` prints."""

    a: str
    b: str
    metric: str
    tasks: tuple[TaskDifference, ...]
    only_a: tuple[str, ...]
    """Tasks that only A has."""
    only_b: tuple[str, ...]
    mixed: tuple[str, ...]
    """What differs between the runs although it should not (empty unless mixing was allowed)."""
    remarks: tuple[str, ...] = ()
    """What differs and is part of what is compared, and what was not recorded."""
    suite: str = ""
    means: tuple[MeanDifference, ...] = ()
    """Groups, axes and the mean of the suite."""
    gates: tuple[GateResult, ...] = ()
    origins: tuple[Mapping[str, Any], ...] = ()
    """The provenance of A and of B."""
    shared_rows: Mapping[str, SharedRows] = field(default_factory=dict)
    """Task → the rows to which both sides were cut; empty where that was not asked for."""

    @property
    def passed(self) -> bool:
        """Whether every gate is open."""
        return all(result.outcome == "pass" for result in self.gates)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `paired` is laid out flat beside the task's name."""
        rows = [
            {"task": t.task, "metric": t.metric, **asdict(t.paired), "p_holm": t.p_holm,
             "n_a": t.n_a, "n_b": t.n_b, "over": list(t.over)}
            for t in self.tasks
        ]  # fmt: skip
        return {
            "a": self.a,
            "b": self.b,
            "metric": self.metric,
            "tasks": rows,
            "suite": self.suite,
            "means": [mean.as_dict() for mean in self.means],
            "gates": [result.as_dict() for result in self.gates],
            "passed": self.passed,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "mixed": list(self.mixed),
            "remarks": list(self.remarks),
            "provenance": [dict(origin) for origin in self.origins],
            "shared_rows": {task: rows.as_dict() for task, rows in self.shared_rows.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """The episodes of two runs by task, under which conditions they were played."""

    a: Mapping[str, list[Record]]
    b: Mapping[str, list[Record]]
    runs: tuple[MeasuredRun, MeasuredRun]
    tasks: Sequence[str]
    """Those that both have and that are compared."""
    rows: Mapping[str, SharedRows] = field(default_factory=dict)
    """To which rows both sides are cut; empty where they are not."""
    remarks: tuple[str, ...] = ()
    """Which tasks that leaves out."""

    @property
    def ids(self) -> dict[str, frozenset[str]] | None:
        """Task → the rows that are left; None where nothing is cut."""
        return {task: rows.ids for task, rows in self.rows.items()} or None

    def rows_apart(self) -> bool:
        """Whether two evaluations say which rows they had, and no task has one in both."""
        recorded = all(side.rows(task) for side in self.runs for task in self.tasks)
        return not self.trained and recorded and not shared_rows(*self.runs, self.tasks)

    @property
    def trained(self) -> bool:
        """Whether one of them is a training."""
        return any(side.trained for side in self.runs)

    def cut(self) -> _Sides | None:
        """Both sides with the rows that they share alone; None where there are none, or for
        trainings, whose episodes come from steps."""
        rows = shared_rows(*self.runs, self.tasks)
        if not rows or self.trained:
            return None
        ids = {task: cut.ids for task, cut in rows.items()}
        a, b = (
            {
                task: [r for r in records if task not in ids or r.example_id in ids[task]]
                for task, records in side.items()
                if task in ids or task not in self.tasks
            }
            for side in (self.a, self.b)
        )
        first, second = (
            whole.within(ids, (r for records in side.values() for r in records))
            for whole, side in zip(self.runs, (a, b), strict=True)
        )
        tasks = [task for task in self.tasks if a.get(task) and b.get(task)]
        lost = tuple(f"{task}: no row in both" for task in self.tasks if task not in tasks)
        made = replace(
            self, a=a, b=b, runs=(first, second), tasks=tasks, rows=rows, remarks=lost
        )  # fmt: skip
        return made if tasks else None


def compare_runs(
    a: Path, b: Path, metric: str = HEADLINE, *, allow_mixed: bool = False, suite: str = "",
    gates: Sequence[ComparisonGate] = (), registry: Registry | None = None, trust: bool = False,
    only_shared_rows: bool = False,
) -> Comparison:  # fmt: skip
    """Compare two run folders on `metric`, task by task; of a `suite`, its members alone.

    `registry` knows the suites, and `trust` lets the code of a task act that a stranger's run
    names: without it, such a task is compared by `value`. With `only_shared_rows` both evaluations
    are cut to the rows that they share with the same content, and everything is computed over
    these. Raises DataError when the episodes cannot be read or neither side has the metric,
    ConfigError for a gate or suite that names nothing, RunError when the runs share no episode, or
    (without `allow_mixed`) may not be compared.
    """
    registry = registry or load_registry()
    members = registry.suite(suite) if suite else None
    sides, last = _sides(a, b, members, suite, only_shared_rows=only_shared_rows)
    shared, runs_a, runs_b = sides.tasks, sides.a, sides.b
    _check_gates(gates, shared, registry, suite)
    mixed, beside = differences(*sides.runs, shared).lines()
    if mixed and not allow_mixed:
        raise _refused(a, b, mixed, sides)
    metrics = {metric, *(gate.metric for gate in gates)}
    controls = shared_controls(a, b, shared, sides.ids)
    names = {name: _value_name(spec.metric) for name, spec in registry.specs.items()}
    pairs = _pairs((a, b), shared, runs_a, runs_b, metrics, controls, names, trust=trust)
    whole = _Pairs(pairs, registry)
    compared, lacking = whole.contrasts(metric)
    if not any(t.paired.n_shared for t in compared.values()):
        raise _no_common_episode(a, b, metric)
    adjusted = holm([t.paired.p for t in compared.values()])
    return Comparison(
        a=str(a),
        b=str(b),
        metric=metric or HEADLINE,
        tasks=tuple(
            TaskDifference(task=task, metric=pairs[task].shown(t.metric), paired=t.paired,
                           p_holm=p, n_a=t.n_a, n_b=t.n_b, over=t.over)
            for (task, t), p in zip(compared.items(), adjusted, strict=True)
        ),
        only_a=_alone(runs_a, runs_b, members),
        only_b=_alone(runs_b, runs_a, members),
        mixed=mixed,
        remarks=(
            *sides.remarks,
            *beside,
            *(error.what if metric in ("", HEADLINE) else f"no metric '{metric}': {task}"
              for task, error in lacking.items()),
            *_partial(compared),
            *controls.remarks,
            *_training(sides, compared.values(), len(last)),
        ),
        suite=suite,
        means=tuple(whole.means(suite, compared)) if suite else (),
        gates=tuple(whole.gate(gate) for gate in gates),
        origins=tuple(provenance_of(folder, {}) for folder in (a, b)),
        shared_rows=sides.rows,
    )  # fmt: skip


def _sides(
    a: Path, b: Path, members: Sequence[str] | None, suite: str, *, only_shared_rows: bool
) -> tuple[_Sides, Sequence[int]]:
    records = [load_records(path / "episodes.jsonl", light=True) for path in (a, b)]
    runs_a, runs_b = (records_by_task(side) for side in records)
    shared = [t for t in members or sorted(runs_a) if t in runs_a and t in runs_b]
    if not shared:
        raise _nothing_shared(a, b, sorted(runs_a), sorted(runs_b), suite)
    measured = read_measured(a, records[0]), read_measured(b, records[1])
    both_trained = all(side.trained for side in measured)
    last = _last_steps((a, b), records) if both_trained else ()
    if both_trained:
        runs_a, runs_b = (_of_training(side, last) for side in (runs_a, runs_b))
    sides = _Sides(a=runs_a, b=runs_b, runs=measured, tasks=shared)
    if not only_shared_rows:
        return sides, last
    if (cut := sides.cut()) is None:
        raise _no_shared_row(a, b, trained=sides.trained)
    return cut, last


def _training(sides: _Sides, compared: Iterable[Contrast], last: int) -> list[str]:
    both = all(side.trained for side in sides.runs)
    drafted = any(made.metric != DEV for made in compared)
    steps = f"last steps: {last}" if last else "all steps that both did"
    return [DRAFTS.format(steps=steps)] if both and drafted else []


def _partial(compared: Mapping[str, Contrast]) -> list[str]:
    return [
        f"{task}: {made.metric} over {', '.join(made.over)}, the parts that both runs have"
        for task, made in compared.items()
        if made.over
    ]


def _last_steps(folders: Iterable[Path], records: Iterable[Sequence[Record]]) -> tuple[int, ...]:
    """The steps that the summaries of two trainings are about, so that a comparison says the
    numbers of a report; none where they ended at different steps: what both did is compared."""
    windows = [
        tuple(sorted({record.step for record in side})[-summary_steps(folder):])
        for folder, side in zip(folders, records, strict=True)
        if summary_steps(folder)
    ]  # fmt: skip
    return windows[0] if len(windows) == 2 and windows[0] == windows[1] else ()


def _of_training(
    tasks: Mapping[str, Sequence[Record]], steps: Sequence[int]
) -> dict[str, list[Record]]:  # fmt: skip
    """What a training drafted in these steps, or in all, as one batch whatever its origins."""
    kept = {t: [r for r in side if not steps or r.step in steps] for t, side in tasks.items()}
    return {task: without_origins(side) for task, side in kept.items()}


def _alone(
    runs: Mapping[str, Any], others: Mapping[str, Any], members: Sequence[str] | None
) -> tuple[str, ...]:
    alone = runs.keys() - others.keys()
    return tuple(sorted(alone if members is None else alone & set(members)))


def _pairs(
    folders: tuple[Path, Path], shared: Sequence[str], a: Mapping[str, Sequence[Record]],
    b: Mapping[str, Sequence[Record]], metrics: Iterable[str], controls: SharedControls,
    names: Mapping[str, str], *, trust: bool,
) -> dict[str, TaskPair]:  # fmt: skip
    """What the runs recorded of each task, with its code where one of `metrics` needs it."""
    dev_a, dev_b = (_held_out(folder) for folder in folders)
    cells_a, cells_b = (recorded_cells(folder) for folder in folders)
    pairs = {
        task: TaskPair(
            task=task, a=a[task], b=b[task], declared_name=names.get(task, ""),
            recorded=(cells_a.get(task, {}), cells_b.get(task, {})),
            held_out=(dev_a[task], dev_b[task]) if task in dev_a and task in dev_b else None,
            controls=controls.sides.get(task, ((), ())),
        )
        for task in shared
    }  # fmt: skip
    coded = [t for t, pair in pairs.items() if any(map(pair.needs_code, metrics))]
    live_a, live_b = (recorded_tasks(folder, coded, trust=trust) for folder in folders)
    return {
        task: replace(pair, live_a=live_a.get(task), live_b=live_b.get(task))
        for task, pair in pairs.items()
    }


def _value_name(declared: Metric) -> str:
    """The declared name of a mean score; empty where a number over the batch has it."""
    return "" if declared.name == declared.headline else declared.name


def _held_out(folder: Path) -> dict[str, list[Record]]:
    """A training's newest episodes on the rows it held out, by task. Runs of other lengths are
    compared where each of them ended, so the step is no part of a pair."""
    tasks = records_by_task(replace(record, step=0) for record in newest_dev(folder, light=True))
    return {task: without_origins(records) for task, records in tasks.items()}


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The tasks that two runs share, and what is declared of all tasks."""

    pairs: Mapping[str, TaskPair]
    registry: Registry

    def contrasts(self, metric: str) -> tuple[dict[str, Contrast], dict[str, DataError]]:
        """(task → its difference, task → why it has no such metric); DataError when none has."""
        compared: dict[str, Contrast] = {}
        lacking: dict[str, DataError] = {}
        for task, pair in self.pairs.items():
            try:
                compared[task] = contrast(pair, metric)
            except DataError as error:
                lacking[task] = error
        if not compared:
            several = len(lacking) > 1
            (first, *_) = lacking.values()
            raise unknown_metric(metric, list(self.pairs.values())) if several else first
        return compared, lacking

    def means(self, suite: str, compared: Mapping[str, Contrast]) -> list[MeanDifference]:
        """Every mean over the members of a suite."""
        metrics = {task: made.metric for task, made in compared.items()}
        # A mean over some of its parts is no member of a suite.
        paired = {task: made.paired for task, made in compared.items() if not made.over}
        return suite_differences(
            self.registry.suite_spec(suite), paired,
            lambda task: self.span(task, metrics.get(task, HEADLINE)),
        )  # fmt: skip

    def span(self, task: str, metric: str) -> float | None:
        """Highest minus lowest value of a metric; None where it is not known."""
        declared = self.registry.specs.get(task)
        scale = (declared.metric.low, declared.metric.high) if declared else None
        scale = self.pairs[task].scale(metric) if task in self.pairs else scale
        return None if scale is None else scale[1] - scale[0]

    def gate(self, gate: ComparisonGate) -> GateResult:
        """What becomes of a gate on a task, or on a suite."""
        if gate.target in self.pairs:
            return self._task_gate(gate, contrast(self.pairs[gate.target], gate.metric))
        compared, _ = self.contrasts(gate.metric)
        (*_, mean) = self.means(gate.target, compared)
        whole = mean.paired
        why = f"{', '.join(mean.missing)} missing" if mean.missing else f"{mean.members} members"
        return gate_result(gate, whole.difference, whole.ci_low, whole.ci_high, why)

    def _task_gate(self, gate: ComparisonGate, made: Contrast) -> GateResult:
        name = self.pairs[gate.target].shown(made.metric)
        name += f" over {', '.join(made.over)}" if made.over else ""
        return paired_gate(gate, made.paired, name, self.span(gate.target, made.metric))


# -- errors ----------------------------------------------------------------------------------------


def _check_gates(
    gates: Sequence[ComparisonGate], shared: Sequence[str], registry: Registry, suite: str
) -> None:
    for gate in gates:
        if suite and gate.target in registry.suites and gate.target != suite:
            raise ConfigError(
                f"The gate '{gate.text}' is about the suite '{gate.target}', and only '{suite}' is "
                "compared.",
                "Members that the compared suite does not have would count as missing.",
                f"Name the gate of '{suite}', or leave --suite out.",
            )
        if gate.target not in shared and gate.target not in registry.suites:
            raise ConfigError(
                f"The gate '{gate.text}' is about '{gate.target}', which the runs do not share.",
                f"They share {', '.join(shared)}; a suite may be named as well.",
                did_you_mean(gate.target, [*shared, *registry.suites]),
            )


def _nothing_shared(
    a: Path, b: Path, in_a: Sequence[str], in_b: Sequence[str], suite: str
) -> RunError:
    common = f"no task of the suite '{suite}' in common" if suite else "no task in common"
    return RunError(
        f"The two runs have {common}.",
        f"'{a}' has {', '.join(in_a) or 'no episodes'}; '{b}' has {', '.join(in_b) or 'none'}.",
        "Evaluate both models on the same task or suite, then compare again.",
    )


def _no_common_episode(a: Path, b: Path, metric: str) -> RunError:
    return RunError(
        f"No episode of '{a}' and '{b}' has a '{metric}' on both sides.",
        "The comparison is paired: it needs the same rows, played and scored in both runs.",
        "Run both with the same data, --limit and --seed; `soul report` shows what is unscored.",
    )


def _no_shared_row(a: Path, b: Path, *, trained: bool) -> RunError:
    if trained:
        return RunError(
            "Only evaluations can be cut to the rows that they share, and a training was named.",
            "The episodes of a training come from its steps.",
            "Evaluate both models on the same rows: soul eval local --adapter FOLDER",
        )
    return RunError(
        f"'{a}' and '{b}' share no row with the same content.",
        "Nothing is left to compare.",
        "Evaluate both models on the same rows.",
    )


def _refused(a: Path, b: Path, mixed: Sequence[str], sides: _Sides) -> RunError:
    cut = None if sides.rows else sides.cut()
    if cut is not None and not differences(*cut.runs, cut.tasks).blocking:
        return RunError(
            f"The two runs were not measured the same way ({'; '.join(mixed)}).",
            "Other rows may be easier.",
            f"Compare the rows that both have: soul compare {shlex.quote(str(a))} "
            f"{shlex.quote(str(b))} --shared-rows",
        )
    if sides.rows_apart():
        return RunError(
            f"'{a}' and '{b}' have no row in common ({'; '.join(mixed)}).",
            "A comparison is paired: both models must answer the same rows.",
            "Evaluate one model again on the rows of the other: give the data, limit and seed that "
            f"{b / 'config.yaml'} records.",
        )
    return RunError(
        f"The two runs were not measured the same way ({'; '.join(mixed)}).",
        "A difference would mix the models with the change of what they were measured with.",
        "Run one of them again with the other's judge, partner, samples, rows and prompts, have "
        "both scored by one judge with soul rescore RUN --ask --judge WHO, or accept the mixture "
        "with --force-mixed.",
    )
