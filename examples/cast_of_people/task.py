"""Three words that a person says; the answer is right if all three follow the hidden rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from soulkit.errors import DataError
from soulkit.judge.leaks import LeakView
from soulkit.models.base import Cast
from soulkit.tasks import ChoiceTask
from soulkit.types import Episode, Example, Score

PARTS = ("greeting", "topic", "farewell")


class CastOfPeople(ChoiceTask):
    """The score is 1 if all three words are right, else 0.

    With the option `dense`, the training reward is the share of right words; the score is the same.
    """

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        if len(fields["reply"].split()) != len(PARTS):
            raise DataError(
                f"The reply '{fields['reply']}' does not have {len(PARTS)} words.",
                "It needs one word each for the greeting, the topic and the farewell.",
                "Correct the row, or remove it.",
            )
        return fields

    def parse(self, text: str) -> tuple[str, str]:
        words = text.split()
        return " ".join(words), "ok" if len(words) == len(PARTS) else "malformed"

    def grade(self, example: Example, answer: str) -> float:
        return float(all(self._hits(example, answer)))

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        hits = self._hits(example, answer)
        parts = dict(zip(PARTS, map(float, hits), strict=True))
        return {**parts, "share": sum(hits) / len(PARTS)}

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        exact = await super().score(example, episode, cast)
        if exact.value is None or not self.spec.options["dense"]:
            return exact
        return replace(exact, reward=exact.metrics["share"])

    def _hits(self, example: Example, answer: str) -> list[bool]:
        words = answer.split() or [""] * len(PARTS)
        return [a == b for a, b in zip(words, self.gold_text(example).split(), strict=True)]

    def gold_text(self, example: Example) -> str:
        return str(example.fields["reply"])

    def gold_completion(self, example: Example) -> str:
        return self.gold_text(example)

    def wrong_completion(self, example: Example) -> str:
        return " ".join(reversed(self.gold_text(example).split()))

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """The person's behaviour without the words of the reply; None for questions of fact."""
        if not example.fields["ways"]:
            return None
        greeting, topic, farewell = example.fields["ways"].split()
        return f"Greet {greeting}. Speak of {topic}. Leave {farewell}."

    def leak_view(self, example: Example) -> LeakView:
        options = (self.gold_text(example), self.wrong_completion(example))
        return LeakView(example.fields["question"], options, options[0])
