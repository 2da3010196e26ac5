"""Costs and warnings of a run.

From the ledger: costs and sent parameters by task and role. From the episodes: words cut to
budgets, replies at their limit, sampling settings that a server rejected or ignored, and judges
that gave every episode the same verdict.

A call is assigned to a task by its example. Calls of other examples (a ledger may be shared) and of
models on this machine are left out.
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
from soulkit.models.ledger.ledger import Ledger, SentCalls
from soulkit.models.vllm.client import sent_cuts
from soulkit.runs.records import drafts
from soulkit.tasks.kit.scoring import reply_failure
from soulkit.types import Form, Record, Sampling


class RoleCost(TypedDict):
    """The calls of one role in one task. `cost` is in US dollars, None if no price is known."""

    calls: int
    tokens: int
    cost: float | None


TaskCosts = dict[str, dict[str, RoleCost]]
"""Task → role → its calls."""


def costs_by_task(ledger: Ledger, tasks: Mapping[str, str]) -> TaskCosts:
    """Task → role → calls, tokens (prompt and reply) and cost; `tasks` maps example → task."""
    costs: TaskCosts = {}
    for (role, task), sums in sorted(ledger.by_example(tasks.get).items()):
        tokens = sums["prompt_tokens"] + sums["completion_tokens"]
        one = RoleCost(calls=sums["calls"], tokens=tokens, cost=sums["cost"])
        costs.setdefault(task, {})[role] = one
    return dict(sorted(costs.items()))


LOGPROBS = "logprobs"
"""Can be among the dropped parameters of a reply, but is not a sampling setting."""


class PlayerCalls(TypedDict):
    """The parameters that were sent to one model in one role of one task."""

    sent: list[dict[str, Any]]
    """Each distinct set of sent parameters, with the number of `calls`; most frequent first."""
    dropped: dict[str, float]
    """Setting that the server rejected → share of calls that were sent without it, in (0, 1]."""


TaskCalls = dict[str, dict[str, dict[str, PlayerCalls]]]
"""Task → role → model → its calls."""


def calls_by_task(ledger: Ledger, tasks: Mapping[str, str]) -> TaskCalls:
    """The sent parameters by task, role and model; `tasks` maps example → task. Detection services
    do not sample and are left out."""
    groups: dict[tuple[str, str, str], list[SentCalls]] = {}
    for one in ledger.sent(tasks):
        if not one.model.startswith(DETECTOR):
            groups.setdefault((one.task, one.role, one.model), []).append(one)
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
    """The parameters of some calls as sent. Calls to the run's own vLLM servers always include the
    neutral values (vllm/client.py)."""
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


def joined_costs(
    before: Mapping[str, Mapping[str, Mapping[str, Any]]],
    new: Mapping[str, Mapping[str, RoleCost]],
) -> dict[str, dict[str, dict[str, Any]]]:
    """Costs by task and role: those of `before` plus the `new` ones."""
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
"""Warn if the share of truncated episodes, or of replies at their limit, is larger."""

Counts = Mapping[str, Mapping[str, int]]
"""Task → kind → count."""


def word_cuts(records: Sequence[Record]) -> dict[str, int]:
    """How many `episodes` contain texts cut to their word budgets, and how many `words` were cut;
    empty if nothing was cut. Every repeat of a row counts."""
    notes = [r.episode.notes.get("cut_words") or {} for r in drafts(records)]
    lost = [sum(words.values()) for words in notes]
    episodes = sum(words > 0 for words in lost)
    return {"episodes": episodes, "words": sum(lost)} if episodes else {}


def limit_counts(records: Sequence[Record]) -> dict[str, int]:
    """Counts of the actor's replies that ended `at_limit`, of those that were `silent` (no visible
    text, and no refusal), and of all `replies`. Empty if none ended at the limit or was silent."""
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
    """Task → number of replies, for tasks in which all replies of the actor were silent.

    A task whose silent replies all ended at the limit is left out: its episodes count as truncated.
    """
    return {
        task: one["replies"] for task, one in limits.items()
        if one.get("silent", 0) == one.get("replies", 0) > one.get("at_limit", 0)
    }  # fmt: skip


def ignored_parameters(records: Sequence[Record]) -> dict[str, int]:
    """Ignored parameters: `actor seed` → number of episodes, `judge form` → number of verdicts."""
    counts: Counter[str] = Counter()
    for record in drafts(records):
        counts.update(f"actor {name}" for name in record.episode.notes.get("ignored", ()))
        for verdict in record.score.verdicts:
            counts.update(f"{verdict.judge} {name}" for name in verdict.ignored)
    return dict(sorted(counts.items()))


UNIFORM_FROM = 10
"""Minimum number of episodes for a warning about equal verdicts."""


def uniform_verdicts(records: Sequence[Record]) -> dict[str, int]:
    """`judge: question` → number of episodes, for judges that gave every episode the same verdict.
    Free text in a verdict, such as reasons, is ignored."""
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
    """The numbers, flags and single words of a verdict; None if there are none."""
    if isinstance(said, Mapping):
        parts = {str(name): _choices(value) for name, value in said.items()}
        return {name: part for name, part in parts.items() if part is not None} or None
    if isinstance(said, list | tuple):
        return [part for part in map(_choices, said) if part is not None] or None
    return None if isinstance(said, str) and len(said.split()) != 1 else said


def uniform_text(uniform: Counts) -> str:
    """`TASK: the same verdict on all 40 episodes (judge: detector)`, or empty."""
    return "; ".join(
        f"{task}: the same verdict on all {count} episodes ({who})"
        for task, counts in uniform.items()
        for who, count in counts.items()
    )


Shares = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Role → model → setting → share of the calls that were sent without it."""


def dropped_by_actor(
    records: Sequence[Record], model: str
) -> dict[str, dict[str, dict[str, float]]]:
    """The settings that the actor's replies were sampled without, from the episodes; empty if all
    settings were used."""
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
    """`dropped` by task, in which the shares in `calls` replace those of the same task and role.
    Models that rejected no setting are left out."""
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
    """`40 %` for a share in (0, 1]."""
    return f"{share:.0%}".replace("%", " %") if share >= 0.01 else "under 1 %"


def truncated_counts(statuses: Counts) -> dict[str, tuple[int, int]]:
    """Task → (truncated episodes, all episodes), for tasks with truncated episodes."""
    numbers = {  # a summary on disk may contain anything
        task: {status: n for status, n in counts.items() if isinstance(n, int)}
        for task, counts in statuses.items()
    }
    return {
        task: (counts[TRUNCATED], sum(counts.values()))
        for task, counts in numbers.items()
        if counts.get(TRUNCATED)
    }


def truncated_total(statuses: Counts) -> int:
    """The number of truncated episodes of all tasks."""
    return sum(cut for cut, _ in truncated_counts(statuses).values())


def truncation_text(statuses: Counts) -> str:
    """`TASK 30 of 60 (50 %)` for tasks whose truncated share is above WARN_ABOVE; else empty."""
    return _shares_text(truncated_counts(statuses))


def limits_text(limits: Counts, statuses: Counts) -> str:
    """`TASK 30 of 60 (50 %)` for tasks whose share of replies at the limit is above WARN_ABOVE.
    Tasks with the same count of truncated episodes are left out: the statuses already show them."""
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
    """`TASK 30 of 60 (50 %)` for every share above WARN_ABOVE."""
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
