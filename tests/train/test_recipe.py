"""A suite with equal shares, the paper's recipe, and what every task of a mixture comes to."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.errors import RunError, UserError
from soulkit.models.local.footprint import Machine
from soulkit.play.plan import Plan
from soulkit.runs.folder import Run, read_config
from soulkit.runs.jsonl import read_jsonl
from soulkit.train.ablate import parse_arms, plan_arms
from soulkit.train.config import TrainConfig
from soulkit.train.planning import training_plan
from soulkit.train.setup.data import load_training_data
from soulkit.train.setup.rows import TrainingData
from tests.support.evaluation import three_lines
from tests.support.training import soul

ROOT = Path(__file__).parents[2]
PAPER, EIGHT, LAPTOP, SMALL = (
    ROOT / "examples" / f"{name}.yaml" for name in ("one_80gb", "eight_80gb", "laptop", "one_24gb")
)
JUDGED = {"coser", "sotopia", "mirrorbench", "userllm"}
COACHED = {"lifechoices", "mistakes", "twinvoice"}
"""Choice tasks whose default coach is a model."""
TASKS = """
tasks:
  attic: {title: A room, summary: Nobody plays it, seats: {guest: actor},
          columns: {text: {type: text, audience: [guest]}}}
suites:
  mixed: [tomi, attic, secret_keeper]
  judged: [tomi, sotopia]
"""


@pytest.fixture(autouse=True)
def _without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def paper(**flags: Any) -> TrainConfig:
    return TrainConfig.load(PAPER, {}, {"method": "ditto", "data": {"*": "synth:6"}} | flags)


def shares(material: TrainingData) -> Counter[str]:
    return Counter(task.name for task, _ in material.pool)


# --- plans in the files ---------------------------------------------------------------------------


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("recipes", ROOT / "scripts" / "recipes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("recipe", [LAPTOP, SMALL, PAPER, EIGHT], ids=lambda path: path.stem)
def test_the_plan_in_a_recipe_is_what_soul_plan_prints(recipe: Path) -> None:
    script, text = generator(), recipe.read_text()
    plan = script.plan_of(recipe)
    assert script.with_plan(text, plan) == text, "stale: run .venv/bin/python scripts/recipes.py"
    for start in ("memory about ", "of this: weights ", "time about "):
        assert any(line.startswith(start) for line in plan)
    cards = [line for line in plan if line.startswith("on 24 GB: ")]
    assert cards == [] if recipe is LAPTOP else len(cards) == 1


def test_the_plans_say_what_fits_and_what_to_change() -> None:
    big, small = (path.read_text() for path in (PAPER, SMALL))
    assert "fits 80 GB" in big and re.search(r"on 24 GB: does not fit .*--quantize nf4", big)
    assert re.search(r"on 24 GB: fits", small)
    plan = generator().plan_of(PAPER, "--quantize", "nf4")
    assert any(line.startswith("on 24 GB: fits") for line in plan)


def test_the_recipe_of_eight_cards_has_the_settings_of_one_card() -> None:
    one, eight = (yaml.safe_load(path.read_text()) for path in (PAPER, EIGHT))
    assert eight == one | {"gpus": 8, "sampler_gpus": 4, "engine": "vllm"}


def test_a_plan_divides_the_time_by_the_processes_that_share_it() -> None:
    def machine(**changes: Any) -> Machine:
        found = training_plan(load_training_data(paper(**changes))).machine
        assert found is not None
        return found

    served = {"gpus": 8, "engine": "vllm"}
    one, many = machine(engine="local"), machine(gpus=8, shard=True, engine="local")
    assert many.seconds == pytest.approx(one.seconds / 8)
    half, few = machine(**served, sampler_gpus=4), machine(**served, sampler_gpus=2)
    assert half.seconds == pytest.approx(one.seconds / 4)
    assert one.seconds / 6 < few.seconds < one.seconds / 2
    assert "sampler cache" in many.parts and "sampler cache" not in half.parts
    assert "vLLM beside" not in half.fit
    words = " ".join(half.ranks)
    assert "4 training ranks and 4 vLLM servers" in words and words.count("349.2 MB") == 2
    assert "a pass gathers 16.3 GB" in many.ranks[-1] and one.ranks == ()
    # Processes on a CPU share its cores and its memory.
    alone, pair = machine(device="cpu"), machine(device="cpu", gpus=2)
    assert pair.seconds == pytest.approx(alone.seconds) and "equal share" in pair.fit


def test_the_recipe_of_a_small_card_trains_an_adapter_on_four_bits() -> None:
    config = TrainConfig.load(SMALL, {}, {"method": "ditto"})
    assert (config.quantize, config.engine_choice.kind, config.device) == ("nf4", "local", "cuda")
    assert set(config.tasks) == set(paper().tasks)


@pytest.mark.slow
def test_the_recipe_of_a_laptop_needs_no_key_and_runs(
    warm: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a tiny model and shorter steps, but all other settings of the file."""
    out, config = tmp_path / "run", TrainConfig.load(LAPTOP, {}, {"method": "ditto"})
    small = ("--model", warm / "model", "--steps", 2, "--max-tokens", 8,
             "--eval-every", 2, "--out", out)  # fmt: skip
    assert soul("train", "ditto", "--config", LAPTOP, *small) == 0
    assert "left out" not in capfd.readouterr().err
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["tasks"]) == set(config.tasks) and summary["steps"] == 2
    assert summary["cost"] in (None, 0) and not summary["calls"]
    assert (out / "best" / "adapter_config.json").is_file()
    assert soul("eval", "local", "--model", warm / "model", "--adapter", out / "best", "--task",
                "tomi", "--data", "synth:5", "--max-tokens", 8, "--max-unscored", 1,
                "--out", tmp_path / "eval") == 0  # fmt: skip


# --- suites, shares -------------------------------------------------------------------------------


def test_the_recipe_of_the_paper_is_what_the_paper_says() -> None:
    """algorithms §2, decisions §7: also where a default is the same, so that it stays."""
    config = paper()
    settings = yaml.safe_load(PAPER.read_text())
    assert len(config.tasks) == 10 and config.rows_per_task == 1024 and config.playable
    assert (config.lora.r, config.lora.alpha, config.lr) == (32, 64, 5e-6)
    assert (config.prompts_per_step, config.group_size, config.mini_batch_prompts) == (64, 8, 16)
    assert (config.eps_low, config.eps_high, config.kl_coef) == (0.2, 0.28, 0.0)
    assert {name: getattr(config, name) for name in settings if name != "lora"} == {
        name: value for name, value in settings.items() if name != "lora"
    }


def test_its_plan_names_what_cannot_be_played_here() -> None:
    material = load_training_data(paper())
    assert set(material.left_out) == JUDGED | COACHED
    assert all("no key in OPENAI_API_KEY" in why for why in material.left_out.values())
    assert {name for name, why in material.left_out.items() if "--coach symbolic" in why} == COACHED
    assert set(load_training_data(paper(coach="symbolic")).left_out) == JUDGED
    assert set(material.config.tasks) == set(paper().tasks) - JUDGED - COACHED
    whole: Plan = training_plan(material)
    assert {part.task.partition(" ")[0] for part in whole.tasks} == set(material.config.tasks)


def test_every_task_has_the_same_share_and_repeats_are_even() -> None:
    material = load_training_data(paper(rows_per_task=20, eval_every=None))
    assert set(shares(material).values()) == {20}
    by_task = {
        task.name: Counter(row.id for owner, row in material.pool if owner is task)
        for task, _ in material.pool
    }
    assert all(max(n.values()) - min(n.values()) <= 1 for n in by_task.values())
    said_aloud = "\n".join(material.remarks())
    assert "left out of soul-10: coser" in said_aloud
    assert "each task keeps its share: fantom (6 for 20)" in said_aloud


def test_rows_are_drawn_by_seed_and_a_ratio_is_one_of_the_share() -> None:
    flags = {"method": "grpo", "model": "m", "data": {"*": "synth:40"}, "rows_per_task": 10}
    tasks = {"tomi": 1.0, "hitom": 0.5}

    def drawn(seed: int) -> TrainingData:
        return load_training_data(
            TrainConfig.load(None, {}, {**flags, "tasks": tasks, "seed": seed})
        )

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert shares(first) == {"tomi": 10, "hitom": 5} and first.remarks() == []
    ids = [{row.id for _, row in one.pool} for one in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]


def test_tasks_and_a_suite_exclude_one_another(tmp_path: Path, capfd: Any) -> None:
    assert soul("train", "grpo", "--suite", "soul-10", "--task", "tomi", "--model", "m") == 2
    assert "choose either tasks" in three_lines(capfd.readouterr().err)[0]
    assert soul("train", "grpo", "--suite", "soul-11", "--model", "m") == 2
    assert "soul-10" in three_lines(capfd.readouterr().err)[2]
    assert soul("train", "grpo", "--playable", "--task", "tomi", "--model", "m") == 2
    assert "--suite" in three_lines(capfd.readouterr().err)[0]


def test_a_task_without_rows_or_class_is_left_out_only_if_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOULKIT_DATA", str(tmp_path / "none"))
    file = tmp_path / "tasks.yaml"
    file.write_text(TASKS)
    flags = {"method": "sft", "model": "tiny", "suite": "mixed", "tasks_file": str(file),
             "data": {"tomi": "synth:6"}}  # fmt: skip
    with pytest.raises(UserError, match="attic"):
        load_training_data(TrainConfig.load(None, {}, flags))
    material = load_training_data(TrainConfig.load(None, {}, {**flags, "playable": True}))
    assert set(material.tasks) == {"tomi"} == set(material.config.tasks)
    assert material.left_out["attic"] == "this version cannot play it"
    assert "no training data" in material.left_out["secret_keeper"]
    nowhere = {**flags, "playable": True, "data": {"secret_keeper": str(tmp_path / "gone.jsonl")}}
    with pytest.raises(UserError, match=r"gone\.jsonl"):
        load_training_data(TrainConfig.load(None, {}, nowhere))


@pytest.mark.parametrize(
    ("flags", "lr", "warm_up"),
    [
        ({}, 1e-4, 5), ({"full": True}, 1e-5, 5), ({"model": "tiny", "full": True}, 2e-3, 5),
        ({"steps": 4500}, 1e-4, 50), ({"lr": 5e-6, "warmup_steps": 0}, 5e-6, 0),
    ],
)  # fmt: skip
def test_imitation_has_defaults_of_its_own(flags: dict[str, Any], lr: float, warm_up: int) -> None:
    plain = {"method": "sft", "model": "m", "tasks": {"tomi": 1.0}}
    config = TrainConfig.load(None, {}, plain | flags)
    assert (config.lr, config.warmup_steps, config.lr_schedule) == (lr, warm_up, "cosine")
    again = TrainConfig.load(None, {}, config.resolved())  # as a run's folder says it
    assert again == config
    reinforced = TrainConfig.load(None, {}, {**plain, "method": "grpo"})
    assert (reinforced.lr, reinforced.lr_schedule, reinforced.warmup_steps) == (5e-6, "constant", 0)


def test_help_says_them(capfd: Any) -> None:
    assert soul("train", "sft", "--help-all") == 0
    assert "1e-4; 1e-5 with --full" in " ".join(capfd.readouterr().out.split())
    assert soul("train", "grpo", "--help-all") == 0
    assert "1e-4" not in capfd.readouterr().out


def test_a_comparison_passes_a_suite_on(tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text(TASKS)
    assert soul(
        "train", "ablate", "--methods", "grpo,ditto", "--seeds", 2, "--suite", "mixed",
        "--playable", "--tasks", file, "--data", "synth:6", "--rows-per-task", 9, "--model", "m",
        "--dry-run", "--out", tmp_path / "out",
    ) == 0  # fmt: skip
    table = capfd.readouterr()
    assert "tomi drafts" in table.out and "attic" not in table.out
    planned = plan_arms(
        parse_arms("grpo,ditto"), tmp_path / "out", None,
        lambda method: {"method": method, "model": "m", "suite": "mixed", "playable": True,
                        "tasks_file": str(file), "data": {"*": "synth:6"}, "rows_per_task": 9},
        seeds=2, match="prompts",
    )  # fmt: skip
    for run in planned:
        assert run.config.tasks == {"tomi": 1.0} and run.config.rows_per_task == 9
        assert any("left out of mixed: attic" in line for line in run.remarks)
        assert any("secret_keeper: no model plays the partner" in line for line in run.remarks)


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_small_run_of_the_recipe_says_what_it_left_out_and_resumes(
    warm: Path, tmp_path: Path, capfd: Any
) -> None:
    """Recorded in the settings, in the provenance and in the summary; every task has its line."""
    out = tmp_path / "run"
    settings = tmp_path / "recipe.yaml"
    text = yaml.safe_load(PAPER.read_text()) | {"eval_every": None, "model": str(warm / "model")}
    settings.write_text(yaml.safe_dump(text | {"max_prompt": 4000}))
    small = ("--data", "synth:5", "--rows-per-task", 4, "--prompts", 6, "--group-size", 2,
             "--max-tokens", 4, "--dtype", "float32", "--device", "cpu", "--out", out)  # fmt: skip
    assert soul("train", "ditto", "--config", settings, *small, "--steps", 2) == 0
    printed = capfd.readouterr()
    assert "left out of soul-10: sotopia: no key in OPENAI_API_KEY" in printed.err
    config, summary = read_config(out), json.loads((out / "summary.json").read_text())
    assert config["suite"] == "soul-10" and config["playable"] and config["rows_per_task"] == 4
    assert set(config["tasks"]) == set(summary["tasks"]) == set(paper().tasks) - JUDGED - COACHED
    assert set(summary["left_out"]) == JUDGED | COACHED and summary["suite"] == "soul-10"
    provenance = json.loads((out / "conditions.json").read_text())
    assert provenance["left_out"] == summary["left_out"]
    tasks = {name.removeprefix("reward/draft/") for line in read_jsonl(out / "metrics.jsonl")
             for name in line if name.startswith("reward/draft/")}  # fmt: skip
    assert tasks <= set(config["tasks"]) and len(tasks) > 2
    assert all(f"    {task}" in printed.out for task in tasks)
    assert soul("train", "ditto", "--config", out / "config.yaml", "--out", out) == 0
    assert "is already finished" in capfd.readouterr().err


def test_a_resume_that_could_play_more_names_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps to come would be drawn from other shares."""
    file = tmp_path / "tasks.yaml"
    file.write_text(TASKS)
    flags = {"method": "grpo", "model": "m", "suite": "judged", "playable": True,
             "tasks_file": str(file), "data": {"*": "synth:6"}}  # fmt: skip
    begun = load_training_data(TrainConfig.load(None, {}, flags)).config
    run = Run.open(tmp_path / "run", "train grpo", begun.identity())
    assert set(begun.tasks) == {"tomi"}
    same = load_training_data(TrainConfig.load(run.path / "config.yaml", {}, {}, trust=True)).config
    assert Run.open(run.path, "train grpo", same.identity()).resumed
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-that-came-later")
    more = load_training_data(TrainConfig.load(None, {}, flags)).config
    assert set(more.tasks) == {"tomi", "sotopia"}
    with pytest.raises(RunError, match="sotopia"):
        Run.open(run.path, "train grpo", more.identity())
