"""Seat and purpose tell calls apart; a call without them is the one from before there were any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from soulkit.models.api.wire import sent_seed
from soulkit.models.ledger.ledger import Ledger, call_key, request_key
from soulkit.models.ledger.view import LedgerView
from soulkit.models.local.decode import uniforms
from soulkit.types import Call, Sampling
from tests.models.ledger.test_storage import filled
from tests.support.ledger_writer import entry_of

CALL = Call(role="partner", example_id="e", rollout=2, kind="refined", turn=3, sample=1, step=4)
NAMED = (
    replace(CALL, seat="ann"), replace(CALL, purpose="ann"), replace(CALL, seat="ann", purpose="b"),
    replace(CALL, seat="annb"), replace(CALL, seat="bob"),
)  # fmt: skip


def key_of(call: Call) -> str:
    messages = [{"role": "user", "content": "x"}]
    return call_key(base_url="u", model="m", messages=messages, sampling=Sampling(), call=call)


def test_a_call_without_seat_keeps_key_seed_and_stream() -> None:
    """The figures are those of the version before seats."""
    assert key_of(CALL) == "61030691fff9dee4c572ed89a8343f7f7d8bf7a01b07e02ee0d36a1fb86db036"
    assert sent_seed(7, CALL) == 1386035217
    assert uniforms(7, CALL, 2).tolist() == [0.21696883593972516, 0.37258861845499036]


def test_seat_and_purpose_have_keys_seeds_and_streams_of_their_own() -> None:
    calls = (CALL, *NAMED)
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
    assert words.startswith(call_words(CALL))
    assert [name in words for name in ("seat", "purpose")] == [bool(call.seat), bool(call.purpose)]
