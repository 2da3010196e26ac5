"""The published circumstances ($SOULKIT_TEST_DATA), checked and played against scripted servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soulkit.tasks.coser.circumstance import ENVIRONMENT
from soulkit.tasks.coser.scripts import surroundings
from soulkit.tasks.loading import examples_from
from soulkit.tasks.selfcheck import check_task
from tests.support.coser import Body, coser, critics
from tests.support.evaluation import FAST, records, soul, start, summary
from tests.support.servers.openai_server import ScriptedServer

FOLDER = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere") / "coser"


def original(name: str) -> Path:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no original file {name} ($SOULKIT_TEST_DATA)")
    return path


def served(body: Body) -> str:
    if body["model"] == "judge":
        return critics({"anthropomorphism": 9})(body)
    if body["model"] == "environment":
        return surroundings(body["messages"])
    return "[Not a word of it.] (steps closer) Then tell me what you would do in my place."


def evaluate(out: Path, file: Path, *options: str) -> None:
    with ScriptedServer(answer=served) as server:
        url = server.base_url
        code = soul(
            "eval", "api", "--model", "actor", "--base-url", url, "--task", "coser", "--data",
            f"coser={file}", "--environment", f"endpoint:environment@{url}", "--judge",
            f"endpoint:judge@{url}", "--out", out, *FAST, *options,
        )  # fmt: skip
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["paper", "reference"])
def test_twenty_published_golds_pass(protocol: str) -> None:
    task = coser(protocol)
    report = check_task(task, examples_from(task, str(original("sample_20.jsonl"))))
    assert (report.rows, report.gold_fails, report.wrong_passes, report.breaks, report.bad) == (
        20, (), (), (), (),
    )  # fmt: skip


@pytest.mark.slow
def test_the_two_hundred_circumstances_play_to_their_ends(tmp_path: Path) -> None:
    evaluate(tmp_path / "run", original("test_set.json"))
    played = records(tmp_path / "run")
    assert len(played) == 200 and all(record.score.scored for record in played)
    assert {record.tags["tag"] for record in played} == {"id", "ood"}
    for record in played:
        episode, metrics = record.episode, record.score.metrics
        assert episode.stop in ("ended", "max_rounds") and 6 <= len(episode.transcript) <= 20
        speakers = {line.seat for line in episode.transcript} - {ENVIRONMENT}
        assert {trace.seat for trace in episode.traces} == speakers
        assert metrics["next_speaker/fallback"] == 0.0
        assert not any("Not a word" in line.text for line in episode.transcript)
    batch = summary(tmp_path / "run")["tasks"]["coser"]
    assert batch["in_distribution"]["n"] == batch["out_of_distribution"]["n"] == 100
    assert batch["distribution_gap"]["n_scored"] == 200


@pytest.mark.slow
def test_the_reference_plays_them_as_well(tmp_path: Path) -> None:
    evaluate(tmp_path / "run", original("sample_20.jsonl"), "--protocol", "reference")
    played = records(tmp_path / "run")
    assert len(played) == 20 and {record.score.value for record in played} == {1.0}
    assert all(len(record.episode.transcript) <= 10 for record in played)


@pytest.mark.slow
def test_made_scenes_play_with_the_served_script(tmp_path: Path) -> None:
    """The command as a process of its own speaks for the surroundings of made rows."""
    served_script = start("serve", "partner", "coser", "--port", 0)
    try:
        assert served_script.stdout is not None
        url = served_script.stdout.readline().strip()
        with ScriptedServer(answer=served) as server:
            code = soul(
                "eval", "api", "--model", "actor", "--base-url", server.base_url, "--task", "coser",
                "--data", "synth:3", "--environment", f"endpoint:scripted-environment@{url}",
                "--judge", f"endpoint:judge@{server.base_url}", "--out", tmp_path / "run", *FAST,
            )  # fmt: skip
        assert code == 0
    finally:
        served_script.terminate()
        served_script.communicate()
    for record in records(tmp_path / "run"):
        assert record.score.scored and len(record.episode.transcript) >= 6
        assert record.score.metrics["next_speaker/fallback"] == 0.0
