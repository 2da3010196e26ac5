"""A scripted street, to play the scene without an environment model: `soul serve --script`.

The next event depends on the number of earlier events. The script is stateless: equal requests get
equal replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EVENTS = ("A bin falls over.", "A window opens.", "Something rustles in the hedge.")


def street_line(messages: Sequence[Mapping[str, str]]) -> str:
    """The next event, given the brief and the scene so far."""
    before = sum(message["role"] == "assistant" for message in messages)
    return EVENTS[before % len(EVENTS)]
