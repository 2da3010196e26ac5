"""A start that a server refused leaves no run folder; a run counts what was scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from soulkit.report.listing import list_runs, state_text
from tests.support.drafting import built, intent
from tests.support.evaluation import api, records, soul
from tests.support.judged import TASKS, essay, evaluated, judge, write_rows
from tests.support.prism import write_conversations
from tests.support.servers.openai_server import Fault, ScriptedServer


def unknown(body: dict[str, Any]) -> Fault | None:
    """What a server says of the one model that it does not have."""
    named = body["model"]
    missing = Fault.status_error(404, f"The model `{named}` does not exist")
    return missing if named == "nobody" else None


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("wrong", ["model", "no /v1", "path"])
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


def test_a_refused_judge_leaves_no_folder(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    words = ("eval", "api", "--model", "m", "--tasks", TASKS, "--task", "essay", "--data",
             f"essay={rows}", "--out", tmp_path / "run")  # fmt: skip
    with ScriptedServer(answer=essay, on_probe=unknown) as server:
        where = ("--base-url", server.base_url, "--judge", f"endpoint:nobody@{server.base_url}")
        assert soul(*words, *where) == 2
        assert server.requests == []
    assert not (tmp_path / "run").exists()


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
