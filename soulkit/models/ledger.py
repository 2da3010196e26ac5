"""The ledger: every paid reply, kept so that it is paid for once and can be replayed offline.

One SQLite file in WAL mode, one row per call, one commit per row: a process that is killed loses at
most the calls that were still in flight. A call is found again by `call_key`, a hash of everything
that decides its answer (endpoint, model, messages, sampling) and of who asked (role, example,
rollout, kind, turn, sample, step), so that eight drafts of one example stay eight entries.

The row holds the server's reply as it came; what was read from it is derived anew on every lookup,
so a repaired reader also repairs old entries. Requests, headers and keys are never stored.

Modes: `record` looks up first and stores what it had to ask for; `replay` answers from the file and
raises `ReplayMiss` rather than touch the network; `off` does nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict
from urllib.parse import quote

from soulkit.errors import RunError, UserError
from soulkit.types import Call, Sampling

Mode = Literal["record", "replay", "off"]

_VERSION = 1
_COLUMNS = (
    "key", "model", "role", "example_id", "rollout", "kind", "turn", "sample", "step", "reply",
    "dropped", "prompt_tokens", "completion_tokens", "cost", "seconds", "attempts", "created",
)  # fmt: skip
_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    key TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    role TEXT NOT NULL,
    example_id TEXT NOT NULL,
    rollout INTEGER NOT NULL,
    kind TEXT NOT NULL,
    turn INTEGER NOT NULL,
    sample INTEGER NOT NULL,
    step INTEGER NOT NULL,
    reply TEXT NOT NULL,
    dropped TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cost REAL,
    seconds REAL NOT NULL,
    attempts INTEGER NOT NULL,
    created TEXT NOT NULL
)
"""


class ReplayMiss(UserError):
    """A replay needs a reply that the ledger does not hold."""


class RoleTotals(TypedDict):
    """What the calls of one role came to. `cost` is in US dollars, None when none is known."""

    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None


class Totals(RoleTotals):
    """All entries of a ledger; `hits` are the lookups that this process was spared paying for."""

    hits: int
    by_role: dict[str, RoleTotals]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One paid call: who asked, the raw reply, and what it took."""

    model: str
    call: Call
    reply: str
    """The server's reply, JSON text as it came (keys masked)."""
    dropped: tuple[str, ...] = ()
    """Sampling parameters that the server refused."""
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    """US dollars, None when no price or no token count is known."""
    seconds: float
    """Latency of the attempt that was answered."""
    attempts: int
    """Requests that were sent for this call, the failed ones included."""
    created: str
    """UTC, ISO 8601."""


def call_key(
    *,
    base_url: str,
    model: str,
    messages: Sequence[Mapping[str, str]],
    sampling: Sampling,
    call: Call,
) -> str:
    """The sha256 (hex) that names one call; equal inputs give equal keys on every machine."""
    parts = {
        "base_url": base_url,
        "model": model,
        "messages": [dict(m) for m in messages],
        "sampling": asdict(sampling),
        "call": asdict(call),
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class Ledger:
    """A file of paid calls, shared by every endpoint of a run; safe across threads and processes.

    Args:
        path: the SQLite file, created with its folder in mode `record`; None only in mode `off`.
        mode: `record`, `replay` or `off`.

    Raises:
        RunError: the file is missing (replay), is no ledger, or cannot be opened.
    """

    def __init__(self, path: Path | str | None, mode: Mode = "record") -> None:
        self.path = None if path is None else Path(path)
        self.mode: Mode = mode
        self._lock = threading.Lock()
        self._hits = 0
        self._db = _open(self.path, mode)

    def lookup(self, key: str, *, model: str, call: Call) -> Entry | None:
        """The entry of `key`, or None when it has to be asked for.

        Raises:
            ReplayMiss: in mode `replay`, when the ledger does not hold the call.
        """
        entry = self._find(key)
        if entry is not None:
            with self._lock:
                self._hits += 1
        elif self.mode == "replay":
            raise _miss(self.path, model, call)
        return entry

    def store(self, key: str, entry: Entry) -> Entry:
        """Keep `entry` and return what the ledger now holds: the first reply of a key stays.

        Raises:
            RunError: the file cannot be written, or the ledger is a replay.
        """
        if self.mode == "off":
            return entry
        if self.mode == "replay":
            raise _unusable(self.path, "it is open for replay only")
        marks = ",".join("?" * len(_COLUMNS))
        try:
            with self._lock:
                self._connection().execute(
                    f"INSERT OR IGNORE INTO calls ({','.join(_COLUMNS)}) VALUES ({marks})",
                    _row(key, entry),
                )
        except sqlite3.Error as error:
            raise _unusable(self.path, str(error)) from error
        return self._find(key) or entry

    def totals(self) -> Totals:
        """Calls, tokens and US dollars of all entries, in all and by role; hits of this process."""
        by_role = {str(row[0]): _sums(row[1:]) for row in self._sum("role, ", "GROUP BY role")}
        rows = self._sum("", "")
        whole = _sums(rows[0]) if rows else _sums((0, 0, 0, None))
        return Totals(**whole, hits=self._hits, by_role=by_role)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r}, mode={self.mode!r})"

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise _unusable(self.path, "it is closed")
        return self._db

    def _find(self, key: str) -> Entry | None:
        rows = self._query(f"SELECT {','.join(_COLUMNS)} FROM calls WHERE key = ?", (key,))
        return _entry(rows[0]) if rows else None

    def _sum(self, group: str, tail: str) -> list[tuple[Any, ...]]:
        return self._query(
            f"SELECT {group}COUNT(*), COALESCE(SUM(prompt_tokens), 0), "
            f"COALESCE(SUM(completion_tokens), 0), SUM(cost) FROM calls {tail}"
        )

    def _query(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        if self.mode == "off":
            return []
        try:
            with self._lock:
                return self._connection().execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise _unusable(self.path, str(error)) from error


def _open(path: Path | None, mode: Mode) -> sqlite3.Connection | None:
    if mode == "off":
        return None
    if path is None:
        raise _unusable(path, "no path was given")
    try:
        return _open_to_read(path) if mode == "replay" else _open_to_write(path)
    except (sqlite3.Error, OSError) as error:
        raise _unusable(path, str(error)) from error


def _open_to_write(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = _connect(path, "rwc")
    try:
        # NORMAL keeps every commit through a killed process; only a power cut can lose the last.
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        if _version(db) == 0 and not _tables(db):
            db.execute(_SCHEMA)
            db.execute(f"PRAGMA user_version={_VERSION}")
        _check(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _open_to_read(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise _unusable(path, "there is no such file")
    # A WAL database needs side files even to be read: an archive that cannot hold them is read as
    # it stands, any other is opened for writing so that closing it clears them away again.
    frozen = not os.access(path.parent, os.W_OK) or not os.access(path, os.W_OK)
    db = _connect(path, "ro&immutable=1" if frozen else "rw")
    try:
        db.execute("PRAGMA query_only=ON")
        _check(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _connect(path: Path, flags: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.resolve()))}?mode={flags}"
    return sqlite3.connect(
        uri, uri=True, timeout=30.0, isolation_level=None, check_same_thread=False
    )


def _version(db: sqlite3.Connection) -> int:
    with closing(db.execute("PRAGMA user_version")) as cursor:
        return int(cursor.fetchone()[0])


def _tables(db: sqlite3.Connection) -> set[str]:
    with closing(db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")) as cursor:
        return {str(row[0]) for row in cursor}


def _check(db: sqlite3.Connection, path: Path) -> None:
    # Two processes may create the file at once: the second sees the table before the version.
    if "calls" not in _tables(db) or _version(db) not in (0, _VERSION):
        raise _unusable(path, "it is no ledger of this version of soulkit")


def _unusable(path: Path | None, cause: str) -> RunError:
    return RunError(
        f"The ledger '{path}' cannot be used: {cause}.",
        "It holds the paid replies of a run, so nothing is guessed or overwritten.",
        "Check the path and its permissions, name another ledger file, or switch the ledger off.",
    )


def _miss(path: Path | None, model: str, call: Call) -> ReplayMiss:
    who = (
        f"role {call.role}, example {call.example_id}, rollout {call.rollout}, {call.kind}, "
        f"turn {call.turn}, sample {call.sample}, step {call.step}"
    )
    return ReplayMiss(
        f"The ledger '{path}' holds no reply of '{model}' for this call: {who}.",
        "A replay never asks the network, and this call was not made with these very messages, "
        "sampling settings, model and base URL.",
        "Record it first with the ledger in mode 'record', or replay with the recorded settings.",
    )


def _row(key: str, entry: Entry) -> tuple[Any, ...]:
    call = entry.call
    return (
        key, entry.model, call.role, call.example_id, call.rollout, call.kind, call.turn,
        call.sample, call.step, entry.reply, json.dumps(entry.dropped), entry.prompt_tokens,
        entry.completion_tokens, entry.cost, entry.seconds, entry.attempts, entry.created,
    )  # fmt: skip


def _entry(row: tuple[Any, ...]) -> Entry:
    named = dict(zip(_COLUMNS, row, strict=True))
    named.pop("key")
    who = ("role", "example_id", "rollout", "kind", "turn", "sample", "step")
    call = Call(**{name: named.pop(name) for name in who})
    dropped = tuple(json.loads(named.pop("dropped")))
    return Entry(call=call, dropped=dropped, **named)


def _sums(row: tuple[Any, ...]) -> RoleTotals:
    calls, prompt_tokens, completion_tokens, cost = row
    return RoleTotals(
        calls=calls, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cost=cost
    )
