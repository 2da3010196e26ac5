"""Reads a ledger: totals, entries, export lines, and checks for damage.

Never writes. `verify` collects all findings instead of stopping at the first one.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from soulkit.errors import RunError
from soulkit.models.api.protocol import Unreadable, WireReply, parse_reply
from soulkit.models.ledger.ledger import ASIDE, LedgerEntry, read_row, request_key
from soulkit.models.ledger.storage import (
    COLUMNS,
    Damaged,
    Request,
    open_to_read,
    request_in,
    unusable_ledger,
    version,
)
from soulkit.runs.jsonl import aside
from soulkit.types import CONTROL_PURPOSE, ControlRecord, Record, Role

_NAMED = 5
"""Maximum findings of one kind that are listed; the rest are counted."""
_ORDER = "ORDER BY step, example_id, rollout, kind, created, turn, sample"
_OF_CONTROLS = f"(substr(purpose, 1, {len(CONTROL_PURPOSE)}) = '{CONTROL_PURPOSE}')"
"""SQL condition: whether a call belongs to a control."""


EpisodeRole = tuple[str, str, int, str, int]
"""Role, example, rollout, kind, step: the calls of one role in one episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCall:
    """An entry as stored in the file."""

    key: str
    entry: LedgerEntry
    request: Request | None
    """None if it cannot be read."""
    problem: str = ""
    """What is wrong with it; empty if nothing."""

    def answer(self) -> WireReply | None:
        """The parsed reply; None if it cannot be read."""
        try:
            return parse_reply(self.entry.reply) if isinstance(self.entry.reply, str) else None
        except Unreadable:
            return None

    def texts(self) -> list[tuple[str, str]]:
        """(label, text) of the prompt's messages, the reasoning and the reply."""
        parts = [("prompt", "(damaged)")]
        if self.request is not None:
            parts = [(message["role"], message["content"]) for message in self.request.messages]
        answer = self.answer()
        if answer is None:
            return [*parts, ("unreadable reply", self.entry.reply)]
        thought = [("reasoning", answer.reasoning)] if answer.reasoning else []
        return [*parts, *thought, (f"reply ({answer.stop_reason})", answer.text)]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values with stable names; `reply` is the server's raw text."""
        entry = asdict(self.entry)
        call = entry.pop("call")
        request = None if self.request is None else asdict(self.request)
        if request is not None and not request["beside"]:
            del request["beside"]
        return {"key": self.key, **call, **entry, "dropped": list(self.entry.dropped),
                "request": request}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTotals:
    """Totals of the calls of one role to one model for one purpose."""

    role: str
    purpose: str
    """Empty if the calls have none."""
    model: str
    calls: int
    attempts: int
    """Requests sent, including failed ones."""
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    """US dollars of the calls with a known price; None if there are none."""
    priced: int
    """Calls with a known price."""
    p50: float
    """Median seconds of the successful attempt."""
    p95: float
    first: str
    """UTC, ISO 8601."""
    last: str


@dataclass(slots=True)
class LedgerFindings:
    """Findings of `verify` as sentences, at most a few per kind, and counts of checked items."""

    version: int
    entries: int = 0
    requests: int = 0
    """Entries whose key was recomputed."""
    episodes: int | None = None
    """Scored episodes whose calls were checked; None without a run folder."""
    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, detail: str) -> None:
        """Count a finding, and list it if it is among the first of its kind."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] <= _NAMED:
            self.problems.append(f"{kind}: {detail}")

    def lines(self) -> list[str]:
        """One line per listed finding, and one per kind for the rest."""
        more = {kind: n - _NAMED for kind, n in self.counts.items() if n > _NAMED}
        return [*self.problems, *(f"{kind}: and {n} more" for kind, n in more.items())]

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "entries": self.entries,
            "recomputed": self.requests,
            "episodes": self.episodes,
            "findings": self.lines(),
            "counts": self.counts,
        }


class LedgerView:
    """An open ledger file. RunError if it does not exist or is not a ledger."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = open_to_read(path)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise unusable_ledger(path, str(error)) from error
        self.version = version(self._db)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._db.close()

    def entries(
        self,
        *,
        example: str | None = None,
        role: str | None = None,
        key: str | None = None,
        limit: int | None = None,
    ) -> Iterator[StoredCall]:
        """Entries in order of step, example, rollout and time; `key` may be a prefix."""
        filters = {"example_id = ?": example, "role = ?": role, "substr(key, 1, ?) = ?": key}
        rules = [rule for rule, value in filters.items() if value is not None]
        values: list[Any] = [value for value in (example, role) if value is not None]
        values += [len(key), key] if key is not None else []
        where = f"WHERE {' AND '.join(rules)}" if rules else ""
        values.append(-1 if limit is None else limit)
        sql = f"SELECT {','.join(COLUMNS)} FROM calls {where} {_ORDER} LIMIT ?"
        for row in self._rows(sql, values):
            yield self._stored(row)

    def groups(self) -> list[CallTotals]:
        """Totals by role, model and purpose."""
        sql = (
            "SELECT role, model, purpose, COUNT(*), SUM(attempts), SUM(prompt_tokens), "
            "SUM(completion_tokens), SUM(cost), COUNT(cost), MIN(created), MAX(created) "
            "FROM calls GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
        )
        try:
            return [self._group(row) for row in self._rows(sql)]
        except (ValueError, TypeError) as error:  # a damaged index or number
            raise unusable_ledger(self.path, "some of its entries are damaged") from error

    def _group(self, row: Sequence[Any]) -> CallTotals:
        role, model, purpose, calls, attempts, prompt, reply, cost, priced, first, last = row
        if not all(isinstance(text, str) for text in (role, model, purpose, first, last)):
            raise TypeError
        times = self._seconds(role, model, purpose)
        return CallTotals(
            role=role, purpose=purpose, model=model, calls=calls, attempts=attempts,
            prompt_tokens=prompt, completion_tokens=reply, cost=cost, priced=priced,
            p50=quantile(times, 0.5), p95=quantile(times, 0.95), first=first, last=last,
        )  # fmt: skip

    def counts(self) -> dict[EpisodeRole, int]:
        """Number of entries per episode and role, without those of controls."""
        names = "role, example_id, rollout, kind, step"
        rows = self._rows(
            f"SELECT {names}, COUNT(*) FROM calls WHERE NOT {_OF_CONTROLS} GROUP BY {names}"
        )
        return {(role, example, rollout, kind, step): n
                for role, example, rollout, kind, step, n in rows}  # fmt: skip

    def control_calls(self) -> dict[str, int]:
        """Number of entries per control, by key: `CONTROL/EXAMPLE/ROLLOUT`."""
        names = "purpose, example_id, rollout"
        rows = self._rows(
            f"SELECT {names}, COUNT(*) FROM calls WHERE {_OF_CONTROLS} GROUP BY {names}"
        )
        return {f"{purpose.removeprefix(CONTROL_PURPOSE)}/{example}/{rollout}": n
                for purpose, example, rollout, n in rows}  # fmt: skip

    def verify(self) -> LedgerFindings:
        """Check every page and every entry of the file."""
        findings = LedgerFindings(version=self.version)
        try:
            for (line,) in self._db.execute("PRAGMA integrity_check").fetchall():
                if line != "ok":
                    findings.add("file", " ".join(str(line).split()))
            self._check_entries(findings)
        except sqlite3.Error as error:
            findings.add("file", str(error))
        return findings

    def _check_entries(self, findings: LedgerFindings) -> None:
        # Without ORDER BY, so that a broken index does not hide readable rows.
        with closing(self._db.execute(f"SELECT {','.join(COLUMNS)} FROM calls")) as cursor:
            for row in cursor:
                stored = self._stored(row)
                findings.entries += 1
                _check_entry(stored, findings)

    def _stored(self, row: Sequence[Any]) -> StoredCall:
        entry, problem = read_row(row)
        request = None
        try:
            request = request_in(self._db, row)
        except Damaged as error:
            problem = problem or str(error)
        except sqlite3.Error as error:  # a damaged page of prompts; replies are still readable
            problem = problem or f"its prompt cannot be read ({error})"
        return StoredCall(key=str(row[0]), entry=entry, request=request, problem=problem)

    def _seconds(self, role: str, model: str, purpose: str) -> list[float]:
        sql = (
            "SELECT seconds FROM calls WHERE role = ? AND model = ? AND purpose = ? "
            "ORDER BY seconds"
        )
        return [float(row[0]) for row in self._rows(sql, (role, model, purpose))]

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        try:
            # Not `yield from`: if the caller stops early, the cursor would close after the file.
            for row in self._db.execute(sql, values):  # noqa: UP028
                yield row
        except sqlite3.Error as error:
            raise unusable_ledger(self.path, str(error)) from error


def write_export(path: Path, lines: Iterable[str]) -> int:
    """Write ASCII lines to a temporary file and rename it to `path`; returns their number."""
    count = 0
    with aside(path) as stream:
        for line in lines:
            stream.write(f"{line}\n".encode("ascii"))
            count += 1
    return count


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the ordered values that is at least as large as `share` of them.

    ValueError if there are no values.
    """
    if not ordered:
        raise ValueError("no values")
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def _check_entry(stored: StoredCall, findings: LedgerFindings) -> None:
    who = f"{stored.key[:12]} ({stored.entry.call.role}, example {stored.entry.call.example_id})"
    if stored.problem:
        findings.add("damaged entry", f"{who}: {stored.problem}")
    elif stored.answer() is None:
        findings.add("unreadable reply", who)
    if stored.request is not None:
        findings.requests += 1
        if (
            request_key(stored.request, stored.entry.model, stored.entry.call)
            != stored.key.partition(ASIDE)[0]
        ):
            findings.add("key", f"{who} does not match its request")


# -- checks against a run's episodes -------------------------------------------------------------


def check_episodes(
    view: LedgerView,
    records: Sequence[Record],
    findings: LedgerFindings,
    *,
    actor: bool,
    judges: bool,
) -> None:
    """Check that every scored episode has its calls: one actor call per turn, one judge call per
    verdict. `actor` and `judges` tell which of them were called over HTTP and must be in the file.
    """
    counts = view.counts()
    scored = [record for record in records if record.score.scored]
    findings.episodes = len(scored)
    talking = {record.task for record in scored if _talk(record, counts)}
    for record in scored:
        least_calls: dict[Role, int] = {}
        if actor:
            least_calls["actor"] = sum(len(trace.turns) for trace in record.episode.traces)
        if judges:
            least_calls["judge"] = len({(v.judge, v.sample) for v in record.score.verdicts})
        if record.task in talking:
            least_calls["partner"] = 1
        _check_calls(record, least_calls, counts, findings)


def check_controls(
    view: LedgerView, controls: Sequence[ControlRecord], findings: LedgerFindings
) -> None:
    """Check that every scored control has one call per verdict. For runs whose judges were called
    over HTTP."""
    counts = view.control_calls()
    for control in controls:
        least = len({(v.judge, v.sample) for v in control.score.verdicts})
        have = counts.get(control.key, 0)
        if control.score.scored and have < least:
            findings.add(
                "missing calls",
                f"control {control.key} of {control.task} has {have} of {least} calls",
            )


def _check_calls(
    record: Record,
    least_calls: Mapping[Role, int],
    counts: Mapping[EpisodeRole, int],
    findings: LedgerFindings,
) -> None:
    for role, least in least_calls.items():
        have = _asked(record, role, counts)
        if have < least:
            findings.add(
                "missing calls",
                f"episode {record.key} of {record.task} has {have} of {least} calls of role {role}",
            )


def _asked(record: Record, role: Role, counts: Mapping[EpisodeRole, int]) -> int:
    if role == "partner":
        return _talk(record, counts)
    roles: tuple[Role, ...] = ("judge", "auditor") if role == "judge" else (role,)
    return sum(counts.get(_episode_role(record, one), 0) for one in roles)


def _talk(record: Record, counts: Mapping[EpisodeRole, int]) -> int:
    talkers: tuple[Role, ...] = ("partner", "environment")
    return sum(counts.get(_episode_role(record, role), 0) for role in talkers)


def _episode_role(record: Record, role: Role) -> EpisodeRole:
    return role, record.example_id, record.rollout, record.kind, record.step


def paid_so_far(run: Path) -> tuple[float | None, int]:
    """(US dollars of priced calls, number of unpriced calls) from the ledger of a run; (None, 0)
    without a readable one; `soul ledger verify` gives the reason."""
    try:
        with LedgerView(run / "ledger.sqlite") as view:
            groups = view.groups()
    except RunError:
        return None, 0
    costs = [group.cost for group in groups if group.cost is not None]
    return sum(costs) if costs else None, sum(group.calls - group.priced for group in groups)
