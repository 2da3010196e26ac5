"""Questions with lettered options, where one letter is right.

Rows of such tasks name the same two things in several ways: options as a mapping from letters, as a
list in order, or as the JSON text of either; the gold as a letter or a place in the list. A task
brings both into one form with `read_options` and `gold_error`, and this class does the rest.

Example (after `prepare`): {"options": {"A": "the attic", "B": "the barn"}, "correct_letter": "B"}.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from soulkit.data.literals import item_text, read_literal
from soulkit.errors import DataError
from soulkit.judge.leaks import LeakView, check_leak
from soulkit.judge.verdict import spoken, tagged_letter
from soulkit.tasks.base import READABLE
from soulkit.tasks.choice import ChoiceTask
from soulkit.types import Episode, Example, Feedback, Score

LETTERS = ("A", "B", "C", "D")
_TAGGED = re.compile(r"<answer>\s*([A-D])\s*</answer>", re.IGNORECASE)
_ABSENT = ("", "nan", "NaN")  # `Nan` is a name


class LetteredTask(ChoiceTask):
    """One of the letters A to D in the answer tag."""

    question_column = "question"
    """What a blind reader of feedback is told that the options are about."""
    hears_thinking = False
    """Under `reference`: whether an answer inside of thinking counts."""

    def options(self, example: Example) -> Mapping[str, str]:
        """Letter → text of the option."""
        options: Mapping[str, str] = example.fields["options"]
        return options

    def gold_letter(self, example: Example) -> str:
        """The right letter; empty where a row names none."""
        return str(example.fields.get("correct_letter") or "")

    def parse(self, text: str) -> tuple[str, str]:
        if self.protocol == "reference":
            match = _TAGGED.search(text if self.hears_thinking else spoken(text, "reference"))
            return (match.group(1).upper(), "ok") if match else ("", "no_tag")
        letter, status = tagged_letter(text, "paper")
        if not letter or letter in LETTERS:
            return letter, status
        return "", "malformed"

    def grade(self, example: Example, answer: str) -> float:
        return float(bool(answer) and answer == self.gold_letter(example))

    def gold_text(self, example: Example) -> str:
        return self.options(example).get(self.gold_letter(example), "")

    def gold_completion(self, example: Example) -> str:
        return f"<answer>{self.gold_letter(example)}</answer>"

    def leak_view(self, example: Example) -> LeakView:
        options = self.options(example)
        question = str(example.fields.get(self.question_column) or "")
        return LeakView(question, tuple(options.values()), self.gold_text(example), tuple(options))

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        """Long fields are cut for a model coach as they are for the actor."""
        view, _ = self.within_budget(super().coach_view(example, episode, score))
        return view

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """The first lesson that helps nobody who has not read the row; None when all would."""
        view = self.leak_view(example)
        for text in self.lessons(example, score):
            if not check_leak(Feedback(text=text, author="symbolic"), view).leak:
                return text
        return None

    @abstractmethod
    def lessons(self, example: Example, score: Score | None) -> Iterable[str]:
        """What could be said about a draft (None: before one), best first."""


def read_options(mapping: Any, listed: Any) -> dict[str, str]:
    """Letter → text, from a mapping from letters, else from a list in order; {} when there is none.

    Either may be JSON text. What a gap left behind (None, NaN, blank) is no option. Raises
    DataError when a value is neither form, or an option no text.
    """
    by_letter, in_order = _structure_of(mapping, Mapping), _structure_of(listed, list)
    pairs = (
        [(str(letter).strip().upper(), text) for letter, text in by_letter.items()]
        if by_letter
        else list(zip(LETTERS, in_order or (), strict=False))
    )
    texts = {k: item_text(v, "options") for k, v in pairs if v is not None and k in LETTERS}
    return {letter: texts[letter] for letter in sorted(texts) if texts[letter] not in _ABSENT}


def _structure_of(value: Any, kind: type[Any]) -> Any:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    structure = value
    if isinstance(value, str):
        try:
            structure = read_literal(value)
        except ValueError as error:
            raise _unreadable(value) from error
    structure = list(structure) if isinstance(structure, tuple) else structure
    if not isinstance(structure, kind):
        raise _unreadable(value)
    return structure


def _unreadable(value: Any) -> DataError:
    return DataError(
        "The row's options cannot be read.",
        f"They are {type(value).__name__} {value!r:.60}, neither a mapping from letters nor a list "
        "in order.",
        "Mend the row, or leave it out.",
    )


def gold_error(letter: str, options: Mapping[str, str]) -> DataError | None:
    """Why a row cannot be answered: fewer than two options, or a gold that is none of them."""
    if len(options) < 2:
        what, why = "The row has fewer than two options.", "There is nothing to choose between."
    elif letter not in options:
        what = f"The gold answer '{letter}' is none of the row's options."
        why = f"Its options are {', '.join(options)}."
    else:
        return None
    return DataError(what, why, "Mend the row, or leave it out.")


def read_state(score: Score | None) -> str:
    """How a draft went: `none` (there is none), `right`, `wrong`, or why it could not be read."""
    if score is None:
        return "none"
    if score.status not in READABLE:
        return score.status
    return "right" if score.value == 1 else "wrong"


UNREAD_OPENINGS = {
    "no_tag": "The draft reasoned but never put its choice between the answer tags.",
    "malformed": "The draft put something other than one letter between the answer tags.",
    "empty": "The draft said nothing.",
    "truncated": "The draft ran out of room before it answered; reason in fewer words.",
    "refusal": "The draft declined; picking among given options is all that is asked.",
}
"""What is said first about a draft that could not be read."""


def opening(state: str, right: str, wrong: str, unread: Mapping[str, str] = UNREAD_OPENINGS) -> str:
    """The first sentence of a lesson, by how the draft went; empty without a draft."""
    return {"none": "", "right": right, "wrong": wrong, **unread}.get(state, wrong)
