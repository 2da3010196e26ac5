"""`soul distill` before anything is played: plans, costs, stages that come too early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli.app import main
from tests.support.distilling import small_base
from tests.support.servers.openai_server import ScriptedServer

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory.mktemp("base") / "model")


def soul(base: Path, *words: object, where: str = "http://127.0.0.1:9/v1") -> int:
    """`soul distill` with two served experts; nobody answers there unless said otherwise."""
    experts = [f"--experts={task}=endpoint:expert@{where}" for task in ("hitom", "tomi")]
    rows = ("--data", "synth:6", "--held-out", "synth:6", "--held-out-limit", 4)
    options = ("--model", base, *experts, *rows, "--samples", 3, "--batch", 4, "--epochs", 6)
    return main([str(word) for word in (*words, *options)])


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_a_plan_names_every_stage_and_sums_up(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert soul(base, "plan", "distill", "--out", out, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    stages: dict[str, Any] = {one["stage"]: one for one in plan["stages"]}
    assert list(stages) == ["sample", "train", "report"] and not out.exists()
    assert stages["sample"]["episodes"] == 2 * 6 * 3
    assert stages["train"]["remarks"] == [
        "18 steps over 12 selected samples, if every prompt gives all it may"
    ]
    # Base, expert and generalist, four rows of two tasks each.
    assert stages["report"]["episodes"] == 3 * 2 * 4
    assert plan["whole"]["episodes"] == 36 + 24
    assert plan["whole"]["machine"]["memory"] == max(
        one["machine"]["memory"] for one in plan["stages"] if one["machine"]
    )
    assert soul(base, "plan", "distill", "--out", out) == 0
    assert "stage train" in capsys.readouterr().out


def test_nothing_is_written_before_the_cost_is_agreed_to(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    out = tmp_path / "out"
    paid = "https://experts.example/v1"
    assert soul(base, "distill", "--out", out, where=paid) == 2
    words = printed(capsys)
    assert words.count("cost of this run") == 1 and "--yes" in words
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["select"], "sample"),
        (["train"], "select"),
        (["report"], "There is no generalist"),
        (["sample", "--by", "opd"], "There is no stage 'sample' with --by opd"),
        (["--gate", "fantom/retention>=0.6"], "which is not measured here"),
    ],
)
def test_stages_that_come_too_early_and_gates_on_nothing(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    assert soul(base, "distill", *words, "--out", tmp_path / "out") == 2
    lines = [line for line in printed(capsys).splitlines() if line.startswith(("error:", "why:"))]
    assert len(lines) == 2 and what in " ".join(lines)


def test_a_changed_setting_is_refused_by_name(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with ScriptedServer(answer="<answer>A</answer>") as server:
        assert soul(base, "distill", "select", "--out", out, where=server.base_url) == 2
        printed(capsys)
        (out / "selection.json").write_text("{}")
        assert soul(base, "distill", "--out", out, "--near", 0.5, where=server.base_url) == 2
        assert not server.requests
    words = printed(capsys)
    assert "near: 0.8 -> 0.5" in words and "select, train, report" in words
