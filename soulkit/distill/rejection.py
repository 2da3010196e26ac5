"""Which samples are good enough to learn from: pure functions over what is known of a sample.

    scored, not cut, refused, forged or hacked ──▶ reward enough ──▶ distinct ──▶ best of a prompt

* Reward enough is what --min-reward says. Without it: the full reward where a score is 0 or 1. A
  graded score must lie above the mean of the samples of its prompt, so that an easy prompt does not
  crowd out a hard one; where all samples of a prompt score alike, it must reach the mean of the
  task. The full reward is always enough, and the least never is.
* The best have the highest reward; of equal ones those of the form that was asked for, then the
  higher score, then fewer tokens, then the smaller key.
* A sample is a duplicate where its replies are those of one that is taken, or nearly, on the same
  prompt or on one that says nearly the same. Two questions about one story are two prompts.
* A quota is spread over the prompts: the best of each in turn, in an order by seed, then the second
  best. What is chosen depends on the set of samples alone, not on the order in which they came.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from soulkit.data.contamination import Words, folded_words
from soulkit.data.rows import share_of
from soulkit.distill.near import same_words
from soulkit.types import Record

CUT = frozenset({"length", "content_filter", "refusal"})
"""How a reply ends that nobody finished."""
READABLE = ("ok", "salvaged")


@dataclass(frozen=True, slots=True)
class Sampled:
    """What is known of one sample."""

    key: str
    example_id: str
    reward: float | None
    """None for a sample that is never learned from."""
    value: float = 0.0
    salvaged: bool = False
    tokens: int = 0
    replies: Words = ()
    fault: str = ""
    """Why it is never learned from: `unscored`, `hacked`, `truncated`, another status."""

    @property
    def rank(self) -> tuple[float, bool, float, int, str]:
        """Smaller is better."""
        return -(self.reward or 0.0), self.salvaged, -self.value, self.tokens, self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a sample must be to be learned from."""

    high: float
    """The full reward."""
    low: float
    """The least."""
    binary: bool
    min_reward: float | None = None
    keep_top: int = 1
    quota: int | None = None
    near: float = 0.8
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What became of the samples of a task."""

    taken: tuple[Sampled, ...]
    passed: int
    duplicates: int
    overlaps: int
    faults: Mapping[str, int]
    below: int
    """Samples whose reward was not enough."""


def sampled(record: Record) -> Sampled:
    """What is known of a record."""
    score = record.score
    turns = [turn.completion for trace in record.episode.traces for turn in trace.turns]
    texts = [turn.text for turn in turns]
    # Words that are only signs count as they are written.
    replies = tuple(w for text in texts for w in folded_words(text) or (text.strip(),))
    fault = _fault(record, [turn.stop_reason for turn in turns])
    return Sampled(
        key=record.key, example_id=record.example_id, reward=None if fault else score.reward,
        value=score.value or 0.0, salvaged=score.status == READABLE[1],
        tokens=sum(len(turn.token_ids) or turn.usage.completion_tokens for turn in turns),
        replies=replies, fault=fault,
    )  # fmt: skip


def _fault(record: Record, ends: Collection[str]) -> str:
    score = record.score
    if not score.scored or score.reward is None or not math.isfinite(score.reward):
        return "unscored"
    if score.status not in READABLE:
        return score.status
    if score.metrics.get("hacked"):
        return "hacked"
    if record.given is not None or record.kind != "draft":
        return "conditioned"  # on feedback, that no prompt will hold
    if not ends:
        return "empty"
    return "truncated" if CUT & set(ends) else ""


# -- choosing ------------------------------------------------------------------------------------


def choose_samples(
    samples: Iterable[Sampled], rules: Rules, *, overlapping: Collection[str] = (),
    alike: Mapping[str, Collection[str]] | None = None,
) -> Choice:  # fmt: skip
    """What of the samples of one task is learned, in a fixed order.

    `overlapping`: rows that no sample may come from. `alike`: row → other rows that say nearly the
    same.
    """
    every = sorted({one.key: one for one in samples}.values(), key=lambda one: one.key)
    clean = [one for one in every if one.example_id not in overlapping]
    usable = [one for one in clean if one.reward is not None]
    passed = passing(usable, rules)
    taken, duplicates = _distinct(passed, rules, alike or {})
    return Choice(
        taken=tuple(taken), passed=len(passed), duplicates=duplicates,
        overlaps=len(every) - len(clean), below=len(usable) - len(passed),
        faults=dict(sorted(Counter(one.fault for one in clean if one.fault).items())),
    )  # fmt: skip


def passing(samples: Sequence[Sampled], rules: Rules) -> list[Sampled]:
    """The samples with reward enough; each has a reward."""
    rewards: dict[str, list[float]] = {}
    for one in samples:
        rewards.setdefault(one.example_id, []).append(one.reward or 0.0)
    task_mean = _mean([reward for several in rewards.values() for reward in several])
    return [
        one
        for one in samples
        if _enough(one.reward or 0.0, rewards[one.example_id], task_mean, rules)
    ]


def _enough(reward: float, row: Sequence[float], task_mean: float, rules: Rules) -> bool:
    if rules.min_reward is not None:
        return reward >= rules.min_reward
    if reward >= rules.high or rules.binary:
        return reward >= rules.high
    if reward <= rules.low:
        return False
    return reward > _mean(row) if max(row) > min(row) else reward >= task_mean


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _distinct(
    passed: Sequence[Sampled], rules: Rules, alike: Mapping[str, Collection[str]]
) -> tuple[list[Sampled], int]:
    """The best of each prompt that no other says already, and how many were set aside for that."""
    waiting: dict[str, list[Sampled]] = {}
    for one in sorted(passed, key=lambda one: one.rank, reverse=True):
        waiting.setdefault(one.example_id, []).append(one)
    order = sorted(waiting, key=lambda row: (share_of(f"quota/{rules.seed}", row), row))
    taken: dict[str, list[Sampled]] = {}
    count = duplicates = 0
    for _ in range(rules.keep_top):
        for row in order:
            if count == rules.quota:
                break
            others = [o for near in (row, *alike.get(row, ())) for o in taken.get(near, ())]
            while waiting[row]:
                one = waiting[row].pop()
                if not any(same_words(one.replies, o.replies, rules.near) for o in others):
                    taken.setdefault(row, []).append(one)
                    count += 1
                    break
                duplicates += 1
    return [one for row in sorted(taken) for one in taken[row]], duplicates
