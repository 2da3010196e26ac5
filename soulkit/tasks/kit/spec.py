"""The schema of `tasks.yaml`: tasks with their columns, metrics and default players, and suites.

It is strict: an unknown key is an error, as is an undeclared seat, column or task.
docs/reference/task-keys.md explains every key.

Default players are models per role; users can replace them:

    players:
      judge: {model: gpt-5.4, effort: low}
      training: {judge: {model: gpt-5-nano, effort: low}}        # a different judge in training
      reference: {coach: {model: gpt-5.4-nano, effort: low}}     # a different coach in `reference`
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PrivateAttr, model_validator

from soulkit.data.rows import Column, Texts, as_list
from soulkit.errors import ConfigError, did_you_mean
from soulkit.tasks.kit.declared.keys import Declaration
from soulkit.tasks.kit.declared.problems import Misfit, Problem
from soulkit.tasks.kit.user_code import Home, Hook, hook
from soulkit.types import Protocol, Role


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DefaultPlayer(Strict):
    """A model and its reasoning effort."""

    model: str = Field(min_length=1)
    effort: str = ""
    """`reasoning_effort`; empty: the server's default."""

    def __str__(self) -> str:
        return f"{self.model} {self.effort}".strip()


class RoleDefaults(Strict):
    """Role → default player."""

    judge: DefaultPlayer | None = None
    auditor: DefaultPlayer | None = None
    partner: DefaultPlayer | None = None
    environment: DefaultPlayer | None = None
    coach: DefaultPlayer | Literal["symbolic", "none"] | None = None
    """`symbolic`: the task's rules instead of a paper's model; `none`: no feedback. If missing: the
    judge's model for judged tasks, the task's rules for others."""

    def of(self, role: str) -> DefaultPlayer | str | None:
        """The default player of `role`, or None."""
        player: DefaultPlayer | str | None = getattr(self, role, None)
        return player


class DefaultPlayers(RoleDefaults):
    """The default players under `paper`, with exceptions for training and for `reference`."""

    training: RoleDefaults = RoleDefaults()
    """For rollouts, dev scores and feedback of training; `reference` takes precedence."""
    reference: RoleDefaults = RoleDefaults()

    def words(self) -> str:
        """`judge gpt-5.4 low, …; in training judge …; under reference judge …`; or empty."""
        parts = {"": _words(self), "in training ": _words(self.training),
                 "under reference ": _words(self.reference)}  # fmt: skip
        return "; ".join(f"{when}{text}" for when, text in parts.items() if text)

    def in_training(self) -> Self:
        """The same declaration with the training players as defaults."""
        others = {role: self.training.of(role) for role in RoleDefaults.model_fields}
        return self.model_copy(update={role: who for role, who in others.items() if who})

    def under(self, protocol: Protocol, role: str) -> DefaultPlayer | str | None:
        """The default player of `role` under a protocol, or None."""
        other = self.reference.of(role) if protocol == "reference" else None
        return other or self.of(role)


def _words(defaults: RoleDefaults) -> str:
    players = {role: defaults.of(role) for role in RoleDefaults.model_fields}
    return ", ".join(f"{role} {who}" for role, who in players.items() if who)


class Suite(Strict):
    """A named list of members; a member is a task, or a group of tasks that counts as one."""

    title: str = ""
    members: tuple[str, ...] = ()
    """In the published order; unnecessary if `axes` lists them in that order."""
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Member → the tasks that it averages."""
    axes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Axis → its members."""
    average: Literal["", "macro"] = ""
    """`macro`: the mean over members with equal weights; empty: no average."""
    parts: bool = False
    """Whether tables also list each task of a group, and counts include tasks."""
    published: tuple[str, ...] = ()
    """Published tables to show next to the results."""

    @model_validator(mode="before")
    @classmethod
    def _as_list(cls, entry: Any) -> Any:
        if not isinstance(entry, list):
            return entry
        texts = all(isinstance(one, str) for one in entry)
        return {"members": tuple(dict.fromkeys(entry)) if texts else entry}

    @model_validator(mode="before")
    @classmethod
    def _in_axes(cls, entry: Any) -> Any:
        axes = entry.get("axes") if isinstance(entry, Mapping) else None
        if not isinstance(axes, Mapping) or entry.get("members"):
            return entry
        return {**entry, "members": [name for names in axes.values() for name in names]}

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if not self.members:
            raise ValueError("the suite has no members")
        strange = [name for name in self.groups if name not in self.members]
        if strange:
            raise ValueError(f"the groups {strange} are not members of the suite")
        twice = [name for name, n in Counter(self.tasks).items() if n > 1]
        if twice:
            raise ValueError(f"the suite counts {twice} twice")
        placed = [name for names in self.axes.values() for name in names]
        if self.axes and sorted(placed) != sorted(self.members):
            raise ValueError("the suite's axes must contain every member exactly once")
        return self

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every task; groups are replaced by their tasks."""
        return tuple(task for member in self.members for task in self.tasks_of(member))

    def tasks_of(self, member: str) -> tuple[str, ...]:
        """The tasks that a member averages; a member that is a task averages only itself."""
        return self.groups.get(member, (member,))

    def axis_of(self, member: str) -> str:
        """The axis of a member; empty if the suite has no axes."""
        return next((axis for axis, names in self.axes.items() if member in names), "")


def check_suites(
    tasks: Collection[str], suites: Mapping[str, Suite], offered: Callable[[], Collection[str]]
) -> None:
    """ConfigError for a suite with an unknown task, or with a group named like a task."""
    for name, suite in suites.items():
        for group in suite.groups:
            if group in tasks:
                raise ConfigError(
                    f"In the suite '{name}', the group '{group}' has the name of a task.",
                    "Its result could be mistaken for the task's.",
                    "Rename the group.",
                )
        for task in suite.tasks:
            if task not in tasks and task not in offered():
                raise ConfigError(
                    f"The suite '{name}' lists the unknown task '{task}'.",
                    "Every task of a suite must be declared under 'tasks:', or be installed.",
                    did_you_mean(task, tasks),
                )


HookKey = Literal["synth", "importer", "builder", "drafting", "audit", "scripted_partner"]
EVALUATION_ONLY = "evaluation_only"
"""Column that marks rows as evaluation-only: their terms forbid training on them."""
ORIGIN = "origin"
"""Column with the name of the user's file that a row was made from; empty for other rows."""
DRAFTED_BY = "; drafted by "
"""In a row's provenance, followed by the model that drafted a part of it."""
BOOKKEEPING: Mapping[str, Mapping[str, Any]] = {
    name: {"type": kind, "required": False, "audience": [], "identity": False}
    for name, kind in {
        "index": "any", "provenance": "any", "licence": "any", ORIGIN: "any",
        EVALUATION_ONLY: "bool",
    }.items()
}  # fmt: skip
"""Columns that any row may have: no seat sees them, and they do not affect the row's id."""

READERS = ("judge", "coach", "gold")
"""Audiences besides the seats."""


PROTOCOLS: tuple[Protocol, ...] = ("paper", "reference")


def protocol_named(text: str) -> Protocol:
    """The protocol of this name; ConfigError if there is none."""
    protocol = next((name for name in PROTOCOLS if name == text), None)
    if protocol is None:
        raise ConfigError(
            f"There is no protocol '{text}'.",
            "A task is scored as in its paper or as in the reference implementation.",
            did_you_mean(text, PROTOCOLS),
        )
    return protocol


class Metric(Strict):
    """The headline metric: its name, its scale, and whether single scores are 0 or 1."""

    name: str = "accuracy"
    binary: bool = True
    low: float = 0.0
    high: float = 1.0
    scales: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Other metric → (lowest, highest) value, for metrics other than yes/no."""
    beside: tuple[str, ...] = ()
    """Metrics that reports always show next to the headline, to reveal trade-offs."""
    less_is_better: tuple[str, ...] = ()
    """Metrics of `beside` for which lower is better."""
    headline: str = ""
    """The batch metric that is the headline; empty: the mean of the scores."""
    parts: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Batch metric that is a mean of others (the headline, or one of its parts) → label of each
    part → batch metric. A part may be such a mean itself."""
    watched: tuple[str, ...] = ()
    """Batch metrics that training monitors at every step, to detect reward hacking."""

    @model_validator(mode="after")
    def _parts_are_no_circle(self) -> Self:
        for name in self.parts:
            inside = set(self.parts[name].values())
            while new := {p for part in inside for p in self.parts.get(part, {}).values()} - inside:
                inside |= new
            if name in inside or not inside:
                raise ValueError(f"the metric '{name}' has no parts, or is a part of itself")
        return self


class Files(Strict):
    """Released file names of the task, and the `data_source` values of its rows."""

    train: tuple[str, ...] = ()
    eval: tuple[str, ...] = ()
    data_source: tuple[str, ...] = ()


class PublishedSize(Strict):
    """Sizes of the task's released rows; a plan uses them while the rows are not here."""

    train: int = Field(default=0, ge=0)
    """Number of training rows; 0: unknown."""
    eval: int = Field(default=0, ge=0)
    words: int = Field(gt=0)
    """Mean number of words in the actor's first prompt."""
    longest: int = Field(gt=0)
    """Words in the longest of these prompts."""


class FeedbackSpec(Strict):
    """The task's coaches, and the condition for feedback under `--feedback-for task`."""

    coaches: tuple[Literal["symbolic", "model"], ...] = ()
    below: float = 1.0
    """Drafts with a lower reward get feedback."""
    until_step: int | None = None
    max_words: int = Field(default=120, gt=0)
    """Longer feedback of a model coach is discarded."""
    gold_in_reference: bool = False
    """Whether a model coach sees the gold answer under `reference`."""
    kind: Literal["coach", "worked_example"] = "coach"
    """`worked_example` reveals the answer; used only on request."""


class TaskSpec(Strict):
    """One entry of `tasks:`."""

    title: str
    summary: str
    axis: str = ""
    folder: str = ""
    """A built-in benchmark's folder in `soulkit/tasks/`; other tasks: the tasks file's folder."""
    module: str = ""
    """`module:Class`. Empty and without `kind`: *rows only*; rows can be read and checked but not
    played."""
    declaration: Declaration | None = None
    """The keys of a task without code; `kit/declared/keys.py` moves them here."""
    reference: str = ""
    """`module:Class` to use under `--protocol reference`; empty: the same class."""
    binder: str = ""
    """Rows-only tasks: `module:Class` that binds rows, if the columns alone are not enough."""
    synth: str = ""
    """`module:function` that generates rows, for `soul data synth` and `synth:N`."""
    importer: str = ""
    """`module:function` that reads original files, for `soul data import`."""
    builder: str = ""
    """`module:function` that builds rows from several files, for `soul data build`."""
    drafting: str = ""
    """`module:function` that defines what one model drafts and another filters, for `soul data
    build --drafter`."""
    audit: str = ""
    """`module:function` that checks labels by rules, for `soul data audit`."""
    scripted_partner: str = ""
    """`module:function` that acts as a scripted partner, for `soul serve --script`."""
    seats: dict[str, Role]
    players: DefaultPlayers = DefaultPlayers()
    """The models of roles that the user does not set."""
    samples: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    """Purpose of a question → number of samples per judge; 1 by default."""
    columns: dict[str, Column]
    unpack: tuple[str, ...] = ()
    """Keys of a row whose value is an object, or its JSON text, with further columns."""
    cluster: Texts = ()
    """Columns that together identify the resampling unit (the story); empty: the row itself."""
    person: str = ""
    """Column that names the row's person. All rows of a person form one cluster; `cluster` applies
    to rows without a person."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Breakdown name → column."""
    metric: Metric = Metric()
    files: Files = Files()
    rows: str = ""
    """A file with rows beside the tasks file, which checks, plans and evaluations read without
    `--data`; training does not. Or `file.py:function`, the same as `synth: file:function`."""
    size: PublishedSize | None = None
    formats: tuple[str, ...] = ()
    """Original file formats that the importer reads."""
    original: tuple[str, ...] = ()
    """Columns that only the original release has. A record with such a column is read by the
    importer, never as a row."""
    release_mark: str = ""
    """A file that marks its folder as the original release."""
    sampling: dict[str, FiniteFloat | int] = Field(default_factory=dict)
    """Defaults of the actor's sampling (temperature, max_tokens)."""
    feedback: FeedbackSpec = FeedbackSpec()
    options: dict[str, Any] = Field(default_factory=dict)
    """The task's own options, such as turn limits."""
    evaluation_only: bool = False
    """Whether all rows are for evaluation only, because the terms of the data forbid training."""
    published: str = ""
    """The task's row in tables of published results, if there is one."""
    citation: str = ""
    licence: str = ""
    url: str = ""
    _home: Home = PrivateAttr(default=Home())

    @model_validator(mode="before")
    @classmethod
    def _with_bookkeeping(cls, entry: Any) -> Any:
        columns = entry.get("columns") if isinstance(entry, Mapping) else None
        file, colon, function = str(isinstance(columns, Mapping) and entry.get("rows")).partition(
            ":"
        )
        if colon and file.endswith(".py"):
            code = file.removesuffix(".py").replace("/", ".")
            entry = {**entry, "rows": "", "synth": f"{code}:{function}"}
        if not isinstance(columns, Mapping):
            return entry
        return {**entry, "columns": {**columns, **{n: c for n, c in BOOKKEEPING.items()
                                                   if n not in columns}}}  # fmt: skip

    @property
    def home(self) -> Home:
        """The folder of the task."""
        return self._home

    def at(self, home: Home) -> Self:
        """The same declaration with its home set."""
        housed = self.model_copy()
        housed._home = home
        return housed

    def played(self, *, training: bool, options: Mapping[str, Any]) -> Self:
        """The declaration as a run uses it. `training` selects the budgets and players of training;
        `options` replace the task's options of the same name, and others are ignored."""
        budgets = {
            name: column.model_copy(update={"max_words": column.train_words})
            for name, column in self.columns.items() if training and column.train_words
        }  # fmt: skip
        own_options = {
            name: option_value(name, value, self.options[name])
            for name, value in options.items()
            if name in self.options and value is not None
        }
        changes = {
            "columns": {**self.columns, **budgets},
            "options": {**self.options, **own_options},
            "players": self.players.in_training() if training else self.players,
        }
        return self.model_copy(update=changes)

    def hook(self, name: str, key: HookKey) -> Hook | None:
        """The function that is named under `key`, or None."""
        reference: str = getattr(self, key)
        return hook(name, key, reference, self.home) if reference else None

    @property
    def rows_file(self) -> Path:
        """The file that `rows` names."""
        return self.home.folder / self.rows

    @property
    def rows_only(self) -> bool:
        """Whether rows of the task can be read and checked but not played."""
        return not self.module and self.declaration is None

    @model_validator(mode="after")
    def _names_are_declared(self) -> Self:
        problems = []
        if "actor" not in self.seats.values():
            problems.append(Problem(("seats",), "no seat has the role 'actor'"))
        if self.original and not self.importer:
            why = "it names columns for an importer, but there is no 'importer'"
            problems.append(Problem(("original",), why))
        readers, columns = (*self.seats, *READERS), self.columns
        for name, column in columns.items():
            problems += _strange(column.audience, readers, "columns", name, "audience")
        problems += _strange(self.cluster, columns, "cluster")
        problems += _strange(as_list(self.person or ()), columns, "person")
        problems += _strange(self.tags.values(), columns, "tags")
        if problems:
            raise Misfit(*problems)
        return self


def option_value(name: str, value: Any, usual: Any) -> Any:
    """A command-line option, converted to the type of its default; ConfigError if impossible."""
    kind = type(usual)
    if not isinstance(value, str) or kind not in _KINDS:
        return value
    try:
        read = _TRUTH[value.strip().lower()] if kind is bool else kind(value)
        size = float(read)  # larger than any float: not a sensible value
    except (KeyError, ValueError, OverflowError) as error:
        raise _no_option(name, value, usual) from error
    least = 1 if _LENGTH.fullmatch(name) else 0
    # In this order, because every comparison with NaN is false.
    if kind is not bool and not least <= size < math.inf:
        raise _no_option(name, value, usual, f", {least} or more")
    return read


def _no_option(name: str, value: str, usual: Any, limits: str = "") -> ConfigError:
    shown = str(usual).lower()
    return ConfigError(
        f"The option {name} cannot be '{value[:60]}'.",
        f"It must be {_KINDS[type(usual)]}{limits} (default: {shown}).",
        f"For example: {name}={shown}",
    )


_LENGTH = re.compile(r"(max|paper|reference|refined)_(turns|rounds|messages)")
"""Limits of episode length, at least 1: an actor without a turn must not score as silent."""
_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}
_TRUTH = {"true": True, "false": False, "yes": True, "no": False}


def _strange(used: Iterable[str], declared: Iterable[str], *spot: str) -> Iterator[Problem]:
    names = list(declared)
    for name in used:
        if name not in names:
            yield Problem(spot, f"there is no '{name}'. {did_you_mean(name, names)}")


def cannot_play(
    names: Sequence[str], playable: Sequence[str] = (), suite: str | None = None
) -> ConfigError:
    """The error for rows-only tasks in a run; lists tasks that can be played."""
    listed = ", ".join(names)
    what = f"The task '{listed}' cannot be played by this version."
    why = "tasks.yaml names no class for it; its rows can only be read and checked (soul data)."
    if len(names) > 1:
        what = f"{len(names)} tasks cannot be played by this version: {listed}."
        why = "tasks.yaml names no class for them; their rows can only be read and checked."
    if suite:
        what = f"Suite '{suite}': {what[0].lower()}{what[1:]}"
    name = "Use --playable to run the others, or name" if suite else "Name"
    tasks = f"{name} tasks that can be played: --task {','.join(playable)}"
    return ConfigError(what, why, tasks if playable else "To list them: soul tasks list")


class RegistryFile(Strict):
    tasks: dict[str, TaskSpec] = Field(default_factory=dict)
    suites: dict[str, Suite] = Field(default_factory=dict)
