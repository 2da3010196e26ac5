"""What a run folder needs beside its records to be taken up again: who holds it, and for how long.

A run may be started many times until all is scored. The clock adds the starts up; the lock keeps a
second process out while one is at work, and is gone when that process is, however it ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from soulkit.errors import RunError
from soulkit.jsonl import write_json
from soulkit.runs import Run, is_run, plain_config, read_config, read_environment

CLOCK, LOCK = "clock.json", ".lock"
_SAVE_EVERY = 5.0


def unfinished(command: str, config: Mapping[str, Any], root: Path = Path("runs")) -> Path | None:
    """The newest run under `root` with this command and configuration that lacks scores."""
    wanted = plain_config(config)
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        if not is_run(path) or read_environment(path).get("command") != command:
            continue
        if not _finished(path) and read_config(path) == wanted:
            return path
    return None


def _finished(path: Path) -> bool:
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    return bool(summary["n"] == summary["n_scored"])


class Clock:
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


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """Hold the run folder for this process; RunError when another one is at work in it."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows has no such locks
        yield
        return
    with (run.path / LOCK).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"Another process is at work in {run.path}.",
                "Two at once would play and pay for the same episodes twice.",
                "Wait until it ends, or give another folder with --out.",
            ) from error
        yield
