"""The tracker and the readers against the published files, when they are at hand."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from soulkit.tasks.labels import LabelAudit as LabelAudit
from soulkit.tasks.labels import write_disputed
from soulkit.tasks.tom.audit import audit_hitom, audit_paratomi, audit_tomi
from soulkit.tasks.tom.stories.explain import explain
from soulkit.tasks.tom.stories.sources import (
    StoryItem,
    read_fixed_tomi,
    read_hitom_json,
    read_percept_tomi,
)


def data(*parts: str) -> Path:
    root = os.environ.get("SOULKIT_TEST_DATA")
    path = Path(root, *parts) if root else None
    if path is not None and path.exists():
        return path
    missing = f"{path or 'SOULKIT_TEST_DATA'} is not there"
    if "data" in os.environ.get("SOULKIT_REQUIRE", "").split(","):
        pytest.fail(missing)
    pytest.skip(missing)


def numbers(report: LabelAudit) -> tuple[int, int]:
    assert report.unread == ()
    return report.overall.agreed, report.overall.total


def test_fixed_tomi() -> None:
    report = audit_tomi(data("tomi", "fixedtomi_test_balanced.jsonl"))
    agreed, total = numbers(report)
    assert total == 1000 and agreed >= 999


@pytest.mark.slow
def test_tomi_test_split_disputes_only_second_order() -> None:
    trace = data("tomi", "fb_all_test.trace")
    report = audit_tomi(data("tomi", "fb_all_test.txt"), trace)
    agreed, total = numbers(report)
    assert total == 5994 and agreed >= 5530
    assert {d.order for d in report.disputed} == {"2"}


@pytest.mark.slow
@pytest.mark.parametrize("traced", [True, False])
def test_paratomi(traced: bool) -> None:
    trace = data("paratomi", "test.trace") if traced else None
    agreed, total = numbers(audit_paratomi(data("paratomi", "test.txt"), trace))
    assert total == 6004 and agreed >= 5997


def test_percept_tomi() -> None:
    agreed, total = numbers(audit_tomi(data("tomi", "Percept-ToMi.csv")))
    assert total == agreed == 600


@pytest.mark.slow
def test_hitom_halves(tmp_path: Path) -> None:
    report = audit_hitom(data("hitom", "Hi-ToM_data.json"))
    assert numbers(report) == (1053, 1200)
    assert report.by["prompting_type"]["CoTP"].agreed >= 583
    assert report.by["prompting_type"]["VP"].agreed == 470
    assert report.by["order"]["0"].share == report.by["order"]["1"].share == 1.0
    assert report.contradictions == 138
    assert write_disputed(report, tmp_path / "disputed.jsonl") == 147
    first = json.loads((tmp_path / "disputed.jsonl").read_text().splitlines()[0])
    assert {"id", "gold", "tracker", "order", "deception", "length"} <= first.keys()


@pytest.mark.slow
def test_disputed_paratomi_rows_are_the_known_ones() -> None:
    report = audit_paratomi(data("paratomi", "test.txt"), data("paratomi", "test.trace"))
    audits = data("paratomi", "label_audit_test.jsonl").read_text().splitlines()
    assert {d.id for d in report.disputed} == {str(json.loads(k)["question_index"]) for k in audits}


def explained(task: str, items: Iterable[StoryItem]) -> Counter[bool]:
    counts: Counter[bool] = Counter()
    for item in items:
        assert item.story is not None
        row = {"story": list(item.story.lines), "question": item.text}
        counts[explain(task, row, item.gold) is not None] += 1
    return counts


@pytest.mark.slow
def test_real_rows_are_explained() -> None:
    fixed = explained("tomi", read_fixed_tomi(data("tomi", "fixedtomi_test_balanced.jsonl")))
    percept = explained("paratomi", read_percept_tomi(data("tomi", "Percept-ToMi.csv")))
    hitom = explained("hitom", read_hitom_json(data("hitom", "Hi-ToM_data.json")))
    assert (fixed[True], percept[True], hitom[True]) == (1000, 600, 1200)
