"""The simulation of coverage: what it asks of a line, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def coverage(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; its parts lie beside it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = spec_from_file_location("coverage_benchmark", FOLDER / "coverage.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "coverage_benchmark", module)
    spec.loader.exec_module(module)
    return module


GOOD = {"part": "means", "kind": "k", "tool": "soulkit", "without": 0.0, "width": 0.2}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"clusters": 5, "coverage": 0.929}, "less than 0.93"),
        ({"clusters": 5, "coverage": 0.93}, ""),
        ({"clusters": 3, "coverage": 0.5}, ""),
        ({"clusters": 5, "coverage": 0.91, "events": 29.9}, ""),
        ({"clusters": 5, "coverage": 0.909, "events": 29.9}, "less than 0.91"),
        ({"clusters": 5, "coverage": 0.929, "events": 30.0}, "less than 0.93"),
        ({"clusters": 10, "coverage": 0.9951}, "more than 0.995"),
        ({"clusters": 8, "coverage": 1.0}, ""),
        ({"clusters": 20, "coverage": 0.9299, "exclusion": 0.0701}, "leaves zero out in 0.070"),
        ({"clusters": 20, "coverage": 0.95, "against": 1.16}, "1.16 times as wide"),
        ({"clusters": 20, "coverage": 0.95, "against": 1.15}, ""),
        ({"clusters": 20, "coverage": float("nan")}, "gives no interval"),
        ({"clusters": 10, "coverage": 0.999, "unheld": True}, ""),
        ({"clusters": 10, "coverage": 0.999, "rare": True}, ""),
        ({"clusters": 10, "coverage": 0.929, "rare": True}, "less than 0.93"),
        ({"clusters": 20, "coverage": 0.85, "warned": True}, ""),
        ({"clusters": 20, "coverage": 0.849, "warned": True}, "less than 0.85"),
    ],
)
def test_the_bounds_are_those_that_the_docs_name(
    coverage: ModuleType, line: dict[str, Any], words: str
) -> None:
    broken = coverage.broken_bounds(coverage.Line(**GOOD, **line))
    assert any(words in text for text in broken) if words else broken == []


def test_an_interval_that_misses_is_counted_as_one(coverage: ModuleType) -> None:
    ends = [(0.0, 1.0), (0.6, 1.0), (None, None), (0.5, 0.7)]
    line = coverage.line_of("means", "k", "soulkit", 5, 0.5, ends)
    assert line.coverage == pytest.approx(2 / 3) and line.without == 0.25
    assert line.width == pytest.approx(0.4) and line.exclusion is None
    assert coverage.line_of("d", "k", "soulkit", 5, 0.0, ends).exclusion == pytest.approx(2 / 3)


@pytest.mark.slow
def test_it_runs_and_shows_every_part(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / "coverage.py", "--quick", "--out", tmp_path / "lines.json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = json.loads((tmp_path / "lines.json").read_text())
    parts = {"means", "differences", "gaps", "suites", "parts", "batch", "retention"}
    assert {line["part"] for line in lines} == parts
    tools = {line["tool"] for line in lines if line["part"] == "means"}
    assert tools >= {"soulkit", "scipy percentile", "scipy BCa", "inspect_ai clustered", "lm-eval"}
    assert "scipy" in done.stdout and "| gaps | 2 | 5 | 20 |" in done.stdout
