"""Humanual rows of the six domains: imported from processed files, or generated.

    {"persona": "...", "prompt": [{"role": "poster", "content": "...", "metadata": {...}}],
     "completion": "...", "user_id": "...", "post_id": "..."}

A row needs the writer (persona), what they saw (prompt) and what they wrote (completion). Records
without one of them are unusable: a reply invented here would not be human. In generated rows a
persona states an invented person's opinion and style; both show in the completion. PER_PERSON
consecutive rows are by the same person.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow
from soulkit.data.literals import structure
from soulkit.tasks.kit.importing import BadRecord, Imported, Row, import_records, need
from soulkit.tasks.kit.prompting import Texts

_DOMAINS = ("book", "chat", "email", "news", "opinion", "politics")
TASKS = tuple(f"humanual_{domain}" for domain in _DOMAINS)
LICENCE = "not stated with the texts; see the terms of Humanual and of the sites they come from"
_KEPT = ("id", "dataset", "category", "user_id", "post_id", "turn_id", "split_type")
_FIELDS = ("prompt", "completion")


def import_humanual(path: Path) -> Imported:
    """Rows of a processed file. The file of posts has no replies, so it cannot be imported."""
    return import_records(
        path, _imported_row, fields=_FIELDS, licence=LICENCE, notes=_notes,
        way_out="Give rows with persona, prompt and completion, not posts without replies.",
    )  # fmt: skip


def _imported_row(raw: RawRow, _: int) -> Row:
    persona, completion = need(raw, "persona", "completion")
    columns = {name: raw.fields[name] for name in _KEPT if name in raw.fields}
    prompt = _prompt(raw.fields.get("prompt"))
    return {"persona": persona, "prompt": prompt, "completion": completion, **columns}


def _prompt(value: Any) -> str:
    """JSON text of the messages without their metadata, or a prompt in plain text."""
    messages = structure(value)
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        messages = [
            {"role": str(m.get("role") or "user"), "content": m["content"]} for m in messages
        ]
        return json.dumps(messages, ensure_ascii=False)
    if isinstance(value, str) and value.strip():
        return value
    raise BadRecord("its prompt is neither text nor a list of messages with content")


def _is_message(value: Any) -> bool:
    content = value.get("content") if isinstance(value, Mapping) else None
    return isinstance(content, str) and bool(content.strip())


def _notes(rows: Sequence[Row], bad: Sequence[BadRow]) -> tuple[str, ...]:
    without = sum("'persona'" in b.why for b in bad)
    lacking = f"{without} records have no persona: only the processed sets have one."
    return (f"{len(rows)} rows, without the messages' metadata.", *([lacking] if without else []))


TEXTS = Texts(__file__)
PER_PERSON = 2
"""Number of consecutive rows by the same person."""


@dataclass(frozen=True, slots=True)
class Stance:
    """A trait, worded as in a description, and two statements that follow from it."""

    trait: str
    says: tuple[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Topic:
    """What the person saw (role, text), and the words that fill a stance's statements."""

    category: str
    seen: tuple[tuple[str, str], ...]
    words: dict[str, str]


@dataclass(frozen=True, slots=True)
class Domain:
    dataset: str
    stances: tuple[Stance, ...]
    topics: tuple[_Topic, ...]


@cache
def domain_of(name: str) -> Domain:
    """One of DOMAINS, with its texts."""
    table = TEXTS["domains"][name]
    stances = tuple(Stance(**stance) for stance in table["stances"])
    return Domain(table["dataset"], stances, tuple(_Topic(**topic) for topic in table["topics"]))


@dataclass(frozen=True, slots=True)
class _Habit:
    """A writing style: its description, and its effect on the two sentences of a statement."""

    description: str
    write: Callable[[str, str], str]


HABITS = (
    _Habit("Writes in full sentences and leaves it at two.", lambda a, b: f"{a} {b}"),
    _Habit("Writes everything in small letters.", lambda a, b: f"{a} {b}".lower()),
    _Habit("Says one thing and stops.", lambda a, b: a),
    _Habit("Starts a new line for every thought.", lambda a, b: f"{a}\n\n{b}"),
    _Habit("Begins with an apology for butting in.", lambda a, b: f"Sorry to butt in. {a} {b}"),
    _Habit("Ends on three dots.", lambda a, b: f"{a} {b.rstrip('.!?')}..."),
)


@dataclass(frozen=True, slots=True)
class _Person:
    text: str
    stance: Stance
    habit: _Habit


def rows(n: int, seed: int, *, task: str) -> list[dict[str, Any]]:
    """`n` rows of one of TASKS; row i depends only on (seed, i), so fewer are a prefix of more."""
    domain = task.removeprefix("humanual_")
    return [_made_row(domain, seed, index) for index in range(n)]


def _made_row(domain: str, seed: int, index: int) -> dict[str, Any]:
    number, turn = divmod(index, PER_PERSON)
    rng = random.Random(f"humanual/{domain}/{seed}/{number}")
    person = _person(rng, domain)
    # Drawn together, so that no person writes twice about the same topic.
    topic = rng.sample(domain_of(domain).topics, PER_PERSON)[turn]
    first, second = rng.choices(person.stance.says, k=PER_PERSON)[turn]
    written = person.habit.write(first.format(**topic.words), second.format(**topic.words))
    return {
        "persona": person.text,
        "prompt": json.dumps(
            [{"role": role, "content": text} for role, text in topic.seen], ensure_ascii=False
        ),
        "completion": written,
        "id": f"made-{domain}-{seed}-{index}",
        "dataset": domain_of(domain).dataset,
        "category": topic.category,
        "user_id": f"made-{domain}-{seed}-{number}",
        "index": index,
    }


def _person(rng: random.Random, domain: str) -> _Person:
    stance = rng.choice(domain_of(domain).stances)
    habit = rng.choice(HABITS)
    job, age, town = rng.choice(TEXTS["jobs"]), rng.randint(18, 79), rng.choice(TEXTS["towns"])
    text = (
        f"A {job} of {age} from {town} who {rng.choice(TEXTS['pastimes'])}. In matters like these, "
        f"a person who {stance.trait}. {habit.description}"
    )
    return _Person(text, stance, habit)
