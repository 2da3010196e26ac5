"""Rows of our own stories: events first, then text, answers from the tracker alone.

Story i of a task depends on (task, world, seed, i) and nothing else, so a shorter data set is a
prefix of a longer one. Story types, questions, lengths and talk take turns by index, hence
balance. Options are shuffled by the story's own stream: their order says nothing about the answer.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Literal

from soulkit.errors import ConfigError
from soulkit.tasks.made import Row
from soulkit.tasks.tom.stories.events import ContainerRoom, Enter, Exit, Noise, agents, encode
from soulkit.tasks.tom.stories.plans import (
    STORY_TYPES,
    ChapterPlan,
    TwoRoomPlan,
    chapter_plan,
    two_room_plan,
)
from soulkit.tasks.tom.stories.questions import Question, solve
from soulkit.tasks.tom.stories.render import (
    FIRST,
    MEMORY,
    PLAIN,
    REALITY,
    SECOND,
    nested_question,
    numbered,
    paraphrase,
    render_events,
)
from soulkit.tasks.tom.stories.tracker import BeliefTracker
from soulkit.tasks.tom.stories.world import LARGE, SMALL, World

StoryTask = Literal["tomi", "paratomi", "hitom"]


def rows(
    n: int | None = None, seed: int = 0, *, task: StoryTask, stories: int | None = None
) -> list[Row]:
    """`n` rows (100 without it), or all rows of so many `stories` of every kind.

    ConfigError when both are asked for, or no story.
    """
    if stories is None:
        return list(synth_rows(task, 100 if n is None else n, seed))
    if n is not None or stories < 1:
        raise ConfigError(
            f"{stories} stories of every kind cannot be made.",
            "--stories takes the place of -n, and both count from 1.",
            "Give one of the two.",
        )
    return list(synth_rows(task, rows_for_stories(task, stories), seed))


def synth_rows(
    task: StoryTask, n: int, seed: int, world: Literal["large", "small"] = "large"
) -> Iterator[Row]:
    """The first `n` rows of an endless, deterministic data set.

    `tomi` gives six and `hitom` five questions per story, one after the other; `paratomi` one.
    `world="small"` (tomi only) draws from few words and writes short, plain stories. ValueError
    for an unknown task or world, or a negative `n`.
    """
    if task not in _MAKERS:
        raise ValueError(f"stories are made for {', '.join(_MAKERS)}, not for {task!r}")
    if world not in ("large", "small") or (world == "small" and task != "tomi"):
        raise ValueError(f"there is no {world!r} world for {task}")
    if n < 0:
        raise ValueError(f"cannot make {n} rows")
    return islice(_endless(task, seed, world), n)


def rows_for_stories(task: StoryTask, stories: int) -> int:
    """How many rows hold `stories` stories of every kind with all their questions.

    Hi-ToM has six kinds (one to three chapters, with and without talk) and asks five orders: 200
    stories of each, as many as its authors trained on, are 6,000 questions. ToMi and ParaToMi have
    three story types and six questions. ValueError for another task.
    """
    if task not in _ROWS_PER_KIND:
        raise ValueError(f"stories are made for {', '.join(_ROWS_PER_KIND)}, not for {task!r}")
    return stories * _ROWS_PER_KIND[task]


def _endless(task: StoryTask, seed: int, world: str) -> Iterator[Row]:
    for index in count():
        rng = random.Random(f"{task}/{world}/{seed}/{index}")
        story_id = f"{task}-{world}-{seed}-{index}"
        yield from _MAKERS[task](rng, index, story_id, SMALL if world == "small" else LARGE)


def _tomi(rng: random.Random, index: int, story_id: str, world: World) -> Iterator[Row]:
    # Nobody comes back to an uneventful world, so it has no second-order false beliefs.
    types = STORY_TYPES if world.eventful else STORY_TYPES[:2]
    plan = two_room_plan(rng, world, types[index % len(types)])
    beliefs = BeliefTracker("tomi").run(plan.events)
    lines = render_events(plan.events, PLAIN, rng)
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


def _paratomi(rng: random.Random, index: int, story_id: str, world: World) -> Iterator[Row]:
    plan = two_room_plan(rng, world, STORY_TYPES[index % 3])
    question, text = _two_room_questions(plan)[index // 3 % 6]
    answer = _certain(solve(BeliefTracker("tomi").run(plan.events), question))
    kind, raw = _question_type(plan, question, answer)
    cands = _mentioned(plan)
    yield {
        "story": render_events(plan.events, paraphrase(), rng),
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


def _hitom(rng: random.Random, index: int, story_id: str, world: World) -> Iterator[Row]:
    length, talk = 1 + index % 3, index // 3 % 2 == 1
    plan = chapter_plan(rng, length, talk)
    beliefs = BeliefTracker("hitom").run(plan.events)
    story = numbered(render_events(plan.events, PLAIN, rng))
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
    "tomi": _tomi,
    "paratomi": _paratomi,
    "hitom": _hitom,
}


_ROWS_PER_KIND = {"tomi": 3 * 6, "paratomi": 3 * 6, "hitom": 6 * 5}


def _two_room_questions(plan: TwoRoomPlan) -> list[tuple[Question, str]]:
    """The six questions: memory, reality, then first and second order for both people."""
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
    """The type without and with the digit that says whether the thinker arrived first (0)."""
    if not question.chain:
        return question.kind, question.kind
    pair = {plan.mover, plan.absentee}
    first = next(who for who in agents(plan.events) if who in pair)
    digit = int(question.chain[0] != first)
    name = "first_order" if question.order == 1 else "second_order"
    suffix = "no_tom" if answer == plan.containers[1] else "tom"
    return f"{name}_{suffix}", f"{name}_{digit}_{suffix}"


def _mentioned(plan: TwoRoomPlan) -> list[str]:
    """Containers, and the rooms and idle things that the story also names."""
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
    if answer is None:  # the grammars leave no chain without a belief
        raise AssertionError("a planned story does not answer its own question")
    return answer
