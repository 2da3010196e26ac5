"""Parsing of the command line: help pages, and usage errors as three lines (error, why, fix).

`CommandTable` makes every command an `OnceCommand`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from soulkit.errors import ConfigError, nearest
from soulkit.option_texts import given_twice
from soulkit.text import one_line

USAGE: type[Exception] = typer.BadParameter.__mro__[1]
"""Base of the parser's usage errors, for which Typer has no public name."""
WORDS: ContextVar[Sequence[str]] = ContextVar("words", default=())
"""The command line after `soul`, without --debug."""
RUNS = Path("runs")
"""Where commands look for runs when none is named."""
_START = re.compile(r"\s*\[(default|required)\b.*")
"""The default at the end of an option's help."""
RUN_ARGUMENTS = {"RUN": 1, "LEDGER": 1, "A": 2, "B": 2}
"""Argument that names a run folder → number of run folders that its command needs."""


class OnceCommand(TyperCommand):
    """A command that rejects a single-value option that is given twice.

    Its help pages look the same with every version of Typer.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # no errors during shell completion
            _, _, given = self.make_parser(ctx).parse_args(args=list(args))
            for parameter, times in Counter(filter(_holds_one_value, given)).items():
                if times > 1:
                    names = (*parameter.opts, *parameter.secondary_opts)
                    raise given_twice(" or ".join(names), ctx.command_path)
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *map(argument_text, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        listed: dict[str, list[tuple[str, str]]] = {}
        for title, parameter in self.listed(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                record = (argument_text(parameter), record[1])
            listed.setdefault(title, []).append(record)
        for title, records in listed.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def listed(self, ctx: Any) -> list[tuple[str, Any]]:
        """(section, parameter) for every parameter that the help lists."""
        return [
            ("Options" if one.param_type_name == "option" else "Arguments", one)
            for one in self.get_params(ctx)
        ]


def argument_text(argument: Any) -> str:
    """An argument as usage lines show it: `RUN`, `[FOLDER]`, `TASK...`."""
    name = (argument.metavar or argument.name.upper()).strip("[].")
    name += "" if argument.nargs == 1 else "..."
    return name if argument.required else f"[{name}]"


def _holds_one_value(parameter: Any) -> bool:
    """Whether a second occurrence would replace the first: for options with a value and on/off
    switches. Repeating a plain switch such as `--json` changes nothing."""
    if parameter.param_type_name != "option" or parameter.multiple or parameter.count:
        return False
    return not parameter.is_flag or bool(parameter.secondary_opts)


class CommandTable(typer.Typer):
    """A group whose commands are `OnceCommand`s."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Callable[[Any], Any]:
        """Registers a command, as `typer.Typer` does."""
        return super().command(name, cls=cls or OnceCommand, **settings)


def help_instead(error: Any) -> str:
    """The help of a group that was called without a command; empty for other usage errors."""
    return str(error.message) if type(error).__name__ == "NoArgsIsHelpError" else ""


def usage_error(error: Any) -> ConfigError:
    """A usage error of the parser as a ConfigError."""
    command = error.ctx.command_path if error.ctx else "soul"
    if hasattr(error, "option_name"):
        return _option(error, command)
    if isinstance(error, typer.BadParameter):
        return _parameter(error, command)
    return _words(error, command)


def _option(error: Any, command: str) -> ConfigError:
    """The error for an option that does not exist or lacks its value."""
    name = one_line(error.option_name, 60)
    if error.ctx is None:  # the command is not known here
        return ConfigError(
            one_line(error.message, 200),
            "Options need a value, such as --limit 20; switches such as --json take none.",
            f"Write {name} VALUE, or {name} alone for a switch; add --help to list the options.",
        )
    options = [flag for p in error.ctx.command.params for flag in (*p.opts, *p.secondary_opts)]
    near = nearest(name, [flag for flag in options if flag.startswith("-")])
    commands = _subcommands(error)
    if commands and not near:
        return ConfigError(
            f"'{command}' has no option '{name}'.",
            "Options come after the name of the subcommand.",
            f"Write {command} COMMAND {name}, where COMMAND is one of: {', '.join(commands)}.",
        )
    hint = f"Did you mean '{near}'? " if near else ""
    return ConfigError(
        f"'{command}' has no option '{name}'.",
        "Unknown options are refused instead of being ignored.",
        f"{hint}See: {command} {'--help-all' if '--help-all' in options else '--help'}",
    )


def _parameter(error: Any, command: str) -> ConfigError:
    """The error for a value that is missing or not allowed."""
    name = _name(error)
    about = _START.sub("", getattr(error.param, "help", "") or "")
    about = f"{name}: {about}" if about else ""
    if type(error).__name__ == "MissingParameter":
        if name in RUN_ARGUMENTS:
            return missing_run_error(command, RUN_ARGUMENTS[name])
        return ConfigError(
            f"'{command}' needs {name}.",
            about or "It has no default.",
            f"Write {command} {_parameter_text(error)}; see: {command} --help",
        )
    message = one_line(error.message, 200).removeprefix("Value error, ")
    value = _value(error)
    return ConfigError(
        f"{name}: {message}" if value in message else f"{name} {value}: {message}",
        about or f"'{command}' cannot use this value.",
        f"Write {_parameter_text(error)}; see: {command} --help",
    )


def missing_run_error(command: str, needed: int = 1) -> ConfigError:
    """The error for a command called without the folders of the `needed` runs. Prints the runs in
    ./runs."""
    from soulkit.cli.console import out
    from soulkit.report.episode_search import shell_path
    from soulkit.report.listing import list_runs, runs_table

    runs = list_runs(RUNS) if RUNS.is_dir() else []
    what = "the folder of a run" if needed == 1 else f"the folders of {needed} runs"
    names = ["RUN"] if needed == 1 else ["A", "B"][:needed]
    if not runs:
        return ConfigError(
            f"'{command}' needs {what}.",
            f"There is no run in ./{RUNS}.",
            f"Make a run first: soul demo; then write {command} {' '.join(names)}; "
            f"see: {command} --help",
        )
    out.print(runs_table(runs, out.width))
    newest = sorted(runs, key=lambda run: run.state == "damaged")[:needed]
    words = [*(shell_path(run.path) for run in reversed(newest)), *names[len(newest) :]]
    return ConfigError(
        f"'{command}' needs {what}.",
        f"The runs in ./{RUNS} are listed above.",
        f"Write {command} {' '.join(words)}, for example; see: {command} --help",
    )


def _words(error: Any, command: str) -> ConfigError:
    """The error for an unknown command or a surplus word."""
    names = _subcommands(error)
    message = one_line(error.message, 200)
    if not names:
        return ConfigError(
            f"'{command}': {message}",
            "Every word that is neither an option nor its value counts as an argument.",
            f"Put values with spaces in quotes, and remove surplus words; see: {command} --help",
        )
    words = [*error.ctx._protected_args, *error.ctx.args]
    return no_command(
        message.partition("'")[2].partition("'")[0] or " ".join(words), names, command
    )


def no_command(name: str, names: Sequence[str], command: str) -> ConfigError:
    """The error for the unknown command `name` of `command`, which has those in `names`."""
    near = nearest(name, names)
    fix = f"Did you mean '{near}'? See: {command} --help" if near else (
        f"Write one of them, or see: {command} --help"
    )  # fmt: skip
    if name == "version":
        fix = "Write soul --version."
    if name == "help":
        fix = f"Write {command} --help, or {command} COMMAND --help for one command."
    return ConfigError(
        f"No such command '{one_line(name, 60)}'.",
        f"The commands of '{command}' are {', '.join(names)}.",
        fix,
    )


def _subcommands(error: Any) -> list[str]:
    listing = getattr(error.ctx.command, "list_commands", None) if error.ctx else None
    return list(listing(error.ctx)) if listing else []


def _name(error: Any) -> str:
    """The option, or the argument without its brackets and dots."""
    if error.param is None:
        return "a value"
    if error.param.param_type_name == "option":
        return str(error.param.opts[0])
    return argument_text(error.param).strip("[].")


def _value(error: Any) -> str:
    """The rejected value in quotes, if the cause of the error contains it."""
    for cause in (error.__cause__, error.__context__):
        items = cause.errors() if hasattr(cause, "errors") else ()
        for item in items:
            return f"'{one_line(str(item.get('input')), 60)}'"
    return ""


def _parameter_text(error: Any) -> str:
    """An option or argument with its choices or a placeholder: `--protocol paper|reference`,
    `--port PORT`, `RUN...`."""
    if error.param is None:
        return "a valid value"
    if error.param.param_type_name == "argument":
        return argument_text(error.param)
    record = error.param.get_help_record(error.ctx) if error.ctx else None
    return str(record[0]) if record else f"{error.param.opts[0]} VALUE"
