"""The built-in suites: what is in them, and that every file of SOUL is some task's."""

from __future__ import annotations

import json

import pytest

from soulkit.cli import app as cli
from soulkit.report.published import publications
from soulkit.tasks.registry import load_registry

ALIGNX = tuple(f"alignx_{part}" for part in ("demo", "pair", "ugc", "arbitrary", "history16"))


def test_soul_27_is_one_task_for_each_evaluation_file() -> None:
    registry = load_registry()
    names = registry.suite("soul-27")
    files = [file for name in names for file in registry.spec(name).files.eval]
    assert len(names) == len(set(names)) == len(files) == len(set(files)) == 27
    train = {file for name in names for file in registry.spec(name).files.train}
    assert len(train) == 23, "the five AlignX splits share one training file"


@pytest.mark.parametrize(("suite", "table"), [("soul-10", 0), ("soul-23", 1)])
def test_a_suite_has_the_rows_of_its_published_table(suite: str, table: int) -> None:
    rows = set(publications()[table].figures) - {"average"}
    if suite == "soul-23":
        assert "alignx" in rows
        rows = (rows - {"alignx"}) | set(ALIGNX)
    assert set(load_registry().suite(suite)) == rows


def test_soul_23_and_soul_27_have_the_same_members() -> None:
    registry = load_registry()
    assert set(registry.suite("soul-23")) == set(registry.suite("soul-27"))
    assert len(registry.suite("soul-23")) - len(ALIGNX) + 1 == 23


def test_evaluating_a_suite_names_every_member_that_cannot_be_played(
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry = load_registry()
    missing = [n for n in registry.suite("soul-27") if registry.spec(n).rows_only]
    if not missing:
        pytest.skip("every member can be played")
    run = ["eval", "api", "--suite", "soul-27", "--model", "m"]
    assert cli.main([*run, "--base-url", "http://127.0.0.1:9/v1"]) == 2
    error, _, fix = capsys.readouterr().err.splitlines()
    assert all(name in error for name in missing)
    assert "--playable" in fix


def test_the_suites_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tasks", "list", "--suite", "soul-10", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [t["name"] for t in listed["tasks"]] == list(load_registry().suite("soul-10"))
