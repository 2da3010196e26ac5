"""The calls of a run by task and role, from its ledger: what they cost and how they were sent.

The ledger names the example of a call; the rows tell its task. Calls of other examples (a ledger
may be shared) are left out, and so are models on this machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypedDict

from soulkit.models.api.detector import DETECTOR
from soulkit.models.api.wire import as_sent
from soulkit.models.ledger.ledger import Ledger, RoleTotals, SentCalls
from soulkit.models.vllm.client import sent_cuts
from soulkit.types import Form, Sampling


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
            roles[role] = _sum_costs(roles.get(role), sums)
    return {task: dict(sorted(roles.items())) for task, roles in sorted(costs.items())}


LOGPROBS = "logprobs"
"""Listed among the parameters that a reply went without, but no sampling setting."""


class PlayerCalls(TypedDict):
    """How the calls of one model in one role of one task were sent."""

    sent: list[dict[str, Any]]
    """Each set of parameters as it was sent, and under `calls` how often; most frequent first."""
    dropped: dict[str, float]
    """Setting that the server refused → share of the calls that went without it, in (0, 1]."""


TaskCalls = dict[str, dict[str, dict[str, PlayerCalls]]]
"""Task → role → model → its calls."""


def calls_by_task(ledger: Ledger, tasks: Mapping[str, str]) -> TaskCalls:
    """How the calls were sent; `tasks`: example → task. A detection service samples nothing, and is
    left out."""
    groups: dict[tuple[str, str, str], list[SentCalls]] = {}
    for one in ledger.sent():
        if one.example_id in tasks and not one.model.startswith(DETECTOR):
            groups.setdefault((tasks[one.example_id], one.role, one.model), []).append(one)
    found: TaskCalls = {}
    for (task, role, model), calls in sorted(groups.items()):
        found.setdefault(task, {}).setdefault(role, {})[model] = _player_calls(calls)
    return found


def _player_calls(calls: list[SentCalls]) -> PlayerCalls:
    forms: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for one in calls:
        dropped.update(dict.fromkeys(set(one.dropped) - {LOGPROBS}, one.calls))
        if one.asked is not None:
            forms[json.dumps(_as_sent(one), sort_keys=True)] += one.calls
    total = sum(one.calls for one in calls)
    return PlayerCalls(
        sent=[{**json.loads(form), "calls": count} for form, count in forms.most_common()],
        dropped={name: count / total for name, count in sorted(dropped.items())},
    )


def _as_sent(one: SentCalls) -> dict[str, Any]:
    """The parameters of some calls. A model behind a vLLM server of the run is prompted with ids,
    always with the neutral values (vllm/client.py)."""
    assert one.asked is not None
    known = {field.name for field in fields(Sampling)}
    asked = {name: value for name, value in one.asked.sampling.items() if name in known}
    form = asked.get("form")
    sampling = Sampling(**{**asked, "stop": tuple(asked.get("stop") or ()),
                           "form": Form(**form) if form else None})  # fmt: skip
    beside = {name: value for name, value in one.asked.beside.items() if name != "batch"}
    if one.asked.base_url.startswith("vllm:"):
        beside = {**sent_cuts(sampling), **beside}
    return as_sent(sampling, beside, one.dropped)


def _sum_costs(before: RoleCost | None, sums: RoleTotals) -> RoleCost:
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
