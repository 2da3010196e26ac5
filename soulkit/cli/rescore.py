"""`soul rescore RUN`: score recorded episodes again with changed parsers, metrics, judges or judge
prompts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.options import DRY_RUN, Json, MaxContext, Trust
from soulkit.errors import ConfigError
from soulkit.runs.folder import default_run_path

if TYPE_CHECKING:
    from soulkit.eval.results.recorded import RecordedRun
    from soulkit.eval.results.rejudge import RejudgePlan
    from soulkit.eval.results.rescore import Change, Rescored
    from soulkit.models.players.settings import RoleSettings


class Missing(StrEnum):
    """What to do with episodes whose judge reply is not recorded."""

    stop = "stop"
    unscored = "unscored"


Judges = Annotated[list[str] | None, typer.Option("--judge", metavar="PLAYER",
    help="With --ask: use these judges instead of the run's own.")]  # fmt: skip
Prompts = Annotated[Path | None, typer.Option("--prompts", metavar="FOLDER",
    help="With --ask: folder with edited judge prompts, judge.md or TASK/judge.md.")]  # fmt: skip
Endpoints = Annotated[Path | None, typer.Option("--endpoints", metavar="FILE",
    help="With --judge: YAML file with named models.")]  # fmt: skip
MaxCost = Annotated[float | None, typer.Option("--max-cost", metavar="X", min=0,
    help="With --ask: stop after spending X US dollars.")]  # fmt: skip


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN",
        help="Run folder of an evaluation or training.")],
    folder: Annotated[Path | None, typer.Option("--out", metavar="FOLDER",
        help="Run folder to write. [default: a new folder under runs/]")] = None,
    missing: Annotated[Missing, typer.Option("--missing", metavar="|".join(Missing),
        help="If a judge reply is not recorded: stop, or leave the episode "
        "unscored.")] = Missing.stop,
    ask: Annotated[bool, typer.Option("--ask",
        help="Ask the judge for replies that are not in the ledger. Can be resumed.")] = False,
    judge: Judges = None, prompts: Prompts = None, endpoints: Endpoints = None,
    max_cost: MaxCost = None, max_context: MaxContext = None,
    yes: Annotated[bool, typer.Option("--yes",
        help="With --ask: skip the cost confirmation.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN)] = False,
    trust: Trust = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Score recorded episodes again without new model calls.

    Judge replies come from the run's ledger, and the scores go to a new run folder. With --ask,
    the judge is asked for missing replies, so that you can change the judge or its prompts. The
    same command resumes an interrupted one.
    """
    from soulkit.cli.console import print_json, warn_unsealed
    from soulkit.eval.results.rescore import rescore
    from soulkit.eval.run.provenance import in_start_folder

    named = {"--judge": judge, "--prompts": prompts, "--max-cost": max_cost, "--yes": yes,
             "--dry-run": dry_run, "--endpoints": endpoints, "--max-context": max_context,
             }  # fmt: skip
    if not ask and any(named.values()):
        raise _needs_ask(next(name for name, value in named.items() if value))
    run, here, judges = run.resolve(), Path.cwd(), _judges(judge, endpoints)
    out, prompts = (path.resolve() if path else None for path in (folder, prompts))
    with in_start_folder(run):
        recorded = _recorded(run, trust)
        if not ask:
            tasks = sorted({r.task for r in recorded.records})
            out = out or default_run_path("rescore", tasks, here / "runs")
            done = rescore(recorded, out, missing.value)
        else:
            from soulkit.eval.results.rejudge import rejudge_plan

            renewal = rejudge_plan(
                recorded, judges, prompts, out, here / "runs",
                max_cost=max_cost, yes=yes, max_context=max_context,
            )  # fmt: skip
            if (asked := _asked(renewal, dry_run=dry_run, as_json=as_json)) is None:
                return
            done = asked
    warn_unsealed()
    if as_json:
        print_json(done.as_dict())
    else:
        _print(done, here)
        _say_next(_seen_from(here, run), _seen_from(here, Path(done.path)))


def _judges(texts: list[str] | None, endpoints: Path | None) -> tuple[RoleSettings, ...]:
    from soulkit.eval.results.rejudge import judges_named

    return judges_named(texts, str(endpoints) if endpoints else None) if texts else ()


def _asked(renewal: RejudgePlan, *, dry_run: bool, as_json: bool) -> Rescored | None:
    """Show the cost, ask for confirmation and call the judge; None for a dry run."""
    from soulkit.cli.console import ConsoleReporter, print_note
    from soulkit.cli.plan import show_plan
    from soulkit.eval.results.rejudge import rejudge, survey_of, survey_plan
    from soulkit.play.plan import confirm_cost

    survey = survey_of(renewal)
    plan = survey_plan(renewal, survey)
    if dry_run:
        show_plan(plan, as_json)
        return None
    controls = f" and {len(survey.controls)} controls" if survey.controls else ""
    asked = f"{survey.questions} questions of {len(survey.episodes)} episodes{controls}"
    print_note(f"not in the ledger: {asked}")
    reporter = ConsoleReporter("rescore")
    confirm_cost(plan, renewal.config, reporter)
    for server in renewal.servers() if survey.questions else ():
        print_note(server)
    return rejudge(renewal, reporter=reporter)


def _needs_ask(option: str) -> ConfigError:
    return ConfigError(
        f"{option} needs --ask.",
        "Without --ask the command only reads recorded replies again.",
        "Add --ask, or leave the option out.",
    )


def _recorded(run: Path, trust: bool) -> RecordedRun:
    from soulkit.errors import RunError
    from soulkit.eval.results.rescore import command_of, recorded_eval

    command = command_of(run)
    if command.startswith("eval"):
        return recorded_eval(run, trust=trust)
    if command.startswith("train"):
        from soulkit.train.rejudge import recorded_training

        return recorded_training(run, trust=trust)
    raise RunError(
        f"{run} was made by 'soul {command}'.",
        "Only evaluation and training runs have episodes to score again.",
        "Name the folder of a soul eval or soul train run.",
    )


def _seen_from(here: Path, path: Path) -> Path:
    return path.relative_to(here) if path.is_relative_to(here) else path


def _print(done: Rescored, here: Path) -> None:
    from soulkit.cli.console import out, safe
    from soulkit.report.grid import plain_table

    made = plain_table(
        "task", "metric", ">old mean", ">new mean", ">changed", ">scored", "now unscored"
    )
    for change in done.changes:
        made.add_row(*(safe(text) for text in _row(change)))
    out.print(made)
    misses = f", {done.misses} of them because a judge reply is missing" if done.misses else ""
    shown = _seen_from(here, Path(done.path))
    beside = f", and {done.controls_changed} of {done.controls} controls" if done.controls else ""
    out.print(
        safe(f"the score of {done.changed} of {done.episodes} episodes{beside} changed{misses}; "
             f"new scores: {shown}"),
        soft_wrap=True,
    )  # fmt: skip


def _say_next(old: Path, new: Path) -> None:
    from soulkit.cli.console import print_next
    from soulkit.report.episode_search import shell_path

    print_next(f"soul report {shell_path(old)} {shell_path(new)}", f"soul show {shell_path(new)}")


def _row(change: Change) -> tuple[str, ...]:
    why = ", ".join(f"{reason} {count}" for reason, count in change.unscored.items())
    scored = f"{change.new_scored}/{change.n}"
    if change.new_scored != change.old_scored:
        scored = f"{change.old_scored} -> {scored}"
    figures = (_number(change.old), _number(change.new), str(change.changed), scored)
    return change.task, change.metric, *figures, why


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
