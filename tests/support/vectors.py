"""Conformance vectors: JSON lines of input and expected output, one pytest case per line.

`load_vectors("train.loss", ...)` reads `<folder>/train.loss.jsonl`; the folder is
$SOULKIT_VECTORS or `tests/vectors`. A line whose family (`input.fn`, else `input.estimator`) is not
built, or whose quirk is one that soulkit deliberately differs on, becomes a skip with a reason
that the summary at the end of the run counts. Without the file the case is skipped, or, when
`vectors` is in $SOULKIT_REQUIRE, the collection fails.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NOT_BUILT = "not built: "
QUIRK = "quirk "
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
    note: str = ""
    quirks: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        return str(self.input.get("fn") or self.input.get("estimator") or "")

    @property
    def raises(self) -> bool:
        """The reference raised: the input has to be rejected."""
        return "error" in self.expected


def vectors_folder() -> Path:
    default = Path(__file__).parents[1] / "vectors"
    return Path(os.environ.get("SOULKIT_VECTORS") or default)


def load_vectors(
    name: str,
    *,
    fns: Set[str] | None = None,
    differ: Mapping[str, str] | None = None,
    formula: Set[str] = frozenset(),
) -> list[Any]:
    """The cases of `<name>.jsonl` as pytest params (each holds one Vector).

    `fns`: the families that are built, None for all. `differ`: quirk slug → why soulkit differs.
    `formula`: the families that no command runs: what is checked stands in a `reference.py`.
    """
    path = vectors_folder() / f"{name}.jsonl"
    if not path.is_file():
        return [_missing(path)]
    vectors = [_read(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    return [_param(v, fns, differ or {}, formula) for v in vectors if "fixture" not in v.quirks]


def assert_matches(
    actual: Any, expected: Any, *, rtol: float = 1e-9, atol: float = 1e-9, at: str = "result"
) -> None:
    """Deep comparison; numbers within tolerance, everything else exactly, keys and lengths too."""
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
    """`assert_matches` with the tolerances of training tensors of that dtype."""
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


def _read(line: str) -> Vector:
    raw = json.loads(line, object_hook=_float_object)
    quirks = tuple(q.strip() for q in raw.get("quirk", "").split(";") if q.strip())
    return Vector(raw["id"], raw["input"], raw["expected"], raw.get("note", ""), quirks)


def _param(
    vector: Vector, fns: Set[str] | None, differ: Mapping[str, str], formula: Set[str]
) -> Any:
    marks = [pytest.mark.vector]
    if vector.family in formula:
        marks.append(pytest.mark.formula)
    reasons = [f"{QUIRK}{q}: {differ[q]}" for q in vector.quirks if q in differ]
    if fns is not None and vector.family not in fns:
        reasons = [f"{NOT_BUILT}{vector.family}"]
    if reasons:
        marks.append(pytest.mark.skip(reason=reasons[0]))
    return pytest.param(vector, id=vector.id, marks=marks)


def _missing(path: Path) -> Any:
    reason = f"no conformance vectors at {path}"
    if "vectors" in os.environ.get("SOULKIT_REQUIRE", "").split(","):
        pytest.fail(reason, pytrace=False)
    return pytest.param(
        None, id="missing", marks=[pytest.mark.vector, pytest.mark.skip(reason=reason)]
    )
