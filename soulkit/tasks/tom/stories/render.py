"""Sentences and questions of our own, from events.

Each style maps an event type to templates. The plain style has one template per
type, built so that it can be read back; `PARAPHRASE` has several, some with the
container or the room as the subject.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.tasks.tom.stories.events import (
    ContainerRoom,
    Enter,
    Event,
    Exit,
    Move,
    Noise,
    Place,
    PrivateTell,
    PublicClaim,
    Stay,
)

Templates = Mapping[type[Any], Sequence[str]]

ATTITUDES = ("enjoys", "fears", "admires", "avoids")
SIGHTS = ("heard", "lost", "drew", "bought")
THINGS = ("owl", "drone", "violin", "parade", "button", "ticket", "comb", "wallet")

PLAIN: Templates = {
    Enter: ("{group} came into the {room}.",),
    Exit: ("{agent} went out of the {room}.",),
    Place: ("The {obj} lay in the {container}.",),
    Move: ("{agent} put the {obj} into the {container}.",),
    Stay: ("{agent} waited in the {room} and touched nothing.",),
    PublicClaim: ("{agent} told everyone that the {obj} was in the {container}.",),
    PrivateTell: ("{agent} whispered to {hearer} that the {obj} was in the {container}.",),
    Noise: ("{agent} {verb} the {thing}.",),
    ContainerRoom: ("The {container} stood in the {room}.",),
}
STARTED_THERE = "{group} began the day in the {room}."

PARAPHRASE: Templates = {
    Enter: (
        "{group} strolled into the {room}.",
        "{group} turned up in the {room}.",
        "{group} joined those in the {room}.",
        "Into the {room} marched {group}.",
        "The {room} welcomed {group}.",
    ),
    Exit: (
        "{agent} slipped out of the {room}.",
        "{agent} said goodbye to the {room}.",
        "{agent} headed off from the {room}.",
        "Out of the {room} rushed {agent}.",
        "The {room} lost sight of {agent}.",
    ),
    Place: (
        "The {obj} rested inside the {container}.",
        "Somebody had packed the {obj} into the {container}.",
        "The {container} sheltered the {obj}.",
        "In the {container} there lay one {obj}.",
        "The {container} had the {obj} at its bottom.",
    ),
    Move: (
        "{agent} tossed the {obj} into the {container}.",
        "{agent} slid the {obj} over to the {container}.",
        "{agent} filled the {container} with the {obj}.",
        "The {container} received the {obj} from {agent}.",
        "The {obj} went into the {container} thanks to {agent}.",
    ),
    Noise: (
        "{agent} {verb} the {thing}.",
        "{agent} keeps talking about the {thing}.",
        "The {thing} bores {agent}.",
        "{agent} would trade anything for the {thing}.",
    ),
    ContainerRoom: (
        "The {container} had its spot in the {room}.",
        "The {room} was home to the {container}.",
        "Anyone in the {room} could reach the {container}.",
    ),
}

MEMORY = "Where was the {obj} at first?"
REALITY = "Where is the {obj} now?"
FIRST = "Where would {0} search for the {obj}?"
SECOND = "Where does {0} believe that {1} would search for the {obj}?"
NESTED = ("Where does {} believe", " {} believes", " the {obj} is?")


def sentences(events: Sequence[Event], templates: Templates, rng: random.Random) -> list[str]:
    """One sentence per event; the rng picks among templates, so one template needs no luck."""
    return [sentence(event, templates, rng) for event in events]


def sentence(event: Event, templates: Templates, rng: random.Random) -> str:
    if isinstance(event, Enter) and event.already and templates is PLAIN:
        return STARTED_THERE.format(**slots(event))
    return rng.choice(templates[type(event)]).format(**slots(event))


def slots(event: Event) -> dict[str, str]:
    """The fields of an event as template values."""
    values = {name: getattr(event, name) for name in type(event).__slots__}
    return {k: _join(v) if isinstance(v, tuple) else str(v) for k, v in values.items()}


def numbered(lines: Sequence[str]) -> str:
    """Sentences as lines `1 ...`, `2 ...`."""
    return "\n".join(f"{i} {line}" for i, line in enumerate(lines, 1))


def nested_question(chain: Sequence[str], obj: str) -> str:
    """The question of a chapter story for a chain of 0 to 4 thinkers."""
    if not chain:
        return REALITY.format(obj=obj)
    head, link, tail = NESTED
    middle = "".join(link.format(name) for name in chain[1:])
    return head.format(chain[0]) + middle + tail.format(obj=obj)


def _join(names: tuple[str, ...]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
