"""What a run has when it is taken up: read once, and left as it is when nothing is left to do."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from soulkit.eval.run.resume import ResumeState, draft_keys, resume_text
from soulkit.eval.run.run_lock import find_resumable
from soulkit.play.plan import Work
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import pack_lines, packed_file, write_json
from soulkit.tasks.kit.registry import load_registry
from tests.eval.test_controls import command, player, write_rows
from tests.support.evaluation import api, examples, records, soul, summary
from tests.support.servers.openai_server import ScriptedServer

_OPENED: list[Counter[str]] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _OPENED and isinstance(arguments[0], str | os.PathLike):
        _OPENED[-1][Path(arguments[0]).name] += 1


sys.addaudithook(_note)


@contextmanager
def opened() -> Iterator[Counter[str]]:
    """How often a file of each name is opened."""
    _OPENED.append(Counter())
    try:
        yield _OPENED[-1]
    finally:
        _OPENED.pop()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer="<answer>A</answer>") as running:
        yield running


def test_a_finished_run_is_left_as_it_is(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert api(server.base_url, out) == 0
    written, n_requests = (out / "summary.json").read_bytes(), len(server.requests)
    with opened() as files:
        assert api(server.base_url, out) == 0
    assert (out / "summary.json").read_bytes() == written and len(server.requests) == n_requests
    assert files["episodes.jsonl"] == 1, "keys and scores are read, once"
    assert "is finished already" in capsys.readouterr().err


def test_a_packed_run_is_taken_up_as_well(server: ScriptedServer, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert api(server.base_url, out) == 0
    before = records(out)
    assert pack_lines(out / "episodes.jsonl", least=1)
    assert api(server.base_url, out) == 0
    assert records(out) == before and packed_file(out / "episodes.jsonl").is_file()
    assert not (out / "episodes.jsonl").exists()


@pytest.mark.parametrize("change", ["gone", "older", "version"])
def test_a_summary_that_may_be_stale_is_made_anew(
    server: ScriptedServer, tmp_path: Path, change: str
) -> None:
    out = tmp_path / "run"
    assert api(server.base_url, out) == 0
    good, file = summary(out), out / "summary.json"
    if change == "gone":
        file.unlink()
    elif change == "older":
        os.utime(file, ns=(1, 1))
    else:
        origin = {**good["provenance"], "versions": {"soulkit": "0.0.1"}}
        write_json(file, {**good, "tasks": {}, "provenance": origin})
    assert api(server.base_url, out) == 0
    assert summary(out)["tasks"] == good["tasks"]
    assert file.stat().st_mtime_ns > 1


def test_controls_are_read_once(tmp_path: Path) -> None:
    """Also where a user's own task has a part in the numbers, which are then made anew."""
    out, rows = tmp_path / "run", write_rows(tmp_path / "rows.jsonl")
    with ScriptedServer(answer=player()) as running:
        words = command(running.base_url, out, rows, "--controls")
        assert soul(*words) == 0
        good, n_requests = summary(out)["tasks"], len(running.requests)
        with opened() as files:
            assert soul(*words) == 0
        assert len(running.requests) == n_requests and summary(out)["tasks"] == good
    assert files["controls.jsonl"] == 1


WORK = (Work(load_registry().task("tomi"), tuple(examples("tomi", 2))),)


@pytest.mark.parametrize(
    ("scored", "left"),
    [({}, 4), ({0: True}, 3), ({0: False}, 4), (dict.fromkeys(range(4), True), 0)],
)
def test_what_is_left_is_what_has_no_score(scored: dict[int, bool], left: int) -> None:
    keys = draft_keys(WORK, 2)
    state = ResumeState(
        scored={keys[i]: done for i, done in scored.items()}, controls=(), changed=(0, 0)
    )
    assert len(state.jobs_left(WORK, 2)) == left and state.any_left(WORK, 2) == bool(left)


def test_what_is_said_of_a_run_that_goes_on(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "a run", "eval api", {})
    assert resume_text(run, 2, 4, 1) == (
        f"resuming {run.path}: 2 of 4 episodes are left to play, controls left to ask about: 1"
    )
    assert "controls" not in resume_text(run, 2, 4) and "resuming" in resume_text(run, 0, 4, 1)
    assert resume_text(run, 0, 4).endswith(f"see: soul report '{run.path}'")


def test_only_a_run_of_the_same_command_and_settings_is_resumed(tmp_path: Path) -> None:
    Run.open(tmp_path / "a", "eval api", {"model": "other"})
    Run.open(tmp_path / "b", "train ditto", {"model": "m"})
    assert find_resumable("eval api", {"model": "m"}, tmp_path) is None
    Run.open(tmp_path / "c", "eval api", {"model": "m"})
    assert find_resumable("eval api", {"model": "m"}, tmp_path) == tmp_path / "c"
    write_json(tmp_path / "c" / "summary.json", {"n": 2, "n_scored": 1})
    assert find_resumable("eval api", {"model": "m"}, tmp_path) == tmp_path / "c"
    write_json(tmp_path / "c" / "summary.json", {"n": 2, "n_scored": 2})
    assert find_resumable("eval api", {"model": "m"}, tmp_path) is None
