"""Learning curves as inline SVG.

Each curve is a small figure of its own, so that a phone can stack them. matplotlib draws with
placeholder colours; they are then replaced by CSS variables, which lets one picture follow the
light or dark scheme of the page around it, and the text stays text. The drawing is deterministic.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from soulkit.errors import MissingPackage
from soulkit.report.load import RunData
from soulkit.train.state.lines import StepLine

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
    return [
        (
            "Loss by source",
            "Of each source of conversations: nats per learned token of its own.",
            _several(_task_curves(run, lambda line: line.learned.losses)),
        ),
        (
            "Validation loss",
            "Nats per learned token of what was not learned, by source. Step −1 is the model "
            "before the training.",
            _validation(run),
        ),
    ]


def _several(curves: list[Curve]) -> list[Curve]:
    """Nothing for a single one, which would repeat the curve of the whole."""
    return curves if len(curves) > 1 else []


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
