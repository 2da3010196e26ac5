"""Rows: formats, the released layout, identity, binding, limits and splits.

Whole combinations of values on one side: dev splits of training and `soul data split` alike.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.cli import app as cli
from soulkit.data.files import RawRow, read_rows, write_rows
from soulkit.data.literals import parse_candidates, parse_choices, parse_story
from soulkit.data.rows import (
    Column,
    ColumnsError,
    bind_columns,
    content_hash,
    dev_split,
    group_key,
    split_rows,
)
from soulkit.errors import ConfigError, DataError, UserError
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import load_examples
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig

ROW = {
    "story": "1 Ada entered the loft.\n2 The pen is in the jar.",
    "question": "Where is the pen really?",
    "answer": "jar",
    "cands": ["jar", "urn"],
    "question_type": "reality",
    "order": 0,
}


@pytest.fixture(scope="module")
def tomi() -> Task:
    return load_registry().task("tomi")


def rows_of(n: int) -> list[dict[str, Any]]:
    return [ROW | {"story": f"{ROW['story']}\n3 Story {i}.", "order": i % 3} for i in range(n)]


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


# -- identity ------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.slow
@given(st.dictionaries(st.text(), json_values))
def test_the_hash_ignores_key_order_absence_and_the_kind_of_sequence(fields: dict[str, Any]):
    again = {k: tuple(v) if isinstance(v, list) else v for k, v in reversed(fields.items())}
    assert content_hash("t", fields) == content_hash("t", again | {"absent of all keys": None})


def test_the_hash_is_sixteen_hex_digits_and_never_changes():
    assert content_hash("tomi", {"b": 1, "a": ["x", True]}) == "63d218d0b75cff0b"


def test_the_hash_tells_tasks_types_and_values_apart():
    fields = [{"a": 1}, {"a": "1"}, {"a": True}, {"a": [1]}, {"b": 1}, {}]
    hashes = {content_hash(task, f) for task in ("t", "u") for f in fields}
    assert len(hashes) == 2 * len(fields)
    assert content_hash("t", {"a": 1}) == content_hash("t", {"a": 1.0})


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1, 2}, [math.nan]])
def test_the_hash_refuses_what_no_file_can_hold(value: Any):
    with pytest.raises(DataError):
        content_hash("t", {"a": value})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".json", ".csv", ".tsv"])
def test_a_row_has_one_id_in_every_format(tmp_path: Path, tomi: Task, suffix: str):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps({"data": [ROW]}))
    elif suffix in (".csv", ".tsv"):
        import csv

        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="," if suffix == ".csv" else "\t")
            writer.writerows([list(ROW), [str(v) for v in ROW.values()]])
    else:
        write_rows(path, [ROW], data_source="tomi")
    (example,) = load_examples(tomi, [path]).examples
    assert example.id == tomi.example(ROW).id
    assert example.source == f"rows{suffix}:{2 if suffix in ('.csv', '.tsv') else 1}"


# -- files ---------------------------------------------------------------------------------------


def test_one_broken_line_costs_one_row(tmp_path: Path):
    good = json.dumps({"story": "a\u2028b"}, ensure_ascii=False)
    lines = [good, "{broken", "", "[1]", '{"a": Infinity}', '{"a": "\\ud800"}', '{"a": NaN}']
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\r\n".join(lines).encode() + b"\n\xff\xfe\n" + b'{"deep": ' + b"[" * 99999)
    rows, bad = read_rows(path)
    assert [(r.source, r.fields) for r in rows] == [
        ("rows.jsonl:1", {"story": "a\u2028b"}),
        ("rows.jsonl:7", {}),
    ]
    assert [b.source for b in bad] == [f"rows.jsonl:{n}" for n in (2, 4, 5, 6, 8, 9)]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_rows(path)[0][0].fields == {"a": 1}


def test_csv_counts_lines_and_names_uneven_records(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n"two\nlines",1\nshort\n,2\n')
    rows, bad = read_rows(path)
    assert [(r.source, r.fields) for r in rows] == [
        ("rows.csv:2", {"a": "two\nlines", "b": "1"}),
        ("rows.csv:5", {"b": "2"}),
    ]
    assert [b.source for b in bad] == ["rows.csv:4"]


def test_a_long_csv_cell_is_read(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text("a\n" + "x" * 200_000 + "\n")
    assert len(read_rows(path)[0][0].fields["a"]) == 200_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.jsonl", b""),
        ("blank.jsonl", b"\n\n"),
        ("bad.parquet", b"PAR1 not a parquet file"),
        ("half.json", b'[{"a": 1}'),
        ("object.json", b'{"rows": []}'),
        ("none.json", b"[]"),
        ("rows.xlsx", b"?"),
        ("twice.csv", b"a,a\n1,2\n"),
        ("latin.csv", b"a\n\xe9\n"),
    ],
)
def test_an_unusable_file_is_explained(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / name)
    assert name in caught.value.what
    assert all(caught.value.lines())


def test_a_missing_file_and_a_folder_are_explained(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(DataError, match="does not exist") as caught:
        read_rows(tmp_path / "row.jsonl")
    assert "rows.jsonl" in caught.value.way_out
    folder = tmp_path / "folder.jsonl"
    folder.mkdir()
    with pytest.raises(DataError, match="is a folder"):
        read_rows(folder)


def test_parquet_keeps_mixed_nested_values(tmp_path: Path):
    rows = [
        {"events": [["enter", ["Ada", "Ben"], False], ["exit", "Ada"]], "index": 1, "meta": {}},
        {"events": [], "index": "b", "facts": [{"topic": "a", "value": "b"}]},
    ]
    write_rows(tmp_path / "rows.parquet", rows)
    rows_read = [r.fields for r in read_rows(tmp_path / "rows.parquet")[0]]
    assert rows_read == rows


def test_writing_leaves_nothing_aside_and_refuses_nothing_to_write(tmp_path: Path):
    assert write_rows(tmp_path / "new" / "rows.jsonl", [ROW], data_source="tomi") == 1
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["rows.jsonl"]
    with pytest.raises(ValueError, match="JSON"):
        write_rows(tmp_path / "nan.jsonl", [{"a": math.nan}])
    under_a_file = tmp_path / "new" / "rows.jsonl" / "a.jsonl"
    wrong = [(tmp_path / "a.jsonl", []), (tmp_path / "a.txt", [ROW]), (under_a_file, [ROW])]
    for path, rows in wrong:
        with pytest.raises(DataError):
            write_rows(path, rows)
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


# -- the released layout -------------------------------------------------------------------------


def test_the_released_struct_is_flattened(tmp_path: Path, tomi: Task):
    # The struct has keys of another task, as in files that were joined.
    inner = ROW | {"index": 7, "history": None, "nested": {"kept": 1, "absent": None}}
    rows = [
        {"prompt": [{"role": "user", "content": "x"}], "data_source": "tomi", "extra_info": inner}
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "val.parquet")
    (row,) = read_rows(tmp_path / "val.parquet")[0]
    assert row.fields == ROW | {"index": 7, "nested": {"kept": 1}, "data_source": "tomi"}
    assert isinstance(row.fields["cands"], list)
    assert load_examples(tomi, [tmp_path / "val.parquet"]).examples[0].id == tomi.example(ROW).id


def test_extra_info_may_be_json_and_hold_raw_json(tmp_path: Path):
    inner = {"index": 1, "raw": json.dumps({"persona": "Ada", "score": None})}
    path = jsonl(tmp_path / "a.jsonl", {"data_source": "x", "extra_info": json.dumps(inner)})
    fields = read_rows(path)[0][0].fields
    assert (fields["index"], fields["persona"], fields["data_source"]) == (1, "Ada", "x")
    assert "score" not in fields


def test_a_flat_extra_info_stays_text_and_a_broken_one_is_bad(tmp_path: Path):
    flat = {**ROW, "extra_info": "{note} Ada is tired."}
    path = jsonl(tmp_path / "a.jsonl", flat, {"data_source": "x", "extra_info": "{broken"})
    rows, bad = read_rows(path)
    assert rows[0].fields == flat
    assert [b.source for b in bad] == ["a.jsonl:2"]
    assert "extra_info" in bad[0].why


# -- binding -------------------------------------------------------------------------------------


def column(type_: Any, **kwargs: Any) -> dict[str, Column]:
    return {"c": Column(type=type_, audience=("reader",), **kwargs)}


@pytest.mark.parametrize(
    ("type_", "value", "expected"),
    [
        ("text", "a", "a"), ("text", "", ""),
        ("list", "['a', 'b']", ["a", "b"]), ("list", '["a", null]', ["a", None]),
        ("list", ("a",), ["a"]),
        ("int", 3, 3), ("int", 3.0, 3), ("int", "3", 3),
        ("int", "12345678901234567", 12345678901234567),
        ("number", "1.5", 1.5), ("number", "1e3", 1000.0), ("number", 2, 2),
        ("bool", True, True), ("bool", "False", False), ("bool", 1, True),
        ("any", {"a": [1]}, {"a": [1]}),
    ],
)  # fmt: skip
def test_values_are_read_as_their_type(type_: str, value: Any, expected: Any):
    value_read = bind_columns({"c": value}, column(type_), "t", "f:1")["c"]
    assert (value_read, type(value_read)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("text", 3), ("text", ["a"]), ("text", True),
        ("list", "a, b"), ("list", "('a',)"), ("list", "__import__('os').getpid()"),
        ("list", {"a": 1}), ("int", 1.5), ("int", True), ("int", "one"),
        ("number", "inf"), ("number", math.inf), ("number", []),
        ("bool", "maybe"), ("bool", 2),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_named(type_: str, value: Any):
    with pytest.raises(DataError, match=r"f:1.*'c'") as caught:
        bind_columns({"c": value}, column(type_), "t", "f:1")
    assert not isinstance(caught.value, ColumnsError)


@pytest.mark.parametrize("value", [None, math.nan, "", "NaN"])
def test_absent_numbers_are_absent(value: Any):
    assert bind_columns({"c": value}, column("int", required=False), "t", "f:1") == {"c": None}
    with pytest.raises(ColumnsError):
        bind_columns({"c": value}, column("int"), "t", "f:1")


def test_aliases_follow_the_own_name_and_strangers_are_dropped():
    columns = column("text", aliases=("first", "second"))
    assert bind_columns({"second": "b", "first": "a", "z": 1}, columns, "t", "") == {"c": "a"}
    assert bind_columns({"c": None, "second": "b"}, columns, "t", "") == {"c": "b"}
    assert bind_columns({"c": "own", "first": "a"}, columns, "t", "") == {"c": "own"}


def test_missing_columns_come_with_the_line_to_add(tomi: Task):
    with pytest.raises(ColumnsError) as caught:
        tomi.example({"storyline": "a", "question": "b", "gold": "c"}, source="f:3")
    what, why, way_out = caught.value.lines()
    assert "f:3" in what and "story, answer" in what
    assert "Expected story, question, answer" in why and "found storyline, question, gold" in why
    assert "columns: {story: {aliases: [storyline]}" in way_out and "tasks.yaml" in way_out


def test_a_column_of_its_own_is_not_offered_in_the_place_of_a_missing_one():
    columns = {
        name: Column(type="text", audience=("reader",), required=name == "story")
        for name in ("story", "stories")
    }
    for own, offered in (("stories", "name_in_your_file"), ("storys", "storys")):
        with pytest.raises(ColumnsError) as caught:
            bind_columns({own: "a", "data_source": "b"}, columns, "t", "")
        assert f"{{story: {{aliases: [{offered}]}}}}" in caught.value.way_out


# -- literals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("A. x, B. y", {"A": "x", "B": "y"}),
        ("A. a, b, B. c", {"A": "a, b", "B": "c"}),
        ("A. x\nB. y\n", {"A": "x", "B": "y"}),
        ("A) x; B) y", {"A": "x", "B": "y"}),
        ("A. Smith, J. Doe, B. Rome", {"A": "Smith, J. Doe", "B": "Rome"}),
        ("A. x, B. y, C. z, ", {"A": "x", "B": "y", "C": "z"}),
        ("B. x, C. y", {}),
        ("", {}),
    ],
)
def test_choices_in_the_paper_protocol(text: str, options: dict[str, str]):
    assert parse_choices(text) == options


@given(
    st.lists(
        st.text("abcXYZ ,-", min_size=1)
        .map(str.strip)
        .filter(lambda t: t and not t.startswith(",") and not t.endswith(",")),
        min_size=1,
        max_size=26,
    )
)
def test_any_options_survive_writing_and_reading(options: list[str]):  # fmt: skip
    letters = [chr(ord("A") + i) for i in range(len(options))]
    written = ", ".join(f"{letter}. {o}" for letter, o in zip(letters, options, strict=True))
    assert parse_choices(written) == dict(zip(letters, options, strict=True))


def test_stories_and_candidates_in_the_paper_protocol():
    assert parse_story("['Ada came in', 'She left.']") == "Ada came in.\nShe left."
    assert parse_story("1 + 1") == "1 + 1"
    assert parse_candidates("box, bag; box\nurn") == ["box", "bag", "urn"]
    assert parse_candidates("['box', ' bag ']") == ["box", "bag"]
    assert parse_candidates(None) == []


# -- loading -------------------------------------------------------------------------------------


def test_duplicates_and_rows_of_other_tasks_are_counted(tmp_path: Path, tomi: Task):
    other = {"data_source": "hitom", "story": "x"}
    path = jsonl(tmp_path / "a.jsonl", ROW, ROW, other, other)
    loaded = load_examples(tomi, [path, path], split="train")
    assert (len(loaded.examples), loaded.duplicates) == (1, 3)
    assert loaded.skipped == {"hitom": 4}
    assert loaded.examples[0].split == "train" and loaded.bad == ()


def test_bad_rows_are_named_and_good_ones_survive(tmp_path: Path, tomi: Task):
    path = jsonl(tmp_path / "a.jsonl", ROW, "{", {**ROW, "order": "x"}, {**ROW, "question": " "})
    loaded = load_examples(tomi, [path])
    assert len(loaded.examples) == 1
    assert [b.source for b in loaded.bad] == ["a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]
    with pytest.raises(DataError, match=r"Some rows .* bad"):
        load_examples(tomi, [path], strict=True)


def test_all_rows_bad_or_of_another_shape_or_task(tmp_path: Path, tomi: Task):
    with pytest.raises(DataError, match="All rows"):
        load_examples(tomi, [jsonl(tmp_path / "a.jsonl", "{", {**ROW, "order": "x"})])
    shape = {"text": "a", "question": "b", "answer": "c"}
    with pytest.raises(ColumnsError, match="story"):
        load_examples(tomi, [jsonl(tmp_path / "b.jsonl", *[shape] * 1000)])
    with pytest.raises(DataError, match="belongs to task 'tomi'"):
        load_examples(tomi, [jsonl(tmp_path / "c.jsonl", {**ROW, "data_source": "coser"})])


def test_a_limit_is_one_sample_whatever_the_order(tmp_path: Path, tomi: Task):
    rows = rows_of(60)
    forward = jsonl(tmp_path / "a.jsonl", *rows)
    backward = jsonl(tmp_path / "b.jsonl", *reversed(rows))

    def ids(path: Path, **kwargs: Any) -> list[str]:
        return [e.id for e in load_examples(tomi, [path], **kwargs).examples]

    assert ids(forward, limit=20) == ids(backward, limit=20)
    assert set(ids(forward, limit=10)) < set(ids(forward, limit=20))
    assert set(ids(forward, limit=20, seed=1)) == set(ids(forward, limit=20))
    assert ids(forward, seed=1) != ids(forward) == ids(backward)
    assert len(ids(forward, limit=99)) == 60
    with pytest.raises(ConfigError):
        ids(forward, limit=0)


def test_a_story_stands_on_one_side_of_the_dev_split(tmp_path: Path, tomi: Task):
    rows = [r | {"question": f"{q}?"} for r in rows_of(200) for q in ("a", "b", "c")]
    examples = load_examples(tomi, [jsonl(tmp_path / "a.jsonl", *rows)]).examples
    train, dev = dev_split(examples)
    assert len(train) + len(dev) == 600
    assert not {e.cluster for e in train} & {e.cluster for e in dev}
    assert 20 < len(dev) < 120
    half = dev_split(examples[:300])[1]
    assert {e.id for e in half} == {e.id for e in dev} & {e.id for e in examples[:300]}
    two = [e for e in examples if e.cluster in {examples[0].cluster, examples[-1].cluster}]
    assert all(dev_split(two, share)[0] and dev_split(two, share)[1] for share in (0.001, 0.999))
    with pytest.raises(ConfigError):
        dev_split(examples, 1.0)


GROUPS = [(a, b) for a in "abcdefgh" for b in range(6)]


def rows(copies: int = 4) -> list[RawRow]:
    cells = [{"who": a, "age": b, "note": f"{a}{b}{i}"} for i in range(copies) for a, b in GROUPS]
    return [RawRow(row, f"x:{i}") for i, row in enumerate(cells)]


def groups(side: Any) -> set[tuple[Any, Any]]:
    return {(row.fields["who"], row.fields["age"]) for row in side}


def test_a_combination_is_never_on_both_sides() -> None:
    parts = split_rows(rows(), ["who", "age"], 0.25)
    assert not groups(parts.rest) & groups(parts.aside)
    assert len(parts.rest) + len(parts.aside) == 4 * len(GROUPS)
    assert (parts.groups_rest, parts.groups_aside) == (
        len(groups(parts.rest)), len(groups(parts.aside)),
    )  # fmt: skip
    assert 4 <= parts.groups_aside <= 20 and len(parts.aside) == 4 * parts.groups_aside


def test_it_depends_on_the_values_and_the_seed_alone() -> None:
    first = groups(split_rows(rows(), ["who", "age"], 0.25).aside)
    backwards = split_rows(rows()[::-1], ["who", "age"], 0.25)
    assert groups(backwards.aside) == first
    assert groups(split_rows(rows()[:90], ["who", "age"], 0.25).aside) <= first
    assert first < groups(split_rows(rows(), ["who", "age"], 0.5).aside)
    assert groups(split_rows(rows(), ["who", "age"], 0.25, seed=1).aside) != first


def test_by_one_column_all_of_its_rows_stay_together() -> None:
    parts = split_rows(rows(), ["who"], 0.3)
    sides = [{row.fields["who"] for row in side} for side in (parts.rest, parts.aside)]
    assert not sides[0] & sides[1] and sides[0] | sides[1] == set("abcdefgh")


def test_an_absent_value_is_a_group_of_its_own() -> None:
    some = [*rows(), RawRow({"who": "a"}, "x:a"), RawRow({"who": "a", "age": None}, "x:b")]
    parts = split_rows(some, ["who", "age"], 0.5)
    sides = [{row.source for row in side} & {"x:a", "x:b"} for side in (parts.rest, parts.aside)]
    assert {"x:a", "x:b"} in sides and parts.groups_rest + parts.groups_aside == len(GROUPS) + 1


@pytest.mark.parametrize(
    ("by", "share", "error", "words"),
    [
        (["whom"], 0.1, ConfigError, "Did you mean 'who'"),
        ([], 0.1, ConfigError, "--by NAME,NAME"),
        (["who"], 1.0, ConfigError, "out of range"),
        (["who"], 0.0, ConfigError, "out of range"),
    ],
)
def test_what_makes_no_groups_is_refused(
    by: list[str], share: float, error: type[UserError], words: str
) -> None:
    with pytest.raises(error) as refusal:
        split_rows(rows(), by, share)
    assert words in " ".join(refusal.value.lines())


def test_rows_that_are_all_alike_are_one_group() -> None:
    with pytest.raises(DataError, match="same who and age"):
        split_rows([rows()[0], rows()[0]], ["who", "age"], 0.5)


# -- the command -----------------------------------------------------------------------------------


def test_the_command_writes_two_files_and_says_their_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_rows(Path("all.jsonl"), [row.fields for row in rows()])
    call = ["data", "split", "all.jsonl", "--by", "who, age", "--share", "0.25", "--out", "parts"]
    assert cli.main([*call, "--json"]) == 0
    told_sizes = json.loads(capfd.readouterr().out)
    assert cli.main(call) == 0  # once more: the same files
    printed = capfd.readouterr().out
    train, held_out = (read_rows(Path("parts") / f"{n}.jsonl")[0] for n in ("train", "held_out"))
    assert told_sizes["train"]["rows"] == len(train) and len(train) + len(held_out) == 192
    assert told_sizes["held_out"]["combinations"] == len(groups(held_out))
    assert f"{len(held_out)} rows, {len(groups(held_out))} combinations of who, age" in printed
    assert groups(held_out) == groups(split_rows(rows(), ["who", "age"], 0.25).aside)


def test_the_command_writes_good_rows_and_names_bad_ones(tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps(row.fields) + "\n" for row in rows()) + "{no json\n")
    out = str(tmp_path / "parts")
    assert cli.main(["data", "split", str(file), "--by", "who", "--out", out]) == 2
    assert "bad row" in capfd.readouterr().err
    assert sum(len(read_rows(path)[0]) for path in Path(out).iterdir()) == 192


def test_an_unknown_column_is_told_in_three_lines(tmp_path: Path, capfd: Any) -> None:
    write_rows(tmp_path / "all.jsonl", [row.fields for row in rows()])
    assert cli.main(["data", "split", str(tmp_path / "all.jsonl"), "--by", "ago"]) == 2
    error = capfd.readouterr().err
    assert error.splitlines()[0] == "error: No row has a column 'ago'."
    assert "Did you mean 'age'?" in error and not list(tmp_path.glob("*split*"))


# -- dev splits ------------------------------------------------------------------------------------


def examples(tmp_path: Path) -> Any:
    task = load_registry().task("tomi")
    cells = [
        {"story": f"1 Ada entered the {a}.", "question": f"Where is {b}?", "answer": "jar",
         "question_type": b, "order": i}
        for i in range(3) for a in ("loft", "barn", "hall", "shed", "yard") for b in "abcdef"
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    write_rows(path, cells, data_source="tomi")
    return load_examples(task, [path]).examples


def test_a_dev_split_by_columns_holds_whole_combinations_out(tmp_path: Path) -> None:
    everything = examples(tmp_path)
    train, dev = dev_split(everything, 0.4, ("story",))
    assert {e.fields["story"] for e in train} & {e.fields["story"] for e in dev} == set()
    assert train and dev and len(train) + len(dev) == len(everything)
    assert [e for e in everything if e in dev] == list(dev)


def test_a_dev_split_tears_no_story_and_knows_its_columns(tmp_path: Path) -> None:
    everything = examples(tmp_path)
    with pytest.raises(ConfigError, match="divides 5 stories"):
        dev_split(everything, 0.4, ("question_type",))
    with pytest.raises(ConfigError, match="no field 'storey'") as refusal:
        dev_split(everything, 0.4, ("storey",))
    assert refusal.value.way_out == "Did you mean 'story'?"


def test_the_setting_takes_names_with_commas() -> None:
    rest = {"method": "ditto", "tasks": {"tomi": 1.0}, "eval_every": 5}
    for names in ("job, town,pet", ["job,town", "pet"], ("job", "town", "pet")):
        assert TrainConfig.model_validate({**rest, "dev_by": names}).dev_by == (
            "job",
            "town",
            "pet",
        )
    assert TrainConfig.model_validate(rest).dev_by == ()
    with pytest.raises(ValueError, match="--dev-by needs --eval-every STEPS"):
        TrainConfig.model_validate({**rest, "dev_by": "job", "eval_every": None})


def test_the_key_of_a_group_does_not_mix_columns_up() -> None:
    assert group_key({"a": "x", "b": "y"}, ["a", "b"]) != group_key(
        {"a": "y", "b": "x"}, ["a", "b"]
    )
    assert group_key({"a": 1.0}, ["a"]) == group_key({"a": 1, "b": 2}, ["a"])
