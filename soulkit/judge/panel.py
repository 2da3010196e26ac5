"""Several opinions on one episode: ask judges, combine their answers, measure agreement.

A question is for the judges or the auditors, with a number of opinions that the panel can override.
All are asked concurrently. An unreadable opinion is kept with its reason. If a judge has no
readable opinion, the episode is unscored, because a mean over the other judges would be the score
of a different panel. Questions in `may_miss` may stay unanswered.

    replies = await ask_several(cast, [rating, audit], episode, may_miss=["audit"])
    readable(replies["audit"]) or "no readable audit"
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Generic, Literal, TypeVar

from soulkit.errors import UnreadableVerdict
from soulkit.judge.structured import JudgeQuestion, answer
from soulkit.judge.verdict import utterances
from soulkit.models.base import Cast, Player
from soulkit.types import Call, Episode, Role, Verdict

T = TypeVar("T")
Combine = Literal["mean", "vote"]


@dataclass(frozen=True, slots=True)
class Opinion(Generic[T]):
    """One answer of one judge. If it is unreadable, `answer` is None and `problem` gives the
    reason."""

    judge: str
    purpose: str
    sample: int
    answer: T | None
    fields: dict[str, Any]
    problem: str = ""
    replies: int = 0
    quoting: int = 0
    error: UnreadableVerdict | None = None
    ignored: tuple[str, ...] = ()

    def verdict(self) -> Verdict:
        """The opinion as a Verdict of a Score."""
        return Verdict(
            judge=self.judge, purpose=self.purpose, sample=self.sample, said=self.fields,
            problem=self.problem, replies=self.replies, quoting=self.quoting, ignored=self.ignored,
        )  # fmt: skip


def judge_call(episode: Episode, sample: int = 0, role: Role = "judge", purpose: str = "") -> Call:
    """The call that asks a judge or auditor about an episode; the same whenever it is judged again.

    `purpose` is the cast's purpose, if the question is not about the episode's score.
    """
    return Call(
        role=role,
        example_id=episode.example_id,
        rollout=episode.rollout,
        kind=episode.kind,
        sample=sample,
        step=episode.step,
        purpose=purpose,
    )


async def opinions(cast: Cast, question: JudgeQuestion[T], episode: Episode) -> list[Opinion[T]]:
    """Ask all players of the question's role; opinions in order of judges and samples.

    ConfigError if the cast has no player for it, UnreadableVerdict if a judge gave no readable
    answer.
    """
    panel_opinions = await all_opinions(cast, question, episode)
    refuse_silent_judges(panel_opinions)
    return panel_opinions


async def all_opinions(
    cast: Cast, question: JudgeQuestion[T], episode: Episode
) -> list[Opinion[T]]:
    """Like `opinions`, but a judge without a readable answer raises no error."""
    cast.player(question.role)
    judges = cast.panel_of(question.role)
    times = cast.panel.samples_of(question.purpose, question.samples)
    # A judge that audits for lack of an auditor is called with the role judge.
    role: Role = "auditor" if question.role == "auditor" and cast.auditors else "judge"
    names = judge_names(judges)
    requests = [
        _ask_judge(
            name,
            judge.asked_times(times),
            question,
            judge_call(episode, sample, role, cast.purpose),
        )
        for name, judge in zip(names, judges, strict=True)
        for sample in range(times)
    ]
    return list(await asyncio.gather(*requests))


def refuse_silent_judges(panel_opinions: Sequence[Opinion[T]]) -> None:
    """UnreadableVerdict if a judge gave no readable answer."""
    for name in dict.fromkeys(opinion.judge for opinion in panel_opinions):
        errors = [opinion.error for opinion in panel_opinions if opinion.judge == name]
        unreadable = [error for error in errors if error is not None]
        if len(unreadable) == len(errors):  # prefer the error of an actual reply
            raise next((error for error in unreadable if error.forgery), unreadable[-1])


def judge_names(judges: Sequence[Player]) -> list[str]:
    """The judges' names; equal names are numbered."""
    counts = Counter(judge.model.name for judge in judges)
    places: Counter[str] = Counter()
    names = []
    for judge in judges:
        name = judge.model.name
        places[name] += 1
        names.append(f"{name} #{places[name]}" if counts[name] > 1 else name)
    return names


async def _ask_judge(
    name: str, judge: Player, question: JudgeQuestion[T], call: Call
) -> Opinion[T]:
    """One opinion of the judge called `name`; an unreadable answer is also an opinion."""
    try:
        reply = await answer(judge, question, call)
    except UnreadableVerdict as error:
        return Opinion(name, question.purpose, call.sample, None, {}, error.detail, error=error)
    return Opinion(
        name, question.purpose, call.sample, reply.value, question.dump(reply.value),
        replies=reply.replies, quoting=reply.quoting, ignored=reply.ignored,
    )  # fmt: skip


def reading_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """`judge/reasked` and `judge/quoted`: shares of the readable verdicts of an episode whose judge
    was asked again, or repeated a verdict from its prompt. Empty without a judge."""
    read = [verdict for verdict in verdicts if verdict.replies]
    if not read:
        return {}
    return {
        "judge/reasked": sum(verdict.replies > 1 for verdict in read) / len(read),
        "judge/quoted": sum(verdict.quoting > 0 for verdict in read) / len(read),
    }


def readable(panel_opinions: Sequence[Opinion[T]]) -> list[T]:
    """The readable answers."""
    return [opinion.answer for opinion in panel_opinions if opinion.answer is not None]


def combined(values: Sequence[float], how: Combine) -> float:
    """Combine values: their mean, or the most frequent value (the mean of tied ones).

    ValueError if there are none.
    """
    if not values:
        raise ValueError("no values to combine")
    if how == "mean":
        return sum(values) / len(values)
    counts = Counter(values)
    most = max(counts.values())
    tied = [value for value, count in counts.items() if count == most]
    return sum(tied) / len(tied)


def pooled(
    panel_opinions: Sequence[Opinion[T]], value: Callable[[T], float], how: Combine
) -> float:
    """Combine a panel's readable opinions into one number.

    In a mean all judges have equal weight, in a vote all opinions. ValueError if none is readable.
    """
    by_judge: dict[str, list[float]] = {}
    for opinion in panel_opinions:
        if opinion.answer is not None:
            by_judge.setdefault(opinion.judge, []).append(value(opinion.answer))
    if how == "vote":
        return combined([v for values in by_judge.values() for v in values], how)
    return combined([combined(values, how) for values in by_judge.values()], how)


def agreement(values: Sequence[float], low: float, high: float) -> float | None:
    """1 − mean |a − b| / (high − low) over pairs of opinions; None for fewer than two."""
    pairs = list(combinations(values, 2))
    if not pairs or high <= low:
        return None
    return 1 - sum(abs(a - b) for a, b in pairs) / (len(pairs) * (high - low))


Rated = tuple[Sequence[Opinion[T]], Callable[[T], float], float, float]
"""Opinions, a function that returns the number of each, and the ends of the scale."""


def mean_agreement(rated: Iterable[Rated[Any]]) -> dict[str, float]:
    """The metric `judge_agreement`, a mean over the rated questions; empty if each has only one
    opinion."""
    values = (
        agreement([read(answer) for answer in readable(opinions)], low, high)
        for opinions, read, low, high in rated
    )
    numbers = [value for value in values if value is not None]
    return {"judge_agreement": sum(numbers) / len(numbers)} if numbers else {}


def verdicts_of(*panels: Iterable[Opinion[Any]]) -> tuple[Verdict, ...]:
    """The opinions as Verdicts of a Score."""
    return tuple(opinion.verdict() for opinions in panels for opinion in opinions)


def in_words(opinions: Iterable[Opinion[Any]]) -> str:
    """Every readable opinion: one line for each field, the score before its reasons. Several
    opinions are headed by the names of their judges."""
    known = [opinion for opinion in opinions if opinion.answer is not None]
    blocks = []
    for opinion in known:
        head = [f"[{opinion.judge}, sample {opinion.sample}]"] if len(known) > 1 else []
        lines = [f"{name}{_part_in_words(part)}" for name, part in opinion.fields.items()]
        blocks.append("\n".join([*head, *lines]))
    return "\n\n".join(blocks)


def _part_in_words(part: Any) -> str:
    if not isinstance(part, Mapping):
        return f": {part}"
    reasons = "; ".join(str(value) for name, value in part.items() if name != "score")
    return f" {part['score']:g}: {reasons}"


def pair_orders(
    episode: Episode, how: Literal["both", "seeded"], key: str = ""
) -> tuple[bool, ...]:
    """The orders in which a pair is shown; True means that the episode comes first.

    `both` gives two orders; `seeded` one, drawn from the example and `key`.
    """
    if how == "both":
        return True, False
    rng = random.Random(f"{key}/{episode.example_id}/{episode.rollout}/{episode.step}")
    return (not rng.getrandbits(1),)


async def ask_several(
    cast: Cast,
    questions: Sequence[JudgeQuestion[Any]],
    episode: Episode,
    may_miss: Collection[str] = (),
) -> dict[str, list[Opinion[Any]]]:
    """Ask several questions; purpose → opinions, in order of questions, judges and samples.

    All replies are awaited before an error is raised, so that paid replies are recorded. If a judge
    has no readable answer to a question in `may_miss`, its list has only the unreadable opinions.
    If the actor's own words imitate the answer, the question still counts as missing, so that an
    actor cannot avoid a part of its score.

    UnreadableVerdict for the first other question without a readable answer (preferring questions
    with a reply, which may be forged); ConfigError if the cast has no player for a question;
    ValueError for two questions with the same purpose or an unknown `may_miss`.
    """
    purposes = _purposes(questions, may_miss)
    requests = [all_opinions(cast, question, episode) for question in questions]
    outcomes = dict(
        zip(purposes, await asyncio.gather(*requests, return_exceptions=True), strict=True)
    )
    replies: dict[str, list[Opinion[Any]]] = {}
    missing: list[UnreadableVerdict] = []
    for purpose, outcome in outcomes.items():
        if isinstance(outcome, BaseException):
            raise outcome
        replies[purpose] = outcome
        try:
            refuse_silent_judges(outcome)
        except UnreadableVerdict as error:
            replies[purpose] = [opinion for opinion in outcome if opinion.answer is None]
            forged = error.forgery is not None and any(map(error.forgery, utterances(episode)))
            if purpose not in may_miss or forged:
                missing.append(error)
    if missing:
        raise next((error for error in missing if error.forgery is not None), missing[0])
    return replies


def _purposes(questions: Sequence[JudgeQuestion[Any]], may_miss: Collection[str]) -> list[str]:
    purposes = [question.purpose for question in questions]
    if len(set(purposes)) < len(purposes):
        raise ValueError(f"two questions have the same purpose: {', '.join(purposes)}")
    if unknown := set(may_miss) - set(purposes):
        raise ValueError(f"no question has the purpose {', '.join(sorted(unknown))}")
    return purposes


U = TypeVar("U")


async def follow_up(
    cast: Cast,
    first: Sequence[Opinion[T]],
    then: Callable[[T], JudgeQuestion[U]],
    episode: Episode,
) -> list[Opinion[U]]:
    """Ask each judge the question `then(answer)` about its own readable opinions in `first`.

    UnreadableVerdict if a judge gave no readable answer.
    """
    panel = cast.panel_of("judge")
    judges = dict(zip(judge_names(panel), panel, strict=True))
    times = max((opinion.sample for opinion in first), default=0) + 1
    requests = [
        _ask_judge(
            opinion.judge,
            judges[opinion.judge].asked_times(times),
            then(opinion.answer),
            judge_call(episode, opinion.sample, "judge", cast.purpose),
        )
        for opinion in first
        if opinion.answer is not None
    ]
    later = list(await asyncio.gather(*requests))
    refuse_silent_judges(later)
    return later
