"""How much time does an evaluation add to the model's? soulkit, inspect_ai and lm-eval compared.

    .venv/bin/python benchmarks/eval_overhead.py --json overhead.json \
        --inspect-python X/bin/python --lm-eval-python Y/bin/python

First create X and Y, Pythons with the two harnesses (without them only soulkit is measured):

    python -m venv X && X/bin/pip install inspect_ai==0.3.285 openai==3.52.0
    python -m venv Y && Y/bin/pip install "lm_eval[api]==0.4.13"

A local server in its own process answers every chat request after 50 ms, however many arrive at
once. Each contender sends it the same 2,000 generated ToMi questions, 64 at a time, greedy, and
scores the answers:

* the bare openai SDK: pooled connections, 64 workers, no parsing, scoring or recording;
* soulkit: `soul eval api` with default settings (a ledger, and a record on disk per episode);
* inspect_ai and lm-evaluation-harness: their command lines with a short task file, samples logged.

Every run is a new process, and contenders take turns. The time is the median wall-clock time from
start to end of the process, including start-up; the server's log splits it into before the first
request, asking, and after the last reply. "Own" time per episode is the difference to the bare SDK,
divided by the episodes: both wait equally long for the model. Memory growth is the peak resident
set after the 200th reply minus that at the 200th. Accuracies must agree; otherwise the contenders
did different work.

All contenders except the bare SDK write to the disk, which other programs may keep busy, so the
script also prints the time to write one record, before and after. The last line loads 100,000 rows
from a file and renders their prompts, including the start of the interpreter.

Run it on an idle machine; client and server need a core each. For a quick trial:
`--episodes 200 --rows 1000 --repeats 1`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _overhead.contenders import (
    MANY,
    bare,
    inspect_ai,
    installed,
    lm_eval,
    load_many,
    soulkit,
    write_files,
)
from _overhead.runs import Contender, Sample, measure, sync_ms
from _overhead.server import Seen, started
from _processes import Json, machine
from rich.console import Console
from rich.table import Table

SAME = 1e-6
HEADINGS = ("", "runs", "whole s", "least – most", "start s", "asking s", "end s", "CPU s",
            "own ms", "MB", "at once", "accuracy", "aims")  # fmt: skip


def contenders(chosen: argparse.Namespace, files: Path, url: str) -> list[Contender]:
    """All contenders; the bare SDK comes first because the others are compared with it."""
    lanes = [bare(files, url, chosen.concurrency), soulkit(files, url, chosen.concurrency)]
    if chosen.inspect_python:
        lanes.append(inspect_ai(chosen.inspect_python, files, url, chosen.concurrency))
    if chosen.lm_eval_python:
        lanes.append(lm_eval(chosen.lm_eval_python, files, url, chosen.concurrency))
    return lanes


def take_turns(
    lanes: Sequence[Contender], chosen: argparse.Namespace, folder: Path, seen: Seen
) -> dict[str, list[Sample]]:
    """Run all contenders in turn, several times, so that other load does not hit only one."""
    samples: dict[str, list[Sample]] = {lane.name: [] for lane in lanes}
    for turn in range(chosen.repeats):
        for number, lane in enumerate(lanes):
            sample = measure(lane, folder / f"run-{number}-{turn}", seen, chosen.episodes)
            print(f"{lane.name}: {sample.seconds:.2f} s", file=sys.stderr, flush=True)
            samples[lane.name].append(sample)
    return samples


def line(name: str, samples: Sequence[Sample], bare_s: float, episodes: int) -> Json:
    """The medians of a contender; memory is the maximum over its runs."""
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
    """Seconds of a process that loads the rows and renders their prompts."""
    count, start = context.Value("q", 0), time.monotonic()
    process = context.Process(target=load_many, args=(str(path), count))
    process.start()
    process.join()
    seconds = time.monotonic() - start
    if process.exitcode or count.value == 0:
        raise SystemExit("loading failed")
    return {"rows": rows, "prompts": count.value, "seconds": seconds}


def judge(lines: Sequence[Json], loaded: Json) -> None:
    """Add to each measurement which aims it meets."""
    ours = lines[1]
    ours["verdicts"] = [
        _verdict("whole", ours["seconds"], 6.0, "s"),
        _verdict("own", ours["own_ms"], 2.0, "ms"),
        _verdict("grown", ours["grown_bytes"] / 1e6, 100.0, "MB"),
    ]
    loaded["verdicts"] = [_verdict("whole", loaded["seconds"], 20.0, "s")]
    for row in lines[2:]:
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
    parser.add_argument(
        "--inspect-python", help="a Python with inspect_ai; without it inspect_ai is skipped"
    )
    parser.add_argument(
        "--lm-eval-python", help="a Python with lm_eval; without it lm_eval is skipped"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument(
        "--latency", type=float, default=0.05, help="delay of each reply in seconds"
    )
    parser.add_argument(
        "--rows", type=int, default=100_000, help="number of rows to load and render"
    )
    parser.add_argument("--repeats", type=int, default=3, help="number of runs per contender")
    return parser.parse_args()


def versions(chosen: argparse.Namespace) -> Json:
    releases = {"python": sys.version.split()[0], "soulkit": version("soulkit"),
             "openai": version("openai")}  # fmt: skip
    if chosen.inspect_python:
        releases["inspect_ai"] = installed(chosen.inspect_python, "inspect_ai")
    if chosen.lm_eval_python:
        releases["lm_eval"] = installed(chosen.lm_eval_python, "lm_eval")
    return releases


def measured(chosen: argparse.Namespace, folder: Path) -> Json:
    """All results, in the form that `--json` writes."""
    context = multiprocessing.get_context("spawn")
    report: Json = {"machine": machine(), "versions": versions(chosen), "settings": {
        "episodes": chosen.episodes, "concurrency": chosen.concurrency,
        "latency_s": chosen.latency, "rows": chosen.rows}}  # fmt: skip
    making = context.Process(target=write_files, args=(str(folder), chosen.episodes, chosen.rows))
    making.start()
    making.join()
    if making.exitcode:
        raise SystemExit("the rows could not be generated")
    report["sync_ms"] = [sync_ms(folder)]
    seen = Seen(context)
    server, url = started(context, chosen.latency, seen)
    samples = take_turns(contenders(chosen, folder, url), chosen, folder, seen)
    server.terminate()
    report["sync_ms"].append(sync_ms(folder))
    bare_s = statistics.median(s.seconds for s in next(iter(samples.values())))
    report["contenders"] = [line(*lane, bare_s, chosen.episodes) for lane in samples.items()]
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
    disk = f"writing a record to the disk takes {before:.2f} ms, {after:.2f} ms at the end"
    console.print(f"{report['machine']}; {disk}", highlight=False)
    console.print(", ".join(f"{k} {v}" for k, v in report["versions"].items()), highlight=False)
    for option, name in (("inspect_python", "inspect_ai"), ("lm_eval_python", "lm_eval")):
        if getattr(chosen, option) is None:
            console.print(f"{name}: skipped (pass its Python with --{option.replace('_', '-')})")
    console.print(table(report))
    rows = [*report["contenders"], report["loading"]]
    return int(not all(verdict["passed"] for row in rows for verdict in row["verdicts"]))


if __name__ == "__main__":
    sys.exit(main())
