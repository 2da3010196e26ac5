"""Random stories for property tests, straight from the plans."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from soulkit.tasks.tom.events import Event
from soulkit.tasks.tom.generate import STORY_TYPES, chapter_plan, two_room_plan, world_of

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
