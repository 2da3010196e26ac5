"""One vLLM server for all tests of this folder, and the tiny model and adapter that it serves.

`make test-vllm` names the interpreter that has vLLM (SOULKIT_VLLM_PYTHON); it is never the one that
runs the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from soulkit.tasks.kit.registry import load_registry
from tests.support.evaluation import examples
from tests.vllm.rows import CHOICE_TASKS, ROWS

if TYPE_CHECKING:
    from soulkit.models.vllm.server import VllmServer

RANK = 8
CONTEXT = 1024


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that has vLLM."""
    python = os.environ.get("SOULKIT_VLLM_PYTHON")
    if not python:
        pytest.skip("needs a vLLM: make test-vllm")
    return python


@pytest.fixture(scope="session", autouse=True)
def _small_servers() -> Iterator[None]:
    """Servers of a test keep a gigabyte for keys and values, and ask nobody outside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for the paths of sleep
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model that knows the words of the choice rows, in float32.

    Its head is one of its own and its end is likely: with a head that is the embedding turned round
    an untrained model repeats its last word for ever, and replies would show little.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from soulkit.models.local.tiny import build_tiny

    registry = load_registry()
    texts = [
        segment.text
        for name in CHOICE_TASKS
        for example in examples(name, ROWS)
        for segment in registry.task(name).preview(example)
    ]
    folder = build_tiny(tmp_path_factory.mktemp("tiny") / "model", texts, max_context=CONTEXT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = torch.empty_like(model.lm_head.weight)
    head.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    head[model.config.eos_token_id] *= 2.5
    model.lm_head.weight, model.config.tie_word_embeddings = torch.nn.Parameter(head), False
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of rank 8 on every projection whose random B changes what is said."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    torch.manual_seed(3)  # PEFT draws A
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear"))
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0.0, 0.05, generator=random)
    folder = tmp_path_factory.mktemp("tiny") / "adapter"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_server(
    vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """A server of the tiny model that takes adapters; leave it as it was."""
    from soulkit.models.vllm.command import ServerSpec
    from soulkit.models.vllm.server import VllmServer

    spec = ServerSpec(
        model=str(tiny_model), dtype="float32", max_context=CONTEXT, lora_rank=RANK,
        python=vllm_python,
    )  # fmt: skip
    (server,) = VllmServer.start_all([spec], tmp_path_factory.mktemp("server"), limit_s=600.0)
    yield server
    server.stop()


@pytest.fixture
def attached(vllm_server: VllmServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """`--engine` for the server that all tests share."""
    monkeypatch.setenv("VLLM_API_KEY", vllm_server.key)
    return f"vllm@{vllm_server.url}"
