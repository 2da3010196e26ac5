"""What a step's log line says, as pure functions of its records and sequences (algorithms §3)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from soulkit.metrics.statistics import RewardGroup, leave_one_out_gap, pair_gap
from soulkit.train.maths.advantage import Entry, group_stats
from soulkit.train.objectives.sequences import TrainSequence
from soulkit.train.rollouts.feedback import GATED
from soulkit.types import Feedback, Kind, Record


def reward_groups(records: Sequence[Record]) -> list[RewardGroup]:
    """Per (step, example): rewards of drafts and refined rollouts, aligned by rollout."""
    grouped: dict[tuple[int, str], dict[int, dict[str, float | None]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for record in records:
        rollouts = grouped[record.step, record.example_id]
        rollouts[record.rollout][record.kind] = record.score.reward
    return [
        RewardGroup([r.get("draft") for r in g.values()], [r.get("refined") for r in g.values()])
        for g in grouped.values()
    ]


def reward_metrics(records: Sequence[Record]) -> dict[str, Any]:
    """Draft and refined reward, both gaps with their intervals, what was unscored and why."""
    groups = reward_groups(records)
    loo, pair = leave_one_out_gap(groups), pair_gap(groups)
    missing = Counter(r.score.reason for r in records if not r.score.scored)
    lengths = [len(t.completion.token_ids) for r in records for tr in r.episode.traces
               for t in tr.turns]  # fmt: skip
    return {
        "draft_reward": _mean_reward(records, "draft"),
        "refined_reward": _mean_reward(records, "refined"),
        "loo_gap": loo.mean,
        "loo_gap_low": loo.ci_low,
        "loo_gap_high": loo.ci_high,
        "pair_gap": pair.mean,
        "n_draft": sum(r.kind == "draft" for r in records),
        "n_refined": sum(r.kind == "refined" for r in records),
        "n_unscored": sum(missing.values()),
        "unscored": dict(missing),
        "response_length": fmean(lengths) if lengths else None,
        "tokens": sum(lengths),
        "task_metrics": _task_metrics(records),
    }


def _mean_reward(records: Sequence[Record], kind: Kind) -> float | None:
    rewards = [r.score.reward for r in records if r.kind == kind and r.score.reward is not None]
    return fmean(rewards) if rewards else None


def _task_metrics(records: Sequence[Record]) -> dict[str, float]:
    """Per-dimension means of the drafts' task metrics."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.score.metrics.items():
            if record.kind == "draft" and value is not None:
                values[f"{record.task}/{name}"].append(value)
    return {name: fmean(v) for name, v in values.items()}


def feedback_metrics(records: Sequence[Record]) -> dict[str, Any]:
    """Who got feedback, what leaked, per coach; failures of the coach are counted, not hidden."""
    drafts = [r for r in records if r.kind == "draft"]
    given = [r.received for r in drafts if r.received is not None]
    leaks = Counter(f"{f.author}/{f.leak}" for f in given if f.leak)
    blind = [f.blind for f in given if f.blind is not None]
    chance = [f.chance for f in given if f.chance is not None]
    return {
        "feedback_share": len(given) / len(drafts) if drafts else None,
        "leak_share": sum(leaks.values()) / len(given) if given else None,
        "leaks": dict(leaks),
        "coaches": _by_coach(given),
        "blind_reader": fmean(blind) if blind else None,
        "blind_chance": fmean(chance) if chance else None,
        "coach_failures": sum("coach_failure" in r.episode.notes for r in drafts),
    }


def _by_coach(given: Sequence[Feedback]) -> dict[str, dict[str, Any]]:
    """Author → texts that were checked, how many leak in which way, and how many were dropped:
    those that leak, but for worked examples, which are asked for knowing that."""
    found: dict[str, dict[str, Any]] = {}
    for feedback in given:
        coach = found.setdefault(feedback.author, {"checked": 0, "dropped": 0, "leaks": {}})
        coach["checked"] += 1
        coach["dropped"] += not feedback.usable
        if feedback.leak:
            coach["leaks"][feedback.leak] = coach["leaks"].get(feedback.leak, 0) + 1
    return found


def feedback_totals(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of a run's step lines: drafts, failures of the coach, per coach what was checked,
    dropped, and leaked in which way, and the drafts that were to have no feedback, if any."""
    steps = [line for line in lines if "coach_failures" in line]
    coaches: dict[str, dict[str, Any]] = {}
    for line in steps:
        for author, counts in line.get("coaches", {}).items():
            coach = coaches.setdefault(author, {"checked": 0, "dropped": 0, "leaks": {}})
            coach["checked"] += counts["checked"]
            coach["dropped"] += counts["dropped"]
            coach["leaks"] = dict(Counter(coach["leaks"]) + Counter(counts["leaks"]))
    gated = sum(line.get(GATED, 0) for line in steps)
    return {
        "drafts": sum(line["n_draft"] for line in steps),
        "coach_failures": sum(line["coach_failures"] for line in steps),
        "coaches": coaches,
        **({"gated": gated} if gated else {}),
    }


def sequence_metrics(
    found: Sequence[TrainSequence], trained: Sequence[TrainSequence]
) -> dict[str, Any]:
    """Groups that can teach nothing, the tokens that were really trained on, and, where rollouts
    are imitated, the share of the refined ones that were accepted."""
    stats = group_stats([Entry(s.group, s.rollout, s.reward) for s in found if s.compared])
    return {
        "groups": stats.groups,
        "groups_single": stats.singletons,
        "groups_flat": stats.flat,
        "silent_share": stats.silent_share,
        "trained_tokens": token_counts(trained),
        **accepted_share(found, trained),
    }


def accepted_share(
    found: Sequence[TrainSequence], trained: Sequence[TrainSequence]
) -> dict[str, float]:
    """Imitated rollouts / those that could be; nothing for methods that imitate none."""
    offered, taken = (
        {(s.example_id, s.rollout) for s in part if s.loss == "imitation"}
        for part in (found, trained)
    )
    return {"accepted_share": len(taken) / len(offered)} if offered else {}


def token_counts(sequences: Iterable[TrainSequence]) -> dict[str, int]:
    """Trained tokens per part, and per `part/loss` for other losses than the policy's: what a
    method really trained on."""
    counts: dict[str, int] = {}
    for sequence in sequences:
        plain = sequence.loss == "policy"
        name = sequence.part if plain else f"{sequence.part}/{sequence.loss}"
        counts[name] = counts.get(name, 0) + sequence.span.n_trained
    return counts


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Key-wise mean of equal-shaped rows (the updates of one step)."""
    return {key: fmean(row[key] for row in rows) for key in rows[0]} if rows else {}
