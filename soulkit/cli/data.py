"""`soul data`: make, download, import, check, show, split and audit the rows of a task."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.panel import Panel

from soulkit.cli.console import (
    console,
    err,
    one_line,
    out,
    print_json,
    print_next,
    progress,
    safe,
    size,
)
from soulkit.cli.console import table as new_table
from soulkit.cli.data_build import build
from soulkit.cli.data_checks import (
    LessonSide,
    audit,
    chat_without_side,
    contamination,
    dedupe,
    show_lesson,
)
from soulkit.cli.options import COMPLETERS, Json, TaskFiles, Trust, registry_of
from soulkit.cli.parse_errors import CommandTable
from soulkit.errors import DataError
from soulkit.option_texts import given_twice

RowFile = Annotated[
    Path, typer.Argument(help=".jsonl, .json, .parquet, .csv or .tsv.", readable=False)
]


def split(
    path: RowFile,
    by: Annotated[
        list[str],
        typer.Option("--by", metavar="NAME,NAME", help="Columns whose combinations stay whole."),
    ],
    share: Annotated[float, typer.Option("--share", help="Of the combinations, set aside.")] = 0.1,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds choose alike.")] = 0,
    folder: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder; default: FILE_split.", readable=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Set whole combinations of values aside, such as job and town.

    Writes train.jsonl and held_out.jsonl: no combination stands in both. The exit code is 2 when
    some rows are malformed; the others are written. In training --dev-by does the same.
    """
    pass
    from soulkit.data.files import read_rows, write_rows
    from soulkit.data.rows import split_rows
    from soulkit.option_texts import split_names

    columns, out = split_names(by), folder or Path(f"{path.stem}_split")
    rows, bad = read_rows(path)
    parts = split_rows(rows, columns, share, seed)
    ends = {"train": (parts.rest, parts.groups_rest), "held_out": (parts.aside, parts.groups_aside)}
    ending = ".parquet" if path.suffix.lower() == ".parquet" else ".jsonl"
    out.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, (side, groups) in ends.items():
        file = out / f"{name}{ending}"
        write_rows(file, [row.fields for row in side], replace=False)
        counts[name] = {"file": str(file), "rows": len(side), "combinations": groups}
        if not as_json:
            line = f"{len(side)} rows, {groups} combinations of {', '.join(columns)} → {file}"
            console().print(safe(line), soft_wrap=True)
    if as_json:
        print_json({"by": columns, **counts, "bad": [asdict(one) for one in bad]})
    else:
        say_bad(bad)
    if bad:
        raise typer.Exit(2)


if TYPE_CHECKING:
    from soulkit.data.contamination import RenamedRows
    from soulkit.data.files import BadRow
    from soulkit.data.hub import Pulled, ReleaseSplit
    from soulkit.tasks.kit.importing import Imported
    from soulkit.tasks.kit.registry import Registry
    from soulkit.tasks.kit.row_checks import RowCheck
    from soulkit.types import Example, Segment

    FirstPrompts = Mapping[str, Sequence[Segment]]

app = CommandTable(add_completion=False, rich_markup_mode=None)

SHOWN_BAD = 50
"""Bad rows printed one by one; --json has all of them."""

SHOWN_SIGNS = 100_000
"""Of one value; laying out a text of many megabytes for a terminal would take minutes."""

TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="The task of the rows, where they do not say so themselves.",
        autocompletion=COMPLETERS["tasks"],
    ),
]


OWN_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that pass options on to the task's own function."""


@app.command(context_settings=OWN_OPTIONS)
def synth(
    context: typer.Context,
    task: Annotated[
        str,
        typer.Argument(
            help="Which task's; `soul tasks list` shows which can.",
            autocompletion=COMPLETERS["tasks"],
        ),
    ],
    n: Annotated[
        int | None, typer.Option("-n", "--rows", help="How many rows; 100 without it.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds make equal rows.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Default: TASK_synth_N_sSEED.jsonl.", readable=False),
    ] = None,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Make rows; equal seeds make equal rows.

    A task may have options of its own, such as --stories: see soul tasks show TASK.
    """
    from soulkit.data.files import write_rows
    from soulkit.tasks.kit.made_rows import make_rows

    live = registry_of(tasks, trust=trust).task(task)
    rows = make_rows(live, n, seed, own_options(context))
    path = output or Path(f"{task}_synth_{len(rows)}_s{seed}.jsonl")
    written = write_rows(path, rows, data_source=task, replace=False)
    _say_written(task, path, written, (), (), as_json)


@app.command()
def pull(
    task: Annotated[
        str | None,
        typer.Option("--task", help="Tasks: NAME,NAME", autocompletion=COMPLETERS["tasks"]),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite", help="A named list of tasks instead.", autocompletion=COMPLETERS["suites"]
        ),
    ] = None,
    corpus: Annotated[
        str | None, typer.Option("--corpus", help="mid-training or post-training instead.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="train or eval; both without it.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Commit, branch or tag; else as before.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Default: SOULKIT_DATA, or the folder data.", readable=False),
    ] = None,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Download released files from the Hugging Face hub.

    Without --task, --suite and --corpus: the files of every task. The same command resumes.
    """
    from soulkit.data.download import Hub
    from soulkit.data.files import data_folder
    from soulkit.data.hub import corpus_files, pull_files, released

    splits = _splits(task, suite, corpus, split)
    options = {"--task": task, "--suite": suite, "--corpus": corpus, "--split": split,
               "--revision": revision, "--out": folder}  # fmt: skip
    hub, where = Hub(_again("soul data pull", options)), folder or data_folder()
    if corpus is not None:
        downloads, revision = corpus_files(hub, corpus, where, revision)
    else:
        registry = registry_of(tasks, trust=trust)
        names = _task_names(registry, task, suite)
        downloads = released({name: registry.spec(name).files for name in names}, splits)
    files = pull_files(
        hub, downloads, where, revision=revision, bars=lambda n: progress(n, "pull", size), say=_say
    )
    _print_pulled(files, where, as_json)


@app.command("import", context_settings=OWN_OPTIONS)
def import_(
    context: typer.Context,
    task: Annotated[
        str,
        typer.Argument(
            help="Which task's; `soul tasks list` shows which can.",
            autocompletion=COMPLETERS["tasks"],
        ),
    ],
    path: Annotated[Path, typer.Argument(help="A file of the original release.", readable=False)],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Default: TASK_NAME.jsonl.", readable=False),
    ] = None,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Turn an original benchmark file into rows.

    A task may have options of its own, such as --half: see soul tasks show TASK. The exit code is 2
    when some records are malformed; the others are written.
    """
    from soulkit.tasks.kit.importing import import_rows

    live, options = registry_of(tasks, trust=trust).task(task), own_options(context)
    write_original(task, path, output, lambda: import_rows(live, path, options), as_json)


app.command(context_settings=OWN_OPTIONS)(build)


@app.command()
def check(
    path: RowFile,
    task: TaskName = None,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Count rows, columns and lengths, and name bad rows.

    Warns when rows of different clusters are equal up to names. The exit code is 2 when any row is
    bad.
    """
    from soulkit.tasks.kit.row_checks import check_row_file

    checks, strays = check_row_file(registry_of(tasks, trust=trust), path, task)
    if as_json:
        checked = [asdict(report) for report in checks]
        print_json({"file": str(path), "tasks": checked, "bad": [asdict(b) for b in strays]})
    else:
        for report in checks:
            _print_check(path, report)
        say_bad(strays)
    if strays or any(report.bad or not report.usable for report in checks):
        raise typer.Exit(2)


@app.command()
def show(
    path: RowFile,
    row: Annotated[
        int | None,
        typer.Option(
            "--row", "-r", help="Which row, counted from 1, as messages do. [default: the first]"
        ),
    ] = None,
    task: TaskName = None,
    side: LessonSide = None,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Show one row: fields, who may see them, the prompt.

    PATH may also say which row, as messages do: rows.jsonl:3.

    With --side, one conversation as `soul train sft` learns from it, and what in it is learned;
    the path may then be a folder, a pattern, or a data set of the hub.
    """
    from soulkit.data.files import numbered_row, row_address
    from soulkit.tasks.kit.importing import (
        chats_for_rows,
        explaining_originals,
        refuse_original_rows,
    )
    from soulkit.tasks.kit.row_checks import rows_by_task

    path, named = row_address(path)
    if named is not None and row is not None:
        raise given_twice("The row", how="behind the file and with --row")
    row = named if row is None else row
    if side is not None:
        show_lesson(path, side, row, as_json)
        return
    registry = registry_of(tasks, trust=trust)
    of_task = None if task is None else registry.task(task)
    if path.is_dir() and (chats := chats_for_rows(of_task, path)):
        raise chats if task else (chat_without_side(path, named, row) or chats)
    raw = numbered_row(path, row)
    try:
        name = next(iter(rows_by_task([raw], registry.by_source())[0])) if task is None else task
    except DataError as error:
        raise chat_without_side(path, named, row) or error from None
    live = registry.task(name)
    with explaining_originals(live, path):
        refuse_original_rows(live, [raw])
        example = live.example(raw.fields, source=raw.source)
    prompts = live.previews(example)
    if as_json:
        print_json(_row_dict(example, prompts))
    else:
        _print_example(example, prompts)


app.command()(audit)
app.command()(contamination)
app.command()(dedupe)
app.command()(split)


# -- help for the commands -----------------------------------------------------------------------


def own_options(context: typer.Context) -> dict[str, str]:
    """The options on the command line that are the task's own: flag → text."""
    from soulkit.errors import ConfigError

    options: dict[str, str] = {}
    words = iter(context.args)
    for word in words:
        flag, equals, text = word.partition("=")
        value = text if equals else next(words, None)
        if not flag.startswith("--") or value is None:
            raise ConfigError(
                f"'{word}' is one word too many.",
                "Options of a task are written --NAME VALUE.",
                "See which there are: soul tasks show TASK",
            )
        if flag in options:
            raise given_twice(flag)
        options[flag] = value
    return options


def _splits(
    task: str | None, suite: str | None, corpus: str | None, split: str | None
) -> Sequence[ReleaseSplit]:
    from soulkit.data.hub import SPLITS
    from soulkit.errors import ConfigError, did_you_mean

    selectors = [f"--{n}" for n, v in (("task", task), ("suite", suite), ("corpus", corpus)) if v]
    if len(selectors) > 1 or (corpus and split):
        raise ConfigError(
            f"{' and '.join([*selectors, *(['--split'] if split else [])])} do not go together.",
            "Each of them says which files to download, and a corpus has no splits.",
            "Keep one of --task, --suite and --corpus.",
        )
    if split is None:
        return SPLITS
    matches = [name for name in SPLITS if name == split]
    if not matches:
        raise ConfigError(
            f"There is no split '{split}'.",
            "Released files are for training or for evaluation.",
            did_you_mean(split, SPLITS),
        )
    return matches


def _task_names(registry: Registry, task: str | None, suite: str | None) -> Sequence[str]:
    if suite is not None:
        return registry.suite(suite)
    if task is None:
        return tuple(registry.specs)
    return tuple(filter(None, (name.strip() for name in task.split(","))))


def _again(command: str, options: Mapping[str, object]) -> str:
    """The command line to run again, as a shell reads it."""
    arguments = [(name, str(value)) for name, value in options.items() if value is not None]
    return " ".join([command, *(f"{name} {shlex.quote(value)}" for name, value in arguments)])


def _say(remark: str) -> None:
    err.print(safe(one_line(remark)), soft_wrap=True)


# -- printing ------------------------------------------------------------------------------------


def write_original(
    task: str, path: Path, output: Path | None, read: Callable[[], Imported], as_json: bool
) -> None:
    """Write what `read` makes of original files beside what it left out; exit 2 for the latter."""
    from soulkit.data.files import check_target, refuse_same, write_rows

    target = output or Path(f"{task}_{path.stem}.jsonl")
    refuse_same(path, target)
    check_target(target)
    imported = read()
    if not imported.rows:
        say_bad(imported.bad)
    written = write_rows(target, imported.rows, data_source=task, replace=False)
    _say_written(task, target, written, imported.bad, imported.notes, as_json)
    if imported.bad:
        raise typer.Exit(2)


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
    say_bad(bad)
    say_next_of(task, path)


def say_next_of(task: str, path: Path) -> None:
    """Of soulkit's own tasks: others are known only to who names their file again."""
    from soulkit.tasks.kit.registry import load_registry

    spec, name = load_registry().specs.get(task), shlex.quote(str(path))
    if spec is not None:
        play = [f"soul eval api --model MODEL --task {task} --data {name}"] if spec.module else []
        print_next(f"soul data check {name}", *play)


def _print_pulled(pulled: Sequence[Pulled], folder: Path, as_json: bool) -> None:
    from soulkit.data.hub import LOCK

    if as_json:
        files = [
            {"name": f.name, "file": f.file, "state": f.state, **asdict(f.entry)} for f in pulled
        ]
        print_json({"folder": str(folder), "files": files})
        return
    table = new_table("file", ">size", "state", "data set")
    for one in pulled:
        cells = (one.name, size(one.entry.bytes), one.state, one.entry.repo)
        table.add_row(*map(safe, cells))
    out.print(table)
    out.print(f"in {safe(str(folder))}; where from: {safe(str(folder / LOCK))}", soft_wrap=True)


def say_bad(bad: Sequence[BadRow]) -> None:
    for row in bad[:SHOWN_BAD]:
        err.print(f"bad row {safe(row.source)}: {safe(one_line(row.why, 400))}", soft_wrap=True)
    if len(bad) > SHOWN_BAD:
        err.print(f"… and {len(bad) - SHOWN_BAD} more bad rows; --json lists all")


def _print_check(path: Path, report: RowCheck) -> None:
    out.print(
        f"{safe(str(path))}: {report.usable} usable rows of {safe(report.task)} in "
        f"{report.clusters} clusters ({report.rows} rows, {len(report.bad)} bad, "
        f"{report.duplicates} duplicates)",
        soft_wrap=True,
    )
    for source, count in report.skipped.items():
        out.print(f"skipped: {count} rows of {safe(source)}")
    table = new_table("field", ">rows", ">words p50", ">p95", ">max", ">over budget")
    for name, words in report.words.items():
        figures = (words.p50, words.p95, words.max, words.over_budget)
        table.add_row(safe(name), str(report.columns.get(name, "")), *map(str, figures))
    out.print(table)
    for tag, values in report.tags.items():
        counts = ", ".join(f"{safe(value)} {count}" for value, count in values.items())
        out.print(f"{safe(tag)}: {counts}", soft_wrap=True)
    columns = ", ".join(f"{safe(name)} ({count})" for name, count in report.columns.items())
    out.print(f"columns: {columns}", soft_wrap=True)
    if report.ignored:
        out.print(f"ignored columns: {safe(', '.join(report.ignored))}", soft_wrap=True)
    if report.equal_up_to_names is not None:
        _warn_renamed(report.task, report.equal_up_to_names)
    say_bad(report.bad)


def _warn_renamed(task: str, renamed: RenamedRows) -> None:
    first, second = map(safe, renamed.example)
    err.print(
        f"warning: {renamed.rows} rows in {renamed.clusters} clusters of {safe(task)} are equal up "
        f"to names: only {renamed.distinct} of them differ otherwise. Two that are equal: {first} "
        f"and {second}. Intervals and splits treat clusters as independent. If the answers depend "
        "on what these rows share, declare those columns as the task's 'cluster' in its tasks "
        "file.",
        soft_wrap=True,
    )


def _by_seat(prompts: FirstPrompts) -> list[tuple[str, Segment]]:
    """(seat, message), the seat empty where the actor has a single one."""
    several = len(prompts) > 1
    return [(seat if several else "", s) for seat, prompt in prompts.items() for s in prompt]


def _row_dict(example: Example, prompts: FirstPrompts) -> dict[str, object]:
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
        "prompt": [
            {**({"seat": seat} if seat else {}), "role": s.role, "text": s.text}
            for seat, s in _by_seat(prompts)
        ],
    }


def _print_example(example: Example, prompts: FirstPrompts) -> None:
    title = f"{example.task} {example.id}  ({example.source})"
    table = new_table("field", "seen by", "value", title=safe(title))
    for name, value in example.fields.items():
        if value is not None:
            seen = ", ".join(example.audience.get(name, ())) or "nobody"
            table.add_row(safe(name), safe(seen), safe(_readable(str(value))))
    out.print(table)
    tags = ", ".join(f"{tag} {value}" for tag, value in example.tags.items())
    out.print(f"cluster {example.cluster}" + (f"; {safe(tags)}" if tags else ""))
    for seat, segment in _by_seat(prompts):
        text, who = safe(_readable(segment.text)), f"{safe(seat)}, " if seat else ""
        out.print(Panel(text, title=f"prompt: {who}{segment.role}", title_align="left"))


def _readable(text: str) -> str:
    """The beginning of a text that nobody would read to its end, and how long it is."""
    cut = len(text) > SHOWN_SIGNS
    return f"{text[:SHOWN_SIGNS]} … ({len(text)} signs; --json has all)" if cut else text
