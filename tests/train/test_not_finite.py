"""A number that is not finite: the update is left out, counted and told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soulkit.runs.jsonl import read_jsonl
from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import prepare_step
from soulkit.train.model.teacher import start_ema
from soulkit.train.model.update import take_updates
from soulkit.train.objectives.sequences import TrainSequence
from soulkit.train.sft.steps import imitate
from soulkit.train.state.metrics import StepLine
from soulkit.train.state.stops import MOST_SKIPS, Skips, step_remarks, too_many_skips
from soulkit.train.step import learn, with_advantages
from tests.support.training import config, policy_of, random_model, soul, step_of

LORA = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """A policy that keeps a moving average."""
    policy = policy_of(random_model(tmp_path / "tiny"), **LORA)
    start_ema(policy)
    return policy


def adam(policy: Policy) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in policy.trained], lr=0.01)


def everything(policy: Policy, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of weights, moving average and the optimizer's moments."""
    moments = [v for state in optimizer.state.values() for v in state.values()]
    weights = [p.detach() for _, p in policy.trained]
    return [t.clone() for t in (*weights, *(policy.ema or {}).values(), *moments)]


@contextmanager
def broken_backward(policy: Policy, when: Callable[[], bool]) -> Iterator[None]:
    """A layer whose backward pass gives NaN, its forward pass what it always gave."""

    def spoil(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        if output.requires_grad and when():
            output.register_hook(lambda grad: grad * math.nan)
        return output

    handle = policy.decoder.norm.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def of_one(example: str, **changes: float) -> Callable[[list[TrainSequence]], list[TrainSequence]]:
    return lambda sequences: [
        replace(s, **changes) if s.example_id == example else s for s in sequences
    ]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (of_one("x1", reward=math.nan), "an advantage is not finite"),
        (of_one("x1", reward=math.inf), "an advantage is not finite"),
        (of_one("x1", weight=math.inf), "the loss is"),
    ],
)
def test_the_mini_batch_of_a_broken_number_is_left_out_and_the_others_are_taken(
    policy: Policy, spoil: Callable[[list[TrainSequence]], list[TrainSequence]], why: str
) -> None:
    settings = config(**LORA, mini_batch_prompts=1)
    line = learn(policy, adam(policy), spoil(step_of(1)), settings)
    assert (line.updates, line.skipped, line.skipped_row) == (2, 1, 0)
    assert list(line.not_finite) == ["2 of 3"] and why in line.not_finite["2 of 3"]
    assert line.loss is not None and math.isfinite(line.loss)
    assert all(bool(t.isfinite().all()) for t in everything(policy, adam(policy)))
    written = StepLine(step=3, learned=line).to_json()
    assert written["update/skipped"] == 1
    assert all(math.isfinite(v) for v in written.values() if isinstance(v, float))
    (remark,) = step_remarks(StepLine(step=3, learned=line))
    assert remark.startswith("update 2 of 3 skipped: ") and why in remark


def test_a_broken_gradient_reaches_neither_weights_nor_moments_nor_average(policy: Policy) -> None:
    settings, optimizer = config(**LORA), adam(policy)
    learn(policy, optimizer, step_of(2), settings)  # moments are there
    before = everything(policy, optimizer)
    with broken_backward(policy, lambda: True):
        line = learn(policy, optimizer, step_of(3), settings)
    after = everything(policy, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert line.updates == 0 and line.loss is None and line.skipped == 1
    assert line.not_finite == {"1 of 1": "the gradient's norm is nan"}
    assert all(p.grad is None for _, p in policy.trained)
    assert learn(policy, optimizer, step_of(3), settings).skipped == 0


def test_old_log_probs_that_are_not_finite_are_never_learned_from(policy: Policy) -> None:
    settings, optimizer = config(**LORA, mini_batch_prompts=1), adam(policy)
    prepared = prepare_step(policy, with_advantages(step_of(4), settings), settings)
    assert prepared.old is not None
    place = next(i for i, s in enumerate(prepared.sequences) if s.example_id == "x2")
    prepared.old[place][0] = -math.inf
    line = take_updates(policy, optimizer, prepared, settings, Skips())
    assert line.not_finite == {"3 of 3": "an old log-prob is not finite"} and line.updates == 2


def test_five_in_a_row_end_a_step_and_then_the_run(policy: Policy) -> None:
    settings, skips = config(**LORA, mini_batch_prompts=1), Skips()
    sequences = [replace(s, weight=math.inf) for s in step_of(5, examples=4)]
    lines = []
    for step in range(2):
        learned = learn(policy, adam(policy), sequences, settings, skips=skips)
        lines.append(StepLine(step=step, learned=learned))
    assert [line.learned.skipped for line in lines] == [4, 1]  # the fifth is the last one tried
    assert too_many_skips(lines[0]) is None
    error = too_many_skips(StepLine.from_json(lines[1].to_json()))
    assert error is not None and f"{MOST_SKIPS} updates in a row" in error.what
    assert "update 1 of 4 of step 1" in error.what and "the loss is" in error.what
    assert learn(policy, adam(policy), step_of(5), settings, skips=skips).skipped_row == 0


def test_an_update_without_anything_to_compute_ends_no_row(policy: Policy) -> None:
    """A mini-batch of equal rewards moves nothing: it says nothing of whether numbers are whole."""
    settings, skips = config(**LORA, mini_batch_prompts=1), Skips(row=3)
    equal = [replace(s, reward=1.0) for s in step_of(5)]
    assert learn(policy, adam(policy), equal, settings, skips=skips).skipped_row == 3
    assert learn(policy, adam(policy), step_of(5), settings, skips=skips).skipped_row == 0


def test_a_lesson_that_breaks_is_left_out(policy: Policy) -> None:
    settings, optimizer, skips = config(method="sft"), adam(policy), Skips()
    spans = [s.span for s in step_of(6)]
    before = everything(policy, optimizer)
    with broken_backward(policy, lambda: True):
        line = imitate(policy, optimizer, spans, settings, skips)
    assert (line.skipped, line.updates, line.loss, skips.row) == (1, 0, None, 1)
    assert all(
        torch.equal(a, b) for a, b in zip(before, everything(policy, optimizer), strict=True)
    )
    assert imitate(policy, optimizer, spans, settings, skips).loss is not None and skips.row == 0


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_broken_updates_stops_behind_a_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first update of so wild a rate leaves weights that no gradient can be computed with."""
    run = tmp_path / "run"
    command = (
        "train", "sft", "--model", "tiny", "--full", "--task", "tomi", "--data", "tomi=synth:20",
        "--steps", 9, "--batch", 2, "--lr", 1e30, "--out", run,
    )  # fmt: skip
    assert soul(*command) == 2
    output = capfd.readouterr().err
    assert "step 1: update 1 of 1 skipped: the gradient's norm is nan" in output
    error, _, fix = [
        line for line in output.splitlines() if line.startswith(("error", "why", "fix"))
    ]
    assert error.startswith("error: 5 updates in a row were skipped") and "step 5" in error
    assert "--lr" in fix and "Traceback" not in output
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["update/skipped"] for line in lines] == [0, 1, 1, 1, 1, 1]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000006"]
    assert soul(*command) == 2  # one more step, which breaks as well
    assert len(read_jsonl(run / "metrics.jsonl")) == 7
