"""`soul data pull` as a user runs it, and the commands that find the files afterwards."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from soulkit.cli import app as cli
from soulkit.cli import console
from soulkit.data.files import data_folder, released_files
from soulkit.errors import DataError
from soulkit.eval.config import EvalConfig, load_work
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.setup.data import training_rows
from tests.support.hub import EVAL, EVALS, HITOM, HITOM_TRAIN, TRAIN, alone_with_the_hub, names_in
from tests.support.servers.hub_server import HubServer, commit_of

TRAINS = {"hitom_rl_train.parquet": HITOM_TRAIN}


@pytest.fixture
def hub_soul(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alone_with_the_hub(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(list(arguments))
        streams = capfd.readouterr()
        return code, streams.out, streams.err

    return run


def test_what_was_pulled_is_found_without_data(hub_soul, monkeypatch) -> None:
    with HubServer({EVAL: EVALS, TRAIN: TRAINS}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
        code, out, err = hub_soul("data", "pull", "--task", "hitom")
    assert code == 0
    assert f"{EVAL} at {commit_of(EVALS)[:12]}: 1 file to download" in err
    assert "pull: 36.2 kB/36.2 kB (" in err
    assert "hitom_val.parquet" in out
    assert "in data; where from: data/soul-data.lock.json" in out
    assert "21.6 kB" in out
    work = load_work(EvalConfig(kind="api", model="m", tasks=("hitom",)))
    assert len(work[0].examples) == 40
    task = load_registry().task("hitom")
    config = TrainConfig(method="grpo", model="tiny", tasks={"hitom": 1.0})
    rows = training_rows(task, config)
    assert {row.split for row in rows} == {"train"}
    assert len(rows) == 12
    code, out, _ = hub_soul("eval", "api", "--model", "m", "--task", "hitom", "--dry-run", "--json")
    assert (code, json.loads(out)["episodes"]) == (0, 40)


def test_a_folder_of_its_own_and_json(hub_soul, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOULKIT_DATA", str(tmp_path / "rows"))
    command = ("data", "pull", "--suite", "tom", "--split", "eval", "--json")
    with HubServer({EVAL: EVALS}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        first, again = hub_soul(*command), hub_soul(*command)
        other = hub_soul(*command[:-1], "--out", "elsewhere", "--revision", commit_of(EVALS))
    files = json.loads(first[1])["files"]
    assert [f["state"] for f in files] == ["downloaded", "downloaded"]
    assert files[0]["name"] == "hitom_val.parquet"
    assert files[0]["file"] == str(tmp_path / "rows" / "hitom_val.parquet")
    assert (files[0]["repo"], files[0]["bytes"]) == (EVAL, len(HITOM))
    assert [f["state"] for f in json.loads(again[1])["files"]] == ["kept", "kept"]
    # Files whose structs have other keys are not joined into one table.
    work = load_work(EvalConfig(kind="api", model="m", tasks=("hitom", "paratomi")))
    assert [(len(part.examples), part.bad) for part in work] == [(40, ()), (9, ())]
    assert other[0] == 0
    assert "hitom_val.parquet" in names_in(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (("--split", "evl"), "no split 'evl'", "'eval'"),
        (("--task", "hitmo"), "no task named 'hitmo'", "'hitom'"),
        (("--suite", "tm"), "no suite named 'tm'", "'tom'"),
        (("--task", "tomi"), "'tomi' has no released file", "soul data import"),
        (("--task", "hitom", "--suite", "tom"), "--task and --suite do not go", "Keep one"),
        (("--corpus", "mid-training", "--split", "eval"), "do not go together", "Keep one"),
        (("--corpus", "mid"), "no corpus named 'mid'", "mid-training"),
    ],
)
def test_slips(hub_soul, arguments: tuple[str, ...], what: str, fix: str) -> None:
    code, out, err = hub_soul("data", "pull", *arguments)
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 3)
    assert what in lines[0]
    assert fix in lines[2]


def test_where_nothing_was_pulled_the_command_is_told(hub_soul, tmp_path: Path) -> None:
    assert data_folder() == Path("data")
    code, _, err = hub_soul("eval", "api", "--model", "m", "--task", "hitom")
    assert code == 2
    assert "the folder 'data' (the default, as SOULKIT_DATA is not set)" in err
    assert "soul data pull --task hitom --split eval" in err
    config = TrainConfig(method="grpo", model="tiny", tasks={"hitom": 1.0})
    with pytest.raises(DataError, match="no training data") as error:
        training_rows(load_registry().task("hitom"), config)
    assert "soul data pull --task hitom --split train" in error.value.way_out


def test_a_part_of_the_files_is_not_taken_for_all(tmp_path: Path) -> None:
    (tmp_path / "one.parquet").write_bytes(HITOM)
    assert released_files("t", ["none.parquet"], str(tmp_path)) == []
    assert released_files("t", ["one.parquet"], str(tmp_path)) == [tmp_path / "one.parquet"]
    with pytest.raises(DataError, match="only 1 of the 2 files") as error:
        released_files("t", ["one.parquet", "two.parquet"], str(tmp_path))
    assert "two.parquet" in error.value.why
    assert "soul data pull --task t" in error.value.way_out


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_340_000, "2.3 MB"), (7.7e12, "7700.0 GB")],
)
def test_sizes(count: float, words: str) -> None:
    assert console.size(count) == words


def test_a_terminal_shows_bytes_rate_and_rest(monkeypatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=shown, force_terminal=True, width=120))
    with console.progress(4_000_000, "pull", console.size) as bar:
        bar.advance(1_000_000, "hitom_val.parquet")
        time.sleep(0.01)
        bar.advance(1_000_000)
    assert "2.0 MB/4.0 MB" in shown.getvalue()
    assert re.search(r"[0-9.]+ [MG]B/s, \d+ s left, hitom_val.parquet", shown.getvalue())
