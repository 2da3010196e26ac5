"""The part of a report on people: hand-written measurements, as text and in a real Chromium."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from soulkit.errors import RunError
from soulkit.report.load import load_runs
from soulkit.report.pages import ReportView, render, write_page
from soulkit.report.people.page import people_parts
from tests.support.evaluation import soul
from tests.support.pages import EVIL, Open, axe_violations
from tests.support.people import closeness, measured_run, memory, road

STEPS = (20, 40, 60)


def page_of(run: Path) -> str:
    return render(load_runs([run], episodes=False))


@pytest.mark.parametrize(
    ("worst", "words"),
    [
        ("words", "by the words alone: right in 75% of pairs"),
        ("context", "whether the reply fits the conversation: right in 61% of pairs"),
        ("distance", "farther from people than people are to each other: 1.31 times"),
    ],
)
def test_the_page_leads_with_the_worst_of_three_numbers(
    tmp_path: Path, worst: str, words: str
) -> None:
    run = measured_run(tmp_path, closeness=closeness(*STEPS, worst=worst), memory=memory(*STEPS))
    page = page_of(run)
    head = page[page.index("<h1>") : page.index("</h1>")]
    assert words in head
    assert page.count("(the worst)") == 1 and "1.310 [1.120, 1.630]" in page
    view = ReportView(load_runs([run], episodes=False))
    assert words in view.text() and words in view.markdown()
    assert next(chart.name for chart in view.charts()) == "closeness-and-memory"


def test_only_lines_that_are_significant_after_holm_are_marked(tmp_path: Path) -> None:
    (part,) = people_parts(load_runs([measured_run(tmp_path, closeness=closeness(60))]))
    assert [line["differs"] for line in part.lines()] == [True, False, True, False]
    page = page_of(tmp_path / "run")
    assert page.count('class="strip zero loss"') == 2 and page.count("<td>yes</td>") == 2
    lines = list(part.lines())
    for left, width, dot in (line["strip"] for line in lines):
        assert 0 <= left <= dot <= left + width <= 100
    crossing = lines[1]["strip"]
    assert crossing[0] < 50 < crossing[0] + crossing[1], "zero is in the middle"


def test_the_curve_joins_checkpoints_by_step(tmp_path: Path) -> None:
    files = {"closeness": closeness(*STEPS), "memory": memory(40, 60, 80)}
    (part,) = people_parts(load_runs([measured_run(tmp_path, **files)]))
    path, end = part.charts()[0].panels[0].curves
    assert path.label == "checkpoints, step 40 to 60" and end.label == "the model, step 60"
    assert list(path.values) == [5.5, 3.5] and list(end.values) == [3.5]
    assert list(path.steps) == [1 + 40 / 90, 1 + 60 / 90]


def test_the_table_of_memory_has_the_controls_and_the_twin_says_what_it_is(tmp_path: Path) -> None:
    planted = measured_run(tmp_path / "a", memory=memory(*STEPS), closeness=closeness(60))
    page = page_of(planted)
    table = page[page.index("Planted secrets by repetitions") : page.index("By checkpoint")]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]
    assert [row[0] for row in rows] == ["never (control)", "once", "twice", "4 times", "8 times"]
    assert [row[-1] for row in rows] == ["0", "0", "0", "0", "1"]
    assert rows[0][1] == "20" and rows[0][5] == "0.000 [0.000, 0.520]"
    assert "this model is an audit" in page
    shipped = measured_run(tmp_path / "b", memory=memory(60, planted=False))
    page = page_of(shipped)
    assert "Only a twin that was trained with some" in page and "In the chats" not in page
    assert "what other attacks find" in page and "3 of 120" in page


def test_the_road_is_shown_with_its_own_run_only(tmp_path: Path) -> None:
    files = {"memory": memory(60), "closeness": closeness(60)}
    page = page_of(measured_run(tmp_path / "a", **files, road=road()))
    for words in ("76 persons, 724 conversations, 4,012 messages", "12 × no message of a person",
                  "31 × email, 8 × phone", "soul data redact d/in.jsonl"):  # fmt: skip
        assert words in page
    other = page_of(measured_run(tmp_path / "b", **files, road=road(run="another")))
    assert "soul data redact" not in other
    bare = {key: value for key, value in road().items() if key != "redacted"}
    assert "not redacted" in page_of(measured_run(tmp_path / "c", **files, road=bare))


def test_texts_are_escaped(tmp_path: Path) -> None:
    evil = road() | {"left_out": {EVIL: 1}, "commands": [EVIL]}
    near = closeness(60)
    near["models"][0]["lines"][0]["label"] = EVIL
    page = page_of(measured_run(tmp_path, closeness=near, memory=memory(60), road=evil))
    assert "<img" not in page and page.count("&lt;img") == 3


def test_the_certificate_is_shown_or_missed(tmp_path: Path) -> None:
    run = measured_run(tmp_path, closeness=closeness(60))
    assert "No certificate: soul certify" in page_of(run)
    (run / "certificate.json").write_text(json.dumps({"model": {"weights": EVIL}}), "utf-8")
    assert "certificate.json does not count: it was changed" in page_of(run)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run = measured_run(tmp_path, closeness=closeness(60))
    (run / "closeness.json").write_text('{"models": [')
    with pytest.raises(RunError, match=re.escape(f"'{run / 'closeness.json'}' cannot be read")):
        page_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_accessible_and_fits(
    tmp_path: Path, width: int, dark: bool, open_page: Open
) -> None:
    files = {"closeness": closeness(*STEPS), "memory": memory(*STEPS), "road": road()}
    run = measured_run(tmp_path, **files)
    assert soul("report", run, "--out", tmp_path / "page.html") == 0
    page = open_page(tmp_path / "page.html", width=width, dark=dark)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert axe_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colours = page.locator(".strip b").evaluate_all(
        "all => all.map(b => getComputedStyle(b).color)"
    )
    assert colours[0] == colours[2] != colours[1] == colours[3]


def test_write_page_makes_one_file(tmp_path: Path) -> None:
    run = measured_run(tmp_path, closeness=closeness(*STEPS), memory=memory(*STEPS))
    page = write_page(load_runs([run], episodes=False), tmp_path / "page.html")
    assert not re.search(r"(?:src|href)=\"(?!data:)", page.read_text())
