"""`soul eval local|api`: parse, call, print. Their options are made from EvalConfig."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from soulkit.cli.console import (
    ask_user,
    err,
    one_line,
    out,
    print_json,
    progress,
    safe,
    say_unsealed,
)
from soulkit.cli.derive import Derived, build_command, options_for, settings_from, tasks_in
from soulkit.cli.options import row_sources

if TYPE_CHECKING:
    from soulkit.eval.config import EvalConfig
    from soulkit.eval.summary import Summary
    from soulkit.runs.folder import Run

KINDS = {
    "local": "Score a checkpoint on this machine, with or without an adapter.",
    "api": "Score a model behind any OpenAI-compatible server.",
}


class Kinds(Derived):
    """The two kinds of models that are scored."""

    def sentences(self) -> Mapping[str, str]:
        return KINDS

    def build(self, name: str) -> Any:
        if name not in KINDS:
            return None
        from soulkit.eval.config import EvalConfig

        options = options_for(EvalConfig, frozenset({"eval", "plays", name}))

        def body(values: dict[str, Any]) -> None:
            file = values["config"]
            flags = settings_from(options, values, row_sources, tasks_in(file))
            settings = EvalConfig.load(file, flags={"kind": name, **flags}, trust=values["trust"])
            if values["dry_run"]:
                _dry_run(settings, values["json"])
            else:
                _run(settings, values["out"], values["json"])

        return build_command(name, KINDS[name], options, body)


app = typer.Typer(cls=Kinds, rich_markup_mode=None)


@app.callback(help="Score a model: a local checkpoint or any API endpoint.")
def group() -> None:
    """The commands are made by `Kinds`."""


# -- running and printing ------------------------------------------------------------------------


def _dry_run(config: EvalConfig, as_json: bool) -> None:
    from soulkit.cli.plan import show_plan
    from soulkit.eval.planning import evaluation_plan
    from soulkit.eval.runner import prepare

    config, work = prepare(config, _say, asking=False)
    show_plan(evaluation_plan(config, work), as_json)
    for server in config.servers():
        _say(server)


def _run(config: EvalConfig, folder: Path | None, as_json: bool) -> None:
    from soulkit.eval.runner import run_eval

    run, summary = run_eval(
        config, folder, bars=lambda n: progress(n, "eval"), say=_say, ask=ask_user()
    )
    say_unsealed()
    if as_json:
        print_json(run.read_summary())
    else:
        _print_run(run, config)
    _say_failures(run, summary)
    share = summary.unscored_share or 0.0
    if share > config.max_unscored:
        unscored = summary.n - summary.n_scored
        _say(
            f"{unscored} of {summary.n} episodes are unscored, more than --max-unscored "
            f"{config.max_unscored:g} allows; to play them again, run the same command with "
            f"--out {run.path}"
        )
        raise typer.Exit(1)


def _say(remark: str) -> None:
    err.print(safe(one_line(remark)), soft_wrap=True)


def _print_run(run: Run, config: EvalConfig) -> None:
    from soulkit.eval.config import eval_registry
    from soulkit.report.load import load_runs
    from soulkit.report.suites import suite_table
    from soulkit.report.views import ReportView

    runs = load_runs([run.path], episodes=False)
    suite = suite_table(runs, config.suite, eval_registry(config)) if config.suite else None
    for part in ReportView(runs, suite).parts():
        out.print(part)


def _say_failures(run: Run, summary: Summary) -> None:
    """Statuses other than ok, and the first failure of each kind in its own words."""
    from soulkit.eval.runner import failures
    from soulkit.runs.records import load_records

    for task, statuses in summary.statuses.items():
        if set(statuses) - {"ok"}:
            counts = ", ".join(f"{status} {count}" for status, count in statuses.items())
            _say(f"{task}: {counts}")
    if summary.n_scored < summary.n:
        for reason, words in failures(load_records(run.episodes)).items():
            _say(f"{reason}: {one_line(words, 300)}")
