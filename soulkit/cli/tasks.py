"""`soul tasks`: which tasks and suites there are, and what one asks and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import out, print_json, safe
from soulkit.cli.console import table as new_table
from soulkit.cli.mistakes import CommandTable
from soulkit.cli.options import COMPLETERS, Json, TaskFiles
from soulkit.cli.tasks_check import check_tasks
from soulkit.cli.tasks_new import new
from soulkit.text import sanitise

if TYPE_CHECKING:
    from soulkit.tasks.registry import Registry
    from soulkit.tasks.spec import HookKey, TaskSpec

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
    from soulkit.tasks.installed import offers

    registry = _registry(tasks)
    chosen = registry.suite(suite) if suite is not None else (*registry.specs, *offers())
    # The declaration of an installed task lies in its package, so its name is all that is shown.
    names = [name for name in chosen if name in registry.specs]
    installed = [asdict(o) for several in offers().values() for o in several if o.task in chosen]
    suites = {n: [*s.tasks] for n, s in registry.suites.items() if suite in (None, n)}
    if as_json:
        listed = [_summary(name, registry.specs[name]) for name in names]
        print_json({"tasks": listed, "suites": suites, "installed": installed})
        return
    table = new_table("task", "axis", "metric", "rows", "what it is")
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
    from soulkit.tasks.registry import load_registry

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

    from soulkit.report.fitting import FittingTable

    out.print(f"{safe(name)}: {safe(spec.title)}. {safe(spec.summary)}", soft_wrap=True)
    table = new_table("column", "type", "required", "also called", "seen by", ">word budget")
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
