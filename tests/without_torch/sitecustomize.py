"""On PYTHONPATH, this makes a Python that has no torch, and nothing that stands on it.

So the tests of the core can show on any machine that they need none of it (`make test-core`).
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

REFUSED = {"torch", "transformers", "peft", "safetensors", "vllm"}


class Refusal(importlib.abc.MetaPathFinder):
    """Answers like an environment in which the packages were never installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


sys.meta_path.insert(0, Refusal())
