"""`scripts/gpu_check`: one check that fails does not stop the others, and the block says what."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    loader = SourceFileLoader("gpu_check", str(SCRIPT))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
            patch.setenv(name, os.environ.get(name, "0"))  # restored: the script sets them
        patch.setitem(sys.modules, "gpu_check", module)
        loader.exec_module(module)
        yield module


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


@pytest.mark.parametrize(
    ("card", "peak"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA L40", 181),
     ("NVIDIA L4", 121), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10G", 70), ("unknown", None)],
)  # fmt: skip
def test_the_peak_of_a_card(script: ModuleType, card: str, peak: int | None) -> None:
    assert script.peak_of(card) == (peak and peak * 1e12)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", ["parity", "attention", "deterministic"])
def test_what_only_runs_on_a_gpu_runs_on_the_stand_in(
    script: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import gpu_step
    from tests.support.stand_in import stand_in

    shape = {**gpu_step.SMALL.model, "max_position_embeddings": 4096}
    monkeypatch.setattr(gpu_step, "LARGE", replace(gpu_step.LARGE, model=shape, r=4))
    check = script.Check("cuda:0", False, tmp_path)
    with stand_in():
        script.CHECKS[name][0](check)
    assert not check.off and check.words
