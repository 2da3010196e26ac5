"""Metrics of a step, as pure functions of its records and sequences (algorithms §3)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from soulkit.eval.results.summary import cluster_of
from soulkit.judge.coach import distinct_share
from soulkit.metrics.comparisons import RewardGroup, leave_one_out_gap, pair_gap
from soulkit.metrics.intervals import finite_value
from soulkit.tasks.kit.coaching import judged_dimensions
from soulkit.train.loss.advantage import GroupMember, group_stats
from soulkit.train.objectives.sequences import TrainSequence
from soulkit.train.state.metrics import CoachCounts, FeedbackCounts, Learned, Rewards
from soulkit.types import COACH_FAILURE, Feedback, Kind, Record


def reward_groups(records: Sequence[Record], metric: str = "") -> list[RewardGroup]:
    """Per (step, example): rewards of drafts and refined rollouts, aligned by rollout; or the
    values of a task metric.

    Groups of the same story, or of the same row in several steps, share a cluster.
    """
    grouped: dict[tuple[int, str], dict[int, dict[str, float | None]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    clusters: dict[tuple[int, str], tuple[str, str]] = {}
    for record in records:
        group = record.step, record.example_id
        score = record.score
        value = score.metrics.get(metric) if metric else score.reward
        grouped[group][record.rollout][record.kind] = value
        clusters[group] = record.task, cluster_of(record)
    return [
        RewardGroup(
            [r.get("draft") for r in g.values()],
            [r.get("refined") for r in g.values()],
            clusters[group],
        )
        for group, g in grouped.items()
    ]


def rewards_of(records: Sequence[Record], *, mixture: bool = False) -> Rewards:
    """Draft and refined rewards, both gaps with intervals, and counts of unscored rollouts by
    reason, and the gap per judged dimension; for a `mixture` also rewards and gap per task."""
    whole = _rewards(records)
    whole = replace(whole, **_by_dimension(records))
    return replace(whole, **_by_task(records)) if mixture else whole


def _by_dimension(records: Sequence[Record]) -> dict[str, Any]:
    """The leave-one-out gap in every judged dimension."""
    gaps = {
        f"{task}/{name}": leave_one_out_gap(
            reward_groups([r for r in records if r.task == task], name)
        )
        for task, names in _rated_dimensions(records).items() for name in names
    }  # fmt: skip
    ends = {"loo": "mean", "loo_low": "ci_low", "loo_high": "ci_high", "scored": "n_scored"}
    refined = Counter(r.task for r in records if r.kind == "refined")
    return {
        f"{field}_by_dimension": {
            name: number for name, gap in gaps.items() if (number := getattr(gap, end)) is not None
        }
        for field, end in ends.items()
    } | {"n_by_dimension": {name: refined[name.partition("/")[0]] for name in gaps}}  # fmt: skip


def _rated_dimensions(records: Sequence[Record]) -> dict[str, list[str]]:
    """Task → the dimensions that its judges rated, if there are several."""
    rated: dict[str, dict[str, None]] = defaultdict(dict)
    for record in records:
        score = record.score
        rated[record.task] |= {n: None for n in judged_dimensions(score) if n in score.metrics}
    return {task: [*names] for task, names in rated.items() if len(names) > 1}


def _by_task(records: Sequence[Record]) -> dict[str, Any]:
    names = sorted({record.task for record in records})
    alone = {name: _rewards([r for r in records if r.task == name]) for name in names}
    return {
        f"{field}_by_task": {
            name: number for name, rewards in alone.items()
            if (number := getattr(rewards, field)) is not None
        }
        for field in ("draft", "refined", "loo", "loo_low", "loo_high")
    }  # fmt: skip


def _rewards(records: Sequence[Record]) -> Rewards:
    groups = reward_groups(records)
    loo, pair = leave_one_out_gap(groups), pair_gap(groups)
    missing = Counter(r.score.reason for r in records if not r.score.scored)
    lengths = [len(t.completion.token_ids) for r in records for tr in r.episode.traces
               for t in tr.turns]  # fmt: skip
    return Rewards(
        draft=_mean_reward(records, "draft"),
        refined=_mean_reward(records, "refined"),
        loo=loo.mean,
        loo_low=loo.ci_low,
        loo_high=loo.ci_high,
        loo_clusters=loo.n_clusters,
        pair=pair.mean,
        n_draft=sum(r.kind == "draft" for r in records),
        n_refined=sum(r.kind == "refined" for r in records),
        n_unscored=sum(missing.values()),
        unscored=dict(missing),
        tokens_per_turn=fmean(lengths) if lengths else None,
        tokens=sum(lengths),
        tasks=_task_metrics(records),
    )


def _mean_reward(records: Sequence[Record], kind: Kind) -> float | None:
    rewards = [r.score.reward for r in records if r.kind == kind and r.score.reward is not None]
    return fmean(rewards) if rewards else None


def _task_metrics(records: Sequence[Record]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.score.metrics.items():
            if record.kind == "draft" and value is not None:
                values[f"{record.task}/{name}"].append(value)
    return {name: fmean(v) for name, v in values.items()}


def feedback_of(records: Sequence[Record]) -> FeedbackCounts:
    """Counts and shares of feedback and leaks, by coach, and the number of coach failures."""
    drafts = [r for r in records if r.kind == "draft"]
    texts = [r.received for r in drafts if r.received is not None]
    leaks = Counter(f"{f.author}/{f.leak}" for f in texts if f.leak)
    blind = [f.blind for f in texts if f.blind is not None]
    chance = [f.chance for f in texts if f.chance is not None]
    dropped = Counter(f.leak for f in texts if not f.usable)
    return FeedbackCounts(
        share=len(texts) / len(drafts) if drafts else None,
        leak_share=sum(leaks.values()) / len(texts) if texts else None,
        distinct=distinct_share([f.text for f in texts]),
        dropped=dropped.total() / len(texts) if texts else None,
        dropped_by={kind: n / len(texts) for kind, n in dropped.items()},
        leaks=dict(leaks),
        coaches=_by_coach(texts),
        blind_reader=fmean(blind) if blind else None,
        blind_chance=fmean(chance) if chance else None,
        about=_about(drafts),
        coach_failures=sum(COACH_FAILURE in r.episode.notes for r in drafts),
    )


def _about(drafts: Sequence[Record]) -> dict[str, float]:
    """`TASK/NAME` → share of feedback texts that mention the dimension: a word of four letters or
    more from its name, also as the start of another word. The judge's text as it is (`raw`)
    mentions all of them, so it is left out."""
    shares = {}
    for task, names in _rated_dimensions(drafts).items():
        received = [r.received for r in drafts if r.task == task and r.received is not None]
        texts = [one.text for one in received if not one.author.startswith("raw ")]
        for name in names if texts else ():
            words = [word for word in name.split("_") if len(word) > 3] or [name]
            mention = re.compile(rf"\b({'|'.join(map(re.escape, words))})", re.IGNORECASE)
            shares[f"{task}/{name}"] = fmean(bool(mention.search(text)) for text in texts)
    return shares


def _by_coach(texts: Sequence[Feedback]) -> dict[str, CoachCounts]:
    """Author → number of checked texts, of dropped texts, and of leaks by kind."""
    authors: dict[str, list[Feedback]] = {}
    for feedback in texts:
        authors.setdefault(feedback.author, []).append(feedback)
    return {
        author: CoachCounts(
            checked=len(texts_of_author),
            dropped=sum(not feedback.usable for feedback in texts_of_author),
            leaks=dict(Counter(feedback.leak for feedback in texts_of_author if feedback.leak)),
        )
        for author, texts_of_author in authors.items()
    }


def member_of(sequence: TrainSequence) -> GroupMember:
    """A sequence as a member of its group; a non-finite reward counts as None."""
    play, reward = (sequence.example_id, sequence.rollout), finite_value(sequence.reward)
    return GroupMember(sequence.group, sequence.rollout, reward, play)


def with_groups(
    learned: Learned, before: Sequence[TrainSequence], trained: Sequence[TrainSequence]
) -> Learned:
    """`learned` with group statistics, counts of trained tokens and, for methods that imitate, the
    share of accepted refined rollouts."""
    stats = group_stats([member_of(s) for s in before if s.compared])
    return replace(
        learned,
        groups=stats.groups,
        groups_single=stats.singletons,
        groups_flat=stats.flat,
        silent_share=stats.silent_share,
        trained=token_counts(trained),
        accepted=accepted_share(before, trained),
    )


def accepted_share(
    before: Sequence[TrainSequence], trained: Sequence[TrainSequence]
) -> float | None:
    """Imitated rollouts / candidates; None for methods that do not imitate."""
    offered, taken = (
        {(s.example_id, s.rollout) for s in part if s.loss == "imitation"}
        for part in (before, trained)
    )
    return len(taken) / len(offered) if offered else None


def token_counts(sequences: Iterable[TrainSequence]) -> dict[str, int]:
    """Trained tokens per part, or per `part/loss` for losses other than the policy loss."""
    counts: dict[str, int] = {}
    for sequence in sequences:
        plain = sequence.loss == "policy"
        name = sequence.part if plain else f"{sequence.part}/{sequence.loss}"
        counts[name] = counts.get(name, 0) + sequence.span.n_trained
    return counts
