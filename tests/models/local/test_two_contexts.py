"""Replies of two contexts: at either end ordinary sampling, in between the mixture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from soulkit.errors import ConfigError
from soulkit.models.local.sampler import LocalModel, expert_turns
from soulkit.models.local.tiny import build_tiny
from soulkit.types import Call, Completion, Sampling, Segment
from tests.models.local.test_decode import LEFT_TO_GENERATE, SHAPES, WORDS, made

FACT = Segment("system", " ".join(WORDS[20:29]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", WORDS, max_context=128)


@pytest.fixture(scope="module")
def model(folder: Path) -> LocalModel:
    sampler = made(folder, *SHAPES["qwen3"])
    # Rows end at all times and leave the batch, in the one context as in the other.
    sampler.codec.end_ids = sampler.codec.end_ids | frozenset(range(300, 340))
    return sampler


def question(number: int) -> list[Segment]:
    return [Segment("user", " ".join(WORDS[number : 2 * number + 3]))]


ROWS = [(p, Call(role="actor", example_id=f"e{p}", sample=s)) for p in range(3) for s in range(6)]


def both(model: LocalModel, share: float, sampling: Sampling) -> list[Completion]:
    async def wave() -> list[Completion]:
        return await asyncio.gather(*(
            model.complete_mixed(question(p), [FACT, *question(p)], share, sampling, call)
            for p, call in ROWS
        ))  # fmt: skip

    return asyncio.run(wave())


def alone(
    model: LocalModel, context: Callable[[int], list[Segment]], sampling: Sampling
) -> list[Completion]:
    async def wave() -> list[Completion]:
        return await asyncio.gather(*(model.complete(context(p), sampling, c) for p, c in ROWS))

    return asyncio.run(wave())


def words_of(replies: Sequence[Completion]) -> list[tuple[tuple[int, ...], str, str]]:
    return [(r.token_ids, r.text, r.stop_reason) for r in replies]


SAMPLING = Sampling(max_tokens=14, seed=2, temperature=1.3)


def test_a_share_of_one_is_sampling_with_the_fact_and_of_none_without(model: LocalModel) -> None:
    with_fact = alone(model, lambda p: [FACT, *question(p)], SAMPLING)
    without = alone(model, question, SAMPLING)
    ends = {1.0: with_fact, 0.0: without}
    for share, expected in ends.items():
        replies = both(model, share, SAMPLING)
        assert words_of(replies) == words_of(expected)
        for reply, plain in zip(replies, expected, strict=True):
            np.testing.assert_allclose(reply.logprobs, plain.logprobs, atol=1e-5)
        assert [r.prompt_ids for r in replies] == [r.prompt_ids for r in without]
    assert words_of(with_fact) != words_of(without)
    assert len({len(r.token_ids) for r in with_fact}) > 3


@torch.inference_mode()
def conditional(model: LocalModel, ids: Sequence[int], temperature: float) -> torch.Tensor:
    logits = model.model(input_ids=torch.tensor([list(ids)])).logits[0, -1].float()
    return torch.log_softmax(logits / temperature, -1)


def test_every_token_is_drawn_where_its_switch_says_behind_all_tokens_before(
    model: LocalModel,
) -> None:
    replies, drawn = both(model, 0.5, SAMPLING), set()
    for (p, call), reply in zip(ROWS, replies, strict=True):
        turns = expert_turns(SAMPLING.seed, call, 0.5, len(reply.token_ids))
        drawn |= set(turns.tolist())
        told = model.renderer().prompt_ids([FACT, *question(p)])
        for k, (token, logprob) in enumerate(zip(reply.token_ids, reply.logprobs, strict=True)):
            prompt = told if turns[k] else reply.prompt_ids
            ids = [*prompt, *reply.token_ids[:k]]
            expected = conditional(model, ids, SAMPLING.temperature)[token]
            assert logprob == pytest.approx(float(expected), abs=2e-4)
    assert drawn == {False, True}


def test_the_text_does_not_depend_on_who_shares_the_batch(model: LocalModel) -> None:
    together = both(model, 0.5, SAMPLING)
    small = LocalModel(model.model, model.tokenizer, batch_size=4)
    small.codec.end_ids = model.codec.end_ids
    assert words_of(both(small, 0.5, SAMPLING)) == words_of(together)


def test_first_tokens_have_the_frequencies_of_the_mixture(model: LocalModel) -> None:
    """Of 1,500 draws every token's count lies within five deviations of λp + (1 − λ)q."""
    share, n, context = 0.5, 1500, question(1)
    once = Sampling(max_tokens=1, seed=5, temperature=0.3)

    async def wave() -> list[Completion]:
        return await asyncio.gather(*(
            model.complete_mixed(context, [FACT, *context], share, once,
                                 Call(role="actor", example_id="one", sample=s))
            for s in range(n)
        ))  # fmt: skip

    drawn = [reply.token_ids[0] for reply in asyncio.run(wave())]
    counts = np.bincount(drawn, minlength=len(model.tokenizer))
    p, q = (
        conditional(model, model.renderer().prompt_ids(c), once.temperature).exp().numpy()
        for c in ([FACT, *context], context)
    )
    mixture = share * p + (1 - share) * q
    deviation = np.sqrt(n * mixture * (1 - mixture)) + 1
    assert (abs(counts - n * mixture) < 5 * deviation).all()
    # Either conditional alone would be seen to be another one.
    assert (abs(n * p - n * mixture) > 6 * deviation).any()
    assert (abs(n * q - n * mixture) > 6 * deviation).any()


def test_switches_are_independent_of_the_tokens_and_of_the_share() -> None:
    call = Call(role="actor", example_id="one")
    few, many = (expert_turns(3, call, share, 4000) for share in (0.25, 0.75))
    assert few.mean() == pytest.approx(0.25, abs=0.03)
    assert many.mean() == pytest.approx(0.75, abs=0.03)
    assert not (few & ~many).any()  # a larger share keeps every turn of a smaller one


def test_a_memory_that_cannot_be_kept_twice_is_refused_by_name(folder: Path) -> None:
    recurrent = made(folder, *LEFT_TO_GENERATE["mamba, recurrent"])
    with pytest.raises(ConfigError, match="two contexts"):
        both(recurrent, 0.5, SAMPLING)
