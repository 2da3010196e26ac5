"""Signals that end a command: SIGTERM and SIGHUP take the path of Ctrl-C, with exit codes of their
own.

    SIGINT ─────────────────────────▶ KeyboardInterrupt, or in an event loop: the command's main
    SIGTERM, SIGHUP ──▶ remembered ─▶ task is cancelled and ends what it must not leave half done

Whoever plans jobs (a cluster, a container, a terminal that closes) ends commands so, and grants
seconds before it kills. What was ignored before the start stays ignored: `nohup` means SIGHUP, a
shell that starts a command in the background means SIGINT. The library has no handlers: within
another program they are that program's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Self

ECHO_S = 1.0
"""A signal that follows within this time is the same one: `timeout` sends it to its child and to
the group, and a closing terminal says it twice."""

ENDING = ("SIGTERM", "SIGHUP")
"""Beside SIGINT. Windows has no SIGHUP."""


class StopSignals:
    """Within it the first signal interrupts, and a later one ends the process at once.

    Outside of the main thread, where no handler can be set, it does nothing.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        """The signal that came first; None also after Ctrl-C alone."""
        self._at = 0.0
        self._terminals: list[int] = []
        self._before: dict[int, Any] = {}
        self._blocked: set[int] = set()

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
        return 128 + (self.first or signal.SIGINT)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._terminals = [descriptor for descriptor in (1, 2) if _is_terminal(descriptor)]
        for name in ENDING:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                self._before[number] = signal.signal(number, self._stop)
        if self._before:
            self._make_interruptible()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._blocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._blocked)

    def _make_interruptible(self) -> None:
        """Where SIGINT is ignored, event loops hear of no interruption at all: it is blocked
        instead, which no Ctrl-C passes either, and has its usual handler for the others to use."""
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and hasattr(signal, "pthread_sigmask"):
            self._blocked = {signal.SIGINT}
            signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
            self._before[signal.SIGINT] = signal.signal(
                signal.SIGINT, signal.default_int_handler
            )  # fmt: skip

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self._at = number, time.monotonic()
            self._let_go_of_terminals()
            _interrupt(frame)
        elif time.monotonic() - self._at >= ECHO_S:
            os._exit(self.exit_code)  # neither clean-up nor threads: files are whole all the time

    def _let_go_of_terminals(self) -> None:
        """Print to nowhere from now on where the terminal has gone: a last word would fail."""
        for descriptor in self._terminals:
            if not _is_terminal(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _interrupt(frame: FrameType | None) -> None:
    """What Ctrl-C does just now: an event loop has put a handler of its own in place."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)


def _is_terminal(descriptor: int) -> bool:
    stream = (sys.stdout, sys.stderr)[descriptor - 1]
    return stream is not None and os.isatty(descriptor)
