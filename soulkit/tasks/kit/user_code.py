"""The code of a task: where to find it, the functions that declarations name, and code errors.

A declaration names code as `module:attribute` (`importer: importer:read`). The module is searched
in the task's folder first: next to the user's tasks file, in `soulkit/tasks/<folder>/`, or in the
folder of an installed package. docs/reference/task-keys.md lists the functions.

Keyword-only parameters of such a function become options: `*, half: Literal["cotp", "vp"]` is
`--half cotp` on the command line. A parameter `task` receives the name of the task.

In `task_code`, an exception of a task's own code becomes a TaskError with its file and line: one
bad row is unscored and the run continues. Errors of soulkit and of models pass unchanged.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import math
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import dropwhile
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from soulkit.api_keys import printable
from soulkit.errors import ConfigError, SoulError, TaskError, UserError, did_you_mean
from soulkit.models.players.functions import error_words, execute_file, raised_at, stops_command
from soulkit.text import one_line
from soulkit.types import Episode, Example, Feedback, Score, unscored

T = TypeVar("T")


class Declared(Protocol):
    @property
    def home(self) -> Home: ...


class DeclaredTask(Protocol):
    name: str

    @property
    def spec(self) -> Declared: ...


BUILTIN = Path(__file__).parents[1]
"""`soulkit/tasks`: shared prompts, the kit, and a folder for each built-in benchmark."""


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of a task, and its package name if it is a package."""

    folder: Path = BUILTIN
    package: str = ""
    distribution: str = ""
    """The installed distribution that contains the package; empty for other tasks."""

    @classmethod
    def builtin(cls, name: str) -> Home:
        """The home of a built-in benchmark."""
        return cls(BUILTIN / name, f"soulkit.tasks.{name}")

    @property
    def builtin_task(self) -> bool:
        """Whether this is the home of a built-in task."""
        return self.folder.parent == BUILTIN

    @property
    def origin(self) -> str:
        """Suffix for the name of an installed task in error messages."""
        return f" of the distribution '{self.distribution}'" if self.distribution else ""

    def load(self, reference: str) -> Any:
        """The object that `module:attribute` names; an ImportError says where it fails."""
        module, _, attribute = reference.partition(":")
        try:
            return getattr(self._module(module), attribute or "missing")
        except BaseException as error:
            if stops_command(error):
                raise
            place = raised_at(error, self._file(module))
            raise ImportError(f"{error_words(error)}{place}") from error

    def _file(self, name: str) -> Path:
        return self.folder.joinpath(*name.split(".")).with_suffix(".py")

    def _module(self, name: str) -> ModuleType:
        file = self._file(name)
        if not file.is_file():
            self._add_to_path()
            return importlib.import_module(name)
        if self.package:
            return importlib.import_module(f"{self.package}.{name}")
        self._add_to_path()
        # A unique module name: two users' files may both be called my_task.py, or random.py.
        mark = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
        unique = f"soulkit_user_{mark}.{name}"
        return execute_file(unique, file)

    def _add_to_path(self) -> None:
        if not self.package and self.folder != BUILTIN and str(self.folder) not in sys.path:
            sys.path.append(str(self.folder))


COMMAND_FLAGS = ("--out", "--rows", "--seed", "--tasks", "--trust", "--json", "--drafter",
                 "--filter", "--max-cost")  # fmt: skip
"""Options of the commands that call hooks, used to suggest corrections of misspelt options."""
TASK_KEYWORD = "task"


@dataclass(frozen=True, slots=True)
class HookOption:
    """An option of a hook: its name, type and default."""

    name: str
    kind: Any
    default: Any

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, if they are limited."""
        literals = [k for k in _kinds(self.kind) if typing.get_origin(k) is typing.Literal]
        return tuple(str(value) for kind in literals for value in typing.get_args(kind))

    def describe(self) -> str:
        """`--half cotp|vp|all (cotp)`."""
        kinds = [k.__name__ for k in _kinds(self.kind) if isinstance(k, type)]
        shape = "|".join(self.choices) or (kinds or ["text"])[0].upper()
        default = "" if self.default in (None, inspect.Parameter.empty) else f" ({self.default})"
        return f"{self.flag} {shape}{default}"

    def read(self, text: str, task: str) -> Any:
        """`text` converted to the option's type; ConfigError if it does not fit."""
        try:
            return TypeAdapter(self.kind).validate_strings(text)
        except ValidationError as error:
            kinds = [f"{kind.__name__} values" for kind in _kinds(self.kind) if not self.choices]
            raise ConfigError(
                f"'{self.flag} {text}' does not fit the task '{task}'.",
                f"Allowed: {', '.join(self.choices or kinds)}.",
                f"Correct {self.flag}, or omit it.",
            ) from error


def _kinds(kind: Any) -> tuple[Any, ...]:
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
        """Whether the parameter `name` is optional."""
        parameter = inspect.signature(self.function).parameters.get(name)
        return parameter is not None and parameter.default is not inspect.Parameter.empty

    def __call__(
        self, *values: Any, options: Mapping[str, str] | None = None, **keywords: Any
    ) -> Any:
        """Call the function with options as typed on the command line, by flag or by name."""
        declared = self.options
        for flag, text in (options or {}).items():
            name = flag.lstrip("-").replace("-", "_")
            if name not in declared:
                raise self._no_option(flag, declared)
            keywords[name] = declared[name].read(text, self.task)
        signature = inspect.signature(self.function)
        if TASK_KEYWORD in signature.parameters:
            keywords[TASK_KEYWORD] = self.task
        try:
            signature.bind(*values, **keywords)
        except TypeError as error:
            raise ConfigError(
                f"A function of the task '{self.task}' cannot be called.", f"Python: {error}.",
                "Use the parameters in docs/reference/task-keys.md.",
            ) from error  # fmt: skip
        return self.function(*values, **keywords)

    def made(self, kind: type[T], *values: Any, **keywords: Any) -> T:
        """What the function returns; ConfigError if it is not a `kind`."""
        result = self(*values, **keywords)
        if isinstance(result, kind):
            return result
        raise self.wrong(f"It returned {type(result).__name__} instead of {kind.__name__}.")

    def wrong(self, why: str) -> ConfigError:
        """The error of a function whose result cannot be used."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return ConfigError(
            f"A function of the task '{self.task}' returned a value that cannot be used.",
            f"{why} ({_shown(code.co_filename)}:{code.co_firstlineno})" if code else why,
            "Correct the function. See docs/reference/task-keys.md.",
        )

    def _no_option(self, flag: str, options: Mapping[str, HookOption]) -> ConfigError:
        flags = [option.flag for option in options.values()]
        return ConfigError(
            f"'{flag}' is not an option of the task '{self.task}'.",
            f"Its options are: {', '.join(o.describe() for o in options.values())}."
            if options
            else "The task has no options for this command.",
            did_you_mean(flag, [*flags, *COMMAND_FLAGS]),
        )


def hook(task: str, key: str, reference: str, home: Home) -> Hook:
    """The function that `key: reference` of a declaration names; ConfigError if unusable."""
    function = load_declared(task, key, reference, home)
    if not callable(function):
        raise unloadable(task, key, reference, home, "It is not a function.")
    return Hook(task, function)


def load_declared(task: str, key: str, reference: str, home: Home) -> Any:
    """The object that `key: reference` of a declaration names; ConfigError if not importable."""
    try:
        return home.load(reference)
    except ImportError as error:
        raise unloadable(task, key, reference, home, f"Python reports: {error}.") from error


def unloadable(task: str, key: str, reference: str, home: Home, why: str) -> ConfigError:
    """The error for a name in a declaration that cannot be loaded or used."""
    kind = "Class" if key == "module" else "function"
    return ConfigError(
        f"'{key}: {reference}' of the task '{task}'{home.origin} cannot be loaded.",
        why,
        f"Write {key} as 'file:{kind}', with file.py in the task's folder. "
        "See docs/reference/task-keys.md.",
    )


PACKAGE = Path(__file__).parents[2]
KIT = frozenset({"tasks", "judge", "metrics", "data", "text.py", "types.py", "errors.py"})
"""Parts of soulkit that tasks are made of: pure code, apart from the models it is given."""
LIBRARIES = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})

_log = logging.getLogger(__name__)
_logged: set[str] = set()


@contextmanager
def task_code(task: DeclaredTask, call: str) -> Iterator[None]:
    """Run code of `task` in its method `call`; exceptions, including SystemExit, become a
    TaskError.

    Each place is logged once.
    """
    try:
        yield
    except SoulError:
        raise
    except BaseException as error:
        first = _first(error)
        if stops_command(first):
            raise
        if isinstance(first, SoulError):
            raise first from None
        frames = traceback.extract_tb(first.__traceback__)
        place = _place(task, list(dropwhile(_is_caller, frames)))
        if place is None:
            raise
        raise _as_error(task, call, f"{error_words(first)} ({place})", place, first) from error


def or_default(task: DeclaredTask, call: str, function: Callable[[], T], instead: T) -> T:
    """The result of `function`, or `instead` if the task's code raises; the error is logged."""
    try:
        with task_code(task, call):
            return function()
    except TaskError:
        return instead


def broken_task(error: BaseException) -> UserError | None:
    """The error for a command that stopped in a user's task code; None for other errors."""
    first = _first(error)
    frames = list(traceback.walk_tb(first.__traceback__))
    last = max((i for i, (f, _) in enumerate(frames) if _owner(f.f_code.co_filename) == "soulkit"),
               default=-1)  # fmt: skip
    callers = (frame.f_locals.get("self") for frame, _ in reversed(frames[last + 1 :]))
    task: DeclaredTask | None = next((one for one in callers if _is_task(one)), None)
    places = [one for one in traceback.extract_tb(first.__traceback__)
              if not one.filename.startswith(LIBRARIES)]  # fmt: skip
    if task is None and places and not Path(places[-1].filename).is_relative_to(PACKAGE):
        at = f"{_shown(places[-1].filename)}:{places[-1].lineno}, in {places[-1].name}"
        return UserError(
            f"Your code raised an error: {error_words(first)} ({at}).",
            "soulkit called this function of a task, a player or a plug-in.",
            "Correct the code and run the command again.",
        )
    if task is None or task.spec.home.builtin_task:
        return None
    place = _place(task, traceback.extract_tb(first.__traceback__)[last + 1 :])
    if place is None:
        return None
    return UserError(
        f"The task '{task.name}' raised an error: {error_words(first)} ({place}).",
        "The error is in the task's own code, outside the scoring of single rows.",
        "Correct the code and run the command again. For a run that had started, use "
        "`soul rescore RUN`, or start a new one with another --out.",
    )


def _is_task(value: object) -> bool:
    return isinstance(getattr(getattr(value, "spec", None), "home", None), Home)


def _first(error: BaseException) -> BaseException:
    """The first error of a group that was raised itself; what a generator raised to end wrongly."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions[0].__traceback__:
        error = error.exceptions[0]
    cause = error.__cause__
    return cause if isinstance(cause, StopIteration | StopAsyncIteration) else error


# -- what methods return ---------------------------------------------------------------------------


def checked_episode(task: DeclaredTask, episode: object) -> Episode:
    """The episode; TaskError if `play` returned anything else."""
    if isinstance(episode, Episode):
        return episode
    raise bad_return(task, "play", f"returned {type(episode).__name__} instead of an Episode")


def checked_feedback(task: DeclaredTask, feedback: object) -> Feedback | None:
    """The feedback; TaskError unless `critique` returned None or Feedback with a text."""
    if not isinstance(feedback, Feedback | None):
        raise bad_return(task, "critique", f"returned {type(feedback).__name__}, not Feedback")
    text: object = "" if feedback is None else feedback.text
    if not isinstance(text, str):
        kind = type(text).__name__
        raise bad_return(task, "critique", f"returned feedback whose text is of type {kind}")
    return feedback


def as_mapping(task: DeclaredTask, call: str, numbers: object) -> Mapping[str, Any]:
    """The mapping; TaskError if a method returned anything else."""
    if isinstance(numbers, Mapping):
        return numbers
    raise bad_return(task, call, f"returned {type(numbers).__name__} instead of a dict")


def checked_score(task: DeclaredTask, score: object, call: str = "score") -> Score:
    """The score with plain finite numbers; a metric that is not finite becomes None (undefined).

    TaskError for anything but a Score, and for a value or reward that is not finite.
    """
    if not isinstance(score, Score):
        raise bad_return(task, call, f"returned {type(score).__name__} instead of a Score")
    metrics: object = score.metrics
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise bad_return(task, call, f"returned metrics of type {kind} instead of a dict")
    for name in ("value", "reward"):
        number = getattr(score, name)
        if number is not None and finite_or_none(number) is None:
            raise bad_return(task, call, f"returned a {name} of {number!r}, not a finite number")
    return replace(
        score,
        value=finite_or_none(score.value),
        reward=finite_or_none(score.reward),
        metrics={str(name): finite_or_none(number) for name, number in metrics.items()},
    )


def finite_or_none(number: Any) -> float | None:
    """The number as a plain finite Python number (NumPy's are not serialisable), else None."""
    if isinstance(number, str) or number is None:
        return None
    try:
        plain = float(number)
    except (TypeError, ValueError, OverflowError):
        return None
    if isinstance(number, bool | int):
        return number
    return plain if math.isfinite(plain) else None


def bad_return(task: DeclaredTask, call: str, what: str) -> TaskError:
    """The error of a method with an invalid return value."""
    place = _defined(task, call)
    return _as_error(task, call, f"{call}() {what} ({place})", place, None)


def scoring_by(
    function: Callable[..., Any], task: DeclaredTask, low: float, high: float
) -> Callable[..., Any]:
    """A method `score` for `task` that calls a user's `function(row, reply, lines)`."""

    @wraps(function)
    async def score(example: Example, episode: Episode, cast: object) -> Score:
        if episode.failure is not None:
            return unscored(episode.failure)
        reply = episode.final.text if episode.final else ""
        lines = [{"seat": line.seat, "text": line.text} for line in episode.transcript]
        result = function(dict(example.fields), reply, lines)
        metrics = dict(result) if isinstance(result, Mapping) else {"value": result}
        value = finite_or_none(metrics.pop("value", None))
        if value is None or not low <= value <= high:
            shown = one_line(printable(repr(result)), 80)
            raise bad_return(task, "score", f"returned {shown}, not {low:g} to {high:g}")
        return Score(value=value, reward=value, metrics=metrics)

    return score


# -- where the error occurred ----------------------------------------------------------------------


def _owner(file: str) -> str:
    """The owner of a file: a `task` (or a library that it calls), the `kit`, or `soulkit`."""
    path = Path(file)
    if not path.is_relative_to(PACKAGE):
        return "task"
    room, *inside = path.relative_to(PACKAGE).parts
    if room not in KIT:
        return "soulkit"
    return "task" if room == "tasks" and len(inside) > 1 and inside[0] != "kit" else "kit"


def _is_caller(frame: traceback.FrameSummary) -> bool:
    return frame.filename == __file__ or _owner(frame.filename) == "soulkit"


def _place(task: DeclaredTask, frames: Sequence[traceback.FrameSummary]) -> str | None:
    """`file:line, in function` of the task's code that caused an error; None if soulkit did.

    An error in the kit caused by values from a user's task is the task's.
    """
    owners = [_owner(frame.filename) for frame in frames]
    own = [frame for frame, owner in zip(frames, owners, strict=True) if owner == "task"]
    ours = task.spec.home.builtin_task
    if not frames or "soulkit" in owners or (ours and owners[-1] == "kit"):
        return None
    if not own:
        kind, last = type(task).__qualname__, frames[-1]
        part = Path(last.filename).relative_to(PACKAGE).as_posix()
        return f"soulkit/{part}:{last.lineno}, in {last.name}, on values from {kind}"
    frame = [f for f in own if not _is_library(f.filename, task)] or own
    return f"{_shown(frame[-1].filename)}:{frame[-1].lineno}, in {frame[-1].name}"


def _is_library(file: str, task: DeclaredTask) -> bool:
    at_home = Path(file).is_relative_to(task.spec.home.folder)
    return file.startswith(LIBRARIES) and not at_home and not Path(file).is_relative_to(PACKAGE)


def _shown(file: str) -> str:
    path = Path(file)
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else file


def _defined(task: DeclaredTask, call: str) -> str:
    for name in (call, "grade", "parse"):
        code = getattr(inspect.unwrap(getattr(task, name, _defined)), "__code__", None)
        if code is not None and _owner(code.co_filename) == "task":
            return f"{_shown(code.co_filename)}:{code.co_firstlineno}, in {code.co_name}"
    return f"in {type(task).__qualname__}"


def _as_error(
    task: DeclaredTask, call: str, words: str, place: str, error: BaseException | None
) -> TaskError:
    """The TaskError with this message; logs each place once, with a traceback under --debug."""
    if place not in _logged:
        _logged.add(place)
        trace = error if _log.isEnabledFor(logging.DEBUG) else None
        _log.warning("task error in %s.%s: %s", task.name, call, words, exc_info=trace)
    return TaskError(words)
