"""The benchmark of engines runs at a small size, and its engines agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = "--many 8 --new 3 --alone 2 --rounds 1 --long 64 --hidden 64 --layers 2 --threads 1"


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "sampling.py"), *options],
        env={**os.environ, **here}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.torch
def test_three_engines_write_the_same_through_an_adapter(tmp_path: Path) -> None:
    out = tmp_path / "sampling.json"
    done = benchmark(*SMALL.split(), "--adapter", "lora", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "vLLM: not run (name its Python with --vllm-python)" in done.stdout
    report = json.loads(out.read_text())
    (weights,) = report["weights"]
    assert weights["lora"] and report["model"]["adapter"] > 0
    cases = [table["case"] for table in weights["tables"]]
    assert [(c["length"], c["replies"], c["at_once"], c["shared"]) for c in cases] == [
        (32, 2, 1, False), (32, 8, 8, False), (32, 8, 8, True),
        (64, 2, 1, False), (64, 8, 8, False), (64, 8, 8, True),
    ]  # fmt: skip
    for table in weights["tables"]:
        engines = {line["engine"]: line for line in table["lines"]}
        assert list(engines) == ["soulkit", "generate", "continuous"]
        assert {line["same"] for line in engines.values()} == {1.0}
        assert all(1e8 < line["peak_bytes"] < 4e9 for line in engines.values())
        for line in engines.values():
            tokens = table["case"]["replies"] * 3
            assert line["tokens_per_s"] == pytest.approx(tokens / line["runs"][0]["wall"])


def test_an_engine_nobody_has_is_refused_before_anything_starts() -> None:
    done = benchmark("--engines", "soulkit,sglang")
    assert done.returncode == 2 and "engines are of soulkit" in done.stderr
