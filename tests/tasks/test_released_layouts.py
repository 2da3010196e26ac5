"""Files as the release has them, and as they should not be: every task, whoever wrote the Parquet.

A released file keeps the row in the struct `extra_info` beside a dummy prompt. Its nested values
may be arrays, or JSON text; a column may hold something else than in the last release; and files
that were joined have the keys of all, None where a file had none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from soulkit.cli import app as cli
from soulkit.data.files import write_rows
from soulkit.errors import DataError
from soulkit.tasks.loading import load_examples
from soulkit.tasks.registry import load_registry
from tests.support.road import synth, task_of

Row = dict[str, Any]

SOUL = load_registry().suite("soul-27")
WHOLE = ("behaviorchain", "sim_doc", "sim_math")
"""Tasks whose rows are JSON text under `raw`."""


def made(name: str, n: int = 12) -> list[Row]:
    """Made rows whose columns have one type each, as the columns of a released file have."""
    rows = [{k: v for k, v in row.items() if k not in ("events", "index")}
            for row in synth(name, n, 3)]  # fmt: skip
    for row in rows:
        if name == "mirrorbench":
            row["metadata"] = {k: str(v) for k, v in row["metadata"].items()}
        if isinstance(row.get("choices"), dict):
            row["choices"] = row["choices"]["text"]
    return rows


def wrapped(name: str, row: Row, index: int) -> Row:
    info = {"raw": json.dumps(row)} if name in WHOLE and "raw" not in row else row
    return {"prompt": [{"role": "user", "content": "x"}], "extra_info": {**info, "index": index},
            "data_source": load_registry().spec(name).files.data_source[0]}  # fmt: skip


def as_json(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: as_arrays(v) for k, v in value.items()}
    if not isinstance(value, list):
        return value
    array = np.empty(len(value), dtype=object)
    array[:] = [as_arrays(item) for item in value]
    return array


def ids(name: str, path: Path) -> list[str]:
    loaded = load_examples(task_of(name), [path])
    assert not loaded.bad and not loaded.skipped
    return sorted(example.id for example in loaded.examples)


@pytest.mark.parametrize("name", SOUL)
@pytest.mark.parametrize("shape", [lambda v: v, as_json, as_arrays], ids=["as is", "json", "numpy"])
def test_a_row_is_the_same_example_whoever_wrote_the_file(
    name: str, shape: Callable[[Any], Any], tmp_path: Path
) -> None:
    rows = made(name)
    plain, released = tmp_path / "plain.jsonl", tmp_path / "released.parquet"
    write_rows(plain, rows)
    table = [
        wrapped(name, {k: shape(v) for k, v in row.items()} if name not in WHOLE else row, i)
        for i, row in enumerate(rows)
    ]
    # With the index that a data frame brings along.
    pd.DataFrame(table, index=range(7, 7 + len(table))).to_parquet(released)
    assert ids(name, released) == ids(name, plain)


def test_files_joined_into_one_are_read_as_their_parts(tmp_path: Path) -> None:
    import datasets

    # Made rows of the other two have columns of other types.
    names = [name for name in SOUL if name not in ("paratomi", "userllm")]
    parts = [
        datasets.Dataset.from_list([wrapped(name, row, i) for i, row in enumerate(made(name, 3))])
        for name in names
    ]
    path = tmp_path / "joined.parquet"
    pq.write_table(datasets.concatenate_datasets(parts).data.table, path)
    for name in names:
        alone = tmp_path / f"{name}.jsonl"
        write_rows(alone, made(name, 3))
        loaded = load_examples(task_of(name), [path])
        assert not loaded.bad
        assert sorted(e.id for e in loaded.examples) == ids(name, alone)


def test_what_was_packed_is_opened_and_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = released(tmp_path / "rows.parquet", "behaviorchain", made("behaviorchain", 2))
    assert cli.main(["data", "check", str(path), "--json"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)["tasks"]
    assert checked["usable"] == 2 and checked["ignored"] == []


# -- nested otherwise than before ----------------------------------------------------------------


def released(path: Path, name: str, rows: Sequence[Row]) -> Path:
    pq.write_table(pa.Table.from_pylist([wrapped(name, r, i) for i, r in enumerate(rows)]), path)
    return path


@pytest.mark.parametrize(
    ("name", "column"),
    [("twinvoice", "answer_choices"), ("twinvoice", "conversation_history"),
     ("humanllm", "candidates"), ("tombench", "options_dict")],
)  # fmt: skip
def test_texts_that_became_objects_or_lists_are_not_shown_as_words(
    name: str, column: str, tmp_path: Path
) -> None:
    changes: list[Callable[[Any], Any]] = [lambda v: [v]]
    changes += [lambda v: {"text": v}] if column != "conversation_history" else []
    for number, change in enumerate(changes):
        rows = [
            {**row, column: {k: change(v) for k, v in row[column].items()}
             if isinstance(row[column], dict) else [change(v) for v in row[column]]}
            for row in made(name, 3)
        ]  # fmt: skip
        path = released(tmp_path / f"{number}.parquet", name, rows)
        with pytest.raises(DataError, match=r"All rows .* bad \(3\)") as caught:
            load_examples(task_of(name), [path])
        assert "is no text" in caught.value.why


def test_a_blank_candidate_is_none() -> None:
    (row,) = synth("humanllm", 1, 3)
    for gap in (None, " "):
        with pytest.raises(DataError, match="candidate 4 is blank"):
            task_of("humanllm").example(
                {**row, "candidates": [*row["candidates"][:3], gap, *row["candidates"][4:]]}
            )


def test_the_options_of_a_question_are_texts_too() -> None:
    (row,) = synth("lifechoices", 1, 3)
    nested = row["Multiple Choice Question"]
    nested["Options"] = [{"text": option} for option in nested["Options"]]
    with pytest.raises(DataError, match="no text"):
        task_of("lifechoices").example(row)


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [("humanual_chat", "prompt", []), ("mirrorbench", "turns", "[]")],
)
def test_a_required_column_that_holds_nothing_makes_a_bad_row(
    name: str, column: str, value: Any, tmp_path: Path
) -> None:
    path, (good, other) = tmp_path / "rows.jsonl", made(name, 2)
    write_rows(path, [good, {**other, column: value}])
    (bad,) = load_examples(task_of(name), [path]).bad
    assert bad.source == "rows.jsonl:2" and column in bad.why and not bad.why.startswith("row:")


@pytest.mark.parametrize("column", ["dialogues", "speaking_characters_w_env", "major_characters"])
def test_a_scene_without_lines_or_people_is_a_bad_row(column: str, tmp_path: Path) -> None:
    path, (good, other) = tmp_path / "rows.jsonl", synth("coser", 2, 3)
    scene = {**json.loads(other["circumstance"]), column: []}
    write_rows(path, [good, {**other, "circumstance": json.dumps(scene)}])
    (bad,) = load_examples(task_of("coser"), [path]).bad
    assert column in bad.why


@pytest.mark.parametrize(
    ("name", "column"), [("mirrorbench", "conversation_id"), ("humanual_chat", "category")]
)
def test_bookkeeping_may_be_numbers(name: str, column: str, tmp_path: Path) -> None:
    path = released(tmp_path / "a.parquet", name, [{**r, column: 7} for r in made(name, 3)])
    assert len(load_examples(task_of(name), [path], strict=True).examples) == 3


def test_a_gold_that_is_no_candidate_is_a_bad_row_of_paratomi() -> None:
    (row,) = synth("paratomi", 1, 3)
    strange = {**row, "correct_answer": "the moon"}
    with pytest.raises(DataError, match="none of the row's candidates"):
        task_of("paratomi").example(strange)
    assert task_of("paratomi").example({**strange, "cands": None})
    assert task_of("paratomi", "reference").example(strange), "scored 0 there, as published"


def test_an_enormous_value_is_shown_by_its_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = made("paratomi", 1)
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{**row, "story": "Ada came. " * 50_000}], data_source="paratomi")
    assert cli.main(["data", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "--json has all" in shown and len(shown) < 500_000
