"""Lock and clock of a run folder, search for a run to resume, and the record writer.

The clock adds up the time of all starts of a run. The lock keeps a second process out of the folder
and is released when its process ends, even after a kill. The writer puts records on disk without
blocking the players.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from soulkit.errors import RunError
from soulkit.models.api.probing import EndpointRefused
from soulkit.models.ledger.view import LedgerView
from soulkit.parse import ParseError, open_regular
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
from soulkit.runs.jsonl import append_to, stored_json, write_json
from soulkit.runs.records import RecordWriter
from soulkit.types import ControlRecord, Record

CLOCK, LOCK = "clock.json", ".lock"
_START_FILES = (
    *(CONFIG, ENVIRONMENT, LOCK, CLOCK),
    *("conditions.json", "rescore.json", "rows.json"),
)
"""Files that a start writes before any call."""
_SAVE_EVERY = 5.0
_LOOKS, _LOOK_S = 3, 0.02
"""Number of attempts to take a lock, and seconds between them."""


def find_resumable(
    command: str, config: Mapping[str, Any], root: Path = Path("runs")
) -> Path | None:
    """The newest unfinished run under `root` with this command and configuration. Runs of earlier
    versions are skipped, because they cannot be resumed."""
    settings = plain_config(config)
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        try:
            if not is_run(path) or older_file(path):
                continue
            same_command = read_environment(path).get("command") == command
            if same_command and not is_scored(path) and same_settings(read_config(path), settings):
                return path
        except RunError:  # skip damaged folders
            continue
    return None


def is_scored(path: Path) -> bool:
    """Whether every episode and control of the run in `path` has a score."""
    try:
        line = stored_json(path / "summary.json")
        counts = [line, *(c for part in line.get("controls", {}).values() for c in part.values())]
        return all(one["n"] == one["n_scored"] for one in counts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


class RunClock:
    """Wall seconds of a run over all its starts; a kill loses at most a few seconds."""

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
        """Write the seconds so far and return them, so that summary and clock file agree."""
        self._saved, seconds = time.monotonic(), self.seconds
        write_json(self._path, {"seconds": seconds})
        return seconds


def _seconds_in(path: Path) -> float:
    if not path.is_file():
        return 0.0
    try:
        return float(stored_json(path)["seconds"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise RunError(
            f"'{path}' does not contain the run time in seconds.",
            "The file was changed by hand or by another program.",
            "Delete the file; only the time of earlier starts is lost.",
        ) from error


class GroupWriter:
    """Writes records in groups: records that arrive during a write form the next group.

    A kill loses at most the current group, whose replies are in the ledger. Use it in one event
    loop only.
    """

    def __init__(self, path: Path) -> None:
        self._writer = RecordWriter(path)
        self._waiting: list[Record | ControlRecord] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, record: Record | ControlRecord) -> None:
        """Queue `record` for writing; raises the error of an earlier group, if any."""
        self._waiting.append(record)
        if self._task is not None and self._task.done():
            self._task.result()
            self._task = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write())

    async def close(self) -> None:
        """Write all queued records; raises the error of a failed write."""
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
    """Lock the run folder for this process; RunError if another process uses it.

    If a server rejects all calls and nothing was recorded, a folder that this start created is
    removed again.
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
        import fcntl  # noqa: F401 - only checks that it exists
    except ModuleNotFoundError:  # Windows has no fcntl
        yield
        return
    with append_to(run.path / LOCK) as handle:
        if not _locked(handle):
            raise RunError(
                f"Another process is using {run.path}.",
                "Two processes would play, and pay for, the same episodes.",
                "Wait until it ends, or choose another folder with --out.",
            )
        yield


def _locked(handle: IO[bytes]) -> bool:
    """Try to take the lock. Retries, because `is_locked` holds it for a moment."""
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
    """Whether a process holds the lock of the run folder; does not wait."""
    try:
        import fcntl

        with open_regular(folder / LOCK) as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ModuleNotFoundError, OSError, ParseError):  # no fcntl, no lock file, no permission
        return False
    return False
