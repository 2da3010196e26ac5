"""Where the commands print.

`out` is for results, `err` for everything said on the way. With --json stdout carries one JSON
document and nothing else: print it with `print_json`, and everything else to `console(json=True)`,
which is stderr. Progress always goes to stderr: a live bar in a terminal, else a plain line every
few seconds while something is done and every half minute while nothing is, so that a log file stays
readable. Text from models goes through `sanitise`.

What to do next: the last line of a command, on stderr.
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

from soulkit.reporting import Bar, Reporter
from soulkit.text import duration, one_line, sanitise

__all__ = ["ConsoleReporter", "console", "err", "one_line", "out", "print_json", "print_next"]
__all__ += ["print_note", "safe", "sanitise", "warn_unsealed"]

PLAIN_EVERY = 5.0
"""Seconds between two plain progress lines."""
QUIET = 30.0
"""Seconds after which a plain line says what is under way, though nothing was done."""
STARTING_EVERY = 15.0
"""The same while something starts."""
BAR = 24
"""Columns of a live bar."""


class _Console(Console):
    """A reader that left (`| head`) ends the printing, not the command and its exit code."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def _make(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    # A pipe has no width of its own; 80 columns would wrap tables that no one resizes.
    piped = not stream.isatty() and "COLUMNS" not in os.environ
    # No emoji: ":100:" in a row's name or a model's text is no picture.
    return _Console(stderr=stderr, highlight=False, emoji=False, width=160 if piped else None)


out = _make(stderr=False)
err = _make(stderr=True)


def console(json: bool = False) -> Console:
    """Where tables go: stdout, or stderr when stdout is kept for JSON."""
    return err if json else out


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON document to stdout. ValueError for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=True, indent=2, allow_nan=False)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # a reader that left, as in _Console
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def safe(text: str) -> str:
    """Model text for a rich console: sanitised, and its square brackets are no markup."""
    return escape(sanitise(text))


class _State:
    """Counts, and says rate and remaining time in words."""

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


class _LiveBar(Bar):
    def __init__(self, bars: Progress, state: _State, description: str) -> None:
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
        """Wipe the bar away; it comes back when there is something to show."""
        self.bars.live.transient = True
        self.bars.stop()
        self.bars.live.transient = False

    def _show(self) -> None:
        amount = self.state.amount("/?")
        # Rich would narrow the bar and the clock for the sake of long words.
        room = err.width - len(self.description) - BAR - len(amount) - len("0:00:00") - 5
        words = escape(one_line(self.state.words(), max(room, 20)))
        self.bars.update(self.task, completed=self.state.done, words=words, amount=amount)
        self.bars.start()


class _PlainBar(Bar):
    """Lines; a thread says what is under way while nothing is done."""

    def __init__(self, state: _State, description: str) -> None:
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
        """What was done since the last line is said, and nothing after it."""
        self._over.set()
        self._thread.join()
        self._say()

    def _since(self) -> float:
        return time.monotonic() - self.printed_at

    def _watch(self) -> None:
        while not self._over.wait(PLAIN_EVERY / 5):
            with self._lock:
                # What takes seconds before anything is done has a name; later the steps speak.
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
    """Shows on stderr what a command does, under its `title`."""

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
        with _bar(_State(total, unit), one_line(self.title, 60)) as bar:
            yield bar

    @contextmanager
    def working(self, what: str, *, alone: bool = False) -> Iterator[None]:
        if not err.is_terminal:
            with _bar(_State(None), one_line(self.title, 60)) as bar:
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
        with _bar(_State(total), one_line(title or self.title, 60)) as bar:
            yield _StepReporter(bar)


class _StepReporter(ConsoleReporter):
    """Moves a bar to each step of a training; a resumed one begins in the middle. With a `name` it
    shows one of several, whose notes would be too many."""

    def __init__(self, bar: Bar, name: str = "", *, notes: bool = True) -> None:
        super().__init__(name)
        self.bar, self.notes, self.done = bar, notes, 0
        self.prefix = f"{name}: " if name else ""

    def note(self, line: str) -> None:
        if self.notes:
            super().note(line)

    @contextmanager
    def starting(self, what: str, limit_s: float) -> Iterator[Callable[[float, str], None]]:
        # Beside a live bar nothing else moves.
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
def _bar(state: _State, title: str) -> Iterator[Bar]:
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
    """A line now and then about something that starts."""
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
    """Say that a run will not be known as the user's own, where no key can be kept."""
    from soulkit.runs.folder import no_seal_reason

    if why := no_seal_reason():
        print_note(
            f"no seal can be made or read here ({one_line(why, 200)}): commands that act on this "
            "run's folder will need --trust"
        )


def print_note(remark: str) -> None:
    """A remark on stderr, on a line of its own."""
    err.print(safe(one_line(remark)), soft_wrap=True)


def print_next(*commands: str) -> None:
    """`next: soul report runs/x; soul show runs/x`: commands as a shell reads them.

    Commands with --json do not say it.
    """

    if commands:
        print_note(f"next: {'; '.join(commands)}")
