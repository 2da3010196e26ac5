"""Errors of the command line's parser, in the three lines of every other error.

Commands are `OnceCommand`s, which also refuse an option with one value that is given twice;
`CommandTable` makes them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from soulkit.errors import ConfigError, did_you_mean
from soulkit.option_texts import given_twice
from soulkit.text import one_line

USAGE: type[Exception] = typer.BadParameter.__mro__[1]
"""The parser's errors about what was written; Typer names only this kind of them."""
RUNS = Path("runs")
"""Where runs are looked for when a command needs one and none is named."""
RUN_ARGUMENTS = {"RUN": 1, "LEDGER": 1, "A": 2, "B": 2}
"""Argument that names the folder of a run → how many such folders its command needs."""
_TYPE_NAME = re.compile(r"\s*<[^<>|]*>$")
"""What the parser writes behind a name: `RUN... <list[Path]>`. A list of choices is kept."""


class OnceCommand(TyperCommand):
    """A command whose options are given once, except those that hold several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # a shell that completes a line gets no errors
            _, _, given = self.make_parser(ctx).parse_args(args=list(args))
            for parameter, times in Counter(filter(_holds_one_value, given)).items():
                if times > 1:
                    names = (*parameter.opts, *parameter.secondary_opts)
                    raise given_twice(" or ".join(names), ctx.command_path)
        return super().parse_args(ctx, args)


def _holds_one_value(parameter: Any) -> bool:
    """Whether it is an option of which the last would count: one with a value, or a switch that can
    be turned on and off. To say `--json` twice changes nothing."""
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
    """The help of a group that was called without a command; empty for a mistake."""
    return str(error.message) if type(error).__name__ == "NoArgsIsHelpError" else ""


def usage_error(error: Any) -> ConfigError:
    """A usage error as what was written, what is allowed, and how to write it."""
    command = error.ctx.command_path if error.ctx else "soul"
    if hasattr(error, "option_name"):
        return _option(error, command)
    if isinstance(error, typer.BadParameter):
        return _parameter(error, command)
    return _words(error, command)


def _option(error: Any, command: str) -> ConfigError:
    """An option that is none, or has no value."""
    name = one_line(error.option_name, 60)
    if error.ctx is None:  # the parser of words knows options alone, not whose they are
        return ConfigError(
            one_line(error.message, 200),
            f"{name} takes a value where it takes one, and a switch such as --json takes none.",
            f"Write {name} VALUE, or {name} alone; --help behind the command says which.",
        )
    options = [flag for p in error.ctx.command.params for flag in (*p.opts, *p.secondary_opts)]
    options = [flag for flag in options if flag.startswith("-")]
    return ConfigError(
        f"'{command}' has no option '{name}'.",
        "An option that nobody reads would change nothing.",
        f"{did_you_mean(name, [*options, '--help'])} See: {command} --help",
    )


def _parameter(error: Any, command: str) -> ConfigError:
    """A value that is missing, or none of those allowed."""
    name = _name(error)
    if type(error).__name__ == "MissingParameter":
        name = name.rstrip(".")
        if name in RUN_ARGUMENTS:
            return missing_run_error(command, RUN_ARGUMENTS[name])
        return ConfigError(
            f"'{command}' needs {name}.",
            "Without it nothing can be done.",
            f"Write {command} {_parameter_text(error)}; see: {command} --help",
        )
    message = one_line(error.message, 200).removeprefix("Value error, ")
    value = _value(error)
    return ConfigError(
        f"{name}: {message}" if value in message else f"{name} {value}: {message}",
        f"'{command}' cannot take this for another value.",
        f"Write {_parameter_text(error)}; see: {command} --help",
    )


def missing_run_error(command: str, needed: int = 1) -> ConfigError:
    """The error of a command that needs so many runs; those of ./runs are printed before it."""
    from soulkit.cli.console import out
    from soulkit.report.episode_search import shell_path
    from soulkit.report.listing import list_runs, runs_table

    runs = list_runs(RUNS) if RUNS.is_dir() else []
    lacking = "None is named" if needed == 1 else "Fewer are named"
    what = "the folder of a run" if needed == 1 else f"the folders of {needed} runs"
    names = ["RUN"] if needed == 1 else ["A", "B"][:needed]
    if not runs:
        return ConfigError(
            f"'{command}' needs {what}.",
            f"{lacking}, and there is no run in ./{RUNS}.",
            f"Write {command} {' '.join(names)}, or make a run first: soul demo; "
            f"see: {command} --help",
        )
    out.print(runs_table(runs, out.width))
    newest = sorted(runs, key=lambda run: run.state == "damaged")[:needed]
    words = [*(shell_path(run.path) for run in reversed(newest)), *names[len(newest) :]]
    return ConfigError(
        f"'{command}' needs {what}.",
        f"{lacking}; the runs in ./{RUNS} are listed above.",
        f"Write {command} {' '.join(words)}, for example; see: {command} --help",
    )


def _words(error: Any, command: str) -> ConfigError:
    """A command that is none, or a word too many."""
    listing = getattr(error.ctx.command, "list_commands", None) if error.ctx else None
    names = listing(error.ctx) if listing else []
    message = one_line(error.message, 200)
    if not names:
        return ConfigError(
            f"'{command}': {message}",
            "A word that nobody reads would change nothing.",
            f"Put options before their values and texts with spaces in quotes; see: {command} "
            "--help",
        )
    words = [*error.ctx._protected_args, *error.ctx.args]
    name = message.partition("'")[2].partition("'")[0] or " ".join(words)
    return ConfigError(
        f"No such command '{one_line(name, 60)}'.",
        f"'{command}' has {', '.join(names)}.",
        f"{did_you_mean(name, names)} See: {command} --help",
    )


def _name(error: Any) -> str:
    """The option, or the argument as help writes it."""
    if error.param is None:
        return "a value"
    option = error.param.param_type_name == "option"
    return str(error.param.opts[0]) if option else _parameter_text(error).strip("[]")


def _value(error: Any) -> str:
    """What was written, as far as the error's cause tells it."""
    for cause in (error.__cause__, error.__context__):
        items = cause.errors() if hasattr(cause, "errors") else ()
        for item in items:
            return f"'{one_line(str(item.get('input')), 60)}'"
    return ""


def _parameter_text(error: Any) -> str:
    """An option or argument with its choices or a placeholder: `--protocol <paper|reference>`,
    `--port VALUE`, `RUN...`."""
    record = error.param.get_help_record(error.ctx) if error.param and error.ctx else None
    if not record:
        return "it as --help says"
    text, typed = _TYPE_NAME.subn("", str(record[0]))
    if error.param.param_type_name == "option":
        return f"{text} VALUE" if typed else text
    # Arguments without a placeholder of their own are listed under the name in the code.
    name, space, choices = text.partition(" ")
    return f"{name.upper()}{space}{choices}"
