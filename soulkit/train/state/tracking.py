"""Optional trackers: TensorBoard, Weights & Biases, trackio. `metrics.jsonl` is always written."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from soulkit.errors import MissingPackage
from soulkit.train.state.lines import StepLine


class MetricsTracker(Protocol):
    def log(self, line: StepLine) -> None: ...

    def close(self) -> None: ...


class NoTracker:
    """Nothing beside `metrics.jsonl`."""

    def log(self, line: StepLine) -> None:
        """The line is already on disk."""

    def close(self) -> None:
        """There is nothing open."""


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        self.writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))

    def log(self, line: StepLine) -> None:
        for name, value in _numbers(line).items():
            self.writer.add_scalar(name, value, line.step)

    def close(self) -> None:
        self.writer.close()


class _Service:
    """wandb and trackio share one interface."""

    def __init__(self, package: str, run: Path, config: Mapping[str, Any]) -> None:
        self.module = _import(package, package)
        self.module.init(project="soulkit", name=run.name, config=dict(config))

    def log(self, line: StepLine) -> None:
        self.module.log(_numbers(line), step=line.step)

    def close(self) -> None:
        self.module.finish()


def check_tracker(name: str) -> None:
    """MissingPackage when the package of tracker `name` is not installed; imports nothing."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise MissingPackage(name, f"--track {name}")


def make_tracker(name: str, run: Path, config: Mapping[str, Any]) -> MetricsTracker:
    """The tracker called `name`; MissingPackage when its package is not installed."""
    if name == "none":
        return NoTracker()
    if name == "tensorboard":
        return _TensorBoard(run / "tensorboard")
    return _Service(name, run, config)


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(package, f"--track {package}") from error


def _numbers(line: StepLine) -> dict[str, float]:
    values = line.to_json()
    return {k: v for k, v in values.items() if isinstance(v, int | float) and k != "step"}
