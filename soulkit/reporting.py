"""Notes and progress of a command, and questions to its user.

Everything that takes its time gets a Reporter as its last argument. `SILENT`, the default, shows
nothing and cannot be asked, and its remarks go to the log; the one that prints is
`cli.console.ConsoleReporter`.

    reporter.note(f"{len(rows)} rows")
    with reporter.progress(len(rows)) as bar:
        for row in rows:
            bar.advance(note=play(row))

A training is a loop of steps in which much happens: see `steps`, `phase` and `step`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

log = logging.getLogger(__name__)


class Bar:
    """How far a loop is."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """`steps` more are done; `note` (a cost, a mean) is shown beside the numbers."""

    def begin(self, what: str, *, alone: bool = False) -> None:
        """`what` is under way now, until the next. `alone`: others may draw bars of their own until
        then (a download's), so that a live one makes room for them."""


class Reporter:
    """Shows nothing, logs remarks, and nobody can be asked through it."""

    def note(self, line: str) -> None:
        """A remark."""
        log.info("%s", line)

    def warn(self, line: str) -> None:
        """A remark on something that broke."""
        log.warning("%s", line)

    def confirm(self, question: str) -> bool | None:
        """Whether the user says yes; None where nobody can be asked."""
        return None

    @contextmanager
    def progress(
        self, total: int | None, unit: Callable[[float], str] | None = None
    ) -> Iterator[Bar]:
        """Shows how far a loop of `total` steps is, if that is known. `unit` writes the counts."""
        yield Bar()

    @contextmanager
    def working(self, what: str, *, alone: bool = False) -> Iterator[None]:
        """Shows that `what` is under way, where nothing can be counted. `alone`: others may draw
        bars of their own meanwhile."""
        yield

    @contextmanager
    def starting(self, what: str, limit_s: float) -> Iterator[Callable[[float, str], None]]:
        """Shows that something starts which may take so many seconds. Call what it gives with the
        seconds so far and the newest line of the log."""
        yield lambda seconds, line: None

    def steps(self, total: int, title: str = "") -> AbstractContextManager[Reporter]:
        """Shows trainings of `total` steps in all: the reporter for them, or for `run` of each."""
        return _itself(self)

    def run(self, name: str = "") -> Reporter:
        """The reporter of one of these trainings: steps and what is under way, without notes."""
        return self

    def phase(self, what: str, *, alone: bool = False) -> None:
        """What is under way in a training; `alone` as in `Bar.begin`."""

    def step(self, done: int, words: str = "", remarks: Sequence[str] = ()) -> None:
        """`done` steps of a training are done, the newest of them with these words and remarks."""


@contextmanager
def _itself(reporter: Reporter) -> Iterator[Reporter]:
    yield reporter


SILENT = Reporter()
