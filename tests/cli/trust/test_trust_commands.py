"""A stranger's run folder asks nobody, tells no key and runs no code in any command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.evaluation import ROOT, oracle, soul, start
from tests.support.servers.openai_server import ScriptedServer
from tests.support.trust import KEY_NAME, SECRET, Received, check, refused, run_of


def test_rescoring_runs_no_strange_code_and_makes_nothing_ones_own(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    refused(foreign, capfd, "rescore", foreign.run, "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert soul("rescore", foreign.run, "--out", tmp_path / "new", "--trust") == 0
    assert foreign.marker.exists() and not foreign.server.requests
    foreign.marker.unlink()
    washed = Received(tmp_path / "new", foreign.home, foreign.server, foreign.marker)
    refused(foreign, capfd, *check(washed, tmp_path / "check"))
    refused(foreign, capfd, "rescore", washed.run, "--out", tmp_path / "newer")


def test_ones_own_run_is_rescored_and_checked_again(native: Received, tmp_path: Path) -> None:
    assert soul("rescore", native.run, "--out", tmp_path / "new") == 0
    assert soul("rescore", tmp_path / "new", "--out", tmp_path / "newer") == 0
    assert soul("judge", "check", tmp_path / "newer", "--out", tmp_path / "c", "--no-pairs") == 0


def by_name(received: Received, tmp_path: Path) -> Path:
    return received.config


def by_link(received: Received, tmp_path: Path) -> Path:
    (tmp_path / "settings.yaml").symlink_to(received.config)
    return tmp_path / "settings.yaml"


def by_copy(received: Received, tmp_path: Path) -> Path:
    return Path(shutil.copy(received.config, tmp_path / "settings.yaml"))


def by_another_name(received: Received, tmp_path: Path) -> Path:
    settings = yaml.safe_load(received.config.read_text())
    short = {name: settings[name] for name in ("base_url", "api_key_env", "tasks_file")}
    (received.run / "extra").mkdir()
    (received.run / "extra" / "short.yaml").write_text(yaml.safe_dump(short))
    return received.run / "extra" / "short.yaml"


def without_environment(received: Received, tmp_path: Path) -> Path:
    (received.run / "environment.json").unlink()
    settings = yaml.safe_load(received.config.read_text())
    short = {name: settings[name] for name in ("base_url", "api_key_env", "tasks_file")}
    received.config.write_text(yaml.safe_dump(short))
    return received.config


@pytest.mark.parametrize("file", [by_name, by_link, by_copy, by_another_name, without_environment])
def test_a_config_out_of_a_run_is_a_strangers(
    foreign: Received, tmp_path: Path, capfd: Any, file: Callable[[Received, Path], Path]
) -> None:
    config = file(foreign, tmp_path)
    one = ("eval", "api", "--config", config, "--model", "m", "--task", "essay")
    out = ("--out", tmp_path / "out")
    for command in ((*one, *out), (*one, "--dry-run"), ("plan", *one)):
        _, why, _ = refused(foreign, capfd, *command)
        assert foreign.url in why and KEY_NAME in why and "essay:Essay" in why
    assert not (tmp_path / "out").exists()


def test_a_config_that_is_trusted_makes_a_run_that_is_not(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    command = ("eval", "api", "--config", foreign.config, "--backoff", 0)
    assert soul(*command, "--out", tmp_path / "out", "--trust") == 0
    assert foreign.marker.exists() and foreign.server.requests
    foreign.marker.unlink()
    foreign.server.requests.clear()
    made = Received(tmp_path / "out", foreign.home, foreign.server, foreign.marker)
    refused(foreign, capfd, *check(made, tmp_path / "check"))


def test_ones_own_config_is_given_back(native: Received, tmp_path: Path) -> None:
    command = ("eval", "api", "--config", native.config, "--backoff", 0)
    assert soul(*command, "--out", tmp_path / "out") == 0
    assert soul("judge", "check", tmp_path / "out", "--out", tmp_path / "c", "--no-pairs") == 0


def test_options_take_the_place_of_settings(foreign: Received, tmp_path: Path, capfd: Any) -> None:
    """Only what is still taken from the file is shown."""
    with ScriptedServer(answer=oracle("tomi", 4)) as helper:

        def change(settings: dict[str, Any]) -> None:
            settings |= {"judge": [], "tasks_file": None, "tasks": ["tomi"], "data": {}}

        foreign.edit(change)
        command = (
            "eval", "api", "--config", foreign.config, "--data", "tomi=synth:4",
            "--base-url", helper.base_url, "--out", tmp_path / "out", "--backoff", 0,
        )  # fmt: skip
        _, why, _ = refused(foreign, capfd, *command)
        assert KEY_NAME in why and foreign.url not in why and not helper.requests
        assert soul(*command, "--api-key-env", "OPENAI_API_KEY") == 0
        assert len(helper.requests) == 4 and foreign.untouched()
        address = ("--config", foreign.config, "--api-key-env", KEY_NAME)
        _, why, _ = refused(foreign, capfd, "eval", "api", *address)
        assert KEY_NAME in why and foreign.url in why


@pytest.mark.parametrize("what", ["endpoints", "tasks"])
def test_files_in_a_run_folder_are_no_word_of_the_users(
    foreign: Received, tmp_path: Path, capfd: Any, what: str
) -> None:
    player = {"model": "j", "base_url": foreign.url, "api_key_env": KEY_NAME}
    file = foreign.run / "book.yaml"
    file.write_text(yaml.safe_dump({"endpoints": {"n": player}, "roles": {"judge": "n"}}))
    if what == "tasks":
        shutil.copytree(foreign.home / "task", foreign.run / "task")
        file = foreign.run / "task" / "tasks.yaml"
    with ScriptedServer(answer="B") as helper:
        command = (
            "eval", "api", "--model", "m", "--base-url", helper.base_url, "--task", "tomi",
            "--data", "synth:2", f"--{what}", file, "--out", tmp_path / "out", "--backoff", 0,
        )  # fmt: skip
        refused(foreign, capfd, *command)
        assert not helper.requests
        assert soul(*command, "--trust") == 0


def test_a_hand_written_file_names_no_code_of_a_run_either(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    shutil.copytree(foreign.home / "task", foreign.run / "task")
    settings = {"tasks_file": str(foreign.run / "task" / "tasks.yaml"), "model": "m"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    refused(foreign, capfd, "eval", "api", "--config", tmp_path / "mine.yaml", "--task", "essay")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    "command", [("train", "grpo"), ("plan", "train", "grpo"), ("train", "ablate")]
)
def test_training_asks_before_it_reads_a_strangers_settings(
    foreign: Received, tmp_path: Path, capfd: Any, command: tuple[str, ...]
) -> None:
    judge = [{"model": "j", "base_url": foreign.url, "api_key_env": KEY_NAME}]
    tasks = str(foreign.home / "task" / "tasks.yaml")
    foreign.config.write_text(yaml.safe_dump({"judge": judge, "tasks_file": tasks}))
    more = ("--model", tmp_path, "--task", "essay", "--config", foreign.config)
    _, why, _ = refused(foreign, capfd, *command, *more)
    assert foreign.url in why and KEY_NAME in why and "essay:Essay" in why


def test_looking_needs_no_trust_and_runs_nothing(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    shutil.copytree(foreign.run, tmp_path / "b")
    for command in (
        ("report", foreign.run), ("report", foreign.run, "--json"),
        ("report", foreign.run, "--format", "html", "--out", tmp_path / "page.html"),
        ("compare", foreign.run, tmp_path / "b"), ("ledger", "stats", foreign.run),
        ("ledger", "show", foreign.run), ("ledger", "verify", foreign.run),
        ("ledger", "export", foreign.run),
    ):  # fmt: skip
        assert soul(*command) == 0, command
    assert foreign.untouched() and SECRET not in capfd.readouterr().out


def test_a_hand_written_file_is_the_users_own_word(native: Received, tmp_path: Path) -> None:
    settings = yaml.safe_load(native.config.read_text())
    names = ("model", "base_url", "api_key_env", "judge", "tasks", "tasks_file", "data")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({name: settings[name] for name in names}))
    for name in ("metrics.jsonl", "summary.json"):  # of another program, in the same folder
        (tmp_path / name).write_text("")
    command = ("eval", "api", "--config", tmp_path / "mine.yaml", "--backoff", 0)
    assert soul(*command, "--out", tmp_path / "out") == 0


def test_without_a_state_folder_runs_go_on_and_say_so_once(
    tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    (tmp_path / "file").write_text("")
    for number, state in enumerate((str(tmp_path / "file" / "state"), "relative")):
        monkeypatch.setenv("SOULKIT_STATE", state)
        home = tmp_path / f"home{number}"
        received = run_of(home, server)
        assert capfd.readouterr().err.count("no seal can be made") == 1
        refused(received, capfd, *check(received, tmp_path / "check"))
    assert not (ROOT / "relative").exists()


@pytest.mark.slow
def test_processes_at_once_share_one_key(tmp_path: Path) -> None:
    state = tmp_path / "new-state"
    with ScriptedServer(answer="B") as tomi:
        begun = [
            start(
                "eval", "api", "--model", "m", "--base-url", tomi.base_url, "--task", "tomi",
                "--data", "synth:1", "--out", tmp_path / f"run{i}", "--backoff", 0,
                env={"SOULKIT_STATE": str(state)},
            )
            for i in range(3)
        ]  # fmt: skip
        for process in begun:
            _, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
    assert [path.name for path in state.iterdir()] == ["key"]
    assert (state / "key").stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o777 == 0o700
    seals = {
        json.loads((tmp_path / f"run{i}" / "environment.json").read_text())["seal"]
        for i in range(3)
    }
    assert len(seals) == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", [("tasks", "check"), ("data", "check"), ("data", "show"),
                                     ("data", "audit"), ("data", "contamination")])  # fmt: skip
def test_checks_import_no_code_of_a_run_either(
    native: Received, tmp_path: Path, capfd: Any, command: tuple[str, str]
) -> None:
    shutil.copytree(native.home / "task", native.run / "task")
    rows = native.home / "rows.jsonl"
    files = {"check": (rows,), "show": (rows,), "audit": ("essay", rows)}.get(
        command[1], (rows, rows)
    )
    arguments = ("essay", "--data", f"essay={rows}") if command[0] == "tasks" else files
    named = () if command in (("tasks", "check"), ("data", "audit")) else ("--task", "essay")
    line = (*command, *arguments, *named, "--tasks", native.run / "task" / "tasks.yaml")
    refused(native, capfd, *line)
    assert soul(*line, "--trust") in (0, 1)
    assert native.marker.exists()
