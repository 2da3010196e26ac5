"""How large FANToM's sets are, so that a sample of rows can tell whole sets from parts of sets.

A set is asked about one piece of information at one accessibility. `set_size` counts its lettered
beliefs, lists, and yes or no (what ALL asks for), `set_beliefs` its beliefs in free words that have
a wrong answer beside the right one (what ALL* adds). Facts and the golds `no:long` are in no set.

Example: the eight rows of a set of one free and one lettered belief, two lists and four questions
on single people each get {"set_size": 7, "set_beliefs": 1}.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from soulkit.tasks.made import Row


def part_of(row: Mapping[str, Any]) -> Literal["strict", "belief"] | None:
    """What a row is to its set: asked for by ALL, by ALL* alone, or in no set (None)."""
    kind = str(row["question_type"])
    if kind.startswith("fact") or str(row.get("correct_answer")) == "no:long":
        return None
    if kind.startswith("tom:belief:") and not kind.endswith(":multiple-choice"):
        return "belief" if row.get("wrong_answer") else None
    return "strict"


def sized(rows: Sequence[Row]) -> list[Row]:
    """The rows of one set, with the sizes of the set; rows that say the same count once."""
    members: dict[tuple[str, str | None], set[str]] = defaultdict(set)
    for row in rows:
        content = repr(
            (row.get("complete_question"), row["question_type"], row.get("correct_answer"))
        )
        members[str(row.get("missed_info_accessibility")), part_of(row)].add(content)
    return [
        {
            **row,
            "set_size": len(members[str(row.get("missed_info_accessibility")), "strict"]),
            "set_beliefs": len(members[str(row.get("missed_info_accessibility")), "belief"]),
        }
        for row in rows
    ]
