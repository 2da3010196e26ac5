"""What running servers are and can, and which of them are refused before anything is played.

In which numbers a server computes, as its log-probs show it; what the comparison needs.
"""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.errors import MissingPackage, UserError
from soulkit.models.codec import Codec
from soulkit.models.local.tiny import tiny_tokenizer
from soulkit.models.vllm.capabilities import (
    PROBE_TEXT,
    PROBE_TOKENS,
    FolderReading,
    IncompatibleServer,
    ServerCapabilities,
    attached_addresses,
    compare_weights,
    logprobs_mode,
    probe_ids,
    probe_servers,
    read_folder,
)
from soulkit.models.vllm.client import Address, VllmClient
from soulkit.models.vllm.replicas import Replicas
from tests.support.servers.toy_vllm import Body, Toy, ToyVllm

pytestmark = pytest.mark.torch

CODEC = Codec(tiny_tokenizer(["where", "is", "the", "apple", "box", "nobody"]))
SIZE = len(CODEC.tokenizer)
TOKENS = CODEC.tokenizer.encode(PROBE_TEXT, add_special_tokens=False)


def toy(**more: Any) -> Toy:
    return Toy(**{"size": SIZE, "tokens": TOKENS, **more})


def attach(*servers: ToyVllm, model: str = "base") -> ServerCapabilities:
    addresses = attached_addresses([server.url for server in servers])
    fleet = Replicas([VllmClient(one) for one in addresses], in_flight=4, pause_s=0.0)
    return asyncio.run(probe_servers(fleet, model, CODEC))


def refusal(*servers: ToyVllm, model: str = "base") -> UserError:
    with pytest.raises(UserError) as caught:
        attach(*servers, model=model)
    assert all(caught.value.lines())
    return caught.value


def test_a_server_that_lacks_nothing_is_taken_without_a_word() -> None:
    with ToyVllm(toy()) as server:
        assert attach(server) == ServerCapabilities(
            served="base", version="0.32.0", max_context=512,
            logprobs="processed", adapters=True, forms=None, remarks=(),
        )  # fmt: skip
        assert server.adapters == {}


def test_the_probe_is_short_and_goes_as_far_as_the_vocabulary_of_words() -> None:
    ids = probe_ids(CODEC)
    special = CODEC.tokenizer.added_tokens_decoder
    assert len(ids) <= PROBE_TOKENS and not special.keys() & {ids[-1]}
    assert all(one <= ids[-1] or one in special for one in CODEC.tokenizer.get_vocab().values())


# -- log-probs and adapters ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "logprobs", "words"),
    [
        ({"raw": True}, "raw",
         ["only used at temperature 0 and 1", "--logprobs-mode processed_logprobs"]),
        ({"without": frozenset({"logprobs"})}, "none", ["no usable log-probs"]),
        ({"tokens": None}, "processed", []),  # it cannot say how it splits words
    ],
)  # fmt: skip
def test_what_a_server_lacks_is_found_out_and_said(
    more: dict[str, Any], logprobs: str, words: list[str]
) -> None:
    with ToyVllm(toy(**more)) as server:
        abilities = attach(server)
    assert (abilities.served, abilities.logprobs) == ("base", logprobs)
    assert len(abilities.remarks) == bool(words)
    assert all(word in abilities.remarks[0] for word in words)


def test_of_several_servers_the_least_able_counts() -> None:
    no_adapters = frozenset({"adapters"})
    raw = toy(raw=True, without=no_adapters, max_context=128)
    with ToyVllm(toy()) as one, ToyVllm(raw) as other:
        abilities = attach(one, other)
    assert abilities.logprobs == "raw" and not abilities.adapters
    assert abilities.max_context == 128


@pytest.mark.parametrize(
    ("warm", "cold", "mode"),
    [
        ({"a": -1.0, "b": -2.0, "c": -5.0}, {"a": -0.2, "b": -2.2, "c": -8.2}, "processed"),
        ({"a": -1.0, "b": -2.0, "c": -5.0}, {"a": -1.0, "b": -2.0, "c": -5.0}, "raw"),
        # The last of the top five may be another one.
        ({"a": -1.0, "b": -2.0, "c": -5.0}, {"a": -0.2, "b": -2.2, "d": -8.2}, "processed"),
        # So flat that nothing can be told: the cautious answer.
        ({"a": -3.0, "b": -3.0001}, {"a": -3.0, "b": -3.0002}, "raw"),
        # A model that is sure: its log-probs hardly move.
        ({"a": -1e-5, "b": -12.0}, {"a": -1e-9, "b": -24.0}, "processed"),
        # Logits, as they are and divided by the temperature; below zero they add up to less than 1.
        ({"a": 14.0, "b": 9.0, "c": 8.5}, {"a": 14.0, "b": 9.0, "c": 8.5}, "none"),
        ({"a": 14.0, "b": 9.0, "c": 8.5}, {"a": 28.0, "b": 18.0, "c": 17.0}, "none"),
        ({"a": -2.0, "b": -3.0, "c": -4.0}, {"a": -4.0, "b": -6.0, "c": -8.0}, "none"),
        ({"a": -3.0}, {"a": -3.0}, "none"),
        ({}, {}, "none"),
    ],
)
def test_the_mode_is_read_from_distances(
    warm: dict[str, float], cold: dict[str, float], mode: str
) -> None:
    assert logprobs_mode(warm, cold) == mode


# -- refusals --------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[list[dict[str, Any]], str, tuple[str, str, str]]] = {
    "no ids": ([{"without": frozenset({"ids"})}], "base", ("ids", "", "endpoint:MODEL@URL")),
    "fewer tokens": ([{"size": SIZE - 20}], "base", ("different token", "vocabulary", "")),
    "other ids": ([{"tokens": [*TOKENS[:-1], 7]}], "base", ("different token", "other ids", "")),
    "two names": (
        [{"served": "one"}, {"served": "other"}], "elsewhere",
        ("'one' and 'other'", "", "--served-model-name"),
    ),
    "two models": ([{}, {"weights": "others"}], "base", ("{0}(?s:.*){1}", "nats", "")),
}  # fmt: skip
"""Name → the servers, the model that is asked for, words of the three lines."""


@pytest.mark.parametrize("name", REFUSED)
def test_servers_that_cannot_be_sampled_are_refused(name: str) -> None:
    toys, model, words = REFUSED[name]
    with ExitStack() as stack:
        servers = [stack.enter_context(ToyVllm(toy(**more))) for more in toys]
        lines = refusal(*servers, model=model).lines()
    for word, line in zip(words, lines, strict=True):
        assert re.search(word.format(*(server.url for server in servers)), line), lines


def test_nobody_there_is_a_refusal_and_no_dropped_server() -> None:
    with ToyVllm(toy()) as one, ToyVllm(toy()) as other:
        other.die()
        error = refusal(one, other)
    assert isinstance(error, IncompatibleServer)
    assert other.url in error.what and one.url not in error.what


def test_a_wrong_key_names_its_variable_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with ToyVllm(toy(key="the-right-key")) as server:
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        assert "VLLM_API_KEY, which is not set" in refusal(server).why
        monkeypatch.setenv("VLLM_API_KEY", "a-wrong-key-of-ours")
        error = refusal(server)
        assert "VLLM_API_KEY, which is set" in error.why
        assert "a-wrong-key" not in " ".join(error.lines())
        monkeypatch.setenv("VLLM_API_KEY", "the-right-key")
        assert attach(server).served == "base"
    (address,) = attached_addresses(["http://host:1"])
    assert "right" not in repr(address)


@pytest.mark.parametrize("key", ["schlüssel-1234567", "two words", "a\nb1234567"])
def test_what_no_header_can_hold_is_refused_as_a_key(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(UserError, match="VLLM_API_KEY") as caught:
        attached_addresses(["http://host:1"])
    assert all(caught.value.lines()) and key not in " ".join(caught.value.lines())


# -- which model -----------------------------------------------------------------------------------


def test_the_only_model_there_is_taken_and_that_is_said() -> None:
    with ToyVllm(toy(served="base", root="/elsewhere/m")) as server:
        abilities = attach(server, model="owner/name")
        assert abilities.served == "base"
        (line,) = abilities.remarks
        assert "base (from /elsewhere/m)" in line and "assumes it is owner/name" in line


def test_a_context_that_is_shorter_than_the_models_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CODEC, "context_limit", 512)
    with ToyVllm(toy(max_context=128)) as short, ToyVllm(toy(max_context=512)) as whole:
        assert attach(whole).remarks == ()
        abilities = attach(short, whole)
        (line,) = abilities.remarks
        assert short.url in line and whole.url not in line and abilities.max_context == 128
        assert "--max-model-len 128" in line and "context of 512" in line
        monkeypatch.setattr(CODEC, "context_limit", 100)  # --max-context asks for no more
        assert attach(short, whole).remarks == ()


def test_another_model_of_the_hub_is_refused_and_a_copy_of_this_one_is_not() -> None:
    with ToyVllm(toy(served="base", root="owner/name-8B")) as server:
        error = refusal(server, model="owner/name-4B")
        assert "does not serve 'owner/name-4B'" in error.what
        assert "base (from owner/name-8B)" in error.why
        assert (
            "assumes it is other/Name-8B" in attach(server, model="other/Name-8B@main").remarks[0]
        )
        assert "assumes it is ./folder" in attach(server, model="./folder").remarks[0]
    with ToyVllm(toy(served="owner/name-4B", root="models/step-1")) as server:
        assert attach(server, model="owner/name-4B").remarks == ()


@pytest.mark.parametrize("root", ["owner/name", "folder"])
def test_a_model_from_the_same_place_is_the_model(tmp_path: Path, root: str) -> None:
    place = str(tmp_path) if root == "folder" else root
    model = place if root == "folder" else "owner/name@main"
    with ToyVllm(toy(served="short", root=place)) as server:
        abilities = attach(server, model=model)
    assert abilities.served == "short" and abilities.remarks == ()


PROMPTS = [tuple(range(1, 60)), tuple(range(30, 5, -1))]
MODEL_SIZE = 64


class Rounded(ToyVllm):
    """Its logits are rounded as those of `dtype` are; log-probs are taken in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        super().__init__(Toy(size=MODEL_SIZE))

    def _of_prompt(self, weights: str, prompt: list[int]) -> list[Body | None]:
        nats = logits(prompt).to(self.dtype).float().log_softmax(-1)
        return [None, *(
            {str(t): {"logprob": float(row[t])} for t in {one, int(row.argmax())}}
            for row, one in zip(nats, prompt[1:], strict=False)
        )]  # fmt: skip


def logits(prompt: list[int] | tuple[int, ...]) -> torch.Tensor:
    return torch.randn(len(prompt) - 1, MODEL_SIZE, generator=torch.Generator().manual_seed(1)) * 3


def folder(moved: float) -> FolderReading:
    """A folder's float32 reading whose every token is so far from the server's logits."""
    read = []
    for prompt in PROMPTS:
        nats = logits(prompt).log_softmax(-1)
        read.append([float(nats[k, one]) + moved for k, one in enumerate(prompt[1:])])
    return FolderReading("here", read, "float32")


def compare(server: ToyVllm, moved: float) -> str:
    async def comparing() -> str:
        fleet = Replicas([VllmClient(Address(server.url))], in_flight=4)
        try:
            return await compare_weights(fleet, "base", PROMPTS, folder(moved))
        finally:
            await fleet.close()

    return asyncio.run(comparing())


def test_float32_is_compared_exactly() -> None:
    with Rounded(torch.float32) as server:
        assert "16-bit" not in compare(server, 0.0)
        with pytest.raises(IncompatibleServer, match=server.url) as caught:
            compare(server, 1e-3)
    assert "0.0001 nats at any token" in caught.value.why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_numbers_are_compared_grossly_and_that_is_said(dtype: torch.dtype) -> None:
    with Rounded(dtype) as server:
        assert "in 16-bit numbers" in compare(server, 0.1)
        with pytest.raises(IncompatibleServer) as caught:
            compare(server, 0.3)
    assert "0.25 nats on average" in caught.value.why


def test_without_torch_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackage, match="'torch' is not installed") as caught:
        read_folder("folder", None, PROMPTS, device="cpu", dtype="auto")
    assert "--verify-weights" in caught.value.why
