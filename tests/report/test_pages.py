"""The rating page in a real browser: keys, progress, what it saves, and nothing else."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import BROWSER, Page, browser
from tests.support.evaluation import soul

RECORDED = Path(__file__).parents[1] / "recorded" / "judged"
DONE = "document.getElementById('done').textContent"
FOCUS = "document.activeElement.closest('fieldset')?.dataset.dimension"
CARD = "[...document.querySelectorAll('.card')].findIndex((card) => !card.hidden)"
NOTE = "document.getElementById('note').textContent"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome here"),
]


@pytest.fixture
def sheet(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.symlink_to(RECORDED, target_is_directory=True)
    assert soul("judge", "sheet", run, "--checks", 1, "--out", tmp_path / "sheet") == 0
    return tmp_path / "sheet"


def saved(home: Path, ending: str) -> Path:
    """The file that the page saves, as soon as it is whole."""
    for _ in range(100):
        files = list((home / "downloads").glob(f"*{ending}"))
        if files and files[0].stat().st_size:
            return files[0]
        time.sleep(0.1)
    raise AssertionError(f"no {ending} was saved")


def fill(page: Page) -> None:
    """Every question from the keyboard: 7 points, the style whose name begins with l."""
    page.press("/")
    while "All questions" not in page.value(NOTE):
        page.press("7" if page.value(FOCUS) == "quality" else "l")
        page.press("/")


def test_a_sheet_is_filled_in_from_the_keyboard_and_saved(sheet: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open(sheet / "rater-1" / "sheet.html")
        assert (page.value(DONE), page.value(FOCUS), page.value(CARD)) == ("0", "quality", 0)
        page.press("3")
        page.press("Enter")
        assert (page.value(DONE), page.value(FOCUS)) == ("1", "style")
        page.press("p")
        page.press("Enter")
        assert (page.value(CARD), page.value(FOCUS)) == (1, "quality")
        page.press(",")
        assert (page.value(CARD), page.value(DONE)) == (0, "2")
        fill(page)
        assert page.value(DONE) == "8"
        page.press("s", ctrl=True)
        filled: dict[str, Any] = json.loads(saved(tmp_path, ".json").read_text())
        page.value("document.getElementById('table').click()")
        with saved(tmp_path, ".csv").open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        assert page.errors == []
    assert filled["sheet"].endswith(".1") and filled["rater"] == "rater 1"
    assert [row["label"] for row in filled["labels"][:3]] == ["3", "plain", "7"]
    assert [{k: row[k] for k in ("task", "example", "rollout", "dimension", "label")}
            for row in rows] == filled["labels"]  # fmt: skip
    written = saved(tmp_path, ".json"), saved(tmp_path, ".csv")
    labels = []
    for file in written:
        assert soul("judge", "import", file, "--key", sheet / "key.json") == 0
        labels.append((sheet / "labels.jsonl").read_text())
    assert labels[0] == labels[1] and len(labels[0].splitlines()) == 6


def test_answers_stay_when_the_page_is_closed(sheet: Path, tmp_path: Path) -> None:
    place = sheet / "rater-1" / "sheet.html"
    with browser(tmp_path) as page:
        page.open(place)
        page.press("4")
        page.value("window.onbeforeunload = null; document.getElementById('save').click()")
        page.open(place)
        assert page.value(DONE) == "1" and page.value(FOCUS) == "quality"
        assert page.value("document.querySelector('input:checked').value") == "4"
        page.value("restore({sheet: 'another.1', labels: []})")
        assert page.value(DONE) == "1"  # a file of another sheet changes nothing
        assert page.errors == []


def test_the_policy_stops_whatever_is_not_the_page_itself(sheet: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open(sheet / "rater-1" / "sheet.html")
        page.value(
            "document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x\" "
            "onerror=\"window.broken = 1\">'); fetch('http://127.0.0.1:9/y').catch(() => 0); 0"
        )
        time.sleep(0.3)
        assert page.value("window.broken ?? 0") == 0
        assert sum("Content Security Policy" in error for error in page.errors) >= 2
