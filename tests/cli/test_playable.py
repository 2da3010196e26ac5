"""`--suite NAME --playable`: what can be played is played, the rest is named everywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.evaluation import FAST, soul, summary, three_lines, visitor
from tests.support.servers.openai_server import ScriptedServer

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
    assert "'sotopia', which is not played here" in capsys.readouterr().err


def test_a_partial_suite_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert evaluate(out, "--playable", "--data", "synth:4") == 0
    printed = capsys.readouterr()
    assert "left out of mixed: attic: this version cannot play it" in printed.err
    assert "left out of mixed: secret_keeper: nobody plays the partner" in printed.err
    assert "mixed (partial)" in printed.out and "A mean (1 of 2)" in printed.out
    done = summary(out)
    assert set(done["tasks"]) == {"tomi"} and done["suite"] == "mixed"
    assert done["left_out"] == {
        "attic": "this version cannot play it",
        "secret_keeper": "nobody plays the partner",
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
    found = re.search(r"(\d+) things are missing: (.*)\.$", what)
    assert found is not None, what
    count, listed = found.groups()
    kinds = [part.split(", ") for part in listed.split("; ")]
    names = [name for kind in kinds for name in kind]
    assert kinds[0] == ["no class that plays attic", "cellar"]
    assert int(count) == len(names) and fix.count("--playable") == 1


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ((), "soul data pull --suite soul-27 --split eval into the folder"),
        (("--suite", "soul-23"), "soul data pull --suite soul-23 --split eval into the folder"),
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
    assert soul("eval", "api", "--model", "gpt-5-nano", *words) == 2
    what, _, fix = three_lines(capsys.readouterr().err)
    rows = what.partition("no rows of ")[2].partition("; ")[0]
    assert re.fullmatch(r"\w+, \w+, \w+ and \d\d more", rows), rows
    assert command in fix and fix.count("soul data pull") == 1 and len(fix) < 300
    assert "{" not in fix


def test_nothing_to_play_is_an_error_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path / "run", "--playable", suite="never") == 2
    what, why, _ = three_lines(capsys.readouterr().err)
    assert "nothing can be played" in what and "attic: this version cannot play it" in why


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
