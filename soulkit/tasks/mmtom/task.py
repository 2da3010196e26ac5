"""MMToM-QA, text only: which of two statements about a person at home is more likely.

Example row: {"question": "The flat has ... Olga opens the oven, shuts it and heads for the shelf.
Question: Suppose Olga wants the salmon. Which is likelier? (a) To her mind it lies on the shelf.
(b) To her mind it does not lie there. Answer with a or b.", "answer": "a", "question_type": 1.1,
"episode": 7}. Scene, question and options are one text. Types that begin with 1 ask for a belief,
those that begin with 2 for a goal.
"""

from __future__ import annotations

import re
from typing import Any

from soulkit.errors import DataError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import tagged_letter
from soulkit.tasks.choice import ChoiceTask
from soulkit.types import Episode, Example, Score

_OPTIONS = re.compile(r"\(a\)\s*(?P<a>.+?)\s*\(b\)\s*(?P<b>.+)", re.DOTALL | re.IGNORECASE)
_REQUEST = re.compile(r"(?:Please (?:respond|answer|reply)|Answer:)[^.]*\.?\s*\Z")

_NOT_READ = {
    "no_tag": "The reply gave no answer between the answer tags; close with one.",
    "malformed": "What stood between the tags was not one of the two letters; give one alone.",
    "empty": "The reply was empty; reason in a few sentences and then answer.",
    "truncated": "The reply was cut off before its answer; reason more briefly.",
    "refusal": "The question is about an everyday scene at home; give an answer.",
}
_ADVICE = {
    "1": "Go through the actions one by one. What somebody saw in an open container they know; "
    "whoever looks for a thing goes where they believe it to be, whether it is there or not, and "
    "does not trouble with places where they expect nothing.",
    "2": "Go through the actions one by one. Whoever opens a container and closes it again did not "
    "want what they saw in it; then ask which of the two wishes makes the last steps sensible, "
    "given what this person could know, not what you know.",
}


class MMToM(ChoiceTask):
    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        gold = str(fields.get("answer") or "").strip().lower()
        return {**fields, "answer": self.checked(gold)}

    def checked(self, gold: str) -> str:
        """The gold's letter; DataError when it is none."""
        letter = gold.strip("(). ")
        if letter in ("a", "b"):
            return letter
        raise DataError(
            f"The gold answer '{letter}' is neither a nor b.",
            "MMToM's questions have two options with these letters.",
            "Mend the row, or leave it out.",
        )

    def parse(self, text: str) -> tuple[str, str]:
        letter, status = tagged_letter(text, "paper")
        if letter in ("", "A", "B"):
            return letter.lower(), status
        return "", "malformed"

    def grade(self, example: Example, answer: str) -> float:
        return float(answer == self.gold_text(example))

    def gold_text(self, example: Example) -> str:
        return str(example.fields["answer"])

    def gold_completion(self, example: Example) -> str:
        return f"<answer>{self.gold_text(example)}</answer>"

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        kind = str(example.fields.get("question_type") or "")[:1]
        advice = _ADVICE.get(kind) or f"{_ADVICE['1']} {_ADVICE['2']}"
        if score is None:
            return advice
        if score.status in _NOT_READ:
            return f"{_NOT_READ[score.status]} {advice}"
        fits = "fits" if score.value == 1 else "does not fit"
        return f"The draft {fits} what this person did. {advice}"

    def leak_view(self, example: Example) -> LeakView:
        text = str(example.fields["question"])
        options = statements_of(text)
        gold = options.get(self.gold_text(example), self.gold_text(example))
        # The scene stays out: a blind reader must not see what the answer follows from.
        stem = text[: text.lower().rfind("(a)")].rpartition("Question:")[2] if options else ""
        letters = tuple(letter.upper() for letter in options)
        return LeakView(stem.strip(), tuple(options.values()), gold, letters)


def statements_of(question: str) -> dict[str, str]:
    """`a` and `b` → statement; empty when the text has no two options so marked."""
    start = question.lower().rfind("(a)")
    match = _OPTIONS.match(question, start) if start >= 0 else None
    if match is None:
        return {}
    return {"a": match["a"], "b": _REQUEST.sub("", match["b"]).strip()}
