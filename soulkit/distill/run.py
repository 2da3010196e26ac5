"""`distill`: the stages one after the other, each of which says what it finds done.

    experts ──▶ sample ──▶ select ──▶ train ──▶ report        by imitation
    experts ──▶ train ──▶ report                              on-policy: nobody is sampled before

Whatever dies is taken up by the same command: a sample is an evaluation run, the generalist a
training run, a measurement an evaluation run, and each of these resumes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from soulkit.distill.config import STAGES, DistillConfig, Stage, open_distillation
from soulkit.distill.expert_rows import note_rows, rows_and_players_words, with_rows_and_players
from soulkit.distill.experts import Expert, find_experts
from soulkit.distill.generalist import generalist_config, generalist_folder, is_trained
from soulkit.distill.measure import (
    ABILITY,
    Measurement,
    measure,
    measured_tasks,
    measurements,
    unmeasured_words,
)
from soulkit.distill.planning import distillation_plan
from soulkit.distill.report import (
    Distillation,
    RetentionGate,
    distilled,
    parse_gates,
    write_distillation,
)
from soulkit.distill.sample import (
    budget_left,
    refuse_other_samples,
    sample,
    sample_config,
    shared_servers,
)
from soulkit.distill.select import read_selection, select_samples
from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.eval.run.run_lock import run_lock
from soulkit.models.local.memory import free_memory
from soulkit.play.plan import confirm_cost, in_turn
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run, is_run
from soulkit.train.run import prepare_training, refuse_untrainable, train

UNREAD_BY = {"sft": (), "opd": ("epochs", "keep_top", "min_reward", "quota")}
"""Settings of one road that the other has no use for: of what the experts read, all is learned."""


def distill(
    config: DistillConfig, out: Path, stages: Sequence[Stage], *, trust: bool = False,
    reporter: Reporter = SILENT,
) -> Distillation | None:  # fmt: skip
    """Do `stages` in `out`, resuming it; what came out, once the stage report is among them.

    Raises a UserError before anything is loaded or paid for where settings, experts, rows, players
    or gates are not in order, and where a stage lacks what an earlier one makes. With `trust`
    settings of experts' runs that are not known to be the user's own act, too.
    """
    experts = with_rows_and_players(config, find_experts(config), trust=trust)
    for line in rows_and_players_words(config, experts):
        reporter.note(line)
    gates = checked_gates(config, experts)
    stages = stages_of(config, stages)
    if words := unread_words(config):
        reporter.note(words)
    # A folder that is there refuses other settings at once; a new one is made last, when nothing
    # stands in the way and somebody agreed to the cost.
    run = open_distillation(out, config, reporter) if is_run(out) else None
    # Somebody agrees to the cost once, for all the stages.
    plans = distillation_plan(config, experts, out, stages)
    confirm_cost(in_turn([one.plan for one in plans]), config, reporter)
    run = run or open_distillation(out, config)
    if not run.resumed:
        reporter.note(f"distillation folder {out}")
    config = config.model_copy(update={"yes": True})
    with run_lock(run):
        note_rows(out, experts)
        refuse_other_samples(out, experts)
        if "sample" in stages:
            configs = [sample_config(config, expert) for expert in experts]
            with shared_servers(config, configs, out, reporter) as servers:
                sample(config, experts, out, servers=servers, reporter=reporter)
        if "select" in stages:
            select_samples(config, experts, out, reporter=reporter)
        if "train" in stages:
            _train(config, experts, out, reporter)
        if "report" not in stages:
            return None
        return _report(config, experts, run, gates, reporter)


def stages_of(config: DistillConfig, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Those that there are: on-policy the experts are not sampled, and nothing is selected."""
    if config.by == "sft":
        return tuple(stages)
    left = tuple(stage for stage in stages if stage in ("train", "report"))
    if not left:
        raise ConfigError(
            f"There is no stage '{stages[0]}' with --by opd.",
            "The experts read what the generalist says; nobody is sampled before.",
            f"Write soul distill train, or leave the stage out: {', '.join(STAGES)}.",
        )
    return left


def unread_words(config: DistillConfig) -> str:
    """Which settings somebody gave that the chosen road does not read; empty for none."""
    unread = [name for name in UNREAD_BY[config.by] if name in config.model_fields_set]
    return f"--by {config.by} does not read: {', '.join(unread)}" if unread else ""


def checked_gates(
    config: DistillConfig, experts: Sequence[Expert]
) -> tuple[RetentionGate, ...]:  # fmt: skip
    """The gates of `config`; ConfigError for one about what is not measured."""
    tasks = measured_tasks(config, experts)
    return parse_gates(config.gate, [*tasks, ABILITY] if config.retention else tasks)


# -- stages ----------------------------------------------------------------------------------------


def _train(config: DistillConfig, experts: Sequence[Expert], out: Path, reporter: Reporter) -> None:
    selection = read_selection(out) if config.by == "sft" else None
    folder = generalist_folder(out)
    training = generalist_config(config, experts, out, selection).model_copy(
        update={"yes": True, "max_cost": budget_left(config, out, folder)}
    )
    if is_trained(training, out):
        reporter.note(f"generalist: trained already, in {folder}")
        return
    reporter.note(f"training the generalist: {training.steps} steps by {config.by}")
    refuse_untrainable(training)
    material = prepare_training(training, folder, reporter)
    with reporter.steps(training.steps, "train") as steps:
        train(training, folder, material, reporter=steps)
    free_memory()  # the policy: what is measured next needs the room


def _report(
    config: DistillConfig, experts: Sequence[Expert], run: Run, gates: Sequence[RetentionGate],
    reporter: Reporter,
) -> Distillation:  # fmt: skip
    if not measured_tasks(config, experts) and not config.retention:
        raise ConfigError(
            "There are no held-out rows to measure on.",
            "Without them nobody can say what the generalist kept of its experts.",
            "Name them with --held-out [TASK=]WHERE, as --data names rows to learn from.",
        )
    if words := unmeasured_words(config, experts):
        reporter.note(words)

    def limited(part: Measurement) -> EvalConfig:
        left = budget_left(config, run.path, part.folder)
        return part.config.model_copy(update={"yes": True, "max_cost": left})

    configs = [part.config for part in measurements(config, experts, run.path)]
    with shared_servers(config, configs, run.path, reporter) as servers:
        measure(config, experts, run.path, limited=limited, servers=servers, reporter=reporter)
    result = distilled(config, experts, run.path, gates)
    write_distillation(run, result)
    return result
