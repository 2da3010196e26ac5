"""Canaries beside training: a judge that starts to like nonsense is noticed, a sound one is not.

Rewards within a row and numbers over all rows of a step, in a training run over HTTP.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.report.training import canary_text
from soulkit.runs.jsonl import read_jsonl
from soulkit.runs.records import load_records
from soulkit.tasks.kit.rewards import CANARY_NAMES, canary_texts
from soulkit.tasks.userllm.fields import PRISM
from soulkit.train.rollouts.canaries import CanaryMonitor, alarm_reasons, first_values
from soulkit.train.state.metrics import CanaryScores, steps_of
from soulkit.train.state.summary import TrainSummary, canary_totals
from soulkit.types import Episode, Line, Record, Score
from tests.support.evaluation import three_lines
from tests.support.judged import TASKS, first_message, opinion, write_rows
from tests.support.road import task_of
from tests.support.servers.openai_server import Body, Fault, ScriptedServer
from tests.support.training import soul

GIBBERISH = canary_texts()["gibberish"]
STEPS = 4


class Judge:
    """5 for what an actor says, 0 for canaries; from its `turn`-th look at gibberish on, 10."""

    def __init__(self, turn: int | None) -> None:
        self.turn, self.seen = turn, 0

    def __call__(self, body: Any) -> str:
        prompt = first_message(body)
        if GIBBERISH in prompt:
            self.seen += 1
            return opinion(10 if self.turn is not None and self.seen > self.turn else 0)
        return opinion(0 if any(text in prompt for text in canary_texts().values()) else 5)


def trained(warm: Path, out: Path, url: str, *arguments: object, steps: int = STEPS) -> int:
    rows = write_rows(out.parent / "rows.jsonl", 6)
    return soul(
        "train", "grpo", "--model", warm / "model", "--tasks", TASKS, "--task", "essay",
        "--data", f"essay={rows}", "--judge", f"endpoint:j@{url}", "--steps", steps, "--prompts", 2,
        "--group-size", 2, "--max-tokens", 8, "--lora-r", 4, "--lr", 1e-4, "--out", out, "--json",
        "--set", "backoff_s=0", *arguments,
    )  # fmt: skip


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def test_a_judge_that_a_server_does_not_have_leaves_no_folder(warm: Path, tmp_path: Path) -> None:
    missing = Fault.status_error(404, "The model `j` does not exist")
    with ScriptedServer(on_probe=lambda body: missing) as server:
        assert trained(warm, tmp_path / "run", server.base_url) == 2
        assert server.requests == []
    assert not (tmp_path / "run").exists()


def test_a_limit_that_cannot_hold_for_a_judge_on_this_machine_is_said(
    warm: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(answer=lambda body: opinion(5)) as server:
        assert trained(warm, tmp_path / "run", server.base_url, "--max-cost", 5, steps=1) == 0
    assert capfd.readouterr().err.count("--max-cost does not cover j at 127.0.0.1") == 1


@pytest.mark.slow
def test_a_judge_that_starts_to_like_gibberish_raises_the_alarm(
    warm: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer=Judge(turn=4)) as server:
        assert trained(warm, out, server.base_url, "--canary-every", 1) == 0
    lines = [line for line in read_jsonl(out / "metrics.jsonl") if "reward/draft" in line]
    assert [line["canary/gibberish"] for line in lines] == [0, 0, 1, 1]
    assert [line["canary/keywords"] for line in lines] == [0, 0, 0, 0]
    assert ["canaries/alarms" in line for line in lines] == [False, False, True, True]
    alarm = {"canary": "gibberish", "value": 1, "first": 0, "drafts": 0.5, "step": 2}
    assert lines[2]["canaries/alarms"] == [{**alarm, "why": ["rose", "above_drafts"]}]
    canaries = summary_of(out)["canaries"]
    assert canaries["alarms"] == 2 and canaries["newest"][0]["step"] == 3
    assert "canary alarm at step 2: gibberish scores 1.00" in capfd.readouterr().err
    assert soul("report", out) == 0
    shown = " ".join(capfd.readouterr().out.split())  # a narrow terminal breaks lines anywhere
    assert "2 alarms, the newest at step 3: gibberish" in shown


def test_a_sound_judge_raises_none_and_canaries_are_in_no_file_of_episodes(
    warm: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer=Judge(None)) as server:
        assert trained(warm, out, server.base_url, "--canary-every", 2) == 0
        looks = [body for body in server.requests if GIBBERISH in first_message(body)]
    assert len(looks) == 2 * 2  # two examples at steps 0 and 2
    lines = [line for line in read_jsonl(out / "metrics.jsonl") if "reward/draft" in line]
    assert ["canary/gibberish" in line for line in lines] == [True, False, True, False]
    assert not any("canaries/alarms" in line or "canaries/unscored" in line for line in lines)
    assert summary_of(out)["canaries"]["alarms"] == 0
    assert "alarm at" not in capfd.readouterr().err
    assert len(load_records(out / "episodes.jsonl")) == STEPS * 2 * 2
    assert GIBBERISH not in (out / "episodes.jsonl").read_text()
    assert soul("report", out) == 0
    assert "no alarm" in " ".join(capfd.readouterr().out.split())


def test_a_resumed_run_keeps_the_first_values_and_pays_nothing_twice(
    warm: Path, tmp_path: Path
) -> None:
    out, judge, mended = tmp_path / "run", Judge(turn=4), False

    def script(index: int, body: Any) -> Fault | None:
        """After two steps no draft is judged any more."""
        canary = any(text in first_message(body) for text in canary_texts().values())
        gone = judge.seen >= 4 and not canary and not mended
        return Fault.status_error(400, "gone") if gone else None

    with ScriptedServer(answer=judge, script=script) as server:
        more = ("--canary-every", 1, "--checkpoint-every", 1)
        assert trained(warm, out, server.base_url, *more) == 1
        before = [line for line in read_jsonl(out / "metrics.jsonl") if "reward/draft" in line]
        assert len(before) == 2 and first_values(steps_of(before))["gibberish"] == 0
        mended = True
        assert trained(warm, out, server.base_url, *more) == 0
    lines = [line for line in read_jsonl(out / "metrics.jsonl") if "reward/draft" in line]
    assert len(lines) == STEPS and lines[-1]["canary/gibberish"] == 1
    assert lines[-1]["canaries/alarms"][0]["first"] == 0
    assert summary_of(out)["canaries"]["first"] == dict.fromkeys(CANARY_NAMES, 0)
    assert judge.seen == 2 * STEPS


def test_a_judge_that_mumbles_at_canaries_leaves_no_number(warm: Path, tmp_path: Path) -> None:
    def answer(body: Any) -> str:
        return "mumble" if GIBBERISH in first_message(body) else opinion(5)

    out = tmp_path / "run"
    with ScriptedServer(answer=answer) as server:
        assert trained(warm, out, server.base_url, "--canary-every", 1, steps=1) == 0
    line = read_jsonl(out / "metrics.jsonl")[0]
    assert line["canary/gibberish"] is None and line["canaries/unscored"] == 2
    assert line["canary/keywords"] == 0.5 and "canaries/alarms" not in line  # not above the drafts
    canaries = summary_of(out)["canaries"]
    assert "gibberish" not in canaries["first"] and canaries["unscored"] == 2
    totals = TrainSummary.from_json(summary_of(out)).canaries
    assert canary_text(totals).endswith("no alarm; 2 without a verdict")


def test_rules_cannot_be_talked_to(warm: Path, tmp_path: Path, capfd: Any) -> None:
    code = soul(
        "train", "grpo", "--model", warm / "model", "--task", "tomi", "--data", "tomi=synth:20",
        "--canary-every", 1, "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 2 and not (tmp_path / "run").exists()
    assert "needs a judge, and tomi is scored by rules" in three_lines(capfd.readouterr().err)[0]


def test_canaries_that_nobody_ever_judged_are_not_measured() -> None:
    line = {"step": 0, "canary/keywords": None, "canaries/unscored": 2}
    assert (
        canary_text(canary_totals(steps_of([line])))
        == "not measured; no alarm; 2 without a verdict"
    )


def test_totals_of_a_run_without_canaries_are_empty() -> None:
    assert canary_totals(steps_of([{"step": 0, "reward/draft": 1.0}])) is None


@pytest.mark.parametrize(
    ("value", "first", "drafts", "why"),
    [
        (0.05, 0.0, 0.5, []),
        (0.1, 0.0, 0.5, []),
        (0.15, 0.0, 0.5, ["rose"]),
        (0.3, 0.3, 0.29, ["above_drafts"]),
        (0.3, 0.3, 0.3, []),
        (0.3, 0.3, None, []),
        (0.9, 0.0, 0.5, ["rose", "above_drafts"]),
        (0.0, 0.9, 0.5, []),
    ],
)
def test_reasons_for_an_alarm(value, first, drafts, why) -> None:
    assert alarm_reasons(value, first, drafts, allowed=0.1) == why


@pytest.mark.parametrize("name", CANARY_NAMES)
def test_every_canary_says_something(name: str) -> None:
    assert len(canary_texts()[name].split()) > 30 or name == "to_the_judge"


def opening_message(row: int, text: str, rollout: int = 0) -> Record:
    episode = Episode(example_id=str(row), task="userllm", transcript=(Line("user", text),))
    score = Score(value=1.0, reward=1.0, metrics={"ai_detector": 1.0, "intent_decomposition": 0.0})
    return Record(key=f"{row}/{rollout}", task="userllm", example_id=str(row), rollout=rollout,
                  kind="draft", episode=episode, score=score,
                  tags={"source": PRISM, "turn": "first"})  # fmt: skip


def watch(**tasks: Any) -> CanaryMonitor:
    return CanaryMonitor(tasks or {"userllm": task_of("userllm")}, margin=0.1)


def test_rows_that_become_alike_raise_an_alarm() -> None:
    one = watch()
    lively = [opening_message(i, text) for i, text in enumerate(("a b", "c d", "e f"))]
    bland = [opening_message(i, "hey there you") for i in range(3)]
    scores = one.look(0, lively, CanaryScores())
    assert scores.means == {"first_turn_diversity": 1.0} and not scores.alarms
    scores = one.look(1, bland, CanaryScores(means={"keywords": 0.2}))
    assert scores.means == {"keywords": 0.2, "first_turn_diversity": 0.0}
    (alarm,) = scores.alarms
    assert (alarm.why, alarm.value, alarm.first, alarm.step) == (("fell",), 0.0, 1.0, 1)


def test_what_is_watched_is_named_by_its_task_and_needs_rows() -> None:
    several = watch(userllm=task_of("userllm"), tomi=task_of("tomi"))
    rows = [opening_message(i, text) for i, text in enumerate(("a b", "c d"))]
    means = several.look(0, rows, CanaryScores()).means
    assert means == {"userllm/first_turn_diversity": 1.0}
    assert several.look(1, [], CanaryScores()) == CanaryScores()
    assert watch(tomi=task_of("tomi")).look(0, rows, CanaryScores()) == CanaryScores()


@pytest.mark.slow
def test_a_run_pays_first_messages_for_being_unlike_and_rescoring_knows_it(tmp_path: Path) -> None:
    def judge(body: Body) -> str:
        return "REFUSED" if "REFUSED" in body["messages"][0]["content"] else "HUMAN"

    warm, out = tmp_path / "warm", tmp_path / "run"
    rows = ("--task", "userllm", "--data", "userllm=synth:30")
    assert soul("train", "sft", "--full", "--model", "tiny", *rows, "--steps", 40, "--lr", 3e-3,
                "--out", warm, "--json") == 0  # fmt: skip
    with ScriptedServer(answer=judge) as server:
        code = soul(
            "train", "grpo", "--model", warm / "model", *rows, "--steps", 2,
            "--judge", f"endpoint:j@{server.base_url}",
            "--prompts", 12, "--group-size", 3, "--max-tokens", 64, "--lora-r", 4, "--out", out,
            "--json",
        )  # fmt: skip
    assert code == 0
    lines = [line for line in read_jsonl(out / "metrics.jsonl") if "reward/draft" in line]
    assert all(0 <= line["canary/first_turn_diversity"] <= 1 for line in lines) and len(lines) == 2
    records = load_records(out / "episodes.jsonl")
    paid = [r for r in records if "novelty" in r.score.metrics]
    assert paid and all(r.tags["turn"] == "first" for r in paid)
    again = tmp_path / "again"
    assert soul("rescore", out, "--out", again, "--json") == 0
    rewards = [{r.key: r.score.reward for r in load_records(f / "episodes.jsonl")}
               for f in (out, again)]  # fmt: skip
    assert rewards[0] == rewards[1]
    assert json.loads((again / "rescore.json").read_text())["changed"] == 0
