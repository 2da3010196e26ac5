"""Compares training methods over seeds: a table, curves with intervals, one page, one JSON file.

Reads the output of `soul train ablate`: `ablation.json` and each run's metrics and summary. Numbers
are means over seeds with 95% intervals, clipped to the scale of the scores if the runs recorded it.
Differences are paired by seed, because equal seeds use the same rows. Only finished runs count;
failed and missing ones are listed. If a method was measured under different conditions than the
first one, no difference is shown and the reason is given. Every result comes with the numbers of
sampled rollouts and trained tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from soulkit.errors import RunError
from soulkit.eval.comparison.comparability import (
    NOT_ALIKE,
    by_task,
    differences,
    read_measured,
)
from soulkit.eval.comparison.provenance_text import provenance_facts
from soulkit.eval.results.summary import VALUE, cluster_of, headline, metric_values
from soulkit.metrics.comparisons import auc, difference_of, paired_difference
from soulkit.metrics.intervals import (
    DASH,
    Interval,
    estimate,
    estimate_text,
    number,
    signed,
)
from soulkit.report.figures import (
    Chart,
    Curve,
    Dot,
    Plot,
    write_figures,
)
from soulkit.report.grid import Grid, GridRow, grid_parts
from soulkit.report.load import RunData, load_runs
from soulkit.report.published import published_beside
from soulkit.report.training import arm_charts, score_scale
from soulkit.runs.conditions import provenance_of
from soulkit.runs.folder import read_config
from soulkit.runs.jsonl import read_object, stored_json, unlinked, write_json
from soulkit.tasks.kit.coaching import judged_dimensions
from soulkit.text import counted, duration
from soulkit.train.ablate import FINAL, STATE, ListedRun
from soulkit.train.rejudge import judging_folder
from soulkit.train.state.metrics import StepLine
from soulkit.train.state.stops import dev_score
from soulkit.train.state.summary import LAST_STEPS, TrainSummary
from soulkit.version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType


ENDS = "The final judge score is the score that {} gives each method's last episodes: the newest " \
    "on held-out rows, else the drafts of the last steps."  # fmt: skip


def judged_end(run: Path, end: str) -> float | None:
    """The mean over tasks of the headline scores in the folder `end` (see `judging_folder`); None
    if the judge has not scored this run."""
    folder = run / end
    if not end or not (folder / "summary.json").is_file():
        return None
    (judged,) = load_runs([folder], episodes=False)
    means = [headline(cells).mean for cells in judged.tasks.values()]
    scored = [mean for mean in means if mean is not None]
    return fmean(scored) if scored and len(scored) == len(means) else None


@dataclass(frozen=True, slots=True)
class OverSeeds:
    """Mean over seeds with its 95% interval; None if there are too few."""

    mean: float | None
    low: float | None
    high: float | None
    seeds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MethodRow:
    """One method over its finished seeds."""

    arm: str
    group_size: int
    final: OverSeeds
    """Mean draft reward over the last steps."""
    area: OverSeeds
    """Mean height of the draft reward curve."""
    dev: OverSeeds
    """Last greedy score on the dev split."""
    final_difference: OverSeeds | None
    """Paired difference from the first method; None for the first itself."""
    area_difference: OverSeeds | None
    dev_difference: OverSeeds | None
    drafts: float | None
    """Sampled drafts per step."""
    refined: float | None
    trained: Mapping[str, float]
    """Part of the loss → trained tokens per step."""
    seconds: OverSeeds
    judge_calls: float | None = None
    """Calls of the judge in one training."""
    judged: OverSeeds = OverSeeds(None, None, None, ())
    """Score of the final replies by the common judge, if there is one."""
    judged_difference: OverSeeds | None = None
    mixed: tuple[str, ...] = ()
    """Reasons against showing a difference from the first method; empty if there are none."""
    remarks: tuple[str, ...] = ()
    """Differences that are part of the comparison, and conditions that were not recorded."""


@dataclass(frozen=True, slots=True)
class FinalScore:
    """A metric in the final evaluations of a method over all seeds, with intervals over rows."""

    arm: str
    task: str
    metric: str
    score: OverSeeds
    difference: OverSeeds | None
    """From the first method, paired by row and seed."""
    n_scored: int
    n: int


@dataclass(frozen=True, slots=True)
class Ablation:
    """All contents of the comparison."""

    rows: tuple[MethodRow, ...]
    missing: tuple[ListedRun, ...]
    """Runs without a result."""
    facts: tuple[tuple[str, str], ...]
    force_mixed: bool = False
    """Whether differences are shown despite different conditions."""
    eval_judge: str = ""
    """Judge of the final replies of all methods; empty: none."""
    curves: tuple[Chart, ...] = ()
    """Learning curves of all methods, with their seeds."""
    finals: tuple[FinalScore, ...] = ()
    """The final evaluations of the base model and of all methods, metric by metric."""

    @property
    def first(self) -> str:
        return self.rows[0].arm if self.rows else ""


# --- reading --------------------------------------------------------------------------------------


def load_ablation(out: Path) -> Ablation:
    """The comparison in the folder `out`; RunError if `soul train ablate` did not write it."""
    state = out / STATE
    if not state.is_file():
        raise RunError(
            f"There is no comparison in '{out}'.",
            f"The folder has no {STATE}, which lists the runs.",
            "Name a folder that `soul train ablate` wrote.",
        )
    plan = stored_json(state)
    listed = [ListedRun.from_json(line) for line in plan["runs"]]
    forced = bool(plan.get("force_mixed"))
    runs: dict[str, dict[int, RunData]] = {}
    for one in listed:
        trained = read_object(out / one.path / "summary.json").get("steps") == one.steps
        if trained or one.status == "finished":  # only its final evaluation may have failed
            (run,) = load_runs([out / one.path], episodes=False)
            runs.setdefault(one.arm, {})[one.seed] = run
    arms = [arm for arm in dict.fromkeys(one.arm for one in listed) if arm in runs]
    sizes = {one.arm: one.group_size for one in listed}
    first = runs[arms[0]] if arms and arms[0] == listed[0].arm else {}
    judge = str(plan.get("eval_judge", ""))
    end = judging_folder(judge) or FINAL
    rows = tuple(_row(arm, sizes[arm], runs[arm], first, forced, end) for arm in arms)
    missing = tuple(one for one in listed if one.status != "finished")
    curves = arm_charts({arm: [*runs[arm].values()] for arm in arms})
    folders = {"base model": {listed[0].seed: out / "base"}}
    folders |= {arm: {seed: run.path for seed, run in runs[arm].items()} for arm in arms}
    apart = {arm for arm, own in runs.items() if not forced and _differences(first, own, FINAL)[0]}
    finals = tuple(replace(one, difference=None) if one.arm in apart else one
                   for one in _final_scores(folders, listed[0].arm))  # fmt: skip
    return Ablation(rows, missing, tuple(_facts(out, listed)), forced, judge, tuple(curves), finals)


def _final_scores(folders: Mapping[str, Mapping[int, Path]], first: str) -> Iterator[FinalScore]:
    """Mean score, judged dimensions and companions of every task, from arm → seed → training."""
    ends = {arm: {seed: load_runs([path / FINAL])[0] for seed, path in own.items()
                  if (path / FINAL / "summary.json").is_file()}
            for arm, own in folders.items()}  # fmt: skip
    runs = [run for own in ends.values() for run in own.values()]
    rated = {(record.task, name) for run in runs for record in run.records
             for name in judged_dimensions(record.score)}  # fmt: skip
    cells = {(task, name): cell for run in runs for task, own in run.tasks.items()
             for name, cell in own.items()
             if name == VALUE or cell.beside or (task, name) in rated}  # fmt: skip
    for (task, metric), cell in cells.items():
        clusters: dict[Hashable, Hashable] = {}
        values: dict[str, dict[Hashable, float | None]] = {"": {}}
        for arm, seed, run in ((arm, *item) for arm, own in ends.items() for item in own.items()):
            played = [record for record in run.records if record.task == task]
            for record, value in metric_values(played, metric):
                key = seed, record.example_id, record.rollout
                clusters[key] = cluster_of(record)
                values.setdefault(arm, {})[key] = value
        for arm in [*values][1:]:
            scores = values[arm]
            a = estimate([*scores.values()], [clusters[key] for key in scores], scale=cell.scale)
            b = paired_difference(values.get(first, {}), scores, clusters, scale=cell.scale)
            whole = OverSeeds(a.mean, a.ci_low, a.ci_high, ())
            difference = OverSeeds(b.difference, b.ci_low, b.ci_high, ()) if arm != first else None
            name = cell.name or metric
            yield FinalScore(arm, task, name, whole, difference, a.n_scored, a.n)


def _row(
    arm: str, group_size: int, runs: Mapping[int, RunData], first: Mapping[int, RunData],
    forced: bool, end: str,
) -> MethodRow:  # fmt: skip
    mixed, remarks = ((), ()) if runs is first else _differences(first, runs)
    scale = score_scale([*runs.values(), *first.values()])
    # Final replies have their own folders, so they may share a judge when the trainings do not.
    judged_alike = forced or not _differences(first, runs, end)[0]
    measures: dict[str, Measure] = {**MEASURES, "judged": lambda run: judged_end(run.path, end)}
    stats: dict[str, Any] = {}
    for name, measure in measures.items():
        alike = judged_alike if name == "judged" else forced or not mixed
        scores, first_scores = ({seed: measure(run) for seed, run in side.items()}
                                for side in (runs, first))  # fmt: skip
        stats[name] = over_seeds(scores.values(), scale)
        differs = bool(first) and alike and runs is not first
        stats[f"{name}_difference"] = _paired(scores, first_scores, scale) if differs else None
    lines = [line for run in runs.values() for line in run.steps]
    return MethodRow(
        arm=arm, group_size=group_size, **stats, mixed=mixed, remarks=remarks,
        drafts=_mean([line.rewards.n_draft for line in lines]),
        refined=_mean([line.rewards.n_refined for line in lines]),
        trained=_parts(lines),
        judge_calls=_mean([run.summary.calls.get("judge", {}).get("calls") for run in runs.values()
                           if isinstance(run.summary, TrainSummary)]),
        seconds=over_seeds([run.summary.seconds if run.summary else None for run in runs.values()]),
    )  # fmt: skip


def _differences(
    first: Mapping[int, RunData], runs: Mapping[int, RunData], inside: str = ""
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(reasons against a difference, remarks) for a method and the first one, over their common
    seeds. Compares the run folders, or the finished folders `inside` them."""
    mixed: list[tuple[str, str]] = []
    beside: list[tuple[str, str]] = []
    for seed in sorted(first.keys() & runs.keys()):
        paths = [side[seed].path / inside for side in (first, runs)]
        if inside and not all((path / "summary.json").is_file() for path in paths):
            continue
        a, b = map(read_measured, paths)
        tasks = dict.fromkeys(task for run in (a, b) for task in run.settings.get("tasks", ()))
        blocking, remarks = differences(a, b, tasks, ("the first", "the other"))
        mixed += blocking
        beside += remarks
    return by_task(mixed), by_task(beside)


Measure = Callable[[RunData], float | None]
MEASURES: dict[str, Measure] = {
    "final": lambda run: _mean([line.rewards.draft for line in run.steps[-LAST_STEPS:]]),
    "area": lambda run: auc([line.step for line in run.steps],
                            [line.rewards.draft for line in run.steps]),
    "dev": lambda run: dev_score(run.evals[-1][1]) if run.evals else None,
}  # fmt: skip


def _paired(
    a: Mapping[int, float | None], b: Mapping[int, float | None], scale: Interval | None
) -> OverSeeds:
    """a − b over the common seeds, clipped to the largest possible difference."""
    pairs = [(value, b.get(seed)) for seed, value in a.items()]
    stat = over_seeds([difference_of(y, x) for x, y in pairs if x is not None and y is not None])
    if scale is None or stat.low is None or stat.high is None:
        return stat
    width = scale[1] - scale[0]
    return replace(stat, low=max(stat.low, -width), high=min(stat.high, width))


def over_seeds(values: Iterable[float | None], scale: Interval | None = None) -> OverSeeds:
    """Mean and interval of one number per seed; None for a seed without it."""
    seeds = tuple(v for v in values if v is not None)
    mean = estimate(seeds, range(len(seeds)), scale=scale)
    return OverSeeds(mean.mean, mean.ci_low, mean.ci_high, seeds)


def _parts(lines: Sequence[StepLine]) -> dict[str, float]:
    """Part of the loss → tokens per step; a step without the part counts as 0."""
    steps = [line.learned.trained for line in lines if line.learned.trained]
    names = dict.fromkeys(name for parts in steps for name in parts)
    return {name: fmean(parts.get(name, 0) for parts in steps) for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [v for v in values if v is not None]
    return fmean(numbers) if numbers else None


def _facts(out: Path, listed: Sequence[ListedRun]) -> list[tuple[str, str]]:
    """Facts that all runs share, for the head of the page."""
    shared = [
        ("steps", str(listed[0].steps)),
        ("prompts per step", str(listed[0].prompts_per_step)),
        ("seeds", ", ".join(map(str, sorted({one.seed for one in listed})))),
    ]
    done = [out / one.path for one in listed if one.status == "finished"]
    if done:
        config, facts = (
            read_config(done[0]),
            [provenance_facts(provenance_of(path, {})) for path in done],
        )
        shared = [("model", config["model"]), ("tasks", ", ".join(config["tasks"])), *shared]
        shared += [fact for fact in facts[0] if all(fact in others for others in facts)]
    return shared


# --- showing --------------------------------------------------------------------------------------


def stat_text(stat: OverSeeds | None, shown: Callable[[object], str] = number) -> str:
    """`0.412 [0.388, 0.436]`; a dash without a mean, no brackets for a single seed."""
    return DASH if stat is None else estimate_text(stat.mean, stat.low, stat.high, shown)


def rollouts_text(row: MethodRow) -> str:
    """`128 = 64 + 64 refined`."""
    if row.drafts is None:
        return DASH
    if not row.refined:
        return f"{row.drafts:,.0f}"
    return f"{row.drafts + row.refined:,.0f} = {row.drafts:,.0f} + {row.refined:,.0f} refined"


def trained_text(row: MethodRow) -> str:
    """`draft 410, copy 380`."""
    return ", ".join(f"{part} {n:,.0f}" for part, n in row.trained.items()) or DASH


def _has_ends(ablation: Ablation) -> bool:
    """Whether final replies were scored after training."""
    return bool(ablation.eval_judge or ablation.finals)


def _end_name(ablation: Ablation) -> str:
    return "judge score" if ablation.eval_judge else "evaluation"


def methods_grid(ablation: Ablation) -> Grid:
    """The table: scores with their differences from the first method, then budgets."""
    judged = [(f"final {_end_name(ablation)}", "judged")] if _has_ends(ablation) else []
    dev = [("dev", "dev")] if any(row.dev.mean is not None for row in ablation.rows) else []
    scores = [*judged, ("final reward", "final"), ("area", "area"), *dev]
    budgets = ("rollouts per step", "trained tokens per step", "time", "seeds")
    head = ("method", *(h for name, _ in scores for h in (name, "difference")), *budgets)
    rows = []
    for row in ablation.rows:
        stats = [(getattr(row, name), getattr(row, f"{name}_difference")) for _, name in scores]
        texts = [text for a, b in stats for text in (stat_text(a), stat_text(b, signed))]
        seconds = row.seconds.mean
        rows.append(GridRow.of(
            row.arm, *texts, rollouts_text(row), trained_text(row),
            DASH if seconds is None else duration(seconds, 1), str(len(row.seconds.seeds)),
        ))  # fmt: skip
    return Grid(
        head=head, rows=tuple(rows), n_below=len(head) - head.index("area"),
        notes=(*method_notes(ablation),
               *(f"Without a complete result: {missing_text(one)}" for one in ablation.missing)),
    )  # fmt: skip


def method_finding(ablation: Ablation) -> str:
    """One sentence: the method that differs most from the first one in its final evaluation or else
    its final reward, among those whose interval excludes zero."""
    name, what = ("judged", _end_name(ablation)) if _has_ends(ablation) else ("final", "reward")
    differences = {row.arm: getattr(row, f"{name}_difference") for row in ablation.rows}
    moved = {arm: d for arm, d in differences.items() if d and d.mean}
    clear = {arm: d for arm, d in moved.items() if (d.low or 0.0) > 0 or (d.high or 0.0) < 0}
    if len(ablation.rows) < 2:
        return "Fewer than two methods have a result, so nothing is compared."
    if not clear:
        return f"No method differs clearly from {ablation.first} in its final {what}."
    arm, most = max(clear.items(), key=lambda item: abs(item[1].mean or 0.0))
    return (f"The final {what} of {arm} differs from that of {ablation.first} by "
            f"{stat_text(most, signed)}, over {len(most.seeds)} seeds.")  # fmt: skip


def method_notes(ablation: Ablation) -> list[str]:
    """Notes below the table."""
    sentences = [
        "Means over seeds with 95% intervals; differences from "
        f"{ablation.first or 'the first method'} are paired by seed. The final reward is the mean "
        f"of the drafts in the last {LAST_STEPS} steps, or in all steps if there are fewer. The "
        "area is the mean height of the reward curve. Rollouts, and tokens in the loss by context, "
        "are means per step; a copy is not sampled and has the tokens of its refined twin.",
    ]
    sentences += [ENDS.format(ablation.eval_judge)] if ablation.eval_judge else []
    sampled = {round((r.drafts or 0) + (r.refined or 0)) for r in ablation.rows}
    if len(sampled) > 1 and max(sampled) > 1.1 * min(sampled):
        sentences.append("Budgets differ: the methods sample different numbers of rollouts.")
    sentences += [line for row in ablation.rows for line in _unlike_text(ablation, row)]
    if any(len(row.final.seeds) < 2 for row in ablation.rows):
        sentences.append("A method with one seed has no interval; its rank may be due to chance.")
    return sentences


def _unlike_text(whole: Ablation, row: MethodRow) -> list[str]:
    pair = f"{whole.first} vs {row.arm}"
    outcome = (
        "so the difference has several causes" if whole.force_mixed else "so no difference is given"
    )
    return [
        *(f"{pair}, {NOT_ALIKE}, {outcome}: {line}." for line in row.mixed),
        *(f"{pair}: {line}." for line in row.remarks),
    ]


def missing_text(run: ListedRun) -> str:
    """One line about a run without a result."""
    why = f": {run.reason}" if run.reason else ""
    return f"{run.arm} seed {run.seed} {run.status}{why}"


def as_json(ablation: Ablation) -> dict[str, Any]:
    """The content of `comparison.json`: everything shown, with the mean curve of each method."""
    missing = [run.to_json() for run in ablation.missing]
    names = ("label", "steps", "values", "low", "high")
    curves = [
        {"figure": chart.title, "panel": panel.title, **{name: getattr(c, name) for name in names}}
        for chart in ablation.curves for panel in chart.panels for c in panel.curves
        if not c.thin
    ]  # fmt: skip
    values = asdict(replace(ablation, curves=()))
    return {**values, "curves": curves, "missing": missing, "first": ablation.first,
            "version": __version__}  # fmt: skip


# --- page -----------------------------------------------------------------------------------------


def ablation_results(out: Path) -> tuple[Path, dict[str, Any], list[RenderableType]]:
    """The comparison in `out` as page (written to `out/report`), JSON and table."""
    made = load_ablation(out)
    return (
        write_ablation(made, unlinked(out, "report")),
        as_json(made),
        grid_parts(methods_grid(made)),
    )


def write_ablation(
    ablation: Ablation, folder: Path, title: str = "", grid: Grid | None = None
) -> Path:
    """Write `comparison.json` and `index.html` to `folder`, and `figures/*` if matplotlib is
    installed; return the page's path. `title` and `grid` replace those of a comparison."""
    from soulkit.report.pages import write_comparison_page

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", as_json(ablation))
    charts = ablation_charts(ablation)
    if find_spec("matplotlib"):
        write_figures(charts, folder / "figures")
    n = len(ablation.rows)
    return write_comparison_page(
        folder / "index.html", title=title or f"Comparison of {counted(n, 'method')}",
        finding=method_finding(ablation), grid=grid or methods_grid(ablation), charts=charts,
        facts=ablation.facts,
    )  # fmt: skip


def reproduction_grid(out: Path, ablation: Ablation, figure: Mapping[str, Any]) -> Grid:
    """The table of `soul reproduce`, from the comparison in `out`: final scores next to published
    ones, what each method cost, and what differs from the paper."""
    paths = sorted(file.parent for file in out.rglob(f"{FINAL}/summary.json"))
    ends = load_runs(paths, episodes=False)
    beside, columns = published_beside(ends), figure["published"]
    table = next((one for one in beside.tables if one.name == columns["table"]), None)
    costs, steps = {row.arm: row for row in ablation.rows}, int(dict(ablation.facts)["steps"])
    ((task, cells),) = ends[0].tasks.items()
    metric, rows = headline(cells).name or VALUE, []
    scores = {one.arm: one for one in ablation.finals if one.metric == metric}
    for arm in dict.fromkeys((*scores, *costs)):
        published = table.figure(task, columns.get(arm, "")) if table else None
        cost, end = costs.get(arm), scores.get(arm)
        spent = (f"{steps * ((cost.drafts or 0) + (cost.refined or 0)):,.0f}",
                 f"{cost.judge_calls or 0:,.0f}",
                 duration(cost.seconds.mean or 0, 1)) if cost else (DASH,) * 3  # fmt: skip
        seeds = ", ".join(f"{one:.2f}" for one in cost.judged.seeds) if cost else ""
        stats = (stat_text(end.score), stat_text(end.difference, signed), seeds or DASH,
                 f"{end.n_scored}/{end.n}") if end else (DASH,) * 4  # fmt: skip
        rows.append(GridRow.of(arm, *stats, number(published), *spent))
    head = ("method", f"{task}: {metric}", "difference", "seeds", "scored", "published",
            "samples", "judge calls", "time")  # fmt: skip
    notes = (
        f"Differences from {ablation.first} are paired by row and seed. Intervals are over "
        "clusters of rows and do not cover the spread of the seeds, whose scores are listed. "
        "Samples, judge calls and time are those of one training.",
        f"Differs from the paper: {figure['differs']}", *beside.notes,
        *(f"Without a complete result: {missing_text(one)}" for one in ablation.missing),
    )  # fmt: skip
    return Grid(head=head, rows=tuple(rows), notes=notes, n_below=4)


# --- figures --------------------------------------------------------------------------------------


def ablation_charts(ablation: Ablation) -> list[Chart]:
    """All figures for which the runs have data, in reading order."""
    rows = ablation.rows
    names = [row.arm for row in rows]
    final, gained = (
        _dots([row.final for row in rows]), _dots([row.final_difference for row in rows])
    )  # fmt: skip
    panels = [
        Plot(title="Final draft reward", rows=names, dots=final, axis="reward"),
        Plot(title=f"Difference from {ablation.first}", rows=names, dots=gained,
              axis="difference", rules=[("", 0.0)]),
    ]  # fmt: skip
    caption = (
        "Draft reward in the last steps, and its paired difference from the first method. Bars are "
        "95% intervals over seeds; each small mark is one seed."
    )
    shown = [panel for panel in panels if panel.dots]
    results = Chart(name="results", title="Results", caption=caption, panels=shown)
    return [*final_charts(ablation), *([results] if shown else []), *sweep_charts(ablation),
            *ablation.curves]  # fmt: skip


def final_charts(ablation: Ablation) -> list[Chart]:
    """The final evaluations: scores and differences of each metric."""
    panels = []
    for (task, metric), own in groupby(ablation.finals, lambda one: (one.task, one.metric)):
        scores = [*own]
        rows = [f"{one.arm} ({one.n_scored}/{one.n})" for one in scores]
        panels += [
            Plot(title=f"{task}: {metric}", rows=rows, dots=_dots([one.score for one in scores]),
                 axis="score"),
            Plot(title=f"{metric}: difference", rows=rows, axis=f"from {ablation.first}",
                 dots=_dots([one.difference for one in scores]), rules=[("", 0.0)]),
        ]  # fmt: skip
    caption = (
        "Means over evaluation rows and seeds with 95% intervals over clusters of rows, and paired "
        "differences. Scored/all episodes are in brackets."
    )
    made = Chart(name="final", title="Final evaluation", caption=caption, panels=panels)
    return [made] if panels else []


NUMBER = re.compile(r":([\w.]+)=([-+]?\.?\d[\d.]*(?:e[-+]?\d+)?)(?=:|$)", re.IGNORECASE)
"""A setting of an arm with a number as its value."""


def sweep_charts(ablation: Ablation) -> list[Chart]:
    """Final score, or else final reward, against every setting that has three or more values in
    arms that are otherwise the same."""
    rows, name = ablation.rows, "judged" if _has_ends(ablation) else "final"
    what = _end_name(ablation) if name == "judged" else "draft reward"
    swept: dict[str, dict[str, list[tuple[float, OverSeeds]]]] = {}
    for row in rows:
        for part in NUMBER.finditer(row.arm):
            rest = row.arm[: part.start()] + row.arm[part.end() :]
            points = swept.setdefault(part[1], {}).setdefault(rest, [])
            points.append((float(part[2]), getattr(row, name)))
    panels = []
    for setting, arms in swept.items():
        curves = [_swept_curve(arm, points) for arm, points in arms.items() if len(points) > 2]
        if curves:
            curves = [replace(curve, colour=n) for n, curve in enumerate(curves, 1)]
            mean = None if f":{setting}=" in rows[0].arm else getattr(rows[0], name).mean
            rules = [] if mean is None else [(rows[0].arm, mean)]
            panels.append(Plot(title="", curves=curves, axis=setting, steps=False, rules=rules))
    caption = "Means over seeds with 95% intervals. Dashed: the first method."
    return [Chart(name="sweep", title=f"Final {what} by setting", caption=caption,
                  panels=panels)] if panels else []  # fmt: skip


def _swept_curve(arm: str, points: Sequence[tuple[float, OverSeeds]]) -> Curve:
    values, stats = zip(*sorted(points, key=lambda point: point[0]), strict=True)
    return Curve(
        label=arm, steps=values, values=[s.mean for s in stats],
        low=[s.low for s in stats], high=[s.high for s in stats],
    )  # fmt: skip


def _dots(stats: Sequence[OverSeeds | None]) -> list[Dot]:
    return [
        Dot(label="", row=i, value=s.mean, low=s.low, high=s.high, seeds=s.seeds)
        for i, s in enumerate(stats) if s is not None and s.mean is not None
    ]  # fmt: skip
