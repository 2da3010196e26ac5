"""Kills with -9 at random moments, files cut as by a loss of power: nothing lost or paid twice."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from soulkit.runs.jsonl import JsonlWriter, read_jsonl
from soulkit.runs.records import scored_keys
from tests.hostile.test_machine_limits import evaluation, stored
from tests.support.evaluation import oracle, soul
from tests.support.hostile import seeded, seeds
from tests.support.hub import EVAL, EVALS, HITOM, alone_with_the_hub
from tests.support.odd_runs import training
from tests.support.servers.hub_server import HubServer
from tests.support.servers.openai_server import ScriptedServer

ROWS = 24


def killed(
    command: Sequence[object], folder: Path, seconds: float,
    reached: Callable[[], bool] = lambda: False,
) -> bool:  # fmt: skip
    """Run a command in a forked child in `folder`, and kill it after some seconds, or when it has
    `reached` a point. Whether it was still running."""
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        os.chdir(folder)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os._exit(soul(*command))
    end = time.monotonic() + seconds
    while time.monotonic() < end and not reached():
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


@pytest.mark.parametrize("seed", seeds(8))
def test_a_killed_evaluation_pays_nothing_twice(tmp_path: Path, seed: int) -> None:
    """Two kills, then the end: every stored reply is used, and every row has its score."""
    rng, run = seeded(seed), tmp_path / "run"
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
    rng, folder = seeded(seed), tmp_path / "data"
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
    killed(command, tmp_path, seeded(seed).uniform(0.0, 0.4))
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


GROWING = ("config.yaml", "metrics.jsonl", "episodes.jsonl", "sampled.jsonl", "summary.json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an untouched training by a method, beside the model that it trains."""
    from tests.support.training import random_model

    folder = tmp_path_factory.mktemp("trained")

    def run(method: str) -> Path:
        if not (folder / method).exists():
            command = training(method, random_model(folder / "model"), folder / method, 4, 2)
            assert soul(*command) == 0
        return folder / method

    return run


def stopped(command: Sequence[str], run: Path, events: int) -> bool:
    """Run a training in another process and kill it once its files have changed so many times.
    Whether it was still running."""
    from tests.support.resuming import fork_context, stop_after

    growing = [run / name for name in GROWING]
    code = stop_after(fork_context(), list(command), growing, events, signal.SIGKILL)
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.hostile
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", ["sft", "ditto"])
def test_a_killed_training_ends_as_an_untouched_one(
    tmp_path: Path, trained: Callable[[str], Path], method: str, seed: int
) -> None:
    """Two kills, then the end: the same metrics, episodes, weights and checkpoints."""
    from tests.support.resuming import assert_same

    untouched, rng = trained(method), seeded(seed)
    command = training(method, untouched.parent / "model", tmp_path / "run", 4, 2)
    for _ in range(2):
        stopped(command, tmp_path / "run", rng.randint(1, 5 if method == "sft" else 12))
    assert soul(*command) == 0
    assert_same(tmp_path / "run", untouched)


def ends(content: bytes) -> dict[str, int]:
    """Kind of a place in a file of lines → its offset."""
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    return {
        "first byte": 1, "first line": content.find(b"\n") // 2, "line end": content.find(b"\n"),
        "next line": content.find(b"\n") + 1, "last line begins": last, "last brace": last + 1,
        "inside the last line": (last + len(content)) // 2, "without its end": len(content) - 1,
        "whole": len(content),
    }  # fmt: skip


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, trained: Callable[[str], Path]) -> Path:
    """A training that was killed after its first checkpoint, with more lines than that has."""
    from soulkit.train.state.checkpoint import read_position
    from tests.support.resuming import fork_context, silent

    run = tmp_path_factory.mktemp("half") / "run"
    command = training("ditto", trained("ditto").parent / "model", run, 4, 2)
    process = fork_context().Process(target=silent, args=(command,))
    process.start()
    first, lines = run / "checkpoints" / "step_000002", run / "metrics.jsonl"
    while not first.exists() or lines.stat().st_size <= read_position(first).metrics:
        assert process.is_alive()
        time.sleep(0.001)
    process.kill()
    process.join()
    return run


PLACES = ("first byte", "line end", "next line", "last line begins", "last brace",
          "inside the last line", "without its end", "whole")  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("name", ["metrics.jsonl", "episodes.jsonl", "sampled.jsonl"])
def test_files_of_a_training_that_were_cut(
    tmp_path: Path, half: Path, trained: Callable[[str], Path], capfd: Any, name: str
) -> None:
    """What a checkpoint has recorded is on the disk: a file that lost more of it is refused, and
    any other cut is repeated to the bit."""
    from soulkit.train.state.checkpoint import read_position
    from tests.support.resuming import assert_same

    content = (half / name).read_bytes()
    position = read_position(half / "checkpoints" / "step_000002")
    recorded = {"metrics.jsonl": position.metrics, "episodes.jsonl": position.episodes}.get(name, 0)
    for place in PLACES:
        size = ends(content)[place]
        run = tmp_path / place / "run"
        shutil.copytree(half, run)
        os.truncate(run / name, size)
        capfd.readouterr()
        code = soul(*training("ditto", trained("ditto").parent / "model", run, 4, 2))
        assert code == (2 if size < recorded else 0), (place, capfd.readouterr().err)
        if code == 0:
            assert_same(run, trained("ditto"))
        else:
            torn = run / f"{name}.torn"
            rest = torn.read_bytes() if torn.exists() else b""
            there = (run / name).read_bytes() + rest  # a whole line may have got its end
            assert there.rstrip(b"\n") == content[:size].rstrip(b"\n")
            assert "error: " in capfd.readouterr().err


@pytest.fixture(scope="module")
def stopped_evaluation(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, ScriptedServer]]:
    folder = tmp_path_factory.mktemp("evaluation")
    lines = folder / "run" / "episodes.jsonl"
    with ScriptedServer(answer="(A) somewhere", delay_s=0.2) as server:
        command = evaluation(server, str(folder / "run"), ROWS, "--concurrency", "2")
        assert killed(
            command, folder, 120, lambda: lines.exists() and lines.read_bytes().count(b"\n") > 5
        )
        server.delay_s = 0.0
        yield folder / "run", server


WAL = {"empty": 0, "header": 20, "frame header": 40, "a page": 32 + 24 + 4096, "inside": 9_000}


@pytest.mark.parametrize("place", ["inside the last line", *(
    pytest.param(place, marks=pytest.mark.hostile) for place in (*PLACES, *WAL))],
)  # fmt: skip
def test_files_of_an_evaluation_that_were_cut(
    tmp_path: Path, stopped_evaluation: tuple[Path, ScriptedServer], place: str
) -> None:
    """Only a reply that was cut away, and whose episode was too, is requested again."""
    half, server = stopped_evaluation
    run = tmp_path / "run"
    shutil.copytree(half, run)
    name = "ledger.sqlite-wal" if place in WAL else "episodes.jsonl"
    os.truncate(
        run / name, WAL.get(place) if place in WAL else ends((run / name).read_bytes())[place]
    )
    lines = read_jsonl(run / "episodes.jsonl")
    paid = max(stored(run), len(lines))
    sent = len(server.requests)
    assert soul(*evaluation(server, str(run), ROWS, "--concurrency", "2")) == 0
    assert len(server.requests) - sent <= ROWS - paid
    after = read_jsonl(run / "episodes.jsonl")
    assert after[: len(lines)] == lines
    assert sum(scored_keys(run / "episodes.jsonl").values()) == ROWS


@pytest.mark.hostile
@pytest.mark.parametrize("size", [0, 1, 4096, len(HITOM) // 2, len(HITOM) - 1, len(HITOM)])
def test_a_part_of_a_pull_that_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    alone_with_the_hub(tmp_path, monkeypatch)
    folder = tmp_path / "data"
    with HubServer({EVAL: EVALS}, pause_s=0.05) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        command = ("data", "pull", "--task", "hitom", "--split", "eval", "--out", folder)
        assert killed(command, tmp_path, 120, lambda: any(folder.glob(".*.part")))
        for part in folder.glob(".*.part"):
            os.truncate(part, min(size, part.stat().st_size))
        server.pause_s = 0.0
        assert soul(*command) == 0
    assert (folder / "hitom_val.parquet").read_bytes() == HITOM


@pytest.mark.hostile
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_distillation_pays_nothing_twice(tmp_path: Path, seed: int) -> None:
    """Three kills in any stage, then the end: every stored reply is used, every row is scored."""
    from tests.support.distilling import small_base
    from tests.support.resuming import fork_context, stop_after

    rng, out, answer = seeded(seed), tmp_path / "out", oracle("tomi", 6)
    base = small_base(tmp_path / "base")
    with ScriptedServer(answer=answer, delay_s=0.02) as server:
        words = ("distill", "--experts", f"tomi=endpoint:expert@{server.base_url}", "--model",
                 base, "--data", "tomi=synth:6", "--held-out", "tomi=synth:3", "--samples", 3,
                 "--keep-top", 3, "--min-reward", 0, "--epochs", 1, "--batch", 4, "--max-tokens", 6,
                 "--lora-r", 4, "--device", "cpu", "--backoff", 0, "--out", out)  # fmt: skip
        command = [str(word) for word in words]
        growing = [out / name for name in (
            "samples/tomi/ledger.sqlite-wal", "samples/tomi/episodes.jsonl", "selected.jsonl",
            "generalist/metrics.jsonl", "measured/base/tomi/episodes.jsonl",
            "measured/generalist/tomi/episodes.jsonl",
        )]  # fmt: skip
        for _ in range(3):
            code = stop_after(fork_context(), command, growing, rng.randint(1, 14), signal.SIGKILL)
            assert code in (0, -signal.SIGKILL)
        before, sent = paid_calls(out), len(server.requests)
        assert soul(*command) == 0
        assert len(server.requests) - sent == paid_calls(out) - before
    lines = read_jsonl(out / "samples" / "tomi" / "episodes.jsonl")
    keys = [line["key"] for line in lines]
    assert len(keys) == len(set(keys)) == 18


def paid_calls(folder: Path) -> int:
    """Replies in the ledgers of a folder."""
    from soulkit.models.ledger.view import LedgerView

    count = 0
    for path in folder.rglob("ledger.sqlite"):
        with LedgerView(path) as view:
            count += sum(1 for _ in view.entries())
    return count
