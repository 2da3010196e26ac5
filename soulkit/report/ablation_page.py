"""The page of a method comparison; figures are drawn as SVG for the page and as PNG for slides.

More than four curves with intervals do not fit into one frame. Then each method has its own panel
on the same scale: its curve with the interval, the first method dashed, all others grey in the
background. Results are points with intervals, one line per method. Curves that share a frame are
labelled at their ends, have different dashes, and use the colours of Okabe and Ito.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from soulkit.report.figures import (
    DrawFigure,
    Figure,
    Palette,
    draw_figure,
    dress,
    plot_band,
    plot_point,
)
from soulkit.report.pages import environment
from soulkit.runs.jsonl import write_aside, write_json
from soulkit.version import __version__

IN_ONE_FRAME = 4
"""Maximum number of curves with intervals in one frame."""
COLUMNS = 5
WIDTH = 10.0
"""Figure width in inches; the page scales it."""


def write_ablation(ablation: Ablation, folder: Path) -> Path:
    """Write `comparison.json`, `index.html` and `figures/*.png` to `folder`; return the page path.

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
    """(mean, interval) of the result columns of the page; empty strings if there is none."""
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


def draw_all(ablation: Ablation, folder: Path) -> list[Figure]:
    """All figures for which the runs have data, in reading order; PNG files go to `folder`.

    MissingPackage without matplotlib.
    """
    if not ablation.rows:
        return []
    plans: list[tuple[str, str, str, tuple[float, float], DrawFigure]] = []
    height = 1.3 + 0.28 * len(ablation.rows)
    plans.append((
        "results", "Results",
        "Left: draft reward in the last steps. Right: paired difference from the first method. "
        "Bars are 95% intervals over seeds; each small mark is one seed.",
        (WIDTH, height), lambda canvas, palette: _results(canvas, ablation.rows, palette),
    ))  # fmt: skip
    for name, (title, caption, _) in CURVES.items():
        plans += _curves(ablation.rows, name, title, caption)
    return [
        draw_figure(title, caption, size, name, draw, png=folder / f"{name.replace('/', '_')}.png")
        for name, title, caption, size, draw in plans
    ]


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
        f"{name}_each", f"{title} by method" if name == "reward/draft" else title,
        f"{caption} Each panel shows one method with its interval over seeds; dashed: "
        f"{drawable[0][1]}; grey: the other methods.",
        (WIDTH, 0.5 + 1.65 * lines), lambda canvas, palette: _panels(canvas, drawable, palette),
    )  # fmt: skip
    return [together, panels] if name == "reward/draft" else [panels]


def _results(canvas: Any, rows: Sequence[MethodRow], palette: Palette) -> None:
    """Final rewards and their paired differences, one line per method."""
    left, right = canvas.subplots(1, 2, sharey=True)
    for index, row in enumerate(rows):
        _point(left, index, row.final, palette.of(index))
        if row.final_difference is not None:
            _point(right, index, row.final_difference, palette.of(index))
    for axes, label in ((left, "final draft reward"), (right, f"difference from {rows[0].arm}")):
        dress(axes, palette, grid="x")
        axes.set_xlabel(label, color=palette.ink)
    right.axvline(0, color=palette.ink, linewidth=0.9)
    left.set_yticks(range(len(rows)), [row.arm for row in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)


def _one_frame(canvas: Any, curves: Sequence[tuple[int, str, Band]], palette: Palette) -> None:
    """All curves in one frame, labelled at their ends; intervals only if there are few curves."""
    axes = canvas.subplots()
    for index, _, band in curves:
        style = (0, (5, 2)) if max(index - 1, 0) // len(palette.series) % 2 else "-"
        _plot(axes, band, palette.of(index), style=style, fill=len(curves) <= IN_ONE_FRAME)
    dress(axes, palette, grid="y")
    axes.set_xlabel("step", color=palette.ink, loc="right")
    last = max(band.steps[-1] for *_, band in curves)
    if last > min(band.steps[0] for *_, band in curves):
        axes.set_xlim(right=last)  # the lines to the labels start at the curves' ends
    _label_ends(axes, curves, palette)


def _label_ends(axes: Any, curves: Sequence[tuple[int, str, Band]], palette: Palette) -> None:
    """Labels at the right edge, moved apart if curves end close together."""
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
    """Move ascending heights up as little as needed to keep them `least` apart, then recentre."""
    places: list[float] = []
    for height in heights:
        places.append(max(height, places[-1] + least) if places else height)
    over = max(0.0, places[-1] - 1.0) if places else 0.0
    return [height - over for height in places]


def _panels(canvas: Any, curves: Sequence[tuple[int, str, Band]], palette: Palette) -> None:
    """One panel per method, all on the same scale."""
    lines = math.ceil(len(curves) / COLUMNS)
    grid = canvas.subplots(lines, COLUMNS, sharex=True, sharey=True, squeeze=False).flatten()
    for place, (axes, (_, name, band)) in enumerate(zip(grid, curves, strict=False)):
        for other, (*_, behind) in enumerate(curves):
            if other not in (0, place):
                _plot(axes, behind, palette.grid, width=1.0)
        if place:
            _plot(axes, curves[0][2], palette.ink, style=(0, (3, 2)), width=1.0)
        _plot(axes, band, palette.series[0] if place else palette.ink, width=1.8, fill=True)
        axes.set_title(name, fontsize=9, color=palette.ink, loc="left")
        dress(axes, palette, grid="y")
    for axes in grid[len(curves) :]:
        axes.set_visible(False)


def _plot(axes: Any, band: Band, colour: str, *, fill: bool = False, **look: Any) -> None:
    plot_band(axes, band.steps, band.mean, band.low, band.high, colour, fill=fill, **look)


def _point(axes: Any, y: int, stat: OverSeeds, colour: str) -> None:
    if stat.mean is not None:
        axes.plot(stat.seeds, [y] * len(stat.seeds), "|", color=colour, markersize=9, alpha=0.6)
        plot_point(axes, y, stat.mean, (stat.low, stat.high), colour)
