"""How large are the records of many conversations, and how long does it take to read them?

    .venv/bin/python benchmarks/records.py [--episodes 10000] [--json records.json]
    .venv/bin/python benchmarks/records.py --one-turn --episodes 100000

`soul eval api` plays generated Sotopia scenes of twenty turns with eight words each against a local
server; partner and judge are scripted. Then several commands read the run: the same evaluation
again (nothing left to play), a report in both formats, a comparison of the run with itself, the
worst episodes. Each command is a separate process with its own wall time, processor time and peak
memory.

The size of the records is given for the finished run, which compresses a large `episodes.jsonl`,
and for the lines as first written. 10,000 scenes take three minutes.

With `--one-turn`, the run has questions with one reply instead (1,000 rows, each played equally
often; `--rows` for another number), and is killed (-9) when half of the episodes are played. A
report on the unfinished run follows, the same command resumes it, and all commands that read it
run. No command may use more than 250 MB, and no episode may be lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _processes import Json, machine
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RECORDS_MB, REPORT_MB, RESUME_S, ONE_TURN_MB = 60, 300, 3.0, 250
"""Budgets. The one for resuming is processor time, which does not depend on other load."""
VOCABULARY = (
    "the door of this old house has never closed by itself and you know who was there that night "
    "when my brother took what he thought nobody would miss so tell me before I ask again"
)
DIMENSIONS = (
    "believability", "relationship", "knowledge", "secret", "social_rules",
    "financial_and_material_benefits", "goal",
)  # fmt: skip


def some_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(VOCABULARY.split(), k=count))


def utterance(rng: random.Random) -> str:
    return json.dumps({"action_type": "speak", "argument": some_words(rng, 8)})


# -- the run --------------------------------------------------------------------------------------


def write_rows(path: Path, count: int) -> None:
    """Write generated scenes, each with its own evening, because equal rows would count once."""
    from soulkit.tasks.kit.made_rows import make_rows
    from soulkit.tasks.kit.registry import load_registry

    made = make_rows(load_registry().task("sotopia", "paper"), 20, 1)
    rows = (
        {**row, "scenario": f"{row['scenario']} It is evening number {number}."}
        for number, row in ((n, made[n % len(made)]) for n in range(count))
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_questions(path: Path, count: int) -> None:
    """Write generated questions, each about its own evening."""
    from soulkit.tasks.kit.made_rows import make_rows
    from soulkit.tasks.kit.registry import load_registry

    made = make_rows(load_registry().task("tomi", "paper"), 100, 1)
    with path.open("w") as stream:
        for number in range(count):
            row = made[number % len(made)]
            row = {name: value for name, value in row.items() if name != "events"}
            story = f"It is evening number {number}. {row['story']}"
            stream.write(json.dumps({**row, "story": story}) + "\n")


def write_players(folder: Path) -> None:
    """Write the scripts of a partner that never repeats itself and of a judge."""
    rng = random.Random(0)
    replies = [utterance(rng) for _ in range(10)]
    verdict = {name: {"reasoning": some_words(rng, 12), "score": 0} for name in DIMENSIONS}
    audit = json.dumps({"risk_level": "low", "reason": "ordinary play"})
    judge = {"rules": [{"when": "risk_level", "say": audit}], "replies": [json.dumps(verdict)]}
    (folder / "partner.yaml").write_text(json.dumps({"name": "partner", "replies": replies}))
    (folder / "judge.yaml").write_text(json.dumps({"name": "judge", **judge}))


def play(folder: Path, episodes: int) -> tuple[list[str], Json]:
    """Run the evaluation in `folder`; returns (its command, its cost)."""
    from tests.support.servers.faulty import FaultPlan, FaultyServer

    write_rows(folder / "rows.jsonl", episodes)
    write_players(folder)

    def answer(body: Json) -> str:
        return utterance(random.Random(json.dumps(body["messages"])))

    with FaultyServer(FaultPlan(), answer) as server:
        command = [
            "eval", "api", "--task", "sotopia", "--data", str(folder / "rows.jsonl"),
            "--model", "scripted", "--base-url", server.base_url,
            "--partner", f"scripted:{folder / 'partner.yaml'}",
            "--judge", f"scripted:{folder / 'judge.yaml'}",
            "--concurrency", "64", "--out", str(folder / "run"), "--yes",
        ]  # fmt: skip
        return command, soul(folder, command)


def play_one_turn(folder: Path, episodes: int, rows: int) -> Json:
    """The cost of an evaluation that is killed half-way and resumed, and of its readers."""
    from tests.support.servers.faulty import FaultPlan, FaultyServer

    write_questions(folder / "rows.jsonl", rows)

    def answer(body: Json) -> str:
        place = random.Random(json.dumps(body["messages"])).choice(("box", "basket", "drawer"))
        return f"The story says where it is now. <answer>{place}</answer>"

    with FaultyServer(FaultPlan(), answer) as server:
        run = str(folder / "run")
        command = [
            "eval", "api", "--task", "tomi", "--data", str(folder / "rows.jsonl"),
            "--model", "scripted", "--base-url", server.base_url, "--concurrency", "64",
            "--repeats", str(episodes // rows), "--out", run, "--yes",
        ]  # fmt: skip
        return {
            "played, killed half-way": soul(folder, command, kill_after=episodes // 2),
            "report, unfinished": soul(folder, ["report", run]),
            "runs, unfinished": soul(folder, ["runs", str(folder)]),
            "resumed, rest played": soul(folder, command),
            "resumed": soul(folder, command),
            "report, HTML": soul(folder, ["report", run, "--format", "html"]),
            "report, console": soul(folder, ["report", run]),
            "runs": soul(folder, ["runs", str(folder)]),
        }


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a file has so many lines, or the process has ended."""
    lines = 0
    while not path.is_file() and process.poll() is None:
        time.sleep(0.1)
    with path.open("rb") as stream:
        while lines < count and process.poll() is None:
            lines += stream.read().count(b"\n")
            time.sleep(0.1)


def soul(folder: Path, arguments: list[str], kill_after: int = 0) -> Json:
    """Run a command; returns its wall seconds, processor seconds and peak memory. With
    `kill_after`, kill it when the run has so many episodes."""
    command = [sys.executable, "-m", "soulkit.cli.app", *arguments]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    start = time.perf_counter()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=settings)
        if kill_after:
            wait_for_lines(folder / "run" / "episodes.jsonl", kill_after, process)
            process.kill()
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != -9 * bool(kill_after):
        raise SystemExit(f"soul {arguments[0]} failed\n{(folder / 'log').read_text()[-3000:]}")
    return {
        "seconds": time.perf_counter() - start, "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1024,
    }  # fmt: skip


def sizes(run: Path) -> Json:
    """Megabytes of the records on disk, of their uncompressed lines, and of the ledger."""
    from soulkit.runs.jsonl import lines_in, packed_file

    path = run / "episodes.jsonl"
    files = [file for file in (path, packed_file(path)) if file.is_file()]
    return {
        "records_mb": sum(file.stat().st_size for file in files) / 1e6,
        "lines_mb": sum(map(len, lines_in(path))) / 1e6,
        "ledger_mb": (run / "ledger.sqlite").stat().st_size / 1e6,
    }


def measure_one_turn(folder: Path, chosen: argparse.Namespace) -> Json:
    episodes = chosen.episodes
    took = play_one_turn(folder, episodes, chosen.rows)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    scored = {name: summary[name] for name in ("n", "n_scored")}
    return {"episodes": episodes, **scored, **sizes(folder / "run"), "commands": took}


def measure(folder: Path, episodes: int) -> Json:
    command, played = play(folder, episodes)
    run = str(folder / "run")
    readers = {
        "resumed": command,
        "report, HTML": ["report", run, "--format", "html"],
        "report, console": ["report", run],
        "compared with itself": ["compare", run, run],
        "show --worst 10": ["show", run, "--worst", "10"],
    }
    took: dict[str, Any] = {name: soul(folder, words) for name, words in readers.items()}
    return {"episodes": episodes, **sizes(folder / "run"), "commands": {"played": played, **took}}


# -- the report -----------------------------------------------------------------------------------


def verdicts(report: Json) -> dict[str, bool]:
    took = report["commands"]
    if "n" in report:
        peak = max(one["peak_mb"] for one in took.values())
        return {
            f"every command at most {ONE_TURN_MB} MB of memory": peak <= ONE_TURN_MB,
            "all episodes scored": report["n"] == report["n_scored"] == report["episodes"],
        }
    return {
        f"records at most {RECORDS_MB} MB": report["records_mb"] <= RECORDS_MB,
        f"report at most {REPORT_MB} MB of memory": took["report, HTML"]["peak_mb"] <= REPORT_MB,
        f"resumed in at most {RESUME_S:g} s of processor time": took["resumed"]["cpu_s"]
        <= RESUME_S,
    }


def table(report: Json) -> Table:
    made = Table("", "wall", "processor", "memory", title=f"{report['episodes']:,} conversations")
    for name, took in report["commands"].items():
        made.add_row(
            name, f"{took['seconds']:.1f} s", f"{took['cpu_s']:.1f} s", f"{took['peak_mb']:.0f} MB"
        )
    made.add_section()
    for name in ("records_mb", "lines_mb", "ledger_mb"):
        made.add_row(name.removesuffix("_mb"), f"{report[name]:.1f} MB")
    for name, passed in verdicts(report).items():
        made.add_row(name, "yes" if passed else "NO")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--one-turn", action="store_true", help="questions with one reply")
    parser.add_argument("--rows", type=int, default=1000, help="rows of --one-turn")
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if chosen.one_turn:
            report = measure_one_turn(folder, chosen)
        else:
            report = measure(folder, chosen.episodes)
    report["machine"] = machine()
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1))
    console = Console(width=120)
    console.print(report["machine"], highlight=False)
    console.print(table(report))
    return int(not all(verdicts(report).values()))


if __name__ == "__main__":
    sys.exit(main())
