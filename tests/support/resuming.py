"""Helpers for tests of resumed runs: small runs with all features, and comparison of two runs.

The comparison covers metrics, episodes, weights, checkpoints and summary, but not measured times:
`time/sample` and `time/train` of a step, `seconds` of positions and of the summary, and the `usage`
of completions, which contains latencies.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from soulkit.cli.app import main
from soulkit.runs.jsonl import read_jsonl
from soulkit.tasks.secret_keeper.task import visitor_line
from soulkit.train.state.checkpoint import checkpoints, damage
from tests.support.judged import write_rows
from tests.support.servers.openai_server import Fault
from tests.support.training import lines_of

STEPS, EVERY = 5, 2


# --- the runs -------------------------------------------------------------------------------------


def ditto(model: Path, out: Path) -> list[str]:
    """A Ditto run with several updates per step, two prompt lengths, a dev split and a warm-up."""
    words = (
        "train", "ditto", "--model", model, "--task", "tomi", "--data", "tomi=synth:40",
        "--prompts", 4, "--group-size", 4, "--max-tokens", 12, "--lr", 3e-3, "--lora-r", 4,
        "--steps", STEPS, "--checkpoint-every", EVERY, "--eval-every", 3, "--out", out,
        "--set", "mini_batch_prompts=2", "--set", "batch_size=8", "--set", "warmup_steps=3",
        "--set", "dev_limit=6",
    )  # fmt: skip
    return [str(w) for w in words]


def everything(model: Path, out: Path, url: str) -> list[str]:
    """Dialogues and questions, partner and coach over HTTP, a checkpoint per step, keep-best."""
    words = (
        "train", "ditto", "--model", model, "--task", "tomi,secret_keeper:0.5",
        "--data", "tomi=synth:24", "--data", "secret_keeper=synth:12",
        "--partner", f"endpoint:visitor@{url}", "--coach", f"endpoint:wise@{url}",
        "--prompts", 3, "--group-size", 2, "--max-tokens", 8, "--lr", 3e-3, "--lora-r", 4,
        "--steps", 3, "--checkpoint-every", 1, "--eval-every", 1, "--out", out,
        "--set", "deterministic=true", "--set", "keep_last=1", "--set", "keep_best=1",
        "--set", "mini_batch_prompts=2", "--set", "batch_size=8", "--set", "dev_limit=3",
        "--set", "sampler_cap=2.0", "--set", "kl_coef=0.01", "--set", "warmup_steps=2",
    )  # fmt: skip
    return [str(w) for w in words]


def taught(model: Path, out: Path, url: str) -> list[str]:
    """A moving average as teacher; few checkpoints, so that a resumed run repeats several steps."""
    words = (
        "train", "sdpo-token", "--model", model, "--task", "tomi", "--data", "tomi=synth:30",
        "--prompts", 4, "--group-size", 3, "--max-tokens", 10, "--lr", 3e-3, "--lora-r", 4,
        "--steps", 5, "--checkpoint-every", 2, "--out", out, "--set", "teacher=ema",
        "--set", "ema_tau=0.2", "--set", "deterministic=true", "--set", "mini_batch_prompts=2",
        "--set", "batch_size=8",
    )  # fmt: skip
    return [str(w) for w in words]


def preferred(model: Path, out: Path, url: str) -> list[str]:
    """DPO whose reference is older than most checkpoints; the actor judges."""
    tasks = Path(__file__).parent / "graded_task" / "tasks.yaml"
    rows = write_rows(model.parent / "topics.jsonl", 12)
    words = (
        "train", "self-rewarding", "--model", model, "--tasks", tasks, "--task", "graded",
        "--data", f"graded={rows}", "--prompts", 4, "--group-size", 3, "--max-tokens", 8,
        "--lr", 1e-2, "--lora-r", 4, "--steps", 5, "--checkpoint-every", 2, "--out", out,
        "--iteration-steps", 3, "--set", "deterministic=true", "--set", "mini_batch_prompts=2",
        "--set", "batch_size=8",
    )  # fmt: skip
    return [str(w) for w in words]


RUNS: dict[str, Callable[[Path, Path, str], list[str]]] = {
    "ditto": everything, "sdpo": taught, "self-rewarding": preferred,
}  # fmt: skip


def sft(model: Path, out: Path) -> list[str]:
    words = ("train", "sft", "--model", "tiny", "--full", "--task", "tomi", "--data",
             "tomi=synth:30", "--steps", STEPS, "--batch", 6, "--lr", 1e-3, "--out", out,
             "--checkpoint-every", EVERY, "--set", "lr_schedule=cosine")  # fmt: skip
    return [str(w) for w in words]


def reply(body: dict[str, Any]) -> str:
    """The partner's next line, or the coach's feedback, which depends on the draft."""
    if body["model"] == "visitor":
        return visitor_line(body["messages"])
    hints = ("Look again at who was in the room.", "Think of what was last seen.", "Keep it short.")
    return hints[len(str(body["messages"])) % len(hints)]


def jitter(index: int, body: dict[str, Any]) -> Fault:
    """Delay replies randomly, so that their order differs between runs."""
    return Fault.slow(0.004 * random.random())


# --- comparison -----------------------------------------------------------------------------------


def episodes(run: Path) -> list[dict[str, Any]]:
    """The run's records without times and costs."""
    records = read_jsonl(run / "episodes.jsonl")
    for record in records:
        record["episode"].pop("usage", None)
        for trace in record["episode"]["traces"]:
            for turn in trace["turns"]:
                turn.pop("usage", None)
    return records


def summary(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "summary.json").read_text())
    values["provenance"].pop("dates")
    # Of the folder that the tests run in, which people may work in meanwhile; and a busy machine
    # may be too slow to tell.
    values["provenance"]["versions"].pop("commit", None)
    return {k: v for k, v in values.items() if k not in ("seconds", "model")}


def differing(one: Any, other: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Path such as `a/b` → both values, for every difference between two JSON values."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return {} if one == other else {name: (one, other)}
    names = [*one, *(key for key in other if key not in one)]
    parts = (differing(one.get(key), other.get(key), f"{name}/{key}") for key in names)
    return {key: pair for part in parts for key, pair in part.items()}


SAME_PLACE = ("step", "policy", "dev", "valid", "stream")
"""The parts of a position that do not depend on time."""


def states(run: Path) -> dict[str, Any]:
    """Every file of every checkpoint; the position without its times."""
    contents: dict[str, Any] = {}
    for path in checkpoints(run / "checkpoints"):
        assert not damage(path)
        contents |= {f"{path.name}/{name}": held for name, held in files(path).items()}
        position = json.loads(contents.pop(f"{path.name}/position.json"))
        # Offsets depend on the number of digits of the times.
        contents[path.name] = {name: position[name] for name in SAME_PLACE}
    return contents


def models(run: Path) -> dict[str, Any]:
    """The files of the final and of the best model."""
    there = [run / name for name in ("model", "best") if (run / name).exists()]
    return {f"{p.name}/{name}": held for p in there for name, held in files(p).items()}


def files(folder: Path) -> dict[str, Any]:
    """Name → content without the folder, and without a set that PEFT saves in arbitrary order."""
    contents: dict[str, Any] = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    if "adapter_config.json" in contents:
        settings = json.loads(contents["adapter_config.json"])
        contents["adapter_config.json"] = {**settings, "target_modules": None}
    if "soulkit.json" in contents:  # a tiny base is inside its run folder
        note = json.loads(contents["soulkit.json"])
        note["base"]["model"] = Path(note["base"]["model"]).name
        contents["soulkit.json"] = note
    return contents


def assert_same(run: Path, untouched: Path) -> None:
    assert lines_of(run) == lines_of(untouched)
    assert episodes(run) == episodes(untouched)
    assert models(run).keys() == models(untouched).keys() and models(run) == models(untouched)
    assert states(run).keys() == states(untouched).keys() and states(run) == states(untouched)
    assert differing(summary(run), summary(untouched)) == {}
    sampled = run / "sampled.jsonl"
    assert not sampled.exists() or not sampled.read_bytes()  # the last checkpoint needs none of it


# --- processes ------------------------------------------------------------------------------------


def fork_context() -> Any:
    """A context for forked processes that have all imports, with one thread each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    model = "transformers.models.qwen3.modeling_qwen3"
    context.set_forkserver_preload(
        ["soulkit.train.run", "soulkit.cli.app", "soulkit.distill.select", "peft", model]
    )
    return context


def silent(arguments: list[str]) -> None:
    """Run the command in a separate process without progress output."""
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nothing:
        sys.stdout = sys.stderr = nothing
        sys.exit(main(arguments))


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def stop_after(
    context: Any, arguments: list[str], growing: Sequence[Path], events: int,
    number: int = signal.SIGTERM,
) -> int:  # fmt: skip
    """Start the command and stop it with signal `number` when the files in `growing` have been
    seen to change `events` times; its exit code. A command that ends earlier is not stopped."""
    process = context.Process(target=silent, args=(arguments,))
    process.start()
    before, end = sizes(growing), time.monotonic() + 600
    while process.is_alive() and events:
        assert time.monotonic() < end
        now = sizes(growing)
        events -= now != before
        before = now
        time.sleep(0.0005)
    if process.is_alive():
        os.kill(process.pid, number)
    process.join(600)
    assert process.exitcode is not None, "it did not end"
    return int(process.exitcode)


def sizes(paths: Sequence[Path]) -> list[int]:
    return [path.stat().st_size if path.exists() else -1 for path in paths]
