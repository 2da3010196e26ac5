"""`soul`: the table of commands, signals, and the one place where an error becomes an exit code.

The commands are registered as names and sentences; a module is imported when its command is called.
So `soul --help` answers at once, and a broken or missing optional package hurts only the command
that needs it. Exit codes: 0 done, 1 internal error or a silent model, 2 something the user can mend
(always three lines: error, why, fix), 130, 143 and 129 interrupted.

    SIGINT ─────────────────────────▶ KeyboardInterrupt, or in an event loop: the command's main
    SIGTERM, SIGHUP ──▶ remembered ─▶ task is cancelled and ends what it must not leave half done

What was ignored before the start stays ignored: `nohup` means SIGHUP, a shell that starts a command
in the background means SIGINT. The library has no handlers.

To add a command: a row in COMMANDS, and `soulkit/cli/<name>.py` with `app` (a `typer.Typer`, for a
group), `command` (a function) or `make_command` (makes the command from settings). A module of
another name is listed in HOMES and has a function `<name>_command`.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, Literal, Self

import typer
from typer.core import TyperCommand, TyperGroup

from soulkit.api_keys import printable
from soulkit.cli.parse_errors import USAGE, CommandTable, help_instead, usage_error
from soulkit.errors import CallError, MissingPackage, RunStopped, SoulError, UserError
from soulkit.text import one_line
from soulkit.version import __version__

SAME_SIGNAL_S = 1.0
"""A signal that follows within this time is the same one: `timeout` sends it to its child and to
the group, and a closing terminal says it twice."""

ENDING = ("SIGTERM", "SIGHUP")
"""Beside SIGINT. Windows has no SIGHUP."""


class StopSignals:
    """Within it the first signal interrupts, and a later one ends the process at once.

    Outside of the main thread, where no handler can be set, it does nothing.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        """The signal that came first; None also after Ctrl-C alone."""
        self._at = 0.0
        self._terminals: list[int] = []
        self._before: dict[int, Any] = {}
        self._blocked: set[int] = set()

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
        return 128 + (self.first or signal.SIGINT)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._terminals = [descriptor for descriptor in (1, 2) if _is_terminal(descriptor)]
        for name in ENDING:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                self._before[number] = signal.signal(number, self._stop)
        if self._before:
            self._make_interruptible()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._blocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._blocked)

    def _make_interruptible(self) -> None:
        """Where SIGINT is ignored, event loops hear of no interruption at all: it is blocked
        instead, which no Ctrl-C passes either, and has its usual handler for the others to use."""
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and hasattr(signal, "pthread_sigmask"):
            self._blocked = {signal.SIGINT}
            signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
            self._before[signal.SIGINT] = signal.signal(
                signal.SIGINT, signal.default_int_handler
            )  # fmt: skip

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self._at = number, time.monotonic()
            self._let_go_of_terminals()
            _interrupt(frame)
        elif time.monotonic() - self._at >= SAME_SIGNAL_S:
            os._exit(self.exit_code)  # neither clean-up nor threads: files are whole all the time

    def _let_go_of_terminals(self) -> None:
        """Print to nowhere from now on where the terminal has gone: a last word would fail."""
        for descriptor in self._terminals:
            if not _is_terminal(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _interrupt(frame: FrameType | None) -> None:
    """What Ctrl-C does just now: an event loop has put a handler of its own in place."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)


def _is_terminal(descriptor: int) -> bool:
    stream = (sys.stdout, sys.stderr)[descriptor - 1]
    return stream is not None and os.isatty(descriptor)


def completion_command(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(help="The shell to print the script for.")
    ],
) -> None:
    """Print the shell completion script.

    bash: soul completion bash > ~/.local/share/bash-completion/completions/soul

    zsh: soul completion zsh > a folder of your fpath, as the file _soul

    fish: soul completion fish > ~/.config/fish/completions/soul.fish
    """
    from typer._completion_shared import get_completion_script

    typer.echo(get_completion_script(prog_name="soul", complete_var=COMPLETE_VARIABLE, shell=shell))


COMMANDS = {
    "demo": "Try the whole road in minutes: no GPU, no key, no network.",
    "doctor": "Look what is here, and whether every player answers.",
    "tasks": "List tasks and suites; show one; check gold against scorer.",
    "data": "Make, download, import, check, show and audit rows.",
    "eval": "Score a model: a local checkpoint or any API endpoint.",
    "train": "Train a model: Ditto, GRPO, SFT and seven more; compare them.",
    "distill": "Make one model of many experts; measure what is kept.",
    "plan": "Print the calls, tokens, cost, memory and time of a command.",
    "runs": "List the runs of a folder: status, headline, cost.",
    "show": "Show episodes: what was seen, said, judged, advised.",
    "report": "Show what runs recorded: tables, figures, one HTML page.",
    "rescore": "Score recorded episodes again, without asking any model.",
    "ledger": "Look at paid replies: totals, single calls, damage.",
    "compare": "Compare two runs, paired example by example.",
    "judge": "Check a judge; have people rate, and correct its means.",
    "serve": "Serve a scripted conversation partner over HTTP.",
    "completion": "Print the shell completion script for bash, zsh or fish.",
}

HOMES = {"compare": "report", "runs": "report", "completion": "app"}
"""Commands that live in the module of another one."""

MENDABLE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT,
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG,
}  # fmt: skip
"""What the system says of a path that the user can change."""

COMPLETE_VARIABLE = "_SOUL_COMPLETE"


class LazyGroup(TyperGroup):
    """Lists commands from the table; imports one when it is called or completed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that only knows its help line: enough for listing and for names."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(name=cmd_name, help=COMMANDS[cmd_name], rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if command and name else None, rest


def load(name: str) -> Any:
    """Import the module of the command `name` and build its command or group."""
    module = importlib.import_module(f"soulkit.cli.{HOMES.get(name, name)}")
    function = getattr(module, f"{name}_command", None)
    if function is None and hasattr(module, "app"):
        group = typer.main.get_group(module.app)
        group.name, group.no_args_is_help = name, True
        group.help = group.help or COMMANDS[name]
        return group
    if function is None and hasattr(module, "make_command"):
        return module.make_command()
    single = CommandTable(add_completion=False, rich_markup_mode=None)
    single.command(name, context_settings=getattr(module, "CONTEXT", None))(
        function or module.command
    )
    command = typer.main.get_command(single)
    command.help = command.help or COMMANDS[name]
    return command


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    # Plain help: rich panels would double the time until the first line.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # the commands take them over
)


def _print_version(version_wanted: bool) -> None:
    if version_wanted:
        typer.echo(f"soul {__version__}")
        raise typer.Exit


@app.callback(help="Evaluate, train and understand human simulators.")
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere on the line.")
    ] = False,
) -> None:
    """The options before the command. `main` takes --debug away, here it is only listed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `soul` with `argv` (default: this process's) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = take_debug(arguments)
    _open_streams()
    with _log_to_stderr(debug), StopSignals() as stop:
        try:
            code = _dispatch(arguments)
        except KeyboardInterrupt:
            code = 130
        except Exception as error:  # noqa: BLE001 - the last stop: told in one line, never swallowed
            if debug:
                for part in traceback.format_exception(error):
                    print(printable(part), end="", file=sys.stderr)
            return _explain(error)
        if code != 130:
            return code
        _say("interrupted: what was finished is kept; run the same command again to resume")
        return stop.exit_code


@contextmanager
def _log_to_stderr(debug: bool) -> Iterator[None]:
    """What tasks break on is said once a place; with --debug it comes with its traceback."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Masked("%(message)s"))
    logger = logging.getLogger("soulkit")
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])


class _Masked(logging.Formatter):
    """Without keys, which an error or a line of a traceback may hold."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _open_streams() -> None:
    """A command whose output is closed (`>&-`) prints to nowhere; without a stream it dies."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def take_debug(arguments: list[str]) -> bool:
    """Remove --debug from `arguments`, wherever it stands before `--`; SOULKIT_DEBUG counts."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    remaining = [word for word in arguments[:end] if word != "--debug"]
    debug = len(remaining) < end
    arguments[:end] = remaining
    return debug or os.environ.get("SOULKIT_DEBUG", "0") not in ("", "0")


def _dispatch(arguments: list[str]) -> int:
    if COMPLETE_VARIABLE in os.environ:
        # Typer registers its shells only where it also adds its own install options.
        from typer._completion_classes import completion_init

        completion_init()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a C locale must not end a run
    try:
        code: Any = run_words(arguments)
    except SystemExit as end:
        from soulkit.tasks.kit.user_code import broken_task

        if broken := broken_task(end):  # else a command that did nothing would end well
            raise broken from end
        code = end.code
    _flush()
    # Typer turns Ctrl-C into a silent 130.
    return code if isinstance(code, int) else int(code is not None)


def run_words(words: Sequence[str]) -> int:
    """Run the command that `words` spell and return its exit code, or raise its error."""
    try:
        code = typer.main.get_group(app).main(
            args=list(words), prog_name="soul", complete_var=COMPLETE_VARIABLE,
            standalone_mode=False,
        )  # fmt: skip
    except USAGE as error:
        if text := help_instead(error):
            typer.echo(text, err=True)
            return 2
        raise usage_error(error) from error
    return code if isinstance(code, int) else 0


def _flush() -> None:
    """Empty stdout now: a reader that left (`soul tasks list | head`) is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error: Exception) -> int:
    """Tell on stderr what went wrong, and return the exit code."""
    soul_error = _soul_error(error)
    if isinstance(soul_error, UserError):
        _three_lines(*soul_error.lines())
        return 1 if isinstance(soul_error, RunStopped) else 2
    if isinstance(soul_error, CallError):
        _three_lines(
            soul_error.detail, soul_error.why, soul_error.way_out,
        )  # fmt: skip
        return 1
    from soulkit.tasks.kit.user_code import broken_task, error_words

    if broken := broken_task(error):
        _three_lines(*broken.lines())
        return 2
    detail = one_line(error_words(error), 300)
    _say(f"internal error: {detail} (run again with --debug for the traceback)")
    return 1


def _soul_error(error: Exception) -> SoulError | None:
    """The soulkit error in `error`: itself, one in a task group's bundle, a missing extra."""
    if isinstance(error, SoulError):
        return error
    if isinstance(error, ExceptionGroup):
        inner = [_soul_error(part) for part in error.exceptions if isinstance(part, Exception)]
        mendable = [part for part in inner if isinstance(part, UserError)]
        return next(iter([*mendable, *(part for part in inner if part)]), None)
    if isinstance(error, OSError) and error.errno in MENDABLE:
        return _system_error(error)
    if isinstance(error, ModuleNotFoundError):
        return MissingPackage.of(error, "this command")
    return None


def _system_error(error: OSError) -> UserError:
    where = "A file" if error.filename is None else f"'{error.filename}'"
    return UserError(
        f"{where} cannot be read or written.",
        f"The system says: {error.strerror}.",
        "Check the path, its permissions and the space left, or name another place.",
    )


def _three_lines(what: str, why: str, way_out: str) -> None:
    # Masked here once more: an error of a library may quote what a server said.
    _say(f"error: {one_line(printable(what))}")
    _say(f"why: {one_line(printable(why))}")
    _say(f"fix: {one_line(printable(way_out))}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
