"""Generated stories: events first, then text; the answers come from the tracker alone.

Story i of a task depends only on (task, world, seed, i). Types, questions, lengths and talk
alternate by index. Options are shuffled by the story's own random stream.

A two-room plan (ToMi, ParaToMi): a mover and an absentee meet, an object is placed, and the move
and the absentee's exits and returns are shuffled; a third person and idle sentences distract. A
chapter plan (Hi-ToM): five people, three rooms, one to three chapters in which people take turns
moving the object and leaving, then may talk, truthfully or not.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from typing import Literal

from soulkit.errors import ConfigError
from soulkit.tasks.kit.made_rows import Row
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.tom.events import (
    BeliefTracker,
    ContainerRoom,
    Enter,
    Event,
    Exit,
    Move,
    Noise,
    Place,
    PrivateTell,
    PublicClaim,
    Question,
    Stay,
    agents,
    encode,
    solve,
)
from soulkit.tasks.tom.sentences import (
    ATTITUDES,
    FIRST,
    MEMORY,
    REALITY,
    SECOND,
    SIGHTS,
    THINGS,
    nested_question,
    numbered,
    render_events,
)


@dataclass(frozen=True, slots=True)
class World:
    """The vocabulary and settings of stories."""

    names: tuple[str, ...]
    rooms: tuple[str, ...]
    containers: tuple[str, ...]
    objects: tuple[str, ...]
    states_rooms: bool = True
    """Whether a sentence says in which room a container is."""
    noise: int = 2
    """Maximum number of noise sentences in a ToMi-like story."""
    numbered: bool = True
    """Whether lines start with their number."""
    eventful: bool = True
    """Whether people return and a third person passes through in a ToMi-like story."""


TEXTS = Texts(__file__)
WAITING = "foyer"


@cache
def world_of(size: Literal["large", "small", "chapters"]) -> World:
    """The world for two-room stories (large or small), or the world for chapter stories."""
    words = {kind: tuple(text.split()) for kind, text in TEXTS["words"].items()}
    names, rooms, containers, objects, tints = words.values()
    if size == "small":
        return World(
            names[:12], rooms[:8], containers[:12], objects[:20],
            states_rooms=False, noise=0, numbered=False, eventful=False,
        )  # fmt: skip
    tinted = tuple(f"{tint}_{kind}" for tint in tints for kind in containers[:8])
    return World(names, rooms, tinted if size == "chapters" else containers, objects)


StoryType = Literal["true_belief", "false_belief", "second_order_false_belief"]
STORY_TYPES: tuple[StoryType, ...] = ("true_belief", "false_belief", "second_order_false_belief")

CHAPTER_SIZES: dict[int, tuple[tuple[int, bool], ...]] = {
    1: ((5, True),),
    2: ((5, False), (3, True)),
    3: ((5, True), (3, False), (4, True)),
}
"""Story length → number of people and whether they may talk, per chapter."""
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
    """The object in the question: the one of chapter 1."""
    containers: tuple[str, ...]
    """All 15, in the order of the options."""


def two_room_plan(rng: random.Random, world: World, story_type: StoryType) -> TwoRoomPlan:
    """A plan of the requested type, by rejection sampling."""
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
        place = rng.choice((room, other))
        passing: tuple[Event, ...] = (Enter((third,), place), Exit(third, place))
        _insert(rng, events, passing[: rng.choice((0, 1, 2))])
    for _ in range(rng.randint(0, world.noise)):
        verb, thing = rng.choice(ATTITUDES), rng.choice(world.objects)
        _insert(rng, events, (Noise(rng.choice((mover, absentee, third)), verb, thing),))
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


def _insert(rng: random.Random, events: list[Event], new: tuple[Event, ...]) -> None:
    """Insert events in order, never between a container and the sentence with its room."""
    free = [i for i in range(len(events) + 1) if i == len(events) or _may_precede(events[i])]
    for event, at in reversed(list(zip(new, sorted(rng.choices(free, k=len(new))), strict=True))):
        events.insert(at, event)


def _may_precede(event: Event) -> bool:
    opens = isinstance(event, Enter) and event.already
    return not opens and not isinstance(event, ContainerRoom)


def chapter_plan(rng: random.Random, length: int, talk: bool) -> ChapterPlan:
    """A story of `length` chapters (1 to 3), with or without talk."""
    world = world_of("chapters")
    people = tuple(rng.sample(world.names, 5))
    rooms = rng.sample(world.rooms, 3)
    objects = rng.sample(world.objects, 6)
    containers = rng.sample(world.containers, 15)
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
    """Object → its current container."""


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
    claims = {"one": one, "two": two, "true_one": scene.where[obj]}
    outside = [p for p in scene.people if p not in here]
    events: list[Event] = []
    for speaker, hearer, what in rng.choice(TEXTS["talks"][len(here)]):
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


StoryTask = Literal["tomi", "paratomi", "hitom"]


def rows(
    n: int | None = None, seed: int = 0, *, task: StoryTask, stories: int | None = None
) -> list[Row]:
    """`n` rows (default 100), or all rows from `stories` stories of every kind. ConfigError if both
    are given, or if `stories` is below 1.
    """
    if stories is None:
        return list(synth_rows(task, 100 if n is None else n, seed))
    if n is not None or stories < 1:
        raise ConfigError(
            f"--stories {stories} cannot be used here.",
            "--stories replaces -n, and both must be at least 1.",
            "Give only one of the two.",
        )
    return list(synth_rows(task, rows_for_stories(task, stories), seed))


def synth_rows(
    task: StoryTask, n: int, seed: int, world: Literal["large", "small"] = "large"
) -> Iterator[Row]:
    """The first `n` rows of an endless, deterministic data set.

    Each story gives six consecutive rows for `tomi`, five for `hitom`, one for `paratomi`.
    `world="small"` (tomi only) uses few words and short, plain stories. ValueError for an unknown
    task or world, or a negative `n`.
    """
    if task not in _MAKERS:
        raise ValueError(f"stories exist for {', '.join(_MAKERS)}, not for {task!r}")
    if world not in ("large", "small") or (world == "small" and task != "tomi"):
        raise ValueError(f"{task} has no world {world!r}")
    if n < 0:
        raise ValueError(f"cannot make {n} rows")
    return islice(_endless(task, seed, world), n)


def rows_for_stories(task: StoryTask, stories: int) -> int:
    """The number of rows for `stories` stories of every kind with all their questions.

    Hi-ToM has six kinds (one to three chapters, with and without talk) and five orders: 200 stories
    of each, the number that its authors trained on, give 6,000 questions. ToMi and ParaToMi have
    three story types and six questions. ValueError for another task.
    """
    if task not in _ROWS_PER_KIND:
        raise ValueError(f"stories exist for {', '.join(_ROWS_PER_KIND)}, not for {task!r}")
    return stories * _ROWS_PER_KIND[task]


def _endless(task: StoryTask, seed: int, world: Literal["large", "small"]) -> Iterator[Row]:
    for index in count():
        rng = random.Random(f"{task}/{world}/{seed}/{index}")
        story_id = f"{task}-{world}-{seed}-{index}"
        yield from _MAKERS[task](rng, index, story_id, world_of(world))


def _tomi_rows(rng: random.Random, index: int, story_id: str, world: World) -> Iterator[Row]:
    # No one returns in an uneventful world, so it has no second-order false beliefs.
    types = STORY_TYPES if world.eventful else STORY_TYPES[:2]
    plan = two_room_plan(rng, world, types[index % len(types)])
    beliefs = BeliefTracker("tomi").run(plan.events)
    lines = render_events(plan.events, "plain", rng)
    story = numbered(lines) if world.numbered else "\n".join(lines)
    for question, text in _two_room_questions(plan):
        answer = _certain(solve(beliefs, question))
        kind, _ = _question_type(plan, question, answer)
        yield {
            "story": story,
            "question": text,
            "answer": answer,
            "cands": rng.sample(plan.containers, 2),
            "story_type": plan.story_type,
            "question_type": kind,
            "order": question.order,
            "story_id": story_id,
            "events": encode(plan.events),
        }


def _paratomi_rows(rng: random.Random, index: int, story_id: str, world: World) -> Iterator[Row]:
    plan = two_room_plan(rng, world, STORY_TYPES[index % 3])
    question, text = _two_room_questions(plan)[index // 3 % 6]
    answer = _certain(solve(BeliefTracker("tomi").run(plan.events), question))
    kind, raw = _question_type(plan, question, answer)
    cands = _mentioned(plan)
    yield {
        "story": render_events(plan.events, "paraphrase", rng),
        "question": text,
        "correct_answer": answer,
        "cands": rng.sample(cands, len(cands)),
        "qType": kind,
        "qTypeRaw": raw,
        "story_type": plan.story_type,
        "order": question.order,
        "index": index,
        "story_id": story_id,
        "events": encode(plan.events),
    }


def _hitom_rows(rng: random.Random, index: int, story_id: str, world: World) -> Iterator[Row]:
    length, talk = 1 + index % 3, index // 3 % 2 == 1
    plan = chapter_plan(rng, length, talk)
    beliefs = BeliefTracker("hitom").run(plan.events)
    story = numbered(render_events(plan.events, "plain", rng))
    chain = tuple(rng.sample(plan.people, 4))
    for order in range(5):
        thinkers = chain[4 - order :]
        yield {
            "story": story,
            "question": nested_question(thinkers, plan.obj),
            "choices": _options(plan),
            "correct_answer": _certain(beliefs.answer(thinkers, plan.obj)),
            "deception": talk,
            "story_length": length,
            "question_order": order,
            "index": 5 * index + order,
            "story_id": story_id,
            "events": encode(plan.events),
        }


_MAKERS: dict[str, Callable[[random.Random, int, str, World], Iterator[Row]]] = {
    "tomi": _tomi_rows,
    "paratomi": _paratomi_rows,
    "hitom": _hitom_rows,
}


_ROWS_PER_KIND = {"tomi": 3 * 6, "paratomi": 3 * 6, "hitom": 6 * 5}


def _two_room_questions(plan: TwoRoomPlan) -> list[tuple[Question, str]]:
    obj, two = plan.obj, (plan.mover, plan.absentee)
    questions = [
        (Question("memory", (), obj), MEMORY.format(obj=obj)),
        (Question("reality", (), obj), REALITY.format(obj=obj)),
    ]
    for who in two:
        questions.append((Question("belief", (who,), obj), FIRST.format(who, obj=obj)))
    for chain in (two, two[::-1]):
        questions.append((Question("belief", chain, obj), SECOND.format(*chain, obj=obj)))
    return questions


def _question_type(plan: TwoRoomPlan, question: Question, answer: str) -> tuple[str, str]:
    """The type without and with the digit for the thinker's order of arrival (0: first)."""
    if not question.chain:
        return question.kind, question.kind
    pair = {plan.mover, plan.absentee}
    first = next(who for who in agents(plan.events) if who in pair)
    digit = int(question.chain[0] != first)
    name = "first_order" if question.order == 1 else "second_order"
    suffix = "no_tom" if answer == plan.containers[1] else "tom"
    return f"{name}_{suffix}", f"{name}_{digit}_{suffix}"


def _mentioned(plan: TwoRoomPlan) -> list[str]:
    """Containers, plus the rooms and idle things that the story mentions."""
    nouns = dict.fromkeys(plan.containers)
    for event in plan.events:
        if isinstance(event, Enter | Exit | ContainerRoom):
            nouns[event.room] = None
        elif isinstance(event, Noise) and event.thing != plan.obj:
            nouns[event.thing] = None
    return list(nouns)


def _options(plan: ChapterPlan) -> str:
    pairs = zip(string.ascii_uppercase, plan.containers, strict=False)
    return ", ".join(f"{letter}. {container}" for letter, container in pairs)


def _certain(answer: str | None) -> str:
    if answer is None:  # every chain of the generated stories has a belief
        raise AssertionError("a generated story does not answer its own question")
    return answer
