"""ToMi and ParaToMi: where an object is, was, or is thought to be; the answer is a place's name.

Example row (tomi): {"story": "1 Ada entered the attic. ...", "question": "Where will Ada look for the
apple?", "answer": "box", "cands": ["bag", "box"], "question_type": "first_order_tom"}. The candidates
serve scoring and the leak check; ParaToMi shows them to the actor, ToMi does not.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.data.rows import parse_candidates, parse_story
from soulkit.data.stories.explain import explain
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import has_word, tagged_text
from soulkit.tasks.base import ChoiceTask
from soulkit.types import Episode, Example, Score


class PlaceTask(ChoiceTask):
    """A free-text place in the answer tag: the gold named, and no other candidate."""

    answer_column = "answer"

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        cands = parse_candidates(fields.get("cands"), self.protocol)
        return {**fields, "cands": tuple(cands)}

    def parse(self, text: str) -> tuple[str, str]:
        answer = tagged_text(text, self.protocol)
        if answer is None:
            return "", "no_tag"
        return answer, "ok" if answer else "malformed"

    def grade(self, example: Example, answer: str) -> float:
        gold, cands = self.gold_text(example), example.fields["cands"]
        if self.protocol == "reference":
            others = [c for c in cands if c != gold]
        else:
            # A candidate that is a word of the gold would make the gold unreachable.
            answer, gold = _spaced(answer), _spaced(gold)
            spaced = (_spaced(c) for c in cands)
            others = [c for c in spaced if c != gold and not has_word(gold, c)]
        named = bool(gold) and has_word(answer, gold)
        return float(named and not any(has_word(answer, other) for other in others))

    def gold_text(self, example: Example) -> str:
        return str(example.fields[self.answer_column])

    def gold_completion(self, example: Example) -> str:
        return f"<answer>{self.gold_text(example)}</answer>"

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        answer = score.words if score else None
        return explain(self.name, example.fields, answer, terse=score is None)

    def rehearse(self, example: Example, rng: random.Random) -> str | None:
        """Feedback on a made-up draft, which names one of the candidates."""
        cands = example.fields["cands"]
        return explain(self.name, example.fields, rng.choice(cands) if cands else None)

    def leak_view(self, example: Example) -> LeakView:
        options = tuple(example.fields["cands"]) or (self.gold_text(example),)
        return LeakView(str(example.fields["question"]), options, self.gold_text(example))


def _spaced(text: str) -> str:
    return " ".join(text.replace("_", " ").split())


class ToMi(PlaceTask):
    pass


class ParaToMi(PlaceTask):
    answer_column = "correct_answer"

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {**super().prepare(fields), "story": parse_story(fields["story"])}


def reference_aggregates(results: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
    """Accuracy per question type and overall, as the reference's helper groups it."""
    groups: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if result:
            reward = float(result.get("reward") or 0.0)
            groups[f"accuracy_{result.get('question_type', 'unknown')}"].append(reward)
            groups["accuracy_overall"].append(reward)
    return {name: sum(values) / len(values) for name, values in groups.items()}
