"""Disks that become full: on a small one, then on a larger one. Nothing is lost or paid twice."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from soulkit.runs.records import scored_keys
from tests.hostile.test_machine_limits import evaluation, stored
from tests.support.hostile import Attack, faults
from tests.support.hub import EVAL, EVALS, HITOM, alone_with_the_hub
from tests.support.odd_runs import make_training, training
from tests.support.servers.hub_server import HubServer
from tests.support.servers.openai_server import ScriptedServer

Disk = Callable[[int], Path]
SHARES = (0.02, *(pytest.param(n, marks=pytest.mark.hostile) for n in (0.2, 0.4, 0.6, 0.8, 0.95)))
"""Sizes of the disk, as shares of what the command writes."""
ROOM = 400_000
"""Kilobytes in which everything fits."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A function that gives a disk of so many kilobytes its size, and returns its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(kilobytes: int) -> Path:
        again = "remount," * os.path.ismount(folder)
        options = f"{again}size={max(4, kilobytes)}k"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False,
            capture_output=True,
        )  # fmt: skip
        if done.returncode:
            pytest.skip("this machine does not allow mounting a small disk")
        return folder

    yield resize
    subprocess.run(["umount", "-l", folder], check=False, capture_output=True)


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer="(A) somewhere") as running:
        yield running


@pytest.fixture(scope="module")
def made(server: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an evaluation, a base model, and a training on it."""
    folder = tmp_path_factory.mktemp("made")
    runs(evaluation(server, str(folder / "run"), 30), folder)
    make_training(folder)
    return folder


def runs(command: list[str], folder: Path, codes: tuple[int, ...] = (0,)) -> list[str]:
    """Run the command in an empty folder; what went wrong."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    attack = Attack(" ".join(command[:2]), command, lambda folder: None, frozenset(codes))
    return faults(attack, work, megabytes=3_000)


def kilobytes(folder: Path) -> int:
    """What the files of a folder occupy, in pages of 4 kB."""
    return sum((file.stat().st_size + 4095) // 4096 * 4 for file in folder.rglob("*"))


def fills(command: list[str], disk: Disk, share: float, tmp_path: Path) -> list[str]:
    """Run the command on a disk with `share` of the room that it needs; what went wrong."""
    folder = disk(ROOM)
    assert runs(command, tmp_path) == []
    size, files = kilobytes(folder), sizes(folder)
    empty(folder)
    disk(int(size * share))
    bad = runs(command, tmp_path, (0, 1, 2))
    late = {name for name, size in sizes(folder).items() if size < 0.99 * files.get(name, 0)}
    return bad + [f"a part of {name}" for name in late if not name.startswith("run")]


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def sizes(folder: Path) -> dict[str, int]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


@pytest.mark.parametrize("share", SHARES)
def test_an_evaluation_goes_on(
    disk: Disk, tmp_path: Path, server: ScriptedServer, share: float
) -> None:
    run = disk(ROOM) / "run"
    command = evaluation(server, str(run), 30)
    assert fills(command, disk, share, tmp_path) == []
    disk(ROOM)
    before, sent = stored(run), len(server.requests)
    assert runs(command, tmp_path) == []
    assert len(server.requests) - sent == 30 - before
    assert len(scored_keys(run / "episodes.jsonl")) == 30


WRITERS = {
    "page": ("report", "{made}/run", "--out", "{disk}/page.html"),
    "csv": ("report", "{made}/run", "--format", "episodes-csv", "--out", "{disk}/rows.csv"),
    "rescore": ("rescore", "{made}/run", "--out", "{disk}/again", "--trust"),
    "ledger": ("ledger", "export", "{made}/run", "--out", "{disk}/calls.jsonl"),
    "synth": ("data", "synth", "tomi", "--rows", "200", "--out", "{disk}/rows.jsonl"),
    "export": ("export", "{made}/train", "--adapter", "--out", "{disk}/model"),
    "merged": ("export", "{made}/train", "--merge", "--out", "{disk}/model"),
    "task": ("tasks", "new", "mine", "--python", "--out", "{disk}/mine"),
}


@pytest.mark.hostile
@pytest.mark.parametrize("share", [0.02, 0.5, 0.95])
@pytest.mark.parametrize("name", WRITERS)
def test_what_a_command_writes_is_whole_or_not_there(
    disk: Disk, tmp_path: Path, made: Path, name: str, share: float
) -> None:
    folder = disk(ROOM)
    command = [word.format(made=made, disk=folder) for word in WRITERS[name]]
    assert fills(command, disk, share, tmp_path) == []
    disk(ROOM)
    assert runs(command, tmp_path, (0, 2)) == []  # 2: everything did fit and is there
    there = sizes(folder).keys()
    empty(folder)
    assert runs(command, tmp_path) == []
    assert there == sizes(folder).keys()


@pytest.mark.hostile
@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("method", ["sft", "ditto"])
def test_a_training_goes_on(
    disk: Disk, tmp_path: Path, made: Path, method: str, share: float
) -> None:
    from tests.support.training import lines_of

    folder = disk(ROOM)
    command = training(method, made / "model", folder / "run", steps=3)
    untouched = [*command[:-1], str(tmp_path / "untouched")]
    assert runs(untouched, tmp_path) == []
    assert fills(command, disk, share, tmp_path) == []
    disk(ROOM)
    assert runs(command, tmp_path) == []
    assert lines_of(folder / "run") == lines_of(tmp_path / "untouched")
    weights = "model/adapter_model.safetensors"
    assert (folder / "run" / weights).read_bytes() == (
        tmp_path / "untouched" / weights
    ).read_bytes()


@pytest.mark.hostile
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
def test_a_pull_goes_on(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    alone_with_the_hub(tmp_path, monkeypatch)
    with HubServer({EVAL: EVALS}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        folder = disk(ROOM)
        command = ["data", "pull", "--task", "hitom", "--split", "eval", "--out", str(folder)]
        disk(int(len(HITOM) / 1024 * share))
        assert runs(command, tmp_path, (0, 1, 2)) == []
        disk(ROOM)
        assert runs(command, tmp_path) == []
    assert (folder / "hitom_val.parquet").read_bytes() == HITOM
