"""What a training method is, and the registry of methods by name.

The losses, the advantages and the loop are the same for all methods. To add one, write one file
here: a class with `names`, and a class with its own settings. Names and sentences are read from
the sources, so that help answers before anything is imported. A package brings a method by an
entry point of the group `soulkit.objectives`, whose name is the method's.
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
from soulkit.errors import ConfigError, did_you_mean
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence
from soulkit.train.objectives.sequences import sequences_of as sequences_of
from soulkit.types import Feedback, Record, Segment

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


Reader = Literal["none", "self", "other"]
"""Whose distributions a method follows: nobody's, the policy's own, or another model's."""

Lines = tuple[str, str, str]
"""What is wrong, why it matters, the way out."""


class Method:
    """One training method, under one or several names."""

    __slots__ = ()

    names: ClassVar[Mapping[str, str]] = {}
    """Name → what `soul train --help` says of it. Written out: help reads it from the source."""
    settings: ClassVar[type[Settings]] = Settings
    """The settings that this method has beside everybody's."""
    marks: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Name → further traits, for settings that matter to some of the names alone."""

    default_words: ClassVar[Mapping[str, str]] = {}
    """Setting of everybody's → its default here in words, where it is another."""

    @classmethod
    def own_defaults(cls, config: Any) -> dict[str, Any]:
        """The values behind `default_words`, for `config`; what was written goes before them."""
        return {}

    @classmethod
    def traits(cls, name: str) -> frozenset[str]:
        """What settings may be tied to (`only`): the name, and what the method is like."""
        return frozenset({"train", name, *cls.marks.get(name, ())})

    @classmethod
    def remark(cls, config: Any) -> str:
        """What these settings make of the method, where a weight is 0; empty otherwise."""
        return ""

    @classmethod
    def futile(cls, config: Any, highs: Mapping[str, float]) -> Lines | None:
        """Why nothing of the method's own could be learned; `highs`: task → its highest reward."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Method, ABC):
    """A method of reinforcement; as it stands, one on drafts alone that nobody talks to."""

    uses_feedback: ClassVar[bool] = False
    refines: ClassVar[bool] = False
    """It trains on refined rollouts, so they are sampled."""
    reader: ClassVar[Reader] = "none"

    name: str = ""
    logits: bool = False
    """It compares whole distributions with the teacher's, not only the sampled tokens."""

    @classmethod
    def traits(cls, name: str) -> frozenset[str]:
        likeness = {"rollouts": True, "feedback": cls.uses_feedback, "refined": cls.refines}
        marks = cls.marks.get(name, ())
        return frozenset(
            {"train", "plays", name, *marks, *(t for t, is_so in likeness.items() if is_so)}
        )

    @classmethod
    def of(cls, config: Any) -> Objective:
        """The objective of a configuration, of which it reads its own settings."""
        return cls()

    @abstractmethod
    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot
    ) -> list[TrainSequence]:
        """The step's scored records as trained sequences; unscored ones give none.

        `slot` gives the message of a record's seat with feedback in it.
        """


def no_slot(record: Record, seat: str, feedback: Feedback) -> Segment:
    """For methods that never ask for the slot."""
    raise LookupError(f"no task to fill the feedback slot of {record.key} with")


def scored_records(records: Sequence[Record], kind: str) -> list[Record]:
    """The scored records of one kind."""
    return [r for r in records if r.kind == kind and r.score.scored]


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


@cache
def built_in_settings() -> tuple[type[Settings], ...]:
    """The settings of the built-in methods, less those that others inherit."""
    kinds = dict.fromkeys(method_class(name).settings for name in built_in())
    return tuple(
        kind for kind in kinds
        if not any(other is not kind and issubclass(other, kind) for other in kinds)
    )  # fmt: skip


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

    yield from (
        one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Method)
    )


def _from_package(entry: EntryPoint) -> type[Method]:

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

    kind = method_class(config.method)
    if not issubclass(kind, Objective):
        raise ConfigError(
            f"'{config.method}' is no method of reinforcement.",
            f"The methods are {', '.join(rollout_methods())}.",
            "Choose one of them.",
        )
    return kind.of(config)
