"""SIGTERM, SIGHUP and Ctrl-C: one path, exit codes of their own, nothing that was finished lost."""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli import stopping
from soulkit.cli.stopping import StopSignals
from soulkit.runs.jsonl import read_jsonl
from tests.support.evaluation import FAST, oracle, paid, replaced, soul, summary
from tests.support.resuming import episodes, fork_context, stop_after
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import random_model

SAYS = "interrupted: what was finished is kept; run the same command again to resume\n"

# --- a command that waits -------------------------------------------------------------------------

NAPS = {
    "plain": "def command() -> None:\n    ready()\n    time.sleep(600)\n",
    "loop": (
        "async def wait() -> None:\n    ready()\n    await asyncio.sleep(600)\n\n"
        "def command() -> None:\n    asyncio.run(wait())\n"
    ),
    "slow_end": (
        "def command() -> None:\n    try:\n        ready()\n        time.sleep(600)\n"
        "    finally:\n        print('ending', flush=True)\n        time.sleep(600)\n"
    ),
}


def usual_signals() -> None:
    """Whoever runs these tests may ignore some, as `nohup` does; a child would, too."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def nap(folder: Path, kind: str = "plain", **how: Any) -> subprocess.Popen[str]:
    """A `soul nap` that has begun to sleep."""
    (folder / "nap.py").write_text(
        f"import asyncio, time\n\ndef ready():\n    print('ready', flush=True)\n\n{NAPS[kind]}"
    )
    script = (
        "import sys, soulkit.cli; from soulkit.cli import app, stopping;"
        f"stopping.ECHO_S = {how.pop('echo_s', 0)}; app.COMMANDS['nap'] = 'Sleep.';"
        f"soulkit.cli.__path__.append({str(folder)!r}); sys.exit(app.main(['nap']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], text=True,
        **{
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": usual_signals,
            **how,
        },
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("kind", "number", "code"),
    [("plain", signal.SIGTERM, 143), ("loop", signal.SIGTERM, 143), ("plain", signal.SIGHUP, 129),
     ("loop", signal.SIGHUP, 129), ("loop", signal.SIGINT, 130)],
)  # fmt: skip
def test_each_signal_has_its_exit_code(
    tmp_path: Path, kind: str, number: signal.Signals, code: int
) -> None:
    process = nap(tmp_path, kind)
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (code, SAYS)


def test_what_was_ignored_before_stays_ignored(tmp_path: Path) -> None:
    """As after `nohup`, and in a shell's background: SIGTERM still ends an event loop in order."""

    def ignore() -> None:
        usual_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = nap(tmp_path, "loop", preexec_fn=ignore)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (143, SAYS)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    process = nap(tmp_path, "slow_end")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "ending\n"
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=600)
    assert process.returncode == 143  # the first one's


def test_an_echo_is_no_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends SIGTERM to the command, and again to its group."""
    monkeypatch.setattr(stopping, "ECHO_S", 600.0)
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_terminal_that_closes_ends_the_command_in_order(tmp_path: Path) -> None:
    """Its last words have nowhere to go, which is no error."""
    import fcntl
    import termios

    here, there = pty.openpty()

    def take_terminal() -> None:
        usual_signals()
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)

    process = nap(
        tmp_path, "loop", echo_s=600, start_new_session=True, stderr=there,
        preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(there)
    os.close(here)
    assert process.wait(600) == 129


# --- evaluations ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


def played(out: Path) -> list[dict[str, Any]]:
    """The run's records in the order of their keys, without how long they took and what of."""
    return sorted(episodes(out), key=lambda record: str(record["key"]))


def figures(out: Path) -> dict[str, Any]:
    values = summary(out)
    values["provenance"].pop("dates")
    return {k: v for k, v in values.items() if k not in ("seconds", "costs")}


def stopped_runs(
    command: Callable[[Path], list[str]], folder: Path, wanted: int, most: int
) -> list[Path]:
    """Runs of one command that were stopped by SIGTERM `wanted` times in all, then finished; at
    most `most` changes of a run's files are between a start and its stop."""
    context, rng, stops = fork_context(), random.Random("evaluation"), 0
    finished: list[Path] = []
    while stops < wanted:
        out = folder / f"run_{len(finished)}"
        while stops < wanted:
            files = [out / "episodes.jsonl", out / "ledger.sqlite-wal", out / "ledger.sqlite"]
            code = stop_after(context, command(out), files, rng.randint(1, most))
            assert code in (0, 143)
            if code == 0:  # it came too late
                break
            stops += 1
        assert soul(*command(out)) == 0
        finished.append(out)
    return finished


@pytest.mark.slow
def test_stops_of_an_evaluation_over_http_lose_nothing(tmp_path: Path) -> None:
    n, whole = 60, tmp_path / "whole"
    with ScriptedServer(answer=oracle("tomi", n), delay_s=0.01) as server:

        def command(out: Path) -> list[str]:
            model = ("--model", "m", "--base-url", server.base_url, "--out", out)
            words = ("eval", "api", *model, "--task", "tomi", "--data", f"synth:{n}",
                     "--concurrency", 2, *FAST)  # fmt: skip
            return [str(word) for word in words]

        assert soul(*command(whole)) == 0
        runs = stopped_runs(command, tmp_path, 6, most=20)
        calls = len(server.requests)
    for out in runs:
        assert played(out) == played(whole) and figures(out) == figures(whole)
        assert len(paid(out)) == n
    # Nothing that was answered is asked again: only what was under way at a stop.
    assert calls <= n * (1 + len(runs)) + 6 * 2


@pytest.mark.slow
def test_stops_of_a_local_evaluation_lose_nothing(tmp_path: Path, tiny: Path) -> None:
    def command(out: Path) -> list[str]:
        words = ("eval", "local", "--model", tiny, "--out", out, "--task", "tomi", "--data",
                 "synth:60", "--max-tokens", 6, "--batch-size", 2, "--temperature", 0,
                 *replaced(FAST, ("--max-unscored", 1)))  # fmt: skip
        return [str(word) for word in words]

    whole = tmp_path / "whole"
    assert soul(*command(whole)) == 0
    for out in stopped_runs(command, tmp_path, 4, most=12):
        assert [r["score"] for r in played(out)] == [r["score"] for r in played(whole)]
        assert figures(out) == figures(whole)
        assert len(list(read_jsonl(out / "episodes.jsonl"))) == 60
