"""Output of the commands: results on stdout, everything else on stderr.

With --json, stdout contains exactly one JSON document: use `print_json` for it and
`console(json=True)`, which is stderr, for the rest. Progress goes to stderr: a live bar in a
terminal, else a plain line every few seconds, or every half minute without progress, so that log
files stay readable. Text from models goes through `sanitise`. The last line of a command says what
to do next.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.text import Text

from soulkit.reporting import Bar, LoopState, Reporter
from soulkit.text import duration, one_line, sanitise

__all__ = ["ConsoleReporter", "console", "err", "one_line", "out", "print_json", "print_next"]
__all__ += ["print_note", "safe", "sanitise", "warn_unsealed"]

PLAIN_EVERY = 5.0
"""Seconds between two plain progress lines."""
QUIET = 30.0
"""Seconds without progress after which a plain line names the current activity."""
STARTING_EVERY = 15.0
"""Seconds between two lines while a server starts."""
BAR = 16
"""Width of a live bar in columns."""


class _Console(Console):
    """A console that stops printing into a closed pipe (`| head`) without ending the command, and
    prints no control characters."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def render_str(self, text: str, **options: Any) -> Text:
        """`text` as rich prints it: any of it may come from a settings file or a model."""
        return super().render_str(sanitise(text), **options)


def _make(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    # A pipe has no width; the default of 80 columns would wrap tables without need.
    piped = not stream.isatty() and "COLUMNS" not in os.environ
    # No emoji codes: ":100:" in a name or a model's text is plain text.
    return _Console(stderr=stderr, highlight=False, emoji=False, width=160 if piped else None)


out = _make(stderr=False)
err = _make(stderr=True)


def console(json: bool = False) -> Console:
    """The console for tables: stdout, or stderr with --json."""
    return err if json else out


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON document to stdout; ValueError for NaN and infinity."""
    text = json.dumps(value, ensure_ascii=True, indent=2, allow_nan=False)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # a closed pipe, as in _Console
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def safe(text: str) -> str:
    """Model text for a rich console: sanitised, with square brackets escaped."""
    return escape(sanitise(text))


class _LiveBar(Bar):
    def __init__(self, bars: Progress, state: LoopState, description: str) -> None:
        self.bars, self.state, self.description = bars, state, description
        name, amount = escape(description), state.amount("/?")
        self.task = bars.add_task(name, total=state.total, words="", amount=amount)

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.state.add(steps, note)
        self._show()

    def begin(self, what: str, *, alone: bool = False) -> None:
        self.state.under_way = what
        if alone:
            self._make_room()
            err.print(f"{self.description}: {what}", markup=False)
        else:
            self._show()

    def _make_room(self) -> None:
        """Remove the bar until there is progress to show."""
        self.bars.live.transient = True
        self.bars.stop()
        self.bars.live.transient = False

    def _show(self) -> None:
        amount = self.state.amount("/?")
        # Rich would shrink the bar and the clock to fit long words.
        room = err.width - len(self.description) - BAR - len(amount) - len("0:00:00") - 5
        words = escape(one_line(self.state.words(), max(room, 20)))
        self.bars.update(self.task, completed=self.state.done, words=words, amount=amount)
        self.bars.start()


class _PlainBar(Bar):
    """Plain lines; a thread prints the current activity while there is no progress."""

    def __init__(self, state: LoopState, description: str) -> None:
        self.state, self.description = state, description
        self.printed_at, self.printed, self.printed_what = state.start, 0, ""
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def advance(self, steps: int = 1, note: str = "") -> None:
        with self._lock:
            self.state.add(steps, note)
            if self._since() >= PLAIN_EVERY:
                self._say()

    def begin(self, what: str, *, alone: bool = False) -> None:
        with self._lock:
            self.state.under_way = what

    def close(self) -> None:
        """Print the progress since the last line, and stop."""
        self._over.set()
        self._thread.join()
        self._say()

    def _since(self) -> float:
        return time.monotonic() - self.printed_at

    def _watch(self) -> None:
        while not self._over.wait(PLAIN_EVERY / 5):
            with self._lock:
                # Before the first step, name the activity early; later only after QUIET seconds.
                fresh = not self.state.done and self.state.under_way != self.printed_what
                if self._since() >= (PLAIN_EVERY if fresh else QUIET):
                    self._say_under_way()

    def _say(self) -> None:
        if self.printed != self.state.done:
            self._print(self.state.words())

    def _say_under_way(self) -> None:
        elapsed = duration(time.monotonic() - self.state.start)
        self._print(", ".join(part for part in (self.state.words(), f"after {elapsed}") if part))

    def _print(self, words: str) -> None:
        self.printed_at, self.printed = time.monotonic(), self.state.done
        self.printed_what = self.state.under_way
        counted = self.state.total is not None or self.state.done
        what = f"{self.state.amount()} ({words})" if counted else words
        print(f"{self.description}: {what}", file=sys.stderr, flush=True)


class ConsoleReporter(Reporter):
    """Reports a command's progress on stderr, prefixed with its `title`."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._status: Status | None = None

    def note(self, line: str) -> None:
        print_note(line)

    def warn(self, line: str) -> None:
        self.note(line)

    def confirm(self, question: str) -> bool | None:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return None
        if self._status is not None:
            self._status.stop()
        try:
            answer = err.input(f"{escape(question)} \\[y/N] ")
        finally:
            if self._status is not None:
                self._status.start()
        return answer.strip().lower() in ("y", "yes")

    @contextmanager
    def progress(
        self, total: int | None, unit: Callable[[float], str] | None = None
    ) -> Iterator[Bar]:
        with _bar(LoopState(total, unit), one_line(self.title, 60)) as bar:
            yield bar

    @contextmanager
    def working(self, what: str, *, alone: bool = False) -> Iterator[None]:
        if not err.is_terminal:
            with _bar(LoopState(None), one_line(self.title, 60)) as bar:
                bar.begin(what)
                yield
        elif alone:
            err.print(f"{self.title}: {what}", markup=False)
            yield
        else:
            with err.status(escape(f"{self.title}: {what}")) as self._status:
                try:
                    yield
                finally:
                    self._status = None

    @contextmanager
    def starting(self, what: str, limit_s: float) -> Iterator[Callable[[float, str], None]]:
        if not err.is_terminal:
            yield _plain_start(what, limit_s)
            return
        with err.status(escape(_start_words(what, 0, limit_s))) as shown:
            yield lambda seconds, line: shown.update(
                escape(one_line(f"{_start_words(what, seconds, limit_s)} · {line}",
                                max(err.width - 4, 40)))
            )  # fmt: skip

    @contextmanager
    def steps(self, total: int, title: str = "") -> Iterator[Reporter]:
        with _bar(LoopState(total), one_line(title or self.title, 60)) as bar:
            yield _StepReporter(bar)


class _StepReporter(ConsoleReporter):
    """Moves a bar to each training step; a resumed training starts in the middle. With a `name` it
    reports one of several trainings and drops their notes."""

    def __init__(self, bar: Bar, name: str = "", *, notes: bool = True) -> None:
        super().__init__(name)
        self.bar, self.notes, self.done = bar, notes, 0
        self.prefix = f"{name}: " if name else ""

    def note(self, line: str) -> None:
        if self.notes:
            super().note(line)

    @contextmanager
    def starting(self, what: str, limit_s: float) -> Iterator[Callable[[float, str], None]]:
        # No second live display next to the bar.
        yield _plain_start(what, limit_s) if self.notes else lambda seconds, line: None

    def run(self, name: str = "") -> Reporter:
        return _StepReporter(self.bar, name, notes=False)

    def phase(self, what: str, *, alone: bool = False) -> None:
        self.bar.begin(f"{self.prefix}{what}" if alone else what, alone=alone)

    def step(self, done: int, words: str = "", remarks: Sequence[str] = ()) -> None:
        self.bar.advance(done - self.done, f"{self.prefix}{words}" if words else "")
        self.done = done
        for remark in remarks:
            print_note(f"{self.prefix}{remark}")


@contextmanager
def _bar(state: LoopState, title: str) -> Iterator[Bar]:
    """A live bar in a terminal, else plain lines."""
    if not err.is_terminal:
        plain = _PlainBar(state, title)
        try:
            yield plain
        finally:
            plain.close()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(BAR),
        TextColumn("{task.fields[amount]}"),
    )
    tail = (TimeElapsedColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, *tail, console=err) as bars:
        yield _LiveBar(bars, state, title)


def _plain_start(what: str, limit_s: float) -> Callable[[float, str], None]:
    """Print a line from time to time while a server starts."""
    printed_at = 0.0

    def watch(seconds: float, line: str) -> None:
        nonlocal printed_at
        if seconds - printed_at >= STARTING_EVERY:
            printed_at = seconds
            print(_start_words(what, seconds, limit_s), file=sys.stderr, flush=True)

    return watch


def _start_words(what: str, seconds: float, limit_s: float) -> str:
    return f"{what}: {duration(seconds)} of at most {duration(limit_s)}"


def warn_unsealed() -> None:
    """Warn if the run cannot be sealed as the user's own."""
    from soulkit.runs.folder import no_seal_reason

    if why := no_seal_reason():
        print_note(
            f"this run could not be sealed ({one_line(why, 200)}): commands that use its folder "
            "will need --trust"
        )


def print_note(remark: str) -> None:
    """Print a remark on stderr, on one line."""
    err.print(safe(one_line(remark)), soft_wrap=True)


def print_next(*commands: str) -> None:
    """Print `next: soul report runs/x; soul show runs/x`, quoted for a shell. Not used with
    --json."""

    if commands:
        print_note(f"next: {'; '.join(commands)}")
