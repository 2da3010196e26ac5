"""Runs that were measured against people, as `soul people` leaves them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[1] / "recorded" / "sft"
REPEATS = (0, 1, 2, 4, 8)
LINES = {
    "length": ("words in a message", 9.81, 14.2, 4.39, 3.1, 5.7, 0.001),
    "questions": ("share of messages with a question", 0.31, 0.29, -0.02, -0.06, 0.02, 1.0),
    "typos": ("typos in 100 words", 2.4, 0.1, -2.3, -3.0, -1.6, 0.002),
    "variety": ("different words in 50", 41.2, 40.1, -1.1, -2.5, 0.3, 0.36),
}


def group(step: int, repeats: int) -> dict[str, Any]:
    bits = 1.0 + repeats * step / 90
    return {"repeats": repeats, "canaries": 20 if not repeats else 5,
            "median_rank": 512 / 2**bits, "median_exposure": bits,
            "significant": min(5, repeats), "share": min(5, repeats) / 5, "low": 0.0, "high": 0.52,
            "recited": int(repeats > 4)}  # fmt: skip


def memory(*steps: int, planted: bool = True) -> dict[str, Any]:
    """The file that `soul people memory` writes."""
    copied = {"copied": 3, "messages": 120, "low": 0.005, "high": 0.071}
    return {
        "schema": "memory", "version": 1, "model": "tiny", "planted": planted, "alternatives": 512,
        "checkpoints": [
            {"step": step, "groups": [group(step, n) for n in REPEATS] if planted else [],
             "verbatim": {"held_in": copied, "held_out": {**copied, "copied": 1}}}
            for step in steps
        ],
    }  # fmt: skip


def closeness(*steps: int, worst: str = "words") -> dict[str, Any]:
    """The file that `soul people closeness` writes."""
    lines = [
        {"name": name, "label": label, "people": people, "model": model, "difference": difference,
         "low": low, "high": high, "p": p, "p_holm": p, "persons": 19, "turns": 412}
        for name, (label, people, model, difference, low, high, p) in LINES.items()
    ]  # fmt: skip
    models = [
        {"name": "tiny", "step": step,
         "headline": {"name": worst, "value": 9.5 - step / 10},
         "ratios": {"distance": 1.31, "words": 9.5 - step / 10, "context": 1.1},
         "distance": {"value": 0.21, "ratio": 1.31, "halves_p95": 0.16, "low": 1.12, "high": 1.63},
         "words": {"auc": 0.95 - step / 300, "low": 0.7, "high": 0.97, "p": 0.001},
         "context": {"auc": 0.61, "low": 0.55, "high": 0.67},
         "likelihood": {"share": 0.72, "low": 0.66, "high": 0.78},
         "perplexity": {"value": 31.4, "low": 28.1, "high": 40.2},
         "lines": lines}
        for step in steps
    ]  # fmt: skip
    return {"schema": "closeness", "version": 1, "persons": 19, "turns": 412, "models": models,
            "against": None}  # fmt: skip


def road(run: str = "run") -> dict[str, Any]:
    """The record that `soul people build` keeps beside the run."""
    commands = [f"soul data {name} d/in.jsonl -o d/out.jsonl" for name in ("redact", "dedupe")]
    material = {"person": 76, "conversation": 724, "message": 4012}
    return {"run": run, "done": {}, "material": material,
            "left_out": {"no message of a person": 12}, "redacted": {"email": 31, "phone": 8},
            "commands": commands}  # fmt: skip


def measured_run(folder: Path, **files: dict[str, Any]) -> Path:
    """A finished training in `folder/run` with these files: memory, closeness, road."""
    run = folder / "run"
    shutil.copytree(RECORDED, run)
    for name, content in files.items():
        place = folder if name == "road" else run
        (place / f"{name}.json").write_text(json.dumps(content))
    return run
