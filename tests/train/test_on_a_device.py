"""`soul train --device cuda` on a device played by the CPU, from the command to the checkpoint.

The stand-in refuses tensors of two devices in one operation (see `tests/support/stand_in.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import soulkit.train.run  # noqa: F401 - loaded before the device is there
from soulkit.train.model.prepare import log_probs
from tests.support.stand_in import CALLS, CARD, OnCard, stand_in
from tests.support.training import lines_of, policy_of, random_model, soul, step_of

PLAYED = ("--task", "tomi", "--data", "synth:24", "--prompts", 2, "--group-size", 3,
          "--max-tokens", 8, "--lora-r", 8, "--lr", 1e-2, "--engine", "local",
          "--set", "checkpoint_every=1")  # fmt: skip
MOVED = ("--set", "entropy_coef=0.1")
"""Untrained models get no rewards: what moves the weights is a bonus."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


def trained(folder: Path, out: Path, method: str, *options: object) -> int:
    with stand_in():
        return soul("train", method, "--model", folder, "--device", "cuda", "--out", out, *options)


def test_the_stand_in_refuses_what_cuda_refuses() -> None:
    with stand_in():
        x = torch.ones(3, 3, device="cuda")
        assert x.device == CARD and x.cpu().numpy().sum() == 9
        assert float(x[torch.tensor([0, 2])].sum()) == 6  # indices may be on the CPU
        with pytest.raises(RuntimeError, match="on the same device"):
            x @ torch.ones(3, 3)
        with pytest.raises(RuntimeError, match="on the same device"):
            torch.cat([x, torch.ones(1, 3)])
        with pytest.raises(RuntimeError, match="generator"):
            x.normal_(generator=torch.Generator())
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
    assert type(torch.ones(2)) is torch.Tensor


@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_log_probs_are_those_of_the_cpu(folder: Path, attention: str) -> None:
    spans = [one.span for one in step_of()]
    lora = {"r": 4, "alpha": 8}
    expected = log_probs(policy_of(folder, lora=lora, device="cpu"), spans, None)
    with stand_in():
        policy = policy_of(folder, lora=lora, device="cuda", attention=attention)
        assert policy.kernel == attention and isinstance(policy.trained[0][1], OnCard)
        scored = [one.cpu() for one in log_probs(policy, spans, None)]
    for one, other in zip(scored, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_ditto_run_reaches_its_checkpoint_and_resumes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = ("kl_coef=0.1", "sampler_cap=2", "mini_batch_prompts=1")
    options = (*PLAYED, *MOVED, *(word for term in terms for word in ("--set", term)))
    options = (*options, "--deterministic")  # every operation has a deterministic kernel
    for steps in (1, 2):
        assert trained(folder, tmp_path / "run", "ditto", *options, "--steps", steps) == 0
        assert CALLS["empty_cache"]  # the sampler's memory, before an update
    assert "`generate`" not in capsys.readouterr().err  # the decode loop works on the device
    for line in lines_of(tmp_path / "run"):
        assert line["optimizer/updates"] == 2 and line["grad/norm"] > 0
        assert line["logprob/sampler_gap_max"] < 1e-3
    assert (tmp_path / "run" / "checkpoints" / "step_000002").is_dir()


METHODS = {
    "half precision": ("ditto", *PLAYED, *MOVED, "--dtype", "bfloat16", "--eval-every", 1,
                       "--activation-checkpointing", "on"),
    "rows": ("ditto", *PLAYED, *MOVED, "--packing", "off", "--set", "ratio=sequence",
             "--set", "aggregation=seq-mean-token-mean"),
    "logits": ("sdpo-logits", *PLAYED),
    "moving average": ("sdpo-token", *PLAYED, "--set", "teacher=ema"),
    "teacher": ("opd", *PLAYED, *MOVED, "--teacher-model", "base"),
    "supervised": ("sft", *PLAYED[:4], "--batch", 4),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_kind_of_update_stays_on_the_device(folder: Path, tmp_path: Path, name: str) -> None:
    method, *options = (folder if word == "base" else word for word in METHODS[name])
    assert trained(folder, tmp_path / "run", str(method), *options, "--steps", 1) == 0
    norms = [line["grad/norm"] for line in lines_of(tmp_path / "run") if "grad/norm" in line]
    assert norms and max(norms) > 0
