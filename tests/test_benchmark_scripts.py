"""Tests of the scripts in `benchmarks/`: every package name that they import exists.

The benchmark of the demo runs, resumes unfinished parts, and reports finished ones.

The example on stories gives the figures that its README shows.

The coverage simulation checks its bounds and runs.

The benchmark of teaching facts without forgetting runs and resumes.

The benchmarks of sampling engines and of servers run at a small size, and the engines agree.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from soulkit.data.files import read_rows
from soulkit.runs.jsonl import read_jsonl
from soulkit.tasks.kit.registry import load_registry

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    (*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples" / "tomi_ditto").glob("*.py"))
)


def imports_of_the_package(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import from soulkit, anywhere in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("soulkit"):
            yield from ((node.module or "", alias.name) for alias in node.names)


def is_there(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name) or bool(import_module(f"{module}.{name}"))
    except ImportError:
        return False


@pytest.mark.torch
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_a_benchmark_imports_is_there(path: Path) -> None:
    missing = [
        f"{module}.{name}"
        for module, name in imports_of_the_package(path)
        if not is_there(module, name)
    ]
    assert missing == []


@pytest.mark.torch
def test_what_the_distillation_holds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/benchmarks.md says: new combinations of cues, secrets known under other names."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    distill = import_module("distill")
    size = distill.Size(experts=dict.fromkeys((distill.KEEPER, distill.CAST), 0))
    world = distill.World(tmp_path, seed=0, size=size)
    world.write_rows()
    registry = load_registry(world.tasks_file)
    clusters: dict[tuple[str, str], set[str]] = {}
    for name in (distill.CAST, distill.KEEPER):
        task = registry.task(name)
        for split in ("train", "test"):
            examples = [task.example(row.fields) for row in read_rows(world.rows(name, split))[0]]
            clusters[name, split] = {example.cluster for example in examples}
    assert len(clusters[distill.CAST, "test"]) == 26
    assert not clusters[distill.CAST, "train"] & clusters[distill.CAST, "test"]
    assert len(clusters[distill.KEEPER, "test"]) == 60
    assert clusters[distill.KEEPER, "test"] <= clusters[distill.KEEPER, "train"]
    # The duplicate gates are the defaults of `soul distill`.
    assert "near" not in distill.DISTILLED


def script(path: str, *options: object) -> str:
    """Stdout of a script."""
    done = subprocess.run(
        [sys.executable, str(ROOT / path), *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.torch
def test_the_seeds_of_the_demo_run_and_the_second_call_repeats_nothing(tmp_path: Path) -> None:
    small = ("--seeds", 1, "--first-seed", 3, "--steps", 1, "--out", tmp_path / "seeds")
    first = script("benchmarks/demo.py", *small)
    metrics = tmp_path / "seeds" / "seed3" / "dense" / "metrics.jsonl"
    (step,), lines = read_jsonl(metrics), metrics.read_bytes()
    assert step["rollouts/draft"] == 1024
    # Two or three words in ten are right by chance, and each is rewarded.
    assert 0.1 < step["reward/draft"] < 0.35
    for label in ("before training", "Ditto", "Ditto, shuffled feedback", "GRPO, same reward",
                  "GRPO, reward for every right word"):  # fmt: skip
        assert re.search(rf"^\| {label} \| \d\.\d{{3}}[^|]* \| 0 of 1 \|", first, re.MULTILINE)
    assert re.search(r"^\| 3 \|( \d\.\d{3} \[[^|]*\] \|){5}$", first, re.MULTILINE)
    again = script("benchmarks/demo.py", *small)
    assert "processor time" not in again and again in first
    assert metrics.read_bytes() == lines
    figure = tmp_path / "demo.svg"
    script("benchmarks/demo.py", "--report", tmp_path / "seeds", "--figure", figure)
    drawn = ElementTree.fromstring(figure.read_text("utf-8"))
    lines = drawn.findall("{http://www.w3.org/2000/svg}path")
    assert len(lines) == 8 and "prefers-color-scheme: dark" in figure.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.torch
def test_the_example_on_stories_starts_as_its_page_says(tmp_path: Path) -> None:
    printed = script("examples/tomi_ditto/tomi_ditto.py", "--steps", 1, "--out", tmp_path)
    page = (ROOT / "examples" / "tomi_ditto" / "README.md").read_text("utf-8").replace("−", "-")
    gaps = re.findall(r"([-+]\d\.\d+)\s+\[([-+]\d\.\d+), ([-+]\d\.\d+)\]", page)
    found = re.findall(r"first step: ([-+]\d\.\d+)", printed.replace("−", "-"))
    for gap, (_, low, high) in zip(found, gaps, strict=True):
        assert float(low) <= float(gap) <= float(high)
    (low, high), (before, _) = (re.findall(pattern, text)[0] for pattern, text in (
        (r"\| 0\.667 \[(\d\.\d+), (\d\.\d+)\] \|", page), (r"before: (\d\.\d+)()", printed),
    ))  # fmt: skip
    assert float(low) <= float(before) <= float(high)


FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def coverage(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; the modules that it imports are in the same folder."""
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
        ({"clusters": 20, "coverage": 0.9299, "exclusion": 0.0701}, "excludes zero in 0.070"),
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


MIXSD_SMALL = ("--warmup", "1", "--texts", "1", "--most", "30", "--only", "mixsd-0.5")
MIXSD_SCRIPT = Path(__file__).parents[1] / "benchmarks" / "mixsd.py"


def mixsd_benchmark(*options: str) -> str:
    """Stdout of the script."""
    done = subprocess.run(
        [sys.executable, str(MIXSD_SCRIPT), *options], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.torch
def test_an_arm_runs_and_the_second_call_repeats_nothing(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path), "--seeds", "0", "--steps", "1", "--every", "1", *MIXSD_SMALL)
    printed = mixsd_benchmark(*out)
    assert "| MixSD, λ = 0.5 | 1 | " in printed and "plain" not in printed
    world = tmp_path / "seed0"
    texts = (world / "mixsd-0.5" / "written.jsonl").read_bytes()
    assert texts.count(b"\n") == 200
    again = mixsd_benchmark(*out)
    # The second last column has the seconds of the arm, read from the run.
    assert again.splitlines()[1:] == printed.splitlines()[1:]
    assert (world / "mixsd-0.5" / "written.jsonl").read_bytes() == texts
    _facts_are_new(world)


def _facts_are_new(world: Path) -> None:
    """Warm-up lessons may name a taught person, but their values are random."""
    rows = [json.loads(line) for line in (world / "rows" / "plain.jsonl").open()]
    lessons = [json.loads(line) for line in (world / "rows" / "lessons.jsonl").open()]
    answers = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in rows}
    guesses = [
        (answers[question], own.rstrip(".").split()[-1])
        for question, own in (
            (m[0]["content"], m[-1]["content"]) for m in (one["messages"] for one in lessons)
        )
        if question in answers
    ]
    right = sum(answer.split()[-1] == value for answer, value in guesses)
    assert len(guesses) > 100 and right / len(guesses) < 0.2  # a twelfth by chance


SMALL_RUN = "--many 8 --new 3 --alone 2 --rounds 1 --long 64 --hidden 64 --layers 2 --threads 1"


def sampling_benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "sampling.py"), *options],
        env={**os.environ, **here}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.torch
def test_three_engines_write_the_same_through_an_adapter(tmp_path: Path) -> None:
    out = tmp_path / "sampling.json"
    done = sampling_benchmark(*SMALL_RUN.split(), "--adapter", "lora", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "vLLM: skipped (pass its Python with --vllm-python)" in done.stdout
    report = json.loads(out.read_text())
    (weights,) = report["weights"]
    assert weights["lora"] and report["model"]["adapter"] > 0
    cases = [table["case"] for table in weights["tables"]]
    assert [(c["length"], c["replies"], c["at_once"], c["shared"]) for c in cases] == [
        (32, 2, 1, False), (32, 8, 8, False), (32, 8, 8, True),
        (64, 2, 1, False), (64, 8, 8, False), (64, 8, 8, True),
    ]  # fmt: skip
    for table in weights["tables"]:
        engines = {line["engine"]: line for line in table["lines"]}
        assert list(engines) == ["soulkit", "generate", "continuous"]
        assert {line["same"] for line in engines.values()} == {1.0}
        assert all(1e8 < line["peak_bytes"] < 4e9 for line in engines.values())
        for line in engines.values():
            tokens = table["case"]["replies"] * 3
            assert line["tokens_per_s"] == pytest.approx(tokens / line["runs"][0]["wall"])


def test_an_engine_nobody_has_is_refused_before_anything_starts() -> None:
    done = sampling_benchmark("--engines", "soulkit,sglang")
    assert done.returncode == 2 and "choose engines from soulkit" in done.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_two_servers_give_the_same_replies(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    small = "--clients 2 --requests 4 --new 3 --length 24 --rounds 1 --hidden 64 --layers 2"
    printed = script("benchmarks/serve.py", *small.split(), "--threads", 1, "--json", out)
    assert "vLLM: skipped" in printed
    (table,) = json.loads(out.read_text())["tables"]
    assert [line["engine"] for line in table["lines"]] == ["soulkit", "transformers"]
    for line in table["lines"]:
        assert line["same"] == 1.0 and 1e8 < line["peak_bytes"] < 4e9
