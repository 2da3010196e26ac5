"""Judged dialogues through the command: what trains is what the actor's seats said."""

from __future__ import annotations

from pathlib import Path

import pytest

from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.runs.records import load_records
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.objectives.sequences import copied_spans, emitted_spans
from soulkit.types import Record
from tests.support.road import synth_examples
from tests.support.servers.answers import Anybody
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import lines_of, soul

pytestmark = pytest.mark.slow
TASKS = ("coser", "humanual_email", "mirrorbench", "sotopia")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows the words of all prompts, so that they stay short."""
    tasks = load_registry().task
    texts = [
        part.text
        for name in TASKS
        for example in synth_examples(name, 8)
        for seat in tasks(name).previews(example).values()
        for part in seat
    ]
    place = tmp_path_factory.mktemp("models") / "tiny"
    return build_tiny(place, texts, max_context=8192)


@pytest.fixture(scope="module", params=TASKS)
def run(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """One Ditto step."""
    out, task = tmp_path_factory.mktemp("runs") / request.param, request.param
    with ScriptedServer(answer=Anybody()) as server:
        players = [f"endpoint:{role}@{server.base_url}" for role in ("partner", "judge")]
        done = soul(
            "train", "ditto", "--model", folder, "--task", task, "--data", f"{task}=synth:8",
            "--partner", players[0], "--environment", players[0], "--judge", players[1],
            "--coach", "symbolic", "--steps", 1, "--prompts", 1, "--group-size", 2,
            "--max-tokens", 6, "--lr", 1e-3, "--lora-r", 4, "--out", out,
        )  # fmt: skip
    assert done == 0
    return out


def test_the_judges_words_are_the_feedback(folder: Path, tmp_path: Path) -> None:
    calls = {}
    for coach in ("raw", "judge"):
        with ScriptedServer(answer=Anybody()) as server:
            done = soul(
                "train", "ditto", "--model", folder, "--task", "sotopia", "--data", "synth:8",
                "--judge", f"endpoint:judge@{server.base_url}", "--partner",
                f"endpoint:partner@{server.base_url}", "--coach", coach, "--steps", 1,
                "--prompts", 1, "--group-size", 2, "--max-tokens", 6, "--lora-r", 4,
                "--leak-check", "off", "--out", tmp_path / coach,
            )  # fmt: skip
            calls[coach] = server.requests
        assert done == 0
    drafts = [r for r in load_records(tmp_path / "raw" / "episodes.jsonl") if r.kind == "draft"]
    given = [draft.received for draft in drafts]
    assert [one and one.text for one in given] == [draft.score.words for draft in drafts]
    assert {one.author for one in given if one} == {"raw judge"}
    assert len(calls["judge"]) == len(calls["raw"]) + 2


def emitted(record: Record) -> list[list[int]]:
    """The tokens of each trace."""
    return [
        [token for turn in trace.turns for token in turn.completion.token_ids]
        for trace in record.episode.traces
    ]


def test_a_step_trains_what_the_actor_emitted_and_nothing_else(run: Path) -> None:
    records, (line,) = load_records(run / "episodes.jsonl"), lines_of(run)
    assert {record.kind for record in records} == {"draft", "refined"}
    assert all(record.score.scored for record in records)
    drafts, refined = (
        sum(len(tokens) for r in records if r.kind == kind for tokens in emitted(r))
        for kind in ("draft", "refined")
    )
    trained = [line.get(f"trained/{kind}", 0) for kind in ("draft", "refined", "copy")]
    assert trained == [drafts, refined, refined]


def test_copies_are_paired_by_seat_and_equal_to_the_token(run: Path, folder: Path) -> None:
    renderer = LocalModel.load(folder).renderer()
    for record in load_records(run / "episodes.jsonl"):
        for trace, tokens in zip(record.episode.traces, emitted(record), strict=True):
            spans = emitted_spans(trace)
            assert [i for s in spans for i, on in zip(s.ids, s.trained, strict=True) if on] == (
                tokens
            )
            if record.kind != "refined":
                continue
            assert record.given is not None
            copies = copied_spans(trace, renderer)
            assert [s.sampler for s in copies] == [s.sampler for s in spans]
            assert [
                i for s in copies for i, on in zip(s.ids, s.trained, strict=True) if on
            ] == tokens
            assert sum(len(s.ids) for s in copies) < sum(len(s.ids) for s in spans)


def test_who_was_silent_or_another_player_is_left_out(run: Path) -> None:
    for record in load_records(run / "episodes.jsonl"):
        assert all(trace.turns for trace in record.episode.traces)
        seats = [trace.seat for trace in record.episode.traces]
        assert len(seats) == len(set(seats)) and "Environment" not in seats
        spoken = {line.seat for line in record.episode.transcript}
        assert record.task in ("humanual_email", "coser") or set(seats) < spoken
