"""Rows of `userllm`: imported from NQ-open and both layouts of CommonsenseQA, and made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.tasks.userllm.data import TEXTS, suggestion
from soulkit.tasks.userllm.fields import CSQA, NQ, PRISM
from tests.support.road import import_rows, original, synth, synth_examples, task_of

HUB = {
    "id": "q1", "question": "Where does  ink dry?", "question_concept": "ink", "answerKey": "B",
    "choices": {"label": ["A", "B"], "text": ["in rain", "on paper "]},
}  # fmt: skip
FIRST = {
    "id": "q1", "answerKey": "B",
    "question": {"stem": "Where does ink dry?", "question_concept": "ink",
                 "choices": [{"label": "A", "text": "in rain"},
                             {"label": "B", "text": "on paper"}]},
}  # fmt: skip
SEARCH = {"question": "who wrote  the song", "answer": ["Ann Lee"]}


def imported(tmp_path: Path, *records: Any) -> Any:
    path = tmp_path / "file.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return import_rows("userllm", path)


def test_both_layouts_of_commonsense_qa_are_one_row(tmp_path: Path) -> None:
    imports = imported(tmp_path, HUB, FIRST)
    assert not imports.bad and "2 rows contain an assistant's answer" in imports.notes[0]
    for row in imports.rows:
        assert row["source"] == CSQA and row["intent"] == "Where does ink dry?"
        assert row["choices"] == ["in rain", "on paper"] and row["answer_key"] == "B"
        first, second = row["conversation_history"].splitlines()
        assert first == "<user>: Where does ink dry? A) in rain B) on paper"
        assert second.startswith("<assistant>: ") and "template of soulkit" in row["provenance"]
        text = task_of("userllm").preview(task_of("userllm").example(row))[0].text
        assert "B) on paper" in text and "The conversation so far" in text
    assert len({task_of("userllm").example(row).id for row in imports.rows}) == 1


def test_a_search_gets_a_turn_that_strays_and_says_where_it_is_from(tmp_path: Path) -> None:
    imports = imported(tmp_path, SEARCH)
    (row,) = imports.rows
    assert row["intent"] == row["question"] == "who wrote the song"
    assert row["assistant_suggestion_turn"] == suggestion("who wrote the song")
    assert "template of soulkit" in row["provenance"] and "file.jsonl:1" in row["provenance"]
    assert "written from a template" in imports.notes[0]
    text = task_of("userllm").preview(task_of("userllm").example(row))[0].text
    assert row["assistant_suggestion_turn"] in text and "Ann Lee" not in text


def test_what_strays_is_always_the_same_and_never_what_was_asked() -> None:
    questions = [f"what is number {i} about bread and chess" for i in range(200)]
    suggestions = {question: suggestion(question) for question in questions}
    assert suggestions == {q: suggestion(q.upper()) for q in questions}
    assert len(set(suggestions.values())) > len(TEXTS["wider"]) + len(TEXTS["other"])
    assert not any("chess" in text for text in suggestions.values())


def test_records_that_are_no_rows_are_listed(tmp_path: Path) -> None:
    broken = (
        {"question": " ", "answer": []},
        {"question": "x"},
        {**HUB, "choices": ["one"]},
        {**HUB, "question": None},
        {**HUB, "choices": {"text": ["a", None]}},
        [1],
        {"a": 1},
    )
    imports = imported(tmp_path, HUB, *broken)
    assert len(imports.rows) == 1 and len(imports.bad) == len(broken)
    with pytest.raises(DataError, match="not have the original format"):
        imported(tmp_path, {"a": 1})


# -- made ----------------------------------------------------------------------------------------


def test_made_rows_hold_every_subset_and_both_truths() -> None:
    rows = synth("userllm", 120, 5)
    assert synth("userllm", 30, 5) == rows[:30] and synth("userllm", 30, 6) != rows[:30]
    examples = synth_examples("userllm", 120)
    kinds = {(e.tags["source"], e.tags["turn"], e.fields["is_last_turn"]) for e in examples}
    assert kinds == {(CSQA, "later", None), (NQ, "later", None), (PRISM, "first", False),
                     (PRISM, "later", True), (PRISM, "later", False)}  # fmt: skip
    assert all("You are a user" not in e.fields["intent"] for e in examples)


def test_made_rows_are_seldom_the_same_in_one_seed_or_in_two() -> None:
    ids = [{e.id for e in synth_examples("userllm", 1000, seed=seed)} for seed in (0, 1)]
    assert all(len(unique_ids) >= 990 for unique_ids in ids)
    assert len(ids[0] & ids[1]) <= 10, "training and test rows are made from two seeds"


# -- real files ----------------------------------------------------------------------------------


def test_the_small_layout_is_part_of_the_large_one() -> None:
    layouts = ("hf_layout.jsonl", "original_layout_100.jsonl")
    paths = [original(f"commonsenseqa/dev_rand_split.{layout}") for layout in layouts]
    task = task_of("userllm")
    large, small = ({task.example(r).id for r in import_rows("userllm", p).rows} for p in paths)
    assert small <= large and len(small) == 100
