"""One error tree.

* `UserError`: something the user can mend. Three sentences: what happened, why it matters or came
  about, and the way out. The command line prints them on three lines and exits with 2.
* `CallError`: a call to a model broke. The engine turns it into a Failure on the episode; it never
  becomes dialogue, a hint or a verdict.

To add one: subclass, give it a `what`, a `why` and a `way_out`; never print a secret in any of
them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from soulkit.extras import EXTRAS, install_line
from soulkit.types import Usage


class SoulError(Exception):
    """Base of every error that soulkit raises on purpose."""


class UserError(SoulError):
    """A mistake that the user can mend; exit code 2."""

    def __init__(self, what: str, why: str, way_out: str) -> None:
        super().__init__(what)
        self.what, self.why, self.way_out = what, why, way_out

    def lines(self) -> tuple[str, str, str]:
        return self.what, self.why, self.way_out


class ConfigError(UserError):
    """A setting is wrong, unknown or missing."""


class RunStopped(UserError):
    """A run ended by a rule before its steps were done; it resumes. Exit code 1."""


class DataError(UserError):
    """A data file is missing, unreadable, of the wrong shape, or empty."""


class RowError(DataError):
    """One row cannot be used."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why, "Mend the row, or leave it out.")


class ModelLoadError(UserError):
    """A model folder or endpoint cannot be used."""


class RunError(UserError):
    """A run folder belongs to something else or was started with another configuration."""


class MissingPackage(UserError):
    """A package of EXTRAS is needed for what was asked."""

    def __init__(self, package: str, purpose: str) -> None:
        super().__init__(
            f"The package '{package}' is not installed.",
            f"It is needed for {purpose}.",
            f"Install it with: {install_line(EXTRAS[package])}",
        )

    @classmethod
    def of(cls, error: ModuleNotFoundError, purpose: str) -> MissingPackage | None:
        """What to say of an import that failed; None where no extra would bring the package."""
        package = (error.name or "").partition(".")[0]
        return cls(package, purpose) if package in EXTRAS else None


class CallError(SoulError):
    """A call to a model failed for good, after its retries. `reason` is a Failure slug."""

    reason = "provider_error"
    why = "A model did not answer, and no result is made up for it."
    way_out = "Check the endpoint, then run the same command again."
    """What the command line says where such an error ends a run."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.usage = Usage()
        """What replies cost that came before it gave up, and that nobody else has counted."""


class ProviderError(CallError):
    """The server answered with an error, or not at all, until the retries ended."""


class PartnerError(CallError):
    """A partner or environment model failed: the actor is not to blame."""

    reason = "partner_error"


class ContextOverflow(CallError):
    """The prompt does not fit the model's context; nothing is cut silently."""

    reason = "context_overflow"


class TaskError(CallError):
    """A task's own code raised, or gave back what is no score: the row stays unscored."""

    reason = "task_error"
    why = "The code of the task broke, and no score is made up for it."
    way_out = (
        "Mend the task at that line. What was played is scored again by `soul rescore RUN`; what "
        "could not be played, and a training, needs another --out."
    )


class UnreadableVerdict(CallError):
    """A judge or coach answered something that cannot be read.

    `forgery` says whether somebody's words hold what poses as such an answer; None where nothing
    was answered, so that nobody's words can be the cause.
    """

    reason = "judge_error"

    def __init__(self, detail: str, forgery: Callable[[str], bool] | None = None) -> None:
        super().__init__(detail)
        self.forgery = forgery


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """A hint such as \" Did you mean 'model'?\", or the sorted list when nothing is near."""
    names = sorted(words)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(names)}."
