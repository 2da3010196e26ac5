"""A run that is killed and started again writes, to the bit, what an untouched run writes.

Kills come at drawn moments, between a run's first file and its last. Five of them for the run with
everything on, unless the environment variable SOULKIT_KILLS asks for more (20 take minutes).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.runs.folder import read_jsonl
from soulkit.train.state.checkpoint import checkpoints
from tests.support.evaluation import changed
from tests.support.resuming import (
    RUNS,
    STEPS,
    assert_same,
    count,
    ditto,
    everything,
    fork_context,
    jitter,
    reply,
    sft,
    silent,
)
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import lines_of, soul

KILLS = int(os.environ.get("SOULKIT_KILLS", "5"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ScriptedServer(answer=reply, script=jitter) as server:
        yield server.base_url


# --- killing --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forked() -> Any:
    return fork_context()


def kill_at(context: Any, arguments: list[str], out: Path, lines: int, delay: float) -> bool:
    """Start the command and kill it `delay` seconds after line `lines` of its metrics came.

    Whether it was still at work then.
    """
    process = context.Process(target=silent, args=(arguments,))
    process.start()
    first = out / ("metrics.jsonl" if lines else "config.yaml")
    end = time.monotonic() + 600
    while process.is_alive() and (not first.exists() or count(first) < lines):
        assert time.monotonic() < end
        time.sleep(0.001)
    time.sleep(delay)
    alive: bool = process.is_alive()
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode in ((-signal.SIGKILL, 0) if alive else (0,))
    return alive and not (out / "summary.json").exists()


def kill_when(arguments: list[str], due: Callable[[], bool]) -> None:
    """Start the installed command as a user does and end it with −9 once `due` says so."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "soulkit.cli.app", *arguments], env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    end = time.monotonic() + 600
    try:
        while not due():
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < end
            time.sleep(0.0005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def whole(warm: Path, tmp_path_factory: pytest.TempPathFactory, url: str) -> Callable[[str], Path]:
    """The untouched run of a name, made when it is first asked for."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("whole") / name
            assert soul(*RUNS[name](warm / "model", made[name], url)) == 0
        return made[name]

    return of


def moments(name: str, number: int, run: Path) -> list[tuple[int, float]]:
    """Line and delay of each kill of a trial; every fifth trial is killed while it resumes, too."""
    rng = random.Random(f"{name}/{number}")
    lines = read_jsonl(run / "metrics.jsonl")
    paces = [line["time/sample"] + line["time/train"] for line in lines if "policy/version" in line]
    kills, done = [], 0
    for _ in range(1 + (number % 5 == 4)):
        done = rng.randrange(done, len(paces))
        kills.append((done * len(lines) // len(paces), rng.random() * paces[done]))
    return kills


TRIALS = [*(("ditto", n) for n in range(KILLS)), *(("sdpo", n) for n in range((KILLS + 1) // 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), TRIALS)
def test_a_killed_run_goes_on_to_the_bit(
    tmp_path: Path, warm: Path, whole: Callable[[str], Path], forked: Any, url: str,
    name: str, number: int, record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    untouched, out = whole(name), tmp_path / "run"
    command = RUNS[name](warm / "model", out, url)
    for lines, delay in moments(name, number, untouched):
        while not kill_at(forked, command, out, lines, delay):  # too late: it had ended
            shutil.rmtree(out)
            delay /= 2
        left = {n: count(out / f"{n}.jsonl") for n in ("metrics", "episodes", "sampled")}
        record_property("lines left", left)
    assert not (out / "summary.json").exists()
    assert soul(*command) == 0
    assert_same(out, untouched)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["trained.safetensors", "position.json"])
def test_a_checkpoint_that_was_being_written_is_not_used(
    tmp_path: Path, warm: Path, whole: Callable[[str], Path], url: str, file: str
) -> None:
    out, untouched = tmp_path / "run", whole("ditto")
    command = everything(warm / "model", out, url)
    points = out / "checkpoints"
    kill_when(command, lambda: any(points.glob(f".step_*2.part/{file}")))
    assert not (out / "summary.json").exists()
    assert soul(*command) == 0
    assert_same(out, untouched)
    assert not list(points.glob(".*"))
    assert len(json.loads((out / "environment.json").read_text())["resumed"]) == 1


@pytest.fixture(scope="module")
def untouched(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untouched") / "run"
    assert soul(*ditto(warm / "model", out)) == 0
    return out


@pytest.mark.slow
def test_a_run_without_its_last_step_goes_on_to_the_bit(
    tmp_path: Path, warm: Path, untouched: Path
) -> None:
    """What a kill leaves, made by hand: the newest checkpoint gone, files longer than the rest."""
    out = tmp_path / "run"
    shutil.copytree(untouched, out)
    shutil.rmtree(out / "checkpoints" / f"step_{STEPS:06d}")
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "torn')
    (out / "checkpoints" / f".step_{STEPS:06d}.part").mkdir()
    assert soul(*ditto(warm / "model", out)) == 0
    assert_same(out, untouched)
    assert (out / "metrics.jsonl.cut").exists()  # the tail is kept aside, not thrown away


def test_supervised_runs_go_on_to_the_bit(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert soul(*sft(whole, whole)) == 0
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / f"step_{STEPS:06d}")
    shutil.rmtree(out / "model")
    assert soul(*sft(out, out)) == 0
    assert_same(out, whole)


def test_another_configuration_is_refused_by_name(
    untouched: Path, warm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (untouched / "metrics.jsonl").read_bytes()
    arguments = [*ditto(warm / "model", untouched), "--lambda-fb", "0.5", "--seed", "7"]
    assert soul(*arguments) == 2
    message = capsys.readouterr().err
    assert "lambda_fb: 1.0 -> 0.5" in message and "seed: 0 -> 7" in message
    assert (untouched / "metrics.jsonl").read_bytes() == before


def test_a_run_killed_after_its_last_checkpoint_is_tidied_up(
    tmp_path: Path, warm: Path, untouched: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(untouched, out)
    for left in ("model", "best"):
        shutil.move(out / left, out / f".{left}.part")
    points = out / "checkpoints"
    shutil.copytree(points / f"step_{STEPS:06d}", points / ".step_000002.old")
    shutil.copytree(out / ".best.part", points / f".step_{STEPS:06d}.part")
    assert soul(*ditto(warm / "model", out)) == 0
    assert_same(out, untouched)
    assert not [*points.glob(".*"), *out.glob(".*.part")]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, warm: Path, untouched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(untouched, out)
    newest = out / "checkpoints" / f"step_{STEPS:06d}"
    data = bytearray((newest / "trained.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "trained.safetensors").write_bytes(data)
    assert soul(*ditto(warm / "model", out)) == 0
    remarks = [line for line in capsys.readouterr().err.splitlines() if "is damaged" in line]
    assert len(remarks) == 1 and "step_000005 is damaged (trained.safetensors" in remarks[0]
    assert "going on from step_000004" in remarks[0]
    assert_same(out, untouched)


def test_a_run_without_a_whole_checkpoint_is_not_begun_again(
    tmp_path: Path, warm: Path, untouched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(untouched, out)
    for path in checkpoints(out / "checkpoints"):
        (path / "optimizer.safetensors").write_bytes(b"")
    assert soul(*ditto(warm / "model", out)) == 2
    assert "checkpoints in" in capsys.readouterr().err
    assert lines_of(out) == lines_of(untouched)


@pytest.mark.slow
def test_training_draws_nothing_from_the_global_generator(
    tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a checkpoint would have to keep its state."""
    from soulkit.train.state.loop import Loop

    seen = []
    checkpoint = Loop.checkpoint

    def noting(loop: Loop, dev: float | None = None) -> None:
        seen.append(torch.random.get_rng_state())
        checkpoint(loop, dev)

    monkeypatch.setattr(Loop, "checkpoint", noting)
    again = changed(
        ditto(warm / "model", tmp_path / "run"), "--checkpoint-every", "1", "--steps", "3"
    )
    assert soul(*again) == 0
    assert len(seen) == 3 and all(torch.equal(seen[0], state) for state in seen)
