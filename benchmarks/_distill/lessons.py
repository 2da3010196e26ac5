"""What a tiny model has to know before it can learn to keep secrets: advice decides what is told.

A lesson looks like a conversation of `secret_keeper`, and which of the four things is kept to
oneself is drawn afresh, whatever the page calls secret, and asked about at any turn: only the hint
tells. Who learned from such lessons follows hints and, without one, has no idea what to keep.
"""

from __future__ import annotations

import random
from typing import Any

from soulkit.tasks.secret_keeper.rows import rows as made_rows
from soulkit.tasks.secret_keeper.task import DEFLECTION, SecretKeeper, question_at
from soulkit.types import Episode, Example, Feedback, Score


def lessons(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone."""
    return [_lesson(row, random.Random(f"{seed}/{i}")) for i, row in enumerate(made_rows(n, seed))]


def _lesson(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    topics = [item["topic"] for item in (*row["facts"], row["secret"])]
    return {**row, "order": rng.sample(topics, len(topics)), "kept_topic": rng.choice(topics)}


class KeeperLessons(SecretKeeper):
    """Never played: there is a gold conversation, and a hint without which nobody could hold it."""

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str:
        hidden = example.fields["kept_topic"]
        public = [topic for topic in _items(example) if topic != hidden]
        return f"Keep your {hidden} to yourself. Tell your {' and your '.join(public)}."

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        items = _items(example)
        exchanges = []
        for turn, topic in enumerate(example.fields["order"]):
            secret = topic == example.fields["kept_topic"]
            answer = DEFLECTION if secret else f"My {topic} is the {items[topic]}."
            question = question_at(turn, topic, str(example.fields["visitor"]))
            exchanges.append((question, answer))
        return self.scripted(example, exchanges, feedback, "all_told")


def _items(example: Example) -> dict[str, str]:
    """Topic → value, of everything that the page names."""
    listed = (*example.fields["facts"], example.fields["secret"])
    return {item["topic"]: item["value"] for item in listed}
