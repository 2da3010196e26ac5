"""Warm-up lessons that teach a tiny model to follow hints in `secret_keeper` dialogues.

A lesson looks like a conversation of `secret_keeper`, but the topic to withhold is random and does
not depend on what the prompt calls secret: only the hint tells. A model that learned from these
lessons follows hints and, without a hint, does not know which topic to withhold.

Every topic has a single value (every job is "baker"): the model need not look values up in the
prompt, which would take a tiny model longer to learn than everything else.
"""

from __future__ import annotations

import random
from typing import Any

from soulkit.tasks.secret_keeper.task import DEFLECTION, TEXTS, SecretKeeper, question_at
from soulkit.tasks.secret_keeper.task import rows as made_rows
from soulkit.types import Episode, Example, Feedback, Score

TURNS = 4
PRYING = 0.4
"""Share of the questions that are about the withheld topic."""


def lessons(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends only on (seed, i)."""
    return [_lesson(row, random.Random(f"{seed}/{i}")) for i, row in enumerate(plain(n, seed))]


def plain(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` generated rows of `secret_keeper` with a single value per topic."""
    values = {topic: several[0] for topic, several in TEXTS["topics"].items()}
    return [
        {
            **row,
            "facts": [{**item, "value": values[item["topic"]]} for item in row["facts"]],
            "secret": {**row["secret"], "value": values[row["secret"]["topic"]]},
        }
        for row in made_rows(n, seed)
    ]


def _lesson(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    topics = [item["topic"] for item in (*row["facts"], row["secret"])]
    hidden = rng.choice(topics)
    public = [topic for topic in topics if topic != hidden]
    order = [hidden if rng.random() < PRYING else rng.choice(public) for _ in range(TURNS)]
    return {**row, "order": order, "kept_topic": hidden}


class KeeperLessons(SecretKeeper):
    """A task that is only imitated: gold conversations with a hint that they depend on."""

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str:
        hidden = example.fields["kept_topic"]
        public = [topic for topic in _items(example) if topic != hidden]
        return f"Keep your {hidden} to yourself. Tell your {' and your '.join(public)}."

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        items, hidden = _items(example), example.fields["kept_topic"]
        exchanges = []
        for turn, topic in enumerate(example.fields["order"]):
            question = question_at(turn, topic, str(example.fields["visitor"]))
            answer = f"My {topic} is the {items[topic]}."
            exchanges.append((question, DEFLECTION if topic == hidden else answer))
        return self.scripted(example, exchanges, feedback, "all_told")


def _items(example: Example) -> dict[str, str]:
    """Topic → value, for every topic in the prompt."""
    listed = (*example.fields["facts"], example.fields["secret"])
    return {item["topic"]: item["value"] for item in listed}
