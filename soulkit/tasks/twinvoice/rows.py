"""Rows of `twinvoice` made here: invented people, each with one thing that gives them away.

Six capabilities take turns (opinion, memory, reasoning, words, tone, syntax), and so do the three
dimensions. In each row the history shows the trait several times, and the four reactions differ in
that trait alone, so that the history settles the answer and the anchor does not.

Example: {"user_id": "p5-0", "dimension": "social", "capability": "words", "conversation_history":
["Rain again, blimey.", ...], "anchor_post": "What do you think of the new tram?",
"answer_choices": ["Blimey, the new tram came up.", ...], "answer_idx": 0}.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from soulkit.tasks.texts import Texts

_DIMENSIONS = ("social", "interpersonal", "narrative")
TOPICS = (
    "the new tram", "the street market", "the choir", "the long winter", "the school play",
    "the corner bakery", "the museum", "the harbour festival", "the library",
    "the football final",
)  # fmt: skip
_OPENERS = ("And you?", "What is new?", "Say something.", "Well, what have you got?")
_PLACES = ("by the fire", "on the stairs", "in the orchard", "at the long table", "on the ferry")
PET_WORDS = ("blimey", "mate", "honestly", "so to speak", "mark my words", "bless", "you know what")

TEXTS = Texts(__file__)

_SHAPES: dict[str, Callable[[str], str]] = {
    "lower": lambda t: f"{t} keeps coming up these days".lower(),
    "trail": lambda t: f"Well... {t}... it keeps coming up...",
    "ask": lambda t: f"{_start(t)} keeps coming up, doesn't it? Or is it just me?",
    "shout": lambda t: f"{t} KEEPS COMING UP!!".upper(),
}
_SIDES = (
    ("I am all for {t}, always was.", "On the side of {t}, as ever."),
    ("I was against {t} from the first day.", "Still not for {t}, as ever."),
    ("I could not care less about {t}.", "Shrugging about {t}, as ever."),
    ("I would back {t} only if it cost nothing.", "Counting what {t} costs, as ever."),
)
"""Opinions: as they were given once, and as they sound when asked again."""
CITIES = ("Porto", "Tartu", "Ghent", "Split", "Bergen", "Lucca", "Malmö", "Cork")
KIN = ("sister", "brother", "godmother", "cousin", "best friend")


@dataclass(frozen=True, slots=True)
class Case:
    """What somebody said, what they react to, and four reactions of which the first is theirs."""

    posts: tuple[str, ...]
    anchor: str
    reactions: tuple[str, ...]


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(i, seed) for i in range(n)]


def _row(i: int, seed: int) -> dict[str, Any]:
    rng = random.Random(f"twinvoice/{seed}/{i}")
    capability = list(CASES)[i % len(CASES)]
    # Over eighteen rows every capability meets every dimension.
    dimension = _DIMENSIONS[(i + i // len(CASES)) % len(_DIMENSIONS)]
    case = CASES[capability](rng)
    reactions = list(case.reactions)
    rng.shuffle(reactions)
    return {
        "id": f"tv{seed}-{i}",
        "user_id": f"p{seed}-{i}",
        "dimension": dimension,
        "capability": capability,
        "conversation_history": [_dressed(dimension, text, rng) for text in case.posts],
        "anchor_post": case.anchor,
        "answer_choices": reactions,
        "answer_idx": reactions.index(case.reactions[0]),
        "index": i,
    }


def _dressed(dimension: str, text: str, rng: random.Random) -> str:
    """What was said as a post, as the answer in a chat, or as a line in a scene."""
    if dimension == "interpersonal":
        return f"Asked: {rng.choice(_OPENERS)} Replied: {text}"
    if dimension == "narrative":
        return f"Scene: The company sat {rng.choice(_PLACES)}. Said: {text}"
    return text


def _opinion(rng: random.Random) -> Case:
    topic, *others = rng.sample(TOPICS, 5)
    stance, *rest = rng.sample(_SIDES, 4)
    small = [f"{_start(other)} came up at breakfast." for other in others]
    posts = [
        *small,
        stance[0].format(t=topic),
        f"Asked about {topic} once more. I have not changed.",
    ]
    rng.shuffle(posts)
    return Case(tuple(posts), f"Where do you stand on {topic}?",
                tuple(side[1].format(t=topic) for side in (stance, *rest)))  # fmt: skip


def _memory(rng: random.Random) -> Case:
    kin, other = rng.sample(KIN, 2)
    home, decoy, *rest = rng.sample(CITIES, 4)
    topics = rng.sample(TOPICS, 3)
    posts = [f"My {kin} lives in {home}.", f"My {other} moved to {decoy}.",
            *(f"{_start(t)} came up at breakfast." for t in topics)]  # fmt: skip
    rng.shuffle(posts)
    return Case(tuple(posts), f"Remind me, where does your {kin} live?",
                tuple(f"In {city}, as ever." for city in (home, decoy, *rest)))  # fmt: skip


def _reasoning(rng: random.Random) -> Case:
    rule, cases = rng.choice(TEXTS["rules"])
    anchor = rng.choice(list(cases))
    rest = [reaction for case, reaction in cases.items() if case != anchor]
    small = [f"{_start(t)} came up at breakfast." for t in rng.sample(TOPICS, 4)]
    posts = [*small, rule]
    rng.shuffle(posts)
    return Case(tuple(posts), anchor, (cases[anchor], *rest))


def _pet_words(rng: random.Random) -> Case:
    topic, *others = rng.sample(TOPICS, 6)
    pet_word, *rest = rng.sample(PET_WORDS, 4)
    posts = tuple(f"{_start(pet_word)}, {other} came up." for other in others)
    reactions = tuple(f"{_start(word)}, {topic} came up." for word in (pet_word, *rest))
    return Case(posts, f"What do you think of {topic}?", reactions)


def _tone(rng: random.Random) -> Case:
    topic, *others = rng.sample(TOPICS, 6)
    habit, *rest = rng.sample(list(TEXTS["tones"]), 4)
    posts = tuple(_start(rng.choice(TEXTS["tones"][habit]).format(t=other)) for other in others)
    reactions = (
        _start(rng.choice(TEXTS["tones"][tone]).format(t=topic)) for tone in (habit, *rest)
    )
    return Case(posts, f"What do you think of {topic}?", tuple(reactions))


def _syntax(rng: random.Random) -> Case:
    topic, *others = rng.sample(TOPICS, 6)
    form, *rest = rng.sample(list(_SHAPES), 4)
    posts = tuple(_SHAPES[form](other) for other in others)
    return Case(posts, f"What do you think of {topic}?",
                tuple(_SHAPES[shape](topic) for shape in (form, *rest)))  # fmt: skip


def _start(text: str) -> str:
    return text[:1].upper() + text[1:]


CASES: dict[str, Callable[[random.Random], Case]] = {
    "opinion": _opinion,
    "memory": _memory,
    "reasoning": _reasoning,
    "words": _pet_words,
    "tone": _tone,
    "syntax": _syntax,
}
"""Capability → how a case of it is made."""
