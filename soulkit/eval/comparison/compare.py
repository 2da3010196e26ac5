"""Compare two runs: is B better than A, and how certain is that?

Runs are compared on the episodes that both scored, paired by example and rollout number (and
training step, if there are several). Pairing removes the difficulty of the rows from the
difference, and a run cannot win by leaving hard episodes unscored. Runs that were measured under
different conditions (`comparability.py`) are rejected unless `allow_mixed` is set; the result then
lists the differences.

The default metric of a task is its headline. A suite adds means over tasks (`contrasts.py`), and a
gate sets a limit on a difference (`gates.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from soulkit.errors import DataError, RunError
from soulkit.eval.comparison.comparability import (
    MeasuredRun,
    SharedRows,
    differences,
    read_measured,
    shared_rows,
)
from soulkit.eval.comparison.contrasts import (
    HEADLINE,
    VALUE,
    Contrast,
    MeanDifference,
    TaskPair,
    contrast,
    suite_differences,
    unknown_metric,
)
from soulkit.eval.gates import Gate, GateResult, check_gates, gate_result, paired_gate
from soulkit.eval.results.recorded import recorded_cells, recorded_tasks, summary_steps
from soulkit.eval.results.summary import DEV, records_by_task
from soulkit.eval.run.resume import SharedControls, shared_controls
from soulkit.metrics.comparisons import PairedDifference, holm
from soulkit.runs.conditions import provenance_of
from soulkit.runs.records import drafts, load_records, newest_dev
from soulkit.tasks.kit.registry import Registry, load_registry
from soulkit.tasks.kit.scoring import without_origins
from soulkit.tasks.kit.spec import Metric
from soulkit.types import Record

ReadRecords = Callable[[Path], Sequence[Record]]
READ_LIGHT: ReadRecords = partial(load_records, light=True)
DRAFTS = "means over training drafts, {steps}; the headline of a training run is its dev score"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDifference:
    """B minus A on one task."""

    task: str
    metric: str
    """The compared metric, by the task's name for it; the headline if no metric was given."""
    paired: PairedDifference
    p_holm: float | None
    """`paired.p`, adjusted for the number of tasks compared (Holm)."""
    n_a: int
    """Episodes of A that the metric applies to, scored or not."""
    n_b: int
    over: tuple[str, ...] = ()
    """The shared parts that a mean is taken over, if one run lacks some parts."""
    less_is_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of `soul compare`."""

    a: str
    b: str
    metric: str
    tasks: tuple[TaskDifference, ...]
    only_a: tuple[str, ...]
    """Tasks that only A has."""
    only_b: tuple[str, ...]
    mixed: tuple[str, ...]
    """Differences that would block the comparison (empty unless mixing was allowed)."""
    remarks: tuple[str, ...] = ()
    """Differences that do not block the comparison, and facts that were not recorded."""
    suite: str = ""
    means: tuple[MeanDifference, ...] = ()
    """Groups, axes and the mean of the suite."""
    gates: tuple[GateResult, ...] = ()
    origins: tuple[Mapping[str, Any], ...] = ()
    """The provenance of A and of B."""
    shared_rows: Mapping[str, SharedRows] = field(default_factory=dict)
    """Task → the rows that the comparison was limited to; empty without --shared-rows."""
    blocked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Task → why it may not be compared: `mixed`, and metrics that the runs lack."""
    breakdowns: tuple[TaskDifference, ...] = ()
    """Companions of the headlines and parts of the mean scores, if they were asked for."""

    @property
    def passed(self) -> bool:
        """Whether every gate passed."""
        return all(result.outcome == "pass" for result in self.gates)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; the fields of `paired` are inlined into the entry of each task."""
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
    """The episodes of two runs by task, with the conditions of both."""

    a: Mapping[str, list[Record]]
    b: Mapping[str, list[Record]]
    runs: tuple[MeasuredRun, MeasuredRun]
    tasks: Sequence[str]
    """The compared tasks, which both runs have."""
    rows: Mapping[str, SharedRows] = field(default_factory=dict)
    """The shared rows that both sides are limited to; empty if they are not limited."""
    remarks: tuple[str, ...] = ()
    """The tasks that have no shared row."""

    @property
    def ids(self) -> dict[str, frozenset[str]] | None:
        """Task → its shared rows; None if the comparison is not limited to shared rows."""
        return {task: rows.ids for task, rows in self.rows.items()} or None

    def rows_apart(self) -> bool:
        """Whether two evaluations recorded their rows and share none in any task."""
        recorded = all(side.rows(task) for side in self.runs for task in self.tasks)
        return not self.trained and recorded and not shared_rows(*self.runs, self.tasks)

    @property
    def trained(self) -> bool:
        """Whether at least one of the two runs is a training run."""
        return any(side.trained for side in self.runs)

    def cut(self) -> _Sides | None:
        """Both sides limited to their shared rows. None if they share none, or if a side is a
        training run, whose episodes come from steps."""
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
        lost = tuple(f"{task}: no shared row" for task in self.tasks if task not in tasks)
        made = replace(
            self, a=a, b=b, runs=(first, second), tasks=tasks, rows=rows, remarks=lost
        )  # fmt: skip
        return made if tasks else None


def compare_runs(
    a: Path, b: Path, metric: str = HEADLINE, *, allow_mixed: bool = False, suite: str = "",
    gates: Sequence[Gate] = (), registry: Registry | None = None, trust: bool = False,
    only_shared_rows: bool = False, breakdowns: bool = False, read: ReadRecords = READ_LIGHT,
) -> Comparison:  # fmt: skip
    """Compare two run folders on `metric`, task by task; with `suite`, only its members.

    `registry` defines the suites. `trust` allows running task code that another person's run
    names; without it, such a task is compared by `value`. With `only_shared_rows`, everything is
    computed over the rows that both evaluations have with the same content. `breakdowns` adds the
    companions and parts of the headlines.

    DataError if the episodes cannot be read or a run lacks the metric; ConfigError for a gate or
    suite that does not exist; RunError if the runs share no episode or (without `allow_mixed`) may
    not be compared.
    """
    registry = registry or load_registry()
    members = registry.suite(suite) if suite else None
    sides, last = _sides(a, b, members, suite, read, only_shared_rows=only_shared_rows)
    runs_a, runs_b, shared = sides.a, sides.b, sides.tasks
    check_gates(gates, shared, registry, suite=suite)
    mixed, beside = (unlike := differences(*sides.runs, shared)).lines()
    if mixed and not allow_mixed:
        raise _refused(a, b, mixed, sides)
    metrics = {metric, *(gate.metric for gate in gates)}
    controls = shared_controls(a, b, shared, sides.ids)
    pairs = _pairs((a, b), shared, runs_a, runs_b, metrics, controls, registry, trust=trust)
    whole = _Pairs(pairs, registry)
    compared, lacking = whole.contrasts(metric)
    if not any(t.paired.n_shared for t in compared.values()):
        raise _no_common_episode(a, b, metric)
    adjusted = holm([t.paired.p for t in compared.values()])
    return Comparison(
        a=str(a), b=str(b), metric=metric or HEADLINE,
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
        blocked=_blocked([*unlike.blocking, *((t, error.what) for t, error in lacking.items())]),
        breakdowns=tuple(whole.breakdowns()) if breakdowns else (),
    )  # fmt: skip


def _blocked(whys: Sequence[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    return {task: tuple(why for t, why in whys if t == task) for task, _ in whys}


def _sides(
    a: Path, b: Path, members: Sequence[str] | None, suite: str, read: ReadRecords, *,
    only_shared_rows: bool,
) -> tuple[_Sides, Sequence[int]]:  # fmt: skip
    records = [read(path / "episodes.jsonl") for path in (a, b)]
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
    steps = f"last steps: {last}" if last else "all steps that both runs completed"
    return [DRAFTS.format(steps=steps)] if both and drafted else []


def _partial(compared: Mapping[str, Contrast]) -> list[str]:
    return [
        f"{task}: {made.metric} covers only the parts that both runs have: {', '.join(made.over)}"
        for task, made in compared.items()
        if made.over
    ]


def _last_steps(folders: Iterable[Path], records: Iterable[Sequence[Record]]) -> tuple[int, ...]:
    """The steps that the summaries of two training runs cover, so that a comparison shows the same
    numbers as a report; none if the runs ended at different steps."""
    windows = [
        tuple(sorted({record.step for record in side})[-summary_steps(folder):])
        for folder, side in zip(folders, records, strict=True)
        if summary_steps(folder)
    ]  # fmt: skip
    return windows[0] if len(windows) == 2 and windows[0] == windows[1] else ()


def _of_training(
    tasks: Mapping[str, Sequence[Record]], steps: Sequence[int]
) -> dict[str, list[Record]]:  # fmt: skip
    """The drafts of these training steps (or of all) as one batch, whatever their origins."""
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
    registry: Registry, *, trust: bool,
) -> dict[str, TaskPair]:  # fmt: skip
    """The recorded results of each task, with its code if one of `metrics` needs it."""
    dev_a, dev_b = (_held_out(folder) for folder in folders)
    cells_a, cells_b = (recorded_cells(folder) for folder in folders)
    names = {name: _value_name(spec.metric) for name, spec in registry.specs.items()}
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
    """The declared name of a mean score; empty if a batch statistic has that name."""
    return "" if declared.name == declared.headline else declared.name


def _held_out(folder: Path) -> dict[str, list[Record]]:
    """The newest held-out episodes of a training run, by task. Runs of different lengths are
    compared at their ends, so the step is not part of the pairing."""
    tasks = records_by_task(replace(record, step=0) for record in newest_dev(folder, light=True))
    return {task: without_origins(records) for task, records in tasks.items()}


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The tasks that two runs share, and the registry."""

    pairs: Mapping[str, TaskPair]
    registry: Registry

    def contrasts(self, metric: str) -> tuple[dict[str, Contrast], dict[str, DataError]]:
        """(task → its difference, task → why it lacks the metric); DataError if all lack it."""
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

    def breakdowns(self) -> Iterator[TaskDifference]:
        """The differences of the companions of each headline and of the parts of each mean score.
        A metric that one of the runs lacks is left out."""
        for task, pair in self.pairs.items():
            declared = self.registry.specs.get(task)
            less = declared.metric.less_is_better if declared else ()
            for name, metric, part in _parts(pair):
                try:
                    made = contrast(part, metric)
                except DataError:
                    continue
                yield TaskDifference(
                    task=task, metric=pair.shown(name), paired=made.paired, p_holm=None,
                    n_a=made.n_a, n_b=made.n_b, less_is_better=name in less,
                )  # fmt: skip

    def means(self, suite: str, compared: Mapping[str, Contrast]) -> list[MeanDifference]:
        """The differences in all means over the members of a suite."""
        metrics = {task: made.metric for task, made in compared.items()}
        # A mean over only some of its parts does not enter the means of a suite.
        paired = {task: made.paired for task, made in compared.items() if not made.over}
        return suite_differences(
            self.registry.suite_spec(suite), paired,
            lambda task: self.span(task, metrics.get(task, HEADLINE)),
        )  # fmt: skip

    def span(self, task: str, metric: str) -> float | None:
        """Highest minus lowest value of a metric; None if unknown."""
        declared = self.registry.specs.get(task)
        scale = (declared.metric.low, declared.metric.high) if declared else None
        scale = self.pairs[task].scale(metric) if task in self.pairs else scale
        return None if scale is None else scale[1] - scale[0]

    def gate(self, gate: Gate) -> GateResult:
        """The result of a gate on a task or a suite."""
        if gate.target in self.pairs:
            return self._task_gate(gate, contrast(self.pairs[gate.target], gate.metric))
        compared, _ = self.contrasts(gate.metric)
        (*_, mean) = self.means(gate.target, compared)
        whole = mean.paired
        why = f"{', '.join(mean.missing)} missing" if mean.missing else f"{mean.members} members"
        return gate_result(gate, whole.difference, whole.ci_low, whole.ci_high, why)

    def _task_gate(self, gate: Gate, made: Contrast) -> GateResult:
        name = self.pairs[gate.target].shown(made.metric)
        name += f" over {', '.join(made.over)}" if made.over else ""
        return paired_gate(gate, made.paired, name, self.span(gate.target, made.metric))


def _parts(pair: TaskPair) -> Iterator[tuple[str, str, TaskPair]]:
    """(name, metric, the episodes it covers) of the companions that both runs recorded, and of the
    mean score by the tags of the rows."""
    for name, cell in pair.recorded[0].items():
        if cell.beside and not cell.headline and name in pair.recorded[1]:
            yield name, name, pair
    sides = [_by_tag(side) for side in (pair.a, pair.b)]
    for tag in sorted(sides[0].keys() & sides[1].keys()):
        if len(sides[0][tag]) < len(drafts(pair.a)):  # else it is the whole
            yield f"{VALUE}/{tag}", VALUE, replace(pair, a=sides[0][tag], b=sides[1][tag])


def _by_tag(records: Sequence[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in drafts(records):
        for tag, value in record.tags.items():
            groups.setdefault(f"{tag}={value}", []).append(record)
    return groups


# -- errors ----------------------------------------------------------------------------------------


def _nothing_shared(
    a: Path, b: Path, in_a: Sequence[str], in_b: Sequence[str], suite: str
) -> RunError:
    common = f"no task of the suite '{suite}' in common" if suite else "no task in common"
    empty = [side for side, tasks in ((a, in_a), (b, in_b)) if not tasks]
    return RunError(
        f"'{empty[0]}' has no episodes." if empty else f"The two runs have {common}.",
        f"'{a}' has {', '.join(in_a) or 'no episodes'}; '{b}' has {', '.join(in_b) or 'none'}.",
        "Evaluate both models on the same task or suite, then compare again.",
    )


def _no_common_episode(a: Path, b: Path, metric: str) -> RunError:
    scored = "scored" if metric in ("", HEADLINE) else f"with a value of '{metric}'"
    return RunError(
        f"No episode is {scored} in both '{a}' and '{b}'.",
        "The comparison is paired: it needs rows that both runs played and scored.",
        "Run both with the same data, --limit and --seed. `soul report` shows unscored episodes.",
    )


def _no_shared_row(a: Path, b: Path, *, trained: bool) -> RunError:
    if trained:
        return RunError(
            "--shared-rows needs two evaluations, but one of these runs is a training run.",
            "A training run's episodes come from different steps, so no single model played them.",
            "Evaluate both models on the same rows: soul eval local --adapter FOLDER",
        )
    return RunError(
        f"'{a}' and '{b}' share no row with the same content.",
        "--shared-rows leaves nothing to compare.",
        "Evaluate both models on the same rows.",
    )


def _refused(a: Path, b: Path, mixed: Sequence[str], sides: _Sides) -> RunError:
    cut = None if sides.rows else sides.cut()
    if cut is not None and not differences(*cut.runs, cut.tasks).blocking:
        return RunError(
            f"The two runs were not measured the same way ({'; '.join(mixed)}).",
            "Their rows may differ in difficulty.",
            f"Compare only the shared rows: soul compare {shlex.quote(str(a))} "
            f"{shlex.quote(str(b))} --shared-rows",
        )
    if sides.rows_apart():
        return RunError(
            f"'{a}' and '{b}' have no row in common ({'; '.join(mixed)}).",
            "The comparison is paired: both models must answer the same rows.",
            "Evaluate one model again on the rows of the other: use the data, limit and seed in "
            f"{b / 'config.yaml'}.",
        )
    return RunError(
        f"The two runs were not measured the same way ({'; '.join(mixed)}).",
        "A difference could come from these settings and not from the models.",
        "Run one of them again with the other's judge, partner, samples, rows and prompts, score "
        "both with one judge (soul rescore RUN --ask --judge PLAYER), or compare anyway with "
        "--force-mixed.",
    )
