"""The original files of the releases, where a copy is at hand: every record is playable or named.

What stands in the files was counted by reading them apart from the importers. $SOULKIT_TEST_DATA
names their folder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from soulkit.data.files import RawRow
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.selfcheck import check_task
from tests.support.road import import_rows, original, task_of

TOMBENCH = {
    "Ambiguous Story Task": 200, "Completion of Failed Actions": 20, "Discrepant Desires": 20,
    "Discrepant Emotions": 40, "Discrepant Intentions": 40, "Emotion Regulation": 20,
    "False Belief Task": 600, "Knowledge-Attention Links": 20, "Knowledge-Pretend Play Links": 30,
    "Moral Emotions": 40, "Multiple Desires": 20, "Percepts-Knowledge Links": 40,
    "Prediction of Actions": 20, "Faux-pas Recognition Test": 560, "Hidden Emotions": 80,
    "Hinting Task Test": 103, "Persuasion Story Task": 100, "Scalar Implicature Test": 200,
    "Strange Story Task": 407, "Unexpected Outcome Test": 300,
}  # fmt: skip
"""File of the release → its items, each in two languages."""
SOUPS = [f"alignx/P-Soups_{part}.sample_150.jsonl" for part in ("friendly_unfriendly",
                                                                 "student_phd")]  # fmt: skip
QUICK = 300
"""Files with more rows are slow."""
# (task, file, rows, bad records, clusters, what is said of every bad record)
FILES: list[tuple[str, str, int, int, int | None, str]] = [
    *((f"alignx_{kind}", soup, 150, 0, None, "")
      for kind in ("demo", "pair", "arbitrary") for soup in SOUPS),
    ("coser", "coser/test_set.json", 200, 0, 101, ""),
    ("coser", "coser/sample_20.jsonl", 20, 0, 19, ""),
    ("coser", "coser/example_test_set.json", 3, 0, 2, ""),
    ("hitom", "hitom/Hi-ToM_data.json", 600, 0, 120, ""),
    ("hitom", "hitom/sample_cotp_200.jsonl", 200, 0, None, ""),
    ("mirrorbench", "mirrorbench/chatbot_arena_mirror.jsonl", 195, 0, 195, ""),
    ("mirrorbench", "mirrorbench/clariq_mirror.jsonl", 200, 0, 54, ""),
    ("mirrorbench", "clariq/multi_turn_human_generated_data.tsv", 498, 1, 61, "is blank"),
    ("mirrorbench", "clariq/dev.tsv", 2161, 152, 50, ""),
    ("mirrorbench", "clariq/test_with_labels.tsv", 4499, 0, 61, ""),
    ("mirrorbench", "clariq/sample_test_with_labels_200.jsonl", 200, 0, 56, ""),
    ("mirrorbench", "qulac/qulac_sample_200.json", 187, 13, 162, ""),
    ("mistakes", "mistakes/train.csv", 4370, 0, None, ""),
    ("mistakes", "mistakes/sample_train_200.jsonl", 483, 0, None, ""),
    ("paratomi", "paratomi/test.txt", 6004, 0, 6004, ""),
    ("paratomi", "tomi/Percept-ToMi.csv", 600, 0, None, ""),
    ("sim_doc", "simulatorarena/document_creation_annotations_for_benchmarking.json",
     51, 0, None, ""),
    ("socsci210", "socsci210/test_1pct.sample_200.jsonl", 188, 12, 19, " scale"),
    ("sotopia", "sotopia", 140, 0, 14, ""),
    *(("tombench", f"tombench/{name}.jsonl", 2 * items, 0, None, "")
      for name, items in TOMBENCH.items()),
    ("tomi", "tomi/fb_all_test.txt", 5994, 0, None, ""),
    ("tomi", "tomi/fixedtomi_test_balanced.jsonl", 1000, 0, None, ""),
    ("tomi", "tomi/Percept-ToMi.csv", 600, 0, None, ""),
    ("twinvoice", "twinvoice/dimension_1_results_gpt-4o-mini.sample_100.jsonl", 0, 100, 0,
     "it has no history"),
    ("twinvoice", "twinvoice/dimension_2_step1_generations_5rows.jsonl", 4, 1, None,
     "placeholders"),
    ("twinvoice", "twinvoice/dimension_3_choices.jsonl", 1186, 1, None,
     "no other line of its character"),
    ("userllm", "nq_open/NQ-open.dev.jsonl", 3610, 0, None, ""),
    ("userllm", "nq_open/NQ-open.efficientqa.test.1.1.sample_200.jsonl", 200, 0, None, ""),
    ("userllm", "commonsenseqa/dev_rand_split.hf_layout.jsonl", 1221, 0, None, ""),
    ("userllm", "commonsenseqa/dev_rand_split.original_layout_100.jsonl", 100, 0, None, ""),
]  # fmt: skip
CASES: list[Any] = [
    pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=[pytest.mark.slow] * (case[2] > QUICK))
    for case in FILES
]


@pytest.mark.parametrize(("name", "file", "rows", "bad", "clusters", "why"), CASES)
def test_every_record_becomes_a_playable_row_or_is_named(
    name: str, file: str, rows: int, bad: int, clusters: int | None, why: str
) -> None:
    imported = import_rows(name, original(file))
    assert (len(imported.rows), len(imported.bad)) == (rows, bad)
    assert all(why in one.why for one in imported.bad)
    assert all(row["provenance"] and row["licence"] for row in imported.rows)
    raw = [RawRow(row, str(i)) for i, row in enumerate(imported.rows)]
    task = task_of(name)
    loaded = to_examples(task, raw, forms=False)
    assert (len(loaded.examples) + loaded.duplicates, loaded.bad) == (rows, ())
    assert clusters is None or len({e.cluster for e in loaded.examples}) == clusters
    every = max(1, len(raw) // 8)
    for protocol in ("paper", "reference"):
        task = task_of(name, protocol)
        loaded = to_examples(task, raw[::every], forms=False)
        assert (len(loaded.examples) + loaded.duplicates, loaded.bad) == (len(raw[::every]), ())
        some = loaded.examples
        assert all(task.preview(example)[0].text for example in some)
        report = check_task(task, replace(loaded, examples=some))
        assert (report.gold_fails, report.wrong_passes, report.breaks) == ((), (), ())


@pytest.mark.parametrize("file", ["tomi/Percept-ToMi.csv", *SOUPS])
def test_an_import_gives_the_same_rows_again(file: str) -> None:
    name = "tomi" if file.startswith("tomi") else "alignx_pair"
    assert import_rows(name, original(file)) == import_rows(name, original(file))
