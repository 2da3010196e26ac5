"""The ledger: records every paid reply, so that it is paid for once and can be replayed offline.

One SQLite file in WAL mode, with one row and one commit per call. `request_key` identifies a call:
a hash of everything that determines the reply and of the call's role and position, so that eight
drafts of one example stay eight entries. A row holds the server's raw reply and the request
(storage.py), never headers or keys. Replies are parsed again at every lookup.

Modes: `record` looks up first and stores new replies; `replay` answers from the file and raises
`ReplayMiss` instead of using the network; `off` stores no replies and counts calls. A
`LayeredLedger` also copies entries of a lower ledger at cost 0 and never writes to that one.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypedDict

from soulkit.errors import RunError, UserError
from soulkit.models.ledger.storage import (
    COLUMNS,
    Damaged,
    Request,
    keep_request,
    kept_settings,
    open_to_read,
    open_to_write,
    request_in,
    seal,
    settings_body,
    transaction,
    unusable_ledger,
)
from soulkit.parse import parse_json
from soulkit.types import Call, Sampling

Mode = Literal["record", "replay", "off"]


ASIDE = "~"
"""Separates the key of a discarded reply from its number; see `Ledger.set_aside`."""


class ReplayMiss(UserError):
    """A replay needs a reply that the ledger does not have."""


class RoleTotals(TypedDict):
    """Totals of one role. `cost` is in US dollars; None if no price is known."""

    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None


class Totals(RoleTotals):
    """Totals of a ledger; `hits` are this process's lookups that found an entry."""

    unpriced: int
    """Calls without a known price, which `cost` leaves out."""
    hits: int
    by_role: dict[str, RoleTotals]


class SentCalls(NamedTuple):
    """Calls of one role in one task that were sent with the same settings."""

    task: str
    role: str
    model: str
    dropped: tuple[str, ...]
    """Sampling parameters that the server refused."""
    asked: Request
    """The request without its messages."""
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One paid call: who asked, the raw reply, and what it used."""

    model: str
    call: Call
    reply: str
    """The server's raw JSON reply, with keys masked."""
    dropped: tuple[str, ...] = ()
    """Sampling parameters that the server refused."""
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    """US dollars; None if the price or the token counts are unknown."""
    seconds: float
    """Latency of the successful attempt."""
    attempts: int
    """Requests sent for this call, including failed ones."""
    created: str = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )
    """UTC, ISO 8601."""


def request_of(base_url: str, messages: Sequence[Mapping[str, str]], sampling: Sampling) -> Request:
    """The request in the form that the ledger stores."""
    return Request(base_url=base_url, messages=tuple(messages), sampling=sampling.identity())


def request_key(request: Request, model: str, call: Call) -> str:
    """The sha256 (hex) of a call; equal inputs give equal keys on every machine."""
    parts = {
        "base_url": request.base_url,
        "model": model,
        "messages": [dict(m) for m in request.messages],
        "sampling": request.sampling,
        "call": call.identity(),
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class Ledger:
    """A file of paid calls, shared by all endpoints of a run; safe across threads and processes.

    Mode `record` creates `path` and its folder; `path` may be None only in mode `off`. With
    `mends`, a resumed run requests unusable replies again; training runs do not, since they must
    give the same result. RunError if the file is missing (replay), not a ledger, or cannot be
    opened.
    """

    def __init__(
        self, path: Path | str | None, mode: Mode = "record", *, mends: bool = False
    ) -> None:
        self.path = None if path is None else Path(path)
        self.mode: Mode = mode
        self.mends = mends
        self._lock = threading.Lock()
        self._hits = 0
        self._unkept: Counter[tuple[Any, ...]] = Counter()
        """Mode `off`: columns of `_sent` → number of calls."""
        self._db = _open(self.path, mode)

    def lookup(self, key: str, *, model: str, call: Call) -> LedgerEntry | None:
        """The entry of `key`; None if it must be requested.

        Raises:
            ReplayMiss: in mode `replay`, if the ledger does not have the call.
        """
        entry = self._find(key)
        if entry is None and self.mode == "replay":
            entry = self._find_aside(key)
        if entry is not None:
            with self._lock:
                self._hits += 1
        elif self.mode == "replay":
            raise _miss(self.path, model, call)
        return entry

    def store(self, key: str, entry: LedgerEntry, request: Request) -> LedgerEntry:
        """Store `entry` and its request, and return the entry in the ledger: the first reply of
        a key is kept.

        Raises:
            RunError: the file cannot be written, or the ledger is a replay.
        """
        if self.mode == "off":
            with self._lock:
                self._unkept[_unkept(entry, request)] += 1
            return entry
        if self.mode == "replay":
            raise unusable_ledger(self.path, "it is open for replay only")
        try:
            with self._lock:
                is_first = _insert(self._connection(), key, entry, request)
        except sqlite3.Error as error:
            raise _not_kept(self.path, entry, str(error)) from error
        return entry if is_first else self._find(key) or entry

    def set_aside(self, key: str) -> None:
        """Mark the reply of `key` as unusable (an unreadable verdict, an empty line). A ledger with
        `mends` requests it again; a replay still finds it. It stays in the file and the totals.

        Raises:
            RunError: the file cannot be written.
        """
        if self.mode != "record" or not self.mends:
            return
        moved = "UPDATE calls SET key = key || ? || rowid WHERE key = ?"
        try:
            with self._lock:
                self._connection().execute(moved, (ASIDE, key))
        except sqlite3.Error as error:
            raise unusable_ledger(self.path, str(error)) from error

    def damaged(self, entry: LedgerEntry, problem: str) -> RunError:
        """The error for an entry that differs from what was stored."""
        who = _who(entry.model, entry.call)
        return unusable_ledger(self.path, f"the reply of {who} is damaged ({problem})")

    def totals(self) -> Totals:
        """Calls, tokens and US dollars, in total and by role; and hits of this process."""
        by_role = {str(row[0]): _sums(row[1:]) for row in self._sum("role, ", "GROUP BY role")}
        rows = self._sum("", "")
        whole = _sums(rows[0]) if rows else _sums((0, 0, 0, None))
        missing = self._query("SELECT COUNT(*) - COUNT(cost) FROM calls")
        unpriced = int(missing[0][0]) if missing else 0
        return Totals(**whole, unpriced=unpriced, hits=self._hits, by_role=by_role)

    def by_example(
        self, group: Callable[[str], str | None] = str
    ) -> dict[tuple[str, str], RoleTotals]:
        """(role, example, or its `group`) → totals of its calls; None leaves an example out."""
        self._define(group)
        rows = self._sum("role, groups(example_id), ",
                         "WHERE groups(example_id) IS NOT NULL GROUP BY 1, 2")  # fmt: skip
        return {(str(row[0]), str(row[1])): _sums(row[2:]) for row in rows}

    def sent(self, tasks: Mapping[str, str]) -> list[SentCalls]:
        """How the calls of the file (in mode `off`: of this process) were sent; `tasks` maps
        example → task, and calls for other examples are left out."""
        self._define(tasks.get)
        rows = self._query(
            "SELECT groups(c.example_id) AS task, c.role, c.model, c.dropped, s.body, COUNT(*) "
            "FROM calls c LEFT JOIN settings s ON s.digest = c.settings "
            "WHERE task IS NOT NULL GROUP BY 1, 2, 3, 4, 5"
        )
        rows += [
            (tasks[example], role, *key, calls)
            for (role, example, *key), calls in self._unkept.items()
            if example in tasks
        ]
        try:
            return [
                SentCalls(task, role, model, tuple(parse_json(dropped, strict=False)),
                          kept_settings(body), calls)
                for task, role, model, dropped, body, calls in rows
            ]  # fmt: skip
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise unusable_ledger(self.path, f"its settings cannot be read ({error})") from error

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r}, mode={self.mode!r})"

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise unusable_ledger(self.path, "it is closed")
        return self._db

    def _find(self, key: str) -> LedgerEntry | None:
        return self._first("key = ?", (key,))

    def _find_aside(self, key: str) -> LedgerEntry | None:
        return self._first("key > ? AND key < ? ORDER BY rowid DESC", (key, f"{key}{ASIDE}{ASIDE}"))

    def _first(self, where: str, values: tuple[str, ...]) -> LedgerEntry | None:
        stored = self._stored(where, values)
        return stored[0] if stored else None

    def _stored(
        self, where: str, values: tuple[str, ...]
    ) -> tuple[LedgerEntry, Sequence[Any]] | None:
        rows = self._query(f"SELECT {','.join(COLUMNS)} FROM calls WHERE {where}", values)
        if not rows:
            return None
        entry, problem = read_row(rows[0])
        if problem:
            raise self.damaged(entry, problem)
        return entry, rows[0]

    def _held(self, key: str) -> tuple[LedgerEntry, Request] | None:
        """The entry of `key` and its request; RunError if damaged."""
        stored = self._stored("key = ?", (key,))
        if stored is None:
            return None
        try:
            return stored[0], request_in(self._connection(), stored[1])
        except Damaged as error:
            raise self.damaged(stored[0], str(error)) from error

    def _define(self, groups: Callable[[str], str | None]) -> None:
        if self._db is not None:
            with self._lock:
                self._db.create_function("groups", 1, groups)

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
            raise unusable_ledger(self.path, str(error)) from error


def _unkept(entry: LedgerEntry, request: Request) -> tuple[Any, ...]:
    """The columns of `Ledger.sent` for an entry that is not stored."""
    call, body = entry.call, settings_body(request)
    return call.role, call.example_id, entry.model, json.dumps(entry.dropped), body


def _open(path: Path | None, mode: Mode) -> sqlite3.Connection | None:
    if mode == "off":
        return None
    if path is None:
        raise unusable_ledger(path, "no path was given")
    try:
        return open_to_read(path) if mode == "replay" else open_to_write(path)
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        raise unusable_ledger(path, str(error)) from error


def _insert(db: sqlite3.Connection, key: str, entry: LedgerEntry, request: Request) -> bool:
    """Store a call and return whether it is new; an existing reply is kept."""
    call = entry.call
    with transaction(db):
        row = (
            key, entry.model, call.role, call.example_id, call.rollout, call.kind, call.turn,
            call.sample, call.step, entry.reply, json.dumps(entry.dropped), entry.prompt_tokens,
            entry.completion_tokens, entry.cost, entry.seconds, entry.attempts, entry.created,
            *keep_request(db, request), seal(entry.reply), call.seat, call.purpose,
        )  # fmt: skip
        marks = ",".join("?" * len(row))
        names = ",".join(COLUMNS)
        done = db.execute(f"INSERT OR IGNORE INTO calls ({names}) VALUES ({marks})", row)
    return done.rowcount == 1


def _not_kept(path: Path | None, entry: LedgerEntry, cause: str) -> RunError:
    return RunError(
        f"A reply could not be stored in the ledger '{path}': {cause}.",
        f"It may have been paid for ({_who(entry.model, entry.call)}); all earlier replies are in "
        "the ledger.",
        "Free disk space, or stop the process that uses the file, then run the same command "
        "again: it only requests missing replies.",
    )


def _miss(path: Path | None, model: str, call: Call) -> ReplayMiss:
    return ReplayMiss(
        f"The ledger '{path}' has no reply of {_who(model, call)}.",
        "A replay never uses the network, and this call was not recorded with exactly these "
        "messages, sampling settings, model and base URL.",
        "Record it first with the ledger in mode 'record', or replay with the recorded settings.",
    )


def _who(model: str, call: Call) -> str:
    return f"'{model}' for this call: role {call.role}, {call_words(call)}"


def call_words(call: Call) -> str:
    """The call in one line, with seat and purpose if set."""
    beside = {"seat": call.seat, "purpose": call.purpose}
    return (
        f"example {call.example_id}, rollout {call.rollout}, {call.kind}, turn {call.turn}, sample "
        f"{call.sample}, step {call.step}"
        + "".join(f", {name} {value}" for name, value in beside.items() if value)
    )


_OF_CALL = ("role", "example_id", "rollout", "kind", "turn", "sample", "step", "seat", "purpose")
_OF_ENTRY = (
    "model", "reply", "prompt_tokens", "completion_tokens", "cost", "seconds", "attempts", "created"
)  # fmt: skip

_TEXTS = ("role", "example_id", "kind", "seat", "purpose", "model", "reply", "created", "dropped")
_COUNTS = ("rollout", "turn", "sample", "step", "prompt_tokens", "completion_tokens", "attempts")
_USUAL: dict[str, Any] = {
    **dict.fromkeys(_TEXTS, ""), **dict.fromkeys(_COUNTS, 0), "seconds": 0.0, "cost": 0.0,
}  # fmt: skip
"""Column → a value of its type, in place of a damaged one."""


def read_row(row: Sequence[Any]) -> tuple[LedgerEntry, str]:
    """(entry, problem) from a database row with COLUMNS; the problem is empty if there is none."""
    named, problem = dict(zip(COLUMNS, row, strict=True)), ""
    if named["seal"] != seal(str(named["reply"])):
        problem = "its reply differs from what was stored"
    for name, usual in _USUAL.items():
        if not isinstance(named[name], type(usual)) and not (
            name == "cost" and named[name] is None
        ):
            named[name], problem = usual, f"its column {name} has an odd value"
    try:
        dropped = tuple(map(str, parse_json(named["dropped"], strict=False)))
    except (ValueError, TypeError):
        dropped, problem = (), "its dropped parameters cannot be read"
    call = Call(**{name: named[name] for name in _OF_CALL})
    return LedgerEntry(
        call=call, dropped=dropped, **{name: named[name] for name in _OF_ENTRY}
    ), problem


def _sums(row: tuple[Any, ...]) -> RoleTotals:
    calls, prompt_tokens, completion_tokens, cost = row
    return RoleTotals(
        calls=calls, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cost=cost
    )


class LayeredLedger(Ledger):
    """A ledger that records to `path` and also reads from `below`.

    In mode `replay` nothing is copied, and a call in neither file raises ReplayMiss. RunError if a
    file cannot be opened.
    """

    def __init__(self, path: Path, below: Path | None = None, mode: Mode = "record") -> None:
        super().__init__(path, mode, mends=mode == "record")
        self._lower = None if below is None else Ledger(below, "replay")

    def close(self) -> None:
        """Close both files. May be called twice."""
        super().close()
        if self._lower is not None:
            self._lower.close()
            self._lower = None

    def _find(self, key: str) -> LedgerEntry | None:
        entry = super()._find(key)
        if entry is not None or self._lower is None:
            return entry
        stored = self._lower._held(key)
        if stored is None or self.mode == "replay":
            return stored[0] if stored else None
        entry, request = stored
        return self.store(key, replace(entry, cost=0.0, attempts=0), request)

    def _find_aside(self, key: str) -> LedgerEntry | None:
        return None
