"""Who thinks that who thinks where the object is: orders 0 to 4, by bookkeeping.

Two kinds of facts suffice. A *joint observation* says that a group saw, together, where an object
is; for every chain of distinct members of that group, nested beliefs become that container. A
*told* fact changes one chain only. The answer to a chain is the latest fact that concerns it, so
chains need no tables, and without talk the order of a chain cannot matter.

Rules `tomi`: chains of up to two, talk carries nothing. Rules `hitom`: chains of up to four; a
hearer trusts a speaker who left the room later than the hearer did (whoever was not there counts
as having left first); a speaker thinks that everybody swallows a public claim and that the
listener swallows a private one, and never believes the own words. Both are the clean
semantics: artefacts of published label generators are not imitated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from soulkit.tasks.tom.stories.events import (
    Enter,
    Event,
    Exit,
    Move,
    Place,
    PrivateTell,
    PublicClaim,
    agents,
    object_rooms,
    witnesses,
)

Rules = Literal["tomi", "hitom"]
MAX_ORDER: dict[Rules, int] = {"tomi": 2, "hitom": 4}
TALK_ORDER = 2
"""Talk changes beliefs up to this order; deeper chains rest on joint observation alone."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that settles beliefs about an object."""

    event: int
    """Index of the event that brought it about."""
    obj: str
    container: str
    group: frozenset[str] = frozenset()
    """Joint observation: everybody who saw it, and each other."""
    chain: tuple[str, ...] = ()
    """Talk: the one chain that it changes, outermost thinker first."""

    def concerns(self, chain: tuple[str, ...], obj: str) -> bool:
        if obj != self.obj:
            return False
        return chain == self.chain if self.chain else self.group.issuperset(chain)


@dataclass(frozen=True, slots=True)
class TrustDecision:
    """Whether a hearer believed one message."""

    event: int
    speaker: str
    hearer: str
    believed: bool
    was_there: bool
    """Whether the hearer had been in the room at all in that chapter."""


@dataclass(frozen=True, slots=True)
class Beliefs:
    """What is true at the end of a story and what everybody thinks."""

    facts: tuple[Fact, ...]
    places: tuple[tuple[int, str, str], ...]
    """Every placing, `(event, object, container)`, in order."""
    trusts: tuple[TrustDecision, ...]
    witnesses: tuple[frozenset[str], ...]
    max_order: int

    def where(self, obj: str) -> str | None:
        """The true container at the end; None for an object that the story never places."""
        return next((c for _, o, c in reversed(self.places) if o == obj), None)

    def start(self, obj: str) -> str | None:
        """The true container at the beginning."""
        return next((c for _, o, c in self.places if o == obj), None)

    def answer(self, chain: tuple[str, ...], obj: str) -> str | None:
        """Where the chain places the object, outermost thinker first; () asks for the truth.

        None when no such belief was ever formed, when a thinker occurs twice, or when the chain is
        longer than the rules follow.
        """
        if not chain:
            return self.where(obj)
        fact = self.last_fact(chain, obj)
        return fact.container if fact else None

    def last_fact(self, chain: tuple[str, ...], obj: str) -> Fact | None:
        """The fact that settles `answer(chain, obj)`."""
        if not chain or len(chain) > self.max_order or len(set(chain)) < len(chain):
            return None
        return next((f for f in reversed(self.facts) if f.concerns(chain, obj)), None)


class BeliefTracker:
    """Runs events into Beliefs; holds no state between runs."""

    def __init__(self, rules: Rules) -> None:
        if rules not in MAX_ORDER:
            raise ValueError(f"rules are 'tomi' or 'hitom', not {rules!r}")
        self.rules = rules

    def run(self, events: Sequence[Event]) -> Beliefs:
        """Every belief that the events lead to."""
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
    """The state of one walk through a story."""

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
        # Exits count within one chapter; the first exit after a group's arrival opens the next.
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
