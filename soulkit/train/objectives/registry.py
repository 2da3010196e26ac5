"""Every training method by its name: those of this folder, and those of installed packages.

A file here with a class that has `names` is a method. Names and sentences are read from the
sources, so that help answers before anything is imported. A package brings a method by an entry
point of the group `soulkit.objectives`; it is looked up when a name is none of the built-in ones,
and imported when it is the one that was named.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from soulkit.train.objectives.base import Method, Objective

GROUP = "soulkit.objectives"


@cache
def built_in() -> Mapping[str, str]:
    """Name → sentence of every built-in method."""
    return {name: sentence for file in _files() for name, sentence in _names_in(file).items()}


@cache
def _files() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.py"))


@cache
def _names_in(file: Path) -> dict[str, str]:
    """The `names` of the classes in a source file."""
    names: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "names":
                names |= ast.literal_eval(line.value) if line.value else {}
    return names


def _entry_points() -> list[EntryPoint]:
    """The methods that installed packages bring; nothing of them is imported."""
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))


def from_packages() -> dict[str, str]:
    """Name → sentence of the methods of installed packages, less those hidden by built-in ones."""
    return {
        entry.name: f"Of an installed package: {entry.value}."
        for entry in _entry_points()
        if entry.name not in built_in()
    }


def overruled(name: str) -> str:
    """What is to be said where a package's method has the name of a built-in one; else nothing."""
    rivals = [entry.value for entry in _entry_points() if entry.name == name]
    if name not in built_in() or not rivals:
        return ""
    return f"'{name}' is soulkit's own method; {', '.join(rivals)} of the same name is not used"


def method_class(name: str) -> type[Method]:
    """The class of the method `name`; ConfigError when nobody brings one."""
    if name in built_in():
        return _built_in_class(name)
    for entry in _entry_points():
        if entry.name == name:
            return _from_package(entry)
    raise unknown_method(name)


@cache
def _built_in_class(name: str) -> type[Method]:
    file = next(file for file in _files() if name in _names_in(file))
    module = importlib.import_module(f"soulkit.train.objectives.{file.stem}")
    return next(one for one in _classes(module) if name in one.names)


def _classes(module: Any) -> Iterator[type[Method]]:
    from soulkit.train.objectives.base import Method

    yield from (
        one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Method)
    )


def _from_package(entry: EntryPoint) -> type[Method]:
    from soulkit.train.objectives.base import Method

    loaded = entry.load()
    if isinstance(loaded, type) and issubclass(loaded, Method) and entry.name in loaded.names:
        return loaded
    raise ConfigError(
        f"The method '{entry.name}' of {entry.value} is no method.",
        f"The entry point '{entry.name}' of the group {GROUP} has to name a class derived from "
        "Objective whose `names` has that name.",
        "Mend the package, or uninstall it.",
    )


def unknown_method(name: str) -> ConfigError:
    """The error of a name that is no method."""
    names = [*built_in(), *(entry.name for entry in _entry_points())]
    return ConfigError(
        f"'{name}' is no training method.",
        f"soul train knows {', '.join(names)}, and ablate to compare them.",
        did_you_mean(name, [*names, "ablate"]),
    )


def rollout_methods() -> list[str]:
    """The built-in methods that play rollouts."""
    return [name for name in built_in() if "rollouts" in method_class(name).traits(name)]


def make_objective(config: Any) -> Objective:
    """The objective of `config.method`; ConfigError when it is no method of reinforcement."""
    from soulkit.train.objectives.base import Objective

    kind = method_class(config.method)
    if not issubclass(kind, Objective):
        raise ConfigError(
            f"'{config.method}' is no method of reinforcement.",
            f"The methods are {', '.join(rollout_methods())}.",
            "Choose one of them.",
        )
    return kind.of(config)
