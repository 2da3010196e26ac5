"""The original files, where a copy is at hand: $SOULKIT_TEST_DATA names the folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soulkit.data.files import RawRow
from soulkit.tasks.loading import to_examples
from soulkit.tasks.registry import load_registry
from tests.support.road import import_rows

FOLDER = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere")


def original(name: str) -> Path:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no original file {name} ($SOULKIT_TEST_DATA)")
    return path


@pytest.mark.parametrize(
    ("task", "name", "half", "rows", "clusters"),
    [
        ("hitom", "hitom/Hi-ToM_data.json", None, 600, 120),
        ("hitom", "hitom/Hi-ToM_data.json", "vp", 600, 120),
        ("hitom", "hitom/sample_cotp_200.jsonl", None, 200, None),
        ("paratomi", "paratomi/test.txt", None, 6004, 6004),
        ("paratomi", "tomi/Percept-ToMi.csv", None, 600, None),
        ("tomi", "tomi/fb_all_test.txt", None, 5994, None),
        ("tomi", "tomi/fixedtomi_test_balanced.jsonl", None, 1000, None),
        ("tomi", "tomi/Percept-ToMi.csv", None, 600, None),
    ],
)
def test_every_row_is_imported_binds_and_has_its_gold_among_the_candidates(
    task: str, name: str, half: str | None, rows: int, clusters: int | None
):
    imported = import_rows(task, original(name), half)
    assert (len(imported.rows), imported.bad) == (rows, ())
    live = load_registry().task(task)
    loaded = to_examples(live, [RawRow(row, str(i)) for i, row in enumerate(imported.rows)])
    assert len(loaded.examples) + loaded.duplicates == rows and not loaded.bad
    if task != "hitom":
        gold = "answer" if task == "tomi" else "correct_answer"
        assert all(e.fields[gold] in e.fields["cands"] for e in loaded.examples)
    if clusters is not None:
        assert len({e.cluster for e in loaded.examples}) == clusters


def test_the_halves_of_hitom_contradict_each_other():
    imported = import_rows("hitom", original("hitom/Hi-ToM_data.json"), "all")
    assert len(imported.rows) == 1200
    assert "600 questions twice" in imported.notes[0] and "golds to 138" in imported.notes[0]
