"""Sotopia and UserLLM through the commands: a real tiny actor, scripted servers over HTTP, kills.

The rows are the 70 pairs of the hard scenarios and the questions of two benchmarks where those
files are there, rows made here in any case.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import write_rows
from soulkit.models.local.tiny import build_tiny
from soulkit.runs.folder import read_jsonl
from soulkit.runs.records import load_records
from soulkit.tasks.loading import load_examples
from soulkit.tasks.registry import load_registry
from tests.support.evaluation import soul, start, summary
from tests.support.road import import_rows, synth
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
