"""`soul chat`: what the terminal shows, the run that a chat leaves, chats that are cut short."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from soulkit.runs.records import load_records
from soulkit.serving.backend import ScriptBackend
from tests.support.evaluation import soul
from tests.support.servers.serving import served
from tests.support.serving import PERSON, person

ESCAPE = "\x1b[31m"


def judge(messages: Any) -> str:
    text = str(messages[-1]["content"])
    if text.startswith("You coach"):
        return f"Say sooner how long you wait.{ESCAPE}"
    mark = {"reasoning": "Typed by a person.", "score": 8}
    return json.dumps(dict.fromkeys(("persona", "purpose", "human"), mark))


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """Name of a script → its server."""
    scripts = {"person": person, "judge": judge, "rude": lambda m: f"{ESCAPE}hi"}
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(served(ScriptBackend(name, speak)))
            for name, speak in scripts.items()
        }


@pytest.fixture(autouse=True)
def _people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"id": "lamp", "scenario": "Your lamp has not arrived."}
    Path("scenarios.jsonl").write_text(json.dumps(row))


def chatted(
    lines: str, url: str, monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[int, Any]:
    """(exit code, the record) of a chat with these lines."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code = soul("chat", url, "--scenario", "scenarios.jsonl", "--out", "run", *options)
    return code, next(iter(load_records(Path("run/episodes.jsonl"))), None) if code == 0 else None


def test_a_chat_is_an_episode_that_can_be_shown_and_scored(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = chatted("Since when?\nLet me see.\n", urls["person"], monkeypatch)
    assert code == 0 and record.episode.stop == "ended"
    lines = [line.text for line in record.episode.transcript]
    assert lines == [PERSON[0], "Since when?", PERSON[1], "Let me see.", "ok thanks"]
    assert (record.score.value, record.score.reason) == (None, "not_judged")
    assert "###" not in capsys.readouterr().out
    assert soul("show", "run", "--example", record.example_id) == 0
    assert "Your lamp has not arrived." in capsys.readouterr().out
    player = f"endpoint:judge@{urls['judge']}"
    assert soul("rescore", "run", "--ask", "--judge", player, "--out", "scored") == 0
    (scored,) = load_records(Path("scored/episodes.jsonl"))
    assert scored.score.value == pytest.approx(0.8)


def test_coach_judge_and_a_second_try(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    player = f"endpoint:judge@{urls['judge']}"
    lines = "/feedback\n/again\n/again be quick\nSince when?\n/why\n/end\n"
    code, record = chatted(lines, urls["person"], monkeypatch, "--judge", player, "--coach", player)
    printed = capsys.readouterr().out
    assert code == 0 and ESCAPE not in printed
    assert "Say sooner how long you wait." in printed and "Typed by a person." in printed
    texts = [line.text for line in record.episode.transcript]
    assert texts == [f"9 days!! {PERSON[0]}", "Since when?", PERSON[1]]
    coached, again = record.episode.notes["again"]
    assert again == {"feedback": "be quick", "first": f"9 days!! {PERSON[0]}"}
    assert "how long you wait" in coached["feedback"] and coached["first"] == PERSON[0]
    first, second = (turn.context[0] for turn in record.episode.traces[0].turns)
    assert "be quick" in first.text and first.bare == second.text
    assert record.score.value == pytest.approx(0.8)


def test_commands_without_a_player_say_what_is_missing(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "/feedback\n/again\n/why\n/nothing\n/help\n"
    code, record = chatted(lines, urls["rude"], monkeypatch)
    printed = capsys.readouterr().out
    assert code == 0 and len(record.episode.transcript) == 1 and ESCAPE not in printed
    for words in ("--coach PLAYER", "--judge PLAYER", "no command /nothing"):
        assert words in printed


def test_a_server_that_is_gone_is_an_error_and_leaves_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chatted("", "http://127.0.0.1:9/v1", monkeypatch) == (2, None)
    assert "does not list its models" in capsys.readouterr().err and not Path("run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\x03", "kill"])
def test_a_chat_at_a_terminal_is_saved_whatever_ends_it(end: str, urls: dict[str, str]) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        words = ("chat", urls["person"], "--scenario", "scenarios.jsonl", "--out", "run")
        os.execv(sys.executable, [sys.executable, "-m", "soulkit", *words])
    with closing(os.fdopen(terminal, "r+b", buffering=0)) as screen:
        seen = read_until(screen, b"you  ")
        assert PERSON[0].encode() in seen
        screen.write(b"Since when?\n")
        read_until(screen, re.escape(PERSON[1].encode()) + rb".*you  ")
        time.sleep(0.5)  # a signal between readline's prompt and its wait counts at the next key
        if end == "kill":
            os.kill(pid, signal.SIGTERM)
        else:
            screen.write(end.encode())
        read_until(screen, b"saved in run")
        os.waitpid(pid, 0)
    (record,) = load_records(Path("run/episodes.jsonl"))
    assert len(record.episode.transcript) == 3 and record.episode.stop == "left"


def read_until(screen: Any, pattern: bytes, limit_s: float = 60.0) -> bytes:
    """What the terminal shows until it matches."""
    seen, end = b"", time.monotonic() + limit_s
    while not re.search(pattern, seen, re.DOTALL):
        ready, _, _ = select.select([screen], [], [], end - time.monotonic())
        assert ready, seen
        seen += screen.read(4096)
    return seen
