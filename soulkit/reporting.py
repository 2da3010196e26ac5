"""Notes and progress of a command, and questions to its user.

Functions that take long have a Reporter as their last argument. The default `SILENT` shows nothing
and logs remarks; `cli.console.ConsoleReporter` prints.

    reporter.note(f"{len(rows)} rows")
    with reporter.progress(len(rows)) as bar:
        for row in rows:
            bar.advance(note=play(row))

For trainings see `steps`, `phase` and `step`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from soulkit.text import duration, one_line

log = logging.getLogger(__name__)


class Bar:
    """Progress of a loop."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Count `steps` more; `note` (a cost, a mean) is shown next to the numbers."""

    def begin(self, what: str, *, alone: bool = False) -> None:
        """Show `what` as the current activity. `alone`: other code, such as a download, may draw
        its own bars meanwhile, so a live bar is hidden."""


class LoopState:
    """Counts steps, and describes the rate and the remaining time."""

    def __init__(self, total: int | None, unit: Callable[[float], str] | None = None) -> None:
        self.total, self.done, self.note, self.unit = total, 0, "", unit
        self.under_way = ""
        self.start = time.monotonic()

    def add(self, steps: int, note: str) -> None:
        self.done += steps
        self.note = one_line(note, 120) if note else self.note
        self.under_way = ""

    def amount(self, unknown: str = "") -> str:
        shown = self.unit or str
        of = unknown if self.total is None else f"/{shown(self.total)}"
        return f"{shown(self.done)}{of}"

    def words(self) -> str:
        parts = [*(self._pace() if self.done else ()), self.under_way, self.note]
        return ", ".join(part for part in parts if part)

    def _pace(self) -> list[str]:
        seconds = time.monotonic() - self.start
        rate = self.done / seconds if seconds > 0 else 0.0
        parts = [f"{rate:.1f}/s" if rate >= 1 or not rate else f"{1 / rate:.1f} s each"]
        if self.unit is not None:
            parts = [f"{self.unit(rate)}/s"]
        if self.total is not None and 0 < self.done < self.total:
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        return parts


class Reporter:
    """A silent reporter: logs remarks and cannot ask questions."""

    def note(self, line: str) -> None:
        """Report a remark."""
        log.info("%s", line)

    def warn(self, line: str) -> None:
        """Report a failure."""
        log.warning("%s", line)

    def confirm(self, question: str) -> bool | None:
        """Ask the user; None if there is no terminal."""
        return None

    @contextmanager
    def progress(
        self, total: int | None, unit: Callable[[float], str] | None = None
    ) -> Iterator[Bar]:
        """Show the progress of a loop of `total` steps, if known. `unit` formats the counts."""
        yield Bar()

    @contextmanager
    def working(self, what: str, *, alone: bool = False) -> Iterator[None]:
        """Show an activity that has no count. `alone`: other code may draw bars meanwhile."""
        yield

    @contextmanager
    def starting(self, what: str, limit_s: float) -> Iterator[Callable[[float, str], None]]:
        """Show that a server is starting, within `limit_s` seconds. Call the result with the
        elapsed seconds and the newest line of its log."""
        yield lambda seconds, line: None

    def steps(self, total: int, title: str = "") -> AbstractContextManager[Reporter]:
        """Show trainings of `total` steps in total; yields their reporter, whose `run` makes one
        for each."""
        return _itself(self)

    def run(self, name: str = "") -> Reporter:
        """The reporter of one of several trainings, without notes."""
        return self

    def phase(self, what: str, *, alone: bool = False) -> None:
        """Show the current activity of a training; `alone` as in `Bar.begin`."""

    def step(self, done: int, words: str = "", remarks: Sequence[str] = ()) -> None:
        """Report that `done` training steps are done, with words and remarks on the newest one."""


@contextmanager
def _itself(reporter: Reporter) -> Iterator[Reporter]:
    yield reporter


SILENT = Reporter()
