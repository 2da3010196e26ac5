"""Before a run: a method that learns from feedback is refused where it can have none.

Feedback that shows the answer by design: used only where a run asks for it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.runs.folder import Run
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.objectives.base import make_objective, method_class, rollout_methods
from soulkit.train.rollouts.feedback import swap_feedback
from soulkit.train.setup.data import load_training_data
from soulkit.train.setup.feedback_check import NoFeedback, no_feedback_reason, zero_weight_remark
from soulkit.train.sft.steps import feedback_for
from soulkit.types import Episode, Feedback, Record, Score
from tests.support.evaluation import three_lines as printed_lines
from tests.support.road import synth, synth_rows
from tests.support.shades import SMALL, TASKS, shade_options, steps_of, train, write_rows
from tests.support.training import config, random_model, soul

SOCIAL = ("--task", "social_r1", "--data", "social_r1=synth:12", "--steps", 1)
NOWHERE = "endpoint:m@http://127.0.0.1:9/v1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


def three_lines(err: str) -> dict[str, str]:
    return dict(zip(("error", "why", "fix"), printed_lines(err), strict=True))


def refusal(capfd: Any, method: str, model: Path, out: Path, *options: Any) -> dict[str, str]:
    """The three lines of a training that must not start."""
    capfd.readouterr()
    code = train(method, model, out, *options)
    lines = three_lines(capfd.readouterr().err)
    assert code == 2 and not out.exists()
    assert f"'{method}'" in lines["error"]
    return lines


# --- built-in tasks -------------------------------------------------------------------------------


TOLD = [name for name in rollout_methods() if "feedback" in method_class(name).traits(name)]


@pytest.mark.parametrize("method", sorted(TOLD))
def test_worked_examples_that_nobody_asked_for(
    tmp_path: Path, model: Path, capfd: Any, method: str
) -> None:
    lines = refusal(capfd, method, model, tmp_path / "run", *SOCIAL)
    assert "'social_r1'" in lines["error"] and "'symbolic'" in lines["error"]
    assert "worked_examples=true" in lines["fix"] and "grpo" in lines["fix"]


@pytest.mark.parametrize("coach", ["terse", "actor", NOWHERE])
@pytest.mark.parametrize("task", ["social_r1", "mistakes_worked"])
def test_no_coach_gives_them_unasked(
    tmp_path: Path, model: Path, capfd: Any, task: str, coach: str
) -> None:
    options = ("--task", task, "--data", f"{task}=synth:12", "--coach", coach)
    lines = refusal(capfd, "ditto", model, tmp_path / "run", *options)
    assert f"'{coach}'" in lines["error"] and f"'{task}'" in lines["error"]


def test_worked_examples_that_were_asked_for(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "run"
    assert train("ditto", model, out, *SOCIAL, "--set", "worked_examples=true") == 0
    assert [line["rollouts/refined"] for line in steps_of(out)] == [8]


def test_scalar_methods_do_not_mind(tmp_path: Path, model: Path) -> None:
    assert train("grpo", model, tmp_path / "run", *SOCIAL) == 0


PLAYABLE = sorted(
    name for name, spec in load_registry().specs.items()
    if spec.synth and not spec.rows_only and not spec.evaluation_only
    and spec.feedback.kind == "coach"
)  # fmt: skip


KINDS = tuple(product(("ditto", "sdpo-token"), ("symbolic", "terse", NOWHERE)))


@pytest.mark.parametrize("task", PLAYABLE)
def test_every_other_task_has_feedback_of_every_kind(task: str) -> None:
    made = synth_rows(task, "synth:4", 0, "train")
    for protocol in ("paper", "reference"):
        owner = load_registry().task(task, protocol)
        examples = to_examples(owner, made, split="train").examples
        for method, coach in KINDS if protocol == "paper" else KINDS[:1]:
            request = config(method=method, coach=coach, protocol=protocol, tasks={task: 1.0})
            assert no_feedback_reason(request, make_objective(request), owner, examples) is None


def test_a_task_without_a_coach_stops_nothing_beside_one_that_has_feedback(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    out = tmp_path / "run"
    options = (*shade_options(tmp_path, "kind", "curt", rows=2), "--coach", "curt=none")
    assert train("ditto", model, out, *options, "--steps", 1, "--prompts", 4) == 0
    (line,) = steps_of(out)
    assert (line["rollouts/draft"], line["rollouts/refined"]) == (16, 8)
    assert line["feedback/gated"] == 8 and "feedback/missing" not in line
    settings = yaml.safe_load((out / "config.yaml").read_text())
    assert settings["task_players"]["curt"]["coach"] == "none"
    lines = refusal(capfd, "ditto", model, tmp_path / "all", *options[:-1], "none")
    assert "coach none" in lines["error"] and "--coach symbolic" in lines["fix"]
    mute = (*shade_options(tmp_path, "mute", "curt", rows=2), "--coach", "curt=none")
    assert "'mute'" in refusal(capfd, "ditto", model, tmp_path / "mute", *mute)["error"]


# --- tasks of one's own ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ditto", "erl", "sdpo-logits+grpo"])
@pytest.mark.parametrize(
    ("task", "word"),
    [
        ("mute", "give no feedback on 36 of 36"), ("blunt", "leaks the answer on 36 of 36"),
        ("pointing", "leaks the answer on 24 of 36"), ("worked", "worked example"),
        ("slotless", "no feedback slot"), ("unmarked", "no feedback slot"),
    ],
)  # fmt: skip
def test_advice_that_can_never_be_used(
    tmp_path: Path, model: Path, capfd: Any, method: str, task: str, word: str
) -> None:
    options = shade_options(tmp_path, task)
    lines = refusal(capfd, method, model, tmp_path / "run", *options)
    assert f"'{task}'" in lines["error"] and word in lines["error"]


@pytest.mark.parametrize("coach", ["terse", "symbolic"])
def test_what_the_rules_lack_a_model_may_have(
    tmp_path: Path, model: Path, capfd: Any, coach: str
) -> None:
    options = shade_options(tmp_path, "mute")
    lines = refusal(capfd, "ditto", model, tmp_path / "run", *options, "--coach", coach)
    assert f"'{coach}'" in lines["error"] and "--coach endpoint:" in lines["fix"]
    plan = ("plan", "train", "ditto", "--model", model, *options, *SMALL, "--coach", "actor")
    assert soul(*plan) == 0


def test_a_slot_that_is_missing_stops_every_coach(tmp_path: Path, model: Path, capfd: Any) -> None:
    options = shade_options(tmp_path, "slotless")
    refusal(capfd, "rltf-sd", model, tmp_path / "run", *options, "--coach", NOWHERE)


@pytest.mark.parametrize("task", ["curt", "worded", "generous", "contented", "kind"])
def test_advice_that_may_be_used_now_and_then(tmp_path: Path, model: Path, task: str) -> None:
    for method in ("ditto", "sdpo-token"):
        plan = ("plan", "train", method, "--model", model, *shade_options(tmp_path, task), *SMALL)
        assert soul(*plan) == 0


def test_one_task_of_a_mixture_is_named(tmp_path: Path, model: Path, capfd: Any) -> None:
    options = shade_options(tmp_path, "kind", "mute", "blunt")
    lines = refusal(capfd, "ditto", model, tmp_path / "run", *options)
    assert "'mute'" in lines["error"] and "'blunt'" in lines["error"]
    assert "'kind'" not in lines["error"]
    assert "remove mute, blunt from --task" in lines["fix"]


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["shut", "late"])
def test_a_gate_that_never_opens(tmp_path: Path, model: Path, capfd: Any, task: str) -> None:
    options = (*shade_options(tmp_path, task), "--feedback-for", "task")
    for coach in ("symbolic", NOWHERE):
        lines = refusal(capfd, "ditto", model, tmp_path / "run", *options, "--coach", coach)
        assert "--feedback-for task" in lines["error"] and "--feedback-for all" in lines["fix"]
    refusal(capfd, "ditto", model, tmp_path / "run", *options[:-2], "--protocol", "reference")
    plan = ("plan", "train", "ditto", "--model", model, *options[:-1], "all", *SMALL)
    assert soul(*plan) == 0


@pytest.mark.parametrize("gate", ["imperfect", "task"])
def test_advice_that_only_those_may_have_who_get_none(
    tmp_path: Path, model: Path, capfd: Any, gate: str
) -> None:
    options = (*shade_options(tmp_path, "praising"), "--feedback-for", gate)
    lines = refusal(capfd, "ditto", model, tmp_path / "run", *options)
    assert "leaks the answer on 24 of 24 test drafts" in lines["error"]
    plan = ("plan", "train", "ditto", "--model", model, *options[:-1], "all", *SMALL)
    assert soul(*plan) == 0


@pytest.mark.parametrize("method", ["ditto", "sdpo-token"])
def test_others_feedback_where_there_are_no_others(
    tmp_path: Path, model: Path, capfd: Any, method: str
) -> None:
    one, many = shade_options(tmp_path, "kind", rows=1), shade_options(tmp_path, "kind", rows=5)
    write_rows(tmp_path / "kind.jsonl", 1)
    lines = refusal(capfd, method, model, tmp_path / "run", *one, "--shuffle-feedback")
    assert "needs several examples" in lines["error"]
    write_rows(tmp_path / "kind.jsonl", 5)
    refusal(capfd, method, model, tmp_path / "run", *many, "--shuffle-feedback", "--prompts", 1)
    assert train(method, model, tmp_path / "run", *many, "--shuffle-feedback", "--steps", 1) == 0


@pytest.mark.parametrize("method", ["sdpo-token", "sdpo-logits", "opd"])
def test_a_teacher_of_no_weight_teaches_nothing(
    tmp_path: Path, model: Path, capfd: Any, method: str
) -> None:
    teacher = ("--teacher-model", model) if method == "opd" else ()
    options = (*shade_options(tmp_path, "kind"), *teacher, "--set", "distill_weight=0")
    assert "distill_weight" in refusal(capfd, method, model, tmp_path / "run", *options)["error"]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"method": "ditto", "lambda_fb": 0}, "only as copies"),
        ({"method": "erl", "aux_weight": 0}, "without feedback"),
        ({"method": "sdpo-token+grpo", "distill_weight": 0}, "this is plain grpo"),
        ({"method": "ditto"}, ""), ({"method": "grpo", "lambda_fb": 0}, ""),
    ],
)  # fmt: skip
def test_an_ablation_is_named_and_not_refused(settings: dict[str, Any], word: str) -> None:
    request = config(**settings, data={"tomi": "synth:6"})
    assert word in zero_weight_remark(request) and bool(zero_weight_remark(request)) == bool(word)
    load_training_data(request)


def test_an_ablation_says_so_on_the_way(tmp_path: Path, model: Path, capfd: Any) -> None:
    options = (*shade_options(tmp_path, "kind"), "--lambda-fb", 0, "--steps", 1)
    assert train("ditto", model, tmp_path / "run", *options) == 0
    assert "lambda_fb is 0" in capfd.readouterr().err


# --- every way in ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_comparison_is_refused_before_its_first_run(
    tmp_path: Path, model: Path, capfd: Any
) -> None:
    out = tmp_path / "comparison"
    options = ("--model", model, *SOCIAL[:-2], *SMALL, "--seeds", 1, "--out", out)
    for words in (("train", "ablate"), ("plan", "train", "ablate")):
        assert soul(*words, *options, "--methods", "grpo,sdpo-token") == 2
        assert "'sdpo-token'" in three_lines(capfd.readouterr().err)["error"]
    assert not out.exists()
    assert soul("train", "ablate", *options, "--methods", "grpo,ditto:worked_examples") == 0


def test_a_plan_is_refused(model: Path, capfd: Any) -> None:
    assert soul("plan", "train", "erl", "--model", model, *SOCIAL) == 2
    assert "'social_r1'" in three_lines(capfd.readouterr().err)["error"]


def test_a_run_of_before_is_not_taken_up(tmp_path: Path, model: Path, capfd: Any) -> None:
    flags = {"method": "ditto", "model": str(model), "tasks": {"social_r1": 1.0}, "steps": 1,
             "data": {"social_r1": "synth:12"}}  # fmt: skip
    request = TrainConfig.load(env={}, flags=flags)
    out = tmp_path / "old"
    Run.open(out, "train ditto", request.identity())
    assert soul("train", "ditto", "--model", model, *SOCIAL, "--out", out) == 2
    assert "'social_r1'" in three_lines(capfd.readouterr().err)["error"]


def test_lessons_in_feedback_that_is_none(tmp_path: Path, capfd: Any) -> None:
    def imitation(*options: Any) -> int:
        return soul("train", "sft", "--model", "tiny", "--full", "--steps", 1, "--batch", 2,
                    "--out", tmp_path / "run", *options)  # fmt: skip

    assert imitation(*SOCIAL[:4], "--feedback", 0.5) == 2
    assert "social_r1" in three_lines(capfd.readouterr().err)["error"]
    assert imitation(*shade_options(tmp_path, "mute"), "--feedback", 0.5) == 2
    assert not (tmp_path / "run").exists()
    assert imitation(*shade_options(tmp_path, "mute", "kind"), "--feedback", 0.5) == 0


def test_nobody_is_asked_before_the_start(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 3)
    settings = {"tasks": {"worked": 1.0}, "tasks_file": str(TASKS), "data": {"worked": str(rows)}}
    with pytest.raises(NoFeedback):
        load_training_data(config(**settings, coach=NOWHERE))
    load_training_data(config(**settings, coach=NOWHERE, worked_examples=True))


@pytest.mark.parametrize(
    ("method", "settings", "word"),
    [
        ("sdpo-logits", ["divergence_top_k=1"], "divergence_top_k is 1"),
        ("sdpo-logits+grpo", ["divergence_top_k=1"], "divergence_top_k is 1"),
        ("erl", ["accept_from=1.5"], "above the highest reward of tomi (1)"),
    ],
)
def test_a_part_that_is_always_zero(
    tmp_path: Path, model: Path, capfd: Any, method: str, settings: list[str], word: str
) -> None:
    options = [
        "--task",
        "tomi",
        "--data",
        "tomi=synth:12",
        *(x for s in settings for x in ("--set", s)),
    ]
    lines = refusal(capfd, method, model, tmp_path / "run", *options)
    assert word in lines["error"]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("sdpo-logits", ["divergence_top_k=1", "divergence_tail=bucket"]),
        ("sdpo-token", ["divergence_top_k=1"]),
        ("erl", ["accept_from=1.0"]),
    ],
)
def test_a_part_that_may_be_more(model: Path, method: str, settings: list[str]) -> None:
    options = [
        "--task",
        "tomi",
        "--data",
        "tomi=synth:12",
        *(x for s in settings for x in ("--set", s)),
    ]
    assert soul("plan", "train", method, "--model", model, *SMALL, *options) == 0


def test_a_gold_that_is_a_script_is_not_imitated(capfd: pytest.CaptureFixture[str]) -> None:
    rows = ("--task", "sotopia", "--data", "sotopia=synth:4", "--model", "tiny", "--full")
    for command in (("train", "sft", *rows), ("plan", "train", "sft", *rows)):
        assert soul(*command) == 2
        error, why, fix = capfd.readouterr().err.strip().splitlines()[-3:]
        assert error == "error: The gold of sotopia is a script for self-checks, not an answer."
        assert "recite" in why and "grpo" in fix


def task_of(kind: str) -> Task:
    task = load_registry().task("tomi")
    feedback = task.spec.feedback.model_copy(update={"kind": kind})
    task.spec = task.spec.model_copy(update={"feedback": feedback})
    return task


@pytest.mark.parametrize(
    ("kind", "worked", "expected"),
    [("coach", False, True), ("worked_example", False, False), ("worked_example", True, True)],
)
def test_lessons(kind: str, worked: bool, expected: bool) -> None:
    task, rng = task_of(kind), random.Random(0)
    example = task.example(synth("tomi", 1, 0)[0])
    settings = config(method="sft", sft_feedback=1.0, worked_examples=worked)
    lesson = feedback_for(task, example, settings, rng)
    assert (lesson is not None) == expected
    assert lesson is None or lesson.kind == kind


def test_what_leaks_is_handed_on_only_as_a_worked_example() -> None:
    leak = Feedback(text="It is in the box.", author="x", leak="gold_text")
    drafts = [
        Record(key=name, task="t", example_id=name, rollout=0, kind="draft",
               episode=Episode(example_id=name, task="t"), score=Score(value=0, reward=0),
               received=leak)
        for name in "ab"
    ]  # fmt: skip
    assert swap_feedback(drafts, "k") == [None, None]
    shown = replace(leak, kind="worked_example")
    assert swap_feedback([replace(d, received=shown) for d in drafts], "k") == [shown, shown]
