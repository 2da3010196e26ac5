"""What a request leaves out is not left to the server: `top_p` always, more where it matters.

Servers in kinds of their own: what each is sent so that it fills in nothing, and its context.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ContextOverflow
from soulkit.models.api.addresses import open_access
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.probing import Preflight
from soulkit.models.api.server_defaults import PAUSES_S, ServerDefaults, ServerKind
from soulkit.models.api.transport import ClientPool, make_client
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.ledger.view import LedgerView
from soulkit.types import Call, Completion, Sampling, Segment
from tests.models import asking
from tests.support.evaluation import api, oracle, records, soul
from tests.support.reporting import Heard
from tests.support.servers.openai_server import Body, Fault, ScriptedServer
from tests.support.servers.transformers_server import TransformersServer

NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
HELLO = (Segment("user", "bab hello"),)
SAID = "You said: bab hello"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def complete(
    model: Endpoint, count: int = 1, sampling: Sampling | None = None
) -> list[Completion | BaseException]:
    return asking.crowd(model, count=count, sampling=sampling, role="actor", context=HELLO)


def ask(model: Endpoint, count: int = 1, sampling: Sampling | None = None) -> list[Completion]:
    replies = complete(model, count, sampling)
    got = [reply for reply in replies if isinstance(reply, Completion)]
    assert len(got) == count, replies
    return got


def texts(model: Endpoint, count: int, temperature: float) -> set[str]:
    replies = ask(model, count, Sampling(temperature=temperature, max_tokens=6, seed=1))
    assert not any(reply.dropped for reply in replies), replies
    return {reply.text for reply in replies}


def beside(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in NEUTRAL if name in body}


@pytest.mark.parametrize("owner", ["vllm", "sglang", "vLLM"])
def test_engines_that_fill_in_are_sent_neutral_values(
    owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "soulkit")
    with ScriptedServer(owner=owner) as server:
        model = Endpoint(model="scripted", base_url=server.base_url)
        got = [*ask(model, 20), *ask(model, sampling=Sampling(top_p=0.9, temperature=0.0))]
        assert len(server.listings) == 1
    assert all(beside(body) == NEUTRAL for body in server.requests)
    assert [body["top_p"] for body in server.requests] == [1.0] * 20 + [0.9]
    assert all(not completion.dropped for completion in got)
    assert "neutral values are also sent for top_k, min_p, repetition_penalty" in caplog.text


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
        assert [c.text for c in ask(model, 8)] == [SAID] * 8
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
    assert asyncio.run(late()).text == SAID
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
    from soulkit.models.ledger.ledger import request_key, request_of

    messages = [{"role": "user", "content": "hello"}]
    request = request_of("http://localhost:8000/v1", messages, Sampling(seed=1, max_tokens=512))
    key = request_key(request, "m", Call(role="judge", example_id="e"))
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


def test_a_dropped_top_p_stands_in_the_episode(tmp_path: Path) -> None:
    def script(index: int, body: dict[str, Any]) -> Fault | None:
        return Fault.status_error(400, "x", param="top_p") if "top_p" in body else None

    with ScriptedServer(answer=oracle("tomi", 6), script=script) as server:
        assert api(server.base_url, tmp_path / "run") == 0
    assert [r.episode.notes["dropped"] for r in records(tmp_path / "run")] == [["top_p"]] * 6


WORDS = [a + b for a in "bcdfgklm" for b in ("ab", "ed", "im", "om", "un")]
NEUTRAL_VALUES = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


# -- transformers serve ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model whose generation config has no `do_sample`."""
    from soulkit.models.local.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("tiny"), WORDS)


def with_config(folder: Path, copy: Path, **settings: Any) -> Path:
    """The model of `folder` with other settings in its generation config."""
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    file = copy / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return copy


def test_transformers_serve_samples_where_the_model_does_not_say_so(tiny: Path) -> None:
    with TransformersServer(tiny) as server:
        model = Endpoint(model="m", base_url=server.base_url)
        assert len(texts(model, 6, 1.0)) > 3
        assert len(texts(model, 3, 0.0)) == 1
    sent = [json.loads(body["generation_config"]) for body in server.requests]
    assert sent == [{"do_sample": one < 6, **NEUTRAL_VALUES} for one in range(9)]
    assert not server.refused


def test_transformers_serve_takes_nothing_from_the_models_own_config(
    tiny: Path, tmp_path: Path
) -> None:
    """With a top_k of 1 every reply would be the same one."""
    filling = with_config(tiny, tmp_path / "m", do_sample=True, top_k=1, repetition_penalty=5.0)
    with TransformersServer(filling) as server:
        assert len(texts(Endpoint(model="m", base_url=server.base_url), 6, 1.0)) > 3


def test_transformers_serve_is_known_behind_a_proxy_that_shows_nothing_else(tiny: Path) -> None:
    remarks: list[str] = []
    roll = Preflight(Heard(remarks))
    with TransformersServer(tiny, hidden=True) as server:
        model = Endpoint(model="m", base_url=server.base_url, preflight=roll)
        assert len(texts(model, 6, 1.0)) > 3
    assert model.server == ServerKind("transformers") and len(remarks) == 1  # it answered
    assert ["top_k" in body for body in server.refused] == [True]


@pytest.mark.parametrize("status", [400, 422])
def test_another_server_that_refuses_the_test_field_is_asked_again_without_it(status: int) -> None:
    def refuses(body: Body) -> Fault | None:
        return Fault.status_error(status, "top_k is not allowed") if "top_k" in body else None

    remarks: list[str] = []
    roll = Preflight(Heard(remarks))
    with ScriptedServer(on_probe=refuses) as server:
        model = Endpoint(model="m", base_url=server.base_url, preflight=roll)
        (reply,) = ask(model)
    assert reply.dropped == ()
    assert ["top_k" in body for body in (*server.probes, *server.requests)] == [True, False, False]
    assert model.server == ServerKind()
    assert [line.partition(":")[0] for line in remarks] == ["answered", "unknown server"]


def test_transformers_serve_is_known_by_its_refusal_where_nothing_else_shows_it() -> None:
    """The field that is refused here is one that older versions do not know."""

    def script(index: int, body: Body) -> Fault | None:
        unexpected = set(body) & {"chat_template_kwargs"}
        text = f"Unexpected fields in the request: {unexpected}"
        return Fault(status=422, raw=json.dumps({"detail": text}).encode()) if unexpected else None

    with ScriptedServer(script=script) as server:
        model = Endpoint(model="m", base_url=server.base_url)
        (reply,), (other,) = ask(model, sampling=Sampling(thinking=False)), ask(model)
    assert (reply.dropped, other.dropped) == (("thinking",), ())
    assert ["generation_config" in body for body in server.requests] == [False, True, True]
    assert model.server == ServerKind("transformers")


# -- llama.cpp -------------------------------------------------------------------------------------


class LlamaServer(ScriptedServer):
    """llama.cpp's server: it names itself as the owner, and `/props` tells of its slots."""

    def __init__(self, props: Mapping[str, Any] | None = None, **more: Any) -> None:
        super().__init__(owner="llamacpp", extra={"/props": props} if props else {}, **more)


def slots(n_ctx: int) -> dict[str, Any]:
    return {"default_generation_settings": {"n_ctx": n_ctx, "params": {"top_k": 40}},
            "total_slots": 4}  # fmt: skip


def test_llama_cpp_is_sent_neutral_values_in_its_own_words() -> None:
    with LlamaServer() as server:
        complete(Endpoint(model="scripted", base_url=server.base_url), 3)
    sent = [{n: v for n, v in body.items() if n in ("top_k", "min_p", "repeat_penalty",
                                                    "repetition_penalty")}
            for body in server.requests]  # fmt: skip
    assert sent == [{"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}] * 3


@pytest.mark.parametrize(
    ("pages", "context"),
    [
        ({"/props": slots(2048)}, 2048),
        ({"/props": slots(0), "/props?model=scripted": slots(512)}, 512),
        ({"/props": {"default_generation_settings": None}}, None),
        ({"/props": {"n_ctx": 9}}, None),
        ({}, None),
    ],
)
def test_the_context_of_a_slot_is_read(pages: dict[str, Any], context: int | None) -> None:
    """Not the one that the model was trained with, which its list of models tells."""
    meta = {"n_ctx_train": 131_072}
    listed = {"data": [{"id": "scripted", "owned_by": "llamacpp", "meta": meta}]}
    with ScriptedServer(models=Fault.reply(listed), extra=pages) as server:
        model = Endpoint(model="scripted", base_url=server.base_url)
        complete(model)
    assert model.server == ServerKind("llamacpp", context=context)


# -- replies that a server cuts --------------------------------------------------------------------


def cut(tokens: int, prompt: int = 728, **usage: Any) -> Fault:
    """A reply of so many tokens that ended for its length."""
    choice = {"message": {"content": "I was about to say"}, "finish_reason": "length"}
    counts = {"prompt_tokens": prompt, "completion_tokens": tokens, **usage}
    return Fault.reply({"choices": [choice], "usage": counts})


def reply_to(fault: Fault, sampling: Sampling | None = None, **server: Any) -> Any:
    with ScriptedServer(script=lambda i, body: fault, **server) as one:
        return complete(Endpoint(model="scripted", base_url=one.base_url), 1, sampling)[0]


VLLM = {"data": [{"id": "scripted", "owned_by": "vllm", "max_model_len": 2048}]}


def llama(n_ctx: int) -> dict[str, Any]:
    return {"owner": "llamacpp", "extra": {"/props": slots(n_ctx)}}


CUT: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "llama.cpp": (llama(2048), (1320, 728), "allows 2048 tokens"),
    "vllm": ({"models": Fault.reply(VLLM)}, (1320, 728), "allows 2048 tokens"),
    "for another reason": (llama(9000), (1320, 728), "does not name"),
    "unknown": ({}, (1320, 728), "does not name"),
    "a prompt that fills the context": (llama(2048), (0, 2048), "allows 2048 tokens"),
    "full near the limit asked for": (llama(8900), (8170, 728), "allows 8900 tokens"),
}


@pytest.mark.parametrize("name", CUT)
def test_a_reply_that_the_server_cut_is_an_overflow(name: str) -> None:
    server, (tokens, prompt), words = CUT[name]
    error = reply_to(cut(tokens, prompt), **server)
    assert isinstance(error, ContextOverflow)
    assert f"cut the reply after {tokens} of 8192 requested tokens" in error.detail
    assert words in error.detail and f"prompt: {prompt} tokens" in error.detail
    assert "max-tokens" not in error.detail


@pytest.mark.parametrize(
    ("fault", "limit"),
    [
        (cut(64), 64),
        (cut(63), 64),
        (cut(8170), 8192),
        (cut(20, total_tokens=728 + 64), 64),
        (cut(20, completion_tokens_details={"reasoning_tokens": 64}), 64),
        (cut(0), 64),
        (Fault.reply({"choices": [{"message": {"content": "x"}, "finish_reason": "length"}]}), 64),
        (Fault.reply({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}],
                      "usage": {"prompt_tokens": 1, "completion_tokens": 5}}), 64),
    ],
    ids=["limit", "one less", "near it", "total", "thinking", "zero", "uncounted", "whole"],
)  # fmt: skip
def test_a_reply_at_the_limit_asked_for_is_the_models_own(fault: Fault, limit: int) -> None:
    assert isinstance(reply_to(fault, Sampling(max_tokens=limit)), Completion)


def test_a_cut_reply_is_asked_for_again_when_the_run_is_resumed(tmp_path: Path) -> None:
    """The server may have more context then; a replay shows the same overflow."""
    path = tmp_path / "ledger.sqlite"
    with ScriptedServer(script={0: cut(1320)}) as server:
        with Ledger(path, mends=True) as ledger:
            model = Endpoint(model="m", base_url=server.base_url, ledger=ledger)
            assert isinstance(complete(model)[0], ContextOverflow)
        with Ledger(path, "replay") as ledger:
            model = Endpoint(model="m", base_url=server.base_url, ledger=ledger)
            assert isinstance(complete(model)[0], ContextOverflow)
        with Ledger(path, mends=True) as ledger:
            model = Endpoint(model="m", base_url=server.base_url, ledger=ledger)
            assert isinstance(complete(model)[0], Completion)
        assert len(server.requests) == 2


# -- servers that are not known --------------------------------------------------------------------


def test_of_an_unknown_server_one_line_is_said() -> None:
    remarks: list[str] = []
    with ScriptedServer() as one, LlamaServer() as other:
        roll = Preflight(Heard(remarks))
        for server in (one, other):
            complete(Endpoint(model="m", base_url=server.base_url, preflight=roll), 4)
    (line,) = (remark for remark in remarks if not remark.startswith("answered"))
    assert line.startswith("unknown server: m at 127.0.0.1:") and "defaults" in line


@pytest.mark.parametrize(
    ("url", "unknown"),
    [("https://api.openai.com/v1", False), ("https://x.openai.azure.com/openai/v1", False),
     ("https://api.anthropic.com/v1", False), ("http://127.0.0.1:9/v1", True)],
)  # fmt: skip
def test_services_with_documented_defaults_are_known_without_a_question(
    url: str, unknown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")

    async def kind() -> ServerKind:
        pool = ClientPool(lambda n: make_client("http://127.0.0.1:9/v1", 1.0, n), 1)
        try:
            defaults = ServerDefaults("m", open_access(url, "OPENAI_API_KEY"), 1.0)
            return await defaults.server(pool, asyncio.Lock())
        finally:
            await pool.close()

    server = asyncio.run(kind())
    assert server.unknown is unknown and server.beside(Sampling()) == {}
