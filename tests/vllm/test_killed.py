"""Kill -9 of soulkit, of the supervisor, of the server, in turn and at random moments of a run.

Each time nothing of the server may be left after half a minute, what was played must be whole, and
the same command must go on; in the end the table is that of a run which nobody disturbed. A run
that comes to its end on a fast machine is compared, and another one takes its place.
`make test-vllm` kills three times, `make test-vllm-kill` twenty times. SOULKIT_KILL_SEED repeats
the moments of a run that failed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from soulkit.models.vllm.supervisor import living
from tests.support.evaluation import ROOT, summary
from tests.support.servers.groups import children, command_line, is_gone
from tests.vllm.rows import replies

pytestmark = [pytest.mark.vllm, pytest.mark.torch]

KILLS = int(os.environ.get("SOULKIT_KILLS", "3"))
ROWS = 120
VICTIMS = ("soulkit", "supervisor", "server")
GONE_S = 30.0
"""After a kill, until nothing may be left."""
LIMIT_S = 300.0
"""For whatever a test waits for; a machine may be busy."""
TERMS = ("--task", "tomi", "--data", f"synth:{ROWS}", "--max-tokens", 12, "--temperature", 0,
         "--batch-size", 4, "--max-unscored", 1)  # fmt: skip


class Running:
    """The command as a process of its own, and what it has started."""

    def __init__(self, out: Path, model: Path, python: str, log: Path) -> None:
        words = [sys.executable, "-m", "soulkit.cli.app", "eval", "local", "--model", model,
                 "--engine", "vllm", "--vllm-python", python, "--out", out, *TERMS]  # fmt: skip
        hidden = ("SOULKIT_KILLS", "SOULKIT_KILL_SEED")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [str(word) for word in words], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output,
            )  # fmt: skip
        self.out, self.before = out, lines(out)
        self.group, self.port = 0, 0

    def find_supervisor(self) -> bool:
        for child in children(self.process.pid):
            words = command_line(child)
            if any(word.endswith("supervisor.py") for word in words) and "--port" in words:
                self.group, self.port = child, int(words[words.index("--port") + 1])
        return self.group != 0

    def pid(self, victim: str) -> int:
        """The process id of `victim`; 0 while there is none."""
        if victim == "soulkit":
            return self.process.pid
        return self.group if victim == "supervisor" else next(iter(children(self.group)), 0)

    def ends(self) -> int:
        return self.process.wait(LIMIT_S)

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.group and living(self.group):
            os.killpg(self.group, signal.SIGKILL)


def lines(out: Path) -> list[bytes]:
    """The whole lines of a run's episodes."""
    file = out / "episodes.jsonl"
    return file.read_bytes().split(b"\n")[:-1] if file.exists() else []


def awaited(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def wait_for_moment(run: Running, dice: random.Random) -> str:
    """Wait for a random moment of the start or of the play, or for the end of the run; what it is,
    in words."""
    assert awaited(lambda: run.find_supervisor() or run.process.poll() is not None)
    if dice.random() < 0.5:
        seconds = dice.uniform(0.0, 25.0)
        awaited(lambda: run.process.poll() is not None, seconds)
        return f"{seconds:.2f} s after the start of the server"
    rows = dice.randint(1, 8)
    goal = len(run.before) + rows
    assert awaited(lambda: len(lines(run.out)) >= goal or run.process.poll() is not None)
    return f"{rows} rows after the start of the play"


def kill_once(run: Running, victim: str, dice: random.Random) -> str:
    """Kill `victim` at a random moment and check what is left; what was done, in words. Nothing
    where the run had come to its end."""
    deed = f"{victim} killed {wait_for_moment(run, dice)}"
    assert awaited(lambda: run.pid(victim) != 0 or run.process.poll() is not None), deed
    process = run.pid(victim)
    if run.process.poll() is None and process:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    begin = time.monotonic()
    if run.group:  # a run of which nothing is left to play starts no server
        assert awaited(lambda: is_gone(run.group, run.port), GONE_S), f"{deed}: {living(run.group)}"
    deed += f", all gone {time.monotonic() - begin:.1f} s later"
    code, after = run.ends(), lines(run.out)
    assert all(isinstance(json.loads(line), dict) for line in after), deed
    assert after[: len(run.before)] == run.before, f"{deed}: what was played before is lost"
    if code == 0:
        assert len(after) == ROWS, f"{deed}: it ended by itself, with {len(after)} rows"
        return ""
    assert code == (-signal.SIGKILL if victim == "soulkit" else 2), f"{deed}: exit code {code}"
    return f"{deed}, {len(after)} rows"


def outcome(out: Path) -> tuple[Any, dict[str, str]]:
    """The table of a run, and what was replied to every row."""
    return summary(out)["tasks"]["tomi"]["value"], {
        row: completion.text for row, completion in replies(out).items()
    }


def finish(out: Path, model: Path, python: str, log: Path) -> tuple[Any, dict[str, str]]:
    """Play a run to its end, undisturbed; what became of it."""
    run = Running(out, model, python, log)
    try:
        assert run.ends() == 0, log.read_text("utf-8", "replace")[-2000:]
    finally:
        run.clean_up()
    keys = [json.loads(line)["key"] for line in lines(out)]
    assert len(set(keys)) == len(keys) == ROWS
    return outcome(out)


def test_whoever_is_killed_the_run_goes_on_and_nothing_is_left(
    vllm_python: str, tiny_model: Path, tmp_path: Path
) -> None:
    seed = int(os.environ.get("SOULKIT_KILL_SEED", random.SystemRandom().randrange(10**6)))
    dice, log, deeds = random.Random(seed), tmp_path / "log", [f"{seed=}"]
    calm = finish(tmp_path / "calm", tiny_model, vllm_python, log)
    out, ended = tmp_path / "run", 0
    while len(deeds) <= KILLS:
        run = Running(out, tiny_model, vllm_python, log)
        try:
            deed = kill_once(run, VICTIMS[len(deeds) % len(VICTIMS)], dice)
        except AssertionError as error:
            pytest.fail(f"{error}; {deeds}; {log.read_text('utf-8', 'replace')[-2000:]}")
        finally:
            run.clean_up()
        if deed:
            sys.stdout.write(f"{len(deeds)} of {KILLS}: {deed}\n")
            deeds.append(deed)
        else:
            assert outcome(out) == calm, deeds
            ended += 1
            out = tmp_path / f"run-{ended}"
    assert finish(out, tiny_model, vllm_python, log) == calm, deeds
