"""Who a model plays in one conversation: persona, scenario, prompt, roles and end.

    {"id": "u7", "persona": "Writes short messages ...", "city": "Riga"}           personas
    {"id": "chat 3", "person": "u7", "scenario": "You want to ...", "about": ...}  scenarios

`soul people personas` and `soul people scenarios` draft such files. Other plain fields of a persona
are facts about the person. Serving, chatting, simulating and the tasks with people use the same
prompt (tasks/prompts/person.md).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from soulkit.data.files import read_rows
from soulkit.errors import DataError
from soulkit.tasks.kit.prompting import PromptFolder
from soulkit.tasks.kit.spec import BOOKKEEPING
from soulkit.types import Segment

T = TypeVar("T")

END_MARK = "###STOP###"
"""Ends the last message of a person; tau2 and others use the same mark."""
PARTIAL_MARK = "|".join(re.escape(END_MARK[:size]) for size in range(len(END_MARK) - 1, 0, -1))
"""Pattern of what may become the mark at the end of a text that still arrives."""
START = "(The conversation begins. You write first.)"
"""The first user message of a person who speaks first."""
MOST_PAIRS = 200_000
"""Pairs of a persona and a scenario; they are held in memory."""
NOT_FACTS = ("id", "person", "persona", "scenario", "about", "source", "data_source", *BOOKKEEPING)
PROMPTS = PromptFolder("person")


@dataclass(frozen=True, slots=True)
class Brief:
    """The persona and the scenario of one conversation; either may be empty."""

    persona: str = ""
    scenario: str = ""
    persona_id: str = ""
    scenario_id: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Other plain fields of the persona, such as name or city."""
    text: str = ""
    """The whole prompt, if it is not made of the other fields."""

    @property
    def name(self) -> str:
        """Identifies the pair in tables and records."""
        return " × ".join(one for one in (self.persona_id, self.scenario_id) if one) or "no persona"

    def values(self, end_mark: str = END_MARK) -> dict[str, Any]:
        """What the template `person` names, apart from the feedback."""
        return {
            "persona": self.persona, "facts": dict(self.facts), "scenario": self.scenario,
            "end_mark": end_mark,
        }  # fmt: skip

    def row(self) -> dict[str, Any]:
        """A row of the tasks in which a person talks to an agent."""
        row = {"persona": self.persona, "facts": dict(self.facts), "scenario": self.scenario,
               "persona_id": self.persona_id, "scenario_id": self.scenario_id}  # fmt: skip
        return {name: value for name, value in row.items() if value}

    def prompt(self, end_mark: str = END_MARK) -> Segment:
        """The system message; without `end_mark` the person is not told how to end."""
        if self.text:
            return Segment("system", self.text)
        return PROMPTS.opening("person", None, self.values(end_mark))


def read_briefs(personas: Path | None, scenarios: Path | None = None) -> tuple[Brief, ...]:
    """Every persona with every scenario, in file order; DataError if a file has no usable row, or
    for more than MOST_PAIRS pairs."""
    nobody: Sequence[Mapping[str, Any]] = [{}]
    people = _rows(personas, "persona") if personas else nobody
    subjects = _rows(scenarios, "scenario") if scenarios else nobody
    if len(people) * len(subjects) > MOST_PAIRS:
        raise DataError(
            f"{len(people):,} personas and {len(subjects):,} scenarios are too many.",
            f"Every persona meets every scenario, in at most {MOST_PAIRS:,} pairs.",
            "Use smaller files.",
        )
    return tuple(_brief(person, subject) for person in people for subject in subjects)


def draw(briefs: Sequence[T], conversation: str) -> T:
    """The brief of a conversation: the same one for the same id."""
    digest = hashlib.sha256(conversation.encode()).digest()
    return briefs[int.from_bytes(digest[:8]) % len(briefs)]


def as_heard(messages: Sequence[Segment]) -> tuple[Segment, ...]:
    """A conversation as the person's model sees it: roles swapped, system messages left out.

    In `messages` the person is the `user` and the other side the `assistant`. A conversation that
    the person begins starts with START. Consecutive messages of one side are joined.
    """
    merged: list[Segment] = []
    swapped = [(_OTHER[one.role], one.text) for one in messages if one.role != "system"]
    if not swapped or swapped[0][0] == "assistant":
        swapped.insert(0, ("user", START))
    for role, text in swapped:
        if merged and merged[-1].role == role:
            text = f"{merged.pop().text}\n\n{text}"
        merged.append(Segment("user" if role == "user" else "assistant", text))
    return tuple(merged)


_OTHER = {"user": "assistant", "assistant": "user"}


def split_end(text: str) -> tuple[str, bool]:
    """(the message without the mark and what follows it, whether the person ended)."""
    before, mark, _ = text.partition(END_MARK)
    return (before.rstrip(), True) if mark else (text, False)


def _rows(path: Path, key: str) -> Sequence[Mapping[str, Any]]:
    rows = [row.fields for row in read_rows(path)[0] if str(row.fields.get(key) or "").strip()]
    if not rows:
        raise DataError(
            f"'{path}' has no row with a {key}.",
            f'Each line must be an object such as {{"id": "a", "{key}": "..."}}.',
            f"Draft the file with: soul people {key}s CHATS -o {path.name}",
        )
    return rows


def _brief(person: Mapping[str, Any], subject: Mapping[str, Any]) -> Brief:
    return Brief(
        persona=str(person.get("persona") or "").strip(),
        scenario=str(subject.get("scenario") or "").strip(),
        persona_id=str(person.get("id") or ""),
        scenario_id=str(subject.get("id") or ""),
        facts={name: str(value) for name, value in person.items() if name not in NOT_FACTS
               and isinstance(value, str | int | float) and str(value).strip()},
    )  # fmt: skip
