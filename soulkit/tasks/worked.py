"""Lettered tasks whose feedback may be a worked example: how the row is solved, answer included.

Which of the two a task gives stands in its declaration (`feedback: {kind: worked_example}`); both
kinds have a symbolic form and a model's. A worked example is written from the gold, does not look
at the draft, and is used only by runs that ask for such.

Example of the symbolic form: "Ada praises the soup she pushed away, to spare the cook.
<answer>B</answer>".
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from soulkit.errors import DataError
from soulkit.judge.coach import ask_coach
from soulkit.judge.verdict import plain
from soulkit.models.base import Cast
from soulkit.tasks.base import Rollout
from soulkit.tasks.lettered import LetteredTask
from soulkit.types import Episode, Example, Feedback, Score

_LED = re.compile(r"\s*[(\[*]*([A-Za-z])(?:[)\]*.:]+(?:\s+(.*))?)?\s*", re.DOTALL)

CLOSE = "Close with one option's letter between <answer> and </answer>, nothing else inside."


class WorkedTask(LetteredTask):
    """A lettered task that can explain either way."""

    @abstractmethod
    def worked_example(self, example: Example) -> str:
        """How the row is solved, answer included, without a model."""

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        if self.spec.feedback.kind == "worked_example":
            return self.worked_example(example)
        return super().explain(example, episode, score)

    async def critique(
        self, example: Example, episode: Episode, score: Score, cast: Cast, rollout: Rollout
    ) -> Feedback | None:
        if cast.coach is None or self.spec.feedback.kind != "worked_example":
            return await super().critique(example, episode, score, cast, rollout)
        prompt = self.prompts.render("worked_example", **self.worked_view(example))
        feedback = await ask_coach(cast.coach, prompt, rollout.call("coach", example))
        return replace(feedback, kind="worked_example")

    def other_prompts(
        self, example: Example, draft: Episode, score: Score
    ) -> Iterator[tuple[str, str]]:
        """The prompts of both kinds of feedback, whichever the declaration asks for."""
        view = self.worked_view(example)
        yield "worked_example", self.prompts.render("worked_example", **view)
        view = self.coach_view(example, draft, score)
        yield "coach", self.prompts.render("coach", **view)

    def wrong_completion(self, example: Example) -> str | None:
        # By letter, since texts may differ in nothing but signs (`<` and `>`).
        others = [key for key in self.options(example) if key != self.gold_letter(example)]
        rng = random.Random(example.id)
        return f"<answer>{rng.choice(others)}</answer>" if others else None

    def worked_view(self, example: Example) -> dict[str, Any]:
        """What the writer of a worked example reads: the actor's view, and the gold."""
        view, _ = self.within_budget(example.visible(self.acted_seat(example)))
        letter, text = self.gold_letter(example), self.gold_text(example)
        return {**view, "gold_letter": letter, "gold_text": text}


# -- what rows say about their gold --------------------------------------------------------------


def led_letter(text: str, letters: str) -> str:
    """The letter that a gold such as `B`, `b)`, `(B)` or `B. some text` stands for, else "".

    A word is no letter: `Burn the will` gives "".
    """
    match = _LED.fullmatch(text)
    letter = match.group(1).upper() if match else ""
    return letter if letter in letters else ""


def led_text(text: str) -> str:
    """`B. some text` without its letter; other texts as they are."""
    match = _LED.fullmatch(text)
    return match.group(2).strip() if match and match.group(2) else text.strip()


def letter_of(gold: str, options: Mapping[str, str], letters: str) -> str:
    """The option that `gold` names, by a letter, its whole text, or both; "" if none does.

    The text goes before a letter that leads it: an option may itself begin like one (`A. Smith`).
    A letter with the text of another option names none. Without options any letter will do.
    """
    letter, gold_words = led_letter(gold, letters), plain(gold)
    text_matches = [
        key for key, text in options.items() if gold_words and plain(text) == gold_words
    ]
    if len(text_matches) == 1 and len(gold_words) > 1:
        return text_matches[0]
    rest = plain(led_text(gold)) if len(gold_words) > 1 else ""
    rest_matches = {key for key, text in options.items() if rest and plain(text) == rest}
    contradicts = bool(rest_matches) and letter not in rest_matches
    return "" if contradicts or (options and letter not in options) else letter


def bad_gold(gold: str, expected: str) -> DataError:
    return DataError(
        f"The gold answer '{gold:.60}' names none of the row's options.",
        f"It should be {expected}.",
        "Mend the row, or leave it out.",
    )
