"""A ledger on top of another: what the lower one holds is not asked again, and is never written to.

What is taken from below is copied with attempts and cost 0, since nothing was sent or paid for it
here. So the upper file alone replays everything, and its cost is that of the new replies. A reply
that was set aside as useless does not count as held: this ledger exists to ask for such again.
"""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

from soulkit.models.ledger.file import (
    Damaged,
    Request,
    columns_of,
    load_request,
    open_to_read,
    unusable_ledger,
)
from soulkit.models.ledger.ledger import Ledger, LedgerEntry, read_row
from soulkit.models.ledger.mode import Mode


class LayeredLedger(Ledger):
    """A ledger that records to `path` and looks at `below` as well.

    In mode `replay` nothing is copied, and a call that neither file holds is a ReplayMiss. RunError
    when a file cannot be opened.
    """

    def __init__(self, path: Path, below: Path | None = None, mode: Mode = "record") -> None:
        super().__init__(path, mode, mends=mode == "record")
        self._lower = None if below is None else _Lower(below)

    def close(self) -> None:
        """Close both files; closing twice is harmless."""
        super().close()
        if self._lower is not None:
            self._lower.close()
            self._lower = None

    def _find(self, key: str) -> LedgerEntry | None:
        entry = super()._find(key)
        if entry is not None or self._lower is None:
            return entry
        stored = self._lower.stored(key)
        if stored is None or self.mode == "replay":
            return stored[0] if stored else None
        entry, request = stored
        return self.store(key, replace(entry, cost=0.0, attempts=0), request)

    def _find_aside(self, key: str) -> LedgerEntry | None:
        return None


class _Lower:
    """The entries of a file that is only read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = open_to_read(path)
            self._columns = columns_of(self._db)
        except (sqlite3.Error, OSError) as error:
            raise unusable_ledger(path, str(error)) from error

    def stored(self, key: str) -> tuple[LedgerEntry, Request | None] | None:
        """The entry of a key and what was asked for it; None when the file does not hold it."""
        sql = f"SELECT {','.join(self._columns)} FROM calls WHERE key = ?"
        try:
            row = self._db.execute(sql, (key,)).fetchone()
        except sqlite3.Error as error:
            raise unusable_ledger(self.path, str(error)) from error
        if row is None:
            return None
        entry, problem = read_row(self._columns, row)
        if problem:
            raise unusable_ledger(self.path, problem)
        named = dict(zip(self._columns, row, strict=True))
        try:
            request = load_request(self._db, named.get("context"), named.get("settings"))
        except Damaged as error:
            raise unusable_ledger(self.path, str(error)) from error
        return entry, request

    def close(self) -> None:
        self._db.close()
