"""`soul eval local|api`: parse, call, print. The options are made from EvalConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from soulkit.cli.console import (
    ConsoleReporter,
    one_line,
    out,
    print_json,
    print_note,
    warn_unsealed,
)
from soulkit.cli.options import (
    EVERYDAY,
    JUNIT,
    PILOT,
    GroupFromSettings,
    Option,
    build_command,
    in_reading_order,
    options_for,
    settings_from,
    tasks_in,
)
from soulkit.cli.parse_errors import CommandTable
from soulkit.errors import ConfigError
from soulkit.option_texts import row_sources

if TYPE_CHECKING:
    from soulkit.eval.config import EvalConfig
    from soulkit.eval.results.summary import Summary
    from soulkit.runs.folder import Run

KINDS = {
    "local": "Evaluate a checkpoint on this machine, with or without an adapter.",
    "api": "Evaluate a model behind an OpenAI-compatible server.",
}
CHECKPOINTS = (
    Option("--run", Path, "Training run whose checkpoints are evaluated, instead of --model.",
           "Task and model", metavar="RUN"),
    Option("--checkpoints", str, "Checkpoints of --run: all, last, or steps such as 0,50,last "
                                 "(0: before training).", "Task and model",
           default="all", metavar="STEPS"),
)  # fmt: skip
SEVERAL = ("model", "system_prompt")
"""Settings whose options can be repeated: all combinations are played."""
HERE = {
    "--base-url", "--adapter", "--system-prompt", "--protocol", "--repeats",
    "--temperature", "--max-tokens", "--concurrency", "--refine", "--run",
}  # fmt: skip
"""Options that `--help` shows in addition to the everyday ones."""


class Kinds(GroupFromSettings):
    """The subcommands: local checkpoints and API models."""

    def sentences(self) -> Mapping[str, str]:
        return KINDS

    def build(self, name: str) -> Any:
        if name not in KINDS:
            return None
        from soulkit.eval.config import EvalConfig

        traits = frozenset({"eval", "plays", name})
        more = CHECKPOINTS if name == "local" else ()
        options = in_reading_order([*options_for(EvalConfig, traits), JUNIT, PILOT, *more])
        options = [replace(one, kind=list[str], help=f"{one.help} Repeatable.")
                   if one.setting in SEVERAL else one for one in options]  # fmt: skip

        def body(values: dict[str, Any]) -> None:
            from soulkit.eval.grid import checkpoint_grid, combinations
            from soulkit.eval.run.runner import load_config

            file = values["config"]
            flags = settings_from(options, values, row_sources, tasks_in(file))
            several = [flags.pop(one, []) for one in SEVERAL]
            models, paths = (one if isinstance(one, list) else [one] for one in several)
            # Beside other prompts, `none` is the task's own, whatever the mode.
            modes = {"none": {"prompt_mode": "before"}} if len(paths) > 1 else {}
            if run := values.get("run"):
                if models or paths or flags.get("adapter"):
                    raise ConfigError(
                        "--run cannot be used with --model, --adapter or --system-prompt.",
                        "The model and its adapters are those of the training run.",
                        "Leave out --run or the other options.",
                    )
                _run_several(checkpoint_grid(
                    run, values["checkpoints"] or "all",
                    lambda **one: load_config(file, {"kind": name, **flags, **one},
                                              trust=values["trust"],
                                              asking=not values["dry_run"]),
                ), values)  # fmt: skip
                return
            if values.get("checkpoints"):
                raise ConfigError(
                    "--checkpoints needs --run.", "Checkpoints belong to a training run.",
                    "Add --run RUN, or evaluate one with --model BASE --adapter FOLDER.",
                )  # fmt: skip
            grid = combinations(
                models, [file for path in paths for file in _prompt_files(path)],
                lambda **one: load_config(file, {"kind": name, **flags, **one,
                                                 **modes.get(one["system_prompt"], {})},
                                          trust=values["trust"], asking=not values["dry_run"]),
            )  # fmt: skip
            settings = next(iter(grid.values()))
            if len(grid) > 1:
                _run_several(grid, values)
            elif values["dry_run"]:
                show_dry_run(settings, values)
            else:
                _run(settings, values)

        return build_command(name, KINDS[name], options, body, everyday=EVERYDAY | HERE)


def _prompt_files(path: str) -> list[str]:
    """The text files of a folder by name; any other path is one file."""
    inside = (file for file in sorted(Path(path).glob("*")) if file.suffix in (".md", ".txt"))
    return [str(file) for file in inside] or [path]


app = CommandTable(cls=Kinds, rich_markup_mode=None)


@app.callback(help="Evaluate a local checkpoint or a model behind an API.")
def group() -> None:
    """The commands are made by `Kinds`."""


# -- running and printing ------------------------------------------------------------------------


def show_dry_run(config: EvalConfig, values: Mapping[str, Any]) -> None:
    """Print the plan of an evaluation."""
    from soulkit.cli.plan import show_plan
    from soulkit.eval.planning import evaluation_plan
    from soulkit.eval.run.runner import evaluation_pilot, prepare
    from soulkit.eval.run.session import batch_words

    reporter, pilot = ConsoleReporter("eval"), values["pilot"]
    if pilot is None:
        config, work = prepare(config.for_plan(), reporter, asking=False)
        plan = evaluation_plan(config, work)
    else:
        plan = evaluation_pilot(config, pilot, values["out"], reporter)
    show_plan(plan, values["json"], bounds=values["bounds"], offered=True)
    for line in (*batch_words(config), *config.servers()):
        print_note(line)


def _run_several(grid: Mapping[str, EvalConfig], values: Mapping[str, Any]) -> None:
    """Play every combination of models and system prompts, or print the plan of all."""
    from soulkit.cli.console import print_next
    from soulkit.cli.plan import show_plan
    from soulkit.eval.grid import grid_comparisons, grid_plan, run_grid
    from soulkit.report.episode_search import shell_path

    first = next(iter(grid.values()))
    for one in ("pilot", "gate", "gates", "junit"):
        if values[one] or getattr(first, one, None):
            raise ConfigError(
                f"--{one} does not work with several models or system prompts.",
                "It is for one run.",
                "Leave it out. Gates can test a finished combination: give its model and system "
                "prompt alone, with --out FOLDER/RUN.",
            )
    if values["dry_run"]:
        show_plan(grid_plan(grid), values["json"], bounds=values["bounds"])
        return
    folder, played = run_grid(grid, values["out"], ConsoleReporter("eval"))
    warn_unsealed()
    if values.get("run") and played:
        _show_checkpoints(folder, values)
    elif values["json"]:
        made, problems = grid_comparisons(folder)
        runs = {run.path.name: summary.to_json() for _, run, summary in played}
        comparisons = [one.as_dict() for one in made]
        print_json({"runs": runs, "comparisons": comparisons, "problems": problems})
    elif played:
        _print_run(folder, first)
        print_next(f"soul report {shell_path(folder)} --format html")
    texts = [f"{run.path.name}: {text}" for config, run, summary in played
             for text in (_too_many(config, summary), _silent(summary)) if text]  # fmt: skip
    for text in texts:
        print_note(text)
    if texts or len(played) < len(grid):
        raise typer.Exit(1)


def _show_checkpoints(folder: Path, values: Mapping[str, Any]) -> None:
    """Write the page of the checkpoints and print their scores against the step."""
    from soulkit.cli.console import print_next
    from soulkit.report.episode_search import shell_path
    from soulkit.report.exports import checkpoints
    from soulkit.report.grid import grid_parts

    scores = checkpoints.load_checkpoint_scores(folder)
    page = checkpoints.write_checkpoints(scores, folder, values["run"])
    if values["json"]:
        print_json(checkpoints.checkpoints_json(scores))
        return
    for part in grid_parts(checkpoints.checkpoint_table(scores)):
        out.print(part)
    print_note(f"report: {page}")
    print_next(f"soul report {shell_path(folder)} --format html")


def _run(config: EvalConfig, values: Mapping[str, Any]) -> None:
    from soulkit.eval.run.runner import run_eval

    run, summary = run_eval(config, values["out"], reporter=ConsoleReporter("eval"))
    warn_unsealed()
    if not values["json"]:
        _print_run(run.path, config)
    finish(config, run, summary, _next_lines(run, summary), values)


def finish(
    config: EvalConfig, run: Run, summary: Summary, next_lines: Sequence[str],
    values: Mapping[str, Any],
) -> None:  # fmt: skip
    """Print the gates (with --json the summary with them), what went wrong and the next commands;
    exit with code 1 if too much went wrong or a gate did not pass."""
    from soulkit.cli.console import print_next
    from soulkit.eval.gates import tested_gates, write_junit
    from soulkit.eval.results.summary import summary_line

    as_json = values["json"]
    tested = tested_gates(config.gate_texts(), run, summary, config.registry())
    gates = {one.line(): one for one in tested}
    if as_json:
        listed = {"gates": [one.as_dict() for one in gates.values()]} if gates else {}
        print_json({**summary_line(run.path), **listed})
    for line in () if as_json else gates:
        out.print(line, markup=False, soft_wrap=True)
    if values["junit"]:
        write_junit(values["junit"], f"soul {config.command}", gates)
    _say_failures(run, summary)
    if not as_json:
        print_next(*next_lines)
    shut = sum(one.outcome != "pass" for one in gates.values())
    failing = f"{shut} of {len(gates)} gates did not pass" if shut else ""
    again = f" with --out {run.path}"
    wrong = [*filter(None, (_too_many(config, summary, again), _silent(summary), failing))]
    for text in wrong:
        print_note(text)
    if wrong:
        raise typer.Exit(1)


def _silent(summary: Summary) -> str:
    """The warning for tasks in which every reply was empty; else empty."""
    from soulkit.eval.results.warnings import silent_tasks

    tasks = ", ".join(f"{name} ({n} of {n})" for name, n in silent_tasks(summary.limits).items())
    why = "check whether the server sends its text in another field than 'content'"
    return f"every reply was empty: {tasks}; {why}" if tasks else ""


def _too_many(config: EvalConfig, summary: Summary, where: str = "") -> str:
    """The message if too many episodes are unscored or truncated; else empty. The same command
    `where` tries them again."""
    from soulkit.eval.results.warnings import truncated_total

    unscored, cut = summary.n - summary.n_scored, truncated_total(summary.statuses)
    most = f"more than --max-unscored {config.max_unscored:g} allows"
    again = f"to retry them, run the same command{where}"
    if (unscored + cut) / max(summary.n, 1) <= config.max_unscored:
        lost = ", ".join(
            f"{task} {metric.partition('/')[2]}: {cell.n - cell.n_scored} of {cell.n}"
            for task, cells in summary.tasks.items() for metric, cell in cells.items()
            if metric.startswith("value/round=")
            and cell.n - cell.n_scored > config.max_unscored * cell.n
        )  # fmt: skip
        failed = f"replies to feedback are unscored ({lost}), {most}"
        return f"{failed}; {again}" if lost else ""
    longer = "start a new run with a larger --max-tokens or a model with a longer context"
    if not cut:
        return f"{unscored} of {summary.n} episodes are unscored, {most}; {again}"
    if not unscored:
        return f"{cut} of {summary.n} episodes are truncated, {most}; {longer}"
    both = f"{unscored} of {summary.n} episodes are unscored and {cut} truncated"
    return f"{both}, {most}; unscored: {again}; truncated: {longer}"


def _print_run(folder: Path, config: EvalConfig) -> None:
    from soulkit.report.load import load_runs
    from soulkit.report.pages import ReportView
    from soulkit.report.suites import suite_table

    runs = load_runs([folder], episodes=False)
    suite = suite_table(runs, config.suite, config.registry()) if config.suite else None
    for part in ReportView(runs, suite).parts():
        out.print(part)


def _next_lines(run: Run, summary: Summary) -> tuple[str, ...]:
    from soulkit.report.episode_search import shell_path, show_command

    name = shell_path(run.path)
    shown = "--worst 10" if summary.n_scored else "--status unscored"
    return (f"{show_command(run.path)} {shown}", f"soul report {name} --format html",
            f"soul compare OTHER {name}")  # fmt: skip


def _say_failures(run: Run, summary: Summary) -> None:
    """Print statuses other than ok, truncated replies, settings that servers refused, and the
    first error message of each kind of failure."""
    from soulkit.eval.results.warnings import dropped_text, limits_text, truncation_text
    from soulkit.eval.run.resume import unscored_controls
    from soulkit.eval.run.runner import failures
    from soulkit.report.episode_search import odd_cells
    from soulkit.runs.records import load_records

    for task, statuses in summary.statuses.items():
        if set(statuses) - {"ok"}:
            counts = ", ".join(f"{status} {count}" for status, count in statuses.items())
            print_note(f"{task}: {counts}")
    if text := truncation_text(summary.statuses):
        print_note(f"truncated replies: {text}; 'worst to best' shows their possible effect")
    if text := limits_text(summary.limits, summary.statuses):
        print_note(f"replies cut at the token limit, readable or not: {text}")
    if text := dropped_text(summary.dropped_settings):
        print_note(f"settings that servers rejected and that were left out: {text}")
    for line in (*unscored_controls(summary.controls), *odd_cells(summary, run.path)):
        print_note(line)
    coached = any("gain/round=1" in cells for cells in summary.tasks.values())
    if summary.n_scored < summary.n or coached:
        for reason, words in failures(load_records(run.episodes, light=True)).items():
            print_note(f"{reason}: {one_line(words, 300)}")
