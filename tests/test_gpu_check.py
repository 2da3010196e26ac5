"""`scripts/gpu_check`: one check that fails does not stop the others, and the block says what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check"

DRIVER = """
import os, sys, time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

loader = SourceFileLoader("gpu_check", sys.argv[1])
script = module_from_spec(spec_from_loader("gpu_check", loader))
sys.modules["gpu_check"] = script
loader.exec_module(script)

def fails(check): raise MemoryError("no room for it")
def dies(check): os._exit(7)
def hangs(check): time.sleep(60)
def skips(check): raise script.Skipped("not installed")
def works(check): check.bounded("log-prob", 1e-5)
def off(check): check.bounded("log-prob", 0.5)
def undefined(check): check.bounded("log-prob", float("nan"))

checks = (fails, dies, hangs, skips, off, undefined, works)
script.CHECKS = {one.__name__: (one, 1) for one in checks}
script.LIMIT_S = {"hangs": 1}
results = list(script.run_all(list(script.CHECKS), script.Check("cpu", True, Path(sys.argv[2]))))
print(script.block(["machine"], results))
"""


def checked(*words: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)


def test_no_failure_of_a_check_stops_the_others(tmp_path: Path) -> None:
    done = checked("-c", DRIVER, SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    first, machine, *lines, last = done.stdout.splitlines()
    assert (first, machine) == ("soulkit gpu_check", "machine")
    states = {line.split()[1]: line.split()[0] for line in lines}
    assert states == {
        "fails": "off", "dies": "off", "hangs": "off", "skips": "skipped", "off": "off",
        "undefined": "off", "works": "ok",
    }  # fmt: skip
    words = dict(zip(states, lines, strict=True))
    assert "MemoryError: no room for it" in words["fails"]
    assert "exit code 7" in words["dies"] and "no result after 1 s" in words["hangs"]
    assert "log-prob 0.5 (at most 0.001 nats) OFF" in words["off"]
    assert last.startswith("1 ok, 5 off, 1 skipped; ")
    assert "[7/7] works" in done.stderr and "s left" in done.stderr


def test_an_unknown_check_is_refused() -> None:
    done = checked(SCRIPT, "--only", "parity,speed")
    assert done.returncode == 2 and "unknown check: speed" in done.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_the_quick_check_passes_on_a_cpu(tmp_path: Path) -> None:
    done = checked(SCRIPT, "--device", "cpu", "--quick", "--json", tmp_path / "c.json", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {one["name"]: one for one in json.loads((tmp_path / "c.json").read_text())["checks"]}
    states = {name: one["state"] for name, one in results.items()}
    assert states.pop("vllm") == "skipped" and set(states.values()) == {"ok"}
    assert results["sampler"]["figures"]["tokens/s"] > 0
    assert 0.3 < results["memory"]["figures"]["memory"] <= 1.15
