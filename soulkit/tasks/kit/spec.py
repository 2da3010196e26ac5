"""The schema of `tasks.yaml`: tasks with their columns, metrics and default players, and suites.

It is strict: an unknown key is an error, and so is a seat, column or task that is used but not
declared. docs/reference/task-keys.md explains every key.

Default players are models by role; a player that the user names replaces them:

    players:
      judge: {model: gpt-5.4, effort: low}
      training: {judge: {model: gpt-5-nano, effort: low}}        # where training has another one
      reference: {coach: {model: gpt-5.4-nano, effort: low}}     # where the published code differs
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from soulkit.data.rows import Column
from soulkit.errors import ConfigError, did_you_mean
from soulkit.tasks.kit.user_code import Home, Hook, hook
from soulkit.types import Protocol, Role


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DefaultPlayer(Strict):
    """A model, and how long it thinks."""

    model: str = Field(min_length=1)
    effort: str = ""
    """`reasoning_effort`; empty: the server's own."""

    def __str__(self) -> str:
        return f"{self.model} {self.effort}".strip()


class RoleDefaults(Strict):
    """Role → who fills it."""

    judge: DefaultPlayer | None = None
    auditor: DefaultPlayer | None = None
    partner: DefaultPlayer | None = None
    environment: DefaultPlayer | None = None
    coach: DefaultPlayer | Literal["symbolic", "none"] | None = None
    """`symbolic`: the task's rules, in the place of a paper's model; `none`: there is no feedback.
    Nothing: the judge's model on a judged task, else the task's rules."""

    def of(self, role: str) -> DefaultPlayer | str | None:
        """Who fills `role`; None for nobody."""
        player: DefaultPlayer | str | None = getattr(self, role, None)
        return player


class DefaultPlayers(RoleDefaults):
    """The players under `paper`; those of training and of `reference` where they differ."""

    training: RoleDefaults = RoleDefaults()
    """Rollouts, dev scores and feedback of a training run; `reference` goes before it."""
    reference: RoleDefaults = RoleDefaults()

    def words(self) -> str:
        """`judge gpt-5.4 low, …; in training judge …; under reference judge …`; empty for none."""
        parts = {"": _words(self), "in training ": _words(self.training),
                 "under reference ": _words(self.reference)}  # fmt: skip
        return "; ".join(f"{when}{text}" for when, text in parts.items() if text)

    def in_training(self) -> Self:
        """The same declaration with the players of training in the place of evaluation's."""
        others = {role: self.training.of(role) for role in RoleDefaults.model_fields}
        return self.model_copy(update={role: who for role, who in others.items() if who})

    def under(self, protocol: Protocol, role: str) -> DefaultPlayer | str | None:
        """Who fills `role` under a protocol; None for nobody."""
        other = self.reference.of(role) if protocol == "reference" else None
        return other or self.of(role)


def _words(defaults: RoleDefaults) -> str:
    players = {role: defaults.of(role) for role in RoleDefaults.model_fields}
    return ", ".join(f"{role} {who}" for role, who in players.items() if who)


class Suite(Strict):
    """A named selection of tasks; a member is a task, or a group of tasks that counts as one."""

    title: str = ""
    members: tuple[str, ...] = ()
    """In the published order; not needed beside `axes` in that order."""
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Member → the tasks that it is the mean of."""
    axes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Axis → its members."""
    average: Literal["", "macro"] = ""
    """`macro`: the mean over members, each counting alike; empty: no average."""
    parts: bool = False
    """Whether a table has a line for every task of a group, and counts tasks beside members."""
    published: tuple[str, ...] = ()
    """Names of published tables to stand beside it."""

    @model_validator(mode="before")
    @classmethod
    def _as_list(cls, entry: Any) -> Any:
        return {"members": tuple(dict.fromkeys(entry))} if isinstance(entry, list) else entry

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
            raise ValueError("it has no members")
        strange = [name for name in self.groups if name not in self.members]
        if strange:
            raise ValueError(f"the groups {strange} are no members")
        twice = [name for name, n in Counter(self.tasks).items() if n > 1]
        if twice:
            raise ValueError(f"{twice} would be counted twice")
        placed = [name for names in self.axes.values() for name in names]
        if self.axes and sorted(placed) != sorted(self.members):
            raise ValueError("its axes do not hold every member once")
        return self

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every task, those of groups in their members' place."""
        return tuple(task for member in self.members for task in self.tasks_of(member))

    def tasks_of(self, member: str) -> tuple[str, ...]:
        """The tasks that a member is the mean of; a task is its own."""
        return self.groups.get(member, (member,))

    def axis_of(self, member: str) -> str:
        """The axis of a member; empty where the suite has none."""
        return next((axis for axis, names in self.axes.items() if member in names), "")


def check_suites(
    tasks: Collection[str], suites: Mapping[str, Suite], offered: Callable[[], Collection[str]]
) -> None:
    """ConfigError for a suite with an unknown task, or with a group that is called like a task."""
    for name, suite in suites.items():
        for group in suite.groups:
            if group in tasks:
                raise ConfigError(
                    f"In the suite '{name}' the group '{group}' is itself a task.",
                    "Its line could mean the task or the mean of the group.",
                    "Give the group another name.",
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
"""Column of rows that may be evaluated on and never trained on: their terms say so."""
ORIGIN = "origin"
"""Column of rows that were made of a file of one's own: its name. Others have none."""
DRAFTED_BY = "; drafted by "
"""In the provenance of a row: who drafted a part of it."""
BOOKKEEPING: Mapping[str, Mapping[str, Any]] = {
    name: {"type": kind, "required": False, "audience": [], "identity": False}
    for name, kind in {
        "index": "any", "provenance": "any", "licence": "any", ORIGIN: "any",
        EVALUATION_ONLY: "bool",
    }.items()
}  # fmt: skip
"""Columns that any row may have: nobody sees them, and they are no part of what a row says."""

READERS = ("judge", "coach", "gold")
"""Who may see a column without sitting at the table."""


PROTOCOLS: tuple[Protocol, ...] = ("paper", "reference")


def protocol_named(text: str) -> Protocol:
    """The protocol of this name; ConfigError where there is none."""
    protocol = next((name for name in PROTOCOLS if name == text), None)
    if protocol is None:
        raise ConfigError(
            f"There is no protocol '{text}'.",
            "A task scores as its paper says, or as the reference implementation does.",
            f"Known: {', '.join(PROTOCOLS)}. {did_you_mean(text, PROTOCOLS)}",
        )
    return protocol


class Metric(Strict):
    """The headline metric: its name, its scale, and whether single values are 0 or 1."""

    name: str = "accuracy"
    binary: bool = True
    low: float = 0.0
    high: float = 1.0
    scales: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Other metric → its lowest and highest value, where it is more than yes or no."""
    beside: tuple[str, ...] = ()
    """Metrics that a report always shows beside the headline: what it must not be bought with."""
    less_is_better: tuple[str, ...] = ()
    """Those of them that are worse the higher they are."""
    headline: str = ""
    """The metric over the batch that is the headline; empty: the mean of the scores."""
    parts: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Metric over the batch that is the mean of others (the headline, or a part of it) → label of
    each part → metric over the batch. A part may be such a mean itself."""
    watched: tuple[str, ...] = ()
    """Metrics over the batch that training watches step by step: no reward may cost them."""

    @model_validator(mode="after")
    def _parts_are_no_circle(self) -> Self:
        for name in self.parts:
            inside = set(self.parts[name].values())
            while new := {p for part in inside for p in self.parts.get(part, {}).values()} - inside:
                inside |= new
            if name in inside or not inside:
                raise ValueError(f"the parts of '{name}' are missing or contain it")
        return self


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
    max_words: int = Field(default=120, gt=0)
    """A model coach that writes more gives no feedback."""
    gold_in_reference: bool = False
    """Whether a model coach is told the right answer under `reference`."""
    kind: Literal["coach", "worked_example"] = "coach"
    """`worked_example` gives the answer away by design: used only where a run asks for it."""


class TaskSpec(Strict):
    """One entry of `tasks:`."""

    title: str
    summary: str
    axis: str = ""
    folder: str = ""
    """Of a built-in benchmark: its folder in `soulkit/tasks/`; else where the tasks file lies."""
    module: str = ""
    """`module:Class`. Empty: *rows only*; rows can be read and checked, and not played."""
    reference: str = ""
    """`module:Class` in its place under `--protocol reference`; empty: the same class."""
    binder: str = ""
    """Rows only: `module:Class` that binds rows whose columns alone do not tell enough."""
    synth: str = ""
    """`module:function` that makes rows, for `soul data synth` and `synth:N`."""
    importer: str = ""
    """`module:function` that reads original files, for `soul data import`."""
    builder: str = ""
    """`module:function` that puts rows together from several files, for `soul data build`."""
    drafting: str = ""
    """`module:function` that says what a model drafts for rows and another filters, for `soul data
    build --drafter`."""
    audit: str = ""
    """`module:function` that compares labels with rules, for `soul data audit`."""
    scripted_partner: str = ""
    """`module:function` that speaks for the partner by script, for `soul serve partner`."""
    seats: dict[str, Role]
    players: DefaultPlayers = DefaultPlayers()
    """Who fills a role that no user fills."""
    samples: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    """Purpose of a question → opinions of each judge on it; 1 where it is not named."""
    columns: dict[str, Column]
    unpack: tuple[str, ...] = ()
    """Keys of a row that hold an object, or its JSON text, whose keys are columns themselves."""
    cluster: tuple[str, ...] = ()
    """Columns whose values together name the resampling unit (the story); empty: the row itself."""
    person: str = ""
    """Column that names the person whose row it is. Rows of one person are one cluster, whatever
    `cluster` says; it holds for rows that name nobody."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Break-down name → column."""
    metric: Metric = Metric()
    files: Files = Files()
    formats: tuple[str, ...] = ()
    """Original file formats that the importer reads."""
    original: tuple[str, ...] = ()
    """Columns that only records of the original release have, and no row of the task: what has one
    is read by the importer and never as a row."""
    release_mark: str = ""
    """A file whose folder as a whole is the original release."""
    sampling: dict[str, float | int] = Field(default_factory=dict)
    """Defaults of the actor's sampling (temperature, max_tokens)."""
    feedback: FeedbackSpec = FeedbackSpec()
    options: dict[str, Any] = Field(default_factory=dict)
    """Numbers of the task itself (turn limits)."""
    evaluation_only: bool = False
    """Whether training refuses the task, whatever its rows say: the terms of its data forbid it."""
    published: str = ""
    """The row of the published results, when there is one."""
    citation: str = ""
    licence: str = ""
    url: str = ""
    _home: Home = PrivateAttr(default=Home())

    @model_validator(mode="before")
    @classmethod
    def _with_bookkeeping(cls, entry: Any) -> Any:
        columns = entry.get("columns") if isinstance(entry, Mapping) else None
        if not isinstance(columns, Mapping):
            return entry
        return {**entry, "columns": {**columns, **{n: c for n, c in BOOKKEEPING.items()
                                                   if n not in columns}}}  # fmt: skip

    @property
    def home(self) -> Home:
        """The folder of the task."""
        return self._home

    def at(self, home: Home) -> Self:
        """The same declaration, in its folder."""
        housed = self.model_copy()
        housed._home = home
        return housed

    def played(self, *, training: bool, options: Mapping[str, Any]) -> Self:
        """The declaration as a run plays it: with the budgets and players of training, and with the
        run's `options` that the task has."""
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
        """The function that is named under `key`, None where there is none."""
        reference: str = getattr(self, key)
        return hook(name, key, reference, self.home) if reference else None

    @property
    def rows_only(self) -> bool:
        """Whether this version can only read and check rows of the task."""
        return not self.module

    @model_validator(mode="after")
    def _names_are_declared(self) -> Self:
        if "actor" not in self.seats.values():
            raise ValueError("no seat has the role 'actor'")
        for name, column in self.columns.items():
            _check_names(
                column.audience, (*self.seats, *READERS), f"the audience of column '{name}'"
            )
        if self.original and not self.importer:
            raise ValueError("'original' names columns for an importer, and there is no 'importer'")
        _check_names(self.cluster, self.columns, "'cluster'")
        _check_names([self.person] if self.person else [], self.columns, "'person'")
        _check_names(self.tags.values(), self.columns, "'tags'")
        return self


def option_value(name: str, value: Any, usual: Any) -> Any:
    """An option from the command line, of the type of its usual value; else ConfigError."""
    kind = type(usual)
    if not isinstance(value, str) or kind not in _KINDS:
        return value
    try:
        read = _TRUTH[value.strip().lower()] if kind is bool else kind(value)
        size = float(read)  # what no float holds is no sensible number of anything
    except (KeyError, ValueError, OverflowError) as error:
        raise _no_option(name, value, usual) from error
    least = 1 if _LENGTH.fullmatch(name) else 0
    # Written this way round, because nothing is true of NaN.
    if kind is not bool and not least <= size < math.inf:
        raise _no_option(name, value, usual, f", {least} or more")
    return read


def _no_option(name: str, value: str, usual: Any, limits: str = "") -> ConfigError:
    shown = str(usual).lower()
    return ConfigError(
        f"The option {name} cannot be '{value[:60]}'.",
        f"It is {shown} by itself, and so it takes {_KINDS[type(usual)]}{limits}.",
        f"Write {name}={shown}, for example.",
    )


_LENGTH = re.compile(r"(max|paper|reference|refined)_(turns|rounds|messages)")
"""How long an episode may be. An actor that is never asked must not score as one that is silent."""
_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}
_TRUTH = {"true": True, "false": False, "yes": True, "no": False}


def _check_names(used: Iterable[str], declared: Iterable[str], where: str) -> None:
    names = list(declared)
    for name in used:
        if name not in names:
            raise ValueError(f"{where} names '{name}'. {did_you_mean(name, names)}")


def cannot_play(
    names: Sequence[str], playable: Sequence[str] = (), suite: str | None = None
) -> ConfigError:
    """The error of rows-only tasks that are to be played, and what can be played instead."""
    listed = ", ".join(names)
    what = f"The task '{listed}' cannot be played by this version."
    why = (
        "Its rows can be read and checked (soul data), and tasks.yaml names no class that plays it."
    )
    if len(names) > 1:
        what = f"{len(names)} tasks cannot be played by this version: {listed}."
        why = (
            "Their rows can be read and checked (soul data), and tasks.yaml names no class for "
            "them; leaving them out silently would change what is measured."
        )
    if suite:
        what = f"Of the suite '{suite}', {what[0].lower()}{what[1:]}"
    name = "Play the rest with --playable, or name" if suite else "Name"
    tasks = f"{name} tasks that it can play: --task {','.join(playable)}"
    return ConfigError(what, why, tasks if playable else "See which can: soul tasks list")


class RegistryFile(Strict):
    tasks: dict[str, TaskSpec] = Field(default_factory=dict)
    suites: dict[str, Suite] = Field(default_factory=dict)
