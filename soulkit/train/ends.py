"""The end of every method of a comparison, scored by one judge.

Methods that were trained with different judges cannot be compared by what these say. What each of
them last said can: its newest episodes on held-out rows, else its drafts of the last steps, are
judged again by somebody who is the same for all. The result is a run folder inside the method's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from soulkit.eval.asking import renew, renewal_of
from soulkit.models.roles.config import RolesConfig
from soulkit.models.roles.settings import RoleSettings
from soulkit.play.costs import AskUser, CostUnconfirmed, is_paid
from soulkit.runs.records import drafts, load_records, newest_dev
from soulkit.train.ablate import Planned
from soulkit.train.state.recorded import recorded_training
from soulkit.train.state.summary import LAST_STEPS
from soulkit.types import Record

JUDGED_END = "judged_end"
"""How the run folders of judged ends begin, inside that of their training."""


def end_folder(judge: str) -> str:
    """The run folder of the end that `judge` scored, as it is written: another judge has another
    folder, so that nobody's numbers stand under somebody else's name."""
    return f"{JUDGED_END}-{hashlib.sha256(judge.encode()).hexdigest()[:8]}" if judge else ""


def end_records(run: Path) -> list[Record]:
    """What a training last said; DataError when its episodes cannot be read."""
    held_out = newest_dev(run)
    if held_out:
        return held_out
    played = drafts(load_records(run / "episodes.jsonl"))
    last = max((record.step for record in played), default=0)
    return [record for record in played if record.step > last - LAST_STEPS]


def confirm_judge(
    judge: RoleSettings, config: RolesConfig, say: Callable[[str], None], ask: AskUser | None
) -> None:
    """Have a judge agreed to that costs money: before the training, whose episodes nobody knows.

    CostUnconfirmed when nobody agrees.
    """
    if not is_paid(config, judge) or config.yes or config.max_cost is not None:
        return
    say(f"{judge.written()} scores the ends of all methods, and is paid for every question")
    if ask is None or not ask("Go on?"):
        raise CostUnconfirmed(
            f"The judge {judge.written()} costs money, and nobody has agreed to it.",
            "It scores the ends of all methods when these are trained.",
            "Confirm with --yes, or bound the cost with --max-cost DOLLARS.",
        )


def judge_ends(
    runs: Sequence[Planned], judge: RoleSettings, say: Callable[[str], None], *, trust: bool = False
) -> None:
    """Score the ends of the runs that are finished; what was asked before is not asked again."""
    for run in runs:
        if not (run.path / "summary.json").is_file():
            continue
        recorded = recorded_training(run.path, trust=trust)
        recorded = replace(recorded, records=end_records(run.path))
        renewal = renewal_of(
            recorded, (judge,), None, run.path / end_folder(judge.written()), run.path, yes=True,
            max_cost=run.config.max_cost,
        )  # fmt: skip
        say(f"{len(recorded.records)} episodes of {run.arm.spelling} seed {run.config.seed} "
            f"are scored by {judge.written()}")  # fmt: skip
        renew(renewal)
