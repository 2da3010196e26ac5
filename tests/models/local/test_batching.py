"""Deterministic models: what shares a batch is a matter of who takes part, not of when they ask.

How many threads a command takes: what was asked for, what the run had, what is idle.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ProviderError
from soulkit.models.local import threads
from soulkit.models.local.batching import Participant, participants
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.threads import (
    ThreadChoice,
    choose_threads,
    core_times,
    idle_cores,
    idle_share,
    note_threads,
    recorded_threads,
    take_threads,
)
from soulkit.models.local.tiny import build_tiny
from soulkit.runs.folder import Run
from soulkit.types import Call, Sampling, Segment

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u")]
SHORT = Sampling(max_tokens=3, seed=1)
Batch = tuple[tuple[str, int, int], ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", WORDS, max_context=96)


class Watched(LocalModel):
    """Remembers which calls shared a batch."""

    batches: list[Batch]

    def _reply(self, batch: list[Any]) -> list[Any]:
        self.__dict__.setdefault("batches", [])
        self.batches.append(tuple((r.call.example_id, r.call.rollout, r.call.turn) for r in batch))
        return super()._reply(batch)


def watched(folder: Path, **options: Any) -> Watched:
    loaded = LocalModel.load(folder)
    return Watched(loaded.model, loaded.tokenizer, deterministic=True, **options)


async def say(model: LocalModel, name: str, turn: int, rollout: int = 0) -> str:
    call = Call(role="actor", example_id=name, rollout=rollout, turn=turn)
    return (await model.complete([Segment("user", f"ba {name}")], SHORT, call)).text


async def talk(
    participant: Participant, model: LocalModel, name: str, turns: int, naps: random.Random
) -> None:
    """Turns with a slow partner between them."""
    with participant:
        for turn in range(turns):
            await say(model, name, turn)
            await asyncio.sleep(naps.random() * 0.02)


def played(folder: Path, seed: int) -> list[Batch]:
    model, naps = watched(folder, batch_size=3), random.Random(seed)

    async def run() -> None:
        members = [participants([model], 1)[0] for _ in range(5)]
        names = ["ba", "be", "bi", "bo", "bu"]
        order = list(zip(members, names, (2, 1, 3, 2, 4), strict=True))
        naps.shuffle(order)
        await asyncio.gather(*(talk(s, model, n, t, naps) for s, n, t in order))

    asyncio.run(asyncio.wait_for(run(), 30))
    return model.batches


def test_batches_are_the_same_however_slow_the_partners_are(folder: Path) -> None:
    first = played(folder, 1)
    assert all(played(folder, seed) == first for seed in (2, 3))
    assert [turn for batch in first for _, _, turn in batch] == sorted(
        turn for batch in first for _, _, turn in batch
    )
    assert sum(map(len, first)) == 12


def test_who_fails_or_is_cancelled_leaves_and_nobody_waits_for_them(folder: Path) -> None:
    model = watched(folder)

    async def fails(participant: Participant) -> None:
        with participant:
            await say(model, "ba", 0)
            raise ZeroDivisionError

    async def hangs(participant: Participant) -> None:
        with participant:
            await asyncio.Event().wait()

    async def run() -> str:
        one, two, three, four = (participants([model], 1)[0] for _ in range(4))
        hanging = asyncio.create_task(hangs(three))
        unborn = asyncio.create_task(hangs(four))
        unborn.cancel()
        four.leave()
        asyncio.get_running_loop().call_later(0.05, hanging.cancel)
        failing = asyncio.create_task(fails(one))
        with two:
            await say(model, "be", 0)
            last = await say(model, "be", 1)
        with pytest.raises(ZeroDivisionError):
            await failing
        return last

    asyncio.run(asyncio.wait_for(run(), 30))
    assert model.batches == [(("ba", 0, 0), ("be", 0, 0)), (("be", 0, 1),)]


def test_two_samplers_share_one_table(folder: Path) -> None:
    """Each waits at another model: with a table for each they would wait for ever."""
    actor, coach = watched(folder), watched(folder)

    async def walk(participant: Participant, name: str, models: list[Watched]) -> None:
        with participant:
            for turn, model in enumerate(models):
                await say(model, name, turn)

    async def run() -> None:
        one, two = participants([actor, coach], 2)
        await asyncio.gather(
            walk(one, "ba", [actor, coach, actor, actor]), walk(two, "be", [coach, actor, coach])
        )

    asyncio.run(asyncio.wait_for(run(), 30))
    assert actor.batches == [
        (("ba", 0, 0),), (("be", 0, 1),), (("ba", 0, 2),), (("ba", 0, 3),),
    ]  # fmt: skip
    assert coach.batches == [(("be", 0, 0),), (("ba", 0, 1),), (("be", 0, 2),)]


def test_callers_that_are_no_participants_are_served_at_once(folder: Path) -> None:
    model = watched(folder)

    async def run() -> None:
        participant = participants([model], 1)[0]
        await say(model, "ba", 0)
        with participant:
            await asyncio.gather(say(model, "be", 0), say(model, "be", 0, rollout=1))

    asyncio.run(asyncio.wait_for(run(), 30))
    assert model.batches == [(("ba", 0, 0),), (("be", 0, 0), ("be", 1, 0))]


def test_a_failing_wave_fails_its_calls_and_the_next_one_opens(folder: Path) -> None:
    model = watched(folder)
    plain = model._generate
    broken: list[Callable[..., Any]] = [plain]

    def generate(batch: list[Any], version: str) -> list[Any]:
        if broken:
            broken.pop()
            raise RuntimeError("no memory")
        return plain(batch, version)

    model._generate = generate  # type: ignore[method-assign]

    async def one(participant: Participant, name: str) -> None:
        with participant:
            with pytest.raises(ProviderError, match="no memory"):
                await say(model, name, 0)
            await say(model, name, 1)

    async def run() -> None:
        walks: list[Awaitable[None]] = [one(participants([model], 1)[0], n) for n in ("ba", "be")]
        await asyncio.gather(*walks)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert [len(b) for b in model.batches] == [2, 2]


def test_without_the_setting_no_wave_waits(folder: Path) -> None:
    model = LocalModel.load(folder)

    async def run() -> str:
        with participants([model], 1)[0] as one, participants([model], 1)[0]:
            assert not one.waited_for
            return await say(model, "ba", 0)

    assert asyncio.run(run()) is not None


torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_what_was_asked_for_goes_before_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_threads(3, 2, alike=True).number == 3
    assert choose_threads(None, 2, alike=True) == ThreadChoice(2, "as at the start of this run")
    assert choose_threads(None, None, alike=True).number == 1
    for text, number in (("4", 4), ("5,2", 5), ("0", 2), ("many", 2), ("", 2), ("9" * 5000, 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert choose_threads(None, 2, alike=False).number == number
        assert choose_threads(7, 2, alike=False).number == 7


def test_a_run_keeps_the_threads_of_its_newest_start(tmp_path: Path) -> None:
    assert recorded_threads(None) is recorded_threads(tmp_path) is None
    for start, number in enumerate((2, 1)):
        run = Run.open(tmp_path / "run", "train grpo", {"seed": 0})
        assert recorded_threads(run.path) == (2 if start else None)
        note_threads(run.path, ThreadChoice(number, "--threads"))
        assert recorded_threads(run.path) == number
    noted = json.loads((run.path / "environment.json").read_text())
    assert noted["threads"] == 2 and noted["resumed"][0]["threads"] == 1
    before = torch.get_num_threads()
    try:
        assert take_threads(None, run.path).number == 1 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def stat(path: Path, *cores: tuple[int, int]) -> dict[int, tuple[int, int]]:
    """The kernel's file with (busy, idle) ticks of each core, read."""
    lines = [f"cpu{i} {busy} 0 0 {idle} 0 0 0 0 0 0" for i, (busy, idle) in enumerate(cores)]
    path.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 12 0", "ctxt 99"]))
    return core_times({0, 1}, path)


def test_idle_time_is_counted_on_the_cores_that_may_be_used(tmp_path: Path) -> None:
    file = tmp_path / "stat"
    before = stat(file, (100, 900), (500, 500), (0, 0))
    assert before == {0: (900, 1000), 1: (500, 1000)}
    assert idle_share(before, stat(file, (100, 930), (530, 500), (9, 0))) == 0.5
    assert idle_share(before, stat(file, (100, 930), (500, 530), (30, 0))) == 1.0
    assert idle_share(before, before) is None  # the clock did not tick
    file.write_text("cpu0 no numbers")
    assert core_times({0}, file) == core_times({0}, tmp_path / "none") == {}


@pytest.mark.slow
def test_a_busy_machine_leaves_one_thread() -> None:
    """By real processes that keep every core busy, seen from a process of its own."""
    if not threads.STAT.is_file():
        pytest.skip("no such file on this system")
    code = "from soulkit.models.local import threads; print(threads.idle_core_threads().number)"
    spin = [sys.executable, "-c", "import time\nwhile time.monotonic(): pass"]
    cores = len(threads.allowed_cores())
    busy = [subprocess.Popen(spin) for _ in range(min(2 * cores, 32))]
    try:
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                                 check=True).stdout  # fmt: skip
    finally:
        for process in busy:
            process.kill()
            process.wait()
    if len(busy) == 2 * cores:
        assert printed.strip() == "1"


def test_no_more_than_a_containers_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpu.max"
    for text, quota in (("150000 100000", 1.5), ("max 100000", math.inf), ("", math.inf)):
        file.write_text(text)
        assert threads.cpu_quota(file) == quota
    assert 0 <= idle_cores() <= (os.cpu_count() or 1)
