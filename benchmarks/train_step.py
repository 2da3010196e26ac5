"""How fast is one optimizer step, and how much memory does it take? soulkit against others.

    .venv/bin/python benchmarks/train_step.py --peer-python X/bin/python --json step.json

First create X, a Python with TRL and prefix-grouper:

    python -m venv X && X/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 \
        trl==1.16.0 datasets==5.2.0 prefix-grouper==0.0.1.post1

A 5.8M Qwen3-shaped model with a LoRA adapter (r 32, alpha 64, all linear layers, float32) makes one
step on the same token ids and advantages in every contender: soulkit packed, soulkit in padded rows
and one sequence at a time, and, at their fastest micro-batch sizes, TRL's GRPOTrainer (the part
after generation) and a step with prefix-grouper, which computes a group's prompt once. "With old"
adds the pass that computes the old log-probs. Every contender has its own process; they take turns
after one warm-up run each, and the time is the median of the other runs. Memory is the growth of
the resident set since before the first step, and its peak. Gradients of the first step must agree
with those of soulkit packed.

Run it on an idle machine; `--clock cpu` compares processor time, which depends less on other load.
`--scale 0.1` shortens everything for a quick trial.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import _cases
from _processes import Client, Failed, Json, Server, machine
from rich.console import Console
from rich.table import Table

STARTED = time.monotonic()
HERE = Path(__file__).parent
MICRO_BATCHES = {"trl": (1, 2, 4, 8, 16), "grouper": (8, 16, 32, 64, 128)}
"""Rows at once that are tried."""
GIVE_UP = 1.2
"""Stop trying larger micro-batches when one takes this many times as long as the best."""
SAME_GRADIENT = 1e-4
NOISE = 0.95
"""Noise tolerance of "never slower", so that equal work does not fail by chance."""
LONG = 20.0
"""A run that takes more seconds is not repeated; its first time counts."""

PACKED: Json = {"packing": "auto"}
LEAN: Json = {"packing": "auto", "activation_checkpointing": True}
PADDED: Json = {"packing": "off"}
SINGLE: Json = {"packing": "off", "tokens_per_batch": 1}


@dataclass(frozen=True)
class Rival:
    """A contender, and its minimum time and memory as multiples of those of soulkit packed."""

    name: str
    settings: Json
    rows: str = "all"
    time: float | None = None
    memory: float | None = None
    """For TRL: both aims refer to soulkit packed with recomputed activations."""


@dataclass(frozen=True)
class Case:
    title: str
    make: Callable[[Callable[[int], int]], _cases.Sets]
    """Builds the sequences; takes a function that scales lengths."""
    rivals: tuple[Rival, ...]
    trl: Rival | None = None
    grouper: Rival | None = None


def _against_rows(time: float | None) -> tuple[Rival, ...]:
    return (
        Rival("soulkit, padded rows", PADDED, time=time),
        Rival("soulkit, one at a time", SINGLE, time=time),
    )


GROUPER = Rival("prefix-grouper", {}, time=NOISE)

CASES = {
    "a": Case(
        "prompt 1024, G 16, 32 new",
        lambda n: _cases.single_turn(1, n(1024), 16, n(32)),
        _against_rows(None),
        Rival("TRL", {}, time=6.0, memory=2.0),
        GROUPER,
    ),
    "b": Case(
        "prompt 2048, G 16, 64 new",
        lambda n: _cases.single_turn(2, n(2048), 16, n(64)),
        _against_rows(None),
        Rival("TRL", {}, time=5.0, memory=2.0),
        GROUPER,
    ),
    "c": Case(
        "8 prompts of 20, G 8, 48 new",
        lambda n: _cases.single_turn(3, n(20), 8, n(48), prompts=8),
        _against_rows(NOISE),
        Rival("TRL", {}),
        GROUPER,
    ),
    "d": Case(
        "dialogues of 2000, 10 turns, 500 shared, G 8",
        lambda n: _cases.dialogues(4, 8, n(500), 10, n(75), n(75)),
        (
            *_against_rows(NOISE),
            Rival("soulkit packed, from a row a turn", PACKED, "turns", time=NOISE),
            Rival("soulkit, a row a turn", PADDED, "turns", time=NOISE),
        ),
    ),
    "e": Case(
        "Ditto, 8 × 3 of 32, feedback of 60 at 90 % of 1024",
        lambda n: _cases.ditto(5, 8, n(1024), n(922), n(60), n(32)),
        (
            Rival("soulkit packed, GRPO on the drafts", PACKED, "drafts", time=1 / 3),
            Rival("soulkit, padded rows", PADDED, time=5.0),
            Rival("soulkit, one at a time", SINGLE),
        ),
    ),
    "f": Case(
        "8 prompts of 512, G 8, 64 new",
        lambda n: _cases.single_turn(6, n(512), 8, n(64), prompts=8),
        (),
        grouper=GROUPER,
    ),
    "g": Case(
        "prompt 4096, G 64, 64 new",
        lambda n: _cases.single_turn(7, n(4096), 64, n(64)),
        (),
        grouper=GROUPER,
    ),
    "h": Case(
        "8 dialogues, 6 turns, 8 branches at each",
        lambda n: _cases.trees(8, 8, 8, 6, n(100), n(50), n(50)),
        (),
        grouper=replace(GROUPER, time=1.3),
    ),
}


def late(chosen: argparse.Namespace) -> bool:
    """Whether the time is up, so that everything left is measured only once."""
    return time.monotonic() > STARTED + 60 * float(chosen.minutes)


@dataclass
class Lane:
    """One contender and its measurements."""

    name: str
    client: Client
    path: str
    """File with its gradients."""
    comparable: bool
    aim: Rival | None = None
    runs: list[Json] = field(default_factory=list)

    def run(self) -> None:
        self.runs.append(self.client.run(**({} if self.runs else {"gradients": self.path})))
        last = self.runs[-1]
        print(f"{self.name}: {last['old']:.2f} + {last['step']:.2f} s", file=sys.stderr, flush=True)

    def done(self, chosen: argparse.Namespace) -> bool:
        spent = sum(r["seconds"] for r in self.runs)
        if not self.runs or (len(self.runs) == 1 and spent < LONG and not late(chosen)):
            return False
        return len(self.runs) > chosen.repeats or spent > chosen.seconds or late(chosen)

    @property
    def counted(self) -> list[Json]:
        return self.runs[1:] or self.runs

    @property
    def step(self) -> float:
        """Median seconds of the update."""
        return statistics.median(r["step"] for r in self.counted)

    @property
    def whole(self) -> float:
        """Median seconds of the update including the pass for old log-probs."""
        return statistics.median(r["step"] + r["old"] for r in self.counted)

    @property
    def peak(self) -> int:
        return int(max(r["peak"] for r in self.runs))

    @property
    def grown(self) -> int:
        return self.peak - int(self.client.built["rss"])


@dataclass
class Bench:
    """The two Pythons and the folder they share."""

    chosen: argparse.Namespace
    folder: Path
    ours: Server
    peers: Server | None

    def run(self, letter: str) -> list[Json]:
        """One row per contender of a case; the first is soulkit packed."""
        case, scale = CASES[letter], self.chosen.scale
        sets = case.make(lambda n: max(2, round(n * scale)))
        for name, rows in sets.items():
            self._rows(letter, name).write_text(json.dumps(rows))
        lanes = [self._ours(letter, Rival("soulkit packed", PACKED))]
        lanes += [self._ours(letter, rival) for rival in case.rivals]
        also: list[Lane] = []
        if self.peers is not None and case.trl is not None:
            lanes.append(self._ours(letter, Rival("soulkit packed, recomputed activations", LEAN)))
        for kind, rival in (("trl", case.trl), ("grouper", case.grouper)):
            if self.peers is not None and rival is not None:
                best, others = self._search(self.peers, letter, rival, len(sets["all"]), kind)
                lanes.append(best)
                also += others
        take_turns(lanes, self.chosen)
        lines = self._lines(letter, lanes[0], [*lanes, *also])
        for lane in lanes:
            lane.client.close()
        return lines

    def _rows(self, letter: str, name: str) -> Path:
        return self.folder / f"{letter}-{name}.json"

    def _ours(self, letter: str, rival: Rival) -> Lane:
        client = self._start(self.ours, "step", letter, rival.rows, settings=rival.settings)
        path = str(self.folder / f"{letter}-{rival.name}.safetensors")
        return Lane(rival.name, client, path, rival.rows != "drafts", rival)

    def _start(self, server: Server, kind: str, letter: str, rows: str, **spec: object) -> Client:
        return server.start(
            kind, folder=str(self.folder), rows=str(self._rows(letter, rows)),
            threads=self.chosen.threads, clock=self.chosen.clock, **spec,
        )  # fmt: skip

    def _search(
        self, server: Server, letter: str, rival: Rival, rows: int, kind: str
    ) -> tuple[Lane, list[Lane]]:
        """A peer at its fastest micro-batch size, and the other sizes that were tried."""
        tried: list[Lane] = []
        step = "step" if kind == "trl" else "grouped"
        for micro in (m for m in self.chosen.micro_batches[kind] if rows % m == 0):
            name = f"{rival.name}, micro-batch {micro}"
            client = self._start(server, step, letter, "all", micro=micro)
            path = str(self.folder / f"{letter}-{name}.safetensors")
            tried.append(Lane(name, client, path, True))
            tried[-1].run()
            best = min(tried, key=lambda lane: lane.whole)
            for lane in tried:
                if lane is not best:
                    lane.client.close()
            if tried[-1].whole > GIVE_UP * best.whole or late(self.chosen):
                break
        best.aim = rival
        return best, [lane for lane in tried if lane is not best]

    def _lines(self, letter: str, first: Lane, lanes: Sequence[Lane]) -> list[Json]:
        compare = self.ours.start("compare", wanted=first.path)
        lines = []
        for lane in lanes:
            off = compare.run(found=lane.path) if lane.comparable and lane is not first else None
            lines.append(line(letter, lane, first, off))
        compare.close()
        _judge_lean(lines, lanes)
        return lines


def take_turns(lanes: Sequence[Lane], chosen: argparse.Namespace) -> None:
    """Run all contenders in turn until each was measured long or often enough."""
    while waiting := [lane for lane in lanes if not lane.done(chosen)]:
        for lane in waiting:
            lane.run()


def line(letter: str, lane: Lane, first: Lane, off: Json | None) -> Json:
    """The results of a contender, with ratios to soulkit packed."""
    step, whole = lane.step / first.step, lane.whole / first.whole
    memory = min(lane.grown / max(first.grown, 1), lane.peak / first.peak)
    cells: Json = {
        "case": letter, "contender": lane.name, "runs": len(lane.counted),
        "warm": len(lane.runs) > 1, "step_s": lane.step, "with_old_s": lane.whole,
        "grown_bytes": lane.grown, "peak_bytes": lane.peak,
        "step_ratio": step, "with_old_ratio": whole, "memory_ratio": memory,
        "gradient_off": None if off is None else off["whole"], "verdicts": [],
    }  # fmt: skip
    if off is not None:
        _verdict(cells, "gradient", off["whole"] <= SAME_GRADIENT, SAME_GRADIENT)
    if lane.aim is not None and lane.aim.time is not None:
        _verdict(cells, "time", min(step, whole) >= lane.aim.time, lane.aim.time)
    return cells


def _judge_lean(lines: Sequence[Json], lanes: Sequence[Lane]) -> None:
    """TRL's time and memory as multiples of those of the contender that recomputes activations."""
    aims = [(lane, lane.aim) for lane in lanes if lane.aim is not None and lane.aim.memory]
    lean = [(line, lane) for line, lane in zip(lines, lanes, strict=True)
            if lane.aim is not None and lane.aim.settings == LEAN]  # fmt: skip
    for (trl, aim), (line, lane) in zip(aims, lean, strict=False):
        time = min(trl.step / lane.step, trl.whole / lane.whole)
        memory = trl.grown / max(lane.grown, 1)
        line["trl"] = {"time": time, "memory_grown": memory, "memory_peak": trl.peak / lane.peak}
        _verdict(line, f"TRL {time:.1f} × time", time >= (aim.time or 0), aim.time or 0)
        _verdict(line, f"TRL {memory:.1f} × memory", memory >= (aim.memory or 0), aim.memory or 0)


def _verdict(line: Json, what: str, passed: bool, aim: float) -> None:
    line["verdicts"].append({"what": what, "aim": aim, "passed": passed})


def table(cases: dict[str, list[Json]], title: str) -> Table:
    shown = Table(title=title, caption="×: multiple of soulkit packed. Memory: grown / peak.")
    for heading in ("", "contender", "runs", "step s", "×", "with old s", "×", "GB", "× (least)",
                    "gradient off", "aims"):  # fmt: skip
        left = heading in ("", "contender", "aims")
        shown.add_column(heading, justify="left" if left else "right")
    for letter, lines in cases.items():
        shown.add_section()
        shown.add_row(letter, f"[bold]{CASES[letter].title}")
        for line in lines:
            shown.add_row("", *_cells(line))
    return shown


def _cells(line: Json) -> Iterator[str]:
    yield line["contender"]
    yield str(line["runs"]) if line["warm"] else "1, cold"
    for what in ("step", "with_old"):
        yield f"{line[f'{what}_s']:.3f}"
        yield f"{line[f'{what}_ratio']:.2f}"
    yield f"{line['grown_bytes'] / 1e9:.2f} / {line['peak_bytes'] / 1e9:.2f}"
    yield f"{line['memory_ratio']:.2f}"
    yield "" if line["gradient_off"] is None else f"{line['gradient_off']:.0e}"
    yield ", ".join(_said(v) for v in line["verdicts"])


def _said(verdict: Json) -> str:
    sign = "≤" if verdict["what"] == "gradient" else "≥"
    mark = "[green]pass[/]" if verdict["passed"] else "[red]MISSED[/]"
    return f"{verdict['what']} {sign} {verdict['aim']:.3g} {mark}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--peer-python", help="a Python with TRL and prefix-grouper; without it they are skipped"
    )
    parser.add_argument(
        "--only", default=",".join(CASES), help="run only these cases, for example a,b"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--micro-batches", help="micro-batch sizes to try, for example 4,8")
    parser.add_argument(
        "--repeats", type=int, default=5, help="maximum number of runs after the first"
    )
    parser.add_argument(
        "--seconds", type=float, default=10, help="stop running a contender after this many seconds"
    )
    parser.add_argument(
        "--minutes", type=float, default=7, help="run everything only once after this many seconds"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths")
    chosen = parser.parse_args()
    chosen.only = [letter.strip() for letter in chosen.only.split(",")]
    given = [int(size) for size in (chosen.micro_batches or "").split(",") if size]
    chosen.micro_batches = {kind: given or sizes for kind, sizes in MICRO_BATCHES.items()}
    if unknown := set(chosen.only) - set(CASES):
        parser.error(f"unknown case: {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    return chosen


def servers(peer_python: str | None, folder: Path, threads: int) -> tuple[Server, Server | None]:
    ours = Server([sys.executable, str(HERE / "_soulkit_side.py")], folder, threads)
    if peer_python is None:
        return ours, None
    return ours, Server([peer_python, str(HERE / "_trl_side.py")], folder, threads)


def versions(server: Server | None) -> Json | None:
    if server is None:
        return None
    client = server.start("versions")
    releases = client.run()
    client.close()
    return {k: v for k, v in releases.items() if k not in ("seconds", "peak")}


def prepare(ours: Server, folder: Path) -> Json:
    """Save the model and the adapter; returns their sizes."""
    client = ours.start("make", folder=str(folder))
    made = client.run()
    client.close()
    return {"parameters": made["parameters"], "trained": made["trained"]}


def save(path: Path | None, report: Json) -> None:
    """Save the results; called after every case, so that an interruption loses little."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1))


def headline(header: Json, console: Console) -> None:
    console.print(header["machine"], highlight=False)
    for side in ("soulkit", "peers"):
        machine_line = header[side]
        text = (
            "not run"
            if machine_line is None
            else ", ".join(f"{k} {v}" for k, v in machine_line.items())
        )
        console.print(f"{side}: {text}", highlight=False)
    sizes = {k: f"{v / 1e6:.2f}M" for k, v in header["model"].items()}
    console.print(f"model {sizes['parameters']}, adapter {sizes['trained']}", highlight=False)


def main() -> int:
    chosen, console = arguments(), Console(width=170)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        where = machine()
        ours, peers = servers(chosen.peer_python, folder, chosen.threads)
        header = {"machine": where, "soulkit": versions(ours), "peers": versions(peers),
                  "model": prepare(ours, folder), "threads": chosen.threads,
                  "clock": chosen.clock, "scale": chosen.scale}  # fmt: skip
        headline(header, console)
        bench, cases, broken = Bench(chosen, folder, ours, peers), {}, False
        for letter in chosen.only:
            try:
                cases[letter] = bench.run(letter)
                save(chosen.json, {**header, "cases": cases})
            except Failed as error:
                console.print(f"case {letter} failed:\n{error}", style="red", markup=False)
                broken = True
        for server in filter(None, (ours, peers)):
            server.close()
    if peers is None:
        console.print("TRL, prefix-grouper: skipped (pass their Python with --peer-python)")
    console.print(table(cases, f"One optimizer step, {chosen.threads} threads, {chosen.clock}"))
    missed = [v for lines in cases.values() for row in lines for v in row["verdicts"]]
    return int(broken or not all(v["passed"] for v in missed))


if __name__ == "__main__":
    sys.exit(main())
