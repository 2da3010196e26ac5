"""What the calls of a run came to: costs and parameters by task and role, from the ledger; and what
a reader is warned of: words cut to budgets, replies at their limit, sampling settings that a server
refused or ignored, judges that gave every episode the same verdict.

The ledger names the example of a call; the rows tell its task. Calls of other examples (a ledger
may be shared) are left out, and so are models on this machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from soulkit.judge.verdict import spoken
from soulkit.models.api.detector import DETECTOR
from soulkit.models.api.wire import as_sent
from soulkit.models.ledger.ledger import Ledger, RoleTotals, SentCalls
from soulkit.models.vllm.client import sent_cuts
from soulkit.runs.records import drafts
from soulkit.tasks.kit.scoring import reply_failure
from soulkit.types import Form, Record, Sampling


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


# -- warnings --------------------------------------------------------------------------------------


TRUNCATED = "truncated"
WARN_ABOVE = 0.01
"""A larger share of truncated episodes, or of replies at their limit, is said aloud."""

Counts = Mapping[str, Mapping[str, int]]
"""Task → what → how many."""


def word_cuts(records: Sequence[Record]) -> dict[str, int]:
    """The `episodes` whose texts were cut to their budgets, and the `words` they lost; empty where
    nothing was cut. A row that is played again is counted again."""
    notes = [r.episode.notes.get("cut_words") or {} for r in drafts(records)]
    lost = [sum(words.values()) for words in notes]
    episodes = sum(words > 0 for words in lost)
    return {"episodes": episodes, "words": sum(lost)} if episodes else {}


def limit_counts(records: Sequence[Record]) -> dict[str, int]:
    """How many `replies` the actor gave, how many of them ended `at_limit`, whatever could be read
    of them, and how many were `silent`: no visible text, and no refusal. Empty where none was
    either."""
    replies = [
        turn.completion
        for record in drafts(records)
        for trace in record.episode.traces
        for turn in trace.turns
    ]
    counts = {
        "at_limit": sum(reply.stop_reason == "length" for reply in replies),
        "silent": sum(
            not (spoken(reply.text, "paper") or reply_failure(reply, strict=False))
            for reply in replies
        ),
    }
    counts = {what: count for what, count in counts.items() if count}
    return {**counts, "replies": len(replies)} if counts else {}


def silent_tasks(limits: Counts) -> dict[str, int]:
    """Task → replies, for the tasks in which all replies of the actor were silent.

    Replies that all ended at their limit are truncated, which is counted with the unscored.
    """
    return {
        task: one["replies"] for task, one in limits.items()
        if one.get("silent", 0) == one.get("replies", 0) > one.get("at_limit", 0)
    }  # fmt: skip


def ignored_parameters(records: Sequence[Record]) -> dict[str, int]:
    """`actor seed` → episodes, `judge form` → verdicts in which it was ignored."""
    counts: Counter[str] = Counter()
    for record in drafts(records):
        counts.update(f"actor {name}" for name in record.episode.notes.get("ignored", ()))
        for verdict in record.score.verdicts:
            counts.update(f"{verdict.judge} {name}" for name in verdict.ignored)
    return dict(sorted(counts.items()))


UNIFORM_FROM = 10
"""Equal verdicts on fewer episodes say nothing of a judge."""


def uniform_verdicts(records: Sequence[Record]) -> dict[str, int]:
    """`judge: question` → episodes, for a judge that gave every episode the same verdict. What it
    says in words of its own, such as its reasons, does not count."""
    seen: dict[str, set[str]] = {}
    episodes: dict[str, set[str]] = {}
    for record in drafts(records):
        for verdict in record.score.verdicts:
            if chosen := _choices(verdict.said):
                who = f"{verdict.judge}: {verdict.purpose}"
                seen.setdefault(who, set()).add(json.dumps(chosen, sort_keys=True, default=str))
                episodes.setdefault(who, set()).add(record.key)
    return {
        who: len(episodes[who])
        for who, verdicts in sorted(seen.items())
        if len(verdicts) == 1 and len(episodes[who]) >= UNIFORM_FROM
    }


def _choices(said: object) -> object:
    """What a verdict chooses: its numbers, flags and single words; None without any."""
    if isinstance(said, Mapping):
        parts = {str(name): _choices(value) for name, value in said.items()}
        return {name: part for name, part in parts.items() if part is not None} or None
    if isinstance(said, list | tuple):
        return [part for part in map(_choices, said) if part is not None] or None
    return None if isinstance(said, str) and len(said.split()) != 1 else said


def uniform_text(uniform: Counts) -> str:
    """`TASK the same verdict on all of 40 episodes (judge: detector)`, or empty."""
    return "; ".join(
        f"{task} the same verdict on all of {count} episodes ({who})"
        for task, counts in uniform.items()
        for who, count in counts.items()
    )


Shares = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Role → model → setting → share of the calls that were sent without it."""


def dropped_by_actor(
    records: Sequence[Record], model: str
) -> dict[str, dict[str, dict[str, float]]]:
    """The settings that the actor's replies were sampled without, as the episodes record it; empty
    when every setting was followed."""
    replies = [
        turn.completion
        for record in drafts(records)
        for trace in record.episode.traces
        for turn in trace.turns
    ]
    counts = Counter(name for reply in replies for name in reply.dropped if name != LOGPROBS)
    shares = {name: count / len(replies) for name, count in sorted(counts.items())}
    return {"actor": {model: shares}} if shares else {}


def with_calls(
    dropped: Mapping[str, Shares], calls: TaskCalls
) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """`dropped` by task, with the shares of `calls` for every role that these know. Models that
    refused no setting are left out."""
    joined = {task: {role: {model: dict(names) for model, names in models.items()}
                     for role, models in roles.items()}
              for task, roles in dropped.items()}  # fmt: skip
    for task, roles in calls.items():
        for role, models in roles.items():
            shares = {model: one["dropped"] for model, one in models.items() if one["dropped"]}
            joined.setdefault(task, {})[role] = shares
    trimmed = {task: {role: models for role, models in roles.items() if models}
               for task, roles in joined.items()}  # fmt: skip
    return {task: roles for task, roles in trimmed.items() if roles}


def dropped_text(dropped: Mapping[str, Shares]) -> str:
    """`TASK actor temperature (100 % of calls)`, or empty."""
    return "; ".join(
        f"{task} {role} {name} ({share_text(share)} of calls"
        f"{f' to {model}' if role != 'actor' else ''})"
        for task, roles in dropped.items()
        for role, models in roles.items()
        for model, names in models.items()
        for name, share in names.items()
    )


def share_text(share: float) -> str:
    """`40 %` of a share in (0, 1]."""
    return f"{share:.0%}".replace("%", " %") if share >= 0.01 else "under 1 %"


def truncated_counts(statuses: Counts) -> dict[str, tuple[int, int]]:
    """Task → (truncated episodes, all of them), where there are any."""
    numbers = {  # a summary on disk may hold anything
        task: {status: n for status, n in counts.items() if isinstance(n, int)}
        for task, counts in statuses.items()
    }
    return {
        task: (counts[TRUNCATED], sum(counts.values()))
        for task, counts in numbers.items()
        if counts.get(TRUNCATED)
    }


def truncated_total(statuses: Counts) -> int:
    """Episodes of all tasks that are truncated."""
    return sum(cut for cut, _ in truncated_counts(statuses).values())


def truncation_text(statuses: Counts) -> str:
    """`TASK 30 of 60 (50 %)` for the tasks in which more than TELLING are; else empty."""
    return _shares_text(truncated_counts(statuses))


def limits_text(limits: Counts, statuses: Counts) -> str:
    """`TASK 30 of 60 (50 %)` for the tasks in which more than TELLING of the replies ended at their
    limit, except where just as many episodes are truncated: the statuses tell of those already."""
    truncated = truncated_counts(statuses)
    counts = {
        task: (one["at_limit"], one["replies"])
        for task, one in limits.items()
        if {"at_limit", "replies"} <= one.keys()
    }
    return _shares_text({
        task: pair for task, pair in counts.items() if pair != truncated.get(task)
    })  # fmt: skip


def _shares_text(counts: Mapping[str, tuple[int, int]]) -> str:
    """`TASK 30 of 60 (50 %)` for every share above TELLING."""
    return ", ".join(
        f"{task} {part} of {total} ({part / total:.0%})".replace("%", " %")
        for task, (part, total) in counts.items()
        if part / total > WARN_ABOVE
    )


def cuts_text(cuts: Counts) -> str:
    """`TASK 12 episodes, 3,400 words`, or empty."""
    return "; ".join(
        f"{task} {one['episodes']:,} episode{'s' * (one['episodes'] != 1)}, {one['words']:,} words"
        for task, one in cuts.items()
        if {"episodes", "words"} <= one.keys()
    )


def ignored_text(ignored: Counts) -> str:
    """`TASK judge form 30`, or empty."""
    return "; ".join(
        f"{task} {', '.join(f'{what} {n}' for what, n in counts.items())}"
        for task, counts in ignored.items()
    )
