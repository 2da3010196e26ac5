"""`soul rescore RUN`: score recorded episodes again with changed parsers, metrics, judges or judge
prompts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.options import DRY_RUN, Json, MaxContext, Trust
from soulkit.errors import ConfigError
from soulkit.runs.folder import default_run_path

if TYPE_CHECKING:
    from soulkit.eval.results.recorded import RecordedRun
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


Scorer = Annotated[str | None, typer.Option("--scorer", metavar="FILE.py:NAME",
    help="Score with your function NAME(row, reply, lines); no judge is needed.")]  # fmt: skip
Tasks = Annotated[Path | None, typer.Option("--tasks", metavar="FILE",
    help="Score with the tasks in this YAML file instead of the run's own.")]  # fmt: skip


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN",
        help="Run folder of an evaluation or training.")],
    folder: Annotated[Path | None, typer.Option("--out", metavar="FOLDER",
        help="Run folder to write. [default: a new folder under runs/]")] = None,
    missing: Annotated[Missing, typer.Option("--missing", metavar="|".join(Missing),
        help="If a judge reply is not recorded: stop, or leave the episode "
        "unscored.")] = Missing.stop,
    scorer: Scorer = None, tasks: Tasks = None,
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

    _refuse_options(ask, {"--scorer": scorer} if ask else {
        "--judge": judge, "--prompts": prompts, "--max-cost": max_cost, "--yes": yes,
        "--dry-run": dry_run, "--endpoints": endpoints, "--max-context": max_context,
    })  # fmt: skip
    run, here, judges = run.resolve(), Path.cwd(), _judges(judge, endpoints)
    out, prompts, tasks = (path and path.resolve() for path in (folder, prompts, tasks))
    with in_start_folder(run):
        recorded = _recorded(run, trust, tasks, scorer and str(here / scorer))
        if not ask:
            names = sorted({r.task for r in recorded.records})
            out = out or default_run_path("rescore", names, here / "runs")
            done = rescore(recorded, out, missing.value)
        else:
            choices = judges, prompts, out, here / "runs"
            limits = {"max_cost": max_cost, "yes": yes, "max_context": max_context}
            asked = _asked(recorded, choices, limits, dry_run=dry_run, as_json=as_json)
            if asked is None:
                return
            done = asked
    warn_unsealed()
    if as_json:
        print_json(done.as_dict())
    else:
        _print(done, here, run)


def _refuse_options(ask: bool, named: dict[str, Any]) -> None:
    """ConfigError for the first option that is set and has no effect."""
    for option in filter(named.get, named):
        raise ConfigError(
            f"{option} does not work with --ask." if ask else f"{option} needs --ask.",
            "Without --ask the command only reads recorded replies again.",
            "Leave out one of them." if ask else "Add --ask, or leave the option out.",
        )


def _judges(texts: list[str] | None, endpoints: Path | None) -> tuple[RoleSettings, ...]:
    from soulkit.eval.results.rejudge import judges_named

    return judges_named(texts, str(endpoints) if endpoints else None) if texts else ()


def _asked(
    recorded: RecordedRun, choices: Any, limits: Any, *, dry_run: bool, as_json: bool
) -> Rescored | None:
    """Show the cost, ask for confirmation and call the judge; None for a dry run."""
    from soulkit.cli.console import ConsoleReporter, print_note
    from soulkit.cli.plan import show_plan
    from soulkit.eval.results.rejudge import rejudge, rejudge_plan, survey_of, survey_plan
    from soulkit.play.plan import confirm_cost

    renewal = rejudge_plan(recorded, *choices, **limits)
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


def _recorded(run: Path, trust: bool, tasks: Path | None, scorer: str | None) -> RecordedRun:
    from soulkit.errors import RunError
    from soulkit.eval.results.rescore import command_of, recorded_eval, with_scorer

    command = command_of(run)
    if command.startswith("eval"):
        recorded = recorded_eval(run, trust=trust, tasks_file=tasks)
    elif command.startswith("train"):
        from soulkit.train.rejudge import recorded_training

        recorded = recorded_training(run, trust=trust, tasks_file=tasks)
    else:
        raise RunError(
            f"{run} was made by 'soul {command}'.",
            "Only evaluation and training runs have episodes to score again.",
            "Name the folder of a soul eval or soul train run.",
        )
    return with_scorer(recorded, scorer, trust=trust) if scorer else recorded


def _seen_from(here: Path, path: Path) -> Path:
    return path.relative_to(here) if path.is_relative_to(here) else path


def _print(done: Rescored, here: Path, old: Path) -> None:
    from soulkit.cli.console import out, print_next, safe
    from soulkit.report.episode_search import shell_path
    from soulkit.report.grid import plain_table

    made = plain_table(
        "task", "metric", ">old mean", ">new mean", ">changed", ">scored", "now unscored"
    )
    for change in done.changes:
        made.add_row(*(safe(text) for text in _row(change)))
    out.print(made)
    misses = f", {done.misses} of them because a judge reply is missing" if done.misses else ""
    shown, before = _seen_from(here, Path(done.path)), _seen_from(here, old)
    beside = f", and {done.controls_changed} of {done.controls} controls" if done.controls else ""
    out.print(
        safe(f"the score of {done.changed} of {done.episodes} episodes{beside} changed{misses}; "
             f"new scores: {shown}"),
        soft_wrap=True,
    )  # fmt: skip
    new = shell_path(shown)
    print_next(f"soul report {shell_path(before)} {new}", f"soul show {new}")


def _row(change: Change) -> tuple[str, ...]:
    from soulkit.metrics.intervals import number

    why = ", ".join(f"{reason} {count}" for reason, count in change.unscored.items())
    scored = f"{change.new_scored}/{change.n}"
    if change.new_scored != change.old_scored:
        scored = f"{change.old_scored} -> {scored}"
    figures = (number(change.old), number(change.new), str(change.changed), scored)
    return change.task, change.metric, *figures, why
