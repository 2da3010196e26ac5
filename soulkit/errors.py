"""The error classes of soulkit.

* `UserError`: the user can fix it. It has three sentences: what is wrong, why, and how to fix it.
  The command line prints them on three lines and exits with 2.
* `CallError`: a call to a model failed. The engine records it as a Failure of the episode; its text
  never enters a dialogue, a hint or a verdict.

To add one: subclass, and pass `what`, `why` and `way_out`; never include a secret.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from soulkit.extras import EXTRAS, install_line
from soulkit.text import sanitise
from soulkit.types import Usage

LIKELY = 0.65
"""Similarity from which a name counts as a typo of another; one wrong letter of three is 0.67."""


class SoulError(Exception):
    """Base class of all errors that soulkit raises on purpose."""


class UserError(SoulError):
    """An error that the user can fix; exit code 2."""

    def __init__(self, what: str, why: str, way_out: str) -> None:
        super().__init__(what)
        self.what, self.why, self.way_out = what, why, way_out

    def lines(self) -> tuple[str, str, str]:
        return self.what, self.why, self.way_out

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows instead of a traceback."""
        return [sanitise(line) for line in self.lines()]

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        return UserError, self.lines()  # subclasses have other arguments


class ConfigError(UserError):
    """A setting is wrong, unknown or missing."""


class BrokenFile(ConfigError):
    """A file of the user has problems; `why` has one line for each."""


class RunStopped(UserError):
    """A rule stopped a run before its last step; the run can be resumed. Exit code 1."""


class DataError(UserError):
    """A data file is missing, unreadable, of the wrong shape, or empty."""


class RowError(DataError):
    """A row is unusable."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why, "Correct the row, or remove it.")


class ModelLoadError(UserError):
    """A model folder or endpoint is unusable."""


class RunError(UserError):
    """A run folder does not fit the command: another kind of run, or other settings."""


class MissingPackage(UserError):
    """A package of EXTRAS is required but not installed."""

    def __init__(self, package: str, purpose: str) -> None:
        super().__init__(
            f"The package '{package}' is not installed.",
            f"It is needed for {purpose}.",
            f"Install it with: {install_line(EXTRAS[package])}",
        )

    @classmethod
    def of(cls, error: ModuleNotFoundError, purpose: str) -> MissingPackage | None:
        """The error for a failed import; None if no extra provides the package."""
        package = (error.name or "").partition(".")[0]
        return cls(package, purpose) if package in EXTRAS else None


class CallError(SoulError):
    """A call to a model failed after all retries. `reason` is a Failure slug."""

    reason = "provider_error"
    why = "The model did not reply, so there is no result."
    way_out = "Check the server, then run the same command again to resume."
    """The fix that the command line prints."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.usage = Usage()
        """Usage of replies that arrived before the failure and are not counted elsewhere."""


class ProviderError(CallError):
    """The server returned errors or did not reply until the retries ended."""


class FunctionError(ProviderError):
    """A player that is a Python function raised an error, or returned no text."""

    reason = "function_error"
    why = "The function did not return a reply."
    way_out = "Fix the function, then run the same command again to resume."


class PartnerError(CallError):
    """A partner or environment model failed, not the actor."""

    reason = "partner_error"


class ContextOverflow(CallError):
    """The prompt does not fit the model's context. Prompts are never truncated automatically."""

    reason = "context_overflow"


class TaskError(CallError):
    """A task's code raised an error or returned no valid score; the row stays unscored."""

    reason = "task_error"
    why = "The code of the task raised an error, so there is no score."
    way_out = (
        "Fix the task's code at that line. `soul rescore RUN` scores finished episodes again; "
        "episodes that could not run, and trainings, need a new --out."
    )


class UnreadableVerdict(CallError):
    """A judge or coach sent an unreadable reply.

    `forgery` tells whether a text contains an imitation of such a reply; None if there was no
    reply.
    """

    reason = "judge_error"

    def __init__(self, detail: str, forgery: Callable[[str], bool] | None = None) -> None:
        super().__init__(detail)
        self.forgery = forgery


MOST_NAMES = 200
"""Names that a hint lists."""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """A hint such as "Did you mean 'model'?", or all `words` if none is close."""
    names = sorted(set(words))
    if near := nearest(word, names):
        return f"Did you mean '{near}'?"
    more = f" and {len(names) - MOST_NAMES:,} others" if len(names) > MOST_NAMES else ""
    return f"Choose one of: {', '.join(names[:MOST_NAMES])}{more}."


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that `word` probably stands for: a likely typo, or a beginning of the name."""
    start, names = word.lstrip("-").casefold(), sorted(names)
    alike = [n for n in names if start and n.lstrip("-").casefold().startswith(start[0])]
    near = difflib.get_close_matches(word, alike[:5000], n=1, cutoff=LIKELY)
    whole = [n for n in sorted(alike, key=len) if len(start) > 2 and n.startswith(word)]
    return next(iter([*near, *whole]), None)
