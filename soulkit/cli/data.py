"""`soul data`: make, import, check, show and audit the rows of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.panel import Panel

from soulkit.cli.console import console, err, one_line, out, print_json, safe
from soulkit.cli.console import table as new_table

if TYPE_CHECKING:
    from soulkit.data.audit import AuditReport
    from soulkit.data.check import Checked
    from soulkit.data.files import BadRow
    from soulkit.tasks.registry import Registry
    from soulkit.types import Example, Segment

app = typer.Typer(add_completion=False, rich_markup_mode=None)

SHOWN_BAD = 50
"""Bad rows printed one by one; --json has all of them."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
TaskFiles = Annotated[
    list[Path] | None, typer.Option("--tasks", metavar="FILE", help="Your own tasks file.")
]
TaskName = Annotated[
    str | None,
    typer.Option("--task", help="The task of the rows, where they do not say so themselves."),
]
RowFile = Annotated[Path, typer.Argument(help=".jsonl, .json, .parquet, .csv or .tsv.")]


@app.command()
def synth(
    task: Annotated[str, typer.Argument(help="tomi, paratomi, hitom or secret_keeper.")],
    n: Annotated[int, typer.Option("-n", "--rows", help="How many rows.")] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds make equal rows.")] = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Default: TASK_synth_N_sSEED.jsonl.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make rows; equal seeds make equal rows."""
    from soulkit.data.files import write_rows
    from soulkit.data.synth import synth as make

    path = output or Path(f"{task}_synth_{n}_s{seed}.jsonl")
    written = write_rows(path, make(task, n, seed), data_source=task)
    _say_written(task, path, written, (), (), as_json)


@app.command("import")
def import_(
    task: Annotated[str, typer.Argument(help="hitom, tomi or paratomi.")],
    path: Annotated[Path, typer.Argument(help="A file of the original release.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Default: TASK_NAME.jsonl.")
    ] = None,
    half: Annotated[
        str | None, typer.Option("--half", help="Hi-ToM only: cotp (default), vp or all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn an original benchmark file into rows.

    The exit code is 2 when some records are malformed; the others are written.
    """
    from soulkit.data.files import refuse_same, write_rows
    from soulkit.data.importers import import_rows

    target = output or Path(f"{task}_{path.stem}.jsonl")
    refuse_same(path, target)
    found = import_rows(task, path, half)
    if not found.rows:
        _say_bad(found.bad)
    written = write_rows(target, found.rows, data_source=task)
    _say_written(task, target, written, found.bad, found.notes, as_json)
    if found.bad:
        raise typer.Exit(2)


@app.command()
def check(
    path: RowFile, task: TaskName = None, tasks: TaskFiles = None, as_json: Json = False
) -> None:
    """Count rows, columns and lengths, and name bad rows.

    The exit code is 2 when any row is bad.
    """
    from soulkit.data.check import by_task, check_rows
    from soulkit.data.files import read_rows

    registry = _registry(tasks)
    rows, bad = read_rows(path)
    if task is not None:
        checks = [check_rows(registry.task(task), rows, bad)]
        strays: list[BadRow] = []
    else:
        groups, strays = by_task(rows, _task_of_source(registry))
        strays = [*bad, *strays]
        checks = [check_rows(registry.task(name), group) for name, group in groups.items()]
    if as_json:
        checked = [asdict(found) for found in checks]
        print_json({"file": str(path), "tasks": checked, "bad": [asdict(b) for b in strays]})
    else:
        for found in checks:
            _print_check(path, found)
        _say_bad(strays)
    if strays or any(found.bad or not found.usable for found in checks):
        raise typer.Exit(2)


@app.command()
def show(
    path: RowFile,
    row: Annotated[int, typer.Option("--row", "-r", help="Which row, counted from 0.")] = 0,
    task: TaskName = None,
    tasks: TaskFiles = None,
    as_json: Json = False,
) -> None:
    """Show one row: fields, who may see them, the prompt."""
    from soulkit.data.check import by_task
    from soulkit.data.files import nth_row

    registry = _registry(tasks)
    raw = nth_row(path, row)
    name = task or next(iter(by_task([raw], _task_of_source(registry))[0]))
    live = registry.task(name)
    example = live.example(raw.fields, source=raw.source)
    prompt = live.preview(example)
    if as_json:
        print_json(_shown(example, prompt))
    else:
        _print_example(example, prompt)


@app.command()
def audit(
    task: Annotated[str, typer.Argument(help="hitom, tomi or paratomi.")],
    path: Annotated[Path, typer.Argument(help="A file of the original release.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the disputed rows here (.jsonl).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare published labels with a belief tracker.

    With -o, the rows on which they differ are written with both answers.
    """
    from soulkit.data.audit import write_disputed
    from soulkit.data.files import check_file, refuse_same

    check_file(path)
    report = _audit(task, path)
    if output is not None:
        refuse_same(path, output)
        write_disputed(report, output)
    if as_json:
        print_json({**asdict(report), "file": str(path), "task": task})
    else:
        _print_audit(task, report, output)


# -- help for the commands -----------------------------------------------------------------------


def _registry(files: Sequence[Path] | None) -> Registry:
    from soulkit.tasks.registry import load_registry

    return load_registry(*(files or ()))


def _task_of_source(registry: Registry) -> dict[str, str]:
    named = {s: name for name, spec in registry.specs.items() for s in spec.files.data_source}
    return {**{name: name for name in registry.specs}, **named}


def _audit(task: str, path: Path) -> AuditReport:
    from soulkit.data import audit as audits
    from soulkit.errors import ConfigError, did_you_mean

    trace = path.with_suffix(".trace")
    beside = trace if trace.is_file() else None
    if task == "hitom":
        return audits.audit_hitom(path)
    if task == "tomi":
        return audits.audit_tomi(path, beside)
    if task == "paratomi":
        return audits.audit_paratomi(path, beside)
    raise ConfigError(
        f"The labels of '{task}' cannot be audited.",
        "Only stories about who saw what have rules that a tracker can follow.",
        did_you_mean(task, ("hitom", "tomi", "paratomi")),
    )


# -- printing ------------------------------------------------------------------------------------


def _say_written(
    task: str, path: Path, rows: int, bad: Sequence[BadRow], notes: Sequence[str], as_json: bool
) -> None:
    for note in notes:
        err.print(f"note: {safe(note)}", soft_wrap=True)
    if as_json:
        listed = [asdict(b) for b in bad]
        print_json({"task": task, "file": str(path), "rows": rows, "bad": listed})
        return
    console().print(f"{rows} rows of {safe(task)} → {safe(str(path))}", soft_wrap=True)
    _say_bad(bad)


def _say_bad(bad: Sequence[BadRow]) -> None:
    for found in bad[:SHOWN_BAD]:
        err.print(f"bad row {safe(found.source)}: {safe(one_line(found.why, 400))}", soft_wrap=True)
    if len(bad) > SHOWN_BAD:
        err.print(f"… and {len(bad) - SHOWN_BAD} more bad rows; --json lists all")


def _print_check(path: Path, found: Checked) -> None:
    out.print(
        f"{safe(str(path))}: {found.usable} usable rows of {safe(found.task)} in "
        f"{found.clusters} clusters ({found.rows} rows, {len(found.bad)} bad, "
        f"{found.duplicates} duplicates)",
        soft_wrap=True,
    )
    for source, count in found.skipped.items():
        out.print(f"skipped: {count} rows of {safe(source)}")
    table = new_table("field", ">rows", ">words p50", ">p95", ">max", ">over budget")
    for name, words in found.words.items():
        figures = (words.p50, words.p95, words.max, words.over_budget)
        table.add_row(safe(name), str(found.columns.get(name, "")), *map(str, figures))
    out.print(table)
    for tag, values in found.tags.items():
        counts = ", ".join(f"{safe(value)} {count}" for value, count in values.items())
        out.print(f"{safe(tag)}: {counts}", soft_wrap=True)
    columns = ", ".join(f"{safe(name)} ({count})" for name, count in found.columns.items())
    out.print(f"columns: {columns}", soft_wrap=True)
    if found.ignored:
        out.print(f"ignored columns: {safe(', '.join(found.ignored))}", soft_wrap=True)
    _say_bad(found.bad)


def _shown(example: Example, prompt: Sequence[Segment]) -> dict[str, object]:
    fields = {
        name: {"value": value, "audience": list(example.audience.get(name, ()))}
        for name, value in example.fields.items()
        if value is not None
    }
    return {
        "id": example.id,
        "task": example.task,
        "source": example.source,
        "cluster": example.cluster,
        "tags": dict(example.tags),
        "fields": fields,
        "prompt": [{"role": s.role, "text": s.text} for s in prompt],
    }


def _print_example(example: Example, prompt: Sequence[Segment]) -> None:
    title = f"{example.task} {example.id}  ({example.source})"
    table = new_table("field", "seen by", "value", title=safe(title))
    for name, value in example.fields.items():
        if value is not None:
            seen = ", ".join(example.audience.get(name, ())) or "nobody"
            table.add_row(safe(name), safe(seen), safe(str(value)))
    out.print(table)
    tags = ", ".join(f"{tag} {value}" for tag, value in example.tags.items())
    out.print(f"cluster {example.cluster}" + (f"; {safe(tags)}" if tags else ""))
    for segment in prompt:
        out.print(Panel(safe(segment.text), title=f"prompt: {segment.role}", title_align="left"))


def _print_audit(task: str, report: AuditReport, output: Path | None) -> None:
    table = new_table("group", "value", ">rows", ">agree", ">share")
    overall = report.overall
    lines = [("all", "", overall)]
    lines += [(tag, v, a) for tag, values in report.by.items() for v, a in values.items()]
    for tag, value, agreement in lines:
        share = "–" if agreement.share is None else f"{100 * agreement.share:.1f} %"
        figures = (str(agreement.total), str(agreement.agreed), share)
        table.add_row(safe(tag), safe(value), *figures)
    out.print(table)
    out.print(
        f"{len(report.disputed)} disputed rows of {safe(task)}, {len(report.unread)} not read, "
        f"{report.contradictions} questions with two golds in the file"
    )
    if output is not None:
        out.print(f"disputed rows → {safe(str(output))}", soft_wrap=True)
