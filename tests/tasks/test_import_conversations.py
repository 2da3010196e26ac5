"""MirrorBench, ClariQ, Qulac and SimulatorArena: small files written here, real ones where at hand.

What stands in the real files was counted by reading them apart from the importers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.contamination import find_overlap
from soulkit.data.files import RawRow, read_rows
from soulkit.errors import DataError
from soulkit.tasks.kit.loading import LoadedExamples, passages, to_examples
from soulkit.tasks.mirrorbench.conversations import subset_of, topic_of
from soulkit.tasks.sim_arena.data import boxed
from tests.support.road import import_rows, task_of

DATA = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere")
LESSONS = DATA / "simulatorarena/math_tutoring_annotations_redacted_for_benchmarking.json"
real = pytest.mark.skipif(not LESSONS.is_file(), reason="no original files ($SOULKIT_TEST_DATA)")

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
CLARIQ = {"topic_id": "7", "facet_id": "F1", "initial_request": "tell me about tea"}


def lines(folder: Path, *rows: Mapping[str, Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def array(folder: Path, rows: Any, name: str = "rows.json") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def loaded(name: str, rows: Sequence[dict[str, Any]]) -> LoadedExamples:
    raw = [RawRow(row, f"row:{i}") for i, row in enumerate(rows)]
    return to_examples(task_of(name), raw)


# -- MirrorBench ---------------------------------------------------------------------------------


def test_a_published_row_keeps_its_words_and_says_where_it_is_from(tmp_path: Path) -> None:
    record = {
        "dataset": "chatbot_arena",
        "conversation_id": "ab12::m",
        "task_description": " T. ",
        "turns": [{**turn, "metadata": {}} for turn in TALK],
        "metadata": {"judge": "x", "few_shot_user_examples": [{"utterance": "u"}]},
    }
    (row,) = import_rows("mirrorbench", lines(tmp_path, record)).rows
    assert (row["task_description"], row["turns"], row["index"]) == ("T.", TALK, 0)
    assert row["few_shot_user_examples"] == [{"utterance": "u"}]
    assert row["metadata"] == {"judge": "x"}
    assert row["provenance"] == "MirrorBench, rows.jsonl:1" and "CC-BY-NC-4.0" in row["licence"]


def test_what_holds_no_conversation_is_bad_with_its_reason(tmp_path: Path) -> None:
    rows = [{"task_description": "T", "turns": turns} for turns in (
        TALK, [], [{"role": "user", "content": " "}], [{"role": "narrator", "content": "x"}],
        TALK[1:], [TALK[0], {"role": "assistant", "content": ""}])]  # fmt: skip
    imported = import_rows("mirrorbench", lines(tmp_path, *rows, {"turns": TALK}))
    assert len(imported.rows) == 1
    assert [bad.source for bad in imported.bad] == [f"rows.jsonl:{n}" for n in range(2, 8)]
    user = "no user message"
    for bad, words in zip(imported.bad, ("list []", user, "narrator", user,
                                      "message 2 of its conversation (assistant) is blank",
                                      "no text under 'task_description'"),
                          strict=True):  # fmt: skip
        assert words in bad.why


def test_three_rounds_of_clariq_become_seven_turns(tmp_path: Path) -> None:
    rounds = {f"{kind}{n}": f"{kind} {n}" for n in (1, 2, 3) for kind in ("question", "answer")}
    good = {**CLARIQ, "Unnamed: 0": "448", "facet": "Find green tea", **rounds}
    gap = {**good, "Unnamed: 0": "449", "question3": None}
    imported = import_rows("mirrorbench", lines(tmp_path, good, gap))
    (row,) = imported.rows
    assert [t["content"] for t in row["turns"]] == [
        "tell me about tea", "question 1", "answer 1", "question 2", "answer 2", "question 3",
        "answer 3"]  # fmt: skip
    assert [t["role"] for t in row["turns"]] == ["user", "assistant"] * 3 + ["user"]
    assert row["conversation_id"] == "clariq-448" and row["metadata"]["clarification_pairs"] == 3
    assert "Their aim: Find green tea. " in row["task_description"]
    assert "message 6 of its conversation (assistant) is blank" in imported.bad[0].why


def test_one_question_of_clariq_becomes_three_turns_and_no_question_none(tmp_path: Path) -> None:
    single_round = {
        **CLARIQ,
        "facet_desc": "Where does it grow?",
        "question": "iced",
        "answer": "no",
    }
    imported = import_rows(
        "mirrorbench", lines(tmp_path, single_round, {**single_round, "question": ""})
    )
    (row,) = imported.rows
    assert [t["content"] for t in row["turns"]] == ["tell me about tea", "iced", "no"]
    assert "Where does it grow? " in row["task_description"]
    assert "asks no question" in imported.bad[0].why


def test_qulac_s_columns_become_rows_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    columns = {
        "topic_id": {"9": 4, "110": 5}, "facet_id": {"9": 1, "110": 2},
        "topic": {"9": "toilet", "110": "tea"}, "topic_desc": {"9": "x", "110": "y"},
        "facet_desc": {"9": "I\\'m after \\\"kinds\\\".", "110": "Find tea"},
        "question": {"9": "any brand", "110": "which year"}, "answer": {"9": "no", "110": ""},
    }  # fmt: skip
    imported = import_rows("mirrorbench", array(tmp_path, columns, "qulac.json"))
    (row,) = imported.rows
    assert row["turns"] == [{"role": "assistant", "content": "any brand"},
                            {"role": "user", "content": "no"}]  # fmt: skip
    assert 'Their aim: I\'m after "kinds". ' in row["task_description"]
    assert "“toilet”" in row["task_description"] and "\\" not in json.dumps(
        row["metadata"]["facet_desc"][:5]
    )
    assert (row["conversation_id"], row["metadata"]["topic_id"]) == ("qulac-9", 4)
    assert [bad.source for bad in imported.bad] == ["qulac.json, row 110"]


@pytest.mark.parametrize("content", [[{"topic_id": "1", "initial request": "x"}], {"data": []}, 3])
def test_files_without_conversations_are_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not have the original format"):
        import_rows("mirrorbench", array(tmp_path, content))


def test_rows_may_stand_in_an_array_and_broken_json_is_called_that(tmp_path: Path) -> None:
    row = {"task_description": "T.", "turns": TALK, "dataset": "oasst1"}
    assert len(import_rows("mirrorbench", array(tmp_path, [row, row])).rows) == 2
    (tmp_path / "rows.json").write_text("[1, 2")
    with pytest.raises(DataError, match="cannot be read") as caught:
        import_rows("mirrorbench", tmp_path / "rows.json")
    assert "not JSON" in caught.value.why


def test_the_subset_is_told_by_the_id_where_the_row_does_not_say_it() -> None:
    keys = {"clariq-4": "clariq", "qulac-1": "qulac", "0a::gpt": "chatbot_arena", "": None,
            "2b6f9c3e-1111-4222-8333-0123456789ab": "oasst1", "x": None}  # fmt: skip
    for key, subset in keys.items():
        assert subset_of({"conversation_id": key}) == subset
    assert subset_of({"dataset": "Qulac", "conversation_id": "clariq-1"}) == "qulac"
    one = topic_of({"dataset": "qulac", "metadata": {"topic_id": 101}})
    assert one == topic_of({"conversation_id": "clariq-3", "metadata": {"topic_id": "101.0"}})
    assert topic_of({"conversation_id": "0a::m1"}) == topic_of({"conversation_id": "0a::m2"})
    assert topic_of({"metadata": {"topic_id": 101}}) is None


@real
@pytest.mark.parametrize("name", ["clariq", "chatbot_arena"])
def test_published_rows_are_the_same_examples_imported_or_read_as_they_are(name: str) -> None:
    path = DATA / f"mirrorbench/{name}_mirror.jsonl"
    as_is = to_examples(task_of("mirrorbench"), read_rows(path)[0]).examples
    imported = loaded("mirrorbench", import_rows("mirrorbench", path).rows).examples
    assert [e.id for e in as_is] == [e.id for e in imported]
    assert [e.cluster for e in as_is] == [e.cluster for e in imported]


@real
def test_clariq_s_own_file_gives_the_conversations_that_mirrorbench_took_from_it() -> None:
    clariq = import_rows("mirrorbench", DATA / "clariq/multi_turn_human_generated_data.tsv").rows
    mirror = import_rows("mirrorbench", DATA / "mirrorbench/clariq_mirror.jsonl").rows
    by_id = {row["conversation_id"]: row["turns"] for row in clariq}
    assert all(by_id[row["conversation_id"]] == row["turns"] for row in mirror)
    sides = [
        passages({"mirrorbench": task_of("mirrorbench")},
                 [("mirrorbench", RawRow(row, str(i))) for i, row in enumerate(rows)])[0]
        for rows in (mirror, clariq)
    ]  # fmt: skip
    overlap = find_overlap(*sides, entities=("conversation",))
    assert len(overlap.touched("conversation")) == 200, "though the descriptions differ"


# -- SimulatorArena ------------------------------------------------------------------------------

LESSON = {
    "problem_id": 4, "workerId": "w", "user_id": "u", "model": "m", "math_expertise": "9-12",
    "why_ask_tutor": "I am stuck", "level": "Level 2", "type": "Algebra", "problem_1_turns": 2,
    "user_queries": ["how?", "3", "next one"], "ai_responses": ["think", "yes", "go on"],
    "question_location": "test/algebra/7.json",
}  # fmt: skip
DOCUMENT = {
    "workerId": "w", "model": "m", "document_type": "email", "intent": "Say sorry.",
    "user_queries": ["hello", "shorter"], "ai_responses": ["draft", "sorry."],
    "bullet_points": ["To whom?", "Why?"], "bullet_points_responses": ["My aunt.", ""],
}  # fmt: skip
KEY = "m_w_email_Say sorry."


def test_a_redacted_lesson_is_bad_until_its_problem_lies_beside_it(tmp_path: Path) -> None:
    path = array(tmp_path, [LESSON])
    imported = import_rows("sim_math", path)
    assert imported.rows == () and "holds 'test/algebra/7.json'" in imported.bad[0].why
    problem = {"problem": "Find x.", "solution": r"So $x = \boxed{\frac{1}{2}}$."}
    array(tmp_path, problem, "MATH/test/algebra/7.json")
    knowledge = {"concepts": [{"Concept Name": "Factoring", "Status": "Struggling"}]}
    array(tmp_path, {str((4, "w", "m")): knowledge}, "knowledge_state.json")
    imported = import_rows("sim_math", path)
    (row,) = imported.rows
    assert (row["problem"], row["correct_answer"]) == ("Find x.", r"\frac{1}{2}")
    assert row["human_user_queries"] == ["how?", "3"], "the second problem is another lesson"
    assert [m["content"] for m in row["human_public_conversation"]] == ["how?", "think", "3", "yes"]
    profile = row["user_profile_text"]
    assert "high school" in profile and "Factoring: struggling" in profile
    assert row["target_interaction_style_features"] is None
    assert "writing_style.json, interaction_style.json" in imported.notes[0]


def test_a_restored_lesson_needs_no_folder(tmp_path: Path) -> None:
    whole = {**LESSON, "question": "Find x.", "problem_1_gold_final_answer": "3"}
    restored = {**LESSON, "question": "Find x.", "solution": "It is three."}
    first, second = import_rows("sim_math", array(tmp_path, [whole, restored])).rows
    assert (first["problem"], first["correct_answer"]) == ("Find x.", "3")
    assert second["correct_answer"] is None, "no answer is made up"


def test_a_problem_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    array(tmp_path, {"problem": "secret"}, "elsewhere.json")
    (tmp_path / "MATH").mkdir()
    lesson = {**LESSON, "question_location": "../elsewhere.json"}
    (bad,) = import_rows("sim_math", array(tmp_path, [lesson])).bad
    assert "is outside of" in bad.why


@pytest.mark.parametrize("place", ["x" * 5000, "test/\0.json"])
def test_a_name_that_no_file_can_have_is_a_bad_record(place: str, tmp_path: Path) -> None:
    lessons = [{**LESSON, "question_location": place}, {**LESSON, "question": "Find x."}]
    imported = import_rows("sim_math", array(tmp_path, lessons))
    assert len(imported.rows) == 1 and len(imported.bad) == 1
    assert "removed by the publisher" in imported.bad[0].why and len(imported.bad[0].why) < 500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"user_queries": ["how?", ["a.png"]]}, "message 2 of its user is not text"),
        ({"ai_responses": ["think", None, "x"]}, "message 2 of its assistant is not text"),
        ({"user_queries": [" ", "3", "x"]}, "message 1 of its conversation (user) is blank"),
        ({"user_queries": []}, "no conversation"),
        ({"ai_responses": ["a"]}, "do not alternate"),
    ],
)
def test_lessons_that_cannot_be_told_say_why(
    change: Mapping[str, Any], words: str, tmp_path: Path
) -> None:
    lesson = {**LESSON, "question": "Find x.", **change}
    if "user_queries" in change and len(lesson["user_queries"]) == 2:
        lesson["ai_responses"] = ["a", "b"]
    (bad,) = import_rows("sim_math", array(tmp_path, [lesson])).bad
    assert words in bad.why and bad.source == "rows.json:1"


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{3} and \boxed{x^{2}}", "x^{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{3", None),
        (r"\boxed{}", None),
        ("three", None),
        (None, None),
    ],
)
def test_the_last_box_of_a_solution_is_its_answer(solution: Any, answer: str | None) -> None:
    assert boxed(solution) == answer


def test_a_document_takes_what_lies_beside_it(tmp_path: Path) -> None:
    path = array(tmp_path, [DOCUMENT])
    (plain,) = import_rows("sim_doc", path).rows
    assert plain["pre_writing_materials_text"] == "- To whom?\n  My aunt."
    assert plain["user_profile_text"] is plain["target_document_preferences"] is None
    feature = {"Feature Name": "Message Length", "Feature Question Answer": "Short."}
    folder = "user_simulator_profiles/document_creation/"
    array(tmp_path, {KEY: [feature]}, f"{folder}interaction_style.json")
    array(tmp_path, {KEY: [{"Preference Name": "Tone", "Preference Question Answer": "Warm."}]},
          f"{folder}preferences.json")  # fmt: skip
    array(tmp_path, {KEY: [{"question": "Who?", "answer": ["My aunt", "Ida."]}]},
          "document_creation_user_simulator_background.json")  # fmt: skip
    imported = import_rows("sim_doc", path)
    (row,) = imported.rows
    assert row["pre_writing_materials_text"] == "- Who?\n  My aunt Ida."
    assert row["target_interaction_style_features"] == [feature]
    assert row["user_profile_text"] == "- Message Length: Short."
    assert row["target_document_preferences"] == "- Tone: Warm."
    assert imported.notes == (
        "Files not found next to it, so their data is missing: writing_style.json.",)  # fmt: skip


@pytest.mark.parametrize("value", [5, "x", {"a": 1}, [[]], True])
@pytest.mark.parametrize("column", ["bullet_points", "bullet_points_responses"])
def test_notes_that_are_no_list_of_texts_stop_nothing(
    column: str, value: Any, tmp_path: Path
) -> None:
    imported = import_rows("sim_doc", array(tmp_path, [{**DOCUMENT, column: value}]))
    assert len(imported.rows) == 1 and not loaded("sim_doc", imported.rows).bad


@pytest.mark.parametrize("name", ["sim_math", "sim_doc"])
def test_other_files_of_simulatorarena_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not have the original format"):
        import_rows(name, array(tmp_path, [{"question": "x", "answer": "y"}]))
    array(tmp_path, [1], "interaction_style.json")
    with pytest.raises(DataError) as refused:
        import_rows(name, array(tmp_path, [DOCUMENT]))
    assert "not a JSON object" in refused.value.why


@real
def test_the_real_lessons_lack_their_problems_and_nothing_else(tmp_path: Path) -> None:
    imported = import_rows("sim_math", LESSONS)
    assert imported.rows == () and len(imported.bad) == 50
    records = [record.fields for record in read_rows(LESSONS)[0]]
    for number, record in enumerate(records):
        problem = {"problem": f"Stand-in {number}.", "solution": "Not known."}
        array(tmp_path, problem, f"MATH/{record['question_location']}")
    lessons = array(tmp_path, records, LESSONS.name)
    imported = import_rows("sim_math", lessons)
    assert len(imported.rows) == 49
    assert [bad.source.rpartition(":")[2] for bad in imported.bad] == ["43"], "it begins blank"
    assert sum(len(row["human_user_queries"]) for row in imported.rows) == sum(
        record["problem_1_turns"] for i, record in enumerate(records) if i != 42
    )
    bound = loaded("sim_math", imported.rows)
    assert (len(bound.examples), bound.bad) == (49, ())
    assert {row["correct_answer"] for row in imported.rows} == {None}


# -- the commands --------------------------------------------------------------------------------


@real
def test_the_same_topics_stand_in_both_files_of_clariq_and_in_qulac() -> None:
    task = {"mirrorbench": task_of("mirrorbench")}
    files = ("clariq/dev.tsv", "qulac/qulac_sample_200.json")
    sides = []
    for file in files:
        rows = import_rows("mirrorbench", DATA / file).rows[:400]
        raw = [("mirrorbench", RawRow(row, f"{file}:{i}")) for i, row in enumerate(rows)]
        sides.append(passages(task, raw)[0])
    overlap = find_overlap(*sides, entities=("topic",))
    assert overlap.reached["topic"] > 0
    assert {shared.kind for shared in overlap.shared} == {"topic"}
