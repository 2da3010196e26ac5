"""A run folder from another person, to test what commands do with it before it is trusted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.evaluation import soul, three_lines
from tests.support.judged import TASKS, judge, write_rows
from tests.support.judged import essay as essay_text
from tests.support.servers.openai_server import ScriptedServer

KEY_NAME, SECRET = "AWS_SECRET_ACCESS_KEY", "aws-value-that-nobody-may-see"


@dataclass(frozen=True)
class Received:
    """A received run folder, the server in its settings, and a trace of its task code."""

    run: Path
    home: Path
    server: ScriptedServer
    marker: Path

    @property
    def url(self) -> str:
        return self.server.base_url

    @property
    def config(self) -> Path:
        return self.run / "config.yaml"

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        settings = yaml.safe_load(self.config.read_text())
        change(settings)
        self.config.write_text(yaml.safe_dump(settings, sort_keys=False))

    def untouched(self) -> bool:
        return not self.server.requests and not self.marker.exists()


def answer(body: Any) -> str:
    return judge()(body) if "<essay" in str(body["messages"]) else essay_text(body)


def run_of(home: Path, server: ScriptedServer, key: str = KEY_NAME) -> Received:
    """A judged evaluation in `home` of a task whose code leaves a trace when it is imported."""
    shutil.copytree(TASKS.parent, home / "task")
    marker = home / "the-code-ran"
    code = home / "task" / "essay.py"
    trace = f"\nfrom pathlib import Path\nPath({str(marker)!r}).touch()\n"
    code.write_text(code.read_text() + trace)
    assert soul(
        "eval", "api", "--model", "m", "--base-url", server.base_url, "--api-key-env", key,
        "--tasks", home / "task" / "tasks.yaml", "--task", "essay", "--backoff", 0,
        "--data", f"essay={write_rows(home / 'rows.jsonl', 4)}",
        "--judge", f"endpoint:j@{server.base_url}#{key}", "--out", home / "run",
    ) == 0  # fmt: skip
    marker.unlink()
    server.requests.clear()
    server.authorizations.clear()
    return Received(home / "run", home, server, marker)


def fresh(run: Received, home: Path) -> Received:
    """A copy whose task code this process has not imported yet."""
    shutil.copytree(run.home, home)
    marker = home / "the-code-ran"
    code = home / "task" / "essay.py"
    code.write_text(code.read_text().replace(str(run.marker), str(marker)))
    copy = Received(home / "run", home, run.server, marker)
    copy.config.write_text(copy.config.read_text().replace(str(run.home), str(home)))
    return copy


def refused(received: Received, capfd: Any, *command: object) -> tuple[str, str, str]:
    capfd.readouterr()
    assert soul(*command) == 2
    shown = capfd.readouterr()
    lines = three_lines(shown.err)
    assert "not known to be yours" in lines[0] and "--trust" in lines[2]
    assert received.untouched() and SECRET not in shown.out + shown.err
    return lines


def check(received: Received, out: Path, *more: object) -> tuple[object, ...]:
    return ("judge", "check", received.run, "--out", out, "--samples", 1, "--no-pairs", *more)
