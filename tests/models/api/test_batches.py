"""Calls by batch against a real batch service: prices, parts, refusals, silence, budgets, kills."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ContextOverflow, ProviderError, RunError, UserError
from soulkit.models.api import batches
from soulkit.models.api.batch_endpoint import ROUNDS, BatchEndpoint
from soulkit.models.api.batch_service import NoBatchService
from soulkit.models.api.batches import BatchBook, Batches
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.limits import Budget, BudgetSpent
from soulkit.models.api.probing import EndpointRefused, Preflight
from soulkit.models.api.replies import Fault as AnyFault
from soulkit.models.ledger.ledger import Ledger
from soulkit.play.engine import gather
from soulkit.reporting import SILENT, Reporter
from soulkit.types import Call, Completion, Sampling, Segment
from tests.support.reporting import Heard
from tests.support.servers.batch_server import Batch, BatchServer, Ending
from tests.support.servers.openai_server import Fault

SECRET = "sk-test-0123456789abcdef0123456789"
SAMPLING = Sampling(max_tokens=20)
LIMIT = 20 * 10.0 / 1e6
"""What a reply costs at most by itself, live."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "TICK_S", 0.002)


def ask(
    server: BatchServer, folder: Path, count: int = 6, *, reporter: Reporter = SILENT,
    silence_s: float = 5.0, start: int = 0, sampling: Sampling = SAMPLING, **settings: Any,
) -> list[Completion | BaseException]:  # fmt: skip
    """The replies to so many calls, or what went wrong with each, as one process gets them."""

    async def scene() -> list[Completion | BaseException]:
        batches = Batches(folder, poll_s=0.01, silence_s=silence_s, reporter=reporter)
        with Ledger(folder / "ledger.sqlite") as ledger:
            model = BatchEndpoint(batches=batches, ledger=ledger, **_settings(server, settings))
            calls = [
                model.complete((Segment("user", f"question {i}"),), sampling, call(i))
                for i in range(start, start + count)
            ]
            try:
                replies = await asyncio.gather(*calls, return_exceptions=True)
            finally:
                await model.close()
            return list(replies)

    return asyncio.run(scene())


def _settings(server: BatchServer, settings: dict[str, Any]) -> dict[str, Any]:
    usual = {"model": "m", "base_url": server.base_url, "backoff_s": 0.0, "price_in": 1.0,
             "price_out": 10.0}  # fmt: skip
    return usual | settings


def call(index: int) -> Call:
    return Call(role="judge", example_id=f"e{index}")


def texts(replies: list[Completion | BaseException]) -> list[str]:
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply
    return [reply.text for reply in replies if isinstance(reply, Completion)]


def paid_once(server: BatchServer, count: int) -> None:
    """Every call was paid for once: the first one live, the others in batches."""
    assert len(server.live) == 1 and len(server.paid) == count - 1
    assert set(server.paid.values()) == {1}


def test_replies_are_those_of_the_live_road_at_half_the_price(tmp_path: Path) -> None:
    with BatchServer() as server:
        replies = ask(server, tmp_path / "batch", 6)
        paid_once(server, 6)

        async def live() -> list[Completion]:
            with Ledger(tmp_path / "live.sqlite") as ledger:
                model = Endpoint(ledger=ledger, **_settings(server, {}))
                done = await gather(
                    model.complete((Segment("user", f"question {i}"),), SAMPLING, call(i))
                    for i in range(6)
                )
                await model.close()
                return done

        usual = asyncio.run(live())
    assert texts(replies) == [reply.text for reply in usual]
    ways, keys = look(tmp_path / "batch" / "ledger.sqlite")
    assert keys == look(tmp_path / "live.sqlite")[1]
    costs = [one.usage.cost or 0 for one in replies if isinstance(one, Completion)]
    for i, (cost, whole) in enumerate(zip(costs, usual, strict=True)):
        assert cost == pytest.approx((whole.usage.cost or 0) / (1 if i == 0 else 2))
    assert ways.count(None) == 1 and ways.count("batch_0") == 5
    assert not list((tmp_path / "batch" / "batches").iterdir())


def look(path: Path) -> tuple[list[str | None], set[str]]:
    """How each reply of a ledger came, and the keys."""
    db = sqlite3.connect(path)
    rows = db.execute(
        "SELECT key, body FROM calls JOIN settings ON calls.settings = settings.digest"
    ).fetchall()
    db.close()
    ways = [json.loads(body).get("beside", {}).get("batch") for _, body in rows]
    return ways, {key for key, _ in rows}


def strict(body: dict[str, Any]) -> Fault | None:
    if "temperature" not in body:
        return None
    return Fault.status_error(400, "Unsupported parameter: temperature", param="temperature",
                              code="unsupported_parameter")  # fmt: skip


def test_what_a_server_refuses_is_learnt_live(tmp_path: Path) -> None:
    with BatchServer(live=strict, lines=lambda batch, body: strict(body)) as server:
        first = ask(server, tmp_path, 4)
        assert len(server.batches) == 1 and len(server.live) == 1
        ask(server, tmp_path, 3, start=4)  # a later process asks nothing live
        assert len(server.batches) == 2 and len(server.live) == 1
    assert {one.dropped for one in first if isinstance(one, Completion)} == {("temperature",)}


def test_a_refusal_in_a_batch_is_mended_in_the_next(tmp_path: Path) -> None:
    with BatchServer(lines=lambda batch, body: strict(body)) as server:
        replies = ask(server, tmp_path, 4)
        assert [len(batch.lines) for batch in server.batches] == [3, 3]
    dropped = [one.dropped for one in replies if isinstance(one, Completion)]
    assert dropped == [(), *[("temperature",)] * 3]


def test_lines_that_an_expired_batch_left_go_into_the_next(tmp_path: Path) -> None:
    def ends(batch: Batch) -> Ending:
        return Ending("expired", 3) if batch.number == 0 else Ending()

    with BatchServer(ends=ends) as server:
        assert len(texts(ask(server, tmp_path, 8))) == 8
        assert [len(batch.lines) for batch in server.batches] == [7, 4]
        paid_once(server, 8)


def test_a_call_that_never_fits_the_window_fails_in_the_services_words(tmp_path: Path) -> None:
    with BatchServer(ends=lambda batch: Ending("expired", 0)) as server:
        replies = ask(server, tmp_path, 3)
        assert len(server.batches) == ROUNDS
    assert isinstance(replies[0], Completion)
    assert all(isinstance(one, ProviderError) and "window" in str(one) for one in replies[1:])


def test_a_cancelled_batch_is_not_sent_again(tmp_path: Path) -> None:
    with BatchServer(ends=lambda batch: Ending("cancelled", 1)) as server:
        replies = ask(server, tmp_path, 4)
        assert len(server.batches) == 1
    assert sum(isinstance(one, Completion) for one in replies) == 2
    lost = [str(one) for one in replies if isinstance(one, ProviderError)]
    assert len(lost) == 2


def test_a_batch_of_too_many_tokens_goes_in_halves_one_after_the_other(tmp_path: Path) -> None:
    together: list[int] = []

    def ends(batch: Batch) -> Ending:
        together.append(sum(one.status not in ("completed", "failed") for one in server.batches))
        many = len(batch.lines) > 2
        return Ending("failed", 0, "token_limit_exceeded") if many else Ending()

    with BatchServer(ends=ends) as server:
        assert len(texts(ask(server, tmp_path, 9))) == 9
        paid_once(server, 9)
    assert [len(batch.lines) for batch in server.batches] == [8, 4, 4, 2, 2, 2, 2]
    assert max(together) == 1


def test_a_batch_that_the_service_will_not_have_says_why(tmp_path: Path) -> None:
    with BatchServer(ends=lambda batch: Ending("failed", 0, "billing_hard_limit")) as server:
        replies = ask(server, tmp_path, 3)
        assert len(server.batches) == 1
    assert all("billing_hard_limit: the provider's reason" in str(one) for one in replies[1:])


def test_lines_that_break_are_asked_again_and_others_are_what_they_are(tmp_path: Path) -> None:
    faults = {
        "question 1": Fault.status_error(429, "slow down"), "question 2": Fault.status_error(500),
        "question 3": Fault.closed(),
    }  # fmt: skip
    forever = {
        "question 4": Fault.status_error(400, "This model's maximum context length is 9 tokens"),
        "question 5": Fault.status_error(400, "not like that"),
    }

    def lines(batch: Batch, body: dict[str, Any]) -> Fault | None:
        question = body["messages"][0]["content"]
        return forever.get(question) or (faults.get(question) if batch.number == 0 else None)

    with BatchServer(lines=lines) as server:
        replies = ask(server, tmp_path, 7)
        assert [len(batch.lines) for batch in server.batches] == [6, 3]
    assert isinstance(replies[4], ContextOverflow) and isinstance(replies[5], ProviderError)
    assert "not like that" in str(replies[5])
    assert len(texts([*replies[:4], replies[6]])) == 5
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    attempts = dict(db.execute("SELECT example_id, attempts FROM calls").fetchall())
    db.close()
    assert attempts == {"e0": 1, "e1": 2, "e2": 2, "e3": 2, "e6": 1}


def test_a_creation_that_nobody_heard_of_is_found_again(tmp_path: Path) -> None:
    def service(request: str, index: int) -> str:
        return "hang up" if (request, index) == ("POST /batches", 0) else ""

    with BatchServer(service=service) as server:
        assert len(texts(ask(server, tmp_path, 5))) == 5
        assert server.requests["POST /batches"] == 1 == len(server.batches)
        paid_once(server, 5)


def test_a_service_that_is_busy_is_waited_for(tmp_path: Path) -> None:
    busy = {(kind, index) for kind in ("POST /files", "POST /batches", "GET /batches/ID",
                                       "GET /files/ID/content") for index in range(2)}  # fmt: skip

    def service(request: str, index: int) -> str:
        return "refuse" if (request, index) in busy else ""

    with BatchServer(service=service) as server:
        assert len(texts(ask(server, tmp_path, 5))) == 5
        assert len(server.batches) == 1
        paid_once(server, 5)


def test_a_silent_service_stops_the_run_and_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = True

    def service(request: str, index: int) -> str:
        return "hang up" if silent and request == "GET /batches/ID" else ""

    monkeypatch.setenv("BATCH_KEY", SECRET)
    settings = {"api_key_env": "BATCH_KEY"}
    with BatchServer(service=service, key=SECRET) as server:
        replies = ask(server, tmp_path, 4, silence_s=0.05, **settings)
        errors = [one for one in replies[1:] if isinstance(one, UserError)]
        assert len(errors) == 3 and "does not answer" in str(errors[0])
        words = Batches(tmp_path).parting_words()
        assert len(words) == 1 and "batch_0" in words[0] and str(tmp_path) in words[0]
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) > 2 and not [p for p in files if SECRET.encode() in p.read_bytes()]
        silent = False
        assert len(texts(ask(server, tmp_path, 4, **settings))) == 4
        assert len(server.batches) == 1
        paid_once(server, 4)
    assert Batches(tmp_path).parting_words() == []


@pytest.mark.parametrize("junk", [b"<html>busy</html>", b"{}"])
@pytest.mark.parametrize(
    "asked", ["POST /v1/batches", "GET /v1/batches/batch_0", "GET /v1/files/file_1/content"]
)
def test_junk_about_a_batch_that_exists_is_asked_for_again(
    asked: str, junk: bytes, tmp_path: Path
) -> None:
    seen: list[str] = []
    progress: list[str] = []
    with BatchServer() as server:
        usual = server.handle

        def handle(method: str, path: str, raw: bytes, kind: str) -> tuple[int, Any]:
            reply = usual(method, path, raw, kind)  # what is asked for is done all the same
            seen.append(f"{method} {path}")
            return (200, junk) if seen[-1] == asked and seen.count(asked) == 1 else reply

        server.handle = handle  # type: ignore[method-assign]
        assert len(texts(ask(server, tmp_path, 5, reporter=Heard(progress)))) == 5
        assert len(server.batches) == 1
        paid_once(server, 5)
    assert asked.startswith("POST") or seen.count(asked) > 1
    polled = asked == "GET /v1/batches/batch_0"
    assert polled == any(line.startswith("the batch service at") for line in progress)


def test_a_file_of_replies_that_came_cut_is_fetched_again(tmp_path: Path) -> None:
    """The line that cannot be read would be sent, and paid for, a second time."""
    fetched: list[str] = []
    with BatchServer() as server:
        usual = server.handle

        def handle(method: str, path: str, raw: bytes, kind: str) -> tuple[int, Any]:
            status, reply = usual(method, path, raw, kind)
            if path.endswith("/content"):
                fetched.append(path)
                reply = reply[:-40] if len(fetched) == 1 else reply
            return status, reply

        server.handle = handle  # type: ignore[method-assign]
        assert len(texts(ask(server, tmp_path, 5))) == 5
        assert len(server.batches) == 1 and len(fetched) == 2
        paid_once(server, 5)


def test_junk_without_end_is_no_reason_to_pay_live(tmp_path: Path) -> None:
    with BatchServer() as server:
        usual = server.handle

        def handle(method: str, path: str, raw: bytes, kind: str) -> tuple[int, Any]:
            junk = (method, path) == ("GET", "/v1/batches/batch_0")
            return (200, {}) if junk else usual(method, path, raw, kind)

        server.handle = handle  # type: ignore[method-assign]
        replies = ask(server, tmp_path, 3, silence_s=0.05)
        assert server.requests["GET /batches/ID"] > 1
        assert all("does not answer" in str(one) for one in replies[1:])
        assert not any("--batch" in str(one) for one in replies[1:])
        server.handle = usual  # type: ignore[method-assign]
        assert len(texts(ask(server, tmp_path, 3))) == 3
        paid_once(server, 3)


def test_a_wait_beyond_the_patience_with_a_batch_is_not_begun(tmp_path: Path) -> None:
    limit = {"error": {"message": "Rate limit reached. Please try again in 2h0m0s.", "code": "x"}}
    with BatchServer() as server:
        usual = server.handle

        def handle(method: str, path: str, raw: bytes, kind: str) -> tuple[int, Any]:
            polled = (method, path) == ("GET", "/v1/batches/batch_0")
            return (429, limit) if polled else usual(method, path, raw, kind)

        server.handle = handle  # type: ignore[method-assign]
        replies = ask(server, tmp_path, 2, silence_s=60.0)
    assert "asks to wait 2 h 00 min" in str(replies[1]) and "waits up to 1 min" in str(replies[1])


def test_an_address_without_the_service_is_named(tmp_path: Path) -> None:
    def service(request: str, index: int) -> str:
        return "unknown" if request == "POST /files" else ""

    with BatchServer(service=service) as server:
        replies = ask(server, tmp_path, 3)
    assert all(isinstance(one, NoBatchService) for one in replies[1:])
    assert server.base_url in str(replies[1])


def test_a_wrong_key_is_found_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRONG_KEY", "sk-wrong-0123456789abcdef")
    with BatchServer(key="right") as server:
        replies = ask(server, tmp_path, 30, api_key_env="WRONG_KEY")
        assert server.requests["POST /chat/completions"] == 3
        assert not server.files
    assert all(isinstance(one, ProviderError) and "401" in str(one) for one in replies)


def test_a_wave_costs_at_most_what_is_left(tmp_path: Path) -> None:
    half = LIMIT / 2 + 7 / 2e6  # of a batch: the reply's limit and about seven tokens of prompt
    budget = Budget(0.00002 + 3.5 * half)
    lines: list[str] = []
    with BatchServer(answer=lambda body: "B") as server:
        replies = ask(server, tmp_path, 9, budget=budget, reporter=Heard(lines))
        assert len(texts(replies)) == 9
        assert len(server.batches[0].lines) == 3 and len(server.batches) > 1
        paid_once(server, 9)
    assert any("wait for the real cost of the others" in line for line in lines)
    assert budget.reserved == pytest.approx(0) and budget.spent <= budget.max_cost


def test_what_does_not_fit_stops_the_run(tmp_path: Path) -> None:
    with BatchServer() as server:
        replies = ask(server, tmp_path, 4, budget=Budget(LIMIT / 3))
        assert not server.batches
        assert all(isinstance(one, BudgetSpent) for one in replies[1:])
        assert len(texts(ask(server, tmp_path, 4, budget=Budget(10 * LIMIT)))) == 4
        paid_once(server, 4)


def test_a_wave_beyond_the_services_limit_is_several_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "LINES", 4)
    with BatchServer() as server:
        assert len(texts(ask(server, tmp_path / "lines", 10))) == 10
        assert sorted(len(batch.lines) for batch in server.batches) == [1, 4, 4]
    monkeypatch.setattr(batches, "FILE_BYTES", 600)
    with BatchServer() as server:
        assert len(texts(ask(server, tmp_path / "bytes", 10))) == 10
        assert len(server.batches) > 3
        assert max(len(server.files[batch.input_file_id]) for batch in server.batches) <= 600


class Liar(BatchServer):
    """What it gives as the replies of a batch is `turned` first."""

    def __init__(self, turned: Callable[[bytes], bytes], **settings: Any) -> None:
        self.turned = turned
        super().__init__(**settings)

    def store(self, lines: list[dict[str, Any]]) -> str:
        name = super().store(lines)
        self.files[name] = self.turned(self.files[name])
        return name


@pytest.mark.parametrize(
    "turned",
    [
        lambda raw: raw.replace(b'"custom_id": "', b'"custom_id": "another'),
        lambda raw: b"\xff\xfe\x00 garbage\n[]\n1\n{}\n" + b"[" * 20_000,
    ],
)
def test_a_batch_that_is_about_something_else_is_paid_for_once(
    turned: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    with Liar(turned) as server:
        replies = ask(server, tmp_path, 4)
        assert len(server.batches) == 1
    assert isinstance(replies[0], Completion)
    assert all("batch_0 completed with no line for any" in str(one) for one in replies[1:])


def test_a_line_too_deep_to_be_read_is_a_fault() -> None:
    body: list[Any] = []
    for _ in range(100_000):
        body = [body]
    line = {"response": {"status_code": 200, "body": body}}
    outcome = batches.line_outcome(line, AnyFault("nothing"))
    assert isinstance(outcome, AnyFault) and "too deep" in outcome.detail


def test_lines_that_come_several_times_count_once(tmp_path: Path) -> None:
    with Liar(lambda raw: raw * 3) as server:
        assert len(texts(ask(server, tmp_path, 4))) == 4
    assert len(look(tmp_path / "ledger.sqlite")[1]) == 4


def test_a_batch_that_was_refused_is_not_said_to_go_on(tmp_path: Path) -> None:
    refusing = True
    with BatchServer() as server:
        usual = server.handle

        def handle(method: str, path: str, raw: bytes, kind: str) -> tuple[int, Any]:
            if refusing and (method, path) == ("POST", "/v1/batches"):
                return 400, {"error": {"message": "no batches of m"}}
            return usual(method, path, raw, kind)

        server.handle = handle  # type: ignore[method-assign]
        replies = ask(server, tmp_path, 4)
        assert all("no batches of m" in str(one) for one in replies[1:])
        assert Batches(tmp_path).parting_words() == []
        refusing = False
        assert len(texts(ask(server, tmp_path, 4))) == 4
        paid_once(server, 4)


def test_a_key_that_is_revoked_while_a_batch_runs_stops_the_run(tmp_path: Path) -> None:
    revoked = Fault.status_error(401, "revoked")
    progress: list[str] = []
    with BatchServer(lines=lambda batch, body: revoked) as server:
        usual = server.complete

        def complete(body: dict[str, Any]) -> tuple[int, Any]:
            return (401, json.loads(revoked.raw or b"")) if server.batches else usual(body)

        server.complete = complete  # type: ignore[method-assign]
        replies = ask(server, tmp_path, 4, preflight=Preflight(Heard(progress)))
    assert isinstance(replies[0], Completion) and progress[0].startswith("answered: m at")
    assert all(isinstance(one, EndpointRefused) and "rejects the key" in str(one)
               for one in replies[1:])  # fmt: skip


def test_nothing_stays_reserved_of_what_was_given_back() -> None:
    budget, costs = Budget(1.0), (0.1, 0.2, 0.3)
    assert all(budget.reserve(cost) for cost in costs) and budget.reserved > 0.5
    for cost in costs:
        budget.release(cost)
    assert budget.reserved == 0.0


def test_a_batch_is_taken_over_once(tmp_path: Path) -> None:
    """Two keys of one model are two queues."""
    earlier = BatchBook(tmp_path)
    earlier.add("http://a/v1", "m", [b"{}"], 0.0)
    book = BatchBook(tmp_path)
    assert [one.number for one in book.take_over("http://a/v1", "m")] == [1]
    book.add("http://a/v1", "m", [b"{}"], 0.0)
    assert book.take_over("http://a/v1", "m") == []


def test_a_damaged_file_of_requests_is_named(tmp_path: Path) -> None:
    book = BatchBook(tmp_path)
    state = book.add("http://a/v1", "m", [b"{no json\n"], 0.0)
    with pytest.raises(RunError, match="requests of batch 1 cannot be read"):
        list(book.requests(state))


@pytest.mark.parametrize("odd", [
    {"batches": 5}, {"batches": [{"number": 1}]}, {"servers": {"a": {"refused": 1}}},
    *({name: value} for name, value in (("number", []), ("base_url", {}), ("requests", None),
                                        ("cost_limit", "x"), ("batch_id", None))),
], ids=str)  # fmt: skip
def test_a_damaged_book_is_not_guessed_at(tmp_path: Path, odd: dict[str, Any]) -> None:
    BatchBook(tmp_path).add("http://a/v1", "m", [b"{}"], 0.0)
    book = json.loads((tmp_path / "batches.json").read_text())
    book |= odd if odd.keys() <= book.keys() else {"batches": [{**book["batches"][0], **odd}]}
    (tmp_path / "batches.json").write_text(json.dumps(book))
    with pytest.raises(RunError, match=r"batches\.json"):
        Batches(tmp_path)


@pytest.mark.parametrize(
    "where", ["POST /files", "POST /batches", "GET /batches/ID", "GET /files/ID/content"]
)
def test_a_process_that_ends_anywhere_pays_for_nothing_twice(where: str, tmp_path: Path) -> None:
    """What is on disk when a process ends in the middle of a request is enough for the next."""

    def service(request: str, index: int) -> str:
        return "stall" if (request, index) == (where, 0) else ""

    async def interrupted(server: BatchServer) -> None:
        running = asyncio.create_task(asyncio.to_thread(server.stalled.wait, 60))
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            batches = Batches(tmp_path, poll_s=0.01)
            model = BatchEndpoint(batches=batches, ledger=ledger, **_settings(server, {}))
            calls = asyncio.gather(*(
                model.complete((Segment("user", f"question {i}"),), SAMPLING, call(i))
                for i in range(6)
            ))  # fmt: skip
            await running
            calls.cancel()
            await asyncio.gather(calls, return_exceptions=True)
            await model.close()

    with BatchServer(service=service) as server:
        asyncio.run(interrupted(server))
        server.go_on.set()
        assert len(texts(ask(server, tmp_path, 6))) == 6
        assert len(server.batches) == 1
        paid_once(server, 6)
    assert Batches(tmp_path).parting_words() == []
