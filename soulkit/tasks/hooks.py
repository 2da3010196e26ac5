"""The functions that a task's declaration names beside its class, and the options they take.

    synth: rows:make_rows          (n, seed, …) → rows            soul data synth
    importer: importer:read        (path, …) → Imported           soul data import
    builder: importer:build        (path, …) → Imported           soul data build
    drafting: build:drafts         (path, prompts, …) → Drafts    soul data build --drafter
    audit: audit:audit_labels      (path, examples, …) → LabelAudit   soul data audit
    scripted_partner: visitor:line (messages) → str               soul serve partner

Keyword-only parameters of such a function are its options: `*, half: Literal["cotp", "vp"]` is
`--half cotp` or `--half vp` on the command line. The keyword `task`, where there is one, is filled
in with the name of the task: for functions that several tasks share.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.errors import ConfigError, did_you_mean
from soulkit.tasks.home import Home

COMMAND_FLAGS = ("--out", "--rows", "--seed", "--tasks", "--trust", "--json", "--drafter",
                 "--filter", "--max-cost")  # fmt: skip
"""What the commands that call hooks take themselves: for slips of the pen."""
TASK_KEYWORD = "task"
"""The keyword that a function gets the name of the task by."""


@dataclass(frozen=True, slots=True)
class HookOption:
    """One option of a hook: what it is called and what it may be."""

    name: str
    kind: Any
    default: Any

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, where only some are."""
        literals = [k for k in _kinds(self.kind) if typing.get_origin(k) is typing.Literal]
        return tuple(str(value) for kind in literals for value in typing.get_args(kind))

    def describe(self) -> str:
        """`--half cotp|vp|all (cotp)`."""
        kinds = [k.__name__ for k in _kinds(self.kind) if isinstance(k, type)]
        shape = "|".join(self.choices) or (kinds or ["text"])[0].upper()
        default = "" if self.default in (None, inspect.Parameter.empty) else f" ({self.default})"
        return f"{self.flag} {shape}{default}"

    def read(self, text: str, task: str) -> Any:
        """The value that `text` stands for; ConfigError when it is none."""
        if self.choices:
            return text if text in self.choices else self._refuse(text, task, self.choices)
        for kind in _kinds(self.kind):
            if kind in (int, float, Path, str):
                try:
                    return kind(text)
                except ValueError:
                    self._refuse(text, task, (f"{kind.__name__} values",))
        return text

    def _refuse(self, text: str, task: str, allowed: tuple[str, ...]) -> None:
        raise ConfigError(
            f"'{self.flag} {text}' does not fit the task '{task}'.",
            f"Allowed: {', '.join(allowed)}.",
            f"Mend {self.flag}, or leave it out.",
        )


def _kinds(kind: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation, None left out."""
    if typing.get_origin(kind) is typing.Literal:
        return (kind,)
    parts = typing.get_args(kind) or (kind,)
    return tuple(part for part in parts if part is not type(None))


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of one task."""

    task: str
    function: Callable[..., Any]

    @property
    def options(self) -> dict[str, HookOption]:
        kinds = typing.get_type_hints(self.function)
        only = inspect.Parameter.KEYWORD_ONLY
        return {
            name: HookOption(name, kinds.get(name, str), parameter.default)
            for name, parameter in inspect.signature(self.function).parameters.items()
            if parameter.kind is only and name != TASK_KEYWORD
        }

    def has_default(self, name: str) -> bool:
        """Whether the parameter `name` may be left out."""
        parameter = inspect.signature(self.function).parameters.get(name)
        return parameter is not None and parameter.default is not inspect.Parameter.empty

    def __call__(
        self, *values: Any, options: Mapping[str, str] | None = None, **keywords: Any
    ) -> Any:
        """Call the function with options as the command line gives them, by flag or by name."""
        keywords |= {
            o.name: o.read(text, self.task) for o, text in self._chosen_options(options or {})
        }
        if TASK_KEYWORD in inspect.signature(self.function).parameters:
            keywords[TASK_KEYWORD] = self.task
        return self.function(*values, **keywords)

    def _chosen_options(self, options: Mapping[str, str]) -> list[tuple[HookOption, str]]:
        declared = self.options
        chosen: list[tuple[HookOption, str]] = []
        for flag, text in options.items():
            name = flag.lstrip("-").replace("-", "_")
            if name not in declared:
                raise self._no_option(flag, declared)
            chosen.append((declared[name], text))
        return chosen

    def _no_option(self, flag: str, options: Mapping[str, HookOption]) -> ConfigError:
        flags = [option.flag for option in options.values()]
        return ConfigError(
            f"'{flag}' is no option for the task '{self.task}'.",
            f"It has {', '.join(o.describe() for o in options.values())}."
            if options
            else "The task has no options of its own here.",
            did_you_mean(flag, [*flags, *COMMAND_FLAGS]),
        )


def hook(task: str, key: str, reference: str, home: Home) -> Hook:
    """The function that `key: reference` of a declaration names; ConfigError when there is none."""
    try:
        function = home.load(reference)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise _unloadable(task, key, reference, home, f"Python says: {error}.") from error
    if not callable(function):
        raise _unloadable(task, key, reference, home, "It is no function.")
    return Hook(task, function)


def _unloadable(task: str, key: str, reference: str, home: Home, why: str) -> ConfigError:
    return ConfigError(
        f"'{key}: {reference}' of the task '{task}'{home.origin} cannot be loaded.",
        why,
        f"Write {key} as 'file:function', with file.py in the task's folder; see docs/tasks.md.",
    )
