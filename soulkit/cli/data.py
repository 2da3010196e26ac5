"""`soul data`: make, download, import, check, show, split and audit the rows of a task."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.panel import Panel

from soulkit.cli.console import (
    ConsoleReporter,
    console,
    out,
    print_json,
    safe,
)
from soulkit.cli.data_build import OWN_OPTIONS, build, import_, synth
from soulkit.cli.data_checks import (
    LessonSide,
    RowFile,
    RowsTask,
    audit,
    chat_without_side,
    check,
    contamination,
    dedupe,
    say_bad_rows,
    show_lesson,
)
from soulkit.cli.options import COMPLETERS, Json, TaskFiles, Trust, registry_of
from soulkit.cli.parse_errors import CommandTable
from soulkit.errors import DataError
from soulkit.option_texts import given_twice, split_names
from soulkit.report.grid import plain_table
from soulkit.text import byte_size

if TYPE_CHECKING:
    from soulkit.data.hub import Pulled, ReleaseSplit
    from soulkit.tasks.kit.registry import Registry
    from soulkit.types import Example, Segment

    FirstPrompts = Mapping[str, Sequence[Segment]]

app = CommandTable(add_completion=False, rich_markup_mode=None)


SHOWN_SIGNS = 100_000
"""Of one value; laying out a text of many megabytes for a terminal would take minutes."""


app.command(context_settings=OWN_OPTIONS)(synth)


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
        hub,
        downloads,
        where,
        revision=revision,
        reporter=ConsoleReporter("pull"),
    )
    _print_pulled(files, where, as_json)


app.command("import", context_settings=OWN_OPTIONS)(import_)
app.command(context_settings=OWN_OPTIONS)(build)
app.command()(check)


@app.command()
def show(
    path: RowFile,
    row: Annotated[
        int | None,
        typer.Option(
            "--row", "-r", help="Which row, counted from 1, as messages do. [default: the first]"
        ),
    ] = None,
    task: RowsTask = None,
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


@app.command()
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
    from soulkit.data.files import read_rows, write_rows
    from soulkit.data.rows import split_rows

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
        say_bad_rows(bad)
    if bad:
        raise typer.Exit(2)


# -- help for the commands -----------------------------------------------------------------------


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


# -- printing ------------------------------------------------------------------------------------


def _print_pulled(pulled: Sequence[Pulled], folder: Path, as_json: bool) -> None:
    from soulkit.data.hub import LOCK

    if as_json:
        files = [
            {"name": f.name, "file": f.file, "state": f.state, **asdict(f.entry)} for f in pulled
        ]
        print_json({"folder": str(folder), "files": files})
        return
    table = plain_table("file", ">size", "state", "data set")
    for one in pulled:
        cells = (one.name, byte_size(one.entry.bytes), one.state, one.entry.repo)
        table.add_row(*map(safe, cells))
    out.print(table)
    out.print(f"in {safe(str(folder))}; where from: {safe(str(folder / LOCK))}", soft_wrap=True)


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
    table = plain_table("field", "seen by", "value", title=safe(title))
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
