"""CoSER's scenes and Humanual's sets: small files written here, and real ones where they lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import RawRow, flatten
from soulkit.errors import DataError
from soulkit.tasks.humanual.data import TASKS as HUMANUAL
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.registry import load_registry
from tests.support.road import import_rows

SCENE: dict[str, Any] = {
    "book": "Ashlar",
    "scenario": "A quarry at noon.",
    "topic": "Who cut the stone",
    "plot": {"summary": "They quarrel.", "key_characters": [{"name": "Ilka"}], "i_p": 3},
    "character_profiles": {"Ilka": "A mason."},
    "key_characters": [{"name": "Ilka", "thought": "It was me."}],
    "speaking_characters_w_env": ["Ilka", "Environment"],
    "major_characters": ["Ilka"],
    "dialogues": [
        {"character": "Ilka", "message": "[Now.] (nods) Yes."},
        {"character": "Environment", "message": "Dust settles."},
    ],
    "weight": 1.5,
    "i_p": 3,
    "i_c": 0,
    "tag": "ood",
}
PERSON: dict[str, Any] = {
    "persona": "A roofer of 40.",
    "prompt": [{"role": "poster", "content": "AITA?", "metadata": {"score": 7}}],
    "completion": "NTA.",
    "user_id": "u1",
}


def write(folder: Path, rows: list[Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def example_ids(task: str, rows: list[dict[str, Any]]) -> list[str]:
    live = load_registry().task(task)
    loaded = to_examples(live, [RawRow(flatten(row), str(i)) for i, row in enumerate(rows)])
    assert loaded.bad == ()
    return [example.id for example in loaded.examples]


# -- CoSER ---------------------------------------------------------------------------------------


def test_a_scene_is_kept_whole_and_read_column_by_column(tmp_path: Path) -> None:
    imported = import_rows("coser", write(tmp_path, [SCENE]))
    (row,) = imported.rows
    assert json.loads(row["circumstance"]) == SCENE
    assert row["provenance"] == "rows.jsonl:1" and "not stated" in row["licence"]
    example = load_registry().task("coser").example(row)
    assert example.fields["dialogues"] == SCENE["dialogues"]
    assert example.tags == {"tag": "ood"}
    assert len(example.seats) > 1
    for seat in (set(example.visible(name)) for name in example.seats):
        assert "scenario" in seat and not seat & {"dialogues", "plot", "key_characters"}


def test_every_layout_of_a_scene_is_the_same_example() -> None:
    union = dict.fromkeys(("wo_thought", "continue_from", "persona", "prompt", "choices"))
    text = json.dumps(SCENE)  # with every sign that is no ASCII written as an escape
    joined = {**SCENE, "character_profiles": {**SCENE["character_profiles"], "Other": None}}
    variants: list[dict[str, Any]] = [
        SCENE,
        {"circumstance": SCENE},
        {"circumstance": text},
        *({"prompt": [], "data_source": "coser", "extra_info": {**union, "circumstance": c}}
          for c in (SCENE, text, joined)),
        {"data_source": "coser", "extra_info": json.dumps({"circumstance": text, "index": 4})},
    ]  # fmt: skip
    assert len(set(example_ids("coser", variants))) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"scenario": " "}, "no text under 'scenario'"),
        ({"plot": "They quarrel."}, "not an object"),
        ({"major_characters": []}, "list the speakers"),
        ({"dialogues": [{"character": "Ilka"}]}, "messages, each with a character"),
        ({"dialogues": [{"character": "Odd", "message": "Hm."}]}, "Odd speaks but"),
    ],
)
def test_a_scene_that_nobody_could_play_is_bad(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    imported = import_rows("coser", write(tmp_path, [SCENE, {**SCENE, **change}]))
    assert len(imported.rows) == 1 and [bad.source for bad in imported.bad] == ["rows.jsonl:2"]
    assert why in imported.bad[0].why


def test_a_circumstance_that_is_no_object_is_a_bad_row() -> None:
    task = load_registry().task("coser")
    loaded = to_examples(task, [RawRow({"circumstance": "A quarry."}, "f:1"),
                                RawRow({"circumstance": SCENE}, "f:2")])  # fmt: skip
    assert len(loaded.examples) == 1
    assert loaded.bad[0].source == "f:1" and "must be an object" in loaded.bad[0].why


# -- Humanual ------------------------------------------------------------------------------------


def test_a_processed_record_becomes_a_row_without_metadata(tmp_path: Path) -> None:
    (row,) = import_rows("humanual_opinion", write(tmp_path, [PERSON])).rows
    assert json.loads(row["prompt"]) == [{"role": "poster", "content": "AITA?"}]
    cells = (row["persona"], row["completion"], row["user_id"])
    assert cells == ("A roofer of 40.", "NTA.", "u1")
    assert row["provenance"] == "rows.jsonl:1" and row["licence"]


def test_layouts_of_a_prompt_are_the_same_example() -> None:
    messages = [{"role": "user", "content": 'So 😀 / \u00e9 and "this"?'}]
    shapes: list[Any] = [messages, json.dumps(messages), json.dumps(messages, ensure_ascii=False),
                         json.dumps(messages).replace("/", "\\/")]  # fmt: skip
    union = dict.fromkeys(("circumstance", "turn_id", "split_type", "choices"))
    for task in HUMANUAL:
        mark = task.replace("_", "-")
        rows: list[dict[str, Any]] = [
            {"data_source": mark, "prompt": [{"role": "user", "content": "x"}],
             "extra_info": {**union, **PERSON, "prompt": shape, "index": i}}
            for i, shape in enumerate(shapes)
        ]  # fmt: skip
        flat = [{**PERSON, "prompt": shape} for shape in shapes]
        assert len(set(example_ids(task, [*rows, *flat]))) == 1


def test_records_that_lack_a_part_are_bad_and_nothing_is_made_up(tmp_path: Path) -> None:
    raw = {key: value for key, value in PERSON.items() if key != "persona"}
    silent = {**PERSON, "completion": " "}
    path = write(tmp_path, [PERSON, raw, silent, {**PERSON, "prompt": [{"role": "user"}]},
                            {**PERSON, "prompt": "What now?"}])  # fmt: skip
    imported = import_rows("humanual_news", path)
    assert [row["index"] for row in imported.rows] == [0, 4]
    assert imported.rows[1]["prompt"] == "What now?"
    whys = [bad.why for bad in imported.bad]
    assert "'persona'" in whys[0] and "'completion'" in whys[1] and "prompt" in whys[2]
    assert any("1 records have no persona" in note for note in imported.notes)


def test_a_file_of_posts_without_replies_cannot_be_imported(tmp_path: Path) -> None:
    path = tmp_path / "posts.json"
    path.write_text(json.dumps({"13rh62c": {"post": "AITA?"}}))
    with pytest.raises(DataError, match="is not a list of rows") as caught:
        import_rows("humanual_opinion", path)
    assert "not posts without replies. Wrap the rows in an array" in caught.value.way_out
    with pytest.raises(DataError, match="does not exist") as caught:
        import_rows("humanual_opinion", tmp_path / "post.json")
    assert caught.value.way_out == "Did you mean 'posts.json'?"
