"""Sampling options: each engine is sent what was asked for, and old ledger keys stay valid."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soulkit.models.api.endpoint import Endpoint
from soulkit.models.ledger.ledger import request_key, request_of
from soulkit.models.players.settings import RoleSettings
from soulkit.models.vllm.client import completion_request, gives_logprobs
from soulkit.types import ADDED_LATER, Call, Completion, Form, Sampling, Segment
from tests.support.evaluation import api, oracle
from tests.support.servers.openai_server import ScriptedServer

CALL = Call(role="judge", example_id="e1")
CUT = Sampling(top_k=40, min_p=0.05)


def key(sampling: Sampling) -> str:
    messages = [{"role": "user", "content": "a"}]
    return request_key(request_of("u", messages, sampling), "m", CALL)


def test_keys_that_were_recorded_before_an_option_existed_stay_valid() -> None:
    """The figures are those of the version without `top_k`, `min_p` and forms."""
    plain, many = Sampling(max_tokens=512), Sampling(temperature=0.5, seed=3, stop=("X",))
    assert key(plain) == "44676b3c0616144e14422a1ba0c5cbf3450bc3c4a9f809148ed0a255a1ce685b"
    assert key(many) == "3ec960fe937d0694f3815e2b3658ef6340dd7bdcf8e9cfb1e1a5077702a842bd"
    for option in fields(Sampling):
        assert key(replace(plain, **{option.name: getattr(plain, option.name)})) == key(plain)


CHANGED: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "max_tokens": 9, "seed": 1, "stop": ("X",),
    "thinking": False, "reasoning_effort": "low", "form": Form("F", "{}"), "top_k": 4, "min_p": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", [option.name for option in fields(Sampling)])
def test_every_option_is_in_the_key_unless_it_is_neutral(name: str) -> None:
    changed = replace(Sampling(), **{name: CHANGED[name]})
    assert key(changed) != key(Sampling())
    later = {option.name for option in fields(Sampling) if option.metadata == ADDED_LATER}
    assert (name in Sampling().identity()) == (name not in later)


def test_the_first_source_that_names_an_option_decides() -> None:
    chosen = Sampling.first_of({"top_k": 0, "seed": None}, {"top_k": 9, "seed": 3, "x": 1}, {})
    assert chosen == Sampling(top_k=0, seed=3)


def test_a_player_may_be_sampled_with_cuts() -> None:
    player = RoleSettings(model="m", top_k=40, min_p=0.05)
    assert player.sampling("partner", 1) == replace(CUT, seed=1, max_tokens=4096)
    assert {"top_k", "min_p"} <= player.model_dump().keys()
    assert not {"top_k", "min_p"} & RoleSettings(model="m").model_dump().keys()


def asked(model: Endpoint, sampling: Sampling) -> Completion:
    async def once() -> Completion:
        try:
            return await model.complete((Segment("user", "hello"),), sampling, CALL)
        finally:
            await model.close()

    return asyncio.run(once())


@pytest.mark.parametrize("owner", ["", "vllm", "llamacpp"])
def test_a_server_is_sent_the_cuts(owner: str) -> None:
    with ScriptedServer(owner=owner) as server:
        reply = asked(Endpoint(model="scripted", base_url=server.base_url), CUT)
    body = server.requests[-1]
    assert (body["top_k"], body["min_p"]) == (40, 0.05)
    assert not reply.dropped


@pytest.mark.torch
def test_transformers_serve_takes_cuts_within_its_generation_config(
    tmp_path: Any,
) -> None:
    from soulkit.models.local.tiny import build_tiny
    from tests.support.servers.transformers_server import TransformersServer

    with TransformersServer(build_tiny(tmp_path / "tiny", ["yes", "no"])) as server:
        reply = asked(Endpoint(model="m", base_url=server.base_url), replace(CUT, max_tokens=2))
    sent = json.loads(server.requests[-1]["generation_config"])
    assert (sent["top_k"], sent["min_p"]) == (40, 0.05)
    assert not server.refused and not reply.dropped


def test_a_vllm_server_is_sent_the_cuts_and_gives_no_logprobs_of_them() -> None:
    body = completion_request("m", [1], CUT, CALL, room=9, end_ids=(2,), logprobs=False, form=False)
    assert (body["top_k"], body["min_p"], body["top_p"]) == (40, 0.05, 1.0)
    plain = completion_request(
        "m", [1], Sampling(), CALL, room=9, end_ids=(2,), logprobs=False, form=False
    )
    assert (plain["top_k"], plain["min_p"]) == (-1, 0.0)
    for cut in (replace(CUT, min_p=0.0), replace(CUT, top_k=0)):
        assert not gives_logprobs(cut, "processed", form=False)
        assert gives_logprobs(cut, "raw", form=False)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("sampling", "likely"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(min_p=0.5), {0, 1}),
        (Sampling(top_k=3, top_p=0.6), {0, 1}),  # of what the three have together
        (Sampling(top_k=3, min_p=0.2), {0, 1, 2}),
        (Sampling(top_p=0.45), {0, 1}),
        (Sampling(), {0, 1, 2, 3}),
    ],
)
def test_a_local_model_draws_from_what_is_left(sampling: Sampling, likely: set[int]) -> None:
    import torch

    from soulkit.models.local.decode import Draw

    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    uniform = torch.from_numpy(np.linspace(0.0, 0.999, 400)).reshape(-1, 1)
    drawn, logprobs = Draw(uniform, sampling).pick(probs.log().expand(400, 4), uniform[:, 0])
    assert set(drawn.tolist()) == likely
    assert torch.allclose(logprobs, probs.log()[drawn]), "the log-probs are of the whole"
    counts = torch.bincount(drawn, minlength=4) / 400
    left = probs * torch.tensor([float(i in likely) for i in range(4)])
    assert torch.allclose(counts, left / left.sum(), atol=0.01)


def test_an_evaluation_sends_and_records_the_cuts(tmp_path: Path) -> None:
    with ScriptedServer(answer=oracle("tomi", 2)) as server:
        cuts = ("--top-k", 40, "--min-p", 0.05, "--limit", 2)
        assert api(server.base_url, tmp_path / "cut", *cuts) == 0
        sent = server.requests[-1]
        assert api(server.base_url, tmp_path / "plain", "--limit", 2) == 0
        assert not {"top_k", "min_p"} & server.requests[-1].keys()
    assert (sent["top_k"], sent["min_p"]) == (40, 0.05)
    recorded = {
        name: json.loads((tmp_path / name / "conditions.json").read_text())["tasks"]["tomi"]
        for name in ("cut", "plain")
    }
    assert recorded["cut"]["sampling"]["top_k"] == 40
    assert "top_k" not in recorded["plain"]["sampling"], "as in runs from before the option"
