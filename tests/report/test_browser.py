"""Report pages in a real Chromium: what a reader sees, and what axe finds."""

from __future__ import annotations

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
