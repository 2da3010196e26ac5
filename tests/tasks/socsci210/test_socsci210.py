"""SocSci210: numbers read from answers, scales, requests, batch metrics, leaks, and imports."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.judge.leaks import check_leak
from soulkit.tasks.socsci210.task import Scale, asked_openly, read_scale
from soulkit.types import Episode, Failure, Feedback, Record, Score, unscored
from tests.support.road import batch_values, import_rows, score_text, synth_examples, task_of

ROW: dict[str, Any] = {
    "prompt_text": "A roofer, 40. How fair? Only return an integer from 1 to 7, nothing else.",
    "response": 5,
    "r_min": 1,
    "r_max": 7,
    "response_type": "ordinal",
    "study_id": "fees",
}
YES_NO: dict[str, Any] = {"response_type": "binary", "response": 1, "r_min": None, "r_max": None}


def score(inside: str, protocol: str = "paper", **changes: Any) -> Score:
    task = task_of("socsci210", protocol)
    return score_text(task, task.example({**ROW, **changes}), f"Fair. <answer>{inside}</answer>")


@pytest.mark.parametrize(
    ("inside", "value", "status"),
    [
        ("5", 1.0, "ok"),
        ("6", 5 / 6, "ok"),
        ("1", 1 / 3, "ok"),
        ("5.0", 1.0, "salvaged"),
        ("**5**", 1.0, "salvaged"),
        ("(5)", 1.0, "salvaged"),
        ("5.", 1.0, "salvaged"),
        ("5 (rather fair)", 1.0, "salvaged"),
        ("5: rather fair", 1.0, "salvaged"),
        ("\uff15", 1.0, "salvaged"),
        ("4.5", 1 - 0.5 / 6, "salvaged"),
        ("5 or 6", 0.0, "malformed"),
        ("5-6", 0.0, "malformed"),
        ("5/7", 0.0, "malformed"),
        ("rather 5", 0.0, "malformed"),
        ("five", 0.0, "malformed"),
        ("yes", 0.0, "malformed"),
        ("0", 0.0, "malformed"),
        ("8", 0.0, "malformed"),
        ("-5", 0.0, "malformed"),
        ("9" * 400, 0.0, "malformed"),
        ("", 0.0, "malformed"),
    ],
)
def test_what_is_read_as_a_number(inside: str, value: float, status: str) -> None:
    grade = score(inside)
    assert (grade.value, grade.status) == (pytest.approx(value), status)


@pytest.mark.parametrize(
    ("inside", "value"),
    [("yes", 1), ("Yes.", 1), ("yes, surely", 1), ("1", 1), ("no", 0), ("yes/no", 0),
     ("yes or no", 0), ("2", 0), ("true", 0)],
)  # fmt: skip
def test_yes_and_no_are_numbers_of_a_binary_scale(inside: str, value: float) -> None:
    assert score(inside, **YES_NO).value == value


def test_the_last_tag_outside_of_thinking_decides() -> None:
    assert score("1</answer> no: <answer>5").value == 1
    assert score("1</answer> no: <answer>5", "reference").value == pytest.approx(1 / 3)


def test_off_the_scale_earns_credit_only_in_the_reference() -> None:
    assert score("99", "reference").value == pytest.approx(2 / 3)
    assert score("-2", "reference").value == pytest.approx(1 / 3)
    assert score("2", "reference", response=2.7, response_type="categorical").value == 1
    assert score("2", "reference", response=2.7, response_type=" Categorical\n").value == 1
    for bad in ({"response": 9}, {"response": 2.7, "response_type": "categorical"}):
        with pytest.raises(DataError, match="not a point of the row's scale"):
            score("2", **bad)


def test_measures_say_how_exact_and_how_far_above() -> None:
    assert score("5").metrics == {"exact": 1.0, "shift": 0.0}
    assert score("7").metrics == {"exact": 0.0, "shift": pytest.approx(1 / 3)}
    assert score("maybe").metrics == {"exact": 0.0, "shift": None}
    assert score("yes", **YES_NO).metrics == {"exact": 1.0}


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("On a scale from 1 to 7. Only return a number.", Scale(1, 7, "ordinal")),
        ("Only return an integer from -3 to 3, where -3 means no", Scale(-3, 3, "ordinal")),
        ("return an integer from 1 ($0\u2013$20) to 7 (More than $120)", Scale(1, 7, "ordinal")),
        ("Only return 1 for Yes or 2 for No, nothing else.", Scale(1, 2, "categorical")),
        ("Only return 0 for no or 1 for yes", Scale(0, 1, "binary")),
        ("return 1 for $1-$10; 2 for $11-$25; 3 for $26 or more", Scale(1, 3, "categorical")),
        ("You rose from 3 to 9. Only return an integer from 0 to 10", Scale(0, 10, "ordinal")),
        ("return 1 to 3, where 1 means x, 2 means y, and 3 means z", Scale(1, 3, "categorical")),
        ("Only return an integer representing dollars", None),
        ("", None),
    ],
)  # fmt: skip
def test_scales_are_read_from_the_words_of_the_request(text: str, scale: Scale | None) -> None:
    assert read_scale(text) == scale


def test_a_row_without_bounds_takes_the_stated_scale_or_that_of_the_contract() -> None:
    bare = {"r_min": None, "r_max": None}
    task = task_of("socsci210")
    assert task.example({**ROW, **bare}).tags["scale"] == "1 to 7"
    assert task.example({**ROW, **bare, "prompt_text": "How?"}).tags["scale"] == "0 to 7"
    assert task_of("socsci210", "reference").example({**ROW, **bare}).tags["scale"] == "0 to 7"
    assert task.example({**ROW, **YES_NO, "prompt_text": "?"}).tags["scale"] == "0 to 1"


@pytest.mark.parametrize("loosely", [True, False])
def test_the_demand_for_a_bare_number_leaves_room_to_think(loosely: bool) -> None:
    question = asked_openly("How? Only return a number, nothing else.", loosely=loosely)
    assert question.startswith("How? Think it through")
    assert question.endswith("answer with a number.")
    assert "nothing else" not in question


def test_the_paper_protocol_rewrites_every_spelling_of_the_demand() -> None:
    lower = "Please only return 1 to 4, nothing else, where 1 means low."
    assert asked_openly(lower) == lower.replace(", nothing else", ".")
    tidy = "Please think it through, then answer with 1 to 4, where 1 means low."
    assert asked_openly(lower, loosely=True) == tidy
    task = task_of("socsci210")
    (segment,) = task.preview(task.example(ROW))
    assert "Only return" not in segment.text and "nothing else" not in segment.text


def test_every_way_to_hold_the_prompt_is_the_same_row() -> None:
    task = task_of("socsci210")
    text = ROW["prompt_text"]
    chat = [{"messages": [{"role": "user", "content": text}]}]
    parts = {"persona": "A roofer, 40.", "outcome_question": "How fair?", "condition_text": None}
    forms = [{}, *({"prompt_text": None, "conversations": c} for c in (chat, json.dumps(chat)))]
    assert len({task.example({**ROW, **form, "persona": None}).id for form in forms}) == 1
    built = task.example({**ROW, **parts, "prompt_text": None})
    assert built.fields["prompt_text"] == "A roofer, 40.\n\nHow fair?"
    profile = {"Age": 40, "Job": "roofer", "Vote": None}
    as_text = [json.dumps(profile), profile, "Age: 40; Job: roofer"]
    rows = [{**ROW, **parts, "prompt_text": None, "persona": p} for p in as_text]
    assert len({task.example(row).id for row in rows}) == 1
    for nothing in ({"conversations": "[1"}, {"conversations": [{}]}, {}):
        with pytest.raises(DataError, match="no question"):
            task.example({**ROW, "prompt_text": None, **nothing})


def record(study: str, value: float | None, gold: str, **tags: str) -> Record:
    scored = unscored(Failure("x")) if value is None else Score(value=value, reward=value)
    return Record(
        key=f"{study}{gold}{value}", task="socsci210", example_id=study, rollout=0, kind="draft",
        episode=Episode(example_id=study, task="socsci210"), score=scored, cluster=study, gold=gold,
        tags={"type": "ordinal", "scale": "1 to 5", **tags},
    )  # fmt: skip


def test_the_batch_has_a_study_mean_and_the_worth_of_constants() -> None:
    summarise = partial(batch_values, task_of("socsci210"))
    records = [record("a", 1.0, "5"), record("a", 0.5, "5"), record("b", 0.0, "1")]
    means = summarise([*records, record("b", None, "1")])
    assert means["study_macro"] == pytest.approx((0.75 + 0.0) / 2)
    assert means["constant_middle"] == pytest.approx(0.5)
    assert means["constant_best"] == pytest.approx(2 / 3), "always 5"
    options = [record("a", 1.0, g, type="categorical", scale="1 to 3") for g in "1223"]
    assert summarise(options)["constant_best"] == 0.5
    assert summarise([record("b", None, "1")]) == {}


def test_rows_of_one_study_are_one_cluster_and_strays_stand_alone() -> None:
    task = task_of("socsci210")
    one, two = (task.example({**ROW, "response": r}) for r in (4, 5))
    assert one.cluster == two.cluster and one.id != two.id
    alone = [task.example({**ROW, "response": r, "study_id": None}).cluster for r in (4, 5)]
    assert len(set(alone)) == 2


def test_advice_fits_the_draft_and_gives_nothing_away() -> None:
    task = task_of("socsci210")
    for example in synth_examples("socsci210", 30):
        low, high = example.fields["r_min"], example.fields["r_max"]
        ends = (f"<answer>{low}</answer>", f"<answer>{high}</answer>")
        drafts = [task.gold_completion(example), *ends, "five", "<answer>x</answer>", ""]
        scores: list[Score | None] = [score_text(task, example, draft) for draft in drafts]
        texts = [task.explain(example, None, score) for score in (*scores, None)]
        assert all(texts) and len(set(texts)) >= 5
        for text in texts:
            feedback = check_leak(Feedback(text=text, author="symbolic"), task.leak_view(example))
            assert feedback.leak == "", text
    gold = task.gold_text(example)
    leak = Feedback(text=f"They said {gold}.", author="symbolic")
    assert check_leak(leak, task.leak_view(example)).leak


def raw_record(scenario: str, output: str, **more: object) -> dict[str, object]:
    text = f"Demographics: Age: 40; Job: roofer\n\nScenario: {scenario}"
    return {"instruction": "Predict.", "input": text, "output": output, "study_id": "s1",
            "condition_num": 2, **more}  # fmt: skip


def write(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_record_becomes_a_row_with_its_scale(tmp_path: Path) -> None:
    question = "How? Only return an integer from 1 to 5, where 1 means no and 5 means yes."
    imports = import_rows("socsci210", write(tmp_path, raw_record(question, "Response: 4")))
    (row,) = imports.rows
    assert row["prompt_text"].startswith("Demographics: Age: 40")
    assert (row["persona"], row["response"]) == ("Age: 40; Job: roofer", 4)
    assert (row["r_min"], row["r_max"], row["response_type"]) == (1, 5, "ordinal")
    assert (row["study_id"], row["condition_id"], row["index"]) == ("s1", 2, 0)
    assert row["provenance"] == "rows.jsonl:1" and row["licence"]


def test_a_study_may_be_named_by_anything(tmp_path: Path) -> None:
    question = "How? Only return an integer from 1 to 5."
    names: list[Any] = [["s1"], {"study": 1}, None, "s1", "s1"]
    path = write(tmp_path, *(raw_record(question, "4", study_id=name) for name in names))
    imports = import_rows("socsci210", path)
    assert [row["study_id"] for row in imports.rows] == names
    assert any("4 studies" in note for note in imports.notes)


def test_what_cannot_be_valued_is_bad_with_its_reason(tmp_path: Path) -> None:
    scale = "How? Only return an integer from 1 to 5."
    path = write(tmp_path, raw_record(scale, "Response: 4"), raw_record(scale, "Response: 9"),
                 raw_record("How many dollars?", "Response: 4"), raw_record(scale, "none"),
                 {"input": " ", "output": "Response: 1"})  # fmt: skip
    imports = import_rows("socsci210", path)
    assert len(imports.rows) == 1
    assert [bad.source for bad in imports.bad] == [f"rows.jsonl:{n}" for n in (2, 3, 4, 5)]
    whys = " / ".join(bad.why for bad in imports.bad)
    for words in (
        "outside its scale from 1 to 5",
        "states no scale",
        "has no number",
        "no text under",
    ):
        assert words in whys
