"""`soul train METHOD` and `soul train ablate`: parse, call, print.

The subcommands are made from the lists in `methods.py`; their bodies are the two functions `_train`
and `_ablate` below. Help lists the options by section, because there are many.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from soulkit.cli.console import Bar, console, duration, err, print_json, progress, say_unsealed
from soulkit.cli.methods import METHODS, RL, Flag, flags_for, settings_of
from soulkit.errors import ConfigError, did_you_mean
from soulkit.runs import default_run_path

if TYPE_CHECKING:
    from soulkit.train.ablate import Ended, Planned
    from soulkit.train.config import TrainConfig
    from soulkit.train.state.lines import Rewards, StepLine
    from soulkit.train.state.summary import TrainSummary

TEN = (
    "grpo,ditto,ditto:lambda_fb=0,ditto:only_copy,rltf-sd,erl,"
    "sdpo-token,sdpo-logits,sdpo-token+grpo,sdpo-logits+grpo"
)
"""What `soul train ablate` compares unless told otherwise."""

COMPARISON = (
    Flag("--methods", str, f"Methods with settings, the first is compared with. Default: {TEN}"),
    Flag("--seeds", int, "Seeds per method, counted up from --seed. Default: 3"),
    Flag("--match", str, "rollouts (default): methods without refined rollouts get 2G drafts, so "
         "that all sample alike; prompts: G drafts for all."),
    Flag("--force-mixed", bool, "Compare methods with other judges, partners or rows all the same, "
         "and say what differs."),
)  # fmt: skip
"""What `ablate` has beside the options of the methods."""

SWITCHES = ("json", "dry_run", "trust", "force_mixed")
METAVARS = {"data": "TASK=FILE", "set": "NAME=VALUE"}


class Sectioned(TyperCommand):
    """A command whose help lists its options by section."""

    sections: Mapping[str, str]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(self.sections.get(parameter.name or "", "Run"), []).append(
                    record
                )
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Methods(TyperGroup):
    """An unknown method is answered with the nearest known one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            raise unknown_method(name)
        return super().resolve_command(ctx, args)


def unknown_method(name: str) -> ConfigError:
    return ConfigError(
        f"'{name}' is no training method.",
        f"soul train knows {', '.join(METHODS)}, and ablate to compare them.",
        did_you_mean(name, [*METHODS, "ablate"]),
    )


app = typer.Typer(cls=Methods, rich_markup_mode=None)


def register(
    name: str, help: str, flags: list[tuple[str, Flag]], body: Callable[..., None]
) -> None:
    """Add the subcommand `name` with these options; `body` gets what was given as one mapping."""

    def command(**given: Any) -> None:
        body(given)

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(flag) for _, flag in flags]
    )
    by_name = {flag.name: section for section, flag in flags}
    made = type("Sectioned", (Sectioned,), {"sections": by_name})
    app.command(name, help=help, cls=made)(command)


def _parameter(flag: Flag) -> inspect.Parameter:
    kind = flag.kind if flag.required else flag.kind | None
    kind = bool if flag.name in SWITCHES else kind
    absent: Any = False if flag.name in SWITCHES else None
    return inspect.Parameter(
        flag.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if flag.required else absent,
        annotation=Annotated[
            kind, typer.Option(flag.names, help=flag.help, metavar=METAVARS.get(flag.name))
        ],
    )


def _add_methods() -> None:
    for method, sentence in METHODS.items():
        flags = list(flags_for(frozenset({method})))
        register(method, sentence, flags, lambda given, method=method: _train(method, given))
    every = [("Comparison", flag) for flag in COMPARISON] + list(flags_for(RL))
    register("ablate", "Compare methods over seeds on equal budgets.", every, _ablate)


# --- one method -----------------------------------------------------------------------------------


def _train(method: str, given: Mapping[str, Any]) -> None:
    from soulkit.cli.plan import show_plan
    from soulkit.train.config import TrainConfig
    from soulkit.train.material.feasible import weightless
    from soulkit.train.planning import plan_of
    from soulkit.train.run import train

    flags = settings_of(method, given)
    config = TrainConfig.load(given["config"], flags=flags, trust=given["trust"])
    if given["dry_run"]:
        show_plan(plan_of(config), given["json"])
        for server in config.servers():
            _say(server)
        return
    out = given["out"] or default_run_path(f"train-{config.method}", list(config.tasks))
    if remark := weightless(config):
        err.print(remark, markup=False, soft_wrap=True)
    with progress(config.steps, f"train {config.method}") as bar:
        summary = train(config, out, step_shower(bar), _say)
    say_unsealed()
    if given["json"]:
        print_json(summary.to_json())
    else:
        _print(config, out, summary)


def _say(remark: str) -> None:
    err.print(remark, markup=False, soft_wrap=True)


def step_shower(bar: Bar) -> Callable[[StepLine], None]:
    """Moves `bar` to each step that is shown to it; a resumed run begins in the middle."""
    shown = 0

    def show(line: StepLine) -> None:
        nonlocal shown
        bar.advance(line.step + 1 - shown, one_line_summary(line))
        shown = line.step + 1
        warn(line)

    return show


def warn(line: StepLine, who: str = "") -> None:
    """Say on stderr which canaries raise an alarm in this step, and what it did not learn from."""
    from soulkit.report.table import alarm_text
    from soulkit.train.rollouts.remarks import remarks

    for alarm in line.canaries.alarms:
        err.print(
            f"{who}canary alarm at step {alarm_text(alarm)}: the judge can be played; "
            "look at its verdicts",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    for remark in remarks(line):
        err.print(f"{who}step {line.step}: {remark}", markup=False, soft_wrap=True)


def one_line_summary(line: StepLine) -> str:
    """A step in a few words: what a person watches."""
    shown = {
        "draft": line.rewards.draft, "refined": line.rewards.refined, "gap": line.rewards.loo,
        "loss": line.learned.loss, "kl": line.learned.kl_base,
    }  # fmt: skip
    parts = [f"{name} {value:.3f}" for name, value in shown.items() if value is not None]
    dev = [f"{task} {mean:.3f}" for task, mean in line.dev.items() if mean is not None]
    return " ".join(parts + (["dev", *dev] if dev else []))


def _print(config: TrainConfig, out: Path, summary: TrainSummary) -> None:
    from soulkit.report.table import canary_text, feedback_text

    rewards, steps, print_line = summary.rewards, summary.steps, console().print
    print_line(f"{steps} step{'s' * (steps != 1)} in {duration(summary.seconds or 0.0)}")
    for label, reward in (("draft", rewards.draft), ("refined", rewards.refined)):
        if reward is not None:
            print_line(f"  {f'{label} reward':18} {reward:.3f}")
    if rewards.loo is not None:
        print_line(f"  leave-one-out gap  {_gap(rewards)}")
    if text := feedback_text(summary.feedback):
        print_line(f"  feedback           {text}", markup=False, soft_wrap=True)
    if text := canary_text(summary.canaries):
        print_line(f"  canaries           {text}", markup=False, soft_wrap=True)
    if unscored := summary.n - summary.n_scored:
        last = summary.summary_steps
        print_line(f"  unscored           {unscored} of {summary.n} in the last {last} steps")
    err.print(
        f"run folder {out}; weights {out / 'model'}; look closer with: soul report {out}",
        markup=False, soft_wrap=True,
    )  # fmt: skip


def _gap(rewards: Rewards) -> str:
    low, high = rewards.loo_low, rewards.loo_high
    interval = "" if low is None or high is None else f" [{low:+.3f}, {high:+.3f}]"
    return f"{rewards.loo:+.3f}{interval}"


# --- many methods ---------------------------------------------------------------------------------


def _ablate(given: Mapping[str, Any]) -> None:
    from soulkit.cli.plan import show_plan
    from soulkit.report import ablation
    from soulkit.train.ablate import parse_arms, plan, run_all
    from soulkit.train.planning import comparison_plan

    arms = parse_arms(given["methods"] or TEN)
    out = given["out"] or default_run_path("ablate", given["task"].split(","))
    runs = plan(
        arms, out, given["config"], lambda method: settings_of(method, given),
        seeds=3 if given["seeds"] is None else given["seeds"], match=given["match"] or "rollouts",
        trust=given["trust"], force_mixed=given["force_mixed"],
    )  # fmt: skip
    if given["dry_run"]:
        show_plan(comparison_plan(runs), given["json"])
        return
    _say(f"{len(runs)} runs in {out}")
    for server in dict.fromkeys(line for run in runs for line in run.config.servers()):
        _say(server)
    with progress(sum(run.config.steps for run in runs), "ablate") as bar:
        ended = run_all(runs, out, *_watch(bar), force_mixed=given["force_mixed"])
    say_unsealed()
    comparison = ablation.compare(out)
    page = ablation.write(comparison, out / "report")
    if given["json"]:
        print_json(ablation.as_json(comparison))
    else:
        for part in ablation.terminal(comparison):
            console().print(part)
    err.print(f"comparison {page}", markup=False, soft_wrap=True)
    failed = sum(run.status == "failed" for run in ended)
    if failed:
        err.print(f"{failed} of {len(ended)} runs failed; the same command tries them again")
        raise typer.Exit(1)


def _watch(bar: Bar) -> tuple[Callable[[Planned, StepLine], None], Callable[[Ended], None]]:
    """What moves the bar over all runs: at every step, and to a run's end when it ends."""
    done: dict[Path, int] = {}

    def show(run: Planned, line: StepLine) -> None:
        note = f"{run.arm.spelling} seed {run.config.seed}: {one_line_summary(line)}"
        bar.advance(line.step + 1 - done.get(run.path, 0), note)
        done[run.path] = line.step + 1
        warn(line, f"{run.arm.spelling} seed {run.config.seed}: ")

    def ended(run: Ended) -> None:
        bar.advance(run.planned.config.steps - done.get(run.planned.path, 0), "")
        if run.status == "failed":
            name = f"{run.planned.arm.spelling} seed {run.planned.config.seed}"
            err.print(f"{name} failed: {run.reason}", markup=False, soft_wrap=True)

    return show, ended


_add_methods()
