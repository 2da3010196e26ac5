"""Conformance vectors: JSON lines of input and expected output, one test case per family of lines.

    @conformance("coser.parse", formula={"parse_json"})
    def test_parse(vector: Vector) -> None: ...

This runs the test for every line of `<folder>/coser.parse.jsonl` and names all lines that fail; the
folder is $SOULKIT_VECTORS or `tests/vectors`. A line with a quirk in which soulkit deliberately
differs is skipped with a reason. The summary at the end of a run counts lines, not cases. If the
file is missing, the case is skipped; if `vectors` is in $SOULKIT_REQUIRE, collection fails.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TENSOR_RTOL = {"float64": 1e-6, "float32": 1e-5}
TENSOR_ATOL = 1e-6

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SCRIPTED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class Vector:
    """One line. `expected` keeps non-finite numbers as strings; `assert_matches` reads them."""

    id: str
    input: Mapping[str, Any]
    expected: Mapping[str, Any]
    file: str
    note: str = ""
    quirks: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        return str(self.input.get("fn") or self.input.get("estimator") or "")

    @property
    def raises(self) -> bool:
        """Whether the reference raised, so that soulkit must reject the input."""
        return "error" in self.expected


def vectors_folder() -> Path:
    default = Path(__file__).parents[1] / "vectors"
    return Path(os.environ.get("SOULKIT_VECTORS") or default)


Check = Callable[[Vector], None]
NOTHING: Mapping[str, str] = {}


def conformance(
    *files: str,
    fns: Set[str] | None = None,
    built: Set[str] | None = None,
    differ: Mapping[str, str] = NOTHING,
    formula: Set[str] = frozenset(),
) -> Callable[[Check], Callable[..., None]]:
    """Turn a check of one line into a test of all lines of these files, one case per family.

    `fns`: use only these families. `built`: skip other families as not built. `differ`: quirk slug
    → why soulkit differs. `formula`: families that no command runs; a `reference.py` has their
    code.
    """
    families = [family for file in files for family in _families(file, fns)]

    def decorate(check: Check) -> Callable[..., None]:
        @pytest.mark.parametrize("lines", families)
        def test(lines: list[Vector], record_property: Callable[[str, object], None]) -> None:
            outcomes, failures = Counter[str](), []
            family = lines[0].family
            missing = [f"not built: {family}"] if built is not None and family not in built else []
            for vector in lines:
                quirks = [f"quirk {q}: {differ[q]}" for q in vector.quirks if q in differ]
                reasons = missing or quirks
                try:
                    if reasons:
                        pytest.skip(reasons[0])
                    check(vector)
                    outcomes["passed"] += 1
                except pytest.skip.Exception as skipped:
                    outcomes[f"skipped: {skipped}"] += 1
                except Exception as error:  # noqa: BLE001 (all are raised together below)
                    error.add_note(f"{vector.id}: {vector.note}")
                    failures.append(error)
                    outcomes["failed"] += 1
            kind = "formulas" if family in formula else "commands"
            record_property(kind, dict(outcomes))
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(lines)} lines", failures)

        test.__doc__ = check.__doc__
        return test

    return decorate


def _families(file: str, fns: Set[str] | None) -> list[Any]:
    """The lines of a file by family, as parameters of a test."""
    path = vectors_folder() / f"{file}.jsonl"
    if not path.is_file():
        return [_missing(path)]
    families: dict[str, list[Vector]] = defaultdict(list)
    for line in path.read_text("utf-8").splitlines():
        vector = _read(line, file) if line.strip() else None
        if vector and "fixture" not in vector.quirks and (fns is None or vector.family in fns):
            families[vector.family].append(vector)
    return [pytest.param(lines, id=f"{file}-{name}") for name, lines in families.items()]


def assert_matches(
    actual: Any, expected: Any, *, rtol: float = 1e-9, atol: float = 1e-9, at: str = "result"
) -> None:
    """Deep comparison: numbers within a tolerance, everything else exactly."""
    if isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), f"{at}: {actual!r} is no mapping"
        assert set(actual) == set(expected), f"{at}: keys {set(actual) ^ set(expected)} differ"
        for key, value in expected.items():
            assert_matches(actual[key], value, rtol=rtol, atol=atol, at=f"{at}.{key}")
    elif isinstance(expected, list):
        assert isinstance(actual, Sequence) and not isinstance(actual, str), f"{at}: {actual!r}"
        assert len(actual) == len(expected), f"{at}: {len(actual)} items, not {len(expected)}"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_matches(a, e, rtol=rtol, atol=atol, at=f"{at}[{i}]")
    elif _is_number(actual) and (_is_number(expected) or expected in _NON_FINITE):
        number = _NON_FINITE.get(expected, expected)
        assert _close(actual, number, rtol, atol), f"{at}: {actual!r} is not {expected!r}"
    else:
        same = type(actual) is type(expected) and actual == expected
        assert same, f"{at}: {actual!r} is not {expected!r}"


def assert_tensor(actual: Any, expected: Any, dtype: str, at: str = "result") -> None:
    """`assert_matches` with the tolerances for training tensors of this dtype."""
    actual = actual.tolist() if hasattr(actual, "tolist") else actual
    assert_matches(actual, expected, rtol=TENSOR_RTOL[dtype], atol=TENSOR_ATOL, at=at)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _close(actual: float, expected: float, rtol: float, atol: float) -> bool:
    if math.isnan(expected):
        return math.isnan(actual)
    if math.isinf(expected) or math.isinf(actual):
        return actual == expected
    return abs(actual - expected) <= max(rtol * abs(expected), atol)


def _float_object(item: dict[str, Any]) -> Any:
    return _SCRIPTED[item["__float__"]] if set(item) == {"__float__"} else item


def _read(line: str, file: str) -> Vector:
    raw = json.loads(line, object_hook=_float_object)
    quirks = tuple(q.strip() for q in raw.get("quirk", "").split(";") if q.strip())
    return Vector(raw["id"], raw["input"], raw["expected"], file, raw.get("note", ""), quirks)


def _missing(path: Path) -> Any:
    reason = f"no conformance vectors at {path}"
    if "vectors" in os.environ.get("SOULKIT_REQUIRE", "").split(","):
        pytest.fail(reason, pytrace=False)
    return pytest.param([], id="missing", marks=pytest.mark.skip(reason=reason))
