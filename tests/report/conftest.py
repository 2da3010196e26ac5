"""Fixtures for report pages in a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pages import Chromium, Open, no_browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """One browser for all tests of a process; the tests are skipped without one."""
    if why := no_browser():
        pytest.skip(why)
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture
def open_page(chromium: Chromium) -> Iterator[Open]:
    """Opens a file in a new tab: `open_page(path, width=390, dark=True)`. The test fails if the
    page has a script error, violates its policy or loads anything from elsewhere. Name this fixture
    last, after those that make pages."""
    with chromium.tabs() as opened:
        yield opened
