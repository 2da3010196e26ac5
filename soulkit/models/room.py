"""How long a reply may be: its limit, and what the context leaves of it. One rule for every model.

A reply may have min(limit, context − prompt) tokens. Where that is less than LEAST_ROOM tokens, or
than the limit where the limit itself is lower, the row does not fit: a reply that is cut after a
few tokens says nothing about the model. Example: with a limit of 8192 a model with a context of
4096 tokens is given at most 3584 tokens of prompt.
"""

from __future__ import annotations

from soulkit.types import LEAST_ROOM


def least_room(limit: int) -> int:
    """Tokens that must be left for a reply of at most `limit` tokens."""
    return min(LEAST_ROOM, limit)


def reply_room(prompt: int, limit: int, context: int | None) -> int:
    """Tokens that the reply to `prompt` tokens may have; 0 when the row does not fit.

    `context` is what the model holds in all; None: not known, and the limit is all there is.
    """
    room = limit if context is None else min(limit, context - prompt)
    return room if room >= least_room(limit) else 0
