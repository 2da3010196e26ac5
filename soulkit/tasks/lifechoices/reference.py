"""LifeChoices under `--protocol reference`: every row, and letters from anywhere in a reply."""

from __future__ import annotations

import re
from collections.abc import Sequence

from soulkit.judge.verdict import spoken
from soulkit.tasks.lifechoices.task import LifeChoices

_LADDER = tuple(
    re.compile(pattern)
    for pattern in (
        r"\A([ABCD])\Z",
        r"<ANSWER>\s*([ABCD])\s*</ANSWER>",
        r"\A([ABCD])\s*[.):,]",
        r"CHOICE[:\s]+([ABCD])",
        r"ANSWER[:\s]+([ABCD])",
        r"\(([ABCD])\)",
        r"([ABCD])\s*\Z",
        r"([ABCD])",
    )
)
_TAG = 1
"""Which step of the ladder is the form asked for."""


class LifeChoicesReference(LifeChoices):
    def checked(self, question: str, options: Sequence[str], gold: str) -> str:
        """The first character of the gold, whatever it is."""
        return gold.strip().upper()[:1]

    def parse(self, text: str) -> tuple[str, str]:
        return climb(spoken(text, "reference"))


def climb(text: str) -> tuple[str, str]:
    """(letter or "", status) by the published ladder: the first step that finds a letter decides.

    The text is upper-cased first, so later steps find letters in ordinary words.
    """
    upper = text.strip().upper()
    for number, step in enumerate(_LADDER):
        if match := step.search(upper):
            return match.group(1), "ok" if number == _TAG else "salvaged"
    return "", "no_tag"
