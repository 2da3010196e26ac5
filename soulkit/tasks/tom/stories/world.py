"""The vocabularies of our own stories.

No published list is reused. The classes are disjoint, so a word says what it is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """What a story may draw from."""

    names: tuple[str, ...]
    rooms: tuple[str, ...]
    containers: tuple[str, ...]
    objects: tuple[str, ...]
    states_rooms: bool = True
    """Whether a sentence says in which room a container stands."""
    noise: int = 2
    """At most this many noise sentences in a ToMi-like story."""
    numbered: bool = True
    """Whether lines begin with their number."""
    eventful: bool = True
    """Whether people come back and a third one passes through a ToMi-like story."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES = _words(
    "Brigid Otto Tamsin Ravi Ingrid Kofi Yara Bjorn Mei Pablo Zelda Dmitri Anouk Tariq Freya Hugo "
    "Priya Soren Leila Marek Nadia Oskar Petra Quentin Rosa Stefan Thea Umar Vera Wanda Xavi "
    "Yusuf Zora Ines Jorge Klara Luca Mirko Noor Opal"
)
_ROOMS = _words(
    "loft greenhouse library studio barn gallery bakery gym tower vault stable nursery "
    "observatory museum boathouse cabin courtyard laboratory foundry theater tent tavern dairy "
    "chapel"
)
_CONTAINERS = _words(
    "urn jar trunk sack tin hamper locker barrel bowl cabinet satchel kettle vase pouch teapot tray"
)
OBJECTS = _words(
    "ladle kite drum lamp candle compass medal flute marble brush hammer coin ring map puzzle doll "
    "ribbon whistle mirror clock spoon fork pen stamp feather shell rope button needle badge lens "
    "magnet ticket crayon eraser ball mask trumpet novel diary wallet comb thimble lantern nail "
    "bead bell chisel"
)
TINTED = tuple(
    f"{tint}_{kind}"
    for tint in ("amber", "teal", "ivory")
    for kind in ("urn", "jar", "trunk", "sack", "tin", "hamper", "locker", "barrel")
)
WAITING = "foyer"

LARGE = World(_NAMES, _ROOMS, _CONTAINERS, OBJECTS)
SMALL = World(
    _NAMES[:12], _ROOMS[:8], _CONTAINERS[:12], OBJECTS[:20],
    states_rooms=False, noise=0, numbered=False, eventful=False,
)  # fmt: skip
CHAPTERS = World(_NAMES, _ROOMS, TINTED, OBJECTS)
