"""What a trained simulator remembers of its chats, and how often the audit finds what is not there.

    python benchmarks/memory_audit.py dose          one run: ranks by repetitions and by checkpoint
    python benchmarks/memory_audit.py null          400 secrets that were never planted, 5 seeds
    python benchmarks/memory_audit.py redacted      the same chats, planted and then redacted

The chats are made: 724 short ones about broken things. The model is the tiny one. A secret is
significant if its rank among 513 is 25 or better; by chance 4.9 % are.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from soulkit.data.privacy.canaries import plant_canaries
from soulkit.metrics.intervals import exact_interval
from soulkit.people.memory import measure_memory
from soulkit.train.config import TrainConfig
from soulkit.train.run import train

HELLO = ("hi", "hey there", "um hello", "ok so", "quick one", "good morning")
THINGS = ("bike", "kettle", "radio", "tent", "piano")
TROUBLES = ("makes a noise", "is stuck", "smells odd", "won't start", "got wet", "lost a screw")
ADVICE = ("Let it dry for a day.", "Clean it with warm water.", "Turn it off and on again.")
RESULTS = ("tried that, no luck", "did that twice already")
CHATS = 724
TRAIN = ("--model", "tiny", "--full", "--side", "human", "--batch", "16", "--lr", "1e-3")


def write_chats(path: Path, seed: int) -> Path:
    """Chats in which a year is the only number."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(CHATS):
            year = rng.randint(1950, 2020)
            said = (
                f"{rng.choice(HELLO)} my {rng.choice(THINGS)} from {year} "
                f"{rng.choice(TROUBLES)}, what now?",
                rng.choice(ADVICE),
                rng.choice(RESULTS),
            )
            messages = [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant", "user"), said, strict=True)
            ]
            file.write(json.dumps({"person": f"p{number % 30}", "messages": messages}) + "\n")
    return path


def soul(*words: object) -> str:
    """Run `soul` and return its output."""
    call = [sys.executable, "-m", "soulkit", *map(str, words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(call, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(call[2:])}\n{done.stderr}")
    return done.stdout


def audit(run: Path, *more: object) -> list[dict]:
    """The checkpoints in the audit of a run."""
    return json.loads(soul("people", "memory", run, "--json", *more))["checkpoints"]


def show(step: int, groups: list[dict]) -> None:
    for one in groups:
        share = (
            f"{one['significant']:3} of {one['canaries']:3} [{one['low']:.3f}, {one['high']:.3f}]"
        )
        print(f"step {step:4}  planted {one['repeats']} x  median rank {one['median_rank']:5.1f}  "
              f"{one['median_exposure']:.2f} bits  p <= .05: {share}  recited {one['recited']}",
              flush=True)  # fmt: skip


def dose(folder: Path) -> None:
    """Ranks after 60, 120, … 300 steps."""
    chats = write_chats(folder / "chats.jsonl", 0)
    soul("data", "plant", chats, "-o", folder / "planted.jsonl")
    start = time.monotonic()
    soul("train", "sft", "--data", folder / "planted.jsonl", *TRAIN, "--steps", 300,
         "--checkpoint-every", 60, "--keep-last", 9, "--out", folder / "run")  # fmt: skip
    trained = time.monotonic() - start
    for one in audit(folder / "run"):
        show(one["step"], one["groups"])
    print(f"training {trained:.0f} s, audit {time.monotonic() - start - trained:.0f} s")


def null(folder: Path, *seeds: str, canaries: int = 80) -> None:
    """Never-planted secrets of models that learned the planted ones."""
    significant = total = 0
    for seed in map(int, seeds or range(5)):
        place = folder / str(seed)
        place.mkdir()
        chats = write_chats(place / "chats.jsonl", seed)
        plant_canaries(chats, place / "planted.jsonl", canaries, "human", seed)
        # A list with all controls, and four of the others, in whose conversations they are ranked.
        lines = (place / "planted.canaries.jsonl").read_text(encoding="utf-8").splitlines()
        controls = place / "controls.canaries.jsonl"
        controls.write_text("\n".join([*lines[:4], *lines[canaries:], ""]), encoding="utf-8")
        (place / "controls.jsonl").write_bytes((place / "planted.jsonl").read_bytes())
        flags = {"method": "sft", "model": "tiny", "full": True, "side": "human", "sft_batch": 16,
                 "corpora": [str(place / "planted.jsonl")], "steps": 60, "lr": 1e-3, "seed": seed,
                 "threads": 1}  # fmt: skip
        train(TrainConfig.load(flags=flags), place / "run")
        report = measure_memory(str(place / "run" / "model"), controls, device="cpu", limit=1)
        group = report["checkpoints"][0]["groups"][0]
        show(60, [group])
        significant, total = significant + group["significant"], total + group["canaries"]
        low, high = exact_interval(significant, total)
        print(f"{significant} of {total}: {significant / total:.4f} [{low:.4f}, {high:.4f}]",
              flush=True)  # fmt: skip


def redacted(folder: Path) -> None:
    """The audit of chats whose secrets were redacted before training."""
    chats = write_chats(folder / "chats.jsonl", 0)
    soul("data", "plant", chats, "-o", folder / "planted.jsonl", "--canaries", 40)
    soul("data", "redact", folder / "planted.jsonl", "-o", folder / "safe.jsonl")
    soul("train", "sft", "--data", folder / "safe.jsonl", *TRAIN, "--steps", 300,
         "--out", folder / "run")  # fmt: skip
    found = audit(folder / "run", "--canaries", folder / "planted.canaries.jsonl")[-1]
    show(found["step"], found["groups"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        {"dose": dose, "null": null, "redacted": redacted}[sys.argv[1]](Path(made), *sys.argv[2:])
