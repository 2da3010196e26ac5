"""Sentences and questions of our own, from events.

Each style maps an event type to templates. The plain style has one template per
type, built so that it can be read back; `paraphrase()` has several, some with the
container or the room as the subject.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from soulkit.tasks.texts import Texts
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

TEXTS = Texts(__file__)
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

MEMORY = "Where was the {obj} at first?"
REALITY = "Where is the {obj} now?"
FIRST = "Where would {0} search for the {obj}?"
SECOND = "Where does {0} believe that {1} would search for the {obj}?"
NESTED = ("Where does {} believe", " {} believes", " the {obj} is?")


@cache
def paraphrase() -> Templates:
    """Several templates for each type of event that is paraphrased."""
    kinds = {"enter": Enter, "exit": Exit, "place": Place, "move": Move, "noise": Noise,
             "container_room": ContainerRoom}  # fmt: skip
    return {kinds[name]: texts for name, texts in TEXTS["paraphrase"].items()}


def render_events(events: Sequence[Event], templates: Templates, rng: random.Random) -> list[str]:
    """One sentence per event; the rng picks among templates, so one template needs no luck."""
    return [sentence(event, templates, rng) for event in events]


def sentence(event: Event, templates: Templates, rng: random.Random) -> str:
    if isinstance(event, Enter) and event.already and templates is PLAIN:
        return STARTED_THERE.format(**template_values(event))
    return rng.choice(templates[type(event)]).format(**template_values(event))


def template_values(event: Event) -> dict[str, str]:
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
