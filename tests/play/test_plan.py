"""Plans: what is counted, what is assumed, and what stays unknown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.judge.structured import QUESTION_ATTEMPTS
from soulkit.models.local.footprint import (
    Machine,
    Speed,
    context_of,
    device_speed,
    footprint,
)
from soulkit.play.plan import (
    AGAIN,
    SECONDS_PER_CALL,
    SECONDS_PER_TOKEN,
    USUAL,
    Load,
    Plan,
    PlayerTerms,
    Work,
    opening_words,
    plan_loads,
    question_load,
)
from soulkit.tasks.kit.loading import stand_ins
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.planning import training_plan
from soulkit.train.rollouts.canaries import canaries_of
from soulkit.train.setup.data import load_training_data
from tests.support.evaluation import examples, soul
from tests.support.training import random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


ACTOR = PlayerTerms(role="actor", name="a", limit=20, prices=(1.0, 2.0))


def works() -> list[Work]:
    tasks = load_registry()
    return [Work(tasks.task(n), examples(n, 4)) for n in ("tomi", "secret_keeper")]


def plan_of(
    work: Sequence[Work], players: Mapping[str, Sequence[PlayerTerms]], times: float = 1,
    **others: Any,
) -> Plan:  # fmt: skip
    load = Load(work, lambda one: players[one.task.name], times=times, **others)
    return plan_loads([load], concurrency=4)


def words(work: Work) -> list[int]:
    return [sum(len(s.text.split()) for s in work.task.preview(e)) for e in work.examples]


def test_calls_words_and_cost() -> None:
    work = works()
    partner = PlayerTerms(role="partner", name="p", limit=30)
    costs = plan_of(work, {"tomi": [ACTOR], "secret_keeper": [ACTOR, partner]}, 3)
    choice, talk = costs.tasks
    assert choice.calls == {"actor": 12} and talk.calls == {"actor": 72, "partner": 72}
    assert (costs.episodes, costs.calls) == (24, 12 + 144)
    assert choice.prompt_words == 3 * sum(words(work[0]))
    assert choice.longest_prompt == max(words(work[0]))
    (actor_load,) = choice.asked
    assert actor_load.cost_limit == pytest.approx(
        (choice.prompt_words * 4 / 3 + 2 * 12 * 20) / 1e6, 1e-3
    )
    assert actor_load.cost == actor_load.cost_limit  # 20 tokens are shorter than a usual reply
    grown = 3 * 6 * sum(w * 4 / 3 + 5 / 2 * (20 + 30) for w in words(work[1]))
    assert talk.asked[0].prompt_tokens == pytest.approx(grown, abs=1)
    assert costs.unpriced == ("p",)
    assert costs.seconds == pytest.approx(sum(a.seconds for a in costs.asked) / 4)
    assert plan_of(work[:1], {"tomi": [PlayerTerms(role="actor", name="x", limit=9)]}).cost is None


def test_roles_that_a_task_does_not_call_cost_nothing() -> None:
    judge = PlayerTerms(role="judge", name="j", limit=4000, prices=(1.0, 1.0), times=3)
    costs = plan_of(works()[:1], {"tomi": [ACTOR, judge]})
    assert [one.role for one in costs.tasks[0].asked] == ["actor"]
    coach = PlayerTerms(role="coach", name="c", limit=4000, each=1)
    coaching = plan_of(works()[:1], {"tomi": [ACTOR, coach]}).tasks[0].asked[1]
    assert (coaching.calls, coaching.reply_tokens) == (4, 4 * USUAL["coach"])


def test_other_opinions_than_the_questions_own() -> None:
    """A task counts its calls with its own samples: another number takes their place."""
    task = load_registry().task("sotopia")
    task.spec = task.spec.model_copy(update={"samples": {"score": 3, "audit": 3}})
    task.calls = lambda example: {"actor": 10, "judge": 3, "auditor": 3}
    work = Work(task, examples("sotopia", 4))

    def counted(times: int | None) -> float:
        judge = PlayerTerms(role="judge", name="j", limit=4000, times=times)
        load = plan_of([work], {"sotopia": [ACTOR, judge]}).tasks[0].asked[1]
        return load.calls / QUESTION_ATTEMPTS

    assert [counted(times) for times in (None, 1, 2, 3)] == [12, 4, 8, 12]


@pytest.mark.parametrize("times", [10, 1.25, 0.5])
def test_rows_that_are_played_more_or_less_than_once(times: float) -> None:
    partner = PlayerTerms(role="partner", name="p", limit=30, prices=(1.0, 1.0))
    players = {"secret_keeper": [ACTOR, partner]}
    once, more = plan_of(works()[1:], players), plan_of(works()[1:], players, times, label="drafts")
    assert more.tasks[0].task == "secret_keeper drafts"
    assert (more.episodes, more.calls) == (4 * times, 48 * times)
    for name in ("cost", "cost_limit", "prompt_words"):
        assert getattr(more, name) == pytest.approx(times * getattr(once, name), rel=1e-3)
    assert more.tasks[0].longest_prompt == once.tasks[0].longest_prompt
    assert more.tasks[0].chain == pytest.approx(once.tasks[0].chain)


# --- footprints -----------------------------------------------------------------------------------


def test_a_footprint_counts_what_the_files_hold(model: Path) -> None:
    import torch
    from safetensors.torch import load_file

    sizes = footprint(model)
    config = json.loads((model / "config.json").read_text())
    tensors = [t for f in model.glob("*.safetensors") for t in load_file(f).values()]
    assert sizes is not None
    assert sizes.parameters == sum(t.numel() for t in tensors)
    assert sizes.itemsize == max(torch.finfo(t.dtype).bits // 8 for t in tensors)
    assert sizes.vocabulary == config["vocab_size"]
    assert sizes.cache_bytes(2, 10, 4) == 2 * 10 * sizes.layers * 2 * sizes.kv_heads * (
        sizes.head_dim * 4
    )
    slow, fast = Speed(1e9, 1e9), Speed(1e12, 1e12)
    assert sizes.seconds(10, 10, 10, 1, slow) > 500 * sizes.seconds(10, 10, 10, 1, fast)


def test_adapters_are_counted_like_peft_counts_them(model: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    sizes = footprint(model)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    wrapped = get_peft_model(loaded, LoraConfig(r=8, target_modules="all-linear"))
    trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert sizes is not None
    assert sizes.lora_parameters(8) == trained


@pytest.mark.parametrize(
    ("settings", "width"),
    [({"intermediate_size": [96, 128]}, 128), ({"num_experts_per_tok": [2, 2]}, 2 * 64),
     ({"num_key_value_heads": [2, 2]}, 64), ({"head_dim": "16"}, 64),
     ({"text_config": [1]}, 64), ({"num_hidden_layers": "two"}, None)],
)  # fmt: skip
def test_unusual_settings_of_a_checkpoint_do_not_stop_a_plan(
    settings: dict[str, object], width: int | None, model: Path, tmp_path: Path
) -> None:
    """Gemma 3n lists the widths of its layers, other families the numbers of heads or experts."""
    shutil.copy(model / "model.safetensors", tmp_path)
    config = json.loads((model / "config.json").read_text("utf-8"))
    usual = {**config, "intermediate_size": 64, "moe_intermediate_size": None}
    (tmp_path / "config.json").write_text(json.dumps({**usual, **settings}), "utf-8")
    sizes = footprint(tmp_path)
    assert (sizes.intermediate if sizes else None) == width


@pytest.mark.parametrize("text", ["[]", "null", '"model"'])
def test_a_configuration_that_is_no_object_has_no_sizes(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, "utf-8")
    assert footprint(tmp_path) is None
    assert context_of(tmp_path) is None


def test_no_footprint_of_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert footprint(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert footprint(tmp_path) is None
    assert device_speed("cuda:1")[0] == "cuda" and device_speed("cpu")[0] == "cpu"


# --- the command ----------------------------------------------------------------------------------


def test_soul_plan_of_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("eval", "api", "--model", "gpt-5-nano", "--task", "secret_keeper",
             "--data", "synth:5", "--partner", "endpoint:no-such-model")  # fmt: skip
    assert soul("plan", *arguments) == 0
    text = capsys.readouterr().out
    assert "no known price for endpoint:no-such-model; set it with --prices FILE" in text
    at_home = ("--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--task", "tomi")
    assert soul("plan", "eval", "api", *at_home, "--data", "synth:5") == 0
    said = "no known price for m; set it with --price-in and --price-out, or --prices FILE"
    assert said in capsys.readouterr().out
    assert soul("plan", *arguments, "--json") == 0
    page = json.loads(capsys.readouterr().out)
    assert page["unpriced"] == ["endpoint:no-such-model"]
    assert page["tasks"][0]["calls"] == {"actor": 30, "partner": 30}
    assert 0 < page["cost"] <= page["cost_limit"]


def test_soul_plan_of_a_training(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ("--model", model, "--task", "tomi", "--data", "tomi=synth:20")
    size = ("--steps", 3, "--prompts", 4, "--group-size", 2)
    coach = ("--coach", "endpoint:gpt-5-nano")
    assert soul("plan", "train", "ditto", *rows, *size, *coach, "--json") == 0
    page = json.loads(capsys.readouterr().out)
    drafts, refined = page["tasks"]
    assert drafts["calls"] == {"actor": 24, "coach": 24} and refined["calls"] == {"actor": 24}
    assert page["machine"]["memory"] > 0 and page["seconds"] > 0
    assert soul("plan", "train", "grpo", *rows, *size) == 0
    assert "coach" not in capsys.readouterr().out


def test_the_plan_has_the_references_coach_and_no_refined_rollouts_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = ("fantom", "hitom", "paratomi", "lifechoices", "twinvoice", "mistakes")
    untold = ("alignx_demo", "behaviorchain", "socsci210", "humanllm")
    tasks = (*told, *untold)
    rows = [x for task in tasks for x in ("--data", f"{task}=synth:6")]
    size = ("--steps", 1, "--prompts", 60, "--group-size", 2)
    command = ("train", "ditto", "--model", "tiny", "--task", ",".join(tasks), *rows, *size)
    assert soul("plan", *command, "--protocol", "reference", "--json") == 0
    parts = {part["task"]: part for part in json.loads(capsys.readouterr().out)["tasks"]}
    for task in told:
        drafts = parts[f"{task} drafts"]
        assert drafts["calls"]["coach"] == drafts["episodes"] > 0
        assert [one["name"] for one in drafts["asked"][1:]] == ["endpoint:gpt-5.4-nano"]
        assert parts[f"{task} refined"]["episodes"] == drafts["episodes"]
    for task in untold:
        assert set(parts[f"{task} drafts"]["calls"]) == {"actor"}
        assert f"{task} refined" not in parts
    assert soul("plan", *command, "--json") == 0
    captured = capsys.readouterr()
    parts = {part["task"]: part for part in json.loads(captured.out)["tasks"]}
    assert all("coach" in parts[f"{task} drafts"]["calls"] for task in untold)
    assert all(f"{task} refined" in parts for task in tasks)
    (remark,) = json.loads(captured.out)["coaches"]
    assert remark.startswith("fantom, hitom, paratomi: feedback is written by rules instead")
    words = ("ablate", *command[2:], "--methods", "grpo,ditto", "--seeds", 1)
    for plan in (command, ("train", *words)):
        assert soul("plan", *plan) == 0
        assert remark in capsys.readouterr().out


def test_the_actor_in_another_role_is_paid_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("eval", "api", "--model", "m", "--task", "secret_keeper", "--data", "synth:2",
             "--price-in", 1, "--price-out", 2)  # fmt: skip
    assert soul("plan", *arguments, "--partner", "actor", "--json") == 0
    actor, partner = json.loads(capsys.readouterr().out)["tasks"][0]["asked"]
    assert partner["name"] == "actor" and actor["cost"] > 0
    # Its own brief is a little longer than the keeper's, the lines are the same.
    assert partner["cost"] == pytest.approx(actor["cost"], rel=0.1)
    assert partner["seconds"] == actor["seconds"] > 0


def test_a_checkpoint_beside_the_actor_takes_memory_and_time(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = {}
    for kind, model_flags in (("local", ("--model", model)), ("api", ("--model", "m"))):
        for partner in (f"local:{model}", "actor"):
            assert soul("plan", "eval", kind, *model_flags, "--task", "secret_keeper", "--data",
                        "synth:2", "--partner", partner, "--json") == 0  # fmt: skip
            machines[kind, partner] = json.loads(capsys.readouterr().out)["machine"]
    alone, both = machines["local", "actor"], machines["local", f"local:{model}"]
    assert both["memory"] == 2 * alone["memory"]
    assert both["seconds"] == pytest.approx(alone["seconds"])
    assert machines["api", "actor"] is None
    assert machines["api", f"local:{model}"]["memory"] == alone["memory"]


def test_judges_count_with_their_re_asks_and_samples() -> None:
    registry = load_registry()
    work = Work(registry.task("sotopia"), examples("sotopia", 3))
    judge = PlayerTerms(role="judge", name="j", limit=100, prices=(1.0, 1.0), times=3)
    (one,) = plan_of([work], {"sotopia": [judge]}, 2).tasks[0].asked
    assert one.calls == 3 * 2 * 3 * 2  # rows, repeats, samples, tries
    assert one.reply_tokens == one.calls // 2 * 100
    assert one.usual_calls == one.calls // 2
    first = one.prompt_tokens + one.reply_tokens
    assert one.cost == pytest.approx(first / 1e6)
    assert one.cost_limit == pytest.approx((2 * first + one.calls // 2 * AGAIN) / 1e6)


def test_roles_that_share_turns_are_not_counted_twice() -> None:
    work = Work(load_registry().task("coser"), examples("coser", 2))
    actor, judge = (PlayerTerms(role=role, name=role, limit=100) for role in ("actor", "judge"))
    environment = replace(actor, role="environment")
    players = [actor, environment, judge]
    whole = plan_of([work], {"coser": players}, 3)
    (part,) = whole.tasks
    assert part.calls == {"actor": 6 * 20, "environment": 6 * 29, "judge": 6 * 4 * 2}
    assert whole.calls == 6 * (39 + 4 * 2) == whole.as_dict()["calls"]
    assert plan_of([work], {"coser": players}, 1.5).calls == whole.calls / 2
    assert plan_of([work], {"coser": [actor]}, 3).calls == 6 * 20


@pytest.mark.parametrize(("times", "both", "drawn"), [(None, 13, 10), (1, 6, 5), (2, 12, 10)])
def test_a_pair_that_is_asked_about_in_one_order_costs_half(
    times: int | None, both: int, drawn: int
) -> None:
    task = load_registry().task("mirrorbench")
    rows = examples("mirrorbench", 2)
    judge = PlayerTerms(role="judge", name="j", limit=100, times=times)
    for terms, calls in ((judge, both), (replace(judge, orders="seeded"), drawn)):
        (one,) = plan_of([Work(task, rows)], {"mirrorbench": [terms]}).tasks[0].asked
        assert one.usual_calls == 2 * calls and one.calls == 2 * one.usual_calls
        asks = [(control, rows[0]) for control in task.controls]
        load = Load([Work(task, ())], lambda _, terms=terms: [terms], controls=asks)
        (beside,) = plan_loads([load]).asked
        if times is None:
            assert beside.usual_calls == (13 + 7 if terms is judge else 10 + 4)


def test_a_comparison_is_planned_without_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOULKIT_DATA", raising=False)
    words = ("plan", "train", "ablate", "--methods", "ditto,grpo", "--task", "hitom",
             "--model", "nobody/nothing", "--steps", 3, "--prompts", 4, "--json")  # fmt: skip
    assert soul(*words) == 0
    printed = capfd.readouterr()
    assert printed.err.count("counted with the published sizes: the rows of hitom") == 1
    assert "feedback is written by rules" not in printed.err  # "coaches" has it
    assert len(json.loads(printed.out)["coaches"]) == 1
    tasks = {part["task"]: part["examples"] for part in json.loads(printed.out)["tasks"]}
    assert tasks["hitom drafts ditto"] == tasks["hitom drafts grpo"] == 1024


def test_a_plan_is_a_table_in_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = Path("examples/one_80gb.yaml").resolve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("soulkit.cli.console.out.width", 80)
    assert soul("plan", "train", "ditto", "--config", recipe, "--device", "cuda") == 0
    table, *_ = capfd.readouterr().out.partition(" episodes, about ")
    assert " · " not in table and max(map(len, table.splitlines())) <= 80
    assert " sotopia drafts partner gpt-5-nano 51,200 79.6M 6.1M $6.44 " in " ".join(table.split())


def test_dev_scores_and_canaries_are_planned(model: Path) -> None:
    flags = {"method": "grpo", "model": str(model), "tasks": {"sotopia": 1.0}, "partner": "actor",
             "data": {"sotopia": "synth:40"}, "judge": ["endpoint:j"], "steps": 5,
             "prompts_per_step": 2, "group_size": 2}  # fmt: skip
    bare = training_plan(load_training_data(TrainConfig.load(env={}, flags=flags)))
    assert [task.task for task in bare.tasks] == ["sotopia drafts"]
    config = TrainConfig.load(env={}, flags={**flags, "eval_every": 2, "canary_every": 2})
    material = load_training_data(config)
    drafts, dev, canaries = training_plan(material).tasks
    assert (drafts.task, dev.task, canaries.task) == (
        "sotopia drafts", "sotopia dev", "sotopia canaries"
    )  # fmt: skip
    assert dev.episodes == 2 * len(material.dev) and dev.calls["actor"] == 10 * dev.episodes
    assert canaries.episodes == 3 * len(canaries_of(material.pool))
    assert canaries.calls == {"judge": 2 * canaries.episodes, "auditor": 2 * canaries.episodes}
    second = TrainConfig.load(env={}, flags={**flags, "eval_every": 2, "dev_judge": "endpoint:k"})
    plan = training_plan(load_training_data(second))
    assert [one.name for one in plan.tasks[1].asked if one.role == "judge"] == [
        "endpoint:j", "endpoint:k"
    ]  # fmt: skip
    assert plan.tasks[1].calls["judge"] == 2 * dev.calls["judge"] and len(plan.tasks) == 2
    assert [one.role for one in plan.tasks[0].asked] == [one.role for one in drafts.asked]


def test_dev_scores_and_general_ability_of_a_supervised_run_take_time_and_no_memory(
    model: Path,
) -> None:
    def machine(**other: object) -> Machine:
        flags = {"method": "sft", "model": str(model), "tasks": {"tomi": 1.0}, "steps": 4,
                 "data": {"tomi": "synth:20"}}  # fmt: skip
        config = TrainConfig.load(env={}, flags={**flags, **other})
        planned = training_plan(load_training_data(config)).machine
        assert planned is not None
        return planned

    bare, dev, both = machine(), machine(eval_every=1), machine(eval_every=1, retention=True)
    assert bare.seconds < dev.seconds < both.seconds
    assert bare.memory == dev.memory == both.memory


def test_each_reply_is_learned_from_once_without_refined_ones(model: Path) -> None:
    flags = {"method": "grpo", "model": str(model), "tasks": {"tomi": 1.0}, "steps": 4,
             "data": {"tomi": "synth:20"}, "group_size": 2}  # fmt: skip
    config = TrainConfig.load(env={}, flags=flags)
    planned, sizes = training_plan(load_training_data(config)), footprint(model)
    assert planned.machine is not None and sizes is not None
    (asked,) = planned.asked
    prompts, replies = asked.prompt_tokens / 2, asked.reply_tokens
    expected = sizes.on(
        config.device, planned.machine.memory, prompt=prompts, reply=replies,
        trained=prompts + replies, batch=config.batch_size,
    )  # fmt: skip
    assert planned.machine.seconds == expected.seconds


def test_questions_take_the_time_of_any_served_call() -> None:
    terms = PlayerTerms(role="judge", name="j", limit=100, prices=(1.0, 1.0))
    asked = question_load(terms, [30, 60])
    assert (asked.calls, asked.usual_calls, asked.prompt_tokens) == (2, 2, 120)
    assert asked.seconds == pytest.approx(2 * SECONDS_PER_CALL + 200 * SECONDS_PER_TOKEN)
    assert asked.cost == pytest.approx((120 + 200) / 1e6)
    assert asked.cost_limit == pytest.approx((2 * 120 + 2 * AGAIN + 2 * 200) / 1e6)
    assert question_load(replace(terms, served=False), [30]).seconds == 0


def test_one_row_is_as_long_as_the_mean_of_many(model: Path) -> None:
    def seconds(rows: int) -> float:
        flags = {"method": "sft", "model": str(model), "tasks": {"tomi": 1.0}, "steps": 5,
                 "data": {"tomi": f"synth:{rows}"}}  # fmt: skip
        machine = training_plan(load_training_data(TrainConfig.load(env={}, flags=flags))).machine
        assert machine is not None
        return machine.seconds

    assert 0.7 < seconds(1) / seconds(40) < 1.4


def test_what_the_actor_reads_in_another_role_takes_its_time(model: Path) -> None:
    def seconds(**other: object) -> float:
        flags = {"method": "grpo", "model": str(model), "tasks": {"sotopia": 1.0}, "steps": 5,
                 "data": {"sotopia": "synth:20"}, "judge": ["endpoint:j"], "max_tokens": 1,
                 "partner": "endpoint:p", "prompts_per_step": 2, "group_size": 1}  # fmt: skip
        machine = training_plan(
            load_training_data(TrainConfig.load(env={}, flags={**flags, **other}))
        ).machine
        assert machine is not None
        return machine.seconds

    # A partner reads as many prompts as the actor, with almost nothing written: one forward pass
    # more, beside one to sample and three to train.
    assert 1.15 < seconds(partner="actor") / seconds() < 1.35


def test_a_comparison_is_planned_and_nothing_runs(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ("--model", model, "--task", "tomi", "--data", "tomi=synth:20", "--steps", 3,
             "--prompts", 4, "--group-size", 2, "--methods", "ditto,grpo", "--seeds", 2,
             "--out", out)  # fmt: skip
    assert soul("plan", "train", "ablate", *arguments, "--json") == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert not out.exists()
    assert {task["task"]: task["calls"]["actor"] for task in tasks} == {
        "tomi drafts ditto": 48, "tomi refined ditto": 48, "tomi drafts grpo": 96
    }  # fmt: skip


def test_what_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert soul("plan", "report", "x") == 2
    assert "soul plan eval" in capsys.readouterr().err
    assert soul("plan", "train") == 2
    assert "soul plan train ditto" in capsys.readouterr().err


# --- judges by purpose ----------------------------------------------------------------------------


def priced(
    capsys: pytest.CaptureFixture[str], task: str, *command: str
) -> tuple[dict[str, set[str]], dict[str, float]]:
    """(role → who is asked, role → dollars about) of a plan of synthetic rows."""
    options = ("--task", task, "--data", "synth:4", "--json")
    assert soul("plan", *command, *options) == 0
    plan = json.loads(capsys.readouterr().out)
    names: dict[str, set[str]] = {}
    costs: dict[str, float] = {}
    for part in plan["tasks"]:
        for one in part["asked"]:
            names.setdefault(one["role"], set()).add(one["name"])
            if one["cost"] is not None:
                costs[one["role"]] = costs.get(one["role"], 0.0) + one["cost"]
    by_role = {role: one["cost"] for role, one in plan["cost_by_role"].items()}
    assert by_role == pytest.approx(costs) and sum(costs.values()) == pytest.approx(plan["cost"])
    assert list(by_role.values()) == sorted(by_role.values(), reverse=True)
    return names, by_role


EVAL = ("eval", "api", "--model", "gpt-5-mini")
TRAIN = ("train", "ditto", "--model", "tiny", "--steps", "2")


@pytest.mark.parametrize(
    ("command", "task", "role", "who"),
    [
        (EVAL, "mirrorbench", "judge", "gpt-5.4"),
        (TRAIN, "mirrorbench", "judge", "gpt-5-nano"),
        (TRAIN, "mirrorbench", "coach", "gpt-5-nano"),
        ((*TRAIN, "--protocol", "reference"), "mirrorbench", "judge", "gpt-5.4-nano"),
        ((*TRAIN, "--judge", "mirrorbench=endpoint:gpt-5.4"), "mirrorbench", "judge", "gpt-5.4"),
        (TRAIN, "coser", "judge", "gpt-5.4"),
        (EVAL, "sotopia", "auditor", "gpt-5-nano"),
        (TRAIN, "sotopia", "auditor", "gpt-5-nano"),
        ((*TRAIN, "--protocol", "reference"), "sotopia", "auditor", "gpt-5.4-mini"),
    ],
)
def test_a_plan_names_the_judge_of_its_purpose_and_costs_by_role(
    command: tuple[str, ...], task: str, role: str, who: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names, costs = priced(capsys, task, *command)
    assert names[role] == {f"endpoint:{who}"} and costs[role] > 0


def test_the_printed_plan_has_a_line_of_costs_by_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert soul("plan", *EVAL, "--task", "sotopia", "--data", "synth:4") == 0
    (line,) = [
        text for text in capsys.readouterr().out.splitlines() if text.startswith("cost by role: ")
    ]
    assert all(f"{role} about $" in line for role in ("actor", "partner", "judge", "auditor"))


# --- rows that are not here -----------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without rows and API keys."""
    for name in ("SOULKIT_DATA", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_training_plan_without_rows_uses_the_published_sizes(fresh: Path, capfd: Any) -> None:
    config = Path(__file__).parents[2] / "examples" / "one_80gb.yaml"
    command = ("train", "ditto", "--config", config, "--device", "cpu")
    assert soul("plan", *command, "--json") == 0
    printed = capfd.readouterr()
    page = json.loads(printed.out)
    parts = {part["task"].partition(" ")[0]: part for part in page["tasks"]}
    assert list(parts) == list(load_registry().suite("soul-10")) and page["cost"] > 0
    drafts = [part for part in page["tasks"] if part["task"].endswith(" drafts")]
    assert {part["episodes"] for part in drafts} == {5120}  # 100 × 64 × 8 in ten equal shares
    for part in drafts:
        size = load_registry().spec(part["task"].removesuffix(" drafts")).size
        assert size is not None and part["longest_prompt"] == size.longest
        assert part["prompt_words"] == 5120 * size.words
    line = next(line for line in printed.err.splitlines() if "published sizes" in line)
    assert "soul data pull --suite soul-10 --split train" in line
    assert "skips the tasks without rows or without a key in OPENAI_API_KEY" in printed.err
    assert soul(*command, "--out", fresh / "run") == 2
    assert "No task of the suite 'soul-10' can be played here" in capfd.readouterr().err


def test_an_evaluation_plan_without_rows_uses_the_published_sizes(fresh: Path, capfd: Any) -> None:
    command = ("eval", "api", "--model", "gpt-5-nano", "--suite", "soul-10")
    assert soul("plan", *command, "--limit", 30, "--json") == 0
    printed = capfd.readouterr()
    assert {part["examples"] for part in json.loads(printed.out)["tasks"]} == {30}
    assert "soul data pull --suite soul-10 --split eval" in printed.err
    assert soul(*command) == 2
    assert "no rows for" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("named", "error"),
    [(("--data", "gone.jsonl"), "gone.jsonl"), (("--where", "order=1"), "There are no rows")],
)
def test_named_or_filtered_rows_must_be_there(
    named: tuple[str, str], error: str, fresh: Path, capfd: Any
) -> None:
    assert soul("plan", "eval", "api", "--model", "m", "--task", "hitom", *named) == 2
    assert error in capfd.readouterr().err


def test_other_players_see_as_many_more_words_as_the_actor() -> None:
    """Prompts of judges grow with the published length of the rows, too."""
    task = load_registry().task("coser")
    size = task.spec.size
    assert size is not None
    (short,) = stand_ins(task, "test", 1)
    long_task = load_registry().task("coser")
    longer = size.model_copy(update={"words": size.words + 1000})
    long_task.spec = task.spec.model_copy(update={"size": longer})
    before, after = (opening_words(one, short, "judge") for one in (task, long_task))
    assert before is not None and after == pytest.approx(before + 1000)


def test_every_released_task_declares_a_size_that_it_can_show() -> None:
    registry = load_registry()
    for name, spec in registry.specs.items():
        for split, files in (("train", spec.files.train), ("test", spec.files.eval)):
            if files and not spec.rows_only:
                assert stand_ins(registry.task(name), split, 1), (name, split)
