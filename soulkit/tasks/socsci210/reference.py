"""SocSci210 under `--protocol reference`: read strictly; what is off the scale moves onto it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from soulkit.judge.verdict import tagged_text
from soulkit.tasks.socsci210.task import SocSci210, scale_of
from soulkit.types import Example


class SocSci210Reference(SocSci210):
    loosely = False

    def check(self, fields: Mapping[str, Any]) -> None:
        """A recorded answer off the scale is played, too."""

    def stated(self, text: str) -> None:
        """A row's own columns, or the usual numbers: no question is read."""

    def parse(self, text: str) -> tuple[str, str]:
        inside = tagged_text(text, "reference")
        return ("", "no_tag") if inside is None else read_strictly(inside)

    def read(self, example: Example, text: str) -> tuple[str, str]:
        """`yes` is 1 and `no` is 0 on any scale of two."""
        answer, status = self.parse(text)
        if answer not in ("yes", "no"):
            return answer, status
        binary = scale_of(example.fields)[0] == "binary"
        return (str(int(answer == "yes")), status) if binary else ("", "malformed")

    def recorded(self, gold: float) -> float:
        return math.trunc(gold)


def read_strictly(inside: str) -> tuple[str, str]:
    if re.fullmatch(r"-?\d+", inside):
        return inside, "ok"
    # The published reader takes every casing of the two words, and whatever is no plain "yes"
    # (a long s folds to s) counts as no.
    if re.fullmatch(r"yes|no", inside, re.IGNORECASE):
        return ("yes" if inside.lower() == "yes" else "no"), "ok"
    return "", "malformed"
