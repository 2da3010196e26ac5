"""Several questions about one episode, asked at once.

Each has its own samples and its own audience, and each is missing for itself: by default an episode
of which one question was answered by nobody is unscored, since a mean over the others would be
another metric. A task whose score is made otherwise names the questions that it can do without.

    replies = await ask_several(cast, [rating, audit], episode, may_miss=["audit"])
    replies["audit"] or "nobody could be read"
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from soulkit.errors import UnreadableVerdict
from soulkit.judge.panel import Opinion, opinions
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
    question in `may_miss` that nobody answered readably has an empty list, unless the actor's own
    words pose as the answer: no actor may talk itself out of a part of its score.

    Raises UnreadableVerdict of the first other question that nobody answered (one with a reply
    before one without: only a reply can be somebody's forgery), ConfigError where the cast has
    nobody for a question, ValueError for two questions of one purpose or an unknown `may_miss`.
    """
    purposes = _purposes(questions, may_miss)
    requests = [opinions(cast, question, episode) for question in questions]
    outcomes = dict(
        zip(purposes, await asyncio.gather(*requests, return_exceptions=True), strict=True)
    )
    replies: dict[str, list[Opinion[Any]]] = {}
    missing: list[UnreadableVerdict] = []
    for purpose, outcome in outcomes.items():
        if isinstance(outcome, UnreadableVerdict):
            replies[purpose] = []
            if purpose not in may_miss or _forged(outcome, episode):
                missing.append(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            replies[purpose] = outcome
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
