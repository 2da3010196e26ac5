"""Kills with -9 at random moments, files cut at every byte: nothing lost, nothing paid twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from soulkit.runs.jsonl import JsonlWriter, read_jsonl
from soulkit.runs.records import scored_keys
from tests.hostile.test_machine_limits import evaluation, stored
from tests.support.evaluation import soul
from tests.support.hostile import seeds
from tests.support.hub import EVAL, EVALS, HITOM, alone_with_the_hub
from tests.support.servers.hub_server import HubServer
from tests.support.servers.openai_server import ScriptedServer

ROWS = 24


def killed(command: Sequence[object], folder: Path, seconds: float) -> bool:
    """Run a command in a forked child in `folder`, and kill it after some seconds. Whether it was
    still running."""
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        os.chdir(folder)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os._exit(soul(*command))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


@pytest.mark.parametrize("seed", seeds(8))
def test_a_killed_evaluation_pays_nothing_twice(tmp_path: Path, seed: int) -> None:
    """Two kills, then the end: every stored reply is used, and every row has its score."""
    rng, run = random.Random(seed), tmp_path / "run"
    with ScriptedServer(answer="(A) somewhere", delay_s=0.05) as server:
        command = evaluation(server, str(run), ROWS, "--concurrency", "4")
        for _ in range(2):
            killed(command, tmp_path, rng.uniform(0.05, 1.5))
        before, sent = stored(run), len(server.requests)
        assert soul(*command) == 0
        assert len(server.requests) - sent == ROWS - before
    assert sum(scored_keys(run / "episodes.jsonl").values()) == ROWS


@pytest.mark.parametrize("seed", seeds(16))
def test_a_killed_pull_keeps_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    alone_with_the_hub(tmp_path, monkeypatch)
    rng, folder = random.Random(seed), tmp_path / "data"
    with HubServer({EVAL: EVALS}, pause_s=0.05) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        command = ("data", "pull", "--task", "hitom", "--split", "eval", "--out", folder)
        killed(command, tmp_path, rng.uniform(0.05, 1.0))
        part = next(iter(folder.glob(".*.part")), None)
        whole, received = folder / "hitom_val.parquet", server.sent
        assert whole.read_bytes() == HITOM if whole.exists() else True
        size = part.stat().st_size if part else len(HITOM) if whole.exists() else 0
        server.pause_s = 0.0
        assert soul(*command) == 0
        assert server.sent - received <= len(HITOM) - size + 16_384  # bytes still under way
    assert whole.read_bytes() == HITOM
    assert not list(folder.glob(".*.part"))


@pytest.mark.parametrize("seed", seeds(10))
def test_a_killed_report_leaves_the_old_page_or_the_new(tmp_path: Path, seed: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"command": "eval api", "model": "m"}')
    page = tmp_path / "page.html"
    command = ("report", tmp_path / "run", "--out", page)
    assert soul(*command) == 0
    old = page.read_bytes()
    assert old.rstrip().endswith(b"</html>")
    killed(command, tmp_path, random.Random(seed).uniform(0.0, 0.4))
    assert page.read_bytes().rstrip().endswith(b"</html>")


@pytest.mark.parametrize("name", ["episodes.jsonl", "metrics.jsonl", "controls.jsonl"])
def test_a_file_cut_at_every_byte_loses_only_the_cut_line(tmp_path: Path, name: str) -> None:
    """After a loss of power, earlier lines are read, the torn one is set aside, and the next line
    is whole."""
    lines = [{"key": f"0/{n}/0/draft", "text": "é\u2028\\n" * n} for n in range(4)]
    with JsonlWriter(tmp_path / name) as writer:
        writer.write_all(lines)
    content = (tmp_path / name).read_bytes()
    for size in range(len(content) + 1):
        path = tmp_path / str(size) / name
        path.parent.mkdir()
        path.write_bytes(content[:size])
        whole = content[:size].count(b"\n")
        rest = content[:size].rpartition(b"\n")[2]
        whole += bool(rest) and content[size : size + 1] == b"\n"  # only the line end is missing
        assert read_jsonl(path) == lines[:whole], size
        with JsonlWriter(path) as writer:
            writer.write({"after": size})
        assert read_jsonl(path) == [*lines[:whole], {"after": size}], size
