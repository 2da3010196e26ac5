"""One server: who waits for it, who hears that it has died, and what a refusal is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from soulkit.models.vllm import client as clients
from soulkit.models.vllm.client import Address, ServerGone, ServerRefused, VllmClient
from tests.support.servers.ids_server import DEAD, Fault, IdsServer

BODY: dict[str, Any] = {
    "model": "base", "prompt": [1], "max_tokens": 3, "stop_token_ids": [], "temperature": 0.0,
}  # fmt: skip


def server(script: Mapping[int, Fault] | None = None, **more: Any) -> IdsServer:
    return IdsServer(lambda body: [5, 6, 7], script=script, **more)


def impatient(one: IdsServer, key: str = "") -> VllmClient:
    return VllmClient(Address(one.url, key), watch_s=0.02, pauses_s=(0.0, 0.0))


async def ask(client: VllmClient) -> dict[str, Any]:
    try:
        return await client.post("/v1/completions", BODY)
    finally:
        await client.close()


def test_a_key_is_sent_and_not_shown() -> None:
    with server(key="sesame-1234") as one:
        client = impatient(one, "sesame-1234")
        assert asyncio.run(ask(client))["choices"][0]["token_ids"] == [5, 6, 7]
        assert "sesame" not in repr(client) + repr(client.address)
        with pytest.raises(ServerRefused) as refusal:
            asyncio.run(ask(impatient(one)))
    assert refusal.value.status == 401


def test_a_reply_that_is_no_object_is_text() -> None:
    async def text() -> dict[str, Any]:
        client = impatient(one)
        got = await client.get("/text")
        await client.close()
        return got

    with server() as one:
        assert asyncio.run(text()) == {"text": "Success: done."}


def test_a_refusal_is_final_and_trouble_that_passes_is_not() -> None:
    script = {0: Fault(status=400, message="no such thing"), 1: Fault(status=500),
              2: Fault(hang_up=True)}  # fmt: skip
    with server(script) as one:
        with pytest.raises(ServerRefused, match="no such thing"):
            asyncio.run(ask(impatient(one)))
        assert len(one.requests) == 1
        assert asyncio.run(ask(impatient(one)))["model"] == "base"
        assert len(one.requests) == 4


def test_a_server_whose_trouble_lasts_has_refused() -> None:
    script = {n: Fault(status=500, message="kv cache") for n in range(9)}
    with server(script) as one, pytest.raises(ServerRefused) as refusal:
        asyncio.run(ask(impatient(one)))
    assert (refusal.value.status, len(one.requests)) == (500, clients.TRIES)


@pytest.mark.parametrize(
    ("fault", "health"),
    [(Fault(status=500, message=DEAD), 200), (Fault(status=500), 503), (Fault(dies=True), 200),
     (Fault(hang_up=True), 503)],
)  # fmt: skip
def test_a_dead_server_is_gone_at_once(fault: Fault, health: int) -> None:
    with server({0: fault}) as one:
        one.health = health
        with pytest.raises(ServerGone, match=one.url):
            asyncio.run(ask(impatient(one)))
        assert len(one.requests) == 1


def test_nobody_there_is_gone() -> None:
    with server() as one:
        address = Address(one.url)
    client = VllmClient(address)
    assert not asyncio.run(client.alive())
    with pytest.raises(ServerGone, match="connection refused"):
        asyncio.run(ask(client))


def test_a_reply_may_take_as_long_as_the_server_lives() -> None:
    go_on = threading.Event()
    with server({0: Fault(wait=go_on)}) as one:

        async def waiting() -> dict[str, Any]:
            asking = asyncio.create_task(ask(impatient(one)))
            for _ in range(3):
                await asyncio.to_thread(one.looks.acquire)
            go_on.set()
            return await asking

        assert asyncio.run(waiting())["model"] == "base"


def test_who_waits_hears_that_the_server_has_died() -> None:
    never = threading.Event()
    with server({0: Fault(wait=never)}) as one:

        async def waiting() -> None:
            asking = asyncio.create_task(ask(impatient(one)))
            await asyncio.to_thread(one.arrived.acquire)
            one.health = 503
            await asking

        with pytest.raises(ServerGone, match="health"):
            asyncio.run(waiting())
        never.set()


def test_a_server_that_is_silent_for_long_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "HEALTH_S", 0.02)
    never = threading.Event()
    with server({0: Fault(wait=never)}) as one:
        one.health = 0
        with pytest.raises(ServerGone, match="health"):
            asyncio.run(ask(impatient(one)))
        never.set()


def test_a_client_serves_several_event_loops_in_turn() -> None:
    with server() as one:
        client = impatient(one)
        assert [asyncio.run(ask(client))["model"] for _ in range(2)] == ["base", "base"]
