"""Original files of four tasks as one suite of one's own: a tiny model, servers, three kills.

CoSER's scenes, the conversations of MirrorBench, ClariQ and Qulac, SimulatorArena's lessons and
documents are imported where a copy is at hand ($SOULKIT_TEST_DATA), a few rows of each file; rows
are made where none is. The model knows the words of the files and has 32,768 positions.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import read_rows, write_rows
from soulkit.models.local.tiny import build_tiny
from soulkit.report.grid import suite_grid
from soulkit.report.load import load_runs
from soulkit.report.suites import suite_table
from soulkit.runs.records import load_records
from soulkit.tasks.loading import load_examples
from soulkit.tasks.registry import load_registry
from tests.support.evaluation import soul, start, summary
from tests.support.road import import_rows, synth
from tests.support.servers.anybody import Anybody
from tests.support.servers.openai_server import ScriptedServer

SOURCE = os.environ.get("SOULKIT_TEST_DATA", "")
FILES = {
    "mirrorbench": (
        "mirrorbench/clariq_mirror.jsonl", "mirrorbench/chatbot_arena_mirror.jsonl",
        "clariq/multi_turn_human_generated_data.tsv", "qulac/qulac_sample_200.json",
    ),
    "sim_doc": ("simulatorarena/document_creation_annotations_for_benchmarking.json",),
    "coser": ("coser/test_set.json",),
    "sim_math": ("simulatorarena/math_tutoring_annotations_redacted_for_benchmarking.json",),
}  # fmt: skip
SUITE = """
suites:
  files:
    title: Four tasks from their original files
    axes: {CONV: [mirrorbench, sim_doc], ROLE: [coser, sim_math]}
    average: macro
"""
POSITIONS = 32_768
PLAYERS = ("partner", "environment", "judge")


def rows_of(task: str, folder: Path, most: int | None) -> list[dict[str, Any]]:
    """Rows of every file, `most` of each from all over it."""
    if not SOURCE:
        return synth(task, most or 20, 1)
    rows: list[dict[str, Any]] = []
    for name in FILES[task]:
        path = Path(SOURCE, name)
        imported = import_rows(task, with_problems(path, folder) if task == "sim_math" else path)
        step = len(imported.rows) // most if most else 1
        rows += imported.rows[:: max(1, step)][:most]
    return rows


def with_problems(lessons: Path, folder: Path) -> Path:
    """The lessons with what the student asks first in the place of problems that are not there."""
    fields = [record.fields for record in read_rows(lessons)[0]]
    for record in fields:
        place = folder / "MATH" / str(record["question_location"])
        place.parent.mkdir(parents=True, exist_ok=True)
        problem = str(record["user_queries"][0]) or "What is one and one?"
        place.write_text(json.dumps({"problem": problem, "solution": "It is 2."}))
    path = folder / lessons.name
    path.write_text(json.dumps(fields))
    return path


def imported_files(folder: Path, most: int | None) -> dict[str, Path]:
    """Task → file of its rows."""
    paths = {task: folder / f"{task}.jsonl" for task in FILES}
    for task, path in paths.items():
        write_rows(path, rows_of(task, folder, most))
    return paths


def model_of(folder: Path, files: dict[str, Path]) -> Path:
    """A tiny model whose words are those of the files and of the prompts about them."""

    def texts() -> Iterator[str]:
        for name, path in files.items():
            yield path.read_text(encoding="utf-8").replace("\\n", " ").replace("\\u", " ")
            task = load_registry().task(name)
            for example in load_examples(task, [path]).examples:
                yield from (part.text for seat in task.previews(example).values() for part in seat)

    return build_tiny(folder / "tiny", texts(), max_context=POSITIONS)


def command(folder: Path, model: Path, files: dict[str, Path], url: str, out: Path) -> list[str]:
    """One command for all of them; most replies of an untrained model are cut."""
    tasks = folder / "tasks.yaml"
    tasks.write_text(SUITE)
    rows = [part for task, file in files.items() for part in ("--data", f"{task}={file}")]
    who = [part for role in PLAYERS for part in (f"--{role}", f"endpoint:{role}@{url}")]
    return ["eval", "local", "--model", str(model), "--suite", "files", "--tasks", str(tasks),
            *rows, *who, "--max-tokens", "8", "--temperature", "0", "--max-unscored", "1",
            "--out", str(out)]  # fmt: skip


def page(folder: Path, out: Path) -> Any:
    """The table, and the summary without what a clock and a run's name decide."""
    runs = load_runs([out], episodes=False)
    grid = suite_grid(suite_table(runs, "files", load_registry(folder / "tasks.yaml")))
    numbers = summary(out)
    numbers["provenance"].pop("dates")
    rows = [[cell.text for cell in row.cells] for row in grid.rows]
    return rows, {k: v for k, v in numbers.items() if k not in ("seconds", "cost", "costs")}


@pytest.mark.slow
@pytest.mark.torch
def test_a_suite_of_original_files_is_the_same_table_after_three_kills(tmp_path: Path) -> None:
    files = imported_files(tmp_path, 2)
    model = model_of(tmp_path, files)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with ScriptedServer(answer=Anybody()) as server:
        assert soul(*command(tmp_path, model, files, server.base_url, whole)) == 0
        calls = len(server.requests)
        words = command(tmp_path, model, files, server.base_url, killed)
        for share in sorted(random.Random().sample(range(5, 95), 3)):
            process = start(*words)
            server.wait_for(calls + calls * share // 100)
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert soul(*words) == 0
        again = len(server.requests) - calls
    assert page(tmp_path, killed) == page(tmp_path, whole)
    # Only what was in flight at a kill is asked for again.
    assert again < calls * 1.5
    records = load_records(whole / "episodes.jsonl")
    assert {record.task for record in records} == set(FILES)
    assert all(r.score.scored and r.episode.stop != "failed" for r in records)
    # Original releases may lack parts of a headline, so not every member has a mean.
    (mean,) = (row for row in page(tmp_path, whole)[0] if row[0].startswith("files mean"))
    assert mean[2] == f"{len(records)}/{len(records)}"
