"""SimulatorArena's rows: a student with a problem, or a writer with a document in mind.

The released layout keeps the whole row as JSON text under `raw`; `unpack` in `tasks.yaml` opens it.
What the person really said stands there twice, alone and inside the conversation. The features that
a simulation should show are lists of `Feature Name` with `Feature Question Answer`, or with
`Feature Question` where nobody answered it; entries without a name or a text say nothing and are
left out, and so is an empty list.

    {"raw": "{\\"problem\\": \\"Find x ...\\", \\"human_user_queries\\": [\\"how do i start\\"],
     \\"human_public_conversation\\": [{\\"role\\": \\"user\\", ...}, ...]}", "index": 3}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soulkit.data.literals import structure
from soulkit.data.turns import conversation
from soulkit.errors import DataError
from soulkit.tasks.rows_only import RowsOnly

NAME, ANSWER, QUESTION = "Feature Name", "Feature Question Answer", "Feature Question"
FEATURES = ("target_writing_style_features", "target_interaction_style_features")


class SimArenaRows(RowsOnly):
    """Binds rows of SimulatorArena; playing them is refused."""

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        opened = super().prepare(fields)
        lists = {name: features(opened[name], name) for name in FEATURES if name in opened}
        return {
            **opened,
            **lists,
            "human_user_queries": _queries(opened["human_user_queries"]),
            "human_public_conversation": _talk(opened["human_public_conversation"]),
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
