"""Pairwise judging, in both orders, because judges tend to prefer the first (or last) text.

The judge sees two texts as A and B and answers A, B or Tie. With `panel.orders` "both" every judge
is asked twice with the sides exchanged. The episode's value is the mean, so a judge that only looks
at the position gives 0.5; `flips` counts these cases. With "seeded" it is asked once, with the
order drawn from the example: half the cost, unbiased over many rows but not for a single one.

    outcome = await judge_pair(cast, episode, lambda first: render(a if first else b, ...))
    outcome.value      # 1 the episode's side won, 0.5 a tie, 0 the other won; then averaged
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from soulkit.judge.panel import Opinion, ask_several, pair_orders, pooled, verdicts_of
from soulkit.judge.structured import JudgeQuestion, VerdictShape, question
from soulkit.models.base import Cast
from soulkit.types import Episode, Verdict

PURPOSE = "pairwise"
_FIRST, _SECOND = "_first", "_second"


class Preference(VerdictShape):
    """What a judge of two answers."""

    reasoning: str
    verdict: Literal["A", "B", "Tie"]


@dataclass(frozen=True, slots=True)
class Ballot:
    """One answer of one judge in one order."""

    judge: str
    sample: int
    first: bool
    verdict: Literal["A", "B", "Tie"]

    @property
    def value(self) -> float:
        """1 if the episode's side won, 0.5 for a tie, 0 if the other side won."""
        return _worth(self.verdict, self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOutcome:
    """The panel's result on a pair."""

    value: float
    """In [0, 1], for the episode's side: opinions combined per order, then the mean of both."""
    flips: tuple[bool, ...]
    """For each judge and sample that answered in both orders: whether its answers disagree."""
    ballots: tuple[Ballot, ...]
    verdicts: tuple[Verdict, ...]
    """For the Score; the purpose gives the order: `pairwise_first`, `pairwise_second`."""

    @property
    def position_flip(self) -> float | None:
        """Share of judges and samples whose answer changed with the order; None if only one order
        was asked."""
        return sum(self.flips) / len(self.flips) if self.flips else None


async def judge_pair(cast: Cast, episode: Episode, prompt: Callable[[bool], str]) -> PairOutcome:
    """Ask the cast's judges about a pair, in the orders of `cast.panel`, concurrently.

    `prompt(first)` is the question with the episode as A (True) or as B (False); it must quote
    texts of models with `fence`. ConfigError without a judge, UnreadableVerdict if a judge has no
    readable answer in some order.
    """
    questions = pair_questions(cast, episode, prompt)
    return pair_outcome(cast, await ask_several(cast, questions, episode))


def pair_questions(
    cast: Cast,
    episode: Episode,
    prompt: Callable[[bool], str],
    samples: int = 1,
) -> list[JudgeQuestion[Preference]]:
    """The question in each order, to ask together with others (`ask_several`).

    The number of opinions is the one that the task declares for `pairwise` (or for one order:
    `pairwise_first`, `pairwise_second`), else `samples`.
    """
    times = cast.panel.questions.get(PURPOSE, samples)
    return [
        replace(question(_ordered(first), prompt(first), Preference), samples=times)
        for first in pair_orders(episode, cast.panel.orders, PURPOSE)
    ]


def pair_outcome(cast: Cast, replies: Mapping[str, Sequence[Opinion[Any]]]) -> PairOutcome:
    """The result of the opinions on `pair_questions`; other purposes in `replies` are ignored.

    ValueError if there are none, or none is readable in some order.
    """
    orders = [first for first in (True, False) if _ordered(first) in replies]
    panels = [replies[_ordered(first)] for first in orders]
    means = [
        pooled(panel, partial(_side, first), cast.panel.combine)
        for first, panel in zip(orders, panels, strict=True)
    ]
    if not means:
        raise ValueError(f"there is no opinion on {PURPOSE}")
    by_order = [
        [_ballot(opinion, first) for opinion in panel if opinion.answer is not None]
        for first, panel in zip(orders, panels, strict=True)
    ]
    return PairOutcome(
        value=sum(means) / len(means),
        flips=_flips(by_order),
        ballots=tuple(ballot for ballots in by_order for ballot in ballots),
        verdicts=verdicts_of(*panels),
    )


def purposes_asked(purposes: Collection[str], orders: Literal["both", "seeded"]) -> tuple[str, ...]:
    """The purposes that are asked in an episode: with seeded orders, only one of the two questions
    of a pair."""
    pairs = {name.removesuffix(_FIRST) for name in purposes if name.endswith(_FIRST)}
    second = {f"{name}{_SECOND}" for name in pairs} if orders == "seeded" else set()
    return tuple(name for name in purposes if name not in second)


def _ordered(first: bool) -> str:
    return f"{PURPOSE}{_FIRST if first else _SECOND}"


def _side(first: bool, preference: Preference) -> float:
    return _worth(preference.verdict, first)


def _worth(verdict: str, first: bool) -> float:
    return 0.5 if verdict == "Tie" else float((verdict == "A") == first)


def _ballot(opinion: Opinion[Preference], first: bool) -> Ballot:
    assert opinion.answer is not None
    return Ballot(opinion.judge, opinion.sample, first, opinion.answer.verdict)


def _flips(by_order: Sequence[Sequence[Ballot]]) -> tuple[bool, ...]:
    if len(by_order) < 2:
        return ()
    one, two = ({(b.judge, b.sample): b.value for b in ballots} for ballots in by_order)
    return tuple(one[key] != two[key] for key in one if key in two)
