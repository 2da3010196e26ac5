"""Can one process play hundreds of scenes with five characters at once?

    .venv/bin/python benchmarks/scene_load.py [--json scenes.json]

`soul eval api` plays 256 generated CoSER scenes with five characters at once, with default
settings, ledger and records: twenty rounds each, a prediction of the next speaker after each round,
then four critics. A local server in its own process answers every request after one second with a
line of 70 words, or with a reply to the JSON Schema: the next speaker is a random name of the
scene, and no scene ends early.

A run takes at least as long as its slowest chain: the sum, from the ledger, of the latencies of one
scene's turns and predictions and of its slowest critic. The budget for the whole command, including
start-up and summary, is 1.25 times that chain, 1.5 GB of memory without the server, and no lost
scene.

The script also counts how often the text of each message is stored in ledger and records.

Run it on an idle machine; client and server need a core each. For a quick trial:
`--episodes 16 --latency 0.1`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from _processes import Json, machine
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
BUDGET, MEMORY_GB, CHARACTERS, CRITICS, WORDS = 1.25, 1.5, 5, 4, 60
VOCABULARY = (
    "the door of this old house has never closed by itself and you know who was there that night "
    "when my brother took what he thought nobody would miss so tell me before I ask again whether "
    "she gave you the key or only the letter because I am tired of waiting"
)


# -- the server -----------------------------------------------------------------------------------


def line_for(body: Json) -> str:
    """Ten words of thought and sixty of speech, determined by the request."""
    text = json.dumps(body["messages"])
    rng = random.Random(hashlib.sha256(text.encode()).digest())
    thought, aloud = (" ".join(rng.choices(VOCABULARY.split(), k=k)) for k in (10, WORDS))
    return f"[{thought}] (looks up) {aloud}."


def speaker_for(body: Json, names: list[str]) -> str:
    """One of the characters' names, determined by the request."""
    people = [n for n in names if n not in ("Environment", "random") and not n.startswith("<")]
    rng = random.Random(json.dumps(body["messages"]))
    return json.dumps({"reason": "by turns", "next_speaker": rng.choice(people)})


def serve(latency: float) -> None:
    """Print the base URL and serve until killed."""
    from tests.support.servers.faulty import FaultPlan, FaultyServer, formed

    def answer(body: Json) -> str:
        form = body.get("response_format", {}).get("json_schema")
        if not form:
            return line_for(body)
        properties = form["schema"].get("properties", {})
        if "next_speaker" in properties:
            return speaker_for(body, properties["next_speaker"]["enum"])
        return formed(body, "")

    with FaultyServer(FaultPlan(latency_s=(latency, latency)), answer) as server:
        print(server.base_url, flush=True)
        time.sleep(3600)


@contextmanager
def served(latency: float, usage: Json) -> Iterator[str]:
    """The base URL of the server; `usage` gets its processor time when it has ended."""
    command = [sys.executable, __file__, "--part", "server", "--latency", str(latency)]
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        _, _, spent = os.wait4(process.pid, 0)
        process.returncode = 0
        usage["server_cpu_s"] = spent.ru_utime + spent.ru_stime


# -- rows -----------------------------------------------------------------------------------------


def scene_rows(count: int) -> list[Json]:
    """Generated rows with the given number of characters, filled up with strangers."""
    from soulkit.tasks.kit.made_rows import make_rows
    from soulkit.tasks.kit.registry import load_registry

    made = make_rows(load_registry().task("coser", "paper"), count, 1)
    return [{**row, "circumstance": crowded(json.loads(row["circumstance"]))} for row in made]


def crowded(scene: dict[str, Any]) -> str:
    missing = CHARACTERS - len(scene["major_characters"])
    for number in range(missing):
        name = f"Stranger {'ABCDE'[number]}"
        scene["major_characters"].append(name)
        scene["speaking_characters_w_env"].append(name)
        scene["character_profiles"][name] = f"{name} came in from the road. " * 40
        thought = "I want to hear how this ends and be gone before anybody asks who I am."
        scene["key_characters"].append({"name": name, "thought": thought})
        scene["dialogues"].append({"character": name, "message": "Do not mind me."})
    return json.dumps(scene)


# -- the run --------------------------------------------------------------------------------------


def play(url: str, episodes: int, folder: Path) -> Json:
    """Run `soul eval api` on the scenes; returns the outcome and the cost."""
    rows, out = folder / "rows.jsonl", folder / "run"
    rows.write_text("".join(json.dumps(row) + "\n" for row in scene_rows(episodes)))
    command = [
        sys.executable, "-m", "soulkit.cli.app", "eval", "api", "--task", "coser",
        "--data", str(rows), "--model", "scripted", "--base-url", url, "--environment", "actor",
        "--judge", "actor", "--concurrency", str(CRITICS * episodes), "--out", str(out), "--yes",
        "--timeout", "120",
    ]  # fmt: skip
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    start = time.perf_counter()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=settings)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"soul eval api failed\n{(folder / 'log').read_text()[-3000:]}")
    return {
        "seconds": seconds, "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_gb": usage.ru_maxrss / 1024**2, **recorded(out),
    }  # fmt: skip


def recorded(run: Path) -> Json:
    """Figures from the ledger and the records."""
    from soulkit.runs.records import load_records

    records, ledger = load_records(run / "episodes.jsonl"), run / "ledger.sqlite"
    chain, calls = slowest_chain(ledger)
    return {
        "episodes": len({r.key for r in records}), "scored": sum(r.score.scored for r in records),
        "lines": sum(len(r.episode.transcript) for r in records),
        "seats": sum(len(r.episode.traces) for r in records), "calls": calls, "chain_s": chain,
        "records_mb": (run / "episodes.jsonl").stat().st_size / 1e6,
        "ledger_mb": ledger.stat().st_size / 1e6,
    }  # fmt: skip


def slowest_chain(ledger: Path) -> tuple[float, int]:
    """(seconds of server delay over the slowest scene's sequential calls, number of all calls)."""
    waits: dict[str, float] = defaultdict(float)
    verdicts: dict[str, float] = defaultdict(float)
    calls = 0
    with closing(sqlite3.connect(ledger)) as db:
        for role, example, reply in db.execute("SELECT role, example_id, reply FROM calls"):
            calls += 1
            latency_s = json.loads(reply)["latency_s"]
            if role == "judge":
                verdicts[example] = max(verdicts[example], latency_s)
            else:
                waits[example] += latency_s
    return max((waits[example] + verdicts[example] for example in waits), default=0.0), calls


# -- the report -----------------------------------------------------------------------------------


def judged(report: Json) -> Json:
    return {
        "ratio": report["seconds"] / report["chain_s"],
        "verdicts": {
            "no scene lost": report["scored"] == report["episodes"] == report["asked"],
            f"memory at most {MEMORY_GB} GB": report["peak_gb"] <= MEMORY_GB,
            f"wall at most {BUDGET} of the chain": report["seconds"] <= BUDGET * report["chain_s"],
        },
    }


def cost(report: Json, side: str) -> str:
    return f"{1000 * report[side] / max(1, report['calls']):.2f} ms"


def table(report: Json) -> Table:
    made = Table("", "measured", title=f"{report['asked']} scenes of {CHARACTERS} at once")
    rows = {
        "scenes scored": f"{report['scored']} of {report['asked']}",
        "calls": f"{report['calls']:,}",
        "messages, in traces of": f"{report['lines']:,}, {report['seats']:,} seats",
        "wall clock": f"{report['seconds']:.1f} s",
        "slowest chain": f"{report['chain_s']:.1f} s",
        "wall / chain": f"{report['ratio']:.2f} (budget {BUDGET})",
        "processor time per call": f"{cost(report, 'cpu_s')} (the server's: "
        f"{cost(report, 'server_cpu_s')})",
        "peak memory": f"{report['peak_gb']:.2f} GB (limit {MEMORY_GB})",
        "records, ledger": f"{report['records_mb']:.0f} MB, {report['ledger_mb']:.0f} MB",
    }
    for row in rows.items():
        made.add_row(*row)
    for name, passed in report["verdicts"].items():
        made.add_row(name, "yes" if passed else "NO")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--latency", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--keep", type=Path, help="keep the run in this folder")
    parser.add_argument("--part", choices=["server"], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part:
        serve(chosen.latency)
        return 0
    sys.path.insert(0, str(ROOT))
    spent: Json = {}
    with tempfile.TemporaryDirectory() as scratch, served(chosen.latency, spent) as url:
        report = play(url, chosen.episodes, chosen.keep or Path(scratch))
    report |= spent
    report |= {"machine": machine(), "asked": chosen.episodes, "latency": chosen.latency}
    report |= judged(report)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1))
    console = Console(width=120)
    console.print(report["machine"], highlight=False)
    console.print(table(report))
    return int(not all(report["verdicts"].values()))


if __name__ == "__main__":
    sys.exit(main())
