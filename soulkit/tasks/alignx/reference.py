"""AlignX under `--protocol reference`: one order a row, drawn from the row's index.

Equal replies are played, items on the row's own post are shown, and only a capital letter alone
between the tags is an answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from soulkit.judge.verdict import spoken
from soulkit.tasks.alignx.task import AlignX, check_texts, items_of
from soulkit.types import Example

_TAGGED = re.compile(r"<answer>\s*([AB])\s*</answer>")


class AlignXReference(AlignX):
    def examples(
        self, row: Mapping[str, Any], *, source: str = "", split: str = "test"
    ) -> tuple[Example, ...]:
        return (self.example(row, source=source, split=split),)

    def check(self, fields: Mapping[str, Any]) -> None:
        check_texts(fields)

    def _shown(
        self, fields: Mapping[str, Any], column: str, count: int
    ) -> tuple[dict[str, str], ...]:
        return items_of(fields, column, count)

    def drawn(self, fields: Mapping[str, Any]) -> bool:
        return random.Random(int(fields.get("index") or 0)).random() < 0.5

    def parse(self, text: str) -> tuple[str, str]:
        match = _TAGGED.search(spoken(text, "reference"))
        return (match.group(1), "ok") if match else ("", "no_tag")
