"""Tasks and suites, as `tasks.yaml` declares them.

The schema is strict: an unknown key is an error that names the nearest known one. A user's own file
(`--tasks my_tasks.yaml`) is read after the built-in one and may add tasks and suites; its Python
modules are looked for beside it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from soulkit.data.schema import Column
from soulkit.errors import ConfigError, did_you_mean
from soulkit.types import Protocol, Role

if TYPE_CHECKING:
    from soulkit.tasks.base import Task


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Metric(Strict):
    """The headline metric: its name, its scale, and whether single values are 0 or 1."""

    name: str = "accuracy"
    binary: bool = True
    low: float = 0.0
    high: float = 1.0


class Files(Strict):
    """Released file names of the task, and the `data_source` values that mark its rows."""

    train: tuple[str, ...] = ()
    eval: tuple[str, ...] = ()
    data_source: tuple[str, ...] = ()


class FeedbackSpec(Strict):
    """Which coaches know the task, and the reference's gate (`--feedback-for task`)."""

    coaches: tuple[Literal["symbolic", "model"], ...] = ()
    below: float = 1.0
    """Feedback is asked for drafts whose reward is below this."""
    until_step: int | None = None


class TaskSpec(Strict):
    """One entry of `tasks:`."""

    title: str
    summary: str
    axis: str = ""
    module: str
    """`package.module:Class`."""
    seats: dict[str, Role]
    columns: dict[str, Column]
    cluster: tuple[str, ...] = ()
    """Columns whose values together name the resampling unit (the story); empty: the row itself."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Break-down name → column."""
    metric: Metric = Metric()
    files: Files = Files()
    synth: bool = False
    """Whether `soul data synth` can write rows of this task."""
    formats: tuple[str, ...] = ()
    """Original file formats that `soul data import` reads."""
    sampling: dict[str, float | int] = Field(default_factory=dict)
    """Defaults of the actor's sampling (temperature, max_tokens)."""
    feedback: FeedbackSpec = FeedbackSpec()
    options: dict[str, Any] = Field(default_factory=dict)
    """Numbers of the task itself (turn limits)."""
    published: str = ""
    """The row of the published results, when there is one."""
    citation: str = ""
    licence: str = ""
    url: str = ""


class RegistryFile(Strict):
    tasks: dict[str, TaskSpec] = Field(default_factory=dict)
    suites: dict[str, tuple[str, ...]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Registry:
    """Every task and suite known to a command."""

    specs: Mapping[str, TaskSpec]
    suites: Mapping[str, tuple[str, ...]]
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Task → folder of the file that declared it (for prompts and modules of user tasks)."""

    def spec(self, name: str) -> TaskSpec:
        if name not in self.specs:
            raise ConfigError(
                f"There is no task named '{name}'.",
                "It is declared neither in the built-in tasks.yaml nor in a file given by --tasks.",
                f"{did_you_mean(name, self.specs)} See: soul tasks list",
            )
        return self.specs[name]

    def task(self, name: str, protocol: Protocol = "paper") -> Task:
        """The live task: its class from `module`, made with its spec."""
        spec = self.spec(name)
        cls = _load_class(name, spec.module, self.folders.get(name))
        made: Task = cls(name, spec, protocol=protocol, folder=self.folders.get(name))
        return made

    def suite(self, name: str) -> tuple[str, ...]:
        if name not in self.suites:
            raise ConfigError(
                f"There is no suite named '{name}'.",
                "A suite is a named list of tasks under 'suites:' in tasks.yaml.",
                f"{did_you_mean(name, self.suites)}",
            )
        return self.suites[name]


def _load_class(task: str, module: str, folder: Path | None) -> type[Task]:
    name, _, attribute = module.partition(":")
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found: type[Task] = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The class of task '{task}' cannot be loaded from '{module}'.",
            f"Python says: {error}.",
            "Write module as 'file:Class', with file.py beside the tasks file.",
        ) from error
    return found


def builtin_file() -> Path:
    """`tasks.yaml`: inside an installed package, or at the root of a checkout."""
    packaged = Path(str(resources.files("soulkit"))) / "tasks.yaml"
    return packaged if packaged.exists() else packaged.parents[1] / "tasks.yaml"


def read_file(path: Path) -> RegistryFile:
    """Parse and validate one tasks file; ConfigError names the place and the nearest known key."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError as error:
        raise ConfigError(
            f"The tasks file '{path}' does not exist.",
            "--tasks names a YAML file that declares your own tasks.",
            "Check the path; docs/tasks.md shows a complete example.",
        ) from error
    except (yaml.YAMLError, IsADirectoryError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The tasks file '{path}' cannot be read as YAML.",
            " ".join(str(error).split()),
            "Mend the file; docs/tasks.md shows a complete example.",
        ) from error
    try:
        return RegistryFile.model_validate(raw)
    except ValidationError as error:
        raise _explained(path, error) from error


def _explained(path: Path, error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    key = str(first["loc"][-1]) if first["loc"] else ""
    known = _fields_at(first["loc"])
    way_out = (
        did_you_mean(key, known)
        if first["type"] == "extra_forbidden"
        else "Mend the entry; docs/tasks.md lists every key."
    )
    return ConfigError(
        f"{path}: the entry '{where}' is not valid.",
        f"{first['msg']} ({len(error.errors())} problem(s) in the file).",
        way_out,
    )


def _fields_at(loc: Sequence[int | str]) -> list[str]:
    """The keys allowed where `loc` points, for a did-you-mean."""
    nested = {"columns": Column, "metric": Metric, "files": Files, "feedback": FeedbackSpec}
    model: type[BaseModel] = RegistryFile
    parts = [str(part) for part in loc[:-1]]
    if parts[:1] == ["tasks"]:
        model = TaskSpec
        model = next((nested[p] for p in parts[2:] if p in nested), model)
    return list(model.model_fields)


@cache
def load_registry(*extra: Path) -> Registry:
    """The built-in tasks with those of `extra` files added; a name declared twice is an error."""
    specs: dict[str, TaskSpec] = {}
    suites: dict[str, tuple[str, ...]] = {}
    folders: dict[str, Path] = {}
    for path in (builtin_file(), *extra):
        parsed = read_file(path)
        for name, spec in parsed.tasks.items():
            if name in specs:
                raise ConfigError(
                    f"The task '{name}' is declared twice, the second time in '{path}'.",
                    "A second declaration would silently change what the name means.",
                    "Give your task another name.",
                )
            specs[name] = spec
            if path in extra:
                folders[name] = path.resolve().parent
        suites.update(parsed.suites)
    _check_suites(specs, suites)
    return Registry(specs=specs, suites=suites, folders=folders)


def _check_suites(specs: Mapping[str, TaskSpec], suites: Mapping[str, tuple[str, ...]]) -> None:
    for suite, names in suites.items():
        for name in names:
            if name not in specs:
                raise ConfigError(
                    f"The suite '{suite}' lists the unknown task '{name}'.",
                    "Every task of a suite must be declared under 'tasks:'.",
                    did_you_mean(name, specs),
                )
