"""Odd row files: JSON lines, JSON, CSV, TSV and Parquet, damaged or made to exhaust the reader."""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from soulkit.data.files import read_rows
from soulkit.parse import parse_json
from tests.support.hostile import ODD_VALUES, Attack, mutations, seeds

Runner = Callable[[Attack, Iterable[Attack]], None]
ROW = {
    "data_source": "cast_of_people", "name": "Vera", "job": "teacher", "town": "Turku",
    "pet": "hen", "question": "How are things, Vera?", "kind": "person",
    "ways": "formally weather slowly", "reply": "Greetings! Heard about the rain? Anyway.",
}  # fmt: skip
ROWS = [ROW, {**ROW, "name": "Ivo", "town": "Graz"}, {**ROW, "name": "Nils", "pet": "goat"}]
COMMANDS = (
    ("data", "check", "FILE"),
    ("data", "dedupe", "FILE", "-o", "out.jsonl"),
    ("data", "split", "FILE", "--by", "name"),
    ("data", "show", "FILE", "--task", "cast_of_people", "--row", "1"),
    ("data", "show", "FILE", "--task", "cast_of_people", "--row", "1", "--json"),
    ("eval", "local", "--dry-run", "--model", "tiny", "--task", "cast_of_people", "--data", "FILE"),
)
FORMATS = ("jsonl", "json", "csv", "tsv", "parquet")


@cache
def content(form: str) -> bytes:
    if form in ("jsonl", "json"):
        return ("\n".join(map(json.dumps, ROWS)) if form == "jsonl" else json.dumps(ROWS)).encode()
    if form == "parquet":
        return parquet(pa.Table.from_pylist(ROWS))
    mark = "," if form == "csv" else "\t"
    lines = [list(ROW), *(row.values() for row in ROWS)]
    return "\n".join(mark.join(f'"{cell}"' for cell in line) for line in lines).encode()


def parquet(table: pa.Table, **options: Any) -> bytes:
    stream = pa.BufferOutputStream()
    pq.write_table(table, stream, **options)
    return bytes(stream.getvalue())


def attack(name: str, form: str, prepare: Callable[[Path], object], number: int = 0) -> Attack:
    """The attack `number` uses one of the commands; `prepare(path)` writes the file."""
    file = f"rows.{form}"
    command = [file if word == "FILE" else word for word in COMMANDS[number % len(COMMANDS)]]
    return Attack(name, command, lambda folder: prepare(folder / file))


def written(name: str, form: str, text: bytes, number: int = 0) -> Attack:
    return attack(name, form, lambda path: path.write_bytes(text), number)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("seed", seeds(9))
def test_damaged_rows(attack_all: Runner, form: str, seed: int) -> None:
    damaged = mutations(seed, content(form), 10 if seed else 2)
    attack_all(
        written("undamaged", form, content(form)),
        (written(name, form, text, seed + n) for n, (name, text) in enumerate(damaged)),
    )


def odd_texts() -> Iterator[tuple[str, bytes]]:
    """(format, content) of files whose rows or cells are odd as a whole."""
    good = json.dumps(ROW).encode()
    for value in ODD_VALUES:
        odd = b'{"data_source": "cast_of_people", "name": ' + value + good[good.index(b', "job"') :]
        yield "jsonl", good + b"\n" + odd + b"\n" + value
        yield "json", b"[" + good + b"," + odd + b"," + value + b"]"
        yield "csv", content("csv") + b"\n" + value + b"," + value
    for text in (
        b"",
        b"\n",
        b"\x00" * 1000,
        b"{",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\xff" * 99,
        content("jsonl").decode().encode("utf-16"),
        b'"',
        b"\r" * 5000,
        b",\n" * 5000,
        b"{%s}" % b",".join(b'"k%d": 0' % (n % 99_999) for n in range(100_000)),
    ):
        yield from ((form, text) for form in FORMATS)


@pytest.mark.hostile
@pytest.mark.parametrize("part", range(4))
def test_odd_rows(attack_all: Runner, part: int) -> None:
    attack_all(
        written("undamaged", "jsonl", content("jsonl")),
        (
            written(f"odd-{n}", form, text, n)
            for n, (form, text) in enumerate(odd_texts())
            if n % 4 == part
        ),
    )


def odd_tables() -> dict[str, bytes]:
    def beside(**columns: Any) -> bytes:
        good = {name: [value] * 2 for name, value in ROW.items()}
        return parquet(pa.table({**good, **columns}))

    nested: Any = 1
    for _ in range(150):
        nested = [nested]
    repeated = pa.DictionaryArray.from_arrays(
        pa.array([0] * 10_000, pa.int32()), pa.array(["x" * 1_000_000])
    )
    return {
        "date": beside(d=pa.array([1, 2**62], pa.timestamp("us"))),
        "day": beside(d=pa.array([1, 2**30], pa.int32()).cast(pa.date32())),
        "duration": beside(d=pa.array([1, 2**62], pa.duration("us"))),
        "bytes": beside(d=pa.array([b"ok", b"\xff"])),
        "bad text": beside(d=pa.array([b"ok", b"\xff\xfe"]).view(pa.string())),
        "infinite": beside(d=[float("inf"), float("nan")]),
        "time": beside(d=[datetime.time(1, 2), None], z=[datetime.timedelta(1), None]),
        "map": beside(d=pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64()))),
        "deep": beside(d=pa.array([nested, nested])),
        "bad packed": parquet(pa.table([pa.array(["{", "[" * 300])], pa.schema(
            [pa.field("a", pa.string(), metadata={b"soulkit.packed": b"json"})]))),
        "same name": parquet(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])),
        "no columns": parquet(pa.table({})),
        "text bomb": parquet(pa.table({"a": repeated})),
        "list bomb": parquet(pa.table({"a": pa.array([[0] * 5_000_000] * 2)}), compression="zstd"),
        "null bomb": parquet(pa.table({"a": pa.nulls(30_000_000)})),
    }  # fmt: skip


@pytest.mark.hostile
def test_odd_tables(attack_all: Runner) -> None:
    attack_all(
        written("undamaged", "parquet", content("parquet")),
        (written(name, "parquet", text, n) for n, (name, text) in enumerate(odd_tables().items())),
    )


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name if len(str(path)) > 100 else str(path))


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "itself": lambda path: path.symlink_to(path.name),
    "nowhere": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("form", ["jsonl", *(pytest.param(f, marks=pytest.mark.hostile)
                                             for f in FORMATS[1:])])  # fmt: skip
def test_what_is_no_regular_file(attack_all: Runner, form: str) -> None:
    attack_all(
        written("undamaged", form, content(form)),
        (
            attack(name, form, make, number)
            for name, make in ODD_FILES.items()
            for number in range(len(COMMANDS) if form != "jsonl" else 2)
        ),
    )


def test_one_bad_row_costs_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"n": 1}\n{"n": 2, "n": 3}\n' + b"[" * 99_999 + b'\n{"n": 1e999}\n\xff\n{"n": 4}\n'
    )
    (tmp_path / "b.parquet").write_bytes(
        parquet(pa.table({"n": [1, 2], "d": pa.array([1, 2**62], pa.timestamp("us"))}))
    )
    rows, bad = read_rows(tmp_path / "a.jsonl")
    assert [row.fields["n"] for row in rows] == [1, 4]
    assert [row.source for row in bad] == [f"a.jsonl:{n}" for n in (2, 3, 4, 5)]
    rows, bad = read_rows(tmp_path / "b.parquet")
    assert [row.fields["n"] for row in rows] == [1] and "b.parquet:2" in bad[0].source


@pytest.mark.parametrize("text", ['[["]]\\"]", "\\\\"]]', '{"a[{": [{"b": "}]"}]}', "[[1], [2]]"])
def test_brackets_in_texts_do_not_count_as_levels(text: str) -> None:
    depth = 4 if "b" in text else 2
    assert parse_json(text, depth=depth) == json.loads(text)
    with pytest.raises(ValueError, match="too deeply"):
        parse_json(text, depth=depth - 1 if "b" not in text else 2)
