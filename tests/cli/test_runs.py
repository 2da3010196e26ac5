"""`soul runs`, and what is said of a run that was killed, is at work, or is finished already."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soulkit.eval.results.summary import Cell, Summary
from soulkit.eval.run.run_lock import LOCK, is_locked, run_lock
from soulkit.report.listing import list_runs
from soulkit.report.load import load_runs
from soulkit.runs.folder import Run
from soulkit.tasks.kit.registry import load_registry
from tests.support.evaluation import FAST, api, oracle, records, soul, start, three_lines, value
from tests.support.servers.openai_server import Fault, ScriptedServer

RECORDED = Path(__file__).parents[1] / "recorded"
ROWS, REPEATS = 9, 2
PLAYED = ROWS * REPEATS


def listed(folder: Path, capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capfd.readouterr()
    assert soul("runs", folder, "--json") == 0
    runs: list[dict[str, Any]] = json.loads(capfd.readouterr().out)
    return runs


def streams_of(
    capfd: pytest.CaptureFixture[str], *arguments: object, code: int = 0
) -> tuple[str, str]:
    capfd.readouterr()
    assert soul(*arguments) == code
    streams = capfd.readouterr()
    return streams.out, streams.err


# -- a run that was killed -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer=oracle("tomi", ROWS), delay_s=0.05) as running:
        yield running


def command(server: ScriptedServer, out: Path) -> tuple[object, ...]:
    return (
        "eval", "api", "--model", "m", "--base-url", server.base_url, "--out", out, "--task",
        "tomi", "--data", f"synth:{ROWS}", "--repeats", REPEATS, "--concurrency", 1,
        "--price-in", 1, "--price-out", 2, *FAST,
    )  # fmt: skip


@pytest.fixture(scope="module")
def stopped(
    server: ScriptedServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """The folder of a run whose process was killed at work, and how it was listed before that."""
    folder = tmp_path_factory.mktemp("stopped")
    process = start(*command(server, folder / "run"))
    server.wait_for(6)
    states = [run.state for run in list_runs(folder)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    return folder, states


def test_a_run_at_work_is_listed_as_running_and_a_killed_one_as_unfinished(
    stopped: tuple[Path, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, states = stopped
    assert states == ["running"]
    (run,) = listed(folder, capfd)
    done = len(records(folder / "run"))
    assert 0 < done < PLAYED
    assert run["state"] == "unfinished"
    assert run["progress"] == {
        "done": done, "total": PLAYED, "unit": "episodes", "scored": done,
    }  # fmt: skip
    assert run["command"] == "eval api" and run["model"] == "m"
    assert run["cost"] > 0 and run["headlines"] == []
    table, _ = streams_of(capfd, "runs", folder)
    assert f"unfinished: {done} of {PLAYED} episodes" in " ".join(table.split())


def test_its_means_are_those_of_a_finished_run_of_the_same_episodes(
    stopped: tuple[Path, list[str]], server: ScriptedServer, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Finished, the run says so; without its summary, the same cells come from its episodes."""
    out = tmp_path / "run"
    shutil.copytree(stopped[0] / "run", out)
    done = len(records(out))
    _, err = streams_of(capfd, *command(server, out))
    assert f"resuming {out}: {PLAYED - done} of {PLAYED} episodes left to play" in err
    calls = len(server.requests)
    _, err = streams_of(capfd, *command(server, out))
    assert f"{out} is already finished; to see its report: soul report {out}" in err
    assert "resuming" not in err and len(server.requests) == calls
    (finished,) = load_runs([out], episodes=False)
    assert finished.progress is None
    (out / "summary.json").unlink()
    (so_far,) = load_runs([out], episodes=False)
    assert so_far.summary is not None and finished.summary is not None
    assert so_far.tasks == finished.tasks
    assert so_far.summary.statuses == finished.summary.statuses
    assert so_far.summary.cost == pytest.approx(finished.summary.cost)


def test_a_run_that_was_killed_before_its_first_episode_is_a_run(
    stopped: tuple[Path, list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(stopped[0] / "run", out)
    (out / "episodes.jsonl").unlink()
    assert f"unfinished: 0 of {PLAYED} episodes" in streams_of(capfd, "report", out)[0]
    assert listed(tmp_path, capfd)[0]["progress"]["done"] == 0
    streams_of(capfd, "show", out, code=2)


def test_an_unfinished_training_counts_its_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ditto"
    shutil.copytree(RECORDED / "ditto", out)
    (out / "summary.json").unlink()
    steps = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(steps[:2]))
    (run,) = listed(tmp_path, capfd)
    expected = len({json.loads(x)["step"] for x in steps[:2] if "reward/draft" in x or "loss" in x})
    assert run["progress"] == {
        "done": expected, "total": 4, "unit": "steps", "scored": None,
    }  # fmt: skip
    assert f"unfinished: {expected} of 4 steps" in streams_of(capfd, "report", out)[0]


# -- the lock --------------------------------------------------------------------------------------


def test_looking_at_a_run_does_not_keep_its_command_out(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "run", "eval api", {"model": "m"})
    assert not is_locked(run.path)
    with run_lock(run):
        assert is_locked(run.path)
    assert not is_locked(run.path)
    (run.path / LOCK).touch()
    with (run.path / LOCK).open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        started = time.monotonic()
        with pytest.raises(Exception, match="Another process is using"), run_lock(run):
            raise AssertionError("the lock is another's")
        assert time.monotonic() - started < 5
    with run_lock(run):
        pass


# -- a folder of many ------------------------------------------------------------------------------


def test_runs_of_every_kind_and_age_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    runs = {run["name"]: run for run in listed(RECORDED, capfd)}
    assert set(runs) >= {"after", "before", "canaries", "ditto", "judged", "sft",
                         "ablate/ditto/seed_0", "ablate/grpo/seed_1"}  # fmt: skip
    assert {run["state"] for run in runs.values()} == {"finished"}
    labels = {name: [one["label"] for one in run["headlines"]] for name, run in runs.items()}
    assert labels["after"] == ["kind"] and labels["sft"] == ["loss kind"]
    assert labels["ditto"][0].startswith("dev (step ") and labels["ditto"][1] == "drafts kind"
    mean = json.loads((RECORDED / "after" / "summary.json").read_text())["tasks"]["kind"]["value"]
    assert runs["after"]["headlines"][0]["mean"] == mean["mean"]
    assert runs["judged"]["unpriced_calls"] == 3 and runs["judged"]["cost"] is None
    table, err = streams_of(capfd, "runs", RECORDED)
    assert "unknown" in table and "model + ditto/model" in table
    assert err.startswith("next: soul report ")


def test_a_suite_that_is_whole_is_known_by_its_mean(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    members = load_registry().suite_spec("soul-10").members
    cell = Cell(mean=0.25, n=40, n_scored=40, variance=0.001, df=20.0, n_clusters=40, headline=True)
    for name, played in (("whole", members), ("partial", members[1:])):
        cells = {task: {"value": cell} for task in played}
        whole = Summary(command="eval api", model="m", tasks=cells, suite="soul-10")
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(whole.to_json()))
    runs = {run["name"]: run["headlines"] for run in listed(tmp_path, capfd)}
    assert [one["label"] for one in runs["partial"]] == list(members[1:])
    first, *others = runs["whole"]
    assert first["label"] == "suite soul-10" and first["mean"] == pytest.approx(0.25)
    assert [one["label"] for one in others] == list(members)
    table, _ = streams_of(capfd, "runs", tmp_path)
    assert f"and {len(members) - 2} more" in table


def test_the_newest_come_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, started in (("a", "2026-01-02T00:00:00+00:00"), ("b", "2026-01-03T09:00:00+02:00"),
                          ("c", "2026-01-03T08:00:00+00:00"), ("d", "no date")):  # fmt: skip
        shutil.copytree(RECORDED / "after", tmp_path / name)
        path = tmp_path / name / "environment.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "started": started}))
    assert [run["name"] for run in listed(tmp_path, capfd)] == ["c", "b", "a", "d"]


@pytest.mark.parametrize("file", ["summary.json", "environment.json", "config.yaml"])
def test_a_damaged_run_is_named_and_hides_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str
) -> None:
    for name in ("good", "bad"):
        shutil.copytree(RECORDED / "after", tmp_path / name)
    (tmp_path / "bad" / file).write_text("[1")
    runs = {run["name"]: run for run in listed(tmp_path, capfd)}
    assert runs["good"]["state"] == "finished"
    assert runs["bad"]["state"] == "damaged" and runs["bad"]["problem"]
    assert "damaged: " in streams_of(capfd, "runs", tmp_path)[0]


def test_unfinished_runs_with_a_broken_line_are_damaged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(RECORDED / "after", out)
    (out / "summary.json").unlink()
    (out / "episodes.jsonl").write_text("no record\n" + (out / "episodes.jsonl").read_text())
    assert "episodes.jsonl:1" in listed(tmp_path, capfd)[0]["problem"]


@pytest.mark.slow
def test_names_stay_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    """They are what the next command is given."""
    name = "20261122-152102-eval-local-tomi"
    shutil.copytree(RECORDED / "before", tmp_path / name)
    soul_runs = (sys.executable, "-m", "soulkit.cli.app", "runs", str(tmp_path))
    shown = {
        width: subprocess.run(
            soul_runs, env={**os.environ, "COLUMNS": str(width)}, capture_output=True, text=True,
            check=True,
        ).stdout
        for width in (80, 160)
    }  # fmt: skip
    assert all(
        name in text and "[0.188, 0.812]" in text and "finished" in text for text in shown.values()
    )
    assert max(map(len, shown[80].splitlines())) <= 80
    assert "eval local" in shown[160] and "started" in shown[160]


def test_a_folder_without_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert listed(tmp_path, capfd) == []
    what, _, fix = three_lines(streams_of(capfd, "runs", tmp_path, code=2)[1])
    assert "There is no run in" in what and "soul demo" in fix
    _, err = streams_of(capfd, "runs", tmp_path / "nowhere", code=2)
    assert "does not exist" in three_lines(err)[0]


# -- what is next ----------------------------------------------------------------------------------


def next_commands(err: str) -> list[str]:
    lines = [line for line in err.splitlines() if line.startswith("next: ")]
    assert len(lines) == 1 and err.splitlines()[-1] == lines[0]
    return lines[0].removeprefix("next: ").split("; ")


def test_odd_cells_name_the_command_that_shows_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    broken = {2: Fault.status_error(400, "no such thing")}
    with ScriptedServer(answer="no tag", script=broken) as server:
        assert api(server.base_url, out, "--concurrency", 1) == 1
    lines = (f"5 no_tag: soul show {out} --status no_tag",
             f"1 unscored: soul show {out} --status unscored")  # fmt: skip
    err = capfd.readouterr().err
    assert all(line in err for line in lines)
    table, _ = streams_of(capfd, "report", out)
    assert table.splitlines()[-2:] == list(lines)
    for line, count in zip(lines, (5, 1), strict=True):
        words = line.partition("soul ")[2].split()
        assert len(json.loads(streams_of(capfd, *words, "--json")[0])) == count


def test_what_is_next_is_said_last_and_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, err = streams_of(capfd, "data", "synth", "tomi", "-n", 4, "-o", "my rows.jsonl")
    check, play = next_commands(err)
    assert check == "soul data check 'my rows.jsonl'"
    assert play == "soul eval api --model MODEL --task tomi --data 'my rows.jsonl'"
    with ScriptedServer(answer="<answer>A</answer>") as server:
        data = ("--task", "tomi", "--data", "my rows.jsonl", "--base-url", server.base_url)
        _, err = streams_of(capfd, "eval", "api", "--model", "m", *data, "--out", "runs/one")
        assert next_commands(err) == [
            "soul show runs/one --worst 10", "soul report runs/one --format html",
            "soul compare OTHER runs/one",
        ]  # fmt: skip
        text, err = streams_of(
            capfd, "eval", "api", "--model", "m", *data, "--out", "two", "--json"
        )
        assert json.loads(text)["n"] == 4 and "next:" not in err
    assert value(Path("two"))["n"] == 4
    assert "score " in streams_of(capfd, "show", "runs/one", "--worst", 10)[0]
    _, err = streams_of(capfd, "rescore", "runs/one", "--out", "three")
    assert next_commands(err) == ["soul report runs/one three", "soul show three"]
    streams_of(capfd, "report", "runs/one", "three")
