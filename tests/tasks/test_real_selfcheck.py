"""Original files against the scorers and the audit: $SOULKIT_TEST_DATA names the folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soulkit.judge.coach import LEAST_DISTINCT
from soulkit.tasks.audit import audit_rows
from soulkit.tasks.loading import examples_from
from soulkit.tasks.selfcheck import check_task
from tests.support.road import task_of

FOLDER = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere")


def original(name: str) -> str:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no original file {name} ($SOULKIT_TEST_DATA)")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["paper", "reference"])
@pytest.mark.parametrize(
    ("task", "name", "rows"),
    [
        ("hitom", "hitom/sample_cotp_200.jsonl", 200),
        ("paratomi", "tomi/Percept-ToMi.csv", 600),
        ("tomi", "tomi/fixedtomi_test_balanced.jsonl", 1000),
    ],
)
def test_every_published_gold_passes_its_scorer(
    task: str, name: str, rows: int, protocol: str
) -> None:
    live = task_of(task, protocol)
    report = check_task(live, examples_from(live, original(name)))
    assert (report.rows, report.gold_fails, report.wrong_passes, report.bad) == (rows, (), (), ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "name", "alike"),
    [
        ("hitom", "hitom/sample_cotp_200.jsonl", False),
        ("paratomi", "tomi/Percept-ToMi.csv", False),
        ("tomi", "tomi/fixedtomi_test_balanced.jsonl", False),
        ("twinvoice", "twinvoice/dimension_3_choices.jsonl", True),
        ("mistakes", "mistakes/sample_train_200.jsonl", True),
        ("socsci210", "socsci210/test_1pct.sample_200.jsonl", True),
        ("alignx_demo", "alignx/P-Soups_student_phd.sample_150.jsonl", True),
        ("tombench", "tombench/False Belief Task.jsonl", True),
    ],
)
def test_rules_answer_to_the_draft_where_they_are_the_default_coach(
    task: str, name: str, alike: bool
) -> None:
    live = task_of(task)
    report = check_task(live, examples_from(live, original(name)))
    assert report.feedback_drafts >= 150
    assert (report.feedback_texts < LEAST_DISTINCT * report.feedback_drafts) is alike
    assert (live.spec.players.under("paper", "coach") == "symbolic") is not alike


def test_some_rows_of_hitom_name_one_container_only() -> None:
    task = task_of("hitom")
    audit = audit_rows(task, examples_from(task, original("hitom/Hi-ToM_data.json")))
    assert audit.rows == 600 and audit.count("leak") == 10, "the half that an import keeps"
    assert audit.favourite == "L" and audit.position is not None and audit.position.hits == 93


def test_the_letters_of_tombench_are_not_balanced() -> None:
    task = task_of("tombench")
    file = original("tombench/Ambiguous Story Task.jsonl")
    audit = audit_rows(task, examples_from(task, file, forms=False))
    assert audit.positions == {"A": 92, "B": 128, "C": 136, "D": 44}
    assert audit.position is not None and audit.position.notable
