"""The batches of a run: a record of all batches sent, and the queue of calls for the next batch.

Each step is recorded before and after it, so that a resumed run finds its batches:

    batches.json    the run's mark, limits learned from servers, and every batch with its stage:
                    written ──▶ uploaded ──▶ created ──▶ ended ──▶ used
                    on disk     file id      batch id    replies    replies are in the ledger
    batches/0001.requests.jsonl, 0001.replies.N.jsonl    until the batch is used

These files contain no keys or headers.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from soulkit.errors import DataError, RunError, UserError
from soulkit.models.api import transport
from soulkit.models.api.batch_service import (
    BatchReport,
    BatchService,
    ServiceSilent,
    was_refused,
)
from soulkit.models.api.limits import Budget, BudgetSpent, CallGate
from soulkit.models.api.replies import NO_CREDIT, Fault, clean_detail
from soulkit.parse import parse_json
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.jsonl import parsed_object, read_value, stored_json, write_aside, write_json
from soulkit.text import duration

BOOK, FILES = "batches.json", "batches"
Stage = Literal["written", "uploaded", "created", "ended", "used"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """One batch of a run."""

    number: int
    base_url: str
    model: str
    requests: int
    cost_limit: float
    """Maximum cost of all replies in US dollars; 0 if no price is known."""
    written: float
    """Unix seconds."""
    stage: Stage = "written"
    file_id: str = ""
    batch_id: str = ""
    status: str = ""
    """Final status as named by the service."""
    words: str = ""
    """Why it failed."""


@dataclass
class LearnedLimits:
    """What live calls showed about a server; also applies to its batches."""

    refused: list[str] = field(default_factory=list)
    longest: int | None = None
    """Maximum tokens of any reply."""
    taken: list[str] = field(default_factory=list)
    """Parameter sets that the server has accepted."""


class BatchBook:
    """The batches of the run in `folder`. RunError if its file is damaged."""

    def __init__(self, folder: Path) -> None:
        self.path, self.files = folder / BOOK, folder / FILES
        self.run = uuid.uuid4().hex
        self.states: dict[int, BatchState] = {}
        self.lore: dict[str, LearnedLimits] = {}
        if self.path.is_file():
            self._read()
        self._earlier = set(self.states)

    def _read(self) -> None:
        try:
            book = stored_json(self.path)
            self.run = str(book["run"])
            states = [read_value(BatchState, one, "A batch") for one in book["batches"]]
            self.lore = {name: read_value(LearnedLimits, lore, "The limits of a server")
                         for name, lore in book["servers"].items()}  # fmt: skip
        except (OSError, ValueError, LookupError, TypeError, AttributeError, DataError) as error:
            raise RunError(
                f"'{self.path}' cannot be read: {error}.",
                "It records which batches were sent; without it they would be paid for twice.",
                "Restore the file. To pay for new batches instead, use another folder with --out.",
            ) from error
        self.states = {state.number: state for state in states}

    def lore_of(self, base_url: str, model: str) -> LearnedLimits:
        return self.lore.setdefault(f"{model} at {base_url}", LearnedLimits())

    def save(self, state: BatchState | None = None) -> None:
        """Write the file, with the new state of a batch if given."""
        if state is not None:
            self.states[state.number] = state
        write_json(self.path, {
            "version": 1, "run": self.run,
            "servers": {name: asdict(lore) for name, lore in self.lore.items()},
            "batches": [asdict(one) for one in self.states.values()],
        })  # fmt: skip

    def add(
        self, base_url: str, model: str, lines: Iterable[bytes], cost_limit: float
    ) -> BatchState:
        """Write the requests of a new batch to disk and record it."""
        number, requests = max(self.states, default=0) + 1, list(lines)
        write_aside(self.requests_file(number), b"".join(requests))
        state = BatchState(number=number, base_url=base_url, model=model, requests=len(requests),
                           cost_limit=cost_limit, written=time.time())  # fmt: skip
        self.save(state)
        return state

    def mark(self, state: BatchState) -> dict[str, str]:
        """Metadata that identifies a batch at the service."""
        return {"soulkit_run": self.run, "soulkit_batch": str(state.number)}

    def unused(self) -> Iterator[BatchState]:
        """Batches whose replies are not all in the ledger."""
        return (state for state in self.states.values() if state.stage != "used")

    def take_over(self, base_url: str, model: str) -> list[BatchState]:
        """Unused batches of a model that an earlier process left; each is returned once."""
        left = [
            state
            for state in self.unused()
            if state.number in self._earlier and (state.base_url, state.model) == (base_url, model)
        ]
        self._earlier -= {state.number for state in left}
        return left

    def requests_file(self, number: int) -> Path:
        return self.files / f"{number:04d}.requests.jsonl"

    def replies_file(self, number: int, part: int) -> Path:
        return self.files / f"{number:04d}.replies.{part}.jsonl"

    def requests(self, state: BatchState) -> Iterator[tuple[str, bytes]]:
        """(custom_id, line) of each request. RunError if the file is missing or damaged."""
        try:
            with self.requests_file(state.number).open("rb") as stream:
                for line in stream:
                    yield str(parse_json(line, strict=False)["custom_id"]), line
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"The requests of batch {state.number} cannot be read: {error}.",
                f"According to '{self.path}' it was sent as {state.batch_id or 'a new batch'}.",
                "Restore the folder 'batches', or use another folder with --out.",
            ) from error

    def replies(self, number: int) -> dict[str, Mapping[str, Any]]:
        """custom_id → reply line. Unreadable lines are left out and requested again."""
        lines: dict[str, Mapping[str, Any]] = {}
        for path in sorted(self.files.glob(f"{number:04d}.replies.*.jsonl")):
            with path.open("rb") as stream:
                for line in filter(None, map(parsed_object, stream)):
                    lines.setdefault(str(line.get("custom_id")), line)
        return lines

    def is_whole(self, path: Path) -> bool:
        """Whether a file of replies has lines, and every line has a custom_id."""
        empty = True
        with path.open("rb") as stream:
            for raw in filter(bytes.strip, stream):
                line = parsed_object(raw)
                if line is None or not isinstance(line.get("custom_id"), str):
                    return False
                empty = False
        return not empty

    def clear(self, state: BatchState) -> None:
        """Delete the files of a batch whose replies are in the ledger."""
        for path in self.files.glob(f"{state.number:04d}.*"):
            path.unlink(missing_ok=True)


T = TypeVar("T")
LINES, FILE_BYTES = 50_000, 200_000_000
"""Maximum size of one batch, as set by OpenAI."""
TICK_S, CALM_TICKS = 0.05, 20
DOWNLOADS = 3
SILENCE_S = 1800.0
"""Give up on a service that does not answer for this long; the batch continues without us."""
SAY_S = 30.0
"""Seconds between progress lines while the status is unchanged."""


class Batches:
    """All batches of the run in `folder`. `poll_s`: seconds between status checks of a batch;
    `silence_s`: give up on a service that does not answer for this long."""

    def __init__(
        self, folder: Path, *, poll_s: float = 30.0, silence_s: float = SILENCE_S,
        reporter: Reporter = SILENT,
    ) -> None:  # fmt: skip
        self.book, self.poll_s, self.reporter = BatchBook(folder), poll_s, reporter
        self.silence_s = silence_s
        self._live: list[Callable[[], Iterable[CallGate]]] = []

    def watch(self, gates: Callable[[], Iterable[CallGate]]) -> None:
        """Send no batch while these gates have calls: their replies may lead to more calls."""
        self._live.append(gates)

    @property
    def busy(self) -> bool:
        return any(gate.inside or gate.waiting for gates in self._live for gate in gates())

    def finish(self) -> None:
        """Close the remaining batches that have ended, since the run is complete."""
        for state in list(self.book.unused()):
            if state.stage == "ended":
                self.close_book(state)

    def close_book(self, state: BatchState) -> None:
        """Mark a batch as used and delete its files: its replies are in the ledger."""
        self.book.save(replace(state, stage="used"))
        self.book.clear(state)

    def parting_words(self) -> list[str]:
        """Lines about the batches that continue after this process ends."""
        way_out = f"to collect it, run the same command again with --out {self.book.path.parent}"
        lines = []
        for s in self.book.unused():
            about = f"of {s.model} ({s.requests} requests)"
            if s.stage == "created":
                lines.append(
                    f"batch {s.batch_id} {about} continues at {s.base_url} and is billed; {way_out}"
                )
            elif s.stage == "uploaded":
                lines.append(f"a batch {about} may be running at {s.base_url}, which did not "
                             f"confirm it; {way_out}")  # fmt: skip
        return lines


@dataclass(frozen=True, slots=True)
class BatchReply:
    """The outcome of one line."""

    key: str
    state: BatchState
    sent: Mapping[str, Any]
    """The parameters as sent, possibly by an earlier process."""
    outcome: transport.Received | Fault


@dataclass(eq=False)
class _Line:
    """A waiting call, as one line of a batch file."""

    key: str
    raw: bytes
    cost: float
    """Maximum cost in US dollars."""
    future: asyncio.Future[BatchReply]
    sent: bool = False
    reserved: bool = False

    def parameters(self) -> dict[str, Any]:
        body = json.loads(self.raw)["body"]
        return {name: value for name, value in body.items() if name not in ("model", "messages")}


class BatchQueue:
    """The batched calls of one endpoint."""

    def __init__(
        self, model: str, batches: Batches, service: BatchService, budget: Budget | None
    ) -> None:
        self.model, self.batches, self.book = model, batches, batches.book
        self._service, self._budget = service, budget
        self._lines: dict[str, _Line] = {}
        self._fresh: dict[str, _Line] = {}
        """Lines that are in no batch yet."""
        self._members: dict[int, list[_Line]] = {}
        self._missing: dict[int, set[str]] = {}
        """Batch → keys whose replies have not been used yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived, self._arrivals = asyncio.Event(), 0
        self._most, self._turn = LINES, asyncio.Lock()
        self._begun = False

    # -- calls ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Continue the batches of an earlier process, and start collecting calls."""
        if self._begun:
            return
        self._begun = True
        for state in self.book.take_over(self._service.base_url, self.model):
            if state.stage == "written":  # never sent; its calls will be made again
                self.batches.close_book(state)
            else:
                self._take_up(state)
        self._start(self._collect())

    def _take_up(self, state: BatchState) -> None:
        cost = state.cost_limit / max(state.requests, 1)
        lines = [self._line(key, raw, cost) for key, raw in self.book.requests(state)]
        for line in lines:
            line.sent = True
            line.reserved = self._budget is not None and state.stage != "ended"
            if line.reserved and self._budget is not None:
                self._budget.reserve(cost, sent=True)
        self._lines |= {line.key: line for line in lines}
        self._follow(state, lines, resumed=True)

    def _line(self, key: str, raw: bytes, cost: float) -> _Line:
        return _Line(key, raw, cost, asyncio.get_running_loop().create_future())

    def holds(self, key: str) -> bool:
        """Whether this call is in a batch or waits for the next one."""
        return key in self._lines

    async def ask(self, key: str, body: Mapping[str, Any], cost: float) -> BatchReply:
        """The reply to a call, from the batch that contains it or from the next one."""
        line = self._lines.get(key)
        if line is None:
            request = {"custom_id": key, "method": "POST", "url": self._service.path, "body": body}
            text = json.dumps(request, ensure_ascii=False, separators=(",", ":"))
            line = self._line(key, text.encode("utf-8", "replace") + b"\n", cost)
            self._lines[key] = self._fresh[key] = line
            self._arrivals += 1
            self._arrived.set()
        try:
            reply = await asyncio.shield(line.future)
        except asyncio.CancelledError:
            if self._fresh.get(key) is line:  # its only caller is gone, so it is not sent
                del self._fresh[key], self._lines[key]
            raise
        finally:
            if line.future.done() and self._lines.get(key) is line:
                del self._lines[key]  # a later call sends it again
        return reply

    def used(self, reply: BatchReply) -> None:
        """Record that a reply is in the ledger, or that there was none. Closes a complete batch."""
        missing = self._missing.get(reply.state.number, set())
        missing.discard(reply.key)
        if not missing and self.book.states[reply.state.number].stage == "ended":
            self.batches.close_book(self.book.states[reply.state.number])

    async def close(self) -> None:
        """Stop polling; the batches continue at the provider."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._service.close()

    # -- waves ---------------------------------------------------------------------------------

    async def _collect(self) -> None:
        while True:
            await self._arrived.wait()
            await self._calm()
            self._arrived.clear()
            try:
                self._leave()
            except UserError as error:
                self._fail(list(self._fresh.values()), error)
                self._fresh.clear()

    async def _calm(self) -> None:
        """Wait until no call has arrived for CALM_TICKS ticks. Rollouts that compute reset them."""
        ticks, before = 0, -1
        while ticks < CALM_TICKS:
            await asyncio.sleep(TICK_S)
            quiet = self._arrivals == before and not self.batches.busy
            ticks, before = (ticks + 1 if quiet else 0), self._arrivals

    def _leave(self) -> None:
        budget = self._budget
        for line in self._fresh.values():
            line.reserved = budget is not None and budget.reserve(line.cost)
            line.sent = line.reserved or budget is None
        lines = [line for line in self._fresh.values() if line.sent]
        for line in lines:
            del self._fresh[line.key]
        if self._fresh and self._budget is not None:
            if not self._budget.reserved:
                raise _too_dear(self._budget, next(iter(self._fresh.values())).cost)
            self.batches.reporter.note(
                f"{len(self._fresh)} of {len(self._fresh) + len(lines)} requests to {self.model} "
                "wait for the real cost of the others: together they might exceed --max-cost"
            )
            self._start(self._look_again())
        for parcel in _parcels(lines, self._most):
            cost = sum(line.cost for line in parcel)
            raws = [line.raw for line in parcel]
            state = self.book.add(self._service.base_url, self.model, raws, cost)
            self._follow(state, parcel, resumed=False)

    async def _look_again(self) -> None:
        await asyncio.sleep(self.batches.poll_s)
        self._arrived.set()

    # -- one batch -----------------------------------------------------------------------------

    def _follow(self, state: BatchState, lines: list[_Line], *, resumed: bool) -> None:
        self._members[state.number] = lines
        self._missing[state.number] = {line.key for line in lines}
        self._start(self._bring(state, resumed))

    async def _bring(self, state: BatchState, resumed: bool) -> None:
        alone = self._most < LINES
        turn: AbstractAsyncContextManager[Any] = self._turn if alone else nullcontext()
        try:
            async with turn:
                state = await self._to_end(state, resumed)
            self._deliver(state)
        except Exception as error:  # noqa: BLE001 - raised again in every waiting call
            self._fail(self._members[state.number], error)

    async def _to_end(self, state: BatchState, resumed: bool) -> BatchState:
        name = f"soulkit-{self.book.run[:12]}-{state.number:04d}.jsonl"
        path = self.book.requests_file(state.number)
        if state.stage == "written":
            file_id = await self._patient(lambda: self._service.upload(path, name))
            state = replace(state, stage="uploaded", file_id=file_id)
            self.book.save(state)
            resumed = False
        if state.stage == "uploaded":
            report = await self._created(state, resumed)
            state = replace(state, stage="created", batch_id=report.id)
            self.book.save(state)
        if state.stage == "created":
            report = await self._ended(state)
            for part, file_id in enumerate(report.files):
                await self._download(file_id, self.book.replies_file(state.number, part))
            state = replace(state, stage="ended", status=report.status, words=report.words)
            self.book.save(state)
        return state

    async def _download(self, file_id: str, path: Path) -> None:
        """Download a file of replies, at most DOWNLOADS times while it has unreadable lines."""
        for left in reversed(range(DOWNLOADS)):
            await self._patient(lambda: self._service.fetch(file_id, path))
            if not left or self.book.is_whole(path):
                return
            await asyncio.sleep(self.batches.poll_s)

    async def _created(self, state: BatchState, resumed: bool) -> BatchReport:
        """Create the batch, unless an unconfirmed one already exists."""
        mark, doubtful = self.book.mark(state), resumed

        async def attempt() -> BatchReport:
            nonlocal doubtful
            if doubtful:
                there = await self._service.search(mark, state.written)
                if there is not None:
                    return there
            doubtful = True
            try:
                return await self._service.create(state.file_id, mark)
            except UserError as error:
                if was_refused(error):
                    self.book.save(replace(state, stage="written"))
                    raise
                # The answer is unreadable, but the batch may exist.
                there = await self._service.search(mark, state.written)
                if there is None:
                    raise _unclear(self._service.base_url, error) from error
                return there

        return await self._patient(attempt)

    async def _ended(self, state: BatchState) -> BatchReport:
        started, status, last = time.monotonic(), "", 0.0
        while True:
            report = await self._patient(lambda: self._service.look(state.batch_id))
            now = time.monotonic()
            if report.status != status or now - last >= SAY_S:
                status, last = report.status, now
                self.batches.reporter.note(_progress_words(report, state, now - started))
            if report.ended:
                return report
            await asyncio.sleep(self.batches.poll_s)

    async def _patient(self, ask: Callable[[], Awaitable[T]]) -> T:
        silence_s, url = self.batches.silence_s, self._service.base_url
        end, pause, told = time.monotonic() + silence_s, min(1.0, self.batches.poll_s), False
        while True:
            try:
                return await ask()
            except ServiceSilent as error:
                wait = max(pause, error.wait_s)
                if time.monotonic() + wait > end:
                    raise _silent(url, error, silence_s) from error
                if not told:
                    self.batches.reporter.note(
                        f"the batch service at {url} does not answer ({error}); retrying for up "
                        f"to {duration(silence_s)}"
                    )
                told = True
                await asyncio.sleep(wait)
                pause = min(60.0, 2 * pause)

    def _deliver(self, state: BatchState) -> None:
        lines, replies = self._members.pop(state.number), self.book.replies(state.number)
        nothing = self._nothing(state, lines, any(line.key in replies for line in lines))
        for line in lines:
            self._release(line)
            outcome = line_outcome(replies.get(line.key), nothing)
            if isinstance(outcome, Fault) and not nothing.retry:
                outcome = nothing  # a cancelled batch must not be sent again
            if not line.future.done():
                line.future.set_result(BatchReply(line.key, state, line.parameters(), outcome))

    def _nothing(self, state: BatchState, lines: Sequence[_Line], some: bool) -> Fault:
        """The fault of a call without a reply line; `some` tells whether other calls have one."""
        count = len(lines)
        if state.status == "completed":  # billed: not sent again if no call has a line
            what = "no line for this request" if some else "no line for any of its requests"
            return Fault(f"batch {state.batch_id} completed with {what}", retry=some)
        words = f"batch {state.batch_id} {state.status}{f': {state.words}' if state.words else ''}"
        if state.status == "failed" and "token_limit" in state.words and count > 1:
            # Over the limit of enqueued tokens: retry in halves, one after the other.
            self._most = min(self._most, max(1, count // 2))
            return Fault(words, probe=True)
        retry = state.status not in ("cancelled", "failed")
        return Fault(words, retry=retry, final=NO_CREDIT.search(state.words) is not None)

    def _fail(self, lines: Iterable[_Line], error: Exception) -> None:
        for line in lines:
            self._release(line)
            if not line.future.done():
                line.future.set_exception(error)
                line.future.exception()  # marks it as retrieved: no caller may be waiting

    def _release(self, line: _Line) -> None:
        if line.reserved and self._budget is not None:
            self._budget.release(line.cost)
        line.reserved = False

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def line_outcome(line: Mapping[str, Any] | None, nothing: Fault) -> transport.Received | Fault:
    """The outcome of a line from the service: a reply with its status, or a fault."""
    if line is None:
        return nothing
    response, error = line.get("response"), line.get("error")
    if isinstance(response, dict) and isinstance(response.get("status_code"), int):
        try:
            text = json.dumps(response.get("body"))
        except RecursionError:
            return Fault("a line of the batch is nested too deeply to be read")
        return transport.Received(response["status_code"], {}, text)
    message = error.get("message") or error.get("code") if isinstance(error, dict) else None
    return Fault(clean_detail(str(message or "a line of the batch has no reply")))


def _parcels(lines: Sequence[_Line], most: int) -> Iterator[list[_Line]]:
    parcel: list[_Line] = []
    size = 0
    for line in lines:
        if parcel and (len(parcel) >= most or size + len(line.raw) > FILE_BYTES):
            yield parcel
            parcel, size = [], 0
        parcel.append(line)
        size += len(line.raw)
    if parcel:
        yield parcel


def _progress_words(report: BatchReport, state: BatchState, seconds: float) -> str:
    """The progress of a batch after `seconds` of waiting."""
    parts = [f"{report.completed} of {report.total or state.requests} done"]
    parts += [f"{report.failed} failed"] if report.failed else []
    parts += [f"{duration(seconds)} elapsed"]
    if report.expires_at and not report.ended:
        parts.append(f"expires in {duration(report.expires_at - time.time())}")
    return f"batch {report.id} of {state.model}: {report.status}, {', '.join(parts)}"


def _silent(base_url: str, error: ServiceSilent, patience_s: float) -> UserError:
    asked = f" and asks to wait {duration(error.wait_s)}" if error.wait_s else ""
    return UserError(
        f"The batch service at {base_url} does not answer{asked}: {error}. A run waits up to "
        f"{duration(patience_s)} for it.",
        "Batches that were sent continue there and are billed; nothing is lost.",
        "Run the same command again later: it continues with these batches.",
    )


def _unclear(base_url: str, error: UserError) -> UserError:
    return UserError(
        f"The batch service at {base_url} gave no readable answer to a new batch. {error.what}",
        "The batch is not in the service's list, but it may exist and be billed.",
        "Run the same command again: it looks for the batch before creating a new one.",
    )


def _too_dear(budget: Budget, cost: float) -> BudgetSpent:
    return BudgetSpent(
        f"The run has spent {budget.spent:.4f} of at most {budget.max_cost:g} US dollars, and the "
        f"next request may cost {cost:.4f}.",
        "The maximum cost of a batch is reserved before it is sent; replies received so far are in "
        "the ledger.",
        "Run the same command with a larger --max-cost, or limit replies with --max-tokens.",
    )
