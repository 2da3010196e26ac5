"""Figures: learning curves and results as plain data, drawn as SVG for pages and PDF for papers.

A `Chart` has one or more panels; a panel has curves over steps, or dots with intervals in rows.
`panel_marks` lays a panel out as lines, areas and texts. `on_page` writes them as inline SVG in the
colours of the page; `write_figures` writes them as SVG and PDF files at the width of a column.
"""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from soulkit.errors import MissingPackage
from soulkit.eval.results.summary import Cell
from soulkit.metrics.intervals import Interval, number
from soulkit.text import one_line

GREY, INK = -1, 0
"""Colours of grids, and of texts and references; 1, 2, … are the series."""
PAPER = ("#40444b", "#0072b2", "#d55e00", "#009e73", "#aa4499", "#c98a00", "#3f9fd8", "#dcdcd7")
"""Ink, series and grey in files: the colours of Okabe and Ito, safe for colour-blind readers."""
PAGE = ("var(--ink-2)", *(f"var(--s{i})" for i in range(1, 7)), "var(--line)")
DASHES = ((), (6, 5), (0.1, 4.5), (9, 5, 0.1, 5))
SIDES = (16, 4, 3, 6)
"""Corners of the marks at points and at the ends of curves. Line style and mark tell curves apart
without colour."""
MOST_POINTS, FEW = 400, 12
"""Maximum number of points of a drawn curve; curves with few points mark each of them."""
IN_ONE_FRAME = 4
"""Maximum number of intervals, and of arms with several curves, in one frame; further ones would
hide each other."""

Numbers = Sequence[float | None]


# --- description ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a figure; None is a gap. `low` and `high` bound a band around it."""

    label: str
    steps: Sequence[float]
    values: Numbers
    low: Numbers = ()
    high: Numbers = ()
    colour: int = 1
    dash: int = 0
    thin: bool = False
    """One of several seeds; not in the legend."""

    def first_and_last(self) -> list[tuple[float, float]]:
        """(step, value) of the first and the last number."""
        both = zip(self.steps, self.values, strict=True)
        points = [(step, value) for step, value in both if value is not None]
        return [points[0], points[-1]] if points else []


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """The curve with at most about `most` points: the ends, and from each stretch of steps the
    minimum, the maximum and the first gap."""
    n, size = len(curve.steps), math.ceil(3 * len(curve.steps) / most)
    if n <= most:
        return curve
    places = {0, n - 1}
    for start in range(0, n, size):
        stretch = range(start, min(start + size, n))
        points = [(v, i) for i in stretch if (v := curve.values[i]) is not None]
        places |= {min(points)[1], max(points)[1]} if points else set()
        places |= set([i for i in stretch if curve.values[i] is None][:1])
    values, low, high = ([column[i] for i in sorted(places)] if column else ()
                         for column in (curve.values, curve.low, curve.high))  # fmt: skip
    steps = [curve.steps[i] for i in sorted(places)]
    return replace(curve, steps=steps, values=values, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A mean with its interval in a row of a panel; `seeds` are small marks."""

    label: str
    row: int
    value: float
    low: float | None = None
    high: float | None = None
    seeds: Sequence[float] = ()
    lane: int = 0
    """Place among the dots of its row, from the top."""
    colour: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A frame with curves over steps, or with dots in labelled `rows`."""

    title: str = ""
    curves: Sequence[Curve] = ()
    rows: Sequence[str] = ()
    dots: Sequence[Dot] = ()
    rules: Sequence[tuple[str, float]] = ()
    """(label, value) of dashed reference lines, such as published figures."""
    axis: str = "step"
    """Label of the horizontal axis."""
    steps: bool = True
    """Whether the horizontal axis has whole ticks, from the first to the last step of a curve."""

    def ends(self, curve: Curve) -> tuple[Numbers, Numbers]:
        """The interval of the curve as drawn; empty if too many intervals would overlap."""
        crowded = sum(bool(one.low) for one in self.curves) > IN_ONE_FRAME
        return ((), ()) if crowded else (curve.low, curve.high)

    def scale(self) -> Iterator[float | None]:
        """All numbers on the axis of the scores: vertical for curves, horizontal for dots."""
        for curve in self.curves:
            low, high = self.ends(curve)
            yield from (*curve.values, *low, *high)
        for dot in self.dots:
            yield from (dot.value, dot.low, dot.high, *dot.seeds)
        yield from (at for _, at in self.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure as plain data; `name` is the name of its files."""

    name: str
    title: str
    caption: str
    panels: Sequence[Plot]

    def legend(self) -> dict[str, tuple[int, int | None]]:
        """Label → colour and line style, None for dots; without labels that are panel titles."""
        curves = (c for panel in self.panels for c in panel.curves
                  if not c.thin and c.label != panel.title)  # fmt: skip
        dots = (d for panel in self.panels for d in panel.dots if d.label)
        looks: dict[str, tuple[int, int | None]] = {c.label: (c.colour, c.dash) for c in curves}
        return looks | {d.label: (d.colour, None) for d in dots}


# --- layout ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from numbers to places in a panel, with round ticks."""

    low: float
    high: float
    step: float
    start: float = 0.0
    end: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float | None], most: int, *, steps: bool = False) -> Axis:
        """The axis for these numbers with about `most` ticks; for `steps` without space at the
        ends, and with whole ticks."""
        numbers = [v for v in values if v is not None and math.isfinite(v)] or [0.0]
        low, high = min(numbers), max(numbers)
        space = 0 if steps else (high - low) * 0.05
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):  # equal but for rounding
            space = 0.5 if steps else max(abs(low) * 0.1, 0.05)
        low, high = low - space, high + space
        raw = (high - low) / most
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(s * power for s in (1, 2, 5, 10) if s * power >= 0.7 * raw)
        return cls(low, high, max(1.0, step) if steps else step)

    def at(self, value: float) -> float:
        """The place of a number; numbers off the scale are at its ends."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> dict[float, str]:
        """Tick → text, all with the same number of decimals."""
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        form = f",.{digits}f" if digits <= 5 else ".3g"
        ticks = [round(i * self.step, 12) + 0.0 for i in range(first, last + 1)]
        return {tick: f"{tick:{form}}".replace("-", "\u2212") for tick in ticks}


@dataclass(frozen=True, slots=True)
class Mark:
    """A line through points, an area (`width` 0), or a text at its point; in pixels of a panel."""

    points: Sequence[tuple[float, float]]
    colour: int = INK
    width: float = 1.0
    dash: Sequence[float] = ()
    opacity: float = 1.0
    text: str = ""
    anchor: str = "start"


WIDTH, HEIGHT = 340, 220
"""Size of a panel; the width is that of a phone, so that texts keep their size there."""
TOP, RIGHT, BOTTOM, LABEL, LANE, LETTER = 28, WIDTH - 14, 38, 19, 12, 7.4


def panel_marks(panel: Plot) -> tuple[list[Mark], int]:
    """A panel as marks in drawing order, and its height."""
    scores = Axis.of(panel.scale(), 4)
    head = [Mark([(0, 14)], text=panel.title)] if panel.title else []
    if panel.rows:
        rows, height = _row_marks(panel, scores)
        return [*head, *rows], height
    return [*head, *_curve_marks(panel, scores)], HEIGHT


def _curve_marks(panel: Plot, scores: Axis) -> Iterator[Mark]:
    left = 9 + LETTER * max(map(len, scores.ticks().values()), default=0)
    base = HEIGHT - BOTTOM
    y = replace(scores, start=base, end=TOP)
    steps = Axis.of((s for curve in panel.curves for s in curve.steps), 5, steps=panel.steps)
    x = replace(steps, start=left, end=RIGHT)
    for tick, text in y.ticks().items():
        yield Mark([(left, y.at(tick)), (RIGHT, y.at(tick))], GREY)
        yield Mark([(left - 7, y.at(tick) + 4.5)], text=text, anchor="end")
    if y.low < 0 < y.high:
        yield Mark([(left, y.at(0)), (RIGHT, y.at(0))])
    yield from _bottom(x, base, panel.axis)
    for curve in sorted(panel.curves, key=lambda one: not one.thin):
        yield from _line_marks(panel, thinned(curve), x, y)
    place = 0.0
    for label, at in sorted(panel.rules, key=lambda rule: -rule[1]):
        above = y.at(at) - 4
        place = above if above > place + 15 else max(above + 17, place + 15)  # never on its line
        yield Mark([(left, y.at(at)), (RIGHT, y.at(at))], dash=(4, 4))
        yield Mark([(left + 4, place)], text=label)  # most curves rise: there is room on the left


def _bottom(x: Axis, base: float, label: str) -> Iterator[Mark]:
    for tick, text in x.ticks().items():
        yield Mark([(x.at(tick), base + 16)], text=text, anchor="middle")
    yield Mark([(RIGHT, base + 33)], text=label, anchor="end")


def _line_marks(panel: Plot, curve: Curve, x: Axis, y: Axis) -> Iterator[Mark]:
    """The band of a curve, the curve, and a mark at its end or, of few points, at each."""
    places = [x.at(step) for step in curve.steps]
    low, high = panel.ends(curve)
    for part in _stretches(low, high):
        there = [(places[i], y.at(high[i] or 0)) for i in part]
        back = [(places[i], y.at(low[i] or 0)) for i in reversed(part)]
        yield Mark([*there, *back], curve.colour, 0, opacity=0.16)
    faint = 0.45 if curve.thin else 1.0
    points: list[tuple[float, float]] = []
    for part in _stretches(curve.values):
        line = [(places[i], y.at(curve.values[i] or 0)) for i in part]
        points += line
        dash = () if curve.thin else DASHES[curve.dash]
        yield Mark([*line, line[-1]], curve.colour, 1 if curve.thin else 2, dash, faint)
    for point in () if curve.thin else points if len(points) <= FEW else points[-1:]:
        yield _corner_mark(*point, curve.colour)


def _corner_mark(x: float, y: float, colour: int) -> Mark:
    n = SIDES[(colour - 1) % len(SIDES)]
    turns = [2 * math.pi * i / n - math.pi / 2 for i in range(n)]
    size = 4.5 if n < 6 else 3.6
    return Mark([(x + size * math.cos(t), y + size * math.sin(t)) for t in turns], colour, 0)


def _stretches(*columns: Numbers) -> Iterator[list[int]]:
    """The runs of indices at which all columns have a number."""
    present = [all(v is not None and math.isfinite(v) for v in values)
             for values in zip(*columns, strict=True)]  # fmt: skip
    start = 0
    for i, here in enumerate([*present, False]):
        if not here:
            if start < i:
                yield [*range(start, i)]
            start = i + 1


def _row_marks(panel: Plot, scores: Axis) -> tuple[list[Mark], int]:
    """Dots with intervals below the label of their row."""
    size = LABEL + LANE * (1 + max((dot.lane for dot in panel.dots), default=0))
    base = TOP + size * len(panel.rows)
    x = replace(scores, start=6, end=RIGHT)
    marks = []
    for top, label in zip(range(TOP, base, size), panel.rows, strict=True):
        ends = top + LABEL, top + size
        marks += [Mark([(x.at(t), y) for y in ends], GREY) for t in x.ticks()]
        marks += [Mark([(x.at(at), y) for y in ends], dash=(2, 4)) for _, at in panel.rules]
        marks.append(Mark([(0, top + 14)], text=label))
    marks += _bottom(x, base, panel.axis)
    for dot in panel.dots:
        y = TOP + size * dot.row + LABEL + LANE * (dot.lane + 0.5)
        if dot.low is not None and dot.high is not None:
            marks.append(Mark([(x.at(dot.low), y), (x.at(dot.high), y)], dot.colour, 4, (), 0.4))
        marks += [Mark([(x.at(v), y - 4.5), (x.at(v), y + 4.5)], dot.colour) for v in dot.seeds]
        marks.append(_corner_mark(x.at(dot.value), y, dot.colour))
    return marks, base + BOTTOM


def _key(colour: int, dash: int | None) -> list[Mark]:
    """The sample of a curve or dot in a legend, 26 × 10 pixels."""
    line = [] if dash is None else [Mark([(0, 5), (26, 5)], colour, 2.5, DASHES[dash])]
    return [*line, _corner_mark(13, 5, colour)]


# --- drawing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawn figure; `legend` pairs each label with a drawing of its line."""

    title: str
    caption: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()


def on_page(chart: Chart) -> Figure:
    """The chart as inline SVG in the colours of the page, one element per panel."""
    drawn = []
    for panel in chart.panels:
        marks, height = panel_marks(panel)
        title = html.escape(one_line(": ".join(filter(None, (chart.title, panel.title)))))
        words, top = html.escape(_in_words(panel)), 0 if panel.title else 14
        drawn.append(
            f'<svg class="plot" role="img" aria-label="{title}" '
            f'viewBox="0 {top} {WIDTH} {height - top}" '
            f'style="font:var(--t1,.8125rem) var(--sans)"><title>{title}</title>'
            f"<desc>{words}</desc>{_elements(marks, PAGE)}</svg>"
        )
    svg = drawn[0] if len(drawn) == 1 else f'<div class="panels">{"".join(drawn)}</div>'
    key = '<svg class="sample" width="26" height="10" aria-hidden="true">{}</svg>'
    keys = tuple((label, key.format(_elements(_key(*look), PAGE)))
                 for label, look in chart.legend().items())  # fmt: skip
    return Figure(title=chart.title, caption=chart.caption, svg=svg, legend=keys)


def _in_words(panel: Plot) -> str:
    """The numbers of a panel: first and last value of each curve, every mean, every line."""
    place = "step" if panel.steps else panel.axis
    lines = [f"{panel.rows[dot.row]}, {dot.label}: {number(dot.value)}" for dot in panel.dots]
    for curve in panel.curves:
        ends = {} if curve.thin else dict(curve.first_and_last())
        text = ", ".join(f"{number(value)} at {place} {step:.6g}" for step, value in ends.items())
        lines += [f"{curve.label}: {text}"] if text else []
    return one_line("; ".join([*lines, *(f"{text}: {number(at)}" for text, at in panel.rules)]))


def _elements(marks: Iterable[Mark], colours: Sequence[str]) -> str:
    """Marks as SVG elements."""
    parts = []
    for mark in marks:
        colour, points = _colour(mark.colour, colours), [f"{x:.1f} {y:.1f}" for x, y in mark.points]
        if mark.text:
            x, y = points[0].split()
            parts.append(f'<text x="{x}" y="{y}" text-anchor="{mark.anchor}" style="fill:{colour}">'
                         f"{html.escape(one_line(mark.text, 46))}</text>")  # fmt: skip
            continue
        dash = f";stroke-dasharray:{' '.join(map(str, mark.dash))}" if mark.dash else ""
        faint = "" if mark.opacity == 1 else f";opacity:{mark.opacity}"
        line = f"fill:none;stroke:{colour};stroke-width:{mark.width};stroke-linecap:round{dash}"
        style = f"{line if mark.width else f'fill:{colour}'}{faint}"
        parts.append(f'<path d="M{"L".join(points)}" style="{style}"/>')
    return "".join(parts)


def _colour(index: int, colours: Sequence[str]) -> str:
    return colours[(index - 1) % (len(colours) - 2) + 1 if index > 0 else index]


COLUMN, BOTH = 3.25, 6.75
"""Width in inches of a column, and of both, in a paper."""


def write_figures(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write every chart as NAME.pdf and NAME.svg; returns the paths.

    One panel has the width of a column, several panels have that of two. Texts stay texts, with
    their font embedded in the PDF. MissingPackage without matplotlib, which writes the PDF.
    """
    paths = []
    for chart in charts:
        canvas, (marks, width, height) = matplotlib_figure(chart), _sheet(chart)
        folder.mkdir(parents=True, exist_ok=True)
        paths += [folder / f"{chart.name}.{form}" for form in ("pdf", "svg")]
        paths[-1].write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{canvas.get_figwidth()}in" height="{canvas.get_figheight():.4f}in" '
            'font-family="Helvetica, Arial, sans-serif" font-size="13">'
            f"<title>{html.escape(chart.title)}</title>{_elements(marks, PAPER)}</svg>\n",
            encoding="utf-8",
        )
        with sys.modules["matplotlib"].rc_context({"pdf.fonttype": 42}):
            canvas.savefig(paths[-2], metadata={"CreationDate": None})
    return paths


def matplotlib_figure(chart: Chart) -> Any:
    """The chart as a figure of matplotlib, which a notebook shows. MissingPackage without it."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingPackage("matplotlib", "figures as PDF and SVG files") from error
    marks, width, height = _sheet(chart)
    inches = COLUMN if width == WIDTH else BOTH
    scale = inches * 72 / width  # points per pixel
    with mpl.rc_context({"text.parse_math": False}):
        canvas = Canvas(figsize=(inches, inches * height / width))
        axes = canvas.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        for mark in marks:
            colour, (x, y) = _colour(mark.colour, PAPER), zip(*mark.points, strict=True)
            if mark.text:
                axes.text(x[0], y[0], one_line(mark.text, 46), color=colour, size=12 * scale,
                          ha=_SIDES[mark.anchor], va="baseline")  # fmt: skip
            elif mark.width:
                dash = (0, [d / mark.width for d in mark.dash]) if mark.dash else "-"
                axes.plot(x, y, color=colour, linewidth=mark.width * scale, linestyle=dash,
                          alpha=mark.opacity, solid_capstyle="round",
                          dash_capstyle="round")  # fmt: skip
            else:
                axes.fill(x, y, color=colour, alpha=mark.opacity, linewidth=0)
    return canvas


_SIDES = {"start": "left", "middle": "center", "end": "right"}


def _sheet(chart: Chart) -> tuple[list[Mark], int, int]:
    """All panels with the legend above them, and the size of the whole in pixels."""
    columns = min(len(chart.panels), 2 if len(chart.panels) < 5 else 3)
    width, top = columns * (WIDTH + 20) - 20, 6
    legend = chart.legend()
    marks: list[Mark] = []
    room = 34 + LETTER * max(map(len, legend), default=0)
    in_line = max(1, int(width // room))
    for i, (label, look) in enumerate(legend.items()):
        x, y = i % in_line * room, top + 16 * (i // in_line)
        marks += _moved([*_key(*look), Mark([(32, 9.5)], text=label)], x, y)
    top += 16 * math.ceil(len(legend) / in_line)
    for start in range(0, len(chart.panels), columns):
        heights = []
        for i, panel in enumerate(chart.panels[start : start + columns]):
            titled = replace(panel, title=panel.title or chart.title)
            inside, height = panel_marks(titled)
            marks += _moved(inside, i * (WIDTH + 20), top)
            heights.append(height)
        top += max(heights)
    return marks, width, top


def _moved(marks: Iterable[Mark], x: float, y: float) -> list[Mark]:
    return [replace(m, points=[(a + x, b + y) for a, b in m.points]) for m in marks]


# --- results --------------------------------------------------------------------------------------


def results_charts(
    runs: Sequence[str], rows: Sequence[tuple[str, Sequence[Cell | None]]]
) -> list[Chart]:
    """The results as means with intervals, a row per task and a dot per run; tasks on different
    scales have different panels. Empty without a mean."""
    by_scale: dict[Interval | None, list[tuple[str, Sequence[Cell | None]]]] = {}
    for label, cells in rows:
        scored = [cell for cell in cells if cell is not None and cell.mean is not None]
        if scored:
            by_scale.setdefault(scored[0].scale, []).append((label, cells))
    panels = [
        Plot(
            rows=[label for label, _ in group], axis="score",
            dots=[Dot(label=run, row=i, lane=j, colour=j + 1, value=cell.mean, low=cell.ci_low,
                      high=cell.ci_high)
                  for i, (_, cells) in enumerate(group)
                  for j, (run, cell) in enumerate(zip(runs, cells, strict=True))
                  if cell is not None and cell.mean is not None],
        )
        for group in by_scale.values()
    ]  # fmt: skip
    return [Chart(name="results", title="Results", panels=panels,
                  caption="Mean of each task, with 95% intervals.")] if panels else []  # fmt: skip
