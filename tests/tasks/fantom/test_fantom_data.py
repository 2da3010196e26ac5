"""Made conversations: what is asked can be read off them, and every kind of question occurs.

FANToM's original layout, and the derived tables that have questions without answers.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import RawRow, read_rows
from soulkit.data.literals import parse_candidates
from soulkit.errors import DataError
from soulkit.tasks.fantom.data import (
    TEXTS,
    rows,
    set_part,
)
from soulkit.tasks.kit.loading import to_examples
from tests.support.road import NO_ONE, import_rows, task_of

ROWS = rows(600, 4)


def lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [tuple(line.split(": ", 1)) for line in row["context"].splitlines()]  # type: ignore[misc]


def there_at(row: dict[str, Any], number: int) -> set[str]:
    """Who is there at an utterance, read from nothing but the words of the conversation."""
    dialogue = lines(row)
    everyone = {who for who, _ in dialogue}
    late = {who for who, text in dialogue if text in TEXTS["coming"]}
    there = everyone - late
    for who, text in dialogue[:number]:
        there = there - {who} if text in TEXTS["leaving"] else there
        there = there | {who} if text in (*TEXTS["coming"], *TEXTS["returning"]) else there
    return there


def test_who_knows_follows_from_the_conversation() -> None:
    questions = [r for r in ROWS if r["question_type"].endswith(":list")]
    for row in questions:
        mentions = [row["events"]["told"], *row["events"]["retold"]]
        aware = set().union(*(there_at(row, n) for n in mentions))
        assert set(parse_candidates(row["correct_answer"])) == aware
        everyone = {who for who, _ in lines(row)}
        first = {who for who, _ in lines(row)[: row["events"]["told"] - 1]}
        assert {lines(row)[row["events"]["told"] - 1][0]} <= aware & first, "nobody appears unsaid"
        assert set(parse_candidates(row["wrong_answer"])) == everyone - aware
        assert (row["missed_info_accessibility"] == "accessible") == (aware == everyone)


def test_the_information_stands_where_it_is_said_to() -> None:
    for row in ROWS:
        if row["question_type"] == "fact":
            utterance = lines(row)[row["events"]["told"] - 1][1]
            shared = set(row["correct_answer"].lower().rstrip(".").split()) & set(
                utterance.lower().rstrip(".").split()
            )
            assert len(shared) >= 3


def test_yes_or_no_agrees_with_the_lists() -> None:
    lists = {
        (r["set_id"], r["question_type"].split(":")[1]): parse_candidates(r["correct_answer"])
        for r in ROWS
        if r["question_type"].endswith(":list")
    }
    for row in ROWS:
        if row["question_type"].endswith(":binary"):
            kind = row["question_type"].split(":")[1]
            who = row["question"].split()[1]
            assert (row["correct_answer"] == "yes") == (who in lists[row["set_id"], kind])


def test_everything_occurs() -> None:
    kinds = Counter(r["question_type"] for r in ROWS)
    assert set(kinds) == {
        "fact",
        *(f"tom:{k}:{form}" for k in ("answerability", "info_accessibility")
          for form in ("list", "binary")),
        *(f"tom:belief:{a}{m}" for a in ("accessible", "inaccessible")
          for m in ("", ":multiple-choice")),
    }  # fmt: skip
    golds = Counter(r["correct_answer"] for r in ROWS if r["question_type"].endswith("choice"))
    assert min(golds["0"], golds["1"]) > 0.35 * golds.total()
    assert {r["tom_type"] for r in ROWS if "tom_type" in r} == {"first-order", "second-order"}
    assert any(r["events"]["retold"] for r in ROWS)


def test_yes_is_no_better_a_guess_than_no() -> None:
    for seed in range(5):
        questions = [r for r in rows(1500, seed) if r["question_type"].endswith("binary")]
        answers = Counter(r["correct_answer"] for r in questions)
        assert 0.45 < answers["yes"] / answers.total() < 0.55
    lacking = {(r["set_id"], name) for r in ROWS if r["question_type"].endswith(":list")
               for name in parse_candidates(r["wrong_answer"])}  # fmt: skip
    denied = {(r["set_id"], r["question"].split()[1]) for r in ROWS
              if r["question_type"].endswith("binary") and r["correct_answer"] == "no"}  # fmt: skip
    last = ROWS[-1]["set_id"]
    assert {d for d in denied if d[0] != last} == {x for x in lacking if x[0] != last}


def test_rows_know_the_size_of_their_set() -> None:
    last = ROWS[-1]["set_id"]
    counts = Counter(
        (r["set_id"], r["missed_info_accessibility"], set_part(r)) for r in ROWS
    )  # fmt: skip
    for row in ROWS:
        place = (row["set_id"], row["missed_info_accessibility"])
        sizes = (counts[*place, "strict"], counts[*place, "belief"])
        assert row["set_id"] == last or (row["set_size"], row["set_beliefs"]) == sizes


FOLDER = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere") / "fantom"
GOLDS = {"choice": "0", "names": "['Ada']", "yes_no": "no", "fact": "x", "belief": "x"}


def pair(kind: str, question: str, gold: Any, wrong: Any = None, **more: str) -> dict[str, Any]:
    return {"question": question, "question_type": kind, "correct_answer": gold,
            "wrong_answer": wrong, **more}  # fmt: skip


def record(**changes: Any) -> dict[str, Any]:
    knows = "Does Ada know the precise correct answer to this question?"
    return {
        "set_id": "3-0-1",
        "part_id": "3-0",
        "short_context": "Ben: I cooked paella.\nCleo: Nice.",
        "full_context": "Ada: Bye.\nBen: I cooked paella.\nCleo: Nice.",
        "factQA": {"question": "What did Ben cook?", "correct_answer": "Ben cooked paella.",
                   "wrong_answer": "Something."},
        "beliefQAs": [pair("tom:belief:inaccessible", "What does Ada believe Ben cooked?",
                           "Ada does not know it.", "Ada believes it was paella.",
                           tom_type="first-order", missed_info_accessibility="inaccessible")],
        "answerabilityQA_list": pair("tom:answerability:list", "Who knows the answer?",
                                     ["Ben", "Cleo"], ["Ada"]),
        "answerabilityQAs_binary": [pair("tom:answerability:binary", knows, "no:long"),
                                    pair("tom:answerability:binary", "Does Ben?", "yes"),
                                    pair("tom:answerability:binary", "Does Eve?", "error")],
        "infoAccessibilityQA_list": pair("tom:info_accessibility:list", "Who knows this?",
                                         ["Ben", "Cleo"], ["Ada"]),
        "infoAccessibilityQAs_binary": [pair("tom:info_accessibility:binary", "Does Ada?", "no")],
        **changes,
    }  # fmt: skip


def released(tmp_path: Path, *records: dict[str, Any]) -> Path:
    path = tmp_path / "fantom_v1.json"
    path.write_text(json.dumps(records))
    return path


def test_every_pair_becomes_a_row_and_a_belief_two(tmp_path: Path) -> None:
    imports = import_rows("fantom", released(tmp_path, record()))
    kinds = [row["question_type"] for row in imports.rows]
    assert kinds == [
        "fact", "tom:belief:inaccessible", "tom:belief:inaccessible:multiple-choice",
        "tom:answerability:binary", "tom:answerability:binary", "tom:info_accessibility:binary",
        "tom:answerability:list", "tom:info_accessibility:list",
    ]  # fmt: skip
    assert [bad.why for bad in imports.bad] == [
        "answerabilityQAs_binary[2]: its gold answer is 'error'"
    ]
    assert "evaluation" in imports.notes[0] and "evaluation" in imports.rows[0]["licence"]
    assert {row["provenance"] for row in imports.rows} == {"FANToM, fantom_v1.json:1"}
    by_kind = {row["question_type"]: row["complete_question"] for row in imports.rows}
    assert (
        by_kind["tom:answerability:list"] == "Question: What did Ben cook?\nWho knows the answer?"
    )
    assert by_kind["tom:info_accessibility:binary"] == (
        "Information: What did Ben cook? Ben cooked paella.\nDoes Ada? Answer yes or no."
    )
    sizes = {(r["missed_info_accessibility"], r["set_size"], r["set_beliefs"])
             for r in imports.rows if r.get("missed_info_accessibility")}  # fmt: skip
    assert sizes == {("inaccessible", 1, 1)}
    assert {r["set_size"] for r in imports.rows if "list" in r["question_type"]} == {4}
    letters = imports.rows[2]
    gold = "(a)" if letters["correct_answer"] == 0 else "(b)"
    assert f"{gold} Ada does not know it." in letters["complete_question"]


def test_imported_rows_are_playable_and_agree_with_their_gold(tmp_path: Path) -> None:
    task = task_of("fantom")
    imports = import_rows("fantom", released(tmp_path, record()))
    loaded = to_examples(task, [RawRow(row, str(i)) for i, row in enumerate(imports.rows)])
    assert len(loaded.examples) == len(imports.rows) and not loaded.bad
    for example in loaded.examples:
        assert asyncio.run(task.score(example, task.gold(example), NO_ONE)).value == 1


def test_the_order_of_options_follows_from_the_words(tmp_path: Path) -> None:
    many = [
        record(beliefQAs=[pair("tom:belief:accessible", f"What does Ada think of {i}?", "x", "y")])
        for i in range(40)
    ]
    rows = import_rows("fantom", released(tmp_path, *many)).rows
    golds = [r["correct_answer"] for r in rows if r["question_type"].endswith("choice")]
    assert rows == import_rows("fantom", released(tmp_path, *many)).rows
    assert 8 < sum(golds) < 32


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"short_context": ""}, "no text under 'short_context'"),
        ({"factQA": {"question": "What?"}}, "its factQA has no question with an answer"),
        ({"beliefQAs": ["?"]}, "beliefQAs[0]: it is not a question-answer pair"),
        ({"beliefQAs": [{"question": "What?"}]}, "beliefQAs[0]: it lacks a question or its type"),
    ],
)
def test_malformed_records_are_named(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    good = record(answerabilityQAs_binary=[])
    imports = import_rows("fantom", released(tmp_path, good, {**good, **changes}))
    assert len(imports.rows) >= 6
    assert [bad.source for bad in imports.bad] == ["fantom_v1.json:2"]
    assert why in imports.bad[0].why


def test_a_table_without_answers_is_no_original_file(tmp_path: Path) -> None:
    path = tmp_path / "flattened_fantom.csv"
    path.write_text(",question,question_type,set_id\n0,Who?,fact,1-0-0\n")
    with pytest.raises(DataError, match="not have the original format") as error:
        import_rows("fantom", path)
    assert "have no answers" in error.value.way_out


def conversations(path: Path) -> dict[str, str]:
    """Part → its utterances, one a line."""
    lines: dict[str, list[str]] = {}
    for row in read_rows(path)[0]:
        lines.setdefault(row.fields["part_id"], []).append(row.fields["utterance"])
    return {part: "\n".join(utterances) for part, utterances in lines.items()}


@pytest.mark.slow
def test_the_real_questions_are_of_known_types_and_fit_the_prompt() -> None:
    """With made-up golds: what is published can be read, rendered and answered in every form."""
    path = FOLDER / "flattened_fantom.csv"
    if not path.is_file():
        pytest.skip("no original file fantom/flattened_fantom.csv ($SOULKIT_TEST_DATA)")
    task, parts = task_of("fantom"), conversations(FOLDER / "Percept-FANToM.csv")
    rendered = 0
    for row in read_rows(path)[0]:
        fields = {**row.fields, "context": parts.get(row.fields["set_id"].rpartition("-")[0])}
        if fields["context"] is None:
            continue
        form = (
            task_of("fantom")
            .example(
                {**fields, "correct_answer": "0" if "choice" in fields["question_type"] else "no"}
            )
            .fields["form"]
        )
        example = task.example({**fields, "correct_answer": GOLDS[form]})
        if form == "choice":
            assert len(task.leak_view(example).options) == 2
        assert task.grade(example, task.parse(task.gold_completion(example))[0]) == 1
        rendered += fields["context"] in task.preview(example)[0].text
    assert rendered > 4000
