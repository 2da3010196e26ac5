"""`soul tasks check`: a task's gold against its own scorer, row by row, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.console import err, one_line, out, print_json, safe
from soulkit.cli.console import table as new_table
from soulkit.cli.options import COMPLETERS, Json, TaskFiles, Trust, registry_of
from soulkit.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from soulkit.tasks.registry import Registry
    from soulkit.tasks.selfcheck import Finding, SelfCheck


MADE_ROWS = "synth:100"
"""What is checked where no rows are given and they can be made."""

NOT_PLAYED = "-"

LONG = 600
"""Characters of what breaks: it says what to do about it."""

SHOWN = 10
"""Findings of one kind printed for a task; --json has all."""


def check_tasks(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Tasks; default: all.", metavar="[TASK]...", autocompletion=COMPLETERS["tasks"]
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="[TASK=]FILE, FOLDER or synth:N; may be repeated."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option("--suite", help="The tasks of a suite.", autocompletion=COMPLETERS["suites"]),
    ] = None,
    protocol: Annotated[str, typer.Option("--protocol", help="paper or reference.")] = "paper",
    seed: Annotated[int, typer.Option("--seed", help="Of made rows.")] = 0,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Play gold and wrong answers through each task's scorer.

    No model is asked. Every prompt of a row is rendered. Without --data, the released files are
    checked where they lie, else 100 rows made here. The exit code is 1 when a gold fails, as no
    model can be right about such a row, and when a prompt or feedback breaks. Warnings say what a
    task declares and does not have: a coach's prompt, a leak check, symbolic feedback. Of feedback
    by rules it counts how many different texts the wrong drafts get.
    """
    from soulkit.tasks.loading import examples_from
    from soulkit.tasks.selfcheck import check_task, with_unused
    from soulkit.tasks.spec import protocol_named

    registry = registry_of(tasks, trust=trust)
    sources = _data(data or (), names or (), suite, registry)
    checks: list[SelfCheck] = []
    for name, where in sources.items():
        if where is not None:
            live = registry.task(name, protocol_named(protocol))
            checks.append(check_task(live, examples_from(live, where, seed), where))
    unchecked = [name for name, where in sources.items() if where is None]
    checks = with_unused(checks, registry)
    failed = not all(check.passed for check in checks)
    if as_json:
        print_json(
            {
                "tasks": [asdict(check) for check in checks],
                "not_checked": unchecked,
                "passed": not failed,
            }
        )
    else:
        _print_checks(checks, unchecked)
    if failed:
        raise typer.Exit(1)


def _data(
    options: Sequence[str], names: Sequence[str], suite: str | None, registry: Registry
) -> dict[str, str | None]:
    """Task → its rows; None where none were given and none can be made."""
    chosen = [*names, *(registry.suite(suite) if suite is not None else ())]
    for name in chosen:
        registry.spec(name)
    rows, for_all = _named_rows(options, chosen, registry)
    requested = dict.fromkeys(chosen or rows or registry.specs)
    sources = {name: rows.get(name) or for_all or _at_hand(name, registry) for name in requested}
    lacking = [name for name in names if sources[name] is None]
    if lacking:
        raise ConfigError(
            f"There are no rows to check for {', '.join(lacking)}.",
            "No released file was found, rows of it cannot be made here, and --data gives none.",
            f"Give --data {lacking[0]}=FILE.",
        )
    return sources


def _at_hand(name: str, registry: Registry) -> str | None:
    """Rows without --data: the released files where they lie, else rows made here."""
    from soulkit.data.folder import data_folder, released_files

    if released_files(name, registry.spec(name).files.eval):
        return str(data_folder())
    return MADE_ROWS if registry.spec(name).synth else None


def _named_rows(
    options: Sequence[str], chosen: Sequence[str], registry: Registry
) -> tuple[dict[str, str], str | None]:
    """(task → rows, rows for every other chosen task) of the --data options."""
    rows: dict[str, str] = {}
    for_all: str | None = None
    for text in options:
        name, equals, where = text.partition("=")
        if equals and (name in registry.specs or not Path(text).exists()):
            _refuse_stray(name, chosen, registry)
            _refuse_second(name, rows.get(name), where)
            rows[name] = where
        elif chosen:
            _refuse_second("every task", for_all, text)
            for_all = text
        else:
            raise ConfigError(
                f"'{text}' does not say which task it is for.",
                "No task is named on this line, and all of them cannot share one file.",
                f"Write soul tasks check TASK --data {text}",
            )
    return rows, for_all


def _refuse_second(owner: str, first: str | None, second: str) -> None:
    if first is not None or not second:
        raise ConfigError(
            f"--data names {'a second file' if second else 'no file'} for {owner}.",
            f"Rows are read from one place, and '{first}' was given before."
            if first is not None
            else "An empty name is often a shell variable that is not set.",
            "Give one --data for a task.",
        )


def _refuse_stray(name: str, chosen: Sequence[str], registry: Registry) -> None:
    registry.spec(name)
    if chosen and name not in chosen:
        raise ConfigError(
            f"--data has rows for '{name}', which is not checked here.",
            "They would be ignored.",
            did_you_mean(name, chosen),
        )


# -- printing ------------------------------------------------------------------------------------


def _print_checks(checks: Sequence[SelfCheck], unchecked: Sequence[str]) -> None:
    table = new_table(
        "task", "data", ">rows", ">gold fails", ">wrong passes", ">no gold", ">no wrong",
        ">needs a model", ">bad rows", ">breaks", ">warnings",
    )  # fmt: skip
    for column in table.columns[:2]:  # heads may break, what they are about may not
        column.no_wrap = True
    for check in checks:
        lists = (check.gold_fails, check.wrong_passes, check.no_gold,
                 (*check.no_wrong, *check.wrong_unread), check.unscored)  # fmt: skip
        later = (check.breaks, check.warnings)
        counts = [*_counts(lists, check), str(len(check.bad)), *_counts(later, check)]
        cells = (str(check.rows), *counts)
        table.add_row(safe(check.task), safe(check.data), *cells)
    out.print(table)
    if any(check.rows_only for check in checks):
        out.print(f"{NOT_PLAYED}: rows only; this version reads them and has no scorer for them")
    for check in checks:
        _print_findings(check.task, "gold fails", check.gold_fails)
        _print_findings(check.task, "wrong passes", check.wrong_passes)
        _print_findings(check.task, "wrong answer not read", check.wrong_unread)
        _print_findings(check.task, "breaks", check.breaks, LONG)
        if check.feedback_drafts:
            out.print(
                f"{safe(check.task)}: feedback by rules: {check.feedback_texts} different texts on "
                f"{check.feedback_drafts} wrong drafts",
                soft_wrap=True,
            )
        for warning in check.warnings:
            out.print(safe(f"{check.task}: warning: {warning}"), soft_wrap=True)
        for bad in check.bad[:SHOWN]:
            line = f"bad row {bad.source}: {one_line(bad.why, 300)}"
            err.print(safe(line), soft_wrap=True)
    if unchecked:
        out.print(
            f"not checked, as no rows are at hand: {safe(', '.join(unchecked))}", soft_wrap=True
        )


def _counts(lists: Sequence[Sequence[object]], check: SelfCheck) -> list[str]:
    """How many there are of each; where nothing was played, a 0 would say too much."""
    return [NOT_PLAYED if check.rows_only else str(len(items)) for items in lists]


def _print_findings(task: str, what: str, findings: Sequence[Finding], width: int = 200) -> None:
    for finding in findings[:SHOWN]:
        played = f" {one_line(finding.played, 60)}" if finding.played else ""
        line = f"{task}: {what}: {finding.source}:{played} {one_line(finding.why, width)}"
        out.print(safe(line), soft_wrap=True)
    if len(findings) > SHOWN:
        out.print(f"{safe(task)}: {what}: … and {len(findings) - SHOWN} more; --json lists all")
