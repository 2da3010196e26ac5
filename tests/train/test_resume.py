"""A run that is killed and started again writes, to the bit, what an untouched run writes.

Kills come at drawn moments, between a run's first file and its last. Three of them for the run with
everything on, unless the environment variable SOULKIT_KILLS asks for more (20 take minutes).

A training that is stopped by SIGTERM, five times on its way, ends as one that nobody stopped.

Each stop comes at a drawn point of progress: so many changes of the run's files after the start,
which fall into rollouts, updates, dev scores and checkpoints alike. Nothing that was learned may be
lost: the newest checkpoint has every step whose line was written. Compared are metrics, episodes,
weights, checkpoints and summary (tests/support/resuming.py).
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.models.local.journal import SAMPLED
from soulkit.runs.jsonl import read_jsonl
from soulkit.runs.records import DEV_EPISODES, newest_dev
from soulkit.train.state.checkpoint import Position, checkpoints, prune, read_position
from soulkit.train.state.loop import Loop
from tests.support.evaluation import changed, replaced
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
    stop_after,
)
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import lines_of, soul

KILLS = int(os.environ.get("SOULKIT_KILLS", "3"))


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
    """Line and delay of each kill of a trial; every third trial is killed while it resumes, too."""
    rng = random.Random(f"{name}/{number}")
    lines = read_jsonl(run / "metrics.jsonl")
    paces = [line["time/sample"] + line["time/train"] for line in lines if "policy/version" in line]
    kills, done = [], 0
    for _ in range(1 + (number % 3 == 2)):
        done = rng.randrange(done, len(paces))
        kills.append((done * len(lines) // len(paces), rng.random() * paces[done]))
    return kills


SHARES = {"ditto": KILLS, "sdpo": (KILLS + 1) // 2, "self-rewarding": (KILLS + 2) // 3}
TRIALS = [(name, n) for name, share in SHARES.items() for n in range(share)]


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


@pytest.fixture(scope="module")
def untouched(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untouched") / "run"
    assert soul(*ditto(warm / "model", out)) == 0
    return out


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


STOPS = 5


def assert_nothing_lost(run: Path) -> None:
    """Every step that has a line is in the newest checkpoint."""
    steps = {line["step"] for line in read_jsonl(run / "metrics.jsonl")}
    newest = [read_position(path).step for path in checkpoints(run / "checkpoints")[-1:]]
    assert newest == ([len(steps)] if steps else [])


@dataclass
class Stopped:
    """Stops of runs of one command, each in a new folder once the one before was finished."""

    context: Any
    seed: str
    folder: Path
    stops: int = 0
    finished: list[Path] = field(default_factory=list)

    def run(self, command: Any, wanted: int, most: int) -> None:
        """`wanted` stops in all; `most` changes of files between a start and its stop."""
        rng = random.Random(self.seed)
        while self.stops < wanted:
            self._one_run(command, rng, wanted, most)

    def _one_run(self, command: Any, rng: random.Random, wanted: int, most: int) -> None:
        out = self.folder / f"run_{len(self.finished)}"
        files = [out / name for name in (SAMPLED, "metrics.jsonl", "episodes.jsonl", DEV_EPISODES)]
        while self.stops < wanted:
            code = stop_after(self.context, command(out), files, rng.randint(1, most))
            assert code in (0, 128 + signal.SIGTERM)
            if code == 0:  # it came too late
                break
            self.stops += 1
            assert_nothing_lost(out)
        assert soul(*command(out)) == 0
        assert not (out / "metrics.jsonl.cut").exists()
        self.finished.append(out)


@pytest.mark.slow
def test_five_stops_of_a_training_lose_nothing(
    tmp_path: Path, warm: Path, forked: Any, url: str
) -> None:
    def command(out: Path) -> list[object]:
        rarer = ("--steps", "6", "--checkpoint-every", "50", "--eval-every", "2")
        return changed(everything(warm / "model", out, url), *rarer)

    untouched = tmp_path / "untouched"
    assert soul(*command(untouched)) == 0
    stopped = Stopped(forked, "training", tmp_path)
    stopped.run(command, STOPS, most=24)
    for out in stopped.finished:
        assert_same(out, untouched)
        assert [r.episode.transcript for r in newest_dev(out)] == [
            r.episode.transcript for r in newest_dev(untouched)
        ]


# --- a stop at a certain place, within this process -----------------------------------------------


def small(model: Path, out: Path, *more: object) -> list[object]:
    return [
        "train", "grpo", "--model", model, "--task", "tomi", "--data", "tomi=synth:20",
        "--set", "dev_limit=2", "--deterministic", "--out", out,
        *replaced(("--prompts", 2, "--group-size", 2, "--max-tokens", 6, "--lora-r", 2,
                   "--lr", 1e-2, "--steps", 3), more),
    ]  # fmt: skip


def stopping(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, turn: int) -> None:
    """SIGTERM arrives when `owner.name` is entered for the `turn`th time, and is noticed at the
    next thing that is waited for."""
    original, calls = getattr(owner, name), 0

    async def stopped(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == turn:
            signal.raise_signal(signal.SIGTERM)
        return await original(self, *arguments)

    monkeypatch.setattr(owner, name, stopped)


def test_a_dev_split_that_was_being_scored_is_scored_later(tmp_path: Path, warm: Path) -> None:
    from soulkit.train.step import Step

    out, untouched = tmp_path / "run", tmp_path / "untouched"
    more = ("--eval-every", 2, "--checkpoint-every", 50, "--set", "keep_best=0")
    assert soul(*small(warm / "model", untouched, *more)) == 0
    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, Step, "measure", 2)
        assert soul(*small(warm / "model", out, *more)) == 143
    (path,) = checkpoints(out / "checkpoints")
    position = read_position(path)
    assert (position.step, position.unmeasured, position.stopgap) == (2, True, True)
    assert [line for line in lines_of(out) if "eval/tomi" in line] == []
    assert soul(*small(warm / "model", out, *more)) == 0
    assert_same(out, untouched)
    assert [path.name for path in checkpoints(out / "checkpoints")] == ["step_000003"]


def test_checkpoints_come_by_minutes_too(tmp_path: Path, warm: Path) -> None:
    more = ("--checkpoint-every", 50, "--checkpoint-minutes", 1e-9)
    assert soul(*small(warm / "model", tmp_path / "run", *more)) == 0
    names = [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")]
    assert names == ["step_000001", "step_000002", "step_000003"]


@pytest.mark.slow
def test_a_stop_in_an_ablation_is_the_end_of_all_its_runs(tmp_path: Path, warm: Path) -> None:
    """A signal that comes behind the last step of a run does not end with that run."""
    out = tmp_path / "ablation"
    command = ["train", "ablate", "--methods", "grpo,grpo:kl_coef=0.01", "--seeds", 1,
               *small(warm / "model", out)[2:]]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        close = Loop.close

        def stopped(loop: Loop) -> None:
            signal.raise_signal(signal.SIGTERM)
            close(loop)

        patch.setattr(Loop, "close", stopped)
        assert soul(*command) == 143
    assert (out / "grpo" / "seed_0" / "summary.json").exists()
    assert not (out / "grpo-kl_coef=0.01").exists()
    assert soul(*command) == 0
    assert len(list(out.glob("*/seed_0/summary.json"))) == 2


def test_what_a_stop_left_counts_for_none_of_the_newest(tmp_path: Path) -> None:
    from soulkit.train.state.checkpoint import _write_position

    def write(step: int, **how: bool) -> None:
        folder = tmp_path / f"step_{step:06d}"
        folder.mkdir()
        _write_position(folder, Position(step, 0, 0, "", **how))

    def left() -> list[int]:
        prune(tmp_path, 2)
        return [read_position(path).step for path in checkpoints(tmp_path)]

    for step in (2, 4):
        write(step)
    write(5, stopgap=True)
    assert left() == [2, 4, 5]
    write(6)
    assert left() == [4, 6]


def test_a_cancelled_training_of_a_program_keeps_its_steps(tmp_path: Path, warm: Path) -> None:
    """The library sets no handlers; whoever cancels it gets the same checkpoint."""
    from soulkit.train.config import TrainConfig
    from soulkit.train.run import train
    from soulkit.train.step import Step

    before = signal.getsignal(signal.SIGTERM)
    config = TrainConfig.model_validate({
        "method": "grpo", "model": str(warm / "model"), "tasks": {"tomi": 1.0},
        "data": {"tomi": "synth:20"}, "prompts_per_step": 2, "group_size": 2, "max_tokens": 6,
        "steps": 3,
    })  # fmt: skip
    take = Step.__call__
    seen = []

    async def second_step(self: Step, step: int) -> Any:
        seen.append(signal.getsignal(signal.SIGTERM))
        if step == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        return await take(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "__call__", second_step)
        with pytest.raises(asyncio.CancelledError):
            train(config, tmp_path / "run")
    assert seen == [before, before]
    (path,) = checkpoints(tmp_path / "run" / "checkpoints")
    assert read_position(path).step == 1
