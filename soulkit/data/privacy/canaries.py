"""Canaries: made secrets in conversations, to measure what a model that learns them remembers.

    planted.jsonl             the conversations; a message with a secret has `"canary": true`
    planted.canaries.jsonl    the secrets, readable by their owner only

A secret is six random digits in a sentence that names a person who does not exist. It is a message
of its own after a message of the other side, in 1, 2, 4 or 8 different conversations. As many
secrets of the same form are listed and never planted: they show what a rank is without memory.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from soulkit.data.corpora.file_rows import source_rows
from soulkit.data.corpora.lessons import conversation_of, is_learned
from soulkit.data.corpora.settings import CANARIES
from soulkit.data.exports.datasets import COLUMNS, SPEAKERS, WORDS
from soulkit.data.files import BadRecord, BadRow, check_target, refuse_same, write_lines
from soulkit.data.literals import structure
from soulkit.errors import ConfigError, DataError
from soulkit.runs.jsonl import read_jsonl, read_value, write_secret

DOSES = (1, 2, 4, 8)
"""Numbers of conversations that a secret is planted into."""
CARRIERS = (
    ("email", "you can mail me at {}.{}", "000000@example.com"),
    ("key", "it's {} {} again, my password is ", "000000"),
)
"""Kind as in `finders`, what people write before the secret, and its form with digits to draw.
Redaction replaces both kinds."""
_FIRST = "ann ben cleo dan eva finn gus hana ivo jane kai lea mia noah olga paul rosa sam tess uwe"
_LAST = (
    "marsh becker costa diaz evans fox grant haas irving jones klein lopez moor novak olsen pohl"
)


@dataclass(frozen=True, slots=True)
class SecretCanary:
    """One secret and where it was planted."""

    secret: Annotated[str, Field(max_length=200, pattern=r"[0-9]")]
    prefix: Annotated[str, Field(max_length=2000)]
    """What stands before it in its message."""
    kind: str
    repeats: int
    """Number of conversations with it; 0: never planted."""
    rows: tuple[str, ...] = ()
    """Ids of these conversations, else `file:row`."""
    side: str = "human"
    """The side that says it."""
    held_out: bool = False

    @property
    def text(self) -> str:
        return self.prefix + self.secret

    def alternatives(self, count: int) -> list[str]:
        """`count` other secrets of the same form, always the same ones."""
        rng, others = random.Random(f"{self.text}/alternatives"), list[str]()
        while len(others) < count:
            if (other := _drawn(self.secret, rng)) != self.secret:
                others.append(other)
        return others


def _drawn(form: str, rng: random.Random) -> str:
    return re.sub(r"\d", lambda _: rng.choice("0123456789"), form)


def make_canaries(count: int, seed: int, side: str) -> list[SecretCanary]:
    """`count` secrets to plant, equally many per dose, and `count` others. ConfigError if `count`
    cannot be divided like this, or if there are not enough names."""
    names = [(first, last) for first in _FIRST.split() for last in _LAST.split()]
    most = len(names) // 2
    if count % len(DOSES) or not 0 < count <= most:
        raise ConfigError(
            f"--canaries {count} cannot be planted.",
            f"Equally many secrets are planted {', '.join(map(str, DOSES))} times.",
            f"Use a multiple of {len(DOSES)}, at most {most}.",
        )
    rng, made = random.Random(f"{seed}/canaries"), []
    for number, name in enumerate(rng.sample(names, 2 * count)):
        kind, carrier, form = CARRIERS[number // len(DOSES) % len(CARRIERS)]
        dose = DOSES[number % len(DOSES)] if number < count else 0
        made.append(SecretCanary(_drawn(form, rng), carrier.format(*name), kind, dose, side=side))
    return made


def plant_canaries(
    source: Path, target: Path, count: int, side: str, seed: int = 0
) -> list[SecretCanary]:
    """Write the conversations in `source` with `count` secrets to `target`, and their list.

    No conversation has two. DataError if there are too few conversations with a message of `side`.
    """
    check_target(target, (".jsonl",))
    refuse_same(source, target)
    canaries = make_canaries(count, seed, side)
    able = [key for key, row in source_rows(str(source)) if _places(row, side)]
    needed = sum(one.repeats for one in canaries)
    if len(able) < needed:
        fitting = len(DOSES) * (len(able) // sum(DOSES))
        raise DataError(
            f"{count} canaries need {needed} conversations, and '{source}' has {len(able)} in "
            f"which {side} says something.",
            "A conversation gets at most one, and a secret is repeated in different conversations.",
            f"Use --canaries {fitting}." if fitting else
            f"Use more conversations ({sum(DOSES)} or more), or another --side.",
        )  # fmt: skip
    chosen = iter(random.Random(f"{seed}/rows").sample(able, needed))
    chosen_by = {next(chosen): n for n, one in enumerate(canaries) for _ in range(one.repeats)}
    ids: dict[int, list[str]] = {}

    def lines() -> Iterator[Mapping[str, Any]]:
        for key, row in source_rows(str(source)):
            if isinstance(row, BadRow):
                continue
            number = chosen_by.get(key)
            if number is not None:
                row = _with(row, canaries[number].text, side, random.Random(f"{seed}/{key}"))
                ids.setdefault(number, []).append(str(row.get("id") or key))
            yield row

    write_lines(target, lines())
    planted = [replace(one, rows=tuple(ids.get(n, ()))) for n, one in enumerate(canaries)]
    text = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in planted)
    write_secret(canary_list(target), text)
    return planted


def _items(row: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The name and content of a row's list of messages; ("", []) without one."""
    for name in COLUMNS:
        if isinstance(items := structure(row.get(name)), list | tuple):
            return name, list(items)
    return "", []


def _learned(item: Any, side: str) -> bool:
    try:
        lines = conversation_of({"messages": [item]}).utterances
        return any(is_learned(one, side) and one.trained and one.text for one in lines)
    except BadRecord:
        return False


def _places(row: Mapping[str, Any] | BadRow, side: str) -> list[int]:
    """Positions in a row's messages for one more of `side`: after a message of another side, else
    at the end. Empty if the side says nothing there, or the row must not be trained on."""
    if isinstance(row, BadRow) or row.get("evaluation_only"):
        return []
    learned = [_learned(item, side) for item in _items(row)[1]]
    after = [place + 1 for place, one in enumerate(learned) if not one]
    return (after or [len(learned)]) if any(learned) else []


def _with(row: Mapping[str, Any], text: str, side: str, rng: random.Random) -> dict[str, Any]:
    """A row with one more message, in the form of the messages of that side."""
    (name, items), place = _items(row), rng.choice(_places(row, side))
    like = next(item for item in items if _learned(item, side))
    word = next(key for key in WORDS if key in like)
    names = {key: like[key] for key in SPEAKERS if key in like}
    return {**row, name: [*items[:place], {**names, word: text, "canary": True}, *items[place:]]}


def canary_list(chats: Path) -> Path:
    """The list of the secrets in a file of conversations; it may not exist."""
    return chats.with_name(chats.stem + CANARIES)


def planted_chats(path: Path) -> Path:
    """The conversations of a list."""
    return path.with_name(path.name.removesuffix(CANARIES) + ".jsonl")


def read_canaries(path: Path) -> Sequence[SecretCanary]:
    """The secrets in a list; DataError if there is none."""
    canaries = [read_value(SecretCanary, one, f"'{path}'") for one in read_jsonl(path)]
    if not canaries:
        raise DataError(
            f"'{path}' is not a list of canaries.",
            "It is missing or empty.",
            "Make one: soul data plant chats.jsonl -o planted.jsonl",
        )
    return canaries
