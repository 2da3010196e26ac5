"""Replies that ran into their limit, through `soul eval`: statuses, bounds, words, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.evaluation import (
    api,
    keeper,
    last_message,
    oracle,
    records,
    soul,
    summary,
    value,
)
from tests.support.evaluation import visitor as visiting
from tests.support.road import synth
from tests.support.servers.openai_server import Body, Fault, ScriptedServer
from tests.support.sotopia import LINE, ROW, judged, table

LONG = "I will think about this for quite some time before I say anything at all"


def every_other(good: Any) -> Any:
    """Good answers to every other question, and one that never comes to an end to the rest."""
    first_asked: list[str] = []

    def answer(body: Body) -> str:
        text = last_message(body)
        if text not in first_asked:
            first_asked.append(text)
        return str(good(body)) if first_asked.index(text) % 2 else f"{LONG} {good(body)}"

    return answer


def test_half_of_the_replies_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer=every_other(oracle("tomi", 6))) as server:
        assert api(server.base_url, out, "--max-tokens", 12, "--max-unscored", 0.4) == 1
    cell, whole = value(out), summary(out)
    assert whole["statuses"] == {"tomi": {"ok": 3, "truncated": 3}}
    assert (cell["mean"], cell["n_scored"], cell["n"], cell["unscored"]) == (0.5, 6, 6, {})
    assert (cell["worst"], cell["best"]) == (0.5, 1.0), "all that was cut may have been right"
    shown = capsys.readouterr()
    assert "0.500–1.000" in shown.out and "truncated tomi 3 of 6 (50 %)" in shown.out
    assert "replies that ran into their limit: tomi 3 of 6 (50 %)" in shown.err
    last = shown.err.splitlines()[-1]
    assert last.startswith("3 of 6 episodes are truncated, more than --max-unscored 0.4 allows")
    assert "--max-tokens" in last and "same command" not in last


def test_few_cut_replies_are_tolerated_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(answer=every_other(oracle("tomi", 6))) as server:
        options = ("--max-tokens", 12, "--max-unscored", 0.5)
        assert api(server.base_url, tmp_path / "run", *options) == 0
    assert "replies that ran into their limit" in capsys.readouterr().err


def test_unscored_and_truncated_episodes_count_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = {0: Fault.status_error(400, "no")}
    with ScriptedServer(answer=every_other(oracle("tomi", 6)), script=gone) as server:
        options = ("--max-tokens", 12, "--max-unscored", 0.5, "--concurrency", 1)
        assert api(server.base_url, tmp_path / "run", *options) == 1
    cell = value(tmp_path / "run")
    assert (cell["n_scored"], cell["worst"], cell["best"]) == (5, pytest.approx(2 / 6), 1.0)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("1 of 6 episodes are unscored and 3 truncated")
    assert "same command" in last and "--max-tokens" in last


def test_a_headline_over_rows_shows_what_cut_forms_hide(tmp_path: Path) -> None:
    """Rows are asked in several forms: one that was cut might have been right."""
    out = tmp_path / "run"
    message = {"content": "<answer>A</answer> because"}
    cut = Fault.reply({"choices": [{"message": message, "finish_reason": "length"}]})
    with ScriptedServer(answer="<answer>A</answer>", script={0: cut}) as server:
        options = ("--max-unscored", 1, "--concurrency", 1)
        assert api(server.base_url, out, *options, task="tombench", n=4) == 0
    cell = value_of(out, "row_accuracy")
    assert summary(out)["statuses"]["tombench"]["truncated"] == 1
    assert cell["headline"] and cell["n"] == 4
    assert cell["worst"] <= cell["mean"] < cell["best"] <= cell["worst"] + 0.25


def value_of(out: Path, metric: str) -> dict[str, Any]:
    cell: dict[str, Any] = summary(out)["tasks"]["tombench"][metric]
    return cell


def test_complete_replies_have_no_bounds(tmp_path: Path) -> None:
    with ScriptedServer(answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, tmp_path / "run", "--max-tokens", 12) == 0
    assert "worst" not in value(tmp_path / "run") and "cuts" not in summary(tmp_path / "run")


def test_a_refusal_is_the_actors_own_failure(tmp_path: Path) -> None:
    message = {
        "role": "assistant",
        "content": None,
        "refusal": "<answer>I would rather not</answer>",
    }
    refusal = Fault.reply({"choices": [{"message": message, "finish_reason": "stop"}]})
    with ScriptedServer(answer=oracle("tomi", 6), script={0: refusal}) as server:
        assert api(server.base_url, tmp_path / "run") == 0
    assert summary(tmp_path / "run")["statuses"] == {"tomi": {"ok": 5, "refusal": 1}}
    assert "worst" not in value(tmp_path / "run"), "a refusal hides nothing"


def test_a_dialogue_with_cut_turns(tmp_path: Path) -> None:
    """It is scored as it stands, but could have gone anywhere."""
    out = tmp_path / "run"

    def rambling(body: Body) -> str:
        return keeper(body) if len(body["messages"]) > 2 else f"{keeper(body)} {LONG}"

    with ScriptedServer(answer=rambling) as server, visiting() as partner:
        who = ("--partner", f"endpoint:v@{partner}", "--max-tokens", 12, "--max-unscored", 1)
        assert api(server.base_url, out, *who, task="secret_keeper", n=3) == 0
    assert summary(out)["statuses"] == {"secret_keeper": {"truncated": 3}}
    for record in records(out):
        turns = record.score.metrics["turns"]
        assert record.score.metrics["turns/cut"] == pytest.approx(1 / (turns or 1))
        assert record.score.value and record.score.value > 0.5
    cell = value(out, "secret_keeper")
    assert cell["mean"] > 0.5 and (cell["worst"], cell["best"]) == (0.0, 1.0)
    assert summary(out)["tasks"]["secret_keeper"]["turns/cut"]["mean"] > 0


@pytest.mark.parametrize("protocol", ["paper", "reference"])
def test_a_scene_with_cut_turns_is_judged_and_never_salvaged(tmp_path: Path, protocol: str) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text(json.dumps(ROW) + "\n")
    wordy = iter([f"Well, {LONG}"])
    players = {"actor": lambda body: next(wordy, LINE), "partner": LINE, "judge": judged()}
    with table(**players) as (cast, _):  # type: ignore[arg-type]
        url = cast.actor.model.base_url  # type: ignore[attr-defined]
        who = ("--partner", f"endpoint:partner@{url}", "--judge", f"endpoint:judge@{url}")
        model = ("--model", "actor", "--base-url", url, "--task", "sotopia", "--data", rows)
        options = ("--protocol", protocol, "--max-tokens", 12, "--out", out, "--max-unscored", 1)
        assert soul("eval", "api", *model, *who, *options) == 0
    (record,) = records(out)
    assert record.score.status == "truncated" and record.score.metrics["turns/cut"] > 0
    assert record.score.value == pytest.approx(22 / 7 / 10), "as the judge rated what there is"
    cell = value(out, "sotopia")
    assert cell["worst"] < cell["mean"] < cell["best"]


def test_a_refused_turn_is_the_minimum_of_a_dialogue(tmp_path: Path) -> None:
    out, message = tmp_path / "run", {"content": None, "refusal": "I will not play this."}
    refusal = Fault.reply({"choices": [{"message": message, "finish_reason": "stop"}]})
    with ScriptedServer(answer=keeper, script={1: refusal}) as server, visiting() as partner:
        who = ("--partner", f"endpoint:v@{partner}")
        assert api(server.base_url, out, *who, task="secret_keeper", n=1) == 0
    (record,) = records(out)
    assert (record.score.value, record.score.status) == (0.0, "refusal")


@pytest.mark.parametrize("protocol", ["paper", "reference"])
@pytest.mark.parametrize("end", ["content_filter", "refusal"])
@pytest.mark.parametrize("task", ["tomi", "secret_keeper"])
def test_no_content_and_an_end_that_says_why_is_a_refusal(
    tmp_path: Path, protocol: str, end: str, task: str
) -> None:
    assert silent_once(tmp_path / "run", end, protocol, task) == ("refusal", 0.0)


@pytest.mark.parametrize("protocol", ["paper", "reference"])
def test_no_content_and_an_ordinary_end_is_empty(tmp_path: Path, protocol: str) -> None:
    """A choice has the minimum; of a dialogue the silent turn is told, and what was said counts."""
    assert silent_once(tmp_path / "tomi", "stop", protocol, "tomi", code=1) == ("empty", 0.0)
    status, score = silent_once(tmp_path / "talk", "stop", protocol, "secret_keeper")
    assert status == "empty" and score and score > 0.5


def silent_once(
    out: Path, end: str, protocol: str, task: str, code: int = 0
) -> tuple[str, float | None]:
    """Status and score of an episode whose first reply has no content; the command ends with
    `code`, 1 where no other reply has any."""
    good = keeper if task == "secret_keeper" else oracle(task, 1)
    message = {"role": "assistant", "content": None}
    silence = Fault.reply({"choices": [{"message": message, "finish_reason": end}]})
    with ScriptedServer(answer=good, script={0: silence}) as server, visiting() as partner:
        who = ("--partner", f"endpoint:v@{partner}") if task == "secret_keeper" else ()
        assert api(server.base_url, out, "--protocol", protocol, *who, task=task, n=1) == code
    (record,) = records(out)
    return record.score.status, record.score.value


def test_words_cut_stand_in_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "run"
    lines = synth("tomi", 4, 0)
    lines[0]["story"] = " ".join(["The cat slept."] * 1010)
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with ScriptedServer(answer="<answer>box</answer>") as server:
        model = ("--model", "m", "--base-url", server.base_url)
        assert soul("eval", "api", *model, "--task", "tomi", "--data", rows, "--out", out) == 0
    assert summary(out)["cuts"] == {"tomi": {"episodes": 1, "words": 30}}
    shown = capsys.readouterr()
    assert "words cut tomi 1 episode, 30 words" in " ".join(shown.out.split())
    command = f"soul show {out} --status cut"
    assert f"1 with words cut by budgets: {command}" in shown.err.splitlines()
    assert soul("show", out, "--status", "cut", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_a_form_that_the_judges_server_ignored_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text(json.dumps(ROW) + "\n")
    chatty = judged(audit=lambda body: 'So: {"risk_level": "low", "reason": "ordinary play"}')
    with table(judge=chatty) as (cast, _):
        url = cast.actor.model.base_url  # type: ignore[attr-defined]
        who = ("--partner", f"endpoint:partner@{url}", "--judge", f"endpoint:judge@{url}")
        model = ("--model", "actor", "--base-url", url, "--task", "sotopia", "--data", rows)
        assert soul("eval", "api", *model, *who, "--out", out) == 0
    assert summary(out)["ignored"] == {"sotopia": {"judge form": 1}}
    assert "ignored by servers sotopia judge form 1" in " ".join(capsys.readouterr().out.split())


def test_a_run_of_another_default_limit_is_not_taken_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defaults move between versions: half a run under each would be no mean of anything."""
    out = tmp_path / "run"
    with ScriptedServer(answer=oracle("hitom", 4)) as server:
        assert api(server.base_url, out, task="hitom", n=4) == 0
        record = json.loads((out / "provenance.json").read_text())
        assert record["tasks"]["hitom"]["sampling"]["max_tokens"] == 8192
        record["tasks"]["hitom"]["sampling"]["max_tokens"] = 1024
        (out / "provenance.json").write_text(json.dumps(record))
        capsys.readouterr()
        assert api(server.base_url, out, task="hitom", n=4) == 2
    error = capsys.readouterr().err
    assert "replies of at most 1024 tokens by the actor in hitom (8192 now)" in error
    # No option of today brings the old limits back: the way out is not to try.
    assert "another folder with --out" in error and f"soul report {out}" in error


def test_cut_replies_that_count_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under `reference` what can be read of a cut reply counts: no status says that it was cut."""
    out, right = tmp_path / "run", oracle("tomi", 6)
    asked: list[str] = []

    def rambling(body: Body) -> str:
        asked.append(last_message(body))
        return f"{right(body)} {LONG}" if len(asked) < 3 else right(body)

    with ScriptedServer(answer=rambling) as server:
        options = ("--max-tokens", 8, "--protocol", "reference", "--max-unscored", 0)
        assert api(server.base_url, out, *options) == 0, "statuses decide how a command ends"
    assert summary(out)["statuses"] == {"tomi": {"ok": 6}}
    assert summary(out)["limits"] == {"tomi": {"at_limit": 2, "replies": 6}}
    shown = capsys.readouterr()
    assert "at their limit tomi 2 of 6 (33 %)" in " ".join(shown.out.split())
    assert "whatever was read of them: tomi 2 of 6 (33 %)" in " ".join(shown.err.split())
    assert soul("report", out, "--format", "json") == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"].values()
    assert run["limits"] == {"tomi": {"at_limit": 2, "replies": 6}}
    page = tmp_path / "page.html"
    assert soul("report", out, "--format", "html", "--out", page) == 0
    assert "whatever was read of them: tomi 2 of 6 (33 %)" in page.read_text()
