"""The batches of a run: a book of those that were sent, and the queue of calls that wait for them.

Each step is written down before and after it, so that the same command finds its batches again:

    batches.json    the run's mark, what servers refuse, and every batch with its stage:
                    written ──▶ uploaded ──▶ created ──▶ ended ──▶ used
                    on disk     file id      batch id    replies    replies are in the ledger
    batches/0001.requests.jsonl, 0001.replies.N.jsonl    until the batch is used

Nothing here holds a key or a header.
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

from soulkit.errors import RunError, UserError
from soulkit.models.api import transport
from soulkit.models.api.batch_service import (
    BatchReport,
    BatchService,
    ServiceSilent,
    was_refused,
)
from soulkit.models.api.limits import Budget, BudgetSpent, CallGate
from soulkit.models.api.replies import NO_CREDIT, Fault, clean_detail
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.jsonl import parsed_object, write_aside, write_json
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
    """US dollars that all its replies cost at most; 0 where no price is known."""
    written: float
    """Unix seconds."""
    stage: Stage = "written"
    file_id: str = ""
    batch_id: str = ""
    status: str = ""
    """In the service's words, once it has ended."""
    words: str = ""
    """Why it failed."""


@dataclass
class LearnedLimits:
    """What was learnt of a server by asking it live, and holds for the batches, too."""

    refused: list[str] = field(default_factory=list)
    longest: int | None = None
    """Tokens of a reply that it gives to anybody."""
    taken: list[str] = field(default_factory=list)
    """Sets of parameters of which one request was answered."""


class BatchBook:
    """The batches of the run in `folder`. RunError when its file is damaged."""

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
            book = json.loads(self.path.read_text(encoding="utf-8"))
            self.run = str(book["run"])
            states = [BatchState(**one) for one in book["batches"]]
            self.lore = {name: LearnedLimits(**lore) for name, lore in book["servers"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"'{self.path}' cannot be read: {error}.",
                "It says which batches were sent; without it they would be paid for twice.",
                "Restore the file. To pay for new batches instead, give another folder with --out.",
            ) from error
        self.states = {state.number: state for state in states}

    def lore_of(self, base_url: str, model: str) -> LearnedLimits:
        return self.lore.setdefault(f"{model} at {base_url}", LearnedLimits())

    def save(self, state: BatchState | None = None) -> None:
        """Write everything down, with this new state of a batch."""
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
        """A new batch, its requests on disk."""
        number, requests = max(self.states, default=0) + 1, list(lines)
        write_aside(self.requests_file(number), b"".join(requests))
        state = BatchState(number=number, base_url=base_url, model=model, requests=len(requests),
                           cost_limit=cost_limit, written=time.time())  # fmt: skip
        self.save(state)
        return state

    def mark(self, state: BatchState) -> dict[str, str]:
        """What tells a batch from all others at the service."""
        return {"soulkit_run": self.run, "soulkit_batch": str(state.number)}

    def unused(self) -> Iterator[BatchState]:
        """The batches whose replies are not all in the ledger."""
        return (state for state in self.states.values() if state.stage != "used")

    def take_over(self, base_url: str, model: str) -> list[BatchState]:
        """The unused batches of a model that an earlier process left; each is given once."""
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
        """custom_id and line of each of its requests; RunError when the file is gone or damaged."""
        try:
            with self.requests_file(state.number).open("rb") as stream:
                for line in stream:
                    yield str(json.loads(line)["custom_id"]), line
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"The requests of batch {state.number} cannot be read: {error}.",
                f"'{self.path}' says that it was sent as {state.batch_id or 'a new batch'}.",
                "Restore the folder 'batches', or give another folder with --out.",
            ) from error

    def replies(self, number: int) -> dict[str, Mapping[str, Any]]:
        """custom_id → the service's line. A line that cannot be read is none: it is asked again."""
        lines: dict[str, Mapping[str, Any]] = {}
        for path in sorted(self.files.glob(f"{number:04d}.replies.*.jsonl")):
            with path.open("rb") as stream:
                for line in filter(None, map(parsed_object, stream)):
                    lines.setdefault(str(line.get("custom_id")), line)
        return lines

    def is_whole(self, path: Path) -> bool:
        """Whether a file of replies has lines, and each of them belongs to a request."""
        empty = True
        with path.open("rb") as stream:
            for raw in filter(bytes.strip, stream):
                line = parsed_object(raw)
                if line is None or not isinstance(line.get("custom_id"), str):
                    return False
                empty = False
        return not empty

    def clear(self, state: BatchState) -> None:
        """Remove what the ledger holds by now."""
        for path in self.files.glob(f"{state.number:04d}.*"):
            path.unlink(missing_ok=True)


T = TypeVar("T")
LINES, FILE_BYTES = 50_000, 200_000_000
"""Of one batch at most, as OpenAI has it."""
TICK_S, CALM_TICKS = 0.05, 20
DOWNLOADS = 3
SILENCE_S = 1800.0
"""A service that says nothing for so long is given up; the batch goes on without us."""
SAY_S = 30.0
"""Between two lines about a batch whose state is the same."""


class Batches:
    """All batches of the run in `folder`. `poll_s` are seconds between two looks at a batch; a
    service that does not answer for `silence_s` is given up."""

    def __init__(
        self, folder: Path, *, poll_s: float = 30.0, silence_s: float = SILENCE_S,
        reporter: Reporter = SILENT,
    ) -> None:  # fmt: skip
        self.book, self.poll_s, self.reporter = BatchBook(folder), poll_s, reporter
        self.silence_s = silence_s
        self._live: list[Callable[[], Iterable[CallGate]]] = []

    def watch(self, gates: Callable[[], Iterable[CallGate]]) -> None:
        """No batch leaves while calls are in these gates: their replies may bring more calls."""
        self._live.append(gates)

    @property
    def busy(self) -> bool:
        return any(gate.inside or gate.waiting for gates in self._live for gate in gates())

    def finish(self) -> None:
        """The run is whole: nobody will ask for what is left of its batches."""
        for state in list(self.book.unused()):
            if state.stage == "ended":
                self.close_book(state)

    def close_book(self, state: BatchState) -> None:
        """The ledger holds what the batch brought."""
        self.book.save(replace(state, stage="used"))
        self.book.clear(state)

    def parting_words(self) -> list[str]:
        """What to know of the batches that go on without this process."""
        way_out = f"run the same command again with --out {self.book.path.parent} to take it up"
        lines = []
        for s in self.book.unused():
            about = f"of {s.model} ({s.requests} requests)"
            if s.stage == "created":
                lines.append(
                    f"batch {s.batch_id} {about} goes on at {s.base_url} and is paid for: {way_out}"
                )
            elif s.stage == "uploaded":
                lines.append(f"a batch {about} may go on at {s.base_url}, which was asked for it "
                             f"and did not say: {way_out}")  # fmt: skip
        return lines


@dataclass(frozen=True, slots=True)
class BatchReply:
    """What came of one line."""

    key: str
    state: BatchState
    sent: Mapping[str, Any]
    """The parameters as they were sent, which may have been by an earlier process."""
    outcome: transport.Received | Fault


@dataclass(eq=False)
class _Line:
    """A call that waits, as a line of a file."""

    key: str
    raw: bytes
    cost: float
    """US dollars at most."""
    future: asyncio.Future[BatchReply]
    sent: bool = False
    reserved: bool = False

    def parameters(self) -> dict[str, Any]:
        body = json.loads(self.raw)["body"]
        return {name: value for name, value in body.items() if name not in ("model", "messages")}


class BatchQueue:
    """The calls of one endpoint, from the first wait to the last reply."""

    def __init__(
        self, model: str, batches: Batches, service: BatchService, budget: Budget | None
    ) -> None:
        self.model, self.batches, self.book = model, batches, batches.book
        self._service, self._budget = service, budget
        self._lines: dict[str, _Line] = {}
        self._fresh: dict[str, _Line] = {}
        """Those that are in no batch yet."""
        self._members: dict[int, list[_Line]] = {}
        self._missing: dict[int, set[str]] = {}
        """Batch → the keys whose replies nobody has used yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived, self._arrivals = asyncio.Event(), 0
        self._most, self._turn = LINES, asyncio.Lock()
        self._begun = False

    # -- calls ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take up the batches that an earlier process left, and start to collect."""
        if self._begun:
            return
        self._begun = True
        for state in self.book.take_over(self._service.base_url, self.model):
            if state.stage == "written":  # nobody heard of it: its calls come again by themselves
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
        """Whether a batch or the next wave has this call."""
        return key in self._lines

    async def ask(self, key: str, body: Mapping[str, Any], cost: float) -> BatchReply:
        """The reply to a call: from the batch that has it, else from the next one."""
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
            if self._fresh.get(key) is line:  # nobody waits for it: it is not sent
                del self._fresh[key], self._lines[key]
            raise
        finally:
            if line.future.done() and self._lines.get(key) is line:
                del self._lines[key]  # whoever asks again asks anew
        return reply

    def used(self, reply: BatchReply) -> None:
        """The reply is in the ledger, or was none."""
        missing = self._missing.get(reply.state.number, set())
        missing.discard(reply.key)
        if not missing and self.book.states[reply.state.number].stage == "ended":
            self.batches.close_book(self.book.states[reply.state.number])

    async def close(self) -> None:
        """Stop looking at batches; they go on."""
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
        """Until no call has come for CALM_TICKS turns: seconds also pass while rollouts compute."""
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
                "wait until what the others cost is known: together they might pass --max-cost"
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
        except Exception as error:  # noqa: BLE001 - raised again by each call that waits
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
        """Fetch a file of replies, DOWNLOADS times at most while lines of it cannot be read."""
        for left in reversed(range(DOWNLOADS)):
            await self._patient(lambda: self._service.fetch(file_id, path))
            if not left or self.book.is_whole(path):
                return
            await asyncio.sleep(self.batches.poll_s)

    async def _created(self, state: BatchState, resumed: bool) -> BatchReport:
        """The batch: a new one, unless one may be there that was not heard of."""
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
                # The answer cannot be read: the batch may have been made all the same.
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
                        f"no answer from the batch service at {url} ({error}); asking again for up "
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
                outcome = nothing  # whoever cancelled the batch wants none of it sent again
            if not line.future.done():
                line.future.set_result(BatchReply(line.key, state, line.parameters(), outcome))

    def _nothing(self, state: BatchState, lines: Sequence[_Line], some: bool) -> Fault:
        """Why a call has no line among the replies, where `some` have one."""
        count = len(lines)
        if state.status == "completed":  # paid for: what brought nothing at all is not sent again
            what = "no line for this request" if some else "no line for any of its requests"
            return Fault(f"batch {state.batch_id} completed with {what}", retry=some)
        words = f"batch {state.batch_id} {state.status}{f': {state.words}' if state.words else ''}"
        if state.status == "failed" and "token_limit" in state.words and count > 1:
            # More tokens than may wait at once: in halves, one after the other. This ends.
            self._most = min(self._most, max(1, count // 2))
            return Fault(words, probe=True)
        retry = state.status not in ("cancelled", "failed")
        return Fault(words, retry=retry, final=NO_CREDIT.search(state.words) is not None)

    def _fail(self, lines: Iterable[_Line], error: Exception) -> None:
        for line in lines:
            self._release(line)
            if not line.future.done():
                line.future.set_exception(error)
                line.future.exception()  # seen: there may be nobody who waits

    def _release(self, line: _Line) -> None:
        if line.reserved and self._budget is not None:
            self._budget.release(line.cost)
        line.reserved = False

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def line_outcome(line: Mapping[str, Any] | None, nothing: Fault) -> transport.Received | Fault:
    """What a line of the service says: a reply with its status, or why there is none."""
    if line is None:
        return nothing
    response, error = line.get("response"), line.get("error")
    if isinstance(response, dict) and isinstance(response.get("status_code"), int):
        try:
            text = json.dumps(response.get("body"), ensure_ascii=False)
        except RecursionError:
            return Fault("a line of the batch too deep to be read")
        return transport.Received(response["status_code"], {}, text)
    message = error.get("message") or error.get("code") if isinstance(error, dict) else None
    return Fault(clean_detail(str(message or "a line of the batch without a reply")))


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
    """How far a batch is, after `seconds` of waiting for it."""
    parts = [f"{report.completed} of {report.total or state.requests} done"]
    parts += [f"{report.failed} failed"] if report.failed else []
    parts += [f"{duration(seconds)} here"]
    if report.expires_at and not report.ended:
        parts.append(f"expires in {duration(report.expires_at - time.time())}")
    return f"batch {report.id} of {state.model}: {report.status}, {', '.join(parts)}"


def _silent(base_url: str, error: ServiceSilent, patience_s: float) -> UserError:
    asked = f" and asks to wait {duration(error.wait_s)}" if error.wait_s else ""
    return UserError(
        f"The batch service at {base_url} does not answer{asked}: {error}. A run waits "
        f"{duration(patience_s)} for it.",
        "Batches that were sent go on there and are paid for; nothing is lost.",
        "Run the same command again when it answers: the batches are taken up.",
    )


def _unclear(base_url: str, error: UserError) -> UserError:
    return UserError(
        f"The batch service at {base_url} gave no readable answer when a batch was made. "
        f"{error.what}",
        "Its list of batches does not show the batch, but it may have been made, and be paid for.",
        "Run the same command again: it looks for the batch before it makes a new one.",
    )


def _too_dear(budget: Budget, cost: float) -> BudgetSpent:
    return BudgetSpent(
        f"The run has spent {budget.spent:.4f} US dollars of the {budget.max_cost:g} that it may "
        f"cost, and the next request may cost {cost:.4f}.",
        "What a batch costs at most is reserved before it is sent; replies that came are in the "
        "ledger.",
        "Run the same command with a larger --max-cost, or bound replies with --max-tokens.",
    )
