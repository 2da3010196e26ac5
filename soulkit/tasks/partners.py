"""Asking a partner, or an environment, for something that can be used.

Such a model is no part of what is measured. A reply of which nothing can be made is asked for once
more, as another sample of the same call; where that is of no use either the episode is broken,
which is not the actor's fault, and every reply to the call is set aside, so that a run that is
taken up again asks anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from soulkit.errors import CallError, PartnerError
from soulkit.models.base import Player
from soulkit.types import Call, Segment, Usage

T = TypeVar("T")
_TIMES = {1: "", 2: ", twice"}


def _unusable(reply: str) -> str:
    """What is wrong with a reply where nobody can say more."""
    return "said nothing usable"


async def partner_reply(
    player: Player,
    context: Sequence[Segment],
    call: Call,
    read: Callable[[str], T | None],
    who: str,
    attempts: int = 2,
    *,
    trouble: Callable[[str], str] = _unusable,
) -> tuple[T, Usage]:
    """(what `read` makes of the reply's text, the cost of all that was asked).

    `read` gives None for a reply that is of no use. `who` names the speaker in the error ("the
    partner"), `trouble` says what is wrong with its last reply.

    Raises:
        PartnerError: no attempt gave anything usable. Like every other CallError of a call made
            here it carries what the attempts before it cost; `play_out` counts that.
    """
    usage, calls = Usage(), [replace(call, sample=call.sample + i) for i in range(attempts)]
    try:
        for once in calls:
            reply = await player.complete(context, once)
            usage += reply.usage
            result = read(reply.text)
            if result is not None:
                return result, usage
        for once in calls:
            player.set_aside(context, once)
        times = _TIMES.get(attempts, f", {attempts} times")
        raise PartnerError(f"{who} {trouble(reply.text)}{times} ({reply.stop_reason})")
    except CallError as error:
        error.usage += usage
        raise
