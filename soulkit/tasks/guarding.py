"""What a task's own code raises, and what it gives back that is none: a TaskError, with the place.

Whoever plays calls a task within `task_code`. A task may break on a single row, or say `sys.exit`;
that row is unscored (`task_error`), its words name file and line, and the run goes on. Errors of
soulkit and of models pass as they are, and so does what broke in soulkit itself: an error that came
through anything but the kit that tasks are made of is not the task's, even if the task asked.

Example: `grade` of my_task.py divides by a length of 0 →
`ZeroDivisionError: division by zero (my_task.py:12, in grade)`.
"""

from __future__ import annotations

import inspect
import logging
import math
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from soulkit.errors import SoulError, TaskError, UserError
from soulkit.keys import printable
from soulkit.text import one_line
from soulkit.types import Episode, Feedback, Score

if TYPE_CHECKING:
    from soulkit.tasks.base import Task

T = TypeVar("T")
PACKAGE = Path(__file__).parents[1]
KIT = frozenset({"tasks", "judge", "metrics", "data", "text.py", "types.py", "errors.py"})
"""Parts of soulkit that a task is made of: pure, but for the models that they are handed."""
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
LONGEST = 400
"""Characters of an error's own words that are kept."""

_log = logging.getLogger(__name__)
_logged: set[str] = set()


@contextmanager
def task_code(task: Task, call: str) -> Iterator[None]:
    """Within it the code of `task` runs, in its method `call`. Raises TaskError for what that
    raises, SystemExit included; each place is said once, on stderr."""
    try:
        yield
    except SoulError:
        raise
    except (Exception, SystemExit) as error:
        first = _first(error)
        if isinstance(first, SoulError):
            raise first from None
        place = _place(task, first)
        if place is None:
            raise
        raise _as_error(task, call, f"{error_words(first)} ({place})", place, first) from error


def error_words(error: BaseException) -> str:
    """`ValueError: no tag`, on one line; of an error that cannot be told, its kind alone."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001 - an error of a user's own, with a fault in its words
        words = "(without words)"
    return f"{type(error).__name__}: {one_line(printable(words), LONGEST)}"


def broken_task(error: BaseException) -> UserError | None:
    """What ended a command within the code of a user's task, where no row could be left out for it:
    with file and line. None for what did not come of one."""
    first = _first(error)
    frames = traceback.extract_tb(first.__traceback__)
    inside = [i for i, frame in enumerate(frames) if _is_infrastructure(_part(frame.filename))]
    start = inside[-1] + 1 if inside else 0  # whoever called the task, or broke when it asked
    task = _task_in(first, start)
    place = None if task is None else _place_in(task, frames[start:])
    if task is None or place is None:
        return None
    return UserError(
        f"The task '{task.name}' broke: {error_words(first)} ({place}).",
        "The task is no part of soulkit, and no single row could be left out for it.",
        "Mend the task at that line and run the command again; a run that it had begun is scored "
        "again by `soul rescore RUN`, or begun anew with another --out.",
    )


def _task_in(error: BaseException, start: int) -> Task | None:
    """The user's task whose method was called last before `error`, from frame `start` on."""
    from soulkit.tasks.base import Task

    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    tasks = (one for one in reversed(callers[start:]) if isinstance(one, Task))
    task = next(tasks, None)
    return None if task is None or task.spec.home.builtin_task else task


def attempt(task: Task, call: str, function: Callable[[], T], instead: T) -> T:
    """What `function` gives, or `instead` where the code of `task` breaks, which is said."""
    try:
        with task_code(task, call):
            return function()
    except TaskError:
        return instead


def checked_episode(task: Task, episode: object) -> Episode:
    """TaskError for a play that gave back no Episode."""
    if isinstance(episode, Episode):
        return episode
    raise returned(task, "play", f"gave back {type(episode).__name__}, no Episode")


def checked_feedback(task: Task, feedback: object) -> Feedback | None:
    """TaskError for a critique that gave back neither Feedback with a text nor None."""
    if feedback is None:
        return None
    if isinstance(feedback, Feedback):
        text: object = feedback.text
        if isinstance(text, str):
            return feedback
        kind = type(text).__name__
        raise returned(task, "critique", f"gave feedback whose text is of type {kind}")
    raise returned(task, "critique", f"gave back {type(feedback).__name__}, no Feedback")


def as_mapping(task: Task, call: str, numbers: object) -> Mapping[str, Any]:
    """TaskError for a method that gave back no dict."""
    if isinstance(numbers, Mapping):
        return numbers
    raise returned(task, call, f"gave back {type(numbers).__name__}, no dict")


def checked_score(task: Task, score: object, call: str = "score") -> Score:
    """The score, of plain finite numbers; a metric that is not finite is undefined (None).

    TaskError for what is no Score, and for a value or reward that is not a finite number.
    """
    if not isinstance(score, Score):
        raise returned(task, call, f"gave back {type(score).__name__}, no Score")
    many: object = score.metrics
    if not isinstance(many, Mapping):
        kind = type(many).__name__
        raise returned(task, call, f"gave metrics of type {kind}, which are no dict")
    for name in ("value", "reward"):
        number = getattr(score, name)
        if number is not None and finite_or_none(number) is None:
            raise returned(task, call, f"gave a {name} of {number!r}, which is no finite number")
    metrics = {
        name: None if number is None else finite_or_none(number)
        for name, number in score.metrics.items()
    }
    return replace(
        score,
        value=finite_or_none(score.value),
        reward=finite_or_none(score.reward),
        metrics=metrics,
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


def _first(error: BaseException) -> BaseException:
    """An error, or the first one that a group of tasks put together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# --- where it broke -------------------------------------------------------------------------------


def _place(task: Task, error: BaseException) -> str | None:
    """`file:line, in function` of the task's code that an error comes of; None where it does not
    come of the task."""
    # The first frames are those of whoever called the task.
    return _place_in(task, list(dropwhile(_calls, traceback.extract_tb(error.__traceback__))))


def _place_in(task: Task, frames: Sequence[traceback.FrameSummary]) -> str | None:
    parts = [_part(frame.filename) for frame in frames]
    if any(_is_infrastructure(part) for part in parts):
        return None
    own = [i for i, part in enumerate(parts) if not part or _is_benchmark(part)]
    # What the kit makes of what it was handed is the fault of whoever wrote the task, unless the
    # task is one of ours.
    ours = task.spec.home.builtin_task
    if not own and frames and not ours:
        kind, last = type(task).__qualname__, frames[-1]
        return f"soulkit/{parts[-1]}:{last.lineno}, in {last.name}, on what {kind} gave it"
    if not own or (ours and any(parts[own[-1] + 1 :])):
        return None
    written = [i for i in own if not _is_library(frames[i].filename, task)]
    frame = frames[(written or own)[-1]]
    return f"{_shown(frame.filename)}:{frame.lineno}, in {frame.name}"


def _part(file: str) -> str:
    """Where in soulkit a file stands (`tasks/base.py`); empty outside it."""
    path = Path(file)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""


def _is_infrastructure(part: str) -> bool:
    return bool(part) and part.split("/")[0] not in KIT


def _calls(frame: traceback.FrameSummary) -> bool:
    part = _part(frame.filename)
    return part == "tasks/guarding.py" or _is_infrastructure(part)


def _is_benchmark(part: str) -> bool:
    return part.startswith("tasks/") and part.count("/") > 1


def _is_library(file: str, task: Task) -> bool:
    if Path(file).is_relative_to(task.spec.home.folder) or _is_benchmark(_part(file)):
        return False
    return file.startswith(LIBRARIES) or file.startswith("<frozen")


def _shown(file: str) -> str:
    path = Path(file)
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else file


def returned(task: Task, call: str, what: str) -> TaskError:
    """The error of a method that gave back what it may not."""
    place = _defined(task, call)
    return _as_error(task, call, f"{call}() {what} ({place})", place, None)


def _defined(task: Task, call: str) -> str:
    """Where the task's class says what `call` does, in its own code or in a part that it calls."""
    for name in (call, "grade", "parse"):
        code = getattr(inspect.unwrap(getattr(type(task), name, _nothing)), "__code__", None)
        if code is None or code is _nothing.__code__:
            continue
        part = _part(code.co_filename)
        if not part or _is_benchmark(part):
            return f"{_shown(code.co_filename)}:{code.co_firstlineno}, in {name}"
    return f"in {type(task).__qualname__}"


def _nothing() -> None:
    """Stands for a method that there is not."""


def _as_error(
    task: Task, call: str, words: str, place: str, error: BaseException | None
) -> TaskError:
    """The TaskError of these words; each place is said once, with --debug as a traceback."""
    if place not in _logged:
        _logged.add(place)
        trace = error if _log.isEnabledFor(logging.DEBUG) else None
        _log.warning("task error in %s.%s: %s", task.name, call, words, exc_info=trace)
    return TaskError(words)
