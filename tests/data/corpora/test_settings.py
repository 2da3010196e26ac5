"""What names a source: settings as text, files, folders of shards, the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from soulkit.data.corpora.settings import (
    SourceSettings,
    hub_address,
    left_out_note,
    source_files,
    source_settings,
)
from soulkit.data.corpora.source import source_labels
from soulkit.errors import DataError
from tests.support.chats import chat, jsonl, parquet

TEXTS: dict[str, tuple[str, float]] = {
    "chats.jsonl": ("chats.jsonl", 1.0),
    "chats.jsonl:1.5": ("chats.jsonl", 1.5),
    "chats.jsonl:.5": ("chats.jsonl", 0.5),
    "chats.jsonl:2": ("chats.jsonl", 2.0),
    "a b/*.parquet:0.25": ("a b/*.parquet", 0.25),
    r"C:\chats\a.jsonl": (r"C:\chats\a.jsonl", 1.0),
    r"C:\chats\a.jsonl:3": (r"C:\chats\a.jsonl", 3.0),
    "owner/name:train": ("owner/name:train", 1.0),
    "owner/name@v1.5/en:train:1.5": ("owner/name@v1.5/en:train", 1.5),
    "owner/name@1.5": ("owner/name@1.5", 1.0),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_ratio_stands_after_the_last_colon(text: str):
    source = source_settings(text)
    assert (source.path, source.ratio) == TEXTS[text]
    assert source_settings({"path": text}).path == text


def test_a_file_of_that_very_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a:2", [])
    assert source_settings("a:2") == SourceSettings(path="a:2")


@pytest.mark.parametrize(
    "value", [{}, {"path": " "}, "a.jsonl:0", {"path": "a", "ratio": -1}, {"path": "a", "turns": 0},
              {"path": "a", "sides": "human"}, {"path": "a", "side": ""}],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(value: Any):
    with pytest.raises(ValidationError):
        source_settings(value)


HUB: dict[str, tuple[str | None, ...] | None] = {
    "owner/name": ("owner/name", None, None, None),
    "owner/name@1f2e": ("owner/name", "1f2e", None, None),
    "owner/name/en": ("owner/name", None, "en", None),
    "owner/name:validation": ("owner/name", None, None, "validation"),
    "owner/name@v1.0/en:test": ("owner/name", "v1.0", "en", "test"),
    "owner/name.jsonl": None,
    "owner/*": None,
    "name": None,
    "/owner/name": None,
    "./owner/name": None,
    "../name": None,
}


@pytest.mark.parametrize("path", HUB)
def test_what_is_not_here_and_looks_like_a_data_set_is_one(path: str):
    match = hub_address(path)
    assert (match and match.groups()) == HUB[path]


def test_what_is_here_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "owner" / "name" / "a.jsonl", [chat(1)])
    assert hub_address("owner/name") is None
    assert source_files("owner/name") == [Path("owner/name/a.jsonl")]


FOLDERS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "shards": (["train_shard_0.parquet", "train_shard_1.parquet", "notes.jsonl"],
               ["train_shard_0.parquet", "train_shard_1.parquet"], []),
    "splits": (["data/train-00000-of-00001.parquet", "data/validation-00000-of-00001.parquet"],
               ["data/train-00000-of-00001.parquet"], ["data/validation-00000-of-00001.parquet"]),
    "folders": (["train/a.jsonl", "train/b.jsonl", "val/a.jsonl", "readme.csv"],
                ["train/a.jsonl", "train/b.jsonl"], ["val/a.jsonl"]),
    "any Parquet": (["my_train.parquet", "my_val.parquet", "my_train.jsonl"],
                    ["my_train.parquet"], ["my_val.parquet"]),
    "named": (["train.jsonl", "validation.jsonl", "more.jsonl"],
              ["train.jsonl"], ["validation.jsonl"]),
    "chats": (["monday.jsonl", "tuesday.json", "test.jsonl", ".hidden.jsonl", "notes.txt"],
              ["monday.jsonl", "tuesday.json"], []),
}  # fmt: skip


@pytest.mark.parametrize("layout", FOLDERS)
def test_the_shards_of_a_folder(tmp_path: Path, layout: str):
    names, train, validation = FOLDERS[layout]
    for name in names:
        path = tmp_path / name
        if path.suffix == ".parquet":
            parquet(path, [chat(1)])
        else:
            jsonl(path, [chat(1)])
    assert [p.relative_to(tmp_path).as_posix() for p in source_files(str(tmp_path))] == train
    if not validation:
        with pytest.raises(DataError, match="contains no validation files"):
            source_files(str(tmp_path), "validation")
    else:
        paths = source_files(str(tmp_path), "validation")
        assert [p.relative_to(tmp_path).as_posix() for p in paths] == validation


@pytest.mark.parametrize("layout", FOLDERS)
def test_the_note_on_files_left_out_gives_a_pattern_that_reads_them(tmp_path: Path, layout: str):
    names, train, _ = FOLDERS[layout]
    for name in names:
        jsonl(tmp_path / name, [])
    note = left_out_note(str(tmp_path))
    pattern = note.split("'")[-2]
    every_row = {n for n in names if not n.startswith(".") and not n.endswith(".txt")}
    assert all(name in note for name in every_row - set(train))
    assert {str(p.relative_to(tmp_path)) for p in source_files(pattern)} == every_row


def test_there_is_no_note_if_all_files_are_read(tmp_path: Path):
    jsonl(tmp_path / "a.jsonl", [])
    jsonl(tmp_path / "latest.jsonl", [])
    assert not left_out_note(str(tmp_path))
    assert not left_out_note(str(tmp_path / "a.jsonl"))
    for n in range(7):
        jsonl(tmp_path / f"test {n}.jsonl", [])
    assert "test 4.jsonl and 2 more;" in left_out_note(str(tmp_path))


def test_a_pattern_finds_row_files_alone(tmp_path: Path):
    for name in ("a.jsonl", "b/c.jsonl", "d.txt"):
        jsonl(tmp_path / name, [chat(1)])
    paths = source_files(f"{tmp_path}/**/*")
    assert [p.name for p in paths] == ["a.jsonl", "c.jsonl"]


def test_sources_have_names_that_tell_them_apart():
    texts = ["a/x.jsonl", "b/x.jsonl", "y.parquet", "y.parquet", "owner/name:train"]
    labels = source_labels([source_settings(t) for t in texts])
    assert labels[0] == "x (a/x.jsonl)" and labels[1] == "x (b/x.jsonl)"
    assert labels[4] == "owner/name" and len(set(labels)) == 5
