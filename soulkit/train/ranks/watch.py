"""Ends a rank whose launcher or whose other ranks are gone. A thread of every rank watches them.

Such a rank might wait forever: in a collective operation, in a rollout, or for a command. Rank 0
first gets SIGTERM, so that it can save a checkpoint. All ranks of a job end within 30 seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from soulkit.train.ranks.launch import (
    FOLDER,
    LAUNCHER,
    LOST,
    PARENT,
    PID,
    RESUME,
    SIGNALS,
    place_in_job,
)

CHECK = 0.5
"""Seconds between two looks at the launcher and the other ranks."""
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
        self._silent: dict[int, float] = {}
        """Rank → seconds since its last sign of life, without those in which this process itself
        was stopped."""

    def join_ranks(self) -> None:
        """Start to watch the other ranks. From now on a follower ignores signals, because rank 0
        decides when it ends."""
        self._silent = dict.fromkeys(range(1, self.size) if self.rank == 0 else (0,), 0.0)
        threading.Thread(target=self._exchange, daemon=True, name="soulkit-beats").start()
        if self.rank:
            _set_signals(signal.SIG_IGN)

    def stop(self) -> None:
        self._over.set()

    def run(self) -> None:
        while not self._over.wait(CHECK):
            if os.getppid() != self._parent:
                return self._end("launcher", "The launcher of this training has ended.")
            for rank, seconds in self._silent.items():
                if seconds > SILENCE:
                    return self._end("rank", f"Rank {rank} has ended or does not answer.")
                self._silent[rank] = seconds + CHECK

    def _exchange(self) -> None:
        """Give signs of life, and note those of the others. A call of the store waits for ever if
        the process that has it hangs, which counts as silence."""
        store, counts = None, dict.fromkeys(self._silent, 0)
        while not self._over.wait(BEAT):
            try:
                store = store or _connection()
                store.add(f"soulkit/beat/{self.rank}", 1)
                for rank, count in counts.items():
                    counts[rank] = store.add(f"soulkit/beat/{rank}", 0)
                    if counts[rank] != count:
                        self._silent[rank] = 0.0
            except RuntimeError:  # torch has no narrower class for a lost store
                store = None

    def _end(self, what: str, text: str) -> None:
        """End this process, unless it ends its part in the job within the time allowed."""
        if self.rank == 0:  # an agent on this host may have sent it 20 seconds ago
            os.kill(os.getpid(), signal.SIGTERM)
        # Before it joins, a rank has nothing to save.
        if self._over.wait(GRACE[what if self._silent else "rank"]):
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
        for number in SIGNALS:
            signal.signal(number, action)


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
