"""What happens in a story: random plans as events.

A two-room plan (ToMi, ParaToMi): a mover and an absentee meet, an object is placed, and the
move and the absentee's coming and going are shuffled; a third person and idle sentences distract.
Labels such as `false_belief` name the plan; beliefs always come from the tracker.

A chapter plan (Hi-ToM): five people, three rooms, one to three chapters in which people take turns
to move the object and leave, then perhaps talk, truthfully or not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

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
from soulkit.tasks.tom.stories.render import ATTITUDES, SIGHTS, THINGS
from soulkit.tasks.tom.stories.world import CHAPTERS, WAITING, World

StoryType = Literal["true_belief", "false_belief", "second_order_false_belief"]
STORY_TYPES: tuple[StoryType, ...] = ("true_belief", "false_belief", "second_order_false_belief")

Message = tuple[int, int | None, str]
"""Speaker, hearer (None: everybody, 0: somebody who was not there), and what is said: one of two
random containers (`one`, `two`) or the truth (`true`). People count from 1, as
they leave."""

TALKS: dict[int, tuple[tuple[Message, Message] | tuple[Message], ...]] = {
    5: (
        ((3, None, "one"), (5, 3, "two")),
        ((4, None, "one"), (5, 1, "true")),
        ((3, 1, "one"),),
    ),
    4: (
        ((2, None, "one"), (4, 3, "two")),
        ((3, None, "one"), (1, 4, "two")),
        ((1, None, "one"), (4, 0, "true")),
        ((2, 3, "one"), (4, 0, "true")),
    ),
    3: (
        ((2, None, "one"), (3, 2, "two")),
        ((3, None, "one"), (1, 3, "two")),
        ((1, None, "one"), (3, 0, "true")),
        ((2, 3, "one"), (3, 0, "true")),
    ),
}
CHAPTER_SIZES: dict[int, tuple[tuple[int, bool], ...]] = {
    1: ((5, True),),
    2: ((5, False), (3, True)),
    3: ((5, True), (3, False), (4, True)),
}
"""Story length → people and whether they may talk, per chapter."""
CHAPTER_NOISE = 0.1


@dataclass(frozen=True, slots=True)
class TwoRoomPlan:
    events: tuple[Event, ...]
    mover: str
    absentee: str
    obj: str
    containers: tuple[str, str]
    """Before and after the move."""
    story_type: StoryType


@dataclass(frozen=True, slots=True)
class ChapterPlan:
    events: tuple[Event, ...]
    people: tuple[str, ...]
    obj: str
    """The object asked about, that of chapter 1."""
    containers: tuple[str, ...]
    """All 15, in the order of the options."""


def two_room_plan(rng: random.Random, world: World, story_type: StoryType) -> TwoRoomPlan:
    """A plan of the wanted type, by drawing until one comes."""
    while True:
        plan = _draw_two_room(rng, world)
        if plan.story_type == story_type:
            return plan


def _draw_two_room(rng: random.Random, world: World) -> TwoRoomPlan:
    mover, absentee, third = rng.sample(world.names, 3)
    room, other = rng.sample(world.rooms, 2)
    obj = rng.choice(world.objects)
    start, target = rng.sample(world.containers, 2)
    first = [Enter((who,), room, already=rng.random() < 0.05) for who in (mover, absentee)]
    rng.shuffle(first)
    first.sort(key=lambda e: not e.already)
    changes = rng.choice((1, 2)) if world.eventful else 1
    steps, story_type = _shuffled_steps(rng, changes, mover, absentee, (room, other), (obj, target))
    events: list[Event] = [*first, Place(obj, start), *steps]
    if world.states_rooms:
        events = _with_rooms(events, room)
    if world.eventful:
        _insert_third(rng, events, third, rng.choice((room, other)))
    _insert_noise(rng, events, (mover, absentee, third), world)
    return TwoRoomPlan(tuple(events), mover, absentee, obj, (start, target), story_type)


def _shuffled_steps(
    rng: random.Random, changes: int, mover: str, absentee: str, rooms: tuple[str, str],
    thing: tuple[str, str],
) -> tuple[list[Event], StoryType]:  # fmt: skip
    names = ["move", *["change"] * changes]
    rng.shuffle(names)
    events: list[Event] = []
    present, mover_left = True, False
    for index, name in enumerate(names):
        if name == "move":
            events.append(Move(mover, *thing))
        elif present:
            events.append(Exit(absentee, rooms[0]))
            present = False
        else:
            if index == len(names) - 1 and rng.random() < 0.5:
                events.append(Exit(mover, rooms[0]))
                mover_left = True
            events.append(Enter((absentee,), rng.choice(rooms)))
    if mover_left:
        return events, "second_order_false_belief"
    return events, "false_belief" if names[1] == "move" else "true_belief"


def _with_rooms(events: list[Event], room: str) -> list[Event]:
    all_events: list[Event] = []
    for event in events:
        all_events.append(event)
        if isinstance(event, Place | Move):
            all_events.append(ContainerRoom(event.container, room))
    return all_events


def _insert_third(rng: random.Random, events: list[Event], who: str, room: str) -> None:
    steps: tuple[Event, ...] = (Enter((who,), room), Exit(who, room))
    _insert(rng, events, steps[: rng.choice((0, 1, 2))])


def _insert_noise(
    rng: random.Random, events: list[Event], people: tuple[str, ...], world: World
) -> None:
    for _ in range(rng.randint(0, world.noise)):
        verb, thing = rng.choice(ATTITUDES), rng.choice(world.objects)
        _insert(rng, events, (Noise(rng.choice(people), verb, thing),))


def _insert(rng: random.Random, events: list[Event], new: tuple[Event, ...]) -> None:
    """Put events in, in their order, never between a container and the room it stands in."""
    free = [i for i in range(len(events) + 1) if i == len(events) or _may_precede(events[i])]
    for event, at in reversed(list(zip(new, sorted(rng.choices(free, k=len(new))), strict=True))):
        events.insert(at, event)


def _may_precede(event: Event) -> bool:
    opens = isinstance(event, Enter) and event.already
    return not opens and not isinstance(event, ContainerRoom)


def chapter_plan(rng: random.Random, length: int, talk: bool) -> ChapterPlan:
    """A story of `length` chapters (1 to 3), with or without talk."""
    people = tuple(rng.sample(CHAPTERS.names, 5))
    rooms = rng.sample(CHAPTERS.rooms, 3)
    objects = rng.sample(CHAPTERS.objects, 6)
    containers = rng.sample(CHAPTERS.containers, 15)
    scene = _Scene(people, {r: containers[5 * i : 5 * i + 5] for i, r in enumerate(rooms)}, {})
    for index, room in enumerate(rooms):
        for obj, container in zip(objects[2 * index :], scene.stands[room][:2], strict=False):
            scene.where[obj] = container
    events: list[Event] = []
    first = ""
    for size, may_talk in CHAPTER_SIZES[length]:
        chapter, obj = _chapter(rng, scene, size, talk and may_talk)
        events += chapter
        first = first or obj
    noisy = _with_noise(rng, events, people, containers, objects)
    return ChapterPlan(tuple(noisy), people, first, tuple(rng.sample(containers, 15)))


@dataclass(slots=True)
class _Scene:
    people: tuple[str, ...]
    stands: dict[str, list[str]]
    """Room → its containers."""
    where: dict[str, str]
    """Object → its container, kept up to date."""


def _chapter(rng: random.Random, scene: _Scene, size: int, talk: bool) -> tuple[list[Event], str]:
    room = rng.choice(sorted(scene.stands))
    obj = rng.choice([o for o, c in scene.where.items() if c in scene.stands[room]])
    here = tuple(rng.sample(scene.people, size))
    begin = scene.where[obj]
    targets = [c for c in scene.stands[room] if c != begin]
    rng.shuffle(targets)
    events: list[Event] = [Enter(here, room), Place(obj, begin)]
    for who, target in zip(here, [*targets, begin], strict=False):
        if rng.random() < 0.5:
            events.append(Move(who, obj, target))
            scene.where[obj] = target
        else:
            events.append(Stay(who, room))
        events.append(Exit(who, room))
    events.append(Enter(here, WAITING))
    return events + (_talk(rng, scene, here, obj, room) if talk else []), obj


def _talk(
    rng: random.Random, scene: _Scene, here: tuple[str, ...], obj: str, room: str
) -> list[Event]:
    one, two = rng.sample(scene.stands[room], 2)
    claims = {"one": one, "two": two, "true": scene.where[obj]}
    outside = [p for p in scene.people if p not in here]
    events: list[Event] = []
    for speaker, hearer, what in rng.choice(TALKS[len(here)]):
        name = here[speaker - 1]
        if hearer is None:
            events.append(PublicClaim(name, obj, claims[what]))
        else:
            listener = here[hearer - 1] if hearer else rng.choice(outside)
            events.append(PrivateTell(name, listener, obj, claims[what]))
    return events


def _with_noise(
    rng: random.Random,
    events: list[Event],
    people: tuple[str, ...],
    containers: list[str],
    objects: list[str],
) -> list[Event]:
    noisy: list[Event] = []
    for event in events:
        if rng.random() < CHAPTER_NOISE:
            verb = rng.choice((*ATTITUDES, *SIGHTS))
            things = (*containers, *objects) if verb in ATTITUDES else THINGS
            noisy.append(Noise(rng.choice(people), verb, rng.choice(things)))
        noisy.append(event)
    return noisy
