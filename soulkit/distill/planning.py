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
from soulkit.distill.generalist import generalist_config, generalist_folder, imitation_config
from soulkit.distill.measure import is_complete, measurements
from soulkit.distill.sample import sample_config, samples_folder
from soulkit.distill.select import written_selection
from soulkit.eval.config import EvalConfig
from soulkit.eval.planning import evaluation_plan
from soulkit.eval.run.runner import prepare
from soulkit.play.engine import ControlJob
from soulkit.play.plan import TOKENS_PER_WORD, USUAL, Plan, in_turn
from soulkit.train.planning import imitation_machine, training_plan
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
                if not is_complete(samples_folder(out, expert.task))]  # fmt: skip
        plan = in_turn([_planned(one, label="samples") for one in left])
        plans.append(StagePlan(stage="sample", plan=plan))
    if "train" in stages and not (generalist_folder(out) / "summary.json").is_file():
        plans.append(_training(config, experts, out, sampled))
    if "report" in stages:
        # The generalist's weights need not be there yet: they are as large as the experts'.
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
    remark = seen if selection is not None else f"{seen}, if every prompt gives all it may"
    plan = Plan(
        tasks=(), machine=imitation_machine(training, training.steps * training.sft_batch * tokens)
    )
    return StagePlan(stage="train", plan=plan, remarks=(remark,))


def _lesson_tokens(sampled: Sequence[EvalConfig]) -> tuple[float, int]:
    """(tokens of a mean prompt with its reply, training prompts)."""
    tasks = [task for one in sampled for task in _planned(one, controls=()).tasks]
    prompts = sum(task.examples for task in tasks)
    words = sum(task.prompt_words / max(task.episodes, 1) * task.examples for task in tasks)
    return TOKENS_PER_WORD * words / max(prompts, 1) + USUAL["actor"], prompts
