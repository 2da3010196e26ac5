"""Runs written before metrics had slash names are reported, compared, resumed and rescored.

`tests/recorded` holds such runs: a warm-up, Ditto steps with a checkpoint in their middle, GRPO
with canaries, evaluations before and after, a judged one with its ledger, a small comparison of
methods, and what the code of that time reported of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.report import ablation
from soulkit.report.load import load_runs
from soulkit.report.tables import markdown
from soulkit.runs.jsonl import read_jsonl
from soulkit.train.state.fingerprint import machine_print
from soulkit.train.state.metrics import OLD_GROUPS, OLD_NAMES, read_line, read_step_lines, renamed
from soulkit.train.state.summary import TrainSummary
from tests.support.training import soul

TESTS = Path(__file__).parents[1]
RECORDED = TESTS / "recorded"
RUNS = ("sft", "ditto", "canaries", "before", "after", "judged")
TRAINED = ("sft", "ditto", "canaries", "ablate/ditto/seed_0", "ablate/grpo/seed_1")
DITTO = (
    "train", "ditto", "--model", "model", "--tasks", "shade_task/tasks.yaml", "--task", "kind",
    "--data", "kind=rows/shade.jsonl", "--prompts", 2, "--group-size", 2, "--max-tokens", 8,
    "--lora-r", 1, "--lr", "1e-2", "--steps", 4, "--set", "checkpoint_every=2",
    "--set", "keep_last=2", "--eval-every", 2, "--deterministic", "--set", "dev_share=0.3",
    "--out", "ditto",
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recorded runs, as they stood where they were made."""
    shutil.copytree(RECORDED, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_reported_as_it_was(name: str) -> None:
    report = (RECORDED / "reports" / f"{name}.md").read_text(encoding="utf-8")
    assert markdown(load_runs([RECORDED / name]), details=True) == report


@pytest.mark.parametrize("name", TRAINED)
def test_every_number_of_an_old_line_has_a_name_now(name: str) -> None:
    for line in read_jsonl(RECORDED / name / "metrics.jsonl"):
        values = {name: value for name, value in renamed(line).items() if value is not None}
        assert not (OLD_NAMES.keys() | OLD_GROUPS.keys()) & values.keys()
        again = read_line(line).to_json()
        for alarm in again.get("canaries/alarms", ()):
            assert alarm.pop("step") == line["step"]
        assert json.loads(json.dumps(again)) == values
        assert read_line(again | {"canaries/alarms": []}).step == line["step"]


def test_the_lines_of_today_keep_their_names() -> None:
    for line in read_step_lines(RECORDED / "ditto" / "metrics.jsonl"):
        assert renamed(line.to_json()) == line.to_json() and read_line(line.to_json()) == line


def test_an_old_summary_is_written_again_under_the_names_of_today() -> None:
    line = json.loads((RECORDED / "ditto" / "summary.json").read_text())
    summary = TrainSummary.from_json(line)
    assert summary.rewards.draft == line["rewards"]["draft_reward"]
    again = summary.to_json()
    assert again["rewards"]["gap/loo_low"] == line["rewards"]["loo_gap_low"]
    assert {**again, "rewards": 0} == {**line, "rewards": 0}


def test_two_old_evaluations_are_compared(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert soul("compare", "before", "after", "--json") == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    means = [TrainSummary.from_json(json.loads((home / name / "summary.json").read_text()))
             for name in ("before", "after")]  # fmt: skip
    assert [task["mean_a"], task["mean_b"]] == [s.tasks["kind"]["value"].mean for s in means]


def test_an_old_comparison_of_methods_is_read_again() -> None:
    old = json.loads((RECORDED / "ablate" / "report" / "comparison.json").read_text())
    new = json.loads(json.dumps(ablation.as_json(ablation.load_ablation(RECORDED / "ablate"))))
    for before, after in zip(old["rows"], new["rows"], strict=True):
        curves, named = before.pop("curves"), after.pop("curves")
        # Ends that a judge of their own scores are measured since.
        assert not after.pop("judged")["seeds"]
        assert not (after.pop("judged_difference") or {}).get("seeds")
        assert rounded(with_widths(before)) == rounded(after)
        for old_name, new_name in (
            ("draft_reward", "reward/draft"), ("dev", "eval/dev"),
            ("trained_tokens", "tokens/trained"),
        ):  # fmt: skip
            assert rounded(curves[old_name]["mean"]) == rounded(named[new_name]["mean"])


def with_widths(row: dict[str, Any]) -> dict[str, Any]:
    """Intervals of zero width, which earlier versions gave equal seeds, are none today."""
    flat = {"low": None, "high": None}
    return {
        name: {**one, **flat}
        if isinstance(one, dict) and one.get("low", 0) == one.get("high")
        else one
        for name, one in row.items()
    }


def rounded(value: Any) -> Any:
    """Numbers to nine digits: sums may be taken in another order."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 9) if isinstance(value, float) else value


def seconds_apart(line: dict[str, Any]) -> dict[str, Any]:
    """A line without what no two runs have in common, and without what earlier versions made in
    another way or did not have: the ends of the gap's interval, the schema, numbers over tokens
    (those of all drafts today, of drafts that moved the weights then)."""
    apart = (
        "time/",
        "gap/loo_",
        "schema",
        "update/",
        "policy/version",
        "part/",
        "logprob/",
        "policy/entropy",
        "ratio/",
        "clip/",
        "feedback/distinct",
        "feedback/dropped",
    )
    return {k: v for k, v in renamed(line).items() if not k.startswith(apart) and v is not None}


def test_an_old_run_goes_on_where_it_stood(home: Path) -> None:
    """A copy that was killed behind its checkpoint after two steps ends as the whole run did: the
    lines of the first two stay under their old names, the next ones have those of today."""
    whole = read_jsonl(home / "ditto" / "metrics.jsonl")
    (home / "ditto" / "summary.json").unlink()
    environment = json.loads((home / "ditto" / "environment.json").read_text())
    material = json.loads((home / "ditto" / "material.json").read_text())
    machine = machine_print(torch.device("cpu"))
    (home / "ditto" / "material.json").write_text(json.dumps({**material, "machine": machine}))
    assert soul(*DITTO) == 0
    lines = read_jsonl(home / "ditto" / "metrics.jsonl")
    assert ["draft_reward" in line for line in lines] == [True, True, False, False, False, False]
    assert [line["step"] for line in lines] == [line["step"] for line in whole]
    equal = len(lines) if material["machine"] == machine else 3
    for line, before in zip(lines[:equal], whole[:equal], strict=True):
        # Sequences may be packed in another way since: their sums differ in the last digits.
        now, then = seconds_apart(line), seconds_apart(before)
        exact = {key for key, value in then.items() if not isinstance(value, float)}
        assert {k: v for k, v in now.items() if k in exact} == {k: then[k] for k in exact}
        floats = {key: value for key, value in then.items() if key not in exact}
        assert {k: v for k, v in now.items() if k not in exact} == pytest.approx(floats, rel=1e-4)
    noted = json.loads((home / "ditto" / "environment.json").read_text())
    assert noted["seal"] == environment["seal"] and len(noted["resumed"]) == 1
    assert load_runs([home / "ditto"])[0].steps[-1].step == 3


def test_other_settings_are_refused_by_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert soul(*DITTO, "--temperature", 0.5) == 2
    assert "temperature" in capsys.readouterr().err


def test_an_old_ledger_answers_for_its_judges(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soul("rescore", "judged", "--out", "again", "--trust") == 0
    capsys.readouterr()
    assert soul("report", "judged", "again", "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    means = [
        {name: (cell["mean"], cell["n_scored"], cell["n"]) for name, cell in task.items()}
        for task in (runs["judged"]["tasks"]["essay"], runs["again"]["tasks"]["essay"])
    ]
    assert means[0] == means[1]
