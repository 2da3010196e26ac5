"""Runs coroutines from functions that are not asynchronous, also where an event loop runs already.

In a notebook an event loop runs all the time, and `asyncio.run` refuses to start another one in its
thread. There a command from Python works in a thread of its own:

    run_beside_loop(work)      waits for it; without a running loop `work` simply runs here
    await run_in_thread(work)  the same for callers that are asynchronous themselves

Ctrl-C, or the cancellation of the caller, cancels the coroutine that `run_coroutine` runs in that
thread. The work then ends as it does after Ctrl-C on the command line.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class _Stop:
    """Asks a coroutine in another thread to end."""

    def __init__(self) -> None:
        self.asked = False
        self._lock = threading.Lock()
        self._task: asyncio.Task[Any] | None = None

    def ask(self) -> None:
        """Cancel what runs now, and what would be run later."""
        with self._lock:
            self.asked = True
            if self._task is not None:
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def watch(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` as what `ask` cancels."""
        with self._lock:
            if self.asked:
                coroutine.close()
                raise asyncio.CancelledError
            self._task = asyncio.current_task()
        try:
            return await coroutine
        finally:
            with self._lock:
                self._task = None


_STOP: ContextVar[_Stop | None] = ContextVar("stop", default=None)


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, which also ends with KeyboardInterrupt when the waiting thread is stopped."""
    stop = _STOP.get()
    if stop is None:
        return asyncio.run(coroutine)
    try:
        return asyncio.run(stop.watch(coroutine))
    except asyncio.CancelledError:
        if stop.asked:
            raise KeyboardInterrupt from None
        raise


def _start(work: Callable[[], T]) -> tuple[Future[T], _Stop]:
    """Begin `work` in a thread of its own: what it will have come to, and how it is stopped."""
    stop = _Stop()

    def run() -> T:
        _STOP.set(stop)
        return work()

    thread = ThreadPoolExecutor(1, thread_name_prefix="soulkit-work")
    result = thread.submit(run)
    thread.shutdown(wait=False)
    return result, stop


def run_beside_loop(work: Callable[[], T]) -> T:
    """What `work()` returns. Where an event loop runs in this thread, `work` has another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    result, stop = _start(work)
    try:
        with _interruptible():
            return result.result()
    except KeyboardInterrupt:
        stop.ask()
        wait([result])
        raise


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here. An event loop's own handler would only cancel its main
    task, which waits for this function."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def run_in_thread(work: Callable[[], T]) -> T:
    """What `work()` returns, in another thread; cancelled, it ends when the work has stopped."""
    result, stop = _start(work)
    ended = asyncio.wrap_future(result)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        stop.ask()
        await asyncio.wait([ended])
        ended.exception()  # it says that it was stopped, which the caller knows
        raise
