"""Suites: which tasks stand together in a table, in which order, and what is averaged over them.

A plain list of names is a suite without any average: tasks to play together. A declared one may
say more:

    NAME:
      title: ...
      axes:                        # axis → its members, in the order of the published table
        EVAL: [GROUP, TASK]
      groups: {GROUP: [TASK_A, TASK_B]}   # a member that is the mean of several tasks
      parts: true                  # tables show the tasks of groups, too
      average: macro               # every member counts alike, in each axis and in the suite
      published: [ditto_8b_card]   # tables of others that stand beside it

Source of the built-in ones: decisions §1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from soulkit.errors import ConfigError, did_you_mean


class Suite(BaseModel):
    """A named selection of tasks; a member is a task, or a group of tasks that counts as one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
        """A bare list of tasks, in which a second mention adds nothing."""
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
    """ConfigError for a suite that lists neither a declared nor an installed task, or whose
    group is called like one. `offered` looks at what is installed, only where it has to."""
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
