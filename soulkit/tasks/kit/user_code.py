"""The code of a task: where it is found, the functions its declaration names, and its errors.

A declaration names code as `module:attribute` (`importer: importer:read`). The module is looked for
in the task's folder first: beside the user's tasks file, in `soulkit/tasks/<folder>/`, or in the
folder of an installed package. docs/reference/task-keys.md lists the functions.

Keyword-only parameters of such a function are options: `*, half: Literal["cotp", "vp"]` is `--half
cotp` on the command line. A parameter `task` gets the name of the task.

Within `task_code`, what a task's own code raises becomes a TaskError with its file and line, so
that one bad row is unscored and the run goes on. Errors of soulkit and of models pass unchanged.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
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
from itertools import dropwhile
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from soulkit.api_keys import printable
from soulkit.errors import ConfigError, SoulError, TaskError, UserError, did_you_mean
from soulkit.text import one_line
from soulkit.types import Episode, Feedback, Score


class Declared(Protocol):
    @property
    def home(self) -> Home: ...


class DeclaredTask(Protocol):
    name: str

    @property
    def spec(self) -> Declared: ...


BUILTIN = Path(__file__).parents[1]
"""`soulkit/tasks`: shared prompts, the kit, and one folder for each built-in benchmark."""


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of a task, and its name as a package where it is one."""

    folder: Path = BUILTIN
    package: str = ""
    distribution: str = ""
    """What was installed to bring the package; empty for others."""

    @classmethod
    def builtin(cls, name: str) -> Home:
        """The home of a benchmark that comes with soulkit."""
        return cls(BUILTIN / name, f"soulkit.tasks.{name}")

    @property
    def builtin_task(self) -> bool:
        """Whether a task that comes with soulkit lives here."""
        return self.folder.parent == BUILTIN

    @property
    def origin(self) -> str:
        """What an error adds to the name of a task that was installed."""
        return f" of the distribution '{self.distribution}'" if self.distribution else ""

    def load(self, reference: str) -> Any:
        """The object that `module:attribute` names.

        Raises ImportError, AttributeError, SyntaxError or ValueError; anything else that a module
        raises becomes an ImportError.
        """
        module, _, attribute = reference.partition(":")
        try:
            return getattr(self._module(module), attribute or "missing")
        except (ImportError, AttributeError, SyntaxError, ValueError):
            raise
        except (Exception, SystemExit) as error:
            raise ImportError(f"{type(error).__name__}: {error}") from error

    def _module(self, name: str) -> ModuleType:
        file = self.folder.joinpath(*name.split(".")).with_suffix(".py")
        if not file.is_file():
            self._add_to_path()
            return importlib.import_module(name)
        if self.package:
            return importlib.import_module(f"{self.package}.{name}")
        self._add_to_path()
        # A name of its own: two users' files may both be called my_task.py, or random.py.
        mark = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
        unique = f"soulkit_user_{mark}.{name}"
        return sys.modules.get(unique) or _execute(unique, file)

    def _add_to_path(self) -> None:
        if not self.package and self.folder != BUILTIN and str(self.folder) not in sys.path:
            sys.path.append(str(self.folder))


def _execute(unique: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(unique, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


COMMAND_FLAGS = ("--out", "--rows", "--seed", "--tasks", "--trust", "--json", "--drafter",
                 "--filter", "--max-cost")  # fmt: skip
"""Options of the commands that call hooks, for a suggestion where an option is misspelt."""
TASK_KEYWORD = "task"


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
        try:
            return TypeAdapter(self.kind).validate_strings(text)
        except ValidationError as error:
            kinds = [f"{kind.__name__} values" for kind in _kinds(self.kind) if not self.choices]
            raise ConfigError(
                f"'{self.flag} {text}' does not fit the task '{task}'.",
                f"Allowed: {', '.join(self.choices or kinds)}.",
                f"Mend {self.flag}, or leave it out.",
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
        """Whether the parameter `name` may be left out."""
        parameter = inspect.signature(self.function).parameters.get(name)
        return parameter is not None and parameter.default is not inspect.Parameter.empty

    def __call__(
        self, *values: Any, options: Mapping[str, str] | None = None, **keywords: Any
    ) -> Any:
        """Call the function with options as the command line gives them, by flag or by name."""
        declared = self.options
        for flag, text in (options or {}).items():
            name = flag.lstrip("-").replace("-", "_")
            if name not in declared:
                raise self._no_option(flag, declared)
            keywords[name] = declared[name].read(text, self.task)
        if TASK_KEYWORD in inspect.signature(self.function).parameters:
            keywords[TASK_KEYWORD] = self.task
        return self.function(*values, **keywords)

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
    function = load_declared(task, key, reference, home)
    if not callable(function):
        raise unloadable(task, key, reference, home, "It is no function.")
    return Hook(task, function)


def load_declared(task: str, key: str, reference: str, home: Home) -> Any:
    """What `key: reference` of a declaration names; ConfigError when it cannot be imported."""
    try:
        return home.load(reference)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise unloadable(task, key, reference, home, f"Python says: {error}.") from error


def unloadable(task: str, key: str, reference: str, home: Home, why: str) -> ConfigError:
    """The error of a name in a declaration that leads to nothing that can be used."""
    kind = "Class" if key == "module" else "function"
    return ConfigError(
        f"'{key}: {reference}' of the task '{task}'{home.origin} cannot be loaded.",
        why,
        f"Write {key} as 'file:{kind}', with file.py in the task's folder. "
        "See docs/reference/task-keys.md.",
    )


T = TypeVar("T")
PACKAGE = Path(__file__).parents[2]
KIT = frozenset({"tasks", "judge", "metrics", "data", "text.py", "types.py", "errors.py"})
"""Parts of soulkit that a task is made of: pure, but for the models that they are handed."""
LIBRARIES = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
LONGEST = 400

_log = logging.getLogger(__name__)
_logged: set[str] = set()


@contextmanager
def task_code(task: DeclaredTask, call: str) -> Iterator[None]:
    """Run code of `task`, in its method `call`; what it raises becomes a TaskError, SystemExit too.

    Each place is logged once.
    """
    try:
        yield
    except SoulError:
        raise
    except (Exception, SystemExit) as error:
        first = _first(error)
        if isinstance(first, SoulError):
            raise first from None
        frames = traceback.extract_tb(first.__traceback__)
        place = _place(task, list(dropwhile(_is_caller, frames)))
        if place is None:
            raise
        raise _as_error(task, call, f"{error_words(first)} ({place})", place, first) from error


def or_default(task: DeclaredTask, call: str, function: Callable[[], T], instead: T) -> T:
    """What `function` returns, or `instead` where the code of `task` breaks, which is logged."""
    try:
        with task_code(task, call):
            return function()
    except TaskError:
        return instead


def error_words(error: BaseException) -> str:
    """`ValueError: no tag`, on one line; only the kind of an error that cannot be printed."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001 - an error of a user's own, with a fault in its words
        words = "(without words)"
    return f"{type(error).__name__}: {one_line(printable(words), LONGEST)}"


def broken_task(error: BaseException) -> UserError | None:
    """The error of a command that ended in the code of a user's task; None for other errors."""
    first = _first(error)
    frames = list(traceback.walk_tb(first.__traceback__))
    last = max((i for i, (f, _) in enumerate(frames) if _owner(f.f_code.co_filename) == "soulkit"),
               default=-1)  # fmt: skip
    callers = (frame.f_locals.get("self") for frame, _ in reversed(frames[last + 1 :]))
    task: DeclaredTask | None = next((one for one in callers if _is_task(one)), None)
    if task is None or task.spec.home.builtin_task:
        return None
    place = _place(task, traceback.extract_tb(first.__traceback__)[last + 1 :])
    if place is None:
        return None
    return UserError(
        f"The task '{task.name}' broke: {error_words(first)} ({place}).",
        "The task is no part of soulkit, and no single row could be left out for it.",
        "Mend the task at that line and run the command again; a run that it had begun is scored "
        "again by `soul rescore RUN`, or begun anew with another --out.",
    )


def _is_task(value: object) -> bool:
    return isinstance(getattr(getattr(value, "spec", None), "home", None), Home)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# -- what methods return ---------------------------------------------------------------------------


def checked_episode(task: DeclaredTask, episode: object) -> Episode:
    """TaskError for a play that gave back no Episode."""
    if isinstance(episode, Episode):
        return episode
    raise bad_return(task, "play", f"gave back {type(episode).__name__}, no Episode")


def checked_feedback(task: DeclaredTask, feedback: object) -> Feedback | None:
    """TaskError for a critique that gave back neither Feedback with a text nor None."""
    if not isinstance(feedback, Feedback | None):
        raise bad_return(task, "critique", f"gave back {type(feedback).__name__}, no Feedback")
    text: object = "" if feedback is None else feedback.text
    if not isinstance(text, str):
        kind = type(text).__name__
        raise bad_return(task, "critique", f"gave feedback whose text is of type {kind}")
    return feedback


def as_mapping(task: DeclaredTask, call: str, numbers: object) -> Mapping[str, Any]:
    """TaskError for a method that gave back no dict."""
    if isinstance(numbers, Mapping):
        return numbers
    raise bad_return(task, call, f"gave back {type(numbers).__name__}, no dict")


def checked_score(task: DeclaredTask, score: object, call: str = "score") -> Score:
    """The score, of plain finite numbers; a metric that is not finite is undefined (None).

    TaskError for anything but a Score, and for a value or reward that is not finite.
    """
    if not isinstance(score, Score):
        raise bad_return(task, call, f"gave back {type(score).__name__}, no Score")
    metrics: object = score.metrics
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise bad_return(task, call, f"gave metrics of type {kind}, which are no dict")
    for name in ("value", "reward"):
        number = getattr(score, name)
        if number is not None and finite_or_none(number) is None:
            raise bad_return(task, call, f"gave a {name} of {number!r}, which is no finite number")
    return replace(
        score,
        value=finite_or_none(score.value),
        reward=finite_or_none(score.reward),
        metrics={name: finite_or_none(number) for name, number in metrics.items()},
    )


def finite_or_none(number: Any) -> float | None:
    """A finite number as Python has it (NumPy's cannot be written down); None for all else."""
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
    """The error of a method that gave back what it may not."""
    place = _defined(task, call)
    return _as_error(task, call, f"{call}() {what} ({place})", place, None)


# -- where it broke --------------------------------------------------------------------------------


def _owner(file: str) -> str:
    """Whose code a file is: of a `task` (or a library that it calls), the `kit`, or `soulkit`."""
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
    """`file:line, in function` of the task's code that an error comes from; None: of soulkit.

    What breaks in the kit on values from a user's task is the task's.
    """
    owners = [_owner(frame.filename) for frame in frames]
    own = [frame for frame, owner in zip(frames, owners, strict=True) if owner == "task"]
    ours = task.spec.home.builtin_task
    if not frames or "soulkit" in owners or (ours and owners[-1] == "kit"):
        return None
    if not own:
        kind, last = type(task).__qualname__, frames[-1]
        part = Path(last.filename).relative_to(PACKAGE).as_posix()
        return f"soulkit/{part}:{last.lineno}, in {last.name}, on what {kind} gave it"
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
        code = getattr(inspect.unwrap(getattr(type(task), name, _defined)), "__code__", None)
        if code is not None and _owner(code.co_filename) == "task":
            return f"{_shown(code.co_filename)}:{code.co_firstlineno}, in {name}"
    return f"in {type(task).__qualname__}"


def _as_error(
    task: DeclaredTask, call: str, words: str, place: str, error: BaseException | None
) -> TaskError:
    """The TaskError of these words; each place is logged once, with --debug as a traceback."""
    if place not in _logged:
        _logged.add(place)
        trace = error if _log.isEnabledFor(logging.DEBUG) else None
        _log.warning("task error in %s.%s: %s", task.name, call, words, exc_info=trace)
    return TaskError(words)
