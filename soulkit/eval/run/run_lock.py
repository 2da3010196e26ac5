"""The lock and the clock of a run folder, the unfinished run of a command, and the record writer.

A run may be started many times until all is scored. The clock adds the starts up; the lock keeps
a second process out while one works, and is gone when that process is, however it ended. The
writer puts records on disk without letting the players wait.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from soulkit.errors import RunError
from soulkit.models.api.probing import EndpointRefused
from soulkit.models.ledger.view import LedgerView
from soulkit.runs.conditions import older_file
from soulkit.runs.folder import (
    CONFIG,
    ENVIRONMENT,
    Run,
    is_run,
    plain_config,
    read_config,
    read_environment,
    same_settings,
)
from soulkit.runs.jsonl import write_json
from soulkit.runs.records import RecordWriter
from soulkit.types import ControlRecord, Record

CLOCK, LOCK = "clock.json", ".lock"
_START_FILES = (
    *(CONFIG, ENVIRONMENT, LOCK, CLOCK),
    *("conditions.json", "rescore.json", "rows.json"),
)
"""What a start writes before anything is asked."""
_SAVE_EVERY = 5.0
_LOOKS, _LOOK_S = 3, 0.02
"""How often, and after how many seconds again, a lock is tried before it counts as held."""


def find_resumable(
    command: str, config: Mapping[str, Any], root: Path = Path("runs")
) -> Path | None:
    """The newest run under `root` with this command and configuration that lacks scores. Those of
    earlier versions, which nobody can resume, are passed over."""
    settings = plain_config(config)
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        try:
            if not is_run(path) or older_file(path):
                continue
            same_command = read_environment(path).get("command") == command
            if same_command and not _finished(path) and same_settings(read_config(path), settings):
                return path
        except RunError:  # a damaged folder of others is no reason to stop
            continue
    return None


def _finished(path: Path) -> bool:
    try:
        line = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        counts = [line, *(c for part in line.get("controls", {}).values() for c in part.values())]
        return all(one["n"] == one["n_scored"] for one in counts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


class RunClock:
    """Wall seconds of a run over all its starts; a kill costs the last few seconds at most."""

    def __init__(self, path: Path) -> None:
        self._path, self._before = path, _seconds_in(path)
        self._start = self._saved = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._start

    def tick(self) -> None:
        if time.monotonic() - self._saved >= _SAVE_EVERY:
            self.save()

    def save(self) -> float:
        """Writes the seconds so far and returns them: what a summary says and what a later start
        adds to are one number."""
        self._saved, seconds = time.monotonic(), self.seconds
        write_json(self._path, {"seconds": seconds})
        return seconds


def _seconds_in(path: Path) -> float:
    if not path.is_file():
        return 0.0
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["seconds"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"'{path}' does not say how many seconds the run has taken.",
            "The file was changed by hand or by another program.",
            "Delete it: only the time of the earlier starts is lost.",
        ) from error


class GroupWriter:
    """Writes records in groups: those that come while the disk is busy go together next.

    A kill costs at most the group under way, and its replies are in the ledger. Belongs to one
    event loop.
    """

    def __init__(self, path: Path) -> None:
        self._writer = RecordWriter(path)
        self._waiting: list[Record | ControlRecord] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, record: Record | ControlRecord) -> None:
        """Have `record` written soon; raises what broke an earlier group."""
        self._waiting.append(record)
        if self._task is not None and self._task.done():
            self._task.result()
            self._task = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write())

    async def close(self) -> None:
        """Everything is on disk on return, or what prevented it is raised."""
        try:
            if self._task is not None:
                await self._task
        finally:
            self._writer.close()

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            await asyncio.to_thread(self._writer.write, *group)


@contextmanager
def run_lock(run: Run) -> Iterator[None]:
    """Hold the run folder for this process; RunError when another one is at work in it.

    A folder that this start made is removed again where a server refused to answer and nothing was
    recorded: no run is left that cannot be resumed.
    """
    try:
        with _locked_folder(run):
            yield
    except EndpointRefused:
        if run.created and _records_nothing(run):
            shutil.rmtree(run.path)
        raise


def _records_nothing(run: Run) -> bool:
    for path in run.path.rglob("*"):
        lines = path.suffix == ".jsonl" and path.stat().st_size == 0
        ledger = path.name.startswith(run.ledger_path.name)
        if path.is_file() and not (lines or ledger or path.name in _START_FILES):
            return False
    if not run.ledger_path.is_file():
        return True
    with LedgerView(run.ledger_path) as view:
        return not view.groups()


@contextmanager
def _locked_folder(run: Run) -> Iterator[None]:
    try:
        import fcntl  # noqa: F401 - whether it is there
    except ModuleNotFoundError:  # Windows has no such locks
        yield
        return
    with (run.path / LOCK).open("w") as handle:
        if not _locked(handle):
            raise RunError(
                f"Another process is at work in {run.path}.",
                "Two at once would play and pay for the same episodes twice.",
                "Wait until it ends, or give another folder with --out.",
            )
        yield


def _locked(handle: IO[str]) -> bool:
    """Whether this process has the lock now. `is_locked` holds it for a moment while it looks."""
    import fcntl

    for _ in range(_LOOKS):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
        else:
            return True
    return False


def is_locked(folder: Path) -> bool:
    """Whether a process holds the run folder; nothing is waited for."""
    try:
        import fcntl

        with (folder / LOCK).open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ModuleNotFoundError, OSError):  # no locks here, none taken, or a folder of others
        return False
    return False
