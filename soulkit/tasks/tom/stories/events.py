"""What happens in a story, before anybody writes it down.

A story is a tuple of events, one per sentence, so that event i is sentence i + 1. The generator
draws events and renders them; the readers turn sentences back into events; the tracker answers
from events alone and never looks at text. Every event knows who observed it: people in a room see
what happens there, everybody hears a public claim, a whisper is known to two.

Objects never change room, only container. A text does not always say in which room a container
stands; then the room is where somebody moves the object, or where the group that arrived last is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Enter:
    """People arrive in a room; `already`: they were there when the story began."""

    group: tuple[str, ...]
    room: str
    already: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    agent: str
    room: str


@dataclass(frozen=True, slots=True)
class Place:
    """The story says in which container the object is."""

    obj: str
    container: str


@dataclass(frozen=True, slots=True)
class Move:
    agent: str
    obj: str
    container: str


@dataclass(frozen=True, slots=True)
class Stay:
    """Somebody had a turn and moved nothing."""

    agent: str
    room: str


@dataclass(frozen=True, slots=True)
class PublicClaim:
    agent: str
    obj: str
    container: str


@dataclass(frozen=True, slots=True)
class PrivateTell:
    agent: str
    hearer: str
    obj: str
    container: str


@dataclass(frozen=True, slots=True)
class Noise:
    """A sentence without consequences; empty strings where a paraphrase hides who or what."""

    agent: str
    verb: str
    thing: str


@dataclass(frozen=True, slots=True)
class ContainerRoom:
    """The story says in which room a container stands."""

    container: str
    room: str


Event = (
    Enter | Exit | Place | Move | Stay | PublicClaim | PrivateTell | Noise | ContainerRoom
)  # fmt: skip

_TAGS: dict[str, type[Any]] = {
    "enter": Enter,
    "exit": Exit,
    "place": Place,
    "move": Move,
    "stay": Stay,
    "claim": PublicClaim,
    "tell": PrivateTell,
    "noise": Noise,
    "room": ContainerRoom,
}
_NAMES = {cls: tag for tag, cls in _TAGS.items()}


@dataclass(frozen=True, slots=True)
class Story:
    """Events with their sentences and witnesses, all three of one length."""

    events: tuple[Event, ...]
    lines: tuple[str, ...]
    """One sentence per event, without its number; empty when only the events are known."""
    witnesses: tuple[frozenset[str], ...]
    """Who observed each event."""

    @classmethod
    def of(cls, events: Sequence[Event], lines: Sequence[str] = ()) -> Story:
        """A story with its witnesses worked out; ValueError when sentences and events differ."""
        if lines and len(lines) != len(events):
            raise ValueError(f"{len(lines)} sentences for {len(events)} events")
        return cls(tuple(events), tuple(lines), witnesses(events))

    @property
    def agents(self) -> tuple[str, ...]:
        return agents(self.events)


def encode(events: Sequence[Event]) -> list[list[Any]]:
    """Events as lists that JSON can hold: the tag, then the fields in order."""
    return [[_NAMES[type(e)], *(_plain(getattr(e, f.name)) for f in fields(e))] for e in events]


def decode(rows: Sequence[Sequence[Any]]) -> tuple[Event, ...]:
    """The inverse of `encode`; ValueError for a tag or a number of fields that no event has."""
    return tuple(_decode_one(row) for row in rows)


def agents(events: Sequence[Event]) -> tuple[str, ...]:
    """Everybody who ever enters a room, in order of appearance."""
    seen: dict[str, None] = {}
    for event in events:
        if isinstance(event, Enter):
            seen.update(dict.fromkeys(event.group))
    return tuple(seen)


def object_rooms(events: Sequence[Event]) -> dict[str, str]:
    """The room of each object, as far as the story tells it."""
    stands = {e.container: e.room for e in events if isinstance(e, ContainerRoom)}
    rooms: dict[str, str] = {}
    for event in events:
        if isinstance(event, Place | Move) and event.container in stands:
            rooms.setdefault(event.obj, stands[event.container])
    for obj, room in _rooms_by_presence(events).items():
        rooms.setdefault(obj, room)
    return rooms


def witnesses(events: Sequence[Event]) -> tuple[frozenset[str], ...]:
    """Who observes each event; nobody when the story does not say where it takes place."""
    everybody = frozenset(agents(events))
    rooms = object_rooms(events)
    place: dict[str, str] = {}
    seen = []
    for event in events:
        if isinstance(event, Enter):
            place.update(dict.fromkeys(event.group, event.room))
        seen.append(_observers(event, place, rooms, everybody))
        if isinstance(event, Exit):
            place.pop(event.agent, None)
    return tuple(seen)


def _observers(
    event: Event, place: dict[str, str], rooms: dict[str, str], everybody: frozenset[str]
) -> frozenset[str]:
    match event:
        case PublicClaim():
            return everybody
        case PrivateTell(agent, hearer):
            return frozenset({agent, hearer})
        case Noise(agent):
            return frozenset({agent} if agent else ())
        case Place(obj):
            room = rooms.get(obj, "")
        case Move(agent, obj):
            room = rooms.get(obj, place.get(agent, ""))
        case Enter(_, room) | Exit(_, room) | Stay(_, room) | ContainerRoom(_, room):
            pass
    return frozenset(name for name, where in place.items() if where == room)


def _rooms_by_presence(events: Sequence[Event]) -> dict[str, str]:
    moved: dict[str, str] = {}
    named: dict[str, str] = {}
    place: dict[str, str] = {}
    group_room = ""
    for event in events:
        if isinstance(event, Enter):
            place.update(dict.fromkeys(event.group, event.room))
            group_room = event.room if len(event.group) > 1 else group_room
        elif isinstance(event, Exit):
            place.pop(event.agent, None)
        elif isinstance(event, Move) and event.agent in place:
            moved.setdefault(event.obj, place[event.agent])
        elif isinstance(event, Place) and (here := group_room or _only(place)):
            named.setdefault(event.obj, here)
    return named | moved


def _only(place: dict[str, str]) -> str:
    rooms = set(place.values())
    return rooms.pop() if len(rooms) == 1 else ""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _decode_one(row: Sequence[Any]) -> Event:
    cls = _TAGS.get(str(row[0])) if row else None
    if cls is None or len(row) != len(fields(cls)) + 1:
        raise ValueError(f"no event looks like {row!r}")
    values = [tuple(v) if isinstance(v, list) else v for v in row[1:]]
    event: Event = cls(*values)
    return event
