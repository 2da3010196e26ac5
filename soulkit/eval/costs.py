"""What the calls of a run came to, by task and role: from its ledger, which knows every paid reply.

The ledger names the example of a call; whose task that is, the rows tell. Calls of examples that
are of no task here (a ledger may be shared) are left out, and so is whoever sits on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from soulkit.models.ledger.ledger import Ledger, RoleTotals


class RoleCost(TypedDict):
    """The calls of one role in one task. `cost` is in US dollars, None when none is known."""

    calls: int
    tokens: int
    cost: float | None


TaskCosts = dict[str, dict[str, RoleCost]]
"""Task → role → its calls."""


def costs_by_task(ledger: Ledger, tasks: Mapping[str, str]) -> TaskCosts:
    """Task → role → calls, tokens (of prompts and replies) and cost; `tasks`: example → task."""
    costs: TaskCosts = {}
    for (role, example), sums in ledger.by_example().items():
        if example in tasks:
            roles = costs.setdefault(tasks[example], {})
            roles[role] = _added(roles.get(role), sums)
    return {task: dict(sorted(roles.items())) for task, roles in sorted(costs.items())}


def _added(before: RoleCost | None, sums: RoleTotals) -> RoleCost:
    calls, cost = sums["calls"], sums["cost"]
    tokens = sums["prompt_tokens"] + sums["completion_tokens"]
    if before is None:
        return RoleCost(calls=calls, tokens=tokens, cost=cost)
    prices = [one for one in (before["cost"], cost) if one is not None]
    return RoleCost(
        calls=before["calls"] + calls, tokens=before["tokens"] + tokens,
        cost=sum(prices) if prices else None,
    )  # fmt: skip


def joined_costs(
    before: Mapping[str, Mapping[str, Mapping[str, Any]]],
    new: Mapping[str, Mapping[str, RoleCost]],
) -> dict[str, dict[str, dict[str, Any]]]:
    """What a run cost by task and role, with what was paid since."""
    joined = {task: {role: dict(one) for role, one in roles.items()}
              for task, roles in before.items()}  # fmt: skip
    for task, roles in new.items():
        for role, one in roles.items():
            old = joined.setdefault(task, {}).get(role, {})
            prices = [p for p in (old.get("cost"), one["cost"]) if p is not None]
            joined[task][role] = {
                "calls": old.get("calls", 0) + one["calls"],
                "tokens": old.get("tokens", 0) + one["tokens"],
                "cost": sum(prices) if prices else None,
            }
    return joined
