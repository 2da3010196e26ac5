"""A run that is killed and started again writes, to the bit, what an untouched run writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soulkit.runs import read_jsonl
from tests.train.support import lines_of, soul

STEPS, EVERY = 5, 2


def ditto(model: Path, out: Path) -> list[str]:
    """Several updates a step, two kinds of prompt length, a dev split, a warm-up."""
    words = (
        "train", "ditto", "--model", model, "--task", "tomi", "--data", "tomi=synth:40",
        "--prompts", 4, "--group-size", 4, "--max-tokens", 12, "--lr", 3e-3, "--lora-r", 4,
        "--steps", STEPS, "--checkpoint-every", EVERY, "--eval-every", 3, "--out", out,
        "--set", "mini_batch_prompts=2", "--set", "batch_size=8", "--set", "warmup_steps=3",
        "--set", "dev_limit=6",
    )  # fmt: skip
    return [str(w) for w in words]


def sft(model: Path, out: Path) -> list[str]:
    words = ("train", "sft", "--model", "tiny", "--full", "--task", "tomi", "--data",
             "tomi=synth:30", "--steps", STEPS, "--batch", 6, "--lr", 1e-3, "--out", out,
             "--checkpoint-every", EVERY, "--set", "lr_schedule=cosine")  # fmt: skip
    return [str(w) for w in words]


def episodes(run: Path) -> list[dict[str, Any]]:
    """The run's records, without how long and how expensive they were."""
    kept = read_jsonl(run / "episodes.jsonl")
    for record in kept:
        record["episode"]["usage"] = None
        for trace in record["episode"]["traces"]:
            for turn in trace["turns"]:
                turn["completion"]["usage"] = None
    return kept


def kill_when(arguments: list[str], due: Callable[[], bool]) -> None:
    """Start the command as a process of its own and end it with −9 once `due` says so."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "soulkit.cli.app", *arguments], env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    end = time.monotonic() + 120
    try:
        while not due():
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < end
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_same(run: Path, untouched: Path, weights: str) -> None:
    assert lines_of(run) == lines_of(untouched)
    assert episodes(run) == episodes(untouched)
    mine, theirs = (r / "model" / weights for r in (run, untouched))
    assert mine.read_bytes() == theirs.read_bytes()
    mine_, theirs_ = (json.loads((r / "summary.json").read_text()) for r in (run, untouched))
    for clock in ("seconds", "model"):
        mine_.pop(clock), theirs_.pop(clock)
    assert mine_ == theirs_


@pytest.fixture(scope="module")
def untouched(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untouched") / "run"
    assert soul(*ditto(warm / "model", out)) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before a checkpoint", "after a step", "in mid-step"])
def test_a_killed_run_goes_on_to_the_bit(
    tmp_path: Path, warm: Path, untouched: Path, moment: str
) -> None:
    out = tmp_path / "run"
    metrics, played = out / "metrics.jsonl", out / "episodes.jsonl"
    whole = untouched / "episodes.jsonl"
    upto_third = sum(json.loads(line)["step"] <= 3 for line in whole.read_text().splitlines())
    due = {
        "before a checkpoint": lambda: count(metrics) >= 1,
        "after a step": lambda: count(metrics) >= 3,
        "in mid-step": lambda: count(played) >= upto_third,  # sampled, not yet trained
    }[moment]
    kill_when(ditto(warm / "model", out), due)
    assert not (out / "summary.json").exists()
    assert soul(*ditto(warm / "model", out)) == 0
    assert_same(out, untouched, "adapter_model.safetensors")
    noted = json.loads((out / "environment.json").read_text())
    assert len(noted["resumed"]) == 1


def test_a_run_without_its_last_step_goes_on_to_the_bit(
    tmp_path: Path, warm: Path, untouched: Path
) -> None:
    """What a kill leaves, made by hand: the newest checkpoint gone, files longer than the rest."""
    import shutil

    out = tmp_path / "run"
    shutil.copytree(untouched, out)
    shutil.rmtree(out / "checkpoints" / f"step_{STEPS:06d}")
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "torn')
    (out / "checkpoints" / f".step_{STEPS:06d}.part").mkdir()
    assert soul(*ditto(warm / "model", out)) == 0
    assert_same(out, untouched, "adapter_model.safetensors")
    assert (out / "metrics.jsonl.cut").exists()  # the tail is kept aside, not thrown away


def test_supervised_runs_go_on_to_the_bit(tmp_path: Path) -> None:
    import shutil

    whole, out = tmp_path / "whole", tmp_path / "run"
    assert soul(*sft(whole, whole)) == 0
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / f"step_{STEPS:06d}")
    shutil.rmtree(out / "model")
    assert soul(*sft(out, out)) == 0
    assert_same(out, whole, "model.safetensors")


def test_another_configuration_is_refused_by_name(
    untouched: Path, warm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (untouched / "metrics.jsonl").read_bytes()
    arguments = [*ditto(warm / "model", untouched), "--lambda-fb", "0.5", "--seed", "7"]
    assert soul(*arguments) == 2
    said = capsys.readouterr().err
    assert "lambda_fb: 1.0 -> 0.5" in said and "seed: 0 -> 7" in said
    assert (untouched / "metrics.jsonl").read_bytes() == before
