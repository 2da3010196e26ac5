"""What the rows of SimulatorArena hold, in one spelling: features, messages, the conversation.

[{"Feature Name": "Message Length", "Feature Question Answer": "Short."}, {"Feature Name": "x"}]
→ [{"Feature Name": "Message Length", "Feature Question Answer": "Short."}]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soulkit.data.literals import structure
from soulkit.data.turns import conversation
from soulkit.errors import DataError
from soulkit.types import Line

NAME, ANSWER, QUESTION = "Feature Name", "Feature Question Answer", "Feature Question"
WRITING, INTERACTION = "target_writing_style_features", "target_interaction_style_features"
FEATURES = (WRITING, INTERACTION)


@dataclass(frozen=True, slots=True)
class Target:
    """A feature that a simulation should show."""

    label: str
    """Its name; with a number where another feature of the row has the same."""
    text: str
    """What is known of it, else what is asked about it."""
    column: str
    """WRITING or INTERACTION."""


def read_arena_row(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The opened fields of a row in one spelling. DataError for what nothing can be compared with.

    `features` says whether the row has target features at all.
    """
    lists = {name: features(fields[name], name) for name in FEATURES if name in fields}
    return {
        **fields,
        **lists,
        "human_user_queries": _queries(fields["human_user_queries"]),
        "human_public_conversation": _talk(fields["human_public_conversation"]),
        "features": "with" if any(lists.values()) else "without",
    }


def features(value: Any, column: str) -> list[dict[str, str]] | None:
    """The features that say something, in their order; None for none. DataError for no list."""
    if value is None or value == "":
        return None
    items = structure(value)
    if not isinstance(items, list | tuple):
        raise DataError(
            f"row: '{column}' should hold a list of features.",
            f"It holds {type(items).__name__} {items!r:.60}.",
            f"Write a list of objects with '{NAME}' and '{ANSWER}'.",
        )
    return [feature for item in items if (feature := _feature(item))] or None


def _feature(item: Any) -> dict[str, str]:
    if not isinstance(item, Mapping):
        return {}
    texts = {k: str(item[k]).strip() for k in (NAME, ANSWER, QUESTION) if item.get(k) is not None}
    feature = {k: text for k, text in texts.items() if text}
    return feature if NAME in feature and len(feature) > 1 else {}


def targets(fields: Mapping[str, Any]) -> tuple[Target, ...]:
    """The target features of a row, those of writing first, each under a label of its own."""
    listed: list[Target] = []
    for column in FEATURES:
        for feature in fields.get(column) or ():
            label = _free_label(feature[NAME], {target.label for target in listed})
            listed.append(Target(label, feature.get(ANSWER) or feature[QUESTION], column))
    return tuple(listed)


def _free_label(name: str, taken: Iterable[str]) -> str:
    """`name` on one line, with the first number that makes it unlike the labels in use."""
    label, number, used = " ".join(name.split()), 1, {other.casefold() for other in taken}
    free = label
    while free.casefold() in used:
        number += 1
        free = f"{label} ({number})"
    return free


def human_lines(fields: Mapping[str, Any], actor: str, partner: str) -> list[Line]:
    """The recorded conversation as lines of the two seats; empty where it is one text."""
    recorded = fields["human_public_conversation"]
    if isinstance(recorded, str):
        return []
    seats = {"user": actor, "assistant": partner}
    return [Line(seats[m["role"]], m["content"]) for m in recorded if m["role"] in seats]


def human_messages(fields: Mapping[str, Any]) -> list[str]:
    """What the person wrote, message by message, blank ones left out."""
    return [text for text in fields["human_user_queries"] if text.strip()]


def _queries(value: Any) -> list[str]:
    """What the person said, message by message; a single text is one message."""
    messages = [value] if isinstance(value, str) else value
    if not isinstance(messages, list | tuple) or not all(
        isinstance(message, str) for message in messages
    ):
        raise DataError(
            "row: 'human_user_queries' should hold what the person said.",
            f"It holds {type(value).__name__} {value!r:.60}.",
            "Write a list of texts, or one text.",
        )
    if not any(message.strip() for message in messages):
        raise DataError(
            "row: 'human_user_queries' holds no words.",
            "There is nothing to compare a simulated person with.",
            "Fill it in, or leave the row out.",
        )
    return list(messages)


def _talk(value: Any) -> Any:
    """The conversation as messages; a text that lists its lines stays as it is."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    return conversation(value, "human_public_conversation")


def mean_words(texts: Sequence[str]) -> float:
    """Words of a text on average; 0 without any."""
    return sum(len(text.split()) for text in texts) / len(texts) if texts else 0.0
