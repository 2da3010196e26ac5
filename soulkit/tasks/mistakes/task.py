"""MISTAKES: which wrong option a student with a certain misconception picks (school mathematics).

Example row: {"QuestionText": "What is 1/2 + 1/3?", "AnswerAText": "2/5", "AnswerBText": "5/6",
"AnswerCText": "1/6", "AnswerDText": "2/6", "MisconceptionName": "Adds numerators and adds
denominators", "TargetOption": "A", "TargetAnswer": "2/5", "CorrectAnswer": "B"}. The right answer
to the problem is wrong here; where a row names it, `picked_correct` tells how often a model solves
the problem instead of playing the student, and `picked_other` how often it errs in another way.

Feedback is a lesson in `mistakes`; `mistakes_worked`, the same rows under a name of its own, gives
the student's line of thought instead, which ends in the answer (`feedback: {kind:
worked_example}`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from soulkit.errors import RowError
from soulkit.judge.leaks import LeakView
from soulkit.runs.records import drafts
from soulkit.tasks.kit.base import READABLE
from soulkit.tasks.kit.choice import (
    CLOSE,
    LETTERS,
    WorkedTask,
    bad_gold,
    led_letter,
    opening,
    read_state,
)
from soulkit.types import BatchMetric, Example, Record, Score


class Mistakes(WorkedTask):
    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        target = str(fields.get("TargetOption") or "").strip().upper()
        right = led_letter(str(fields.get("CorrectAnswer") or ""), "ABCD")
        if self.protocol == "paper":
            target = self._checked(fields, target, right)
        return {**fields, "TargetOption": target, "CorrectAnswer": right or None}

    def _checked(self, fields: Mapping[str, Any], target: str, right: str) -> str:
        """The target's letter; DataError when no wrong option of the row can be the answer."""
        options = row_options(fields)
        letter = led_letter(target, "ABCD")
        if letter not in options:
            raise bad_gold(target, "the letter of an option that the row has")
        if letter == right:
            what = f"The option '{letter}' of a row of mistakes is target and right answer at once."
            raise RowError(what, "A misconception leads to a wrong option.")
        return letter

    def options(self, example: Example) -> dict[str, str]:
        return row_options(example.fields)

    def gold_letter(self, example: Example) -> str:
        return str(example.fields["TargetOption"])

    def gold_text(self, example: Example) -> str:
        letter = self.gold_letter(example)
        text = str(example.fields.get("TargetAnswer") or letter)
        return self.options(example).get(letter, text)

    def leak_view(self, example: Example) -> LeakView:
        options, gold = self.options(example), self.gold_text(example)
        question = str(example.fields["QuestionText"])
        return LeakView(question, tuple(options.values()), gold, tuple(options))

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        right = example.fields.get("CorrectAnswer")
        if right is None:
            return {"picked_correct": None, "picked_other": None}
        other = answer not in ("", right, self.gold_letter(example))
        return {"picked_correct": float(answer == right), "picked_other": float(other)}

    # -- feedback -----------------------------------------------------------------------------

    def worked_example(self, example: Example) -> str:
        idea = str(example.fields["MisconceptionName"]).strip().rstrip(".")
        return (
            f'The student goes by one idea, "{idea}", and working it through arrives at '
            f"{self.gold_text(example)}. {self.gold_completion(example)}"
        )

    def lessons(self, example: Example, score: Score | None) -> Iterable[str]:
        lead, texts = self._remark(example, score)
        yield from (f"{lead} {text}".strip() for text in texts)
        yield CLOSE

    def _remark(self, example: Example, score: Score | None) -> tuple[str, tuple[str, ...]]:
        """(first sentence by how the draft went, wordings of the rest)."""
        right = example.fields.get("CorrectAnswer")
        if read_state(score) == "wrong" and score is not None and right is not None:
            if score.words == right:
                return "The draft solved the problem, as this student cannot.", (_OBEY, _SHORT)
            return "The draft erred, though by another route than this student.", (_SINGLE, _SHORT)
        lead = opening(
            read_state(score), "The draft thought as this student does.",
            "The draft did not think as this student does.",
        )  # fmt: skip
        return lead, (_OBEY, _SHORT)

    # -- batches ------------------------------------------------------------------------------

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """The distractor matrix: `picked_B_for_A` is how often B was picked where A was meant.

        `picked_none_for_A` counts replies without a readable letter; each target's shares sum to 1.
        Each counts the rows that mean its target; unscored replies have no share.
        """
        rows: Counter[str] = Counter()
        picks: dict[str, Counter[str]] = defaultdict(Counter)
        for record in drafts(records):
            target = record.tags.get("target")
            if not target:
                continue
            rows[target] += 1
            if record.score.scored:
                read = record.score.status in READABLE and record.score.words in LETTERS
                picks[target][record.score.words if read else "none"] += 1
        return {
            f"picked_{pick}_for_{target}": BatchMetric(
                value=counts[pick] / counts.total(), n=rows[target], n_scored=counts.total(),
                unit="rows", low=0.0, high=1.0,
            )
            for target, counts in sorted(picks.items())
            for pick in (*LETTERS, "none")
        }  # fmt: skip


_OBEY = (
    "Put what you know aside: write the calculation down line by line as the stated idea demands, "
    "without repairing any step, and only then look which option is closest."
)
_SINGLE = (
    "Break just the rule that the stated idea breaks and keep every other step sound; then compare "
    "with what is offered."
)
_SHORT = "Follow the stated idea literally, step by step, before looking at what is offered."


def row_options(fields: Mapping[str, Any]) -> dict[str, str]:
    """Letter → text of the options that a row has; letters go by column, so gaps shift nothing."""
    texts = {letter: str(fields.get(f"Answer{letter}Text") or "").strip() for letter in LETTERS}
    return {letter: text for letter, text in texts.items() if text}
