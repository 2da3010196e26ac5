"""`soul`: the table of commands, signal handling, and the mapping from errors to exit codes.

COMMANDS holds only names and help lines; a command's module is imported when the command is called,
so `soul --help` is fast and a missing optional package breaks only the commands that need it. Exit
codes: 0 done, 1 internal error or failed model call, 2 user error (three lines: error, why, fix),
130, 143 and 129 interrupted. SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, or cancel the main
task of an event loop. Signals that were ignored at the start stay ignored (`nohup`, background
jobs). The library itself sets no handlers.

To add a command: a row in COMMANDS, and `soulkit/cli/<name>.py` with `app` (a `typer.Typer`, for a
group), `command` (a function) or `make_command` (builds the command from settings). A command in
another module is listed in HOMES; its function is `<name>_command`.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import re
import shutil
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
from soulkit.cli.parse_errors import USAGE, WORDS, CommandTable, help_instead, usage_error
from soulkit.errors import BrokenFile, CallError, MissingPackage, RunStopped, SoulError, UserError
from soulkit.text import one_line, sanitise
from soulkit.version import __version__

SAME_SIGNAL_S = 1.0
"""A second signal within this time counts as the same one: `timeout` sends it to its child and to
the group, and a closing terminal sends it twice."""

ENDING = ("SIGTERM", "SIGHUP")
"""Signals besides SIGINT that stop a command. Windows has no SIGHUP."""


class StopSignals:
    """Context manager: the first signal interrupts the command, a later one ends the process.

    Does nothing outside the main thread, where handlers cannot be set.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        """The first signal; None after a plain Ctrl-C."""
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
        """If SIGINT is ignored, event loops install no handler at all. Block it instead, which also
        stops Ctrl-C, and restore its default handler so that the other signals can use it."""
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
            os._exit(self.exit_code)  # no clean-up needed: files are always complete

    def _let_go_of_terminals(self) -> None:
        """Redirect closed terminals to /dev/null, because printing to them would fail."""
        for descriptor in self._terminals:
            if not _is_terminal(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _interrupt(frame: FrameType | None) -> None:
    """Call the current Ctrl-C handler, which an event loop may have replaced."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)


def _is_terminal(descriptor: int) -> bool:
    stream = (sys.stdout, sys.stderr)[descriptor - 1]
    return stream is not None and os.isatty(descriptor)


def completion_command(
    shell: Annotated[
        Literal["bash", "zsh", "fish"],
        typer.Argument(metavar="bash|zsh|fish", help="Shell to print the script for."),
    ],
) -> None:
    """Print the shell completion script.

    bash: soul completion bash > ~/.local/share/bash-completion/completions/soul

    zsh: soul completion zsh > FOLDER/_soul, where FOLDER is in your fpath

    fish: soul completion fish > ~/.config/fish/completions/soul.fish
    """
    from typer._completion_shared import get_completion_script

    typer.echo(get_completion_script(prog_name="soul", complete_var=COMPLETE_VARIABLE, shell=shell))


COMMANDS = {
    "demo": "Train and evaluate a tiny model end to end in three minutes.",
    "doctor": "Check this machine, your keys and every configured model.",
    "tasks": "List, show and check tasks, or create your own.",
    "data": "Generate, download, import, check and inspect rows.",
    "eval": "Evaluate a local checkpoint or a model behind an API.",
    "simulate": "Let simulated people talk to your agent.",
    "train": "Train a model with Ditto, GRPO, SFT or nine other methods.",
    "distill": "Distil several task experts into one model.",
    "reproduce": "Run the commands behind a figure of a paper, and draw it.",
    "people": "Learn from people's chats, and measure what came of it.",
    "certify": "Collect what is known of a simulator in one file.",
    "plan": "Estimate calls, tokens, cost, memory and time of a command.",
    "runs": "List runs with their status, headline score and cost.",
    "show": "Read episodes: prompts, replies, judgements and feedback.",
    "report": "Show the results of runs as tables, figures or an HTML page.",
    "rescore": "Score recorded episodes again without new model calls.",
    "ledger": "Inspect recorded API calls: totals, single calls, integrity.",
    "compare": "Compare two runs example by example.",
    "judge": "Check a judge and calibrate it with human ratings.",
    "chat": "Talk to a model that plays a person.",
    "serve": "Serve a model or a script as an OpenAI-compatible server.",
    "export": "Export a model for vLLM, SGLang, transformers or the Hub.",
    "completion": "Print the completion script for bash, zsh or fish.",
}

HOMES = {
    "certify": "people", "compare": "report", "runs": "report", "reproduce": "plan",
    "completion": "app",
}  # fmt: skip
"""Command → module, for commands in the module of another command."""

MENDABLE = dict.fromkeys((
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR,
    errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ENXIO,
), "Check the path, its permissions and the disk, or use another path.") | dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT), "Free disk space, then run the same command again."
) | dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.ENOMEM),
                  "Raise the limit (ulimit -a), then run the same command again.")  # fmt: skip
"""System errors that the user can fix, and how."""

COMPLETE_VARIABLE = "_SOUL_COMPLETE"
STOPPED = {
    "": "interrupted: finished work is saved; run the same command again to resume",
    "serve": "stopped",
    "export": "interrupted: run the same command again",
}
"""What a command says last when a signal has stopped it."""


class LazyGroup(TyperGroup):
    """Lists commands from COMMANDS; imports a command when it is called or completed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A placeholder with only the help line, which is enough for lists and completion."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(name=cmd_name, help=COMMANDS[cmd_name], rich_markup_mode=None)

    def invoke(self, ctx: Any) -> Any:
        """A KeyboardInterrupt that a user's code raised is an error of it, not Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            from soulkit.models.players.functions import stops_command
            from soulkit.tasks.kit.user_code import broken_task

            if not stops_command(error) and (broken := broken_task(error)):
                raise broken from error
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if os.environ.get("WORLD_SIZE", "1") != "1" and name:
            from soulkit.train.ranks.launch import check_launched

            check_launched(f"soul {name}")
        return name, load(name) if command and name else None, rest


def load(name: str) -> Any:
    """Import the module of the command `name` and build its command or group."""
    module = importlib.import_module(f"soulkit.cli.{HOMES.get(name, name)}")
    function = getattr(module, f"{name}_command", None)
    if function is None and hasattr(module, "app"):
        group = typer.main.get_group(module.app)
        group.name, group.no_args_is_help = name, not group.invoke_without_command
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
    context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit it
)


def _print_version(version_wanted: bool) -> None:
    if version_wanted:
        typer.echo(f"soul {__version__}")
        raise typer.Exit


@app.callback(help="Evaluate and train language models as human simulators.")
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks. Works anywhere on the command line.")
    ] = False,
) -> None:
    """The options before the command. `main` handles --debug; here it is only listed."""


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
        except BaseException as error:  # noqa: BLE001 - reported in one line, never swallowed
            if debug:
                for part in traceback.format_exception(error):
                    print(printable(part), end="", file=sys.stderr)
            return _explain(error)
        if code != 130:
            return code
        if stop.exit_code != 130 or "SOULKIT_RANKS" not in os.environ:  # else `launch` says it
            _say(STOPPED.get(next(iter(arguments), ""), STOPPED[""]))
        return stop.exit_code


@contextmanager
def _log_to_stderr(debug: bool) -> Iterator[None]:
    """Print the log of soulkit, such as errors in tasks; with --debug including tracebacks."""
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
    """Masks API keys and removes terminal escapes, which errors and tracebacks may contain."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitise(printable(super().format(record)))


def _open_streams() -> None:
    """Open /dev/null for closed output streams (`>&-`), because printing to None would fail."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def take_debug(arguments: list[str]) -> bool:
    """Remove --debug from `arguments` (before `--`); return whether it or SOULKIT_DEBUG is set."""
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

        if broken := broken_task(end):  # a task that calls exit(0) must not look like success
            raise broken from end
        if end.code == 130:  # another process was interrupted, and has said so
            raise
        code = end.code
    _flush()
    # Typer turns Ctrl-C into a silent 130.
    return code if isinstance(code, int) else int(code is not None)


def run_words(words: Sequence[str]) -> int:
    """Run the command in `words` and return its exit code, or raise its error."""
    WORDS.set(list(words))
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
    """Flush stdout; a closed pipe (`soul tasks list | head`) is not an error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error: BaseException) -> int:
    """Print the error on stderr and return the exit code."""
    # A system error in a user's code is reported with its file and line, as any other.
    broken = _of_user(error) if isinstance(error, OSError) else None
    soul_error = broken or _soul_error(error)
    if isinstance(soul_error, UserError):
        _three_lines(*soul_error.lines(), several=isinstance(soul_error, BrokenFile))
        return 1 if isinstance(soul_error, RunStopped) else 2
    if isinstance(soul_error, CallError):
        _three_lines(
            soul_error.detail, soul_error.why, soul_error.way_out,
        )  # fmt: skip
        return 1
    if broken := _of_user(error):
        _three_lines(*broken.lines())
        return 2
    from soulkit.models.players.functions import error_words

    detail = one_line(error_words(error), 300)
    _say(f"internal error: {detail} (run again with --debug for the traceback)")
    return 1


def _of_user(error: BaseException) -> UserError | None:
    from soulkit.tasks.kit.user_code import broken_task

    return broken_task(error)


def _soul_error(error: BaseException) -> SoulError | None:
    """The soulkit error behind `error`: itself, one of an exception group, or a missing extra."""
    if isinstance(error, SoulError):
        return error
    if isinstance(error, ExceptionGroup):
        inner = [_soul_error(part) for part in error.exceptions if isinstance(part, Exception)]
        mendable = [part for part in inner if isinstance(part, UserError)]
        return next(iter([*mendable, *(part for part in inner if part)]), None)
    if isinstance(error, ModuleNotFoundError):
        return MissingPackage.of(error, "this command")
    return _system_error(error)


def _system_error(error: BaseException) -> UserError | None:
    """The error of the operating system; some libraries report it as `(os error 28)`."""
    starved = isinstance(error, MemoryError) or str(error) == "can't start new thread"
    name, number = None, errno.ENOMEM if starved else None
    words = " ".join(part for part in error.args if type(part) is str)
    words += str(error) if isinstance(error, shutil.Error) else ""  # of a folder's copy
    if isinstance(error, OSError) and error.errno:
        name, number = error.filename2 or error.filename, error.errno
    elif code := re.search(r"\b(?:os error|Errno) (\d+)\b", words):
        number = int(code[1])
    if number is None or number not in MENDABLE:
        return None
    return UserError(
        f"'{name}' cannot be read or written." if name else "The system refused an operation.",
        f"The system says: {os.strerror(number)}.",
        MENDABLE[number],
    )


def _three_lines(what: str, why: str, way_out: str, *, several: bool = False) -> None:
    """Print an error; `several`: `why` has a line for each problem of a file."""
    # Masked again: the error of a library may quote a server's reply.
    _say(f"error: {one_line(printable(what))}")
    for n, line in enumerate(why.splitlines() if several else [why]):
        _say(f"{'    ' if n else 'why:'} {one_line(printable(line))}")
    _say(f"fix: {one_line(printable(way_out))}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
