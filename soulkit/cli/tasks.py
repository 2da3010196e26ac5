"""`soul tasks`: list tasks and suites, show one, check it, start a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import err, one_line, out, print_json, safe
from soulkit.cli.options import COMPLETERS, Json, TaskFiles, Trust, registry_of
from soulkit.cli.parse_errors import CommandTable
from soulkit.errors import ConfigError, did_you_mean
from soulkit.report.grid import plain_table
from soulkit.text import sanitise

if TYPE_CHECKING:
    from soulkit.tasks.kit.registry import Registry
    from soulkit.tasks.kit.selfcheck import Finding, SelfCheck
    from soulkit.tasks.kit.spec import HookKey, TaskSpec


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
    from soulkit.tasks.kit.loading import examples_to_inspect
    from soulkit.tasks.kit.selfcheck import check_task, with_unused_prompts
    from soulkit.tasks.kit.spec import protocol_named

    registry = registry_of(tasks, trust=trust)
    sources = _data(data or (), names or (), suite, registry)
    checks: list[SelfCheck] = []
    for name, where in sources.items():
        if where is not None:
            live = registry.task(name, protocol_named(protocol))
            checks.append(check_task(live, examples_to_inspect(live, where, seed), where))
    unchecked = [name for name, where in sources.items() if where is None]
    checks = with_unused_prompts(checks, registry)
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
    from soulkit.data.files import data_folder, released_files

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
    table = plain_table(
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


def new(
    name: Annotated[str, typer.Argument(help="The task's name: letters, digits, underscores.")],
    kind: Annotated[
        str,
        typer.Option("--kind", help="What it begins as: choice, judged, dialogue or scene."),
    ] = "choice",
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write; default: one with its name.", readable=False),
    ] = None,
) -> None:
    """Write the folder of a new task, complete and small.

    It has a declaration, a class, prompts, rows and a function that makes more; the folder is laid
    out as those of the built-in tasks are. What to do next is printed.
    """
    from soulkit.tasks.scaffold import template, write_task

    place = folder if folder is not None else Path(name)
    files = write_task(name, kind, place)
    out.print(f"{len(files)} files → {safe(str(place))}: {', '.join(files)}", soft_wrap=True)
    out.print("next:")
    for line in _next_commands(name, place, template(kind).players):
        out.print(f"  {safe(line)}", soft_wrap=True)


def _next_commands(name: str, folder: Path, players: str) -> list[str]:
    declared, rows = quote(str(folder / "tasks.yaml")), quote(str(folder / "rows.jsonl"))
    return [
        f"soul tasks check {name} --tasks {declared}",
        f"soul data synth {name} -n 20 --tasks {declared}",
        f"soul eval api --tasks {declared} --task {name} --data {name}={rows} --model MODEL "
        f"--base-url URL {players}".rstrip(),
    ]


app = CommandTable(add_completion=False, rich_markup_mode=None)


@app.command("list")
def list_(
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite", help="Only the tasks of a suite.", autocompletion=COMPLETERS["suites"]
        ),
    ] = None,
    tasks: TaskFiles = None,
    as_json: Json = False,
) -> None:
    """List the tasks and suites."""
    from soulkit.tasks.kit.registry import installed_tasks

    registry = _registry(tasks)
    chosen = registry.suite(suite) if suite is not None else (*registry.specs, *installed_tasks())
    # The declaration of an installed task lies in its package, so its name is all that is shown.
    names = [name for name in chosen if name in registry.specs]
    installed = [
        asdict(o) for several in installed_tasks().values() for o in several if o.task in chosen
    ]
    suites = {n: [*s.tasks] for n, s in registry.suites.items() if suite in (None, n)}
    if as_json:
        listed = [_summary(name, registry.specs[name]) for name in names]
        print_json({"tasks": listed, "suites": suites, "installed": installed})
        return
    table = plain_table("task", "axis", "metric", "rows", "what it is")
    for name in names:
        table.add_row(*(safe(cell) for cell in _cells(name, registry.specs[name])))
    out.print(table)
    for name, members in suites.items():
        out.print(f"suite {safe(name)}: {safe(', '.join(members))}", soft_wrap=True)
    for offer in installed:
        line = f"installed: {offer['task']} ({offer['distribution']})"
        out.print(safe(line), soft_wrap=True)


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(help="A task; see: soul tasks list", autocompletion=COMPLETERS["tasks"])
    ],
    tasks: TaskFiles = None,
    as_json: Json = False,
) -> None:
    """Show one task: columns, who sees them, metric, licence."""
    registry = _registry(tasks)
    spec = registry.spec(name)
    suites = [s for s, declared in registry.suites.items() if name in declared.tasks]
    if as_json:
        facts = {**spec.model_dump(mode="json"), "rows_only": spec.rows_only, "suites": suites}
        print_json({"name": name, **facts})
    else:
        _print_task(name, spec, suites)
        if controls := _controls(registry, name):
            out.print(f"controls: {safe(controls)}", soft_wrap=True)


app.command("check")(check_tasks)
app.command()(new)


def _registry(files: Sequence[Path] | None) -> Registry:
    from soulkit.tasks.kit.registry import load_registry

    return load_registry(*(files or ()))


def _summary(name: str, spec: TaskSpec) -> dict[str, Any]:
    columns = ("title", "summary", "axis", "seats", "metric", "synth", "formats", "licence")
    listed = spec.model_dump(mode="json", include=set(columns))
    return {"name": name, **listed, "rows_only": spec.rows_only}


def _cells(name: str, spec: TaskSpec) -> tuple[str, ...]:
    rows = [
        *(["synth"] if spec.synth else []),
        *(["import"] if spec.formats else []),
        *(["rows only"] if spec.rows_only else []),
    ]
    headline = spec.metric.headline or spec.metric.name
    return name, spec.axis, headline, ", ".join(rows), spec.summary


def _print_task(name: str, spec: TaskSpec, suites: Sequence[str]) -> None:
    from rich.text import Text

    from soulkit.report.grid import FittingTable

    out.print(f"{safe(name)}: {safe(spec.title)}. {safe(spec.summary)}", soft_wrap=True)
    table = plain_table("column", "type", "required", "also called", "seen by", ">word budget")
    for column, c in spec.columns.items():
        cells = (column, c.type, "yes" if c.required else "", ", ".join(c.aliases),
                 ", ".join(c.audience) or "nobody", str(c.max_words or ""))  # fmt: skip
        table.add_row(*(Text(sanitise(cell)) for cell in cells))
    out.print(FittingTable(table))
    for label, text in _facts(name, spec, suites):
        if text:
            out.print(f"{label}: {safe(text)}", soft_wrap=True)


def _controls(registry: Registry, name: str) -> str:
    """The controls of a task, each with what it costs; the class of a task of one's own is not
    imported for showing its declaration."""
    spec = registry.spec(name)
    shown = spec.home.builtin_task and not spec.rows_only
    return "; ".join(
        f"{one.name} (of each {one.per}, "
        + ", ".join(f"{role} {n}" for role, n in one.calls.items()) + ")"
        for one in (registry.task(name).controls if shown else ())
    )  # fmt: skip


def _facts(name: str, spec: TaskSpec, suites: Sequence[str]) -> list[tuple[str, str]]:
    metric, coaches = spec.metric, spec.feedback.coaches
    kind = "each example 0 or 1" if metric.binary else "graded"
    return [
        ("players", spec.players.words()),
        ("samples", ", ".join(f"{question} {n}" for question, n in spec.samples.items())),
        ("rows only", "they can be read and checked, not yet played" if spec.rows_only else ""),
        ("evaluation only", "training refuses it" if spec.evaluation_only else ""),
        ("seats", ", ".join(f"{seat} ({role})" for seat, role in spec.seats.items())),
        ("metric", f"{metric.name}, {metric.low:g} to {metric.high:g}, {kind}"),
        ("headline", metric.headline and f"{metric.headline}, over the whole batch"),
        *(
            (
                f"parts of {name}",
                ", ".join(
                    f"{label} ({part})" if label != part else part for label, part in parts.items()
                ),
            )
            for name, parts in metric.parts.items()
        ),
        ("shown beside it", ", ".join(metric.beside)),
        ("watched in training", ", ".join(metric.watched)),
        ("groups", ", ".join(spec.tags)),
        ("clusters", _clusters(spec)),
        ("coaches", ", ".join(coaches)),
        ("sampling", ", ".join(f"{k} {v}" for k, v in spec.sampling.items())),
        ("options", ", ".join(f"{k} {v}" for k, v in spec.options.items() if v is not None)),
        ("suites", ", ".join(suites)),
        ("training files", ", ".join(spec.files.train)),
        ("evaluation files", ", ".join(spec.files.eval)),
        ("original formats", ", ".join(spec.formats)),
        ("rows can be made", _with_options("soul data synth", name, spec, "synth")),
        ("original files are read", _with_options("soul data import", name, spec, "importer")),
        ("put together", _with_options("soul data build", name, spec, "builder")),
        ("drafted by models", _with_options("soul data build", name, spec, "drafting")),
        ("citation", spec.citation),
        ("licence", spec.licence),
        ("url", spec.url),
    ]


def _clusters(spec: TaskSpec) -> str:
    """The columns that name a row's cluster: its person, where it names one."""
    others = ", ".join(spec.cluster) or "each row"
    return f"{spec.person} where a row names one, else {others}" if spec.person else others


def _with_options(command: str, name: str, spec: TaskSpec, key: HookKey) -> str:
    """The command that calls a function of the task, with the options that it takes."""
    hook = spec.hook(name, key)
    if hook is None:
        return ""
    return " ".join([command, name, *(f"[{o.describe()}]" for o in hook.options.values())])
