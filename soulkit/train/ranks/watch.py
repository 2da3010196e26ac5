"""Ends a rank whose launcher or whose other ranks are gone. A thread of every rank watches them.

Such a rank might wait forever: in a collective operation, in a rollout, or for a command. Rank 0
first gets SIGTERM, so that it can save a checkpoint. All ranks of a job end within 30 seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from soulkit.train.ranks.launch import FOLDER, LAUNCHER, LOST, PARENT, PID, RESUME, place_in_job

BEAT = 2.0
"""Seconds between signs of life in the store of the job."""
SILENCE = 20.0
"""Seconds without one after which a rank counts as gone."""
GRACE = {"launcher": 20.0, "rank": 5.0}
"""Seconds in which a process may end by itself after one of these is gone."""
CALL = timedelta(seconds=10)
"""Time limit of one call of the store."""


class Watch(threading.Thread):
    """Watches the launcher and, after `join`, the other ranks: rank 0 all of them, the others only
    rank 0."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="soulkit-ranks")
        self.rank, self.size = place_in_job()
        self._parent = int(os.environ.get(LAUNCHER) or PARENT)
        self._over = threading.Event()
        self._joined = False
        self._store: dist.Store | None = None
        self._beats: dict[int, tuple[int, float]] = {}
        """Rank → number of its signs of life, and when the last one was seen."""

    def join_ranks(self) -> None:
        """Start to watch the other ranks. From now on a follower ignores signals, because rank 0
        decides when it ends."""
        now, others = time.monotonic(), range(1, self.size) if self.rank == 0 else (0,)
        self._beats = dict.fromkeys(others, (0, now))
        self._joined = True
        if self.rank:
            _set_signals(signal.SIG_IGN)

    def stop(self) -> None:
        self._over.set()

    def run(self) -> None:
        beat = 0.0
        while not self._over.wait(0.5):
            if os.getppid() != self._parent:
                return self._end("launcher", "The launcher of this training has ended.")
            if self._joined and time.monotonic() - beat >= BEAT:
                beat = time.monotonic()
                gone = self._gone()
                if gone is not None:
                    return self._end("rank", f"Rank {gone} has ended or does not answer.")

    def _gone(self) -> int | None:
        """Give a sign of life; return a rank that has given none for SILENCE seconds."""
        now = time.monotonic()
        try:
            if self._store is None:
                self._store = _connection()
            self._store.add(f"soulkit/beat/{self.rank}", 1)
            for rank, (count, _) in self._beats.items():
                newest = self._store.add(f"soulkit/beat/{rank}", 0)
                if newest != count:
                    self._beats[rank] = newest, now
        except RuntimeError:  # torch has no narrower class for a lost store; it counts as silence
            self._store = None
        return next((r for r, (_, seen) in self._beats.items() if now - seen > SILENCE), None)

    def _end(self, what: str, text: str) -> None:
        """End this process, unless it ends its part in the job within the time allowed."""
        if self.rank == 0:  # an agent on this host may have sent it 20 seconds ago
            os.kill(os.getpid(), signal.SIGTERM)
        if self._over.wait(GRACE[what]):
            return
        if self.rank == 0:
            why = "This process waited for it, and could not save a checkpoint in time."
            sys.stderr.write(f"error: {text}\nwhy: {why}\nfix: {RESUME}\n")
            sys.stderr.flush()
        os._exit(LOST if self.rank else 1)


def _connection() -> dist.Store:
    """A connection of its own, because a call of the job's may block for long."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
        timeout=CALL, wait_for_workers=False,
    )  # fmt: skip


def _set_signals(action: signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), action)


_watch: Watch | None = None


def start_watch() -> Watch:
    """The watch of this rank, started by the first call."""
    global _watch
    if _watch is None:
        _watch = Watch()
        _watch.start()
        if _watch.rank:  # the first signal ends it, even while it waits to join
            _set_signals(signal.SIG_DFL)
        elif folder := os.environ.get(FOLDER):
            (Path(folder) / PID).write_text(str(os.getpid()))
    return _watch


def stop_watch() -> None:
    """Stop watching: this rank leaves its job."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None
