"""General ability before and after training: greedy replies to tasks with rule-based scores.

    RUN/retention/before.jsonl     episodes of the weights before the first step
    RUN/retention/after.jsonl      episodes of the weights after the last step

A file is renamed into place when it is complete, and its episodes record the hash of the weights
(`completion.policy`), so an interrupted measurement is repeated and results of other weights are
never reused. If `before` is missing after the first step, it cannot be measured any more, and the
run reports that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from soulkit.models.base import Cast, Player
from soulkit.runs.records import RecordWriter, load_records
from soulkit.train.rollouts.play import played_greedily
from soulkit.train.setup.rows import general_rows, general_settings
from soulkit.train.state.loop import Loop
from soulkit.train.state.summary import AbilityTotals, ability_totals
from soulkit.types import Record

FOLDER = "retention"
Moment = Literal["before", "after"]


async def measure_ability(loop: Loop, moment: Moment) -> None:
    """Play the rows with the current weights, unless that is already done or `retention` is off.
    Called before the first step and after the last."""
    path = loop.run.path / FOLDER / f"{moment}.jsonl"
    version = loop.policy.version()
    if not loop.config.retention or _is_of(path, version) or (moment == "before" and loop.step):
        return
    loop.reporter.phase(f"general ability {moment} training")
    config = general_settings(loop.config)
    sampler = loop.policy.sampler(config.batch_size, deterministic=config.deterministic)
    await sampler.take(loop.policy)
    step = loop.step - (moment == "after")
    try:
        episodes = [
            record
            async for _, records in played_greedily(
                config, Cast(actor=Player(sampler)), general_rows(), step
            )
            for record in records
        ]
    finally:
        await sampler.close()
    _write(path, episodes)


def _write(path: Path, episodes: Sequence[Record]) -> None:
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    aside.unlink(missing_ok=True)
    writer = RecordWriter(aside)
    writer.write(*episodes)
    writer.close()
    os.replace(aside, path)


def _is_of(path: Path, version: str) -> bool:
    if not path.is_file():
        return False
    replies = [
        turn.completion
        for record in load_records(path)
        for trace in record.episode.traces
        for turn in trace.turns
    ]
    return bool(replies) and all(reply.policy == version for reply in replies)


def ability_of(loop: Loop) -> AbilityTotals | None:
    """Totals of the two measurements; None for a run without `retention`. Prints what was lost and
    whether the loss is significant."""
    if not loop.config.retention:
        return None
    folder = loop.run.path / FOLDER
    files = (folder / f"{moment}.jsonl" for moment in ("before", "after"))
    before, after = (load_records(file, light=True) if file.is_file() else [] for file in files)
    totals = ability_totals(before, after, [task for task, _ in general_rows()])
    for remark in totals.remarks():
        loop.reporter.note(remark)
    return totals
