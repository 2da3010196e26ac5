"""Refusals for good, on every road: said before anything is played, or when they come.

A start that a server refused leaves no run folder; a run counts what was scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soulkit.report.listing import list_runs, state_text
from tests.support.drafting import built, intent
from tests.support.evaluation import api, last_message, oracle, records, soul, three_lines
from tests.support.judged import TASKS, essay, evaluated, judge, write_rows
from tests.support.prism import write_conversations
from tests.support.servers.openai_server import Body, Fault, ScriptedServer
from tests.support.training import random_model

KEY = "rk0123456789abcdef0123"


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """A judge's server that wants another key than there is."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with ScriptedServer(answer=judge(), require_key="another") as server:
        yield server


def told(capsys: Any) -> str:
    """The error that a command ended with, in one line."""
    return " ".join(three_lines("\n".join(capsys.readouterr().err.splitlines()[-3:])))


def essays(server: ScriptedServer, folder: Path, *arguments: object) -> int:
    rows = write_rows(folder / "rows.jsonl", 4)
    return soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--tasks", TASKS,
                "--task", "essay", "--data", f"essay={rows}", "--backoff", 0,
                "--out", folder / "run", *arguments)  # fmt: skip


def test_a_judges_wrong_key_is_known_before_the_actor_plays(
    strict: ScriptedServer, tmp_path: Path, capsys: Any
) -> None:
    with ScriptedServer(answer=essay) as actor:
        assert essays(actor, tmp_path, "--judge", f"endpoint:j@{strict.base_url}") == 2
        assert actor.requests == strict.requests == [] and len(actor.probes) == 1
        assert not (tmp_path / "run").exists()
        assert "rejects the key for 'j'" in told(capsys)
        strict._require_key = None  # mended: the same command goes on
        assert essays(actor, tmp_path, "--judge", f"endpoint:j@{strict.base_url}") == 0
    assert len(records(tmp_path / "run")) == 4


def test_a_local_actor_waits_for_its_judge(
    strict: ScriptedServer, tmp_path: Path, capsys: Any
) -> None:
    rows, model = write_rows(tmp_path / "rows.jsonl", 2), random_model(tmp_path / "model")
    code = soul("eval", "local", "--model", model, "--tasks", TASKS, "--task", "essay",
                "--data", f"essay={rows}", "--judge", f"endpoint:j@{strict.base_url}",
                "--out", tmp_path / "run")  # fmt: skip
    assert code == 2 and "rejects the key for 'j'" in told(capsys)


def test_training_waits_for_its_coach(strict: ScriptedServer, tmp_path: Path, capsys: Any) -> None:
    model = random_model(tmp_path / "model")
    small = ("--prompts", 1, "--group-size", 2, "--max-tokens", 8, "--lora-r", 4, "--steps", 1)
    code = soul("train", "ditto", "--model", model, "--task", "tomi", "--data", "tomi=synth:8",
                "--coach", f"endpoint:c@{strict.base_url}", *small,
                "--out", tmp_path / "run")  # fmt: skip
    assert code == 2 and "rejects the key for 'c'" in told(capsys)
    assert len(strict.probes) == 1 and strict.requests == []


def test_a_check_of_judges_asks_first(strict: ScriptedServer, tmp_path: Path, capsys: Any) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 2)
    with ScriptedServer(answer=judge()) as fine:
        run = evaluated(tmp_path / "run", rows, fine.base_url)
    code = soul("judge", "check", run, "--judge", f"endpoint:k@{strict.base_url}",
                "--out", tmp_path / "check")  # fmt: skip
    assert code == 2 and "rejects the key for 'k'" in told(capsys)
    assert len(strict.probes) == 1 and strict.requests == []


def test_a_key_that_is_revoked_ends_the_run_and_what_is_played_stays(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    gold = oracle("tomi", 40)
    with ScriptedServer(answer=gold, require_key=KEY) as server:

        def revoking(body: Body) -> str:
            if len(server.requests) >= 10:
                server._require_key = "another"
            return gold(body)

        server._answer = revoking
        out = tmp_path / "run"
        assert api(server.base_url, out, "--concurrency", 2, n=40) == 2
        words = told(capsys)
        assert "rejects the key for 'm'" in words and "Finished work is kept" in words
        played = [record for record in records(out) if record.score.scored]
        assert 8 <= len(played) <= 11 and len(server.requests) <= 13
        server._require_key, server._answer = KEY, gold
        assert api(server.base_url, out, "--concurrency", 2, n=40) == 0
    assert len([record for record in records(out) if record.score.scored]) >= 40


def test_a_finished_run_and_a_replay_ask_nobody(tmp_path: Path, capsys: Any) -> None:
    with ScriptedServer(answer=oracle("tomi", 6)) as server:
        out = tmp_path / "run"
        assert api(server.base_url, out) == 0 and len(server.probes) == 1
        line = f"answered: m at 127.0.0.1:{server.base_url.split(':')[2].removesuffix('/v1')}"
        assert line in capsys.readouterr().err.splitlines()
        assert api(server.base_url, out) == 0 and len(server.probes) == 1
        again = ("--ledger", "replay", "--ledger-file", out / "ledger.sqlite")
        assert api(server.base_url, tmp_path / "again", *again) == 0
        (out / "episodes.jsonl").unlink()  # every reply is in the ledger
        assert api(server.base_url, out) == 0
        assert len(server.probes) == 1 and len(server.requests) == 6


def test_headers_are_sent_and_never_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("MY_GATEWAY", KEY)
    with ScriptedServer(answer=lambda body: f"{last_message(body)} {KEY}") as server:
        out = tmp_path / "run"
        header = ("--headers", "Authorization=MY_GATEWAY")
        assert api(server.base_url, out, *header, "--max-unscored", 1) == 0
        assert set(server.authorizations) == {KEY}
        assert f"server {server.base_url} (headers Authorization): actor m" in (
            capsys.readouterr().err
        )
    for path in out.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    assert "Authorization: MY_GATEWAY" in (out / "config.yaml").read_text("utf-8")
    assert api(server.base_url, out, "--headers", "Authorization") == 2
    assert "NAME=ENV" in told(capsys)
    assert api(server.base_url, tmp_path / "b", "--headers", f"X-Key={KEY}-secret") == 2
    assert KEY not in told(capsys)


def test_options_that_contradict_each_other_are_refused(tmp_path: Path, capsys: Any) -> None:
    for flag, name, value, other in (
        ("--hack-penalty", "hack_penalty", "off", "always"),
        ("--assistant", "assistant", "live", "replay"),
    ):
        both = (flag, value, "--option", f"{name}={other}")
        assert api("http://127.0.0.1:9/v1", tmp_path / "run", *both) == 2
        assert f"{flag} {value} and --option {name}={other} contradict" in told(capsys)


def unknown(body: dict[str, Any]) -> Fault | None:
    """What a server says of the one model that it does not have."""
    named = body["model"]
    missing = Fault.status_error(404, f"The model `{named}` does not exist")
    return missing if named == "nobody" else None


@pytest.mark.parametrize(
    ("wrong", "there"), [("model", False), ("no /v1", False), ("path", False), ("model", True)]
)
def test_a_refused_actor_leaves_no_folder(
    wrong: str, there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    if there:
        out.mkdir()
    with ScriptedServer(on_probe=unknown) as server:
        server.paths = ("/v1/chat/completions",)
        url = server.base_url.removesuffix("/v1")
        where = {"model": server.base_url, "no /v1": url, "path": f"{url}/v2/none"}[wrong]
        name = "nobody" if wrong == "model" else "m"
        assert api(where, out, "--model", name) == 2
        said = capsys.readouterr().err
        assert "error: " in said and "run folder" not in said
        assert list_runs(tmp_path) == [] and not out.exists()
        assert api(server.base_url, out, "--max-unscored", 1) == 0, "the mended command runs"
        assert f"run folder {out}" in capsys.readouterr().err
    assert [run.state for run in list_runs(tmp_path)] == ["finished"]


def test_a_refused_question_about_an_old_run_leaves_no_folder(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    with ScriptedServer(answer=judge(), on_probe=unknown) as server:
        run = evaluated(tmp_path / "run", rows, server.base_url)
        other = f"endpoint:nobody@{server.base_url}"
        before = sorted(tmp_path.rglob("*"))
        assert soul("judge", "check", run, "--judge", other, "--out", tmp_path / "check") == 2
        assert soul("rescore", run, "--ask", "--judge", other, "--out", tmp_path / "again") == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_refused_drafter_leaves_no_folder(tmp_path: Path) -> None:
    source = write_conversations(tmp_path / "conversations.jsonl", 4)
    refused = Fault.status_error(401)
    with ScriptedServer(answer=intent, on_probe=lambda body: refused) as server:
        assert built("userllm", source, tmp_path / "rows.jsonl", server, server) == 2
    assert not (tmp_path / "rows.run").exists()


def test_a_refusal_keeps_what_an_earlier_start_recorded(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with ScriptedServer(script=lambda i, body: Fault.status_error(400) if i else None) as server:
        api(server.base_url, out, "--concurrency", 1, "--max-attempts", 1)
        kept = len(records(out))
        server.on_probe = lambda body: Fault.status_error(401)
        assert api(server.base_url, out) == 2
    assert kept and len(records(out)) == kept


def test_episodes_without_a_score_are_not_counted_as_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(answer="x", script=lambda i, body: Fault.status_error(500)) as server:
        words = ("--max-attempts", 1, "--concurrency", 2, "--down-after", 0.5)
        assert api(server.base_url, tmp_path / "run", *words, n=60) == 1
    (run,) = list_runs(tmp_path)
    assert run.progress is not None and run.progress.scored == 0
    done = len(records(tmp_path / "run"))
    assert state_text(run) == f"unfinished: {done} of 60 episodes, 0 scored"
    capsys.readouterr()
    assert soul("report", tmp_path / "run") == 0
    assert f"{done} of 60 episodes, 0 scored" in capsys.readouterr().out
