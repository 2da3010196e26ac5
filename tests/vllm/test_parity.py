"""What vLLM says is what transformers and PEFT say: the ids row by row, the log-probs to 1e-4.

Rounding may turn the choice between two tokens that the model holds equal. A row may differ there
and nowhere else: where the trainer's own two best logits are closer than TIE.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from soulkit.types import Completion
from tests.vllm.rows import CHOICE_TASKS, ROWS, evaluated, replies

pytestmark = [pytest.mark.vllm, pytest.mark.torch]

TIE = 1e-4
"""Two logits that rounding may put in another order."""
TIES = 4
"""Of 200 rows: more of them would be no coincidence."""
EXACT = 1e-4
"""Between log-probs, in nats."""
Replies = dict[str, Completion]


@dataclass(frozen=True)
class Weights:
    """What is compared: the model alone, or with the adapter."""

    model: Path
    adapter: Path | None

    @property
    def arguments(self) -> tuple[object, ...]:
        return () if self.adapter is None else ("--adapter", self.adapter)

    def trainer(self) -> Any:
        """As training loads it: transformers, PEFT, float32."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        if self.adapter is not None:
            model = PeftModel.from_pretrained(model, self.adapter)
        return model.eval()


@pytest.fixture(scope="module", params=["base", "adapter"])
def weights(request: pytest.FixtureRequest, tiny_model: Path, tiny_adapter: Path) -> Weights:
    return Weights(tiny_model, tiny_adapter if request.param == "adapter" else None)


def logits_after(trainer: Any, prompt: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
    """float32 [len(ids), vocabulary]: what each of `ids` was drawn from; one plain forward pass."""
    with torch.no_grad():
        logits = trainer(torch.tensor([[*prompt, *ids]])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def is_tie(trainer: Any, one: Completion, other: Completion) -> bool:
    """Whether two replies to one prompt part where the model can hardly choose."""
    assert one.prompt_ids == other.prompt_ids
    length = min(len(one.token_ids), len(other.token_ids))
    at = next((i for i in range(length) if one.token_ids[i] != other.token_ids[i]), None)
    if at is None:
        return False
    first, second = logits_after(trainer, one.prompt_ids, one.token_ids)[at].topk(2).values
    return bool(first - second < TIE)


def test_greedy_replies_are_those_of_transformers_and_peft(
    weights: Weights, attached: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = ("--temperature", 0, *weights.arguments)
    here = replies(evaluated(tmp_path / "here", weights.model, "local", *greedy))
    there = replies(evaluated(tmp_path / "there", weights.model, attached, *greedy))
    assert here.keys() == there.keys() and len(there) == ROWS * len(CHOICE_TASKS) == 200
    trainer = weights.trainer()
    other = [row for row in here if here[row].token_ids != there[row].token_ids]
    assert [row for row in other if not is_tie(trainer, here[row], there[row])] == []
    assert len(other) <= TIES
    assert worst_lead(trainer, there) < TIE
    with capsys.disabled():
        print(f"\n{len(there)} rows: {len(there) - len(other)} equal, {len(other)} ties")


def worst_lead(trainer: Any, there: Replies) -> float:
    """By how much plain transformers' favourite leads a token of vLLM's, at most, in logits."""
    leads = [0.0]
    for one in there.values():
        logits = logits_after(trainer, one.prompt_ids, one.token_ids)
        drawn = logits.gather(1, torch.tensor(one.token_ids)[:, None])
        leads.append(float((logits.max(1).values - drawn[:, 0]).max()))
    return max(leads)


def test_an_adapter_says_something_else(
    tiny_model: Path, tiny_adapter: Path, attached: str, tmp_path: Path
) -> None:
    greedy, rows = ("--temperature", 0), 5
    base = replies(evaluated(tmp_path / "a", tiny_model, attached, *greedy, rows=rows))
    adapter = ("--adapter", tiny_adapter)
    tuned = replies(evaluated(tmp_path / "b", tiny_model, attached, *greedy, *adapter, rows=rows))
    same = [row for row in base if base[row].token_ids == tuned[row].token_ids]
    assert len(same) < len(base) / 2
    assert {one.policy for one in base.values()} == {""}
    assert len({one.policy for one in tuned.values()} - {""}) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_a_plain_forward_pass(
    weights: Weights, attached: str, tmp_path: Path, temperature: float
) -> None:
    sampled = ("--temperature", temperature, *weights.arguments)
    there = replies(evaluated(tmp_path / "run", weights.model, attached, *sampled, rows=10))
    trainer, worst, n = weights.trainer(), 0.0, 0
    for one in there.values():
        logits = logits_after(trainer, one.prompt_ids, one.token_ids) / (temperature or 1.0)
        own = logits.log_softmax(1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        assert len(one.logprobs) == len(one.token_ids) > 0
        worst = max(worst, float((own - torch.tensor(one.logprobs)).abs().max()))
        n += len(one.token_ids)
    assert n > 200
    assert worst < EXACT
