"""Which experts are found, and everything that keeps some from becoming one model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.distill.config import DistillConfig, open_distillation, stages_after
from soulkit.distill.experts import common_base, find_experts
from soulkit.errors import ConfigError, ModelLoadError, RunError, UserError
from soulkit.models.local.loading import adapter_hash
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import write_json
from tests.support.distilling import change_note, distillation, save_expert, small_base
from tests.support.reporting import Heard

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/ and experts/a, experts/deep/er/b: one of tomi, one of secret_keeper."""
    root = tmp_path_factory.mktemp("experts")
    base = small_base(root / "base")
    save_expert(root / "experts" / "a", base, "tomi")
    save_expert(root / "experts" / "deep" / "er" / "b", base, "secret_keeper", seed=1)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy that may be changed; its base stays where it was."""
    shutil.copytree(made / "experts", tmp_path / "experts")
    return tmp_path


def refusal(config: DistillConfig) -> UserError:
    with pytest.raises((ConfigError, ModelLoadError)) as caught:
        find_experts(config)
    return caught.value


def test_experts_are_found_by_what_lies_beside_their_weights(made: Path, root: Path) -> None:
    (root / "experts" / "a").rename(root / "experts" / "secret_keeper")  # a name proves nothing
    (root / "experts" / "notes").mkdir()
    (root / "experts" / "link").symlink_to(root / "experts" / "deep")  # found once
    keeper, reader = find_experts(distillation(root / "experts"))
    assert (keeper.task, reader.task) == ("secret_keeper", "tomi")
    assert reader.adapter == (root / "experts" / "secret_keeper").resolve()
    assert reader.base == reader.model == str((made / "base").resolve())
    assert reader.weights == adapter_hash(reader.adapter) != keeper.weights
    assert keeper.base_print == reader.base_print and keeper.tokenizer_print
    assert keeper.note["tasks"] == {"secret_keeper": 1.0} and not keeper.remarks
    assert common_base([keeper, reader], distillation(root)) == reader.base


def test_a_run_stands_for_its_best_weights_else_its_last(root: Path) -> None:
    run = Run.open(root / "run", "train ditto", {"model": "m"}).path
    refused = refusal(distillation({"tomi": str(run)}))
    assert "is unfinished" in refused.what
    shutil.copytree(root / "experts" / "a", run / "model")
    assert find_experts(distillation(run))[0].folder == run / "model"
    shutil.copytree(root / "experts" / "a", run / "best")
    best = find_experts(distillation(run))[0]
    assert best.folder == run / "best" and "checkpoint with the best dev score" in best.remarks[0]
    Run.open(root / "runs" / "eval", "eval local", {"model": "m"})
    assert "no expert" in refusal(distillation(root / "runs")).what


def test_two_experts_for_one_task_until_one_is_named(root: Path) -> None:
    shutil.copytree(root / "experts" / "a", root / "experts" / "z")
    first, second = root / "experts" / "a", root / "experts" / "z"
    refused = refusal(distillation(root / "experts"))
    assert "two experts for 'tomi'" in refused.what
    assert str(first) in refused.what and str(second) in refused.what
    named = {"*": str(root / "experts"), "tomi": str(second)}
    expert = find_experts(distillation(named))[1]
    assert expert.folder == second and "is ignored" in expert.remarks[0]


def test_weights_that_say_nothing_of_themselves(made: Path, root: Path) -> None:
    foreign = root / "experts" / "a"
    (foreign / "soulkit.json").unlink()
    refused = refusal(distillation(root / "experts"))
    assert "The task of the expert" in refused.what and "--experts TASK=" in refused.way_out
    expert = find_experts(distillation({"tomi": str(foreign)}))[0]
    assert expert.note == {} and expert.base == str((made / "base").resolve())
    shutil.copytree(made / "base", root / "whole")
    assert "is not an expert" in refusal(distillation({"tomi": str(root / "whole")})).what
    assert "The task of the expert" not in refusal(distillation(root / "nowhere")).what


def test_a_mixture_is_an_expert_only_where_it_is_named(root: Path) -> None:
    change_note(root / "experts" / "a", tasks={"tomi": 1.0, "hitom": 0.5})
    refused = refusal(distillation(root / "experts"))
    assert "2 tasks: hitom, tomi" in refused.what
    experts = find_experts(
        distillation({"*": str(root / "experts"), "tomi": str(root / "experts" / "a")})
    )
    assert [one.task for one in experts] == ["secret_keeper", "tomi"]
    assert "was trained on hitom, tomi" in experts[1].remarks[0]


def test_tasks_that_nobody_may_or_can_teach(root: Path) -> None:
    folder = root / "experts" / "a"
    change_note(folder, tasks={"my_task": 1.0})
    refused = refusal(distillation(folder))
    assert "The task 'my_task' of the expert" in refused.what and "--tasks FILE" in refused.way_out
    change_note(folder, tasks={"tau_usi": 1.0})
    assert "evaluation-only" in refusal(distillation(folder)).what
    wrong = distillation(root / "experts" / "deep", data={"tomi": "synth:3"})
    assert "but there is no expert for it" in refusal(wrong).what


def test_another_protocol_is_told(root: Path) -> None:
    change_note(root / "experts" / "a", protocol="reference")
    expert = find_experts(distillation(root / "experts" / "a"))[0]
    assert "with protocol reference" in expert.remarks[0]


# -- bases, tokenizers, weights --------------------------------------------------------------------


def test_bases_are_compared_by_weights_and_not_by_place(made: Path, root: Path) -> None:
    shutil.copytree(made / "base", root / "moved")
    other = small_base(root / "other", seed=5)
    folder = root / "experts" / "a"
    moved = str((root / "moved").resolve())
    note = json.loads((folder / "soulkit.json").read_text())
    change_note(folder, base={**note["base"], "model": moved})
    assert len(find_experts(distillation(root / "experts"))) == 2
    assert find_experts(distillation(root / "experts", model=moved))[0].base == moved
    shutil.rmtree(root / "moved")
    assert len(find_experts(distillation(root / "experts"))) == 2  # another knows where it is
    refused = refusal(distillation(folder))
    assert "does not exist" in refused.what and "--model FOLDER" in refused.way_out
    refused = refusal(distillation(root / "experts", model=str(other)))
    assert "was not trained on the base that --model names" in refused.what


def test_experts_of_different_bases(root: Path) -> None:
    other = small_base(root / "other", seed=5)
    save_expert(root / "experts" / "c", other, "hitom")
    refused = refusal(distillation(root / "experts"))
    assert "The secret_keeper expert" in refused.what or "tomi expert" in refused.what
    assert "was not trained on the base that the hitom expert names" in refused.what
    alone = distillation(root / "experts" / "c")
    assert find_experts(alone)[0].base_print
    small_base(root / "other", seed=6)
    assert "have changed since" in refusal(alone).what


def test_another_tokenizer_or_template(root: Path) -> None:
    folder = root / "experts" / "a"
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    assert "a different chat template than its base" in refusal(distillation(folder)).what
    shutil.rmtree(folder)
    shutil.copytree(root / "experts" / "deep" / "er" / "b", folder)
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"]["another"] = len(words["model"]["vocab"]) + 50
    (folder / "tokenizer.json").write_text(json.dumps(words))
    assert "a different vocabulary than its base" in refusal(distillation(folder)).what


def test_weights_that_are_not_finite(root: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    file = root / "experts" / "a" / "adapter_model.safetensors"
    weights = load_file(file)
    next(iter(weights.values()))[0, 0] = torch.nan
    save_file(weights, file)
    refused = refusal(distillation(root / "experts"))
    assert "NaN" in refused.what and "experts/a" in refused.what
    file.write_bytes(b"torn")
    assert "cannot be used" in refusal(distillation(root / "experts")).what


def test_experts_that_are_served(root: Path) -> None:
    served = {"tomi": "endpoint:big@http://127.0.0.1:1/v1"}
    both = find_experts(distillation({"*": str(root / "experts" / "deep"), **served}))
    assert [one.task for one in both] == ["secret_keeper", "tomi"]
    assert both[1].model == "big" and not both[1].tokenizer_print
    assert common_base(both, distillation(served)) == both[0].base
    alone = find_experts(distillation(served))
    with pytest.raises(ConfigError, match="base of the generalist is unknown"):
        common_base(alone, distillation(served))
    assert "The task of the expert" in refusal(distillation(served["tomi"])).what  # type: ignore[arg-type]


# -- settings --------------------------------------------------------------------------------------


def test_experts_in_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "distill.yaml"
    file.write_text(yaml.safe_dump({"experts": {"tomi": "a", "hitom": "b"}, "samples": 2}))
    assert DistillConfig.load(file, {}).experts == {"tomi": "a", "hitom": "b"}
    file.write_text("experts: some/folder\n")
    assert DistillConfig.load(file, {}).experts == {"*": "some/folder"}
    refused: tuple[dict[str, Any], ...] = (
        {"adapter": "x"}, {"suite": "soul-10"}, {"experts": {}},
    )  # fmt: skip
    for wrong in refused:
        with pytest.raises(ConfigError):
            DistillConfig.load(file, {}, wrong)


def test_a_changed_setting_is_named_with_the_stages_that_it_reaches(tmp_path: Path) -> None:
    config = distillation(tmp_path)
    assert not open_distillation(tmp_path / "out", config).resumed
    faster = config.model_copy(update={"batch_size": 2, "gate": ("x>=0",)})
    assert open_distillation(tmp_path / "out", faster).resumed
    asked: list[str] = []
    config = config.model_copy(update={"min_reward": 0.5})
    open_distillation(tmp_path / "out", config, Heard(asked))
    assert asked == ["changed settings that no finished stage has used: min_reward"]
    assert open_distillation(tmp_path / "out", config).resumed
    for name in ("samples/tomi", "generalist", "measured"):
        (tmp_path / "out" / name).mkdir(parents=True)
    write_json(tmp_path / "out" / "selection.json", {})
    for key, value, stages in (
        ("samples", 9, "sample, select, train, report"),
        ("keep_top", 3, "select, train, report"),
        ("epochs", 1.0, "train, report"),
        ("held_out_limit", 5, "report"),
    ):
        with pytest.raises(RunError, match=f"{key}: ") as caught:
            open_distillation(tmp_path / "out", config.model_copy(update={key: value}))
        assert f"The stages {stages} would have to be repeated. " in caught.value.why
    write_json(tmp_path / "elsewhere" / "a.json", {})
    with pytest.raises(RunError, match="cannot be used as a run folder"):
        open_distillation(tmp_path / "elsewhere", config)
    assert stages_after(set()) == ()
