"""ToMi, ParaToMi and Hi-ToM: where an object is, was, or is believed to be.

The answer in ToMi and ParaToMi is the name of a place. The candidates are for scoring and the leak
check; ParaToMi shows them to the actor, ToMi does not. Hi-ToM asks where a chain of people believes
an object is and offers fifteen lettered options; its gold is an option's text, so order is free.

    tomi   {"story": "1 Ada entered the attic. ...", "question": "Where will Ada look for the
            apple?", "answer": "box", "cands": ["bag", "box"], "question_type": "first_order_tom"}
    hitom  {"story": "1 Ada, Ben entered the attic. ...", "question": "Where does Ada really
            think the apple is?", "choices": "A. red_box, B. blue_bag, ...",
            "correct_answer": "red_box", "question_order": 1, "deception": false, "story_length": 1}
"""

from __future__ import annotations

import random
import string
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.data.literals import parse_candidates, parse_choices, parse_story
from soulkit.errors import RowError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import has_word, named_options, plain
from soulkit.runs.records import drafts
from soulkit.tasks.kit.choice import ANY_LETTER, ChoiceTask, LetteredTask
from soulkit.tasks.kit.scoring import mean_of
from soulkit.tasks.tom.events import read_question
from soulkit.tasks.tom.explain import explain
from soulkit.types import BatchMetric, Episode, Example, Record, Score


class PlaceTask(ChoiceTask):
    """A place in the answer tag; right if it names the gold and no other candidate."""

    answer_column = "answer"
    rules = "tomi"
    """The rules of the symbolic coach: `tomi` or `paratomi`, also in derived tasks."""

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        cands = parse_candidates(fields.get("cands"), self.protocol)
        return {**fields, "cands": tuple(cands)}

    def grade(self, example: Example, answer: str) -> float:
        gold = self.gold_text(example)
        if self.protocol == "paper":
            return float(named_options(answer, self._options(example)) == {plain(gold)})
        others = [c for c in example.fields["cands"] if c != gold]
        right = bool(gold) and has_word(answer, gold)
        return float(right and not any(has_word(answer, other) for other in others))

    def _options(self, example: Example) -> tuple[str, ...]:
        """The distinct candidates, including the gold."""
        places = {plain(c): c for c in (*example.fields["cands"], self.gold_text(example))}
        return tuple(places.values())

    def gold_text(self, example: Example) -> str:
        return str(example.fields[self.answer_column])

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        answer = self._place(example, score.words) if score else None
        return explain(self.rules, example.fields, answer, terse=score is None)

    def _place(self, example: Example, answer: str) -> str | None:
        """The place that an answer names; the answer itself if it names none, None if several."""
        places = named_options(answer, self._options(example))
        return next(iter(places)) if len(places) == 1 else None if places else answer

    def rehearse(self, example: Example, rng: random.Random) -> str | None:
        """Feedback on an invented draft that names one of the candidates."""
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
            cands, gold = prepared["cands"], str(fields["correct_answer"])
            if cands and plain(gold) not in map(plain, cands):
                what = f"The gold answer '{gold:.40}' is not one of the row's candidates."
                raise RowError(what, "No candidate would be a right answer.")
        question = read_question(str(fields["question"]))
        if prepared.get("order") is None and question is not None:
            prepared["order"] = question.order
        return prepared


class HiToM(LetteredTask):
    letters, published = string.ascii_uppercase, ANY_LETTER
    coach_view = ChoiceTask.coach_view

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        gold = str(fields["correct_answer"]).strip()
        if self.protocol == "paper" and gold not in self._options(fields).values():
            what = f"The gold answer '{gold}' is not one of the row's choices."
            raise RowError(what, "Hi-ToM's gold must be the text of an option.")
        return fields

    def options(self, example: Example) -> dict[str, str]:
        return self._options(example.fields)

    def _options(self, fields: Mapping[str, Any]) -> dict[str, str]:
        parsed = parse_choices(str(fields["choices"]), self.protocol)
        return {letter: text.strip() for letter, text in parsed.items()}

    def grade(self, example: Example, answer: str) -> float:
        return float(self.options(example).get(answer) == self.gold_text(example))

    def gold_text(self, example: Example) -> str:
        return str(example.fields["correct_answer"]).strip()

    def gold_letter(self, example: Example) -> str:
        gold = self.gold_text(example)
        return next(letter for letter, text in self.options(example).items() if text == gold)

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        answer = self.options(example).get(score.words) if score else None
        return explain("hitom", example.fields, answer, terse=score is None)

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """Joint accuracy: a story counts at order k only if all its orders up to k are right.

        Stories with an unplayed order up to k are left out of `joint_order_k`; those with an
        unscored one have no value there.
        """
        stories = _by_story(records)
        joints = {f"joint_order_{k}": _joint(stories, k) for k in range(5)}
        return {name: joint for name, joint in joints.items() if joint.n}


def _joint(stories: Sequence[Mapping[int, float | None]], order: int) -> BatchMetric:
    """Over the plays of stories with all orders up to `order`."""
    upto = range(order + 1)
    complete = [story for story in stories if all(k in story for k in upto)]
    return mean_of([_all_right([story[k] for k in upto]) for story in complete], "stories")


def _all_right(values: Sequence[float | None]) -> float | None:
    """1 or 0; None if any value is missing."""
    return None if None in values else float(all(value == 1 for value in values))


def _by_story(records: Sequence[Record]) -> list[dict[int, float | None]]:
    """For each play of a story: order → the lowest value among its questions of that order.

    None: one of these questions is unscored.
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
