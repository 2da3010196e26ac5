"""MISTAKES under the paper protocol: reading, lessons, the matrix, and imports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli import app as cli
from soulkit.data.files import RawRow
from soulkit.errors import ConfigError, DataError
from soulkit.judge.leaks import check_leak
from soulkit.models.base import Cast
from soulkit.tasks.kit.loading import load_examples, to_examples
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.mistakes.task import Mistakes
from soulkit.types import Episode, Failure, Record, Score, unscored
from tests.support.road import (
    NO_ONE,
    ROLLOUT,
    batch_values,
    build_rows,
    episode_of,
    import_rows,
    played_by,
    score_text,
    synth_examples,
    task_of,
)

ROW = {
    "id": "0_A",
    "QuestionText": "What is 1/2 + 1/3?",
    "AnswerAText": "2/5",
    "AnswerBText": "5/6",
    "AnswerCText": "1/6",
    "AnswerDText": "2/6",
    "MisconceptionName": "Adds numerators and adds denominators",
    "MisconceptionId": 1000,
    "TargetOption": "A",
    "TargetAnswer": "2/5",
    "CorrectAnswer": "B",
}


def score(text: str, **changes: Any) -> Score:
    task = task_of("mistakes")
    return score_text(task, task.example({**ROW, **changes}), text)


@pytest.mark.parametrize(
    ("text", "value", "status"),
    [
        ("<answer>A</answer>", 1.0, "ok"),
        ("<answer>a)</answer>", 1.0, "salvaged"),
        ("<answer>B</answer>", 0.0, "ok"),
        ("<answer>E</answer>", 0.0, "malformed"),
        ("<answer>2/5</answer>", 0.0, "malformed"),
        ("A", 0.0, "no_tag"),
        ("", 0.0, "empty"),
    ],
)
def test_what_decides(text: str, value: float, status: str) -> None:
    grade = score(text)
    assert (grade.value, grade.status) == (value, status)


@pytest.mark.parametrize(
    ("text", "correct", "other"), [("A", 0, 0), ("B", 1, 0), ("C", 0, 1), ("none", 0, 0)]
)
def test_whom_a_wrong_pick_resembles(text: str, correct: float, other: float) -> None:
    metrics = score(f"<answer>{text}</answer>").metrics
    assert metrics == {"picked_correct": correct, "picked_other": other}
    unknown = score(f"<answer>{text}</answer>", CorrectAnswer=None).metrics
    assert unknown == {"picked_correct": None, "picked_other": None}


def test_the_names_of_columns_and_options_that_are_absent() -> None:
    task = task_of("mistakes")
    old = {"question": ROW["QuestionText"], "misconception_text": ROW["MisconceptionName"],
           "target_option": " a ", "target_text": "2/5"}  # fmt: skip
    texts = {k: v for k, v in ROW.items() if k.endswith("Text") and k != "QuestionText"}
    assert task.example({**old, **texts, "raw_prompt": None}).id == task.example(ROW).id
    example = task.example({**ROW, "AnswerCText": None, "TargetOption": "D)"})
    assert task.options(example) == {"A": "2/5", "B": "5/6", "D": "2/6"}
    (segment,) = task.preview(example)
    assert "D) 2/6" in segment.text and "C)" not in segment.text and "None" not in segment.text
    assert score_text(task, example, "<answer>D</answer>").value == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"TargetOption": ""}, "matches none"),
        ({"TargetOption": None}, "matches none"),
        ({"TargetOption": "E"}, "matches none"),
        ({"TargetOption": "2/5"}, "matches none"),
        ({"AnswerAText": " "}, "matches none"),
        ({"CorrectAnswer": "a"}, "both target and right answer"),
        ({"CorrectAnswer": "A)"}, "both target and right answer"),
    ],
)
def test_rows_without_a_wrong_target_are_bad(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        task_of("mistakes").example({**ROW, **changes})


def test_a_letter_is_a_letter_even_where_options_are_letters() -> None:
    task = task_of("mistakes")
    swapped = {"AnswerAText": "D", "AnswerDText": "A", "AnswerBText": "B", "AnswerCText": "C"}
    example = task.example({**ROW, **swapped})
    assert score_text(task, example, "<answer>A</answer>").value == 1
    signs = {f"Answer{x}Text": s for x, s in zip("ABCD", "<>=≤", strict=True)}
    example = task.example({**ROW, **signs})
    assert task.wrong_completion(example) in {f"<answer>{x}</answer>" for x in "BCD"}


def test_lessons_tell_solving_from_another_error() -> None:
    task = task_of("mistakes")
    for example in synth_examples("mistakes", 36):
        target, right = task.gold_letter(example), example.fields["CorrectAnswer"]
        other = next(x for x in "ABCD" if x not in (target, right))
        drafts = (target, right, other, "?")
        scores = [score_text(task, example, f"<answer>{x}</answer>") for x in drafts]
        remarks = [task.explain(example, None, s) for s in (*scores, None)]
        starts = (
            "The draft thought",
            "The draft solved",
            "The draft erred",
            "The draft put",
            "Put",
        )
        for text, start in zip(remarks, starts, strict=True):
            assert text.startswith(start)
            assert not check_leak(task.symbolic(text), task.leak_view(example)).leak, text


def test_the_worked_form_is_the_students_thought_with_its_end() -> None:
    task = task_of("mistakes_worked")
    example = task.example(ROW)
    text = task.explain(example, None, None)
    assert '"Adds numerators and adds denominators"' in text and text.endswith("<answer>A</answer>")
    draft, scored = episode_of(task, example, "B."), score("B.")
    seen = []

    def answer(body: dict[str, Any]) -> str:
        seen.append(body["messages"][-1]["content"])
        return "One and one is two, two and three is five. <answer>A</answer>"

    async def run() -> Any:
        with played_by(answer) as coach:
            cast = Cast(actor=NO_ONE.actor, coach=coach)
            try:
                return await task.critique(example, draft, scored, cast, ROLLOUT)
            finally:
                await coach.model.close()

    lesson = asyncio.run(run())
    assert lesson.kind == "worked_example" and lesson.usable and "two and three" in lesson.text
    assert "picks A: 2/5" in seen[0]


def test_the_worked_form_shares_rows_prompts_and_scores(tmp_path: Path) -> None:
    lessons, worked = task_of("mistakes"), task_of("mistakes_worked")
    assert load_registry().by_source()["mistakes"] == "mistakes"
    rows = [RawRow({**ROW, "data_source": "mistakes"}, "x:1")]
    (one,), (other,) = (to_examples(t, rows).examples for t in (lessons, worked))
    assert lessons.preview(one) == worked.preview(other)
    grades = [score_text(t, e, "<answer>A</answer>") for t, e in ((lessons, one), (worked, other))]
    assert grades[0] == grades[1]
    (tmp_path / "prompts" / "mine").mkdir(parents=True)
    (tmp_path / "prompts" / "mine" / "user.md").write_text("Mine.")
    custom = Mistakes("mine", worked.spec, folder=tmp_path)
    assert custom.preview(other)[0].text == "Mine."


def record(target: str, words: str, status: str = "ok", value: float | None = 0.0) -> Record:
    score = Score(value=value, reward=value, words=words, status=status)
    return Record(
        key=f"{target}{words}{status}", task="mistakes", example_id="x", rollout=0, kind="draft",
        episode=Episode(example_id="x", task="mistakes"),
        score=unscored(Failure("x")) if value is None else score, tags={"target": target},
    )  # fmt: skip


def test_the_distractor_matrix() -> None:
    records = [record("A", "A"), record("A", "B", "salvaged"), record("A", "B")]
    records += [record("A", "", "no_tag"), record("C", "C"), record("C", "", value=None)]
    means = batch_values(task_of("mistakes"), records)
    assert means == {
        "picked_A_for_A": 0.25, "picked_B_for_A": 0.5, "picked_C_for_A": 0.0,
        "picked_D_for_A": 0.0, "picked_none_for_A": 0.25, "picked_A_for_C": 0.0,
        "picked_B_for_C": 0.0, "picked_C_for_C": 1.0, "picked_D_for_C": 0.0,
        "picked_none_for_C": 0.0,
    }  # fmt: skip
    assert batch_values(task_of("mistakes"), []) == {}


def test_pairs_of_one_question_are_one_cluster() -> None:
    task = task_of("mistakes")
    other = {**ROW, "TargetOption": "C", "MisconceptionName": "Subtracts where it should add"}
    one, two = task.example(ROW), task.example(other)
    assert one.cluster == two.cluster and one.id != two.id and one.tags == {"target": "A"}


QUESTION = {
    "QuestionId": "7",
    "SubjectName": "Fractions",
    "CorrectAnswer": "B",
    "QuestionText": "What is 1/2 + 1/3?",
    "AnswerAText": "2/5",
    "AnswerBText": "5/6",
    "AnswerCText": "1/6",
    "AnswerDText": "2/6",
    "MisconceptionAId": "11",
    "MisconceptionBId": "12",
    "MisconceptionCId": "12.0",
    "MisconceptionDId": "",
}
NAMES = {11: "Adds tops and bottoms", 12: "Multiplies instead"}


def files(folder: Path, *questions: Mapping[str, Any]) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(q) + "\n" for q in questions))
    lines = "".join(f"{number},{name}\n" for number, name in NAMES.items())
    (folder / "misconception_mapping.csv").write_text(f"MisconceptionId,MisconceptionName\n{lines}")
    return path


def test_one_row_per_labelled_wrong_option(tmp_path: Path) -> None:
    imports = import_rows("mistakes", files(tmp_path, QUESTION))
    assert [row["id"] for row in imports.rows] == ["7_A", "7_C"]
    assert imports.bad == imports.notes == ()
    row = imports.rows[1]
    assert (row["TargetOption"], row["TargetAnswer"], row["CorrectAnswer"]) == ("C", "1/6", "B")
    assert (row["MisconceptionId"], row["MisconceptionName"]) == (12, "Multiplies instead")
    assert row["provenance"] == "train.jsonl:7" and "competition" in row["licence"]
    assert row["rivals"] == 0 and row["SubjectName"] == "Fractions"


def test_options_with_the_same_misconception_are_counted_and_told(tmp_path: Path) -> None:
    imports = import_rows("mistakes", files(tmp_path, {**QUESTION, "MisconceptionDId": 11}))
    assert [row["rivals"] for row in imports.rows] == [1, 0, 1]
    assert "In 2 of 3 rows" in imports.notes[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"MisconceptionAId": "99"}, "misconception 99 has no name"),
        ({"MisconceptionAId": "eleven"}, "is not a number"),
        ({"MisconceptionAId": "1.5"}, "is not a number"),
        ({"CorrectAnswer": "E"}, "not a letter from A to D"),
        ({"CorrectAnswer": "AB"}, "not a letter from A to D"),
        ({"AnswerDText": " "}, "no text under 'AnswerDText'"),
        ({"QuestionText": None}, "no text under 'QuestionText'"),
    ],
)
def test_bad_questions_are_named(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    imports = import_rows("mistakes", files(tmp_path, QUESTION, {**QUESTION, **changes}))
    assert imports.bad[0].source == "train.jsonl:2" and why in imports.bad[0].why


def test_files_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = files(tmp_path, QUESTION)
    assert len(import_rows("mistakes", path).rows) == 2
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "?"}\n')
    for call in (
        lambda: build_rows("mistakes", other),
        lambda: build_rows("mistakes", path, other),
    ):
        with pytest.raises(DataError, match="not have the original format"):
            call()
    (tmp_path / "misconception_mapping.csv").unlink()
    with pytest.raises(DataError, match=r"no .misconception_mapping\.csv. next to"):
        build_rows("mistakes", path)
    with pytest.raises(ConfigError, match="cannot build rows from several files"):
        build_rows("tomi", path)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = files(tmp_path, QUESTION, {**QUESTION, "QuestionId": "8", "MisconceptionAId": "99"})
    target = tmp_path / "rows.jsonl"
    code = cli.main(["data", "build", "mistakes", str(path), "-o", str(target), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 2 and report["rows"] == 3 and len(report["bad"]) == 1
    assert len(load_examples(task_of("mistakes"), [target]).examples) == 2, "8_C says the same"
