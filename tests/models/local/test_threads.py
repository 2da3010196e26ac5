"""How many threads a command takes: what was asked for, what the run had, what is idle."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from soulkit.models.local import threads
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
from soulkit.runs.folder import Run

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_what_was_asked_for_goes_before_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_threads(3, 2, alike=True).number == 3
    assert choose_threads(None, 2, alike=True) == ThreadChoice(2, "as this run began")
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
