"""How fast is supervised training on conversations, and is it correct? soulkit against TRL.

    .venv/bin/python benchmarks/sft_throughput.py --trl-python X/bin/python --json sft.json
    .venv/bin/python benchmarks/sft_throughput.py --only "" --corpus-gb 5 --out /scratch
    .venv/bin/python benchmarks/sft_throughput.py --only "" --kill 20

First create X, a Python with TRL:

    python -m venv X && X/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 \
        trl==1.16.0 datasets==5.2.0

*Speed.* A 21M Qwen3-shaped model (vocabulary 32,000, float32) makes one optimizer step on the same
conversations of 50 to 1,500 tokens in every contender, with a LoRA adapter (r 32) and with all
weights, `--tokens` tokens per forward pass. Contenders are soulkit as in a run, and TRL's
SFTTrainer with padded rows, one row at a time (no padding), its default packing (`bfd`) and
`wrapped` packing. A contender is clean (free of contamination between sequences) if its gradients
match those of transformers' own forward pass, one sequence at a time. The aim: no slower than the
fastest clean contender. Each has its own process; they take turns after one warm-up run.

*A corpus* of `--corpus-gb` GB, half JSONL and half Parquet shards, is written to `--out`, read
through the shuffled stream of a run, and removed. The aim: resident memory grows by at most 1 GB,
and a stream resumed deep in the corpus continues with the same rows.

*Kills.* The same run on conversations, once undisturbed and once killed with −9 at random moments
until it is done: metrics, weights and stream position must be equal bit for bit.

`--clock cpu` compares processor time, which depends less on other load. `--scale 0.1` shortens the
conversations for a quick trial.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from _processes import Client, Failed, Json, Server, machine
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
CASES = {"lora": False, "full": True}
"""Case → whether it trains all weights."""
SAME_GRADIENT = 1e-4
NOISE = 0.97
"""Noise tolerance of "no slower"."""
MOST_GROWTH = 1e9
OURS: dict[str, Json] = {
    "soulkit": {"packing": "auto"},
    "soulkit, padded rows": {"packing": "off"},
}
TRL: dict[str, tuple[str, int | None]] = {
    "TRL, padded rows": ("padded", None),
    "TRL, a row at a time": ("padded", 1),
    "TRL, packed (bfd)": ("bfd", None),
    "TRL, packed (wrapped)": ("wrapped", None),
}
"""Contender → layout, and tokens per forward pass if it is not `--tokens`."""


# --- speed ----------------------------------------------------------------------------------------


@dataclass
class Lane:
    """One contender and its measurements."""

    name: str
    client: Client
    gradients: str
    off: float | None = None
    runs: list[Json] = field(default_factory=list)

    def run(self) -> None:
        self.runs.append(self.client.run(**({} if self.runs else {"gradients": self.gradients})))
        print(f"{self.name}: {self.runs[-1]['step']:.2f} s", file=sys.stderr, flush=True)

    @property
    def step(self) -> float:
        """Median seconds of a step, without the first (warm-up) run."""
        return statistics.median(r["step"] for r in self.runs[1:] or self.runs)

    def line(self, made: Json) -> Json:
        grown = max(r["peak"] for r in self.runs) - int(self.client.built["rss"])
        return {
            "contender": self.name, "step_s": self.step, "runs": len(self.runs[1:]),
            "trained_per_s": made["trained"] / self.step,
            "tokens_per_s": made["tokens"] / self.step,
            "computed": self.runs[-1]["computed"],
            "loss": self.runs[0]["loss"],
            "grown_bytes": grown,
            "peak_bytes": max(r["peak"] for r in self.runs), "gradient_off": self.off,
            "clean": self.off is not None and self.off <= SAME_GRADIENT,
        }  # fmt: skip


@dataclass
class Bench:
    """The two Pythons and the folder they share."""

    chosen: argparse.Namespace
    folder: Path
    ours: Server
    trl: Server | None
    made: Json

    def run(self, case: str) -> list[Json]:
        """One row per contender; the first is soulkit."""
        full = CASES[case]
        yardstick = str(self.folder / "plain.safetensors")
        plain = self._start(self.ours, "plain", full)
        plain.run(gradients=yardstick)
        plain.close()
        lanes = list(self._lanes(full))
        for _ in range(1 + self.chosen.repeats):
            for lane in lanes:
                lane.run()
        compare = self.ours.start("compare", wanted=yardstick)
        for lane in lanes:
            lane.off = compare.run(found=lane.gradients)["whole"]
            lane.client.close()
        compare.close()
        return [lane.line(self.made) for lane in lanes]

    def _lanes(self, full: bool) -> Iterator[Lane]:
        for number, (name, settings) in enumerate(OURS.items()):
            client = self._start(self.ours, "step", full, settings=settings)
            yield Lane(name, client, str(self.folder / f"ours{number}.safetensors"))
        if self.trl is None:
            return
        for number, (name, (layout, tokens)) in enumerate(TRL.items()):
            client = self._start(self.trl, "step", full, layout=layout, tokens=tokens)
            yield Lane(name, client, str(self.folder / f"trl{number}.safetensors"))

    def _start(self, server: Server, kind: str, full: bool, **spec: object) -> Client:
        spec["tokens"] = spec.get("tokens") or self.chosen.tokens
        return server.start(
            kind, folder=str(self.folder), rows=str(self.folder / "rows.json"), full=full,
            threads=self.chosen.threads, clock=self.chosen.clock, **spec,
        )  # fmt: skip


def verdict(lines: list[Json]) -> Json:
    """Whether soulkit is clean and no slower than TRL's fastest clean contender."""
    first, *others = lines
    clean = [o for o in others if o["clean"] and o["contender"].startswith("TRL")]
    best = min(clean, key=lambda o: float(o["step_s"]), default=None)
    ratio = None if best is None else best["step_s"] / first["step_s"]
    return {
        "clean": first["clean"], "against": best and best["contender"], "ratio": ratio,
        "passed": first["clean"] and (ratio is None or ratio >= NOISE),
    }  # fmt: skip


def table(case: str, lines: list[Json], result: Json) -> Table:
    said = "" if result["ratio"] is None else (
        f" TRL's fastest clean contender: {result['against']}, {result['ratio']:.2f} × soulkit's "
        f"time: {'pass' if result['passed'] else 'MISSED'}."
    )  # fmt: skip
    shown = Table(title=case, caption=f"×: soulkit's time is 1. Memory: grown / peak.{said}")
    for heading in ("contender", "step s", "×", "trained tok/s", "tok/s", "computed", "GB",
                    "gradient off", ""):  # fmt: skip
        shown.add_column(heading, justify="left" if heading in ("contender", "") else "right")
    for line in lines:
        times = line["step_s"] / lines[0]["step_s"]
        shown.add_row(
            line["contender"], f"{line['step_s']:.2f}", f"{times:.2f}",
            f"{line['trained_per_s']:.0f}", f"{line['tokens_per_s']:.0f}", str(line["computed"]),
            f"{line['grown_bytes'] / 1e9:.2f} / {line['peak_bytes'] / 1e9:.2f}",
            f"{line['gradient_off']:.0e}", "clean" if line["clean"] else "contaminated",
        )  # fmt: skip
    return shown


def speed(chosen: argparse.Namespace, folder: Path, ours: Server, console: Console) -> Json:
    trl = None
    if chosen.trl_python is not None:
        trl = Server([chosen.trl_python, str(HERE / "_sft_trl.py")], folder, chosen.threads)
    maker = ours.start("make", folder=str(folder), sequences=chosen.sequences, scale=chosen.scale)
    made = {k: v for k, v in maker.run().items() if k not in ("seconds", "peak")}
    maker.close()
    report: Json = {"made": made, "versions": [versions(s) for s in (ours, trl)], "cases": {}}
    console.print(*report["versions"], made, highlight=False)
    bench = Bench(chosen, folder, ours, trl, made)
    for case in chosen.only:
        lines = bench.run(case)
        report["cases"][case] = {"lines": lines, "verdict": verdict(lines)}
        console.print(table(case, lines, verdict(lines)))
    if trl is not None:
        trl.close()
    verdicts = [case["verdict"]["passed"] for case in report["cases"].values()]
    host = made["encode_s"] / min(c["lines"][0]["step_s"] for c in report["cases"].values())
    console.print(f"rendering and tokenising: {made['encode_s']:.3f} s, {host:.1%} of a step")
    return {**report, "host_share": host, "passed": all(verdicts)}


def versions(server: Server | None) -> Json | None:
    if server is None:
        return None
    client = server.start("versions")
    releases = client.run()
    client.close()
    return {k: v for k, v in releases.items() if k not in ("seconds", "peak")}


# --- a large corpus -------------------------------------------------------------------------------

SHARD = 256 << 20
"""Bytes per shard."""


def write_corpus(folder: Path, size: float) -> list[str]:
    """Write about `size` bytes of conversations, half JSONL, half Parquet; returns both folders."""
    (folder / "lines").mkdir(parents=True)
    (folder / "tables").mkdir()
    rows = made_rows(2000)
    block = sum(len(json.dumps(row)) + 1 for row in rows)
    for shard in range(max(2, round(size / SHARD))):
        copies = max(1, round(min(SHARD, size / 2) / block))
        if shard % 2:
            _write_table(folder / "tables" / f"train-{shard:04d}.parquet", rows, shard, copies)
        else:
            _write_lines(folder / "lines" / f"train-{shard:04d}.jsonl", rows, shard, copies)
    return [str(folder / "lines"), str(folder / "tables")]


def made_rows(count: int) -> list[Json]:
    """Conversations of one to six exchanges, 2 kB on average, from 5,000 generated words."""
    rng = random.Random(0)
    words = [f"{a}{b}{c}" for a in "bdfgklmnpr" for b in "aeiou" for c in "bdfgklmnst"] * 10
    rows = []
    for _ in range(count):
        turns = [(role, " ".join(rng.choices(words, k=rng.randint(5, 120))))
                 for _ in range(rng.randint(1, 6)) for role in ("user", "assistant")]  # fmt: skip
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return rows


def _numbered(rows: list[Json], shard: int, copy: int) -> Iterator[Json]:
    """The rows, each with a unique opening."""
    for number, row in enumerate(rows):
        first, *rest = row["messages"]
        opening = {"role": "user", "content": f"{shard} {copy} {number}: {first['content']}"}
        yield {"messages": [opening, *rest]}


def _write_lines(path: Path, rows: list[Json], shard: int, copies: int) -> None:
    lines = [json.dumps(row) + "\n" for row in _numbered(rows, shard, 0)]
    halves = [line.split(f"{shard} 0 ", 1) for line in lines]  # faster; writing is not measured
    with path.open("w", encoding="utf-8") as file:
        for copy in range(copies):
            file.writelines(f"{before}{shard} {copy} {after}" for before, after in halves)


def _write_table(path: Path, rows: list[Json], shard: int, copies: int) -> None:
    import pyarrow
    import pyarrow.parquet

    first = pyarrow.Table.from_pylist(list(_numbered(rows, shard, 0)))
    # Not compressed, so that the corpus has the requested size.
    with pyarrow.parquet.ParquetWriter(path, first.schema, compression="NONE",
                                       use_dictionary=False) as writer:  # fmt: skip
        for copy in range(copies):
            writer.write_table(pyarrow.Table.from_pylist(list(_numbered(rows, shard, copy))))


def corpus(chosen: argparse.Namespace, ours: Server, console: Console) -> Json:
    """Read a generated corpus, then again from a position deep in it."""
    with tempfile.TemporaryDirectory(dir=chosen.out) as made:
        sources = write_corpus(Path(made) / "corpus", chosen.corpus_gb * 1e9)
        size = sum(p.stat().st_size for p in Path(made).rglob("train-*"))
        reader = ours.start("read", sources=sources)
        first = reader.run(steps=chosen.corpus_steps, batch=256, clock=chosen.clock)
        reader.close()
        again = ours.start("read", sources=sources)
        second = again.run(steps=4, batch=256, clock=chosen.clock, position=first["position"])
        again.close()
    report = {
        "bytes": size, "rows": first["rows"], "open_s": first["open_s"],
        "first_row_s": first["first_s"], "rows_per_s": first["rows_s"],
        "grown_bytes": max(first["grown"], second["grown"]),
        "resume_s": second["open_s"] + second["first_s"], "passes": first["passes"],
        "same": first["next"][0] == second["first"],
    }  # fmt: skip
    report["passed"] = report["same"] and report["grown_bytes"] <= MOST_GROWTH
    console.print(report, highlight=False)
    return report


# --- kills ----------------------------------------------------------------------------------------


def kills(chosen: argparse.Namespace, folder: Path, console: Console) -> Json:
    """Compare an undisturbed run with one that is killed `--kill` times."""
    chats = folder / "chats.jsonl"
    with chats.open("w", encoding="utf-8") as file:
        for row in made_rows(120):
            short = [{**m, "content": m["content"][:80]} for m in row["messages"]]
            file.write(json.dumps({"messages": short}) + "\n")
    untouched, broken = folder / "untouched", folder / "broken"
    started = time.monotonic()
    subprocess.run(_run(chats, untouched, chosen), check=True, stdout=subprocess.DEVNULL)
    whole, rng = time.monotonic() - started, random.Random(0)
    expected, count, off = results(untouched), 0, set[str]()
    while count < chosen.kill:
        shutil.rmtree(broken, ignore_errors=True)
        count += _killed(_run(chats, broken, chosen), whole, chosen.kill - count, rng)
        actual = results(broken)
        off |= {name for name in expected if actual[name] != expected[name]}
    console.print(f"{count} kills in runs of {whole:.0f} s; differing: {sorted(off) or 'nothing'}")
    return {"kills": count, "seconds": whole, "differing": sorted(off), "passed": not off}


def _killed(command: list[str], whole: float, most: int, rng: random.Random) -> int:
    """Run to the end with at most `most` kills; returns the number of kills."""
    for kill in range(most):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            if process.wait(rng.uniform(0.2, 1.0) * whole):
                raise Failed("a resumed run failed: see its error above")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        else:
            return kill
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return most


def _run(chats: Path, out: Path, chosen: argparse.Namespace) -> list[str]:
    words = (
        sys.executable, "-m", "soulkit.cli.app", "train", "sft", "--model", "tiny", "--full",
        "--data", chats, "--side", "human", "--out", out, "--steps", 24, "--batch", 4,
        "--window", 32, "--checkpoint-every", 2, "--threads", 1, "--set", "deterministic=true",
    )  # fmt: skip
    return [str(word) for word in words]


def results(run: Path) -> Json:
    """The values that must be equal: metrics without times, weights, last stream position."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in x.items() if not k.startswith("time/")} for x in lines]
    last = max((run / "checkpoints").glob("step_*"))
    position = json.loads((last / "position.json").read_text())
    weights = {
        str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(run.rglob("*.safetensors"))
    }
    return {"metrics": metrics, "weights": weights, "stream": position["stream"]}


# --- the script -----------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trl-python", help="a Python with TRL; without it TRL is skipped")
    parser.add_argument(
        "--only", default=",".join(CASES), help="speed cases to run; empty for none"
    )
    parser.add_argument("--sequences", type=int, default=16, help="conversations per step")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per forward pass")
    parser.add_argument("--repeats", type=int, default=5, help="runs after the warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths")
    parser.add_argument("--corpus-gb", type=float, help="read a generated corpus of this size")
    parser.add_argument("--corpus-steps", type=int, default=1000, help="batches of 256 rows")
    parser.add_argument("--out", type=Path, help="folder for the temporary corpus")
    parser.add_argument("--kill", type=int, help="kill a run this many times")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    chosen = parser.parse_args()
    chosen.only = [case.strip() for case in chosen.only.split(",") if case.strip()]
    if unknown := set(chosen.only) - set(CASES):
        parser.error(f"unknown case: {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    return chosen


def main() -> int:
    chosen, console = arguments(), Console(width=170)
    report: Json = {"machine": machine(), "threads": chosen.threads, "clock": chosen.clock,
                    "scale": chosen.scale, "command": sys.argv}  # fmt: skip
    console.print(report["machine"], highlight=False)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are forked
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        ours = Server([sys.executable, str(HERE / "_sft_soulkit.py")], folder, chosen.threads)
        try:
            if chosen.only:
                report["speed"] = speed(chosen, folder, ours, console)
            if chosen.corpus_gb:
                report["corpus"] = corpus(chosen, ours, console)
            if chosen.kill:
                report["kill"] = kills(chosen, folder, console)
        except Failed as error:
            console.print(f"failed:\n{error}", style="red", markup=False)
            report["failed"] = str(error)
        ours.close()
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1))
    parts = [part for part in report.values() if isinstance(part, dict)]
    return int("failed" in report or not all(part["passed"] for part in parts))


if __name__ == "__main__":
    sys.exit(main())
