"""Asking the players of a run: how a command that asks them begins, when it gives up, and which of
them are asked by batch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from soulkit.errors import CallError, ConfigError, ProviderError
from soulkit.eval.config import EvalConfig
from soulkit.models.api.addresses import checked_url
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import Players, Serve, check_players, checkpoint_player
from soulkit.play.plan import Plan, Work, confirm_cost, pays
from soulkit.reporting import Reporter
from soulkit.runs.folder import Run, note_start

if TYPE_CHECKING:
    from soulkit.models.api.batches import Batches

BATCH_CONCURRENCY = 50_000
"""Rollouts that may wait for one batch: as many as it has lines."""
_OTHERS = ("partner", "environment")
GIVE_UP = 20
"""A command stops after so many failures in a row (or twice the concurrency, if more): a dead
server would only cost hours."""


def open_session(
    config: RolesConfig, folder: Path, command: str, plan: Callable[[], Plan], *, sealed: bool,
    reporter: Reporter,
) -> Run:  # fmt: skip
    """The run of a command that asks about what is there: its players are checked first, and what
    `plan` says that it costs is confirmed."""
    check_players(config)
    if pays(config):
        confirm_cost(plan(), config, reporter)
    run = Run.open(folder, command, config.identity(), sealed=sealed)
    for line in (f"{'resuming' if run.resumed else 'run folder'} {run.path}", *config.servers()):
        reporter.note(line)
    return run


@asynccontextmanager
async def asking(
    config: RolesConfig, run: Run, ledger: Ledger, serve: Serve, reporter: Reporter
) -> AsyncIterator[Players]:
    """Within it the players of `config` can be asked; there is no actor."""
    calls = {**config.call_arguments(ledger), "concurrency": config.concurrency}
    players = Players(
        ledger, None, checkpoint_player, calls, config.settings_of_players(),
        serve=serve, note=partial(note_start, run.path), reporter=reporter,
    )  # fmt: skip
    try:
        yield players
    finally:
        await players.close()


class FailureStreak:
    """Counts failures in a row of `what`, and stops the command when there are too many."""

    def __init__(self, concurrency: int, what: str) -> None:
        self.limit, self.what, self.length = max(GIVE_UP, 2 * concurrency), what, 0

    def add(self, failed: bool, words: str, kind: type[CallError] = ProviderError) -> None:
        """Take up one result; an error of `kind` after `limit` failures in a row."""
        self.length = self.length + 1 if failed else 0
        if self.length >= self.limit:
            raise kind(f"{self.length} {self.what} in a row failed, the last with: {words}")


# -- by batch --------------------------------------------------------------------------------------


def refuse_dialogues(config: EvalConfig, work: Sequence[Work]) -> None:
    """ConfigError for tasks whose actor cannot be asked by batch: each of its turns would wait a
    day for the one before it."""
    if not config.batch or config.ledger == "replay":
        return
    spoken = [part.task.name for part in work if _turns(part) > 1 or part.roles & set(_OTHERS)]
    if not spoken:
        return
    rest = [part.task.name for part in work if part.task.name not in spoken]
    alone = f"; by batch alone: --task {','.join(rest)}" if rest else ""
    raise ConfigError(
        f"--batch cannot play {', '.join(spoken)}: there the actor speaks in several turns.",
        "Every turn waits for the one before it, and a batch may take 24 hours.",
        "Play dialogues without --batch, or with --batch-judges, which asks only their judges that "
        f"way{alone}.",
    )


def _turns(part: Work) -> int:
    return max((part.task.calls(example).get("actor", 0) for example in part.examples), default=0)


def batch_words(config: EvalConfig) -> list[str]:
    """What a plan cannot say in its figures of the players that are asked by batch."""
    names = sorted({who.written() for role, who in config.served() if config.by_batch(role, who)})
    if not names:
        return []
    return [
        f"by batch at a lower price: {', '.join(names)}; each wave (the actor's replies, then the "
        "judges') takes up to 24 hours, whatever the time above says, and the first call of each "
        "is asked at once, at the full price"
    ]


def max_calls(config: EvalConfig) -> int:
    """Rollouts of a served model that are under way at once."""
    return BATCH_CONCURRENCY if config.batched else config.concurrency


def make_batches(config: EvalConfig, folder: Path, reporter: Reporter) -> Batches | None:
    """The batches of the run in `folder`; None for a run that is asked live, or replayed."""
    if not config.batched or config.ledger == "replay":
        return None
    from soulkit.models.api.batches import Batches

    return Batches(folder, poll_s=config.batch_poll_s, reporter=reporter)


def check_open_batches(config: EvalConfig, folder: Path) -> None:
    """ConfigError where calls of this run wait at a batch service and would be asked live."""
    from soulkit.models.api.batches import BOOK, BatchBook

    if config.ledger == "replay" or not (folder / BOOK).is_file():
        return
    fetched = {
        (checked_url(who.base_url), who.model)
        for role, who in config.served()
        if config.by_batch(role, who)
    }
    left = [
        state
        for state in BatchBook(folder).unused()
        if state.stage in ("created", "ended") and (state.base_url, state.model) not in fetched
    ]
    if left:
        names = ", ".join(f"{s.batch_id} ({s.requests} requests to {s.model})" for s in left)
        raise ConfigError(
            f"This run left batches at {left[0].base_url}: {names}.",
            "They are paid for; asked live, the same calls would be paid for a second time.",
            "Give --batch, or --batch-judges where they are the judges' alone, to take them up. To "
            f"go on without them, cancel them there and remove '{folder / BOOK}'.",
        )


@contextmanager
def report_open_batches(batches: Batches | None, reporter: Reporter) -> Iterator[None]:
    """Within it a run is played. However it ends, what goes on at a provider is named."""
    try:
        yield
        if batches is not None:
            batches.finish()
    finally:
        for line in batches.parting_words() if batches is not None else ():
            reporter.note(line)
