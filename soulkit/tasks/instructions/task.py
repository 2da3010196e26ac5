"""Instructions whose keeping can be seen by rule: lengths, case, lists, JSON, words to avoid.

What a model can do beside what it is trained for: measured before and after, it says what a
training cost elsewhere. A reply counts (1) if it meets every check of its row, else 0; `checks` is
the share of them that it meets, and stands beside the headline. The forty rows are always the
same, so that one run's result can stand beside another's.

Example row: {"instruction": "Name the four seasons … as a JSON list.", "checks": [{"kind":
"json_list", "count": 4}], "kind": "json", "reply": "[...]"}. `checks.py` decides each
kind of check.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import spoken
from soulkit.models.base import Cast
from soulkit.tasks.instructions.checks import refuse_unreadable, unmet
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.kit.scoring import READABLE
from soulkit.types import Episode, Example, Score

SHARE = "checks"
"""Metric: the share of a row's checks that a reply meets."""


class Instructions(ChoiceTask):
    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        refuse_unreadable(fields["checks"])
        return fields

    def parse(self, text: str) -> tuple[str, str]:
        """All that was said is the answer; of nothing there is nothing to check."""
        words = spoken(text, self.protocol).strip()
        return words, "ok" if words else "empty"

    def grade(self, example: Example, answer: str) -> float:
        return float(not unmet(example.fields["checks"], answer))

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        checks = example.fields["checks"]
        return {SHARE: 1 - len(unmet(checks, answer)) / len(checks) if answer else 0.0}

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """As for every answer; the words are what was not kept, the reply stands in the episode."""
        score = await super().score(example, episode, cast)
        missed = unmet(example.fields["checks"], score.words) if score.status in READABLE else []
        return replace(score, words=", ".join(missed))

    def gold_completion(self, example: Example) -> str:
        return str(example.fields["reply"])

    def gold_text(self, example: Example) -> str:
        return str(example.fields["reply"])

    def wrong_completion(self, example: Example) -> str:
        """Readable, and in no row's form."""
        return (
            "Congratulations on the test drive! I would rather NOT swim in blue water,\n\n"
            "thank you very much. Another time? Perhaps."
        )

    def leak_view(self, example: Example) -> LeakView:
        fields = example.fields
        return LeakView(question=fields["instruction"], reference=fields["reply"])


TEXTS = Texts(__file__)


def rows(n: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """`n` of the forty in an order that the seed draws; there are no more of them."""
    every = list(TEXTS["instructions"])
    random.Random(f"instructions/{seed}").shuffle(every)
    return [deepcopy(dict(row)) for row in every[:n]]
