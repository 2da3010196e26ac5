"""On PYTHONPATH, this makes a Python that has no torch, and nothing that stands on it.

So the tests of the core can show on any machine that they need none of it (`make test-core`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ABSENT = {"torch", "transformers", "peft", "safetensors", "vllm"}


class CoreFinder(PathFinder):
    """Finds what is on the path, as if these packages had never been installed."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ABSENT:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = CoreFinder
