"""The ledger: nothing is paid for twice, not even after kill -9, and replays need no network.

Seat and purpose tell calls apart; a call without them is the one from before there were any.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.errors import ProviderError, RunError
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.wire import sent_seed
from soulkit.models.ledger.ledger import (
    LayeredLedger,
    Ledger,
    LedgerEntry,
    ReplayMiss,
    request_key,
    request_of,
)
from soulkit.models.ledger.view import LedgerView
from soulkit.models.local.draw import uniforms
from soulkit.types import Call, Completion, Sampling
from tests.models import asking
from tests.models.ledger.test_storage import closing_db, filled
from tests.support.ledger_writer import entry_of
from tests.support.servers.openai_server import Fault, ScriptedServer

CALL = Call(role="judge", example_id="e1")
PLAIN = Sampling(max_tokens=512)
ENTRY = LedgerEntry(
    model="m", call=CALL, reply='{"x": 1}', dropped=("seed",), prompt_tokens=3, completion_tokens=4,
    cost=None, seconds=0.5, attempts=2, created="2025-01-01T00:00:00.000+00:00",
)  # fmt: skip
REQUEST = request_of("u", [{"role": "user", "content": "a"}], PLAIN)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(url: str, ledger: Ledger, call: Call = CALL, **settings: Any) -> Completion:
    model = Endpoint(model="m", base_url=url, ledger=ledger, backoff_s=0.0, **settings)
    return asking.ask(model, call=call)


def test_store_and_lookup(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "led%20ger?.sqlite"
    with Ledger(path) as ledger:
        assert ledger.lookup("k", model="m", call=CALL) is None
        assert ledger.store("k", ENTRY, REQUEST) == ENTRY
        assert ledger.store("k", replace(ENTRY, reply="{}"), REQUEST) == ENTRY, (
            "the first reply stays"
        )
    assert path.is_file()
    with Ledger(path) as ledger:
        assert ledger.lookup("k", model="m", call=CALL) == ENTRY


def test_totals(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        empty = {"calls": 0, "prompt_tokens": 0, "completion_tokens": 0, "cost": None}
        assert ledger.totals() == {**empty, "unpriced": 0, "hits": 0, "by_role": {}}
        ledger.store("a", ENTRY, REQUEST)
        ledger.store("b", replace(ENTRY, cost=0.25), REQUEST)
        ledger.store("c", replace(ENTRY, cost=0.5, call=replace(CALL, role="coach")), REQUEST)
        ledger.lookup("a", model="m", call=CALL)
        judge = {"calls": 2, "prompt_tokens": 6, "completion_tokens": 8, "cost": 0.25}
        coach = {"calls": 1, "prompt_tokens": 3, "completion_tokens": 4, "cost": 0.5}
        whole = {"calls": 3, "prompt_tokens": 9, "completion_tokens": 12, "cost": 0.75}
        roles = {"judge": judge, "coach": coach}
        assert ledger.totals() == {**whole, "unpriced": 1, "hits": 1, "by_role": roles}


def test_record_then_replay_without_network(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    script = {0: Fault.status_error(500)}
    with ScriptedServer(profile="strict-reasoning", script=script) as server:
        url = server.base_url
        with Ledger(path) as ledger:
            first = ask(url, ledger, price_in=1.0, price_out=1.0)
            assert ask(url, ledger) == first
            assert ledger.totals()["hits"] == 1
    assert len(server.requests) == 4, "a fault, two refusals, and one paid answer"
    assert first.dropped == ("temperature",)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT attempts, role FROM calls").fetchall() == [(4, "judge")]
    with Ledger(path, mode="replay") as ledger:
        assert ask(url, ledger) == first


def test_replay_misses_name_the_call(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    Ledger(path).close()
    with ScriptedServer() as server, Ledger(path, mode="replay") as ledger:
        with pytest.raises(ReplayMiss) as caught:
            ask(server.base_url, ledger, replace(CALL, rollout=7))
        with pytest.raises(RunError):
            ledger.store("k", ENTRY, REQUEST)
        with pytest.raises(ReplayMiss):  # and no key is asked for
            ask("https://api.example.org/v1", ledger)
    assert "role judge, example e1, rollout 7" in caught.value.what
    assert server.requests == []


@pytest.mark.parametrize("frozen", [False, True])
def test_replay_from_an_archive_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    folder = tmp_path / "archive"
    path = folder / "l.sqlite"
    with Ledger(path) as ledger:
        ledger.store("k", ENTRY, REQUEST)
    before = path.read_bytes()
    if frozen:  # permissions do not hold the superuser back, who may run the tests
        monkeypatch.setattr(os, "access", lambda *_: False)
    with Ledger(path, mode="replay") as ledger:
        assert ledger.lookup("k", model="m", call=CALL) == ENTRY
    assert path.read_bytes() == before
    assert [p.name for p in folder.iterdir()] == ["l.sqlite"]


def test_off_does_nothing() -> None:
    with ScriptedServer() as server, Ledger(None, mode="off") as ledger:
        ask(server.base_url, ledger)
        ask(server.base_url, ledger)
        assert ledger.totals()["calls"] == 0
    assert len(server.requests) == 2


def test_failures_are_not_stored(tmp_path: Path) -> None:
    script = {0: Fault.status_error(404)}
    with ScriptedServer(script=script) as server, Ledger(tmp_path / "l.sqlite") as ledger:
        with pytest.raises(ProviderError):
            ask(server.base_url, ledger)
        assert ledger.totals()["calls"] == 0
        assert ask(server.base_url, ledger).text


@pytest.mark.parametrize("mode", ["record", "replay"])
def test_unusable_files(tmp_path: Path, mode: Any) -> None:
    text = tmp_path / "text"
    text.write_text("this is no database " * 100)
    with pytest.raises(RunError):
        Ledger(text, mode=mode)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE things (a)")
    with pytest.raises(RunError, match="it is not a ledger"):
        Ledger(other, mode=mode)
    for path in (tmp_path, None):
        with pytest.raises(RunError):
            Ledger(path, mode=mode)


def test_missing_file_is_not_created_by_a_replay(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        Ledger(tmp_path / "l.sqlite", mode="replay")
    assert list(tmp_path.iterdir()) == []


def test_closed_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.close()
    ledger.close()
    with pytest.raises(RunError, match="closed"):
        ledger.lookup("k", model="m", call=CALL)


def test_threads_and_connections_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    with Ledger(path) as one, Ledger(path) as two:

        def write(ledger: Ledger, offset: int) -> None:
            for i in range(25):
                ledger.store(f"k{offset + i}", ENTRY, REQUEST)

        jobs = [(one, 0), (one, 25), (two, 50), (two, 60)]
        threads = [threading.Thread(target=write, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.totals()["calls"] == two.totals()["calls"] == 85


def _key(
    sampling: Sampling = PLAIN, call: Call = CALL, base_url: str = "u", model: str = "m",
    messages: Sequence[Mapping[str, str]] = ({"role": "user", "content": "a"},),
) -> str:  # fmt: skip
    return request_key(request_of(base_url, messages, sampling), model, call)


def test_everything_that_matters_is_in_the_key() -> None:
    calls: list[dict[str, Any]] = [
        {"role": "coach"}, {"example_id": "e2"}, {"rollout": 1}, {"kind": "refined"},
        {"turn": 1}, {"sample": 1}, {"step": 1},
    ]  # fmt: skip
    samplings = [replace(PLAIN, seed=1), replace(PLAIN, temperature=0.0)]
    samplings += [replace(PLAIN, thinking=False), replace(PLAIN, max_tokens=8192)]
    keys = [
        _key(),
        _key(base_url="v"),
        _key(model="n"),
        _key(messages=[{"role": "user", "content": "b"}]),
        *(_key(call=replace(CALL, **change)) for change in calls),
        *(_key(sampling=sampling) for sampling in samplings),
    ]
    assert len(set(keys)) == len(keys) == 15
    assert _key(messages=[{"content": "a", "role": "user"}]) == _key()
    assert _key() == "44676b3c0616144e14422a1ba0c5cbf3450bc3c4a9f809148ed0a255a1ce685b"


@given(st.text(), st.text())
def test_keys_tell_texts_apart(a: str, b: str) -> None:
    one, two = (_key(messages=[{"role": "user", "content": text}]) for text in (a, b))
    assert (one == two) == (a == b)


PARTNER = Call(role="partner", example_id="e", rollout=2, kind="refined", turn=3, sample=1, step=4)
NAMED = (
    replace(PARTNER, seat="ann"), replace(PARTNER, purpose="ann"),
    replace(PARTNER, seat="ann", purpose="b"),
    replace(PARTNER, seat="annb"), replace(PARTNER, seat="bob"),
)  # fmt: skip


def key_of(call: Call) -> str:
    messages = [{"role": "user", "content": "x"}]
    return request_key(request_of("u", messages, Sampling()), "m", call)


def test_a_call_without_seat_keeps_key_seed_and_stream() -> None:
    """The figures are those of the version before seats."""
    assert key_of(PARTNER) == "61030691fff9dee4c572ed89a8343f7f7d8bf7a01b07e02ee0d36a1fb86db036"
    assert sent_seed(7, PARTNER) == 1386035217
    assert uniforms(7, PARTNER, 2).tolist() == [0.21696883593972516, 0.37258861845499036]


def test_seat_and_purpose_have_keys_seeds_and_streams_of_their_own() -> None:
    calls = (PARTNER, *NAMED)
    assert len({key_of(call) for call in calls}) == len(calls)
    assert len({sent_seed(7, call) for call in calls}) == len(calls)
    assert len({uniforms(7, call, 1)[0] for call in calls}) == len(calls)


def test_a_ledger_keeps_seat_and_purpose(tmp_path: Path) -> None:
    path = filled(tmp_path / "l.sqlite", 3)
    _, entry, request = entry_of(1)
    with Ledger(path) as ledger:
        for call in (replace(entry.call, seat="ann", purpose="p"), replace(entry.call, seat="bo")):
            ledger.store(request_key(request, "m", call), replace(entry, call=call), request)
    with LedgerView(path) as view:
        assert not view.verify().counts, "the keys are computed again from what is stored"
        stored = sorted((s.entry.call.seat, s.entry.call.purpose) for s in view.entries())
        assert stored == [("", "")] * 3 + [("ann", "p"), ("bo", "")]
        assert [(g.purpose, g.calls) for g in view.groups()] == [("", 4), ("p", 1)]


@pytest.mark.parametrize("call", NAMED)
def test_the_words_for_a_call_name_seat_and_purpose(call: Call) -> None:
    from soulkit.models.ledger.ledger import call_words

    words = call_words(call)
    assert words.startswith(call_words(PARTNER))
    assert [name in words for name in ("seat", "purpose")] == [bool(call.seat), bool(call.purpose)]


# -- one ledger on top of another ------------------------------------------------------------------


def lower_ledger(path: Path, count: int = 2) -> Path:
    with Ledger(path, mends=True) as ledger:
        for number in range(count):
            key, entry, request = entry_of(number)
            ledger.store(key, replace(entry, cost=0.5), request)
    return path


def test_what_the_lower_ledger_holds_is_copied_as_free(tmp_path: Path) -> None:
    lower, upper = lower_ledger(tmp_path / "lower"), tmp_path / "upper"
    before = lower.read_bytes()
    key, entry, request = entry_of(1)
    with LayeredLedger(upper, lower) as ledger:
        copied = ledger.lookup(key, model="m", call=entry.call)
        assert copied == replace(entry, cost=0.0, attempts=0)
        assert ledger.lookup("other", model="m", call=entry.call) is None
    assert lower.read_bytes() == before, "the lower one is never written to"
    with LedgerView(upper) as view:
        (stored,) = view.entries()
        assert stored.request is not None and stored.request.messages == request.messages
        assert not view.verify().counts
    with Ledger(upper, "replay") as alone:
        assert alone.lookup(key, model="m", call=entry.call) == copied


def test_a_replay_of_two_ledgers_copies_nothing(tmp_path: Path) -> None:
    lower, upper = lower_ledger(tmp_path / "lower"), tmp_path / "upper"
    Ledger(upper).close()
    key, entry, _ = entry_of(1)
    with LayeredLedger(upper, lower, "replay") as ledger:
        assert ledger.lookup(key, model="m", call=entry.call) == replace(entry, cost=0.5)
        with pytest.raises(ReplayMiss):
            ledger.lookup("other", model="m", call=entry.call)
    with LedgerView(upper) as view:
        assert list(view.entries()) == []


@pytest.mark.parametrize("mode", ["record", "replay"])
def test_a_reply_that_was_set_aside_below_is_asked_for_again(tmp_path: Path, mode: Any) -> None:
    lower, upper = lower_ledger(tmp_path / "lower"), tmp_path / "upper"
    Ledger(upper).close()
    key, entry, _ = entry_of(1)
    with Ledger(lower, mends=True) as ledger:
        ledger.set_aside(key)
    with LayeredLedger(upper, lower, mode) as layered:
        if mode == "record":
            assert layered.lookup(key, model="m", call=entry.call) is None
        else:
            with pytest.raises(ReplayMiss):
                layered.lookup(key, model="m", call=entry.call)


@pytest.mark.parametrize(
    "change",
    ["UPDATE calls SET reply = 'x'", "UPDATE contexts SET role = 'system'",
     "UPDATE settings SET body = '{}'"],
)  # fmt: skip
def test_damage_in_the_lower_ledger_is_an_error(tmp_path: Path, change: str) -> None:
    lower = lower_ledger(tmp_path / "lower")
    with closing_db(lower) as db:
        db.execute(change)
    key, entry, _ = entry_of(1)
    with LayeredLedger(tmp_path / "upper", lower) as ledger, pytest.raises(RunError) as caught:
        ledger.lookup(key, model="m", call=entry.call)
    assert "lower" in caught.value.what
