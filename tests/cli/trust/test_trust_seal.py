"""What makes the config of a run another one: whatever was changed is no longer one's own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.evaluation import soul
from tests.support.servers.openai_server import ScriptedServer
from tests.support.trust import KEY_NAME, Received, check, fresh, refused, run_of


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


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_was_changed_is_no_longer_ones_own(
    native: Received, tmp_path: Path, capfd: Any, change: Callable[[Path], None]
) -> None:
    change(native.run)
    refused(native, capfd, *check(native, tmp_path / "check"))


def test_every_byte_of_a_config_counts(native: Received) -> None:
    from soulkit.runs.folder import config_bytes, parsed_config
    from soulkit.trust import is_own

    text = config_bytes(native.run)
    settings = parsed_config(native.run, text)
    assert is_own(native.run, text, settings)
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
