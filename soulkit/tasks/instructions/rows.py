"""The forty rows of `instructions`: always the same, so that one run's result can stand beside
another's.

Example: {"instruction": "Name the four seasons … as a JSON list.", "checks": [{"kind":
"json_list", "count": 4}], "kind": "json", "reply": "[\\"spring\\", …]"}.
"""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

from soulkit.tasks.texts import Texts

TEXTS = Texts(__file__)


def rows(n: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """`n` of the forty in an order that the seed draws; there are no more of them."""
    every = list(TEXTS["instructions"])
    random.Random(f"instructions/{seed}").shuffle(every)
    return [deepcopy(dict(row)) for row in every[:n]]
