"""The answer scale that a survey question states in its own words.

    "Only return an integer from 1 to 7, where 1 means Never and 7 means Always." → 1 to 7, ordinal
    "Only return 1 for Rent, 2 for Own, or 3 for Neither."                     → 1 to 3, categorical

A scale whose every point has a name is read as a list of options, on which an answer is right or
wrong and never near; a scale that names its ends alone is ordinal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ScaleKind = Literal["ordinal", "binary", "categorical"]

_SIGNED = r"[-\u2212]?\d+"
_RANGE = re.compile(rf"\bfrom\s+({_SIGNED})(?:\s*\([^()]*\))?\s+to\s+({_SIGNED})(?!\d)")
_POINT = re.compile(rf"(?<![\d$.,])({_SIGNED})\s+(?:for|means|corresponds to|=)\s")
_NAMEABLE = 20
"""Scales with more steps than this are never lists of names."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Lowest and highest point, and how answers on it compare."""

    low: int
    high: int
    kind: ScaleKind


def read_scale(text: str) -> Scale | None:
    """The scale of the last request to *return* something, else the last range in the text.

    None when the text states none (an amount of money, say).
    """
    request = max(text.rfind("return"), text.rfind("Return"))
    scale = _requested(text[request:]) if request >= 0 else None
    ranges = _RANGE.findall(text)
    if scale is None and ranges:
        low, high = ranges[-1]
        scale = _scale(_int(low), _int(high), set())
    return scale


def _requested(text: str) -> Scale | None:
    points = {_int(point) for point in _POINT.findall(text)}
    spread = _RANGE.search(text)
    if spread is not None:
        return _scale(_int(spread[1]), _int(spread[2]), points)
    return _scale(min(points), max(points), points) if len(points) > 1 else None


def _scale(low: int, high: int, named: set[int]) -> Scale | None:
    if high <= low:
        return None
    if high - low > _NAMEABLE or not named.issuperset(range(low, high + 1)):
        return Scale(low, high, "ordinal")
    return Scale(low, high, "binary" if (low, high) == (0, 1) else "categorical")


def _int(text: str) -> int:
    return int(text.replace("\u2212", "-"))
