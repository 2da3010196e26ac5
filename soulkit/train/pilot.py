"""A pilot of a training: drafts of its first step, played before any update.

    first N rows of step 0 ──one draft each──▶ feedback, refined rollout ──ledger──▶ measured plan

The rows come from the training mixture, spread over its tasks. Drafts go into the journal and the
replies of other players into the ledger of the run. The training, with the same options and --out,
asks for none of them again; a deterministic one samples its drafts anew, in its own batches. Only
players on servers are measured. The ratios of drafts also scale dev scores and later steps, in
which replies may become longer or shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, zip_longest
from pathlib import Path

from soulkit.errors import ConfigError
from soulkit.eval.pilot import PilotRow, plan_from_pilot
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.local.journal import SAMPLED, Journal
from soulkit.models.players.players import check_players
from soulkit.play.engine import Job
from soulkit.play.plan import Plan, confirm_cost, in_turn
from soulkit.reporting import Reporter
from soulkit.runs.coroutines import run_coroutine
from soulkit.train.config import TrainConfig
from soulkit.train.planning import draft_plan, training_plan
from soulkit.train.rollouts.play import (
    DevScores,
    Rollouts,
    jobs_by_task,
    step_failure,
    step_jobs,
)
from soulkit.train.run import Parts, open_training, refuse_untrainable
from soulkit.train.setup.data import make_cast, make_players, make_reader
from soulkit.train.setup.rows import TaskRows, TrainingData
from soulkit.train.state.metrics import read_step_lines


def training_pilot(material: TrainingData, n: int, out: Path, reporter: Reporter) -> Plan:
    """Play `n` rows of the first step in the run folder `out` and return the training's plan,
    measured on them."""
    config = material.config
    refuse_untrainable(config)
    if n > config.prompts_per_step:
        raise ConfigError(
            f"--pilot {n} is more than the {config.prompts_per_step} rows of a step.",
            "The pilot plays rows of the first step.",
            f"Use at most --pilot {config.prompts_per_step}.",
        )
    if read_step_lines(out / "metrics.jsonl"):
        raise ConfigError(
            f"The training in {out} has already taken steps.",
            "A pilot plays the first step with the initial weights.",
            f"To see what its calls cost: soul ledger stats {out}",
        )
    check_players(config)
    jobs = pilot_jobs(config, material.pool, n)
    plans = [draft_plan(material, job.task, job.example) for job in jobs]
    confirm_cost(in_turn(plans), config, reporter, "the pilot")
    with open_training(config, out, material, reporter) as parts:
        run_coroutine(_play(parts, jobs, reporter))
        with Ledger(parts[1].ledger_path) as ledger:
            used = ledger.by_example()
    rows = [PilotRow.of(job.task.name, job.example, plan, used)
            for job, plan in zip(jobs, plans, strict=True)]  # fmt: skip
    return plan_from_pilot(training_plan(material), rows, out)


def pilot_jobs(config: TrainConfig, pool: TaskRows, n: int) -> list[Job]:
    """The first draft of `n` rows of the first step, from all its tasks in turn."""
    first = [job for job in step_jobs(config, pool, 0) if job.index == 0]
    turns = zip_longest(*jobs_by_task(first).values())
    return list(islice((job for turn in turns for job in turn if job is not None), n))


async def _play(parts: Parts, jobs: Sequence[Job], reporter: Reporter) -> None:
    """Play these drafts with the initial weights; CallError if all of them failed."""
    config, run, policy, _, material, engine = parts
    assert material.objective is not None
    journal = Journal(run.path / SAMPLED)
    sampler = engine.sampler(material, journal, reporter)
    players = make_players(config, sampler, run, engine.player, reporter)
    cast = make_cast(config, sampler, players)
    rollouts = Rollouts(config, material.objective, sampler, cast, material.pool,
                        DevScores(config, sampler, cast, []),
                        make_reader(config, players))  # fmt: skip
    try:
        await players.preflight.hold()
        reporter.phase("pilot")
        await rollouts.take(policy)
        error = step_failure(await rollouts.sample(jobs))
    finally:
        await sampler.close()
        await players.close()
        journal.close()
    if error is not None:
        raise error
