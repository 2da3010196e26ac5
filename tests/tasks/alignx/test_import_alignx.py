"""Importing AlignX: small files made here, and the real P-Soups where $SOULKIT_TEST_DATA has it."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import RawRow
from soulkit.errors import ConfigError, DataError
from soulkit.tasks.loading import to_examples
from soulkit.tasks.registry import load_registry
from soulkit.tasks.selfcheck import check_task
from soulkit.types import Protocol
from tests.support.road import import_rows, importable

FOLDER = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere")
PAIR = {"prompt": "p", "chosen": "c", "rejected": "r", "Preference Direction": [0, 1]}
RECORD: dict[str, Any] = {
    "prompt": "Shorten this.",
    "chosen": "Short.",
    "rejected": "Rather long.",
    "profile": "Young, likes science",
    "ground_truth_persona": "Write tersely.",
    "Pair-wise Comparative Feedback": [PAIR, PAIR, PAIR, PAIR],
}


def written(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_a_split_keeps_its_evidence_and_all_of_it(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", RECORD)
    (demo,) = import_rows("alignx_demo", path).rows
    (pair,) = import_rows("alignx_pair", path).rows
    (both,) = import_rows("alignx_arbitrary", path).rows
    assert "icl_pairs" not in demo and demo["profile"] == RECORD["profile"]
    assert "profile" not in pair and pair["n_icl"] == len(pair["icl_pairs"]) == 4
    assert both["profile"] and both["icl_pairs"] == pair["icl_pairs"]
    assert set(pair["icl_pairs"][0]) == {"prompt", "chosen", "rejected"}
    assert (both["index"], both["provenance"]) == (0, "x.jsonl:1") and "none" in both["licence"]


def test_alignx_proper_has_descriptions_and_comments(tmp_path: Path) -> None:
    comments = [{"prompt": "p", "comment": "c", "Preference Direction": [0.5]}]
    full = {**RECORD, "Demographic Information": "A cook.", "User-Generated Content": comments}
    path = written(tmp_path / "x.jsonl", full)
    (row,) = import_rows("alignx_ugc", path).rows
    assert row["ugc"] == [{"prompt": "p", "comment": "c"}] and row["n_ugc"] == 1
    live = load_registry().task("alignx_demo")
    (demo,) = import_rows("alignx_demo", path).rows
    assert live.example(demo).fields["persona"] == "A cook."


def test_a_compared_pair_that_is_the_question_is_left_out(tmp_path: Path) -> None:
    question_pair = {k: RECORD[k] for k in ("prompt", "chosen", "rejected")}
    other = {**RECORD, "Pair-wise Comparative Feedback": json.dumps([PAIR, question_pair])}
    imports = import_rows("alignx_pair", written(tmp_path / "x.jsonl", RECORD, other))
    assert [len(row["icl_pairs"]) for row in imports.rows] == [4, 1]
    assert imports.rows[1]["n_icl"] == 1 and "1 rows had their own answer" in imports.notes[1]
    only = {**RECORD, "Pair-wise Comparative Feedback": [question_pair]}
    nothing_left = import_rows("alignx_pair", written(tmp_path / "y.jsonl", only))
    assert not nothing_left.rows and "none of Pair-wise" in nothing_left.bad[0].why


def test_records_that_are_no_rows_are_named(tmp_path: Path) -> None:
    same = {**RECORD, "rejected": " Short. "}
    bare = {k: RECORD[k] for k in ("prompt", "chosen", "rejected")}
    path = written(tmp_path / "x.jsonl", RECORD, same, bare, {**RECORD, "chosen": ""})
    imports = import_rows("alignx_pair", path)
    assert len(imports.rows) == 1 and [b.source for b in imports.bad] == [
        f"x.jsonl:{n}" for n in (2, 3, 4)
    ]
    assert "say the same" in imports.bad[0].why and "Pair-wise" in imports.bad[1].why
    assert "licence" in imports.notes[0]
    with pytest.raises(DataError, match="original format"):
        import_rows("alignx_pair", written(tmp_path / "y.jsonl", {"story": "x"}))
    with pytest.raises(ConfigError):
        import_rows("alignx_history16", path)
    assert "alignx_history16" not in importable()


@pytest.mark.parametrize("task", ["alignx_demo", "alignx_pair", "alignx_arbitrary"])
@pytest.mark.parametrize("part", ["friendly_unfriendly", "student_phd"])
@pytest.mark.parametrize("protocol", ["paper", "reference"])
def test_p_soups(task: str, part: str, protocol: Protocol) -> None:
    path = FOLDER / "alignx" / f"P-Soups_{part}.sample_150.jsonl"
    if not path.is_file():
        pytest.skip(f"no original file {path.name} ($SOULKIT_TEST_DATA)")
    imports = import_rows(task, path)
    assert (len(imports.rows), imports.bad) == (150, ())
    assert import_rows(task, path) == imports
    assert len(imports.notes) == (1 if task == "alignx_demo" else 2)
    live = load_registry().task(task, protocol)
    loaded = to_examples(live, [RawRow(row, row["provenance"]) for row in imports.rows])
    orders = 2 if protocol == "paper" else 1
    assert (len(loaded.examples), loaded.duplicates, loaded.bad) == (150 * orders, 0, ())
    checked = check_task(live, loaded)
    for findings in (checked.gold_fails, checked.wrong_passes, checked.wrong_unread,
                     checked.no_gold, checked.no_wrong, checked.unscored):  # fmt: skip
        assert findings == ()
    if protocol == "paper":
        assert Counter(e.tags["gold"] for e in loaded.examples) == {"A": 150, "B": 150}
    for example in loaded.examples:
        # In some of the compared replies the instruction behind them shines through.
        if task == "alignx_demo":
            assert example.fields["ground_truth_persona"] not in live.preview(example)[0].text
        assert live.within_budget(example.visible("reader"))[1] == {}
