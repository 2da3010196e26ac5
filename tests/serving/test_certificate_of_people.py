"""A certificate of a tiny model that learned from recorded people, and one of a bland model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from soulkit.people.continuations import measure_closeness
from soulkit.serving.certificate import certificate_lines, certify
from tests.support.evaluation import soul

DATA = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere") / "simulatorarena"
BLAND = "replies: ['Could you please help me with this?']\nrules:\n- {purpose: ends, say: GO ON}\n"


def write_chats(file: Path) -> None:
    """The first turns of SimulatorArena's conversations with their persons, cut short."""
    rows = []
    for name in ("document_creation_annotations", "math_tutoring_annotations_redacted"):
        path = DATA / f"{name}_for_benchmarking.json"
        for row in json.loads(path.read_text("utf-8")):
            pairs = zip(row["user_queries"][:3], row["ai_responses"], strict=False)
            messages = [
                {"role": role, "content": text[:limit]}
                for query, reply in pairs
                for role, text, limit in (("user", query, 200), ("assistant", reply or "", 60))
            ]
            if all(isinstance(one["content"], str) and one["content"] for one in messages):
                rows.append({"data_source": name, "person": row["workerId"], "messages": messages})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="no original files ($SOULKIT_TEST_DATA)")
def test_a_model_of_people_is_closer_to_others_than_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_chats(Path("chats.jsonl"))
    split = "data split chats.jsonl --by person --share 0.5 --out d"
    train = "train sft --model tiny --full --data d/train.jsonl --turns 2 --side human --steps 20"
    assert soul(*split.split()) == 0
    assert soul(*train.split(), "--batch", 4, "--allow-private", "--out", "tuned") == 0
    report = measure_closeness(
        "tuned", "d/held_out.jsonl", against="tuned/base", limit=14, flags={"max_tokens": 10}
    )
    certificate, file = certify("tuned")
    assert file == Path("tuned/certificate.json")
    measured, entry = certificate["closeness"], report["models"][-1]
    assert {name: measured[name] for name in entry.keys() & measured.keys()} == {
        name: entry[name] for name in entry.keys() & measured.keys()
    }
    assert measured["against"]["high"] < 0, "closer to unseen people than its base"
    assert measured["persons_in_training"] == 0
    before = {path: path.stat().st_mtime_ns for path in Path("tuned").rglob("*") if path.is_file()}
    again = measure_closeness(
        "tuned", "d/held_out.jsonl", against="tuned/base", limit=14, flags={"max_tokens": 10}
    )
    assert again == report
    after = {path: path.stat().st_mtime_ns for path in Path("tuned").rglob("*") if path.is_file()}
    assert before == after, "nothing is measured twice"

    Path("bland.yaml").write_text(BLAND, "utf-8")
    bland, _ = certify("scripted:bland.yaml", "d/held_out.jsonl", target=Path("bland.json"))
    lines = bland["closeness"]["lines"]
    assert sum((line["p_holm"] or 1) < 0.05 for line in lines) > len(lines) / 2
    assert any("whether the people were in training" in one for one in certificate_lines(bland))
