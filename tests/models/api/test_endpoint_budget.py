"""What endpoints charge, and how a run with a limit stops and goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.limits import Budget, BudgetSpent
from soulkit.models.api.prices import load_prices
from soulkit.models.ledger.ledger import Ledger
from soulkit.play.engine import gather
from soulkit.types import MAX_TOKENS, Call, Completion, Sampling, Segment
from tests.support.servers.openai_server import Fault, ScriptedServer

HELLO = (Segment("user", "hello there"),)
COST = (2 * 1.0 + 4 * 10.0) / 1e6
"""Of one call: two words, answered by four."""


def endpoint(server: ScriptedServer, **settings: Any) -> Endpoint:
    base: dict[str, Any] = {
        "model": "m", "base_url": server.base_url, "backoff_s": 0.0, "max_attempts": 2,
        "price_in": 1.0, "price_out": 10.0,
    }  # fmt: skip
    return Endpoint(**(base | settings))


def call(index: int) -> Call:
    return Call(role="judge", example_id=f"e{index}")


def one_after_the_other(model: Endpoint, count: int) -> list[Completion]:
    async def scene() -> list[Completion]:
        try:
            return [await model.complete(HELLO, Sampling(), call(i)) for i in range(count)]
        finally:
            await model.close()

    return asyncio.run(scene())


def test_prices_are_looked_up_when_none_is_given(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("prices: [{model: m, in: 2, out: 20}]")
    with ScriptedServer() as server:
        table = load_prices(path)
        looked_up = one_after_the_other(
            endpoint(server, price_in=None, price_out=None, prices=table), 1
        )
        by_setting = one_after_the_other(endpoint(server, prices=table), 1)
        unknown = endpoint(
            server, model="other", price_in=None, price_out=None, prices=load_prices()
        )
        assert one_after_the_other(unknown, 1)[0].usage.cost is None
    assert looked_up[0].usage.cost == pytest.approx(2 * COST)
    assert by_setting[0].usage.cost == pytest.approx(COST)


def test_cached_tokens_cost_what_the_table_says(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("prices: [{model: m, in: 2, out: 20, cached: 1}]")
    usage = {
        "prompt_tokens": 1000, "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 600},
    }  # fmt: skip
    reply = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": usage}
    with ScriptedServer(script={0: Fault.reply(reply)}) as server:
        model = endpoint(server, price_in=None, price_out=None, prices=load_prices(path))
        got = one_after_the_other(model, 1)
    assert got[0].usage.cost == pytest.approx((400 * 2 + 600 * 1 + 10 * 20) / 1e6)


def counted(reply: int, total: int | None = None, reasoning: int | None = None) -> dict[str, Any]:
    """The usage of a prompt of 10 tokens under the names of OpenAI."""
    usage: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": reply}
    usage |= {} if total is None else {"total_tokens": total}
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    return usage | ({} if reasoning is None else details)


NATIVE = {"promptTokenCount": 10, "candidatesTokenCount": 20, "thoughtsTokenCount": 80}
USAGES: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "OpenAI": ({"usage": counted(100, 110, 80)}, (10, 100, 80)),
    "OpenAI, all of it reasoning": ({"usage": counted(80, 90, 80)}, (10, 80, 80)),
    "OpenAI's newer names": (
        {"usage": {"input_tokens": 10, "output_tokens": 100, "total_tokens": 110,
                   "output_tokens_details": {"reasoning_tokens": 80}}}, (10, 100, 80),
    ),
    "OpenRouter": ({"usage": counted(100, 110, 80) | {"cost": 0.1}}, (10, 100, 80)),
    "DeepSeek": (
        {"usage": counted(100, 110, 80) | {"prompt_cache_miss_tokens": 10}}, (10, 100, 80),
    ),
    "Gemini": ({"usage": counted(20, 110)}, (10, 100, 80)),
    "Gemini, reasoning told": ({"usage": counted(20, 110, 80)}, (10, 100, 80)),
    "Gemini, nothing but thoughts": (
        {"usage": {"prompt_tokens": 10, "total_tokens": 90}}, (10, 80, 0),
    ),
    "Gemini's own names": ({"usageMetadata": NATIVE | {"totalTokenCount": 110}}, (10, 100, 80)),
    "Gemini's own names, no total": ({"usageMetadata": NATIVE}, (10, 100, 80)),
    "thoughts beside OpenAI's names": (
        {"usage": counted(20) | {"thoughts_token_count": 80}}, (10, 100, 80),
    ),
    "thoughts that the gateway added": (
        {"usage": counted(100, 110) | {"thoughts_token_count": 80}}, (10, 100, 80),
    ),
    "xAI": ({"usage": counted(20, 110, 80)}, (10, 100, 80)),
    "xAI, total of a gateway": ({"usage": counted(20, 30, 80)}, (10, 100, 80)),
    "xAI, no total": ({"usage": counted(20, None, 80)}, (10, 100, 80)),
    "vLLM": ({"usage": counted(100, 110) | {"prompt_tokens_details": None}}, (10, 100, 0)),
    "SGLang": ({"usage": counted(100, 110) | {"reasoning_tokens": 80}}, (10, 100, 80)),
    "Anthropic": ({"usage": counted(100, 110)}, (10, 100, 0)),
    "Anthropic's own names": (
        {"usage": {"input_tokens": 4, "output_tokens": 100, "cache_read_input_tokens": 5,
                   "cache_creation_input_tokens": 1}}, (10, 100, 0),
    ),
    "a total that says less": ({"usage": counted(100, 0)}, (10, 100, 0)),
}  # fmt: skip


@pytest.mark.parametrize("provider", USAGES)
def test_reasoning_costs_what_each_provider_bills(provider: str, tmp_path: Path) -> None:
    body, (prompt, billed, reasoning) = USAGES[provider]
    reply = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], **body}
    budget, cost = Budget(1.0), (prompt * 1.0 + billed * 10.0) / 1e6
    with (
        ScriptedServer(script=lambda index, body: Fault.reply(reply)) as server,
        Ledger(tmp_path / "ledger.sqlite") as ledger,
    ):
        model = endpoint(server, budget=budget, ledger=ledger)
        usage = one_after_the_other(model, 1)[0].usage
        kept = ledger.totals()
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, billed)
    assert usage.reasoning_tokens == reasoning
    assert usage.cost == pytest.approx(cost) == budget.spent == kept["cost"]
    assert kept["completion_tokens"] == billed


def test_a_budget_needs_prices_of_servers_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(host="0.0.0.0") as server:  # no address of this machine
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-nobody")
        with pytest.raises(ConfigError) as caught:
            endpoint(server, price_in=None, price_out=None, budget=Budget(1.0))
        endpoint(server, price_in=0.0, price_out=0.0, budget=Budget(1.0))
    assert "price of 'm'" in caught.value.what


def test_a_server_on_this_machine_without_a_price_spends_nothing() -> None:
    budget = Budget(0.5 * COST)
    with ScriptedServer() as server:
        model = endpoint(server, price_in=None, price_out=None, budget=budget)
        one_after_the_other(model, 3)
    assert len(server.requests) == 3 and budget.spent == 0.0


def test_the_run_stops_when_it_is_spent() -> None:
    budget = Budget(3.5 * COST)
    with ScriptedServer() as server:
        model = endpoint(server, budget=budget)
        with pytest.raises(BudgetSpent):
            one_after_the_other(model, 10)
    assert len(server.requests) == 4
    assert budget.spent == pytest.approx(4 * COST)


def test_one_budget_for_all_endpoints() -> None:
    budget = Budget(3.5 * COST)
    with ScriptedServer() as server:
        first, second = endpoint(server, budget=budget), endpoint(server, budget=budget)
        one_after_the_other(first, 3)
        with pytest.raises(BudgetSpent):
            one_after_the_other(second, 3)
    assert len(server.requests) == 4


def test_retries_stop_too() -> None:
    budget = Budget(1.0, spent=1.0)
    with ScriptedServer() as server, pytest.raises(BudgetSpent):
        one_after_the_other(endpoint(server, budget=budget), 1)
    assert not server.requests


def test_replies_without_counts_are_taken_at_their_most() -> None:
    reply = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
    budget = Budget(1.0)
    with ScriptedServer(script={0: Fault.reply(reply)}) as server:
        got = one_after_the_other(endpoint(server, budget=budget), 1)
    assert got[0].usage.cost is None
    assert MAX_TOKENS * 10e-6 <= budget.spent < MAX_TOKENS * 11e-6


def test_what_is_under_way_is_waited_for_and_kept_and_not_paid_again(tmp_path: Path) -> None:
    """Eight at once, enough for one: the others are cancelled, and their replies are kept."""
    path, budget = tmp_path / "ledger.sqlite", Budget(0.5 * COST)

    def slower(index: int, body: dict[str, Any]) -> Fault:
        return Fault.slow(0.05 if index == 0 else 0.4)

    async def run(model: Endpoint, count: int) -> list[Completion]:
        try:
            return await gather(model.complete(HELLO, Sampling(), call(i)) for i in range(count))
        finally:
            await model.close()

    with ScriptedServer(script=slower) as server, Ledger(path) as ledger:
        model = endpoint(server, concurrency=8, ledger=ledger, budget=budget)
        with pytest.raises(BudgetSpent):
            asyncio.run(run(model, 20))
        assert len(server.requests) == 8
        assert ledger.totals()["calls"] == 8
        assert budget.spent == pytest.approx(8 * COST)

    port = int(server.base_url.split(":")[2].split("/")[0])
    with ScriptedServer(port=port) as server, Ledger(path) as ledger:
        spent = ledger.totals()["cost"]
        assert spent == pytest.approx(8 * COST)
        budget = Budget(1.0, spent=spent or 0.0)
        assert len(asyncio.run(run(endpoint(server, ledger=ledger, budget=budget), 20))) == 20
        assert len(server.requests) == 12
        assert budget.spent == pytest.approx(20 * COST)


def test_cancelled_for_another_reason_nothing_is_waited_for() -> None:
    async def scene(model: Endpoint) -> None:
        task = asyncio.create_task(model.complete(HELLO, Sampling(), call(0)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(model.close(), 2)

    with ScriptedServer(delay_s=5.0) as server:
        asyncio.run(scene(endpoint(server, budget=Budget(1.0))))
