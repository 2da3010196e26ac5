"""Tests for a GPU. With SOULKIT_GPU_TESTS_ON=cpu they run on the CPU wherever the code allows.

`make test-gpu` runs them; `make test` runs the quick ones on the CPU, which the marker `on_cpu`
selects.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.training import random_model

DEVICE = os.environ.get("SOULKIT_GPU_TESTS_ON", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in here if DEVICE == "cpu" else ():
        if item.get_closest_marker("vllm") is None:  # those need a server
            item.add_marker("on_cpu")


@pytest.fixture(scope="session")
def device() -> str:
    """The device of these tests."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or SOULKIT_GPU_TESTS_ON=cpu")
    return DEVICE


@pytest.fixture(scope="session")
def gpu(device: str) -> str:
    """The device, in tests that a CPU cannot run."""
    if device == "cpu":
        pytest.skip("a CPU has no such limit or kernel")
    return device


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    return random_model(tmp_path_factory.mktemp("models") / "tiny")
