"""Reports of real records: an evaluation, a training run, and the two around it.

What a reader of `soul report` learns beside the headline, task by task, on the whole road.

Tables keep the names of their rows and every number, however narrow the terminal is.

A judge that tells nothing apart is named in every report.
"""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import count
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from soulkit.cli import report as cli
from soulkit.errors import RunError
from soulkit.eval.results.summary import Cell, Summary, summarise
from soulkit.report import pages, tables
from soulkit.report.grid import FittingTable, parts_text, plain_table
from soulkit.report.load import RunData, load_runs
from soulkit.report.published import CAVEAT, publications
from soulkit.report.training import feedback_over_time, learning_charts, steps_grid
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import (
    Completion,
    Episode,
    Failure,
    Feedback,
    Kind,
    Record,
    Score,
    Segment,
    Trace,
    Turn,
    record_key,
    unscored,
)
from tests.support import judged
from tests.support.browser import BROWSER, browser
from tests.support.evaluation import api, oracle, soul, summary, write_records
from tests.support.servers.openai_server import Body, ScriptedServer

EVIL = (
    "<script>alert('x')</script> \"onload=\"alert(1) </p></details></script>"
    "\x1b[31mred\x1b[0m \x07\x00 \u202eevil\u202c \u2066x\u2069 {{ 7*7 }} <!--<img src=x onerror=y>"
)


def record(
    i: int, value: float | None, *, task: str = "hitom", kind: Kind = "draft", step: int = 0,
    text: str = "The cup is in the box. [C]", feedback: str = "",
) -> Record:  # fmt: skip
    broken = Failure("judge_error", "no verdict in the reply") if value is None else None
    turn = Turn((Segment("user", "Where?"),), Completion(text=text, reasoning="Anna left."))
    hint = Feedback(text=feedback, author="symbolic") if feedback else None
    return Record(
        key=record_key(step, f"{task}-{i}", 0, kind),
        task=task,
        example_id=f"{task}-{i}",
        rollout=0,
        kind=kind,
        step=step,
        episode=Episode(
            example_id=f"{task}-{i}", task=task, traces=(Trace("reader", (turn,)),), failure=broken
        ),
        score=unscored(broken) if broken else Score(
            value=value, reward=value, status="ok" if value else "no_tag", words="read: C",
            metrics={"length": 12.0},
        ),
        tags={"order": str(i % 3)},
        prompt="Anna puts the cup in the box.\nShe leaves.\nWhere does she think it is?",
        gold="C",
        received=hint if kind == "draft" else None,
        given=hint if kind == "refined" else None,
    )  # fmt: skip


def write_run(
    path: Path, records: list[Record], command: str, steps: int = 0, hour: int = 0
) -> Path:
    write_records(path, records)
    summary = summarise(
        records, command=command, model="tiny-qwen3", protocol="paper", seconds=83.2, cost=None,
        scale={"hitom": (0.0, 1.0), "paratomi": (0.0, 1.0)},
    )  # fmt: skip
    dates = {"started": f"2026-11-26T{hour:02d}:00:00+00:00"}
    line = {**summary.to_json(), "provenance": {"dates": dates}}
    (path / "summary.json").write_text(json.dumps(line), encoding="utf-8")
    if steps:
        text = "".join(json.dumps(line) + "\n" for line in metric_lines(steps))
        (path / "metrics.jsonl").write_text(text, encoding="utf-8")
    return path


def metric_lines(steps: int) -> Iterator[dict[str, object]]:
    rng = random.Random(0)
    for step in range(1, steps + 1):
        level = 0.3 + 0.5 * step / steps + rng.uniform(-0.05, 0.05)
        gap = 0.3 - 0.25 * step / steps + rng.uniform(-0.04, 0.04)
        yield {
            "step": step, "reward/draft": level, "reward/refined": level + gap, "gap/loo": gap,
            "gap/loo_low": gap - 0.12, "gap/loo_high": gap + 0.12, "gap/pair": gap + 0.1,
            "feedback/share": 1 - level, "feedback/leak_share": 0.02,
            "policy/entropy": 1.2 - 0.01 * step,
            "kl/base": 0.001 * step, "clip/share": 0.03, "tokens/per_turn": 40.0,
        }  # fmt: skip
        if step % 5 == 0:
            yield {"step": step, "eval/hitom": level - 0.05, "eval/paratomi": level + 0.04}


def story(tmp_path: Path) -> Path:
    """A folder as a demonstration leaves it: before/, train/, after/."""
    rng = random.Random(1)

    def scores(chance: float) -> list[Record]:
        return [
            record(i, None if rng.random() < 0.04 else float(rng.random() < chance), task=task)
            for task in ("hitom", "paratomi")
            for i in range(60)
        ]

    hint = "Anna left before the cup was moved, so she still believes what she saw last."
    drafts = [record(i, 0.0, step=1 + i % 20, feedback=hint, text="[A]") for i in range(30)]
    refined = [record(i, float(i % 3 > 0), kind="refined", step=1 + i % 20) for i in range(30)]
    write_run(tmp_path / "demo" / "before", scores(0.35), "eval")
    write_run(tmp_path / "demo" / "train", drafts + refined, "train ditto", 20, hour=1)
    write_run(tmp_path / "demo" / "after", scores(0.8), "eval", hour=2)
    return tmp_path / "demo"


class Page(HTMLParser):
    """Every tag and attribute of a page, as a browser's parser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]


def terminal_text(runs: list[RunData], width: int = 120, *, details: bool = False) -> str:
    return parts_text(tables.report_parts(tables.blocks(runs, details=details)), width)


def test_a_folder_of_runs_is_told_in_order(tmp_path: Path) -> None:
    runs = load_runs([story(tmp_path)])
    assert [(r.name, r.kind) for r in runs] == [
        ("before", "eval"), ("train", "train"), ("after", "eval")]  # fmt: skip
    assert len(runs[1].steps) == 20
    assert [step for step, _ in runs[1].evals] == [5, 10, 15, 20]


def test_a_summary_of_the_whole_folder_hides_none_of_its_runs(tmp_path: Path) -> None:
    folder = story(tmp_path)
    (folder / "summary.json").write_text('{"command": "demo", "tasks": {}}')
    assert [r.name for r in load_runs([folder])] == ["before", "train", "after"]


def test_feedback_is_told_per_coach(tmp_path: Path) -> None:
    folder = story(tmp_path) / "train"
    summary = json.loads((folder / "summary.json").read_text())
    coach = {"checked": 512, "dropped": 3, "leaks": {"gold_text": 2, "answerable": 1}}
    summary["feedback"] = {"drafts": 600, "coach_failures": 1, "coaches": {"symbolic": coach}}
    (folder / "summary.json").write_text(json.dumps(summary))
    runs = load_runs([folder])
    feedback = "symbolic 512, 3 dropped (2 gold_text, 1 answerable); coach failed 1 time"
    assert ("feedback", feedback) in tables.facts(runs[0])
    told = dict(tables.facts(runs[0]))["leak check"]
    assert "compares words" in told and "does not notice" in told and "a code" in told
    page = pages.render(runs)
    assert feedback in page and told in page
    assert "symbolic 512, 3 dropped" in tables.markdown(tables.blocks(runs))
    assert "leak check" not in dict(tables.facts(load_runs([folder.with_name("before")])[0]))


def test_how_answers_could_be_read_is_told_where_some_could_not(tmp_path: Path) -> None:
    folder = story(tmp_path) / "before"
    summary = json.loads((folder / "summary.json").read_text())
    counts = {"salvaged": 2, "ok": 30, "no_tag": 1, "unscored": 4}
    clean = {"tomi": {"ok": 5, "unscored": 2}}
    assert tables.answers_text(Summary(statuses=clean)) == tables.answers_text(Summary()) == ""
    summary["statuses"] = {"tomi": counts, "hitom": {"ok": 5, "unscored": 2}}
    (folder / "summary.json").write_text(json.dumps(summary))
    runs = load_runs([folder])
    assert ("answers", "tomi 30 ok, 1 no_tag, 2 salvaged") in tables.facts(runs[0])
    assert "30 ok, 1 no_tag, 2 salvaged" in terminal_text(runs)


def test_no_run_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match="no run"):
            load_runs([path])
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        load_runs([tmp_path])


def test_a_mean_never_stands_alone() -> None:
    cell = Cell(mean=0.7, ci_low=0.6, ci_high=0.78, n_scored=98, n=100)
    assert tables.mean_text(cell) == "0.700 [0.600, 0.780] (98/100)"
    clustered = replace(cell, n_clusters=32, events=29.4)
    assert tables.mean_text(clustered) == "0.700 [0.600, 0.780] (98/100, 32 clusters, few events)"
    few = replace(cell, n_clusters=7)
    assert tables.mean_text(few) == "0.700 [0.600, 0.780] (98/100, 7 clusters: few)"
    held_by_few = Cell(mean=0.96, ci_low=0.93, ci_high=0.99, n_scored=400, n=400, n_clusters=40,
                       variance=0.0002, df=30.0, scale=(0.0, 1.0), method="wilson-t")  # fmt: skip
    assert tables.mean_text(held_by_few).endswith("(400/400, 40 clusters: few)")
    assert tables.mean_text(replace(held_by_few, df=39.0)).endswith("(400/400, 40 clusters)")
    flat = Cell(mean=0.7, n_scored=4, n=4, n_clusters=4, method="no-spread")
    assert tables.mean_text(flat) == "0.700 (4/4, no spread in 4 clusters)"
    assert tables.mean_text(Cell(n=4)) == "\u2013 (0/4)"
    assert tables.number(float("nan")) == "\u2013"
    assert tables.number(-0.5) == "\u22120.500"


def test_terminal_and_markdown_show_the_same_numbers(tmp_path: Path) -> None:
    runs = load_runs([story(tmp_path)], episodes=False)
    expected = tables.scored_text(runs[2].tasks["hitom"]["value"])
    plain = terminal_text(runs)
    assert expected in plain
    assert tables.md_text(expected) in tables.markdown(tables.blocks(runs))
    assert "unfinished" not in plain
    assert "Leave-one-out gap: other drafts" in plain
    assert CAVEAT in tables.markdown(tables.blocks(runs))


def test_a_narrow_terminal_keeps_the_means_whole(tmp_path: Path) -> None:
    runs = load_runs([story(tmp_path) / "after"], episodes=False)
    assert tables.scored_text(runs[0].tasks["hitom"]["value"]) in terminal_text(runs, 80)


@pytest.mark.parametrize("details", [False, True])
def test_a_run_is_whole_at_sixty_columns(details: bool, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [record(i, 0.0) for i in range(10)], "eval")
    shown = terminal_text(load_runs([path]), 60, details=details)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60
    words = shown.split()
    assert {"hitom", "clusters", "few", "events"} <= set(words) and "few event" not in lines
    at = next(i for i, line in enumerate(lines) if line.startswith(" hitom"))
    assert len(lines[at].rstrip()) < 60 and "[0.000, 0." in "".join(lines[at : at + 3])


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome here")
def test_the_results_fit_their_width_when_a_dot_is_at_the_end(tmp_path: Path) -> None:
    best = write_run(tmp_path / "run", [record(i, 1.0, task="mine") for i in range(40)], "eval")
    assert soul("report", best, "--format", "html", "--out", tmp_path / "page.html") == 0
    results = "document.querySelector('.strips').closest('.scroll')"
    with browser(tmp_path) as page:
        page.open(tmp_path / "page.html")
        assert page.value(f"{results}.scrollWidth - {results}.clientWidth") == 0


def test_an_unfinished_run_is_reported_as_such(tmp_path: Path) -> None:
    path = story(tmp_path) / "train"
    (path / "summary.json").unlink()
    (run,) = load_runs([path])
    assert "unfinished" in terminal_text([run])
    assert "Unfinished" in pages.render([run])
    assert tables.runs_as_json([run])["runs"]["train"]["finished"] is False


def test_the_page_asks_nobody_for_anything(tmp_path: Path) -> None:
    page = Page(pages.render(load_runs([story(tmp_path)])))
    loading = {"src", "href", "action", "data", "poster", "srcset", "xlink:href"}
    addresses = {(n, v) for _, n, v in page.attributes if n in loading}
    assert all(v is not None and v.startswith(("data:", "#")) for _, v in addresses)
    assert not {"iframe", "object", "embed", "img"} & set(page.tags)


def test_the_policy_holds_the_hash_of_the_script(tmp_path: Path) -> None:
    import base64
    import hashlib

    text = pages.render(load_runs([story(tmp_path)]))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)  # others contain data
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text.replace("&#39;", "'").replace("&#43;", "+")


def test_what_models_write_is_text_and_nothing_else(tmp_path: Path) -> None:
    evil = [
        record(1, 0.0, task=EVIL, text=EVIL, feedback=EVIL, step=1),
        record(1, 1.0, task=EVIL, text=EVIL, feedback=EVIL, kind="refined", step=1),
        record(2, None, task="hitom", text=EVIL),
    ]
    run = load_runs([write_run(tmp_path / "run", evil, "train", steps=5)])
    text = pages.render(run)
    page = Page(text)
    harmless = Page(pages.render(load_runs([write_run(
        tmp_path / "plain",
        [record(1, 0.0, task="a", feedback="b", step=1),
         record(1, 1.0, task="a", feedback="b", kind="refined", step=1), record(2, None)],
        "train", steps=5)])))  # fmt: skip
    assert page.tags == harmless.tags
    assert not any(n.startswith("on") for _, n, _ in page.attributes)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "&lt;script&gt;" in text and "{{ 7*7 }}" in text
    for shown in (terminal_text(run), tables.markdown(tables.blocks(run))):
        assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", shown)


def test_a_hostile_task_name_in_the_evaluation_lines_is_text(tmp_path: Path) -> None:
    path = story(tmp_path) / "train"
    before = Page(pages.render(load_runs([path]))).tags.count("script")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "eval/<script>$x^$": 0.5}) + "\n")
    assert Page(pages.render(load_runs([path]))).tags.count("script") == before


def test_a_mixture_has_a_line_for_every_task(tmp_path: Path) -> None:
    """A step that played no row of a task is bridged."""
    steps = [
        {"step": 0, "reward/draft": 0.2, "reward/draft/a": 0.1, "reward/draft/b": 0.3},
        {"step": 1, "reward/draft": 0.4, "reward/draft/a": 0.4, "gap/loo/a": 0.1},
        {"step": 2, "reward/draft": 0.5, "reward/draft/b": 0.7},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    (run,) = load_runs([tmp_path])
    charts = {chart.title: chart for chart in learning_charts([run])}
    assert list(charts) == ["Rewards", "Rewards by task", "Leave-one-out gap by task"]
    assert list(charts["Rewards by task"].legend()) == ["a", "b"]
    rows = {row.cells[0].text: [c.text for c in row.cells[1:]] for row in steps_grid(run).rows}
    assert rows["Rewards by task: b"] == ["0.300", "0.700"]
    assert rows["Rewards by task: a"] == ["0.100", "0.400 (step 1)"]
    assert rows["Leave-one-out gap by task: a"] == ["0.100 (step 1)", "0.100 (step 1)"]


def test_missing_quantities_only_leave_their_figures_out(tmp_path: Path) -> None:
    path = tmp_path / "train"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 1, "reward/draft": 0.2, "gap/loo": null}\n')
    (run,) = load_runs([path])
    assert [chart.title for chart in learning_charts([run])] == ["Rewards"]
    assert "Rewards: drafts" in terminal_text([run])


def test_training_means_stand_beside_no_published_figure(tmp_path: Path) -> None:
    (run,) = load_runs([story(tmp_path) / "train"])
    assert CAVEAT not in pages.render([run])
    assert CAVEAT not in terminal_text([run], 400)


def test_published_figures() -> None:
    paper, card, _ = publications()
    assert paper.figure("hitom", "Ditto 8B") == 0.78
    assert card.figure("hitom", "Ditto-8B") == 0.79
    assert card.figure("tomi", "Ditto-8B") is None
    assert all(0 <= f <= 1 for t in (paper, card) for row in t.figures.values() for f in row)
    assert (len(paper.figures), len(card.figures)) == (10, 23)
    domains = load_registry().suite_spec("humanual")
    assert domains.published == ("ditto_8b_card",)
    means = (0.210, 0.408, 0.275, 0.297, 0.534, 0.303)
    assert card.mean(domains.tasks, "Ditto-8B") == pytest.approx(sum(means) / 6)


def app() -> Typer:
    made = Typer()
    made.command()(cli.command)
    return made


def test_the_command(tmp_path: Path) -> None:
    path = story(tmp_path)
    run = CliRunner()
    machine = run.invoke(app(), [str(path), "--json"])
    assert list(json.loads(machine.stdout)["runs"]) == ["before", "train", "after"]
    assert run.invoke(app(), [str(path)]).exit_code == 0
    out = tmp_path / "deep" / "r.md"
    assert run.invoke(app(), [str(path), "--format", "md", "--out", str(out)]).exit_code == 0
    assert out.read_text().startswith("# Results")
    made = run.invoke(app(), [str(path), "--format", "html"])
    assert made.exit_code == 0, made.output
    assert (path / "report" / "index.html").read_text().startswith("<!doctype html>")


TYPES = ("true_belief", "false_belief", "second_order_false_belief")
EXPECTED = {
    "hitom": (
        *(f"value/order={order}" for order in range(5)),
        *(f"joint_order_{order}" for order in range(5)),
        *(f"value/length={length}" for length in (1, 2, 3)),
        "value/deception=False",
        "value/deception=True",
    ),
    "paratomi": (
        *(f"value/story={kind}" for kind in TYPES),
        *(f"value/order={order}" for order in range(3)),
        "value/question=memory",
        "value/question=reality",
    ),
    "tomi": (
        *(f"value/story={kind}" for kind in TYPES),
        *(f"value/order={order}" for order in range(3)),
        "value/question=memory",
        "value/question=reality",
    ),
    "mmtom": tuple(f"value/type={t}" for t in (1.1, 1.2, 1.3, 2.1, 2.2, 2.3, 2.4)),
    "socsci210": (
        *(f"value/type={kind}" for kind in ("binary", "categorical", "ordinal")),
        *("exact", "shift", "study_macro", "constant_best", "constant_middle"),
    ),
}


@pytest.mark.parametrize("task", EXPECTED)
def test_the_report_shows_every_break_down(
    task: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = tmp_path / "run"
    with ScriptedServer(answer=oracle(task, 30)) as server:
        assert api(server.base_url, run, task=task, n=30) == 0
    cells = summary(run)["tasks"][task]
    assert cells["value"]["mean"] == 1.0
    capfd.readouterr()
    assert soul("report", run, "--details") == 0
    shown = capfd.readouterr().out
    for name in EXPECTED[task]:
        assert cells[name]["n_scored"] > 0, name
        assert name.removeprefix("value/") in shown, name


def test_what_belongs_beside_a_headline_stands_there() -> None:
    cell = Cell(mean=1.0, n_scored=2, n=2)
    metrics = {
        "believability": cell, "secret": replace(cell, beside=True),
        "value": replace(cell, headline=True), "value/side=a": cell,
    }  # fmt: skip
    order = [name for name, _ in tables.in_order(metrics)]
    assert order == ["value", "secret", "value/side=a", "believability"]
    summary = Summary(
        command="eval api", model="m", protocol="paper", seconds=1.0, tasks={"t": metrics}
    )
    runs = [RunData(name=n, path=Path(n), kind="eval", summary=summary) for n in ("one", "two")]
    assert tables.extra_cells(runs, "t") == [("secret", [replace(cell, beside=True)] * 2)]
    assert "secret" in pages.render(runs) and "believability" in pages.render(runs)
    lines = [line.split() for line in terminal_text(runs).splitlines() if line.strip()]
    heads = [line[0] for line in lines]
    assert heads.index("secret") == heads.index("t") + 1  # also where runs stand side by side


HEADS = ("task", "A", "B \u2212 A", "95% CI", "p (Holm)", "shared", "clusters")
ROWS = (
    ("alignx_arbitrary row_accuracy", "0.500", "\u22120.150", "\u22120.284 to \u22120.016",
     "0.4733", "440", "no spread in 11"),
    ("all (suite)", "0.519", "\u22120.115", "\u22120.202 to \u22120.012", "\u2013", "200",
     "9: few"),
)  # fmt: skip


def printed(width: int) -> str:
    from rich.console import Console
    from rich.text import Text

    table = plain_table()
    for head in HEADS:
        table.add_column(head, justify="left" if head == "task" else "right")
    for row in ROWS:
        table.add_row(*map(Text, row))
    screen = Console(file=io.StringIO(), width=width, highlight=False)
    screen.print(FittingTable(table))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return str(text)


@pytest.mark.parametrize("width", [200, 100, 80, 72, 60, 40, 24])
def test_every_word_is_there(width: int) -> None:
    words = printed(width).split()
    for row in ROWS:
        assert all(words.count(word) >= 1 for text in row for word in text.split()), width
    assert "\u2026" not in printed(width)


def test_it_is_one_line_a_row_where_there_is_room() -> None:
    lines = [line for line in printed(120).splitlines() if line.strip()]
    assert len(lines) == 2 + len(ROWS) and "\u22120.284 to \u22120.016" in lines[2]


def test_without_room_each_row_is_a_paragraph() -> None:
    lines = printed(40).splitlines()
    at = lines.index(ROWS[0][0])
    assert lines[at + 1].strip().startswith("A 0.500 · B \u2212 A \u22120.150")
    assert ROWS[1][0] in lines


def test_names_of_break_downs_fold_nowhere() -> None:
    """The space before such a name is a part of it."""
    from rich.console import Console
    from rich.text import Text

    shown = plain_table()
    for head in ("metric", "clusters"):
        shown.add_column(head)
    shown.add_row(*map(Text, (" secret=surprise", "11 of these, few events")))
    screen = Console(file=io.StringIO(), width=30)
    screen.print(FittingTable(shown))
    assert "secret=surprise" in screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("differs", "n"), [(False, 12), (True, 12), (False, 4)])
def test_a_judge_that_gives_every_episode_the_same_verdict_is_named(
    differs: bool, n: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its reasons may differ; a few equal verdicts say nothing yet."""
    seen = count(1)

    def says(body: Body) -> str:
        nth = next(seen)
        quality = {"reasoning": f"it is number {nth}", "score": 9 if differs and nth == 3 else 7}
        return json.dumps({"quality": quality, "style": "plain"})

    rows = judged.write_rows(tmp_path / "rows.jsonl", n)
    with ScriptedServer(answer=says) as server:
        run = judged.evaluated(tmp_path / "run", rows, server.base_url)
    page = tmp_path / "page.html"
    assert soul("report", run, "--format", "html", "--out", page) == 0
    capfd.readouterr()
    assert soul("report", run) == 0
    words = f"the same verdict on all {n} episodes (j: "
    assert "feedback and refined episode" not in page.read_text()  # an evaluation has none
    for shown in (page.read_text(), capfd.readouterr().out):
        assert (words in " ".join(shown.split())) == (not differs and n == 12)


def test_feedback_on_the_same_example_early_and_late(tmp_path: Path) -> None:
    path = write_records(tmp_path / "run", [
        *(record(0, 0.0, step=step, feedback=f"<b>At {step}</b>") for step in (5, 1, 9, 4)),
        *(record(1, 1.0, step=step, feedback=f"Then {step}") for step in (2, 3)),
        record(2, 0.0, step=1, feedback="Only once"),
        record(3, 0.0, step=1, feedback="Then nothing"), record(3, 1.0, step=9),
    ])  # fmt: skip
    (run,) = load_runs([path])
    assert feedback_over_time(run) == []  # no training
    (path / "metrics.jsonl").write_text('{"step": 1, "reward/draft": 0.2}\n')
    again = record(0, 0.5, step=9, feedback="<i>resumed</i>")  # a resumed run plays step 9 again
    write_records(path, [again])
    (run,) = load_runs([path])
    far, near = feedback_over_time(run)
    assert [(one.step, one.reward, one.text) for one in far[1:]] == [
        (1, 0.0, "<b>At 1</b>"), (9, 0.5, "<i>resumed</i>")
    ]  # fmt: skip
    assert [one.step for one in near[1:]] == [2, 3]
    page = pages.render([run])
    assert (
        "&lt;b&gt;At 1&lt;/b&gt;" in page and "<i>resumed" not in page and "Only once" not in page
    )
