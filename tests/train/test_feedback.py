"""During a run: what became of the feedback is counted, said, and stops a run that gets none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.play.engine import FeedbackPolicy
from soulkit.runs.records import load_records
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.rollouts.feedback import FeedbackMonitor
from soulkit.train.state.loop import Loop
from soulkit.train.state.metrics import FeedbackCounts, Learned, StepLine
from soulkit.train.state.stops import Stops, flat_groups, stop_flat
from soulkit.types import (
    Completion,
    Episode,
    Failure,
    Feedback,
    Kind,
    Record,
    Score,
    Segment,
    Trace,
    Turn,
    unscored,
)  # fmt: skip
from tests.support.evaluation import three_lines
from tests.support.servers.openai_server import Fault, ScriptedServer
from tests.support.shades import TASKS, shade_options, steps_of, train, write_coach
from tests.support.training import CTRL_C, config, random_model

LEAK = "16 of 16 feedback texts leak the answer (gold_text)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


def stopped(capfd: Any) -> tuple[str, str, str]:
    """The three lines behind what was said on the way."""
    lines = capfd.readouterr().err.splitlines()
    return three_lines("\n".join(lines[-3:]))


def scripted(folder: Path, *tasks: str, leaks: bool = True) -> list[Any]:
    """Training options with a coach from a file, two prompts of eight drafts a step."""
    coach = write_coach(folder / "coach.yaml", leaks=leaks)
    options = shade_options(folder, *tasks, rows=12 // len(tasks))
    return [*options, "--coach", f"scripted:{coach}", "--group-size", 8, "--lr", 1e-3]


# --- nothing of use -------------------------------------------------------------------------------


def test_three_steps_in_vain_stop_a_run(tmp_path: Path, model: Path, capfd: Any) -> None:
    out, options = tmp_path / "run", scripted(tmp_path, "kind")
    assert train("ditto", model, out, *options, "--steps", 6) == 2
    output = capfd.readouterr().err
    for step in range(3):
        assert f"step {step}: no draft was refined: {LEAK}" in output
    error, why, fix = three_lines("\n".join(output.splitlines()[-3:]))
    assert "3 steps in a row" in error and LEAK in error
    assert "'ditto'" in why and "--coach" in fix
    lines = steps_of(out)
    assert [line["feedback/in_vain"] for line in lines] == [1, 2, 3]
    assert [line["rollouts/refined"] for line in lines] == [0, 0, 0]
    assert (out / "checkpoints" / "step_000003").is_dir() and not (out / "summary.json").exists()


@pytest.mark.slow
def test_what_was_stopped_goes_on_once_the_coach_is_mended(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    out, options = tmp_path / "run", scripted(tmp_path, "kind")
    assert train("ditto", model, out, *options, "--steps", 5) == 2
    assert train("ditto", model, out, *options, "--steps", 5) == 2  # one more step, and no more
    assert "4 steps in a row" in stopped(capfd)[0]
    assert [line["feedback/in_vain"] for line in steps_of(out)] == [1, 2, 3, 4]
    write_coach(tmp_path / "coach.yaml", leaks=False)
    assert train("ditto", model, out, *options, "--steps", 5) == 0
    lines = steps_of(out)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert "feedback/in_vain" not in lines[-1] and lines[-1]["rollouts/refined"] == 16


@pytest.mark.slow
def test_the_count_survives_an_interruption(tmp_path: Path, model: Path, capfd: Any) -> None:
    out, options = tmp_path / "run", scripted(tmp_path, "kind")
    options += ["--steps", 6, "--checkpoint-every", 50]
    with pytest.MonkeyPatch.context() as patch:
        advance = Loop._due

        def interrupted(loop: Loop, dev: float | None) -> bool:
            if loop.step == 2 and advance(loop, dev):
                loop.checkpoint()
            if loop.step == 2:
                raise CTRL_C
            return advance(loop, dev)

        patch.setattr(Loop, "_due", interrupted)
        assert train("ditto", model, out, *options) == 130
    assert [line["feedback/in_vain"] for line in steps_of(out)] == [1, 2]
    assert train("ditto", model, out, *options) == 2
    assert "3 steps in a row" in stopped(capfd)[0]
    assert [line["feedback/in_vain"] for line in steps_of(out)] == [1, 2, 3]


@pytest.mark.slow
def test_a_setting_that_the_coachs_server_refuses_is_recorded(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    def script(index: int, body: Any) -> Fault | None:
        if "temperature" not in body:
            return None
        return Fault.status_error(400, "temperature is not supported", param="temperature")

    out = tmp_path / "run"
    with ScriptedServer(answer=lambda body: "Look at the light.", script=script) as server:
        coach = ("--coach", f"endpoint:c@{server.base_url}", "--steps", 1)
        assert train("ditto", model, out, *shade_options(tmp_path, "kind"), *coach) == 0
    dropped = {"coach": {"c": {"temperature": 1.0}}}
    assert json.loads((out / "summary.json").read_text())["dropped_settings"] == {"kind": dropped}
    record = json.loads((out / "conditions.json").read_text())
    assert record["tasks"]["kind"]["dropped_settings"] == dropped
    assert record["servers"] == {f"c@{server.base_url}": {"defaults": "unknown"}}
    assert "kind coach temperature (100 % of calls to c)" in capfd.readouterr().out


# --- what is counted ------------------------------------------------------------------------------

SHOWN = Segment("user", "Q. Look at the light.", bare="Q.")
ADVICE, TELLING = (
    Feedback(text="Look.", author="coach"),
    Feedback(text="It is amber.", author="coach", leak="gold_text"),
)
FULL, POOR, BROKEN = (
    Score(value=1.0, reward=1.0), Score(value=0.5, reward=0.5),
    unscored(Failure("partner_error"), "paper"),
)  # fmt: skip


def record(
    row: int, kind: Kind = "draft", score: Score = POOR, received: Feedback | None = None,
    task: str = "kind", context: Segment = SHOWN, **notes: Any,
) -> Record:  # fmt: skip
    trace = Trace(seat="reader", turns=(Turn(context=(context,), completion=Completion(text="x")),))
    episode = Episode(example_id=str(row), task=task, kind=kind, traces=(trace,), notes=notes)
    return Record(
        key=f"{row}/{kind}", task=task, example_id=str(row), rollout=0, kind=kind,
        episode=episode, score=score, received=received,
    )  # fmt: skip


def monitor(*tasks: str, refines: bool = True, **policy: Any) -> FeedbackMonitor:
    registry = load_registry(TASKS)
    policies = dict.fromkeys(tasks, FeedbackPolicy(**policy))
    return FeedbackMonitor(refines, policies, {name: registry.task(name) for name in tasks})


def after(one: FeedbackMonitor, *records: Record) -> FeedbackCounts:
    return one.look(FeedbackCounts(), records, records)


USED = (record(0, received=ADVICE), record(0, "refined"))
LEAKED, SILENT = record(1, received=TELLING), record(2)


@pytest.mark.parametrize(
    ("refines", "records", "words"),
    [
        (True, USED, ""),
        (True, (LEAKED,),
         "no draft was refined: 1 of 1 feedback texts leak the answer (gold_text)"),
        (False, (LEAKED,),
         "no draft has a teacher: 1 of 1 feedback texts leak the answer (gold_text)"),
        (False, (record(0, received=ADVICE),), ""),
        (True, (record(0, received=ADVICE),), "no other draft had feedback to swap for 1 of 1"),
        (True, (SILENT,), "the coach gave no feedback on 1 of 1 drafts"),
        (True, (record(0, coach_failure="gone"),), "the coach failed on 1 of 1 drafts"),
        (True, (LEAKED, SILENT), "1 of 2 feedback texts leak the answer (gold_text), the coach"),
        (True, (USED[0], record(0, "refined", BROKEN)), "1 of 1 refined rollouts have no score"),
        (True, (USED[0], record(0, "refined", context=Segment("user", "Q."))),
         "1 of 1 feedback texts are missing from the prompt"),
        (True, (record(0, score=BROKEN),), ""),  # an unscored draft leaves before
    ],
)  # fmt: skip
def test_why_feedback_was_of_no_use(refines: bool, records: Sequence[Record], words: str) -> None:
    counts = after(monitor("kind", refines=refines), *records)
    assert bool(counts.missing) == bool(words) == bool(counts.in_vain)
    assert words in counts.missing.get("kind", "")


@pytest.mark.parametrize(
    ("task", "score", "policy", "gated"),
    [
        ("kind", FULL, {}, 1), ("kind", POOR, {}, 0), ("kind", POOR, {"coach": "none"}, 1),
        ("kind", POOR, {"when": "imperfect"}, 0), ("closed", POOR, {"when": "task"}, 1),
        ("closed", POOR, {"when": "all"}, 0),
    ],
)  # fmt: skip
def test_drafts_that_want_no_feedback_miss_none(
    task: str, score: Score, policy: dict[str, Any], gated: int
) -> None:
    counts = after(monitor(task, **policy), record(0, score=score, task=task))
    assert (counts.gated, counts.in_vain, len(counts.missing)) == (gated, 1 - gated, 1 - gated)


def test_steps_in_vain_are_counted_while_they_follow_each_other() -> None:
    one, gated = monitor("kind"), record(5, score=FULL)
    steps = ((LEAKED,), (gated,), (SILENT, gated), USED, (LEAKED,), (*USED, SILENT))
    assert [after(one, *step).in_vain for step in steps] == [1, 1, 2, 0, 1, 0]


def test_of_a_mixture_the_task_without_use_is_named() -> None:
    other = (record(3, received=ADVICE, task="mute"), record(3, "refined", task="mute"))
    counts = after(monitor("kind", "mute"), LEAKED, *other)
    remark = "no draft was refined for kind: 1 of 1 feedback texts leak the answer (gold_text)"
    assert (counts.missing, counts.in_vain) == ({"kind": remark}, 0)


# --- groups without spread ------------------------------------------------------------------------


def test_groups_without_spread_are_said_aloud(tmp_path: Path, model: Path, capfd: Any) -> None:
    out, options = tmp_path / "run", shade_options(tmp_path, "generous")
    assert train("grpo", model, out, *options, "--steps", 11) == 0
    output = capfd.readouterr().err
    text = "2 of 2 groups have equal rewards: nothing is learned;"
    assert f"step 0: {text}" in output and output.count(text) == 1
    assert "--group-size" in output and "--stop-flat 10 would stop the run" in output
    assert "step 9: 10 steps so far had nothing to learn from" in output
    assert "11 of 11 steps learned nothing from rewards" in output


@pytest.mark.slow
def test_a_run_that_learns_nothing_ends_and_goes_on(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    out, options = tmp_path / "run", shade_options(tmp_path, "generous")
    assert train("grpo", model, out, *options, "--steps", 6, "--stop-flat", 2) == 1
    error = capfd.readouterr().err
    assert "the run stops after 2 such steps in a row" in error
    assert "error: 2 steps in a row learned nothing" in error and "--stop-flat 2 was given" in error
    assert len(steps_of(out)) == 2 and not (out / "summary.json").exists()
    assert train("grpo", model, out, *options, "--steps", 6, "--stop-flat", 3) == 1  # it goes on
    assert len(steps_of(out)) == 5
    assert train("grpo", model, out, *options, "--steps", 6, "--stop-flat", 0) == 0
    assert len(steps_of(out)) == 6 and (out / "summary.json").exists()


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, None), ({"stop_flat": 3}, 3), ({"stop_flat": 0}, None),
        ({"judge": "endpoint:gpt-5-nano@https://api.openai.com/v1"}, 10),
        ({"judge": "endpoint:gpt-5-nano@https://api.openai.com/v1", "stop_flat": 0}, None),
        ({"judge": "endpoint:mine@http://127.0.0.1:9/v1"}, None),
    ],
)  # fmt: skip
def test_paid_runs_end_by_themselves(settings: dict[str, Any], limit: int | None) -> None:
    assert stop_flat(config(**settings)) == limit


def test_flat_steps_are_counted_anew_after_one_that_learned() -> None:
    flat, moved = (
        StepLine(learned=Learned(groups=4, groups_flat=count, grad_norm=norm))
        for count, norm in ((4, 0.0), (0, 1.0))
    )
    stops = Stops(config(stop_flat=3))
    steps = [flat, flat, moved, flat, flat, flat]
    assert [bool(stops.after(line, last=False)) for line in steps] == [False] * 5 + [True]
    assert stops.after(flat, last=True) is None


@pytest.mark.parametrize(
    ("counts", "norm", "text"),
    [
        ((8, 0, 8), 0.0, "8 of 8 groups have equal rewards: nothing is learned;"),
        ((8, 0, 8), 0.1, "8 of 8 groups have equal rewards: nothing is learned from rewards;"),
        ((8, 8, 0), 0.0, "8 of 8 groups have one rollout: nothing is learned;"),
        ((8, 3, 5), 0.0, "8 of 8 groups have one rollout or equal rewards: nothing is learned;"),
        ((8, 8, 0), 0.1, ""), ((8, 0, 7), 0.0, ""), ((0, 0, 0), 0.0, ""),
    ],
)  # fmt: skip
def test_what_is_said_of_groups(counts: tuple[int, int, int], norm: float, text: str) -> None:
    groups, single, flat = counts
    line = StepLine(
        learned=Learned(groups=groups, groups_single=single, groups_flat=flat, grad_norm=norm)
    )
    assert flat_groups(line).startswith(text) and bool(flat_groups(line)) == bool(text)


# --- how different, and how leaks are treated -----------------------------------------------------


def test_a_coach_of_one_sentence_is_counted_and_said(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    out, options = tmp_path / "run", scripted(tmp_path, "kind", leaks=False)
    assert train("ditto", model, out, *options, "--steps", 2) == 0
    assert [line["feedback/distinct"] for line in steps_of(out)] == [1 / 16] * 2
    assert json.loads((out / "summary.json").read_text())["feedback"]["distinct"] == 1 / 16
    shown = capfd.readouterr()
    remark = "the feedback hardly differs: 0.06 different texts per draft, fewer than 1 in 10"
    assert shown.err.count(remark) == 1 and f"step 0: {remark}" in shown.err
    assert "0.06 different texts" in shown.out and remark in shown.out


def test_feedback_that_differs_is_counted_and_no_more(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    out = tmp_path / "run"
    times = count()
    with ScriptedServer(answer=lambda body: f"Look again, {next(times)} times.") as server:
        coach = ("--coach", f"endpoint:c@{server.base_url}", "--group-size", 8, "--steps", 1)
        assert train("ditto", model, out, *shade_options(tmp_path, "kind"), *coach) == 0
    (line,) = steps_of(out)
    assert line["feedback/distinct"] > 0.5
    shown = capfd.readouterr()
    assert "hardly differs" not in shown.err + shown.out and "different texts" in shown.out
    assert train("grpo", model, tmp_path / "grpo", *shade_options(tmp_path, "kind")) == 0
    assert all("feedback/distinct" not in line for line in steps_of(tmp_path / "grpo"))


@pytest.mark.parametrize(
    ("more", "mode", "refined", "leaks", "dropped"),
    [
        ((), "drop", 0, 1.0, 1.0),
        (("--leak-check", "off"), "off", 16, 0.0, 0.0),
        (("--protocol", "reference"), "log", 16, 1.0, 0.0),
    ],
)
def test_what_becomes_of_leaks_is_asked_for_recorded_and_counted(
    tmp_path: Path, model: Path, capfd: Any, more: tuple[str, ...], mode: str, refined: int,
    leaks: float, dropped: float,
) -> None:  # fmt: skip
    out, options = tmp_path / "run", scripted(tmp_path, "kind")
    assert train("ditto", model, out, *options, "--steps", 1, "--feedback-for", "all", *more) == 0
    (line,) = steps_of(out)
    assert line["rollouts/refined"] == refined
    assert (line["feedback/leak_share"], line["feedback/dropped"]) == (leaks, dropped)
    assert line.get("feedback/dropped/gold_text", 0.0) == dropped
    assert yaml.safe_load((out / "config.yaml").read_text())["leak_check"] == mode
    received = [r.received for r in load_records(out / "episodes.jsonl") if r.kind == "draft"]
    assert {f.usable for f in received if f} == {refined > 0}
    assert {f.leak for f in received if f} == {"" if mode == "off" else "gold_text"}
    said = {"drop": "leak check         compares words", "log": "counts leaks but keeps the",
            "off": "off: feedback was not checked"}  # fmt: skip
    assert said[mode] in capfd.readouterr().out
