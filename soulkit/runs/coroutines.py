"""Run coroutines from synchronous functions, even if an event loop is already running.

In a notebook an event loop is always running, and `asyncio.run` cannot start another one in its
thread. Python functions that run a command then use a separate thread:

    run_beside_loop(work)      waits for it; without a running loop, `work` runs in this thread
    await run_in_thread(work)  the same for asynchronous callers

Ctrl-C, or cancelling the caller, cancels the coroutine that `run_coroutine` runs in that thread, as
Ctrl-C does on the command line.
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
    """Cancels a coroutine in another thread."""

    def __init__(self) -> None:
        self.asked = False
        self._lock = threading.Lock()
        self._task: asyncio.Task[Any] | None = None

    def ask(self) -> None:
        """Cancel the running coroutine, and any that starts later."""
        with self._lock:
            self.asked = True
            if self._task is not None:
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def watch(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` so that `ask` can cancel it."""
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
    """`asyncio.run` that also raises KeyboardInterrupt if the waiting thread is interrupted."""
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
    """Start `work` in a new thread; returns its future and an object to stop it."""
    stop = _Stop()

    def run() -> T:
        _STOP.set(stop)
        return work()

    thread = ThreadPoolExecutor(1, thread_name_prefix="soulkit-work")
    result = thread.submit(run)
    thread.shutdown(wait=False)
    return result, stop


def run_beside_loop(work: Callable[[], T]) -> T:
    """Run `work` and return its result; in another thread if an event loop runs in this one."""
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
    """Make Ctrl-C raise KeyboardInterrupt here. An event loop's own handler would only cancel its
    main task, which waits for this function."""
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
    """Run `work` in another thread and return its result. If cancelled, wait until it stops."""
    result, stop = _start(work)
    ended = asyncio.wrap_future(result)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        stop.ask()
        await asyncio.wait([ended])
        ended.exception()  # retrieve it to avoid a warning
        raise
