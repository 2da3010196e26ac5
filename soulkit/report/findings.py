"""Differences of runs: the findings of a report in sentences, and the table of `soul compare`.

    runs ──▶ pairs (baseline, run) ──▶ paired differences ──▶ a claim, its evidence, seven facts

Each run is compared with the first earlier run that has one of its tasks: the baseline. The facts
are: what improved, by how much, how certain, why, what got worse, who judged, on which rows. A
difference whose interval includes zero is never called a gain. Nothing is scored again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from soulkit.data.rows import row_id
from soulkit.errors import UserError
from soulkit.eval.comparison.comparability import NOT_ALIKE
from soulkit.eval.comparison.compare import (
    Comparison,
    ReadRecords,
    TaskDifference,
    compare_runs,
)
from soulkit.eval.comparison.provenance_text import provenance_facts, role_text
from soulkit.eval.grid import grid_comparisons, grid_runs
from soulkit.eval.results.cells import suite_lines
from soulkit.eval.results.summary import VALUE, Cell, headline, metric_name, summary_line
from soulkit.eval.run.provenance import start_folder
from soulkit.metrics.comparisons import holm
from soulkit.metrics.intervals import DASH, estimate_text, interval_remark, number, signed
from soulkit.metrics.student import CONFIDENCE, significance
from soulkit.models.local.loading import adapter_hash
from soulkit.models.local.weights import ADAPTER_FILE
from soulkit.report.grid import Grid, GridRow, md_text
from soulkit.report.load import EPISODES, JUDGEMENTS, RunData, small_records
from soulkit.report.suites import common_suite, draft_steps, scales_of
from soulkit.report.tables import (
    Block,
    bounds_text,
    cell_text,
    comparable_runs,
    dollar_text,
    headline_label,
    mean_text,
    rows_across,
    task_label,
)
from soulkit.runs.conditions import Conditions, prompt_in
from soulkit.runs.folder import CONFIG, read_config
from soulkit.tasks.kit.registry import load_registry
from soulkit.text import counted, join_and, one_line
from soulkit.train.state.metrics import StepLine

if TYPE_CHECKING:
    from rich.console import RenderableType

    from soulkit.eval.comparison.contrasts import MeanDifference
    from soulkit.metrics.comparisons import PairedDifference

BETTER, WORSE, UNCLEAR, ONE_RUN, REFUSED = "better", "worse", "unclear", "one run", "not comparable"
_RANK = {BETTER: 0, WORSE: 0, UNCLEAR: 1, ONE_RUN: 2, REFUSED: 3}
SHOWN = 8
"""Number of findings that a terminal and a page show."""
_WORST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One comparison on one task or suite, or the description of one run."""

    run: str
    baseline: str = ""
    """Empty if the run is not compared."""
    task: str = ""
    outcome: str
    claim: str
    """One short sentence, for a heading."""
    evidence: str = ""
    """A second sentence: difference, interval, p, counts."""
    facts: tuple[tuple[str, str], ...] = ()
    """The seven facts: label and text."""
    moved: tuple[TaskDifference, ...] = ()
    """The parts whose interval excludes zero, largest difference first."""
    checked: int = 0
    """Number of parts that were compared."""
    p: float = 1.0

    @property
    def sentence(self) -> str:
        return f"{self.claim} {self.evidence}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "run": self.run, "baseline": self.baseline, "task": self.task,
            "outcome": self.outcome, "sentence": self.sentence, "facts": dict(self.facts),
            "moved": [{"task": t.task, "metric": t.metric, **asdict(t.paired)} for t in self.moved],
            "checked": self.checked,
        }  # fmt: skip


def findings(runs: Sequence[RunData]) -> list[Finding]:
    """The findings on `runs`, the most certain difference first; empty before the first result.

    RunError or DataError if a file with the conditions of a run is damaged.
    """
    shown, made = comparable_runs(runs), list[Finding]()
    loaded = {one.path / EPISODES: one.records for one in shown}
    read = lru_cache(2)(lambda path: loaded.get(path) or small_records(path))  # and a baseline
    for i, run in enumerate(shown):
        alike = [one.tasks.keys() & run.tasks.keys() for one in shown]
        if any(alike[:i]):
            base = next(one for one, shared in zip(shown, alike, strict=True) if shared)
            made += _compared(base, run, runs, read)
        elif not any(alike[i + 1 :]):
            made += _alone(run, runs)
    made = made or [Finding(run=run.name, outcome=ONE_RUN, claim=f"{training_text(run)}.")
                    for run in runs if run.steps]  # fmt: skip
    return sorted(made, key=lambda one: (_RANK[one.outcome], one.p))


# -- two runs --------------------------------------------------------------------------------------


def _compared(
    base: RunData, run: RunData, runs: Sequence[RunData], read: ReadRecords
) -> list[Finding]:
    """The mean of a suite and the tasks that moved, or all tasks; then what is not comparable."""
    registry = load_registry()
    try:
        whole = compare_runs(
            base.path, run.path, allow_mixed=True, breakdowns=True,
            suite=common_suite((base, run), registry) or "", registry=registry, read=read,
        )  # fmt: skip
    except UserError as error:
        return [_refused(base, run, "", error.what)]
    tasks = [task for task in whole.tasks if task.task not in whole.blocked]
    adjusted = holm([task.paired.p for task in tasks]) if len(tasks) > 1 else [None] * len(tasks)
    tasks = [replace(task, p_holm=p) for task, p in zip(tasks, adjusted, strict=True)]
    parts = [part for part in whole.breakdowns if part.task not in whole.blocked]
    mean = [] if whole.blocked else list(_suite_mean(whole))
    kept = [task for task in tasks if not mean or change_of(task) != UNCLEAR]
    whys: dict[str, list[str]] = {}
    for task, lines in whole.blocked.items():
        whys.setdefault("; ".join(lines), []).append(task)
    return [
        *(_difference(one, tasks, [*tasks, *parts], (base, run), runs) for one in mean),
        *(_difference(one, [part for part in parts if part.task == one.task], [*tasks, *parts],
                      (base, run), runs) for one in kept),
        *(_refused(base, run, join_and(some), why) for why, some in whys.items()),
    ]  # fmt: skip


def _suite_mean(whole: Comparison) -> Iterator[TaskDifference]:
    for mean in whole.means[-1:]:
        signs = f"mean; {mean.better} of {mean.members} tasks higher"
        n_a, n_b = (sum(getattr(task, side) for task in whole.tasks) for side in ("n_a", "n_b"))
        if mean.paired.difference is not None:
            yield TaskDifference(task=whole.suite, metric=f"{signs}, {mean.worse} lower",
                                 paired=mean.paired, p_holm=None, n_a=n_a, n_b=n_b)  # fmt: skip


def change_of(one: TaskDifference) -> str:
    """Whether a difference is clear: its interval excludes zero, or without one its p is small."""
    pair = one.paired
    if pair.p is None or pair.p >= significance(CONFIDENCE) or not pair.difference:
        return UNCLEAR
    return BETTER if (pair.difference > 0) != one.less_is_better else WORSE


def _difference(
    one: TaskDifference, parts: Sequence[TaskDifference], checked: Sequence[TaskDifference],
    pair: tuple[RunData, RunData], runs: Sequence[RunData],
) -> Finding:  # fmt: skip
    """The finding on one difference; `parts` may explain it, `checked` may have got worse."""
    base, run = (_label(side, runs) for side in pair)
    a, b = number(one.paired.mean_a), number(one.paired.mean_b)
    outcome = change_of(one)
    label = _over_steps(task_label(one.task, one.metric), pair[1], one.task)
    way = "up" if (one.paired.difference or 0) > 0 else "down"
    n, of = one.paired.n_shared, max(one.n_a, one.n_b)
    part = f", on the {n:,} of {of:,} episodes scored in both" if n < of else ""
    claim = f"{run} scores {b} on {label}, {way} from {a} in {base}{part}."
    if outcome == UNCLEAR:
        claim = f"No clear difference on {label}{part}: {run} scores {b}, {base} {a}."
    moved = sorted((part for part in parts if change_of(part) != UNCLEAR),
                   key=lambda part: -abs(part.paired.difference or 0.0))  # fmt: skip
    return Finding(
        run=pair[1].name, baseline=pair[0].name, task=one.task, outcome=outcome, claim=claim,
        evidence=f"Difference {difference_text(one.paired)}. {_certainty(one)}.",
        moved=tuple(moved), checked=len(parts), p=1.0 if one.paired.p is None else one.paired.p,
        facts=(
            ("What improved" if outcome == BETTER else "What changed",
             f"{'Nothing clearly: ' * (outcome == UNCLEAR)}{label}, {run} compared with {base}"
             + _about(one.task)),
            ("By how much", f"{difference_text(one.paired)}, from {a} to {b}"),
            ("How certain", _certainty(one)),
            ("Why", _why(pair, runs, one.task, moved)),
            ("What got worse", _worse(checked)),
            ("Who judged", judges_text(pair[1], one.task)),
            ("On which rows", f"The same in both runs: {n} of {of} episodes of "
             f"{one_line(one.task)} scored in both{_trained_on(one.task, pair[1], runs)}"),
        ),
    )  # fmt: skip


def _refused(base: RunData, run: RunData, tasks: str, why: str) -> Finding:
    on = f" on {tasks}" if tasks else ""
    claim = f"{_quoted(run)} cannot be compared with {_quoted(base)}{on}: {why.rstrip('.')}."
    return Finding(
        run=run.name, baseline=base.name, task=tasks, outcome=REFUSED, claim=one_line(claim),
        evidence="The table shows the mean of each run.",
    )  # fmt: skip


def _label(run: RunData, runs: Sequence[RunData]) -> str:
    made = maker(run, runs)
    control = " (control: shuffled feedback)" if made and _shuffled(made) else ""
    return f"{_quoted(run)}{control}"


def _quoted(run: RunData) -> str:
    """A run's name in quotation marks, because many are ordinary words."""
    return f"'{one_line(run.name, 60)}'"


def _about(task: str) -> str:
    """`. The task: SUMMARY` for a built-in task."""
    spec = load_registry().specs.get(task)
    return f". The task: {spec.summary}" if spec else ""


def _over_steps(label: str, run: RunData, task: str) -> str:
    """The label of a headline that averages drafts of training says over which steps."""
    steps = draft_steps(run, task)
    return f"{label} in the drafts of the last {counted(steps, 'step')}" if steps else label


def difference_text(paired: PairedDifference | None) -> str:
    """`+0.210 [+0.150, +0.270]`."""
    if paired is None or paired.difference is None:
        return DASH
    if paired.ci_low is None:
        beside = f" ({interval_remark(paired.n_clusters, paired.method)})"
        return f"{signed(paired.difference)}{beside if paired.n_clusters else ''}"
    return estimate_text(paired.difference, paired.ci_low, paired.ci_high, signed)


def _certainty(one: TaskDifference) -> str:
    """`p < 0.0001 (Holm 0.0002); the 95% interval excludes zero; 450 episodes in 300 clusters`."""
    pair = one.paired
    texts = ["No p-value" if pair.p is None else f"p = {p_text(pair.p)}".replace("= <", "< ")]
    if one.p_holm is not None:
        texts[0] += f" (Holm {p_text(one.p_holm)})".replace("<", "< ")
    if pair.ci_low is not None and pair.ci_high is not None:
        zero = "includes" if pair.ci_low <= 0 <= pair.ci_high else "excludes"
        texts.insert(0, f"The 95% interval {zero} zero")
    remark = interval_remark(pair.n_clusters, pair.method) or "clusters unknown"
    return "; ".join([*texts, f"{counted(pair.n_shared, 'episode')}, {remark}"])


def _worse(checked: Sequence[TaskDifference]) -> str:
    worse = sorted((one for one in checked if change_of(one) == WORSE),
                   key=lambda one: -abs(one.paired.difference or 0.0))  # fmt: skip
    texts = [
        f"{task_label(one.task, one.metric)} {difference_text(one.paired)}"
        + (", less is better" if one.less_is_better else "")
        for one in worse[:_WORST]
    ]
    texts += [f"{len(worse) - _WORST} more"] if len(worse) > _WORST else []
    n = f"{counted(len(checked), 'difference')} checked (tasks, metrics, break-downs)"
    return "; ".join([*(texts or ["Nothing got clearly worse"]), n])


# -- why -------------------------------------------------------------------------------------------


def _why(
    pair: tuple[RunData, RunData], runs: Sequence[RunData], task: str,
    moved: Sequence[TaskDifference],
) -> str:  # fmt: skip
    """The training that made the model, beside its control and how its model scores, or how the
    models differ; then the part that moved most."""
    made = maker(pair[1], runs)
    if made:
        controls = [one for one in runs if one is not made and _shuffled(one)]
        controls = [pair[0]] if pair[0].kind == "train" else controls
        texts = [training_text(made), *(training_text(one) + _model_of(one, runs, task)
                 for one in controls[: any(map(_gap, made.steps))])]  # fmt: skip
    else:
        a, b = (one.summary.model if one.summary else "" for one in pair)
        texts = [f"Another model: '{b}' instead of '{a}'" if a != b else "Both name the same model"]
        prompts = [prompt_in(one.provenance) or "none" for one in pair]
        if prompts[0] != prompts[1]:
            texts.append(f"Another system prompt: {prompts[1]} instead of {prompts[0]}")
    for part in moved[:1]:
        a, b = number(part.paired.mean_a), number(part.paired.mean_b)
        texts.append(f"The metric that moved most: {part.metric}, {a} to {b}")
    return one_line(". ".join(texts))


def _model_of(training: RunData, runs: Sequence[RunData], task: str) -> str:
    """`. The control's model scores 0.000 [0.000, 0.079] ('after_shuffled')`; empty if unknown."""
    fits = (run for run in runs if run.kind == "eval" and task in run.tasks)
    texts = (f"scores {cell_text(headline(run.tasks[task]))} ({_quoted(run)})"
             for run in fits if _made(training, run))  # fmt: skip
    return next((f". The control's model {text}" for text in texts), "")


def maker(run: RunData, runs: Sequence[RunData]) -> RunData | None:
    """The training run that made the model of `run`, by the hash or the path of its weights."""
    trained = [one for one in runs if one.kind == "train"]
    return run if run.kind == "train" else next((t for t in trained if _made(t, run)), None)


def _made(training: RunData, run: RunData) -> bool:
    actor = run.provenance.get("actor")
    known: Mapping[str, Any] = actor if isinstance(actor, Mapping) else {}
    digest, file = known.get("adapter_weights"), training.path / "model" / ADAPTER_FILE
    weights = _weights(file.parent, file.stat().st_mtime_ns) if digest and file.is_file() else ""
    if weights and weights.startswith(str(digest)):
        return True
    named = known.get("adapter") or known.get("model")
    place = (start_folder(run.path) or Path()) / str(named)
    return bool(named) and place.resolve().is_relative_to(training.path.resolve())


@lru_cache
def _weights(folder: Path, changed: int) -> str:
    """The hash of an adapter that was written at `changed`; every finding asks for it."""
    return adapter_hash(folder)


def _shuffled(run: RunData) -> bool:
    recorded = run.kind == "train" and (run.path / CONFIG).is_file()
    return recorded and read_config(run.path).get("shuffle_feedback") is True


def _gap(line: StepLine) -> bool:
    return line.rewards.loo is not None


def training_text(run: RunData) -> str:
    """Whether feedback helped: the leave-one-out gap at the first step and its mean over the run;
    without feedback, how the reward or the loss moved."""
    name, measured = _quoted(run), [line for line in run.steps if _gap(line)]
    if measured:
        first = measured[0].rewards
        gap = estimate_text(first.loo, first.loo_low, first.loo_high, signed)
        said = ("helped" if (first.loo_low or 0) > 0 else "hurt" if (first.loo_high or 0) < 0
                else "did not clearly help")  # fmt: skip
        whose = "Control: shuffled feedback" if _shuffled(run) else "Feedback"
        mean = signed(fmean(one.rewards.loo or 0.0 for one in measured))
        when = "the first step" if measured[0] is run.steps[0] else f"step {measured[0].step}"
        return (
            f"{whose} {said} in {name}: replies that saw it scored {gap} compared with the other "
            f"drafts of their row at {when}, {mean} on average over "
            f"{counted(len(measured), 'step')}"
        )
    drafts = [line.rewards.draft for line in run.steps if line.rewards.draft is not None]
    losses = [line.learned.loss for line in run.steps if line.learned.loss is not None]
    what, ends = ("draft reward", drafts) if drafts else ("loss", losses)
    moved = f", {what} {number(ends[0])} to {number(ends[-1])}" if ends else ""
    fed = any(line.rewards.n_refined or line.feedback.share for line in run.steps)
    how = "with feedback, whose effect was not measured" if fed else "without feedback"
    return f"{name} trained {counted(len(run.steps), 'step')} {how}{moved}"


# -- judges and rows -------------------------------------------------------------------------------


def judges_text(run: RunData, task: str = "") -> str:
    """Who scored a task, or all tasks: rules, or judge models with their number of opinions."""
    tasks = run.provenance.get("tasks")
    if not isinstance(tasks, Mapping) or not tasks:
        return "Not recorded"
    own = {task: tasks[task]} if task in tasks else tasks
    judge = one_line(role_text({**run.provenance, "tasks": own}, "judge"), 200)
    samples = run.provenance.get("panel", {}).get("samples")
    asked = f", {samples} opinions each" if isinstance(samples, int) and samples > 1 else ""
    if not judge:
        return "Rules; no judge model was asked"
    return "; ".join([f"Judge model {judge}{asked}", *_agreements(run, task)])


def _agreements(run: RunData, task: str) -> Iterator[str]:
    """`j again: alpha 0.83 [0.60, 0.92], reliable`: the finished judge checks beside the run."""
    for file in sorted(run.path.parent.glob(f"*/{JUDGEMENTS}")):
        check = summary_line(file.parent)
        checked = (start_folder(file.parent) or Path()) / str(check.get("run", ""))
        if "tasks" not in check or checked.resolve() != run.path.resolve():
            continue
        whole = check["tasks"].get(task, {}).get("dimensions", {}).get("headline", {})
        pairs = [(f"{judge} again", cell) for judge, cell in whole.get("retest", {}).items()]
        pairs += whole.get("between", {}).items()
        pairs += [(f"{judge} and people", cell) for judge, cell in whole.get("people", {}).items()]
        for who, cell in pairs:
            alpha = cell and cell["alpha"]
            if alpha and alpha["value"] is not None:
                ends = estimate_text(alpha["value"], alpha["ci_low"], alpha["ci_high"],
                                     partial(number, digits=2))  # fmt: skip
                yield f"{one_line(who)}: alpha {ends}, {cell['trust']}"


def _trained_on(task: str, run: RunData, runs: Sequence[RunData]) -> str:
    """`; none of 450 rows used in training by the runs shown`; empty if none recorded its rows."""
    used = frozenset().union(*(_row_ids(one, task) for one in runs if one.kind == "train"))
    own = _row_ids(run, task) if run.kind == "eval" else frozenset()
    if not own or not used:
        return ""
    return f"; {len(own & used) or 'none'} of {len(own)} rows used in training by the runs shown"


def _row_ids(run: RunData, task: str) -> frozenset[str]:
    conditions = Conditions.read(run.path)
    return frozenset(map(row_id, conditions.of_task(task).rows)) if conditions else frozenset()


# -- one run ---------------------------------------------------------------------------------------


def _alone(run: RunData, runs: Sequence[RunData]) -> list[Finding]:
    """The mean of a suite with its tasks, or the headline of each task with its parts."""
    registry = load_registry()
    if name := common_suite([run], registry):
        *_, line = suite_lines(registry.suite_spec(name), run.tasks, scales_of(registry))
        members = {task: headline(cells) for task, cells in run.tasks.items()}
        return [_described(run, name, f"{name} (mean)", line.cell, members, runs)]
    return [
        _described(run, task, _over_steps(headline_label([run], task), run, task), headline(cells),
                   {metric_name(part, cells): one for part, one in cells.items()
                    if part.startswith(f"{VALUE}/")}, runs)
        for task, cells in run.tasks.items()
    ]  # fmt: skip


def _described(
    run: RunData, task: str, label: str, cell: Cell, parts: Mapping[str, Cell],
    runs: Sequence[RunData],
) -> Finding:  # fmt: skip
    name, made = _quoted(run), maker(run, runs)
    means = sorted((one.mean, f"{one_line(part)} {cell_text(one)}")
                   for part, one in parts.items() if one.mean is not None)  # fmt: skip
    why = [training_text(made)] if made else []
    why += [f"Lowest: {means[0][1]}", f"Highest: {means[-1][1]}"] if len(means) > 1 else []
    bounds = f"; worst to best {bounds_text(cell)}" if bounds_text(cell) else ""
    says = "has no mean" if cell.mean is None else f"scores {number(cell.mean)}"
    unfinished = f" The run is unfinished: {run.progress.text()}." if run.progress else ""
    return Finding(
        run=run.name, task=task, outcome=ONE_RUN, claim=f"{name} {says} on {label}.",
        evidence=f"{mean_text(cell)}.{unfinished}",
        facts=(
            ("What was measured", f"{label} in {name}{_about(task)}"),
            ("How much", cell_text(cell)),
            ("How certain", f"{mean_text(cell)}{bounds}"),
            ("Why", ". ".join(why) or "No break-downs"),
            ("What got worse", "Unknown: there is no other run to compare with"),
            ("Who judged", judges_text(run, task)),
            ("On which rows", f"{counted(cell.n, 'episode')}{_trained_on(task, run, runs)}"),
        ),
    )  # fmt: skip


# -- in a terminal and in Markdown -----------------------------------------------------------------


def finding_parts(found: Sequence[Finding]) -> list[RenderableType]:
    """The findings for a terminal: rich renderables, top to bottom."""
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2, 0, 0))
    lead = [Text(one.claim, style="bold") for one in found[:1]]
    if found and found[0].outcome == ONE_RUN:  # the table shows the rest
        return [*lead, *(Text(one.claim) for one in found[1:SHOWN])]
    for label, text in found[0].facts if found else ():
        facts.add_row(Text(label, style="dim", no_wrap=True), Text(text))
    others = [Text(f"• {one.sentence}") for one in found[1:SHOWN]]
    more = f"{len(found) - SHOWN} more: soul report --json" if len(found) > SHOWN else ""
    return [*lead, facts, *others, *([Text(more)] if more else [])]


def findings_markdown(found: Sequence[Finding]) -> str:
    """The findings as Markdown: the first with its facts, then a list; empty without findings."""
    lines = [f"**{md_text(one.claim)}**\n" for one in found[:1]]
    lines += [f"- {label}: {md_text(text)}" for one in found[:1] for label, text in one.facts]
    return "\n".join([*lines, "", *(f"- {md_text(one.sentence)}" for one in found[1:]), ""])


# -- the table of `soul compare` -------------------------------------------------------------------


_HEADS = ("A", "B", "B \u2212 A [95% CI]", "p", "p (Holm)", "shared", "clusters")


def comparison_blocks(result: Comparison) -> list[Block]:
    """The table of differences and its notes, top to bottom."""
    alike, rows = len(_metrics(result)) == 1, []
    for task in result.tasks:
        name = task.task if alike else task_label(task.task, task.metric)
        name += f" ({', '.join(task.over)})" if task.over else ""
        rows.append(_row(one_line(name), task.paired, p_text(task.p_holm)))
    rows += [_row(f"{m.name} ({m.level})", m.paired, DASH, level="suite") for m in result.means]
    table = Grid(head=("task", *_HEADS), rows=tuple(rows), n_below=4)
    gates = (gate.line(signed) for gate in result.gates)
    return [*_head(result), table, *gates, *_notes(result)]


def _head(result: Comparison) -> list[str]:
    """The two runs with their judge and rows, and what is compared."""
    lines = [f"A: {result.a}", f"B: {result.b}", f"metric: {', '.join(_metrics(result))}"]
    for place, origin in enumerate(result.origins):
        facts = " · ".join(f"{label} {text}" for label, text in provenance_facts(origin))
        lines[place] += f" · {facts}" if facts else ""
    if result.shared_rows:
        rows = (f"{task} {one.words()}" for task, one in result.shared_rows.items())
        lines += [f"shared rows only: {', '.join(rows)}"]
    return [*lines, f"suite: {result.suite}"] if result.suite else lines


def _notes(result: Comparison) -> list[str]:
    notes = [f"{NOT_ALIKE}: {line}" for line in result.mixed]
    notes += [f"note: {line}" for line in result.remarks]
    notes += [f"only in A: {', '.join(result.only_a)}"] if result.only_a else []
    notes += [f"only in B: {', '.join(result.only_b)}"] if result.only_b else []
    notes += [
        f"{t.task}: {t.paired.n_only_a} scored only in A, {t.paired.n_only_b} only in B"
        for t in result.tasks
        if t.paired.n_only_a or t.paired.n_only_b
    ]
    for mean in result.means:
        notes += [_signs(mean)]
    return [
        *notes,
        "A, B and B \u2212 A cover only the episodes that both runs scored (shared).",
        "p is the p-value of B \u2212 A; p (Holm) is corrected for the number of tasks.",
    ]


def _clusters(pair: PairedDifference) -> str:
    """`32`, `7: few`, `no spread in 7`: the number of clusters behind the difference."""
    if not pair.n_clusters:
        return DASH
    remark = interval_remark(pair.n_clusters, pair.method)
    return remark.replace(" clusters", "").replace(" cluster", "")


def _signs(mean: MeanDifference) -> str:
    """`COG: 2 of 3 members better, 1 worse`, then missing members and the bounds of the mean."""
    counted = f"{mean.name}: {mean.better} of {mean.members} members better, {mean.worse} worse"
    if not mean.missing:
        return counted
    low, high = number(mean.worst), number(mean.best)
    bounds = "" if mean.worst is None else f"; it would be between {low} and {high}"
    return f"{counted}; no mean ({', '.join(mean.missing)} missing){bounds}"


def _metrics(result: Comparison) -> list[str]:
    """The compared metrics, under the names that the tasks declare."""
    return list(dict.fromkeys(task.metric for task in result.tasks))


def p_text(p: float | None) -> str:
    """A p-value with four digits; a smaller one is `<0.0001`, not zero."""
    return "<0.0001" if p is not None and p < 0.0001 else number(p, 4)


def _row(name: str, pair: PairedDifference, p_holm: str, level: str = "task") -> GridRow:
    return GridRow.of(
        name,
        number(pair.mean_a),
        number(pair.mean_b),
        estimate_text(pair.difference, pair.ci_low, pair.ci_high, signed),
        p_text(pair.p),
        p_holm,
        str(pair.n_shared),
        _clusters(pair),
        level=level,
    )


COMBINATIONS = ("task", "run", "system prompt", "mean [95% CI]", "difference [95% CI]", "scored",
                "p (Holm)", "cost of the run")  # fmt: skip


def combinations_grid(runs: Sequence[RunData]) -> Grid | None:
    """The table of several models and system prompts, each compared with the first; None if `runs`
    are not those of one grid."""
    by_path = {run.path: run for run in runs}
    folder = runs[0].path.parent if runs else Path()
    order = grid_runs(folder) if len(runs) > 1 else []
    if not order or not by_path.keys() <= set(order):
        return None
    made, notes = grid_comparisons(folder)
    moved = {(Path(one.b), task.task): task for one in made for task in one.tasks}
    runs = [by_path[path] for path in order if path in by_path]
    notes += [f"{run.name} is unfinished: {run.progress.text()}" for run in runs if run.progress]
    rows = []
    for task, cells in rows_across(runs):
        for run, cell in zip(runs, (one or Cell() for one in cells), strict=True):
            pair, cost = moved.get((run.path, task)), run.summary.cost if run.summary else None
            rows.append(GridRow.of(
                task, run.name, prompt_in(run.provenance), cell_text(cell),
                difference_text(pair.paired if pair else None), f"{cell.n_scored}/{cell.n}",
                p_text(pair.p_holm if pair else None), dollar_text(cost),
            ))  # fmt: skip
    return Grid(
        title="Models and system prompts", head=COMBINATIONS, words=COMBINATIONS[:3], n_below=3,
        rows=tuple(rows), grouped=True, n_names=2,
        notes=(f"Differences are paired with {order[0].name}, row by row. Holm's p is corrected "
               "for all of them.", *notes),
    )  # fmt: skip
