"""`soul show`: episodes of real runs, and of recorded ones, as a person reads them."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.report.episode_search import Selection, episode_places, records_at, select
from soulkit.report.transcript import fold
from soulkit.runs.records import RecordWriter, load_records
from soulkit.types import Feedback
from tests.support.evaluation import Body, api, oracle, records, soul, three_lines
from tests.support.servers.answers import answer
from tests.support.servers.openai_server import Fault, ScriptedServer

RECORDED = Path(__file__).parents[1] / "recorded"
DITTO = RECORDED / "ditto"
ESCAPES = "\x1b[31mred\x1b[0m \u202eevil\u202c [bold]x[/bold]"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations with a partner, judged on seven dimensions and audited."""
    out = tmp_path_factory.mktemp("scene") / "run"
    with ScriptedServer(answer=answer) as server:
        players = [f"endpoint:{name}@{server.base_url}" for name in ("talker", "umpire")]
        assert soul(
            "eval", "api", "--model", "m", "--base-url", server.base_url, "--task", "sotopia",
            "--data", "synth:3", "--partner", players[0], "--judge", players[1],
            "--backoff", "0", "--out", out,
        ) == 0  # fmt: skip
    return out


def untagged(body: Body) -> str:
    return f"I would say {ESCAPES}"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six answers: two without a tag, one that its server broke, three right ones."""
    out = tmp_path_factory.mktemp("odd") / "a run"
    right = oracle("tomi", 6)
    asked: dict[str, int] = {}

    def words(body: Body) -> str:
        place = asked.setdefault(json.dumps(body["messages"]), len(asked))
        return untagged(body) if place < 2 else right(body)

    def fault(index: int, body: Body) -> Fault | None:
        place = asked.get(json.dumps(body["messages"]), len(asked))
        return Fault.status_error(400, "no such thing") if place == 5 else None

    with ScriptedServer(answer=words, script=fault) as server:
        assert api(server.base_url, out, "--concurrency", 1) == 1
    return out


def shown(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    capfd.readouterr()
    assert soul("show", *arguments) == 0
    streams = capfd.readouterr()
    return streams.out, streams.err


def refused(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str, str]:
    capfd.readouterr()
    assert soul("show", *arguments) == 2
    streams = capfd.readouterr()
    assert streams.out == ""
    return three_lines(streams.err)


# -- one episode -----------------------------------------------------------------------------------


def test_a_conversation_is_told_from_prompt_to_verdict(
    scene: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = records(scene)[0]
    page, _ = shown(capfd, scene, "--example", record.example_id)
    seat = record.episode.traces[0].seat
    assert f"seen by {seat}" in page and "dialogue (draft)" in page
    for line in record.episode.transcript:
        assert f"{line.seat}: {line.text}" in page
    (ratings, *_) = [v for v in record.score.verdicts if v.purpose == "score"]
    assert "judged by umpire" in page and "audited by umpire" in page
    for dimension, verdict in ratings.said.items():
        assert f"    {dimension} {verdict['score']}: {verdict['reasoning']}" in page
    assert f"score {record.score.value:.3f}" in page.replace("\u2212", "-")
    assert page.count("seen by") == 1  # of no other example


def test_a_long_prompt_is_folded_in_its_middle_unless_all_is_asked_for(
    scene: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = records(scene)[0]
    prompt = record.episode.traces[0].turns[0].context[0].text
    some, _ = shown(capfd, scene, "--example", record.example_id)
    everything, _ = shown(capfd, scene, "--example", record.example_id, "--full")
    assert " words …]" in some and " words …]" not in everything
    assert all(line.strip() in everything for line in prompt.splitlines())
    assert prompt.split()[0] in some and prompt.split()[-1] in some


@pytest.mark.parametrize("words", [3, 30, 31, 90])
def test_folding_keeps_the_beginning_the_end_and_the_count(words: int) -> None:
    text = "\n".join(f"w{i}" for i in range(100))
    folded = fold(text, words)
    hidden = re.search(r"\[… (\d+) words …\]", folded)
    if 100 - words <= 20:
        assert folded == text
        return
    assert hidden is not None and int(hidden[1]) == 100 - words
    assert folded.startswith("w0\n") and folded.endswith("w99")
    assert len(re.findall(r"w\d+", folded)) == words


def test_what_a_model_wrote_steers_no_terminal(
    odd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page, _ = shown(capfd, odd, "--status", "no_tag")
    assert "\x1b" not in page and "\u202e" not in page
    assert page.count("red evil [bold]x[/bold]") == 2


def test_a_refined_episode_stands_beside_its_draft_with_the_feedback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    page, _ = shown(capfd, DITTO, "--improved", "--limit", 1)
    first = select(episode_places(DITTO / "episodes.jsonl"), Selection(improved=True), DITTO)[0]
    draft, refined = records_at(DITTO / "episodes.jsonl", [p for p in first if p])
    assert draft.received is not None and refined.given is not None
    assert (draft.score.value or 0.0) < (refined.score.value or 0.0)
    places = [page.index(text) for text in (
        f"step {draft.step}", draft.prompt.split("?")[0], "answer (draft)",
        f"feedback (coach) by {draft.received.author}", draft.received.text,
        "refined: the same prompt", "answer (refined)",
    )]  # fmt: skip
    assert places == sorted(places)


# -- choosing --------------------------------------------------------------------------------------


def keys(capfd: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    lines: list[dict[str, Any]] = json.loads(shown(capfd, *arguments, "--json")[0])
    return [line["key"] for line in lines]


def test_json_gives_the_recorded_lines(capfd: pytest.CaptureFixture[str]) -> None:
    recorded = [json.loads(x) for x in (DITTO / "episodes.jsonl").read_text().splitlines()]
    chosen = json.loads(shown(capfd, DITTO, "--step", "1", "--limit", 99, "--json")[0])
    expected = {line["key"]: line for line in recorded if line.get("step") == 1}
    assert {line["key"]: line for line in chosen} == expected and len(expected) > 2


def test_improved_pairs_come_with_the_largest_gain_first(
    capfd: pytest.CaptureFixture[str],
) -> None:
    by_key = {r.key: r for r in load_records(DITTO / "episodes.jsonl")}
    gains = {}
    for key, record in by_key.items():
        twin = by_key.get(key.replace("/draft", "/refined"))
        if record.kind == "draft" and twin is not None:
            gains[key] = (twin.score.value or 0.0) - (record.score.value or 0.0)
    better = [key for key, gain in gains.items() if gain > 0]
    assert 0 < len(better) < len(gains)
    drafts = [k for k in keys(capfd, DITTO, "--improved", "--limit", 99) if k.endswith("draft")]
    assert sorted(drafts) == sorted(better)
    assert [gains[k] for k in drafts] == sorted((gains[k] for k in better), reverse=True)


def test_the_worst_are_scored_and_come_lowest_first(
    odd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    by_key = {r.key: r for r in records(odd)}
    worst = [by_key[key].score for key in keys(capfd, odd, "--worst", 3)]
    assert [score.value for score in worst] == [0.0, 0.0, 1.0]
    assert [score.status for score in worst] == ["no_tag", "no_tag", "ok"]
    assert len(keys(capfd, odd, "--worst", 99)) == 5  # the unscored one is not the worst


def test_status_finds_statuses_and_the_reasons_of_unscored_ones(
    odd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    by_status = {status: keys(capfd, odd, "--status", status) for status in
                 ("no_tag", "unscored", "provider_error", "ok")}  # fmt: skip
    assert by_status["unscored"] == by_status["provider_error"]
    assert [len(listed) for listed in by_status.values()] == [2, 1, 1, 3]
    page, _ = shown(capfd, odd, "--status", "unscored")
    assert "unscored: provider_error" in page and "no such thing" in page


def test_marks_are_found_like_statuses(odd: Path, tmp_path: Path) -> None:
    first, second, third, *_ = records(odd)
    hint = Feedback(text="It is B.", author="symbolic", leak="gold_letter")
    hacked = replace(first, score=replace(first.score, metrics={"hacked": 1.0}))
    cut = replace(third, episode=replace(third.episode, notes={"cut_words": {"story": 7}}))
    writer = RecordWriter(tmp_path / "episodes.jsonl")
    writer.write(hacked, replace(second, received=hint), cut)
    writer.close()
    places = episode_places(tmp_path / "episodes.jsonl")
    by_mark = [select(places, Selection(status=mark), tmp_path) for mark in
               ("hacked", "leaked", "cut")]  # fmt: skip
    assert [[pair[0].key for pair in pairs] for pairs in by_mark] == [
        [first.key], [second.key], [third.key],
    ]  # fmt: skip


def test_an_episode_that_was_played_again_counts_once_and_is_the_newest(
    odd: Path, tmp_path: Path
) -> None:
    first, second, *_ = records(odd)
    writer = RecordWriter(tmp_path / "episodes.jsonl")
    again = replace(first, score=replace(first.score, value=0.5))
    writer.write(first, second, again)
    writer.close()
    with (tmp_path / "episodes.jsonl").open("ab") as stream:
        stream.write(b'{"key": "torn')
    places = episode_places(tmp_path / "episodes.jsonl")
    assert [place.key for place in places] == [second.key, first.key]
    assert records_at(tmp_path / "episodes.jsonl", places) == [second, again]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"score": {"value": [1]}}, "score.value"),
        ({"score": "high"}, "score"),
        ({"rollout": None}, "rollout"),
        ({"kind": "sketch"}, "kind"),
        ({"received": "well done"}, "received"),
    ],
)
def test_a_line_that_is_no_record_is_named(
    odd: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: dict[str, Any],
    problem: str,
) -> None:  # fmt: skip
    out = tmp_path / "run"
    shutil.copytree(odd, out)
    lines = (out / "episodes.jsonl").read_text().splitlines(keepends=True)
    lines[1] = json.dumps({**json.loads(lines[1]), **change}) + "\n"
    (out / "episodes.jsonl").write_text("".join(lines))
    what, _, way = refused(capfd, out, "--worst", 3)
    assert "Line 2 of" in what and problem in what and "to replace it" in way


def test_a_line_that_another_program_wrote_is_read_like_everywhere(tmp_path: Path) -> None:
    first = json.loads((DITTO / "episodes.jsonl").read_text().splitlines()[0])
    first["score"]["value"] = "0.25"
    (tmp_path / "episodes.jsonl").write_text(json.dumps(first) + "\n")
    (place,) = episode_places(tmp_path / "episodes.jsonl")
    assert place.value == load_records(tmp_path / "episodes.jsonl")[0].score.value == 0.25


# -- lists and refusals ----------------------------------------------------------------------------


def test_without_a_selector_the_newest_are_listed_with_the_ways_to_select(
    odd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table, err = shown(capfd, odd)
    ids = [r.example_id for r in records(odd)]
    places = [table.index(name) for name in ids]
    assert places == sorted(places, reverse=True)
    assert "6 episodes: 3 ok, 2 no_tag, 1 provider_error, 1 unscored" in err
    assert f"soul show '{odd}' --worst 10" in err and f"'{odd}' --status no_tag" in err
    assert "--improved" not in err
    table, err = shown(capfd, DITTO)
    assert "--improved" in err and "refined" in table


def test_the_beginning_of_an_id_will_do_where_only_one_begins_so(
    odd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = records(odd)[0]
    assert keys(capfd, odd, "--example", record.example_id[:10]) == [record.key]
    what, _, way = refused(capfd, odd, "--example", f"{record.example_id[:-1]}_")
    assert "contains no episode of example" in what
    assert f"Did you mean '{record.example_id}'?" in way


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--status", "no_tags"), "Did you mean 'no_tag'?"),
        (("--task", "tomy"), "Did you mean 'tomi'?"),
        (("--kind", "drafts"), "Did you mean 'draft'?"),
        (("--step", "7"), "Choose one of: 0."),
        (("--improved",), "--worst 10"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    odd: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], hint: str
) -> None:
    assert hint in refused(capfd, odd, *arguments)[2]


def test_one_run_is_shown_at_a_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    what, _, way = refused(capfd, RECORDED)
    assert "runs" in what and "after" in way
    assert "no episodes" in refused(capfd, RECORDED / "sft")[0]
    shutil.copytree(RECORDED / "sft", tmp_path / "sft")
    (tmp_path / "sft" / "episodes.jsonl").touch()
    assert "no episodes" in refused(capfd, tmp_path / "sft")[0]
    assert "no run" in refused(capfd, RECORDED / "rows")[0]


def test_runs_of_earlier_versions_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("after", "before", "ditto", "judged"):
        page, _ = shown(capfd, RECORDED / name, "--worst", 2, "--full")
        assert page.count("score ") >= 2
    page, _ = shown(capfd, RECORDED / "judged", "--worst", 1)
    assert "judged by j" in page and "    quality 4: so it seems" in page
    assert "    style plain" in page


def test_episodes_on_held_out_rows_are_shown_apart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ditto"
    shutil.copytree(DITTO, out)
    assert "dev.jsonl" in refused(capfd, out, "--dev")[0]
    drafts = [r for r in load_records(DITTO / "episodes.jsonl") if r.kind == "draft"][:3]
    writer = RecordWriter(out / "dev.jsonl")
    writer.write(*drafts)
    writer.close()
    assert sorted(keys(capfd, out, "--dev")) == sorted(r.key for r in drafts)
    assert f"soul show {out} --dev --worst 10" in shown(capfd, out, "--dev")[1]
