"""Every word that our own stories, their questions and the coach's explanations can contain.

Tokenizers of tiny models are built from it, so it is small and complete: a test draws rows of
every task and finds no other word.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from soulkit.tasks.tom.stories.explain import DIAGNOSES, FACTS
from soulkit.tasks.tom.stories.render import (
    ATTITUDES,
    FIRST,
    MEMORY,
    NESTED,
    PARAPHRASE,
    PLAIN,
    REALITY,
    SECOND,
    SIGHTS,
    STARTED_THERE,
    THINGS,
)
from soulkit.tasks.tom.stories.world import CHAPTERS, LARGE, SMALL, WAITING, World

WORD = re.compile(r"[A-Za-z_]+|\d+|[^\w\s]")
"""How a text falls into words: letters with underscores, a number, or one punctuation mark."""

LONGEST_STORY = 80
"""Sentence numbers up to this one are words."""


def lexicon(*, small: bool = False) -> list[str]:
    """All words, sorted; `small` covers only plain ToMi-like stories of the small world."""
    worlds = (SMALL,) if small else (LARGE, CHAPTERS)
    words = {w for text in _templates(small) for w in WORD.findall(re.sub(r"\{\w*\}", " ", text))}
    words.update(word for world in worlds for word in _names(world))
    words.update(ATTITUDES if small else (*ATTITUDES, *SIGHTS, *THINGS, WAITING))
    words.update(str(n) for n in range(1, (20 if small else LONGEST_STORY) + 1))
    if not small:
        words.update(string.ascii_uppercase[:15])
    return sorted(words)


def _templates(small: bool) -> Iterator[str]:
    for bank in (PLAIN,) if small else (PLAIN, PARAPHRASE):
        for texts in bank.values():
            yield from texts
    yield from (STARTED_THERE, MEMORY, REALITY, FIRST, SECOND)
    yield from () if small else NESTED
    yield from (*FACTS.values(), *DIAGNOSES.values(), "object")


def _names(world: World) -> Iterator[str]:
    yield from (*world.names, *world.rooms, *world.containers, *world.objects)
