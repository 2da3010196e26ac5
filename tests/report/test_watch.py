"""`soul report --watch` beside a real evaluation that a slow server keeps going."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from soulkit.runs.records import scored_keys
from tests.support.evaluation import Body, api, oracle, soul, start, three_lines
from tests.support.servers.openai_server import ScriptedServer

REFRESH = '<meta http-equiv="refresh" content="1">'
ROWS = 6


@contextmanager
def going(out: Path) -> Iterator[tuple[subprocess.Popen[str], Callable[[int], None]]]:
    """An evaluation in a process of its own, and a function that lets it answer so many rows."""
    gold, permits = oracle("tomi", ROWS), threading.Semaphore(0)

    def answer(body: Body) -> str:
        assert permits.acquire(timeout=60)
        return gold(body)

    with ScriptedServer(answer=answer) as server:
        process = start(
            "eval", "api", "--model", "m", "--base-url", server.base_url, "--out", out,
            "--task", "tomi", "--data", f"synth:{ROWS}", "--concurrency", "1",
        )  # fmt: skip
        try:
            yield process, lambda n: permits.release(n)
        finally:
            permits.release(ROWS)
            process.communicate(timeout=60)


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.is_file() else ""


@pytest.mark.slow
def test_the_page_follows_a_run_until_it_is_finished(tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "page.html"
    with going(run) as (evaluation, let):
        let(2)
        episodes = run / "episodes.jsonl"
        wait_until(lambda: episodes.is_file() and len(scored_keys(episodes)) == 2)
        watching = start("report", run, "--watch", "--every", "1", "--out", page)
        wait_until(lambda: "2 of 6 episodes" in text(page))
        assert REFRESH in text(page) and "reloads every 1 s" in text(page)
        let(2)
        wait_until(lambda: "4 of 6 episodes" in text(page))
        assert text(page).endswith("</html>") and watching.poll() is None
        let(2)
        out, err = watching.communicate(timeout=60)
    assert evaluation.returncode == 0 and watching.returncode == 0
    assert out == f"{page}\n"
    said = [line.partition(" ")[2] for line in err.splitlines()]
    assert said[0] == "run: 2 of 6 episodes" and said[-1] == "run: finished"
    assert len(said) == len(set(said))
    assert 'http-equiv="refresh"' not in text(page) and "reloads" not in text(page)
    assert "Unfinished" not in text(page)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


@pytest.mark.slow
def test_ctrl_c_leaves_a_page_that_does_not_reload(tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "folder" / "index.html"
    with going(run) as (evaluation, let):
        let(1)
        wait_until((run / "episodes.jsonl").is_file)
        watching = start("report", run, "--watch", "--every", "1", "--out", page.parent)
        wait_until(lambda: REFRESH in text(page))
        evaluation.send_signal(signal.SIGINT)
        assert watching.stderr
        lines = iter(watching.stderr.readline, "")
        assert any(line.rstrip().endswith("episodes (stopped)") for line in lines)
        watching.send_signal(signal.SIGINT)
        out, _ = watching.communicate(timeout=60)
    assert watching.returncode == 130 and out == f"{page}\n"
    assert "Unfinished" in text(page) and 'http-equiv="refresh"' not in text(page)


def test_finished_runs_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(answer=oracle("tomi", ROWS)) as server:
        assert api(server.base_url, tmp_path / "run") == 0
    capsys.readouterr()
    assert soul("report", tmp_path / "run", "--watch") == 0
    page = tmp_path / "run" / "report" / "index.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert 'http-equiv="refresh"' not in text(page)


def test_other_formats_cannot_be_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soul("report", tmp_path, "--watch", "--format", "md") == 2
    assert three_lines(capsys.readouterr().err)[0] == "--watch does not work with --format md."
