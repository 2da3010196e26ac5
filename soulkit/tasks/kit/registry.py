"""The registry: tasks and suites from `tasks.yaml`, `--tasks FILE` and installed packages.

A user's file is read after the built-in one and may add tasks and suites. A name that neither file
declares may be a task of an installed package, which offers it through an entry point:

    [project.entry-points."soulkit.tasks"]
    game = "my_lab.game"            # the task's name = the package with its tasks.yaml
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from soulkit.errors import ConfigError, did_you_mean
from soulkit.parse import ParseError, decoded, parse_yaml, read_limited
from soulkit.tasks.kit.declared.keys import expand
from soulkit.tasks.kit.declared.problems import (
    Problem,
    broken_file,
    misfits,
    parsed,
    placed,
)
from soulkit.tasks.kit.spec import (
    HookKey,
    RegistryFile,
    Suite,
    TaskSpec,
    cannot_play,
    check_suites,
)
from soulkit.tasks.kit.user_code import Home, Hook, load_declared, unloadable
from soulkit.types import Protocol

if TYPE_CHECKING:
    from soulkit.tasks.kit.base import Task


@dataclass(frozen=True)
class Registry:
    """Every task and suite that a command can use."""

    specs: dict[str, TaskSpec]
    """The declared tasks, plus the installed tasks requested so far."""
    suites: Mapping[str, Suite]

    def spec(self, name: str) -> TaskSpec:
        """The declaration of a task; ConfigError if there is none."""
        declared = self.specs.get(name)
        if declared is None:
            declared = self.specs[name] = self._installed(name)
        elif not declared.home.distribution:
            built_in = declared.home.builtin_task
            note_shadowed(name, "that comes with soulkit" if built_in else "of your tasks file")
        return declared

    def _installed(self, name: str) -> TaskSpec:
        """The declaration of an installed task; loads its package."""
        offer = installed_task(name)
        if offer is None:
            raise ConfigError(
                f"There is no task named '{name}'.",
                "Neither the built-in tasks.yaml nor a file given by --tasks declares it, "
                "and no installed package offers it.",
                f"{did_you_mean(name, (*self.specs, *installed_tasks()))} See: soul tasks list",
            )
        home = offer.home()
        try:
            tasks = read_file(home.folder / DECLARATION).tasks
        except ConfigError as error:
            raise offer.broken(f"{error.what} {error.why}") from error
        if name not in tasks:
            raise offer.broken(f"Its {DECLARATION} declares {', '.join(tasks) or 'no task'}.")
        return tasks[name].at(home)

    def task(
        self, name: str, protocol: Protocol = "paper", *, training: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Task:  # fmt: skip
        """The task object, of the class that its declaration names (RowsOnly if it names none).

        `training` selects the word budgets and default players of training. `options` override
        the task's options of the same name.
        """
        spec = self.spec(name).played(training=training, options=options or {})
        shared = self._built_in(spec) or spec
        module, home = shared.module or shared.binder, shared.home
        if protocol == "reference" and spec.reference:
            module, home = spec.reference, spec.home
        elif protocol == "reference" and shared.reference:
            module = shared.reference
        if spec.declaration is not None and not module:
            from soulkit.tasks.kit.declared.task import CLASSES

            module = CLASSES[spec.declaration.kind]
        cls = _load_class(name, module, home)
        return cls(name, spec, protocol=protocol, folder=spec.home.folder)

    def _built_in(self, spec: TaskSpec) -> TaskSpec | None:
        """The built-in task whose class (`soulkit.tasks.…:Class`) a user's declaration names."""
        named = spec.module or spec.binder
        tasks = (task for task in self.specs.values() if task.home.builtin_task)
        return next((t for t in tasks if named == f"{t.home.package}.{t.module or t.binder}"), None)

    def hook(self, name: str, key: HookKey) -> Hook | None:
        """The function that a task's declaration names under `key`; None if it names none."""
        return self.spec(name).hook(name, key)

    def with_hook(self, key: HookKey) -> list[str]:
        """The tasks whose declaration names a function under `key`."""
        return [name for name, spec in self.specs.items() if getattr(spec, key)]

    def refuse_rows_only(self, names: Collection[str], suite: str | None = None) -> None:
        """ConfigError if `names` (the members of `suite`) include tasks that cannot be played."""
        unplayable = [name for name in names if self.spec(name).rows_only]
        if not unplayable:
            return
        others = names if len(unplayable) < len(names) else tuple(self.specs)
        playable = [name for name in others if not self.specs[name].rows_only]
        raise cannot_play(unplayable, playable, suite)

    def refuse_evaluation_only(self, names: Collection[str]) -> None:
        """ConfigError if `names` include tasks that are for evaluation only."""
        marked = [name for name in names if self.spec(name).evaluation_only]
        if marked:
            trainable = [name for name in names if name not in marked]
            tasks = f"the task{'s' * (len(marked) > 1)} {', '.join(marked)}"
            raise not_for_training(tasks, trainable)

    def suite(self, name: str) -> tuple[str, ...]:
        """The tasks of a suite; ConfigError if there is no such suite."""
        return self.suite_spec(name).tasks

    def suite_spec(self, name: str) -> Suite:
        """The declaration of a suite; ConfigError if there is no such suite."""
        if name not in self.suites:
            raise ConfigError(
                f"There is no suite named '{name}'.",
                "A suite is a named list of tasks under 'suites:' in tasks.yaml.",
                f"{did_you_mean(name, self.suites)} See: soul tasks list",
            )
        return self.suites[name]

    def by_source(self) -> dict[str, str]:
        """`data_source` value of a row → the task that the row belongs to."""
        marks = {s: name for name, spec in self.specs.items() for s in spec.files.data_source}
        # Task names take precedence over marks: two tasks may share rows marked with one's name.
        return {**marks, **{name: name for name in self.specs}}


# -- classes -------------------------------------------------------------------------------------


LEAVE_OUT = "Leave them out (choose other rows with --where or --example, or use another file)"


class NotForTraining(ConfigError):
    """Training on tasks or rows that do not allow it, such as those for evaluation only."""


def not_for_training(marked: str, trainable: Sequence[str] = ()) -> NotForTraining:
    """The error for tasks or rows marked evaluation-only; lists what can be trained on."""
    way_out = f"Train on the other tasks: --task {','.join(trainable)}" if trainable else LEAVE_OUT
    return NotForTraining(
        f"You asked to train on {marked}, marked evaluation-only.",
        "Their licence or purpose forbids training on them, and a model trained on them could "
        "no longer be evaluated with them.",
        f"{way_out}; to evaluate on them: soul eval",
    )


def _load_class(task: str, module: str, home: Home) -> type[Task]:
    from soulkit.tasks.kit.base import Task

    if not module:
        from soulkit.tasks.kit.loading import RowsOnly

        return RowsOnly
    cls = load_declared(task, "module", module, home)
    why = ""
    if not (inspect.isclass(cls) and issubclass(cls, Task)):
        why = f"'{module.partition(':')[2]}' is not a class derived from Task."
    elif inspect.isabstract(cls):
        why = f"The class does not define: {', '.join(sorted(cls.__abstractmethods__))}."
    if why:
        raise unloadable(task, "module", module, home, why)
    return cast("type[Task]", cls)


# -- files ---------------------------------------------------------------------------------------


def builtin_file() -> Path:
    """`tasks.yaml`: inside an installed package, or at the root of a checkout."""
    packaged = Path(str(resources.files("soulkit"))) / "tasks.yaml"
    return packaged if packaged.exists() else packaged.parents[1] / "tasks.yaml"


@cache
def builtin_declarations() -> RegistryFile:
    """The built-in tasks file."""
    return read_file(builtin_file(), ours=True)


def read_file(path: Path, *, ours: bool = False) -> RegistryFile:
    """Parse and validate a tasks file; BrokenFile lists every problem with its line.

    `ours`: the file comes with soulkit, so that the fast loader may read it.
    """
    try:
        text = decoded(read_limited(path))
    except (OSError, ParseError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise ConfigError(
            f"The tasks file '{path}' {'does not exist' if missing else 'cannot be read'}.",
            f"--tasks needs a YAML file that declares your tasks; {' '.join(str(error).split())}.",
            "Check the path; docs/tutorials/write-a-task.md shows a complete example.",
        ) from error
    node = None
    if ours:
        raw = parse_yaml(text, ours=True)
    else:
        raw, node = parsed(path, text)
    if raw is None:
        raise broken_file(path, [(1, "the file is empty; expected 'tasks:' or 'suites:'")])
    problems: list[Problem] = []
    file = _read_tasks(raw, path.parent, problems)
    if problems:
        raise broken_file(path, [placed(node, problem, RegistryFile) for problem in problems])
    return file


def _read_tasks(raw: Any, folder: Path, problems: list[Problem]) -> RegistryFile:
    """The tasks and suites of a file; what is wrong with them joins `problems`."""
    kinds: dict[str, type[TaskSpec | Suite]] = {"tasks": TaskSpec, "suites": Suite}
    made: dict[str, Any] = dict(raw) if isinstance(raw, Mapping) else raw
    for group in kinds if isinstance(raw, Mapping) else ():
        entries = raw.get(group)
        made |= {group: {}} if isinstance(entries, Mapping) else {}
        for name, entry in entries.items() if isinstance(entries, Mapping) else ():
            full, before = entry, len(problems)
            if group == "tasks" and isinstance(entry, Mapping) and "kind" in entry:
                full = expand(entry, str(name), folder, problems)
            try:
                made[group][name] = kinds[group].model_validate(full)
            except ValidationError as error:
                rules = len(problems) == before  # keys with problems lack columns
                problems += misfits(error, entry, (group, name), rules=rules)
    try:
        return RegistryFile.model_validate(made)
    except ValidationError as error:
        problems += misfits(error, raw, ())
        return RegistryFile()


@cache
def load_registry(*extra: Path) -> Registry:
    """The built-in tasks plus those of `extra` files; ConfigError if a name is declared twice."""
    built_in = builtin_declarations()
    specs = {n: spec.at(Home.builtin(spec.folder or n)) for n, spec in built_in.tasks.items()}
    suites = dict(built_in.suites)
    for path in extra:
        parsed = read_file(path)
        _refuse_second(path, "task", parsed.tasks, specs)
        _refuse_second(path, "suite", parsed.suites, suites)
        home = Home(path.resolve().parent)
        specs |= {name: spec.at(home) for name, spec in parsed.tasks.items()}
        suites |= parsed.suites
    check_suites(specs, suites, installed_tasks)
    return Registry(specs=specs, suites=suites)


def _refuse_second(path: Path, kind: str, names: Iterable[str], declared: Iterable[str]) -> None:
    for name in names:
        if name in declared:
            raise ConfigError(
                f"The {kind} '{name}' is declared twice, the second time in '{path}'.",
                "The second declaration would change what the name means.",
                f"Give your {kind} another name.",
            )


GROUP = "soulkit.tasks"
DECLARATION = "tasks.yaml"


@dataclass(frozen=True, slots=True)
class InstalledTask:
    """A task offered by an installed distribution."""

    task: str
    package: str
    distribution: str

    def home(self) -> Home:
        """The package's folder; ConfigError if it does not exist or has no declaration."""
        folder = self._folder()
        if not (folder / DECLARATION).is_file():
            raise self.broken(f"There is no {DECLARATION} in '{folder}'.")
        return Home(folder, self.package, self.distribution)

    def _folder(self) -> Path:
        try:
            spec = importlib.util.find_spec(self.package)
        except Exception as error:
            raise self.broken(f"Python reports: {type(error).__name__}: {error}.") from error
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not places:
            raise self.broken(f"'{self.package}' is not a package that can be imported.")
        return Path(places[0])

    def broken(self, why: str) -> ConfigError:
        """The error for an offered task that cannot be used."""
        return ConfigError(
            f"The task '{self.task}' of the distribution '{self.distribution}' cannot be used.",
            " ".join(why.split()),
            f"Correct or reinstall the distribution '{self.distribution}'. "
            "docs/reference/task-keys.md describes such packages.",
        )


def installed_tasks() -> Mapping[str, tuple[InstalledTask, ...]]:
    """Task → the distributions that offer it, read from package metadata without importing them."""
    return _offers(tuple(sys.path))


@cache
def _offers(path: tuple[str, ...]) -> Mapping[str, tuple[InstalledTask, ...]]:
    from importlib.metadata import entry_points

    by_task: dict[str, list[InstalledTask]] = {}
    for entry in entry_points(group=GROUP):
        name = entry.dist.name if entry.dist is not None else "unknown"
        by_task.setdefault(entry.name, []).append(
            InstalledTask(entry.name, entry.value.strip(), name)
        )
    return {task: tuple(by_task[task]) for task in sorted(by_task)}


def installed_task(task: str) -> InstalledTask | None:
    """The distribution that offers a task, or None; ConfigError if several do."""
    offers = installed_tasks().get(task, ())
    if len(offers) > 1:
        names = ", ".join(sorted(f"'{offer.distribution}'" for offer in offers))
        raise ConfigError(
            f"Several installed distributions offer a task '{task}': {names}.",
            "The name does not say which one to use.",
            "Uninstall all but one of them.",
        )
    return offers[0] if offers else None


def note_shadowed(task: str, where: str) -> None:
    """Print one line to stderr, once, if the task in use hides an installed one of that name."""
    if names := ", ".join(f"'{offer.distribution}'" for offer in installed_tasks().get(task, ())):
        _write_once(
            f"task '{task}': using the one {where}, not the one of the distribution {names}\n"
        )


@cache
def _write_once(line: str) -> None:
    sys.stderr.write(line)
