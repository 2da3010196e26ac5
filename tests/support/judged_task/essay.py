"""The judged task of the examples, under the name by which the tests know it."""

from __future__ import annotations

from pathlib import Path

import tests
from soulkit.tasks.kit.registry import load_registry

# Not beside this file: tests copy its folder to other places.
EXAMPLE = Path(tests.__path__[0]).parent / "examples" / "judged_task" / "tasks.yaml"
Essay = type(load_registry(EXAMPLE).task("judged_task"))
