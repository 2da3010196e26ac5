"""What stands around the code: the workflow, the hooks, the templates, how to cite."""

from __future__ import annotations

import re
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
    """The commands of a make target, without their `@` and with what its variables stand for."""
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
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    made = re.findall(r"^ *(?:timeout \d+ )?make .*?([a-z-]+)(?: \|\| \{)?$", script, re.M)
    assert made == ["lint", "test", "test-slow", "test-vllm"]
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


# --- words to others ------------------------------------------------------------------------------


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
