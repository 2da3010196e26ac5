"""Draws figures as inline SVG in a page's colours and as PNG; learning curves of a run."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from soulkit.errors import MissingPackage
from soulkit.report.load import RunData
from soulkit.train.state.metrics import StepLine

INK, GRID = "#010203", "#010204"
SERIES = ("#010301", "#010302", "#010303", "#010304", "#010305", "#010306")
_CSS = {INK: "var(--ink-2)", GRID: "var(--line)"} | {
    colour: f"var(--s{i})" for i, colour in enumerate(SERIES, 1)
}


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours for ink, grid and series."""

    ink: str
    grid: str
    series: tuple[str, ...]

    def of(self, index: int) -> str:
        """The colour of a method; the first one, the reference, is drawn in ink."""
        return self.ink if index == 0 else self.series[(index - 1) % len(self.series)]


PAGE = Palette(INK, GRID, SERIES)
PAPER = Palette(
    "#40444b", "#dcdcd7", ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#c98a00", "#3f9fd8")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawn figure; `legend` pairs each label with its CSS colour."""

    title: str
    caption: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()


DrawFigure = Callable[[Any, Palette], None]
Numbers = Sequence[float | None]


def draw_figure(
    title: str, caption: str, size: tuple[float, float], salt: str, draw: DrawFigure, *,
    png: Path | None = None, legend: tuple[tuple[str, str], ...] = (),
) -> Figure:  # fmt: skip
    """Draw a figure of this size in inches: as SVG for a page, and as the file `png` for slides.

    MissingPackage without matplotlib.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingPackage("matplotlib", "the figures of a report") from error
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9}):
        page = Canvas(figsize=size, layout="constrained")
        FigureCanvasSVG(page)
        draw(page, PAGE)
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        page.savefig(text, format="svg", transparent=True, metadata=nothing)
        if png is not None:
            png.parent.mkdir(parents=True, exist_ok=True)
            paper = Canvas(figsize=size, layout="constrained")
            FigureCanvasAgg(paper)
            draw(paper, PAPER)
            paper.savefig(png, dpi=160, metadata={"Software": None})
    return Figure(title=title, caption=caption, svg=themed(text.getvalue(), title), legend=legend)


def themed(svg: str, title: str) -> str:
    """The bare <svg> element with CSS colours and without unused ids."""
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


def dress(axes: Any, palette: Palette, *, grid: str, ticks: tuple[int, int] = (4, 4)) -> None:
    """Remove the frame; keep thin lines along `grid`, "x" or "y"."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(palette.grid)
    axes.grid(axis=grid, color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=palette.ink, length=0, labelsize=9)
    if grid == "y":
        axes.xaxis.set_major_locator(MaxNLocator(ticks[0], integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(ticks[1]))


def plot_band(
    axes: Any, steps: Sequence[int], mean: Numbers, low: Numbers, high: Numbers, colour: str, *,
    style: Any = "-", width: float = 1.6, fill: bool = True, few: int = 1,
) -> None:  # fmt: skip
    """A curve with its interval; None is a gap. Points are marked if there are at most `few`."""
    marked = sum(v is not None for v in mean) <= few
    axes.plot(steps, _with_gaps(mean), color=colour, linewidth=width, linestyle=style,
              marker="o" if marked else "", markersize=3.2)  # fmt: skip
    if fill and low and high:
        between = _with_gaps(low), _with_gaps(high)
        axes.fill_between(steps, *between, color=colour, alpha=0.2, linewidth=0)


def _with_gaps(values: Numbers) -> list[float]:
    return [math.nan if v is None else v for v in values]


def plot_point(
    axes: Any, y: float, mean: float, ends: tuple[float | None, float | None], colour: str
) -> None:
    """A mean at height `y`, with its interval as a bar."""
    low, high = ends
    if low is not None and high is not None:
        axes.plot([low, high], [y, y], color=colour, linewidth=4, alpha=0.3,
                  solid_capstyle="butt")  # fmt: skip
    axes.plot([mean], [y], "o", color=colour, markersize=6)


# --- learning curves ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a figure; None is a gap. `low` and `high` bound a band around it."""

    label: str
    steps: Sequence[int]
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def learning_curves(run: RunData) -> list[Figure]:
    """The figures for which a training run has data, in reading order; none without step lines.

    MissingPackage if there is something to draw and matplotlib is not installed.
    """
    plans = [
        ("Loss", "Loss of the imitated replies, per token, by step.", _imitation(run)),
        (
            "Rewards",
            "Mean reward of drafts and of refined episodes, which saw feedback.",
            [
                _curve(run, lambda line: line.rewards.draft, "drafts"),
                _curve(run, lambda line: line.rewards.refined, "refined"),
            ],
        ),
        (
            "Leave-one-out gap",
            "Score of refined episodes minus that of the other drafts of their example, with 95% "
            "intervals. Uninformative feedback gives zero on average.",
            [
                _gap_curve(run),
                _curve(run, lambda line: line.rewards.pair, "own draft"),
            ],
        ),
        (
            "Rewards by task",
            "Mean draft reward of each task in the mixture.",
            _task_curves(run, lambda line: line.rewards.draft_by_task),
        ),
        (
            "Leave-one-out gap by task",
            "The same gap for each task in the mixture.",
            _task_curves(run, lambda line: line.rewards.loo_by_task),
        ),
        *_conversations(run),
        ("Evaluation during training", "Mean of each task, by training step.", _eval_curves(run)),
        (
            "Feedback",
            "Share of drafts with feedback, and share of feedback with a leak.",
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
    """One line per task; steps without rows of the task are bridged, not shown as gaps."""
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
    """The loss of supervised training; the loss of a policy gradient is not informative."""
    supervised = not any(line.played for line in run.steps)
    return [_curve(run, lambda line: line.learned.loss, "loss")] if supervised else []


def _conversations(run: RunData) -> list[tuple[str, str, list[Curve]]]:
    """The loss figures of training on conversations, by source."""
    losses = _task_curves(run, lambda line: line.learned.losses)
    return [
        (
            "Loss by source",
            "Loss of each source of conversations, in nats per learned token.",
            losses if len(losses) > 1 else [],  # with one source, this is the curve of the loss
        ),
        (
            "Validation loss",
            "Loss on held-out conversations by source, in nats per learned token. Step −1 is the "
            "model before training.",
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
    legend = tuple((c.label, _CSS[k]) for c, k in zip(curves, colours, strict=True))
    return draw_figure(
        title, caption, (4.2, 2.5), salt,
        lambda canvas, palette: _draw(canvas.add_subplot(), curves, palette), legend=legend,
    )  # fmt: skip


def _draw(axes: Any, curves: Sequence[Curve], palette: Palette) -> None:
    for i, curve in enumerate(curves):
        colour = palette.series[i % len(palette.series)]
        plot_band(axes, curve.steps, curve.values, curve.low, curve.high, colour, few=12)
    dress(axes, palette, grid="y", ticks=(6, 5))
    axes.set_xlabel("step", color=palette.ink, loc="right")
    steps = {s for c in curves for s in c.steps}
    if len(steps) == 1:
        axes.set_xlim(min(steps) - 0.5, min(steps) + 0.5)  # the default limits show no integer
    values = [v for c in curves for v in (*c.values, *c.low, *c.high) if v is not None]
    if min(values) < 0 < max(values):
        axes.axhline(0, color=palette.ink, linewidth=0.9)
