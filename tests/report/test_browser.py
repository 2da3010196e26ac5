"""Report pages in a real Chromium: what a reader sees, and what axe finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.evaluation import soul
from tests.support.pages import Open, axe_violations

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def demo_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the scripted demo: two evaluations, dialogues and questions."""
    folder = tmp_path_factory.mktemp("demo")
    assert soul("demo", "--scripted", "--out", folder / "demo") == 0
    return folder / "demo" / "report" / "index.html"


def test_the_page_opens_without_errors(demo_page: Path, open_page: Open) -> None:
    page = open_page(demo_page, width=390, dark=True)
    assert page.locator("h2", has_text="Episodes").count() == 1
    assert isinstance(axe_violations(page), list)


FACTS = {
    "What improved": r"^\w+ \(\w+\), careful compared with careless$",
    "By how much": r"^\+\d\.\d{3} \[\+\d\.\d{3}, \+\d\.\d{3}\], from \d\.\d{3} to \d\.\d{3}$",
    "How certain": r"interval excludes zero; p < 0\.0001 .*\d+ episodes, \d+ clusters",
    "Why": r"Another model: careful instead of careless",
    "What got worse": r"^Nothing got clearly worse; \d+ differences checked",
    "Who judged": r"^Rules; no judge model was asked$",
    "On which rows": r"^The same in both runs: \d+ of \d+ episodes of \w+ scored in both",
}


@pytest.mark.parametrize("dark", [False, True])
def test_the_first_screen_states_seven_facts(demo_page: Path, open_page: Open, dark: bool) -> None:
    page = open_page(demo_page, width=1280, height=800, dark=dark)
    seen = page.evaluate(
        """() => [...document.querySelectorAll("h1, dl.key > div")].map(
          (e) => [e.innerText.split("\\n").join(" | "), e.getBoundingClientRect().bottom])"""
    )
    assert all(bottom <= 800 for _, bottom in seen), seen
    (claim, _), *facts = seen
    assert re.search(r"^careful scores 1\.000 on \w+ \(\w+\), up from 0\.\d+ in careless\.$", claim)
    said = dict(text.split(" | ", 1) for text, _ in facts)
    assert list(said) == list(FACTS)
    assert not [name for name, form in FACTS.items() if not re.search(form, said[name])], said
    assert claim not in page.title()  # the title names the runs
    assert "careless" in page.title() and "careful" in page.title()


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_page_scrolls_sideways(demo_page: Path, open_page: Open, width: int) -> None:
    page = open_page(demo_page, width=width)
    root = "document.documentElement"
    assert page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
    order = page.evaluate("[...document.querySelectorAll('h1, h2')].map((e) => e.innerText)")
    assert order[1:5] == ["Results", "Why", "How certain", "Episodes"]
    assert page.locator("h1").count() == 1
