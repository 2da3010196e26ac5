"""A judged run of the user, and the same run as a stranger receives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.openai_server import ScriptedServer
from tests.support.trust import KEY_NAME, SECRET, Received, answer, fresh, run_of


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
