"""The street by script, so that the scene can be played without a model: `soul serve partner`.

What happens depends on how often something happened before. Stateless: equal calls get equal
replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EVENTS = ("A bin falls over.", "A window opens.", "Something rustles in the hedge.")


def street_line(messages: Sequence[Mapping[str, str]]) -> str:
    """What happens next, from the brief and what was said so far."""
    before = sum(message["role"] == "assistant" for message in messages)
    return EVENTS[before % len(EVENTS)]
