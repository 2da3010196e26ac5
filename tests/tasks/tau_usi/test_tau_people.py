"""The user's files: of the right shape they are read, of another they are refused in three lines.

Every file here is made; those of people are not in this repository.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.tasks.imports import import_rows
from soulkit.tasks.tau_usi.features import LISTED
from soulkit.tasks.tau_usi.people import (
    missing_files,
    read_difficulty,
    read_human_data,
    read_lexicons,
)
from soulkit.tasks.tau_usi.survey import SURVEY
from tests.support.desk import LISTS, write_people
from tests.support.road import task_of

BEST = {q: {"answer": max(o, key=lambda key: o[key])} for q, o in SURVEY.items()}


def options(folder: Path, **more: str) -> dict[str, str]:
    return {**write_people(folder, range(4)), **more}


def test_people_come_in_batches_without_what_was_thrown_out(tmp_path: Path) -> None:
    people = read_human_data(options(tmp_path))
    assert people is not None and people.survey is None
    # One entry of the second batch has keep: false.
    assert [len(batch) for batch in people.batches] == [4, 3, 4]
    talk = people.batches[0]["tool_library_0"]
    assert talk.features["user_words_per_turn"] == 4  # commands of the study's page are no turns
    assert talk.features["politeness_rate"] == 0.5
    assert talk.success and talk.answers["reuse"] == "Maybe"
    assert people.difficulty["tool_library_1"] == 0.3


def test_what_is_missing_is_named_and_nothing_is_read(tmp_path: Path) -> None:
    chosen = options(tmp_path, lexicons="")
    assert missing_files(chosen) == ["lexicons"]
    assert read_human_data(chosen) is None
    assert missing_files({}) == ["human_file", "lexicons", "difficulty"]


def test_the_models_answers_about_peoples_conversations(tmp_path: Path) -> None:
    file = tmp_path / "survey.json"
    file.write_text(json.dumps({"tool_library_0_ann3": {"survey": {"reuse": {"answer": "Maybe"}}}}))
    people = read_human_data(options(tmp_path, survey_file=str(file)))
    assert people is not None and people.survey == 100


def test_lists_may_be_words(tmp_path: Path) -> None:
    file = tmp_path / "lists.yaml"
    file.write_text(json.dumps({**LISTS, "emotion_rate": ["Cross", "fed up"]}))
    pattern = read_lexicons(str(file))["emotion_rate"]
    assert (
        pattern.search("i am fed up.") and pattern.search("cross") and not pattern.search("across")
    )


def test_difficulties_of_few_samples_say_nothing(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    shares = {
        "a_1": 0.5,
        "a_2": {"success": 0.1, "samples": 9},
        "a_3": {"success": 1, "samples": 10},
    }
    file.write_text(json.dumps(shares))
    assert read_difficulty(str(file)) == {"a_1": 0.5, "a_3": 1.0}


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("lexicons", json.dumps({LISTED[0]: "a"}), "lack"),
        ("lexicons", json.dumps({**LISTS, "pivot_rate": "(("}), "pivot_rate"),
        ("lexicons", json.dumps({**LISTS, "pivot_rate": 3}), "pivot_rate"),
        ("difficulty", json.dumps({"a_1": 62}), "no share"),
        ("difficulty", "[0.5]", "another shape"),
        ("human_file", "{}", "another shape"),
        ("human_file", json.dumps({"retail_1": [1]}), "another shape"),
        ("human_file", "no JSON", "cannot be read"),
    ],
)
def test_files_of_another_shape_are_refused(
    tmp_path: Path, option: str, content: str, words: str
) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(DataError) as caught:
        read_human_data(options(tmp_path, **{option: str(file)}))
    assert words in caught.value.what and all(caught.value.lines())


def test_a_file_that_is_not_there_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_human_data(options(tmp_path, human_file=str(tmp_path / "nowhere.json")))
    assert "human_file" in caught.value.what and "terms" in caught.value.way_out


def test_rows_come_of_the_ids_alone_and_are_marked(tmp_path: Path) -> None:
    file = tmp_path / "unified.json"
    secret: dict[str, Any] = {"conversation": [{"role": "user", "content": "private words"}]}
    ids = ("retail_12", "retail_12_ann2", "airline_3_ann3", "odd")
    file.write_text(json.dumps(dict.fromkeys(ids, secret)))
    imported = import_rows(task_of("tau_usi"), file)
    assert [(row["env_name"], row["task_index"]) for row in imported.rows] == [
        ("retail", 12), ("airline", 3),
    ]  # fmt: skip
    assert all(row["evaluation_only"] is True for row in imported.rows)
    assert "private" not in json.dumps(imported.rows) and len(imported.bad) == 1
    file.write_text('{"odd": {}}')
    with pytest.raises(DataError):
        import_rows(task_of("tau_usi"), file)
