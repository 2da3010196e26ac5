"""Which weights played: a name may stand for others later, and one model plays after the other."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path

import pytest

from soulkit.distill.config import DistillConfig
from soulkit.distill.experts import find_experts
from soulkit.distill.measure import LastLoaded, generalist_weights, measure, measurements
from soulkit.distill.run import unread_words
from soulkit.distill.sample import refuse_other_samples, sample
from soulkit.distill.standing import refuse_other_teachers
from soulkit.errors import RunError
from soulkit.models.local.loading import adapter_hash
from soulkit.runs.folder import write_json
from tests.support.distilling import distillation, save_expert, small_base

pytestmark = pytest.mark.torch
TASKS = ("hitom", "tomi")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts, and another one that takes the place of the second in the tests."""
    root = tmp_path_factory.mktemp("made")
    base = small_base(root / "base")
    for task in TASKS:
        save_expert(root / "experts" / task, base, task)
    save_expert(root / "other", base, "tomi", seed=1)
    return root


@pytest.fixture
def config(made: Path, tmp_path: Path) -> DistillConfig:
    for name in ("experts", "other"):
        shutil.copytree(made / name, tmp_path / name)
    return distillation(
        tmp_path / "experts", data={"*": "synth:2"}, held_out={"*": "synth:2"}, samples=1,
        max_tokens=2, batch_size=4, exclude_overlap=True,
    )  # fmt: skip


def replace_adapter(there: Path, tmp_path: Path) -> None:
    name = "adapter_model.safetensors"
    shutil.copy(tmp_path / "other" / name, there / name)


def test_a_model_is_loaded_once_for_its_runs_and_never_beside_another(
    config: DistillConfig, tmp_path: Path
) -> None:
    parts = measurements(config, find_experts(config), tmp_path / "out")
    last = LastLoaded()
    first = last.load(parts[0].config)
    again = last.load(parts[1].config)
    assert (parts[0].side, parts[1].side, parts[1].task) == ("base", "base", "tomi")
    assert again is not first and again.model is first.model
    weights = weakref.ref(first.model)
    del first, again
    expert = last.load(parts[2].config)
    assert parts[2].side == "expert" and expert.policy_version and weights() is None


@pytest.mark.slow
def test_what_was_measured_of_other_weights_is_refused(
    config: DistillConfig, tmp_path: Path
) -> None:
    config = config.model_copy(update={"held_out": {"tomi": "synth:1"}})
    out = tmp_path / "out"
    shutil.copytree(tmp_path / "experts" / "tomi", generalist_weights(out))
    experts = find_experts(config)
    measure(config, experts, out)
    measure(config, experts, out)  # finished: the same weights are what they are
    replace_adapter(generalist_weights(out), tmp_path)
    with pytest.raises(RunError, match="made with other weights than the generalist has now"):
        measure(config, experts, out)


def test_samples_of_an_expert_that_was_trained_on_are_refused(
    config: DistillConfig, tmp_path: Path
) -> None:
    """Also once something was selected from them: they would pass for those of the new weights."""
    out = tmp_path / "out"
    sample(config, find_experts(config), out)
    (out / "selection.json").write_text("{}")
    sample(config, find_experts(config), out)
    replace_adapter(tmp_path / "experts" / "tomi", tmp_path)
    with pytest.raises(RunError, match="made with other weights") as caught:
        refuse_other_samples(out, find_experts(config))
    assert "experts/tomi" in caught.value.what
    with pytest.raises(RunError, match="made with other weights"):
        sample(config, find_experts(config), out)


def test_a_generalist_of_other_teachers_is_refused(config: DistillConfig, tmp_path: Path) -> None:
    adapters = {task: str(tmp_path / "experts" / task) for task in TASKS}
    prints = {
        task: {"model": "base", "adapter_weights": adapter_hash(adapter)}
        for task, adapter in adapters.items()
    }
    write_json(tmp_path / "provenance.json", {"players": {}, "tasks": {}, "teachers": prints})
    refuse_other_teachers(tmp_path, adapters)
    replace_adapter(tmp_path / "experts" / "tomi", tmp_path)
    with pytest.raises(RunError, match="than the expert of tomi has now"):
        refuse_other_teachers(tmp_path, adapters)


def test_settings_that_the_road_does_not_read_are_named() -> None:
    assert unread_words(distillation(Path("x"), by="opd", epochs=2, quota=3)) == (
        "--by opd does not read: epochs, quota"
    )
    assert unread_words(distillation(Path("x"), by="opd")) == ""
