"""`distill`: runs the stages one after the other; finished work is reused.

    experts ──▶ sample ──▶ select ──▶ train ──▶ report        --by sft
    experts ──▶ train ──▶ report                              --by opd

The same command resumes: samples and measurements are evaluation runs, the generalist is a training
run, and all of them can resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from soulkit.distill.config import STAGES, DistillConfig, Stage, open_distillation
from soulkit.distill.expert_rows import note_rows, rows_and_players_words, with_rows_and_players
from soulkit.distill.experts import Expert, find_experts
from soulkit.distill.generalist import (
    generalist_config,
    generalist_folder,
    imitation_config,
    is_trained,
)
from soulkit.distill.measure import (
    ABILITY,
    Measurement,
    is_complete,
    measure,
    measured_tasks,
    measurements,
    unmeasured_words,
)
from soulkit.distill.report import (
    Distillation,
    distilled,
    parse_gates,
    write_distillation,
)
from soulkit.distill.sample import (
    budget_left,
    refuse_other_samples,
    sample,
    sample_config,
    samples_folder,
    shared_servers,
)
from soulkit.distill.select import read_selection, select_samples, written_selection
from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.eval.gates import Gate
from soulkit.eval.planning import evaluation_plan
from soulkit.eval.run.run_lock import run_lock
from soulkit.eval.run.runner import prepare
from soulkit.models.local.footprint import free_memory
from soulkit.play.engine import ControlJob
from soulkit.play.plan import TOKENS_PER_WORD, USUAL, Plan, confirm_cost, in_turn
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run, is_run
from soulkit.train.planning import imitation_machine, training_plan
from soulkit.train.run import prepare_training, refuse_untrainable, train
from soulkit.train.setup.data import load_training_data

UNREAD_BY = {"sft": (), "opd": ("epochs", "keep_top", "min_reward", "quota")}
"""Settings without effect, by method."""


def distill(
    config: DistillConfig, out: Path, stages: Sequence[Stage], *, trust: bool = False,
    reporter: Reporter = SILENT,
) -> Distillation | None:  # fmt: skip
    """Run `stages` in `out`, resuming it; returns the result if `report` is among them.

    UserError for problems with settings, rows, players, gates or earlier stages, before anything is
    loaded or paid for. With `trust`, settings from runs of unknown origin are also used.
    """
    experts = with_rows_and_players(config, find_experts(config), trust=trust)
    for line in rows_and_players_words(config, experts):
        reporter.note(line)
    gates = checked_gates(config, experts)
    stages = stages_of(config, stages)
    if words := unread_words(config):
        reporter.note(words)
    # An existing folder refuses other settings now; a new one is created after the checks and the
    # confirmation of the cost.
    run = open_distillation(out, config, reporter) if is_run(out) else None
    # The cost is confirmed once for all stages.
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
    """The stages that apply: --by opd has no stages sample and select."""
    if config.by == "sft":
        return tuple(stages)
    left = tuple(stage for stage in stages if stage in ("train", "report"))
    if not left:
        raise ConfigError(
            f"There is no stage '{stages[0]}' with --by opd.",
            "On-policy distillation does not sample the experts.",
            f"Run soul distill train or soul distill report; {' and '.join(STAGES[:2])} are for "
            "--by sft.",
        )
    return left


def unread_words(config: DistillConfig) -> str:
    """A remark on settings that have no effect; empty if all of them have one."""
    unread = [name for name in UNREAD_BY[config.by] if name in config.model_fields_set]
    return f"ignored with --by {config.by}: {', '.join(unread)}" if unread else ""


def checked_gates(config: DistillConfig, experts: Sequence[Expert]) -> tuple[Gate, ...]:
    """The gates in `config`; ConfigError if one tests a result that is not measured."""
    tasks = measured_tasks(config, experts)
    return parse_gates(config.gate_texts(), [*tasks, ABILITY] if config.retention else tasks)


# -- stages ----------------------------------------------------------------------------------------


def _train(config: DistillConfig, experts: Sequence[Expert], out: Path, reporter: Reporter) -> None:
    selection = read_selection(out) if config.by == "sft" else None
    folder = generalist_folder(out)
    training = generalist_config(config, experts, out, selection).model_copy(
        update={"yes": True, "max_cost": budget_left(config, out, folder)}
    )
    if is_trained(training, out):
        reporter.note(f"the generalist is already trained: {folder}")
        return
    reporter.note(f"training the generalist: {training.steps} steps of {config.by}")
    refuse_untrainable(training)
    material = prepare_training(training, folder, reporter)
    with reporter.steps(training.steps, "train") as steps:
        train(training, folder, material, reporter=steps)
    free_memory()  # the policy, before other models are measured


def _report(
    config: DistillConfig, experts: Sequence[Expert], run: Run, gates: Sequence[Gate],
    reporter: Reporter,
) -> Distillation:  # fmt: skip
    if not measured_tasks(config, experts) and not config.retention:
        raise ConfigError(
            "There are no held-out rows to measure on.",
            "Without them the report cannot compare the generalist with its experts.",
            "Name held-out rows with --held-out [TASK=]ROWS, in the same form as --data.",
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


# --- plans ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The plan of one stage."""

    stage: Stage
    plan: Plan
    remarks: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"stage": self.stage, "remarks": list(self.remarks), **self.plan.as_dict()}


def distillation_plan(
    config: DistillConfig, experts: Sequence[Expert], out: Path, stages: Sequence[Stage]
) -> list[StagePlan]:
    """The plans of all stages that play or train, except for finished runs."""
    plans: list[StagePlan] = []
    remarks = tuple(rows_and_players_words(config, experts))
    sampled = [sample_config(config, expert) for expert in experts] if config.by == "sft" else []
    if "sample" in stages and sampled:
        left = [one for one, expert in zip(sampled, experts, strict=True)
                if not is_complete(samples_folder(out, expert.task))]  # fmt: skip
        plan = in_turn([_planned(one, label="samples") for one in left])
        plans.append(StagePlan(stage="sample", plan=plan))
    if "train" in stages and not (generalist_folder(out) / "summary.json").is_file():
        plans.append(_training(config, experts, out, sampled))
    if "report" in stages:
        # The generalist may not exist yet; it is as large as the experts.
        parts = [one for one in measurements(config, experts, out) if not one.finished]
        plan = in_turn([_planned(part.config, label=part.side) for part in parts])
        plans.append(StagePlan(stage="report", plan=plan))
    if plans and remarks:
        plans[0] = replace(plans[0], remarks=(*remarks, *plans[0].remarks))
    return plans


def _planned(
    config: EvalConfig, controls: Sequence[ControlJob] | None = None, label: str = ""
) -> Plan:
    seated, work = prepare(config, asking=False)
    return evaluation_plan(seated, work, controls, label)


def _training(
    config: DistillConfig, experts: Sequence[Expert], out: Path, sampled: Sequence[EvalConfig]
) -> StagePlan:  # fmt: skip
    if config.by == "opd":
        data = load_training_data(generalist_config(config, experts, out))
        return StagePlan(stage="train", plan=training_plan(data))
    tokens, prompts = _lesson_tokens(sampled)
    selection = written_selection(out)
    most = prompts * min(config.keep_top, config.samples)
    lines = selection.lines if selection is not None else most
    training = imitation_config(config, experts, out, max(lines, 1))
    seen = f"{training.steps} steps over {lines} selected samples"
    remark = seen if selection is not None else f"{seen}, if all prompts pass the selection"
    plan = Plan(
        tasks=(), machine=imitation_machine(training, training.steps * training.sft_batch * tokens)
    )
    return StagePlan(stage="train", plan=plan, remarks=(remark,))


def _lesson_tokens(sampled: Sequence[EvalConfig]) -> tuple[float, int]:
    """(mean tokens of a prompt with its reply, number of training prompts)."""
    tasks = [task for one in sampled for task in _planned(one, controls=()).tasks]
    prompts = sum(task.examples for task in tasks)
    words = sum(task.prompt_words / max(task.episodes, 1) * task.examples for task in tasks)
    return TOKENS_PER_WORD * words / max(prompts, 1) + USUAL["actor"], prompts
