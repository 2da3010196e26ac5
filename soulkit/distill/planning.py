"""What a distillation will take, stage by stage, before anything starts.

How many samples will pass nobody knows: the training is planned as if all prompts gave as many as
`--keep-top` allows, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from soulkit.distill.config import DistillConfig, Stage
from soulkit.distill.expert_rows import rows_and_players_words
from soulkit.distill.experts import Expert
from soulkit.distill.generalist import generalist_config, imitation
from soulkit.distill.measure import Measurement, measurements
from soulkit.distill.sample import sample_config, samples_folder
from soulkit.distill.select import SampleSelection, read_selection
from soulkit.errors import RunError
from soulkit.eval.config import EvalConfig
from soulkit.eval.planning import evaluation_plan
from soulkit.eval.results.summary import recorded_summary
from soulkit.eval.run.runner import prepare
from soulkit.play.plan import TOKENS_PER_WORD, USUAL, Plan, Work, scaled
from soulkit.runs.folder import is_run
from soulkit.train.planning import imitation_machine, in_turn, training_plan
from soulkit.train.setup.data import load_training_data


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """What one stage will ask for."""

    stage: Stage
    plan: Plan
    remarks: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"stage": self.stage, "remarks": list(self.remarks), **self.plan.as_dict()}


def distillation_plan(
    config: DistillConfig, experts: Sequence[Expert], out: Path, stages: Sequence[Stage]
) -> list[StagePlan]:
    """The plan of every stage that plays or trains, without runs that are finished already."""
    plans: list[StagePlan] = []
    remarks = tuple(rows_and_players_words(config, experts))
    sampled = [sample_config(config, expert) for expert in experts] if config.by == "sft" else []
    if "sample" in stages and sampled:
        left = [one for one, expert in zip(sampled, experts, strict=True)
                if not _finished(samples_folder(out, expert.task))]  # fmt: skip
        plans.append(_evaluations("sample", left, "samples"))
    if "train" in stages and not _trained(out):
        plans.append(_training(config, experts, out, sampled))
    if "report" in stages:
        parts = [one for one in measurements(config, experts, out) if not one.finished]
        plans.append(_measurements(parts))
    if plans and remarks:
        plans[0] = replace(plans[0], remarks=(*remarks, *plans[0].remarks))
    return plans


def _finished(folder: Path) -> bool:
    summary = recorded_summary(folder) if is_run(folder) else None
    return summary is not None and 0 < summary.n == summary.n_scored


def _trained(out: Path) -> bool:
    return (out / "generalist" / "summary.json").is_file()


# -- evaluations -----------------------------------------------------------------------------------


def _evaluations(stage: Stage, configs: Sequence[EvalConfig], label: str) -> StagePlan:
    plans = [_labelled(config, label) for config in configs]
    return StagePlan(stage=stage, plan=in_turn(plans))


def _measurements(parts: Sequence[Measurement]) -> StagePlan:
    """The generalist's weights need not be there yet: they are as large as the experts'."""
    plans = [_labelled(part.config, part.side) for part in parts]
    return StagePlan(stage="report", plan=in_turn(plans))


def _labelled(config: EvalConfig, label: str) -> Plan:
    seated, work = prepare(config, asking=False)
    return scaled(evaluation_plan(seated, work), 1, label)


# -- training --------------------------------------------------------------------------------------


def _training(
    config: DistillConfig, experts: Sequence[Expert], out: Path, sampled: Sequence[EvalConfig]
) -> StagePlan:  # fmt: skip
    if config.by == "opd":
        data = load_training_data(generalist_config(config, experts, out))
        return StagePlan(stage="train", plan=training_plan(data))
    tokens, prompts = _lesson_tokens(sampled)
    selection = _selection(out)
    most = prompts * min(config.keep_top, config.samples)
    lines = selection.lines if selection is not None else most
    training = imitation(config, experts, out, max(lines, 1))
    seen = f"{training.steps} steps over {lines} selected samples"
    remark = seen if selection is not None else f"{seen}, if every prompt gives all it may"
    plan = Plan(
        tasks=(), machine=imitation_machine(training, training.steps * training.sft_batch * tokens)
    )
    return StagePlan(stage="train", plan=plan, remarks=(remark,))


def _selection(out: Path) -> SampleSelection | None:
    try:
        return read_selection(out)
    except RunError:
        return None


def _lesson_tokens(sampled: Sequence[EvalConfig]) -> tuple[float, int]:
    """(tokens of a mean prompt with its reply, training prompts)."""
    tasks = [task for one in sampled for task in _prepared(one)]
    prompts = sum(task.examples for task in tasks)
    words = sum(task.prompt_words / max(task.episodes, 1) * task.examples for task in tasks)
    return TOKENS_PER_WORD * words / max(prompts, 1) + USUAL["actor"], prompts


def _prepared(config: EvalConfig) -> Sequence[Any]:
    seated, work = prepare(config, asking=False)
    rows: list[Work] = [replace(part, controls=()) for part in work]
    return evaluation_plan(seated, rows).tasks
