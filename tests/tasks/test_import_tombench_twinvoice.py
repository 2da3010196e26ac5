"""ToMBench's and TwinVoice's files: on small ones written here, and on the originals at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import write_rows
from soulkit.errors import DataError
from soulkit.tasks.kit.loading import load_examples
from soulkit.tasks.twinvoice.data import PROFILES
from tests.support.road import import_rows, original, task_of

GOLD = "答案\nANSWER"
ITEM: dict[str, Any] = {
    "能力\nABILITY": "Belief: Content false beliefs Belief: Second-order beliefs",
    "序号\nINDEX": 7, "故事": "小梅走了。", "问题": "小梅在哪里？",
    "选项A": "A. 家里", "选项B": "B.学校", "选项C": None, "选项D": None,
    "STORY": "Mei went.", "QUESTION": "Where is Mei?", "OPTION-A": "At home",
    "OPTION-B": "B. School", "OPTION-C": None, "OPTION-D": None, GOLD: "B. ",
}  # fmt: skip


def written(path: Path, *rows: Any) -> Path:
    """Rows as the original writes them: a gap is a bare NaN, which is no strict JSON."""
    lines = [json.dumps(row, ensure_ascii=False).replace("null", "NaN") for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_an_item_of_tombench_becomes_a_row_in_each_language(tmp_path: Path) -> None:
    imported = import_rows("tombench", written(tmp_path / "False Belief Task.jsonl", ITEM))
    english, chinese = imported.rows
    assert english["options_dict"] == {"A": "At home", "B": "School"}
    assert chinese["options_dict"] == {"A": "家里", "B": "学校"}
    assert {row["correct_letter"] for row in imported.rows} == {"B"}
    assert english["story_id"] == chinese["story_id"]
    assert english["ability"] == "Belief: Content false beliefs Belief: Second-order beliefs"
    assert (english["subtask"], english["licence"]) == ("False Belief Task", "MIT")
    assert chinese["provenance"] == "ToMBench, False Belief Task.jsonl:1"
    assert "2 of 2 rows" in imported.notes[0] and imported.bad == ()


def test_broken_items_of_tombench_cost_their_own_rows_only(tmp_path: Path) -> None:
    broken = [{**ITEM, GOLD: "C"}, {**ITEM, GOLD: None}, {**ITEM, "STORY": " "},
              {**ITEM, "OPTION-B": "B. "}]  # fmt: skip
    imported = import_rows("tombench", written(tmp_path / "Hinting.jsonl", ITEM, *broken))
    assert [(r["language"], r["provenance"]) for r in imported.rows] == [
        ("en", "ToMBench, Hinting.jsonl:1"), ("zh", "ToMBench, Hinting.jsonl:1"),
        ("zh", "ToMBench, Hinting.jsonl:4"), ("zh", "ToMBench, Hinting.jsonl:5"),
    ]  # fmt: skip
    assert [b.source.removeprefix("Hinting.jsonl:") for b in imported.bad] == [
        "2 (en)", "2 (zh)", "3 (en)", "3 (zh)", "4 (en)", "5 (en)",
    ]  # fmt: skip
    with pytest.raises(DataError, match="original format"):
        import_rows("tombench", written(tmp_path / "x.jsonl", {"a": 1}))


SCENE: dict[str, Any] = {
    "chunk_id": "00002", "speaker": "Ada", "speaker_match_key": "Ada Vale", "utterance": "Why?",
    "context": "Ada looks up.", "source_novel": "Moor",
    "mcq": {"options": {"A": "Rain.", "B": "Why?", "C": "Wind.", "D": "Snow."}, "answer": "B"},
}  # fmt: skip
LONG = "I never said that I would come"


def profiles(path: Path) -> Path:
    utterances = [
        ("00009", "Never.", "Later."),
        ("00002", "Why?", "Ada looks up."),
        ("00004", "Why", "x"),
        ("00001", "Who?", "First."),
        ("00005", "Oh.", f"Ada said: {LONG}, and left."),
    ]
    history = [{"chunk_id": c, "utterance": u, "context": t} for c, u, t in utterances]
    ada = {"NameCanonical": "Ada Vale", "Personality Traits": ["curt", "shy"],
           "Additional Details": {"Occupation": "nurse"}, "UtteranceHistory": history}  # fmt: skip
    bea = {"NameCanonical": "Bea", "UtteranceHistory": [history[1]]}
    people = {"characterList": {"CHAR_1": ada, "CHAR_2": bea}}
    path.write_text(json.dumps(people, indent=2), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", PROFILES)
def test_a_scene_gets_the_history_of_its_character_without_the_answer(
    tmp_path: Path, name: str
) -> None:
    profiles(tmp_path / name)
    mcq = {"options": {**SCENE["mcq"]["options"], "D": LONG}, "answer": "D"}
    quoted = {**SCENE, "chunk_id": "00007", "context": f"He heard: {LONG}!", "utterance": LONG,
              "mcq": mcq}  # fmt: skip
    imported = import_rows("twinvoice", written(tmp_path / "dimension_3.jsonl", SCENE, quoted))
    first, second = imported.rows
    assert first["conversation_history"] == [
        "Scene: First.\n  Said: Who?",
        f"Scene: Ada said: {LONG}, and left.\n  Said: Oh.",
        "Scene: Later.\n  Said: Never.",
    ]
    assert (first["answer_idx"], first["user_id"], first["anchor_post"]) == (
        1, "Moor/Ada Vale", "Ada looks up.")  # fmt: skip
    assert first["profile"] == "Name: Ada Vale\nTraits: curt, shy\nOccupation: nurse"
    assert not any(LONG in entry for entry in second["conversation_history"])
    assert "In 1 of 2 rows the anchor contains" in imported.notes[0]


def test_scenes_without_a_known_character_are_bad(tmp_path: Path) -> None:
    profiles(tmp_path / PROFILES[0])
    bea = {**SCENE, "speaker_match_key": "Bea"}
    odd = {**SCENE, "mcq": {"options": SCENE["mcq"]["options"], "answer": "E"}}
    nobody = {**SCENE, "speaker_match_key": "Cy"}
    imported = import_rows("twinvoice", written(tmp_path / "c.jsonl", SCENE, bea, nobody, odd))
    assert len(imported.rows) == 1
    whys = ("no other line of its character", "no profile", "not one of its options")
    assert all(why in bad.why for why, bad in zip(whys, imported.bad, strict=True))


def test_profiles_have_to_be_there_and_are_no_choices(tmp_path: Path) -> None:
    choices = written(tmp_path / "c.jsonl", SCENE)
    with pytest.raises(DataError, match="no file of profiles"):
        import_rows("twinvoice", choices)
    for text in ('{"a": 1}', '{"a": 1}\n{"b": 2}'):
        (tmp_path / PROFILES[2]).write_text(text)
        with pytest.raises(DataError, match="cannot be read"):
            import_rows("twinvoice", choices)
    with pytest.raises(DataError, match="profiles, not choices"):
        import_rows("twinvoice", profiles(tmp_path / PROFILES[0]))
    with pytest.raises(DataError, match="original format"):
        import_rows("twinvoice", written(tmp_path / "x.jsonl", {"a": 1}))


def test_posts_and_chats(tmp_path: Path) -> None:
    post = {"user_id": 5, "anchor_post": "Rain.", "choices": ["a", "b", "c", "d"],
            "ground_truth_index": 2, "predicted_index": 1, "reasoning": "x"}  # fmt: skip
    posts = written(tmp_path / "p.jsonl", {**post, "history": ["hm", None, " "]}, post)
    imported = import_rows("twinvoice", posts)
    (row,) = imported.rows
    assert (row["dimension"], row["user_id"], row["conversation_history"]) == (
        "social", "5", ["hm"])  # fmt: skip
    assert "no history" in imported.bad[0].why and not {"reasoning", "predicted_index"} & set(row)
    chat = {"line_idx": 3, "context": "+", "choices": ["a", "b", "c", "d"], "answer_idx": 0,
            "history": ["Context:x UserReply:y"], "lmut_reply": "z"}  # fmt: skip
    bad = [{**chat, "choices": ["a", "[Distractor 3]", "c", "d"]}, {**chat, "answer_idx": 4},
           {**chat, "choices": ["a", "b", "c"]}, {**chat, "choices": ["a", "a", "c", "d"]},
           {**chat, "choices": ["a", "b", "c", " "]}, {**chat, "answer_idx": None}]  # fmt: skip
    imported = import_rows("twinvoice", written(tmp_path / "c.jsonl", chat, *bad))
    assert len(imported.rows) == 1 and imported.rows[0]["dimension"] == "interpersonal"
    assert len(imported.bad) == len(bad)


def test_imported_rows_are_read_back_as_they_are(tmp_path: Path) -> None:
    imported = import_rows("tombench", written(tmp_path / "Task.jsonl", ITEM))
    for suffix in ("jsonl", "parquet"):
        path = tmp_path / f"rows.{suffix}"
        write_rows(path, imported.rows, data_source="tombench")
        loaded = load_examples(task_of("tombench"), [path])
        assert len({e.source for e in loaded.examples}) == 2 and not loaded.bad
        assert {type(e.fields["options"]) for e in loaded.examples} == {dict}


# -- the originals -------------------------------------------------------------------------------


def test_no_character_of_twinvoice_has_the_asked_line_in_its_history() -> None:
    imported = import_rows("twinvoice", original("twinvoice/dimension_3_choices.jsonl"))
    for row in imported.rows:
        gold = row["answer_choices"][row["answer_idx"]]
        assert not any(entry.endswith(f"Said: {gold}") for entry in row["conversation_history"])
