"""The agent's calls, and the service behind them: made here, or over HTTP with everything that can
go wrong on the way."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import PartnerError
from soulkit.models.ledger.ledger import Ledger
from soulkit.tasks.tau_usi.desk import DOMAIN, desk, desk_tools
from soulkit.tasks.tau_usi.service import (
    FormatError,
    MadeService,
    RuntimeServer,
    RuntimeService,
    ToolCall,
    read_agent_message,
    service_of,
)
from soulkit.types import Call
from tests.support.desk import call
from tests.support.servers.loopback import Asked, Reply
from tests.support.servers.runtime_server import DeskRuntime

CALL = Call(role="environment", example_id="e")
NUMBERS = ({"name": "count", "parameters": {"properties": {"n": {"type": "integer"}}}},)


# --- calls ----------------------------------------------------------------------------------------


def test_a_call_and_words_are_told_apart() -> None:
    text = f"I look.\n{call('find_member', name='Ada A', member='M1')}"
    assert read_agent_message(text, desk_tools()) == ToolCall(
        "find_member", {"name": "Ada A", "member": "M1"}
    )
    assert read_agent_message(" Good day. ", desk_tools()) == "Good day."
    assert read_agent_message("<function=find_member></function>", desk_tools()) == ToolCall(
        "find_member", {}
    )


@pytest.mark.parametrize(
    "text",
    [
        "<function=find_member><parameter=name>Ada</parameter>",
        call("find_member") + call("list_loans"),
        call("find_member") + " and then?",
        call("fly_away"),
        "<function=find_member>Ada</function>",
        "<function=find_member><parameter=name>Ada</function>",
        "<function=find_member><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        "<function=find member></function>",
        "done </function>",
    ],
)
def test_what_looks_like_a_call_and_is_none_is_a_format_error(text: str) -> None:
    act = read_agent_message(text, desk_tools())
    assert isinstance(act, FormatError) and act.why


def test_values_are_of_the_type_that_the_tool_declares() -> None:
    assert read_agent_message(call("count", n="3"), NUMBERS) == ToolCall("count", {"n": 3})
    assert read_agent_message(call("count", n="many"), NUMBERS) == ToolCall("count", {"n": "many"})
    nested = ({"type": "function", "function": NUMBERS[0]},)
    assert read_agent_message(call("count", n="3"), nested) == ToolCall("count", {"n": 3})
    assert read_agent_message(call("find_member", member="3"), desk_tools()).arguments == {
        "member": "3"
    }  # type: ignore[union-attr]


def test_megabytes_of_openings_and_parameters_are_read_at_once() -> None:
    started = time.process_time()
    many = "".join(f"<parameter=p{number}>x</parameter>" for number in range(120_000))
    for text in (
        "<function=" * 100_000, call("count", n="<parameter=" * 90_000),
        f"<function=count>{many}</function>",
    ):  # fmt: skip
        assert not isinstance(read_agent_message(text, NUMBERS), str)
    assert time.process_time() - started < 5  # quadratic reading would take minutes


# --- the made desk --------------------------------------------------------------------------------


def test_desks_of_one_number_are_alike_and_the_reward_is_about_the_loans() -> None:
    for number in range(40):
        place, other = desk(number), desk(number)
        assert place.instruction == other.instruction and place.loans == other.loans
        forbidden = not place.wishes[0].allowed
        assert place.reward() == float(forbidden)
        for wish in place.wishes:
            assert place.step(wish.tool, {"loan": wish.loan}) != "no such loan"
        assert place.reward() == float(not forbidden)
    assert len({desk(number).instruction for number in range(40)}) == 40


def test_tools_answer_mistakes_in_words() -> None:
    place = desk(1)
    assert place.step("find_member", {"name": "Nobody", "member": "M0"}) == "no such member"
    assert place.step("list_loans", {}) == "no such member"
    assert place.step("end_loan", {"loan": "L0"}) == "no such loan"
    assert place.member in place.step("find_member", {"name": place.name, "member": place.member})


def test_the_made_domain_needs_no_server() -> None:
    service = service_of(DOMAIN, 3, RuntimeServer("http://127.0.0.1:9"), CALL, None)
    assert isinstance(service, MadeService)
    assert asyncio.run(service.open()).instruction == desk(3).instruction


# --- a runtime over HTTP --------------------------------------------------------------------------


def played(runtime: DeskRuntime, ledger: Ledger | None = None, **server: Any) -> tuple[Any, float]:
    """What desk 0 answers to a whole visit: (answers, reward)."""

    async def visit() -> tuple[Any, float]:
        of_server = {"wait_s": 2.0, "pause_s": 0.01, **server}
        service = RuntimeService(
            RuntimeServer(runtime.url, **of_server),
            {"env_name": "retail", "task_index": 0}, CALL, ledger,
        )  # fmt: skip
        meta = await service.open()
        assert meta.wiki and len(meta.tools) == len(desk_tools())
        place = desk(0)
        answers = [
            await service.step("find_member", {"name": place.name, "member": place.member}),
            await service.step("extend_loan", {"loan": place.wishes[0].loan}),
        ]
        return answers, await service.reward()

    return asyncio.run(visit())


def test_a_visit_over_http() -> None:
    with DeskRuntime() as runtime:
        answers, reward = played(runtime)
    assert reward == 1 and "seven days later" in answers[1]
    assert runtime.paths() == ["/create", "/step", "/step", "/reward"]
    _, body = runtime.requests[0]
    assert json.loads(body["params"]) == {"env_name": "retail", "task_index": 0}


FAULTS = [
    {("/create", 0): "hang up"},
    {("/create", 0): 503, ("/create", 1): 502},
    {("/step", 1): "hang up"},
    {("/step", 1): "done, then hang up"},
    {("/step", 1): "forget"},
    {("/reward", 0): "forget"},
    {("/reward", 0): 503},
    {("/step", 0): "forget", ("/step", 2): "hang up", ("/reward", 0): "hang up"},
]


@pytest.mark.parametrize("faults", FAULTS)
def test_a_lost_environment_is_made_anew_and_brought_to_where_it_was(faults: Any) -> None:
    with DeskRuntime() as whole:
        expected = played(whole)
    with DeskRuntime(faults) as runtime:
        assert played(runtime) == expected
    # The desk that was asked for the reward saw every call exactly once.
    last = runtime.desks[runtime.requests[-1][1]["runtime_id"]]
    assert last.calls == ["find_member", "extend_loan"]


def refusal(faults: Any, **server: Any) -> str:
    with DeskRuntime(faults) as runtime, pytest.raises(PartnerError) as caught:
        played(runtime, **server)
    return str(caught.value)


def test_what_stays_broken_is_the_services_failure() -> None:
    assert "HTTP 500" in refusal({("/create", 0): 500})
    assert "HTTP 422" in refusal({("/step", 0): 422})
    assert "lost the environment 4 times" in refusal(dict.fromkeys(
        [("/step", n) for n in range(9)], "forget"
    ))  # fmt: skip
    away = dict.fromkeys([("/create", n) for n in range(500)], 503)
    assert "cannot be reached" in refusal(away, wait_s=0.05)


def test_a_server_that_is_away_is_waited_for_once() -> None:
    away = dict.fromkeys([("/create", n) for n in range(500)], 503)
    counts = []

    async def open_twice(runtime: DeskRuntime) -> None:
        server = RuntimeServer(runtime.url, wait_s=0.3, pause_s=0.02)
        for _ in range(2):
            with pytest.raises(PartnerError):
                await RuntimeService(server, {}, CALL).open()
            counts.append(len(runtime.requests))
        assert not await RuntimeServer("http://127.0.0.1:9").present()
        assert await server.present()

    with DeskRuntime(away) as runtime:
        asyncio.run(open_twice(runtime))
    assert counts[0] > 1 and counts[1] == counts[0] + 1


def test_where_nobody_ever_answered_nobody_is_waited_for() -> None:
    server = RuntimeServer("http://127.0.0.1:9", wait_s=1e9)
    with pytest.raises(PartnerError, match="no service answers"):
        asyncio.run(RuntimeService(server, {}, CALL).open())


@pytest.mark.parametrize(
    ("reward", "number"),
    [(0.25, 0.25), ("1", 1), (True, 1), ("NaN", None), ("good", None), ([1], None)],
)
def test_a_reward_is_a_number_or_the_episode_is_broken(reward: Any, number: float | None) -> None:
    with DeskRuntime() as runtime:
        usual = runtime.answer
        runtime.answer = lambda asked: (  # type: ignore[method-assign]
            Reply(200, {"reward": reward}) if asked.target == "/reward" else usual(asked)
        )
        if number is None:
            with pytest.raises(PartnerError, match="no reward"):
                played(runtime)
        else:
            assert played(runtime)[1] == number


def test_an_environment_that_answers_otherwise_is_not_the_one_that_was_lost() -> None:
    with DeskRuntime({("/step", 1): "forget"}) as runtime:
        first = runtime.answer

        def changing(asked: Asked) -> Reply | None:
            reply, again = first(asked), runtime.paths().count("/create") == 2
            if asked.target == "/step" and again and reply is not None:
                return Reply(200, {"result": "somebody else"})
            return reply

        runtime.answer = changing  # type: ignore[method-assign]
        with pytest.raises(PartnerError, match="another answer when it was replayed"):
            played(runtime)


def test_answers_are_kept_and_a_new_environment_is_brought_to_where_the_old_one_was(
    tmp_path: Path,
) -> None:
    with DeskRuntime({("/step", 1): 422}) as runtime, Ledger(tmp_path / "l.sqlite") as ledger:
        with pytest.raises(PartnerError):  # killed in the middle, as it were
            played(runtime, ledger)
        before = len(runtime.requests)
        expected = played(runtime, ledger)
        # From the ledger: what /create and the first step said. Live: the rest, in a new desk.
        assert runtime.paths()[before:] == ["/create", "/step", "/step", "/reward"]
        assert runtime.desks[runtime.requests[-1][1]["runtime_id"]].calls == [
            "find_member", "extend_loan",
        ]  # fmt: skip
    with Ledger(tmp_path / "l.sqlite") as ledger, DeskRuntime() as other:
        assert played(other, ledger)[1] == 1  # another address is another question
        assert len(other.requests) == 4
    assert expected[1] == 1


def test_a_finished_visit_is_replayed_without_a_server(tmp_path: Path) -> None:
    with DeskRuntime() as runtime, Ledger(tmp_path / "l.sqlite") as ledger:
        expected = played(runtime, ledger)
        sent = len(runtime.requests)
        assert played(runtime, ledger) == expected and len(runtime.requests) == sent
        assert ledger.totals()["cost"] == 0
    with Ledger(tmp_path / "l.sqlite", "replay") as ledger:
        assert played(runtime, ledger, wait_s=0.0) == expected  # nobody listens there any more
