"""Pulling released files: one commit, a lock, and nothing of the user's replaced."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from soulkit.data.hub import CORPORA, LOCK, FileRequest, corpus_files, pull_files, released
from soulkit.errors import ConfigError, DataError
from soulkit.tasks.kit.registry import load_registry
from tests.support.hub import (
    AGAIN,
    EVAL,
    EVALS,
    HITOM,
    HITOM_FILE,
    HITOM_TRAIN,
    NOTES,
    PARATOMI,
    TRAIN,
    alone_with_the_hub,
    client,
    lines,
    names_in,
    want,
)
from tests.support.servers.hub_server import HubServer, commit_of

NEWER = {**EVALS, "hitom_val.parquet": PARATOMI}
QUIET = {LOCK, ".soul-data.pulling"}


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone_with_the_hub(tmp_path, monkeypatch)


def test_files_arrive_with_a_lock_that_says_where_from(tmp_path: Path) -> None:
    with HubServer({EVAL: EVALS}) as server:
        pulled = pull_files(client(server), want(*EVALS), tmp_path)
    assert [f.state for f in pulled] == ["downloaded"] * 3
    assert {n: (tmp_path / n).read_bytes() for n in EVALS} == EVALS
    assert names_in(tmp_path) == {*EVALS, *QUIET}
    lock = json.loads((tmp_path / LOCK).read_text())
    assert lock["repos"] == {EVAL: commit_of(EVALS)}
    for name, content in EVALS.items():
        sha256 = hashlib.sha256(content).hexdigest()
        expected = {"repo": EVAL, "path": name, "sha256": sha256, "bytes": len(content)}
        assert lock["files"][name] == {**expected, "revision": commit_of(EVALS)}


def test_what_the_lock_vouches_for_costs_no_request(tmp_path: Path) -> None:
    with HubServer({EVAL: EVALS}) as server:
        pull_files(client(server), want(*EVALS), tmp_path)
        server.requests.clear()
        assert {f.state for f in pull_files(client(server), want(*EVALS), tmp_path)} == {"kept"}
        assert server.requests == []


def test_files_without_a_lock_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "hitom_val.parquet").write_bytes(HITOM)
    with HubServer({EVAL: EVALS}) as server:
        assert pull_files(client(server), HITOM_FILE, tmp_path)[0].state == "kept"
        assert server.sent == 0
    assert "hitom_val.parquet" in json.loads((tmp_path / LOCK).read_text())["files"]


def test_a_mirror_that_lists_only_names_is_asked_for_checksums(tmp_path: Path) -> None:
    with HubServer({EVAL: EVALS}, plain_listing=True) as server:
        pull_files(client(server), want(*EVALS), tmp_path)
        assert len(server.paths("HEAD")) == 3
    assert {n: (tmp_path / n).read_bytes() for n in EVALS} == EVALS


def test_a_file_in_a_folder_of_the_data_set_is_found_by_its_name(tmp_path: Path) -> None:
    with HubServer({EVAL: {"data/hitom_val.parquet": HITOM, "data/x.jsonl": NOTES}}) as server:
        pulled = pull_files(client(server), HITOM_FILE, tmp_path)[0]
    assert pulled.entry.path == "data/hitom_val.parquet"
    assert (tmp_path / "hitom_val.parquet").read_bytes() == HITOM


# -- one commit ----------------------------------------------------------------------------------


def test_a_data_set_stays_at_the_commit_of_its_first_pull(tmp_path: Path) -> None:
    with HubServer({EVAL: EVALS}) as server:
        pull_files(client(server), want("paratomi_val.parquet"), tmp_path)
        newest = server.push(EVAL, NEWER)
        pull_files(client(server), HITOM_FILE, tmp_path)
        assert (tmp_path / "hitom_val.parquet").read_bytes() == HITOM
        assert (
            pull_files(client(server), HITOM_FILE, tmp_path, revision="main")[0].state
            == "downloaded"
        )
        assert (tmp_path / "hitom_val.parquet").read_bytes() == PARATOMI
        # The other file is now at an older commit than the data set; its bytes are the same.
        other = pull_files(client(server), want("paratomi_val.parquet"), tmp_path)[0]
    assert (other.state, other.entry.revision) == ("kept", newest)


def test_an_older_commit_can_be_named(tmp_path: Path) -> None:
    with HubServer({EVAL: NEWER}, older={EVAL: [EVALS]}) as server:
        pull_files(client(server), HITOM_FILE, tmp_path, revision=commit_of(EVALS))
        assert (tmp_path / "hitom_val.parquet").read_bytes() == HITOM
        assert all(commit_of(EVALS) in path for path in server.paths("GET"))


def test_a_commit_belongs_to_one_data_set(tmp_path: Path) -> None:
    requests = [*HITOM_FILE, *want("hitom_rl_train.parquet", repo=TRAIN)]
    files = {EVAL: EVALS, TRAIN: {"hitom_rl_train.parquet": HITOM_TRAIN}}
    with HubServer(files) as server:
        with pytest.raises(ConfigError, match="for several datasets") as error:
            pull_files(client(server), requests, tmp_path, revision=commit_of(EVALS))
        assert "--split" in error.value.way_out
        pull_files(client(server), requests, tmp_path, revision="main")
    assert set(json.loads((tmp_path / LOCK).read_text())["repos"]) == {EVAL, TRAIN}


# -- what is missing or in the way ---------------------------------------------------------------


def test_a_missing_file_names_the_nearest_and_the_others_arrive(tmp_path: Path) -> None:
    requests = want("hitom_vall.parquet", "paratomi_val.parquet")
    with HubServer({EVAL: EVALS}) as server, pytest.raises(DataError) as error:
        pull_files(client(server), requests, tmp_path)
    assert error.value.what == f"The dataset {EVAL} has no file 'hitom_vall.parquet'."
    assert "Similar names: 'hitom_val.parquet'" in error.value.why
    assert AGAIN in error.value.way_out
    assert names_in(tmp_path) == {"paratomi_val.parquet", *QUIET}


@pytest.mark.parametrize("pulled_before", [False, True])
def test_a_file_of_the_user_is_not_replaced(tmp_path: Path, pulled_before: bool) -> None:
    target = tmp_path / "hitom_val.parquet"
    with HubServer({EVAL: EVALS}) as server:
        if pulled_before:
            pull_files(client(server), HITOM_FILE, tmp_path)
        target.write_bytes(b"mine")
        with pytest.raises(DataError, match="already exists") as error:
            pull_files(client(server), HITOM_FILE, tmp_path)
    assert "--out" in error.value.way_out
    assert target.read_bytes() == b"mine"


def test_a_full_disk_is_told_before_the_first_byte(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=len(HITOM) - 1))
    with HubServer({EVAL: EVALS}) as server:
        with pytest.raises(DataError, match="not have enough free disk space"):
            pull_files(client(server), HITOM_FILE, tmp_path)
        assert server.sent == 0


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / ".soul-data.pulling").open("w") as handle, HubServer({EVAL: EVALS}) as server:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="Another process is downloading"):
            pull_files(client(server), HITOM_FILE, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 9}', '{"version": 1, "files": {}}'])
def test_a_broken_lock_file_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    with HubServer({EVAL: EVALS}) as server, pytest.raises(DataError, match="lock file") as error:
        pull_files(client(server), HITOM_FILE, tmp_path)
    assert "Delete it" in error.value.way_out


# -- corpora and tasks ---------------------------------------------------------------------------


def test_a_corpus_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    repo = CORPORA["post-training"]
    files = {"train/part-0.parquet": HITOM, "train/part-1.parquet": PARATOMI, "README.md": b"hello"}
    with HubServer({repo: files}) as server:
        requests, commit = corpus_files(client(server), "post-training", tmp_path)
        pull_files(client(server), requests, tmp_path, revision=commit)
    subfolder = repo.partition("/")[2]
    assert names_in(tmp_path) - QUIET == {f"{subfolder}/train/part-{i}.parquet" for i in (0, 1)}


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    with HubServer({CORPORA["mid-training"]: {"../../x.jsonl": NOTES}}) as server:
        with pytest.raises(DataError, match="outside its folder"):
            corpus_files(client(server), "mid-training", tmp_path)
        with pytest.raises(ConfigError, match="no corpus") as error:
            corpus_files(client(server), "midtraining", tmp_path)
    assert "'mid-training'" in error.value.way_out


def test_tasks_name_their_files() -> None:
    specs = load_registry().specs
    files = {name: spec.files for name, spec in specs.items()}
    hitom, tomi = files["hitom"], files["tomi"]
    both = released({"hitom": hitom}, ("train", "eval"))
    assert both == [
        FileRequest(TRAIN, "hitom_rl_train.parquet", "hitom_rl_train.parquet", "hitom"),
        FileRequest(EVAL, "hitom_val.parquet", "hitom_val.parquet", "hitom"),
    ]
    assert released({"hitom": hitom, "tomi": tomi}, ("eval",)) == both[1:]
    with pytest.raises(DataError, match="'tomi' has no released file"):
        released({"tomi": tomi}, ("eval",))
    everything = released(files, ("train", "eval"))
    assert len({w.name for w in everything}) == len(everything)


def test_the_error_is_three_sentences_of_the_house(tmp_path: Path) -> None:
    with HubServer({EVAL: EVALS}) as server, pytest.raises(DataError) as error:
        pull_files(client(server), want("nothing_like_it"), tmp_path)
    assert "Similar names: none." in lines(error)
