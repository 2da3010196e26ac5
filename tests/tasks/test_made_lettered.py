"""Made rows of tasks with lettered options, through a file as they are released in: joined structs.

One Parquet file holds rows of several tasks under `extra_info`; every row then has the keys of all,
None where a key is another task's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from soulkit.data.files import flatten, read_rows
from soulkit.tasks.loading import load_examples
from tests.support.road import synth, task_of

SOURCES = {"twinvoice": "twinvoice", "tombench": "tombench", "behaviorchain": "behavior_chain"}
N = 20


def packed(task: str, row: dict[str, Any], index: int) -> dict[str, Any]:
    if task == "behaviorchain":
        return {"raw": json.dumps(row), "index": index}
    return {**row, "index": index}


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inner, sources = [], []
    for task, source in SOURCES.items():
        for i, row in enumerate(synth(task, N, 5)):
            inner.append(packed(task, row, i))
            sources.append(source)
    keys = sorted({key for row in inner for key in row})
    whole = [{key: row.get(key) for key in keys} for row in inner]
    dummy = [[{"role": "user", "content": "x"}]] * len(whole)
    path = tmp_path_factory.mktemp("joined") / "all_val.parquet"
    pq.write_table(
        pa.table({"prompt": dummy, "data_source": sources, "extra_info": pa.array(whole)}), path
    )
    return path


@pytest.mark.parametrize("name", SOURCES)
def test_rows_of_a_joined_file_are_the_rows_that_were_made(joined: Path, name: str) -> None:
    task = task_of(name)
    loaded = load_examples(task, [joined])
    assert not loaded.bad and sum(loaded.skipped.values()) == 2 * N
    made = {e.id: e for row in synth(name, N, 5) for e in task.examples(row)}
    assert {e.id for e in loaded.examples} == set(made)
    for example in loaded.examples:
        same = made[example.id]
        assert (example.tags, example.cluster) == (same.tags, same.cluster)
        assert task.preview(example) == task.preview(same)


def plain_types(value: Any) -> bool:
    if isinstance(value, dict):
        return all(plain_types(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(plain_types(item) for item in value)
    return type(value) in (str, int, float, bool, type(None))


def test_nothing_but_plain_values_comes_out_of_a_file(joined: Path) -> None:
    rows, bad = read_rows(joined)
    assert not bad and all(plain_types(row.fields) for row in rows)
    for name in SOURCES:
        assert all(
            plain_types(dict(e.fields)) for e in load_examples(task_of(name), [joined]).examples
        )


def test_a_row_under_raw_may_be_json_text_or_the_row_itself() -> None:
    (row,) = synth("behaviorchain", 1, 5)
    forms = [flatten({"extra_info": {"raw": raw, "index": 0}}) for raw in (row, json.dumps(row))]
    assert len({task_of("behaviorchain").example(form).id for form in (row, *forms)}) == 1


@pytest.mark.parametrize("name", SOURCES)
def test_more_rows_begin_with_fewer_and_letters_are_spread(name: str) -> None:
    rows = synth(name, 200, 5)
    assert synth(name, 30, 5) == rows[:30] and synth(name, 30, 6) != rows[:30]
    task = task_of(name)
    golds = [task.gold_letter(task.example(row)) for row in rows]
    assert all(golds.count(letter) > 25 for letter in "ABCD")
    assert len({task.example(row).id for row in rows}) == 200
