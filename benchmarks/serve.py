"""How fast does `soul serve` answer, beside `transformers serve` and vLLM?

    .venv/bin/python benchmarks/serve.py --vllm-python X/bin/python --json serve.json

See sampling.py for X and for the model: Qwen3-shaped, with random weights, it never ends a turn.
1, 8 and 64 clients send chat requests over HTTP, each the next one as soon as it has a reply. All
replies are greedy and have `--new` tokens (the server's count is checked), so all servers should
write the same: the share of replies equal to those of `soul serve` is printed. The servers:

* *soulkit*: `soul serve MODEL --engine local`.
* *transformers*: `transformers serve --continuous-batching`, with pages of 64 tokens, as in
  sampling.py. `--transformers-arg FLAG=VALUE` changes that and adds flags.
* *vllm*: vLLM's own server, as soulkit starts it.

All servers have the same number of threads. They take turns after a warm-up round, and the others
are stopped meanwhile (SIGSTOP); no round repeats an earlier prompt. The table has the median and
the range of the rounds. Memory is the peak resident set during the case, summed over the server's
processes. For a quick trial: `--new 4 --requests 8 --rounds 1`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from _processes import Json, Server, machine
from _sampling_cases import WORDS, forget_group_peak, group_peak
from rich.console import Console
from rich.table import Table
from sampling import versions

from soulkit.models.vllm.command import ServerSpec
from soulkit.models.vllm.server import VllmServer, free_port

HERE = Path(__file__).parent
SERVERS = ("soulkit", "transformers", "vllm")
START_S = 600
PAGES = {"--cb-block-size": "64", "--cb-num-blocks": "256", "--cb-max-batch-tokens": "1024"}


@dataclass
class Engine:
    """A running server and its measurements with the current number of clients."""

    name: str
    url: str
    group: int
    """Its process group."""
    key: str = ""
    model: str = ""
    runs: list[Json] = field(default_factory=list)

    async def find_model(self) -> None:
        """Wait until the server answers."""
        begin = time.monotonic()
        async with self.client() as client:
            while not self.model:
                try:
                    listed = (await client.get("/models")).raise_for_status().json()["data"]
                    self.model = listed[0]["id"]
                except (httpx.HTTPError, IndexError):
                    if time.monotonic() - begin > START_S:
                        raise
                    await asyncio.sleep(0.5)

    def client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=START_S, limits=limits)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the processes run; they stop afterwards."""
        os.killpg(self.group, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.group, signal.SIGSTOP)

    async def answer(self, texts: list[str], clients: int, new: int) -> Json:
        """Send all texts, `clients` at a time."""
        waiting, replies, seconds = list(enumerate(texts)), [""] * len(texts), list[float]()

        async def send() -> None:
            while waiting:
                number, text = waiting.pop(0)
                begin = time.perf_counter()
                reply = await client.post("/chat/completions", json={
                    "model": self.model, "messages": [{"role": "user", "content": text}],
                    "temperature": 0, "max_tokens": new,
                })  # fmt: skip
                answer = reply.raise_for_status().json()
                seconds.append(time.perf_counter() - begin)
                if (count := answer["usage"]["completion_tokens"]) != new:
                    raise ValueError(f"{self.name} wrote {count} tokens instead of {new}")
                replies[number] = answer["choices"][0]["message"]["content"]

        forget_group_peak(self.group)
        async with self.client() as client:
            begin = time.perf_counter()
            await asyncio.gather(*(send() for _ in range(clients)))
            wall = time.perf_counter() - begin
        return {"wall": wall, "peak": group_peak(self.group), "texts": replies,
                "median_s": statistics.median(seconds)}  # fmt: skip


def line(engine: Engine, new: int, texts: list[str]) -> Json:
    """The results of one case; resets the measurements. `texts`: the first engine's replies."""
    first, *rest = engine.runs
    counted, engine.runs = rest or [first], []
    rates = sorted(len(texts) / run["wall"] for run in counted)
    same = sum(a.strip() == b.strip() for a, b in zip(first["texts"], texts, strict=True))
    return {
        "engine": engine.name, "rounds": len(counted), "requests_per_s": statistics.median(rates),
        "least": rates[0], "most": rates[-1], "tokens_per_s": statistics.median(rates) * new,
        "latency_s": statistics.median(run["median_s"] for run in counted),
        "same": same / len(texts), "peak_bytes": max(run["peak"] for run in counted),
    }  # fmt: skip


def table(title: str, lines: list[Json]) -> Table:
    shown = Table(title=title)
    for name in ("server", "requests / s", "least – most", "tokens / s", "×", "latency", "same",
                 "GB"):  # fmt: skip
        shown.add_column(name, justify="left" if name == "server" else "right")
    for one in lines:
        shown.add_row(
            one["engine"],
            f"{one['requests_per_s']:.2f}",
            f"{one['least']:.2f} – {one['most']:.2f}",
            f"{one['tokens_per_s']:,.0f}",
            f"{one['requests_per_s'] / lines[0]['requests_per_s']:.2f}",
            f"{one['latency_s']:.2f} s", f"{one['same']:.2f}", f"{one['peak_bytes'] / 1e9:.2f}",
        )  # fmt: skip
    return shown


def measure(
    chosen: argparse.Namespace, engines: list[Engine], words: int, console: Console
) -> Json:
    tables = []
    for clients in chosen.clients:
        count = chosen.requests or max(8, 2 * clients)
        for number in range(1 + chosen.rounds):
            rng = random.Random(f"{clients}/{number}")
            texts = [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]
            for engine in engines:
                with engine.awake():
                    run = asyncio.run(engine.answer(texts, clients, chosen.new))
                engine.runs.append(run)
                spent = f"{clients} clients: {engine.name} {run['wall']:.2f} s"
                print(spent, file=sys.stderr, flush=True)
        first = engines[0].runs[0]["texts"]
        lines = [line(engine, chosen.new, first) for engine in engines]
        console.print(table(f"{clients} at once, {count} requests a round", lines))
        tables.append({"clients": clients, "requests": count, "lines": lines})
    return {"tables": tables}


@contextmanager
def running(name: str, chosen: argparse.Namespace, folder: Path) -> Iterator[Engine]:
    """The server `name`, with its log in `folder`."""
    model, threads = str(folder / "model"), str(chosen.threads)
    if name == "vllm":
        spec = ServerSpec(
            model=model, dtype="float32", device="cpu", in_flight=max(chosen.clients),
            max_context=chosen.length + chosen.new + 16, python=chosen.vllm_python,
            threads=chosen.threads,
        )  # fmt: skip
        (server,) = VllmServer.start_all([spec], folder, limit_s=START_S)
        try:
            yield Engine(name, f"{server.url.removesuffix('/v1')}/v1", server.group, server.key)
        finally:
            os.killpg(server.group, signal.SIGCONT)
            server.stop()
        return
    port = free_port("127.0.0.1")
    command = {
        "soulkit": [sys.executable, "-m", "soulkit", "serve", model, "--engine", "local",
                    "--device", "cpu", "--port", str(port)],
        "transformers": [str(Path(sys.executable).with_name("transformers")), "serve", model,
                         "--continuous-batching", "--device", "cpu", "--dtype", "float32",
                         "--port", str(port), *pairs(PAGES | chosen.transformers_arg)],
    }[name]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        yield Engine(name, f"http://127.0.0.1:{port}/v1", process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pairs(flags: Mapping[str, str]) -> list[str]:
    return [word for pair in flags.items() for word in pair]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--vllm-python", help="a Python with vLLM; without it vLLM is skipped")
    parser.add_argument("--transformers-arg", action="append", default=[], metavar="FLAG=VALUE")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, help="requests per round [max(8, 2 per client)]")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=48, help="tokens per reply")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    parts = [flag.partition("=") for flag in chosen.transformers_arg]
    chosen.transformers_arg = {f"--{name.lstrip('-')}": value for name, _, value in parts}
    return chosen


def main() -> int:
    chosen, console = arguments(), Console(width=110)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers, too
    console.print(f"python benchmarks/serve.py {shlex.join(sys.argv[1:])}", highlight=False)
    names = SERVERS if chosen.vllm_python else SERVERS[:-1]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        maker = Server([sys.executable, str(HERE / "_sampling_here.py")], folder, chosen.threads)
        made = maker.start(
            "make", folder=name, hidden=chosen.hidden, layers=chosen.layers, rank=1,
            context=chosen.length + chosen.new + 16,
        ).run()  # fmt: skip
        report: Json = {"machine": machine(), "versions": versions(maker),
                        "parameters": made["parameters"]}  # fmt: skip
        maker.close()
        console.print(*report.values(), sep="\n", highlight=False)
        engines = [stack.enter_context(running(one, chosen, folder)) for one in names]
        for engine in engines:
            asyncio.run(engine.find_model())
            os.killpg(engine.group, signal.SIGSTOP)
        words = chosen.length - made["overhead"]
        report |= measure(chosen, engines, words, console)
    if "vllm" not in names:
        console.print("vLLM: skipped (pass its Python with --vllm-python)")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({**report, "arguments": sys.argv[1:]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
