"""How long does an evaluation take besides the model? soulkit beside inspect_ai and lm-eval.

    .venv/bin/python benchmarks/eval_overhead.py --json overhead.json \
        --inspect-python X/bin/python --lm-eval-python Y/bin/python

makes X and Y, Pythons with the two harnesses, first (without them only soulkit is measured):

    python -m venv X && X/bin/pip install inspect_ai==0.3.285 openai==3.52.0
    python -m venv Y && Y/bin/pip install "lm_eval[api]==0.4.13"

A server on this machine's loopback, a process of its own, answers every chat request after 50 ms,
however many there are at once. Each contender asks it the same 2,000 made ToMi questions, 64 at a
time, greedy, and scores the answers:

* the bare openai SDK: pooled connections, 64 workers, nothing parsed, scored or kept;
* soulkit: `soul eval api` as it comes, with its ledger and a record on disk for each episode;
* inspect_ai and lm-evaluation-harness: their command lines with a task file of a few lines, their
  samples logged.

Every run is a fresh process, and contenders take turns. A time is the median wall clock from the
start of the process to its end, so it holds the start-up; the server's log splits it into before
the first request, asking, and after the last reply. "Own" time per episode is what a run takes
longer than the bare SDK, divided by the episodes: both wait for the model equally, and the SDK's
own start and work cancel out. Memory grown is the highest resident set from the 200th reply on,
less that at the 200th. Accuracies must agree, or the contenders did not do the same.

All but the bare SDK also write to the disk, which others may keep busy: what it takes to keep one
more record there, before and after, is printed as well.

The last line reads 100,000 rows of a file and renders their prompts, interpreter included.

Numbers mean something on a machine that does nothing else: client and server need a core each.
`--episodes 200 --rows 1000 --repeats 1` shortens everything, to try the script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _processes import Json, machine
from rich.console import Console
from rich.table import Table

TASK, MODEL = "tomi", "scripted"
MAX_TOKENS = 32
ROWS, MANY, PROMPTS, PAIRS = "rows.jsonl", "many.jsonl", "prompts.json", "pairs.jsonl"
"""What the contenders read: soulkit's rows, and their prompts and answers for the others."""
EARLY = 200
"""Replies after which memory is read for the first time."""
LOOK_S = 0.01
"""Seconds between two looks at a process's memory."""
SAME = 1e-6
HEADINGS = ("", "runs", "whole s", "least – most", "start s", "asking s", "end s", "CPU s",
            "own ms", "MB", "at once", "accuracy", "aims")  # fmt: skip
MINUTES = 5
"""A run that takes longer is given up."""

BARE = """
import asyncio, json, sys
import openai

async def main(path, url, workers, model, tokens):
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    client = openai.AsyncOpenAI(api_key="unused", base_url=url, max_retries=0, http_client=http)
    prompts = iter(json.load(open(path)))

    async def work():
        for prompt in prompts:
            await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": prompt}],
                temperature=0, max_tokens=int(tokens),
            )

    await asyncio.gather(*(work() for _ in range(int(workers))))
    await client.close()

asyncio.run(main(*sys.argv[1:]))
"""

INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate

@task
def bench():
    rows = json_dataset({path!r}, FieldSpec(input="prompt", target="gold"))
    return Task(dataset=rows, solver=generate(), scorer=pattern("<answer>(.*?)</answer>"))
"""

INSPECT_ACCURACY = """
import sys
from inspect_ai.log import read_eval_log
found = read_eval_log(sys.argv[1], header_only=True).results.scores[0].metrics
print(found["accuracy"].value)
"""

LM_EVAL_TASK = """
task: bench
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{path}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{gold}}}}"
generation_kwargs: {{until: [], do_sample: false, temperature: 0, max_gen_toks: {tokens}}}
filter_list:
  - name: answer
    filter: [{{function: regex, regex_pattern: "<answer>(.*?)</answer>"}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


# -- the server ----------------------------------------------------------------------------------


class Chat(asyncio.Protocol):
    """One connection: HTTP/1.1 with lengths, kept alive, each reply a fixed while after its end."""

    def __init__(self, latency_s: float, seen: Seen) -> None:
        self.latency_s, self.seen, self.buffer = latency_s, seen, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", self.buffer[: end + 2])
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(self.buffer) < whole:
                return
            body, self.buffer = self.buffer[end + 4 : whole], self.buffer[whole:]
            self.seen.arrived()
            asyncio.get_running_loop().call_later(self.latency_s, self.reply, body)

    def reply(self, body: bytes) -> None:
        if not self.transport.is_closing():
            content = json.dumps(completion(json.loads(body or b"{}"))).encode()
            head = f"Content-Type: application/json\r\nContent-Length: {len(content)}"
            self.transport.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + content)
        self.seen.replied()


def completion(asked: Json) -> Json:
    """Answers with the container that the story names last: right for about half the questions."""
    messages = asked.get("messages") or [{"content": ""}]
    places = re.findall(r"The (\w+) stood in", json.dumps(messages[-1]["content"]))
    text = f"<answer>{places[-1] if places else 'nowhere'}</answer>"
    return {
        "id": "chatcmpl-bench", "object": "chat.completion", "created": 0, "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text},
                     "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 150, "completion_tokens": 5, "total_tokens": 155},
    }  # fmt: skip


class Seen:
    """What the server saw, in memory that both processes read."""

    def __init__(self, context: Any) -> None:
        self.requests, self.replies = context.Value("q", 0), context.Value("q", 0)
        self.open, self.most = context.Value("q", 0), context.Value("q", 0)
        self.first, self.last = context.Value("d", 0.0), context.Value("d", 0.0)

    def arrived(self) -> None:
        if self.requests.value == 0:
            self.first.value = time.monotonic()  # the same clock in every process
        self.requests.value += 1
        self.open.value += 1
        self.most.value = max(self.most.value, self.open.value)

    def replied(self) -> None:
        self.replies.value += 1
        self.open.value -= 1
        self.last.value = time.monotonic()

    def forget(self) -> None:
        """Between two contenders, when nothing is asked."""
        for count in (self.requests, self.replies, self.open, self.most):
            count.value = 0


def serve(port: Any, latency_s: float, seen: Seen) -> None:
    """The server process: puts its port into `port` and runs until it is stopped."""

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        chat = lambda: Chat(latency_s, seen)  # noqa: E731 - one connection's protocol
        server = await loop.create_server(chat, "127.0.0.1", 0, backlog=1024)
        port.value = server.sockets[0].getsockname()[1]
        await server.serve_forever()

    asyncio.run(listen())


def started(context: Any, latency_s: float, seen: Seen) -> tuple[Any, str]:
    """The running server and its base URL."""
    port = context.Value("q", 0)
    server = context.Process(target=serve, args=(port, latency_s, seen), daemon=True)
    server.start()
    while port.value == 0:
        if not server.is_alive():
            raise SystemExit("the server did not start")
        time.sleep(LOOK_S)
    return server, f"http://127.0.0.1:{port.value}/v1"


# -- one run of one contender --------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    name: str
    command: Callable[[Path], list[str]]
    """From an empty folder of the run's own."""
    accuracy: Callable[[Path, str], float] | None
    """From that folder and the standard output; None: nothing is scored."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""


@dataclass(frozen=True)
class Sample:
    """One run; seconds and bytes."""

    seconds: float
    before: float
    asking: float
    after: float
    cpu: float
    grown: int
    peak: int
    most_open: int
    accuracy: float | None


class Watch(threading.Thread):
    """Looks at a process's memory until it ends."""

    def __init__(self, pid: int, seen: Seen) -> None:
        super().__init__(daemon=True)
        self.path, self.seen = Path(f"/proc/{pid}/status"), seen
        self.early = self.highest = self.peak = 0

    def run(self) -> None:
        while (found := self._memory()) is not None:
            resident, self.peak = found[1], max(self.peak, found[0])
            if self.seen.replies.value >= EARLY:
                self.early = self.early or resident
                self.highest = max(self.highest, resident)
            time.sleep(LOOK_S)

    def _memory(self) -> tuple[int, int] | None:
        """(highest, now) in bytes; None once the process has ended."""
        try:
            found = re.findall(r"Vm(?:HWM|RSS):\s+(\d+) kB", self.path.read_text())
        except (FileNotFoundError, ProcessLookupError):
            return None
        return (int(found[0]) * 1024, int(found[1]) * 1024) if len(found) == 2 else None


def measure(contender: Contender, folder: Path, seen: Seen, episodes: int) -> Sample:
    """Run a contender once. SystemExit with what it said when it failed or asked too little."""
    folder.mkdir()
    seen.forget()
    settings = {**os.environ, "NO_PROXY": "127.0.0.1", **contender.settings}
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        start = time.monotonic()
        process = subprocess.Popen(
            contender.command(folder), stdout=out, stderr=err, cwd=folder, env=settings
        )
        watch, late = Watch(process.pid, seen), threading.Timer(60 * MINUTES, process.kill)
        watch.start()
        late.start()
        _, status, used = os.wait4(process.pid, 0)
        end = time.monotonic()
        process.returncode = os.waitstatus_to_exitcode(status)
    late.cancel()
    watch.join()
    said, errors = (folder / "out.txt").read_text(), (folder / "err.txt").read_text()
    if process.returncode or seen.replies.value != episodes:
        raise SystemExit(
            f"{contender.name}: exit {process.returncode}, {seen.replies.value} of {episodes} "
            f"requests\n{(said + errors)[-3000:]}"
        )
    return Sample(
        seconds=end - start, before=seen.first.value - start,
        asking=seen.last.value - seen.first.value, after=end - seen.last.value,
        cpu=used.ru_utime + used.ru_stime, grown=watch.highest - watch.early, peak=watch.peak,
        most_open=seen.most.value,
        accuracy=contender.accuracy(folder, said) if contender.accuracy else None,
    )  # fmt: skip


def sync_ms(folder: Path) -> float:
    """Median milliseconds that the disk takes to keep one more record of 2 kB."""
    taken = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(100):
            file.write(bytes(2048))
            start = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken)


# -- the contenders ------------------------------------------------------------------------------


def write_files(folder: str, episodes: int, rows: int) -> None:
    """Makes the rows of all contenders, in a process of its own: it grows."""
    from soulkit.data.rows import load_examples
    from soulkit.data.synth import synth
    from soulkit.tasks.registry import load_registry

    made = Path(folder)
    for path, count in ((made / ROWS, episodes), (made / MANY, rows)):
        lines = (json.dumps({"data_source": TASK, **row}) for row in synth(TASK, count, 1))
        path.write_text("".join(f"{line}\n" for line in lines))
    task = load_registry().task(TASK, "paper")
    examples = load_examples(task, [made / ROWS]).examples
    pairs = [{"prompt": task.preview(e)[0].text, "gold": task.gold_text(e)} for e in examples]
    (made / PROMPTS).write_text(json.dumps([pair["prompt"] for pair in pairs]))
    (made / PAIRS).write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))


def load_many(path: str, count: Any) -> None:
    """Reads rows and renders their prompts as an evaluation does; how many go to `count`."""
    from soulkit.data.rows import load_examples
    from soulkit.tasks.registry import load_registry

    task = load_registry().task(TASK, "paper")
    prompts = [
        task.preview(example)[0].text for example in load_examples(task, [Path(path)]).examples
    ]
    count.value = len(prompts)


def bare(files: Path, url: str, at_once: int) -> Contender:
    def command(_: Path) -> list[str]:
        asked = [str(files / PROMPTS), url, str(at_once), MODEL, str(MAX_TOKENS)]
        return [sys.executable, "-c", BARE, *asked]

    return Contender("bare openai SDK", command, None)


def soulkit(files: Path, url: str, at_once: int) -> Contender:
    def command(folder: Path) -> list[str]:
        return [
            sys.executable, "-m", "soulkit.cli.app", "eval", "api", "--model", MODEL,
            "--base-url", url, "--task", TASK, "--data", f"{TASK}={files / ROWS}",
            "--temperature", "0", "--max-tokens", str(MAX_TOKENS), "--concurrency", str(at_once),
            "--out", str(folder / "run"), "--json",
        ]  # fmt: skip

    def accuracy(_: Path, said: str) -> float:
        return float(json.loads(said)["tasks"][TASK]["value"]["mean"])

    return Contender("soul eval api", command, accuracy)


def inspect_ai(python: str, files: Path, url: str, at_once: int) -> Contender:
    def command(folder: Path) -> list[str]:
        (folder / "bench.py").write_text(INSPECT_TASK.format(path=str(files / PAIRS)))
        return [
            python, "-c", "from inspect_ai._cli.main import main; main()", "eval", "bench.py",
            "--model", f"openai-api/bench/{MODEL}", "--model-base-url", url,
            "--temperature", "0", "--max-tokens", str(MAX_TOKENS), "--log-dir", "logs",
            "--max-connections", str(at_once), "--max-samples", str(at_once),
            "--display", "plain",
        ]  # fmt: skip

    def accuracy(folder: Path, _: str) -> float:
        log = str(next((folder / "logs").glob("*.eval")))
        return float(subprocess.check_output([python, "-c", INSPECT_ACCURACY, log], text=True))

    return Contender("inspect_ai", command, accuracy, {"BENCH_API_KEY": "unused"})


def lm_eval(python: str, files: Path, url: str, at_once: int) -> Contender:
    def command(folder: Path) -> list[str]:
        task = LM_EVAL_TASK.format(path=files / PAIRS, tokens=MAX_TOKENS)
        (folder / "bench.yaml").write_text(task)
        model = (f"model={MODEL},base_url={url}/chat/completions,num_concurrent={at_once},"
                 "max_retries=1,tokenized_requests=False")  # fmt: skip
        return [
            python, "-m", "lm_eval", "--model", "local-chat-completions", "--model_args", model,
            "--tasks", "bench", "--include_path", str(folder), "--apply_chat_template",
            "--output_path", str(folder / "results"), "--log_samples",
        ]  # fmt: skip

    def accuracy(folder: Path, _: str) -> float:
        found = json.loads(next((folder / "results").rglob("results_*.json")).read_text())
        return float(found["results"]["bench"]["exact_match,answer"])

    offline = {"OPENAI_API_KEY": "unused", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
               "HF_HOME": str(files / "hf")}  # fmt: skip
    return Contender("lm-evaluation-harness", command, accuracy, offline)


def installed(python: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python} has no {package}: see the first lines of this script")
    return done.stdout.strip()


# -- all of them ---------------------------------------------------------------------------------


def contenders(chosen: argparse.Namespace, files: Path, url: str) -> list[Contender]:
    """The bare SDK first: the others are compared to it."""
    found = [bare(files, url, chosen.concurrency), soulkit(files, url, chosen.concurrency)]
    if chosen.inspect_python:
        found.append(inspect_ai(chosen.inspect_python, files, url, chosen.concurrency))
    if chosen.lm_eval_python:
        found.append(lm_eval(chosen.lm_eval_python, files, url, chosen.concurrency))
    return found


def take_turns(
    lanes: Sequence[Contender], chosen: argparse.Namespace, folder: Path, seen: Seen
) -> dict[str, list[Sample]]:
    """Everybody once, then everybody again: a neighbour's burst does not hit one of them alone."""
    found: dict[str, list[Sample]] = {lane.name: [] for lane in lanes}
    for turn in range(chosen.repeats):
        for number, lane in enumerate(lanes):
            sample = measure(lane, folder / f"run-{number}-{turn}", seen, chosen.episodes)
            print(f"{lane.name}: {sample.seconds:.2f} s", file=sys.stderr, flush=True)
            found[lane.name].append(sample)
    return found


def line(name: str, samples: Sequence[Sample], bare_s: float, episodes: int) -> Json:
    """The medians of a contender; memory is the most of any run."""
    parts = ("seconds", "before", "asking", "after", "cpu")
    times = {part: statistics.median(getattr(s, part) for s in samples) for part in parts}
    seconds, scores = sorted(s.seconds for s in samples), {s.accuracy for s in samples}
    if len(scores) > 1:
        raise SystemExit(f"{name}: greedy runs differ, accuracies {scores}")
    return {
        "contender": name, "runs": len(samples), **times,
        "fastest": seconds[0], "slowest": seconds[-1],
        "own_ms": 1000 * (times["seconds"] - bare_s) / episodes,
        "grown_bytes": max(s.grown for s in samples), "peak_bytes": max(s.peak for s in samples),
        "most_at_once": max(s.most_open for s in samples), "accuracy": samples[0].accuracy,
        "verdicts": [],
    }  # fmt: skip


def loading(context: Any, path: Path, rows: int) -> Json:
    """Seconds of a process that reads the rows and renders their prompts."""
    count, start = context.Value("q", 0), time.monotonic()
    process = context.Process(target=load_many, args=(str(path), count))
    process.start()
    process.join()
    seconds = time.monotonic() - start
    if process.exitcode or count.value == 0:
        raise SystemExit("loading failed")
    return {"rows": rows, "prompts": count.value, "seconds": seconds}


def judge(found: Sequence[Json], loaded: Json) -> None:
    """Notes beside the measurements which aims they meet."""
    ours = found[1]
    ours["verdicts"] = [
        _verdict("whole", ours["seconds"], 6.0, "s"),
        _verdict("own", ours["own_ms"], 2.0, "ms"),
        _verdict("grown", ours["grown_bytes"] / 1e6, 100.0, "MB"),
    ]
    loaded["verdicts"] = [_verdict("whole", loaded["seconds"], 20.0, "s")]
    for row in found[2:]:
        apart = abs(row["accuracy"] - ours["accuracy"])
        row["verdicts"] = [_verdict("accuracy off", apart, SAME, "")]


def _verdict(what: str, measured: float, aim: float, unit: str) -> Json:
    return {"what": what, "aim": aim, "unit": unit, "passed": measured <= aim}


# -- printing ------------------------------------------------------------------------------------


def table(report: Json) -> Table:
    chosen = report["settings"]
    title = (f"{chosen['episodes']:,} questions, {chosen['concurrency']} at once, "
             f"{1000 * chosen['latency_s']:.0f} ms each")  # fmt: skip
    least = chosen["episodes"] / chosen["concurrency"] * chosen["latency_s"]
    shown = Table(title=title, caption=f"Waiting alone takes {least:.2f} s. Memory: grown / peak.")
    for heading in HEADINGS:
        left = heading in ("", "aims")
        shown.add_column(heading, justify="left" if left else "right")
    for row in report["contenders"]:
        shown.add_row(*_cells(row))
    shown.add_section()
    loaded = report["loading"]
    blank = [""] * (len(shown.columns) - 4)
    name = f"load {loaded['rows']:,} rows, render"
    shown.add_row(name, "1", f"{loaded['seconds']:.2f}", *blank, _aims(loaded))
    return shown


def _aims(row: Json) -> str:
    return ", ".join(
        f"{v['what']} ≤ {v['aim']:g} {v['unit']} ".replace("  ", " ")
        + ("[green]pass[/]" if v["passed"] else "[red]MISSED[/]")
        for v in row["verdicts"]
    )


def _cells(row: Json) -> Iterator[str]:
    yield row["contender"]
    yield str(row["runs"])
    yield f"{row['seconds']:.2f}"
    yield f"{row['fastest']:.2f} – {row['slowest']:.2f}"
    for part in ("before", "asking", "after", "cpu"):
        yield f"{row[part]:.2f}"
    yield f"{row['own_ms']:.2f}"
    yield f"{row['grown_bytes'] / 1e6:.0f} / {row['peak_bytes'] / 1e6:.0f}"
    yield str(row["most_at_once"])
    yield "" if row["accuracy"] is None else f"{row['accuracy']:.4f}"
    yield _aims(row)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--inspect-python", help="a Python with inspect_ai; without it, not run")
    parser.add_argument("--lm-eval-python", help="a Python with lm_eval; without it, not run")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each reply")
    parser.add_argument("--rows", type=int, default=100_000, help="rows to load and render")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every contender")
    return parser.parse_args()


def versions(chosen: argparse.Namespace) -> Json:
    found = {"python": sys.version.split()[0], "soulkit": version("soulkit"),
             "openai": version("openai")}  # fmt: skip
    if chosen.inspect_python:
        found["inspect_ai"] = installed(chosen.inspect_python, "inspect_ai")
    if chosen.lm_eval_python:
        found["lm_eval"] = installed(chosen.lm_eval_python, "lm_eval")
    return found


def measured(chosen: argparse.Namespace, folder: Path) -> Json:
    """Everything, as `--json` writes it."""
    context = multiprocessing.get_context("spawn")
    report: Json = {"machine": machine(), "versions": versions(chosen), "settings": {
        "episodes": chosen.episodes, "concurrency": chosen.concurrency,
        "latency_s": chosen.latency, "rows": chosen.rows}}  # fmt: skip
    making = context.Process(target=write_files, args=(str(folder), chosen.episodes, chosen.rows))
    making.start()
    making.join()
    if making.exitcode:
        raise SystemExit("the rows could not be made")
    report["sync_ms"] = [sync_ms(folder)]
    seen = Seen(context)
    server, url = started(context, chosen.latency, seen)
    found = take_turns(contenders(chosen, folder, url), chosen, folder, seen)
    server.terminate()
    report["sync_ms"].append(sync_ms(folder))
    bare_s = statistics.median(s.seconds for s in next(iter(found.values())))
    report["contenders"] = [line(*lane, bare_s, chosen.episodes) for lane in found.items()]
    report["loading"] = loading(context, folder / MANY, chosen.rows)
    judge(report["contenders"], report["loading"])
    return report


def main() -> int:
    chosen, console = arguments(), Console(width=190)
    with tempfile.TemporaryDirectory() as folder:
        report = measured(chosen, Path(folder))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1))
    before, after = report["sync_ms"]
    disk = f"a record is on the disk after {before:.2f} ms, {after:.2f} ms at the end"
    console.print(f"{report['machine']}; {disk}", highlight=False)
    console.print(", ".join(f"{k} {v}" for k, v in report["versions"].items()), highlight=False)
    for option, name in (("inspect_python", "inspect_ai"), ("lm_eval_python", "lm_eval")):
        if getattr(chosen, option) is None:
            console.print(f"{name}: not run (name its Python with --{option.replace('_', '-')})")
    console.print(table(report))
    rows = [*report["contenders"], report["loading"]]
    return int(not all(verdict["passed"] for row in rows for verdict in row["verdicts"]))


if __name__ == "__main__":
    sys.exit(main())
