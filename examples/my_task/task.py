"""What does someone mean by what they say? Three options, of which one is meant."""

from __future__ import annotations

from typing import Any

from soulkit.errors import DataError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import tagged_letter
from soulkit.tasks import ChoiceTask
from soulkit.types import Episode, Example, Score

LETTERS = "ABC"


class MyTask(ChoiceTask):
    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        if len(fields["options"]) != len(LETTERS) or fields["meant"] not in fields["options"]:
            raise DataError(
                "The row needs three options that include the text of 'meant'.",
                "The gold letter is the position of 'meant' among the options.",
                "Correct the row, or remove it.",
            )
        return fields

    def parse(self, text: str) -> tuple[str, str]:
        return tagged_letter(text, self.protocol)

    def grade(self, example: Example, answer: str) -> float:
        return float(answer == self.gold_letter(example))

    def gold_letter(self, example: Example) -> str:
        return LETTERS[example.fields["options"].index(example.fields["meant"])]

    def gold_text(self, example: Example) -> str:
        return str(example.fields["meant"])

    def gold_completion(self, example: Example) -> str:
        return f"<answer>{self.gold_letter(example)}</answer>"

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str:
        right = score is not None and score.value == 1
        verdict = "That fits." if right else "Do not stop at the words."
        return f"{verdict} Ask what {example.fields['speaker']} would like to happen next."

    def leak_view(self, example: Example) -> LeakView:
        options = tuple(example.fields["options"])
        return LeakView(example.fields["said"], options, example.fields["meant"], tuple(LETTERS))
