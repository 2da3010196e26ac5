"""Opens report pages in a real Chromium through Playwright, checks them with axe, and makes records
for them."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

from soulkit.report.explorer import EpisodePack
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

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
PACKAGES = ("playwright", "axe_playwright_python")

Open = Callable[..., "Page"]
"""`open_page(path, width=1280, height=800, dark=False, fragment="", scripts=True)`."""


def no_browser() -> str:
    """Why pages cannot be opened here; empty if they can."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        return f"browser tests need {' and '.join(absent)} (soulkit[dev])"
    return "" if CHROMIUM else "browser tests need Chromium or Chrome in PATH"


class Chromium:
    """A headless Chromium without a network.

    While it lives, Playwright marks its event loop as running in this thread, which would stop
    tests that start a loop of their own. So the mark is set only while a test uses the browser.
    """

    def __init__(self) -> None:
        from playwright.sync_api import sync_playwright

        self._driver = sync_playwright().start()
        self._loop = asyncio.get_running_loop()
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        self._browser: Browser = self._driver.chromium.launch(
            executable_path=CHROMIUM, args=options
        )
        asyncio._set_running_loop(None)

    def close(self) -> None:
        asyncio._set_running_loop(self._loop)
        self._browser.close()
        self._driver.stop()
        asyncio._set_running_loop(None)

    @contextmanager
    def tabs(self) -> Iterator[Open]:
        """A function that opens a page in a new tab. Afterwards: no page had a script error or a
        violation of its policy, and none asked for anything outside its own folder."""
        asyncio._set_running_loop(self._loop)
        problems: list[str] = []
        contexts: list[Any] = []

        def open_page(
            path: Path, *, width: int = 1280, height: int = 800, dark: bool = False,
            fragment: str = "", scripts: bool = True,
        ) -> Page:  # fmt: skip
            context = self._browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if dark else "light", java_script_enabled=scripts,
            )  # fmt: skip
            contexts.append(context)
            page = context.new_page()
            page.set_default_timeout(20_000)
            inside = ("data:", path.resolve().parent.as_uri())

            def note(kind: str, text: str, bad: bool = True) -> None:
                problems.extend([f"{kind}: {text}"] if bad else [])

            page.on("pageerror", lambda error: note("error", str(error)))
            page.on("console", lambda line: note("console", line.text, line.type == "error"))
            page.on(
                "request", lambda sent: note("request", sent.url, not sent.url.startswith(inside))
            )
            page.goto(path.resolve().as_uri() + fragment)
            return page

        try:
            yield open_page
            assert not problems, problems
        finally:
            for context in contexts:
                context.close()
            asyncio._set_running_loop(None)


def axe_violations(page: Page, within: str | None = None) -> list[str]:
    """The accessibility violations of a page as axe finds them: rule and elements. With `within`,
    only those inside this element, as a CSS selector."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, context=within).response["violations"]
    return [f"{one['id']}: {[node['html'][:200] for node in one['nodes']][:5]}" for one in found]


# -- records ---------------------------------------------------------------------------------------

EVIL = (
    "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'></script> "
    "\x1b[31mred\x1b[0m \x07\x00 \u202eevil\u202c \u2066x\u2069 {{ 7*7 }} <!-- \u2028 "
)
"""Text that would break a page which treats it as anything but text."""


def episode(
    i: int, value: float | None, *, text: str = "The cup is in the box.", task: str = "rooms",
    kind: Kind = "draft", step: int = 0, feedback: str = "",
) -> Record:  # fmt: skip
    """An episode with one question and one reply."""
    turn = Turn((Segment("user", f"Question {i}: where is the cup?"),),
                Completion(text=text, reasoning="She left."))  # fmt: skip
    hint = Feedback(text=feedback, author="coach") if feedback else None
    broken = Failure("judge_error", "no verdict") if value is None else None
    return Record(
        key=record_key(step, f"{task}-{i}", 0, kind), task=task, example_id=f"{task}-{i}",
        rollout=0, kind=kind, step=step, gold="box",
        episode=Episode(example_id=f"{task}-{i}", task=task, traces=(Trace("reader", (turn,)),)),
        score=unscored(broken) if broken else Score(
            value=value, reward=value, words="box", metrics={"length": 12.0}
        ),
        received=hint if kind == "draft" else None, given=hint if kind == "refined" else None,
    )  # fmt: skip


def pair(i: int, before: float, after: float, **rest: Any) -> tuple[Record, Record]:
    """A draft and its refined episode."""
    rest = {"feedback": "Look again.", **rest}
    draft = episode(i, before, text="draft reply", **rest)
    return draft, episode(i, after, text="refined reply", kind="refined", **rest)


def opened(text: str) -> Any:
    """The values of a pack: compressed JSON in base64."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


def takes(pack: EpisodePack) -> list[dict[str, Any]]:
    """What the page shows of each episode."""
    return [one for name, text in pack.chunks.items() if name.isdigit() for one in opened(text)]


def spoken(play: Episode) -> Record:
    """A record of this episode with score 1."""
    return Record(key=record_key(0, play.example_id, 0, "draft"), task=play.task,
                  example_id=play.example_id, rollout=0, kind="draft", episode=play,
                  score=Score(value=1.0, reward=1.0))  # fmt: skip
