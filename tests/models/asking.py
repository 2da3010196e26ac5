"""Calls of models as tests make them: one, or many at once; the model is closed behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from soulkit.models.base import ChatModel
from soulkit.types import Call, Completion, Role, Sampling, Segment

CALL = Call(role="judge", example_id="e1")
HELLO = (Segment("user", "hello"),)


def ask(
    model: ChatModel, sampling: Sampling | None = None, call: Call = CALL,
    context: Sequence[Segment] = HELLO,
) -> Completion:  # fmt: skip
    """The reply to one call."""

    async def once() -> Completion:
        try:
            return await model.complete(context, sampling or Sampling(), call)
        finally:
            await model.close()

    return asyncio.run(once())


def crowd(
    *models: ChatModel, count: int = 1, sampling: Sampling | None = None, role: Role = "judge",
    context: Sequence[Segment] = HELLO,
) -> list[Completion | BaseException]:  # fmt: skip
    """What becomes of `count` calls to each of the models, all at once."""

    async def everybody() -> list[Completion | BaseException]:
        calls = [Call(role=role, example_id="e", rollout=i) for i in range(count)]
        asked = [
            model.complete(context, sampling or Sampling(), call)
            for call in calls for model in models
        ]  # fmt: skip
        try:
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            for model in models:
                await model.close()

    return asyncio.run(everybody())
