"""Readings of made stories that tests alone need: every word of them, and a whole text as events.

The words are small in number and complete: a test draws rows of every task and finds no other.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator

from hypothesis import strategies as st

from soulkit.tasks.tom.events import Beliefs, Event
from soulkit.tasks.tom.explain import TEXTS
from soulkit.tasks.tom.generate import (
    STORY_TYPES,
    WAITING,
    World,
    chapter_plan,
    two_room_plan,
    world_of,
)
from soulkit.tasks.tom.sentences import (
    ATTITUDES,
    FIRST,
    MEMORY,
    NESTED,
    REALITY,
    SECOND,
    SIGHTS,
    STARTED_THERE,
    THINGS,
    Story,
    read_sentences,
    story_lines,
    templates,
)

WORD = re.compile(r"[A-Za-z_]+|\d+|[^\w\s]")
"""How a text falls into words: letters with underscores, a number, or one punctuation mark."""

LONGEST_STORY = 80
"""Sentence numbers up to this one are words."""


def lexicon(*, small: bool = False) -> list[str]:
    """All words, sorted; `small` covers only plain ToMi-like stories of the small world."""
    worlds = [world_of("small")] if small else [world_of("large"), world_of("chapters")]
    words = {w for text in _templates(small) for w in WORD.findall(re.sub(r"\{\w*\}", " ", text))}
    words.update(word for world in worlds for word in _names(world))
    words.update(ATTITUDES if small else (*ATTITUDES, *SIGHTS, *THINGS, WAITING))
    words.update(str(n) for n in range(1, (20 if small else LONGEST_STORY) + 1))
    if not small:
        words.update(string.ascii_uppercase[:15])
    return sorted(words)


def _templates(small: bool) -> Iterator[str]:
    for bank in [templates("plain")] if small else [templates("plain"), templates("paraphrase")]:
        for texts in bank.values():
            yield from texts
    yield from (STARTED_THERE, MEMORY, REALITY, FIRST, SECOND)
    yield from () if small else NESTED
    yield from (*TEXTS["facts"].values(), *TEXTS["diagnoses"].values(), "object")


def _names(world: World) -> Iterator[str]:
    yield from (*world.names, *world.rooms, *world.containers, *world.objects)


def read_story(text: str) -> Story | None:
    """The story of numbered or bare lines; None when a line cannot be read.

    Empty lines, a stray `***` and an instruction line before line 1 are no part of a story.
    """
    return read_sentences(story_lines(text))


def last_joint_event(beliefs: Beliefs, chain: tuple[str, ...], obj: str) -> int | None:
    """Index of the last event at which all of the chain saw together where the object is."""
    seen = (f.event for f in reversed(beliefs.facts) if f.group and f.concerns(chain, obj))
    return next(seen, None)


# -- random stories, straight from the plans -------------------------------------------------------

seeds = st.integers(0, 2**32)


@st.composite
def two_room(draw: st.DrawFn) -> tuple[Event, ...]:
    rng = random.Random(draw(seeds))
    return two_room_plan(rng, world_of("large"), draw(st.sampled_from(STORY_TYPES))).events


@st.composite
def chapters(draw: st.DrawFn, talk: bool | None = None) -> tuple[Event, ...]:
    rng = random.Random(draw(seeds))
    with_talk = draw(st.booleans()) if talk is None else talk
    return chapter_plan(rng, draw(st.integers(1, 3)), with_talk).events
