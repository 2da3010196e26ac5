"""Two gloo ranks sample what one process samples. As a program, this file is one of the ranks."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError
from soulkit.models.local.batching import GenerationRequest, fail
from soulkit.models.local.journal import Journal
from soulkit.models.local.sampler import LocalModel
from soulkit.models.vllm.server import free_port
from soulkit.train.model.policy import Policy
from soulkit.train.ranks import sampling
from soulkit.train.ranks.follower import follow, leading, load_student
from soulkit.train.ranks.launch import ranks_to_start
from soulkit.train.ranks.sampling import divide_rows
from soulkit.train.ranks.world import RankError, on_all_ranks, ranks
from soulkit.train.rollouts.push import LogprobProbe
from soulkit.types import Call, Completion, Sampling, Segment
from tests.support.training import config, jolt, policy_of, random_model

pytestmark = pytest.mark.torch

SIZE = 2
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "temperature": 0.7}


def test_rows_are_divided_by_work_and_keep_their_order() -> None:
    some = random.Random(4)
    for _ in range(200):
        parts, most = some.randint(1, 6), some.randint(1, 9)
        work = [some.uniform(1, 50) for _ in range(some.randint(1, parts * most))]
        slices = divide_rows(work, parts, most)
        assert [row for one in slices for row in work[one]] == work and len(slices) == parts
        assert all(len(work[one]) <= most for one in slices)
        loads = [sum(work[one]) for one in divide_rows(work, parts, len(work))]
        assert max(loads) <= sum(work) / parts + max(work)


@pytest.mark.parametrize(("gpus", "samplers", "number"), [(4, 1, 3), (3, 2, 0), (2, 0, 2)])
def test_gpus_that_sample_have_no_rank(gpus: int, samplers: int, number: int) -> None:
    job = config(gpus=gpus, sampler_gpus=samplers, engine="vllm", **SETTINGS)
    assert ranks_to_start(job) == number, "one rank needs no launcher"


@pytest.mark.parametrize(("gpus", "samplers"), [(1, 1), (2, 2), (2, 3)])
def test_a_training_without_a_gpu_is_refused(gpus: int, samplers: int) -> None:
    with pytest.raises(ConfigError, match=f"--sampler-gpus {samplers} leaves no GPU"):
        ranks_to_start(config(gpus=gpus, sampler_gpus=samplers, engine="vllm", **SETTINGS))


def test_the_end_of_the_run_is_no_failed_reply() -> None:
    async def failed() -> None:
        future = asyncio.get_running_loop().create_future()
        request = GenerationRequest([1], Sampling(), call("e", 0), (), future, 1)
        fail(request, RankError("a", "b", "c"))
        await future

    with pytest.raises(RankError):
        asyncio.run(failed())


@pytest.mark.slow
def test_two_ranks_sample_what_one_process_samples(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    env = {**os.environ, "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port())}  # fmt: skip
    processes = [
        subprocess.Popen([sys.executable, __file__, model, tmp_path],
                         env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(SIZE)
    ]  # fmt: skip
    try:
        assert [one.wait(600) for one in processes] == [0] * SIZE
    finally:
        for one in processes:
            one.kill()
    results = json.loads((tmp_path / "results.json").read_text())
    policy = policy_of(model, **SETTINGS)
    alone = asyncio.run(replies(policy.sampler(16), policy))
    assert len({tuple(reply["token_ids"]) for reply in alone}) > 8
    for reply, other, again in zip(alone, results["replies"], results["again"], strict=True):
        assert other["logprobs"] == pytest.approx(reply.pop("logprobs"), abs=1e-5)
        assert {name: other[name] for name in reply} == reply
        assert again == other, "bit for bit"
    assert [sum(parts) for parts in results["sizes"]] == [8, 7, 6], "twice a rank's batch"
    assert all(2 <= min(parts) <= max(parts) <= 4 for parts in results["sizes"])
    assert results["probe"][0] == probe(policy)[0]
    for log, other in zip(probe(policy)[1:], results["probe"][1:], strict=True):
        assert log == pytest.approx(other, abs=1e-5)
    assert results["journal"] == 2 and results["error"].endswith("ValueError on rank 1: broken")
    assert results["closed"] == [f"RuntimeError on rank {n}: the model was closed" for n in (0, 1)]


# --- the program of a rank ------------------------------------------------------------------------


def plain(reply: Completion) -> dict[str, Any]:
    """A reply without its time."""
    return json.loads(json.dumps({**asdict(reply), "usage": asdict(reply.usage) | {"seconds": 0}}))


def call(example: str, rollout: int, kind: str = "draft") -> Call:
    return Call(role="actor", example_id=example, rollout=rollout, turn=0, purpose=kind)


async def replies(model: LocalModel, policy: Policy) -> list[dict[str, Any]]:
    """Fifteen drafts of prompts of other lengths, then six texts from two contexts."""
    await model.take(policy)
    prompts = {f"e{n}": [Segment("user", "where is the apple ? " * n)] for n in (1, 2, 3, 9)}
    terms = Sampling(temperature=1.0, max_tokens=24, seed=3)
    drafts = [model.complete(prompt, terms, call(name, n))
              for name, prompt in prompts.items() for n in range(int(name[1]) % 3 + 3)]  # fmt: skip
    replies_D = await asyncio.gather(*drafts)
    expert = [Segment("user", "say where the ball is .")]
    mixed = [model.complete_mixed(prompts["e2"], expert, 0.5, terms, call("e2", n, "mixed"))
             for n in range(6)]  # fmt: skip
    return [plain(reply) for reply in [*replies_D, *await asyncio.gather(*mixed)]]


def probe(policy: Policy) -> list[Any]:
    """The probe adapter before a push: its spread, and log-probs without and with it."""
    found = LogprobProbe(policy, (tuple(range(20, 60)), tuple(range(50, 70)))).probe()
    return [found.spread, *found.before, *found.after]


@on_all_ranks
def move(policy: Policy) -> None:
    jolt(policy, 0.05, seed=1)


@on_all_ranks
def fail_on(rank: int) -> None:
    """Let a rank fail in its next part of a batch."""

    def fail(*_: object) -> None:
        del part._generate_once
        raise ValueError("broken")

    part = ranks().shared[sampling.PART]
    if rank == ranks().rank:
        part._generate_once = fail


@on_all_ranks
def sample_slowly() -> None:
    def slowly(batch: Any) -> None:
        time.sleep(0.01)
        give_up(batch)

    part = ranks().shared[sampling.PART]
    give_up, part._give_up = part._give_up, slowly


async def lead(model: Path, out: Path) -> dict[str, Any]:
    policy = load_student(config(**SETTINGS), str(model), None)
    move(policy)
    parts: list[Any] = []
    generate = sampling.generate_parts
    sampling.generate_parts = lambda *args: parts.append(generate(*args)) or parts[-1]
    results: dict[str, Any] = {}
    for name in ("replies", "again"):
        journal = Journal(out / f"{name}.jsonl")
        results[name] = await replies(
            policy.sampler(4, deterministic=True, journal=journal), policy
        )
    results["probe"] = probe(policy)
    results["sizes"] = [[len(one) for one in batch] for batch in parts[:3]]
    results["journal"] = len(Journal(out / "replies.jsonl"))
    sampler, prompt = policy.sampler(4), [Segment("user", "where is the apple ? ")]
    fail_on(1)
    calls = [sampler.complete(prompt, Sampling(), call("e", n)) for n in (0, 1)]
    results["error"] = str((await asyncio.gather(*calls, return_exceptions=True))[0])
    sample_slowly()
    sampler.codec.end_ids = frozenset()
    long = asyncio.gather(*(sampler.complete(prompt, Sampling(max_tokens=900), call("e", n))
                            for n in range(8)))  # fmt: skip
    await asyncio.sleep(0.5)
    long.cancel()
    with suppress(asyncio.CancelledError):
        await long
    await sampler.close()
    move(policy)  # waits for the batch
    results["closed"] = parts[-1]
    return results


if __name__ == "__main__":
    if int(os.environ["RANK"]):
        follow()
    else:
        with leading():
            answer = asyncio.run(lead(Path(sys.argv[1]), Path(sys.argv[2])))
        (Path(sys.argv[2]) / "results.json").write_text(json.dumps(answer))
