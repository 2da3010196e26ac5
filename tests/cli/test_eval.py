"""`soul eval local` with a tiny real model: resume, determinism, repeats, real text, overflow.

Replies that ran into their limit, through `soul eval`: statuses, bounds, words, exit codes.

`--suite NAME --playable`: what can be played is played, the rest is named everywhere.

The whole benchmark in one command: every file's task, with the players that its makers had.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.data.files import write_rows
from soulkit.metrics.text import subword_tokens
from soulkit.models.local.tiny import build_tiny
from soulkit.report.load import load_runs
from soulkit.report.suites import suite_grid, suite_table
from soulkit.runs.records import load_records
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import load_policy
from tests.support.evaluation import (
    FAST,
    api,
    examples,
    keeper,
    last_message,
    oracle,
    records,
    replaced,
    soul,
    summary,
    three_lines,
    value,
    visitor,
)
from tests.support.evaluation import visitor as visiting
from tests.support.road import synth
from tests.support.servers.answers import Anybody
from tests.support.servers.openai_server import Body, Fault, ScriptedServer
from tests.support.sotopia import LINE, ROW, judged, table


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model that knows the words of the tasks' prompts."""
    registry = load_registry()
    texts = [
        segment.text
        for name in ("tomi", "secret_keeper")
        for example in examples(name, 8)
        for segment in registry.task(name).preview(example)
    ]
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", texts, max_context=512)


def local(model: Path, out: Path, *arguments: object, task: str = "tomi", n: int = 5) -> int:
    rows = ("--task", task, "--data", f"synth:{n}", "--max-tokens", 6)
    # Untrained, it hardly ever ends a reply.
    tolerant = ("--max-unscored", 1)
    usual = ("--model", model, "--out", out, *rows, *FAST[:2], *tolerant)
    return soul("eval", "local", *replaced(usual, arguments))


def texts(out: Path) -> dict[str, str]:
    return {r.key: r.episode.transcript[-1].text for r in records(out)}


def test_a_run_cut_short_ends_as_if_it_had_not_been(tiny: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert local(tiny, whole) == 0
    assert local(tiny, cut) == 0
    lines = (cut / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "episodes.jsonl").write_bytes(lines[0] + lines[1] + lines[2][:80])
    (cut / "summary.json").unlink()
    assert local(tiny, cut) == 0
    assert texts(cut) == texts(whole)
    assert value(cut) == value(whole)
    tokens = {r.key: r.episode.final.token_ids for r in records(cut) if r.episode.final}
    assert tokens == {r.key: r.episode.final.token_ids for r in records(whole) if r.episode.final}


def test_another_adapter_under_the_same_name_is_another_model(
    tiny: Path, tmp_path: Path, capsys
) -> None:
    adapter, out = tmp_path / "adapter", tmp_path / "run"
    policy = load_policy(TrainConfig(method="grpo", model="x", tasks={"tomi": 1.0}), tiny)
    policy.save(adapter)
    assert local(tiny, out, "--adapter", adapter) == 0
    assert local(tiny, out, "--adapter", adapter) == 0  # finished, and still the same weights
    with torch.no_grad():
        for _, parameter in policy.trained:
            parameter.add_(0.01)
    policy.save(adapter)
    capsys.readouterr()
    assert local(tiny, out, "--adapter", adapter) == 2
    assert "different adapter weights" in three_lines(capsys.readouterr().err)[0]


def test_text_in_words_the_model_never_saw(tiny: Path, tmp_path: Path) -> None:
    row = {
        "story": "Zoë déposa l’œuf 🥚 dans le garde-manger; \t\u200bथोड़ा 水 — <|im_start|> “ok”.",
        "question": "Où est l’œuf, à présent ?",
        "answer": "garde-manger",
    }
    write_rows(tmp_path / "rows.jsonl", [row], data_source="tomi")
    data = ("--data", tmp_path / "rows.jsonl")
    out = tmp_path / "run"
    base = ("--task", "tomi", "--max-tokens", 5, "--out", out, *FAST[:2], "--max-unscored", 1)
    assert soul("eval", "local", "--model", tiny, *base, *data) == 0
    assert value(out)["n_scored"] == 1


def test_a_dialogue_with_the_served_visitor(tiny: Path, tmp_path: Path) -> None:
    with visitor() as url:
        partner = ("--partner", f"endpoint:scripted-visitor@{url}")
        assert local(tiny, tmp_path / "run", *partner, task="secret_keeper", n=2) == 0
    assert value(tmp_path / "run", "secret_keeper")["n_scored"] == 2
    for record in records(tmp_path / "run"):
        assert 8 <= len(record.episode.transcript) <= 12
        assert len(record.episode.traces[0].turns) * 2 == len(record.episode.transcript)


def test_prompts_that_do_not_fit_stop_the_run_or_stay_unscored(
    tiny: Path, tmp_path: Path, capsys
) -> None:
    out, short = tmp_path / "run", ("--max-context", 100)
    assert local(tiny, out, *short, n=8) == 2
    what, why, fix = three_lines(capsys.readouterr().err)
    assert what.endswith("of 8 prompts of 'tomi' do not fit the model's context.")
    assert "the context is 100 tokens" in why
    assert "--allow-overflow" in fix
    assert not out.exists()
    assert local(tiny, out, *short, "--allow-overflow", "--max-unscored", 0, n=8) == 1
    over = int(what.split()[0])
    assert 0 < over <= 8
    cell = value(out)
    assert cell["unscored"] == {"context_overflow": over}
    assert cell["n_scored"] == 8 - over
    assert "context_overflow" in capsys.readouterr().err


@pytest.mark.slow
def test_the_way_out_names_a_limit_that_fits(tiny: Path, tmp_path: Path, capsys) -> None:
    assert local(tiny, tmp_path / "run", "--max-tokens", 500) == 2
    fix = three_lines(capsys.readouterr().err)[2]
    fits = int(fix.split("--max-tokens ")[1].split()[0])
    assert local(tiny, tmp_path / "run", "--max-tokens", fits) == 0
    capsys.readouterr()
    assert local(tiny, tmp_path / "all", "--max-tokens", fits + 1) == 2


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
    assert "truncated replies: tomi 3 of 6 (50 %)" in shown.err
    last = shown.err.splitlines()[-1]
    assert last.startswith("3 of 6 episodes are truncated, more than --max-unscored 0.4 allows")
    assert "--max-tokens" in last and "same command" not in last


def test_few_cut_replies_are_tolerated_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(answer=every_other(oracle("tomi", 6))) as server:
        options = ("--max-tokens", 12, "--max-unscored", 0.5)
        assert api(server.base_url, tmp_path / "run", *options) == 0
    assert "truncated replies" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("protocol", "end", "task"),
    [("paper", "content_filter", "tomi"), ("paper", "refusal", "secret_keeper"),
     ("reference", "refusal", "tomi"), ("reference", "content_filter", "secret_keeper")],
)  # fmt: skip
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
    assert f"1 with text cut by word limits: {command}" in shown.err.splitlines()
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
    assert "at token limit tomi 2 of 6 (33 %)" in " ".join(shown.out.split())
    assert "readable or not: tomi 2 of 6 (33 %)" in " ".join(shown.err.split())
    assert soul("report", out, "--format", "json") == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"].values()
    assert run["limits"] == {"tomi": {"at_limit": 2, "replies": 6}}
    page = tmp_path / "page.html"
    assert soul("report", out, "--format", "html", "--out", page) == 0
    assert "readable or not: tomi 2 of 6 (33 %)" in page.read_text()


ROWS_ONLY = "{title: A room, summary: Nobody plays it, seats: {guest: actor}, \
columns: {text: {type: text, audience: [guest]}}}"
TASKS = f"""
tasks:
  attic: {ROWS_ONLY}
  cellar: {ROWS_ONLY}
suites:
  mixed: {{axes: {{A: [tomi, attic], B: [secret_keeper]}}, average: macro}}
  never: [attic]
  two: [attic, cellar, tomi, secret_keeper]
"""


def evaluate(out: Path, *arguments: object, suite: str = "mixed") -> int:
    tasks = out.parent / "tasks.yaml"
    tasks.write_text(TASKS)
    with ScriptedServer(answer="<answer>A</answer>") as server:
        return soul(
            "eval", "api", "--model", "m", "--base-url", server.base_url, "--out", out,
            "--tasks", tasks, "--suite", suite, *arguments, *FAST,
        )  # fmt: skip


def test_players_may_be_named_for_every_member(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For one that is played and for one that is left out; for a stranger to the suite never."""
    with visitor() as url:
        who = f"endpoint:scripted-visitor@{url}"
        named = ("--partner", f"secret_keeper={who}", "--judge", f"attic={who}")
        out = tmp_path / "run"
        assert evaluate(out, "--playable", "--data", "synth:2", *named) == 0
        assert set(summary(out)["tasks"]) == {"tomi", "secret_keeper"}
        capsys.readouterr()
        stray = ("--judge", f"sotopia={who}")
        assert evaluate(tmp_path / "b", "--playable", "--data", "synth:2", *stray) == 2
    assert "'sotopia', but that task is not selected" in capsys.readouterr().err


def test_a_partial_suite_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert evaluate(out, "--playable", "--data", "synth:4") == 0
    printed = capsys.readouterr()
    assert "left out of mixed: attic: this version cannot play it" in printed.err
    assert "left out of mixed: secret_keeper: no model plays the partner" in printed.err
    assert "mixed (partial)" in printed.out and "A mean (1 of 2)" in printed.out
    done = summary(out)
    assert set(done["tasks"]) == {"tomi"} and done["suite"] == "mixed"
    assert done["left_out"] == {
        "attic": "this version cannot play it",
        "secret_keeper": "no model plays the partner",
    }
    assert "playable: true" in (out / "config.yaml").read_text()
    assert soul("report", out, "--tasks", tmp_path / "tasks.yaml", "--format", "csv") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("mixed,suite,all,,run,run,,,,")]
    assert any("attic" in line for line in lines)


def test_with_every_player_more_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with visitor() as partner:
        address = ("--partner", f"endpoint:scripted-visitor@{partner}")
        assert evaluate(tmp_path / "run", "--playable", "--data", "synth:2", *address) == 0
    assert set(summary(tmp_path / "run")["tasks"]) == {"tomi", "secret_keeper"}
    assert list(summary(tmp_path / "run")["left_out"]) == ["attic"]


def test_a_task_whose_players_want_a_key_that_is_not_here_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The players that a task declares are served elsewhere: without their key it cannot play."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with ScriptedServer(answer="<answer>A</answer>") as server:
        assert soul(
            "eval", "api", "--model", "m", "--base-url", server.base_url, "--out", tmp_path / "run",
            "--suite", "soul-10", "--playable", "--data", "synth:2", *FAST,
        ) == 0  # fmt: skip
    left_out = summary(tmp_path / "run")["left_out"]
    assert "no key in OPENAI_API_KEY (partner gpt-5-nano, judge gpt-5-nano" in left_out["sotopia"]
    assert {"sotopia", "userllm", "coser", "mirrorbench"} == set(left_out)
    assert "fantom" in summary(tmp_path / "run")["tasks"]


def test_without_the_option_the_suite_is_refused_and_the_option_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path / "run", "--data", "synth:4") == 2
    what, _, fix = three_lines(capsys.readouterr().err)
    assert "attic" in what and "--playable" in fix and not (tmp_path / "run").exists()


def test_every_task_that_cannot_be_played_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOULKIT_DATA", str(tmp_path / "none"))
    assert evaluate(tmp_path / "run", suite="two") == 2
    what, _, fix = three_lines(capsys.readouterr().err)
    found = re.search(r"(\d+) requirements are not met: (.*)\.$", what)
    assert found is not None, what
    count, listed = found.groups()
    kinds = [part.split(", ") for part in listed.split("; ")]
    names = [name for kind in kinds for name in kind]
    assert kinds[0] == ["no code to play attic", "cellar"]
    assert int(count) == len(names) and fix.count("--playable") == 1


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ((), "soul data pull --suite soul-27 --split eval into the folder"),
        (("--data", "."), "soul data pull --suite soul-27 --split eval --out .;"),
    ],
)
def test_without_any_rows_a_suite_names_a_few_tasks_and_one_command(
    words: tuple[str, ...], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("SOULKIT_DATA", raising=False)
    assert soul("eval", "api", "--model", "gpt-5-nano", "--suite", SUITE, *words) == 2
    what, _, fix = three_lines(capsys.readouterr().err)
    rows = what.partition("no rows for ")[2].partition("; ")[0]
    assert re.fullmatch(r"\w+, \w+, \w+ and \d\d more", rows), rows
    assert command in fix and fix.count("soul data pull") == 1 and len(fix) < 300
    assert "{" not in fix


def test_nothing_to_play_is_an_error_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path / "run", "--playable", suite="never") == 2
    what, why, _ = three_lines(capsys.readouterr().err)
    assert "No task of the suite" in what and "attic: this version cannot play it" in why


def test_rows_that_are_not_here_leave_a_task_out_unless_they_were_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOULKIT_DATA", str(tmp_path / "none"))
    made = ("--data", "tomi=synth:3")
    assert evaluate(tmp_path / "run", "--playable", *made) == 0
    assert (
        "no rows for the task 'secret_keeper'"
        in summary(tmp_path / "run")["left_out"]["secret_keeper"]
    )
    capsys.readouterr()
    gone = ("--data", f"secret_keeper={tmp_path / 'gone.jsonl'}")
    assert evaluate(tmp_path / "other", "--playable", *made, *gone) == 2
    assert "gone.jsonl" in " ".join(three_lines(capsys.readouterr().err))


def test_playable_is_about_a_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert soul("eval", "api", "--model", "m", "--task", "tomi", "--playable") == 2
    assert "--suite" in three_lines(capsys.readouterr().err)[0]


def test_a_finished_partial_suite_is_taken_up_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert evaluate(out, "--playable", "--data", "synth:3") == 0
    first = (out / "summary.json").read_bytes()
    settings = ("--config", out / "config.yaml")
    assert soul("eval", "api", *settings, "--out", out) == 0  # nobody is asked: all is there
    assert json.loads(first)["tasks"] == summary(out)["tasks"]
    lines = (out / "episodes.jsonl").read_text().splitlines()
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == 3


SUITE = "soul-27"
PRICES = {"gpt-5.4": (2.5, 15), "gpt-5.4-mini": (0.75, 4.5), "gpt-5-nano": (0.05, 0.4)}
LIMIT = 20


def subwords(text: str) -> int:
    ids = subword_tokens(text)
    assert ids is not None
    return len(ids)


def prices(folder: Path) -> Path:
    file = folder / "prices.yaml"
    lines = [{"model": model, "in": a, "out": b} for model, (a, b) in PRICES.items()]
    file.write_text(json.dumps({"prices": lines}))
    return file


def loads(plan: dict[str, Any], task: str) -> tuple[int, int]:
    """(calls, tokens) that a plan expects of a task."""
    (part,) = [part for part in plan["tasks"] if part["task"] == task]
    tokens = sum(one["prompt_tokens"] + one["reply_tokens"] for one in part["asked"])
    return sum(one["usual_calls"] for one in part["asked"]), tokens


def test_every_file_is_played_as_its_makers_did_and_the_plan_was_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bpe_openai")
    out = tmp_path / "run"
    # Replies as long as a plan assumes: 120, 500 and 60 tokens, about.
    everybody = Anybody(line=108, verdict=430, happening=54)
    with ScriptedServer(answer=everybody, count=subwords) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        # Nine rows of UserLLM are the fewest that have every part of its headline.
        command = ("eval", "api", "--model", "gpt-5.4-mini", "--suite", SUITE, "--data", "synth:3",
                   "--data", "userllm=synth:9", "--prices", prices(tmp_path))  # fmt: skip
        assert soul("plan", *command, "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        assert not server.requests
        assert soul(*command, "--out", out) == 0
        players = {str(body["model"]) for body in server.requests}
    assert players == set(PRICES)
    costs = summary(out)["costs"]
    tasks = load_registry().suite(SUITE)
    assert set(costs) == set(tasks) and len(tasks) == 27
    whole = [(0, 0), (0, 0)]
    for task in tasks:
        planned = loads(plan, task)
        asked_for = tuple(
            sum(one[what] for one in costs[task].values()) for what in ("calls", "tokens")
        )
        for expected, counted in zip(planned, asked_for, strict=True):
            assert expected == pytest.approx(counted, rel=0.2), task
        whole = [tuple(map(sum, zip(*pair, strict=True)))
                 for pair in zip(whole, (planned, asked_for), strict=True)]  # fmt: skip
    for expected, counted in zip(*whole, strict=True):
        assert expected == pytest.approx(counted, rel=0.2)
    paid = sum(one["cost"] for roles in costs.values() for one in roles.values())
    assert plan["cost"] == pytest.approx(paid, rel=0.2)
    assert plan["cost_limit"] > plan["cost"] and not plan["unpriced"]
    check_table(out, paid)


def check_table(out: Path, paid: float) -> None:
    """One table: the lines of the model card, its axes, what is covered and what it cost."""
    registry = load_registry()
    runs = load_runs([out], episodes=False)
    table = suite_table(runs, SUITE, registry)
    assert not table.partial and not table.absent
    card = registry.suite_spec("soul-23")
    assert [line.name for line in table.lines if line.level in ("task", "group")] == [*card.members]
    assert [line.name for line in table.lines if line.level == "axis"] == [*card.axes]
    same = suite_table(runs, "soul-23", registry)
    assert [line.runs[0].cell for line in same.lines] == [line.runs[0].cell for line in table.lines]
    grid = suite_grid(table)
    cost = grid.head.index("cost")
    rows = {row.cells[0].text.strip(): row.cells[cost].text for row in grid.rows}
    assert rows[f"{SUITE} mean (23 of 23; 27 of 27 tasks)"] == f"${paid:,.4f}"
    assert len(rows) == 23 + 5 + 5 + 1 and all(text.startswith("$") for text in rows.values())


def test_replies_that_end_at_their_limit_are_truncated_in_every_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, everybody = tmp_path / "run", Anybody()
    tasks = (*load_registry().suite(SUITE), "tau_usi")

    def answer(body: Body) -> str:
        return "well " * (2 * LIMIT) if body["model"] == "chatterer" else everybody(body)

    with ScriptedServer(answer=answer) as server:
        roles = ("judge", "auditor", "partner", "environment")
        players = [part for r in roles for part in (f"--{r}", f"endpoint:{r}@{server.base_url}")]
        code = soul("eval", "api", "--model", "chatterer", "--base-url", server.base_url, "--task",
                    ",".join(tasks), "--data", "synth:2", "--max-tokens", LIMIT, "--out", out,
                    *players)  # fmt: skip
    records = load_records(out / "episodes.jsonl")
    assert code == 1 and {record.score.status for record in records} == {"truncated"}
    assert all(record.score.value is not None for record in records)
    assert {record.task for record in records} == set(tasks)
    for task in tasks:
        metric, cell = load_registry().spec(task).metric, value(out, task)
        assert (cell["worst"], cell["best"]) == pytest.approx((metric.low, metric.high)), task
    assert "truncated, more than --max-unscored" in capsys.readouterr().err
