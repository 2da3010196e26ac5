"""How fast does a model on this machine answer one prompt sixteen times? soulkit against TRL.

    .venv/bin/python benchmarks/trl_sampling.py --trl-python X/bin/python --json trl_sampling.json

Sixteen samples of 32 tokens from one prompt of 1024 tokens, with the 5.8M model and adapter of
`train_step.py` (which also says how to create X). Contenders are soulkit's local sampler, called as
in an episode, and TRL's GRPOTrainer through its transformers path. Both sample at temperature 1 and
stop at the end of a turn; the result is generated tokens per second. They take turns in separate
processes; the figure is the median after one warm-up run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from _processes import Client, Json, machine
from rich.console import Console
from rich.table import Table
from train_step import headline, prepare, servers, versions

AIM = 3.0
"""Aim for tokens per second, as a multiple of TRL's."""


@dataclass
class Lane:
    """One sampler and its measurements."""

    name: str
    client: Client
    runs: list[Json] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Median tokens per second, without the first run."""
        return statistics.median(r["tokens"] / r["seconds"] for r in self.runs[1:])

    @property
    def line(self) -> Json:
        peak = max(r["peak"] for r in self.runs)
        return {
            "contender": self.name, "runs": len(self.runs) - 1, "tokens_per_s": self.rate,
            "seconds": statistics.median(r["seconds"] for r in self.runs[1:]),
            "grown_bytes": peak - self.client.built["rss"], "peak_bytes": peak,
        }  # fmt: skip


def measure(chosen: argparse.Namespace, folder: Path) -> Json:
    """All results as JSON; the first row is soulkit's."""
    where = machine()
    ours, trl = servers(chosen.trl_python, folder, chosen.threads)
    header = {"machine": where, "soulkit": versions(ours), "peers": versions(trl),
              "model": prepare(ours, folder), "threads": chosen.threads,
              "clock": chosen.clock}  # fmt: skip
    sizes = {"prompt": chosen.prompt, "samples": chosen.samples, "new": chosen.new}
    spec = {"folder": str(folder), "threads": chosen.threads, "clock": chosen.clock, **sizes}
    prompt = str(folder / "prompt.json")
    lanes = [Lane("soulkit", ours.start("sample", **spec))]
    lanes[0].runs.append(lanes[0].client.run(round=0, prompt=prompt))
    if trl is not None:
        lanes.append(Lane("TRL", trl.start("sample", prompt_file=prompt, **spec)))
        lanes[1].runs.append(lanes[1].client.run(round=0))
    for number in range(1, chosen.repeats + 1):
        for lane in lanes:
            lane.runs.append(lane.client.run(round=number))
    lines = [lane.line for lane in lanes]
    for lane in lanes:
        lane.client.close()
    for server in filter(None, (ours, trl)):
        server.close()
    return {**header, **sizes, "lines": lines}


def table(report: Json) -> Table:
    what = f"{report['samples']} samples of {report['new']} tokens from one prompt of"
    shown = Table(
        title=f"{what} {report['prompt']}, {report['threads']} threads, {report['clock']}"
    )
    for heading in ("contender", "runs", "seconds", "tokens / s", "grown / peak GB"):
        shown.add_column(heading, justify="left" if heading == "contender" else "right")
    for line in report["lines"]:
        memory = f"{line['grown_bytes'] / 1e9:.2f} / {line['peak_bytes'] / 1e9:.2f}"
        shown.add_row(line["contender"], str(line["runs"]), f"{line['seconds']:.3f}",
                      f"{line['tokens_per_s']:,.0f}", memory)  # fmt: skip
    return shown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trl-python", help="a Python with TRL; without it TRL is skipped")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    chosen = parser.parse_args()
    if chosen.repeats < 1:
        parser.error("use at least one repeat: the first run is only a warm-up")
    return chosen


def main() -> int:
    chosen, console = arguments(), Console(width=120)
    with tempfile.TemporaryDirectory() as made:
        report = measure(chosen, Path(made))
    headline(report, console)
    console.print(table(report))
    rates = [line["tokens_per_s"] for line in report["lines"]]
    passed = True
    if len(rates) == 1:
        console.print("TRL: skipped (pass its Python with --trl-python)")
    else:
        report["ratio"] = rates[0] / rates[1]
        passed = report["ratio"] >= AIM
        mark = "[green]pass[/]" if passed else "[red]MISSED[/]"
        console.print(f"soulkit / TRL: {report['ratio']:.2f}, aim ≥ {AIM} {mark}", highlight=False)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1))
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
