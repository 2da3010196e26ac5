"""What is found out about real servers, adapters on them, and the death of one of two.

Servers that do not come up: what a real vLLM writes is read, and nothing of it is left.

`soul doctor --load` asks an actor with its adapter behind a real vLLM server.

A judge that knows no language is read all the same, because vLLM holds it to its schema.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest
import yaml

from soulkit.models.codec import Codec
from soulkit.models.vllm.adapters import (
    AdapterNotServed,
    prompt_logprobs,
    push_adapter,
    serve_adapter,
)
from soulkit.models.vllm.capabilities import (
    IncompatibleServer,
    compare_weights,
    compared_prompts,
    probe_ids,
    probe_servers,
    read_folder,
)
from soulkit.models.vllm.client import Address, VllmClient
from soulkit.models.vllm.command import ServerSpec
from soulkit.models.vllm.replicas import Replicas
from soulkit.models.vllm.server import ServerFailed, VllmServer, free_port
from soulkit.models.vllm.settings import vllm_version
from soulkit.reporting import SILENT, Reporter
from tests.support.evaluation import records, soul, value
from tests.support.judged import write_rows
from tests.support.reporting import Heard
from tests.support.servers.groups import children

if TYPE_CHECKING:
    from soulkit.models.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.torch]

START_S = 300.0
PLAIN = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--served-model-name")
"""As somebody starts a server who has read nothing: raw log-probs, no adapters."""


@dataclass(frozen=True)
class Plain:
    """A server that was started by hand, in a process group of its own."""

    address: Address
    group: int

    def kill(self) -> None:
        """kill -9 to the server with its engine."""
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)


@pytest.fixture(scope="module")
def plain(
    vllm_python: str, vllm_server: VllmServer, tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Plain]:  # fmt: skip
    port, log = free_port(), tmp_path_factory.mktemp("plain") / "log"
    command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model)]
    where = ("--host", "127.0.0.1", "--port", str(port))
    env = {**os.environ, "VLLM_API_KEY": vllm_server.key, "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *where, *PLAIN, vllm_server.served], env=env, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    server = Plain(Address(f"http://127.0.0.1:{port}", vllm_server.key), process.pid)
    try:
        end = time.monotonic() + START_S
        while not answers(server.address.url):
            running = process.poll() is None and time.monotonic() < end
            assert running, log.read_text("utf-8", "replace")[-2000:]
            time.sleep(0.5)
        yield server
    finally:
        server.kill()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def fleet(*addresses: Address, reporter: Reporter = SILENT) -> Replicas:
    clients = [VllmClient(address) for address in addresses]
    return Replicas(clients, in_flight=16, reporter=reporter)


@pytest.fixture
def address(vllm_server: VllmServer) -> Address:
    return Address(vllm_server.url, vllm_server.key)


@pytest.fixture(scope="module")
def codec(tiny_model: Path) -> Codec:
    return Codec.load(tiny_model)


def listed(server: Address) -> list[str]:
    """The names that a server lists."""
    listing = asyncio.run(VllmClient(server).ask("/v1/models"))
    return [entry["id"] for entry in listing["data"]]


# -- one server ------------------------------------------------------------------------------------


def test_a_server_that_soulkit_started_lacks_nothing(
    address: Address, tiny_model: Path, codec: Codec
) -> None:
    abilities = asyncio.run(probe_servers(fleet(address), str(tiny_model), codec))
    assert abilities.adapters and abilities.remarks == ()
    assert abilities.logprobs == "processed" and abilities.max_context == codec.context_limit
    assert abilities.version.startswith("0.")


def test_an_adapter_is_proven_and_leaves_nothing(
    address: Address, vllm_server: VllmServer, tiny_adapter: Path, codec: Codec
) -> None:
    before, servers, ids = listed(address), fleet(address), probe_ids(codec)

    async def serving() -> None:
        served = await serve_adapter(servers, vllm_server.served, tiny_adapter, ids)
        await served.unload(servers)
        await servers.close()

    asyncio.run(serving())
    assert listed(address) == before


def test_log_probs_of_a_prompt_are_those_of_transformers_with_peft(
    address: Address, vllm_server: VllmServer, tiny_model: Path, tiny_adapter: Path, codec: Codec
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids, servers = probe_ids(codec), fleet(address)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tiny_adapter)).eval()
    with torch.no_grad():
        nats = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = nats.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    async def serving() -> tuple[float, ...]:
        served = await serve_adapter(servers, vllm_server.served, tiny_adapter, ids)
        logprobs = (await prompt_logprobs(servers, served.name, ids))[address.url]
        await served.unload(servers)
        await servers.close()
        return logprobs

    assert asyncio.run(serving()) == pytest.approx(expected, abs=1e-4)


def test_served_weights_are_compared_with_a_folders(
    address: Address, vllm_server: VllmServer, tiny_model: Path, tiny_adapter: Path, codec: Codec,
) -> None:  # fmt: skip
    prompts, servers = compared_prompts(codec, codec.context_limit), fleet(address)
    base, adapted = (
        read_folder(str(tiny_model), adapter, prompts, device="cpu", dtype="float32")
        for adapter in (None, tiny_adapter)
    )

    async def comparing() -> None:
        served = await serve_adapter(servers, vllm_server.served, tiny_adapter, prompts[0])
        for name, own, other in (
            (vllm_server.served, base, adapted), (served.name, adapted, base)
        ):  # fmt: skip
            line = await compare_weights(servers, name, prompts, own)
            assert address.url in line and "16-bit" not in line
            with pytest.raises(IncompatibleServer, match=address.url):
                await compare_weights(servers, name, prompts, other)
        await served.unload(servers)
        await servers.close()

    asyncio.run(comparing())


def test_an_adapter_of_too_high_a_rank_is_refused_and_nothing_stays(
    address: Address, tiny_adapter: Path, tmp_path: Path
) -> None:
    before, large = listed(address), tmp_path / "large"
    large.mkdir()
    for file in tiny_adapter.glob("adapter_*"):
        (large / file.name).write_bytes(file.read_bytes())
    config = (large / "adapter_config.json").read_text()
    (large / "adapter_config.json").write_text(config.replace('"r": 8', '"r": 512'))
    with pytest.raises(AdapterNotServed) as caught:
        asyncio.run(push_adapter(fleet(address), large, "too-large"))
    assert "512" in caught.value.why and listed(address) == before
    (large / "adapter_config.json").unlink()
    with pytest.raises(AdapterNotServed, match="cannot read"):
        asyncio.run(push_adapter(fleet(address), large, "unreadable"))
    assert listed(address) == before


def test_another_models_tokenizer_is_refused(
    address: Address, tiny_model: Path, tmp_path: Path
) -> None:
    from soulkit.models.local.tiny import tiny_tokenizer

    codec = Codec(tiny_tokenizer(["apple", "where", "box", "nobody"]))
    with pytest.raises(IncompatibleServer, match="different tokenizer"):
        asyncio.run(probe_servers(fleet(address), str(tiny_model), codec))


# -- two servers -----------------------------------------------------------------------------------


def test_a_server_started_by_hand_is_looked_through(
    address: Address, plain: Plain, tiny_model: Path, tiny_adapter: Path, codec: Codec
) -> None:
    alone = asyncio.run(probe_servers(fleet(plain.address), str(tiny_model), codec))
    assert alone.logprobs == "raw" and not alone.adapters
    assert "--logprobs-mode processed_logprobs" in alone.remarks[0]
    both = asyncio.run(probe_servers(fleet(address, plain.address), str(tiny_model), codec))
    assert both.logprobs == "raw" and both.max_context == 512
    with pytest.raises(AdapterNotServed, match="cannot load adapters while it runs") as caught:
        asyncio.run(push_adapter(fleet(address, plain.address), tiny_adapter, "policy"))
    assert plain.address.url in caught.value.what and "policy" not in listed(address)


def test_one_of_two_is_killed_half_way_and_the_replies_are_those_of_one(
    address: Address, plain: Plain, vllm_server: VllmServer, codec: Codec
) -> None:
    words, lines = probe_ids(codec), list[str]()
    bodies = [
        {
            "model": vllm_server.served, "prompt": [*words[n % 20 : n % 20 + 12], 5 + n],
            "max_tokens": 8, "temperature": 0.0 if n % 2 else 1.0, "seed": n, "top_p": 1.0,
            "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True,
        }
        for n in range(200)
    ]  # fmt: skip

    async def asking(servers: Replicas, kill_at: int) -> list[list[int]]:
        done = 0

        async def one(body: dict[str, Any]) -> list[int]:
            nonlocal done
            reply = await servers.ask("/v1/completions", body)
            done += 1
            if done == kill_at:
                plain.kill()
            return list(reply["choices"][0]["token_ids"])

        replies = await asyncio.gather(*(one(body) for body in bodies))
        await servers.close()
        return list(replies)

    single = asyncio.run(asking(fleet(address), 0))
    servers = fleet(address, plain.address, reporter=Heard(lines))
    both = asyncio.run(asking(servers, 100))
    # Between two batches rounding may turn a choice between two tokens that are as good as equal.
    assert sum(one != other for one, other in zip(both, single, strict=True)) <= 1
    assert servers.urls == (address.url,)
    (line,) = lines
    assert plain.address.url in line and "1 server left" in line


def failure(spec: ServerSpec, folder: Path) -> tuple[str, str, str]:
    before = set(children(os.getpid()))
    with pytest.raises(ServerFailed) as failed:
        VllmServer.start_all([spec], folder)
    assert set(children(os.getpid())) <= before
    return failed.value.lines()


def test_a_flag_that_vllm_does_not_know(vllm_python: str, tiny_model: Path, tmp_path: Path) -> None:
    spec = ServerSpec(model=str(tiny_model), python=vllm_python, args={"no-such-flag": "1"})
    what, why, way_out = failure(spec, tmp_path)
    assert what.endswith("did not start: it ended with exit code 2.")
    assert why.endswith("error: unrecognized arguments: --no-such-flag=1")
    assert "--vllm-arg" in way_out


def test_memory_that_is_not_there(
    vllm_python: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = vllm_version(vllm_python)
    if install is None or install.on_gpu:
        pytest.skip("the setting is that of a server on a CPU")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "900000")
    spec = ServerSpec(model=str(tiny_model), python=vllm_python)
    what, why, way_out = failure(spec, tmp_path)
    assert what.endswith("did not start: it ended with exit code 1.")
    assert "less than requested memory" in why
    assert "Engine core initialization failed" not in why
    assert "VLLM_CPU_KVCACHE_SPACE=GIB" in way_out


def test_an_actor_on_servers_that_run_is_asked_with_its_adapter(
    tmp_path: Path, tiny_model: Path, tiny_adapter: Path, attached: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    settings = {"kind": "local", "model": str(tiny_model), "adapter": str(tiny_adapter),
                "engine": attached, "tasks": ["tomi"], "data": {"*": "synth:2"},
                "max_tokens": 8}  # fmt: skip
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    assert soul("doctor", file, "--json") == 0  # nothing is loaded here to ask it
    (actor,) = json.loads(capsys.readouterr().out)["players"]
    assert actor["calls"] == 1, actor
    assert 0 < actor["completion_tokens"] <= 8


TASKS = Path(__file__).parent / "held_task" / "tasks.yaml"
N = 12


def judged(out: Path, model: Path, engine: str, judge: str, *arguments: object) -> int:
    rows = write_rows(out.with_suffix(".jsonl"), N)
    return soul(
        "eval", "local", "--model", model, "--engine", engine, "--out", out, "--tasks", TASKS,
        "--task", "held", "--data", f"held={rows}", "--judge", judge, "--max-unscored", 1,
        *arguments,
    )  # fmt: skip


def test_every_verdict_of_a_random_judge_is_read(
    vllm_python: str, tiny_model: Path, tmp_path: Path
) -> None:
    here = ("--vllm-python", vllm_python)
    assert judged(tmp_path / "run", tiny_model, "vllm", f"vllm:{tiny_model}", *here) == 0
    assert value(tmp_path / "run", "held")["n_scored"] == N
    verdicts = [verdict for r in records(tmp_path / "run") for verdict in r.score.verdicts]
    assert [verdict.replies for verdict in verdicts] == [1] * N, "read at once, every one"
    assert {tuple(verdict.said) for verdict in verdicts} == {("quality", "style")}
    logs = list((tmp_path / "run" / "vllm").glob("*.log"))
    assert len(logs) == 1, "actor and judge are one model: one server"


def test_without_its_schema_none_is(tiny_model: Path, tmp_path: Path) -> None:
    assert judged(tmp_path / "run", tiny_model, "local", f"local:{tiny_model}") == 0
    assert value(tmp_path / "run", "held")["unscored"] == {"judge_error": N}
