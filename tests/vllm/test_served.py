"""`soul serve` in front of vLLM: replies, errors and cancelled streams pass through."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from soulkit.models.vllm.client import Address
from soulkit.models.vllm.server import VllmServer
from soulkit.serving.vllm_backend import VllmBackend
from tests.support.servers.serving import serve_process, served

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def client(vllm_server: VllmServer) -> Iterator[openai.OpenAI]:
    address = Address(vllm_server.url, vllm_server.key)
    with served(VllmBackend(address, vllm_server.served, name="sim")) as url:
        yield openai.OpenAI(base_url=url, api_key="any", max_retries=0)


def ask(client: openai.OpenAI, text: str = "Where is the pen?", **settings: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="sim", messages=messages, **settings)


def test_whole_and_streamed_replies_are_equal(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=12, logprobs=True)
    chunks = list(ask(client, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert {c.model for c in chunks} == {whole.model} == {"sim"}
    assert chunks[-1].usage == whole.usage and whole.choices[0].logprobs.content
    assert ask(client, max_tokens=12, seed=5).choices[0].message.content != text


def test_its_errors_name_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="1024"):
        ask(client, "where " * 2000)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, temperature="hot")


def test_a_cancelled_stream_ends_in_vllm(client: openai.OpenAI, vllm_server: VllmServer) -> None:
    def running() -> float:
        headers = {"Authorization": f"Bearer {vllm_server.key}"}
        lines = httpx2.get(f"{vllm_server.url}/metrics", headers=headers).text.splitlines()
        return sum(float(one.split()[-1]) for one in lines
                   if one.startswith("vllm:num_requests_running"))  # fmt: skip

    stream = ask(client, max_tokens=1000, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    stream.close()
    end = time.monotonic() + 3.0
    while running():
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.05)


@pytest.mark.slow
def test_the_command_starts_and_stops_vllm_with_an_adapter(
    vllm_python: str, tiny_model: Path, tiny_adapter: Path
) -> None:
    words = (tiny_model, "--adapter", tiny_adapter, "--engine", "vllm", "--model-name", "sim")
    env, before = {"SOULKIT_VLLM_PYTHON": vllm_python}, sorted(_processes(tiny_model))
    with serve_process(*words, env=env, limit_s=600) as (process, url):
        client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
        reply = ask(client, max_tokens=12)
        assert (reply.model, reply.usage.completion_tokens > 0) == ("sim", True)
        assert client.models.retrieve("sim").model_dump()["max_model_len"] == 1024
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "engine: vllm" in err
    assert sorted(_processes(tiny_model)) == before


def _processes(folder: Path) -> list[str]:
    """Processes with this folder in their command lines."""
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in lines.splitlines() if str(folder) in line]
