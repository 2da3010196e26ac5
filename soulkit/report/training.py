"""What a training run says of itself: facts in one line each, and learning curves as inline SVG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from soulkit.errors import MissingPackage
from soulkit.metrics.intervals import estimate_text, signed
from soulkit.report.load import RunData
from soulkit.train.state.metrics import Alarm, Rewards, StepLine
from soulkit.train.state.stops import alike_feedback
from soulkit.train.state.summary import (
    AbilityTotals,
    CanaryTotals,
    FeedbackTotals,
    TrainSummary,
)

LEAK_CHECK = (
    "compares words: it finds feedback that says the answer, leaves few options open, or "
    "repeats private texts; it does not notice the answer in other words, such as a paraphrase or "
    "a code"
)
"""What the counts of leaks cover, shown for every training run with feedback."""
MODES = {
    "drop": LEAK_CHECK,
    "log": f"counts leaks and drops none (log); {LEAK_CHECK}",
    "off": "off: no feedback was checked",
}


def facts_of_training(summary: TrainSummary) -> list[tuple[str, str]]:
    """What stands in the head of a training run beside what every run has: label and text."""
    return [
        ("feedback", feedback_text(summary.feedback)),
        ("feedback texts", alike_feedback(summary.feedback.distinct) if summary.feedback else ""),
        ("leak check", leak_check_text(summary.feedback)),
        ("canaries", canary_text(summary.canaries)),
        ("general ability", ability_text(summary.retention)),
        ("probes", probe_text(summary.probes)),
        *lesson_facts(summary),
    ]


def feedback_text(feedback: FeedbackTotals | None) -> str:
    """`symbolic 512, 3 dropped (2 gold_text, 1 answerable); 0.42 different texts a draft; coach
    failed 4 times; 8 of 520 drafts wanted none`, or empty."""
    feedback = feedback or FeedbackTotals()
    parts = []
    for author, counts in feedback.coaches.items():
        kinds = ", ".join(f"{n} {kind}" for kind, n in counts.leaks.items())
        parts.append(f"{author} {counts.checked}, {counts.dropped} dropped")
        parts[-1] += f" ({kinds})" if kinds else ""
    if feedback.distinct is not None:
        parts.append(f"{feedback.distinct:.2f} different texts a draft")
    failures = feedback.coach_failures
    if failures:
        parts.append(f"coach failed {failures} time{'s' * (failures != 1)}")
    if feedback.gated:
        parts.append(f"{feedback.gated} of {feedback.drafts} drafts wanted none")
    return "; ".join(parts)


def leak_check_text(feedback: FeedbackTotals | None) -> str:
    """What the run did about leaks; empty without feedback."""
    return MODES[feedback.leak_check] if feedback and feedback.coaches else ""


def task_lines(rewards: Rewards) -> list[str]:
    """`TASK  draft 0.512  refined 0.634  gap +0.120 [+0.080, +0.160]`, each task of a mixture."""
    width = max((len(task) for task in rewards.draft_by_task), default=0)
    return [f"{task:{width}}  {_task_text(rewards, task)}" for task in rewards.draft_by_task]


def _task_text(rewards: Rewards, task: str) -> str:
    parts = []
    for label, by_task in (("draft", rewards.draft_by_task), ("refined", rewards.refined_by_task)):
        if (reward := by_task.get(task)) is not None:
            parts.append(f"{label} {reward:.3f}")
    if (gap := rewards.loo_by_task.get(task)) is not None:
        low, high = rewards.loo_low_by_task.get(task), rewards.loo_high_by_task.get(task)
        parts.append(f"gap {estimate_text(gap, low, high, signed)}")
    return "  ".join(parts)


LESSON_FACTS = ("validation loss", "texts written", "lessons", "left out", "rows without use")
"""The labels of `lesson_facts`."""
LABELLED_FACTS = ("general ability", "probes", *LESSON_FACTS)
"""The labels of `facts_of_training` that stand before texts which do not say what they are of."""


def lesson_facts(summary: TrainSummary) -> list[tuple[str, str]]:
    """Of a training on conversations: (label, text) of its losses and of what was left out."""
    facts = []
    if (valid := summary.validation) is not None:
        texts = [
            _moved(valid.first[name], loss, name)
            + (f" ({valid.lessons[name]:,} conversations)" if name in valid.lessons else "")
            for name, loss in valid.last.items()
        ]
        facts.append(("validation loss", "; ".join(texts)))
    if summary.written is not None:
        facts.append(("texts written", summary.written.words()))
    if learned := summary.lessons.learned:
        facts.append(("lessons", ", ".join(f"{name} {n:,}" for name, n in learned.items())))
    reasons = [f"{n:,} × {reason}" for reason, n in summary.lessons.left_out.items()]
    if n := summary.lessons.shortened:
        reasons.append(f"{n:,} lost their oldest turns")
    if reasons:
        facts.append(("left out", "; ".join(reasons)))
    rows = [
        f"{source}: " + ", ".join(f"{n:,} × {reason}" for reason, n in several.items())
        for source, several in summary.unusable.items()
        if several
    ]
    if rows:
        facts.append(("rows without use", "; ".join(rows)))
    return facts


def _moved(first: float, last: float, name: str) -> str:
    """`NAME 2.369 to 1.612`, of one that was measured once its loss alone."""
    return f"{name} {last:.3f}" if first == last else f"{name} {first:.3f} to {last:.3f}"


def validation_rows(
    measured: Sequence[tuple[int, Mapping[str, float]]],
) -> list[tuple[str, str, str]]:
    """(label, first, newest) loss of each validation source, of (step, source → loss)."""
    rows = []
    for name in dict.fromkeys(name for _, losses in measured for name in losses):
        ends = [(step, losses[name]) for step, losses in measured if name in losses]
        first, last = (
            f"{loss:.3f} ({f'step {step}' if step >= 0 else 'before'})"
            for step, loss in (ends[0], ends[-1])
        )
        rows.append((f"validation loss, {name}", first, last))
    return rows


def canary_text(canaries: CanaryTotals | None) -> str:
    """`keywords 0.10 to 0.12; no alarm`, or the newest alarms, and how many got no verdict; empty
    without canaries."""
    if canaries is None:
        return ""
    moved = [
        f"{name} {canaries.first[name]:.2f} to {value:.2f}"
        for name, value in canaries.last.items()
        if name in canaries.first
    ]
    silent = f"; {canaries.unscored} got no verdict" if canaries.unscored else ""
    total = canaries.alarms
    if not total:
        return f"{', '.join(moved) or 'not measured'}; no alarm{silent}"
    newest = "; ".join(map(alarm_text, canaries.newest))
    return f"{total} alarm{'s' * (total != 1)}, the newest at step {newest}{silent}"


def alarm_text(alarm: Alarm) -> str:
    """`12: keywords scores 0.80 (0.10 at first, drafts 0.55)`."""
    drafts = "" if alarm.drafts is None else f", drafts {alarm.drafts:.2f}"
    return (
        f"{alarm.step}: {alarm.canary} scores {alarm.value:.2f} "
        f"({alarm.first:.2f} at first{drafts})"
    )


def ability_text(ability: AbilityTotals | None) -> str:
    """`0.525 to 0.400 (40/40, 40/40 scored), -0.125 [-0.231, -0.019], 40 clusters: a regression`;
    empty where it was not measured."""
    if ability is None:
        return ""
    return ability.words() + (": a regression" if ability.regression else "")


def probe_text(probes: Mapping[str, Mapping[str, float | None]]) -> str:
    """`TASK 0.100 to 0.400 after 50 steps, 0.150 to 0.450 after 100`; empty without probes. One
    that ended without a result has a dash."""
    by_task: dict[str, list[str]] = {}
    for step, scores in probes.items():
        for name in scores:
            task, _, moment = name.rpartition("/")
            if moment == "before":
                ends = [scores.get(f"{task}/{one}") for one in ("before", "after")]
                moved = " to ".join("–" if score is None else f"{score:.3f}" for score in ends)
                steps = "" if by_task.get(task) else " steps"
                by_task.setdefault(task, []).append(f"{moved} after {step}{steps}")
    return "; ".join(f"{task} {', '.join(moves)}" for task, moves in by_task.items())


INK, GRID = "#010203", "#010204"
SERIES = ("#010301", "#010302", "#010303", "#010304", "#010305", "#010306")
_CSS = {INK: "var(--ink-2)", GRID: "var(--line)"} | {
    colour: f"var(--s{i})" for i, colour in enumerate(SERIES, 1)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a figure; None is a gap. `low` and `high` bound a band around it."""

    label: str
    steps: Sequence[int]
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawn figure; `legend` pairs each label with its CSS colour."""

    title: str
    caption: str
    svg: str
    legend: tuple[tuple[str, str], ...]


def learning_curves(run: RunData) -> list[Figure]:
    """The figures that a training run's lines allow, in reading order; none without lines.

    Raises MissingPackage when something is to be drawn and matplotlib is not installed.
    """
    plans = [
        ("Loss", "Of the imitated replies, per token, by step.", _imitation(run)),
        (
            "Rewards",
            "Mean reward of the drafts, and of the refined episodes that saw feedback.",
            [
                _curve(run, lambda line: line.rewards.draft, "drafts"),
                _curve(run, lambda line: line.rewards.refined, "refined"),
            ],
        ),
        (
            "Leave-one-out gap",
            "How much better refined episodes are than the other drafts of their example, with its "
            "95% interval: zero on average for feedback that says nothing.",
            [
                _gap_curve(run),
                _curve(run, lambda line: line.rewards.pair, "own draft"),
            ],
        ),
        (
            "Rewards by task",
            "Mean reward of the drafts of each task of the mixture.",
            _task_curves(run, lambda line: line.rewards.draft_by_task),
        ),
        (
            "Leave-one-out gap by task",
            "The same gap for each task of the mixture.",
            _task_curves(run, lambda line: line.rewards.loo_by_task),
        ),
        *_conversations(run),
        ("Evaluation while training", "Mean of each task, by training step.", _eval_curves(run)),
        (
            "Feedback",
            "Share of drafts with feedback, and of feedback in which the leak check found a leak.",
            [
                _curve(run, lambda line: line.feedback.share, "with feedback"),
                _curve(run, lambda line: line.feedback.leak_share, "leaks"),
            ],
        ),
        (
            "Policy",
            "Entropy and divergence from the base model, per token.",
            [
                _curve(run, lambda line: line.learned.means.entropy, "entropy"),
                _curve(run, lambda line: line.learned.kl_base, "KL to base"),
            ],
        ),
    ]
    figures = []
    for title, caption, curves in plans:
        drawable = [c for c in curves if any(v is not None for v in c.values)]
        if drawable:
            figures.append(_figure(title, caption, drawable, f"{run.name}/{title}"))
    return figures


StepColumn = Callable[[StepLine], float | None]


def _curve(run: RunData, column: StepColumn, label: str) -> Curve:
    steps = [line.step for line in run.steps]
    return Curve(label=label, steps=steps, values=[column(line) for line in run.steps])


def _task_curves(
    run: RunData, numbers: Callable[[StepLine], Mapping[str, float | None]]
) -> list[Curve]:
    """A line for each task; a step that played none of its rows is bridged, not a gap."""
    tasks = dict.fromkeys(task for line in run.steps for task in numbers(line))
    curves = []
    for task in tasks:
        lines = [line for line in run.steps if task in numbers(line)]
        values = [numbers(line)[task] for line in lines]
        curves.append(Curve(label=task, steps=[line.step for line in lines], values=values))
    return curves


def _gap_curve(run: RunData) -> Curve:
    return replace(
        _curve(run, lambda line: line.rewards.loo, "other drafts"),
        low=[line.rewards.loo_low for line in run.steps],
        high=[line.rewards.loo_high for line in run.steps],
    )


def _imitation(run: RunData) -> list[Curve]:
    """The loss where it is a likelihood; a policy gradient's loss says nothing to the eye."""
    supervised = not any(line.played for line in run.steps)
    return [_curve(run, lambda line: line.learned.loss, "loss")] if supervised else []


def _conversations(run: RunData) -> list[tuple[str, str, list[Curve]]]:
    """The losses of a training on conversations, by source."""
    losses = _task_curves(run, lambda line: line.learned.losses)
    return [
        (
            "Loss by source",
            "Of each source of conversations: nats per learned token of its own.",
            losses if len(losses) > 1 else [],  # a single one is the curve of the whole
        ),
        (
            "Validation loss",
            "Nats per learned token of what was not learned, by source. Step −1 is the model "
            "before the training.",
            _validation(run),
        ),
    ]


def _validation(run: RunData) -> list[Curve]:
    names = dict.fromkeys(name for _, losses in run.valid for name in losses)
    steps = [step for step, _ in run.valid]
    return [
        Curve(label=name, steps=steps, values=[losses.get(name) for _, losses in run.valid])
        for name in names
    ]


def _eval_curves(run: RunData) -> list[Curve]:
    tasks = dict.fromkeys(task for _, means in run.evals for task in means)
    steps = [step for step, _ in run.evals]
    return [
        Curve(label=task, steps=steps, values=[means.get(task) for _, means in run.evals])
        for task in tasks
    ]


def _figure(title: str, caption: str, curves: Sequence[Curve], salt: str) -> Figure:
    colours = [SERIES[i % len(SERIES)] for i in range(len(curves))]
    return Figure(
        title=title,
        caption=caption,
        svg=themed(_draw(curves, colours, salt), title),
        legend=tuple((c.label, _CSS[k]) for c, k in zip(curves, colours, strict=True)),
    )


def _draw(curves: Sequence[Curve], colours: Sequence[str], salt: str) -> str:
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingPackage("matplotlib", "the learning curves of a report") from error
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9}):
        figure = Canvas(figsize=(4.2, 2.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for curve, colour in zip(curves, colours, strict=True):
            _plot(axes, curve, colour)
        _dress(axes, curves)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return buffer.getvalue()


def _plot(axes: Any, curve: Curve, colour: str) -> None:
    y = [math.nan if v is None else v for v in curve.values]
    few = sum(v is not None for v in curve.values) <= 12
    axes.plot(
        curve.steps, y, color=colour, linewidth=1.6, marker="o" if few else "", markersize=3.2
    )
    if curve.low and curve.high:
        low = [math.nan if v is None else v for v in curve.low]
        high = [math.nan if v is None else v for v in curve.high]
        axes.fill_between(curve.steps, low, high, color=colour, alpha=0.16, linewidth=0)


def _dress(axes: Any, curves: Sequence[Curve]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("step", color=INK, fontsize=9, loc="right")
    steps = {s for c in curves for s in c.steps}
    if len(steps) == 1:
        axes.set_xlim(min(steps) - 0.5, min(steps) + 0.5)  # matplotlib's own limits show no integer
    values = [v for c in curves for v in (*c.values, *c.low, *c.high) if v is not None]
    if min(values) < 0 < max(values):
        axes.axhline(0, color=INK, linewidth=0.9)


def themed(svg: str, title: str) -> str:
    """The bare <svg> element, its placeholders replaced, its ids only those it refers to."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", svg)
    for placeholder, css in _CSS.items():
        svg = svg.replace(placeholder, css)
    svg = re.sub(r"\n\s*", "\n", svg)
    head = f'<svg role="img" aria-label="{title}"'
    return svg.replace("<svg", head, 1)
