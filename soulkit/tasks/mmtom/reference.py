"""MMToM-QA under `--protocol reference`: any gold, and one exact form of an answer."""

from __future__ import annotations

import re

from soulkit.judge.verdict import spoken
from soulkit.tasks.mmtom.task import MMToM
from soulkit.types import Example

_TAGGED = re.compile(r"<answer>\s*([ab])\s*</answer>", re.IGNORECASE)


class MMToMReference(MMToM):
    def checked(self, gold: str) -> str:
        return gold

    def parse(self, text: str) -> tuple[str, str]:
        match = _TAGGED.search(spoken(text, "reference"))
        return (match[1].lower(), "ok") if match else ("", "no_tag")

    def read(self, example: Example, text: str) -> tuple[str, str]:
        """A row without gold is right when nothing could be read: the published scorer compares
        before it asks whether there is anything to compare."""
        answer, status = self.parse(text)
        return ("", "ok") if not answer and not self.gold_text(example) else (answer, status)
