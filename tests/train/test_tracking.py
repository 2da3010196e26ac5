"""Trackers with their real packages, offline: one run through kills, nothing told twice."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from soulkit.train.state.metrics import Learned, StepLine
from soulkit.train.state.tracking import TRACKING, MetricsTracker, make_tracker
from tests.support.training import lines_of, random_model, soul

SECRET = "very-secret-0123456789abcdef"


def log_all(tracker: MetricsTracker, steps: range) -> None:
    for step in steps:
        tracker.log(StepLine(step=step, learned=Learned(loss=1.0 + step)))
    tracker.close()


def entry(run: Path, package: str) -> dict[str, object]:
    noted: dict[str, object] = json.loads((run / TRACKING).read_text())[package]
    return noted


# -- TensorBoard -----------------------------------------------------------------------------------


def test_tensorboard_forgets_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_all(make_tracker("tensorboard", tmp_path, {}), range(5))
    log_all(make_tracker("tensorboard", tmp_path, {}), range(3, 7))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("loss/total")
    assert [one.step for one in scalars] == list(range(7))
    assert [one.value for one in scalars] == [1.0 + step for step in range(7)]


# -- trackio ---------------------------------------------------------------------------------------


@pytest.fixture
def trackio_folder(tmp_path: Path) -> dict[str, str]:
    pytest.importorskip("trackio")
    return {"TRACKIO_DIR": str(tmp_path / "trackio"), "TRACKIO_PROJECT": "people"}


PLAY = """
import sys
from pathlib import Path
from soulkit.api_keys import remember
from tests.train.test_tracking import SECRET, log_all
from soulkit.train.state.tracking import make_tracker
package, run, first, last = sys.argv[1:5]
remember(SECRET)
tracker = make_tracker(package, Path(run), {"steps": 9, "note": f"a {SECRET}"})
log_all(tracker, range(int(first), int(last)))
"""


def play(package: str, run: Path, first: int, last: int, env: dict[str, str]) -> str:
    """Some steps in a process of their own, as a resumed command is; what it says on stderr."""
    run.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", PLAY, package, str(run), str(first), str(last)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # it belongs to results
    return done.stderr


@pytest.mark.slow
def test_trackio_goes_on_with_the_run_and_is_told_each_step_once(
    tmp_path: Path, trackio_folder: dict[str, str]
) -> None:
    run = tmp_path / "run"
    play("trackio", run, 0, 4, trackio_folder)
    first = entry(run, "trackio")
    play("trackio", run, 2, 6, trackio_folder)
    assert entry(run, "trackio") == {**first, "step": 5} and first["step"] == 3
    other = tmp_path / "elsewhere" / "run"
    other.parent.mkdir()
    play("trackio", other, 0, 1, trackio_folder)
    assert entry(other, "trackio")["id"] != first["id"]
    rows = subprocess.run(
        [sys.executable, "-c", "import json; from trackio.sqlite_storage import SQLiteStorage as S;"
         f"print(json.dumps(S.get_logs('people', {first['name']!r})))"],
        env={**os.environ, **trackio_folder}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    logs = json.loads(rows.stdout.splitlines()[-1])
    assert [(one["step"], one["loss/total"]) for one in logs] == [(n, 1.0 + n) for n in range(6)]
    stored = b"".join(p.read_bytes() for p in (tmp_path / "trackio").rglob("*") if p.is_file())
    assert b"loss/total" in stored and SECRET.encode() not in stored


# -- Weights & Biases ------------------------------------------------------------------------------


def histories(run: Path, id: str) -> list[tuple[int, float]]:
    """(step, loss) that offline wandb keeps under one id, in the order they were told."""
    from wandb.proto.wandb_internal_pb2 import Record

    logged = []
    for file in sorted(run.glob(f"wandb/offline-run-*-{id}/run-{id}.wandb")):
        for data in log_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {i.key or "/".join(i.nested_key): i.value_json
                         for i in record.history.item}  # fmt: skip
                logged.append((int(items["_step"]), float(items["loss/total"])))
    return logged


def log_records(log: bytes) -> Iterator[bytes]:
    """The records of a log as LevelDB writes it: blocks of 32 KiB, parts with crc, size, type."""
    place, record = 7, b""  # behind the head of the file
    while place + 7 <= len(log):
        room = 32_768 - place % 32_768
        if room < 7:  # too little for a part: zeros
            place += room
            continue
        size, kind = struct.unpack("<HB", log[place + 4 : place + 7])
        record += log[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_goes_on_with_the_run_and_is_told_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    env = {"WANDB_MODE": "offline", "WANDB_PROJECT": "people", "WANDB_SILENT": "true"}
    play("wandb", run, 0, 4, env)
    first = entry(run, "wandb")
    assert (first["project"], first["name"], first["step"]) == ("people", "run", 3)
    play("wandb", run, 2, 6, env)
    assert entry(run, "wandb") == {**first, "step": 5}
    assert histories(run, str(first["id"])) == [(n, 1.0 + n) for n in range(6)]
    stored = b"".join(p.read_bytes() for p in (run / "wandb").rglob("*") if p.is_file())
    assert b"people" in stored and SECRET.encode() not in stored


@pytest.mark.slow
def test_a_run_whose_tracker_fails_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is logged in at the service."""
    pytest.importorskip("wandb")
    random_model(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name, value in {"WANDB_MODE": "online", "NETRC": "none", "HOME": str(tmp_path),
                        "WANDB_BASE_URL": "http://127.0.0.1:9"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert soul("train", "sft", "--model", "base", "--task", "tomi", "--data", "tomi=synth:20",
                "--batch", 2, "--steps", 2, "--track", "wandb", "--out", "run") == 0  # fmt: skip
    assert len(lines_of(tmp_path / "run")) == 2
    assert capsys.readouterr().err.count("wandb failed and is left out from here on") == 1


def test_what_a_tracker_raises_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where its folder would be")
    log_all(make_tracker("tensorboard", tmp_path, {}), range(3))
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("tensorboard failed and is left out from here on (")
    assert "the run goes on, metrics.jsonl has every step" in errors[0]
