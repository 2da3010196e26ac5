"""Work in several processes at once, with their progress in one place.

    run_together({"ditto": partial(train, …), "grpo": partial(train, …)}, reporter)

Every process sends its progress through a pipe. The first error stops the other processes, and so
does an interrupt. If the parent is killed, its processes end with the next thing that they report.

On Linux the processes are forked from a server that has imported the libraries: that saves seconds,
and they share that memory.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from soulkit.errors import RunError, RunStopped, UserError
from soulkit.reporting import Reporter

Work = Callable[[Reporter], Any]
"""The work of a process; must be picklable, like its result."""
PRELOADED = ["soulkit.train.run", "transformers.modeling_utils", "peft"]
"""Modules that every training needs and that take seconds to import."""
ERROR, CRASH, RESULT = "error", "crash", "result"
"""Messages about the end of a process; all others are calls of a Reporter's methods."""


def run_together(
    parts: Mapping[str, Work], reporter: Reporter, watch: Callable[[str], None] = lambda name: None,
    *, at_once: int | None = None, ended: Callable[[str, Any], None] = lambda name, result: None,
) -> None:  # fmt: skip
    """Do all parts, each in a process of its own, and report their steps.

    `watch` is called with the name of a part after each of its steps, and `ended` with its name
    and result. At most `at_once` processes run at a time; by default all do. A UserError of a part
    is raised as a RunError or RunStopped that names the part.
    """
    forks = sys.platform == "linux"
    context: ForkServerContext | SpawnContext
    context = get_context("forkserver") if forks else get_context("spawn")
    if forks:
        context.set_forkserver_preload(PRELOADED)
    waiting = [*parts.items()][::-1]
    processes: dict[Connection, tuple[BaseProcess, Reporter]] = {}
    try:
        while waiting or processes:
            while waiting and len(processes) < (at_once or len(parts)):
                name, work = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                started = context.Process(target=_work, args=(work, sender), name=name, daemon=True)
                started.start()
                sender.close()
                processes[receiver] = started, reporter.run(name)
            _listen(processes, watch, ended)
    finally:
        for process, _ in processes.values():
            process.terminate()
        for process, _ in processes.values():
            process.join()


def _listen(
    processes: dict[Connection, tuple[BaseProcess, Reporter]], watch: Callable[[str], None],
    ended: Callable[[str, Any], None],
) -> None:  # fmt: skip
    """Pass on what the processes report, and remove those that have ended."""
    for pipe in wait(list(processes)):
        assert isinstance(pipe, Connection)
        process, reporter = processes[pipe]
        try:
            call, arguments = pipe.recv()
        except EOFError:
            del processes[pipe]
            process.join()
            _check_end(process.name, process.exitcode)
            continue
        if call in (ERROR, CRASH):
            raise _error_of(process.name, *arguments)
        if call == RESULT:
            ended(process.name, *arguments)
            continue
        getattr(reporter, call)(*arguments)
        if call == "step":
            watch(process.name)


def _check_end(name: str, code: int | None) -> None:
    """RunStopped if the process of a part was killed."""
    if code:
        raise RunStopped(
            f"The process of '{name}' was killed (exit code {code}), and the others were stopped.",
            "Another program ended it, or the memory ran out.",
            "Run the same command again: it resumes.",
        )


def _error_of(name: str, lines: Sequence[str], stopped: bool = False) -> Exception:
    """The error that a process has reported: of the user, or with its traceback."""
    if len(lines) == 1:
        error = RuntimeError(f"{name}: {lines[0].splitlines()[-1]}")
        error.add_note(lines[0])
        return error
    what, why, way_out = lines
    return (RunStopped if stopped else RunError)(f"{name}: {what}", why, way_out)


class _Sender(Reporter):
    """The reporter of a process: sends the progress of its training to the parent."""

    def __init__(self, pipe: Connection) -> None:
        self._send: Callable[[tuple[str, tuple[Any, ...]]], None] = pipe.send

    def warn(self, line: str) -> None:
        self._send(("warn", (line,)))

    def phase(self, what: str, *, alone: bool = False) -> None:
        self._send(("phase", (what,)))

    def step(self, done: int, words: str = "", remarks: Sequence[str] = ()) -> None:
        self._send(("step", (done, words, tuple(remarks))))


def _work(work: Work, pipe: Connection) -> None:
    """Do the work of a process and report how it failed, if it did."""
    # Ctrl-C reaches all processes of a terminal. The parent handles it, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(BrokenPipeError):  # the parent is gone
        try:
            pipe.send((RESULT, (work(_Sender(pipe)),)))
        except BrokenPipeError:
            raise
        except UserError as error:
            pipe.send((ERROR, (error.lines(), isinstance(error, RunStopped))))
        except Exception:  # noqa: BLE001 - the parent raises it
            pipe.send((CRASH, ((traceback.format_exc(),),)))
