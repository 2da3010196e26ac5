"""Made rows of `mirrorbench`, `sim_math` and `sim_doc`: shapes, layouts, prefixes, solvability."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import read_rows, write_rows
from soulkit.errors import DataError
from soulkit.tasks.kit.loading import load_examples
from soulkit.tasks.kit.made_rows import VOICES
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.sim_arena.data import features
from tests.support.road import synth, synth_examples, task_of

TASKS = ("mirrorbench", "sim_doc", "sim_math")
SOURCES = {"mirrorbench": "mirrorbench", "sim_doc": "sim_arena_doc", "sim_math": "sim_arena_math"}


def opened(row: dict[str, Any]) -> dict[str, Any]:
    """A made row without its packing."""
    return {**row, **json.loads(row["raw"])} if "raw" in row else row


def as_text(row: dict[str, Any]) -> dict[str, Any]:
    """The row with every structure as its JSON text."""
    packed = (list, dict)
    return {k: json.dumps(v) if isinstance(v, packed) else v for k, v in row.items()}


def with_nothing(value: Any) -> Any:
    """The value as a union of structs would hold it: absent keys as None, in every object."""
    if isinstance(value, dict):
        return {"labels": None, **{k: with_nothing(v) for k, v in value.items()}}
    return [with_nothing(item) for item in value] if isinstance(value, list) else value


def in_layouts(name: str, row: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The row as several files hold it, read back."""
    flat = {k: v for k, v in opened(row).items() if k != "raw"}
    every = {column for spec in load_registry().specs.values() for column in spec.columns}
    union = {**dict.fromkeys(sorted(every)), **with_nothing(flat)}
    mark = {"prompt": [{"role": "user", "content": "x"}], "data_source": SOURCES[name]}
    released: list[dict[str, Any]] = [
        {**mark, "extra_info": union},
        {**mark, "extra_info": json.dumps(union)},
        {**mark, "extra_info": {"raw": json.dumps(flat), "index": 3, "story": None}},
        {**mark, "extra_info": as_text(flat)},
        {"data_source": SOURCES[name], **as_text(flat)},
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in released))
    write_rows(folder / f"{name}.parquet", [row, flat], data_source=name)
    write_rows(folder / f"{name}_released.parquet", released)
    files = (path, folder / f"{name}.parquet", folder / f"{name}_released.parquet")
    return [raw.fields for file in files for raw in read_rows(file)[0]]


@pytest.mark.parametrize("name", TASKS)
def test_a_row_has_one_id_in_every_layout(name: str, tmp_path: Path) -> None:
    task = task_of(name)
    for row in synth(name, 6, 3):
        layouts = in_layouts(name, row, tmp_path)
        assert len(layouts) == 12
        examples = [task.example(fields) for fields in (row, *layouts)]
        assert len({e.id for e in examples}) == len({e.cluster for e in examples}) == 1
        assert len({str(e.tags) for e in examples}) == 1


@pytest.mark.parametrize("name", TASKS)
def test_what_the_real_person_said_is_hidden_from_who_plays_them(name: str) -> None:
    task = task_of(name)
    column = "turns" if name == "mirrorbench" else "human_user_queries"
    for example in synth_examples(name, 30):
        seat = task.acted_seat(example)
        assert column not in example.visible(seat)
        assert column in example.visible("judge") and column in task.gold_fields
        if name == "sim_doc":
            continue  # here the notes say the same, as a writer reveals them one by one
        speech = example.fields[column]
        words = (
            [m["content"] for m in speech if m["role"] == "user"]
            if name == "mirrorbench"
            else speech
        )
        shown = json.dumps(example.visible(seat), ensure_ascii=False)
        assert not [text for text in words if len(text.split()) > 3 and text in shown]


def test_the_four_subsets_have_the_shapes_of_the_real_ones() -> None:
    shapes: dict[str, Counter[tuple[int, str, str]]] = {}
    for example in synth_examples("mirrorbench", 400):
        turns = example.fields["turns"]
        roles = [turn["role"] for turn in turns]
        assert all(one != other for one, other in pairwise(roles))
        shape = (len(turns), roles[0], roles[-1])
        shapes.setdefault(example.tags["subset"], Counter())[shape] += 1
    assert {name: sum(counts.values()) for name, counts in shapes.items()} == dict.fromkeys(
        ("chatbot_arena", "clariq", "oasst1", "qulac"), 100
    )
    assert set(shapes["clariq"]) == {(7, "user", "user")}
    assert set(shapes["qulac"]) == {(2, "assistant", "user")}
    assert set(shapes["chatbot_arena"]) == {(2, "user", "assistant"), (4, "user", "assistant")}
    assert {shape[2] for shape in shapes["oasst1"]} == {"user", "assistant"}


def test_some_rows_tell_their_subset_by_their_id_alone() -> None:
    rows = synth("mirrorbench", 40, 0)
    silent = [row for row in rows if "dataset" not in row]
    assert len(silent) == 8
    named = {task_of("mirrorbench").example(row).tags["subset"] for row in silent}
    assert named == {"chatbot_arena", "clariq", "oasst1", "qulac"}


def test_problems_are_solved_by_their_last_step() -> None:
    for row in map(opened, synth("sim_math", 200, 2)):
        numbers = [int(n) for n in re.findall(r"\d+", row["problem"])]
        assert int(row["correct_answer"]) == SOLVED[row["subject"]](*numbers), row["problem"]
        replies = [m for m in row["human_public_conversation"] if m["role"] == "user"]
        assert [m["content"] for m in replies] == row["human_user_queries"]
        assert row["correct_answer"] in "".join(row["human_user_queries"][-2:])


SOLVED: dict[str, Any] = {
    "Prealgebra": lambda many, total, more: total // many * more,
    "Algebra": lambda factor, add, right: (right - add) // factor,
    "Geometry": lambda longer, fence: (fence // 2 - longer) // 2 * ((fence // 2 + longer) // 2),
    "Counting & Probability": lambda caps, scarves, gloves: caps * scarves * gloves,
    "Number Theory": lambda number, add, by: (number + add) % by,
}
"""Subject → the answer, worked out in another way from the numbers of the problem."""


@pytest.mark.parametrize("name", ["sim_math", "sim_doc"])
def test_rows_come_with_and_without_features(name: str) -> None:
    groups = Counter(example.tags["features"] for example in synth_examples(name, 90))
    assert min(groups["with"], groups["without"]) == 30
    for example in synth_examples(name, 30):
        listed = example.fields["target_interaction_style_features"]
        assert (listed is not None) == (example.tags["features"] == "with")
        assert all("Topic Coherence" not in feature.values() for feature in listed or ())


def test_features_that_say_nothing_are_left_out() -> None:
    full = {"Feature Name": " Tone ", "Feature Question": "How?", "Feature Question Answer": None}
    empty = [{"Feature Name": "Tone"}, {"Feature Question": "How?"}, "Tone", {}, None]
    complete = [{"Feature Name": "Tone", "Feature Question": "How?"}]
    assert features([full, *empty], "x") == features(json.dumps([full]), "x") == complete
    assert features(empty, "x") is features(None, "x") is features("", "x") is None
    with pytest.raises(DataError, match="list of objects"):
        features("warm", "x")


def test_texts_instead_of_lists_are_taken_as_they_are() -> None:
    row = {"problem": "P", "human_user_queries": "how?", "human_public_conversation": "- S: how?"}
    example = task_of("sim_math").example(row)
    assert example.fields["human_user_queries"] == ["how?"]
    assert example.fields["human_public_conversation"] == "- S: how?"
    for broken in ({"human_user_queries": [1]}, {"human_user_queries": [" "]},
                   {"human_public_conversation": [{"role": "tutor", "content": "x"}]},
                   {"raw": "[1]"}):  # fmt: skip
        with pytest.raises(DataError):
            task_of("sim_math").example({**row, **broken})


def test_what_is_packed_wins_and_what_cannot_be_opened_is_a_bad_row(tmp_path: Path) -> None:
    full = {"problem": "P", "human_user_queries": ["a"], "human_public_conversation": "- S: a"}
    rows = [
        {"extra_info": {"raw": json.dumps(full), "problem": "Q", "level": "Level 1"}},
        {"raw": json.dumps(full), "problem": "Q"},
        {"raw": full},
        {"extra_info": {"raw": "{broken", **full}},
        {"raw": "{broken", **full},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_examples(task_of("sim_math"), [path])
    assert [e.fields["problem"] for e in loaded.examples] == ["P"] and loaded.duplicates == 2
    assert [bad.source for bad in loaded.bad] == ["rows.jsonl:4", "rows.jsonl:5"]
    assert all("'raw' must be an object" in bad.why for bad in loaded.bad)


def test_a_chat_may_begin_with_an_instruction_and_blank_replies() -> None:
    turns = [{"role": "System", "content": "Be kind."}, {"role": "user", "content": "hi"},
             {"role": "assistant", "content": ""}]  # fmt: skip
    task = task_of("mirrorbench")
    example = task.example({"task_description": "T", "turns": turns})
    assert [t["role"] for t in example.fields["turns"]] == ["system", "user", "assistant"]
    assert "subset" not in example.tags and example.cluster == example.id
    with pytest.raises(DataError, match="conversation"):
        task.example({"task_description": "T", "turns": turns[:1]})


def test_voices_do_what_they_say() -> None:
    text = "Could you please help me, because I am stuck. Thanks."
    written = {voice.trait: voice.write(text) for voice in VOICES}
    assert len(set(written.values())) == len(VOICES)
    assert VOICES[2].write(text) == "could u pls help me, bc i am stuck. thx"
    assert all(voice.features for voice in VOICES)
