"""The events of a story, everyone's beliefs about them, and what a question asks.

A story is a tuple of events, one per sentence. People in a room see what happens there, everyone
hears a public claim, a whisper is known to two. Objects never change room, only container.

Beliefs of orders 0 to 4 follow from two kinds of facts: a *joint observation* (a group saw together
where an object is) holds for every chain of distinct members of that group; a *told* fact changes
one chain. The answer to a chain is its latest fact. Rules `tomi`: chains of up to two, talk has no
effect. Rules `hitom`: chains of up to four; a hearer trusts a speaker who left the room later; a
speaker assumes that everyone believes a public claim, and never believes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Enter:
    """People arrive in a room; `already`: they were there at the start of the story."""

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
    """A person had a turn and moved nothing."""

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
    """A sentence without effect; fields are empty if a paraphrase hides them."""

    agent: str
    verb: str
    thing: str


@dataclass(frozen=True, slots=True)
class ContainerRoom:
    """The story says in which room a container is."""

    container: str
    room: str


Event = (
    Enter | Exit | Place | Move | Stay | PublicClaim | PrivateTell | Noise | ContainerRoom
)  # fmt: skip

EVENT_TYPES: dict[str, type[Any]] = {
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
"""Tag of an event in rows → its type."""
_NAMES = {cls: tag for tag, cls in EVENT_TYPES.items()}


@dataclass(frozen=True, slots=True)
class Story:
    """Events with their sentences and witnesses; all three have the same length."""

    events: tuple[Event, ...]
    lines: tuple[str, ...]
    """One sentence per event, without its number; empty if only the events are known."""
    witnesses: tuple[frozenset[str], ...]
    """Who observed each event."""

    @classmethod
    def of(cls, events: Sequence[Event], lines: Sequence[str] = ()) -> Story:
        """A story with computed witnesses; ValueError if sentences and events differ in number."""
        if lines and len(lines) != len(events):
            raise ValueError(f"{len(lines)} sentences for {len(events)} events")
        return cls(tuple(events), tuple(lines), witnesses(events))

    @property
    def agents(self) -> tuple[str, ...]:
        return agents(self.events)


def encode(events: Sequence[Event]) -> list[list[Any]]:
    """Events as JSON lists: the tag, then the fields in order."""
    return [[_NAMES[type(e)], *(_plain(getattr(e, f.name)) for f in fields(e))] for e in events]


def decode(rows: Sequence[Sequence[Any]]) -> tuple[Event, ...]:
    """The inverse of `encode`; ValueError for an unknown tag or a wrong number of fields."""
    return tuple(_decode_one(row) for row in rows)


def agents(events: Sequence[Event]) -> tuple[str, ...]:
    """All people who ever enter a room, in order of appearance."""
    names: dict[str, None] = {}
    for event in events:
        if isinstance(event, Enter):
            names.update(dict.fromkeys(event.group))
    return tuple(names)


def object_rooms(events: Sequence[Event]) -> dict[str, str]:
    """The room of each object, if the story mentions it."""
    stands = {e.container: e.room for e in events if isinstance(e, ContainerRoom)}
    rooms: dict[str, str] = {}
    for event in events:
        if isinstance(event, Place | Move) and event.container in stands:
            rooms.setdefault(event.obj, stands[event.container])
    for obj, room in _rooms_by_presence(events).items():
        rooms.setdefault(obj, room)
    return rooms


def witnesses(events: Sequence[Event]) -> tuple[frozenset[str], ...]:
    """The observers of each event; none if the story does not say where it happens."""
    everybody = frozenset(agents(events))
    rooms = object_rooms(events)
    place: dict[str, str] = {}
    observers = []
    for event in events:
        if isinstance(event, Enter):
            place.update(dict.fromkeys(event.group, event.room))
        observers.append(_observers(event, place, rooms, everybody))
        if isinstance(event, Exit):
            place.pop(event.agent, None)
    return tuple(observers)


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
    cls = EVENT_TYPES.get(str(row[0])) if row else None
    if cls is None or len(row) != len(fields(cls)) + 1:
        raise ValueError(f"no event looks like {row!r}")
    values = [tuple(v) if isinstance(v, list) else v for v in row[1:]]
    event: Event = cls(*values)
    return event


Rules = Literal["tomi", "hitom"]
MAX_ORDER: dict[Rules, int] = {"tomi": 2, "hitom": 4}


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact that determines beliefs about an object."""

    event: int
    """Index of the event that caused it."""
    obj: str
    container: str
    group: frozenset[str] = frozenset()
    """Joint observation: all who saw it and saw each other."""
    chain: tuple[str, ...] = ()
    """Talk: the chain that it changes, outermost thinker first."""

    def concerns(self, chain: tuple[str, ...], obj: str) -> bool:
        if obj != self.obj:
            return False
        return chain == self.chain if self.chain else self.group.issuperset(chain)


@dataclass(frozen=True, slots=True)
class TrustDecision:
    """Whether a hearer believed a message."""

    event: int
    speaker: str
    hearer: str
    believed: bool
    was_there: bool
    """Whether the hearer had been in the room at all during that chapter."""


@dataclass(frozen=True, slots=True)
class Beliefs:
    """The truth and all beliefs at the end of a story."""

    facts: tuple[Fact, ...]
    places: tuple[tuple[int, str, str], ...]
    """Every placement, `(event, object, container)`, in order."""
    trusts: tuple[TrustDecision, ...]
    witnesses: tuple[frozenset[str], ...]
    max_order: int

    def where(self, obj: str) -> str | None:
        """The true container at the end; None for an object that is never placed."""
        return next((c for _, o, c in reversed(self.places) if o == obj), None)

    def start(self, obj: str) -> str | None:
        """The true container at the start."""
        return next((c for _, o, c in self.places if o == obj), None)

    def answer(self, chain: tuple[str, ...], obj: str) -> str | None:
        """Where the chain believes the object is, outermost thinker first; () asks for the truth.

        None if no such belief was ever formed, if a thinker occurs twice, or if the chain is longer
        than the rules support.
        """
        if not chain:
            return self.where(obj)
        fact = self.last_fact(chain, obj)
        return fact.container if fact else None

    def last_fact(self, chain: tuple[str, ...], obj: str) -> Fact | None:
        """The fact that determines `answer(chain, obj)`."""
        if not chain or len(chain) > self.max_order or len(set(chain)) < len(chain):
            return None
        return next((f for f in reversed(self.facts) if f.concerns(chain, obj)), None)


class BeliefTracker:
    """Computes Beliefs from events; keeps no state between runs."""

    def __init__(self, rules: Rules) -> None:
        if rules not in MAX_ORDER:
            raise ValueError(f"rules are 'tomi' or 'hitom', not {rules!r}")
        self.rules = rules

    def run(self, events: Sequence[Event]) -> Beliefs:
        """All beliefs that result from the events."""
        seen = witnesses(events)
        pass_ = _Pass(events, seen)
        for index, event in enumerate(events):
            pass_.step(index, event, talk=self.rules == "hitom")
        return Beliefs(
            facts=tuple(pass_.facts),
            places=tuple(pass_.places),
            trusts=tuple(pass_.trusts),
            witnesses=seen,
            max_order=MAX_ORDER[self.rules],
        )


class _Pass:
    """The state of one pass through a story."""

    def __init__(self, events: Sequence[Event], seen: tuple[frozenset[str], ...]) -> None:
        self.seen = seen
        self.agents = agents(events)
        self.rooms = object_rooms(events)
        self.where: dict[str, str] = {}
        self.left: dict[str, int] = {}
        self.reopened = False
        self.facts: list[Fact] = []
        self.places: list[tuple[int, str, str]] = []
        self.trusts: list[TrustDecision] = []

    def step(self, index: int, event: Event, *, talk: bool) -> None:
        match event:
            case Enter(group, room):
                self.arrive(index, group, room)
            case Exit(agent):
                self.leave(index, agent)
            case Place(obj, container) | Move(_, obj, container):
                self.where[obj] = container
                self.places.append((index, obj, container))
                self.observe(index, obj)
            case PublicClaim(agent, obj, container) if talk:
                self.claim(index, agent, obj, container)
            case PrivateTell(agent, hearer, obj, container) if talk:
                self.hear(index, agent, hearer, obj, container)
                self.tell(index, (agent, hearer), obj, container)

    def arrive(self, index: int, group: tuple[str, ...], room: str) -> None:
        here = [obj for obj in self.where if self.rooms.get(obj) == room]
        for obj in here:
            self.observe(index, obj)
        # Exits count within a chapter; the first exit after a group's arrival starts the next one.
        self.reopened = self.reopened or len(group) > 1

    def leave(self, index: int, agent: str) -> None:
        if self.reopened:
            self.left, self.reopened = {}, False
        self.left[agent] = index

    def observe(self, index: int, obj: str) -> None:
        group = self.seen[index]
        if group:
            self.facts.append(Fact(index, obj, self.where[obj], group=group))

    def claim(self, index: int, speaker: str, obj: str, container: str) -> None:
        for hearer in self.agents:
            if hearer != speaker:
                self.hear(index, speaker, hearer, obj, container)
                self.tell(index, (speaker, hearer), obj, container)

    def hear(self, index: int, speaker: str, hearer: str, obj: str, container: str) -> None:
        believed = self.left.get(speaker, -1) > self.left.get(hearer, -1)
        self.trusts.append(TrustDecision(index, speaker, hearer, believed, hearer in self.left))
        if believed:
            self.tell(index, (hearer,), obj, container)
            self.tell(index, (hearer, speaker), obj, container)

    def tell(self, index: int, chain: tuple[str, ...], obj: str, container: str) -> None:
        self.facts.append(Fact(index, obj, container, chain=chain))


QuestionKind = Literal["memory", "reality", "belief"]


@dataclass(frozen=True, slots=True)
class Question:
    """`chain` starts with the outermost thinker and is empty unless `kind` is `belief`."""

    kind: QuestionKind
    chain: tuple[str, ...]
    obj: str

    @property
    def order(self) -> int:
        return len(self.chain)


_NAME = r"([A-Z][A-Za-z]*)"
_OBJ = r"the (?P<obj>\S.*?)"
_MEMORY = re.compile(rf"Where was {_OBJ} at (?:the beginning|first)\?")
_REALITY = re.compile(rf"Where is {_OBJ} (?:really|now)\?")
_FIRST = re.compile(rf"Where (?:will|would) {_NAME} (?:look|search) for {_OBJ}\?")
_SECOND = re.compile(
    rf"Where does {_NAME} (?:think|believe) that {_NAME} (?:searches|would search) for {_OBJ}\?"
)
_CHAIN = re.compile(
    rf"Where does {_NAME} (?:really )?(?:think|believe)"
    rf"(?P<rest>(?: [A-Z][A-Za-z]* (?:thinks|believes))*) {_OBJ} is\?"
)


def read_question(text: str) -> Question | None:
    """The question in a text; None if its form is unknown."""
    text = text.strip().replace(" - ", "-")  # some copies split "t-shirt"
    if match := _MEMORY.fullmatch(text):
        return Question("memory", (), match["obj"])
    if match := _REALITY.fullmatch(text):
        return Question("reality", (), match["obj"])
    if match := _FIRST.fullmatch(text):
        return Question("belief", (match[1],), match["obj"])
    if match := _SECOND.fullmatch(text):
        return Question("belief", (match[1], match[2]), match["obj"])
    if match := _CHAIN.fullmatch(text):
        rest = tuple(match["rest"].split()[::2])
        return Question("belief", (match[1], *rest), match["obj"])
    return None


def solve(beliefs: Beliefs, question: Question) -> str | None:
    """The tracker's answer to a question; None if the story does not determine it."""
    if question.kind == "memory":
        return beliefs.start(question.obj)
    return beliefs.answer(question.chain, question.obj)
