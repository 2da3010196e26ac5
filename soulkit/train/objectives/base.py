"""Base classes of training methods, and the registry that finds a method by name.

All methods share losses, advantages and the training loop. To add a method, write one file here
with a class that has `names` and a class with its settings. Names and descriptions are read from
the source, so that help is fast. Another package adds a method with an entry point in the group
`soulkit.objectives`, named like the method.
"""

from __future__ import annotations

import ast
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from soulkit.config import Settings
from soulkit.errors import ConfigError, nearest
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence
from soulkit.train.objectives.sequences import sequences_of as sequences_of
from soulkit.types import Feedback, Record, Segment

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


Reader = Literal["none", "self", "other"]
"""Teacher of a method: none, the policy itself, or another model."""

Lines = tuple[str, str, str]
"""What is wrong, why, and how to fix it."""


class Method:
    """A training method with one or more names."""

    __slots__ = ()

    names: ClassVar[Mapping[str, str]] = {}
    """Name → description in `soul train --help`. Must be a literal: help reads the source."""
    settings: ClassVar[type[Settings]] = Settings
    """The settings that only this method has."""
    marks: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Name → further traits, for settings that apply only to some names."""

    default_words: ClassVar[Mapping[str, str]] = {}
    """Common setting → text of its default in this method, where it differs."""

    @classmethod
    def own_defaults(cls, config: Any) -> dict[str, Any]:
        """The values that `default_words` describes, for `config`; values set by the user win."""
        return {}

    @classmethod
    def traits(cls, name: str) -> frozenset[str]:
        """The traits that settings can refer to (`only`): the name and properties of the method."""
        return frozenset({"train", name, *cls.marks.get(name, ())})

    @classmethod
    def remark(cls, config: Any) -> str:
        """A remark about settings that change the method, such as a weight of 0; else empty."""
        return ""

    @classmethod
    def futile(cls, config: Any, highs: Mapping[str, float]) -> Lines | None:
        """Why the method cannot learn anything, or None; `highs`: task → highest reward."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Method, ABC):
    """A reinforcement method; by default on drafts only, without feedback."""

    uses_feedback: ClassVar[bool] = False
    refines: ClassVar[bool] = False
    """Whether it trains on refined rollouts; if so, they are sampled."""
    reader: ClassVar[Reader] = "none"
    judges_itself: ClassVar[bool] = False
    """Whether the actor must be the judge of every task."""

    name: str = ""
    logits: bool = False
    """Whether it compares whole distributions with the teacher's, not only sampled tokens."""

    @classmethod
    def traits(cls, name: str) -> frozenset[str]:
        likeness = {"rollouts": True, "feedback": cls.uses_feedback, "refined": cls.refines}
        marks = cls.marks.get(name, ())
        return frozenset(
            {"train", "plays", name, *marks, *(t for t, is_so in likeness.items() if is_so)}
        )

    @classmethod
    def of(cls, config: Any) -> Objective:
        """The objective with its settings from a configuration."""
        return cls()

    @abstractmethod
    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot
    ) -> list[TrainSequence]:
        """Trained sequences of the step's scored records; unscored records give none.

        `slot` returns the message of a record's seat with the feedback filled in.
        """


def no_slot(record: Record, seat: str, feedback: Feedback) -> Segment:
    """Slot for methods that never use it."""
    raise LookupError(f"no task is available to fill the feedback slot of {record.key}")


def scored_records(records: Sequence[Record], kind: str) -> list[Record]:
    """The scored records of one kind."""
    return [r for r in records if r.kind == kind and r.score.scored]


GROUP = "soulkit.objectives"


@cache
def built_in() -> Mapping[str, str]:
    """Name → description of every built-in method."""
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
    """Entry points of methods from installed packages; nothing is imported."""
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))


@cache
def built_in_settings() -> tuple[type[Settings], ...]:
    """Settings classes of the built-in methods, without base classes of others."""
    kinds = dict.fromkeys(method_class(name).settings for name in built_in())
    return tuple(
        kind for kind in kinds
        if not any(other is not kind and issubclass(other, kind) for other in kinds)
    )  # fmt: skip


def from_packages() -> dict[str, str]:
    """Name → description of methods from installed packages, except names that are built in."""
    return {
        entry.name: f"From an installed package: {entry.value}."
        for entry in _entry_points()
        if entry.name not in built_in()
    }


def overruled(name: str) -> str:
    """A remark if a package's method has the name of a built-in one; else empty."""
    rivals = [entry.value for entry in _entry_points() if entry.name == name]
    if name not in built_in() or not rivals:
        return ""
    return f"'{name}' is a built-in method; {', '.join(rivals)} has the same name and is ignored"


def method_class(name: str) -> type[Method]:
    """The class of the method `name`; ConfigError for an unknown method."""
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

    yield from (
        one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Method)
    )


def _from_package(entry: EntryPoint) -> type[Method]:

    loaded = entry.load()
    if isinstance(loaded, type) and issubclass(loaded, Method) and entry.name in loaded.names:
        return loaded
    raise ConfigError(
        f"The method '{entry.name}' from {entry.value} is not valid.",
        f"The entry point '{entry.name}' of the group {GROUP} must name a class derived from "
        f"Objective, with '{entry.name}' in its `names`.",
        "Fix the package, or uninstall it.",
    )


def unknown_method(name: str) -> ConfigError:
    """The error for an unknown method."""
    names = [*built_in(), *(entry.name for entry in _entry_points())]
    near = nearest(name, [*names, "ablate", "matrix"])
    return ConfigError(
        f"'{name}' is not a training method.",
        f"The methods of soul train are {', '.join(names)}; ablate and matrix compare trainings.",
        f"Did you mean '{near}'?" if near else "Write one of them, or see: soul train --help",
    )


def rollout_methods() -> list[str]:
    """The built-in methods that play rollouts."""
    return [name for name in built_in() if "rollouts" in method_class(name).traits(name)]


def make_objective(config: Any) -> Objective:
    """The objective of `config.method`; ConfigError if it is not a reinforcement method."""

    kind = method_class(config.method)
    if not issubclass(kind, Objective):
        raise ConfigError(
            f"'{config.method}' is not a reinforcement method.",
            "Only methods that play rollouts can be used here.",
            f"Choose one of {', '.join(rollout_methods())}.",
        )
    return kind.of(config)
