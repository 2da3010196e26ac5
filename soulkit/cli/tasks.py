"""`soul tasks`: list tasks and suites, show or check a task, create a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import err, one_line, out, print_json, print_next, safe
from soulkit.cli.options import COMPLETERS, Json, TaskFiles, Trust, registry_of
from soulkit.cli.parse_errors import CommandTable
from soulkit.errors import ConfigError, did_you_mean
from soulkit.report.grid import plain_table
from soulkit.text import sanitise

if TYPE_CHECKING:
    from rich.table import Table

    from soulkit.tasks.kit.registry import Registry
    from soulkit.tasks.kit.selfcheck import Defect, SelfCheck
    from soulkit.tasks.kit.spec import HookKey, Suite, TaskSpec


MADE_ROWS = "synth:100"
"""Rows to check if none are given and the task can generate some."""

NOT_PLAYED = "-"

LONG = 600
"""Characters shown of an error, which includes the fix."""

SHOWN = 10
"""Findings of one kind to print per task; --json has all."""


def check_tasks(
    names: Annotated[list[str] | None, typer.Argument(
        metavar="[TASK]...", autocompletion=COMPLETERS["tasks"],
        help="Tasks to check. [default: all]")] = None,
    data: Annotated[list[str] | None, typer.Option("--data", metavar="[TASK=]ROWS",
        help="Rows to check: a file, a folder, or synth:N to generate N. Repeatable for single "
        "tasks.")] = None,
    suite: Annotated[str | None, typer.Option(
        "--suite", metavar="SUITE", autocompletion=COMPLETERS["suites"],
        help="Check all tasks of a suite.")] = None,
    protocol: Annotated[str, typer.Option("--protocol", metavar="paper|reference",
        help="Score as the paper describes (paper) or as its code does (reference).")] = "paper",
    seed: Annotated[int, typer.Option("--seed", metavar="N",
        help="Random seed of generated rows.")] = 0,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Check tasks by scoring gold and wrong answers; no model is called.

    The check also renders every prompt of a row. Without --data it uses the downloaded files, or
    100 generated rows. The exit code is 1 if a gold answer fails, because no model can then be
    right, or if a prompt or feedback raises an error. Warnings name what a task declares but lacks:
    a coach prompt, a leak check, symbolic feedback. For symbolic feedback the check counts how many
    different texts the wrong drafts get.
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
    """Task → its rows; None if none were given and none can be generated."""
    chosen = [*names, *(registry.suite(suite) if suite is not None else ())]
    for name in chosen:
        registry.spec(name)
    rows, for_all = _named_rows(options, chosen, registry)
    requested = dict.fromkeys(chosen or rows or registry.specs)
    sources = {name: rows.get(name) or for_all or _at_hand(name, registry) for name in requested}
    lacking = [name for name in names if sources[name] is None]
    if lacking:
        released = [name for name in lacking if registry.spec(name).files.eval]
        why, way = "The task has no released files", "declare synth: FILE:FUNCTION in tasks.yaml"
        if released:
            why = "The released files of the task are not downloaded"
            way = f"download them: soul data pull --task {released[0]}"
        raise ConfigError(
            f"There are no rows to check for {', '.join(lacking)}.",
            f"{why}, and it cannot generate rows.",
            f"Add --data {(released or lacking)[0]}=FILE, or {way}",
        )
    return sources


def _at_hand(name: str, registry: Registry) -> str | None:
    """Rows to check without --data: the task's own file, the downloaded ones, or generated rows."""
    from soulkit.data.files import data_folder, released_files

    if registry.spec(name).rows:
        return str(registry.spec(name).rows_file)
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
                f"--data {text} does not say which task it is for.",
                "The command names no task, and one file cannot hold the rows of all tasks.",
                f"Write soul tasks check TASK --data {text}",
            )
    return rows, for_all


def _refuse_second(owner: str, first: str | None, second: str) -> None:
    if first is not None or not second:
        raise ConfigError(
            f"--data names {'a second file' if second else 'no file'} for {owner}.",
            f"The first one was '{first}', and a task reads its rows from one place."
            if first is not None
            else "An empty name often means that a shell variable is not set.",
            "Give --data once per task.",
        )


def _refuse_stray(name: str, chosen: Sequence[str], registry: Registry) -> None:
    registry.spec(name)
    if chosen and name not in chosen:
        raise ConfigError(
            f"--data has rows for '{name}', but this command does not check that task.",
            "The rows would be ignored.",
            did_you_mean(name, chosen),
        )


# -- printing ------------------------------------------------------------------------------------


def _print_checks(checks: Sequence[SelfCheck], unchecked: Sequence[str]) -> None:
    table = plain_table(
        "task", "data", ">rows", ">gold fails", ">wrong passes", ">no gold", ">no wrong",
        ">needs a model", ">bad rows", ">breaks", ">warnings",
    )  # fmt: skip
    for column in table.columns[:2]:  # heads may wrap, the names of tasks and files may not
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
        out.print(f"{NOT_PLAYED}: rows only; this version cannot score them")
    for check in checks:
        _print_findings(check.task, "gold fails", check.gold_fails)
        _print_findings(check.task, "wrong passes", check.wrong_passes)
        _print_findings(check.task, "wrong answer unreadable", check.wrong_unread)
        _print_findings(check.task, "breaks", check.breaks, LONG)
        if check.feedback_drafts:
            out.print(
                f"{safe(check.task)}: symbolic feedback: {check.feedback_texts} different texts "
                f"for {check.feedback_drafts} wrong drafts",
                soft_wrap=True,
            )
        for warning in check.warnings:
            out.print(safe(f"{check.task}: warning: {warning}"), soft_wrap=True)
        for bad in check.bad[:SHOWN]:
            line = f"bad row {bad.source}: {one_line(bad.why, 300)}"
            err.print(safe(line), soft_wrap=True)
    if unchecked:
        out.print(
            f"not checked, because there are no rows: {safe(', '.join(unchecked))}", soft_wrap=True
        )


def _counts(lists: Sequence[Sequence[object]], check: SelfCheck) -> list[str]:
    """Number of findings per list; `-` if nothing was scored."""
    return [NOT_PLAYED if check.rows_only else str(len(items)) for items in lists]


def _print_findings(task: str, what: str, findings: Sequence[Defect], width: int = 200) -> None:
    for finding in findings[:SHOWN]:
        played = f" {one_line(finding.played, 60)}" if finding.played else ""
        line = f"{task}: {what}: {finding.source}:{played} {one_line(finding.why, width)}"
        out.print(safe(line), soft_wrap=True)
    if len(findings) > SHOWN:
        out.print(f"{safe(task)}: {what}: … and {len(findings) - SHOWN} more; --json lists all")


def new(
    name: Annotated[str, typer.Argument(
        help="Name of the new task: letters, digits, underscores.")],
    kind: Annotated[str, typer.Option("--kind", metavar="KIND",
        help="Template: choice, text, judged, dialogue or scene.")] = "choice",
    python: Annotated[bool, typer.Option("--python",
        help="Write Python code, too: a class, prompts, a function that generates rows.")] = False,
    folder: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", readable=False,
        help="Folder to write. [default: a folder named like the task]")] = None,
) -> None:  # fmt: skip
    """Create a new task from a template: a declaration and rows.

    With --python the folder has the layout of the built-in tasks: a declaration, a class, prompts,
    rows and a function that generates rows. A scene needs it. The command prints the next steps.
    """
    from soulkit.tasks.scaffold import template, write_task

    place = folder if folder is not None else Path(name)
    files = write_task(name, kind, place, python=python)
    out.print(f"{len(files)} files → {safe(str(place))}: {', '.join(files)}", soft_wrap=True)
    out.print("next:")
    declared, rows = quote(str(place / "tasks.yaml")), quote(str(place / "rows.jsonl"))
    players = template(kind, python=python).players
    for line in (
        f"soul tasks check {name} --tasks {declared}",
        f"soul data synth {name} -n 20 --tasks {declared}" if python
        else f"soul data check {rows} --task {name} --tasks {declared}",
        f"soul eval api --tasks {declared} --task {name} {f'--data {name}={rows} ' * python}"
        f"--model MODEL --base-url URL {players}".rstrip(),
    ):  # fmt: skip
        out.print(f"  {safe(line)}", soft_wrap=True)


app = CommandTable(add_completion=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """List, show and check tasks, or create your own. Without a command: soul tasks list."""
    if context.invoked_subcommand is None:
        list_()


@app.command("list")
def list_(
    suite: Annotated[str | None, typer.Option(
        "--suite", metavar="SUITE", autocompletion=COMPLETERS["suites"],
        help="List only the tasks of this suite.")] = None,
    tasks: TaskFiles = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """List all tasks and suites."""
    from soulkit.tasks.kit.registry import installed_tasks

    registry = _registry(tasks)
    chosen = registry.suite(suite) if suite is not None else (*registry.specs, *installed_tasks())
    # The declaration of an installed task is in its package, so only its name is shown.
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
    out.print("rows: synth = soul data synth generates rows; import = soul data import reads the "
              "original files", soft_wrap=True)  # fmt: skip
    out.print(_suite_table({name: registry.suites[name] for name in suites}))
    for offer in installed:
        line = f"installed: {offer['task']} ({offer['distribution']})"
        out.print(safe(line), soft_wrap=True)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="TASK", autocompletion=COMPLETERS["tasks"],
        help="Name of a task; `soul tasks list` shows them.")],
    tasks: TaskFiles = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show one task: columns, audiences, metric, options, licence."""
    registry = _registry(tasks)
    spec = registry.spec(name)
    suites = {s: one.title for s, one in registry.suites.items() if name in one.tasks}
    if as_json:
        facts = {**spec.model_dump(mode="json"), "rows_only": spec.rows_only, "suites": [*suites]}
        print_json({"name": name, **facts})
    else:
        _print_task(name, spec, suites)
        if controls := _controls(registry, name):
            out.print(f"controls: {safe(controls)}", soft_wrap=True)


@app.command("import")
def import_task(
    layout: Annotated[str, typer.Argument(metavar="FORMAT", help="Format of FILE: lm-eval.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The task's YAML file.")],
    rows: Annotated[Path | None, typer.Option("--data", metavar="ROWS",
        help="The task's rows, as a file.")] = None,
    folder: Annotated[Path | None, typer.Option("-o", "--out", metavar="FOLDER", readable=False,
        help="Folder to write tasks.yaml into. [default: a folder named like the task]")] = None,
) -> None:  # fmt: skip
    """Convert a task of lm-evaluation-harness into one of soulkit.

    Converted are tasks with one prompt and a choice or a text as the answer. Whatever would change
    scores and has no counterpart is refused with its line.
    """
    from soulkit.tasks.lm_eval import import_lm_eval

    if layout != "lm-eval":
        what = f"There is no format '{layout}' of tasks."
        raise ConfigError(what, "Only lm-eval can be imported.", did_you_mean(layout, ["lm-eval"]))
    name, place, notes = import_lm_eval(file, rows, folder)
    out.print(safe("\n".join([f"{name} → {place}", *notes])), soft_wrap=True)
    print_next(f"soul tasks check {name} --tasks {quote(str(place))} --data {quote(str(rows))}")


app.command("check")(check_tasks)
app.command()(new)


def _suite_table(suites: Mapping[str, Suite]) -> Table:
    """A line per suite; a suite without a title is described by its tasks."""
    table = plain_table("suite", ">tasks", "what it is")
    for name, suite in suites.items():
        about = suite.title or ", ".join(suite.tasks)
        table.add_row(safe(name), str(len(suite.tasks)), safe(about))
    return table


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


def _print_task(name: str, spec: TaskSpec, suites: Mapping[str, str]) -> None:
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
    """The controls of a built-in task with their calls. The class of a user's own task is not
    imported just to show its declaration."""
    spec = registry.spec(name)
    shown = spec.home.builtin_task and not spec.rows_only
    return "; ".join(
        f"{one.name} (per {one.per}: "
        + ", ".join(f"{role} {n}" for role, n in one.calls.items()) + ")"
        for one in (registry.task(name).controls if shown else ())
    )  # fmt: skip


def _facts(name: str, spec: TaskSpec, suites: Mapping[str, str]) -> list[tuple[str, str]]:
    metric, coaches = spec.metric, spec.feedback.coaches
    kind = "each example 0 or 1" if metric.binary else "graded"
    return [
        ("players", spec.players.words()),
        ("samples", ", ".join(f"{question} {n}" for question, n in spec.samples.items())),
        (
            "rows only",
            "this version can read and check the rows but not evaluate them"
            if spec.rows_only
            else "",
        ),
        ("evaluation only", "soul train refuses this task" if spec.evaluation_only else ""),
        ("seats", ", ".join(f"{seat} ({role})" for seat, role in spec.seats.items())),
        ("metric", f"{metric.name}, {metric.low:g} to {metric.high:g}, {kind}"),
        ("headline", metric.headline and f"{metric.headline}, over all episodes"),
        *(
            (
                f"parts of {name}",
                ", ".join(
                    f"{label} ({part})" if label != part else part for label, part in parts.items()
                ),
            )
            for name, parts in metric.parts.items()
        ),
        ("also shown", ", ".join(metric.beside)),
        ("watched in training", ", ".join(metric.watched)),
        ("groups", ", ".join(spec.tags)),
        ("clusters", _clusters(spec)),
        ("coaches", ", ".join(coaches)),
        ("sampling", ", ".join(f"{k} {v}" for k, v in spec.sampling.items())),
        ("options", ", ".join(f"{k} {v}" for k, v in spec.options.items() if v is not None)),
        ("suites", "; ".join(f"{s} ({about})" if about else s for s, about in suites.items())),
        ("training files", ", ".join(spec.files.train)),
        ("evaluation files", ", ".join(spec.files.eval)),
        ("original formats", ", ".join(spec.formats)),
        ("generate rows", _with_options("soul data synth", name, spec, "synth")),
        ("import original files", _with_options("soul data import", name, spec, "importer")),
        ("build rows from files", _with_options("soul data build", name, spec, "builder")),
        ("draft rows with models", _with_options("soul data build", name, spec, "drafting")),
        ("citation", spec.citation),
        ("licence", spec.licence),
        ("url", spec.url),
    ]


def _clusters(spec: TaskSpec) -> str:
    """The columns that define a row's cluster: its person if it names one."""
    others = ", ".join(spec.cluster) or "each row on its own"
    own = spec.person and spec.person not in spec.cluster
    return f"{spec.person} if a row has one, else {others}" if own else others


def _with_options(command: str, name: str, spec: TaskSpec, key: HookKey) -> str:
    """The command that calls a hook of the task, with its options."""
    hook = spec.hook(name, key)
    if hook is None:
        return ""
    return " ".join([command, name, *(f"[{o.describe()}]" for o in hook.options.values())])
