"""`soul train METHOD`, `soul train ablate` and `soul train matrix`: parse, call, print.

The subcommands are made from the methods and TrainConfig; their bodies are `_train`, `_ablate` and
`_matrix` below. A method from an installed package is a subcommand like any other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from typer.core import TyperCommand

from soulkit.cli.console import (
    ConsoleReporter,
    console,
    err,
    print_json,
    print_next,
    print_note,
    warn_unsealed,
)
from soulkit.cli.options import (
    EVERYDAY,
    PILOT,
    GroupFromSettings,
    Option,
    assignments,
    build_command,
    in_reading_order,
    merged_options,
    options_for,
    settings_from,
    suite_in,
    tasks_in,
)
from soulkit.cli.parse_errors import WORDS, CommandTable, no_command
from soulkit.errors import ConfigError
from soulkit.option_texts import row_sources, values_by_task
from soulkit.runs.folder import default_run_path
from soulkit.runs.jsonl import stored_json
from soulkit.text import duration
from soulkit.train.objectives.base import built_in, from_packages, unknown_method
from soulkit.train.ranks.launch import check_launched, place_in_job

if TYPE_CHECKING:
    from soulkit.models.players.settings import RoleSettings
    from soulkit.train.ablate import PlannedRun
    from soulkit.train.config import TrainConfig
    from soulkit.train.setup.rows import TrainingData
    from soulkit.train.state.metrics import Rewards
    from soulkit.train.state.summary import TrainSummary

TEN = (
    "grpo,ditto,ditto:lambda_fb=0,ditto:only_copy,rltf-sd,erl,"
    "sdpo-token,sdpo-logits,sdpo-token+grpo,sdpo-logits+grpo"
)
"""The methods that `soul train ablate` compares by default."""
SEEDS = 3
ABLATE = "Compare methods on equal budgets over several seeds."
MATRIX = "Train on some tasks and evaluate on all: a transfer matrix."
PARALLEL = Option("--parallel", int, "Trainings at a time, each in a process of its own.",
                  "Comparison", default="1", min=1)  # fmt: skip

COMPARISON = (
    Option("--methods", str, "Methods to compare: 'grpo,ditto:lora.r=8|32'. The first is the "
                             "baseline.", "Comparison",
           default=TEN, complete="methods", metavar="METHODS"),
    Option("--seeds", int, "Seeds per method, starting at --seed.", "Comparison",
           default=str(SEEDS)),
    PARALLEL,
    Option("--match", Literal["rollouts", "prompts"],
           "Equal budget of rollouts (methods without refined rollouts get 2G drafts) or of "
           "prompts (G drafts for all).", "Comparison", default="rollouts"),
    Option("--eval-judge", str, "Judge that scores the final episodes of all methods. Methods "
                                "may then train with different judges.", "Comparison",
           metavar="PLAYER"),
    Option("--final-eval", Path, "YAML file with the settings of an evaluation, which scores the "
                                 "base model and every trained one.", "Comparison", metavar="FILE"),
    Option("--force-mixed", bool, "Compare methods with different judges, partners or rows, and "
                                  "list the differences.", "Comparison"),
)  # fmt: skip
"""The options of `ablate` in addition to those of the methods."""
TRANSFER = (
    Option("--train", str, "Tasks to train on: each alone, and all but one.", "Comparison",
           metavar="TASK,TASK", complete="tasks", required=True),
    Option("--eval", str, "Suite that the base model and every trained model are evaluated on.",
           "Comparison", metavar="SUITE", required=True),
    Option("--method", str, "Training method.", "Comparison", default="grpo", metavar="METHOD"),
    PARALLEL,
    Option("--final-eval", Path, "YAML file with more settings of the evaluation.", "Comparison",
           metavar="FILE"),
    Option("--force-mixed", bool, "Let a training judge evaluate as well.", "Comparison"),
)  # fmt: skip
"""The options of `matrix` in addition to those of the methods."""


class Methods(GroupFromSettings):
    """One subcommand per method; an error for an unknown method suggests the nearest one."""

    def sentences(self) -> Mapping[str, str]:
        return {**built_in(), "ablate": ABLATE, "matrix": MATRIX}

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *from_packages()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        listed = cmd_name not in self.sentences() and from_packages().get(cmd_name)
        if listed:  # help and completion need one line, without importing the package
            return TyperCommand(name=cmd_name, help=listed, rich_markup_mode=None)
        return super().get_command(ctx, cmd_name)

    def build(self, name: str) -> Any:
        if name == "ablate":
            return build_command(name, ABLATE, ablate_options(), _ablate)
        if name == "matrix":
            own = EVERYDAY | {option.flag for option in TRANSFER}
            return build_command(name, MATRIX, matrix_options(), _matrix, everyday=own)
        from soulkit.train.config import TrainConfig
        from soulkit.train.objectives.base import method_class

        sentence, options = method_class(name).names[name], method_options(name)
        if name != "sft":  # supervised training calls no other models
            options = in_reading_order([*options, PILOT])
        known = {"", *TrainConfig.model_fields}  # the others belong to a package's method
        packaged = {o.flag for o in options if o.setting.partition(".")[0] not in known}
        return build_command(
            name, sentence, options, partial(_train, name), everyday=EVERYDAY | packaged
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name == "help":
            raise no_command(name, self.list_commands(ctx), ctx.command_path)
        if name.startswith("-") and not ctx.resilient_parsing:
            raise unknown_method(name)
        if name not in self.sentences() and name in from_packages():
            return name, self.build(name), args[1:]
        return super().resolve_command(ctx, args)


def method_options(method: str) -> list[Option]:
    """The options of one method."""
    from soulkit.train.config import settings_class
    from soulkit.train.objectives.base import method_class

    kind = method_class(method)
    options = options_for(settings_class(method), kind.traits(method))
    return [replace(o, default=kind.default_words.get(o.setting, o.default)) for o in options]


def matrix_options() -> list[Option]:
    """The options of `matrix`; --train names the tasks."""
    return [one for one in ablate_options(TRANSFER) if one.flag not in ("--task", "--suite")]


def ablate_options(comparison: Sequence[Option] = COMPARISON) -> list[Option]:
    """The options of all methods that can be compared, and of the comparison."""
    from soulkit.train.objectives.base import rollout_methods

    return merged_options([comparison, *(method_options(name) for name in rollout_methods())])


def settings_of(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The command line as settings of `method`, without those that only other methods have."""
    from soulkit.train.ablate import idle_settings

    values, chats = _without_chats(method, values)
    written = settings_from(method_options(method), values, _rows, tasks_in(values.get("config")))
    for name in idle_settings(method, written):
        del written[name]
    return {"method": method, **chats, **written}


def check_used(
    methods: Sequence[str], values: Mapping[str, Any], options: Sequence[Option] = ()
) -> None:
    """ConfigError for a given option or --set that none of the methods uses."""
    from soulkit.train.ablate import refuse_idle_settings

    flags = {option.setting: option.flag.partition("/")[0] for option in options
             if option.setting and values.get(option.name) not in (None, [])}  # fmt: skip
    sets = {name: f"--set {name}" for name in assignments(values.get("set"))}
    refuse_idle_settings(methods, {**flags, **sets})


def _without_chats(
    method: str, values: Mapping[str, Any]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The options without --data, and --data as chat logs if no task is named."""
    from soulkit.train.config import names_chats

    file, variables = values.get("config"), ("SOULKIT_TASKS", "SOULKIT_SUITE")
    named = [values.get("task"), values.get("suite"), tasks_in(file), suite_in(file)]
    named += [os.environ.get(name) for name in variables]
    named += [text.startswith(("tasks=", "suite=")) for text in values.get("set") or ()]
    sources = list(values.get("data") or ())
    if any(named) or not names_chats(method, sources):
        return values, {}
    return {**values, "data": None}, {"corpora": sources}


def _rows(texts: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """ROWS without TASK= are for the only task, or for every task of a suite."""
    return values_by_task(texts, ",".join(tasks)) if tasks else row_sources(texts, ())


app = CommandTable(cls=Methods, rich_markup_mode=None)


@app.callback(help="Train a model with one method, or compare methods.")
def group() -> None:
    """The commands are made by `Methods`."""


# --- one method -----------------------------------------------------------------------------------


def _train(method: str, values: Mapping[str, Any]) -> None:
    reporter = ConsoleReporter(f"train {method}")
    with reporter.working("starting"):
        from soulkit.train.config import TrainConfig
        from soulkit.train.objectives.base import overruled
        from soulkit.train.ranks.launch import launch, ranks_to_start

    if _follows(values):
        return
    check_used([method], values)
    flags = settings_of(method, values)
    config = TrainConfig.load(values["config"], flags=flags, trust=values["trust"])
    on_ray = config.launcher == "ray" and "WORLD_SIZE" not in os.environ
    if on_ray and not values["dry_run"]:
        from soulkit.train.ranks.ray_launch import launch_on_ray

        out = values["out"] or _new_path(config)
        named = () if values["out"] else ("--out", str(out))  # the same one if it starts again
        raise typer.Exit(launch_on_ray((*_words(), *named), config, out))
    if not values["dry_run"] and (number := ranks_to_start(config)):
        raise SystemExit(launch(_words(), number))
    with reporter.working("starting"):
        from soulkit.train.run import prepare_training, refuse_untrainable, train
        from soulkit.train.setup.feedback_check import zero_weight_remark
        from soulkit.train.state.metrics import read_step_lines
        from soulkit.train.state.stops import flat_total, steps_before, with_more_steps

    if remark := overruled(method):
        print_note(remark)
    if values["dry_run"]:
        _show_plan(config, values)
        return
    out = values["out"] or _new_path(config)
    if remark := zero_weight_remark(config):
        print_note(remark)
    config = with_more_steps(config, out)
    finished = (out / "summary.json").is_file() and steps_before(out) == config.steps
    refuse_untrainable(config)
    with reporter.working("reading rows"):
        material = prepare_training(config, out, reporter)
        refuse_idle_players(material, values)
    with reporter.steps(config.steps) as steps:
        summary = train(config, out, material, reporter=steps)
    if flat := flat_total(read_step_lines(out / "metrics.jsonl")):
        print_note(flat)
    if finished:  # only now is it certain that this is the same training
        print_note(f"{out} is already finished: all steps are trained")
    warn_unsealed()
    if values["json"]:
        print_json(stored_json(out / "summary.json"))
    else:
        _print(out, summary)


def _follows(values: Mapping[str, Any]) -> bool:
    """Whether this process is a rank other than 0; then it has done its part of the training."""
    if "WORLD_SIZE" not in os.environ:
        return False
    rank, _ = place_in_job()
    if not values["dry_run"]:
        from soulkit.train.ranks.watch import start_watch

        start_watch()
        if rank:
            from soulkit.train.ranks.follower import follow

            follow()
    return rank > 0


def _words() -> tuple[str, ...]:
    """The words of this command line after `soul`, for the processes that train."""
    debug = logging.getLogger("soulkit").level == logging.DEBUG
    return (*WORDS.get(), *["--debug"] * debug)


def _new_path(config: TrainConfig) -> Path:
    names = [config.suite] if config.suite else list(config.tasks) or config.corpus_names
    return default_run_path(f"train-{config.method}", names)


def _show_plan(config: TrainConfig, values: Mapping[str, Any]) -> None:
    """Print what `--dry-run` shows: remarks at the start, and the cost of the training."""
    from soulkit.cli.plan import show_corpus_plan, show_plan
    from soulkit.train.planning import corpus_plan, played_beside, refuse_unfitting, training_plan
    from soulkit.train.run import adapter_remark
    from soulkit.train.setup.data import download_remark, load_training_data

    refuse_unfitting(config)
    reporter, pilot = ConsoleReporter("plan"), values.get("pilot")
    config = config if pilot else config.for_plan()
    material = load_training_data(config, asking=bool(pilot), reporter=reporter)
    refuse_idle_players(material, values)
    remarks = (download_remark(config), *material.remarks(), adapter_remark(config))
    for remark in filter(None, remarks):
        if remark not in material.coaches:
            print_note(remark)
    if material.corpus is not None:
        played = played_beside(material)
        show_corpus_plan(
            corpus_plan(config, material.corpus), values["json"], played, values["bounds"]
        )
        return
    if pilot:
        from soulkit.train.pilot import training_pilot

        out = values["out"] or _new_path(config)
        plan = training_pilot(material, pilot, out, reporter)
    else:
        plan = training_plan(material)
    offered = material.objective is not None
    show_plan(plan, values["json"], material.coaches, bounds=values["bounds"], offered=offered)
    for server in material.config.servers():
        print_note(server)


PLAYERS = ("partner", "environment", "judge", "auditor", "judge_samples")
"""Options for the other players."""


def refuse_idle_players(material: TrainingData, values: Mapping[str, Any]) -> None:
    """ConfigError for partner or judge options of a supervised training without episodes."""
    idle = [f"--{name.replace('_', '-')}" for name in PLAYERS if values.get(name)]
    if idle and material.objective is None and material.measured is None:
        raise ConfigError(
            f"{idle[0]} has no effect in this training.",
            "Supervised training uses other models only for dev scores and probes.",
            "Leave it out, or evaluate during training: --eval-task TASK --eval-every N.",
        )


def _print(out: Path, summary: TrainSummary) -> None:
    from soulkit.eval.results.warnings import dropped_text, limits_text, truncation_text
    from soulkit.report.training import facts_of_training, task_lines

    rewards, steps, print_line = summary.rewards, summary.steps, console().print
    print_line(f"{steps} step{'s' * (steps != 1)} in {duration(summary.seconds or 0.0)}")
    for label, reward in (("draft", rewards.draft), ("refined", rewards.refined)):
        if reward is not None:
            print_line(f"  {f'{label} reward':18} {reward:.3f}")
    if rewards.loo is not None:
        print_line(f"  leave-one-out gap  {_gap(rewards)}")
    for line in task_lines(rewards):
        print_line(f"    {line}", markup=False)
    last = f"in the last {summary.summary_steps} steps"
    unscored, cut = summary.n - summary.n_scored, truncation_text(summary.statuses)
    facts = [
        *facts_of_training(summary),
        ("unscored", f"{unscored} of {summary.n} {last}" if unscored else ""),
        ("truncated", f"{cut} {last}" if cut else ""),
        ("at token limit", limits_text(summary.limits, summary.statuses)),
        ("rejected settings", dropped_text(summary.dropped_settings)),
    ]
    for label, text in facts:
        if text:
            print_line(f"  {label:18} {text}", markup=False, soft_wrap=True)
    print_note(f"run folder {out}; weights {out / 'model'}")
    _say_next(out, summary)


def _say_next(out: Path, summary: TrainSummary) -> None:
    """The command that shows results: supervised training has held-out continuations, not
    episodes."""
    from soulkit.report.episode_search import shell_path, show_command
    from soulkit.runs.records import SAMPLES

    refined = summary.rewards.refined is not None
    played = summary.n > 0
    which = "--improved" if refined else "--worst 10" if summary.n_scored else "--status unscored"
    shown = [f"{show_command(out)} {which}"] if played else []
    shown += [show_command(out)] if not played and (out / SAMPLES).is_file() else []
    exported = f"soul export {shell_path(out)} --merge --out DIR"
    print_next(f"soul report {shell_path(out)}", *shown, exported)


def _gap(rewards: Rewards) -> str:
    from soulkit.metrics.intervals import estimate_text, interval_remark, signed

    text = estimate_text(rewards.loo, rewards.loo_low, rewards.loo_high, signed)
    beside = interval_remark(rewards.loo_clusters) if "[" in text else ""
    return f"{text} ({beside})" if beside else text


# --- many methods ---------------------------------------------------------------------------------


def _ablate(values: Mapping[str, Any]) -> None:
    check_launched("soul train ablate")
    from soulkit.report.ablation import ablation_results
    from soulkit.train.ablate import parse_arms, plan_arms

    arms = parse_arms(values["methods"] or TEN)
    check_used([arm.method for arm in arms], values, ablate_options(()))
    common = settings_of(arms[0].method, values)
    suite = common.get("suite")
    tasks = [suite] if suite else list(common.get("tasks") or tasks_in(values["config"]))
    out = values["out"] or default_run_path("ablate", tasks)
    judge = _eval_judge(values)
    reporter = ConsoleReporter("ablate")
    with reporter.working("reading rows"):
        runs = plan_arms(
            arms, out, values["config"], lambda method: settings_of(method, values),
            seeds=SEEDS if values["seeds"] is None else values["seeds"],
            match=values["match"] or "rollouts", trust=values["trust"],
            force_mixed=values["force_mixed"], judged_alike=judge is not None,
            planned=values["dry_run"], final_eval=values["final_eval"],
        )  # fmt: skip
    _run_planned(runs, out, values, reporter, ablation_results, judge)


def _matrix(values: Mapping[str, Any]) -> None:
    check_launched("soul train matrix")
    from soulkit.report.exports.matrix import matrix_results
    from soulkit.train.ablate import parse_arm, plan_matrix

    arm, train, suite = parse_arm(values["method"] or "grpo"), values["train"], values["eval"]
    check_used([arm.method], values, ablate_options(()))
    out = values["out"] or default_run_path("matrix", [suite])
    reporter = ConsoleReporter("matrix")
    with reporter.working("reading rows"):
        settings = settings_of(arm.method, {**values, "task": [train], "suite": None})
        shared = {name: values[name] for name in ("final_eval", "trust", "force_mixed")}
        runs = plan_matrix(
            train, suite, arm, out, values["config"], settings, planned=values["dry_run"], **shared
        )
    _run_planned(runs, out, values, reporter, matrix_results)


def _run_planned(
    runs: Sequence[PlannedRun], out: Path, values: Mapping[str, Any], reporter: ConsoleReporter,
    results: Callable[[Path], tuple[Path, Any, Sequence[Any]]], judge: RoleSettings | None = None,
) -> None:  # fmt: skip
    """Print the plan, or carry it out and print the `results`: page, JSON and table."""
    from soulkit.cli.plan import show_plan
    from soulkit.report.episode_search import shell_path, show_command
    from soulkit.train.ablate import comparison_plan, confirm_runs, run_all
    from soulkit.train.rejudge import confirm_final_judge, judge_final_episodes

    coaches = dict.fromkeys(line for run in runs for line in run.coaches if values["dry_run"])
    for remark in dict.fromkeys(line for run in runs for line in run.remarks):
        if remark not in coaches:
            print_note(remark)
    if values["dry_run"]:
        plan, bounds = comparison_plan(runs), values["bounds"]
        show_plan(plan, values["json"], list(coaches), bounds=bounds)
        return
    print_note(f"{len(runs)} runs in {out}")
    if judge is not None:
        confirm_final_judge(judge, runs[0].config, reporter)
    runs = confirm_runs(runs, reporter)
    for server in dict.fromkeys(line for run in runs for line in run.config.servers()):
        print_note(server)
    written = judge.written() if judge else ""
    ended = run_all(
        runs, out, force_mixed=values["force_mixed"], eval_judge=written,
        parallel=values["parallel"] or 1, reporter=reporter,
    )  # fmt: skip
    if judge is not None:
        judge_final_episodes(runs, judge, trust=values["trust"], reporter=reporter)
    warn_unsealed()
    page, content, parts = results(out)
    if values["json"]:
        print_json(content)
    else:
        for part in parts:
            console().print(part)
    print_note(f"report: {page}")
    if not values["json"]:
        print_next(f"soul runs {shell_path(out)}", show_command(runs[-1].path))
    failed = sum(run.status == "failed" for run in ended)
    if failed:
        err.print(f"{failed} of {len(ended)} runs failed; the same command retries them")
        raise typer.Exit(1)


def _eval_judge(values: Mapping[str, Any]) -> RoleSettings | None:
    from soulkit.eval.results.rejudge import judges_named

    if not values["eval_judge"]:
        return None
    endpoints = values.get("endpoints")
    return judges_named([values["eval_judge"]], str(endpoints) if endpoints else None)[0]
