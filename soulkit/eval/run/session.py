"""Asking the players of a run: open a session, stop after repeated failures, and use batch
calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from soulkit.data.rows import share_of
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
"""Rollouts that may wait for one batch; equals its maximum number of lines."""
_OTHERS = ("partner", "environment")
GIVE_UP = 20
"""Stop after this many failures in a row (or twice the concurrency, if larger), because the server
is probably down."""


def open_session(
    config: RolesConfig, folder: Path, command: str, plan: Callable[[], Plan], *, sealed: bool,
    reporter: Reporter,
) -> Run:  # fmt: skip
    """Open the run of a command that asks about recorded data, after checking its players and
    confirming the cost of `plan`."""
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
    """Context with the players of `config`, without an actor."""
    calls = {**config.call_arguments(ledger), "concurrency": config.concurrency}
    load = partial(checkpoint_player, max_context=config.max_context)
    players = Players(
        ledger, None, load, calls, config.settings_of_players(),
        serve=serve, note=partial(note_start, run.path), reporter=reporter,
    )  # fmt: skip
    try:
        yield players
    finally:
        await players.close()


def pilot_work(work: Sequence[Work], n: int, seed: int) -> list[Work]:
    """`n` random rows, spread evenly over the tasks; a larger pilot contains a smaller one."""
    orders = (sorted(part.examples, key=lambda e: share_of(f"pilot/{seed}", e.id)) for part in work)
    turns = [one for turn in zip_longest(*orders) for one in turn if one is not None]
    chosen = {id(one) for one in turns[:n]}
    parts = [replace(part, examples=tuple(e for e in part.examples if id(e) in chosen))
             for part in work]  # fmt: skip
    return [part for part in parts if part.examples]


class FailureStreak:
    """Counts consecutive failures of `what` and stops the command if there are too many."""

    def __init__(self, concurrency: int, what: str) -> None:
        self.limit, self.what, self.length = max(GIVE_UP, 2 * concurrency), what, 0

    def add(self, failed: bool, words: str, kind: type[CallError] = ProviderError) -> None:
        """Count one result; raises `kind` after `limit` failures in a row."""
        self.length = self.length + 1 if failed else 0
        if self.length >= self.limit:
            raise kind(f"{self.length} {self.what} in a row failed; the last error: {words}")


# -- by batch --------------------------------------------------------------------------------------


def refuse_dialogues(config: EvalConfig, work: Sequence[Work]) -> None:
    """ConfigError for tasks whose actor cannot use batch calls: each turn could wait a day for the
    one before it."""
    if not config.batch or config.ledger == "replay":
        return
    spoken = [part.task.name for part in work if _turns(part) > 1 or part.roles & set(_OTHERS)]
    if not spoken:
        return
    rest = [part.task.name for part in work if part.task.name not in spoken]
    alone = f". Tasks that work with --batch: --task {','.join(rest)}" if rest else ""
    raise ConfigError(
        f"--batch cannot play {', '.join(spoken)}, where the actor replies in several turns.",
        "Each turn waits for the one before it, and a batch can take 24 hours.",
        f"Leave out --batch, or use --batch-judges, which batches only the judges' calls{alone}.",
    )


def _turns(part: Work) -> int:
    return max((part.task.calls(example).get("actor", 0) for example in part.examples), default=0)


def batch_words(config: EvalConfig) -> list[str]:
    """Notes for a plan about players that use batch calls."""
    names = sorted({who.written() for role, who in config.served() if config.by_batch(role, who)})
    if not names:
        return []
    return [
        f"batch calls at a lower price: {', '.join(names)}; each wave (first the actor, then the "
        "judges) can take 24 hours, which the time above does not include. The first call to each "
        "model is made live, at the full price"
    ]


def max_calls(config: EvalConfig) -> int:
    """Maximum number of concurrent rollouts of an API model."""
    return BATCH_CONCURRENCY if config.batched else config.concurrency


def make_batches(config: EvalConfig, folder: Path, reporter: Reporter) -> Batches | None:
    """The batches of the run in `folder`; None if it uses live calls or is a replay."""
    if not config.batched or config.ledger == "replay":
        return None
    from soulkit.models.api.batches import Batches

    return Batches(folder, poll_s=config.batch_poll_s, reporter=reporter)


def check_open_batches(config: EvalConfig, folder: Path) -> None:
    """ConfigError if open batches of this run would be asked again by live calls."""
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
            f"This run has open batches at {left[0].base_url}: {names}.",
            "These batches have already been paid for. Live calls would be charged again.",
            "Add --batch (or --batch-judges, if only judges are in the batches) to fetch them. To "
            f"continue without them, cancel them there and delete '{folder / BOOK}'.",
        )


@contextmanager
def report_open_batches(batches: Batches | None, reporter: Reporter) -> Iterator[None]:
    """Context in which a run is played; at its end, even after an error, open batches are
    listed."""
    try:
        yield
        if batches is not None:
            batches.finish()
    finally:
        for line in batches.parting_words() if batches is not None else ():
            reporter.note(line)
