"""Hi-ToM: where a chain of minds thinks an object is; fifteen lettered options.

Example row: {"story": "1 Ada, Ben entered the attic. ...", "question": "Where does Ada really think
the apple is?", "choices": "A. red_box, B. blue_bag, ...", "correct_answer": "red_box",
"question_order": 1, "deception": false, "story_length": 1}. The gold is an option's text, so
options may be shuffled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.data.literals import parse_choices
from soulkit.errors import DataError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import tagged_letter
from soulkit.runs.records import drafts
from soulkit.tasks.choice import ChoiceTask
from soulkit.tasks.tom.stories.explain import explain
from soulkit.types import Episode, Example, Record, Score


class HiToM(ChoiceTask):
    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        gold = str(fields["correct_answer"]).strip()
        if self.protocol == "paper" and gold not in self._options(fields).values():
            raise DataError(
                f"The gold answer '{gold}' is none of the row's choices.",
                "Hi-ToM's gold is the text of an option.",
                "Mend the row, or leave it out.",
            )
        return fields

    def _options(self, fields: Mapping[str, Any]) -> dict[str, str]:
        parsed = parse_choices(str(fields["choices"]), self.protocol)
        return {letter: text.strip() for letter, text in parsed.items()}

    def parse(self, text: str) -> tuple[str, str]:
        return tagged_letter(text, self.protocol)

    def grade(self, example: Example, answer: str) -> float:
        gold = str(example.fields["correct_answer"]).strip()
        return float(self._options(example.fields).get(answer) == gold)

    def gold_text(self, example: Example) -> str:
        return str(example.fields["correct_answer"])

    def gold_letter(self, example: Example) -> str:
        gold = self.gold_text(example).strip()
        return next(k for k, text in self._options(example.fields).items() if text == gold)

    def gold_completion(self, example: Example) -> str:
        return f"<answer>{self.gold_letter(example)}</answer>"

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        answer = self._options(example.fields).get(score.words) if score else None
        return explain("hitom", example.fields, answer, terse=score is None)

    def leak_view(self, example: Example) -> LeakView:
        options = self._options(example.fields)
        question, gold = str(example.fields["question"]), self.gold_text(example).strip()
        return LeakView(question, tuple(options.values()), gold, tuple(options))

    def summarise(self, records: Sequence[Record]) -> dict[str, float]:
        """Joint accuracy: a story counts at order k only if all its orders up to k are right.

        Stories of which an order up to k is missing or unscored stay out of `joint_order_k`.
        """
        by_story = _by_story(records)
        metrics = {}
        for order in range(5):
            whole = [s for s in by_story if all(k in s for k in range(order + 1))]
            if whole:
                right = [all(s[k] == 1 for k in range(order + 1)) for s in whole]
                metrics[f"joint_order_{order}"] = sum(right) / len(right)
        return metrics


def _by_story(records: Sequence[Record]) -> list[dict[int, float]]:
    """For each play of a story: order → the worst value among its questions of that order."""
    stories: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    broken: set[tuple[tuple[Any, ...], int]] = set()
    for record in drafts(records):
        if "order" not in record.tags:
            continue
        play = (record.cluster, record.kind, record.step, record.rollout)
        order, value = int(record.tags["order"]), record.score.value
        if value is None:
            broken.add((play, order))
        else:
            stories[play][order] = min(value, stories[play].get(order, value))
    for play, order in broken:
        stories[play].pop(order, None)
    return list(stories.values())
