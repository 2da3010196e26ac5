"""Importers on small files written here: every format, and what malformed records become.

The original files, where a copy is at hand: $SOULKIT_TEST_DATA names the folder.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError, DataError
from soulkit.tasks.tom.importer import read_blocks
from tests.support.road import import_rows, original, synth

BLOCKS = """\
1 Ada entered the attic.
2 Ben entered the attic.
3 The pen is in the red_box.
4 Ada moved the pen to the bag.
5 Where is the pen really?\tbag\t1
1 Ada entered the attic.
3 The pen is in the red_box.
4 Where is the pen really?\tred_box\t1
1 Ada entered the attic.
2 Ben loves the pen
3 The pen is in the red_box.
1 Ada entered the attic.
2 The pen is in the red_box.
3 Where does Ada think that Ben searches for the pen?\tred_box\t1
"""
TRACE = """\
enter_agent_0,enter_agent_1,agent_0_moves_obj,reality,true_belief
enter_agent_0,reality,true_belief
enter_agent_0,memory,true_belief
enter_agent_0,second_order_0_no_tom,false_belief
"""


def blocks(tmp_path: Path, text: str = BLOCKS, trace: str | None = TRACE) -> Path:
    path = tmp_path / "toy.txt"
    path.write_text(text)
    if trace is not None:
        path.with_suffix(".trace").write_text(trace)
    return path


def test_blocks_survive_their_malformed_neighbours(tmp_path: Path):
    good, bad = read_blocks(blocks(tmp_path))
    assert [(b.source, b.question_type, b.story_type) for b in good] == [
        ("toy.txt:1", "reality", "true_belief"),
        ("toy.txt:12", "second_order_0_no_tom", "false_belief"),
    ]
    assert good[0].steps == ("enter_agent_0", "enter_agent_1", "agent_0_moves_obj")
    assert [b.source for b in bad] == ["toy.txt:6", "toy.txt:9"]
    assert "line 7" in bad[0].why and "without a question" in bad[1].why


def test_a_trace_that_slipped_is_found_out(tmp_path: Path):
    slipped = "\n".join(TRACE.splitlines()[1:]) + "\nx,reality,true_belief\nx,memory,true_belief\n"
    good, bad = read_blocks(blocks(tmp_path, trace=slipped))
    assert len(good) == 1
    assert [b.source for b in bad] == ["toy.txt:6", "toy.txt:9", "toy.txt:12", "toy.trace:5"]
    short = read_blocks(blocks(tmp_path, trace=TRACE.splitlines()[0]))[1]
    assert "missing" in short[-1].why


def test_tomi_rows_from_blocks(tmp_path: Path):
    imported = import_rows("tomi", blocks(tmp_path))
    assert imported.rows[0] == {
        "story": "1 Ada entered the attic.\n2 Ben entered the attic.\n"
        "3 The pen is in the red_box.\n4 Ada moved the pen to the bag.",
        "question": "Where is the pen really?",
        "answer": "bag",
        "question_type": "reality",
        "story_type": "true_belief",
        "order": 0,
        "cands": ["bag", "red_box"],
        "story_id": 0,
        "provenance": "ToMi, toy.txt:1",
        "licence": "CC-BY-NC-4.0 (ToMi, and what is derived from it)",
    }
    assert (imported.rows[1]["order"], imported.rows[1]["story_id"]) == (2, 1)
    assert len(imported.bad) == 2


def test_paratomi_rows_from_blocks_read_like_prose(tmp_path: Path):
    text = (
        "1 Ada crept into the tool_shed.\n2 The treasure_chest has the pen.\n"
        "3 The tool_shed is keeping the treasure_chest inside of it.\n4 Ada is fond of the hat.\n"
        "5 Ada hid the pen in the bag.\n6 The bag is kept in the tool_shed.\n"
        "7 Where will Ada look for the pen?\tbag\t1\n"
    )
    trace = "enter_agent_0,agent_0_moves_obj,first_order_0_no_tom,true_belief\n"
    (row,) = import_rows("paratomi", blocks(tmp_path, text, trace)).rows
    assert row["story"].splitlines()[1] == "The treasure chest has the pen."
    assert row["cands"] == ["bag", "tool shed", "treasure chest"]
    assert (row["correct_answer"], row["index"]) == ("bag", 0)
    assert (row["qType"], row["qTypeRaw"]) == ("first_order_no_tom", "first_order_0_no_tom")
    assert row["provenance"] == "ToMi, toy.txt:1" and "CC-BY-NC" in row["licence"]


def test_without_a_trace_the_question_says_its_type(tmp_path: Path):
    imported = import_rows("tomi", blocks(tmp_path, trace=None))
    assert [row["question_type"] for row in imported.rows] == ["reality", "second_order"]
    assert "no toy.trace" in imported.notes[0]


def percept(tmp_path: Path, *changes: dict[str, Any]) -> Path:
    row = {
        "index": 4, "qTypeRaw": "first_order_0_tom", "qType": "first_order_tom",
        "story": "['Ada entered the attic', 'The pen is in the treasure chest']",
        "question": "Where will Ada look for the pen?", "char1": "Ada",
        "cands": "['attic', 'treasure chest']", "answer": "treasure chest",
    }  # fmt: skip
    path = tmp_path / "Percept-ToMi.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows(row | change for change in changes)
    return path


def test_percept_tomi_for_both_tasks(tmp_path: Path):
    path = percept(tmp_path, {}, {"story": "['Ada"}, {"answer": "attics"}, {"question": ""})
    imported = import_rows("paratomi", path)
    (row,) = imported.rows
    assert row["story"] == "Ada entered the attic.\nThe pen is in the treasure chest."
    assert (row["cands"], row["qType"]) == (["attic", "treasure chest"], "first_order_tom")
    assert [b.source for b in imported.bad] == [f"Percept-ToMi.csv:{n}" for n in (3, 4, 5)]
    tomi = import_rows("tomi", path).rows[0]
    assert (tomi["cands"], tomi["order"]) == (["treasure chest"], 1)


def test_fixed_tomi(tmp_path: Path):
    row = {"story": "1 Ada entered the den.\n2 The pen is in the box.", "answer": "box",
           "question": "Where was the pen at the beginning?", "story_type": "true_belief",
           "question_type": "memory", "containers": ["box", "bag"]}  # fmt: skip
    path = tmp_path / "fixed.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"answer": None}) + "\n")
    imported = import_rows("tomi", path)
    assert imported.rows[0]["cands"] == ["bag", "box"] and imported.rows[0]["order"] == 0
    assert [b.source for b in imported.bad] == ["fixed.jsonl:2"]


def hitom(tmp_path: Path) -> Path:
    story = "1 Ada entered the attic.\n2 The pen is in the red_box."
    row = {"prompting_type": "CoTP", "deception": False, "story_length": 1, "question_order": 0,
           "sample_id": 0, "story": story + "\n\n***", "question": "Where is the pen really?",
           "choices": "A. red_box, B. blue_bag", "answer": "red_box"}  # fmt: skip
    vp = {"prompting_type": "VP", "sample_id": 1, "answer": "blue_bag",
          "story": "Read it and choose one.\n" + story}  # fmt: skip
    rows = [row, row | vp, row | {"answer": "urn"}, row | {"choices": "red_box"}, 3]
    path = tmp_path / "Hi-ToM_data.json"
    path.write_text(json.dumps({"data": rows}))
    return path


@pytest.mark.parametrize(
    ("half", "golds"),
    [(None, ["red_box"]), ("vp", ["blue_bag"]), ("all", ["red_box", "blue_bag"])],
)
def test_hitom_halves(tmp_path: Path, half: str | None, golds: list[str]):
    imported = import_rows("hitom", hitom(tmp_path), half)
    assert [row["correct_answer"] for row in imported.rows] == golds
    assert {row["story"] for row in imported.rows} == {
        "1 Ada entered the attic.\n2 The pen is in the red_box."
    }
    assert "different golds for 1" in imported.notes[0]
    assert all("Apache" in row["licence"] for row in imported.rows)
    assert imported.rows[-1]["provenance"] == f"Hi-ToM, Hi-ToM_data.json:{1 if half is None else 2}"
    assert [b.source for b in imported.bad] == [f"Hi-ToM_data.json:{n}" for n in (5, 3, 4)]


def test_what_cannot_be_imported_is_explained(tmp_path: Path):
    with pytest.raises(ConfigError, match="no importer"):
        import_rows("secret_keeper", tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="--half both"):
        import_rows("hitom", hitom(tmp_path), "both")
    with pytest.raises(ConfigError, match="--half"):
        import_rows("tomi", blocks(tmp_path), "vp")
    with pytest.raises(DataError, match="original format"):
        import_rows("paratomi", hitom(tmp_path))
    with pytest.raises(DataError, match="no rows"):
        import_rows("tomi", blocks(tmp_path, ""))
    with pytest.raises(DataError, match="does not exist"):
        import_rows("tomi", tmp_path / "nowhere.txt")


def test_rows_that_cannot_be_made_are_explained():
    for name, n in (("tom", 1), ("tomi", 0)):
        with pytest.raises(ConfigError):
            synth(name, n, 0)


def test_the_halves_of_hitom_contradict_each_other():
    imported = import_rows("hitom", original("hitom/Hi-ToM_data.json"), "all")
    assert len(imported.rows) == 1200
    assert "600 questions twice" in imported.notes[0] and "golds for 138" in imported.notes[0]
