"""Scenes of several characters through the command: what trains is what each character said."""

from __future__ import annotations

from pathlib import Path

import pytest

from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.runs.records import load_records
from soulkit.tasks.coser.coach import scripted_environment
from soulkit.train.objectives.sequences import copied_spans, emitted_spans
from soulkit.train.run import tiny_model_texts
from soulkit.types import Record
from tests.support.coser import Body, critics
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import lines_of, rows, soul

WEAK = {"anthropomorphism": 12, "storyline_quality": 7}


def served(body: Body) -> str:
    """Critics who like longer words, and the scripted surroundings."""
    if body["model"] == "judge":
        return critics({**WEAK, "character_fidelity": len(str(body)) % 9})(body)
    return scripted_environment(body["messages"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    task, examples = rows("coser", 8)
    texts = tiny_model_texts([(task, example) for example in examples])
    build_tiny(folder, [*texts, served({"model": "environment", "messages": []})], max_context=8192)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three Ditto steps of one scene each."""
    out = tmp_path_factory.mktemp("runs") / "coser"
    with ScriptedServer(answer=served) as server:
        done = soul(
            "train", "ditto", "--model", folder, "--task", "coser", "--data", "coser=synth:8",
            "--environment", f"endpoint:environment@{server.base_url}", "--judge",
            f"endpoint:judge@{server.base_url}", "--coach", "symbolic", "--steps", 3,
            "--prompts", 1, "--group-size", 2, "--max-tokens", 6, "--lr", 1e-3, "--lora-r", 4,
            "--out", out,
        )  # fmt: skip
    assert done == 0
    return out


def trained_of(record: Record) -> int:
    return sum(
        len(turn.completion.token_ids) for trace in record.episode.traces for turn in trace.turns
    )


@pytest.mark.slow
def test_three_steps_train_what_the_characters_emitted(run: Path) -> None:
    records = load_records(run / "episodes.jsonl")
    assert {record.kind for record in records} == {"draft", "refined"} and len(records) == 12
    assert all(record.score.scored for record in records)
    for line in lines_of(run):
        of_step = [record for record in records if record.step == line["step"]]
        drafts, refined = (
            sum(trained_of(r) for r in of_step if r.kind == kind) for kind in ("draft", "refined")
        )
        assert (line["trained/draft"], line["trained/refined"]) == (drafts, refined)
        assert line["trained/copy"] == refined


@pytest.mark.slow
def test_copies_are_paired_by_character_and_equal_to_the_token(run: Path, folder: Path) -> None:
    renderer = LocalModel.load(folder).renderer()
    records = load_records(run / "episodes.jsonl")
    for record in records:
        spoke = {line.seat for line in record.episode.transcript} - {"Environment"}
        assert {trace.seat for trace in record.episode.traces} >= spoke
        for trace in record.episode.traces:
            emitted = [i for turn in trace.turns for i in turn.completion.token_ids]
            spans = emitted_spans(trace)
            assert [i for s in spans for i, on in zip(s.ids, s.trained, strict=True) if on] == (
                emitted
            )
            if record.kind != "refined":
                continue
            assert record.given is not None
            copies = copied_spans(trace, renderer)
            assert [s.sampler for s in copies] == [s.sampler for s in spans]
            assert [
                i for s in copies for i, on in zip(s.ids, s.trained, strict=True) if on
            ] == emitted
            assert sum(len(s.ids) for s in copies) < sum(len(s.ids) for s in spans)


@pytest.mark.slow
def test_silent_characters_are_left_out(run: Path) -> None:
    for record in load_records(run / "episodes.jsonl"):
        assert all(trace.turns for trace in record.episode.traces)
        seats = [trace.seat for trace in record.episode.traces]
        assert len(seats) == len(set(seats)) and "Environment" not in seats
