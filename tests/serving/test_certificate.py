"""Certificates: what they collect, and for which weights they count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from soulkit.errors import RunError
from soulkit.models.local.weights import weights_hash
from soulkit.people.continuations import FILE as CLOSENESS
from soulkit.people.continuations import closeness_folder
from soulkit.runs.jsonl import CERTIFICATE_SCHEMA, schema_file, write_json
from soulkit.serving.certificate import (
    FILE,
    certificate_lines,
    certify,
    copy_certificate,
    find_certificate,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with (meaningless) weights; nothing here loads them."""
    folder = tmp_path / "simulator"
    folder.mkdir()
    (folder / "config.json").write_text("{}", "utf-8")
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    return folder


def evaluation(folder: Path, weights: str, command: str = "eval local") -> Path:
    """A finished run with one headline."""
    cells = {
        "accuracy": {"mean": 0.5, "ci_low": 0.25, "ci_high": 0.75, "n_scored": 9, "n": 10,
                     "headline": True},
        "length": {"mean": 12.0, "n_scored": 9, "n": 10},
    }  # fmt: skip
    actor = {"model": "simulator", "weights": weights}
    write_json(folder / "summary.json", {
        "schema": "soulkit/summary@1", "command": command, "protocol": "paper", "n": 10,
        "n_scored": 9, "tasks": {"tom": cells}, "provenance": {"actor": actor},
    })  # fmt: skip
    return folder


def test_a_certificate_collects_scores_and_names_what_is_missing(
    model: Path, tmp_path: Path
) -> None:
    run = evaluation(tmp_path / "scored", weights_hash(model))
    certificate, file = certify(str(model), runs=[run])
    assert file == model / FILE
    assert certificate == find_certificate(str(model))
    (score,) = certificate["scores"]
    assert (score["task"], score["metric"], score["low"]) == ("tom", "accuracy", 0.25)
    text = "\n".join(certificate_lines(certificate))
    assert "tom: accuracy 0.500 [0.250, 0.750], 9 of 10 scored, scored by rules, run scored" in text
    assert "Not measured: closeness to people, memory of private items" in text


def test_scores_of_other_weights_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    other = evaluation(tmp_path / "other", "0123456789abcdef")
    with pytest.raises(RunError, match=r"other.* is no evaluation of") as error:
        certify(str(model), runs=[other])
    assert "0123456789abcdef" in error.value.why
    assert weights_hash(model) in error.value.why
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    with pytest.raises(RunError, match=r"unfinished.* is no evaluation of") as error:
        certify(str(model), runs=[unfinished])
    assert "no recorded weights" in error.value.why


def test_nothing_known_is_no_certificate(model: Path) -> None:
    with pytest.raises(RunError, match="Nothing was measured"):
        certify(str(model))
    assert find_certificate(str(model)) is None
    assert certificate_lines(None)[0].startswith("No certificate: ")


def test_other_weights_and_changed_numbers_do_not_count(model: Path, tmp_path: Path) -> None:
    certify(str(model), runs=[evaluation(tmp_path / "scored", weights_hash(model))])
    valid = json.loads((model / FILE).read_text("utf-8"))
    score = {**valid["scores"][0], "mean": 0.99}
    for changed in (valid | {"scores": [score]}, valid | {"scores": 3}, {"model": []}, {}):
        write_json(model / FILE, changed)
        invalid = find_certificate(str(model))
        assert invalid is not None
        assert set(invalid) == {"schema", "stale"}
        assert "was changed" in certificate_lines(invalid)[0]

    certify(str(model), runs=[tmp_path / "scored"])
    before = weights_hash(model)
    (model / "model.safetensors").write_bytes(b"trained" * 100)
    stale = find_certificate(str(model))
    assert stale is not None
    assert before in stale["stale"]
    assert weights_hash(model) in stale["stale"]


def test_an_exported_model_takes_its_certificate_along(model: Path, tmp_path: Path) -> None:
    certify(str(model), runs=[evaluation(tmp_path / "scored", weights_hash(model))])
    merged, stranger = tmp_path / "merged", tmp_path / "stranger"
    for folder in (merged, stranger):
        folder.mkdir()
        (folder / "config.json").write_text("{}", "utf-8")
        (folder / "model.safetensors").write_bytes(folder.name.encode() * 50)
    copy_certificate(str(model), merged)
    shutil.copy(model / FILE, stranger)
    certificate = find_certificate(str(merged))
    assert certificate is not None
    assert certificate["revision"] == (find_certificate(str(model)) or {})["revision"]
    assert "stale" in (find_certificate(str(stranger)) or {})


def test_closeness_counts_only_for_the_weights_that_were_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = evaluation(tmp_path / "scored", weights_hash(model))
    line = {"name": "length", "label": "length", "difference": -1.0, "p_holm": 0.01}
    numbers = {
        "headline": {"name": "words", "value": 3.0}, "ratios": {"distance": 1.5, "words": 3.0},
        "distance": {}, "words": {}, "context": {}, "likelihood": None, "perplexity": None,
        "lines": [line, {**line, "p_holm": None}],
    }  # fmt: skip
    for weights in ("ffff", weights_hash(model)):
        entry = {"name": "x", "step": None, "weights": weights, "key": "k", "no_reply": 0}
        write_json(closeness_folder(str(model)) / CLOSENESS, {
            "persons": 12, "turns": 40, "conversations": 12, "data": "home/chats.jsonl",
            "side": "human", "seed": 0, "models": [{**entry, **numbers}], "against": None,
        })  # fmt: skip
        closeness = certify(str(model), runs=[run])[0]["closeness"]
        assert bool(closeness) == (weights != "ffff")
    assert closeness["lines"] == numbers["lines"]
    assert closeness["data"] == "chats.jsonl"
    text = "\n".join(certificate_lines(find_certificate(str(model))))
    assert "distance 1.50, words 3.00" in text
    assert "in 1 of 2 features; measured on 12 persons, 40 messages" in text
    assert "Not measured: memory of private items, whether the people were in training" in text


def test_the_schema_of_the_file(model: Path, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    certify(str(model), runs=[evaluation(tmp_path / "scored", weights_hash(model))])
    schema = json.loads(schema_file(CERTIFICATE_SCHEMA).read_text("utf-8"))
    jsonschema.validate(json.loads((model / FILE).read_text("utf-8")), schema)
