"""The ledger's file: its tables, how it is opened, and how prompts are stored.

    calls      one row per paid call; `context` and `settings` refer to the request, `seal` is a
               hash of the reply that detects damage
    contexts   messages, each with its parent: turns of a dialogue share their history, drafts share
               their prompt, and each text is stored once
    settings   base URL and sampling, shared by thousands of calls, and other parameters sent

A file of another version is rejected.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from soulkit.errors import RunError
from soulkit.parse import parse_json

VERSION = 3
BUSY_S = 30.0
"""Seconds to wait while another process writes."""
LARGEST = 64_000_000
"""Maximum bytes of a message, a reply or another cell."""
COLUMNS = (
    "key", "model", "role", "example_id", "rollout", "kind", "turn", "sample", "step", "reply",
    "dropped", "prompt_tokens", "completion_tokens", "cost", "seconds", "attempts", "created",
    "context", "settings", "seal", "seat", "purpose",
)  # fmt: skip
"""Columns of the table `calls`."""
TABLES = (
    """
CREATE TABLE calls (
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
    created TEXT NOT NULL,
    context BLOB,
    settings BLOB,
    seal BLOB,
    seat TEXT NOT NULL DEFAULT '',
    purpose TEXT NOT NULL DEFAULT ''
)
""",
    "CREATE TABLE contexts (digest BLOB PRIMARY KEY, parent BLOB, role TEXT NOT NULL, "
    "body BLOB NOT NULL)",
    "CREATE TABLE settings (digest BLOB PRIMARY KEY, body TEXT NOT NULL)",
)
_DIGEST_BYTES = 16
_PLAIN, _PACKED = b"t", b"z"
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""The last bytes of a journal that names another (https://sqlite.org/fileformat.html, 3.1)."""


class Damaged(Exception):
    """A part of the file differs from what was written. The caller adds the file's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request; with model and call it determines the key. Contains no headers or API keys."""

    base_url: str
    messages: tuple[Mapping[str, str], ...]
    """Role and content of each message, in order."""
    sampling: Mapping[str, Any]
    """The sampling settings that enter the key."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters sent to neutralise server defaults; not part of the key."""


# -- opening -------------------------------------------------------------------------------------


def open_to_write(path: Path) -> sqlite3.Connection:
    """A connection that records. Creates the file and its folder if missing.

    sqlite3.Error, OSError or RunError on failure; an existing file is left unchanged.
    """
    if path.is_symlink():
        raise unusable_ledger(path, "it is a link, so another file would be written")
    path.parent.mkdir(parents=True, exist_ok=True)
    db = _connect(path, "rwc")
    try:
        _check_version(db, path, empty_ok=True)
        # NORMAL keeps every commit if the process is killed; a power cut may lose the last one.
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        if version(db) < VERSION:
            _make_tables(db, path)
    except BaseException:
        db.close()
        raise
    return db


def open_to_read(path: Path) -> sqlite3.Connection:
    """A read-only connection."""
    if not path.is_file():
        raise unusable_ledger(path, "the file does not exist")
    # Reading a WAL database needs side files. Open a read-only archive as immutable, and any other
    # for writing, so that closing it removes the side files.
    frozen = not os.access(path.parent, os.W_OK) or not os.access(path, os.W_OK)
    if frozen:
        _check_whole(path)
    db = _connect(path, "ro&immutable=1" if frozen else "rw")
    try:
        db.execute("PRAGMA query_only=ON")
        _check_version(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _check_whole(path: Path) -> None:
    """RunError if the newest entries of a killed run are still in a side file."""
    side = path.with_name(f"{path.name}-wal")
    if side.is_file() and side.stat().st_size:
        raise unusable_ledger(
            path,
            f"its newest entries are in '{side.name}', which can only be merged in a writable "
            "folder; copy both files to one",
        )


def _connect(path: Path, flags: str) -> sqlite3.Connection:
    whole = path.resolve()
    for end in ("-wal", "-shm", "-journal"):  # SQLite opens these itself
        side = whole.with_name(f"{whole.name}{end}")
        if os.path.lexists(side) and not side.is_file():
            raise unusable_ledger(path, f"'{side.name}' is not a regular file")
        if end == "-journal" and side.is_file() and _names_another(side):
            raise unusable_ledger(path, f"'{side.name}' names another file, which SQLite deletes")
    uri = f"file:{quote(str(whole))}?mode={flags}"
    db = sqlite3.connect(
        uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
    return db


def _names_another(journal: Path) -> bool:
    """Whether a journal belongs to a transaction over several databases. SQLite deletes the file
    that such a journal names; soulkit never opens two in one connection."""
    with journal.open("rb") as stream:
        stream.seek(max(0, journal.stat().st_size - len(_JOURNAL_MAGIC)))
        return stream.read() == _JOURNAL_MAGIC


def _make_tables(db: sqlite3.Connection, path: Path) -> None:
    with transaction(db):
        _check_version(db, path, empty_ok=True)
        if version(db) == VERSION:  # another process has created them
            return
        for statement in TABLES:
            db.execute(statement)
        db.execute(f"PRAGMA user_version={VERSION}")


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run all statements inside as one transaction."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # False if a full disk has already rolled it back
            db.execute("ROLLBACK")
        raise


def version(db: sqlite3.Connection) -> int:
    """The version of the tables; 0 for a new file or one whose creation was interrupted."""
    with closing(db.execute("PRAGMA user_version")) as cursor:
        return int(cursor.fetchone()[0])


def _check_version(db: sqlite3.Connection, path: Path, *, empty_ok: bool = False) -> None:
    """RunError unless the file is a ledger of this version, or empty if `empty_ok`."""
    with closing(db.execute("SELECT name, sql FROM sqlite_master")) as cursor:
        parts = [(name, sql) for name, sql in cursor if sql is not None]  # no automatic indexes
    tables, file_version = {name for name, _ in parts}, version(db)
    if "calls" in tables and file_version != VERSION:
        raise RunError(
            f"The ledger '{path}' has version {file_version}, but this soulkit only reads "
            f"version {VERSION}.",
            "It was written by another version of soulkit.",
            "Use that version, or name another ledger file.",
        )
    if "calls" not in tables and not (empty_ok and not tables and file_version == 0):
        raise unusable_ledger(path, "it is not a ledger of soulkit")
    # Views, triggers, checks and generated columns are code that SQLite would run.
    if not {_without_space(sql) for _, sql in parts} <= set(map(_without_space, TABLES)):
        raise unusable_ledger(path, "its tables are not those of a ledger")


def _without_space(sql: str) -> str:
    """A definition as it may also have been written by earlier versions and `ALTER TABLE`."""
    return "".join(str(sql).split())


def unusable_ledger(path: Path | None, cause: str) -> RunError:
    """The error for a file that cannot be opened, read or written."""
    if "locked" in cause:
        return RunError(
            f"The ledger '{path}' cannot be used: another process has locked it for over "
            f"{BUSY_S:g} s.",
            "Several processes may use a ledger, but only one can write at a time.",
            "Wait for the other process or stop it, then run the same command again.",
        )
    if any(words in cause for words in ("disk is full", "disk I/O", "No space left")):
        return RunError(
            f"The ledger '{path}' cannot be used: {cause}.",
            "All replies that it contains are kept.",
            "Check that the disk has free space, then run the same command again.",
        )
    return RunError(
        f"The ledger '{path}' cannot be used: {cause}.",
        "It contains paid replies of a run, so soulkit neither repairs nor overwrites it.",
        "Check the path and its permissions (soul ledger verify lists damaged entries), name "
        "another ledger file, or switch the ledger off.",
    )


# -- requests ------------------------------------------------------------------------------------


def seal(reply: str) -> bytes:
    """An 8-byte hash of a reply, to detect damage."""
    return hashlib.sha256(reply.encode("utf-8", "surrogatepass")).digest()[:8]


def keep_request(db: sqlite3.Connection, request: Request) -> tuple[bytes | None, bytes]:
    """Store the new parts of a request; returns (context, settings) for the call's row.

    Call it in the transaction that stores the call, so that a stored message always has its
    parents.
    """
    chain = list(_chain(request.messages))
    for digest, parent, message in reversed(chain):
        plain = message["content"].encode("utf-8", "surrogatepass")
        packed = zlib.compress(plain, 6)
        text = _PACKED + packed if len(packed) < len(plain) else _PLAIN + plain
        row = (digest, parent, message["role"], text)
        done = db.execute("INSERT OR IGNORE INTO contexts VALUES (?, ?, ?, ?)", row)
        if done.rowcount == 0:
            break
    body = settings_body(request)
    settings = _digest(body.encode("ascii"))
    db.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", (settings, body))
    return (chain[-1][0] if chain else None), settings


def settings_body(request: Request) -> str:
    """A request without its messages, as stored in the file."""
    beside = {"beside": request.beside} if request.beside else {}
    return _canonical({"base_url": request.base_url, "sampling": request.sampling, **beside})


def kept_settings(body: str) -> Request:
    """The request stored by `settings_body`, without its messages."""
    kept = parse_json(body, strict=False)
    return Request(base_url=kept["base_url"], messages=(), sampling=kept["sampling"],
                   beside=kept.get("beside", {}))  # fmt: skip


def load_request(db: sqlite3.Connection, context: bytes | None, settings: bytes) -> Request:
    """Read what `keep_request` stored. Raises Damaged if that fails."""
    row = db.execute("SELECT body FROM settings WHERE digest = ?", (settings,)).fetchone()
    if row is None or _digest(str(row[0]).encode()) != settings:
        raise Damaged("its settings are missing or changed")
    messages: list[dict[str, str]] = []
    at, left = context, LARGEST
    while at is not None:
        at, message = _message(db, at)
        messages.append(message)
        left -= len(message["content"])
        if left < 0:
            raise Damaged(f"its prompt has more than {LARGEST} characters")
    try:
        return replace(kept_settings(str(row[0])), messages=tuple(reversed(messages)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Damaged("its settings cannot be read") from error


def request_in(db: sqlite3.Connection, row: Sequence[Any]) -> Request:
    """The request in a database row with COLUMNS. Raises Damaged if it cannot be read."""
    return load_request(db, row[COLUMNS.index("context")], row[COLUMNS.index("settings")])


def _message(db: sqlite3.Connection, digest: bytes) -> tuple[bytes | None, dict[str, str]]:
    """(parent, message) of a stored message."""
    row = db.execute(
        "SELECT parent, role, body FROM contexts WHERE digest = ?", (digest,)
    ).fetchone()
    if row is None:
        raise Damaged("a message of its prompt is missing")
    parent, message = row[0], {"role": str(row[1]), "content": _unpack(row[2])}
    # This check also ends the walk: correct hashes cannot form a cycle.
    if _link(parent, message) != digest:
        raise Damaged("a message of its prompt was changed")
    return parent, message


def _chain(
    messages: Sequence[Mapping[str, str]],
) -> Iterator[tuple[bytes, bytes | None, Mapping[str, str]]]:
    """(digest, parent, message) per message; a digest covers all messages up to its own."""
    parent: bytes | None = None
    for message in messages:
        digest = _link(parent, message)
        yield digest, parent, message
        parent = digest


def _link(parent: bytes | None, message: Mapping[str, str]) -> bytes:
    text = _canonical([parent.hex() if parent else "", message["role"], message["content"]])
    return _digest(text.encode("ascii"))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]


def _unpack(body: bytes) -> str:
    try:
        plain = body[1:]
        if body[:1] == _PACKED:
            unpacker = zlib.decompressobj()
            plain = unpacker.decompress(plain, LARGEST)
            if not unpacker.eof:
                raise zlib.error(f"it is incomplete, or larger than {LARGEST} bytes")
        return plain.decode("utf-8", "surrogatepass")
    except (zlib.error, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise Damaged("a message of its prompt cannot be read") from error
