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
from soulkit.tasks.batches import mean_of
from soulkit.tasks.choice import ChoiceTask
from soulkit.tasks.tom.stories.explain import explain
from soulkit.types import BatchMetric, Episode, Example, Record, Score


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

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """Joint accuracy: a story counts at order k only if all its orders up to k are right.

        Stories of which an order up to k was not played stay out of `joint_order_k`, and those of
        which one is unscored have no value there.
        """
        stories = _by_story(records)
        joints = {f"joint_order_{k}": _joint(stories, k) for k in range(5)}
        return {name: joint for name, joint in joints.items() if joint.n}


def _joint(stories: Sequence[Mapping[int, float | None]], order: int) -> BatchMetric:
    """Over the plays of stories that asked every order up to `order`."""
    upto = range(order + 1)
    whole = [story for story in stories if all(k in story for k in upto)]
    return mean_of([_all_right([story[k] for k in upto]) for story in whole], "stories")


def _all_right(values: Sequence[float | None]) -> float | None:
    """1 or 0; None where one of the values is not there, whatever the others are."""
    return None if None in values else float(all(value == 1 for value in values))


def _by_story(records: Sequence[Record]) -> list[dict[int, float | None]]:
    """For each play of a story: order → the worst value among its questions of that order.

    None: one of these is unscored.
    """
    stories: dict[tuple[Any, ...], dict[int, float | None]] = defaultdict(dict)
    for record in drafts(records):
        if "order" not in record.tags:
            continue
        story = stories[record.cluster, record.kind, record.step, record.rollout]
        order, value = int(record.tags["order"]), record.score.value
        worst = story.get(order, value)
        story[order] = None if value is None or worst is None else min(value, worst)
    return list(stories.values())
