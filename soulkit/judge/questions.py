"""Several questions about one episode, asked at once.

Each has its own samples and its own audience, and each is missing for itself: by default an episode
of which one question was answered by nobody is unscored, since a mean over the others would be
another metric. A task whose score is made otherwise names the questions that it can do without.

    replies = await ask_several(cast, [rating, audit], episode, may_miss=["audit"])
    readable(replies["audit"]) or "nobody could be read"
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from soulkit.errors import UnreadableVerdict
from soulkit.judge.panel import Opinion, all_opinions, refuse_silent_judges
from soulkit.judge.structured import JudgeQuestion
from soulkit.judge.transcripts import utterances
from soulkit.models.base import Cast
from soulkit.types import Episode


async def ask_several(
    cast: Cast,
    questions: Sequence[JudgeQuestion[Any]],
    episode: Episode,
    may_miss: Collection[str] = (),
) -> dict[str, list[Opinion[Any]]]:
    """Purpose → the opinions on it, in the order of the questions, judges and samples.

    Everybody is waited for before anything is raised, so that what was paid for is on record. A
    question in `may_miss` that nobody answered readably has no readable opinion: its list holds the
    unreadable ones, each with its problem. But where the actor's own words pose as the answer, it
    is missing all the same: no actor may talk itself out of a part of its score.

    Raises UnreadableVerdict of the first other question that nobody answered (one with a reply
    before one without: only a reply can be somebody's forgery), ConfigError where the cast has
    nobody for a question, ValueError for two questions of one purpose or an unknown `may_miss`.
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
            if purpose not in may_miss or _forged(error, episode):
                missing.append(error)
    if missing:
        raise next((error for error in missing if error.forgery is not None), missing[0])
    return replies


def _purposes(questions: Sequence[JudgeQuestion[Any]], may_miss: Collection[str]) -> list[str]:
    purposes = [question.purpose for question in questions]
    if len(set(purposes)) < len(purposes):
        raise ValueError(f"two questions of one purpose: {', '.join(purposes)}")
    if unknown := set(may_miss) - set(purposes):
        raise ValueError(f"no question is called {', '.join(sorted(unknown))}")
    return purposes


def _forged(error: UnreadableVerdict, episode: Episode) -> bool:
    return error.forgery is not None and any(map(error.forgery, utterances(episode)))
