"""What do several ranks cost on a CPU? soulkit with 1, 2 and 4 processes, against TRL.

    .venv/bin/python benchmarks/world_size.py --trl-python X/bin/python --json ranks.json

X is a Python with TRL, as in `train_step.py`, with accelerate. The model is the one of
`train_step.py`. Every contender computes old log-probs and one update on the same token ids and
advantages, in 1, 2 and 4 processes (gloo) with one thread each: soulkit replicated and with
`--shard`, and TRL's GRPOTrainer with accelerate's DistributedDataParallel at its fastest
micro-batch size. Gradients must agree with those of soulkit in one process.

Shown for each contender, from the last of two runs: processor seconds of all ranks (which other
programs disturb least) and of the busiest one, the wall time if there are as many idle cores as
ranks, soulkit's imbalance (estimated work of the busiest rank / mean), the growth of a rank's
memory and its peak, and the bytes that the ranks sent to each other. For the latter, the benchmark
runs in a network of its own (`unshare`, Linux); without it they include other programs' traffic and
are not shown.

`--shapes` only shows what FSDP2 leaves on each rank of models of real sizes, on torch's meta
device: bytes are counted, nothing is computed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _cases
from _processes import Json, Server, machine
from rich.console import Console
from rich.table import Table
from train_step import SAME_GRADIENT, prepare, versions

HERE = Path(__file__).parent
OWN_NETWORK = "SOULKIT_OWN_NETWORK"
IMBALANCE, EXTRA = 1.10, 1.15
"""Aims with two ranks: imbalance, and processor time of all ranks / that of one process."""
MICRO_BATCHES = (4, 8, 16)
SEED = 7


@dataclass(frozen=True)
class Case:
    title: str
    make: Callable[[Callable[[int], int]], list[_cases.Row]]
    trl: bool = False
    """Whether TRL can train on these sequences: one reply to each prompt."""


def groups(sets: Sequence[_cases.Sets]) -> list[_cases.Row]:
    """The rows of several groups of one case, as different examples."""
    rows = [
        {**row, "example": 100 * i + row["example"]}
        for i, one in enumerate(sets) for row in one["all"]
    ]  # fmt: skip
    return _cases.with_advantages(rows)


CASES = {
    "grpo": Case(
        "GRPO: 16 prompts of 40 to 190, G 4, 32 new",
        lambda n: groups([
            _cases.single_turn(SEED + i, n(40 + 10 * i), 4, n(32)) for i in range(16)
        ]),
        trl=True,
    ),
    "ditto": Case(
        "Ditto: 8 prompts of 128 to 268, G 4, drafts, copies and refined of 32",
        lambda n: groups([
            _cases.ditto(SEED + i, 4, n(128 + 20 * i), n(100), n(40), n(32)) for i in range(8)
        ]),
    ),
    "trees": Case(
        "dialogues: 8 prompts of 60 to 200, G 4, 4 turns of 40",
        lambda n: groups([
            _cases.dialogues(SEED + i, 4, n(60 + 20 * i), 4, n(20), n(20)) for i in range(8)
        ]),
    ),
    "one": Case(
        "one prompt of 1024, G 16, 32 new",
        lambda n: _cases.single_turn(SEED, n(1024), 16, n(32))["all"],
        trl=True,
    ),
}  # fmt: skip


@dataclass
class Lane:
    """The measurements of one contender on one number of ranks."""

    name: str
    ranks: int
    report: Json
    gradients: Path
    off: float | None = None

    @property
    def last(self) -> list[Json]:
        """The numbers of each rank in the last run."""
        return list(self.report["runs"][-1])

    def most(self, what: str) -> float:
        return max(float(one[what]) for one in self.last)

    @property
    def cpu(self) -> float:
        return sum(float(one["cpu"]) for one in self.last)


@dataclass
class Bench:
    chosen: argparse.Namespace
    folder: Path
    ours: Server
    trl: Server | None

    def run(self, name: str) -> list[Lane]:
        case, scale = CASES[name], self.chosen.scale
        rows = self.folder / f"{name}.json"
        made = case.make(lambda n: max(2, round(n * scale)))
        rows.write_text(json.dumps(made))
        lanes = []
        for size in self.chosen.ranks:
            lanes.append(self._soulkit(rows, size, {}))
        for size in self.chosen.ranks:
            if size > 1 and not self.chosen.no_shard:
                lanes.append(self._soulkit(rows, size, {"shard": True}))
        if case.trl and self.trl is not None:
            lanes += self._theirs(self.trl, rows, len(made))
        compare = self.ours.start("compare", wanted=str(lanes[0].gradients))
        for lane in lanes[1:]:
            lane.off = compare.run(found=str(lane.gradients))["whole"]
        compare.close()
        return lanes

    def _soulkit(self, rows: Path, size: int, settings: Json) -> Lane:
        name = "soulkit --shard" if settings else "soulkit"
        return self._lane(name, self.ours, rows, size, settings=settings)

    def _theirs(self, server: Server, rows: Path, count: int) -> list[Lane]:
        """TRL with 1, 2, … ranks, at the micro-batch size that is fastest with one."""
        tried: list[Lane] = []
        for micro in (m for m in MICRO_BATCHES if count % m == 0):
            tried.append(self._lane(f"TRL, micro-batch {micro}", server, rows, 1, micro=micro))
            if tried[-1].cpu > 1.2 * min(lane.cpu for lane in tried):
                break
        best = min(tried, key=lambda lane: lane.cpu)
        micro = int(best.name.split()[-1])
        sizes = [n for n in self.chosen.ranks if n > 1 and count % (n * micro) == 0]
        return [best, *(self._lane(best.name, server, rows, n, micro=micro) for n in sizes)]

    def _lane(self, name: str, server: Server, rows: Path, size: int, **more: Any) -> Lane:
        gradients = self.folder / f"{rows.stem}-{name}-{size}.safetensors"
        spec = {"folder": str(self.folder), "rows": str(rows), "gradients": str(gradients),
                "threads": 1, "runs": 2, "settings": {}, **more}  # fmt: skip
        report = run_ranks(server, size, spec)
        lane = Lane(name, size, report, gradients)
        print(f"{rows.stem}, {name}, {size}: {lane.cpu:.2f} s", file=sys.stderr, flush=True)
        return lane


def run_ranks(server: Server, size: int, spec: Json) -> Json:
    """The reply of rank 0 of a job with `size` processes."""
    port = free_port()
    clients = [server.start("rank", size=size, rank=n, port=port, **spec) for n in range(size)]
    with ThreadPoolExecutor(size) as pool:
        replies = list(pool.map(lambda client: client.run(), clients))
    for client in clients:
        client.close()
    return replies[0]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# --- shapes of real models ------------------------------------------------------------------------

SHAPES = ("qwen3-8b", "qwen3-32b")


def shapes(sizes: Sequence[int] = (1, 2, 4, 8)) -> list[Json]:
    """Bytes of bfloat16 weights and of the adapter on each rank."""
    return [
        json.loads(subprocess.run(
            [sys.executable, "-c", f"import world_size; world_size.shape({name!r}, {size})"],
            cwd=HERE, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])},
        ).stdout.splitlines()[-1])
        for name in SHAPES for size in sizes
    ]  # fmt: skip


def shape(name: str, size: int) -> None:
    """Print what rank 0 of `size` holds of a model that exists only on the meta device."""
    import torch
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig, AutoModelForCausalLM

    from soulkit.models.local.footprint import SHAPES as PUBLISHED
    from soulkit.models.local.loading import lora_targets
    from soulkit.train.ranks.sharding import split_layers

    layers, hidden, heads, keys, width, inner, words, tables, _ = PUBLISHED[name]
    config = AutoConfig.for_model(
        "qwen3", num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_key_value_heads=keys, head_dim=width, intermediate_size=inner, vocab_size=words,
        tie_word_embeddings=tables == 1,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        lora = LoraConfig(r=32, lora_alpha=64, target_modules=lora_targets(model))
        model = get_peft_model(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    layer = sum(p.nbytes for p in model.get_base_model().model.layers[0].parameters()
                if not p.requires_grad)  # fmt: skip
    if size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        split_layers(model, init_device_mesh("cpu", (size,)))
    held = {True: 0, False: 0}
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        held[parameter.requires_grad] += local.numel() * local.element_size()
    print(json.dumps({"model": name, "ranks": size, "weights": held[False],
                      "adapter": held[True], "layer": layer}))  # fmt: skip


# --- output ---------------------------------------------------------------------------------------


def table(cases: dict[str, list[Lane]], wire: bool) -> Table:
    shown = Table(caption="×: multiple of soulkit with one rank. Memory: grown / peak of a rank.")
    for heading in ("contender", "ranks", "CPU s", "×", "busiest s", "wall s", "imbalance",
                    "MB a rank", "MB sent", "gradient off"):  # fmt: skip
        shown.add_column(heading, justify="left" if heading == "contender" else "right")
    idle = (os.cpu_count() or 1) - os.getloadavg()[0]
    for name, lanes in cases.items():
        shown.add_section()
        shown.add_row(f"[bold]{CASES[name].title}")
        for lane in lanes:
            uneven = lane.last[0].get("imbalance")
            shown.add_row(
                lane.name, str(lane.ranks), f"{lane.cpu:.2f}", f"{lane.cpu / lanes[0].cpu:.2f}",
                f"{lane.most('cpu'):.2f}",
                f"{lane.most('wall'):.2f}" if idle >= lane.ranks - 1 else "",
                f"{uneven:.2f}" if uneven else "",
                f"{lane.most('grown') / 1e6:.0f} / {lane.most('peak') / 1e6:.0f}",
                f"{lane.report['wire'] / 1e6:.1f}" if wire else "",
                "" if lane.off is None else f"{lane.off:.0e}",
            )  # fmt: skip
    return shown


def shape_table(lines: Sequence[Json]) -> Table:
    shown = Table(title="LoRA r 32 in float32, base in bfloat16, --shard, GB on each rank")
    for heading in ("model", "ranks", "weights", "one layer, whole", "adapter"):
        shown.add_column(heading, justify="left" if heading == "model" else "right")
    for line in lines:
        sizes = (f"{line[key] / 1e9:.2f}" for key in ("weights", "layer", "adapter"))
        shown.add_row(line["model"], str(line["ranks"]), *sizes)
    return shown


def missed(cases: dict[str, list[Lane]]) -> list[str]:
    """The aims that were missed, in words."""
    words = []
    for name, lanes in cases.items():
        for lane in lanes[1:]:
            if lane.off is None or not lane.off <= SAME_GRADIENT:
                words.append(f"{name}, {lane.name}, {lane.ranks}: gradients differ by {lane.off}")
            if lane.name != "soulkit" or lane.ranks != 2 or name == "one":
                continue
            uneven, extra = lane.last[0]["imbalance"], lane.cpu / lanes[0].cpu
            if uneven > IMBALANCE:
                words.append(f"{name}: imbalance {uneven:.2f} on two ranks (aim {IMBALANCE})")
            if extra > EXTRA:
                words.append(f"{name}: {extra:.2f} × processor time on two ranks (aim {EXTRA})")
    return words


def in_own_network() -> bool:
    """Run this program again in a network without other traffic, if that is possible."""
    if os.environ.get(OWN_NETWORK):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return True
    own = ["unshare", "--map-root-user", "--net"]
    there = shutil.which("unshare") and shutil.which("ip")
    if there and subprocess.run([*own, "true"], check=False, capture_output=True).returncode == 0:
        os.environ[OWN_NETWORK] = "1"
        os.execvp(own[0], [*own, sys.executable, *sys.argv])
    return False


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trl-python", help="a Python with TRL; without it TRL is skipped")
    parser.add_argument("--only", default=",".join(CASES), help="run only these cases: grpo,ditto")
    parser.add_argument(
        "--ranks", default="1,2,4", help="numbers of processes; the first must be 1"
    )
    parser.add_argument("--no-shard", action="store_true", help="leave out --shard")
    parser.add_argument("--shapes", action="store_true", help="only count bytes of real models")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    chosen = parser.parse_args()
    chosen.ranks = [int(one) for one in chosen.ranks.split(",")]
    chosen.only = chosen.only.split(",")
    if unknown := set(chosen.only) - set(CASES):
        parser.error(f"unknown case: {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    return chosen


def main() -> int:
    chosen, console = arguments(), Console(width=150)
    if chosen.shapes:
        lines = shapes()
        console.print(shape_table(lines))
        if chosen.json:
            chosen.json.write_text(json.dumps(lines, indent=1))
        return 0
    wire = in_own_network()
    console.print(machine(), highlight=False)
    cases: dict[str, list[Lane]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        ours = Server([sys.executable, str(HERE / "_ranks_soulkit.py")], folder, 1)
        theirs = [chosen.trl_python, str(HERE / "_ranks_trl.py")]
        trl = Server(theirs, folder, 1) if chosen.trl_python else None
        for side, server in (("soulkit", ours), ("TRL", trl)):
            console.print(f"{side}: {versions(server) or 'not run'}", highlight=False)
        prepare(ours, folder)
        bench = Bench(chosen, folder, ours, trl)
        for name in chosen.only:
            cases[name] = bench.run(name)
            if chosen.json:
                report = {n: [vars(lane) for lane in lanes] for n, lanes in cases.items()}
                chosen.json.write_text(json.dumps(report, indent=1, default=str))
        for server in filter(None, (ours, trl)):
            server.close()
    console.print(table(cases, wire))
    failed = missed(cases)
    for words in failed:
        console.print(f"MISSED {words}", style="red", markup=False)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
