"""MISTAKES from Eedi's files: small ones written here, and the original where it is at hand."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli import app as cli
from soulkit.data.files import RawRow
from soulkit.errors import ConfigError, DataError
from soulkit.tasks.loading import load_examples, to_examples
from soulkit.tasks.mistakes.importer import wrong_options
from soulkit.tasks.selfcheck import check_task
from tests.support.road import build_rows, import_rows, task_of

FOLDER = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere") / "mistakes"
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


def made(**changes: Any) -> list[RawRow]:
    return [RawRow({**QUESTION, **changes}, "train.csv:2")]


def files(folder: Path, *questions: Mapping[str, Any]) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(q) + "\n" for q in questions))
    lines = "".join(f"{number},{name}\n" for number, name in NAMES.items())
    (folder / "misconception_mapping.csv").write_text(f"MisconceptionId,MisconceptionName\n{lines}")
    return path


def test_one_row_per_labelled_wrong_option() -> None:
    imports = wrong_options(made(), NAMES, "train.csv")
    assert [row["id"] for row in imports.rows] == ["7_A", "7_C"]
    assert imports.bad == imports.notes == ()
    row = imports.rows[1]
    assert (row["TargetOption"], row["TargetAnswer"], row["CorrectAnswer"]) == ("C", "1/6", "B")
    assert (row["MisconceptionId"], row["MisconceptionName"]) == (12, "Multiplies instead")
    assert row["provenance"] == "train.csv:7" and "competition" in row["licence"]
    assert row["rivals"] == 0 and row["SubjectName"] == "Fractions"


def test_options_with_the_same_misconception_are_counted_and_told() -> None:
    imports = wrong_options(made(MisconceptionDId=11), NAMES)
    assert [row["rivals"] for row in imports.rows] == [1, 0, 1]
    assert "In 2 of 3 rows" in imports.notes[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"MisconceptionAId": "99"}, "misconception 99 has no name"),
        ({"MisconceptionAId": "eleven"}, "is no number"),
        ({"MisconceptionAId": "1.5"}, "is no number"),
        ({"CorrectAnswer": "E"}, "no letter from A to D"),
        ({"CorrectAnswer": "AB"}, "no letter from A to D"),
        ({"AnswerDText": " "}, "no text under 'AnswerDText'"),
        ({"QuestionText": None}, "no text under 'QuestionText'"),
    ],
)
def test_bad_questions_are_named(changes: dict[str, Any], why: str) -> None:
    imports = wrong_options(made(**changes), NAMES)
    assert imports.bad[0].source == "train.csv:2" and why in imports.bad[0].why


def test_files_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = files(tmp_path, QUESTION)
    assert len(import_rows("mistakes", path).rows) == 2
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "?"}\n')
    for call in (
        lambda: build_rows("mistakes", other),
        lambda: build_rows("mistakes", path, other),
    ):
        with pytest.raises(DataError, match="not of the original format"):
            call()
    (tmp_path / "misconception_mapping.csv").unlink()
    with pytest.raises(DataError, match=r"no .misconception_mapping\.csv. beside"):
        build_rows("mistakes", path)
    with pytest.raises(ConfigError, match="not built from several files"):
        build_rows("tomi", path)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = files(tmp_path, QUESTION, {**QUESTION, "QuestionId": "8", "MisconceptionAId": "99"})
    target = tmp_path / "rows.jsonl"
    code = cli.main(["data", "build", "mistakes", str(path), "-o", str(target), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 2 and report["rows"] == 3 and len(report["bad"]) == 1
    assert len(load_examples(task_of("mistakes"), [target]).examples) == 2, "8_C says the same"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("train.csv", 4370), ("sample_train_200.jsonl", 483)])
def test_every_original_pair_is_imported_renders_and_passes_the_gold_check(
    name: str, rows: int
) -> None:
    if not (FOLDER / name).is_file():
        pytest.skip(f"no original file {name} ($SOULKIT_TEST_DATA)")
    imports = import_rows("mistakes", FOLDER / name)
    assert (len(imports.rows), imports.bad) == (rows, ())
    task = task_of("mistakes")
    loaded = to_examples(task, [RawRow(row, str(i)) for i, row in enumerate(imports.rows)])
    assert (len(loaded.examples), loaded.bad) == (rows, ())
    assert all(e.fields["MisconceptionName"] in task.preview(e)[0].text for e in loaded.examples)
    checked = check_task(task, loaded)
    assert not checked.gold_fails + checked.wrong_passes + checked.wrong_unread + checked.no_wrong
