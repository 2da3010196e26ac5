"""Training with vLLM on the trainer's own device: every push is proven, also after a sleep.

On a CPU (`make test-gpu SOULKIT_GPU_TESTS_ON=cpu`) vLLM's CPU build does the same without sleeping.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soulkit.models.vllm.settings import interpreter, vllm_version
from soulkit.runs.jsonl import read_jsonl
from tests.support.training import soul

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.fixture
def python(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter whose vLLM runs on the device."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    python = interpreter(None)
    install = vllm_version(python)
    if install is None or install.on_gpu is not (device == "cuda"):
        pytest.skip("needs a vLLM for this device; SOULKIT_VLLM_PYTHON names its interpreter")
    return python


@pytest.mark.parametrize("sleep", [False, True], ids=["awake", "asleep"])
def test_rollouts_come_from_a_server_on_the_same_device(
    device: str, python: str, sleep: bool, folder: Path, tmp_path: Path
) -> None:
    if sleep and device == "cpu":
        pytest.skip("on a CPU, vLLM reports a sleep and does nothing")
    out = tmp_path / "run"
    half = "bfloat16" if device == "cuda" else "float32"
    code = soul(
        "train", "ditto", "--model", folder, "--task", "tomi", "--data", "synth:16",
        "--prompts", 2, "--group-size", 3, "--max-tokens", 8, "--lora-r", 8, "--lr", 1e-2,
        "--set", "entropy_coef=0.1", "--dtype", half, "--device", device, "--engine", "vllm",
        "--vllm-python", python, "--steps", 2, "--out", out,
        *(["--vllm-sleep"] if sleep else []),
    )  # fmt: skip
    assert code == 0
    steps = [line for line in read_jsonl(out / "metrics.jsonl") if "time/push" in line]
    assert len({line["policy/version"] for line in steps}) == 2
    bound = 0.1 if device == "cuda" else 1e-3
    assert all(line["logprob/sampler_gap"] <= bound for line in steps)
    assert not any(os.scandir(out / "vllm" / "pushes"))
