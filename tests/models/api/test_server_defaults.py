"""What a request leaves out is not left to the server: `top_p` always, more where it matters."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ProviderError
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.server_defaults import PAUSES_S
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.ledger.view import LedgerView
from soulkit.types import Call, Completion, Sampling, Segment
from tests.support.evaluation import api, oracle, records, soul
from tests.support.servers.openai_server import Fault, ScriptedServer

NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
HELLO = (Segment("user", "hello"),)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(model: Endpoint, count: int = 1, sampling: Sampling | None = None) -> list[Completion]:
    async def crowd() -> list[Completion]:
        calls = (Call(role="judge", example_id="e", rollout=i) for i in range(count))
        try:
            sampled = sampling or Sampling()
            return await asyncio.gather(*(model.complete(HELLO, sampled, c) for c in calls))
        finally:
            await model.close()

    return asyncio.run(crowd())


def beside(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in NEUTRAL if name in body}


@pytest.mark.parametrize("owner", ["vllm", "sglang", "vLLM"])
def test_engines_that_fill_in_are_sent_neutral_values(owner: str) -> None:
    with ScriptedServer(owner=owner) as server:
        model = Endpoint(model="scripted", base_url=server.base_url)
        got = [*ask(model, 20), *ask(model, sampling=Sampling(top_p=0.9, temperature=0.0))]
        assert len(server.listings) == 1
    assert all(beside(body) == NEUTRAL for body in server.requests)
    assert [body["top_p"] for body in server.requests] == [1.0] * 20 + [0.9]
    assert all(not completion.dropped for completion in got)


def test_others_are_sent_what_the_interface_knows() -> None:
    with ScriptedServer() as server:
        ask(Endpoint(model="m", base_url=server.base_url), 3)
    assert all(beside(body) == {} and body["top_p"] == 1.0 for body in server.requests)
    assert len(server.listings) == 1


LISTS: dict[str, tuple[Any, bool]] = {
    "own name": ([{"id": "m", "owned_by": "vllm"}, {"id": "x", "owned_by": "acme"}], True),
    "other's name": ([{"id": "x", "owned_by": "vllm"}, {"id": "m", "owned_by": "acme"}], False),
    "nobody's name": ([{"id": "x", "owned_by": "vllm"}, {"id": "y", "owned_by": "acme"}], False),
    "adapters": ([{"id": "base", "owned_by": "vllm"}, {"id": "m", "owned_by": "vllm"}], True),
    "none": ([], False),
    "no list": ({"id": "m", "owned_by": "vllm"}, False),
    "no entries": (["vllm"], False),
    "no owner": ([{"id": "m"}], False),
    "an odd owner": ([{"id": "m", "owned_by": ["vllm"]}], False),
}


@pytest.mark.parametrize("name", LISTS)
def test_the_list_is_read_for_the_model_that_is_asked(name: str) -> None:
    listed, filling = LISTS[name]
    with ScriptedServer(models=Fault.reply({"object": "list", "data": listed})) as server:
        ask(Endpoint(model="m", base_url=server.base_url))
    assert beside(server.requests[0]) == (NEUTRAL if filling else {})


@pytest.mark.parametrize(
    "fault",
    [
        Fault.status_error(404), Fault.status_error(401), Fault.status_error(500),
        Fault.status_error(429), Fault(raw=b"<html>"), Fault(raw=b""), Fault.closed(),
        Fault(status=307, raw=b"", headers={"Location": "http://127.0.0.1:9/v1/models"}),
        Fault(raw=b"[" * 100_000), Fault(raw=b" " * 9_000_000), Fault(delay_s=1.0, raw=b"{}"),
    ],
)  # fmt: skip
def test_no_answer_decides_nothing_and_is_no_failure(fault: Fault) -> None:
    busy = fault.status in (429, 500)
    timeout_s = 0.5 if fault.delay_s else 60.0
    with ScriptedServer(models=fault) as server:
        model = Endpoint(model="m", base_url=server.base_url, timeout_s=timeout_s, max_attempts=1)
        assert [c.text for c in ask(model, 8)] == ["You said: hello"] * 8
        ask(model, 2)
        assert len(server.listings) == (len(PAUSES_S) if busy else 1)
    assert all(beside(body) == {} for body in server.requests)


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_server_that_is_busy_is_asked_before_anything_is_sent(status: int) -> None:
    busy = iter([Fault.status_error(status), Fault.status_error(status)])
    with ScriptedServer(owner="vllm", models=lambda: next(busy, None)) as server:
        ask(Endpoint(model="scripted", base_url=server.base_url), 4)
        assert len(server.listings) == 3
    assert all(beside(body) == NEUTRAL for body in server.requests)


@pytest.mark.slow
def test_a_silent_list_does_not_hold_up_a_patient_endpoint() -> None:
    with ScriptedServer(models=Fault(delay_s=30.0, raw=b"{}")) as server:
        started = time.monotonic()
        ask(Endpoint(model="m", base_url=server.base_url, timeout_s=600.0))
        assert time.monotonic() - started < 25


def test_a_server_that_is_still_starting_is_asked_again() -> None:
    """Nothing has been sampled yet, so that nothing is mixed."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = int(place.getsockname()[1])

    async def late() -> Completion:
        model = Endpoint(model="m", base_url=f"http://127.0.0.1:{port}/v1", backoff_s=0.05)
        asking = asyncio.create_task(
            model.complete(HELLO, Sampling(), Call(role="judge", example_id="e"))
        )
        await asyncio.sleep(0.4)
        with server:
            got = await asking
            await model.close()
        return got

    server = ScriptedServer(owner="vllm", port=port)
    assert asyncio.run(late()).text == "You said: hello"
    assert [beside(body) for body in server.requests] == [NEUTRAL]


def test_a_replay_asks_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with ScriptedServer(owner="vllm") as server:
        with Ledger(path) as ledger:
            ask(Endpoint(model="m", base_url=server.base_url, ledger=ledger), 2)
            ask(Endpoint(model="m", base_url=server.base_url, ledger=ledger), 2)
        with Ledger(path, "replay") as ledger:
            ask(Endpoint(model="m", base_url=server.base_url, ledger=ledger), 2)
        assert (len(server.listings), len(server.requests)) == (1, 2)


def test_what_was_sent_beside_the_settings_is_recorded(tmp_path: Path, capfd: Any) -> None:
    run = tmp_path / "run"
    with ScriptedServer(owner="vllm", answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, run) == 0
    with LedgerView(run / "ledger.sqlite") as view:
        stored = list(view.entries())
        assert view.verify().lines() == []
    assert [dict(s.request.beside) for s in stored if s.request] == [NEUTRAL] * 6
    assert stored[0].request is not None and "top_k" not in stored[0].request.sampling
    capfd.readouterr()
    assert soul("ledger", "show", run, "--limit", 1) == 0
    assert "with min_p 0, repetition_penalty 1, top_k -1" in capfd.readouterr().out
    assert soul("ledger", "export", run) == 0
    line = json.loads(capfd.readouterr().out.splitlines()[0])
    assert line["request"]["beside"] == NEUTRAL


def test_a_ledger_of_requests_without_top_p_is_replayed(tmp_path: Path) -> None:
    """The key is made of the settings, not of what was sent: this one was written before."""
    from soulkit.models.ledger.ledger import call_key

    key = call_key(
        base_url="http://localhost:8000/v1", model="m",
        messages=[{"role": "user", "content": "hello"}], sampling=Sampling(seed=1, max_tokens=512),
        call=Call(role="judge", example_id="e"),
    )  # fmt: skip
    assert key == "b4dc62c947609ae3263f78b3675740b3233e6c9f03d698e48438f84336f53bd6"


# -- servers that refuse ---------------------------------------------------------------------------


def test_what_such_a_server_refuses_is_dropped_and_recorded(tmp_path: Path) -> None:
    def script(index: int, body: dict[str, Any]) -> Fault | None:
        if "min_p" in body:
            return Fault.status_error(400, "The min_p sampling parameter is not yet supported")
        return None

    with ScriptedServer(owner="vllm", script=script) as server, Ledger(tmp_path / "l") as ledger:
        got = ask(Endpoint(model="m", base_url=server.base_url, ledger=ledger, max_attempts=1))
    assert got[0].dropped == ("min_p",)
    assert beside(server.requests[-1]) == {"top_k": -1, "repetition_penalty": 1.0}
    with LedgerView(tmp_path / "l") as view:
        (stored,) = view.entries()
    assert stored.request is not None and "min_p" not in stored.request.beside


REFUSALS = {
    "unsupported": ("Unsupported parameter: 'top_p' is not supported with this model.", "top_p"),
    "by name": ("x", "top_p"),
    "open interval": ("Range of top_p should be (0.0, 1.0)", None),
    "out of range": ("top_p: Input should be less than 1", "top_p"),
    "not both": ("`temperature` and `top_p` cannot both be specified for this model.", None),
    "not both, by name": ("temperature and top_p cannot be used together", "temperature"),
    "not both, unsupported": ("Setting both temperature and top_p is not supported", None),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_neutral_top_p_is_given_up_and_the_temperature_stays(name: str) -> None:
    """Whoever left `top_p` alone could ask such servers before, and still can."""
    message, param = REFUSALS[name]

    def script(index: int, body: dict[str, Any]) -> Fault | None:
        return Fault.status_error(400, message, param=param) if "top_p" in body else None

    with ScriptedServer(script=script) as server:
        model = Endpoint(model="m", base_url=server.base_url, max_attempts=1)
        got = ask(model, sampling=Sampling(temperature=0.3)) + ask(model)
    assert [c.dropped for c in got] == [("top_p",)] * 2
    assert [body["temperature"] for body in server.requests] == [0.3, 0.3, 1.0]


@pytest.mark.parametrize(
    "message",
    [
        "Range of top_p should be (0.0, 1.0)",
        "invalid messages in {'temperature': 1.0, 'top_p': 1.0, 'max_tokens': 512}",
        'bad request: {"top_p": 1.0, "top_k": -1}',
    ],
)
def test_errors_about_something_else_are_not_mended_so(message: str) -> None:
    """A value of the user's, or a request that is quoted whole."""
    fault = Fault.status_error(400, message)
    sampling = Sampling(top_p=0.5) if message.startswith("Range") else Sampling()
    with ScriptedServer(script=lambda i, body: fault) as server, pytest.raises(ProviderError):
        ask(Endpoint(model="m", base_url=server.base_url, max_attempts=1), sampling=sampling)
    assert len(server.requests) == 1


def test_an_unknown_parameter_is_not_taken_for_a_known_one_that_is_named_beside_it() -> None:
    def script(index: int, body: dict[str, Any]) -> Fault | None:
        if "seed" in body:
            return Fault.status_error(400, "unsupported: seed (there are temperature, top_p)")
        return None

    with ScriptedServer(script=script) as server:
        got = ask(Endpoint(model="m", base_url=server.base_url), sampling=Sampling(seed=3))
    assert got[0].dropped == ("seed",) and server.requests[-1]["top_p"] == 1.0


def test_a_dropped_top_p_stands_in_the_episode(tmp_path: Path) -> None:
    def script(index: int, body: dict[str, Any]) -> Fault | None:
        return Fault.status_error(400, "x", param="top_p") if "top_p" in body else None

    with ScriptedServer(answer=oracle("tomi", 6), script=script) as server:
        assert api(server.base_url, tmp_path / "run") == 0
    assert [r.episode.notes["dropped"] for r in records(tmp_path / "run")] == [["top_p"]] * 6


def test_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "soulkit")
    with ScriptedServer(owner="vllm") as server:
        ask(Endpoint(model="m", base_url=server.base_url))
    assert "neutral top_k, min_p, repetition_penalty are sent" in caplog.text
