"""FANToM under `--protocol reference`: the published reading and scoring, word for word.

No row is refused for its gold, beliefs come with options only, and what an answer says is looked
for in it as text: `yes` and `no` by how it begins and by words between blanks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.judge.verdict import has_word, tagged_text
from soulkit.runs.records import drafts
from soulkit.tasks.fantom.task import (
    ASSENT,
    DENIAL,
    MARKS,
    AnswerForm,
    Fantom,
    gold_index,
    name_list,
)
from soulkit.types import Example, Record

_LETTER = re.compile(r"\(?([a-d])\)?\.?")


class FantomReference(Fantom):
    free_beliefs = False

    def check(self, fields: Mapping[str, Any], form: AnswerForm) -> None:
        """Every row is played."""

    def parse(self, text: str) -> tuple[str, str]:
        answer = tagged_text(text, "reference")
        return ("", "no_tag") if answer is None else (answer, "ok")

    def read(self, example: Example, text: str) -> tuple[str, str]:
        return self.parse(text)

    def counted(self, records: Sequence[Record]) -> list[float | None]:
        """All of them: the published mean holds the F1 of facts, too."""
        return [record.score.value for record in drafts(records)]

    def right(self, example: Example, form: AnswerForm, answer: str) -> bool:
        fields = example.fields
        return published_right(form, answer, fields["correct_answer"], fields.get("wrong_answer"))

    def _gold_names(self, gold: Any) -> list[str]:
        return name_list(gold)


def published_right(form: AnswerForm, answer: str, gold: Any, wrong: Any) -> bool:
    """The published rules, word for word as they decide."""
    if form == "choice":
        letter = _LETTER.fullmatch(answer.lower())
        return letter is not None and ord(letter.group(1)) - ord("a") == gold_index(gold)
    if form == "names":
        names = name_list(gold)
        right = bool(names) and all(has_word(answer, name) for name in names)
        return right and not any(has_word(answer, name) for name in name_list(wrong))
    text = answer.lower().strip(MARKS[2:])
    assent = text.startswith(ASSENT) or _holds(text, " yes,", " yes ", " yes.", " knows ")
    denial = text.startswith(DENIAL) or _holds(
        text, " no,", " no ", " no.", " does not know ", " doesn't know "
    )
    return {"yes": assent and not denial, "no": denial and not assent}.get(
        "no" if gold == "no:long" else str(gold), False
    )


def _holds(text: str, *parts: str) -> bool:
    return any(part in text for part in parts)
