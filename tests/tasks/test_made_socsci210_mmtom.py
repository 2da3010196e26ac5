"""Made rows of `socsci210` and `mmtom`: varied, prefixes of more, one id in every file layout."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import read_rows, write_rows
from soulkit.tasks.loading import load_examples
from soulkit.tasks.mmtom import rows as mmtom
from soulkit.tasks.registry import load_registry
from soulkit.tasks.socsci210 import rows as socsci210
from tests.support.road import synth

TASKS = ("mmtom", "socsci210")
NUMBER = re.compile(r"they answered (-?\d+)\.")
SCALE = re.compile(r"from (-?\d+) to (-?\d+)")


def in_layouts(name: str, row: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The row as several files hold it, read back."""
    every = {column for spec in load_registry().specs.values() for column in spec.columns}
    union = {**dict.fromkeys(sorted(every)), **row}
    prompt = [{"role": "user", "content": "x"}]
    released = [
        {"prompt": prompt, "data_source": name, "extra_info": union},
        {"prompt": prompt, "data_source": name, "extra_info": json.dumps(union)},
        {"prompt": prompt, "data_source": name, "extra_info": {"raw": json.dumps(row)}},
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in released))
    write_rows(folder / f"{name}.parquet", [row], data_source=name)
    raw_rows = [*read_rows(path)[0], *read_rows(folder / f"{name}.parquet")[0]]
    return [raw.fields for raw in raw_rows]


@pytest.mark.parametrize("name", TASKS)
def test_a_row_has_one_id_in_every_layout(name: str, tmp_path: Path) -> None:
    task = load_registry().task(name)
    for row in synth(name, 5, 3):
        layouts = in_layouts(name, row, tmp_path)
        assert len(layouts) == 4
        examples = [task.example(fields) for fields in (row, *layouts)]
        assert len({e.id for e in examples}) == len({e.cluster for e in examples}) == 1
        assert len({str(e.tags) for e in examples}) == 1
        assert len({task.preview(e)[0].text for e in examples}) == 1


@pytest.mark.parametrize("name", TASKS)
def test_fewer_rows_are_the_beginning_of_more(name: str) -> None:
    assert synth(name, 8, 1) == synth(name, 20, 1)[:8] != synth(name, 8, 2)


@pytest.mark.parametrize("name", TASKS)
def test_rows_differ_and_load(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, synth(name, 210, 4), data_source=name)
    loaded = load_examples(load_registry().task(name), [path], strict=True)
    assert len(loaded.examples) + loaded.duplicates == 210 and loaded.duplicates <= 2


def test_questions_take_turns_and_letters_are_fair() -> None:
    rows = mmtom.rows(700, 0)
    assert set(Counter(row["question_type"] for row in rows).values()) == {100}
    for kind in mmtom.TYPES:
        letters = Counter(row["answer"] for row in rows if row["question_type"] == kind)
        assert 30 <= letters["a"] <= 70, (kind, letters)


def test_answers_of_a_survey_follow_from_its_row() -> None:
    rows = socsci210.rows(300, 0)
    assert {row["response_type"] for row in rows} == {"ordinal", "binary", "categorical"}
    for row in rows:
        assert row["r_min"] <= row["response"] <= row["r_max"]
        if row["response_type"] == "ordinal":
            assert row["response"] == expected(row)


def expected(row: dict[str, Any]) -> int:
    """The answer, worked out from the prompt alone."""
    text = row["prompt_text"]
    earlier = int(NUMBER.search(text)[1])  # type: ignore[index]
    low, high = map(int, SCALE.search(text).groups())  # type: ignore[union-attr]
    step = re.search(r"is (\d+) points", text)
    size = int(step[1]) if step else 1
    side = 1 if "good experiences" in text else -1 if "how little came of it" in text else 0
    moved = "moves them a step" in text
    return min(max(earlier + side * size * moved, low), high)


def test_a_study_shares_its_texts_and_varies_its_respondents() -> None:
    rows = socsci210.rows(socsci210.PER_STUDY, 7)
    assert len({row["study_id"] for row in rows}) == 1
    assert len({row["outcome_question"] for row in rows}) == 1
    assert len({row["persona"] for row in rows}) == len(rows)
