"""Command line options: the shared ones, and those made from settings.

A command made from settings has a Settings class and traits that select its fields (the argument
`only` of `setting`). The options with their help, defaults, choices and sections follow from these
fields, and the command line is read back into settings. The class is imported only when the command
is called, listed in full or completed.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from typer.core import TyperCommand, TyperGroup

from soulkit.cli.parse_errors import CommandTable, OnceCommand
from soulkit.errors import ConfigError
from soulkit.option_texts import (
    ADAPTERS,
    BY_TASK,
    given_twice,
    plain_parts,
    settings_from_texts,
    split_names,
    text_form,
)
from soulkit.parse import ParseError, parse_yaml

if TYPE_CHECKING:
    from pydantic import BaseModel

    from soulkit.config import Settings
    from soulkit.tasks.kit.registry import Registry


OUT = "Run folder. The same command resumes it. [default: a new one under runs/]"
CONFIG = "YAML file with settings, such as a run's config.yaml; options override it."
SET = "Set any other setting. Repeatable."
TRUST = "Allow settings from a run folder that is not your own."
DRY_RUN = "Print the estimated calls, tokens, cost and time, and stop."
BOUNDS = "In a plan, also print the maximum of calls and cost."
JSON = "Print only one JSON document to stdout."
Trust = Annotated[bool, typer.Option("--trust", help=TRUST)]
Json = Annotated[bool, typer.Option("--json", help=JSON)]
MaxContext = Annotated[int | None, typer.Option("--max-context", metavar="N", min=1,
    help="Maximum tokens of prompt and reply together, of models on this machine. "
    "[default: what prompts and replies need]")]  # fmt: skip
Adapter = Annotated[str | None, typer.Option("--adapter", metavar="FOLDER",
    help="LoRA adapter of MODEL.")]  # fmt: skip
Device = Annotated[str, typer.Option("--device", metavar="DEVICE",
    help="Device of the model: auto, cpu, cuda.")]  # fmt: skip
Side = Annotated[str, typer.Option("--side", metavar="SIDE",
    help="The person's side: human, or a speaker's name.")]  # fmt: skip
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Random seed.")]
# The parser does not check files: the functions that read them raise better errors.
TaskFiles = Annotated[list[Path] | None, typer.Option("--tasks", metavar="FILE", readable=False,
    help="YAML file that declares your own tasks.")]  # fmt: skip


def registry_of(files: Sequence[Path] | None, *, trust: bool) -> Registry:
    """The built-in tasks and those in `files`.

    TrustError for a file in a run folder, whose code is not known to be safe, unless `trust`.
    """
    from soulkit.tasks.kit.registry import load_registry
    from soulkit.trust import inside_runs, refuse_foreign

    for file in files or ():
        if inside_runs({"tasks_file": file}) and not trust:
            refuse_foreign(file, {"tasks_file": str(file)})
    return load_registry(*(files or ()))


def names_from(kind: str) -> Callable[..., list[str]]:
    """A shell completion for `tasks`, `suites` or `methods`; completes the last name of a list."""

    def complete(ctx: typer.Context, args: list[str], incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in _names(kind) if name.startswith(last)]

    return complete


def _names(kind: str) -> Sequence[str]:
    if kind == "engines":
        from soulkit.models.vllm.settings import ENGINES

        return ENGINES
    if kind == "methods":
        from soulkit.train.objectives.base import built_in

        return list(built_in())
    from soulkit.tasks.kit.registry import load_registry

    registry = load_registry()
    return list(registry.specs if kind == "tasks" else registry.suites)


COMPLETERS = {kind: names_from(kind) for kind in ("tasks", "suites", "methods", "engines")}


SECTIONS = (
    "Comparison", "Task and model", "Check", "Rollouts", "Sampling", "Players", "Feedback",
    "Objective", "Optimizer and memory", "Calls", "Machine", "Run",
)  # fmt: skip
"""The sections of a help text, in reading order."""
FIRST = ("--model", "--base-url", "--adapter", "--task", "--suite", "--data", "--limit")
"""The options that every user needs; they come first in their section."""

EVERYDAY = frozenset({
    "--model", "--task", "--suite", "--data", "--limit", "--methods", "--seeds", "--experts",
    "--gate", "--steps", "--prompts", "--group-size", "--side", "--partner", "--judge", "--coach",
    "--endpoints", "--lr", "--max-cost", "--yes", "--engine", "--eval-every", "--seed", "--out",
    "--config", "--set", "--dry-run", "--json",
})  # fmt: skip
"""The options that `--help` shows for a command made from settings; `--help-all` shows all."""
HELP_ALL = "help_all"
FEW = 30
"""`--help` shows all options of a command with at most this many."""

Body = Callable[[dict[str, Any]], None]
Rows = Callable[[Sequence[str], Sequence[str]], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its flag, the type of its value, and the setting that it sets."""

    flag: str
    kind: Any
    help: str
    section: str = "Run"
    setting: str = ""
    """Dotted name of the setting; empty for options such as --json."""
    default: str = ""
    """Default as help shows it."""
    metavar: str | None = None
    complete: str | None = None
    required: bool = False
    """Whether the command needs it, on the command line or in a settings file."""
    form: str = ""
    """How several texts are read together; see `text_form`."""
    min: int | None = None
    """Smallest number allowed."""

    @property
    def name(self) -> str:
        """The name of the parameter in Python."""
        return self.flag.split("/")[0].lstrip("-").replace("-", "_")

    @property
    def choices(self) -> tuple[str, ...]:
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()


COMMON = (
    Option("--out", Path, OUT),
    Option("--config", Path, CONFIG, metavar="FILE"),
    Option("--set", list[str], SET, metavar="NAME=VALUE"),
    Option("--trust", bool, TRUST),
    Option("--dry-run", bool, DRY_RUN),
    Option("--bounds", bool, BOUNDS),
    Option("--json", bool, JSON),
)
"""Options of every command that makes a run folder from settings."""
JUNIT = Option("--junit", Path, "Write the outcomes of the gates as JUnit XML.", metavar="FILE")
PILOT = Option(
    "--pilot", int, "In a plan, play N rows first and measure the cost on them. The run continues "
    "with the other rows.", metavar="N", min=1,
)  # fmt: skip


# --- from settings to options ---------------------------------------------------------------------


def options_for(kind: type[Settings], traits: frozenset[str]) -> list[Option]:
    """The options of a command with these traits, by section."""
    return in_reading_order([*_settings_options(kind, traits), *COMMON])


def in_reading_order(options: Iterable[Option]) -> list[Option]:
    """Options by section; in each section, those in FIRST come first."""

    def place(option: Option) -> tuple[int, int]:
        first = FIRST.index(option.flag) if option.flag in FIRST else len(FIRST)
        return SECTIONS.index(option.section), first

    return sorted(options, key=place)


def _settings_options(
    kind: type[BaseModel], traits: frozenset[str], under: str = ""
) -> Iterator[Option]:
    from soulkit.config import about, flag_of, nested_settings

    for name, info in kind.model_fields.items():
        facts = about(info)
        if not _matters(kind, name, facts, traits):
            continue
        flag = flag_of(name, info, under)
        if flag is None:
            group = nested_settings(info.annotation)
            if group is not None and not under:
                yield from _settings_options(group, traits, name)
            continue
        setting = f"{under}.{name}" if under else name
        value = kind_of(info.annotation, facts["metavar"])
        metavar = facts["metavar"] if typing.get_origin(value) is not Literal else None
        yield Option(
            flag, value, info.description or "", facts["section"], setting,
            default_text(info), metavar, facts["complete"], info.is_required(),
            text_form(info.annotation, metavar),
        )  # fmt: skip


def _matters(
    kind: type[BaseModel], name: str, facts: Mapping[str, Any], traits: frozenset[str]
) -> bool:
    """Whether a field is declared by `setting` and applies to these commands or methods."""
    if not facts or (facts["only"] and not traits & set(facts["only"])):
        return False
    owners = getattr(kind, "owners", None)
    return owners is None or bool(traits & owners(name))


def kind_of(annotation: Any, metavar: str | None) -> Any:
    """The type of an option's value: choice, number, switch, file, text, or a list."""
    parts = plain_parts(annotation)
    if metavar in (BY_TASK, ADAPTERS):
        return list[str]
    if len(parts) == 1:
        part = parts[0]
        if typing.get_origin(part) is Literal or part in (bool, int, float):
            return part
        if typing.get_origin(part) in (dict, tuple, list):
            return list[str]
    return Path if metavar in ("FILE", "FOLDER") else str


def default_text(info: Any) -> str:
    """A field's default as help and documentation show it; empty for a required field."""
    from soulkit.config import about

    if info.is_required():
        return ""
    default = info.get_default(call_default_factory=True)
    if default is None or default in ((), {}, []):
        return str(about(info).get("unset") or "none")
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default.value if isinstance(default, Enum) else default)


# --- from the command line to settings ------------------------------------------------------------


def settings_from(
    options: Sequence[Option], values: Mapping[str, Any], rows: Rows, tasks: Sequence[str] = ()
) -> dict[str, Any]:
    """The options given on the command line, under the names of their settings.

    `rows` parses --data for the tasks in --task, else for `tasks`, which come from a settings file.
    """
    settings: dict[str, Any] = {}
    names = [text.partition(":")[0] for text in split_names(values.get("task"))] or list(tasks)
    for option in options:
        value = values.get(option.name)
        if not option.setting or value is None or value == []:
            continue
        if option.setting == "data":
            settings["data"] = rows(value, names)
        elif option.setting == "eval_data":
            settings["eval_data"] = rows(value, split_names(values.get("eval_task")))
        else:
            plain = str(value) if isinstance(value, Path) else value
            settings |= settings_from_texts(option.setting, option.form, option.flag, plain)
    assigned = assignments(values.get("set"))
    for name in settings.keys() & assigned.keys():
        raise given_twice(f"'{name}'", how="with its own option and with --set")
    return settings | assigned


def assignments(options: Sequence[str] | None) -> dict[str, Any]:
    """The settings given as NAME=VALUE; values are read as YAML."""
    settings: dict[str, Any] = {}
    for option in options or ():
        name, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {option} has no equals sign.",
                "--set takes the name of a setting and its value.",
                "Write --set NAME=VALUE, for example --set kl_coef=0.01.",
            )
        try:
            value = parse_yaml(text)
        except ParseError as error:
            raise ConfigError(
                f"The value of --set {option} cannot be read.",
                f"The value is not valid YAML: {error}.",
                f"Write --set '{name.strip()}=VALUE', with quotes if the shell needs them.",
            ) from error
        if name.strip() in settings:
            raise given_twice(f"--set {name.strip()}")
        settings[name.strip()] = value
        if value is None:
            raise ConfigError(
                f"--set {option} has no value.",
                "On the command line an empty value means that the option was not given.",
                f"Write '{name.strip()}: null' in a YAML file and pass it with --config.",
            )
    return settings


def tasks_in(file: Path | None) -> list[str]:
    """The tasks in a settings file."""
    settings = _settings_in(file)
    tasks = settings.get("task") or settings.get("tasks")
    names = split_names([tasks]) if isinstance(tasks, str) else tasks
    return [str(n).partition(":")[0] for n in names] if isinstance(names, dict | list) else []


def suite_in(file: Path | None) -> str:
    """The suite in a settings file; empty without one."""
    return str(_settings_in(file).get("suite") or "")


def _settings_in(file: Path | None) -> Mapping[str, Any]:
    from soulkit.config import read_settings_file

    return {} if file is None else read_settings_file(file)


# --- commands -------------------------------------------------------------------------------------


class Sectioned(OnceCommand):
    """A command whose help lists options by section: with --help only the everyday ones."""

    sections: Mapping[str, str]
    everyday: frozenset[str]
    whole_help = False

    def listed(self, ctx: Any) -> list[tuple[str, Any]]:
        parameters = super().listed(ctx)
        options = [one for title, one in parameters if title == "Options"]
        brief = not self.whole_help and len(options) > FEW
        rare = [
            one for one in options
            if brief and one.name not in ("help", HELP_ALL) and self.everyday.isdisjoint(one.opts)
        ]  # fmt: skip
        return [
            (title if title == "Arguments" else self.sections.get(one.name or "", "Run"), one)
            for title, one in parameters if one not in rare
        ]  # fmt: skip


def _print_whole_help(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        cast("Sectioned", ctx.command).whole_help = True
        typer.echo(ctx.get_help())
        raise typer.Exit


class GroupFromSettings(TyperGroup):
    """A group that builds a command only when it is called; listing needs only its help line."""

    def sentences(self) -> Mapping[str, str]:
        """Name → help line of every listed command."""
        raise NotImplementedError

    def build(self, name: str) -> Any:
        """The full command; None if there is no command `name`."""
        raise NotImplementedError

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.sentences(), *self.commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        sentence = self.sentences().get(cmd_name)
        if sentence is None:
            return self.commands.get(cmd_name) or self.build(cmd_name)
        return TyperCommand(name=cmd_name, help=sentence, rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, (self.build(name) if name and name in self.sentences() else command), rest


def build_command(
    name: str, help: str, options: Sequence[Option], body: Body,
    argument: inspect.Parameter | None = None, everyday: frozenset[str] = EVERYDAY,
) -> Any:  # fmt: skip
    """The command `name`; `body` gets its values as one mapping."""

    def command(**values: Any) -> None:
        del values[HELP_ALL]
        _check_plan_options(values)
        body(values)

    whole_help = inspect.Parameter(
        HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False,
        annotation=Annotated[bool, typer.Option(
            "--help-all", help="Show all options and exit.", is_eager=True,
            callback=_print_whole_help,
        )],
    )  # fmt: skip
    parameters = [*([argument] if argument else []), *map(_parameter, options), whole_help]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    facts = {"sections": {o.name: o.section for o in options}, "everyday": everyday}
    single = CommandTable(add_completion=False, rich_markup_mode=None)
    single.command(name, help=help, cls=type("Sectioned", (Sectioned,), facts))(command)
    return typer.main.get_command(single)


def _check_plan_options(values: Mapping[str, Any]) -> None:
    for name in ("pilot", "bounds"):
        if values.get(name) and not values["dry_run"]:
            raise ConfigError(
                f"--{name} has no effect here.", "It changes only plans.",
                "Leave it out, or add --dry-run to print a plan.",
            )  # fmt: skip


def _parameter(option: Option) -> inspect.Parameter:
    switch = option.kind is bool and not option.setting
    # A required setting may come from a settings file; another required option may not.
    must = option.required and not option.setting
    start = "required" if option.required else f"default: {option.default}"
    said = option.required or option.default not in ("", "none")
    shown = f"{option.help} [{start}]" if said and not must else option.help
    info = typer.Option(
        option.flag, help=shown, metavar=metavar_of(option), show_default=False,
        autocompletion=COMPLETERS.get(option.complete or ""), min=option.min,
    )  # fmt: skip
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if must else False if switch else None,
        annotation=Annotated[option.kind if switch or must else option.kind | None, info],
    )  # fmt: skip


def metavar_of(option: Option) -> str | None:
    """The word for the option's value in help."""
    if option.metavar or option.kind is bool:
        return option.metavar
    if option.choices:
        return "|".join(option.choices)
    return {int: "N", float: "X", Path: "FOLDER"}.get(option.kind, "NAME")


def merged_options(lists: Sequence[Sequence[Option]]) -> list[Option]:
    """The options of several commands in reading order; of those with the same flag, the first."""
    merged: dict[str, Option] = {}
    for option in (option for one in lists for option in one):
        merged.setdefault(option.flag, option)
    return in_reading_order(merged.values())
