"""Rows of the five AlignX splits, with invented people who each have one taste that decides.

A taste is one end of an axis (short or long, blunt or gentle, numbers or stories, ...). The two
replies to a post give the same advice at the two ends of the person's axis; what is known of them
(a description, replies they compared, comments they wrote) shows which end is theirs, so a row is
solvable from itself and only from what is known of the person.

Example row: {"raw_prompt": "My flatmate keeps taking my bike. What now?", "chosen": "Stop waiting.
Agree on a rule for the bike today.", "rejected": "That sounds wearing. ...", "demographic": "A
nurse in their forties. Cannot stand being handled with kid gloves.", "index": 3}.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from soulkit.tasks.made import Row
from soulkit.tasks.texts import Texts

TEXTS = Texts(__file__)


@dataclass(frozen=True, slots=True)
class Post:
    """A post, and what there is to advise: one step first, three in all."""

    post: str
    steps: tuple[str, str, str]
    thing: str
    people: str

    @property
    def words(self) -> dict[str, str]:
        """What a reply is filled with."""
        steps = dict(zip(("first", "second", "third"), self.steps, strict=True))
        starts = {name.capitalize(): step[:1].upper() + step[1:] for name, step in steps.items()}
        return {**steps, **starts, "thing": self.thing, "people": self.people}


@dataclass(frozen=True, slots=True)
class Taste:
    """One end of an axis: how it shows in a person, in their comments, and in a reply."""

    traits: tuple[str, ...]
    comments: tuple[str, ...]
    reply: str

    def answer(self, topic: Post) -> str:
        """What a person of this taste would like to be told."""
        return self.reply.format(**topic.words)


@cache
def all_posts() -> tuple[Post, ...]:
    return tuple(Post(**topic) for topic in TEXTS["topics"])


@cache
def axes() -> tuple[tuple[Taste, Taste], ...]:
    return tuple((Taste(**one), Taste(**other)) for one, other in TEXTS["axes"])


TASKS = tuple(f"alignx_{s}" for s in ("demo", "pair", "ugc", "arbitrary", "history16"))
_JOBS = ("nurse", "bus driver", "lawyer", "florist", "roofer", "librarian", "student", "cook")
_AGES = ("twenties", "thirties", "forties", "fifties", "sixties")
_HOBBIES = ("chess", "pottery", "choir singing", "bird watching", "old radios", "swimming")
_KINDS = ("demographic", "icl_pairs", "ugc")
_ITEMS = 4
_HISTORY = 8


def rows(n: int, seed: int, *, task: str) -> list[Row]:
    """`n` rows of the split `alignx_<split>`; row i depends on (split, seed, i) alone."""
    split = task.removeprefix("alignx_")
    return [_row(random.Random(f"alignx/{split}/{seed}/{i}"), split, i) for i in range(n)]


def _row(rng: random.Random, split: str, index: int) -> Row:
    taste, other = rng.sample(rng.choice(axes()), 2)
    topic, *earlier = rng.sample(all_posts(), len(all_posts()))
    row: Row = {
        "raw_prompt": topic.post,
        "chosen": taste.answer(topic),
        "rejected": other.answer(topic),
        "index": index,
    }
    if split == "history16":
        pairs, posts = earlier[:_HISTORY], rng.sample(all_posts(), _HISTORY)
        return {**row, **_pairs(pairs, taste, other), **_comments(posts, taste, rng)}
    kinds = {"demo": _KINDS[:1], "pair": _KINDS[1:2], "ugc": _KINDS[2:]}.get(split)
    for kind in kinds or rng.sample(_KINDS, rng.randint(1, len(_KINDS))):
        if kind == "demographic":
            row[kind] = _person(taste, rng)
        elif kind == "icl_pairs":
            row |= _pairs(earlier[:_ITEMS], taste, other)
        else:
            row |= _comments(earlier[-_ITEMS:], taste, rng)
    return row


def _person(taste: Taste, rng: random.Random) -> str:
    sentences = [
        f"A {rng.choice(_JOBS)} in their {rng.choice(_AGES)}.",
        rng.choice(taste.traits),
        f"Spends free evenings on {rng.choice(_HOBBIES)}.",
    ]
    rng.shuffle(sentences)
    return " ".join(sentences)


def _pairs(posts: Sequence[Post], taste: Taste, other: Taste) -> Row:
    pairs = [
        {"prompt": t.post, "chosen": taste.answer(t), "rejected": other.answer(t)} for t in posts
    ]
    return {"icl_pairs": pairs, "n_icl": len(pairs)}


def _comments(posts: Sequence[Post], taste: Taste, rng: random.Random) -> Row:
    order = rng.sample(taste.comments, len(taste.comments))
    texts = (order[i % len(order)] for i in range(len(posts)))
    comments = [{"prompt": t.post, "comment": text} for t, text in zip(posts, texts, strict=True)]
    return {"ugc": comments, "n_ugc": len(comments)}
