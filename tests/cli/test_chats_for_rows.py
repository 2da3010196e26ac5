"""Chats that are given where rows are wanted, in every layout and to every kind of command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluation import soul, three_lines
from tests.support.judged import TASKS

SAID = [("user", "hi, my bike is stuck"), ("assistant", "Oil it."), ("user", "thanks!")]
MESSAGES = [{"role": role, "content": text} for role, text in SAID]
SHARED = [{"from": {"user": "human", "assistant": "gpt"}[r], "value": t} for r, t in SAID]
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"person": "p", "messages": MESSAGES}],
    "conversation": [{"conversation": MESSAGES}],
    "from and value": [{"id": "c", "conversations": SHARED}],
    "replies": [
        {"conversation_id": "c", "turn": n, "user_prompt": u, "model_response": "Oil it."}
        for n, u in enumerate(("hi, my bike is stuck", "thanks!"))
    ],
}  # fmt: skip


def chats(folder: Path, layout: str = "messages", name: str = "chats.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in LAYOUTS[layout]]
    (folder / name).write_text("".join(lines), encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("task", ["userllm", "mirrorbench", "twinvoice"])
def test_the_command_that_drafts_rows_is_named(
    task: str, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = chats(tmp_path, layout)
    assert soul("data", "check", file, "--task", task) == 2
    what, _, fix = three_lines(capsys.readouterr().err)
    assert f"soul data build {task} {file} --drafter " in fix
    if (task, layout) != ("userllm", "replies"):  # the layout of a release that its importer knows
        assert what == f"'{file}' holds chats, and '{task}' is played on rows."
        assert f"soul train sft --model MODEL --data {file} --side human" in fix


@pytest.mark.parametrize(
    "command",
    ["eval api --model m --base-url http://127.0.0.1:9/v1 --judge endpoint:j@http://127.0.0.1:9/v1",
     "train ditto --model m --judge endpoint:j@http://127.0.0.1:9/v1", "train grpo --model m "
     "--judge endpoint:j@http://127.0.0.1:9/v1", "train sft --model m",
     "plan eval api --model m --base-url http://127.0.0.1:9/v1", "data show FILE",
     "data check FILE"],
)  # fmt: skip
@pytest.mark.parametrize("folder", [False, True])
def test_every_command_that_reads_rows_recognises_chats(
    command: str, folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    place = chats(tmp_path / "mine")
    place = place.parent if folder else place
    words = command.replace("FILE", str(place)).split()
    data = () if "FILE" in command else ("--data", place)
    assert soul(*words, "--task", "userllm", *data) == 2
    what, _, fix = three_lines("\n".join(capsys.readouterr().err.splitlines()[-3:]))
    assert what == f"'{place}' holds chats, and 'userllm' is played on rows."
    assert ("soul data dedupe " in fix) == folder
    assert "soul data build userllm " in fix


@pytest.mark.parametrize("folder", [False, True])
def test_an_audit_recognises_chats(
    folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = chats(tmp_path / "mine").parent if folder else chats(tmp_path / "mine")
    for task in ("userllm", "tomi", "sotopia"):
        assert soul("data", "audit", task, place) == 2
        what, _, fix = three_lines(capsys.readouterr().err)
        assert what == f"'{place}' holds chats, and '{task}' is played on rows."
        assert f"--data {place} --side human" in fix


def test_a_folder_of_chats_is_looked_at_with_a_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = chats(tmp_path / "mine").parent
    for command, named in (("check", f"--data {place}"), ("show", f"soul data show {place}")):
        assert soul("data", command, place) == 2
        what, _, fix = three_lines(capsys.readouterr().err)
        assert f"'{place}' holds chats" in what and f"{named} --side human" in fix
    assert soul(*fix.partition("soul ")[2].split()) == 0


def test_a_folder_of_rows_that_hold_conversations_is_no_folder_of_chats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    assert soul("data", "synth", "mirrorbench", "-n", 3, "-o", tmp_path / "rows/r.jsonl") == 0
    capsys.readouterr()
    for command in (("check",), ("show",), ("check", "--task", "mirrorbench")):
        assert soul("data", command[0], tmp_path / "rows", *command[1:]) == 2
        assert "is a folder, not a file" in three_lines(capsys.readouterr().err)[0]


def test_a_task_that_nobody_drafts_rows_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = chats(tmp_path)
    for task, more in (("tomi", ()), ("essay", ("--tasks", TASKS))):
        assert soul("data", "check", file, "--task", task, *more) == 2
        what, _, fix = three_lines(capsys.readouterr().err)
        assert "holds chats" in what and "soul train sft --model MODEL --data" in fix
        assert f"soul data build {task}" not in fix
    assert soul("data", "check", file) == 2
    assert "holds chats" in three_lines(capsys.readouterr().err)[0]


def test_rows_that_lack_a_column_are_no_chats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"story": "s", "question": "q", "messages": MESSAGES}) + "\n")
    assert soul("data", "check", file, "--task", "tomi") == 2
    assert "answer" in three_lines(capsys.readouterr().err)[0]


def test_the_readme_prints_the_three_commands_in_their_order() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    part = text[text.index("on your own chats, in three commands") :].split("```")[1]
    lines = part.replace("\\\n", " ").strip().splitlines()
    assert [shlex.split(line)[1:3] for line in lines] == [
        ["train", "sft"], ["data", "build"], ["train", "ditto"],
    ]  # fmt: skip
    assert "rows.jsonl" in lines[1] and "--data rows.jsonl" in lines[2]
    assert "Four commands" not in text
