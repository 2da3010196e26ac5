"""`--gpus N`: starting, joining and ending the ranks of a training on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import soulkit as sk
from soulkit.cli.app import main
from soulkit.errors import ConfigError, UserError
from soulkit.models.local.loading import pick_device
from soulkit.models.local.threads import choose_threads, idle_core_threads
from soulkit.train.ranks import watch
from soulkit.train.ranks.launch import (
    LAUNCHER,
    LOST,
    launch,
    rank_error,
    rank_to_explain,
    ranks_to_start,
    refuse_ranks,
)
from soulkit.train.ranks.watch import GRACE, SILENCE
from soulkit.train.state import fingerprint
from soulkit.train.state.fingerprint import machine_print
from tests.support.resuming import fork_context
from tests.support.training import config

pytestmark = pytest.mark.torch

JOB = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
TINY = ("train", "sft", "--full", "--model", "tiny", "--task", "tomi", "--data", "synth:8",
        "--device", "cpu", "--set", "lr_schedule=constant")  # fmt: skip
LIMIT = 30
"""Seconds in which a job must end."""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the variables of a launcher."""

    def start(**changes: str) -> None:
        for name, value in (JOB | changes).items():
            monkeypatch.setenv(name, value)

    return start


@pytest.mark.parametrize("words", ["eval local", "demo", "runs", "distill", "train ablate"])
def test_other_commands_are_refused_by_name(
    words: str, job: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    command = " ".join(words.split()[: 1 + (words == "train ablate")])
    job()
    assert main(words.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["error:", "why:", "fix:"]
    assert f"`soul {command}`" in lines[0] and "WORLD_SIZE" in lines[0]
    job(RANK="1")
    assert main(words.split()) == 2
    assert not capsys.readouterr().err, "rank 0 has said it"


@pytest.mark.parametrize("command", ["train sft", "runs"])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MASTER_ADDR", "", "MASTER_ADDR is not set."),
        ("MASTER_PORT", "http", "MASTER_PORT is not a number: 'http'."),
        ("WORLD_SIZE", "two", "WORLD_SIZE is not a number: 'two'."),
        ("WORLD_SIZE", "0", "RANK is 0, but WORLD_SIZE is 0."),
        ("RANK", "", "RANK is not set."),
        ("RANK", "-1", "RANK is not a number: '-1'."),
        ("RANK", "2", "RANK is 2, but WORLD_SIZE is 2."),
    ],
)
def test_a_job_with_wrong_variables_is_refused(
    command: str, name: str, value: str, said: str,
    job: Callable[..., None], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    job(**{name: value})
    assert main(command.split()) == 2
    first, why, fix = capsys.readouterr().err.splitlines()
    assert first == f"error: {said}" and why.startswith("why: ") and fix.startswith("fix: ")


def test_the_python_function_trains_in_one_process(job: Callable[..., None]) -> None:
    with pytest.raises(ConfigError, match="gpus=2 does not work"):
        sk.train_model("sft", "tiny", "tomi", data="synth:8", full=True, gpus=2)
    job()
    with pytest.raises(ConfigError, match="train_model"):
        sk.train_model("sft", "tiny", "tomi", data="synth:8", full=True)


@pytest.mark.parametrize("settings", [{"gpus": 2}, {"launcher": "ray"}])
def test_a_comparison_refuses_several_ranks(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="soul train ablate"):
        refuse_ranks(config(**settings), "soul train ablate")
    refuse_ranks(config(gpus=2, sampler_gpus=1), "soul train ablate")


@pytest.mark.parametrize(
    ("gpus", "settings", "what"),
    [
        (0, {"gpus": 2}, "this machine has none"),
        (2, {"gpus": 3}, "needs 3 GPUs, but this machine has 2"),
        (4, {"gpus": 2, "device": "cuda:1"}, "--device cuda:1"),
    ],
)
def test_missing_gpus_are_refused(
    gpus: int, settings: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=what):
        ranks_to_start(config(**settings))


def test_ranks_are_started_once(job: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert [ranks_to_start(config(gpus=n)) for n in (1, 2, 4)] == [0, 2, 4]
    assert ranks_to_start(config(gpus=9, device="cpu")) == 9
    job()
    assert ranks_to_start(config(gpus=2)) == ranks_to_start(config()) == 0
    with pytest.raises(ConfigError, match="the launcher started 2"):
        ranks_to_start(config(gpus=3))
    job(WORLD_SIZE="8", LOCAL_WORLD_SIZE="8")
    with pytest.raises(ConfigError, match="--nproc-per-node 8 needs 8 GPUs"):
        ranks_to_start(config())


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ({}, 0),
        ({0: 2}, None),
        ({0: 143, 1: -15}, None),
        ({0: 1, 1: LOST}, None),
        ({0: -9, 1: LOST}, 0),
        ({0: -9, 1: -15}, 0),
        ({1: -9, 0: LOST}, 1),
        ({1: -9, 0: 1}, 1),
        ({0: LOST, 1: 1}, 1),
        ({0: LOST, 1: LOST, 2: -11}, 2),
        ({0: 143, 1: -9}, 1),
        ({0: 130, 1: -9}, None),
    ],
)
def test_the_rank_that_ended_first_is_explained(codes: dict[int, int], rank: int | None) -> None:
    assert rank_to_explain(codes) == rank


@pytest.mark.parametrize(("code", "how"), [(-9, "SIGKILL"), (-35, "signal 35"), (7, "code 7")])
def test_every_exit_code_is_explained(code: int, how: str) -> None:
    assert how in str(rank_error(1, code, "host", [], ""))


def test_device_and_threads_follow_the_local_rank(
    job: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("soulkit.models.local.threads.allowed_cores", lambda: set(range(64)))
    monkeypatch.setattr("soulkit.models.local.threads.usual_threads", lambda: 64)
    job(LOCAL_RANK="3", LOCAL_WORLD_SIZE="4")
    idle_core_threads.cache_clear()
    try:
        assert choose_threads(None, 50, alike=False).number == 16
        assert choose_threads(None, 3, alike=True).number == 3
    finally:
        idle_core_threads.cache_clear()
    asked: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.empty", lambda _, device: asked.append(device) or _Empty())
    pick_device("auto"), pick_device("cuda"), pick_device("cuda:1"), pick_device("cpu")
    assert asked == ["cuda:3", "cuda:3", "cuda:1", "cpu"]


class _Empty:
    device = None


def test_a_deterministic_run_keeps_its_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = pick_device("cpu")
    alone = machine_print(cpu)
    monkeypatch.setattr(fingerprint, "ranks", lambda: type("Two", (), {"size": 2}))
    facts = [fingerprint.MaterialFacts(machine=one) for one in (alone, machine_print(cpu))]
    first, second = (fingerprint.Conditions(players={}, tasks={}, material=f) for f in facts)
    changes = [*fingerprint._changes(first, second, config()),
               *fingerprint._changes(second, first, config())]  # fmt: skip
    assert [c.partition("with ")[2] for c in changes] == [
        "ranks 1 (--gpus 1), but now it is 2", "ranks 2 (--gpus 2), but now it is 1",
    ]  # fmt: skip
    assert "ranks" not in alone, "runs of one process stay as they were"


def test_a_lost_rank_ends_the_job_in_time() -> None:
    assert max(GRACE["launcher"], SILENCE + GRACE["rank"]) + 3 < LIMIT


# --- real processes -------------------------------------------------------------------------------


def soul(*words: str, tag: str = "") -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k not in JOB} | {
        "TAG": tag,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "soulkit", *words], env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def processes(tag: str) -> dict[str, int]:
    """RANK (or `launcher`) → process id of the living processes of a job."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_text(errors="replace").split("\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"TAG={tag}" in variables and state != "Z":
            ranks = [v[5:] for v in variables if v.startswith("RANK=")]
            found[ranks[0] if ranks else "launcher"] = int(folder.name)
    return found


def wait_until(ready: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (done := ready()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def losses(run: Path) -> list[float]:
    file = run / "metrics.jsonl"
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return [line["loss/total"] for line in lines if "loss/total" in line]


def end(run: Path, words: Sequence[str], target: str, how: signal.Signals) -> tuple[int, str]:
    """Train for some steps, send a signal to a process; exit code and messages of the job."""
    tag, before = f"{os.getpid()}-{target}-{how}", len(losses(run))
    job = soul(*words, tag=tag)
    try:
        assert wait_until(lambda: len(losses(run)) > before + 2, 120)
        os.kill(processes(tag)[target], how)
        assert wait_until(lambda: not processes(tag), LIMIT), processes(tag)
    finally:
        for pid in processes(tag).values():
            os.kill(pid, signal.SIGKILL)
    return job.wait(), job.communicate()[1]


@pytest.mark.slow
def test_killed_jobs_end_and_resume_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """A follower, rank 0 and the launcher are killed, and the launcher is stopped; the run then
    has the losses of one process."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    often = (*TINY, "--steps", "40", "--checkpoint-every", "2", "--out")
    for number, target, how, code, text in (
        (2, "1", signal.SIGKILL, 1, "error: Rank 1 on "),
        (3, "0", signal.SIGKILL, 1, "error: Rank 0 on "),
        (2, "launcher", signal.SIGKILL, -9, "interrupted"),
        (2, "launcher", signal.SIGTERM, 143, "interrupted"),
    ):
        ended, error = end(run, (*often, str(run), "--gpus", str(number)), target, how)
        assert ended == code and text in error
        assert "Traceback" not in error and error.count("error:") == text.count("error:")
    for folder in (run, whole):
        assert soul(*often, str(folder)).wait() == 0
    assert losses(run) == pytest.approx(losses(whole), rel=1e-3)


def hold_store(send: Any) -> None:
    """Have the store of a job, and hang after the first sign of life of rank 1."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    send.send(store.port)
    store.wait(["soulkit/beat/1"])
    os.kill(os.getpid(), signal.SIGSTOP)


def watch_rank_0(port: int) -> None:
    os.environ |= JOB | {"RANK": "1", "MASTER_PORT": str(port), LAUNCHER: str(os.getppid())}
    watch.BEAT, watch.SILENCE, GRACE["rank"] = 0.1, 1.0, 0.1
    watch.start_watch().join_ranks()
    time.sleep(60)


@pytest.mark.slow
def test_a_rank_ends_although_the_store_hangs() -> None:
    context = fork_context()
    receive, send = context.Pipe(duplex=False)
    holder = context.Process(target=hold_store, args=(send,))
    holder.start()
    rank = context.Process(target=watch_rank_0, args=(receive.recv(),))
    rank.start()
    rank.join(10)
    stopped = Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0]
    holder.kill(), rank.kill()
    assert (rank.exitcode, stopped) == (LOST, "T")


@pytest.mark.slow
def test_an_error_of_a_job_is_shown_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`launch` returns the code of rank 0, or explains a rank that failed alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the logs stay
    absent = str(tmp_path / "absent")
    assert launch([*TINY[:4], absent, *TINY[5:], "--steps", "1", "--out", absent], 2) == 2
    assert capfd.readouterr().err.count("error:") == 1
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $RANK = 1 ] && { echo broken >&2; exit 7; }\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UserError, match=r"Rank 1 on .* ended with exit code 7"):
        launch(TINY, 2)
    assert capfd.readouterr().err == "[rank 1] broken\n"
