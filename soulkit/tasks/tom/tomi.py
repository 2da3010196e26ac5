"""ToMi and ParaToMi: where an object is, was, or is thought to be; the answer is a place's name.

Example row (tomi): {"story": "1 Ada entered the attic. ...", "question": "Where will Ada look for
the apple?", "answer": "box", "cands": ["bag", "box"], "question_type": "first_order_tom"}. The
candidates serve scoring and the leak check; ParaToMi shows them to the actor, ToMi does not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from soulkit.data.literals import parse_candidates, parse_story
from soulkit.errors import DataError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import has_word, named_options, plain, tagged_text
from soulkit.tasks.choice import ChoiceTask
from soulkit.tasks.tom.stories.explain import explain
from soulkit.tasks.tom.stories.questions import read_question
from soulkit.types import Episode, Example, Score


class PlaceTask(ChoiceTask):
    """A free-text place in the answer tag: the gold named, and no other candidate."""

    answer_column = "answer"
    rules = "tomi"
    """Whose rules the symbolic coach follows: `tomi` or `paratomi`, also in derived tasks."""

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        cands = parse_candidates(fields.get("cands"), self.protocol)
        return {**fields, "cands": tuple(cands)}

    def parse(self, text: str) -> tuple[str, str]:
        answer = tagged_text(text, self.protocol)
        if answer is None:
            return "", "no_tag"
        return answer, "ok" if answer else "malformed"

    def grade(self, example: Example, answer: str) -> float:
        gold = self.gold_text(example)
        if self.protocol == "paper":
            return float(named_options(answer, self._options(example)) == {plain(gold)})
        others = [c for c in example.fields["cands"] if c != gold]
        right = bool(gold) and has_word(answer, gold)
        return float(right and not any(has_word(answer, other) for other in others))

    def _options(self, example: Example) -> tuple[str, ...]:
        """The candidates, the gold among them, each place once."""
        every = {plain(c): c for c in (*example.fields["cands"], self.gold_text(example))}
        return tuple(every.values())

    def gold_text(self, example: Example) -> str:
        return str(example.fields[self.answer_column])

    def gold_completion(self, example: Example) -> str:
        return f"<answer>{self.gold_text(example)}</answer>"

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        answer = self._place(example, score.words) if score else None
        return explain(self.rules, example.fields, answer, terse=score is None)

    def _place(self, example: Example, answer: str) -> str | None:
        """The one place that an answer names; as it stands if it names none, None if several."""
        places = named_options(answer, self._options(example))
        return next(iter(places)) if len(places) == 1 else None if places else answer

    def rehearse(self, example: Example, rng: random.Random) -> str | None:
        """Feedback on a made-up draft, which names one of the candidates."""
        cands = example.fields["cands"]
        return explain(self.rules, example.fields, rng.choice(cands) if cands else None)

    def leak_view(self, example: Example) -> LeakView:
        question = str(example.fields["question"])
        return LeakView(question, self._options(example), self.gold_text(example))


class ToMi(PlaceTask):
    pass


class ParaToMi(PlaceTask):
    answer_column = "correct_answer"
    rules = "paratomi"

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        prepared = {**super().prepare(fields), "story": parse_story(fields["story"])}
        if self.protocol == "paper":
            _check_gold(prepared["cands"], str(fields["correct_answer"]))
        question = read_question(str(fields["question"]))
        if prepared.get("order") is None and question is not None:
            prepared["order"] = question.order
        return prepared


def _check_gold(cands: Sequence[str], gold: str) -> None:
    """DataError when candidates are shown and the gold is none of them."""
    if cands and plain(gold) not in map(plain, cands):
        raise DataError(
            f"The gold answer '{gold:.40}' is none of the row's candidates.",
            "The actor is shown the candidates, so that nobody who picks one could be right.",
            "Mend the row, or leave it out.",
        )
