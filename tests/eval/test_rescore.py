"""Recorded episodes are scored again with changed code while every server is down."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from soulkit.runs.folder import read_config, read_environment
from soulkit.runs.records import load_records
from tests.support.evaluation import (
    Body,
    api,
    oracle,
    records,
    soul,
    start,
    summary,
    three_lines,
    value,
)
from tests.support.servers.openai_server import Fault, ScriptedServer

Rescore = Callable[..., tuple[int, str, str]]
TASKS = """
tasks:
  plea:
    title: A plea
    summary: The actor asks for something in one sentence.
    module: plea:Plea
    seats: {speaker: actor}
    columns:
      topic: {audience: [speaker, judge]}
      mood: {required: false, audience: []}
    tags: {mood: mood}
    metric: {name: warmth, binary: false, low: 0, high: 10}
    licence: Apache-2.0
"""
MODULE = """
from pydantic import Field
from soulkit.judge import panel
from soulkit.judge.verdict import fence
from soulkit.judge.structured import VerdictShape, question
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.types import Score, unscored


class Rating(VerdictShape):
    score: int = Field(ge=0, le=10)


class Plea(ChoiceTask):
    def calls(self, example):
        return {"actor": 1, "judge": 1}

    def parse(self, text):
        return text, "ok"

    def grade(self, example, answer):
        return 0.0

    def gold_completion(self, example):
        return "please"

    async def score(self, example, episode, cast):
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        said = episode.transcript[0].text
        prompt = "How warm is this, from 0 to 10?" + fence(said, "plea")
        found = await panel.opinions(cast, question("score", prompt, Rating), episode)
        ratings = [rating.score for rating in panel.readable(found)]
        value = panel.combined(ratings, cast.panel.combine)
        return Score(
            value=float(value), reward=float(value),
            metrics={"words": float(len(said.split()))},
            protocol=self.protocol, prompts=self.prompts.hashes("user"),
            verdicts=tuple(o.verdict() for o in found),
        )
"""
CHANGED = MODULE.replace("value=float(value), reward", "value=9.5 - value, reward").replace(
    'metrics={"words"', 'metrics={"letters": float(len(said)), "words"'
)
TOPICS = ["tea", "rain", "a loan", "silence", "the window"]


def answer(body: Body) -> str:
    prompt = str(body["messages"][0]["content"])
    if "How warm" not in prompt:
        return f"Might I ask for {prompt.splitlines()[0]}?"
    return json.dumps({"score": 1 + len(prompt) % 7})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "prompts" / "plea").mkdir(parents=True)
    (tmp_path / "prompts" / "plea" / "user.md").write_text(
        "{{ topic }}\n{% if feedback %}{{ feedback }}{% endif %}"
    )
    (tmp_path / "tasks.yaml").write_text(TASKS)
    (tmp_path / "plea.py").write_text(MODULE)
    lines = [json.dumps({"topic": t, "mood": "grey" if "r" in t else "sunny"}) for t in TOPICS]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path


def evaluate(home: Path, server: ScriptedServer, *more: object, out: str = "old") -> int:
    return soul(
        "eval", "api", "--tasks", home / "tasks.yaml", "--task", "plea", "--model", "m",
        "--data", f"plea={home / 'rows.jsonl'}", "--base-url", server.base_url, "--backoff", 0,
        "--max-attempts", 1, "--judge", f"endpoint:j@{server.base_url}", "--out", home / out,
        *more,
    )  # fmt: skip


@pytest.fixture
def old(home: Path) -> Path:
    """An evaluation whose server is down again."""
    with ScriptedServer(answer=answer) as server:
        assert evaluate(home, server, "--judge-samples", 2, "--repeats", 2) == 0
        assert len(server.requests) == 30
    return home / "old"


def rescore(run: Path, *more: object) -> tuple[int, str, str]:
    """The real command, as a process that reads the task's code anew: (exit code, out, err)."""
    process = start("rescore", run, *more, env={"COLUMNS": "200"})
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Rescore:
    """`rescore` in this process, for tests that change no code."""

    def rescored(run: Path, *more: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = soul("rescore", run, *more)
        return code, *capfd.readouterr()

    return rescored


def test_unchanged_code_gives_the_same_records(old: Path, home: Path) -> None:
    before = {p.name: p.read_bytes() for p in old.iterdir()}
    code, out, err = rescore(old, "--out", home / "new", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["episodes"], report["changed"], report["misses"]) == (10, 0, 0)
    assert all(change["old"] == change["new"] for change in report["changes"])
    assert records(home / "new") == records(old)
    aside = ("rescored_from", "provenance")
    was, now = (
        {k: v for k, v in summary(run).items() if k not in aside} for run in (old, home / "new")
    )
    assert now == was
    was, now = (summary(run)["provenance"] for run in (old, home / "new"))
    assert now["tasks"] == was["tasks"] and now["players"] == was["players"]
    assert (was["command"], now["command"]) == ("eval api", "rescore eval api")
    assert {p.name: p.read_bytes() for p in old.iterdir()} == before


def test_a_changed_scorer_is_applied_without_a_call(old: Path, home: Path) -> None:
    (home / "plea.py").write_text(CHANGED)
    code, out, err = rescore(old, "--out", home / "new")
    assert (
        code == 0 and err == f"next: soul report {old} {home / 'new'}; soul show {home / 'new'}\n"
    )
    shown = " ".join(out.split())
    first, second = value(old, "plea")["mean"], value(home / "new", "plea")["mean"]
    assert second == pytest.approx(9.5 - first)
    assert f"plea warmth {first:.3f} {second:.3f} 10 10/10" in shown
    assert re.search(r"letters – \d+\.\d{3} 10 0 -> 10/10", shown)
    assert re.search(r"words (\d\.\d{3}) \1 0 10/10", shown)
    assert "the score of 10 of 10 episodes changed" in shown
    for one, two in zip(records(old), records(home / "new"), strict=True):
        assert two.score.value == 9.5 - (one.score.value or 0)
        assert (two.episode, two.key) == (one.episode, one.key)
        assert two.score.verdicts == one.score.verdicts
        assert len(two.score.verdicts) == 2
    report = json.loads((home / "new" / "rescore.json").read_text())
    assert report["changed"] == 10
    assert summary(home / "new")["cost"] == summary(old)["cost"]


@pytest.mark.slow
def test_the_new_folder_is_a_run_like_any_other(old: Path, home: Path, capfd) -> None:
    (home / "plea.py").write_text(CHANGED)
    assert rescore(old, "--out", home / "new")[0] == 0
    assert read_environment(home / "new")["command"] == "rescore eval api"
    settings = read_config(home / "new")
    assert settings["ledger_file"] == str((old / "ledger.sqlite").resolve())
    assert not (home / "new" / "ledger.sqlite").exists()
    assert soul("report", home / "new", "--json") == 0
    assert soul("compare", old, home / "new") == 0
    assert soul("ledger", "verify", home / "new") == 0
    code, out, _ = rescore(home / "new", "--out", home / "newer", "--json")
    assert (code, json.loads(out)["changed"]) == (0, 0)
    assert read_environment(home / "newer")["command"] == "rescore eval api"
    capfd.readouterr()
    for taken in (old, home / "new"):
        code, _, err = rescore(old, "--out", taken)
        assert code == 2
        assert "already contains a run" in three_lines(err)[0]


@pytest.mark.slow
def test_a_changed_question_is_a_miss(old: Path, home: Path) -> None:
    (home / "plea.py").write_text(MODULE.replace("How warm", "Say: how warm"))
    code, out, err = rescore(old, "--out", home / "new")
    assert (code, out) == (2, "")
    what, _, fix = three_lines(err)
    assert what.startswith("10 of 10 episodes need replies that were not recorded")
    assert "'j' for this call: role judge" in what
    assert "--missing unscored" in fix
    assert not (home / "new").exists()
    code, out, err = rescore(old, "--out", home / "new", "--missing", "unscored")
    assert code == 0
    assert "10 -> 0/10" in out and "replay_miss 10" in out
    assert value(home / "new", "plea")["unscored"] == {"replay_miss": 10}
    assert "the score of 10 of 10 episodes changed, 10 of them because" in out


def test_one_lost_reply_is_one_miss(old: Path, home: Path, here: Rescore) -> None:
    db = sqlite3.connect(old / "ledger.sqlite", isolation_level=None)
    lost = records(old)[3]
    db.execute(
        "DELETE FROM calls WHERE role = 'judge' AND example_id = ? AND rollout = ? AND sample = 1",
        (lost.example_id, lost.rollout),
    )
    db.close()
    code, _, err = here(old, "--out", home / "new")
    assert code == 2
    assert three_lines(err)[0].startswith("1 of 10 episodes need replies")
    assert here(old, "--out", home / "new", "--missing", "unscored")[0] == 0
    assert [r.key for r in records(home / "new") if not r.score.scored] == [lost.key]


@pytest.mark.slow
def test_what_a_dead_judge_left_unscored_stays_so(home: Path) -> None:
    judged: list[int] = []

    def script(index: int, body: Body) -> Fault | None:
        if "How warm" not in str(body["messages"][0]["content"]):
            return None
        judged.append(index)
        return Fault.status_error(400, "no") if len(judged) == 2 else None

    with ScriptedServer(answer=answer, script=script) as server:
        assert evaluate(home, server, "--max-unscored", 0.5) == 0
    [failed] = [r for r in records(home / "old") if not r.score.scored]
    code, out, err = rescore(home / "old", "--out", home / "new", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["changed"], report["misses"]) == (0, 0)
    assert value(home / "new", "plea")["unscored"] == {"judge_error": 1}
    assert [r for r in records(home / "new") if not r.score.scored] == [failed]


LENIENT = """
import json
from dataclasses import replace

def lenient(text):
    return Rating(score=json.loads(text)["points"])
"""


def test_a_repaired_reader_scores_what_was_unreadable(home: Path) -> None:
    wrong = lambda body: answer(body).replace('"score"', '"points"')  # noqa: E731
    with ScriptedServer(answer=wrong) as server:
        assert evaluate(home, server) == 1
    assert value(home / "old", "plea")["unscored"] == {"judge_error": 5}
    call = 'question("score", prompt, Rating)'
    (home / "plea.py").write_text(MODULE.replace(call, f"replace({call}, read=lenient)") + LENIENT)
    code, out, _ = rescore(home / "old", "--out", home / "new")
    assert code == 0
    assert value(home / "new", "plea")["n_scored"] == 5
    assert "0 -> 5/5" in out


@pytest.mark.parametrize("gone", ["changed", "missing"])
def test_rows_that_are_gone(old: Path, home: Path, gone: str, here: Rescore) -> None:
    rows = home / "rows.jsonl"
    if gone == "changed":
        rows.write_text(rows.read_text().replace("tea", "coffee"))
    else:
        rows.unlink()
    code, _, err = here(old, "--out", home / "new")
    assert code == 2
    what = three_lines(err)[0]
    assert ("2 of 10 episodes" in what) if gone == "changed" else str(rows) in err
    assert not (home / "new").exists()


def test_rows_that_were_added_push_no_recorded_one_out(home: Path, here: Rescore) -> None:
    with ScriptedServer(answer=answer) as server:
        assert evaluate(home, server, "--limit", 2) == 0
    rows = home / "rows.jsonl"
    more = [json.dumps({"topic": f"topic {i}", "mood": "grey"}) for i in range(40)]
    rows.write_text("\n".join([*more, rows.read_text()]))
    code, out, err = here(home / "old", "--out", home / "new")
    assert code == 0, err
    assert "0 of 2 episodes" in out
    with ScriptedServer(answer=answer) as server:  # a rescored run is a run like any other
        assert soul(
            "judge", "check", home / "new", "--judge", f"endpoint:j@{server.base_url}",
            "--out", home / "check",
        ) == 0  # fmt: skip
        assert len(server.requests) == 2 * 2


def test_bad_folders(old: Path, home: Path, here: Rescore) -> None:
    settings = (old / "config.yaml").read_text()
    cases: list[tuple[Path, str]] = [(home / "nowhere", "is not a soulkit run")]
    (old / "config.yaml").write_text(settings + "mood: good\n")
    cases.append((old, "cannot be used (mood"))
    for path, problem in cases:
        code, _, err = here(path, "--out", home / "new")
        assert code == 2
        assert problem in three_lines(err)[0]
    (old / "config.yaml").write_text(settings)
    (old / "episodes.jsonl").unlink()
    assert "no episodes" in three_lines(here(old, "--out", home / "new")[2])[0]


def test_a_killed_command_is_given_again(old: Path, home: Path, here: Rescore) -> None:
    half = home / ".new.half"
    shutil.copytree(old, half)
    (half / "summary.json").unlink()
    code, out, err = here(old, "--out", home / "new")
    assert code == 0, err
    assert "0 of 10 episodes" in out and not half.exists()
    assert (home / "new" / "rescore.json").is_file()
    code, _, err = here(old, "--out", home / "new")
    assert code == 2 and "already contains a run" in three_lines(err)[0]
    (home / "mine").mkdir()
    (home / "mine" / "notes.txt").write_text("keep")
    code, _, err = here(old, "--out", home / "mine")
    assert code == 2 and "already contains other files" in three_lines(err)[0]
    assert [p.name for p in (home / "mine").iterdir()] == ["notes.txt"]


def test_what_has_no_episodes_to_score(old: Path, home: Path, here: Rescore) -> None:
    (old / "episodes.jsonl").write_text('{"torn')
    assert "contains no episode to score" in three_lines(here(old, "--out", home / "new")[2])[0]
    noted = json.loads((old / "environment.json").read_text()) | {"command": "judge check"}
    (old / "environment.json").write_text(json.dumps(noted))
    code, _, err = here(old, "--out", home / "new")
    assert code == 2 and "made by 'soul judge check'" in three_lines(err)[0]


def test_a_run_without_a_ledger_needs_none_for_rules(tmp_path: Path, capfd) -> None:
    with ScriptedServer(answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, tmp_path / "old", "--ledger", "off") == 0
    capfd.readouterr()
    assert soul("rescore", tmp_path / "old", "--out", tmp_path / "new") == 0
    assert "the score of 0 of 6 episodes changed" in capfd.readouterr().out
    assert value(tmp_path / "new") == value(tmp_path / "old")
    assert load_records(tmp_path / "new" / "episodes.jsonl") == records(tmp_path / "old")


def test_an_unfinished_run_is_rescored_as_far_as_it_went(tmp_path: Path, capfd) -> None:
    with ScriptedServer(answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, tmp_path / "old") == 0
    (tmp_path / "old" / "summary.json").unlink()
    lines = (tmp_path / "old" / "episodes.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "old" / "episodes.jsonl").write_text("".join(lines[:4]) + '{"torn')
    capfd.readouterr()
    assert soul("rescore", tmp_path / "old", "--out", tmp_path / "new", "--json") == 0
    assert json.loads(capfd.readouterr().out)["episodes"] == 4


def test_a_lost_ledger_of_a_replay_is_named(tmp_path: Path, capfd) -> None:
    with ScriptedServer(answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, tmp_path / "a") == 0
        replay = ("--ledger", "replay", "--ledger-file", tmp_path / "a" / "ledger.sqlite")
        assert api(server.base_url, tmp_path / "b", *replay) == 0
    shutil.rmtree(tmp_path / "a")
    capfd.readouterr()
    assert soul("rescore", tmp_path / "b", "--out", tmp_path / "c") == 2
    assert "does not exist" in three_lines(capfd.readouterr().err)[0]


def test_batch_metrics_keep_what_the_run_wrote(tmp_path: Path) -> None:
    with ScriptedServer(answer=oracle("hitom", 20)) as server:
        assert api(server.base_url, tmp_path / "old", task="hitom", n=20) == 0
    assert soul("rescore", tmp_path / "old", "--out", tmp_path / "new") == 0
    changes = json.loads((tmp_path / "new" / "rescore.json").read_text())["changes"]
    batch = {
        name for name, cell in summary(tmp_path / "old")["tasks"]["hitom"].items()
        if name.startswith("joint_")
    }  # fmt: skip
    assert batch
    by_metric: dict[str, Any] = {c["metric"]: c for c in changes if c["metric"] in batch}
    assert by_metric.keys() == batch
    assert all(c["old"] == c["new"] for c in by_metric.values())


@pytest.fixture(autouse=True)
def _tidy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    yield


# --- a scorer or tasks of the user's own ----------------------------------------------------------

SCORER = """
def length(row, reply, lines):
    assert lines == [{"seat": "speaker", "text": reply}]
    return {"value": min(len(reply) / 10, 10), "about": float(row["topic"] in reply), 3: 1}


def one(row):
    return 1


def short(row, reply, lines):
    return {"tea": 99, "rain": None, "silence": "7", "the window": 2}.get(row["topic"]) or 1 / 0
"""


@pytest.fixture
def scorer(old: Path, home: Path) -> Path:
    """A file with scorers; the judge's replies are gone."""
    (old / "ledger.sqlite").unlink()
    (home / "scorer.py").write_text(SCORER)
    return home / "scorer.py"


def test_a_scorer_of_ones_own_needs_no_judge(old: Path, scorer: Path, here: Rescore) -> None:
    new = old.with_name("new")
    code, out, _ = here(old, "--scorer", f"{scorer}:length", "--out", new, "--json")
    assert code == 0 and list(json.loads(out)["scorer"]) == [f"{scorer}:length"]
    for record in records(new):
        reply = record.episode.transcript[0].text
        assert record.score.value == min(len(reply) / 10, 10) and not record.score.verdicts
        assert record.score.metrics["about"] == 1.0
    cell = value(new, "plea")
    assert (cell["name"], cell["headline"], cell["n_scored"]) == ("length", True, 10)
    assert cell["scale"] == [0, 10], "the scale of the task"


def test_a_scorer_that_fails_leaves_rows_unscored(
    old: Path, scorer: Path, here: Rescore
) -> None:  # fmt: skip
    new = old.with_name("new")
    code, out, err = here(old, "--scorer", f"{scorer}:short", "--out", new)
    assert code == 0 and "10 -> 2/10" in out and "task_error 8" in out
    words = {one.score.words for one in records(new) if not one.score.scored}
    place = f"({scorer}:12, in short)"
    assert f"ZeroDivisionError: division by zero ({scorer}:12, in short)" in words
    assert f"score() returned 99, not 0 to 10 ({scorer}:11, in short)" in words
    assert f"score() returned '7', not 0 to 10 ({scorer}:11, in short)" in words
    assert place in err, "each place is named once while it runs"


def test_scorers_are_told_apart_in_a_comparison(
    old: Path, scorer: Path, here: Rescore, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = [old.with_name(name) for name in ("a", "b", "c")]
    for folder, name in zip(folders, ("length", "length", "short"), strict=True):
        assert here(old, "--scorer", f"{scorer}:{name}", "--out", folder)[0] == 0
    assert soul("compare", *folders[:2]) == 0
    for other in (folders[2], old):
        capfd.readouterr()
        assert soul("compare", folders[0], other) == 2
        assert "plea: the task's scorer differs" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (("--scorer", "{home}/scorer.py:long"), "'{home}/scorer.py:long' cannot be used"),
        (("--scorer", "{home}/scorer.py:one"), "'{home}/scorer.py:one' cannot be used"),
        (("--scorer", "{home}/scorer.py:length", "--ask"), "--scorer does not work with --ask"),
        (("--scorer", "{home}/old/scorer.py:length"), "'{home}/old/scorer.py' are not known"),
        (("--tasks", "{home}/old/tasks.yaml"), "'{home}/old/tasks.yaml' are not known"),
    ],
)
def test_scorers_that_are_refused(
    more: tuple[str, ...], what: str, old: Path, scorer: Path, home: Path, here: Rescore
) -> None:
    for name in ("scorer.py", "tasks.yaml"):
        shutil.copy(home / name, old / name)
    code, _, err = here(old, *(text.format(home=home) for text in more), "--out", home / "new")
    assert code == 2 and what.format(home=home) in three_lines(err)[0], err
    assert not (home / "new").exists()


def test_other_tasks_score_the_same_episodes(old: Path, home: Path) -> None:
    other = home / "other"
    shutil.copytree(home / "prompts", other / "prompts")
    (other / "tasks.yaml").write_text(TASKS.replace("name: warmth", "name: coldness"))
    (other / "plea.py").write_text(CHANGED)
    code, _, err = rescore(old, "--tasks", other / "tasks.yaml", "--out", home / "new")
    assert code == 0, err
    cell = value(home / "new", "plea")
    assert cell["name"] == "coldness" and cell["mean"] == 9.5 - value(old, "plea")["mean"]
    assert read_config(home / "new")["tasks_file"] == str(other / "tasks.yaml")
