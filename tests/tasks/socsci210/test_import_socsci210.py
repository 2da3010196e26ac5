"""SocSci210's instruction layout: small files written here, and the real sample where it lies."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from soulkit.data.files import RawRow
from soulkit.errors import DataError
from soulkit.tasks.loading import to_examples
from soulkit.tasks.registry import load_registry
from tests.support.road import import_rows

SAMPLE = (
    Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere") / "socsci210/test_1pct.sample_200.jsonl"
)


def record(scenario: str, output: str, **more: object) -> dict[str, object]:
    text = f"Demographics: Age: 40; Job: roofer\n\nScenario: {scenario}"
    return {"instruction": "Predict.", "input": text, "output": output, "study_id": "s1",
            "condition_num": 2, **more}  # fmt: skip


def write(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_record_becomes_a_row_with_its_scale(tmp_path: Path) -> None:
    question = "How? Only return an integer from 1 to 5, where 1 means no and 5 means yes."
    imports = import_rows("socsci210", write(tmp_path, record(question, "Response: 4")))
    (row,) = imports.rows
    assert row["prompt_text"].startswith("Demographics: Age: 40")
    assert (row["persona"], row["response"]) == ("Age: 40; Job: roofer", 4)
    assert (row["r_min"], row["r_max"], row["response_type"]) == (1, 5, "ordinal")
    assert (row["study_id"], row["condition_id"], row["index"]) == ("s1", 2, 0)
    assert row["provenance"] == "rows.jsonl:1" and row["licence"]


def test_what_cannot_be_valued_is_bad_with_its_reason(tmp_path: Path) -> None:
    scale = "How? Only return an integer from 1 to 5."
    path = write(tmp_path, record(scale, "Response: 4"), record(scale, "Response: 9"),
                 record("How many dollars?", "Response: 4"), record(scale, "none"),
                 {"input": " ", "output": "Response: 1"})  # fmt: skip
    imports = import_rows("socsci210", path)
    assert len(imports.rows) == 1
    assert [bad.source for bad in imports.bad] == [f"rows.jsonl:{n}" for n in (2, 3, 4, 5)]
    whys = " / ".join(bad.why for bad in imports.bad)
    for words in ("off the scale from 1 to 5", "states no scale", "no number", "no text under"):
        assert words in whys


def test_another_file_is_refused_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not of the original format"):
        import_rows("socsci210", write(tmp_path, {"study_id": "s", "conditions": {}}))


@pytest.mark.skipif(not SAMPLE.is_file(), reason="no original file ($SOULKIT_TEST_DATA)")
def test_the_real_sample_imports_renders_and_passes_the_gold_check() -> None:
    imports = import_rows("socsci210", SAMPLE)
    assert (len(imports.rows), len(imports.bad)) == (188, 12)
    reasons = [bad.why for bad in imports.bad]
    assert sum("states no scale" in why for why in reasons) == 6
    assert sum("off the scale" in why for why in reasons) == 6
    for protocol in ("paper", "reference"):
        task = load_registry().task("socsci210", protocol)  # type: ignore[arg-type]
        loaded = to_examples(task, [RawRow(row, str(i)) for i, row in enumerate(imports.rows)])
        assert (len(loaded.examples) + loaded.duplicates, loaded.bad) == (188, ())
        assert len({example.cluster for example in loaded.examples}) == 19
        for example in loaded.examples:
            text = task.preview(example)[0].text
            assert "Scenario:" in text and "nothing else" not in text
            answer, status = task.read(example, task.gold_completion(example))  # type: ignore[attr-defined]
            assert status == "ok"
            assert task.grade(example, answer) == 1  # type: ignore[attr-defined]
