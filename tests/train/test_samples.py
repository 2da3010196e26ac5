"""What can be read after supervised training: held-out conversations, continued on the way."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from soulkit.runs.records import load_records
from soulkit.train.config import TrainConfig
from soulkit.train.state.metrics import read_step_lines
from tests.support.people import chats_file, person_chat
from tests.support.training import soul

CHATS = ("train", "sft", "--model", "tiny", "--full", "--side", "human", "--batch", 4,
         "--deterministic")  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    chats_file(folder / "chats.jsonl", 40)
    chats_file(folder / "valid.jsonl", 12, seed=2)
    return folder


def trained(files: Path, out: Path, *more: object, steps: int = 4) -> int:
    return soul(
        *CHATS, "--data", files / "chats.jsonl", "--validation", files / "valid.jsonl",
        "--steps", steps, "--eval-every", 2, "--out", out, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "sft"
    assert trained(files, out) == 0
    return out


@pytest.mark.slow
def test_some_are_kept_beside_what_the_person_wrote(run: Path) -> None:
    records = load_records(run / "samples.jsonl")
    assert sorted({r.step for r in records}) == [1, 3] and len(records) == 8
    for record in records:
        row = int(record.example_id.rpartition(":")[2]) - 1
        remarks = person_chat(row, seed=2)["messages"]
        assert record.gold == [m["content"] for m in remarks if m["role"] == "user"][-1].strip()
        for message, who in zip(remarks[1:3], ("person", "assistant"), strict=True):
            assert f"{who}: {message['content']}" in record.prompt, "not by the learned role"
        assert remarks[2]["content"] in record.prompt and record.gold not in record.prompt
        assert record.score.value is None and record.episode.transcript[0].seat == "model"


@pytest.mark.slow
def test_show_and_the_page_show_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = load_records(run / "samples.jsonl")[0]
    assert soul("show", run) == 0
    err = capsys.readouterr().err
    assert "8 episodes" in err
    for command in err.partition("next: ")[2].strip().split("; "):  # nothing of it has a score
        assert soul(*shlex.split(command)[1:]) == 0, command
    capsys.readouterr()
    assert soul("show", run, "--example", first.example_id, "--step", 1) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "person wrote" in shown and first.gold.split()[0] in shown
    assert soul("report", run, "--format", "html") == 0
    page = (run / "report" / "index.html").read_text("utf-8")
    assert "The person wrote" in page and first.gold in page


@pytest.mark.slow
def test_they_change_no_weight_and_are_printed_when_asked_for(
    files: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(files, tmp_path / "none", "--show-samples", 0) == 0
    assert not (tmp_path / "none" / "samples.jsonl").exists()
    losses = [
        [line.learned.loss for line in read_step_lines(out / "metrics.jsonl")]
        for out in (run, tmp_path / "none")
    ]
    assert losses[0] == losses[1]
    assert "sample after step" not in capsys.readouterr().err
    assert trained(files, tmp_path / "two", "--show-samples", 2, steps=2) == 0
    printed = capsys.readouterr().err
    assert printed.count("sample after step 2, valid.jsonl:") == 2 and "; person “" in printed
    assert "soul show" in printed  # the next command


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "ditto"])
def test_reinforcement_prints_the_same_lines(
    method: str, tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft = ("train", "sft", "--model", "tiny", "--full", "--task", "tomi", "--data", "synth:24")
    assert soul(*sft, "--steps", 1, "--eval-every", 1, "--out", tmp_path / "warm") == 0
    capsys.readouterr()
    out = tmp_path / "run"
    assert soul(
        "train", method, "--model", tmp_path / "warm" / "model", "--task", "tomi", "--data",
        "synth:24", "--steps", 2, "--prompts", 2, "--group-size", 2, "--max-tokens", 6,
        "--eval-every", 1, "--show-samples", 2, "--out", out,
    ) == 0  # fmt: skip
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("sample after step")]
    assert len(lines) == 4 and all("model “" in x and "; gold “" in x for x in lines)
    assert lines[0].startswith("sample after step 1, ")


def test_they_need_turns_to_be_taken(tmp_path: Path) -> None:
    plain = {"method": "grpo", "model": "m", "tasks": {"tomi": 1.0}, "show_samples": 2}
    with pytest.raises(Exception, match="--eval-every STEPS"):
        TrainConfig.load(env={}, flags=plain)
    assert (
        "show_samples" not in TrainConfig.load(env={}, flags={**plain, "eval_every": 1}).identity()
    )


def test_lines_need_something_that_is_held_out(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ("--data", files / "chats.jsonl", "--steps", 2, "--eval-every", 1)
    assert soul(*CHATS, *alone, "--show-samples", 1, "--out", tmp_path / "run") == 2
    assert "held-out conversations: --validation FILE" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_played_nothing_is_not_offered_to_be_shown(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert soul(*CHATS, "--data", files / "chats.jsonl", "--steps", 1, "--out", out) == 0
    capsys.readouterr()
    assert soul("runs", tmp_path) == 0
    assert capsys.readouterr().err.strip().endswith(f"next: soul report {out}")
