"""The one decision of `make setup` that is easy to get wrong: which torch would come."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "is_cpu_build.py"


def is_cpu_build(version: str, needs: list[str], system: str = "Linux") -> bool:
    spec = importlib.util.spec_from_file_location("is_cpu_build", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wheel = {"metadata": {"name": "torch", "version": version, "requires_dist": needs}}
    answer: bool = module.is_cpu_build({"install": [wheel]}, system)
    return answer


@pytest.mark.parametrize(
    ("version", "needs", "system", "cpu"),
    [
        ("2.13.0+cpu", ["filelock"], "Linux", True),
        ("2.13.0", ["filelock", "sympy>=1.13"], "Linux", True),
        ("2.13.0", ["nvidia-nccl-cu13==2.29; platform_system == 'Linux'"], "Linux", False),
        ("2.13.0", ["cuda-toolkit[cublas]==13.0"], "Linux", False),
        ("2.13.0+cu130", [], "Linux", False),
        ("2.13.0", ["nvidia-nccl-cu13; platform_system == 'Linux'"], "Darwin", True),
    ],
)
def test_cuda_builds_are_told_apart(version: str, needs: list[str], system: str, cpu: bool) -> None:
    assert is_cpu_build(version, needs, system) is cpu
