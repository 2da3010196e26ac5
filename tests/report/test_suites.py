"""A suite as a table: terminal, Markdown, LaTeX, CSV, JSON and page, of one run and of several.

Published figures stand beside published rows alone, and one footnote says what else differs.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli.app import main
from soulkit.data.files import write_rows
from soulkit.errors import ConfigError, RunError
from soulkit.eval.results.summary import Cell, Summary, headline_shown
from soulkit.report import pages
from soulkit.report.exports.suite import grid_latex, latex_text, suite_csv, suite_values
from soulkit.report.grid import parts_text
from soulkit.report.load import RunData, load_runs
from soulkit.report.pages import ReportView
from soulkit.report.published import (
    CAVEAT,
    publications,
    published_beside,
)
from soulkit.report.suites import Grid, SuiteTable, common_suite, suite_grid, suite_table
from soulkit.tasks.kit.registry import Registry, load_registry
from soulkit.train.state.metrics import steps_of
from tests.support.evaluation import FAST, soul
from tests.support.road import synth
from tests.support.servers.openai_server import ScriptedServer

ALIKE = Path(__file__).parents[1] / "recorded" / "after"
TASKS = """
suites:
  duo:
    title: Two axes_of 100% & more
    axes: {X: [tomi, hitom], Y: [paratomi]}
    average: macro
    published: [ditto_paper]
"""


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    (tmp_path / "tasks.yaml").write_text(TASKS)
    return load_registry(tmp_path / "tasks.yaml")


def cell(mean: float, **more: Any) -> Cell:
    shape = {
        "headline": True,
        "ci_low": mean - 0.1,
        "ci_high": mean + 0.1,
        "variance": 0.0025,
        "df": 19.0,
    }
    counts = {"n": 20, "n_scored": 20, "n_clusters": 20, "scale": (0.0, 1.0)}
    return Cell(mean=mean, **{**shape, **counts, **more})


def run(name: str, **means: float) -> RunData:
    """A run with this summary, measured like any other of these."""
    summary = Summary(
        command="eval api", model=name, protocol="paper", seconds=1.0,
        tasks={task: {"value": cell(mean)} for task, mean in means.items()},
    )  # fmt: skip
    return RunData(name=name, path=ALIKE, kind="eval", summary=summary)


WHOLE = {"tomi": 0.5, "hitom": 0.7, "paratomi": 0.4}


def duo(registry: Registry, *runs: RunData, **more: bool) -> SuiteTable:
    return suite_table(runs, "duo", registry, **more)


def texts(grid: Grid) -> dict[str, list[str]]:
    return {row.cells[0].text.strip(): [one.text for one in row.cells[1:]] for row in grid.rows}


# --- one run --------------------------------------------------------------------------------------


def test_one_line_a_task_then_axes_then_the_suite(registry: Registry) -> None:
    grid = suite_grid(duo(registry, run("one", **WHOLE)))
    assert grid.head[:4] == ("task", "mean [95% CI]", "scored", "clusters")
    assert grid.title == "duo: Two axes_of 100% & more"
    rows = texts(grid)
    assert list(rows) == [
        "tomi", "hitom", "paratomi", "X mean (2 of 2)", "Y mean (1 of 1)", "duo mean (3 of 3)",
    ]  # fmt: skip
    assert rows["tomi"][:3] == ["0.500 [0.400, 0.600]", "20/20", "20"]
    assert rows["X mean (2 of 2)"][0].startswith("0.600 [")
    assert rows["duo mean (3 of 3)"][0].startswith("0.533 [")
    assert rows["duo mean (3 of 3)"][1] == "60/60"
    assert [row.rule for row in grid.rows] == [False, False, False, True, False, True]


def test_a_missing_member_is_named_and_nothing_is_averaged(registry: Registry) -> None:
    table = duo(registry, run("one", tomi=0.5, hitom=0.7))
    grid = suite_grid(table)
    rows = texts(grid)
    assert grid.title.startswith("duo (partial)") and table.partial
    assert rows["paratomi"][:2] == ["\u2013"] * 2
    assert rows["duo mean (2 of 3)"][0] == "\u2013"
    assert grid.head[4] == "worst to best" and rows["duo mean (2 of 3)"][3] == "0.400\u20130.733"
    assert rows["X mean (2 of 2)"][0].startswith("0.600 [") and rows["X mean (2 of 2)"][3] == ""
    assert "not played: paratomi" in grid.notes
    assert any("one covers part of the suite: 2 of 3 members" in note for note in grid.notes)
    assert "paratomi" not in texts(suite_grid(replace(table, playable=True)))


WHY = "none of these rows asks for it"


def unasked(run: RunData, task: str) -> RunData:
    """The run, whose headline of `task` applies to none of its rows."""
    assert run.summary is not None
    cells = {"joint": Cell(headline=True, not_applicable=WHY, scale=(0.0, 1.0))}
    tasks = {**run.summary.tasks, task: cells}
    return replace(run, summary=replace(run.summary, tasks=tasks))


def test_a_headline_that_applies_to_no_row_makes_no_suite_partial(registry: Registry) -> None:
    table = duo(registry, unasked(run("one", **WHOLE), "paratomi"))
    grid = suite_grid(table)
    rows = texts(grid)
    assert not table.partial and "partial" not in grid.title + " ".join(grid.notes)
    assert any(note.startswith(f"one: paratomi: {WHY}; no average") for note in grid.notes)
    assert rows["paratomi (joint)"][:2] == ["\u2013"] * 2
    assert rows["duo mean (2 of 3)"][0] == "\u2013"
    assert rows["duo mean (2 of 3)"][3] == "0.400\u20130.733"
    assert "paratomi (joint)" in texts(suite_grid(replace(table, playable=True)))
    lacking = duo(registry, unasked(run("one", tomi=0.5), "paratomi"))
    assert lacking.partial and any(
        "one covers part of the suite" in n for n in suite_grid(lacking).notes
    )
    both = suite_grid(duo(registry, run("a", **WHOLE), unasked(run("b", **WHOLE), "paratomi")))
    assert texts(both)["paratomi (value, joint)"][1] == "\u2013"
    assert "partial" not in both.title


def test_a_group_and_a_suite_of_it_are_not_partial_either() -> None:
    card = load_registry()
    group = card.suite_spec("soul-23").groups["alignx"]
    whole = run("one", **dict.fromkeys(card.suite("soul-23"), 0.5))
    assert not suite_table([unasked(whole, group[0])], "soul-23", card).partial
    one_away = {task: 0.5 for task in card.suite("soul-23") if task != group[1]}
    assert suite_table([unasked(run("one", **one_away), group[0])], "soul-23", card).partial


def test_why_a_task_was_left_out_is_what_the_run_says(registry: Registry) -> None:
    part = run("one", tomi=0.5, hitom=0.7)
    assert part.summary is not None
    why = replace(part.summary, suite="duo", left_out={"paratomi": "nobody plays the judge"})
    table = duo(registry, replace(part, summary=why))
    assert table.absent == {"paratomi": "nobody plays the judge"}
    assert common_suite([replace(part, summary=why)], registry) == "duo"
    assert common_suite([replace(part, summary=why), part], registry) is None
    gone = replace(why, suite="no longer declared")
    assert common_suite([replace(part, summary=gone)], registry) is None


def test_a_headline_of_another_name_is_named(registry: Registry) -> None:
    one = run("one", **WHOLE)
    assert one.summary is not None
    tasks = {**one.tasks, "tomi": {"value": cell(0.9, headline=False), "joint": cell(0.3)}}
    grid = suite_grid(duo(registry, replace(one, summary=replace(one.summary, tasks=tasks))))
    assert texts(grid)["tomi (joint)"][0] == "0.300 [0.200, 0.400]"
    assert texts(grid)["X mean (2 of 2)"][0].startswith("0.500 [")


# --- runs and published columns side by side ------------------------------------------------------


def test_the_best_of_the_runs_is_marked(registry: Registry) -> None:
    table = duo(registry, run("one", **WHOLE), run("two", tomi=0.6, hitom=0.7, paratomi=0.1))
    grid = suite_grid(table)
    assert grid.head[:3] == ("task", "one", "two")
    best = {row.cells[0].text: [one.best for one in row.cells[1:3]] for row in grid.rows}
    assert best["tomi"] == [False, True] and best["hitom"] == [True, True]
    assert best["paratomi"] == [True, False] and best["duo mean (3 of 3)"] == [True, False]
    assert texts(grid)["tomi"][0].startswith("0.500 [0.400, 0.600] (20/20")


def test_runs_that_were_measured_differently_have_no_best(tmp_path: Path) -> None:
    paths = []
    for name, protocol in (("one", "paper"), ("two", "reference")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(f"kind: api\nmodel: m\nprotocol: {protocol}\n")
        summary = run(name, **WHOLE).summary
        assert summary is not None
        line = {**summary.to_json(), "protocol": protocol, "prompts": {t: {} for t in WHOLE}}
        (folder / "summary.json").write_text(json.dumps(line))
        paths.append(folder)
    (tmp_path / "tasks.yaml").write_text(TASKS)
    table = suite_table(load_runs(paths), "duo", load_registry(tmp_path / "tasks.yaml"))
    assert all(line.best_runs == () for line in table.lines)
    assert any("not measured the same way" in note for note in table.notes)


def test_published_columns_stand_beside_and_claim_nothing(registry: Registry) -> None:
    table = duo(registry, run("one", **WHOLE))
    assert [c.model for c in table.context] == ["Base 8B", "GRPO 8B", "Ditto 8B"]
    grid = suite_grid(table)
    assert grid.head[-3:] == ("Base 8B*", "GRPO 8B*", "Ditto 8B*")
    assert texts(grid)["hitom"][-3:] == ["0.580", "0.770", "0.780"]
    assert texts(grid)["tomi"][-3:] == ["\u2013"] * 3
    assert texts(grid)["X mean (2 of 2)"][-3:] == ["\u2013"] * 3  # no mean of the rows it has
    assert texts(grid)["Y mean (1 of 1)"][-1] == "0.930"
    best = {row.cells[0].text: row.cells[-1].best for row in grid.rows}
    assert best["hitom"] and best["paratomi"] and not best["tomi"]
    footnotes = [note for note in grid.notes if note.startswith("* ")]
    assert len(footnotes) == 1 and footnotes[0].startswith(f"* {CAVEAT}")
    assert re.search(r"Ditto paper: judge .*this run: not recorded", footnotes[0])
    wide = duo(registry, run("one", **WHOLE), all_context=True)
    assert len(wide.context) == len(publications()[0].models)


def test_axis_means_that_have_no_rows_stand_as_they_were_printed() -> None:
    table = suite_table([run("one", **WHOLE)], "soul-23", load_registry())
    place = [c.model for c in table.context].index("OSim-8B")
    figures = {line.name: line.figures[place] for line in table.lines if line.level == "axis"}
    assert figures == {"CONV": 0.565, "SS": 0.492, "COG": 0.755, "ROLE": 0.636, "EVAL": 0.584}
    whole = next(line for line in table.lines if line.level == "suite")
    assert whole.figures[place] is None


# --- formats --------------------------------------------------------------------------------------


def test_terminal_and_markdown_show_the_same_numbers(registry: Registry) -> None:
    one, two = run("one", **WHOLE), run("two_*", tomi=0.6, hitom=0.7)
    view = ReportView([one, two], duo(registry, one, two))
    shown, written = view.text(), view.markdown()
    for text in ("0.600 [0.500, 0.700] (20/20", "could be 0.433\u20130.767"):
        assert text in shown and text.replace("[", "\\[").replace("]", "\\]") in written
    assert "**0.600" in written and "two\\_\\*" in written
    assert "duo (partial)" in parts_text(view.parts())


def test_break_downs_are_behind_details(registry: Registry) -> None:
    one = run("one", **WHOLE)
    assert one.summary is not None
    tasks = {**one.tasks, "tomi": {**one.tasks["tomi"], "value/order=2": cell(0.111)}}
    one = replace(one, summary=replace(one.summary, tasks=tasks))
    table = duo(registry, one)
    for view in (ReportView([one]), ReportView([one], table)):
        assert "order=2" not in view.text() + view.markdown()
        suite = view.suite and replace(view.suite, details=True)
        detailed = replace(view, suite=suite, details=True)
        assert "order=2" in detailed.text() and "order=2" in detailed.markdown()


def test_a_training_on_a_suite_shows_its_steps_as_well(registry: Registry) -> None:
    """Reward and gap of every task: what a joint run is read for."""
    lines = [{"step": 0, "reward/draft": 0.2, "reward/draft/tomi": 0.125, "gap/loo/tomi": 0.0625}]
    one = replace(run("one", **WHOLE), kind="train", steps=steps_of(lines))
    view = ReportView([one], duo(registry, one))
    for text in (view.text(), view.markdown()):
        assert "Rewards by task: tomi" in text and "0.125" in text and "0.062" in text
        assert text.index("hitom") < text.index("Rewards by task: tomi")
    two = ReportView([one, run("two", **WHOLE)], duo(registry, one, run("two", **WHOLE)))
    assert two.text().count("Rewards by task: tomi") == 1
    assert two.markdown().count("## one") == 2 and two.markdown().count("## two") == 1


def test_csv_and_json_hold_a_record_a_number(registry: Registry) -> None:
    table = duo(registry, run("=cmd()", tomi=0.5, hitom=0.7))
    rows = list(csv.DictReader(io.StringIO(suite_csv(table))))
    records = {(row["name"], row["column"]): row for row in rows}
    tomi = records["tomi", "'=cmd()"]
    assert (tomi["mean"], tomi["n_scored"], tomi["n"], tomi["axis"]) == ("0.5", "20", "20", "X")
    whole = records["all", "'=cmd()"]
    assert whole["mean"] == "" and whole["missing"] == "paratomi"
    assert float(whole["worst"]) == pytest.approx(0.4)
    assert records["paratomi", "Ditto 8B"]["mean"] == "0.93"
    assert records["paratomi", "Ditto 8B"]["comparable"] == ""
    values = suite_values(table)
    json.dumps(values, allow_nan=False)
    assert values["partial"] and values["absent"] == {"paratomi": "not played"}
    assert len(values["lines"]) == len(rows)


def balanced(text: str) -> bool:
    """Whether braces and environments close, and every special sign outside them is escaped."""
    depth = 0
    for sign in re.sub(r"\\[{}]", "", text):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return False
    opened = re.findall(r"\\begin\{(\w+)\}", text)
    closed = re.findall(r"\\end\{(\w+)\}", text)
    return depth == 0 and sorted(opened) == sorted(closed)


def columns_agree(text: str) -> bool:
    """Whether every line of the table has as many cells as the table has columns."""
    columns = re.search(r"\\begin\{tabular\}\{(\w+)\}", text)
    assert columns is not None
    body = text[columns.end() : text.index("\\end{tabular}")]
    lines = [line for line in body.splitlines() if line.endswith("\\\\")]
    return all(len(re.findall(r"(?<!\\)&", line)) + 1 == len(columns[1]) for line in lines)


def compiles(text: str, folder: Path) -> None:
    """Let pdflatex read it, where there is one."""
    if shutil.which("pdflatex") is None:
        return
    article = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n%s\n\\end{document}"
    (folder / "table.tex").write_text(article % text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]


def test_latex_escapes_what_files_say(registry: Registry, tmp_path: Path) -> None:
    evil = run(r"a_b & 100% #1 $x$ {y} \input{/etc/passwd} ~^ 好 é", **WHOLE)
    evil = replace(evil, path=tmp_path)  # named in a note: nothing is recorded there
    text = grid_latex(suite_grid(duo(registry, evil, run("[two]", **WHOLE))))
    assert balanced(text) and columns_agree(text)
    assert r"\textbackslash{}input\{/etc/passwd\}" in text and "[U+597D]" in text
    assert "\\toprule" in text and text.count("\\midrule") == 3 and "\\bottomrule" in text
    assert r"Two axes\_of 100\% \& more" in text
    compiles(text, tmp_path)


def test_signs_for_latex() -> None:
    assert latex_text('\u22120.5 \u00b1 1 \u2013 <a> "b" |') == (
        r"$-$0.5 $\pm$ 1 -- \textless{}a\textgreater{} ''b'' \textbar{}"
    )
    assert latex_text("\u0105\u00e9\u00d0") == "[U+0105]\u00e9[U+00D0]"


def test_the_page_shows_the_suite(registry: Registry) -> None:
    one = run("<b>one</b>", **WHOLE)
    table = duo(registry, one)
    page = pages.render([one], suite=table)
    assert "duo: Two axes_of 100% &amp; more" in page and "X mean (2 of 2)" in page
    assert "&lt;b&gt;one" in page and "<b>one" not in page
    section = page[page.index("duo: Two axes_of") : page.index("<h2>Results</h2>")]
    assert section.count('class="strip"') == 6 and "OSim" not in section


def test_without_a_suite_a_flat_table_has_every_task(registry: Registry) -> None:
    table = suite_table([run("one", **WHOLE)], None, registry)
    assert [line.name for line in table.lines] == list(WHOLE) and table.context == ()
    assert balanced(grid_latex(suite_grid(table)))
    with pytest.raises(RunError, match="has scores yet"):
        suite_table([replace(run("one"), summary=None)], None, registry)
    with pytest.raises(ConfigError, match="no suite named"):
        suite_table([run("one", **WHOLE)], "soul-11", registry)


# --- the whole road -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def choice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The suite `choice`, played against a server that always answers A."""
    out = tmp_path_factory.mktemp("suites") / "run"
    with ScriptedServer(answer="<answer>A</answer>") as server:
        actor = ("--model", "scripted", "--base-url", server.base_url)
        code = soul("eval", "api", *actor, "--suite", "choice", "--data", "synth:8", "--out", out,
                    *FAST)  # fmt: skip
    assert code == 0
    return out


def test_every_task_shows_its_metric_under_the_declared_name(
    choice: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary, the report, its exports and `soul runs` say what `soul tasks show` says."""
    specs = load_registry().specs
    cells = load_runs([choice])[0].tasks
    names = {}
    for task, of_task in cells.items():
        metric = specs[task].metric
        names[task] = metric.headline or metric.name
        shared = metric.name == metric.headline
        assert of_task["value"].name == ("" if shared else metric.name), task
        assert headline_shown(of_task) == names[task]
    forms = ["--format md", "--format latex", "--format csv --details", "--format table"]
    for command in [*(f"report {choice} {form}" for form in forms), f"runs {choice}"]:
        assert main(command.split()) == 0
        shown = " ".join(capsys.readouterr().out.replace("\\", "").split())
        known = list(names.values())[:3] if command.startswith("runs") else set(names.values())
        assert all(name in shown for name in known), command
        assert not re.search(r"\bvalue\b|\u00b1|pm\$", shown), command


def test_a_suite_that_was_played_is_shown_as_one(
    choice: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads((choice / "summary.json").read_text())["suite"] == "choice"
    assert main(["report", str(choice)]) == 0
    shown = capsys.readouterr().out
    assert "mmtom" in shown and "order=" not in shown and "mean (" not in shown


def test_one_line_a_task_axes_bounds_and_nothing_averaged_away(
    choice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["report", str(choice), "--suite", "soul-23", "--playable", "--format", "latex"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert balanced(text) and columns_agree(text)
    compiles(text, tmp_path)
    lines = [line for line in text.splitlines() if line.endswith("\\\\")][1:]
    names = [line.partition(" & ")[0] for line in lines]
    tasks = load_registry().suite_spec("soul-23")
    played = json.loads((choice / "summary.json").read_text())["tasks"]
    members = [m for m in tasks.members if all(t in played for t in tasks.tasks_of(m))]
    assert [n.replace("\\_", "_").partition(" (")[0] for n in names[: len(members)]] == members
    assert names[len(members) :] == [
        "CONV mean (0 of 4)", "SS mean (0 of 1)", "COG mean (4 of 4)", "ROLE mean (4 of 9)",
        "EVAL mean (3 of 5)", "soul-23 mean (11 of 23)",
    ]  # fmt: skip
    means = {line.partition(" & ")[0]: line[:-2].rstrip().split(" & ")[1:5] for line in lines}
    for name in ("CONV mean (0 of 4)", "ROLE mean (4 of 9)", "soul-23 mean (11 of 23)"):
        mean, _, _, bounds = means[name]
        assert mean == "--" and re.fullmatch(r"\d\.\d{3}--\d\.\d{3}", bounds), name
    assert re.fullmatch(r"\d\.\d{3}", means["COG mean (4 of 4)"][0])
    assert "covers part of the suite: 11 of 23 members" in text and "not played:" in text


@pytest.mark.parametrize("form", ["table", "md", "csv", "json", "html"])
def test_every_format_of_a_partial_suite(
    form: str, choice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"out.{form}"
    command = ["report", str(choice), "--suite", "soul-10", "--format", form, "--out", str(file)]
    assert main(command) == 0
    text = file.read_text()
    assert "soul-10" in text and "userllm" in text
    assert "0.726" not in text, "the published mean stands beside rows that were made here"
    said = "Published figures are shown only for published rows"
    assert said in " ".join(text.split()) or form == "csv"
    assert capsys.readouterr().out.strip() == str(file)


def test_drafts_of_a_training_are_no_score_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = Path(__file__).parents[1] / "recorded"
    folders = [str(recorded / name) for name in ("before", "ditto")]
    said = "ditto: kind: mean over drafts of the last 4 steps; no score on held-out rows"
    assert main(["report", *folders, "--format", "latex"]) == 0
    assert said in capsys.readouterr().out
    assert main(["report", *folders, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["metric"] for row in rows] == ["value", "value (drafts, last 4 steps)"]


IMPORTED = {"provenance": "Hi-ToM, Hi-ToM_data.json:1", "licence": "Apache-2.0 (Hi-ToM)"}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "released": ("hitom_val.parquet", {}),
    "imported": ("hitom.jsonl", IMPORTED),
    "own": ("own.jsonl", {}),
    "drafted": ("drafts.jsonl", {**IMPORTED, "provenance": "Hi-ToM, x:1; drafted by a"}),
    "of an own file": ("built.jsonl", {**IMPORTED, "origin": "mine.jsonl"}),
    "training rows": ("hitom_rl_train.parquet", {}),
}
SAID = {
    "made": "made here", "own": "own.jsonl", "drafted": "drafts.jsonl",
    "of an own file": "mine.jsonl", "training rows": "hitom_rl_train.parquet",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of rows → a run on such rows."""
    folder = tmp_path_factory.mktemp("rows")
    rows = synth("hitom", 4, 3)
    sources = {"made": "synth:4"}
    for kind, (name, more) in ROWS.items():
        write_rows(folder / name, [{**row, **more} for row in rows], data_source="hitom")
        sources[kind] = str(folder / name)
    paths = {}
    with ScriptedServer(answer="<answer>A</answer>") as server:
        for kind, source in sources.items():
            paths[kind] = folder / f"run {kind}"
            assert soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--task",
                        "hitom", "--data", source, "--out", paths[kind], *FAST) == 0  # fmt: skip
    return paths


def text_of(form: str, out: Path, *arguments: object) -> str:
    assert soul("report", *arguments, "--format", form, "--out", out / f"page.{form}") == 0
    return " ".join((out / f"page.{form}").read_text().replace("\\", "").split())


FORMS = ("table", "md", "html")
SUITE = ("--suite", "soul-10")


@pytest.mark.parametrize("suite", [(), SUITE])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["released", "imported"])
def test_figures_stand_beside_published_rows(
    kind: str, form: str, suite: tuple[str, ...], runs: dict[str, Path], tmp_path: Path
) -> None:
    text = text_of(form, tmp_path, runs[kind], *suite)
    assert "Ditto 8B" in text and "0.780" in text and "alone, released" not in text


@pytest.mark.parametrize("suite", [(), SUITE])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SAID)
def test_other_rows_have_none_and_one_line_says_why(
    kind: str, form: str, suite: tuple[str, ...], runs: dict[str, Path], tmp_path: Path
) -> None:
    text = text_of(form, tmp_path, runs[kind], *suite)
    assert "Ditto 8B" not in text and "0.780" not in text and CAVEAT not in text
    assert text.count("Published figures are shown only for published rows") == 1
    assert f"hitom ({SAID[kind]})" in text


def test_one_run_on_other_rows_is_enough(runs: dict[str, Path], tmp_path: Path) -> None:
    both = published_beside(load_runs([runs["released"], runs["made"]]))
    assert both.tables == () and "hitom (made here)" in both.left_out and not both.footnote


def test_a_suite_shows_figures_of_the_tasks_that_have_published_rows(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    with ScriptedServer(answer="<answer>A</answer>") as server:
        assert soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--task",
                    "hitom,paratomi", "--data", f"hitom={Path(runs['released']).parent}",
                    "--data", "paratomi=synth:3", "--out", tmp_path / "run",
                    *FAST) == 0  # fmt: skip
    assert "paratomi (made here)" in text_of("md", tmp_path, tmp_path / "run", *SUITE)
    text_of("csv", tmp_path, tmp_path / "run", *SUITE)
    with (tmp_path / "page.csv").open() as file:
        lines = {row["name"]: row for row in csv.DictReader(file) if row["column"] == "Ditto 8B"}
    assert lines["hitom"]["mean"] == "0.78" and lines["lifechoices"]["mean"] == "0.8"
    assert not {"paratomi", "COG", "all"} & lines.keys()


def test_the_footnote_of_a_suite_speaks_of_the_figures_that_it_shows(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """UserLLM has another judge than the paper, and no figure beside these rows."""
    with ScriptedServer(answer="<answer>A</answer>") as server:
        assert soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--task",
                    "hitom,userllm", "--data", f"hitom={Path(runs['released']).parent}",
                    "--data", "userllm=synth:3", "--judge", f"endpoint:j@{server.base_url}",
                    "--max-unscored", "1", "--backoff", "0",
                    "--out", tmp_path / "run") == 0  # fmt: skip
    text = text_of("md", tmp_path, tmp_path / "run", *SUITE)
    assert "userllm (made here)" in text and "(userllm)" not in text and "judge gpt" not in text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suite", [(), SUITE])
def test_everything_that_differs_stands_in_one_footnote(
    form: str, suite: tuple[str, ...], runs: dict[str, Path], tmp_path: Path
) -> None:
    text = text_of(form, tmp_path, runs["released"], *suite)
    footnote = text[text.index(CAVEAT) :]
    for said in ("prompt wording", "temperature", "the source does not state"):
        assert said in footnote
    assert footnote.count("the source does not state") == 1
    assert "not comparable:" not in text


def test_the_rows_are_recorded_with_the_run(runs: dict[str, Path]) -> None:
    for kind, said in {"released": "published", "imported": "published", **SAID}.items():
        entry = json.loads((runs[kind] / "conditions.json").read_text())["tasks"]["hitom"]
        assert entry["origins"] == {said: 4}
        assert len(entry["rows"]) == 4
