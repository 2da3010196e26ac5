"""Draws: the inverse of the cumulative probabilities, with kernels that a GPU has as well."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from soulkit.models.local.decode import decode_batch, windows_of
from soulkit.models.local.draw import Draw
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.types import Sampling
from tests.support.cuda_ops import CudaDeterminism

CUTS = [
    Sampling(), Sampling(temperature=0.6), Sampling(top_p=0.9), Sampling(top_k=40),
    Sampling(min_p=0.02), Sampling(top_k=700, top_p=0.95, min_p=0.001), Sampling(top_k=1),
]  # fmt: skip


def by_one_sum(logprobs: Tensor, uniform: Tensor, cut: Sampling) -> Tensor:
    """The draw with one cumulative sum over the vocabulary."""
    order, probs = None, logprobs.double().exp()
    if cut.cuts:
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        probs = probs * (probs >= cut.min_p * probs[:, :1])
        probs[:, cut.top_k or probs.shape[1] :] = 0
        left = probs.sum(-1, keepdim=True) if cut.top_k or cut.min_p else 1.0
        probs = probs * (probs.cumsum(-1) - probs < cut.top_p * left)
    sums = probs.cumsum(-1)
    at = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    return at[:, 0] if order is None else order.gather(1, at)[:, 0]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("vocabulary", [3, 128, 2000, 151_936])
def test_a_draw_equals_one_cumulative_sum(vocabulary: int, cut: Sampling) -> None:
    rng = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(8, vocabulary, generator=rng)
    logits[0, 1:] = -torch.inf
    logits[1, ::2] = -torch.inf
    uniform = torch.rand(8, 1, generator=rng, dtype=torch.float64)
    drawn, logprobs = Draw(uniform, cut).pick(logits, uniform[:, 0])
    every = torch.log_softmax(logits / cut.temperature, -1)
    assert drawn.tolist() == by_one_sum(every, uniform, cut).tolist()
    assert torch.equal(logprobs, every.gather(1, drawn[:, None])[:, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_impossible_token_is_drawn(dtype: torch.dtype) -> None:
    """The number 0, the largest below 1, and sums that hit a boundary exactly or by rounding."""
    probs = torch.zeros(1, 300)
    places = [5, 127, 128, 253, 263]
    probs[0, places] = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1])
    edges = np.concatenate([np.linspace(0, 1, 101), np.cumsum([0.1, 0.2, 0.3, 0.3])])
    shares = [f(e) for e in edges for f in (lambda e: e, lambda e: np.nextafter(e, 0),
                                            lambda e: np.nextafter(e, 1))]  # fmt: skip
    share = torch.tensor(shares, dtype=dtype).clamp(0, 1)
    at = Draw(share[:, None], Sampling()).pick(probs.log().expand(len(share), -1), share)[0]
    assert set(at.tolist()) == set(places) and at[0] == places[0]
    ordered = [place for _, place in sorted(zip(share.tolist(), at.tolist(), strict=True))]
    assert ordered == sorted(ordered)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    words = [f"{a}{b}" for a in "bdfgkl" for b in "aeiou"]
    return LocalModel.load(build_tiny(tmp_path_factory.mktemp("m") / "tiny", words))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_decode_loop_has_deterministic_kernels_on_a_gpu(
    model: LocalModel, cut: Sampling
) -> None:
    windows = windows_of(model.model)
    assert windows is not None
    draw = Draw(torch.rand(5, 6, dtype=torch.float64), cut)
    prompts = [[7, 8, 9], [7, 8, 9], [4, 5, 6, 7, 8], [4, 5, 6, 7, 8], [9]]
    with CudaDeterminism() as ops:
        decode_batch(model.model, windows, prompts, draw, lambda row, ids: len(ids) > row, 0)
        draw(torch.zeros(5, 1), torch.zeros(5, 90))  # within `generate`
    assert "cumsum.default" in ops.seen, "of integers only"
