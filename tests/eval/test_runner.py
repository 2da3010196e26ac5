"""The runner from Python: settings, rows, resuming, and what stops a run before it starts.

What a run has when it is taken up: read once, and left as it is when nothing is left to do.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from soulkit.data.files import write_rows
from soulkit.errors import ConfigError, DataError, PartnerError, ProviderError, RunError
from soulkit.eval.config import EvalConfig, load_work
from soulkit.eval.run import run_lock, runner
from soulkit.eval.run.resume import ResumeState, draft_keys, resume_text
from soulkit.eval.run.run_lock import find_resumable
from soulkit.eval.run.session import FailureStreak
from soulkit.models.base import Cast, Player
from soulkit.play.plan import Work
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import pack_lines, packed_file, write_json
from soulkit.tasks.kit.made_rows import split_seed
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Call, Completion, Record, Sampling, Segment, Usage
from tests.eval.test_controls import command, player
from tests.eval.test_controls import write_rows as write_essays
from tests.support.evaluation import api, examples, records, soul, summary
from tests.support.road import synth
from tests.support.servers.openai_server import ScriptedServer


class Teller:
    """Answers with the gold of the asked example; counts and remembers how it was sampled."""

    name = "teller"

    def __init__(self, works: Sequence[Work], lost: Sequence[str] = ()) -> None:
        self.gold = {e.id: w.task.gold(e) for w in works for e in w.examples}
        self.lost = set(lost)
        self.asked: list[tuple[Call, Sampling]] = []

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        self.asked.append((call, sampling))
        if call.example_id in self.lost:
            raise ProviderError("lost")
        episode = self.gold[call.example_id]
        assert episode is not None
        assert episode.final is not None
        return Completion(text=episode.final.text, usage=Usage(calls=1, cost=0.25))

    async def close(self) -> None:
        """Nothing is open."""


def config(**changes: object) -> EvalConfig:
    base = {"kind": "api", "model": "m", "tasks": ("tomi",), "data": {"*": "synth:6"}}
    return EvalConfig.model_validate({**base, **changes})


def play(
    run: Run, work: Sequence[Work], settings: EvalConfig, lost: Sequence[str] = ()
) -> tuple[Teller, dict]:
    model = Teller(work, lost)
    totals = asyncio.run(runner.run_evaluation(run, work, Cast(actor=Player(model)), settings))
    return model, json.loads(json.dumps(totals.to_json()))


def test_every_task_is_sampled_its_own_way_unless_told(tmp_path: Path) -> None:
    settings = config(tasks=("tomi", "hitom"), repeats=2, seed=7)
    work = load_work(settings)
    run = Run.open(tmp_path / "r", settings.command, settings.identity())
    model, totals = play(run, work, settings)
    task_of = {e.id: w.task.name for w in work for e in w.examples}
    seen = {(task_of[c.example_id], s.max_tokens, s.temperature) for c, s in model.asked}
    assert seen == {("tomi", 256, 1.0), ("hitom", 8192, 1.0)}
    assert {s.seed for _, s in model.asked} == {7}
    assert totals["n"] == len(model.asked) == 2 * len(task_of)
    assert totals["tasks"]["hitom"]["value"]["mean"] == 1.0
    # What the file says beside it: who was measured, on what, when.
    beside = ("schema", "provenance")
    assert totals == {k: v for k, v in summary(run.path).items() if k not in beside}
    greedy = config(temperature=0, max_tokens=9, top_p=0.5)
    spec = load_registry().spec("hitom")
    assert greedy.sampling(spec) == Sampling(temperature=0, top_p=0.5, max_tokens=9, seed=0)


def test_only_what_has_no_score_is_played_again(tmp_path: Path) -> None:
    settings = config()
    work = load_work(settings)
    run = Run.open(tmp_path / "r", settings.command, settings.identity())
    lost = [e.id for e in work[0].examples[1:3]]
    _, first = play(run, work, settings, lost)
    assert (first["n_scored"], first["n"]) == (4, 6)
    again, second = play(run, work, settings)
    assert sorted(c.example_id for c, _ in again.asked) == sorted(lost)
    assert (second["n_scored"], second["tasks"]["tomi"]["value"]["mean"]) == (6, 1.0)
    assert second["cost"] == 6 * 0.25
    assert second["seconds"] >= first["seconds"]
    none, third = play(run, work, settings)
    assert none.asked == []
    assert third["tasks"] == second["tasks"]


def test_a_torn_last_line_is_played_again(tmp_path: Path) -> None:
    settings = config()
    work = load_work(settings)
    run = Run.open(tmp_path / "r", settings.command, settings.identity())
    play(run, work, settings)
    lines = run.episodes.read_bytes().splitlines(keepends=True)
    run.episodes.write_bytes(b"".join(lines[:4]) + lines[4][:50])
    model, totals = play(run, work, settings)
    assert len(model.asked) == 2
    assert totals["n_scored"] == 6


def test_rows_that_changed_are_refused(tmp_path: Path) -> None:
    settings = config()
    run = Run.open(tmp_path / "r", settings.command, settings.identity())
    play(run, load_work(settings), settings)
    other = [Work(load_registry().task("tomi"), examples("tomi", 6, seed=5))]
    with pytest.raises(RunError, match="of rows that are no longer in the data"):
        play(run, other, settings)


def test_the_clock_adds_up_over_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(run_lock.time, "monotonic", lambda: now[0])
    first = run_lock.RunClock(tmp_path / "c.json")
    now[0] += 4
    first.tick()
    assert not (tmp_path / "c.json").exists()
    now[0] += 2
    first.tick()  # a kill now costs nothing
    now[0] += 500
    second = run_lock.RunClock(tmp_path / "c.json")
    now[0] += 3
    assert second.seconds == 9
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(RunError):
        run_lock.RunClock(tmp_path / "c.json")


def test_the_keeper_writes_in_groups_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(data={"*": "synth:40"})
    work = load_work(settings)
    run = Run.open(tmp_path / "r", settings.command, settings.identity())
    groups: list[int] = []
    real = run_lock.RecordWriter.write

    def slow(writer: run_lock.RecordWriter, *records: Record) -> None:
        time.sleep(0.02)
        groups.append(len(records))
        real(writer, *records)

    monkeypatch.setattr(run_lock.RecordWriter, "write", slow)
    play(run, work, settings)
    assert sum(groups) == 40 > len(groups)
    assert len({r.key for r in load(run)}) == 40


def test_a_disk_that_fails_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config()
    run = Run.open(tmp_path / "r", settings.command, settings.identity())

    def full(writer: run_lock.RecordWriter, *records: Record) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(run_lock.RecordWriter, "write", full)
    with pytest.raises(OSError, match="no space left"):
        play(run, load_work(settings), settings)
    assert not run.summary_path.exists()


def test_a_streak_of_failures_ends_the_run(tmp_path: Path) -> None:
    settings = config(data={"*": "synth:60"}, concurrency=1)
    work = load_work(settings)
    run = Run.open(tmp_path / "r", settings.command, settings.identity())
    ids = [e.id for e in work[0].examples]
    with pytest.raises(ProviderError, match="20 episodes in a row failed; the last error: lost"):
        play(run, work, settings, lost=ids[5:])
    scores = [r.score.value for r in load(run)]
    assert scores == [1.0] * 5 + [None] * 20
    _, totals = play(run, work, settings)
    assert totals["n_scored"] == len(ids)


def test_a_streak_is_twice_the_concurrency_long_and_ends_with_a_success() -> None:
    streak = FailureStreak(15, "rows")
    for failed in [*[True] * 29, False, *[True] * 29]:
        streak.add(failed, "gone")
    with pytest.raises(PartnerError, match="30 rows in a row failed; the last error: gone"):
        streak.add(True, "gone", PartnerError)


def load(run: Run) -> list[Record]:
    from soulkit.runs.records import load_records

    return load_records(run.episodes)


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    settings = config()
    run = Run.open(tmp_path / "r", settings.command, settings.identity())
    hold = (
        "import sys; from pathlib import Path; from soulkit.eval.run.run_lock import run_lock;"
        "from soulkit.runs.folder import Run; run = Run(Path(sys.argv[1]), 'eval api', False)\n"
        "with run_lock(run):\n    print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunError, match="Another process"), run_lock.run_lock(run):
        pass
    holder.kill()
    holder.communicate()
    with run_lock.run_lock(run):  # a killed process holds nothing
        pass


def test_where_rows_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = synth("hitom", 8, split_seed(0, "test"))
    write_rows(tmp_path / "hitom_val.parquet", rows, data_source="hitom")
    write_rows(tmp_path / "own.jsonl", rows[:3], data_source="hitom")
    made = load_work(config(tasks=("hitom",), data={"hitom": "synth:8"}))[0].examples
    ids = {e.id for e in made}
    folder = load_work(config(tasks=("hitom",), data={"hitom": str(tmp_path)}))[0].examples
    assert {e.id for e in folder} == ids
    part = load_work(config(tasks=("hitom",), data={"*": str(tmp_path / "own.jsonl")}))[0].examples
    assert {e.id for e in part} < ids
    monkeypatch.delenv("SOULKIT_DATA", raising=False)
    with pytest.raises(DataError) as error:
        load_work(config(tasks=("hitom",), data={}))
    for way in ("synth:100", "soul data import hitom", "--data hitom=FILE"):
        assert way in error.value.way_out
    monkeypatch.setenv("SOULKIT_DATA", str(tmp_path))
    settings = EvalConfig.load(flags={"kind": "api", "model": "m", "tasks": ["hitom"]})
    assert settings.data == {}
    assert {e.id for e in load_work(settings)[0].examples} == ids
    with pytest.raises(DataError, match="no rows for the task 'tomi'"):
        load_work(config(tasks=("tomi",), data={}))
    few = load_work(config(tasks=("hitom",), data={"*": str(tmp_path)}, limit=3))[0].examples
    assert [e.id for e in sorted(few, key=lambda e: e.id)] == sorted(ids)[:3]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tasks": ("tomi",), "suite": "small"}, "either tasks"),
        ({"kind": "local", "tasks": ()}, "--task or --suite"),
        ({"price_in": 1}, "both --price-in"),
        ({"ledger": "replay"}, "--ledger-file"),
        ({"temperature": -1}, "temperature"),
        ({"max_unscored": 2}, "max_unscored"),
        ({"kind": "both"}, "kind"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict, named: str) -> None:
    flags = {"kind": "api", "model": "m", "tasks": ("tomi",), **wrong}
    with pytest.raises(ConfigError, match=named):
        EvalConfig.load(env={}, flags=flags)


def test_a_suite_is_its_tasks_and_rows_for_others_are_refused() -> None:
    settings = config(tasks=(), suite="tom", data={"*": "synth:3"})
    assert [w.task.name for w in load_work(settings)] == ["hitom", "paratomi", "tomi"]
    with pytest.raises(ConfigError, match="rows for 'hitom'"):
        load_work(config(data={"*": "synth:3", "hitom": "synth:3"}))
    with pytest.raises(ConfigError, match="how many rows"):
        load_work(config(data={"*": "synth:many"}))


def test_patience_is_no_part_of_the_identity() -> None:
    same = config(timeout_s=5, concurrency=3, max_attempts=1, batch_size=2, max_unscored=0.5)
    assert same.identity() == config().identity()
    assert config(temperature=0.3).identity() != config().identity()


def unfinished(settings: EvalConfig, root: Path) -> Path | None:
    return run_lock.find_resumable(settings.command, settings.identity(), root)


def test_an_unfinished_run_is_found_again(tmp_path: Path) -> None:
    settings = config()
    work = load_work(settings)
    run = Run.open(tmp_path / "20260101-eval-api-tomi", settings.command, settings.identity())
    assert unfinished(settings, tmp_path) == run.path
    assert unfinished(config(seed=1), tmp_path) is None
    older = Run.open(tmp_path / "20260102-eval-api-tomi", settings.command, settings.identity())
    write_json(older.path / "provenance.json", {"players": {}, "tasks": {}})
    assert unfinished(settings, tmp_path) == run.path  # nobody can resume an earlier version's
    for name, text in (("environment.json", "{"), ("config.yaml", "a: [")):
        broken = tmp_path / f"29990101-{name}"
        broken.mkdir()
        (broken / "config.yaml").write_text("a: 1")
        (broken / "environment.json").write_text(json.dumps({"command": settings.command}))
        (broken / name).write_text(text)
    (run.path / "summary.json").write_text('{"n":')
    assert unfinished(settings, tmp_path) == run.path
    play(run, work, settings, lost=[work[0].examples[0].id])
    assert unfinished(settings, tmp_path) == run.path
    play(run, work, settings)
    assert unfinished(settings, tmp_path) is None
    assert unfinished(settings, tmp_path / "nowhere") is None


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
    assert "is already finished" in capsys.readouterr().err


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
    out, rows = tmp_path / "run", write_essays(tmp_path / "rows.jsonl")
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
        f"resuming {run.path}: 2 of 4 episodes left to play, controls left: 1"
    )
    assert "controls" not in resume_text(run, 2, 4) and "resuming" in resume_text(run, 0, 4, 1)
    assert resume_text(run, 0, 4).endswith(f"see its report: soul report '{run.path}'")


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
