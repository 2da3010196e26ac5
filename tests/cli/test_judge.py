"""`soul judge check` on real runs, with judges whose character is known beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli import console
from soulkit.eval.judges.questions import human_labels
from soulkit.tasks.kit.registry import load_registry
from tests.support.evaluation import paid, soul, three_lines
from tests.support.judged import TASKS, Body, essay, evaluated, judge, topic, write_rows
from tests.support.servers.openai_server import Fault, ScriptedServer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty topics, two drafts of each, judged once."""
    folder = tmp_path_factory.mktemp("essays")
    rows = write_rows(folder / "rows.jsonl", 30, human=True)
    with ScriptedServer(answer=judge()) as server:
        return evaluated(folder / "run", rows, server.base_url, "--repeats", 2)


def checked(run: Path, out: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    assert soul("judge", "check", run, "--out", out, *arguments) == code
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


@pytest.mark.slow
def test_a_steady_judge_is_reliable_and_a_guessing_one_is_not(run: Path, tmp_path: Path) -> None:
    retests = {}
    for width in (0, 1, 10):
        with ScriptedServer(answer=judge(width)) as server:
            report = checked(
                run, tmp_path / str(width), "--judge", f"endpoint:j@{server.base_url}",
                "--samples", 3, "--temperature", 1, "--no-pairs",
            )  # fmt: skip
        retests[width] = report["tasks"]["essay"]["dimensions"]["quality"]["retest"]["j"]
    assert retests[0]["alpha"]["value"] == pytest.approx(1) and retests[0]["trust"] == "reliable"
    assert retests[0]["exact"]["value"] == 1 and retests[0]["mean_gap"]["value"] == 0
    assert 0.8 < retests[1]["alpha"]["value"] < 1
    assert retests[10]["alpha"]["value"] < 0.3
    assert retests[10]["trust"] == "do not rank models by it"
    assert (
        retests[10]["alpha"]["ci_low"]
        < retests[10]["alpha"]["value"]
        < retests[10]["alpha"]["ci_high"]
    )


@pytest.mark.slow
def test_samples_are_different_questions_and_are_paid_for_once(run: Path, tmp_path: Path) -> None:
    with ScriptedServer(answer=judge()) as server:
        command = ("--judge", f"endpoint:j@{server.base_url}", "--samples", 2, "--limit", 10)
        checked(run, tmp_path / "check", *command)
        calls = len(server.requests)
        assert calls == 10 * 2 + 5 * 2  # ten episodes twice, five pairs in both orders
        assert len(paid(tmp_path / "check")) == calls
        checked(run, tmp_path / "check", *command)
        assert len(server.requests) == calls
        for file in ("judgements.jsonl", "pairs.jsonl"):  # the ledger alone pays nothing twice
            (tmp_path / "check" / file).unlink()
        checked(run, tmp_path / "check", *command)
        assert len(server.requests) == calls


@pytest.mark.slow
def test_two_judges_and_people(run: Path, tmp_path: Path) -> None:
    with (
        ScriptedServer(answer=judge()) as steady,
        ScriptedServer(answer=judge(3)) as other,
    ):
        report = checked(
            run, tmp_path / "check", "--judge", f"endpoint:a@{steady.base_url}",
            "--judge", f"endpoint:b@{other.base_url}", "--no-pairs", "--samples", 1,
        )  # fmt: skip
    quality = report["tasks"]["essay"]["dimensions"]["quality"]
    between = quality["between"]["a and b"]
    assert between["n"] == 60 and 0.4 < between["alpha"]["value"] < 0.95
    assert 0 < between["mean_gap"]["value"] < 3 and between["kappa"]["value"] < 1
    assert quality["people"]["a"]["alpha"]["value"] == pytest.approx(1)
    assert quality["people"]["b"]["alpha"]["value"] < 1
    style = report["tasks"]["essay"]["dimensions"]["style"]
    assert style["level"] == "nominal" and style["people"]["a"]["exact"]["value"] == 1
    assert style["people"]["a"]["alpha"]["value"] == 1 and "length" not in style
    assert quality["retest"] == {"a": None, "b": None}
    assert "Each judge gave one opinion" in report["remarks"][0]


def test_any_row_may_carry_human_labels_that_nobody_at_the_table_sees() -> None:
    task = load_registry(TASKS).task("essay", "paper")
    plain, labelled = {"topic": "tea"}, {"topic": "tea", "human_mood": "merry", "human_x": [1]}
    example = task.example(labelled)
    assert human_labels(task, example) == {"mood": "merry"}
    assert example.visible("writer") == example.visible("judge") == plain
    assert example.id == task.example(plain).id


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "flips", "first"), [("longer", 0, 0.5), ("A", 1, 1), ("Tie", 0, None), ("B", 1, 0)]
)
def test_position_bias(run: Path, tmp_path: Path, pair: str, flips: float, first: Any) -> None:
    with ScriptedServer(answer=judge(pair=pair)) as server:
        report = checked(
            run, tmp_path / "check", "--judge", f"endpoint:j@{server.base_url}", "--samples", 1
        )
    position = report["tasks"]["essay"]["position"]["j"]
    assert position["pairs"] == 30 and position["flips"]["value"] == flips
    assert position["prefers_first"]["value"] == first
    assert position["flips"]["ci_low"] <= flips <= position["flips"]["ci_high"]


def test_length_bias_is_found_with_its_slope(run: Path, tmp_path: Path) -> None:
    with ScriptedServer(answer=judge()) as server:
        report = checked(
            run, tmp_path / "check", "--judge", f"endpoint:j@{server.base_url}", "--samples", 1,
            "--no-pairs",
        )  # fmt: skip
    length = report["tasks"]["essay"]["dimensions"]["quality"]["length"]["j"]
    assert length["spearman"]["value"] == pytest.approx(1)  # five words and one point more each
    assert length["points_per_100_words"]["value"] == pytest.approx(100)
    assert length["at_equal_turns"]["value"] == pytest.approx(1)


def test_unreadable_verdicts_are_counted_with_their_reasons(run: Path, tmp_path: Path) -> None:
    def mumbling(body: dict[str, Any]) -> str:
        again = len(body["messages"]) > 1
        i = int(body["messages"][0]["content"].partition("topic ")[2].partition("?")[0])
        if i < 6:
            return "I would rather not say."
        return judge()(body) if again or i >= 12 else "well"

    with ScriptedServer(answer=mumbling) as server:
        report = checked(
            run, tmp_path / "check", "--judge", f"endpoint:j@{server.base_url}", "--samples", 1,
            "--no-pairs",
        )  # fmt: skip
    reading = report["tasks"]["essay"]["reading"]["j"]
    assert reading["judgements"] == 60 and reading["no_answer"] == 0
    assert reading["unreadable"]["value"] == pytest.approx(0.2)
    assert reading["asked_again"] == pytest.approx(0.4)
    assert list(reading["reasons"].values()) == [12]
    assert "holds no complete JSON object" in next(iter(reading["reasons"]))


def test_silent_actors_do_not_make_a_guessing_judge_reliable(tmp_path: Path, capfd: Any) -> None:
    def half(body: Body) -> str:
        return essay(body) if topic(body) % 2 else ""

    with ScriptedServer(answer=half) as actor, ScriptedServer(answer=judge(10)) as server:
        assert soul(
            "eval", "api", "--model", "m", "--base-url", actor.base_url, "--out", tmp_path / "run",
            "--tasks", TASKS, "--task", "essay", "--backoff", 0,
            "--data", f"essay={write_rows(tmp_path / 'rows.jsonl', 24)}",
            "--judge", f"endpoint:j@{server.base_url}",
        ) == 0  # fmt: skip
        capfd.readouterr()
        report = checked(tmp_path / "run", tmp_path / "check", "--temperature", 1)["tasks"]["essay"]
    headline = report["dimensions"]["headline"]
    assert headline["retest"]["j"]["n"] == headline["length"]["j"]["spearman"]["n"] == 12
    assert headline["retest"]["j"]["alpha"]["value"] < 0.5
    assert report["reading"]["j"]["judgements"] == 24 and report["by_rules"] == 12
    assert "12 episodes were scored by rules" in capfd.readouterr().err


def test_episodes_whose_rows_are_gone_are_left_out_and_counted(
    run: Path, tmp_path: Path, capfd: Any
) -> None:
    rows = run.parent / "rows.jsonl"
    whole = rows.read_text()
    rows.write_text("".join(whole.splitlines(keepends=True)[:20]))
    try:
        with ScriptedServer(answer="mumble") as server:
            command = ("--judge", f"endpoint:j@{server.base_url}", "--samples", 1, "--no-pairs")
            report = checked(run, tmp_path / "check", *command)
    finally:
        rows.write_text(whole)
    assert report["tasks"]["essay"]["episodes"] == 40
    message = capfd.readouterr().err
    assert "no longer in the data: 20." in message
    assert "essay, j: no verdict 40 times: j: it holds no complete JSON object" in message


@pytest.mark.slow
def test_a_server_that_breaks_is_no_finding_and_is_asked_again(run: Path, tmp_path: Path) -> None:
    broken = True

    def script(index: int, body: Any) -> Fault | None:
        return Fault.status_error(400, "no") if broken and index % 5 == 0 else None

    with ScriptedServer(answer=judge(), script=script) as server:
        command = ("--judge", f"endpoint:j@{server.base_url}", "--samples", 1, "--no-pairs")
        report = checked(run, tmp_path / "check", *command, code=1)
        reading = report["tasks"]["essay"]["reading"]["j"]
        assert reading["no_answer"] == 12 and reading["unreadable"]["value"] == 0
        broken = False
        report = checked(run, tmp_path / "check", *command)
        assert report["tasks"]["essay"]["reading"]["j"]["no_answer"] == 0
        assert len(server.requests) == 60 + 12


def test_a_dead_server_ends_the_check(run: Path, tmp_path: Path, capfd: Any) -> None:
    with ScriptedServer(
        answer=judge(), script=lambda i, b: Fault.status_error(400, "no")
    ) as server:
        command = ("--judge", f"endpoint:j@{server.base_url}", "--samples", 1, "--concurrency", 1)
        assert soul("judge", "check", run, "--out", tmp_path / "check", *command) == 1
        assert len(server.requests) == 20
    assert "20 judgements in a row failed" in capfd.readouterr().err


def test_a_plan_counts_judgements_and_pairs(run: Path, capfd: Any) -> None:
    assert soul("judge", "check", run, "--dry-run", "--samples", 4) == 0
    assert "240 judgements of 60 episodes and 30 pairs, by 1 judge" in capfd.readouterr().err


@pytest.mark.slow
def test_the_runs_own_judge_at_temperature_zero_is_remarked_on(
    run: Path, tmp_path: Path, capfd: Any
) -> None:
    assert soul("judge", "check", run, "--dry-run", "--json", "--samples", 4) == 0
    plan = json.loads(capfd.readouterr().out)
    # Four opinions of each and a pair in two orders; at most, each has to be put twice.
    assert (plan["episodes"], plan["usual_calls"], plan["calls"]) == (60, 300, 600)
    with ScriptedServer(answer=judge()) as server:
        report = checked(run, tmp_path / "c", "--judge", f"endpoint:j@{server.base_url}", "--json")
        assert {body["temperature"] for body in server.requests} == {0}
    shown = capfd.readouterr()
    assert json.loads(shown.out) == report
    assert "temperature 0" in shown.err and report["judges"] == {"j": 0}


def test_the_table_says_what_the_numbers_allow(
    run: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.out, "_width", 160)  # cells break in a narrow terminal
    with ScriptedServer(answer=judge(10)) as server:
        checked(
            run, tmp_path / "c", "--judge", f"endpoint:j@{server.base_url}", "--temperature", 1,
            "--limit", 20,
        )  # fmt: skip
    shown = capfd.readouterr()
    assert "do not rank models by it" in shown.out and "j again" in shown.out
    last = f"next: soul judge show {tmp_path / 'c'}; soul show {run} --worst 10"
    assert shown.err.splitlines()[-1] == last
    assert "first preferred" in shown.out and "Krippendorff" in shown.err
    assert soul("judge", "show", tmp_path / "c") == 0
    assert capfd.readouterr().out == shown.out


def test_a_check_is_no_run_of_a_model(run: Path, tmp_path: Path, capfd: Any) -> None:
    with ScriptedServer(answer=judge()) as server:
        command = ("--judge", f"endpoint:j@{server.base_url}", "--limit", 6, "--samples", 1)
        checked(run, tmp_path / "check", *command)
    capfd.readouterr()
    assert soul("report", tmp_path / "check") == 2
    assert "soul judge show" in three_lines(capfd.readouterr().err)[2]
    (tmp_path / "run").symlink_to(run, target_is_directory=True)
    assert soul("report", tmp_path) == 0
    assert "essay" in capfd.readouterr().out
    assert soul("judge", "show", run) == 2
    assert "no finished judge check" in three_lines(capfd.readouterr().err)[0]


def test_without_out_the_same_command_takes_up_its_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ScriptedServer(answer=judge()) as server:
        command = ("--judge", f"endpoint:j@{server.base_url}", "--limit", 4)
        for _ in range(2):
            assert soul("judge", "check", run, *command) == 0
        folders = list((tmp_path / "runs").iterdir())
        assert len(folders) == 1 and folders[0].name.startswith("judge-check-run-")
        assert soul("judge", "check", run, *command, "--samples", 3) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_what_cannot_be_checked_is_said_in_three_lines(
    run: Path, tmp_path: Path, capfd: Any
) -> None:
    assert soul("judge", "check", tmp_path) == 2
    assert "is not a soulkit run" in three_lines(capfd.readouterr().err)[0]
    with ScriptedServer(answer="A") as server:
        assert soul(
            "eval", "api", "--model", "m", "--base-url", server.base_url, "--task", "tomi",
            "--data", "synth:3", "--out", tmp_path / "tomi", "--backoff", "0",
        ) == 0  # fmt: skip
    capfd.readouterr()
    assert (
        soul("judge", "check", tmp_path / "tomi", "--judge", "endpoint:j@http://127.0.0.1:9") == 2
    )
    what, why, _ = three_lines(capfd.readouterr().err)
    assert "No task of this run asks a judge" in what and "(tomi)" in why
    assert soul("judge", "check", tmp_path / "tomi") == 2  # that no judge is named matters less
    assert "No task of this run asks a judge" in three_lines(capfd.readouterr().err)[0]
    twice = ("--judge", "endpoint:j@http://127.0.0.1:9") * 2
    assert soul("judge", "check", run, *twice, "--out", tmp_path / "c") == 2
    assert "same judge is listed twice" in three_lines(capfd.readouterr().err)[0]
    assert soul("judge", "check", run, "--judge", "actor", "--out", tmp_path / "c") == 2
    assert "this command has no actor" in three_lines(capfd.readouterr().err)[0]
    assert not (tmp_path / "c").exists()


def test_of_a_mixed_run_the_tasks_without_judge_are_named(tmp_path: Path, capfd: Any) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 6)
    with ScriptedServer(answer="a few words") as actor, ScriptedServer(answer=judge()) as server:
        assert soul(
            "eval", "api", "--model", "m", "--base-url", actor.base_url, "--out", tmp_path / "run",
            "--tasks", TASKS, "--task", "essay,tomi", "--data", f"essay={rows}",
            "--data", "tomi=synth:3", "--judge", f"endpoint:j@{server.base_url}",
        ) == 0  # fmt: skip
        report = checked(tmp_path / "run", tmp_path / "check", "--samples", 1, "--no-pairs")
    assert list(report["tasks"]) == ["essay"]
    assert "tomi: scored by rules, so no judge is asked." in report["remarks"]
    assert "tomi: scored by rules" in capfd.readouterr().err
