"""Can one process play hundreds of judged dialogues at once, and how much overhead does it add?

    .venv/bin/python benchmarks/judged_load.py [--json load.json]
    .venv/bin/python benchmarks/judged_load.py --episodes 2000 --outages 10

A local server in its own process answers every chat request after one to four seconds (determined
by the request) and reports the delay in its reply. 512 generated Sotopia scenes run at once: up to
twenty turns each, then a rating and an audit, with every reply in a ledger. No episode may be lost
or hang, and the process may use 1.5 GB.

Two lower bounds limit a run: its slowest chain (the sum, from the ledger, of the latencies of one
episode's turns and of the slower of its two verdicts), and its number of calls times the cost of
one call through the bare openai SDK with as many pooled connections. The cost of the SDK is the
processor time of a new process that makes `--sdk-calls` calls to the same server, equally parallel,
with prompts of similar length. The budget is 1.25 times the larger bound. The cost of a call in
soulkit, including records and ledger, is printed too.

With `--outages SECONDS`, `soul eval api` plays the scenes instead, and the judge is another server,
which is down in every second period of that length: it answers with status 503, drops the
connection, or sends a reply that is no JSON. At the end every episode has to be scored, or unscored
with a reason.

Run it on an idle machine. For a quick trial: `--episodes 32 --latency 0.1 0.4 --sdk-calls 400`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from _processes import Json, machine
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
TASK, MODEL = "sotopia", "scripted"
BUDGET, MEMORY_GB = 1.25, 1.5
LINE = (
    '{"action_type": "speak", "argument": "I see what you mean, and I would like to think about it '
    "a little before I say yes; tell me first what you had in mind, when you would need it, and "
    'whether there is anything that you would rather not talk about today."}'
)
WORDS = 700
"""Length of the bare SDK's prompts: about the average length of a dialogue."""


@contextmanager
def served(latency: list[float], outages_s: float = 0.0) -> Iterator[str]:
    """The base URL of the server, which runs in its own process."""
    command = [sys.executable, "-m", "tests.support.servers.faulty", "--answer", LINE,
               "--outages-s", str(outages_s), "--latency"]  # fmt: skip
    process = subprocess.Popen(
        [*command, *map(str, latency)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


# -- the two sides, each in its own process --------------------------------------------------------


async def ask_bare(url: str, calls: int, at_once: int) -> None:
    import openai

    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
        max_connections=at_once, max_keepalive_connections=at_once
    )
    http = openai.DefaultAsyncHttpxClient(trust_env=False, limits=limits)
    client = openai.AsyncOpenAI(api_key="unused", base_url=url, max_retries=0, http_client=http)
    numbers = iter(range(calls))

    async def work() -> None:
        for number in numbers:
            prompt = f"{number} " + "word " * WORDS
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": prompt}],
                temperature=1.0, max_tokens=512,
            )  # fmt: skip

    await asyncio.gather(*(work() for _ in range(at_once)))
    await client.close()


def bare(url: str, calls: int, at_once: int) -> Json:
    """Cost of one SDK call, without imports and the first connections."""
    asyncio.run(ask_bare(url, at_once, at_once))
    start, wall = time.process_time(), time.perf_counter()
    asyncio.run(ask_bare(url, calls, at_once))
    return {
        "calls": calls,
        "seconds": time.perf_counter() - wall,
        "cost_ms": 1000 * (time.process_time() - start) / calls,
    }


def play(url: str, episodes: int, folder: Path) -> Json:
    """Play all scenes at once; returns the outcome and the cost."""
    from soulkit.models.api.endpoint import Endpoint
    from soulkit.models.base import Cast, Player
    from soulkit.models.ledger.ledger import Ledger
    from soulkit.play.engine import Engine, Job
    from soulkit.tasks.kit.made_rows import make_rows
    from soulkit.tasks.kit.registry import load_registry
    from soulkit.types import Record, Sampling

    task = load_registry().task(TASK, "paper")
    jobs = [Job(task, task.example(row)) for row in make_rows(task, episodes, 1)]
    with Ledger(folder / "ledger.sqlite") as ledger:
        model = Endpoint(model=MODEL, base_url=url, concurrency=episodes, ledger=ledger)
        player = Player(model, Sampling(seed=1))
        engine = Engine(Cast(actor=player, partner=player, judges=(player,)), concurrency=episodes)

        async def run() -> list[Record]:
            try:
                return await engine.run(jobs, lambda record: None)
            finally:
                await model.close()

        start, wall = time.process_time(), time.perf_counter()
        records = asyncio.run(run())
        seconds, cpu = time.perf_counter() - wall, time.process_time() - start
        calls = ledger.totals()["calls"]
    statuses = Counter(r.score.reason or r.score.status for r in records)
    turns = sum(len(r.episode.transcript) for r in records)
    return {
        "episodes": len({r.key for r in records}), "scored": sum(r.score.scored for r in records),
        "statuses": dict(statuses), "turns": turns, "calls": calls, "seconds": seconds,
        "cost_ms": 1000 * cpu / max(1, calls), "chain_s": slowest_chain(folder / "ledger.sqlite"),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2,
    }  # fmt: skip


def slowest_chain(ledger: Path) -> float:
    """Seconds of server delay over the sequential calls of the slowest episode."""
    turns: dict[str, float] = defaultdict(float)
    verdicts: dict[str, float] = defaultdict(float)
    with closing(sqlite3.connect(ledger)) as db:
        for role, example, reply in db.execute("SELECT role, example_id, reply FROM calls"):
            taken = json.loads(reply)["latency_s"]
            if role == "judge":
                verdicts[example] = max(verdicts[example], taken)
            else:
                turns[example] += taken
    return max((turns[example] + verdicts[example] for example in turns), default=0.0)


def with_outages(chosen: argparse.Namespace, folder: Path) -> Json:
    """Play all scenes at once with a judge that is down half of the time."""
    out = folder / "run"
    with served(chosen.latency) as actor, served([0.2, 0.4], chosen.outages) as judge:
        command = [
            sys.executable, "-m", "soulkit.cli.app", "eval", "api", "--task", TASK,
            "--data", f"synth:{chosen.episodes}", "--model", MODEL, "--base-url", actor,
            "--partner", "actor", "--judge", f"endpoint:judge@{judge}",
            "--concurrency", str(chosen.episodes), "--out", str(out), "--yes",
        ]  # fmt: skip
        settings = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=settings)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    summary = json.loads((out / "summary.json").read_text())
    cell = summary["tasks"][TASK]["value"]
    return {
        "machine": machine(), "asked": chosen.episodes, "outages_s": chosen.outages,
        "seconds": time.perf_counter() - start, "exit": process.returncode,
        "peak_mb": usage.ru_maxrss / 1024, "n": summary["n"], "n_scored": summary["n_scored"],
        "unscored": cell.get("unscored", {}), "statuses": summary["statuses"][TASK],
    }  # fmt: skip


# -- the report ------------------------------------------------------------------------------------


def part(name: str, url: str, *arguments: str) -> Json:
    """The results of one side, measured in a new process."""
    command = [sys.executable, __file__, "--part", name, "--url", url, *arguments]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    if done.returncode:
        raise SystemExit(f"{name} failed\n{done.stderr[-3000:]}")
    report: Json = json.loads(done.stdout.splitlines()[-1])
    return report


def measured(chosen: argparse.Namespace) -> Json:
    at_once = str(chosen.episodes)
    report: Json = {"machine": machine(), "episodes": chosen.episodes, "latency": chosen.latency}
    with served(chosen.latency) as url:
        report["soulkit"] = part("soulkit", url, "--episodes", at_once)
    with served([0.3, 0.6]) as url:
        calls = str(chosen.sdk_calls)
        report["sdk"] = part("sdk", url, "--episodes", at_once, "--sdk-calls", calls)
    return {**report, **judged(report)}


def judged(report: Json) -> Json:
    own_side, sdk = report["soulkit"], report["sdk"]
    work = own_side["calls"] * sdk["cost_ms"] / 1000
    bound = max(own_side["chain_s"], work)
    verdicts = {
        "no episode lost": own_side["episodes"] == own_side["scored"] == report["episodes"],
        f"memory at most {MEMORY_GB} GB": own_side["peak_gb"] <= MEMORY_GB,
        f"wall at most {BUDGET} of the larger bound": own_side["seconds"] <= BUDGET * bound,
    }
    return {"work_s": work, "ratio": own_side["seconds"] / bound, "verdicts": verdicts}


def table(report: Json) -> Table:
    own_side, sdk = report["soulkit"], report["sdk"]
    rows: list[tuple[str, str, str]] = [
        (
            "episodes",
            f"{own_side['episodes']}",
            f"{own_side['scored']} scored, {own_side['statuses']}",
        ),
        ("calls", f"{own_side['calls']}", f"{own_side['turns']} turns and the verdicts"),
        ("wall clock", f"{own_side['seconds']:.1f} s", ""),
        ("slowest chain", f"{own_side['chain_s']:.1f} s", "latencies of one episode"),
        ("calls x SDK", f"{report['work_s']:.1f} s", f"{sdk['cost_ms']:.2f} ms of CPU per call"),
        ("wall / larger bound", f"{report['ratio']:.2f}", f"budget {BUDGET}"),
        (
            "soulkit's cost per call",
            f"{own_side['cost_ms']:.2f} ms",
            "CPU, including ledger and prompts",
        ),
        ("peak memory", f"{own_side['peak_gb']:.2f} GB", f"limit {MEMORY_GB} GB"),
    ]
    made = Table("", "measured", "", title=f"{report['episodes']} judged dialogues at once")
    for row in rows:
        made.add_row(*row)
    for name, passed in report["verdicts"].items():
        made.add_row(name, "yes" if passed else "NO", "")
    return made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--latency", type=float, nargs=2, default=[1.0, 4.0], metavar="SECONDS")
    parser.add_argument(
        "--sdk-calls", type=int, default=4096, help="number of calls of the bare SDK"
    )
    parser.add_argument("--outages", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--part", choices=["soulkit", "sdk"], help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    return parser.parse_args()


def one_side(chosen: argparse.Namespace) -> Json:
    if chosen.part == "sdk":
        return bare(chosen.url, chosen.sdk_calls, chosen.episodes)
    with tempfile.TemporaryDirectory() as folder:
        return play(chosen.url, chosen.episodes, Path(folder))


def main() -> int:
    chosen = arguments()
    if chosen.part:
        print(json.dumps(one_side(chosen)))
        return 0
    if chosen.outages:
        with tempfile.TemporaryDirectory() as scratch:
            report = with_outages(chosen, Path(scratch))
        print(json.dumps(report, indent=1))
        named = sum(count for reason, count in report["unscored"].items() if reason != "unknown")
        whole = report["n_scored"] + named == report["n"] == report["asked"]
        return int(not whole or report["exit"] not in (0, 1))
    report = measured(chosen)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1))
    console = Console(width=120)
    console.print(report["machine"], highlight=False)
    console.print(table(report))
    return int(not all(report["verdicts"].values()))


if __name__ == "__main__":
    sys.exit(main())
