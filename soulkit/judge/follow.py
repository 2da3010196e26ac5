"""A further question to each judge about what that judge has just said.

For judgements in steps: a critique first, then a decision with that critique at hand. Each readable
opinion is followed up by its own author, under its own sample number; one that could not be read
has nothing to follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from soulkit.judge.panel import Opinion, judge_call, judge_names, one_opinion, refuse_silent_judges
from soulkit.judge.structured import JudgeQuestion
from soulkit.models.base import Cast
from soulkit.types import Episode

T = TypeVar("T")
U = TypeVar("U")


async def follow_up(
    cast: Cast,
    first: Sequence[Opinion[T]],
    then: Callable[[T], JudgeQuestion[U]],
    episode: Episode,
) -> list[Opinion[U]]:
    """What the judges answer to `then` of their own readable opinions in `first`, in that order.

    Raises UnreadableVerdict when some judge gave no readable answer at all.
    """
    panel = cast.panel_of("judge")
    judges = dict(zip(judge_names(panel), panel, strict=True))
    times = max((opinion.sample for opinion in first), default=0) + 1
    requests = [
        one_opinion(
            one.judge,
            judges[one.judge].asked_times(times),
            then(one.answer),
            judge_call(episode, one.sample, "judge", cast.purpose),
        )
        for one in first
        if one.answer is not None
    ]
    later = list(await asyncio.gather(*requests))
    refuse_silent_judges(later)
    return later
