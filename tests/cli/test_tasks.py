"""`soul tasks`: what is listed is what tasks.yaml declares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soulkit.cli import app as cli
from soulkit.tasks.registry import load_registry

OWN = """\
suites: {mine: [lights, tomi]}
tasks:
  lights:
    title: Lights
    summary: Is it [red] or green?
    module: lights:Lights
    seats: {driver: actor}
    columns: {scene: {audience: [driver]}}
"""


@pytest.fixture
def soul(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["tasks", *arguments])
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


def test_list_names_every_task_and_suite(soul):
    registry = load_registry()
    code, out, _ = soul("list")
    assert code == 0 and all(name in out for name in (*registry.specs, *registry.suites))
    listed = json.loads(soul("list", "--json")[1])
    assert [task["name"] for task in listed["tasks"]] == list(registry.specs)
    assert set(listed["suites"]) == set(registry.suites)


def test_a_suite_narrows_the_list(soul):
    listed = json.loads(soul("list", "--suite", "small", "--json")[1])
    assert [task["name"] for task in listed["tasks"]] == list(load_registry().suite("small"))
    assert set(listed["suites"]) == {"small"}
    code, _, err = soul("list", "--suite", "smal")
    assert code == 2 and "'small'" in err


def test_show_prints_columns_audiences_and_licence(soul):
    spec = load_registry().spec("hitom")
    code, out, _ = soul("show", "hitom")
    assert code == 0 and all(name in out for name in spec.columns)
    assert spec.licence in out and "gold, coach" in out and "reader (actor)" in out
    shown = json.loads(soul("show", "hitom", "--json")[1])
    assert shown["columns"]["story"]["max_words"] == spec.columns["story"].max_words
    code, _, err = soul("show", "hitum")
    assert code == 2 and "'hitom'" in err


def test_own_tasks_are_listed_beside_the_built_in_ones(soul, tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(OWN)
    code, out, _ = soul("list", "--tasks", str(path), "--suite", "mine")
    assert code == 0 and "Is it [red] or green?" in out and "tomi" in out
    assert soul("show", "lights", "--tasks", str(path))[0] == 0
    assert soul("list", "--tasks", str(tmp_path / "no.yaml"))[0] == 2
