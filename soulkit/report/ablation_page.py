"""The page of a comparison of methods; its pictures are drawn as SVG for the page, PNG for slides.

Ten curves with intervals in one frame cannot be read. With more than four methods each has a panel
of its own, in the same scale: its curve with the interval, the first method dashed, all others in
grey behind. Results stand as points with intervals, one line a method. So no colour has to be told
from ten others; where curves do share a frame, each is labelled at its end and has its own dashes,
and the colours are those of Okabe and Ito.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.errors import MissingPackage
from soulkit.metrics.intervals import number, signed
from soulkit.report.ablation import (
    CURVES,
    Ablation,
    Band,
    MethodRow,
    OverSeeds,
    as_json,
    count,
    duration_text,
    has_dev,
    method_notes,
    missing_text,
    reward_parts,
    stat_text,
)
from soulkit.report.pages import environment
from soulkit.report.training import GRID, INK, SERIES, themed
from soulkit.runs.jsonl import write_aside, write_json
from soulkit.version import __version__

IN_ONE_FRAME = 4
"""Curves with intervals that one frame can hold."""
COLUMNS = 5
WIDTH = 10.0
"""Inches; the page scales the picture."""


@dataclass(frozen=True, slots=True)
class Palette:
    """Ink, grid and six colours."""

    ink: str
    grid: str
    series: tuple[str, ...]

    def of(self, index: int) -> str:
        """The colour of a method: the first is ink, like the line others are held against."""
        return self.ink if index == 0 else self.series[(index - 1) % len(self.series)]


PAGE = Palette(INK, GRID, SERIES)
PAPER = Palette(
    "#40444b", "#dcdcd7", ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#c98a00", "#3f9fd8")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawn figure for the page."""

    name: str
    title: str
    caption: str
    svg: str


DrawFigure = Callable[[Any, Palette], None]


def write_ablation(ablation: Ablation, folder: Path) -> Path:
    """`comparison.json`, `index.html` and `figures/*.png` in `folder`; returns the page's path.

    MissingPackage without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", as_json(ablation))
    figures = draw_all(ablation, folder / "figures")
    page = environment().get_template("ablation.html.j2").render(
        found=ablation, figures=figures, notes=method_notes(ablation), dev=has_dev(ablation),
        judged=bool(ablation.eval_judge),
        stats=_figures, count=count, parts=reward_parts(ablation), duration=duration_text,
        missing=list(map(missing_text, ablation.missing)), version=__version__,
    )  # fmt: skip
    write_aside(folder / "index.html", page.encode("utf-8", errors="replace"))
    return folder / "index.html"


def _figures(row: MethodRow, dev: bool, judged: bool) -> list[tuple[str, str]]:
    """(mean, interval) of the result columns of the page; empty strings where there is none."""
    columns = [(row.judged, False), (row.judged_difference, True)] if judged else []
    columns += [(row.final, False), (row.final_difference, True)]
    columns += [(row.area, False), (row.area_difference, True)]
    columns += [(row.dev, False), (row.dev_difference, True)] if dev else []
    shown = []
    for stat, difference in columns:
        mean, _, interval = stat_text(stat, signed if difference else number).partition(" ")
        shown.append((mean, interval))
    return shown


# --- pictures -------------------------------------------------------------------------------------


def draw_all(ablation: Ablation, folder: Path) -> list[Picture]:
    """Every figure that the runs allow, in reading order; PNG files go to `folder`.

    MissingPackage without matplotlib.
    """
    if not ablation.rows:
        return []
    plans: list[tuple[str, str, str, tuple[float, float], DrawFigure]] = []
    height = 1.3 + 0.28 * len(ablation.rows)
    plans.append((
        "results", "Results",
        "Left: draft reward over the last steps; right: paired difference to the first method. A "
        "bar is the 95% interval over seeds, a small mark is one seed.",
        (WIDTH, height), lambda canvas, palette: _results(canvas, ablation.rows, palette),
    ))  # fmt: skip
    for name, (title, caption, _) in CURVES.items():
        plans += _curves(ablation.rows, name, title, caption)
    return [picture_of(folder, *one) for one in plans]


def _curves(
    rows: Sequence[MethodRow], name: str, title: str, caption: str
) -> list[tuple[str, str, str, tuple[float, float], DrawFigure]]:
    drawable = [
        (i, r.arm, r.curves[name])
        for i, r in enumerate(rows)
        if any(v is not None for v in r.curves[name].mean)
    ]
    if not drawable:
        return []
    together = (name, title, caption, (WIDTH, 3.8),
                lambda canvas, palette: _one_frame(canvas, drawable, palette))  # fmt: skip
    if len(drawable) <= IN_ONE_FRAME:
        return [together]
    lines = math.ceil(len(drawable) / COLUMNS)
    panels = (
        f"{name}_each", f"{title}, method by method" if name == "reward/draft" else title,
        f"{caption} Each panel: one method with its interval over seeds; dashed: {drawable[0][1]}; "
        "grey: the others.",
        (WIDTH, 0.5 + 1.65 * lines), lambda canvas, palette: _panels(canvas, drawable, palette),
    )  # fmt: skip
    return [together, panels] if name == "reward/draft" else [panels]


def picture_of(
    folder: Path, name: str, title: str, caption: str, size: tuple[float, float], draw: DrawFigure
) -> Picture:
    """Draw a figure of this size in inches twice: as SVG for the page, as PNG into `folder`."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage("matplotlib", "the figures of a comparison") from error
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        page, paper = (Figure(figsize=size, layout="constrained") for _ in range(2))
        FigureCanvasSVG(page)
        FigureCanvasAgg(paper)
        draw(page, PAGE)
        draw(paper, PAPER)
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        page.savefig(text, format="svg", transparent=True, metadata=nothing)
        paper.savefig(
            folder / f"{name.replace('/', '_')}.png", dpi=160, metadata={"Software": None}
        )
    return Picture(name=name, title=title, caption=caption, svg=themed(text.getvalue(), title))


def _results(canvas: Any, rows: Sequence[MethodRow], palette: Palette) -> None:
    """Final rewards and their paired differences, one line a method."""
    left, right = canvas.subplots(1, 2, sharey=True)
    for index, row in enumerate(rows):
        _point(left, index, row.final, palette.of(index))
        if row.final_difference is not None:
            _point(right, index, row.final_difference, palette.of(index))
    for axes, label in ((left, "final draft reward"), (right, f"difference to {rows[0].arm}")):
        dress(axes, palette, grid="x")
        axes.set_xlabel(label, color=palette.ink)
    right.axvline(0, color=palette.ink, linewidth=0.9)
    left.set_yticks(range(len(rows)), [row.arm for row in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)


def _point(axes: Any, y: int, stat: OverSeeds, colour: str) -> None:
    if stat.mean is None:
        return
    axes.plot(stat.seeds, [y] * len(stat.seeds), "|", color=colour, markersize=9, alpha=0.6)
    if stat.low is not None and stat.high is not None:
        axes.plot([stat.low, stat.high], [y, y], color=colour, linewidth=4, alpha=0.3,
                  solid_capstyle="butt")  # fmt: skip
    axes.plot([stat.mean], [y], "o", color=colour, markersize=6)


def _one_frame(canvas: Any, curves: Sequence[tuple[int, str, Band]], palette: Palette) -> None:
    """All curves in one frame, labelled at their ends; intervals while they can be told apart."""
    axes = canvas.subplots()
    for index, _, band in curves:
        style = (0, (5, 2)) if max(index - 1, 0) // len(palette.series) % 2 else "-"
        _curve(axes, band, palette.of(index), style=style, fill=len(curves) <= IN_ONE_FRAME)
    dress(axes, palette, grid="y")
    axes.set_xlabel("step", color=palette.ink, loc="right")
    last = max(band.steps[-1] for *_, band in curves)
    if last > min(band.steps[0] for *_, band in curves):
        axes.set_xlim(right=last)  # the lines to the names begin where the curves end
    _label_ends(axes, curves, palette)


def _label_ends(axes: Any, curves: Sequence[tuple[int, str, Band]], palette: Palette) -> None:
    """Names at the right edge, moved apart where curves end close together."""
    low, high = axes.get_ylim()
    ends = sorted(
        ((last - low) / (high - low), index, name, band)
        for index, name, band in curves
        if (last := next((v for v in reversed(band.mean) if v is not None), None)) is not None
    )
    for (height, index, name, _), at in zip(ends, _apart([e[0] for e in ends], 0.075), strict=True):
        axes.annotate(
            name, xy=(1.0, height), xytext=(1.04, at), xycoords="axes fraction", va="center",
            color=palette.of(index), fontsize=9, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": palette.of(index), "linewidth": 0.7,
                        "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)},
        )  # fmt: skip


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Ascending heights moved up by as little as keeps them `least` apart, then centred again."""
    places: list[float] = []
    for height in heights:
        places.append(max(height, places[-1] + least) if places else height)
    over = max(0.0, places[-1] - 1.0) if places else 0.0
    return [height - over for height in places]


def _panels(canvas: Any, curves: Sequence[tuple[int, str, Band]], palette: Palette) -> None:
    """A panel a method, all in the same scale."""
    lines = math.ceil(len(curves) / COLUMNS)
    grid = canvas.subplots(lines, COLUMNS, sharex=True, sharey=True, squeeze=False).flatten()
    for place, (axes, (_, name, band)) in enumerate(zip(grid, curves, strict=False)):
        for other, (*_, behind) in enumerate(curves):
            if other not in (0, place):
                _curve(axes, behind, palette.grid, width=1.0)
        if place:
            _curve(axes, curves[0][2], palette.ink, style=(0, (3, 2)), width=1.0)
        _curve(axes, band, palette.series[0] if place else palette.ink, width=1.8, fill=True)
        axes.set_title(name, fontsize=9, color=palette.ink, loc="left")
        dress(axes, palette, grid="y")
    for axes in grid[len(curves) :]:
        axes.set_visible(False)


def _curve(
    axes: Any, band: Band, colour: str, *, style: Any = "-", width: float = 1.6, fill: bool = False
) -> None:
    mean, low, high = (_gaps(values) for values in (band.mean, band.low, band.high))
    few = sum(v is not None for v in band.mean) == 1
    axes.plot(band.steps, mean, color=colour, linewidth=width, linestyle=style,
              marker="o" if few else "", markersize=3.2)  # fmt: skip
    if fill:
        axes.fill_between(band.steps, low, high, color=colour, alpha=0.2, linewidth=0)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [math.nan if v is None else v for v in values]


def dress(axes: Any, palette: Palette, *, grid: str) -> None:
    """Take off the frame; leave thin lines along `grid`, "x" or "y"."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(palette.grid)
    axes.grid(axis=grid, color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=palette.ink, length=0, labelsize=9)
    if grid == "y":
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
