"""`--steps` raised on a run that is there, finished or not; everything else stays what it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from soulkit.errors import RunError
from soulkit.runs.folder import Run, change_settings, read_config, read_environment, seal_fits
from soulkit.train.ablate import is_finished, parse_arms, plan_arms, refuse_other_settings
from soulkit.train.state.metrics import read_step_lines
from tests.support.evaluation import soul, three_lines

USUAL = ("train", "sft", "--model", "tiny", "--full", "--task", "tomi", "--data", "synth:16",
         "--batch", 4, "--deterministic")  # fmt: skip
CONSTANT = ("--set", "lr_schedule=constant", "--set", "warmup_steps=0")


def losses(out: Path) -> list[float | None]:
    return [line.learned.loss for line in read_step_lines(out / "metrics.jsonl") if line.step >= 0]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that has ended."""
    out = tmp_path_factory.mktemp("three") / "run"
    assert soul(*USUAL, *CONSTANT, "--steps", 3, "--out", out) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.slow
def test_a_longer_run_is_as_if_it_had_been_that_long(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soul(*USUAL, *CONSTANT, "--steps", 5, "--out", run, "--trust") == 0
    err = capsys.readouterr().err
    assert "steps raised from 3 to 5: no other setting depends on it" in err
    assert "already finished" not in err
    assert soul(*USUAL, *CONSTANT, "--steps", 5, "--out", tmp_path / "whole") == 0
    assert losses(run) == losses(tmp_path / "whole") and len(losses(run)) == 5
    raised, whole = weights(run), weights(tmp_path / "whole")
    assert all(torch.equal(raised[name], whole[name]) for name in whole)
    assert json.loads((run / "summary.json").read_text())["steps"] == 5
    assert json.loads((run / "summary_3_steps.json").read_text())["steps"] == 3


def is_sealed(run: Path) -> bool:
    noted, text = read_environment(run), (run / "config.yaml").read_bytes()
    return seal_fits(noted.get("seal"), run, noted["command"], text, read_config(run))


@pytest.mark.slow
def test_the_users_own_run_stays_the_users_own(finished: Path) -> None:
    assert is_sealed(finished)
    run = Run.open(finished, "train sft", read_config(finished))
    change_settings(run, read_config(finished) | {"keep_last": 3}, {"keep_last": [3, 3]})
    assert is_sealed(finished)


@pytest.mark.slow
def test_the_folder_says_what_was_changed(run: Path) -> None:
    assert soul(*USUAL, *CONSTANT, "--steps", 4, "--out", run) == 0
    assert read_config(run)["steps"] == 4
    assert read_environment(run)["resumed"][-1]["changed"] == {"steps": [3, 4]}
    again = read_environment(run)
    assert soul(*USUAL, *CONSTANT, "--steps", 4, "--out", run) == 0
    assert "changed" not in read_environment(run)["resumed"][len(again["resumed"])]


@pytest.mark.slow
def test_what_depends_on_the_number_is_said_and_the_warm_up_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    few = [word for word in USUAL if word not in ("--batch", 4)]
    assert soul(*few, "--batch", 1, "--steps", 20, "--out", out) == 0
    capsys.readouterr()
    assert soul(*few, "--batch", 1, "--steps", 44, "--out", out) == 0
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("steps raised")]
    assert (
        "cosine learning rate now ends at step 44" in line and "the warm-up stays 1 steps" in line
    )
    assert read_config(out)["warmup_steps"] == 1
    rates = [one.lr for one in read_step_lines(out / "metrics.jsonl") if one.step >= 0]
    assert rates[19] is not None and rates[20] is not None and rates[20] > 4 * rates[19]


@pytest.mark.slow
def test_fewer_steps_are_refused_and_nothing_changes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "config.yaml").read_bytes(), (run / "summary.json").read_bytes()
    assert soul(*USUAL, *CONSTANT, "--steps", 2, "--out", run) == 2
    what, why, fix = three_lines("\n".join(capsys.readouterr().err.splitlines()[-3:]))
    assert "started with 3 steps, but now --steps is 2" in what
    assert "raised, not lowered" in why and "--steps 3 or more" in fix
    assert ((run / "config.yaml").read_bytes(), (run / "summary.json").read_bytes()) == before


@pytest.mark.slow
def test_another_setting_is_refused_with_more_steps_too(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soul(*USUAL, *CONSTANT, "--steps", 5, "--lr", 1e-3, "--out", run) == 2
    err = capsys.readouterr().err
    assert "lr: 0.002 -> 0.001" in err and "steps: 3" not in err
    assert read_config(run)["steps"] == 3 and (run / "summary.json").is_file()


def test_a_comparison_takes_more_steps_than_before(tmp_path: Path) -> None:
    def planned(steps: int) -> Any:
        def common(method: str) -> dict[str, Any]:
            return {"method": method, "model": "m", "tasks": {"tomi": 1.0}, "steps": steps}

        (one,) = plan_arms(parse_arms("grpo"), tmp_path, None, common, seeds=1, match="prompts")
        return one

    three, five = planned(3), planned(5)
    Run.open(three.path, "train grpo", three.config.identity())
    (three.path / "summary.json").write_text("{}")
    assert is_finished(three) and not is_finished(five)
    refuse_other_settings(five)
    with pytest.raises(RunError, match="started with 3 steps"):
        refuse_other_settings(planned(2))
