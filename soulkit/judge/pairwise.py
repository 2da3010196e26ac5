"""Which of two? Asked both ways round, because judges like what they read first (or last).

The judge sees two texts as A and B and answers A, B or Tie. With `panel.orders` "both" every judge
is asked twice, the sides exchanged; the episode's value is the mean, so that a judge who only looks
at the position gives 0.5, and `flips` says how often that happened. With "seeded" it is asked
once, the side drawn from the example: half the price, unbiased over many rows, blind in one.

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
        """1 when the episode's side won, 0.5 for a tie, 0 when the other won."""
        return _worth(self.verdict, self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOutcome:
    """What the panel made of a pair."""

    value: float
    """In [0, 1], from the episode's side: the combined opinions of each order, then their mean."""
    flips: tuple[bool, ...]
    """One for each judge and sample that answered in both orders: whether the two disagree."""
    ballots: tuple[Ballot, ...]
    verdicts: tuple[Verdict, ...]
    """For the Score; the purpose says the order: `pairwise_first`, `pairwise_second`."""

    @property
    def position_flip(self) -> float | None:
        """Share of judges and samples whose answer turned with the order; None: one order only."""
        return sum(self.flips) / len(self.flips) if self.flips else None


async def judge_pair(cast: Cast, episode: Episode, prompt: Callable[[bool], str]) -> PairOutcome:
    """The cast's judges on a pair, in the orders that `cast.panel` asks for, asked at once.

    `prompt(first)` is the question with the episode as A (True) or as B (False); texts of models
    are in it through `fence` only. Raises ConfigError without a judge, UnreadableVerdict when a
    judge has no readable answer in some order.
    """
    questions = pair_questions(cast, episode, prompt)
    return pair_outcome(cast, await ask_several(cast, questions, episode))


def pair_questions(
    cast: Cast,
    episode: Episode,
    prompt: Callable[[bool], str],
    samples: int = 1,
) -> list[JudgeQuestion[Preference]]:
    """The question in each order, for whoever asks others beside it (`ask_several`).

    Each takes so many opinions as the task declares for `pairwise` (or for the order alone:
    `pairwise_first`, `pairwise_second`); without a declaration, `samples`.
    """
    times = cast.panel.questions.get(PURPOSE, samples)
    return [
        replace(question(_ordered(first), prompt(first), Preference), samples=times)
        for first in pair_orders(episode, cast.panel.orders, PURPOSE)
    ]


def pair_outcome(cast: Cast, replies: Mapping[str, Sequence[Opinion[Any]]]) -> PairOutcome:
    """What the opinions on `pair_questions` come to; other purposes in `replies` are left alone.

    Raises ValueError when there are none, or none readable in some order.
    """
    orders = [first for first in (True, False) if _ordered(first) in replies]
    panels = [replies[_ordered(first)] for first in orders]
    means = [
        pooled(panel, partial(_side, first), cast.panel.combine)
        for first, panel in zip(orders, panels, strict=True)
    ]
    if not means:
        raise ValueError(f"nobody was asked for {PURPOSE}")
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
    """Of the purposes of one episode's questions those that are asked: where the order of a pair is
    drawn, one question of its two."""
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
