"""AlignX rows: imported from its original files (or its P-Soups benchmark, same layout), or made.

Example record: {"prompt": ..., "chosen": ..., "rejected": ..., "profile": "Young, High Openness",
"Pair-wise Comparative Feedback": [{"prompt": ..., "chosen": ..., "rejected": ...}]}; AlignX itself
also has "Demographic Information" and "User-Generated Content".

A record holds several kinds of evidence about a person. Importing for a split keeps its kinds and
all their items, save a compared pair that is the very question. A record that has none of them is
no row of that split; none has sixteen items. The files state no terms of use; every row says so.

Made rows have invented people who each have one taste that decides: one end of an axis (short or
long, blunt or gentle, ...). The two replies give the same advice at the two ends of that axis, and
what is known of the person shows which end is theirs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from soulkit.data.files import RawRow
from soulkit.data.literals import literal_list
from soulkit.tasks.kit.importing import BadRecord, Imported, import_records, need
from soulkit.tasks.kit.made_rows import Row
from soulkit.tasks.kit.prompting import Texts

LICENCE = "none stated by the source (JinaLeejnl/AlignX)"
_FIELDS = ("prompt", "chosen", "rejected")
_ORIGINAL = {
    "demographic": "Demographic Information",
    "profile": "profile",
    "icl_pairs": "Pair-wise Comparative Feedback",
    "ugc": "User-Generated Content",
}
_COUNTS = {"icl_pairs": "n_icl", "ugc": "n_ugc"}
_KEPT: dict[str, tuple[str, ...]] = {
    "alignx_demo": ("demographic", "profile"),
    "alignx_pair": ("icl_pairs",),
    "alignx_ugc": ("ugc",),
    "alignx_arbitrary": tuple(_ORIGINAL),
}


def import_alignx(path: Path, *, task: str) -> Imported:
    """Rows of one split from a .json or .jsonl file of AlignX or P-Soups.

    Raises DataError when no record has the fields.
    """
    with_answer = []

    def row(record: RawRow, _: int) -> Row:
        evidence, left_out = _evidence(record, _KEPT[task])
        made = _imported_row(record, evidence)
        with_answer.extend([made] if left_out else [])
        return made

    def notes(*_: Any) -> Iterator[str]:
        yield f"The licence of these rows: {LICENCE}. Use them for tests of your own only."
        if shown := len(with_answer):
            yield f"{shown} rows had their own answer among the compared pairs; it is left out."

    return import_records(
        path, row, fields=_FIELDS, way_out="Give a file of AlignX or of its P-Soups benchmark.",
        licence=LICENCE, notes=notes,
    )  # fmt: skip


def _imported_row(raw: RawRow, evidence: dict[str, Any]) -> Row:
    post, chosen, rejected = need(raw, *_FIELDS)
    if chosen.strip() == rejected.strip():
        raise BadRecord("its two replies say the same")
    counts = {_COUNTS[name]: len(evidence[name]) for name in _COUNTS if name in evidence}
    direction = raw.fields.get("ground_truth_persona")
    about = {"ground_truth_persona": direction} if direction else {}
    return {
        "raw_prompt": post,
        "chosen": chosen,
        "rejected": rejected,
        **evidence,
        **counts,
        **about,
    }


def _evidence(raw: RawRow, columns: tuple[str, ...]) -> tuple[dict[str, Any], int]:
    """(column → evidence, items left out because they show the answer)."""
    evidence: dict[str, Any] = {}
    left_out = 0
    for name in columns:
        value = raw.fields.get(_ORIGINAL[name])
        if name in _COUNTS and value:
            items = [_texts(item) for item in _listed(value, name)]
            value = [item for item in items if not _same(item, raw)]
            left_out += len(items) - len(value)
        if value:
            evidence[name] = value
    if not evidence:
        raise BadRecord(f"it has none of {', '.join(_ORIGINAL[name] for name in columns)}")
    return evidence, left_out


def _listed(value: Any, name: str) -> list[Any]:
    items = literal_list(value)
    if items is None or not all(isinstance(item, dict) for item in items):
        raise BadRecord(f"its {_ORIGINAL[name]} is no list of objects")
    return items


def _texts(item: dict[str, Any]) -> dict[str, str]:
    """An item without the numbers that come with it (preference directions)."""
    return {k: v for k, v in item.items() if isinstance(v, str)}


def _same(item: dict[str, str], raw: RawRow) -> bool:
    """Whether a compared pair is the question of the row, its answer included."""
    names = ("prompt", "chosen")
    return all(item.get(k, "").strip() == str(raw.fields.get(k)).strip() for k in names)


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
    return tuple((Taste(**low), Taste(**high)) for low, high in TEXTS["axes"])


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
    return [_made_row(random.Random(f"alignx/{split}/{seed}/{i}"), split, i) for i in range(n)]


def _made_row(rng: random.Random, split: str, index: int) -> Row:
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
