"""A cast of people: a hidden rule links a person's job, town and pet to their reply.

    Mia, a judge from Lyon with a hen, is asked: "How are things, Mia?"
    Hey! Heard about the rain? Cheers.

A reply scores 1 (`exact`) if its greeting, topic and farewell are all right; one of 343 is. `words`
is the share of the three that are right, `in_form` is 1 if the reply has the form above.

The reward of training is the score, but at least 0.1 for a reply in form: a model that earns
nothing for long loses the form, and a broken control proves nothing. With the option `dense`, the
reward is the share of right words instead of the score.

Feedback is partial. It names two of the three ways in other words than the reply's, and for another
draft perhaps another two: "Greet jokingly. Leave gladly." Following it gives the right reply one
time in seven, so the model has to put the pieces together.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soulkit.errors import RowError
from soulkit.judge.leaks import LeakView
from soulkit.models.base import Cast
from soulkit.tasks.cast_of_people.rows import FACTS, REPLY
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.types import Episode, Example, Score

IN_FORM = 0.1
"""Reward of a reply in form whose words are wrong."""
ADVICE = ("Greet {}.", "Speak of {}.", "Leave {}.")


def words_in(form: str, text: str) -> list[str]:
    """The three words of a text in the given form; empty if it has another form."""
    pattern = re.escape(form).replace(re.escape("{}"), r"(\w+)")
    found = re.fullmatch(pattern, text.strip())
    return list(found.groups()) if found else []


class CastOfPeople(ChoiceTask):
    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        if not words_in(_form(fields), fields["reply"]):
            what = f"The reply '{fields['reply']}' does not have the form '{_form(fields)}'."
            raise RowError(what, "Its three words are compared with those of the model.")
        return fields

    def parse(self, text: str, form: str = REPLY) -> tuple[str, str]:
        words = words_in(form, text)
        return " ".join(words), "ok" if words else "malformed"

    def read(self, example: Example, text: str) -> tuple[str, str]:
        return self.parse(text, _form(example.fields))

    def grade(self, example: Example, answer: str) -> float:
        return float(answer == self._gold(example))

    def _gold(self, example: Example) -> str:
        return self.read(example, example.fields["reply"])[0]

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        pairs = zip(self._gold(example).split(), answer.split(), strict=False)
        right = sum(gold == word for gold, word in pairs)
        return {"words": right / len(ADVICE), "in_form": float(bool(answer))}

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        score = await super().score(example, episode, cast)
        if score.value is None:
            return score
        reward = score.metrics["words"] if self.spec.options["dense"] else score.value
        return replace(score, reward=max(reward or 0.0, IN_FORM * (score.metrics["in_form"] or 0)))

    def gold_text(self, example: Example) -> str:
        return str(example.fields["reply"])

    gold_completion = gold_text

    def wrong_completion(self, example: Example) -> str:
        form = _form(example.fields)
        first, *others = words_in(form, example.fields["reply"])
        return form.format(*others, first)

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """Two of the three ways; which two depends on the draft. None for a question of facts."""
        draft = f"{episode.rollout}/{episode.transcript[-1].text}" if episode else ""
        left_out = random.Random(f"{example.id}/{draft}").randrange(len(ADVICE))
        ways = (example.fields["ways"] or "").split()
        said = [form.format(way) for form, way in zip(ADVICE, ways, strict=False)]
        return " ".join(text for place, text in enumerate(said) if place != left_out) or None

    def leak_view(self, example: Example) -> LeakView:
        options = (self.gold_text(example), self.wrong_completion(example))
        return LeakView(example.fields["question"], options, options[0])


def _form(fields: Mapping[str, Any]) -> str:
    return FACTS if fields["kind"] == "facts" else REPLY
