"""A training on a Ray cluster of this machine: its ranks, and its vLLM servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli.app import main
from soulkit.errors import UserError
from soulkit.models.vllm.command import ServerSpec
from soulkit.models.vllm.server import VllmServer, stop_all
from soulkit.train.ranks.launch import LOST
from tests.support.servers.groups import command_line, eventually
from tests.support.servers.vllm_stand_in import interpreter
from tests.support.training import lines_of, random_model

STEPS, STORE = 24, 100 << 20


def processes(*words: str) -> list[int]:
    """Processes with all these words in their command line or environment."""
    matches = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "environ").read_bytes() + b"\0" + (path / "cmdline").read_bytes()
        except OSError:  # ended, or of another user
            continue
        if int(path.name) != os.getpid() and all(word.encode() in text for word in words):
            matches.append(int(path.name))
    return matches


def ray_left() -> list[int]:
    return [p for p in processes("ray") if any("soulkit-ray-" in w for w in command_line(p))]


def start(model: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    words = (
        "train", "sft", "--model", model, "--task", "tomi", "--data", "tomi=synth:40",
        "--batch", 6, "--lr", 3e-3, "--lora-r", 4, "--steps", STEPS, "--checkpoint-every", 1,
        "--device", "cpu", "--gpus", 2, "--out", out, *more,
    )  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "soulkit", *map(str, words)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def steps_of(out: Path) -> int:
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def reach(steps: int, out: Path, job: subprocess.Popen[str]) -> None:
    while steps_of(out) < steps:
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)


def learned(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")}
            for line in lines_of(out / "metrics.jsonl")]  # fmt: skip


@pytest.mark.ray
@pytest.mark.slow
def test_killed_and_interrupted_ranks_resume_to_the_metrics_of_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    model = random_model(tmp_path / "model")
    whole = start(model, tmp_path / "whole")
    out = tmp_path / "out"
    job = start(model, out, "--launcher", "ray")
    try:
        assert whole.wait() == 0
        reach(3, out, job)
        (rank,) = processes("\0RANK=1\0", str(out), "-m\0soulkit")
        os.kill(rank, signal.SIGKILL)
        before = steps_of(out)
        reach(before + 3, out, job)  # after a new start
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate()
    finally:
        job.kill()
        whole.kill()
    assert job.returncode == 130, output
    assert "Rank 1 on " in output and "SIGKILL" in output
    assert output.count("interrupted: finished work is saved") == 1
    assert eventually(lambda: not ray_left() and not processes(str(out), "WORLD_SIZE"))
    assert before < steps_of(out) < STEPS
    rest = start(model, out)  # the run folder is all that the other launcher needs
    assert rest.wait() == 0
    assert learned(out) == learned(tmp_path / "whole")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process sees and the only host of its Ray cluster with CPUs does not."""
    ray = pytest.importorskip("ray")
    from soulkit.train.ranks.ray_launch import connect

    hidden = tmp_path / "hidden"
    hidden.mkdir()
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    with (
        tempfile.TemporaryDirectory(prefix="soulkit-ray-", dir="/tmp") as folder,
        connect(num_cpus=0, include_dashboard=False, object_store_memory=STORE, _temp_dir=folder),
    ):
        join = (
            f"mount -t tmpfs tmpfs {hidden} && exec {sys.executable} -m ray.scripts.scripts start "
            f"--block --num-cpus=3 --object-store-memory={STORE} "
            f"--address={ray.get_runtime_context().gcs_address}"
        )
        host = subprocess.Popen(["unshare", "-m", "sh", "-c", join], stdout=subprocess.DEVNULL)
        try:
            assert eventually(lambda: ray.cluster_resources().get("CPU") == 3)
            yield hidden
        finally:
            host.terminate()
            host.wait()


@pytest.mark.ray
@pytest.mark.slow
def test_servers_on_another_host_get_the_adapters_and_end_with_their_actors(
    elsewhere: Path, tmp_path: Path
) -> None:
    import ray

    from soulkit.train.ranks.ray_launch import RayServer

    spec = ServerSpec(model=str(tmp_path / "serves"), python=interpreter(tmp_path))
    one, other = servers = RayServer.start_all([spec, spec], elsewhere)
    try:
        assert len({one.url, other.url}) == len({one.key, other.key}) == 2
        assert "127.0.0.1" not in one.url and one.served == "base"
        one.check()
        push = elsewhere / "push"
        push.mkdir()
        file = push / "adapter_model.safetensors"
        file.write_text("weights")
        there = ray.remote(lambda: file.read_text() if file.exists() else "")
        assert ray.get(there.remote()) == ""
        for server in servers:
            server.send(push)
        assert ray.get(there.remote()) == "weights"
        one.remove(push)
        assert ray.get(there.remote()) == ""

        of_one, of_other = (processes(f"--port\0{server.port}") for server in servers)
        assert of_one and of_other
        for process in of_one:
            os.kill(process, signal.SIGKILL)
        assert eventually(lambda: died(one))
        ray.kill(other._actor)  # as when its host ends
        assert eventually(lambda: not any(map(command_line, of_other)))
        assert eventually(lambda: died(other))
    finally:
        stop_all(servers)


def died(server: VllmServer) -> bool:
    try:
        server.check()
    except UserError as error:
        return "Finished work is kept" in error.way_out
    return False


@pytest.mark.parametrize(
    ("codes", "lost", "result"),
    [
        ({0: 0, 1: 0}, False, 0),
        ({0: 2, 1: 1}, False, 2),
        ({0: 130, 1: 0}, False, 130),
        ({0: LOST, 1: -9}, False, "RankKilled: Rank 1 on there was ended by SIGKILL."),
        ({0: LOST, 1: 1}, False, "RunStopped: Rank 1 on there ended with exit code 1."),
        ({0: LOST}, True, "RankKilled: Ray could not run all ranks."),
        ({}, True, "RankKilled: Ray could not run all ranks."),
        ({1: None}, False, "ConfigError: Rank 1 runs on there, where '/runs' does not exist."),
    ],
)
@pytest.mark.ray
@pytest.mark.slow
def test_a_job_ends_with_the_cause(
    codes: dict[int, int | None], lost: bool, result: int | str
) -> None:
    pytest.importorskip("ray")
    from ray.train import WorkerGroupError

    from soulkit.train.ranks.ray_launch import RankEnd, _exit_code

    ends = {rank: RankEnd("there", code, ("/runs",)) for rank, code in codes.items()}
    error = WorkerGroupError("gone", {}) if lost else None
    try:
        assert _exit_code(ends, error) == result
    except UserError as failure:
        assert f"{type(failure).__name__}: {failure.what}" == result


def test_without_the_package_the_extra_is_named(capsys: Any, tmp_path: Path) -> None:
    if find_spec("ray"):
        pytest.skip("it is installed")
    words = ["train", "sft", "--model", "tiny", "--task", "tomi", "--data", "tomi=synth:4"]
    assert main([*words, "--launcher", "ray", "--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr().err
    assert "'ray' is not installed" in output and "[ray]" in output and output.count("\n") == 3
