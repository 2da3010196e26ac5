"""Rows made here: customers of the made desk, or the numbers of a runtime's own tasks.

A row is little more than a number, because whoever serves its domain has the rest. The made domain
is served in this process; the others need a runtime, which knows their tasks by domain and index.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from soulkit.tasks.tau_usi.desk import DOMAIN

SIZES: Mapping[str, int] = {"retail": 115, "airline": 50}
"""Tasks of the published domains."""
_PER_SEED = 10_000


def rows(
    n: int = 100, seed: int = 0, *, domain: Literal["tool_library", "retail", "airline"] = DOMAIN
) -> list[dict[str, Any]]:
    """`n` rows of a domain; of a published one its first `n`, which the seed does not change."""
    if domain in SIZES:
        return [_row(domain, i) for i in range(min(n, SIZES[domain]))]
    return [_row(domain, seed * _PER_SEED + i) for i in range(n)]


def _row(domain: str, number: int) -> dict[str, Any]:
    return {"env_name": domain, "task_index": number, "instance_id": f"{domain}_{number}"}
