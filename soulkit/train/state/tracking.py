"""Optional trackers: TensorBoard, Weights & Biases, trackio. `metrics.jsonl` is always written.

`tracking.json` in the run folder has the run's id in the tracking service and the last logged step,
so a resumed run continues there and logs no step twice. If a tracker fails (no network, no key, a
full disk), that is printed once, and the run continues without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from soulkit.api_keys import masked_json, printable
from soulkit.errors import MissingPackage
from soulkit.runs.jsonl import stored_json, write_json
from soulkit.train.state.metrics import StepLine

TRACKING = "tracking.json"
PROJECT = "soulkit"
"""Default project name, unless the service's environment variable sets another."""


class MetricsTracker(Protocol):
    def log(self, line: StepLine) -> None: ...

    def close(self) -> None: ...


class _Guarded:
    """Wraps a tracker, or none, so that its failure stops the tracking but not the run."""

    def __init__(self, name: str, make: Callable[[], MetricsTracker | None]) -> None:
        self.name = name
        self.tracker: MetricsTracker | None = None
        self._try(lambda: setattr(self, "tracker", make()))

    def log(self, line: StepLine) -> None:
        if (tracker := self.tracker) is not None:
            self._try(lambda: tracker.log(line))

    def close(self) -> None:
        if (tracker := self.tracker) is not None:
            self._try(tracker.close)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except MissingPackage:
            raise
        except Exception as error:  # noqa: BLE001 -- services raise arbitrary exceptions
            self.tracker = None
            words = (printable(str(error)).strip().splitlines() or [""])[0]
            sys.stderr.write(
                f"{self.name} failed and is disabled ({type(error).__name__}: {words}); the run "
                "continues, and metrics.jsonl has every step\n"
            )


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        self.writers = _import("torch.utils.tensorboard", "tensorboard")
        self.folder = folder
        self.writer: Any = None

    def log(self, line: StepLine) -> None:
        if self.writer is None:  # the first step is where a resumed run continues
            resumed = line.step if self.folder.is_dir() else None
            self.writer = self.writers.SummaryWriter(str(self.folder), purge_step=resumed)
        for name, value in _numbers(line).items():
            self.writer.add_scalar(name, value, line.step)
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class _Service:
    """wandb and trackio share one interface."""

    def __init__(self, package: str, run: Path, config: Mapping[str, Any]) -> None:
        self.module = _import(package, package)
        self.place = run / TRACKING
        self.package = package
        notes = _read(self.place)
        self.entry: dict[str, Any] = notes.get(package) or _new_entry(package, run)
        shown = json.loads(masked_json(json.dumps(dict(config), default=str)))
        opened = self._open(run, shown, resumed=package in notes)
        self.entry["id"] = str(getattr(opened, "id", None) or self.entry["id"])
        self._note()

    def _open(self, run: Path, config: Any, *, resumed: bool) -> Any:
        entry = {name: self.entry[name] for name in ("project", "name")}
        if self.package == "wandb":
            folder = None if "WANDB_DIR" in os.environ else str(run)
            quiet = self.module.Settings(console="off")  # soul prints its own progress
            return self.module.init(
                **entry, id=self.entry["id"], resume="allow", config=config, dir=folder,
                settings=quiet,
            )  # fmt: skip
        with redirect_stdout(sys.stderr):  # its greeting goes to stdout, which is for results
            return self.module.init(
                **entry, config=config, resume="allow" if resumed else "never", embed=False
            )

    def log(self, line: StepLine) -> None:
        if line.step <= self.entry["step"]:
            return  # logged before a kill; services do not accept earlier steps
        self.module.log(_numbers(line), step=line.step)
        self.entry["step"] = line.step
        self._note()

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self.module.finish()

    def _note(self) -> None:
        write_json(self.place, {**_read(self.place), self.package: self.entry})


def _new_entry(package: str, run: Path) -> dict[str, Any]:
    """The entry of a new run: project, folder name and a unique id."""
    token = os.environ.get("WANDB_RUN_ID", "") if package == "wandb" else ""
    token = token or uuid.uuid4().hex[:8]
    # trackio identifies a run only by its name.
    name = run.resolve().name if package == "wandb" else f"{run.resolve().name}-{token}"
    project = os.environ.get(f"{package.upper()}_PROJECT") or PROJECT
    return {"project": project, "name": name, "id": token, "step": -1}


def _read(place: Path) -> dict[str, dict[str, Any]]:
    try:
        notes = stored_json(place)
        return {name: entry for name, entry in notes.items() if {"id", "step"} <= entry.keys()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def check_tracker(name: str) -> None:
    """MissingPackage if the package of tracker `name` is not installed; imports nothing."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise MissingPackage(name, f"--track {name}")


def make_tracker(name: str, run: Path, config: Mapping[str, Any]) -> MetricsTracker:
    """The tracker `name`; MissingPackage if its package is not installed."""
    if name == "none":
        return _Guarded(name, lambda: None)
    if name == "tensorboard":
        return _Guarded(name, lambda: _TensorBoard(run / "tensorboard"))
    return _Guarded(name, lambda: _Service(name, run, config))


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(package, f"--track {package}") from error


def _numbers(line: StepLine) -> dict[str, float]:
    values = line.to_json()
    return {k: v for k, v in values.items() if isinstance(v, int | float) and k != "step"}
