"""`soul eval local --run`: the checkpoints of a training, by step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soulkit.errors import RunError
from soulkit.eval.grid import checkpoint_grid
from tests.support.evaluation import soul


def _run(folder: Path, command: str = "train sft") -> Path:
    """A training run with one adapter and one whole model."""
    for step, file in ((2, "adapter_config.json"), (10, "config.json")):
        path = folder / "checkpoints" / f"step_{step:06d}"
        path.mkdir(parents=True)
        for name in (file, "position.json"):
            (path / name).write_text("{}")
    (folder / "checkpoints" / "step_000011").mkdir()  # not complete
    (folder / "config.yaml").write_text("model: owner/base\nadapter: start\n")
    (folder / "environment.json").write_text(json.dumps({"command": command}))
    return folder


def test_steps_are_adapters_whole_models_or_the_model_before(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    grid = checkpoint_grid(run, "last,all,0", dict)  # type: ignore[arg-type]
    first, last = (str(run / "checkpoints" / name) for name in ("step_000002", "step_000010"))
    assert grid == {
        "step_000000": {"model": "owner/base", "adapter": "start"},
        "step_000002": {"model": "owner/base", "adapter": first},
        "step_000010": {"model": last, "adapter": None},
    }


def test_relative_paths_start_where_the_training_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path / "work" / "run")
    (run / "config.yaml").write_text("model: warm/model\nadapter: warm/start\n")
    (run / "conditions.json").write_text('{"players": {}, "tasks": {}, "directory": ".."}')
    for name in ("model", "start"):
        (tmp_path / "work" / "warm" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    grid = checkpoint_grid(run, "0,2", dict)  # type: ignore[arg-type]
    warm = tmp_path / "work" / "warm"
    assert grid["step_000000"] == {"model": str(warm / "model"), "adapter": str(warm / "start")}
    assert grid["step_000002"]["model"] == str(warm / "model")


@pytest.mark.parametrize("which", ["5", "2,11", "", "first", "-2"])
def test_a_missing_step_is_refused_with_those_that_are_there(tmp_path: Path, which: str) -> None:
    with pytest.raises(RunError) as error:
        checkpoint_grid(_run(tmp_path / "run"), which, dict)  # type: ignore[arg-type]
    assert "the steps 2, 10" in error.value.why


def test_other_folders_are_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", _run(tmp_path / "run", "eval local")):
        with pytest.raises(RunError, match="has no checkpoints"):
            checkpoint_grid(folder, "all", dict)  # type: ignore[arg-type]


@pytest.mark.slow
def test_scores_by_step_and_nothing_is_evaluated_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "scores"
    rows = ["--task", "tomi", "--data", "synth:6"]
    assert not soul("train", "sft", "--model", "tiny", *rows, "--steps", 2, "--checkpoint-every", 1,
                    "--out", run)  # fmt: skip
    evaluate = ["eval", "local", "--run", run, *rows, "--max-tokens", 4, "--out", out]
    assert soul(*evaluate, "--checkpoints", "all", "--max-unscored", 1, "--json") == 0
    folders = sorted(path for path in out.iterdir() if path.is_dir())
    assert [path.name for path in folders] == ["step_000001", "step_000002"]
    times = [(path / "episodes.jsonl").stat().st_mtime_ns for path in folders]
    capsys.readouterr()
    assert soul(*evaluate, "--checkpoints", "all", "--max-unscored", 1) == 0
    assert times == [(path / "episodes.jsonl").stat().st_mtime_ns for path in folders]
    shown = capsys.readouterr().out
    assert "difference from" in shown and max(map(len, shown.splitlines())) <= 80
    assert "<svg" in (out / "index.html").read_text()
    assert [*json.loads((out / "checkpoints.json").read_text())["checkpoints"]] == ["1", "2"]
