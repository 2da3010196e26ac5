"""Figures: where numbers land, what arms share, and files for papers; pages need no matplotlib."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.eval.results.summary import Cell
from soulkit.eval.run.provenance import MADE_HERE, PUBLISHED
from soulkit.metrics.intervals import estimate
from soulkit.report import pages
from soulkit.report.figures import (
    DASHES,
    HEIGHT,
    INK,
    MOST_POINTS,
    PAPER,
    RIGHT,
    SIDES,
    Axis,
    Chart,
    Curve,
    Dot,
    Mark,
    Plot,
    on_page,
    panel_marks,
    results_charts,
    thinned,
    write_figures,
)
from soulkit.report.load import load_runs
from soulkit.report.training import arms_of, dimension_text, learning_charts
from tests.support.evaluation import soul

EVIL = "<script>x</script>\"'&\u202e $x^$ \x1b[31m"


def chart(*panels: Plot) -> Chart:
    return Chart(name="n", title="Title", caption="c", panels=panels)


def marks(panel: Plot) -> list[Mark]:
    return panel_marks(panel)[0]


def lines(panel: Plot, width: float = 2) -> list[Mark]:
    """The drawn curves: thick lines that are no reference."""
    return [m for m in marks(panel) if m.width == width and not m.text and m.colour > INK]


def ticks(panel: Plot) -> dict[str, float]:
    """Text of each vertical tick → height of its line."""
    return {m.text: m.points[0][1] - 4.5 for m in marks(panel) if m.anchor == "end"}


def training(path: Path, rewards: Sequence[float | None], **settings: Any) -> Path:
    """A run folder as a training leaves it."""
    path.mkdir(parents=True)
    steps = [{"step": i, "reward/draft": r, "rollouts/draft": 8} for i, r in enumerate(rewards)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    (path / "config.yaml").write_text(yaml.safe_dump({"method": "ditto", "seed": 0} | settings))
    (path / "environment.json").write_text('{"command": "train ditto"}')
    return path


# -- geometry --------------------------------------------------------------------------------------


def test_a_value_is_drawn_at_its_place() -> None:
    panel = Plot(curves=[Curve(label="a", steps=[0, 5, 10], values=[0.0, 0.5, 1.0])])
    (line,) = lines(panel)
    at = ticks(panel)
    (x0, y0), (x5, y5), (x10, y10) = line.points[:3]
    assert (y0, y5, y10) == pytest.approx((at["0.0"], (at["0.0"] + at["1.0"]) / 2, at["1.0"]))
    assert x5 == pytest.approx((x0 + x10) / 2) and x10 == RIGHT
    labels = {m.text: m.points[0][0] for m in marks(panel) if m.anchor == "middle"}
    assert labels["0"] == x0 and labels["10"] == x10


def test_gaps_stay_gaps_and_a_point_between_two_gaps_is_visible() -> None:
    values = [0.1, None, 0.3, None, 0.5, math.nan, 0.7, 0.8]
    parts = lines(Plot(curves=[Curve(label="a", steps=range(8), values=values)]))
    assert [len(part.points) - 1 for part in parts] == [1, 1, 1, 2]  # the last point is repeated
    assert all(len(part.points) > 1 for part in parts)


def test_the_band_contains_the_line() -> None:
    values = [math.sin(i) for i in range(9)]
    low, high = [v - 0.3 for v in values], [None, *(v + 0.4 for v in values[1:])]
    panel = Plot(curves=[Curve(label="a", steps=range(9), values=values, low=low, high=high)])
    (band,) = (m for m in marks(panel) if m.width == 0 and m.opacity < 1)
    (line,) = lines(panel)
    half = len(band.points) // 2
    assert half == 8  # a step without both ends has no band
    upper, lower = band.points[:half], band.points[: -half - 1 : -1]
    for (x, y), (_, top), (_, bottom) in zip(line.points[1:], upper, lower, strict=False):
        assert top < y < bottom and 0 < x <= RIGHT
    assert all(0 <= y <= HEIGHT for _, y in band.points)


def test_more_intervals_than_can_be_told_apart_are_left_out() -> None:
    one = Curve(label="a", steps=[0, 1], values=[0.0, 1.0], low=[-9.0, 0.9], high=[9.0, 1.1])
    assert Plot(curves=[one] * 4).ends(one) == (one.low, one.high)
    panel = Plot(curves=[one] * 5)
    assert not any(m.opacity < 1 for m in marks(panel)) and max(panel.scale() or [0]) == 1.0


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0, 1.0], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([-0.2, 0.4], ["\u22120.2", "0.0", "0.2", "0.4"]),
        ([0, 45000], ["0", "10,000", "20,000", "30,000", "40,000"]),
        ([0.5, 0.5 + 1e-16], ["0.46", "0.48", "0.50", "0.52", "0.54"]),
        ([0.0, 3e-6], ["0", "1e\u221206", "2e\u221206", "3e\u221206"]),
        ([], ["\u22120.04", "\u22120.02", "0.00", "0.02", "0.04"]),
        ([math.inf, None, 2.0], ["1.8", "1.9", "2.0", "2.1", "2.2"]),
    ],
)  # fmt: skip
def test_ticks_are_round_and_inside(values: list[float | None], texts: list[str]) -> None:
    axis = Axis.of(values, 4)
    assert list(axis.ticks().values()) == texts
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks())


def test_steps_have_whole_ticks() -> None:
    assert list(Axis.of([3], 5, steps=True).ticks()) == [3]
    assert list(Axis.of([0, 1], 5, steps=True).ticks()) == [0, 1]


def test_a_reference_line_is_dashed_labelled_and_inside() -> None:
    curve = Curve(label="a", steps=[0, 9], values=[0.1, 0.2])
    panel = Plot(curves=[curve], rules=[("Ditto 8B", 0.78), ("Ditto-8B", 0.79)])
    drawn = marks(panel)
    labels = [m for m in drawn if m.text.startswith("Ditto")]
    rules = [m for m in drawn if m.dash and m.colour == INK]
    assert sorted(m.points[0][1] for m in rules) == [m.points[0][1] for m in rules]
    assert labels[1].points[0][1] - labels[0].points[0][1] >= 13  # they do not overlap
    at = ticks(replace(panel, rules=[("", 0.78), ("", 0.79)]))
    assert at["0.6"] > rules[1].points[0][1] > at["0.8"]


def test_dots_share_rows_and_have_their_interval_and_seeds() -> None:
    dot = Dot(label="a", row=1, value=0.5, low=0.4, high=0.7, seeds=(0.45, 0.55))
    panel = Plot(rows=["first", "second"], dots=[replace(dot, row=0, value=0.9), dot])
    drawn, height = panel_marks(panel)
    texts = {m.text: m.points[0][1] for m in drawn if m.text}
    (_, bar), (_, point) = ([m for m in drawn if m.width == 4],
                            [m for m in drawn if m.width == 0])  # fmt: skip
    (left, y), (right, _) = bar.points
    assert texts["first"] < texts["second"] < y < height
    assert left < min(x for x, _ in point.points) and max(x for x, _ in point.points) < right
    seeds = [
        m for m in drawn if m.width == 1 and m.colour == 1 and m.points[0][1] > texts["second"]
    ]
    assert len(seeds) == 2 and all(left < m.points[0][0] < right for m in seeds)


def test_a_long_run_keeps_its_extremes_in_few_points() -> None:
    n = 40_000
    values: list[float | None] = [math.sin(i / 900) for i in range(n)]
    values[12_345], values[23_456], values[30_000] = 7.0, -5.0, None
    curve = Curve(label="a", steps=range(n), values=values, low=values, high=values)
    short = thinned(curve)
    known = [v for v in short.values if v is not None]
    assert len(short.steps) <= MOST_POINTS + 3 and (short.steps[0], short.steps[-1]) == (0, n - 1)
    assert (min(known), max(known)) == (-5.0, 7.0) and None in short.values
    assert len(short.low) == len(short.high) == len(short.steps)
    assert len(on_page(chart(Plot(curves=[curve]))).svg) < 30_000
    assert thinned(replace(curve, steps=range(50), values=values[:50])).steps == range(50)


# -- on a page -------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def of_everything(label: str) -> Chart:
    curve = Curve(label=label, steps=[0, 1], values=[0.0, 1.0], low=[-1.0, 0.0], high=[1.0, 2.0])
    dots = [Dot(label=label, row=0, value=0.5, low=0.1, high=0.9)]
    return chart(
        Plot(title=label, curves=[curve], rules=[(label, 0.5)]),
        Plot(title=label, rows=[label], dots=dots, axis=label),
    )


def test_hostile_labels_are_text_on_pages_and_in_files(tmp_path: Path) -> None:
    drawn, harmless = on_page(of_everything(EVIL)), on_page(of_everything("a"))
    for svg, plain in ((drawn.svg, harmless.svg), (drawn.legend[0][1], harmless.legend[0][1])):
        shown = Tags(svg)
        assert shown.tags == Tags(plain).tags and shown.attributes == Tags(plain).attributes
        assert not re.search("[\x00-\x08\x1b\u202e]", svg)
        ElementTree.fromstring(f"<x>{svg}</x>")
    assert "&lt;script&gt;" in drawn.svg
    *_, file = write_figures([of_everything(EVIL)], tmp_path)
    texts = [t.text or "" for t in ElementTree.parse(file).iter() if t.tag.endswith("text")]
    assert any("<script>" in text for text in texts)


def test_a_drawing_is_named_described_and_in_the_colours_of_the_page() -> None:
    curve = Curve(label="drafts", steps=[0, 1, 2], values=[0.25, 0.5, 0.75], colour=2)
    dots = [Dot(label="after", row=0, value=0.4)]
    figure = on_page(chart(Plot(title="P", curves=[curve], rules=[("Ditto 8B", 0.5)]),
                           Plot(rows=["tomi"], dots=dots)))  # fmt: skip
    plot, other = ElementTree.fromstring(figure.svg)
    assert plot.attrib["role"] == "img" and plot.attrib["aria-label"] == "Title: P"
    title, words, *_ = plot
    assert (title.text, other[1].text) == ("Title: P", "tomi, after: 0.400")
    assert words.text == "drafts: 0.250 at step 0, 0.750 at step 2; Ditto 8B: 0.500"
    assert "var(--s2)" in figure.svg and "var(--sans)" in figure.svg and "#" not in figure.svg
    assert figure == on_page(chart(Plot(title="P", curves=[curve], rules=[("Ditto 8B", 0.5)]),
                                   Plot(rows=["tomi"], dots=dots)))  # fmt: skip


# -- arms ------------------------------------------------------------------------------------------


def test_arms_share_the_axes_and_differ_in_colour_line_and_mark(tmp_path: Path) -> None:
    runs = load_runs([training(tmp_path / "ditto", [0.2, 0.9]),
                      training(tmp_path / "grpo", [0.2, 0.3], method="grpo")])  # fmt: skip
    (rewards,) = learning_charts(runs)
    (panel,) = rewards.panels
    assert [curve.label for curve in panel.curves] == ["ditto", "grpo"]
    a, b = lines(panel)
    assert a.points[0] == b.points[0] and a.points[1][1] < b.points[1][1]
    assert (a.colour, b.colour) == (1, 2) and a.dash != b.dash
    (corners_a, corners_b) = ({len(m.points) for m in marks(panel) if m.colour == c and not m.width}
                              for c in (1, 2))  # fmt: skip
    assert corners_a == {SIDES[0]} and corners_b == {SIDES[1]}
    assert pages.render(runs).count("<h4>Rewards</h4>") == 1


def test_seeds_are_thin_and_their_mean_has_an_interval(tmp_path: Path) -> None:
    """Runs are seeds of one arm if only the seed differs, apart from where they lie."""
    values = [[0.2, 0.5], [0.3, 0.7], [0.4, None]]
    for seed, rewards in enumerate(values):
        folder = tmp_path / f"seed_{seed}"
        training(folder / "ditto", rewards, seed=seed, model=str(folder / "warmup"))
        training(folder / "other", [0.1, 0.1], seed=seed, model=str(folder / "warmup"), lr=2)
    runs = load_runs(sorted(tmp_path.glob("*/*")))
    assert {name: len(arm) for name, arm in arms_of(runs).items()} == {
        "ditto (3 seeds)": 3, "other (3 seeds)": 3,
    }  # fmt: skip
    (chart_,) = learning_charts(runs)
    curves = [c for c in chart_.panels[0].curves if c.label == "ditto (3 seeds)"]
    assert [c.thin for c in curves] == [True, True, True, False]
    mean = estimate([0.2, 0.3, 0.4], range(3))
    assert (curves[-1].low[0], curves[-1].values[0]) == pytest.approx((mean.ci_low, 0.3))
    assert curves[-1].values[1] == pytest.approx(0.6)
    assert "Thin: seeds" in chart_.caption
    assert len([m for m in marks(chart_.panels[0]) if m.opacity == 0.45]) == 6
    assert list(chart_.legend()) == ["ditto (3 seeds)", "other (3 seeds)"]


def test_two_seeds_have_no_interval_and_scores_stay_on_their_scale(tmp_path: Path) -> None:
    """A supervised warm-up records no scale; the scores of the others are still bounded."""
    cells = {"value": {"mean": 0.9, "n": 8, "n_scored": 8, "scale": [0.0, 1.0]}}
    for arm, seeds in (("two", 2), ("three", 3)):
        for seed in range(seeds):
            path = training(
                tmp_path / arm / f"seed_{seed}", [0.5, 0.7 + 0.1 * seed], seed=seed, a=arm
            )
            (path / "summary.json").write_text(json.dumps({"tasks": {"tomi": cells}}))
    warm = training(tmp_path / "warm", [], method="sft")
    (warm / "metrics.jsonl").write_text('{"step": 0, "loss/total": 2.0}\n')
    (warm / "summary.json").write_text(json.dumps({"command": "train sft", "tasks": {"tomi": {}}}))
    runs = load_runs([tmp_path / "two", tmp_path / "three", warm])
    loss, rewards = learning_charts(runs)
    means = {curve.label: curve for curve in rewards.panels[0].curves if not curve.thin}
    assert means["two (2 seeds)"].low == () and means["two (2 seeds)"].values[1] == 0.75
    assert 0.8 < max(v for v in means["three (3 seeds)"].high if v is not None) <= 1.0
    assert [(c.label.endswith("warm"), c.dash) for c in loss.panels[0].curves] == [(True, 0)]


def test_every_judged_dimension_has_a_panel_with_its_interval(tmp_path: Path) -> None:
    run = training(tmp_path / "a", [0.1, 0.2, 0.3])
    names = {f"{EVIL}/goal": 2.0, "talk/rules": -0.5}
    steps = [
        {"step": i, "reward/draft": 0.1} | {
            f"gap/dimension{end}/{name}": gap + i + shift
            for name, gap in names.items() if i < 2 or name.startswith("talk")
            for end, shift in (("", 0), ("_low", -1), ("_high", 1))
        } | {"gap/dimension_scored/talk/rules": 2 + i, "gap/dimension_n/talk/rules": 4}
        for i in range(3)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    charts = {one.title: one for one in learning_charts(load_runs([run]))}
    goal, rules = charts["Leave-one-out gap by dimension"].panels
    assert rules.title == "talk/rules" and rules.curves[0].steps == [0, 1, 2]
    assert goal.curves[0].values == [2.0, 3.0] and goal.curves[0].high == [3.0, 4.0]
    assert not charts["Leave-one-out gap by dimension"].legend()  # panels have titles
    assert "by dimension: talk/rules 9 of 12" in dimension_text(*load_runs([run]))
    assert "<script>x" not in on_page(charts["Leave-one-out gap by dimension"]).svg


def test_the_same_seed_twice_is_not_two_seeds(tmp_path: Path) -> None:
    for name in ("a_1", "a_2", "b"):
        training(tmp_path / name, [0.1, 0.2])
    assert list(arms_of(load_runs([tmp_path]))) == ["a_1", "a_2", "b"]


def test_two_arms_never_share_a_name(tmp_path: Path) -> None:
    for i, rate in enumerate((1, 1, 2, 2)):
        training(tmp_path / f"run_{i}", [0.1, 0.2], seed=i, lr=rate)
    assert list(map(len, arms_of(load_runs([tmp_path])).values())) == [2, 2]


def test_the_curves_of_many_arms_differ_in_colour_or_line(tmp_path: Path) -> None:
    """Drafts and refined episodes of more than four arms have a panel each."""
    for i in range(7):
        path = training(tmp_path / f"arm{i}", [0.1, 0.1 * (i + 1)], lr=i)
        lines = [{"step": s, "reward/draft": 0.1, "reward/refined": 0.2} for s in (0, 1)]
        (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (found,) = learning_charts(load_runs([tmp_path]))
    assert [panel.title for panel in found.panels] == ["drafts", "refined"]
    for panel in found.panels:
        assert [curve.label for curve in panel.curves] == [f"arm{i}" for i in range(7)]
        assert len({(curve.colour % 6, curve.dash) for curve in panel.curves}) == 7


@pytest.mark.parametrize(
    ("origins", "labels"),
    [({PUBLISHED: 4}, ["Ditto 8B, Ditto paper", "Ditto-8B, Ditto-8B model card"]),
     ({MADE_HERE: 4}, []), ({PUBLISHED: 3, "mine.jsonl": 1}, []), ({}, [])],
)  # fmt: skip
def test_published_lines_need_published_dev_rows(
    tmp_path: Path, origins: dict[str, int], labels: list[str]
) -> None:
    path = training(tmp_path / "run", [0.1, 0.2])
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "eval/hitom": 0.3, "eval/tomi": 0.4}) + "\n")
    tasks = {name: {"dev_rows": {"1": "a"}, "origins": origins} for name in ("hitom", "tomi")}
    (path / "conditions.json").write_text(json.dumps({"players": {}, "tasks": tasks}))
    _, evaluation = learning_charts(load_runs([path]))
    found = {panel.title: [label for label, _ in panel.rules] for panel in evaluation.panels}
    assert found == ({"hitom": labels, "tomi": []} if labels else {"": []})
    assert ("comparable with these runs only if" in evaluation.caption) == bool(labels)


def test_results_on_other_scales_have_other_panels() -> None:
    cells = [Cell(mean=0.5, ci_low=0.4, ci_high=0.6, scale=(0.0, 1.0)), None]
    likert = [Cell(mean=7.0, scale=(1.0, 10.0))] * 2
    rows = [("x", cells), ("y", likert), ("z", cells), ("none", [None, Cell()])]
    (made,) = results_charts(["a", "b"], rows)
    assert [panel.rows for panel in made.panels] == [["x", "z"], ["y"]]
    assert [(d.row, d.label, d.lane) for d in made.panels[0].dots] == [(0, "a", 0), (1, "a", 0)]
    assert results_charts(["a"], [("none", [None])]) == []


# -- files -----------------------------------------------------------------------------------------


def test_files_have_the_width_of_a_column_and_embedded_fonts(tmp_path: Path) -> None:
    curve = Curve(label="a", steps=[0, 1], values=[0.0, 1.0])
    one, two = chart(Plot(curves=[curve])), chart(*[Plot(curves=[curve])] * 2)
    paths = write_figures([one, replace(two, name="two")], tmp_path / "new")
    assert [path.name for path in paths] == ["n.pdf", "n.svg", "two.pdf", "two.svg"]
    for pdf, svg, inches in ((*paths[:2], 3.25), (*paths[2:], 6.75)):
        data = pdf.read_bytes()
        assert re.search(rb"/MediaBox \[ 0 0 (\d+)", data)[1] == str(int(inches * 72)).encode()  # type: ignore[index]
        assert b"/FontFile2" in data and b"/Type3" not in data  # TrueType, so text can be searched
        root = ElementTree.parse(svg).getroot()
        assert root.attrib["width"] == f"{inches}in" and "var(" not in svg.read_text()
    again = write_figures([one], tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths[:2]]


def test_curves_differ_in_grey_and_without_line_style() -> None:
    """Neighbouring colours differ in line and mark, and all are visible on white."""
    assert len(set(DASHES)) == len(set(SIDES)) == 4
    for colour in PAPER[1:-1]:
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        assert 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.35


def test_the_command_writes_every_figure_and_prints_the_paths(tmp_path: Path, capsys: Any) -> None:
    path = training(tmp_path / "run", [0.1, 0.5])
    assert soul("report", path, "--figures", tmp_path / "f") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == str(tmp_path / "f" / "rewards.pdf")
    assert (tmp_path / "f" / "rewards.svg").is_file() and "draft reward" in out
    assert soul("report", path, "--figures", tmp_path / "g", "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["runs"] and "rewards.pdf" in shown.err
    assert soul("report", path, "--figures", tmp_path / "g", "--format", "episodes-csv") == 2
    assert "--figures does not work with --format episodes-csv." in capsys.readouterr().err
    (path / "metrics.jsonl").write_text("")
    assert soul("report", path, "--figures", tmp_path / "h") == 2
    assert "There is no figure to write." in capsys.readouterr().err


def test_a_page_with_curves_needs_no_matplotlib(tmp_path: Path) -> None:
    path = training(tmp_path / "run", [0.1, 0.5])
    (tmp_path / "absent").mkdir()
    missing = "raise ModuleNotFoundError('No module named matplotlib', name='matplotlib')\n"
    (tmp_path / "absent" / "matplotlib.py").write_text(missing)
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "absent"), root])}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "soulkit.cli.app", "report", str(path), *options]
        return subprocess.run(line, capture_output=True, text=True, env=environment, check=False)

    made = run("--format", "html")
    assert made.returncode == 0, made.stderr
    assert '<svg class="plot"' in (path / "report" / "index.html").read_text()
    refused = run("--figures", str(tmp_path / "f"))
    assert refused.returncode == 2 and "[report]" in refused.stderr
