"""`soul distill [STAGE]`: parse, call, print. The options are made from DistillConfig."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import (
    ConsoleReporter,
    console,
    print_json,
    print_note,
    warn_unsealed,
)
from soulkit.cli.options import JUNIT, build_command, options_for, settings_from
from soulkit.errors import ConfigError, did_you_mean
from soulkit.option_texts import row_sources
from soulkit.runs.folder import default_run_path

if TYPE_CHECKING:
    from soulkit.distill.config import DistillConfig, Stage
    from soulkit.distill.report import Distillation
    from soulkit.distill.run import StagePlan

HELP = """Distil several task experts into one model.

The stages are sample, select, train and report; without STAGE, all of them run. Each stage resumes
its earlier work.
"""
TRAITS = frozenset({"distill", "plays", "local", "rollouts", "train"})
NOT_HERE = ("adapter", "suite", "playable")
"""Settings of other commands that --experts replaces."""
BY_TASK = ("experts", "held_out")
"""Settings written like --data: for all tasks, or for one."""


def make_command() -> Any:
    """The command; imports its settings when it is called."""
    from soulkit.distill.config import DistillConfig

    options = [one for one in options_for(DistillConfig, TRAITS) if one.setting not in NOT_HERE]
    options.append(JUNIT)

    def body(values: dict[str, Any]) -> None:
        file = values["config"]
        named = {name: _by_task(name, values.get(name)) for name in BY_TASK}
        rest = {name: None if name in BY_TASK else value for name, value in values.items()}
        flags = {
            **settings_from(options, rest, row_sources),
            **{k: v for k, v in named.items() if v},
        }
        config = DistillConfig.load(file, flags=flags, trust=values["trust"])
        _distill(config, _stages(values["stage"]), values)

    stage = inspect.Parameter(
        "stage", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None,
        annotation=Annotated[
            str | None, typer.Argument(metavar="[STAGE]", help="Run only this stage: sample, "
                                                               "select, train or report.",
                                       show_default=False)
        ],
    )  # fmt: skip
    return build_command("distill", HELP, options, body, stage)


def _by_task(name: str, texts: Sequence[str] | None) -> dict[str, str]:
    """`[TASK=]ROWS` options as task (`*`: all others) → rows."""
    made: dict[str, str] = {}
    for text in texts or ():
        task, equals, where = text.partition("=")
        key, value = (task, where) if equals and task.isidentifier() else ("*", text)
        if key in made:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is given twice for {'every task' if key == '*' else repr(key)}.",
                "Each task has one folder or file of rows.",
                f"Write {flag} TASK=ROWS once for each task.",
            )
        made[key] = value
    return made


def _stages(name: str | None) -> tuple[Stage, ...]:
    from soulkit.distill.config import STAGES

    if name is None:
        return STAGES
    stages = tuple(stage for stage in STAGES if stage == name)
    if not stages:
        raise ConfigError(
            f"There is no stage '{name}'.",
            f"The stages of a distillation are {', '.join(STAGES)}, in this order.",
            did_you_mean(name, STAGES),
        )
    return stages


# -- running and printing --------------------------------------------------------------------------


def _distill(config: DistillConfig, stages: Sequence[Stage], values: Mapping[str, Any]) -> None:
    reporter = ConsoleReporter("distill")
    with reporter.working("starting"):
        from soulkit.distill.run import distill

    out = values["out"] or default_run_path("distill", sorted(set(config.data) - {"*"}))
    if values["dry_run"]:
        _dry_run(config, out, stages, values)
        return
    result = distill(config, out, stages, trust=values["trust"], reporter=reporter)
    warn_unsealed()
    if result is None:
        print_note(f"distillation folder {out}")
        return
    _show(out, result, as_json=values["json"])
    if values["junit"]:
        from soulkit.eval.gates import write_junit
        from soulkit.report.distillation import gate_line

        write_junit(values["junit"], "soul distill", {gate_line(one): one for one in result.gates})
    if not result.passed:
        raise typer.Exit(1)


def _show(out: Path, result: Distillation, *, as_json: bool) -> None:
    from soulkit.cli.console import print_next
    from soulkit.report.distillation import distillation_parts, write_distillation_page
    from soulkit.report.episode_search import shell_path

    page = write_distillation_page(result, out / "report")
    if as_json:
        from soulkit.distill.report import distillation_values

        print_json(distillation_values(result))
    else:
        for part in distillation_parts(result):
            console().print(part)
    print_note(f"report: {page}")
    if not as_json:
        base, weights = Path(result.base), out / "generalist" / "model"
        model = f"--model {shell_path(base)} --adapter {shell_path(weights)}"
        exported = f"soul export {shell_path(out)} --merge --out DIR"
        print_next(f"soul report {shell_path(out)}", f"soul eval local {model} --task …", exported)


def _dry_run(
    config: DistillConfig, out: Path, stages: Sequence[Stage], values: Mapping[str, Any]
) -> None:
    from soulkit.distill.expert_rows import with_rows_and_players
    from soulkit.distill.experts import find_experts
    from soulkit.distill.run import checked_gates, distillation_plan, stages_of

    experts = with_rows_and_players(config, find_experts(config), trust=values["trust"])
    checked_gates(config, experts)
    plans = distillation_plan(config, experts, out, stages_of(config, stages))
    show_stage_plans(plans, as_json=values["json"], bounds=values["bounds"])


def show_stage_plans(plans: Sequence[StagePlan], *, as_json: bool, bounds: bool) -> None:
    """Print the plan of every stage, and their sum."""
    from soulkit.cli.plan import show_plan
    from soulkit.play.plan import in_turn

    whole = in_turn([one.plan for one in plans])
    if as_json:
        print_json({"stages": [one.as_dict() for one in plans], "whole": whole.as_dict()})
        return
    for one in plans:
        console().print(f"stage {one.stage}", style="bold")
        show_plan(one.plan, as_json=False, bounds=bounds)
        for remark in one.remarks:
            console().print(remark, markup=False, soft_wrap=True)
        console().print()
    console().print("all stages", style="bold")
    show_plan(whole, as_json=False, bounds=bounds)
