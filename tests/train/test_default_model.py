"""Training without --model: the Soul tasks have a default, data of your own has none, and a line
says what is downloaded before anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from soulkit.train.config import DEFAULT_MODEL, TrainConfig
from soulkit.train.material.assemble import download_remark
from soulkit.train.run import prepare_training
from tests.support.training import soul

DITTO = ("ditto", "--coach", "symbolic")
COMMANDS = {
    "conversations": ("sft", "--data", "chats.jsonl", "--side", "human"),
    "rows of a file": (*DITTO, "--task", "tomi", "--data", "own.jsonl"),
    "rows of a file, imitated": ("sft", "--task", "tomi", "--data", "tomi=own.jsonl"),
    "a task": ("grpo", "--tasks", "mine/tasks.yaml", "--task", "mine", "--data", "synth:4"),
    "a comparison": ("ablate", "--methods", "grpo", "--task", "tomi", "--data", "own.jsonl"),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations, rows and a task of its own."""
    folder = tmp_path_factory.mktemp("own")
    talk = [{"role": "user", "content": "Soup?"}, {"role": "assistant", "content": "Soup."},
            {"role": "user", "content": "Not again."}]  # fmt: skip
    (folder / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    for task, name in (("tomi", "own.jsonl"), ("hitom", "hitom_rl_train.parquet")):
        assert soul("data", "synth", task, "-n", 6, "-o", folder / name) == 0
    assert soul("tasks", "new", "mine", "--out", folder / "mine") == 0
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, without a cache of the hub."""
    monkeypatch.chdir(made)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(made / "hub"))
    return made


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_data_of_your_own_has_no_default_model(
    folder: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    for more in ((), ("--dry-run",)):
        capfd.readouterr()
        assert soul("train", *words, *more, "--steps", 1, "--out", "none") == 2
        lines = capfd.readouterr().err.strip().splitlines()
        assert [line.partition(":")[0] for line in lines[-3:]] == ["error", "why", "fix"]
        assert "No model is named" in lines[-3]
        assert DEFAULT_MODEL in lines[-2] and "17.5 GB" in lines[-2]
        assert "--model FOLDER" in lines[-1]
        assert not Path("none").exists()


SAID = (
    f"the model {DEFAULT_MODEL} (the default, about 17.5 GB) is not on this machine and is "
    "downloaded first; to train another: --model FOLDER or --model OWNER/NAME"
)


@pytest.mark.parametrize("data", ["synth:4", "hitom_rl_train.parquet", "."])
def test_a_soul_task_says_what_it_downloads(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], data: str
) -> None:
    flags = {"method": "ditto", "tasks": {"hitom": 1.0}, "data": {"hitom": data}}
    said: list[str] = []
    config = TrainConfig.load(env={}, flags={**flags, "coach": "symbolic"})
    prepare_training(config, tmp_path / "run", said.append)
    assert said[0] == SAID
    capfd.readouterr()
    words = (*DITTO, "--task", "hitom", "--data", data, "--steps", 1)
    assert soul("train", *words, "--dry-run") == 0
    assert SAID in capfd.readouterr().err.splitlines()


def test_its_size_is_said_when_a_key_is_missing_too(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    words = ("ditto", "--task", "hitom", "--data", "synth:4", "--judge", "endpoint:gpt-5-nano")
    capfd.readouterr()
    assert soul("train", *words, "--steps", 1, "--out", "none") == 2
    error = capfd.readouterr().err.splitlines()[-3]
    assert "no key in OPENAI_API_KEY" in error
    assert f"{DEFAULT_MODEL} on this machine (the default, about 17.5 GB)" in error


@pytest.mark.slow
def test_it_is_said_before_the_download(folder: Path, tmp_path: Path) -> None:
    """A process that may not ask the hub fails at the download, after that line."""
    soul_command = (sys.executable, "-m", "soulkit.cli.app", "train", *DITTO, "--task", "hitom")
    words = (*soul_command, "--data", "synth:4", "--steps", "1", "--out", tmp_path / "run")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    lines = ended.stderr.strip().splitlines()
    assert SAID in lines[:-3]
    assert "is not on this machine, and the hub cannot be reached" in lines[-3]
    assert "HF_HUB_OFFLINE" in lines[-1]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (DEFAULT_MODEL, f"the model {DEFAULT_MODEL} (about 17.5 GB) is not"),
        ("owner/other", "the model owner/other is not on this machine"),
        ("tiny", ""),
        (".", ""),
    ],
)
def test_the_line_says_what_is_known_of_a_model_that_is_named(
    folder: Path, model: str, words: str
) -> None:
    Path("hub/hub/models--owner--here").mkdir(parents=True, exist_ok=True)
    settings = TrainConfig(method="grpo", model=model, tasks={"tomi": 1.0})
    remark = download_remark(settings)
    assert remark.startswith(words) and bool(remark) == bool(words)
    here = settings.model_copy(update={"model": "owner/here"})
    assert download_remark(here) == ""


def test_a_model_from_the_environment_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOULKIT_MODEL", "owner/other")
    capfd.readouterr()
    assert soul("train", *COMMANDS["conversations"], "--steps", 1, "--dry-run") == 0
    assert "the model owner/other is not on this machine" in capfd.readouterr().err
