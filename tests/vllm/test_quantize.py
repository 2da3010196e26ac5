"""Servers that sample for a trainer with a base in nf4: only those with the same base are taken.

No CPU build of vLLM reads 4-bit weights, so the same base is served as the values it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from soulkit.models.local.sampler import LocalModel
from soulkit.runs.jsonl import read_jsonl
from tests.support.training import soul
from tests.vllm.conftest import CONTEXT, RANK

if TYPE_CHECKING:
    from soulkit.models.vllm.server import VllmServer

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.vllm, pytest.mark.torch]


@pytest.fixture
def same_base(
    vllm_python: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[VllmServer]:
    """A server of the values that the 4 bits stand for."""
    from soulkit.models.vllm.command import ServerSpec
    from soulkit.models.vllm.server import VllmServer

    loaded = LocalModel.load(tiny_model, quantize="nf4", device="cpu")
    folder = tmp_path / "unpacked"
    loaded.model.dequantize().save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    spec = ServerSpec(
        model=str(folder), dtype="float32", max_context=CONTEXT, lora_rank=RANK, python=vllm_python
    )
    (server,) = VllmServer.start_all([spec], tmp_path / "server", limit_s=600.0)
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    yield server
    server.stop()


def trained(model: Path, engine: str, out: Path) -> int:
    return soul(
        "train", "grpo", "--model", model, "--task", "tomi", "--data", "synth:30", "--engine",
        engine, "--quantize", "nf4", "--steps", 1, "--prompts", 2, "--group-size", 2, "--lora-r", 8,
        "--max-tokens", 8, "--dtype", "float32", "--device", "cpu", "--threads", 1, "--out", out,
    )  # fmt: skip


def test_a_server_with_the_same_base_samples(
    same_base: VllmServer, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert trained(tiny_model, f"vllm@{same_base.url}", out) == 0
    (line,) = [line for line in read_jsonl(out / "metrics.jsonl") if "time/push" in line]
    assert line["push/distance"] <= 1e-4 and line["logprob/sampler_gap_max"] <= 1e-4


def test_a_server_with_the_full_base_is_refused(
    attached: str, tiny_model: Path, tmp_path: Path, capfd: Any
) -> None:
    assert trained(tiny_model, attached, tmp_path / "run") != 0
    what, why, fix = capfd.readouterr().err.splitlines()[-3:]
    assert what.startswith("error: The server at") and "uses a different base" in why
    assert "Serve the base of this run" in fix
