"""Rollouts sampled by vLLM: what is sampled with is what is trained, and a killed run goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from soulkit.models.local.sampler import LocalModel
from soulkit.models.vllm.client import Address, VllmClient
from soulkit.models.vllm.replicas import Replicas
from soulkit.reporting import SILENT
from soulkit.runs.jsonl import read_jsonl
from soulkit.runs.records import load_records
from soulkit.train.rollouts.push import LogprobProbe, Pusher
from soulkit.types import Call, Record, Sampling, Segment
from tests.support.evaluation import changed
from tests.support.servers.proxy import Body, Proxy
from tests.support.training import lines_of, policy_of, soul

if TYPE_CHECKING:
    from soulkit.models.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.torch]

EXACT = 1e-4
STEPS = 2
REPLIES = STEPS * 2 * 3
"""Drafts of a run."""


def command(method: str, model: Path, engine: str, out: Path, *more: object) -> list[str]:
    """A short training on rows that an untrained model never solves: what moves it is a bonus."""
    return [str(one) for one in (
        "train", method, "--model", model, "--task", "tomi", "--data", "synth:30",
        "--engine", engine, "--steps", STEPS, "--prompts", 2, "--group-size", 3, "--lora-r", 8,
        "--max-tokens", 16, "--lr", 1e-2, "--set", "entropy_coef=0.1", "--set", "warmup_steps=0",
        "--dtype", "float32", "--device", "cpu", "--threads", 1,
        "--set", "checkpoint_every=1", "--out", out, *more,
    )]  # fmt: skip


def adapters_on(server: VllmServer) -> list[str]:
    headers = {"Authorization": f"Bearer {server.key}"}
    with urlopen(Request(f"{server.url}/v1/models", headers=headers), timeout=30) as reply:
        return [one["id"] for one in json.load(reply)["data"] if one["parent"]]


def replies(records: Sequence[Record]) -> list[tuple[str, int, str, tuple[int, ...]]]:
    """Who said what by which weights."""
    return sorted(
        (record.example_id, record.rollout, turn.completion.policy, turn.completion.token_ids)
        for record in records
        for trace in record.episode.traces
        for turn in trace.turns
    )


def greedy(model: LocalModel, records: Sequence[Record]) -> list[str]:
    """What a model in this process replies to the prompts of these episodes, at temperature 0."""

    async def texts() -> list[str]:
        sampling = Sampling(temperature=0.0, max_tokens=16)
        replies_R = []
        for record in records:
            call = Call(role="actor", example_id=record.example_id, turn=0)
            reply = await model.complete([Segment("user", record.prompt)], sampling, call)
            replies_R.append(reply.text)
        await model.close()
        return replies_R

    return asyncio.run(texts())


def arithmetic(out: Path) -> list[dict[str, Any]]:
    """The metrics without what servers round in their own way from batch to batch."""
    rounded = ("logprob/", "push/", "time/")
    return [
        {name: value for name, value in line.items() if not name.startswith(rounded)}
        for line in lines_of(out)
    ]


@pytest.fixture(scope="module")
def undisturbed(
    vllm_server: VllmServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", vllm_server.key)
        engine = f"vllm@{vllm_server.url}"
        assert soul(*command("grpo", tiny_model, engine, out, "--eval-every", 2)) == 0
    return out


def test_rollouts_come_from_the_weights_that_move(
    undisturbed: Path, tiny_model: Path, vllm_server: VllmServer
) -> None:
    steps = [line for line in read_jsonl(undisturbed / "metrics.jsonl") if "time/push" in line]
    assert len(steps) == STEPS
    record = json.loads((undisturbed / "conditions.json").read_text())
    assert record["actor"]["weights_basis"] == "verified"  # by every push
    for line in steps:
        assert line["logprob/sampler_gap"] <= line["logprob/sampler_gap_max"] <= EXACT
        assert line["push/distance"] <= EXACT and line["time/push"] > 0
    versions = [line["policy/version"] for line in steps]
    assert len(set(versions)) == STEPS
    records = load_records(undisturbed / "episodes.jsonl")
    assert len(records) == REPLIES
    for record in records:
        (version,) = {turn[2] for turn in replies([record])}
        assert version == versions[record.step]
    dev = load_records(undisturbed / "dev.jsonl")
    local = LocalModel.load(
        tiny_model, adapter=undisturbed / "model", dtype="float32", device="cpu"
    )
    assert dev and [record.episode.transcript[0].text for record in dev] == greedy(local, dev)
    engine = json.loads((undisturbed / "conditions.json").read_text("utf-8"))["engine"]
    assert engine == {"kind": "vllm", "version": vllm_server.version}


def test_nothing_is_left_on_the_servers(undisturbed: Path, vllm_server: VllmServer) -> None:
    assert not adapters_on(vllm_server)
    assert not list((undisturbed / "vllm" / "pushes").iterdir())


def test_killed_and_taken_up_it_says_and_learns_the_same(
    undisturbed: Path, tiny_model: Path, vllm_server: VllmServer, attached: str, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    arguments = command("grpo", tiny_model, attached, out, "--eval-every", 2)
    process = subprocess.Popen(
        [sys.executable, "-c", "from soulkit.cli.app import main; main()", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    sampled = out / "sampled.jsonl"
    while process.poll() is None:  # in the second step, with some of its replies on the disk
        begun = out.is_dir() and (out / "checkpoints" / "step_000001").is_dir()
        if begun and sampled.exists() and sampled.read_bytes().count(b"\n"):
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    assert process.wait(60) == -signal.SIGKILL
    assert adapters_on(vllm_server)  # nobody has taken it away
    recorded = sampled.read_bytes().count(b"\n")
    assert soul(*arguments) == 0
    assert not adapters_on(vllm_server) and recorded
    whole = load_records(undisturbed / "episodes.jsonl")
    assert replies(load_records(out / "episodes.jsonl")) == replies(whole)
    assert arithmetic(out) == arithmetic(undisturbed)
    weights = "model/adapter_model.safetensors"
    assert (out / weights).read_bytes() == (undisturbed / weights).read_bytes()


def test_rollouts_of_other_weights_are_found_before_they_are_learned(
    undisturbed: Path, tiny_model: Path, vllm_server: VllmServer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:  # fmt: skip
    """A proxy asks the base for the last replies of the second step, after the proof."""
    monkeypatch.setenv("VLLM_API_KEY", vllm_server.key)
    out = tmp_path / "swapped"
    with Proxy(vllm_server.url) as proxy:

        def swapped(body: Body) -> Body:
            late = len(proxy.adapters) == 2 and proxy.sampled.count(body["model"]) > 3
            return {**body, "model": vllm_server.served} if late else body

        proxy.change = swapped
        arguments = command("grpo", tiny_model, f"vllm@{proxy.url}", out, "--eval-every", 2)
        assert soul(*arguments) == 2
        assert f"step 1 from {proxy.url} were not sampled" in capsys.readouterr().err
        assert {record.step for record in load_records(out / "episodes.jsonl")} == {0}
        assert len(lines_of(out)) == 1 and not adapters_on(vllm_server)
        proxy.change = dict
        assert soul(*arguments) == 0
    assert replies(load_records(out / "episodes.jsonl")) == replies(
        load_records(undisturbed / "episodes.jsonl")
    )
    weights = "model/adapter_model.safetensors"
    assert (out / weights).read_bytes() == (undisturbed / weights).read_bytes()


def test_a_server_that_was_told_to_sleep_wakes_with_the_pushed_adapter(
    tiny_model: Path, vllm_server: VllmServer, tmp_path: Path
) -> None:
    """On a CPU nothing is released; paths and replies are the real ones."""
    policy = policy_of(tiny_model, lora={"r": 8})
    ids = tuple(policy.tokenizer.encode("Where is the apple?", add_special_tokens=False))
    fleet = Replicas([VllmClient(Address(vllm_server.url, vllm_server.key))], in_flight=4)
    pusher = Pusher(fleet, LogprobProbe(policy, (ids,)), tmp_path / "pushes", SILENT, sleeps=True)

    async def through_a_night() -> list[str]:
        names = [(await pusher(policy))[0]]
        await pusher.sleep()
        assert await fleet.each("/is_sleeping") == {vllm_server.url: {"is_sleeping": True}}
        names.append((await pusher(policy))[0])
        assert await fleet.each("/is_sleeping") == {vllm_server.url: {"is_sleeping": False}}
        assert pusher.distance is not None and pusher.distance.largest <= EXACT
        assert adapters_on(vllm_server) == names[1:]
        await pusher.close()
        await fleet.close()
        return names

    first, second = asyncio.run(through_a_night())
    assert first != second and not adapters_on(vllm_server)


def test_own_servers_are_shared_with_a_coach_and_stopped(
    tiny_model: Path, vllm_python: str, tmp_path: Path
) -> None:
    out = tmp_path / "own"
    servers = ("--coach", f"vllm:{tiny_model}", "--vllm-python", vllm_python)
    servers += ("--gpus", "3", "--sampler-gpus", "2")
    assert soul(*changed(command("ditto", tiny_model, "vllm", out, *servers), "--steps", 1)) == 0
    (line,) = [line for line in read_jsonl(out / "metrics.jsonl") if "time/push" in line]
    assert line["logprob/sampler_gap_max"] <= EXACT and line["feedback/coaches"]
    logs = [log.read_text("utf-8", "replace") for log in (out / "vllm").glob("*.log")]
    assert len(logs) == 2 and all("/v1/load_lora_adapter" in log for log in logs)
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _started_for(pid, out)]


def _started_for(pid: str, out: Path) -> bool:
    """Whether a process writes into the folder of this run."""
    try:
        return any(
            os.readlink(f"/proc/{pid}/fd/{fd}").startswith(f"{out}/vllm/")
            for fd in os.listdir(f"/proc/{pid}/fd")
        )
    except OSError:
        return False
