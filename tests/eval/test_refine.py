"""`soul eval … --refine N`: rounds of feedback and refined replies, each with a score."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from soulkit.runs.records import load_records
from tests.support.servers.openai_server import Body, Fault, ScriptedServer
from tests.support.training import soul

pytestmark = pytest.mark.usefixtures("_key")
TASK = ("--task", "tombench", "--data", "synth:24")


@pytest.fixture
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")


def guess(body: Body) -> str:
    """One of the answers, drawn from the whole prompt: right or wrong, with feedback or without."""
    draw = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()[0]
    return f"<answer>{'ABCD'[draw % 4]}</answer>"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer=guess) as running:
        yield running


def refine(server: ScriptedServer, out: Path, *more: object) -> int:
    address = ("--model", "m", "--base-url", server.base_url)
    rounds = () if "--refine" in more else ("--refine", 3)
    return soul("eval", "api", *address, *TASK, *rounds, "--out", out, *more)


def test_each_round_is_the_newest_reply_to_every_row(
    server: ScriptedServer, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert refine(server, out, "--coach", "symbolic") == 0
    cells = json.loads((out / "summary.json").read_text())["tasks"]["tombench"]
    replies: dict[str, dict[int, float]] = defaultdict(dict)
    for record in load_records(out / "episodes.jsonl"):
        assert record.score.value is not None
        number = 0 if record.kind == "draft" else record.step + 1
        replies[record.example_id][number] = record.score.value
        assert (record.given is None) == (record.kind == "draft")
    first = [one[0] for one in replies.values()]
    assert cells["value"]["mean"] == pytest.approx(fmean(first))
    for number in (1, 2, 3):
        newest = [one[max(k for k in one if k <= number)] for one in replies.values()]
        cell, gain = cells[f"value/round={number}"], cells[f"gain/round={number}"]
        assert cell["mean"] == pytest.approx(fmean(newest)) and cell["n"] == len(first) >= 24
        assert gain["mean"] == pytest.approx(fmean(newest) - fmean(first))
    assert len({cells[f"value/round={n}"]["mean"] for n in (1, 2, 3)} | {fmean(first)}) > 1


def test_a_finished_run_asks_nothing_and_a_cut_one_pays_only_for_what_is_missing(
    server: ScriptedServer, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert refine(server, out, "--coach", "symbolic") == 0
    asked, whole = len(server.requests), (out / "summary.json").read_bytes()
    assert refine(server, out, "--coach", "symbolic") == 0 and len(server.requests) == asked
    tasks = json.loads(whole)["tasks"]
    episodes = out / "episodes.jsonl"
    lines = [json.dumps(json.loads(line)) for line in _lines(out)]
    for packed in out.glob("episodes.jsonl*"):
        packed.unlink()
    episodes.write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    (out / "summary.json").unlink()
    assert refine(server, out, "--coach", "symbolic") == 0
    assert len(server.requests) == asked  # the ledger has every reply
    assert json.loads((out / "summary.json").read_text())["tasks"] == tasks


def test_a_round_whose_coach_failed_has_no_score_and_is_played_by_the_next_command(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A silent coach is no reason to count the old reply again, nor to exit with 0."""
    out, down = tmp_path / "run", [Fault.status_error(400)]
    advice, failing = "Think again about who saw what.", lambda *_: down[0] if down else None
    with ScriptedServer(answer=lambda _: advice, script=failing) as coach:
        command = ("--coach", f"endpoint:coach@{coach.base_url}")
        assert refine(server, out, *command) == 1
        words = " ".join(capsys.readouterr().err.split())
        cells = json.loads((out / "summary.json").read_text())["tasks"]["tombench"]
        n = cells["value"]["n"]
        assert f"replies to feedback are unscored (tombench round=1: {n} of {n}" in words
        assert f"coach_error ({n}): " in words
        assert cells["value"]["n_scored"] == n
        assert cells["value/round=1"]["n_scored"] == 0 and cells["value/round=1"]["mean"] is None
        assert cells["value/round=1"]["unscored"] == {"coach_error": n}
        asked = len(server.requests)
        down.clear()
        assert refine(server, out, *command) == 0
    assert f"{n} of {n} episodes left to play" in " ".join(capsys.readouterr().err.split())
    cells = json.loads((out / "summary.json").read_text())["tasks"]["tombench"]
    assert cells["value/round=3"]["n_scored"] == n
    played = (one.kind == "refined" for one in load_records(out / "episodes.jsonl"))
    assert len(server.requests) == asked + sum(played)  # the ledger has the drafts


def _lines(out: Path) -> list[str]:
    from soulkit.runs.jsonl import lines_in

    return [line.decode() for line in lines_in(out / "episodes.jsonl")]


def test_show_draft_puts_the_reply_into_the_prompt(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refine(server, tmp_path / "run", "--coach", "symbolic", "--show-draft") == 0
    prompts = [json.dumps(body["messages"]) for body in server.requests]
    assert sum("<answer>" in prompt for prompt in prompts) > 0
    plain = len(server.requests)
    assert refine(server, tmp_path / "other", "--coach", "symbolic") == 0
    assert server.requests[plain:] != server.requests[:plain]
    # The report pairs both runs, with numbers over a batch that need the notes of episodes.
    assert soul("report", tmp_path / "run", tmp_path / "other") == 0
    shown = capsys.readouterr().out
    assert "round=3 (with feedback)" in " ".join(shown.split()) and "differences checked" in shown
    assert refine(server, tmp_path / "plain", "--refine", 0) == 0
    assert soul("compare", tmp_path / "plain", tmp_path / "run") == 0
    assert "rounds with feedback (--refine) 0 vs 3" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--coach", "none"), "--coach none gives none"),
        (("--refine", "0", "--coach", "symbolic"), "need --refine N"),
        (("--coach", "raw"), "tombench has no judge"),
        (("--coach", "judge"), "tombench has no judge"),
        (("--batch", "--coach", "symbolic"), "does not work with --batch"),
    ],
)
def test_settings_that_cannot_be_followed(
    server: ScriptedServer, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    options: tuple[str, ...], words: str,
) -> None:  # fmt: skip
    assert refine(server, tmp_path / "run", *options) == 2
    error = capfd.readouterr().err
    assert words in error and "fix: " in error and not server.requests
