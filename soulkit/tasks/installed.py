"""Tasks of installed packages: the entry points of the group `soulkit.tasks`.

    [project.entry-points."soulkit.tasks"]
    game = "my_lab.game"            # the task's name = the package that holds it

The folder of such a package holds a `tasks.yaml` that declares the task, and the modules that the
declaration names: it is laid out like the folder of a built-in task. Looking for entry points reads
what installers wrote beside the packages, and imports nothing. When a task is named, its package is
looked up (which may import the packages above it); its modules are imported when they are needed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from soulkit.errors import ConfigError
from soulkit.tasks.home import Home

GROUP = "soulkit.tasks"
DECLARATION = "tasks.yaml"


@dataclass(frozen=True, slots=True)
class Offer:
    """A task that an installed distribution offers."""

    task: str
    package: str
    distribution: str

    def home(self) -> Home:
        """The folder of its package; ConfigError when there is none, or no declaration in it."""
        folder = self._folder()
        if not (folder / DECLARATION).is_file():
            raise self.broken(f"There is no {DECLARATION} in '{folder}'.")
        return Home(folder, self.package, self.distribution)

    def _folder(self) -> Path:
        try:
            spec = importlib.util.find_spec(self.package)
        except Exception as error:
            raise self.broken(f"Python says: {type(error).__name__}: {error}.") from error
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not places:
            raise self.broken(f"'{self.package}' is no package that can be imported.")
        return Path(places[0])

    def broken(self, why: str) -> ConfigError:
        """The error of an offer that nothing can be made of."""
        return ConfigError(
            f"The task '{self.task}' of the distribution '{self.distribution}' cannot be used.",
            " ".join(why.split()),
            f"Mend or reinstall the distribution '{self.distribution}'; docs/authoring.md says "
            "what such a package holds.",
        )


def offers() -> Mapping[str, tuple[Offer, ...]]:
    """Task → who offers it, as installers noted it; nothing is imported."""
    return _offers(tuple(sys.path))


@cache
def _offers(path: tuple[str, ...]) -> Mapping[str, tuple[Offer, ...]]:
    from importlib.metadata import entry_points

    by_task: dict[str, list[Offer]] = {}
    for entry in entry_points(group=GROUP):
        name = entry.dist.name if entry.dist is not None else "unknown"
        by_task.setdefault(entry.name, []).append(Offer(entry.name, entry.value.strip(), name))
    return {task: tuple(by_task[task]) for task in sorted(by_task)}


def offer_of(task: str) -> Offer | None:
    """Who offers a task; ConfigError when several do, as nobody could tell which one is meant."""
    several = offers().get(task, ())
    if len(several) > 1:
        names = ", ".join(f"'{offer.distribution}'" for offer in several)
        raise ConfigError(
            f"Several installed distributions offer a task '{task}': {names}.",
            "Which of them is meant cannot be told from the name.",
            "Uninstall all but one.",
        )
    return several[0] if several else None


def say_shadowed(task: str, where: str) -> None:
    """One line on stderr, once: the name that was used is not that of the installed task."""
    if names := ", ".join(f"'{offer.distribution}'" for offer in offers().get(task, ())):
        _say(f"the task '{task}' is the one {where}, not that of the distribution {names}\n")


@cache
def _say(line: str) -> None:
    sys.stderr.write(line)
