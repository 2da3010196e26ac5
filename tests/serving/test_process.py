"""`soul serve` as a process: options, signals, killed under load, and fuzzed bodies."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from soulkit.serving.backend import ScriptBackend
from tests.support.evaluation import soul, three_lines
from tests.support.servers.serving import serve_process, served

SCRIPT = """
import time

def reply(messages):
    text = str(messages[-1]["content"])
    time.sleep(float(text) if text.replace(".", "").isdigit() else 0.0)
    return "after " + text

NOT_A_FUNCTION = 3
"""
HTTP = httpx2.Client(timeout=30)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "stand_in.py"
    file.write_text(SCRIPT)
    return file


def ask(url: str, text: str, **settings: Any) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": text}], **settings}
    return HTTP.post(f"{url}/chat/completions", json=body)


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        ((), "Nothing to serve", "soul serve MODEL"),
        (("m", "--script", "s.py:f"), "Two things", "soul serve --script"),
        (("--script", "secret_keper"), "neither a task", "secret_keeper"),
        (("--script", "tomi"), "neither a task", ""),
        (("--script", "{}:reply2"), "cannot be used", ""),
        (("--script", "{}:NOT_A_FUNCTION"), "cannot be used", ""),
        (("--script", "{}:reply", "--engine", "vllm"), "--engine and", "Leave them out"),
        (("--script", "{}:reply", "--end", "tool"), "--end and", "Leave them out"),
        (("m", "--engine", "vllm@http://127.0.0.1:9", "--device", "cpu"), "--device", "Leave them"),
        (("m", "--engine", "vllm@http://127.0.0.1:9"), "does not list", "VLLM_API_KEY"),
        (("--script", "{}:reply", "--host", "0.0.0.0"), "Other machines", "--api-key-env"),
        (("--script", "{}:reply", "--api-key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY", "export"),
        (("tiny", "--engine", "llama", "--port", "0"), "not an engine", "local"),
    ],
)
def test_what_cannot_be_served_is_refused(
    script: Path, capsys: pytest.CaptureFixture[str], arguments: Any, what: str, fix: str
) -> None:
    words = [word.replace("{}", str(script)) for word in arguments]
    assert soul("serve", *words, *(() if "--port" in words else ("--port", "0"))) == 2
    lines = three_lines(capsys.readouterr().err)
    assert what in lines[0] and fix in lines[2]


@pytest.mark.slow
def test_a_signal_lets_running_replies_finish(script: Path) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        with serve_process("--script", f"{script}:reply", "--model-name", "m") as (process, url):
            assert ask(url, "x").json()["model"] == "m"
            replies: list[httpx2.Response] = []
            slow = threading.Thread(target=lambda: replies.append(ask(url, "1.5")))  # noqa: B023
            slow.start()
            time.sleep(0.4)
            process.send_signal(number)
            time.sleep(0.4)
            with pytest.raises(httpx2.ConnectError):
                httpx2.get(f"{url}/models")
            slow.join()
            assert replies[0].json()["choices"][0]["message"]["content"] == "after 1.5"
            _, err = process.communicate(timeout=30)
            assert (process.returncode, err.splitlines()[-1]) == (code, "stopped")


@pytest.mark.slow
def test_it_is_killed_and_restarted_under_load(script: Path) -> None:
    """Clients that retry get every reply; the new process takes the same port at once."""
    arguments = ("--script", f"{script}:reply", "--model-name", "m")
    stop = threading.Event()

    async def talk(url: str) -> int:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=20) as many:
            done = 0
            while not stop.is_set():
                wanted = f"0.0{done % 10}"
                messages: Any = [{"role": "user", "content": wanted}]
                reply = await many.chat.completions.create(model="m", messages=messages)
                assert reply.choices[0].message.content == f"after {wanted}"
                done += 1
            return done

    async def load(url: str) -> list[int]:
        return await asyncio.gather(*(talk(url) for _ in range(8)))

    counts: list[int] = []
    with serve_process(*arguments) as (first, url):
        port = int(url.split(":")[2].partition("/")[0])
        clients = threading.Thread(target=lambda: counts.extend(asyncio.run(load(url))))
        clients.start()
        time.sleep(1.0)
        first.kill()
        first.wait()
    with serve_process(*arguments, port=port) as (_, again):
        assert again == url
        time.sleep(3.0)
        stop.set()
        clients.join(timeout=60)
    assert len(counts) == 8 and min(counts) > 1


@pytest.mark.slow
def test_512_connections_are_accepted_at_once(script: Path) -> None:
    async def ask_all(url: str) -> list[int]:
        limits = httpx2.Limits(max_connections=512)
        async with httpx2.AsyncClient(timeout=60, limits=limits) as many:
            body = {"messages": [{"role": "user", "content": "0.01"}]}
            asked = (many.post(f"{url}/chat/completions", json=body) for _ in range(512))
            return [reply.status_code for reply in await asyncio.gather(*asked)]

    with serve_process("--script", f"{script}:reply") as (_, url):
        assert asyncio.run(ask_all(url)) == [200] * 512


# -- fuzzed bodies ---------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": [{"type": "text", "text": "I am here"}]}]  # fmt: skip
VALID: dict[str, Any] = {
    "model": "m", "messages": MESSAGES, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9,
    "stop": ["x"], "seed": 3, "n": 1, "stream": False, "user": "u", "metadata": {"a": "b"},
    "stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "tools": [],
}  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3.5, 1e308, -1e-9, 10**30, 2**63, "", "x", "\x00", "é🙂",
    "a" * 5000, [], [[]], {}, {"a": {"b": []}}, [None], ["x"], [1], [{}], [{"role": "user"}],
    {"type": "text"},
    [{"role": "user", "content": ""}], [{"role": "tool", "content": None}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}],
    {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}, [{"type": "function"}],
)  # fmt: skip


def fuzzed(seed: int) -> bytes:
    """A body that is valid but for a few places."""
    rng = random.Random(seed)
    body: Any = json.loads(json.dumps(VALID))
    for _ in range(rng.randint(1, 4)):
        where: Any = rng.choice([body, body, *(m for m in body["messages"] if type(m) is dict)]
                                if type(body.get("messages")) is list else [body])  # fmt: skip
        name = rng.choice([*where, "logprobs", "tool_choice", "content", "\ud800", "top_k"])
        if rng.random() < 0.2:
            where.pop(name, None)
        else:
            where[name] = rng.choice(ODD)
    raw = json.dumps(body).encode()
    kind = rng.random()
    if kind < 0.1:
        return raw[: rng.randrange(len(raw))]
    if kind < 0.15:
        return rng.randbytes(rng.randrange(200))
    if kind < 0.2:
        return b'{"messages": ' + rng.choice([b"[", b'{"a":']) * rng.choice([10, 50_000])
    if kind < 0.3:
        place = rng.randrange(len(raw))
        return raw[:place] + rng.randbytes(rng.randint(1, 3)) + raw[place + 1 :]
    return raw


def send(url: str, seeds: range) -> set[int]:
    """The statuses of these bodies; every error is an error object without internals."""
    statuses = set()
    for seed in seeds:
        reply = HTTP.post(f"{url}/chat/completions", content=fuzzed(seed))
        statuses.add(reply.status_code)
        if reply.headers["content-type"] == "application/json":
            content = reply.json()
            assert reply.status_code == 200 or content["error"]["message"], seed
        assert reply.status_code in (200, 400, 404, 413), (seed, reply.text)
        assert "Traceback" not in reply.text and ".py" not in reply.text, seed
    return statuses


def test_fuzzed_bodies_get_an_answer() -> None:
    with served(ScriptBackend("m", lambda messages: f"{messages[-1]['content']}!")) as url:
        assert send(url, range(150)) == {200, 400, 404}


def resident(process: int) -> int:
    """Memory of a process in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) >> 10


@pytest.mark.slow
def test_1000_fuzzed_bodies_leave_a_model_serving() -> None:
    model = ("tiny", "--engine", "local", "--max-context", "64", "--model-name", "m")
    with serve_process(*model) as (process, url):
        assert {200, 400, 404} <= send(url, range(250))
        before = resident(process.pid)
        send(url, range(250, 1000))
        assert resident(process.pid) - before < 64
        assert ask(url, "Hello", max_tokens=3).status_code == 200
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert "Traceback" not in err and "failed" not in err, err[-2000:]
