"""During a run: what became of the feedback is counted, said, and stops a run that gets none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.runs.records import load_records
from soulkit.train.rollouts.feedback import STEPS_IN_VAIN
from soulkit.train.state.loop import Loop
from soulkit.train.state.metrics import Learned, StepLine
from soulkit.train.state.stops import flat_groups, stop_flat
from tests.support.evaluation import three_lines
from tests.support.servers.openai_server import Fault, ScriptedServer
from tests.support.shades import SHADES, shade_options, steps_of, train, write_coach
from tests.support.training import config, random_model

LEAK = "16 of 16 feedbacks leak the answer (gold_text)"


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


@pytest.mark.parametrize(
    ("method", "verb"), [("ditto", "refined"), ("erl", "refined"), ("sdpo-token+grpo", "taught")]
)
def test_three_steps_in_vain_stop_a_run(
    tmp_path: Path, model: Path, capfd: Any, method: str, verb: str
) -> None:
    out, options = tmp_path / "run", scripted(tmp_path, "kind")
    assert train(method, model, out, *options, "--steps", 6) == 2
    output = capfd.readouterr().err
    for step in range(3):
        assert f"step {step}: nothing was {verb}: {LEAK}" in output
    error, why, fix = three_lines("\n".join(output.splitlines()[-3:]))
    assert "3 steps in a row" in error and LEAK in error
    assert f"'{method}'" in why and "--coach" in fix
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
def test_a_run_in_vain_to_its_last_step_has_no_result(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    out, options = tmp_path / "run", scripted(tmp_path, "kind")
    for _ in range(2):
        assert train("ditto", model, out, *options, "--steps", STEPS_IN_VAIN) == 2
        assert "3 steps in a row" in stopped(capfd)[0]
    assert len(steps_of(out)) == 3 and not (out / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2, 50])
def test_the_count_survives_an_interruption(
    tmp_path: Path, model: Path, capfd: Any, every: int
) -> None:
    out, options = tmp_path / "run", scripted(tmp_path, "kind")
    options += ["--steps", 6, "--checkpoint-every", every]
    with pytest.MonkeyPatch.context() as patch:
        advance = Loop._due

        def interrupted(loop: Loop, dev: float | None) -> bool:
            if loop.step == 2 and advance(loop, dev):
                loop.checkpoint()
            if loop.step == 2:
                raise KeyboardInterrupt
            return advance(loop, dev)

        patch.setattr(Loop, "_due", interrupted)
        assert train("ditto", model, out, *options) == 130
    assert [line["feedback/in_vain"] for line in steps_of(out)] == [1, 2]
    assert train("ditto", model, out, *options) == 2
    assert "3 steps in a row" in stopped(capfd)[0]
    assert [line["feedback/in_vain"] for line in steps_of(out)] == [1, 2, 3]


class Coach:
    """Gives the answer away in the calls of the steps that it is told, and helps in the others."""

    def __init__(self, calls: int, leaking: set[int]) -> None:
        self.calls, self.leaking, self.count = calls, leaking, 0

    def __call__(self, body: Any) -> str:
        step, self.count = self.count // self.calls, self.count + 1
        prompt = str(body["messages"][0]["content"])
        speaker = int(prompt.partition("Speaker ")[2].split()[0])
        return f"It is {SHADES[speaker % 3]}." if step in self.leaking else "Look at the light."


@pytest.mark.slow
def test_one_step_of_use_begins_the_count_anew(tmp_path: Path, model: Path, capfd: Any) -> None:
    out, options = tmp_path / "run", shade_options(tmp_path, "kind")
    with ScriptedServer(answer=Coach(8, {0, 1, 3, 4})) as server:
        coach = ("--coach", f"endpoint:c@{server.base_url}")
        assert train("ditto", model, out, *options, *coach, "--steps", 6) == 0
    counts = [line.get("feedback/in_vain", 0) for line in steps_of(out)]
    assert counts == [1, 2, 0, 1, 2, 0]


@pytest.mark.slow
def test_a_setting_that_the_coachs_server_refuses_is_recorded(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    def script(index: int, body: Any) -> Fault | None:
        if "temperature" not in body:
            return None
        return Fault.status_error(400, "temperature is not supported", param="temperature")

    out = tmp_path / "run"
    with ScriptedServer(answer=Coach(8, set()), script=script) as server:
        coach = ("--coach", f"endpoint:c@{server.base_url}", "--steps", 1)
        assert train("ditto", model, out, *shade_options(tmp_path, "kind"), *coach) == 0
    dropped = {"coach": {"c": {"temperature": 1.0}}}
    assert json.loads((out / "summary.json").read_text())["dropped_settings"] == {"kind": dropped}
    record = json.loads((out / "provenance.json").read_text())
    assert record["tasks"]["kind"]["dropped_settings"] == dropped
    assert record["servers"] == {f"c@{server.base_url}": {"defaults": "unknown"}}
    assert "kind coach temperature (100 % of calls to c)" in capfd.readouterr().out


@pytest.mark.slow
def test_reasons_are_counted_apart(tmp_path: Path, model: Path, capfd: Any) -> None:
    def answer(body: Any) -> str:
        number = len(server.requests) % 2
        return "amber cobalt " * 200 if number else Coach(1, {0})(body)

    with ScriptedServer(answer=answer) as server:
        coach = ("--coach", f"endpoint:c@{server.base_url}", "--set", "concurrency=1")
        options = (*shade_options(tmp_path, "kind"), *coach, "--steps", 3)
        assert train("ditto", model, tmp_path / "run", *options) == 2
    error = stopped(capfd)[0]
    assert "4 of 8 feedbacks leak the answer" in error
    assert "the coach failed on 4 of 8 drafts" in error


@pytest.mark.slow
def test_of_a_mixture_the_task_is_named_and_the_others_carry_on(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    out = tmp_path / "run"
    options = shade_options(tmp_path, "kind", "mute", rows=3)
    coach = write_coach(tmp_path / "coach.yaml", leaks=True)
    script = coach.read_text() + "replies: [Look at the light.]\n"
    rows = [json.loads(line) for line in (tmp_path / "mute.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):  # speakers that the script does not know
        row["said"] = f"Singer {number} points."
    (tmp_path / "mute.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    coach.write_text(script)
    more = ("--coach", f"scripted:{coach}", "--prompts", 6, "--steps", 4)
    assert train("ditto", model, out, *options, *more) == 0
    lines = steps_of(out)
    assert all("feedback/in_vain" not in line for line in lines)
    remark = "nothing was refined for kind: 12 of 12 feedbacks leak the answer (gold_text)"
    assert [line["feedback/missing"] for line in lines] == [{"kind": remark}] * 4
    assert f"step 3: {remark}" in capfd.readouterr().err


@pytest.mark.slow
def test_refined_rollouts_without_a_score_are_of_no_use(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    from soulkit.errors import ProviderError
    from soulkit.tasks.kit.choice import ChoiceTask

    play = ChoiceTask.play

    async def failing(self: Any, example: Any, cast: Any, rollout: Any) -> Any:
        if rollout.kind == "refined" and rollout.rng(example, "x"):
            raise ProviderError("gone")
        return await play(self, example, cast, rollout)

    options = (*shade_options(tmp_path, "kind"), "--steps", 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChoiceTask, "play", failing)
        assert train("ditto", model, tmp_path / "run", *options) == 2
    assert "8 of 8 refined rollouts have no score" in stopped(capfd)[0]


# --- nothing to mend ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("contented", ()), ("generous", ("--feedback-for", "imperfect")),
        ("generous", ("--feedback-for", "task")), ("closed", ("--protocol", "reference")),
    ],
)  # fmt: skip
def test_drafts_that_want_no_feedback_do_not_stop_a_run(
    tmp_path: Path, model: Path, capfd: Any, task: str, more: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    assert train("ditto", model, out, *shade_options(tmp_path, task), "--steps", 4, *more) == 0
    lines = steps_of(out)
    assert [line["feedback/gated"] for line in lines] == [8] * 4
    assert not any({"feedback/in_vain", "feedback/missing"} & line.keys() for line in lines)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["feedback"]["gated"] == 32
    shown = capfd.readouterr()
    assert "nothing was refined" not in shown.err and "32 of 32 drafts wanted none" in shown.out


@pytest.mark.slow
def test_full_marks_need_no_feedback_whatever_was_said(tmp_path: Path, model: Path) -> None:
    out, options = tmp_path / "run", scripted(tmp_path, "generous")
    assert train("ditto", model, out, *options, "--steps", 4) == 0
    drafts = [r for r in load_records(out / "episodes.jsonl") if r.kind == "draft"]
    full = [sum(r.score.reward == 1 for r in drafts if r.step == step) for step in range(4)]
    assert [line["feedback/gated"] for line in steps_of(out)] == full
    # A reply without a visible word that was cut at its limit has no marks in any task.
    cut = [r for r in drafts if r.score.reward != 1]
    assert sum(full) > 50 and {r.score.status for r in cut} <= {"truncated"}


@pytest.mark.slow
def test_gated_steps_leave_the_count_as_it_is(tmp_path: Path, model: Path, capfd: Any) -> None:
    out, options = tmp_path / "run", [*scripted(tmp_path, "kind"), "--feedback-for", "task"]
    with pytest.MonkeyPatch.context() as patch:
        from soulkit.tasks.kit.base import Task

        patch.setattr(Task, "gate", lambda self, score, step: step != 1)
        assert train("ditto", model, out, *options, "--steps", 6) == 2
    lines = steps_of(out)
    assert [line["feedback/in_vain"] for line in lines] == [1, 1, 2, 3]
    assert [line.get("feedback/gated", 0) for line in lines] == [0, 16, 0, 0]
    assert "feedback/missing" not in lines[1]


@pytest.mark.slow
def test_what_is_used_adds_nothing_to_the_line(tmp_path: Path, model: Path, capfd: Any) -> None:
    out, options = tmp_path / "run", shade_options(tmp_path, "kind")
    assert train("ditto", model, out, *options, "--steps", 1) == 0
    added = {"feedback/gated", "feedback/missing", "feedback/in_vain"}
    assert not any(added & line.keys() for line in steps_of(out))
    refined = [r for r in load_records(out / "episodes.jsonl") if r.kind == "refined"]
    assert len(refined) == 8
    assert "nothing was" not in capfd.readouterr().err.replace("nothing was learned", "")


# --- groups without spread ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "ditto"])
def test_groups_without_spread_are_said_aloud(
    tmp_path: Path, model: Path, capfd: Any, method: str
) -> None:
    out, options = tmp_path / "run", shade_options(tmp_path, "generous")
    assert train(method, model, out, *options, "--steps", 11) == 0
    groups = 2 if method == "grpo" else 4
    output = capfd.readouterr().err
    text = f"{groups} of {groups} groups have equal rewards: nothing is learned;"
    assert f"step 0: {text}" in output and output.count(text) == 1
    assert "--group-size" in output and "--stop-flat 10 would end the run" in output
    assert "step 9: 10 steps so far had nothing to learn from" in output
    assert "11 of 11 steps had nothing to learn from rewards" in output


@pytest.mark.slow
def test_a_run_that_learns_nothing_ends_and_goes_on(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    out, options = tmp_path / "run", shade_options(tmp_path, "generous")
    assert train("grpo", model, out, *options, "--steps", 6, "--stop-flat", 2) == 1
    error = capfd.readouterr().err
    assert "2 such steps in a row end the run" in error
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


@pytest.mark.parametrize("method", ["ditto", "sdpo-token"])
def test_a_coach_of_one_sentence_is_counted_and_said(
    tmp_path: Path, model: Path, capfd: Any, method: str
) -> None:
    out, options = tmp_path / "run", scripted(tmp_path, "kind", leaks=False)
    assert train(method, model, out, *options, "--steps", 2) == 0
    assert [line["feedback/distinct"] for line in steps_of(out)] == [1 / 16] * 2
    assert json.loads((out / "summary.json").read_text())["feedback"]["distinct"] == 1 / 16
    shown = capfd.readouterr()
    remark = "the feedback hardly differs: 0.06 different texts a draft, fewer than 1 in 10"
    assert shown.err.count(remark) == 1 and f"step 0: {remark}" in shown.err
    assert "0.06 different texts a draft" in shown.out and remark in shown.out


def test_feedback_that_differs_is_counted_and_no_more(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer=lambda body: f"Look again, {len(server.requests)} times.") as server:
        coach = ("--coach", f"endpoint:c@{server.base_url}", "--group-size", 8, "--steps", 1)
        assert train("ditto", model, out, *shade_options(tmp_path, "kind"), *coach) == 0
    (line,) = steps_of(out)
    assert line["feedback/distinct"] > 0.5
    shown = capfd.readouterr()
    assert "hardly differs" not in shown.err + shown.out and "different texts a draft" in shown.out
    assert train("grpo", model, tmp_path / "grpo", *shade_options(tmp_path, "kind")) == 0
    assert all("feedback/distinct" not in line for line in steps_of(tmp_path / "grpo"))


@pytest.mark.parametrize(
    ("more", "mode", "refined", "leaks", "dropped"),
    [
        ((), "drop", 0, 1.0, 1.0),
        (("--leak-check", "log"), "log", 16, 1.0, 0.0),
        (("--leak-check", "off"), "off", 16, 0.0, 0.0),
        (("--protocol", "reference"), "log", 16, 1.0, 0.0),
        (("--protocol", "reference", "--leak-check", "drop"), "drop", 0, 1.0, 1.0),
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
    said = {"drop": "leak check         compares words", "log": "counts leaks and drops none",
            "off": "no feedback was checked"}  # fmt: skip
    assert said[mode] in capfd.readouterr().out
