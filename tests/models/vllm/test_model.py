"""A model behind servers: read as a local one, with forms, a ledger, and failures that are data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ContextOverflow, ProviderError
from soulkit.models.api.probing import SCHEMA_FORM as QUESTION
from soulkit.models.api.probing import SCHEMA_WORD
from soulkit.models.base import Sampler
from soulkit.models.codec import Codec
from soulkit.models.ledger.ledger import Ledger, ReplayMiss
from soulkit.models.ledger.view import LedgerView
from soulkit.models.local.tiny import tiny_tokenizer
from soulkit.models.vllm.client import Address, LogprobsMode, VllmClient
from soulkit.models.vllm.model import VllmModel
from soulkit.models.vllm.replicas import NoServerLeft, Replicas
from soulkit.types import Call, Completion, Form, Sampling, Segment
from tests.support.servers.ids_server import Fault, IdsServer, logprob

WORDS = ["red", "green", "blue", "yes"]
CODEC = Codec(tiny_tokenizer(WORDS), context_limit=96, name="tiny")
END = min(CODEC.end_ids)
CALL, JUDGE = Call(role="actor", example_id="x"), Call(role="judge", example_id="x")
GREEDY = Sampling(temperature=0.0, max_tokens=12, seed=1)
ASKED = (Segment("user", "red or green"),)
FORM = Form("verdict", '{"properties":{"yes":{}},"required":["yes"],"type":"object"}')


@dataclass(frozen=True)
class Truths:
    logprobs: LogprobsMode = "processed"
    forms: bool | None = None
    max_context: int | None = None


def fleet(server: IdsServer) -> Replicas:
    return Replicas([VllmClient(Address(server.url))], in_flight=8, pause_s=0.0)


def ids(text: str) -> list[int]:
    return list(CODEC.tokenizer.encode(text, add_special_tokens=False))


def says(*texts: str, end: bool = True, **more: Any) -> IdsServer:
    """A server that answers with these texts in turn, then with the last one."""
    left = [[*ids(text), *([END] if end else [])] for text in texts]
    return IdsServer(lambda body: left.pop(0) if len(left) > 1 else left[0], **more)


def model(server: IdsServer, **more: Any) -> VllmModel:
    settings: dict[str, Any] = {"abilities": Truths(), **more}
    return VllmModel(fleet(server), CODEC, name="tiny", served="base", **settings)


def run(
    one: VllmModel, sampling: Sampling = GREEDY, call: Call = CALL,
    context: Sequence[Segment] = ASKED,
) -> Completion:  # fmt: skip
    async def ask() -> Completion:
        try:
            return await one.complete(context, sampling, call)
        finally:
            assert one._fleet is not None
            await one._fleet.close()

    return asyncio.run(ask())


def test_a_reply_is_read_by_the_codec() -> None:
    with says("<think>red?</think>green") as server:
        one = model(server, policy_version="abc")
        sampler: Sampler = one
        reply = run(one)
    emitted = [*ids("<think>red?</think>green"), END]
    assert (reply.text, reply.reasoning, reply.stop_reason) == ("green", "red?", "stop")
    assert reply.token_ids == tuple(emitted) and reply.token_ids[-1] == END
    assert reply.logprobs == tuple(logprob(t, 1.0) for t in emitted)
    assert (reply.policy, reply.dropped, reply.ignored) == ("abc", (), ())
    prompt = CODEC.prompt_ids(ASKED)
    assert reply.prompt_ids == tuple(prompt) == tuple(server.requests[0]["prompt"])
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), len(emitted))
    assert sampler.prompt_length(ASKED) == len(prompt) and sampler.context_limit == 96


def test_the_token_that_completes_a_stop_string_stays() -> None:
    with says("red green blue yes", end=False) as server:
        reply = run(model(server), replace(GREEDY, stop=(" blue",)))
        cut = run(model(server), replace(GREEDY, max_tokens=2))
    assert (reply.text, reply.stop_reason) == ("red green", "stop")
    assert reply.token_ids == tuple(ids("red green blue"))
    assert len(reply.logprobs) == len(reply.token_ids)
    assert (cut.text, cut.stop_reason) == ("red green", "length")


def test_a_reply_that_the_server_cut_at_a_limit_of_its_own_is_none() -> None:
    script = {0: Fault(choice={"finish_reason": "length"})}
    with says("red green", end=False, script=script) as server:
        with pytest.raises(ProviderError, match=r"after 2 of \d+ tokens.*--generation-config vllm"):
            run(model(server))
        assert len(server.requests) == 1


def test_an_end_that_only_the_server_knows_is_one() -> None:
    script = {0: Fault(choice={"finish_reason": "stop"})}
    with says("red", end=False, script=script) as server:
        assert run(model(server)).stop_reason == "stop"


@pytest.mark.parametrize(
    ("sampling", "mode", "temperature", "dropped"),
    [
        (replace(GREEDY, temperature=0.7), "processed", 0.7, ()),
        (replace(GREEDY, temperature=0.7, top_p=0.9), "processed", None, ("logprobs",)),
        (replace(GREEDY, temperature=1.0, top_p=0.9), "raw", 1.0, ()),
        (replace(GREEDY, temperature=0.7), "raw", None, ("logprobs",)),
        (GREEDY, "none", None, ("logprobs",)),
        (replace(GREEDY, temperature=0.001), "processed", None, ("logprobs", "temperature")),
    ],
)
def test_logprobs_are_those_of_the_logits_or_left_out(
    sampling: Sampling, mode: LogprobsMode, temperature: float | None, dropped: tuple[str, ...]
) -> None:
    with says("red green", raw=mode == "raw") as server:
        reply = run(model(server, abilities=Truths(mode)), sampling)
    notes = () if temperature is None else tuple(logprob(t, temperature) for t in reply.token_ids)
    assert (reply.logprobs, reply.dropped) == (notes, dropped)


def test_a_prompt_that_leaves_no_room_is_not_sent() -> None:
    with says("red") as server:
        one = model(server, abilities=Truths(max_context=40))
        assert one.context_limit == 40 and CODEC.context_limit == 96
        with pytest.raises(ContextOverflow, match="holds 40"):
            run(one, context=(Segment("user", "red " * 60),))
    assert server.requests == []


# -- forms -----------------------------------------------------------------------------------------


def test_a_server_is_asked_once_whether_it_follows_a_schema(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with says('{"yes": 1}', spell=lambda text: [*ids(text), END]) as server:
        server.says = lambda body: [*ids('{"yes": 1}'), END]
        one = model(server)
        assert asyncio.run(one.holds_forms())
        assert server.requests[0]["structured_outputs"] == {"json": {"enum": [SCHEMA_WORD]}}
        assert asyncio.run(one.holds_forms()) and len(server.requests) == 1
    assert "tiny: it enforces JSON schemas" in caplog.messages


def test_a_server_that_ignores_schemas_is_asked_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with says("Tuesday", "yes", "red") as server:
        one = model(server)
        one.expect_forms()
        first = run(one, call=JUDGE)
        second = run(one, replace(GREEDY, form=FORM), JUDGE)
    asked = [body.get("structured_outputs") for body in server.requests]
    assert asked == [{"json": {"enum": [SCHEMA_WORD]}}, None, None]
    assert (first.dropped, second.dropped, second.ignored) == ((), ("form",), ())
    assert sum("does not enforce" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    ("text", "ignored"), [('{"yes": 1}', ()), ("yes", ("form",)), ('{"no": 1}', ("form",))]
)
def test_a_form_that_was_held_and_is_not_there_is_recorded(
    text: str, ignored: tuple[str, ...]
) -> None:
    with says(text) as server:
        one = model(server, abilities=Truths(forms=True))
        reply = run(one, replace(GREEDY, form=FORM), JUDGE)
    assert "structured_outputs" in server.requests[0] and "logprobs" not in server.requests[0]
    assert (reply.dropped, reply.ignored) == (("logprobs",), ignored)


def test_a_form_that_the_server_cannot_hold_is_left_out() -> None:
    script = {0: Fault(status=400, message="Grammar error: unsupported")}
    with says("yes", script=script) as server:
        one = model(server, abilities=Truths(forms=True))
        replies = [run(one, replace(GREEDY, form=FORM), JUDGE) for _ in range(2)]
    assert [reply.dropped for reply in replies] == [("form",)] * 2
    assert ["structured_outputs" in body for body in server.requests] == [True, False, False]


def test_a_form_leaves_no_room_to_think() -> None:
    opened = Codec(tiny_tokenizer(WORDS), name="thinks")
    opened.tokenizer.chat_template = str(opened.tokenizer.chat_template).replace(
        "assistant\\n' }}{%- endif", "assistant\\n<think>' }}{%- endif"
    )
    codec = Codec(opened.tokenizer, name="thinks")
    with says("red</think>yes") as server:
        one = VllmModel(fleet(server), codec, name="t", served="b",
                        abilities=Truths(forms=True))  # fmt: skip
        reply = run(one, replace(GREEDY, form=FORM), JUDGE)
    assert (reply.reasoning, reply.text, reply.dropped) == ("red", "yes", ("form",))
    assert "structured_outputs" not in server.requests[0]


def test_the_question_is_one_that_nobody_answers_by_chance() -> None:
    assert QUESTION.schema == f'{{"enum":["{SCHEMA_WORD}"]}}'


# -- the ledger ------------------------------------------------------------------------------------


def kept(server: IdsServer, ledger: Ledger, **more: Any) -> VllmModel:
    return model(server, ledger=ledger, ledger_name="/models/tiny", **more)


def test_a_players_replies_are_found_again_on_another_port(tmp_path: Path) -> None:
    hot = replace(GREEDY, temperature=0.7, form=FORM)
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        with says('{"yes": 1}') as server:
            first = run(kept(server, ledger, abilities=Truths(forms=True)), hot, JUDGE)
        with says("blue") as other:
            again = run(kept(other, ledger), hot, JUDGE)
            different = run(kept(other, ledger), GREEDY, replace(JUDGE, sample=1))
    assert "logprobs" not in server.requests[0] and first.logprobs == ()
    assert again == first and (first.text, first.dropped, first.usage.cost) == (
        '{"yes": 1}', (), 0.0
    )  # fmt: skip
    assert different.text == "blue" and len(other.requests) == 1
    with LedgerView(path) as view:
        stored = list(view.entries())
        assert view.verify().problems == []
    assert {one.request.base_url for one in stored if one.request} == {"vllm:/models/tiny"}
    assert '"token_ids"' in stored[0].entry.reply


def test_a_replay_asks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with says("red") as server, Ledger(path) as ledger:
        recorded = run(kept(server, ledger), call=JUDGE)
    with Ledger(path, "replay") as ledger:
        offline = kept(server, ledger)
        offline.expect_forms()
        assert run(offline, call=JUDGE) == recorded
        with pytest.raises(ReplayMiss):
            run(offline, call=replace(JUDGE, sample=1))


def test_a_reply_that_was_of_no_use_is_asked_for_again(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite", mends=True) as ledger, says("red", "blue") as server:
        one = kept(server, ledger)
        assert run(one, call=JUDGE).text == "red"
        one.set_aside(ASKED, GREEDY, JUDGE)
        assert run(one, call=JUDGE).text == "blue"


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "error", "asked"),
    [
        ({0: Fault(status=404, message="no such model")}, ProviderError, 1),
        ({0: Fault(status=400, message="maximum context length is 9 tokens")}, ContextOverflow, 1),
        ({0: Fault(choice={"token_ids": None})}, None, 2),
        ({n: Fault(choice={"finish_reason": "abort"}) for n in range(2)}, ProviderError, 2),
    ],
)  # fmt: skip
def test_failures(script: Mapping[int, Fault], error: type[Exception] | None, asked: int) -> None:
    with says("red", script=script) as server:
        if error is None:
            assert run(model(server)).text == "red"
        else:
            with pytest.raises(error):
                run(model(server))
    assert len(server.requests) == asked


def test_what_ends_a_fleet_is_not_blamed_on_the_call() -> None:
    with says("red") as server:
        one = model(server)
    with pytest.raises(NoServerLeft):
        run(one)


def test_who_is_closed_answers_no_more_and_begins_anew() -> None:
    async def close(one: VllmModel) -> None:
        await one.close()

    with says("red") as server:
        one = model(server)
        asyncio.run(close(one))
        with pytest.raises(ProviderError, match="closed"):
            run(one)
        assert run(one.anew()).text == "red"


# -- weights ---------------------------------------------------------------------------------------


def test_new_weights_are_sampled_from_the_next_call_on() -> None:
    with says("red") as server:
        one = model(server)
        before = run(one)
        one.use("adapter-1", "v1")
        after = run(one)
    assert [body["model"] for body in server.requests] == ["base", "adapter-1"]
    assert (before.policy, after.policy) == ("", "v1")
