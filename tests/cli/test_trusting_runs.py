"""A stranger's run folder asks nobody, tells no key and runs no code in any command.

Checking the judge of a stranger's run asks nobody and hides nothing, however it is written.

What makes the config of a run another one: whatever was changed is no longer one's own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.runs.folder import config_bytes, parsed_config
from soulkit.trust import is_own
from tests.support.evaluation import ROOT, oracle, soul, start, three_lines
from tests.support.judged import judge
from tests.support.servers.openai_server import ScriptedServer
from tests.support.trust import KEY_NAME, SECRET, Received, answer, check, fresh, refused, run_of


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(KEY_NAME, SECRET)
    monkeypatch.setenv("SOULKIT_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer=answer) as scripted:
        yield scripted


@pytest.fixture
def native(tmp_path: Path, server: ScriptedServer, capfd: Any) -> Received:
    received = run_of(tmp_path / "home", server)
    capfd.readouterr()
    return received


@pytest.fixture
def foreign(native: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Received:
    """The same, found by a user with another state folder."""
    monkeypatch.setenv("SOULKIT_STATE", str(tmp_path / "other-state"))
    return fresh(native, tmp_path / "received")


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
        assert capfd.readouterr().err.count("this run could not be sealed") == 1
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


def test_a_received_folder_is_shown_and_asks_nobody(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    for more in ((), ("--dry-run",), ("--dry-run", "--json"), ("--json",)):
        _, why, _ = refused(foreign, capfd, *check(foreign, tmp_path / "check", *more))
        assert foreign.url in why and KEY_NAME in why
        assert str(foreign.home / "task" / "tasks.yaml") in why and "essay:Essay" in why
        assert str(foreign.home / "rows.jsonl") in why
    assert not (tmp_path / "check").exists()


def test_trusted_for_one_command_and_not_longer(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    assert soul(*check(foreign, tmp_path / "check", "--trust")) == 0
    assert foreign.marker.exists() and len(foreign.server.requests) == 4
    assert set(foreign.server.authorizations) == {f"Bearer {SECRET}"}
    foreign.server.requests.clear()
    foreign.marker.unlink()
    refused(foreign, capfd, *check(foreign, tmp_path / "again"))


def test_the_users_own_run_needs_no_trust(native: Received, tmp_path: Path) -> None:
    assert soul(*check(native, tmp_path / "check")) == 0
    assert len(native.server.requests) == 4
    moved = native.run.rename(native.home / "renamed")
    assert soul("judge", "check", moved, "--out", tmp_path / "again", "--no-pairs") == 0


def test_a_check_by_a_judge_of_ones_own_names_only_what_is_taken(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    with ScriptedServer(answer=judge()) as helper:
        judged = check(foreign, tmp_path / "check", "--judge", f"endpoint:j@{helper.base_url}")
        _, why, _ = refused(foreign, capfd, *judged)
        assert "essay:Essay" in why and foreign.url not in why and KEY_NAME not in why
        assert soul(*judged, "--trust") == 0
        assert not foreign.server.requests and len(helper.requests) == 4


# -- other ways to write it ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "judged",
    [
        "judge: ['endpoint:j@{url}#{key}']",
        "judge: 'endpoint:j@{url}#{key}'",
        "judge: [{{model: j, base_url: '{url}', api_key_env: {key}}}]",
        "judge: [&a {{model: j, base_url: '{url}', api_key_env: {key}}}]\npartner: *a",
        "judge: [&a {{model: i, base_url: '{url}', api_key_env: {key}}}, {{<<: *a, model: j}}]",
        "endpoints: {file}",
    ],
)
def test_no_way_of_writing_hides_an_address_or_a_key(
    foreign: Received, tmp_path: Path, capfd: Any, judged: str
) -> None:
    book = tmp_path / "book.yaml"
    player = {"model": "j", "base_url": foreign.url, "api_key_env": KEY_NAME}
    book.write_text(yaml.safe_dump({"endpoints": {"n": player}, "roles": {"judge": "n"}}))
    foreign.edit(lambda settings: [settings.pop(name) for name in ("judge", "partner")] and None)
    line = judged.format(url=foreign.url, key=KEY_NAME, file=book)
    foreign.config.write_text(f"{foreign.config.read_text()}\n{line}\n")
    _, why, _ = refused(foreign, capfd, *check(foreign, tmp_path / "check"))
    assert foreign.url in why and KEY_NAME in why


def test_a_setting_that_stands_twice_hides_nothing(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    foreign.config.write_text(f"{foreign.config.read_text()}\njudge: []\n")
    assert soul(*check(foreign, tmp_path / "check")) == 2
    assert "'judge' appears twice" in capfd.readouterr().err and foreign.untouched()


@pytest.mark.parametrize(
    "text",
    ["!!python/object/apply:os.system ['touch {m}']", "a: &a [*a", "judge: !!binary aHR0cA==", ""],
)
def test_yaml_runs_nothing(foreign: Received, tmp_path: Path, text: str) -> None:
    foreign.config.write_text(text.format(m=foreign.marker))
    assert soul(*check(foreign, tmp_path / "check")) == 2
    assert foreign.untouched()


def test_aliases_neither_hang_nor_hide(foreign: Received, tmp_path: Path, capfd: Any) -> None:
    bomb = "judge: [&a [x], &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]"
    for one, two in zip("bcdefghi", "cdefghij", strict=True):
        bomb += f", &{two} [{','.join([f'*{one}'] * 9)}]"
    foreign.edit(lambda settings: settings.pop("judge") and None)
    foreign.config.write_text(foreign.config.read_text() + bomb + "]\n")
    for text in (foreign.config.read_text(), "judge: &a [*a]\n"):
        foreign.config.write_text(text)
        capfd.readouterr()
        assert soul(*check(foreign, tmp_path / "check")) == 2
        three_lines(capfd.readouterr().err)
        assert foreign.untouched()


def test_what_is_shown_cannot_write_on_the_terminal(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    def change(settings: dict[str, Any]) -> None:
        settings["judge"][0]["base_url"] = "http://ev\x1b[2K\x1b[1Ail\u202e.example\n/v1"
        settings["judge"][0]["api_key_env"] = "A\rB\x07"
        settings["data"]["essay"] = "rows\nfix: nothing.jsonl"

    foreign.edit(change)
    capfd.readouterr()
    assert soul(*check(foreign, tmp_path / "check")) == 2
    err = capfd.readouterr().err
    three_lines(err)
    assert not set("\x1b\r\x07\u202e") & set(err) and ".example" in err


def spaced(run: Path) -> None:
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "\n")


def commented(run: Path) -> None:
    (run / "config.yaml").write_text("# hello\n" + (run / "config.yaml").read_text())


def reordered(run: Path) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    turned = dict(reversed(settings.items()))
    (run / "config.yaml").write_text(yaml.safe_dump(turned, sort_keys=False))


def environment(run: Path, **changes: object) -> None:
    file = run / "environment.json"
    noted = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in noted.items() if v is not None}))


def unsealed(run: Path) -> None:
    environment(run, seal=None)


def other_command(run: Path) -> None:
    environment(run, command="eval local")


def odd_seals(run: Path) -> None:
    environment(run, seal=["é\ud800"])


def odd_text(run: Path) -> None:
    environment(run, seal="é\ud800")


def no_key(run: Path) -> None:
    (Path(os.environ["SOULKIT_STATE"]) / "key").unlink()


def new_key(run: Path) -> None:
    (Path(os.environ["SOULKIT_STATE"]) / "key").write_bytes(b"k" * 32)


def short_key(run: Path) -> None:
    (Path(os.environ["SOULKIT_STATE"]) / "key").write_bytes(b"")


def open_key(run: Path) -> None:
    (Path(os.environ["SOULKIT_STATE"]) / "key").chmod(0o644)


def linked_key(run: Path) -> None:
    key = Path(os.environ["SOULKIT_STATE"]) / "key"
    key.rename(key.with_name("elsewhere"))
    key.symlink_to(key.with_name("elsewhere"))


def piped_key(run: Path) -> None:
    key = Path(os.environ["SOULKIT_STATE"]) / "key"
    key.unlink()
    os.mkfifo(key, 0o600)


CHANGES = (
    spaced, commented, reordered, unsealed, other_command, odd_seals, odd_text, no_key,
    new_key, short_key, open_key, linked_key, piped_key,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_was_changed_is_no_longer_ones_own(
    native: Received, change: Callable[[Path], None]
) -> None:
    assert is_own(native.run, *config_of(native.run))
    change(native.run)
    assert not is_own(native.run, *config_of(native.run))


def config_of(run: Path) -> tuple[bytes, dict[str, Any]]:
    text = config_bytes(run)
    return text, parsed_config(run, text)


def test_every_byte_of_a_config_counts(native: Received) -> None:
    text, settings = config_of(native.run)
    for i in range(len(text)):
        assert not is_own(native.run, text[:i] + bytes([text[i] ^ 1]) + text[i + 1 :], settings)


def test_a_seal_of_another_run_does_not_fit(
    native: Received, tmp_path: Path, server: ScriptedServer, capfd: Any
) -> None:
    other = run_of(tmp_path / "second", server, "OPENAI_API_KEY")
    seal = json.loads((other.run / "environment.json").read_text())["seal"]
    environment(native.run, seal=seal)
    refused(native, capfd, *check(native, tmp_path / "check"))


def test_a_link_to_another_runs_config_brings_no_seal(
    native: Received, tmp_path: Path, server: ScriptedServer, capfd: Any
) -> None:
    evil = tmp_path / "evil.yaml"
    evil.write_text(native.config.read_text().replace(KEY_NAME, "HOME"))
    native.config.unlink()
    native.config.symlink_to(evil)
    refused(native, capfd, *check(native, tmp_path / "check"))


def test_code_at_another_place_is_not_the_sealed_one(
    native: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, server: Any
) -> None:
    """A sealed config with relative paths, unpacked beside somebody else's code."""
    monkeypatch.chdir(native.home)
    assert soul(
        "eval", "api", "--model", "m", "--base-url", server.base_url, "--backoff", 0,
        "--tasks", "task/tasks.yaml", "--task", "essay", "--data", "essay=rows.jsonl",
        "--judge", f"endpoint:j@{server.base_url}", "--out", "relative",
    ) == 0  # fmt: skip
    assert soul("judge", "check", "relative", "--out", tmp_path / "a", "--no-pairs") == 0
    received = fresh(native, tmp_path / "received")
    shutil.copytree(native.home / "relative", received.home / "relative", dirs_exist_ok=True)
    server.requests.clear()
    monkeypatch.chdir(received.home)
    refused(received, capfd, "judge", "check", "relative", "--out", tmp_path / "b")
    native.marker.unlink(missing_ok=True)
    monkeypatch.chdir(native.home)  # the same folder, where a link now leads to other code
    shutil.rmtree(native.home / "task")
    (native.home / "task").symlink_to(received.home / "task")
    refused(received, capfd, "judge", "check", "relative", "--out", tmp_path / "b")


def test_ones_own_code_may_change_and_code_in_the_run_is_never_ones_own(
    native: Received, tmp_path: Path, capfd: Any
) -> None:
    code = native.home / "task" / "essay.py"
    code.write_text(code.read_text() + "\n# a better parser\n")
    assert soul("rescore", native.run, "--out", tmp_path / "new") == 0
    (native.home / "task").rename(native.run / "task")
    (native.home / "task").symlink_to(native.run / "task")
    native.marker.unlink(missing_ok=True)
    refused(native, capfd, *check(native, tmp_path / "check"))
