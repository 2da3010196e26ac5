"""Exports are opened, and their records streamed, whatever form they have."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.exports.layouts import HEAD, ExportFile
from soulkit.data.exports.reading import open_export, recognise
from soulkit.data.exports.records import records, sample_of
from soulkit.data.files import BadRow
from soulkit.errors import DataError

ROWS: list[dict[str, Any]] = [{"n": n, "text": "ä" * n} for n in range(3)]
LINES = "\n".join(map(json.dumps, ROWS))
FORMS = {
    "array.json": json.dumps(ROWS, indent=1),
    "bom.json": "\ufeff" + json.dumps(ROWS),
    "data.json": json.dumps({"version": 1, "data": ROWS}),
    "lines.jsonl": LINES + "\n\n",
    "lines_bom.jsonl": "\ufeff" + LINES,
    "lines.json": LINES,
    "table.csv": "n,text\n" + "".join(f"{row['n']},{row['text']}\n" for row in ROWS),
    "table.tsv": "n\ttext\n" + "".join(f"{row['n']}\t{row['text']}\n" for row in ROWS),
}


def one(path: Path) -> ExportFile:
    (file,) = open_export(path)
    return file


@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_the_same_records(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FORMS[name], encoding="utf-8")
    rows = records(one(tmp_path / name))
    read = [{**row, "n": int(row["n"])} for _, row in rows]
    assert read == ROWS
    assert [{**row, "n": int(row["n"])} for row in sample_of(one(tmp_path / name))] == ROWS


def test_an_object_without_a_list_of_records_is_one_record_and_at_names_a_place(
    tmp_path: Path,
) -> None:
    value = {"name": "x", "chats": {"list": ROWS}}
    (tmp_path / "a.json").write_text(json.dumps(value))
    file = one(tmp_path / "a.json")
    assert [row for _, row in records(file)] == [value]
    assert [row for _, row in records(file, "chats.list.item")] == ROWS
    talk = {"conversations": [{"from": "human", "value": "hi"}]}
    (tmp_path / "b.json").write_text(json.dumps(talk))
    assert [row for _, row in records(one(tmp_path / "b.json"))] == [talk]


@pytest.mark.parametrize("name", ["cut.json", "cut.jsonl"])
def test_the_sample_of_a_record_longer_than_the_head_has_its_first_keys(
    tmp_path: Path, name: str
) -> None:
    long = {"first": [{"a": 1}], "text": "ä" * HEAD}
    text = json.dumps([long, long] if name == "cut.json" else long, ensure_ascii=False)
    (tmp_path / name).write_text(text, encoding="utf-8")
    (cut,) = sample_of(one(tmp_path / name))
    assert cut["first"] == [{"a": 1}]
    assert len(list(records(one(tmp_path / name)))) == 1 + (name == "cut.json")


@pytest.mark.parametrize("text", ["", "12.03.21, 10:00 - Ada: hi", "[", "null", "{\x00", "[1, 2]"])
def test_unknown_bytes_have_no_layout_and_raise_nothing_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match="none of the layouts"):
        recognise(tmp_path / "a.json")


def test_a_broken_line_is_named_and_a_damaged_array_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{broken\n{"n": 3}\n')
    read = [row for _, row in records(one(tmp_path / "a.jsonl"))]
    assert isinstance(read[1], BadRow) and read[1].source == "a.jsonl:2"
    assert [read[0], read[2]] == [{"n": 1}, {"n": 3}]
    (tmp_path / "b.json").write_text('[{"n": 1}, {"n": ')
    with pytest.raises(DataError, match="cannot be read"):
        list(records(one(tmp_path / "b.json")))


def test_a_zip_file_and_a_folder_have_the_same_files(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    (folder / "chats").mkdir(parents=True)
    (folder / "chats" / "b.json").write_text(json.dumps(ROWS))
    (folder / ".DS_Store").write_text("x")
    with zipfile.ZipFile(tmp_path / "export.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "chats" / "b.json", "chats/b.json")
        archive.writestr("__MACOSX/chats/b.json", "x")
    for path in (folder, tmp_path / "export.zip"):
        assert one(path).name == "chats/b.json"
        assert [row for _, row in records(one(path))] == ROWS


@pytest.mark.parametrize("kind", ["way out", "damaged", "bomb"])
def test_a_zip_file_that_cannot_be_trusted_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../a.json" if kind == "way out" else "a.json", "[]")
        if kind == "bomb":
            archive.filelist[0].file_size = 8 << 30
    if kind == "damaged":
        path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="cannot be read"):
        open_export(path)
