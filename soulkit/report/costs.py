"""What a run's calls came to, by task and role, as its summary recorded them.

Whoever sits on this machine costs nothing and is not listed; a cost without a price is a dash, and
no part of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from soulkit.eval.summary import Summary
from soulkit.report.load import RunData

if TYPE_CHECKING:
    from rich.table import Table

HEADS = ("run", "task", "role", "calls", "tokens", "cost")


def dollar_text(cost: object) -> str:
    """US dollars with four digits behind the point; a dash where no price is known."""
    if isinstance(cost, bool) or not isinstance(cost, int | float):
        return "\u2013"
    return f"${cost:,.4f}"


def cost_rows(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """The table by run, task and role, under `HEADS`; empty where nobody was asked over HTTP."""
    return [
        (run.name, task, role, f"{one.get('calls', 0):,}", f"{one.get('tokens', 0):,}",
         dollar_text(one.get("cost")))
        for run in runs if run.summary is not None
        for task, roles in run.summary.costs.items()
        for role, one in roles.items()
    ]  # fmt: skip


def cost_table(runs: Sequence[RunData]) -> Table | None:
    """The same for a terminal; None where there is nothing to show."""
    from rich.table import Table
    from rich.text import Text

    rows = cost_rows(runs)
    if not rows:
        return None
    table = Table(title="cost by task and role", title_justify="left")
    for head in HEADS:
        table.add_column(head, justify="left" if head in HEADS[:3] else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def cost_by_role(summary: Summary) -> str:
    """`judge $0.4000, actor $0.0120`, dearest first; empty where fewer than two
    roles were paid for."""
    sums: dict[str, float] = {}
    for roles in summary.costs.values():
        for role, one in roles.items():
            sums[role] = sums.get(role, 0.0) + (one.get("cost") or 0.0)
    paid = sorted((cost, role) for role, cost in sums.items() if cost)
    if len(paid) < 2:
        return ""
    return ", ".join(f"{role} {dollar_text(cost)}" for cost, role in reversed(paid))
