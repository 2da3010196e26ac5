"""Sotopia and UserLLM through the commands: a real tiny actor, scripted servers over HTTP, kills.

The rows are the 70 pairs of the hard scenarios and the questions of two benchmarks where those
files are there, rows made here in any case.

Original files of four tasks as one suite of one's own: a tiny model, servers, three kills.

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
from soulkit.report.load import load_runs
from soulkit.report.suites import suite_grid, suite_table
from soulkit.runs.jsonl import read_jsonl
from soulkit.runs.records import load_records
from soulkit.tasks.kit.loading import load_examples
from soulkit.tasks.kit.registry import load_registry
from tests.support.evaluation import soul, start, summary
from tests.support.road import import_rows, synth
from tests.support.servers.anybody import Anybody
from tests.support.servers.openai_server import ScriptedServer
from tests.support.servers.verdicts import answer

SOURCE = os.environ.get("SOULKIT_TEST_DATA", "")
TASKS = ("sotopia", "userllm")


def rows_of(task: str) -> list[dict[str, Any]]:
    """Real rows as far as they are at hand, and made ones (of every source of userllm)."""
    made = synth(task, 24, 1)
    if not SOURCE:
        return made
    if task == "sotopia":
        both = import_rows(task, Path(SOURCE, "sotopia")).rows
        # Every pair once, the actor on the one side and on the other in turn.
        return [row for i, row in enumerate(both) if i % 2 == i // 2 % 2]
    nq = import_rows(task, Path(SOURCE, "nq_open", "NQ-open.dev.jsonl")).rows
    folder = Path(SOURCE, "commonsenseqa")
    quiz = import_rows(task, folder / "dev_rand_split.original_layout_100.jsonl").rows
    return [*nq[:40], *quiz[:40], *made]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    paths = {task: folder / f"{task}.jsonl" for task in TASKS}
    for task, file in paths.items():
        write_rows(file, rows_of(task))
    return paths


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Path:
    """A tiny model that knows the words of these prompts, so that they stay short."""
    tasks = {name: load_registry().task(name) for name in TASKS}
    texts = [
        segment.text
        for name, task in tasks.items()
        for example in load_examples(task, [files[name]]).examples
        for segment in task.preview(example)
    ]
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", texts, max_context=6000)


def players(server: ScriptedServer) -> list[str]:
    who = f"@{server.base_url}"
    return ["--partner", f"endpoint:p{who}", "--judge", f"endpoint:j{who}"]


def evaluated(model: Path, files: dict[str, Path], server: ScriptedServer, out: Path) -> list[str]:
    """The command; most replies of an untrained model are cut."""
    rows = [part for task in TASKS for part in ("--data", f"{task}={files[task]}")]
    return ["eval", "local", "--model", str(model), "--task", ",".join(TASKS), *rows,
            "--max-tokens", "12", *players(server), "--temperature", "0",
            "--max-unscored", "1", "--out", str(out)]  # fmt: skip


def figures(out: Path) -> dict[str, Any]:
    """A summary without what a clock or the money decides."""
    figures_of_all = summary(out)
    figures_of_all["provenance"].pop("dates")
    return {k: v for k, v in figures_of_all.items() if k not in ("seconds", "cost", "costs")}


@pytest.mark.slow
def test_every_pair_and_question_is_played_and_a_kill_changes_nothing(
    tmp_path: Path, model: Path, files: dict[str, Path]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with ScriptedServer(answer=answer) as server:
        assert soul(*evaluated(model, files, server, whole)) == 0
        calls = len(server.requests)
        command = evaluated(model, files, server, killed)
        for share in sorted(random.Random().sample(range(5, 95), 3)):
            process = start(*command)
            server.wait_for(calls + calls * share // 100, timeout_s=600)
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert soul(*command) == 0
        again = len(server.requests) - calls
    assert figures(killed) == figures(whole)
    # Only what was in flight at a kill is asked for again.
    assert again < calls * 1.5
    records = load_records(whole / "episodes.jsonl")
    pairs = [r for r in records if r.task == "sotopia"]
    assert len(pairs) == (70 if SOURCE else 24)
    assert len({r.tags["position"] for r in pairs}) == 2
    assert all(r.score.scored and r.episode.stop != "failed" for r in records)
    assert {r.score.protocol for r in records} == {"paper"}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_three_steps_of_ditto_train_what_the_actor_said_and_nothing_else(
    tmp_path: Path, model: Path, files: dict[str, Path], task: str
) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer=answer) as server:
        done = soul("train", "ditto", "--model", model, "--task", task, "--data", files[task],
                    *players(server), "--steps", 3, "--prompts", 2, "--group-size", 3,
                    "--max-tokens", 10, "--lora-r", 4, "--lr", 1e-3, "--out", out)  # fmt: skip
    assert done == 0
    records = load_records(out / "episodes.jsonl")
    lines = read_jsonl(out / "metrics.jsonl")
    assert len(lines) == 3 and all(line["rollouts/unscored"] == 0 for line in lines)
    refined = [r for r in records if r.kind == "refined"]
    assert refined, json.dumps(lines[0])
    for line in lines:
        batch = [r for r in records if r.step == line["step"]]
        tokens = {
            kind: emitted([r for r in batch if r.kind == kind]) for kind in ("draft", "refined")
        }
        assert line.get("trained/draft", 0) == tokens["draft"]
        copied = line.get("trained/copy", 0)
        assert line.get("trained/refined", 0) == copied == tokens["refined"]
    acted = {trace.seat for r in records for trace in r.episode.traces}
    spoken = {line.seat for r in records for line in r.episode.transcript}
    assert acted and (acted < spoken or task == "userllm" or spoken == {"agent1", "agent2"})


def emitted(records: list[Any]) -> int:
    turns = [t for r in records for trace in r.episode.traces for t in trace.turns]
    return sum(len(turn.completion.token_ids) for turn in turns)


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


def rows_of_file(task: str, folder: Path, most: int | None) -> list[dict[str, Any]]:
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
        write_rows(path, rows_of_file(task, folder, most))
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
