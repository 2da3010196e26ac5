"""Several servers asked as one: places, deaths, and that no request is lost or put twice."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from soulkit.errors import ProviderError, RunError
from soulkit.models.vllm.client import Address, ServerRefused, VllmClient
from soulkit.models.vllm.replicas import TRIES, NoServerLeft, Replicas
from tests.support.reporting import Heard
from tests.support.servers.ids_server import Fault, IdsServer
from tests.support.servers.toy_vllm import Body, Toy, ToyVllm

PATH = "/v1/completions"


def body(number: int, **more: Any) -> Body:
    ids = {"model": "base", "prompt": [1, 2, 3 + number % 50], "seed": number, "max_tokens": 4}
    return {**ids, "return_token_ids": True, **more}


def fleet(*servers: ToyVllm, in_flight: int = 8, **more: Any) -> Replicas:
    clients = [VllmClient(Address(server.url)) for server in servers]
    return Replicas(clients, in_flight=in_flight, **{"pause_s": 0.0, **more})


def tokens(reply: Body) -> list[int]:
    return list(reply["choices"][0]["token_ids"])


def ask_all(servers: Replicas, bodies: Sequence[Body]) -> list[Body]:
    async def asking() -> list[Body]:
        replies = await asyncio.gather(*(servers.ask(PATH, one) for one in bodies))
        await servers.close()
        return list(replies)

    return asyncio.run(asking())


def times_put(*servers: ToyVllm) -> Counter[str]:
    return Counter(json.dumps(one) for server in servers for one in server.bodies())


def expected(bodies: Sequence[Body]) -> list[list[int]]:
    with ToyVllm() as single:
        return [tokens(reply) for reply in ask_all(fleet(single), bodies)]


def test_the_least_loaded_server_is_asked_and_none_has_more_than_its_places() -> None:
    bodies = [body(n) for n in range(40)]
    with ToyVllm(Toy(delay_s=0.005)) as one, ToyVllm(Toy(delay_s=0.005)) as other:
        replies = ask_all(fleet(one, other, in_flight=3), bodies)
    assert [tokens(reply) for reply in replies] == expected(bodies)
    assert one.most_at_once <= 3 and other.most_at_once <= 3
    assert len(one.bodies()) >= 5 and len(other.bodies()) >= 5
    assert set(times_put(one, other).values()) == {1}


@pytest.mark.slow
def test_a_server_that_dies_half_way_costs_nothing_but_its_requests_put_again() -> None:
    bodies, lines = [body(n) for n in range(200)], list[str]()
    with ToyVllm(Toy(die_after=60)) as one, ToyVllm() as other:
        servers = fleet(one, other, reporter=Heard(lines))
        replies = ask_all(servers, bodies)
        assert servers.urls == (other.url,)
    assert [tokens(reply) for reply in replies] == expected(bodies)
    again = times_put(one, other)
    assert set(again.values()) <= {1, 2}
    (line,) = lines
    assert line.startswith(f"vLLM server {one.url} is dropped (") and "1 server left" in line
    assert "is gone" not in line and ".)" not in line
    assert 1 <= sum(times - 1 for times in again.values()) <= 8
    assert sum(len(server.bodies()) for server in (one, other)) == sum(again.values())


@pytest.mark.slow
def test_a_server_that_hangs_is_dropped_and_its_requests_go_to_the_others() -> None:
    bodies, lines = [body(n) for n in range(12)], list[str]()
    with ToyVllm() as one, ToyVllm() as other:
        one.hang()
        servers = fleet(one, other, in_flight=2, reporter=Heard(lines), health_s=0.3)
        replies = ask_all(servers, bodies)
    assert [tokens(reply) for reply in replies] == expected(bodies)
    assert len(lines) == 1 and one.url in lines[0]
    assert "silent" in lines[0] and "2 requests put again" in lines[0]


def test_with_nobody_left_all_who_wait_hear_it() -> None:
    lines = list[str]()
    with ToyVllm(Toy(die_after=2)) as one, ToyVllm(Toy(die_after=2)) as other:
        servers = fleet(one, other, in_flight=2, reporter=Heard(lines))

        async def asking() -> list[Any]:
            requests = (servers.ask(PATH, body(n)) for n in range(30))
            return list(await asyncio.gather(*requests, return_exceptions=True))

        outcomes = asyncio.run(asking())
    lost = [outcome for outcome in outcomes if isinstance(outcome, NoServerLeft)]
    assert len(lost) + sum(isinstance(outcome, dict) for outcome in outcomes) == 30
    assert len(lost) >= 20 and len(lines) == 1
    what, why, way_out = lost[0].lines()
    assert "No vLLM server is left" in what
    assert one.url in why and other.url in why and "kept" in why
    assert "same command" in way_out


def test_a_server_of_our_own_says_itself_why_it_ended() -> None:
    with ToyVllm(Toy(die_after=0)) as server:

        def check() -> None:
            if server.dead.is_set():
                raise RunError("The server ended.", "Its log: out of memory.", "Take less.")

        with pytest.raises(NoServerLeft) as caught:
            ask_all(fleet(server, checks={server.url: check}), [body(1)])
    assert "out of memory" in caught.value.why


def test_a_broken_connection_to_a_server_that_lives_drops_nobody() -> None:
    lines = list[str]()
    with ToyVllm(Toy(breaks=4)) as server:
        (reply,) = ask_all(fleet(server, reporter=Heard(lines)), [body(7)])
        assert len(server.bodies()) == 5
    assert [tokens(reply)] == expected([body(7)])
    assert lines == []


def test_connections_that_break_without_end_are_a_failure_and_no_death() -> None:
    lines = list[str]()
    with ToyVllm(Toy(breaks=1000)) as server:
        servers = fleet(server, reporter=Heard(lines))
        with pytest.raises(ProviderError, match="the connection broke"):
            ask_all(servers, [body(7)])
        server.toy.breaks = 0
        assert ask_all(servers, [body(7)])
    assert lines == []


@pytest.mark.parametrize(
    ("faults", "health", "error", "asked"),
    [
        (TRIES - 1, 200, None, TRIES),
        (TRIES, 200, ServerRefused, TRIES),
        (1, 503, NoServerLeft, 1),
    ],
)
def test_a_busy_server_is_asked_again_as_long_as_it_lives(
    faults: int, health: int, error: type[Exception] | None, asked: int
) -> None:
    script = {n: Fault(status=503, message="later") for n in range(faults)}
    with IdsServer(lambda body: [5, 6, 7], script=script) as server:
        server.health = health
        asked_for = [body(1, stop_token_ids=[], temperature=0.0)]
        servers = Replicas([VllmClient(Address(server.url))], in_flight=1, pause_s=0.0)
        if error is None:
            assert [tokens(one) for one in ask_all(servers, asked_for)] == [[5, 6, 7]]
        else:
            with pytest.raises(error):
                ask_all(servers, asked_for)
        assert len(server.requests) == asked


def test_a_refusal_is_the_callers_and_is_put_to_nobody_else() -> None:
    with ToyVllm() as one, ToyVllm() as other:
        with pytest.raises(ServerRefused) as caught:
            ask_all(fleet(one, other), [body(1, model="nobody")])
        assert caught.value.status == 404
    assert sum(times_put(one, other).values()) == 1


def test_callers_that_are_cancelled_give_their_places_back() -> None:
    with ToyVllm(Toy(delay_s=0.05)) as server:
        servers = fleet(server, in_flight=2)

        async def asking() -> Body:
            requests = [asyncio.ensure_future(servers.ask(PATH, body(n))) for n in range(8)]
            await until(lambda: len(server.bodies()) >= 2)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            return await servers.ask(PATH, body(100))

        assert [tokens(asyncio.run(asking()))] == expected([body(100)])
    assert len(server.bodies()) < 8


@pytest.mark.slow
def test_a_fleet_serves_one_event_loop_after_the_other() -> None:
    with ToyVllm(Toy(die_after=5)) as one, ToyVllm() as other:
        servers = fleet(one, other, in_flight=1)
        first = ask_all(servers, [body(n) for n in range(15)])
        second = ask_all(servers, [body(n) for n in range(15)])
        assert servers.urls == (other.url,)
    assert [tokens(reply) for reply in first] == [tokens(reply) for reply in second]


def test_idle_waits_for_requests_under_way_and_for_those_that_wait() -> None:
    with ToyVllm(Toy(delay_s=0.02)) as server:
        servers = fleet(server, in_flight=1)

        async def asking() -> tuple[int, int]:
            requests = [asyncio.ensure_future(servers.ask(PATH, body(n))) for n in range(4)]
            await asyncio.sleep(0)
            await servers.idle("somebody else")
            before = sum(request.done() for request in requests)
            await servers.idle("base")
            return before, sum(request.done() or server.answered == 4 for request in requests)

        assert asyncio.run(asking()) == (0, 4)


def test_everywhere_is_every_server_that_lives() -> None:
    with ToyVllm() as one, ToyVllm() as other:
        servers = fleet(one, other)

        async def asking() -> list[dict[str, Body]]:
            both = await servers.everywhere(PATH, body(1))
            one.die()
            return [both, await servers.everywhere(PATH, body(2))]

        both, rest = asyncio.run(asking())
    assert set(both) == {one.url, other.url} and set(rest) == {other.url}
    assert tokens(both[one.url]) == tokens(both[other.url])


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)
