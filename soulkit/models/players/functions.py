"""A player that is a Python function: `function:MODULE:NAME` or `function:FILE.py:NAME`.

    def answer(messages, conversation=""):        # may be async
        return "Hello! What is your order number?"

`messages` is a list of {"role": …, "content": …}; a second parameter gets the id of the
conversation, so that an agent can keep a state. An error of the function is a FunctionError with
its file and line. It is never retried.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from soulkit.api_keys import printable
from soulkit.errors import ConfigError, FunctionError
from soulkit.parse import read_limited
from soulkit.text import join_and, one_line
from soulkit.types import Call, Completion, Sampling, Segment, Usage

LONGEST = 400
"""Characters of an error that are reported."""


def stops_command(error: BaseException) -> bool:
    """Whether an error stops the command on purpose; False if a user's code raised it itself."""
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop
            return False
        return task is not None and task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):  # a signal interrupts any other line
        frames = traceback.extract_tb(error.__traceback__)
        raised = frames and "KeyboardInterrupt" in (frames[-1].line or "")
        return not raised or frames[-1].filename == asyncio.runners.__file__
    return isinstance(error, GeneratorExit)


def error_words(error: BaseException) -> str:
    """`ValueError: no tag`, on one line; only the type of an error that cannot be printed."""
    try:
        words = str(error)
    except BaseException:  # noqa: BLE001 - a user's exception class with a broken __str__
        words = "(no message)"
    return f"{type(error).__name__}: {one_line(printable(words), LONGEST)}".rstrip(": .")


def raised_at(error: BaseException, file: Path) -> str:
    """` (name.py:3, in f)`: the last line of `file` in the traceback; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if Path(one.filename) == file]
    return f" ({file.name}:{own[-1].lineno}, in {own[-1].name})" if own else ""


def execute_file(unique: str, file: Path) -> ModuleType:
    """The module in `file`, under the name `unique`, executed again only if its text has changed;
    raises what the file raises."""
    source = read_limited(file)
    unique += f".{hashlib.sha256(source).hexdigest()[:12]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, file)
    if spec is None:
        raise ImportError(f"no loader for {file}")
    module = sys.modules[unique] = importlib.util.module_from_spec(spec)
    try:  # not by the loader: its compiled file may be older than the text
        exec(compile(source, str(file), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def load_function(reference: str, *takes: str) -> tuple[Callable[..., Any], Path]:
    """(the function that `FILE.py:NAME` or `MODULE:NAME` names, its file); ConfigError if there is
    none, or if it does not take these arguments."""
    place, _, name = reference.rpartition(":")
    file = Path(place).expanduser().resolve()
    folder, unique = file.parent if file.suffix == ".py" else Path.cwd(), f"soulkit_user.{file}"
    try:
        if str(folder) not in sys.path:  # it may import its neighbours
            sys.path.append(str(folder))
        if file.suffix == ".py":
            module = execute_file(unique, file)
        else:
            module = importlib.import_module(place)
        function = getattr(module, name)
        if takes:
            inspect.signature(function).bind(*takes)
        return function, Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
    except BaseException as error:
        if stops_command(error):
            raise
        raise ConfigError(
            f"The function '{reference}' cannot be used.",
            f"Python reports: {error_words(error)}{raised_at(error, file)}.",
            "Write FILE.py:NAME or MODULE:NAME, where NAME is a function"
            f"{' of ' * bool(takes)}{join_and(takes)}.",
        ) from error  # fmt: skip


class FunctionModel:
    """A ChatModel that calls a function; one that is not async runs in a thread."""

    def __init__(self, reference: str) -> None:
        self.name = reference
        self.function, self.file = load_function(reference)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(self.function).parameters.values()
        self.takes_id = sum(one.kind in kinds for one in parameters) > 1

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """What the function returns. FunctionError if it raises, or returns no text."""
        arguments: list[Any] = [[{"role": one.role, "content": one.text} for one in context]]
        arguments += [f"{call.example_id}/{call.rollout}"] if self.takes_id else []
        try:
            text = await asyncio.to_thread(self.function, *arguments)
            if inspect.isawaitable(text):
                text = await text
        except BaseException as error:
            if stops_command(error):
                raise
            raise FunctionError(error_words(error) + raised_at(error, self.file)) from error
        if not isinstance(text, str):
            raise FunctionError(f"{self.name} returned {type(text).__name__} instead of text")
        words = sum(len(one.text.split()) for one in context)
        usage = Usage(calls=1, prompt_tokens=words, completion_tokens=len(text.split()))
        return Completion(text=text, usage=usage)

    async def close(self) -> None:
        """Nothing to close."""
