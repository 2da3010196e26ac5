"""In which numbers a server computes, as its log-probs show it; what the comparison needs."""

from __future__ import annotations

import asyncio
import sys

import pytest
import torch

from soulkit.errors import MissingPackage
from soulkit.models.vllm.capabilities import IncompatibleServer
from soulkit.models.vllm.client import Address, VllmClient
from soulkit.models.vllm.replicas import Replicas
from soulkit.models.vllm.weights_check import FolderReading, compare_weights, read_folder
from tests.support.servers.toy_vllm import Body, Toy, ToyVllm

PROMPTS = [tuple(range(1, 60)), tuple(range(30, 5, -1))]
SIZE = 64


class Rounded(ToyVllm):
    """Its logits are rounded as those of `dtype` are; log-probs are taken in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        super().__init__(Toy(size=SIZE))

    def _of_prompt(self, weights: str, prompt: list[int]) -> list[Body | None]:
        nats = logits(prompt).to(self.dtype).float().log_softmax(-1)
        return [None, *(
            {str(t): {"logprob": float(row[t])} for t in {one, int(row.argmax())}}
            for row, one in zip(nats, prompt[1:], strict=False)
        )]  # fmt: skip


def logits(prompt: list[int] | tuple[int, ...]) -> torch.Tensor:
    return torch.randn(len(prompt) - 1, SIZE, generator=torch.Generator().manual_seed(1)) * 3


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
