"""`soul data`: generate, download, import, check, show, split and audit rows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.panel import Panel

from soulkit.cli.console import ConsoleReporter, console, out, print_json, print_note, safe
from soulkit.cli.data_build import OWN_OPTIONS, build, import_, plant, redact, synth
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
from soulkit.cli.options import COMPLETERS, Json, Seed, TaskFiles, Trust, registry_of
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


SHOWN_CHARACTERS = 100_000
"""Characters to show of one value; wrapping many megabytes for a terminal would take minutes."""


app.command(context_settings=OWN_OPTIONS)(synth)


@app.command()
def pull(
    task: Annotated[str | None, typer.Option(
        "--task", metavar="TASK", autocompletion=COMPLETERS["tasks"],
        help="Tasks to download: NAME,NAME.")] = None,
    suite: Annotated[str | None, typer.Option(
        "--suite", metavar="SUITE", autocompletion=COMPLETERS["suites"],
        help="Download all tasks of a suite instead of --task.")] = None,
    corpus: Annotated[str | None, typer.Option("--corpus", metavar="CORPUS",
        help="Download a training corpus instead: mid-training or post-training.")] = None,
    split: Annotated[str | None, typer.Option("--split", metavar="train|eval",
        help="Download only the train or the eval files. [default: both]")] = None,
    revision: Annotated[str | None, typer.Option("--revision", metavar="REVISION",
        help="Commit, branch or tag to download. [default: the one downloaded before]")] = None,
    folder: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", readable=False,
        help="Target folder. [default: SOULKIT_DATA, else data]")] = None,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Download released files from the Hugging Face Hub.

    Without --task, --suite or --corpus, it downloads the files of every task. The same command
    resumes an interrupted download.
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
    files = pull_files(hub, downloads, where, revision=revision, reporter=ConsoleReporter("pull"))
    _print_pulled(files, where, as_json)


app.command("import", context_settings=OWN_OPTIONS)(import_)
app.command(context_settings=OWN_OPTIONS)(build)
app.command()(check)


@app.command()
def show(
    path: RowFile,
    row: Annotated[int | None, typer.Option("--row", "-r", metavar="N",
        help="Row number, counted from 1. [default: the first row]")] = None,
    task: RowsTask = None,
    side: LessonSide = None,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show one row: its fields, who sees them, and the prompt.

    PATH may include the row number, as in messages: rows.jsonl:3.

    With --side, the command shows one conversation and marks what `soul train sft` learns from it.
    PATH may then also be an export of chats, a folder, a glob pattern or a Hub data set.
    """
    from soulkit.data.files import UnusableFile, numbered_row, row_address
    from soulkit.tasks.kit.importing import (
        chats_for_rows,
        explaining_originals,
        refuse_original_rows,
    )
    from soulkit.tasks.kit.row_checks import rows_by_task

    path, named = row_address(path)
    if named is not None and row is not None:
        raise given_twice("The row", how="after the file name and with --row")
    row = named if row is None else row
    if side is not None:
        show_lesson(path, side, row, as_json)
        return
    registry = registry_of(tasks, trust=trust)
    of_task = None if task is None else registry.task(task)
    if path.is_dir() and (chats := chats_for_rows(of_task, path)):
        raise chats if task else (chat_without_side(path, named, row) or chats)
    try:
        raw = numbered_row(path, row)
    except UnusableFile as error:  # perhaps an export of chats
        raise (path.is_file() and chat_without_side(path, named, row)) or error from None
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
app.command()(plant)
app.command()(redact)


@app.command()
def split(
    path: RowFile,
    by: Annotated[list[str] | None, typer.Option("--by", metavar="NAME,NAME",
        help="Columns to split by, such as job,town. [default for conversations: person]")] = None,
    share: Annotated[float, typer.Option("--share", metavar="X",
        help="Share of the combinations to hold out.")] = 0.1,
    seed: Seed = 0,
    folder: Annotated[Path | None, typer.Option("-o", "--out", metavar="FOLDER", readable=False,
        help="Target folder. [default: FILE_split]")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Split rows by column values, and conversations by person.

    Writes train.jsonl and held_out.jsonl, which share no combination. A conversation without a
    person counts as one. The exit code is 2 if some rows are malformed; the others are written.
    --dev-by does the same during training.
    """
    from soulkit.data.chats import has_messages
    from soulkit.data.exports.datasets import person_in
    from soulkit.data.files import read_rows, write_rows
    from soulkit.data.rows import PERSON, split_rows

    rows, bad = read_rows(path)
    chats = bool(rows) and all(has_messages(row.fields) for row in rows)
    columns = split_names(by) or (list(PERSON) if chats else [])
    by_person, out = chats and columns == list(PERSON), folder or Path(f"{path.stem}_split")
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
            people = f"{groups} {'person' if groups == 1 else 'people'}"
            of = people if by_person else f"{groups} combinations of {', '.join(columns)}"
            line = f"{len(side)} rows, {of} → {file}"
            console().print(safe(line), soft_wrap=True)
    if as_json:
        print_json({"by": columns, **counts, "bad": [asdict(one) for one in bad]})
    else:
        say_bad_rows(bad)
        if by_person and (unknown := sum(not person_in(row.fields) for row in rows)):
            print_note(f"{unknown} conversations name no person; each counts as one person")
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
            f"{' and '.join([*selectors, *(['--split'] if split else [])])} cannot be combined.",
            "--task, --suite and --corpus each select files, and a corpus has no splits.",
            "Keep one of --task, --suite and --corpus.",
        )
    if split is None:
        return SPLITS
    matches = [name for name in SPLITS if name == split]
    if not matches:
        raise ConfigError(
            f"There is no split '{split}'.",
            "The splits are train and eval.",
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
    """The command line to run again, quoted for a shell."""
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
    out.print(f"in {safe(str(folder))}; source: {safe(str(folder / LOCK))}", soft_wrap=True)


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
    """The beginning of a very long text, and its length."""
    cut = len(text) > SHOWN_CHARACTERS
    return (
        f"{text[:SHOWN_CHARACTERS]} … ({len(text)} characters; --json prints all)" if cut else text
    )
