"""Asking a partner: once more where a reply is of no use, then its failure, and nothing unpaid."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from soulkit.errors import CallError, PartnerError
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.base import Player
from soulkit.models.ledger.ledger import Ledger
from soulkit.tasks.dialogue import partner_words
from soulkit.tasks.partners import partner_reply
from soulkit.types import Call, Sampling, Segment, Usage
from tests.support.road import played_by
from tests.support.servers.openai_server import Fault, ScriptedServer

CALL = Call(role="environment", example_id="e", turn=2, seat="room", purpose="environment")
CONTEXT = (Segment("user", "What happens?"),)


def reply_of(player: Player, attempts: int = 2) -> tuple[str, Usage]:
    return asyncio.run(
        partner_reply(player, CONTEXT, CALL, partner_words, "the room", attempts=attempts)
    )


def test_an_unusable_reply_is_asked_for_once_more() -> None:
    replies = iter(["<think>hm", "A door slams."])
    with played_by(lambda body: next(replies)) as player:
        words, usage = reply_of(player)
    assert (words, usage.calls) == ("A door slams.", 2)


@pytest.mark.parametrize(("attempts", "times"), [(1, ""), (2, ", twice"), (3, ", 3 times")])
def test_a_partner_that_never_says_anything_broke_the_episode(attempts: int, times: str) -> None:
    with (
        played_by(" ") as player,
        pytest.raises(PartnerError, match=f"the room said nothing usable{times} .stop") as caught,
    ):
        reply_of(player, attempts)
    assert caught.value.usage.calls == attempts, "what it cost is not lost"


def test_a_failure_after_a_useless_reply_carries_its_cost() -> None:
    with ScriptedServer(answer="", script={1: Fault.status_error(400)}) as server:
        player = Player(Endpoint(model="m", base_url=server.base_url, max_attempts=1))
        with pytest.raises(CallError) as caught:
            reply_of(player)
    assert caught.value.usage.calls == 1


def test_both_replies_are_set_aside_and_asked_for_anew(tmp_path: Path) -> None:
    replies = iter(["", "", "Rain.", "Never."])

    def play(mode: str) -> str:
        with Ledger(tmp_path / "l.sqlite", mode, mends=True) as ledger:  # type: ignore[arg-type]
            endpoint = Endpoint(model="m", base_url=server.base_url, ledger=ledger, backoff_s=0.0)
            try:
                return reply_of(Player(endpoint, Sampling()))[0]
            except PartnerError as error:
                return error.reason

    with ScriptedServer(answer=lambda body: next(replies)) as server:
        outcomes = [play("record"), play("record"), play("replay")]
    assert outcomes == ["partner_error", "Rain.", "Rain."]
