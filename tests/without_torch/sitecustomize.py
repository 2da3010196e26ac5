"""On PYTHONPATH, this file hides torch and the packages that need it.

So `make test-core` can show on any machine that the core tests do not need them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ABSENT = {"torch", "transformers", "peft", "safetensors", "vllm"}


class CoreFinder(PathFinder):
    """A path finder that acts as if these packages were not installed."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ABSENT:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = CoreFinder
