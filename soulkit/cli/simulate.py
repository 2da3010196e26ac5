"""`soul simulate`: simulated people talk to an agent. The options are made from EvalConfig."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from soulkit.cli.console import ConsoleReporter, out, safe, warn_unsealed
from soulkit.cli.eval import finish, show_dry_run
from soulkit.cli.options import (
    COMMON,
    EVERYDAY,
    JUNIT,
    Option,
    build_command,
    options_for,
    settings_from,
)
from soulkit.errors import ConfigError

if TYPE_CHECKING:
    from soulkit.eval.config import EvalConfig
    from soulkit.eval.results.summary import Cell, Summary
    from soulkit.runs.folder import Run

HELP = """Let simulated people talk to your agent.

Every persona meets every scenario. A judge (--judge) or your own function (--verdict) decides
whether the agent did its job; without either, only ends, turns and faults are reported. Scores are
shown with and without the conversations in which the simulator was at fault. The same command
resumes an interrupted run; soul compare compares the runs of two agents."""
_about, _players = "Task and model", "Players"
OWN = (
    Option("--agent", str, "Agent under test: URL of an OpenAI-compatible server, FILE.py:NAME of "
           "a Python function, or a player.", _about, required=True, metavar="AGENT"),
    Option("--user", str, "Who plays the people: a model, a training run, or a player such as "
           "endpoint:MODEL@URL.", _about, required=True, metavar="USER"),
    Option("--personas", Path, "Personas, one a line; soul people personas drafts them.", _about,
           metavar="FILE"),
    Option("--scenarios", Path, "What the people want, one scenario a line; soul people scenarios "
           "drafts them.", _about, metavar="FILE"),
    Option("-n", int, "Number of conversations; pairs are repeated once all are used.", _about,
           default="every persona with every scenario", metavar="N", min=1),
    Option("--max-turns", int, "Maximum replies of the agent in a conversation.", _about,
           default="12", metavar="N", min=1),
    Option("--criterion", str, "What the judge rates, in a sentence.", _players,
           default="set by the task", metavar="SENTENCE"),
    Option("--verdict", str, "Python function that gets the messages and the row, and returns "
           "True, False, a number from 0 to 1, or a dict with score and reason.", _players,
           metavar="FILE.py:NAME"),
)  # fmt: skip
"""Options of this command alone."""
SHARED = frozenset({
    *("--judge", "--judge-samples", "--endpoints", "--temperature", "--max-tokens", "--thinking"),
    *("--reasoning-effort", "--seed", "--concurrency", "--max-cost", "--yes", "--prices"),
    *("--requests-per-minute", "--tokens-per-minute", "--timeout", "--max-attempts", "--device"),
    *("--batch-size", "--max-context", "--allow-private", "--max-unscored", "--bounds"),
    *("--gate", "--gates"),
    *(one.flag for one in COMMON if one.flag not in ("--config", "--set")),
})  # fmt: skip
"""Options of an evaluation that apply here."""


def make_command() -> Any:
    """The command with its options."""
    from soulkit.eval.config import EvalConfig

    shared = options_for(EvalConfig, frozenset({"eval", "plays", "api", "local"}))
    options = [*OWN, *(one for one in shared if one.flag in SHARED), JUNIT]

    def body(values: dict[str, Any]) -> None:
        settings = settings_from(options, values, lambda *_: {})
        if not values["dry_run"]:
            folder = values["out"].parent if values["out"] else Path("runs")
            _run(_config(values, settings, folder), values)
            return
        with tempfile.TemporaryDirectory() as aside:
            show_dry_run(_config(values, settings, Path(aside)), {**values, "pilot": None})

    everyday = EVERYDAY | {one.flag for one in OWN}
    return build_command("simulate", HELP, options, body, everyday=everyday)


def _config(values: Mapping[str, Any], settings: dict[str, Any], folder: Path) -> EvalConfig:
    """The settings of the run; ConfigError for options that contradict each other."""
    from soulkit.models.players.settings import players_by_name
    from soulkit.people.simulation import conversation_rows, simulation_config
    from soulkit.tasks.kit.person.brief import read_briefs

    named = players_by_name({"endpoints": settings.get("endpoints")}, ["judge"]).get("judge")
    verdict = values["verdict"] or ("judge" if values["judge"] or named else "none")
    for wrong, *texts in (
        (not (values["personas"] or values["scenarios"]), "No people are described.",
         "They need a persona, a scenario or both.", "Add --personas FILE or --scenarios FILE."),
        (values["verdict"] and values["judge"], "Both --judge and --verdict are given.",
         "A conversation has one score.", "Leave out one of them."),
        (values["criterion"] and verdict != "judge", "--criterion has no effect without a judge.",
         "Only a judge reads it.", "Add --judge PLAYER, or leave out --criterion."),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(*texts)
    briefs = read_briefs(values["personas"], values["scenarios"])
    rows = conversation_rows(briefs, values["n"], int(settings.get("seed") or 0), folder)
    own = {name: str(values[name]) for name in ("criterion", "max_turns") if values[name]}
    return simulation_config(values["agent"], values["user"], rows, {"verdict": verdict, **own},
                             settings, trust=values["trust"])  # fmt: skip


def _run(config: EvalConfig, values: Mapping[str, Any]) -> None:
    from soulkit.eval.results.summary import summary_line
    from soulkit.eval.run.runner import run_eval
    from soulkit.report.episode_search import shell_path, show_command
    from soulkit.report.grid import plain_table
    from soulkit.report.load import NOTES
    from soulkit.serving.certificate import certificate_lines, find_certificate

    reporter, user = ConsoleReporter("simulate"), config.partner
    folder = user.model if user is not None and user.kind == "local" else ""
    certificate = find_certificate(folder) if folder and Path(folder).is_dir() else None
    lines = [f"simulator: {line}" for line in certificate_lines(certificate)]
    for line in lines:
        reporter.note(line)
    run, summary = run_eval(config, values["out"], reporter=reporter)
    warn_unsealed()
    cells = next(iter(summary.tasks.values()))
    facts = list(_facts(run, summary, cells, judged=config.option["verdict"] != "none"))
    notes = [" · ".join(f"{label}: {text}" for label, text in facts), *lines]
    run.write_summary({**summary_line(run.path), NOTES: notes})
    if not values["json"]:
        table = plain_table(*facts[0])
        for fact in facts[1:]:
            table.add_row(*map(safe, fact))
        out.print(table)
    name = shell_path(run.path)
    commands = (f"{show_command(run.path)} --worst 5", f"soul report {name} --format html",
                f"soul compare OTHER {name}")  # fmt: skip
    finish(config, run, summary, commands, values)


def _facts(
    run: Run, summary: Summary, cells: Mapping[str, Cell], *, judged: bool
) -> Iterator[tuple[str, str]]:
    """The results of the run: label, text."""
    from soulkit.runs.records import load_records
    from soulkit.tasks.kit.person.faults import fault_kinds
    from soulkit.text import dollars, listed, one_line

    records = load_records(run.episodes, light=True)
    turns = [x for one in records if (x := one.score.metrics.get("turns")) is not None]
    ends = Counter(one.episode.stop.replace("_", " ") for one in records)
    kinds = Counter(kind.replace("_", " ") for one in records for kind in fault_kinds(one.episode))
    errors = [one.score.words for one in records if one.episode.stop == "agent_error"]
    yield "conversations", str(summary.n)
    if not judged:
        yield "score", "none: neither --judge nor --verdict was given"
    yield "score" if judged else "every message answered", _estimate(cells.get("value"))
    yield "without faulty ones", _estimate(cells.get("without_faults"))
    yield "ends", listed(dict(ends.most_common()))
    yield "turns", f"median {median(turns):g}" if turns else "none"
    yield "faults of the simulator", listed(dict(kinds.most_common())) or "none"
    if errors:
        yield "first error of the agent", one_line(errors[0], 200)
    if summary.cost is not None or summary.unpriced_calls:
        yield "cost", dollars(summary.cost)


def _estimate(cell: Cell | None) -> str:
    from soulkit.metrics.intervals import estimate_text

    if cell is None:
        return "none"
    return f"{estimate_text(cell.mean, cell.ci_low, cell.ci_high)} (n {cell.n_scored})"
