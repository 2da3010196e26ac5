"""`soul data synth`, `import` and `build`: generate rows, read them from original files, or have
models draft them."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import (
    ConsoleReporter,
    console,
    print_json,
    print_next,
    print_note,
    safe,
    warn_unsealed,
)
from soulkit.cli.data_checks import say_bad_rows
from soulkit.cli.options import COMPLETERS, DRY_RUN, Json, MaxContext, TaskFiles, Trust, registry_of
from soulkit.errors import ConfigError, did_you_mean
from soulkit.option_texts import given_twice
from soulkit.text import counted, dollars, listed, one_line

if TYPE_CHECKING:
    from soulkit.data.exports.reading import ChatImport
    from soulkit.data.files import BadRow
    from soulkit.eval.drafted_rows import BuildResult
    from soulkit.tasks.kit.importing import Imported
    from soulkit.tasks.kit.made_rows import Drafts

SHOWN = 20
"""Records without a readable answer that are named; outcomes.jsonl has all of them."""
Asking = dict[str, Any]
"""The options of a build by models, by their names."""


TaskArgument = Annotated[str, typer.Argument(autocompletion=COMPLETERS["tasks"],
    help="Task of the rows; `soul tasks show TASK` lists its options.")]  # fmt: skip
SomeTask = Annotated[str, typer.Argument(autocompletion=COMPLETERS["tasks"],
    help="Task of the rows; `soul tasks list` shows which tasks support this.")]  # fmt: skip
Source = Annotated[Path, typer.Argument(help="First of the original files.", readable=False)]
Output = Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", readable=False,
    help="File to write. [default: TASK_NAME.jsonl]")]  # fmt: skip
Drafter = Annotated[str | None, typer.Option("--drafter", metavar="PLAYER",
    help="Model that drafts the missing parts of the rows.")]  # fmt: skip
Filter = Annotated[str | None, typer.Option("--filter", metavar="PLAYER",
    help="Model that keeps or rejects each draft.")]  # fmt: skip
Rows = Annotated[int | None, typer.Option("-n", "--rows", metavar="N", min=1,
    help="Number of rows to draft. [default: all]")]  # fmt: skip
Seed = Annotated[int | None, typer.Option("--seed", metavar="N",
    help="Random seed for the order of the records.")]  # fmt: skip
Endpoints = Annotated[Path | None, typer.Option("--endpoints", metavar="FILE",
    help="YAML file with named models: URL, limits, prices.")]  # fmt: skip
Folder = Annotated[Path | None, typer.Option("--folder", metavar="FOLDER",
    help="Run folder of the build. [default: a new folder under runs/]")]  # fmt: skip
Concurrency = Annotated[int | None, typer.Option("--concurrency", metavar="N", min=1,
    help="Maximum number of requests at once. [default: 16]")]  # fmt: skip
AllowPrivate = Annotated[bool, typer.Option("--allow-private",
    help="Send chats with private data to models that are not on this machine.")]  # fmt: skip
Yes = Annotated[bool, typer.Option("--yes", help="Skip the cost confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help=DRY_RUN)]
MaxCost = Annotated[float | None, typer.Option("--max-cost", metavar="X", min=0,
    help="Stop after spending X US dollars.")]  # fmt: skip


def build(
    context: typer.Context, task: TaskArgument, path: Source, output: Output = None,
    drafter: Drafter = None, filter_: Filter = None, n: Rows = None, seed: Seed = None,
    endpoints: Endpoints = None, folder: Folder = None, concurrency: Concurrency = None,
    max_cost: MaxCost = None, max_context: MaxContext = None, allow_private: AllowPrivate = False,
    yes: Yes = False, dry_run: DryRun = False, tasks: TaskFiles = None, trust: Trust = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Build rows from several files, or have models draft them.

    With --drafter and --filter, one model drafts the missing parts and another keeps or rejects
    each draft. The same command resumes an interrupted build. A task may have more options, such
    as --names: see soul tasks show TASK. The exit code is 2 if some records are malformed, 1 if
    some calls got no reply.
    """
    from soulkit.tasks.kit.importing import build_rows
    from soulkit.tasks.kit.made_rows import drafts_from

    live, options = registry_of(tasks, trust=trust).task(task), own_options(context)
    asking: Asking = {
        "drafter": drafter, "filter": filter_, "rows": n, "seed": seed, "endpoints": endpoints,
        "concurrency": concurrency, "max_cost": max_cost, "yes": yes or None, "folder": folder,
        "max_context": max_context, "dry_run": dry_run or None,
        "allow_private": allow_private or None,
    }  # fmt: skip
    if live.spec.drafting or drafter or filter_:
        about = {"task": task, "source": str(path), "options": options}
        target = output or Path(f"{task}_{path.stem}.jsonl")
        write_drafts(target, about, asking, as_json, lambda: drafts_from(live, path, options))
        return
    _refuse_asking(task, asking)
    write_original(task, path, output, lambda: build_rows(live, path, options), as_json)


def _refuse_asking(task: str, asking: Asking) -> None:
    """ConfigError for an option about models if the task builds rows without models."""
    named = next((name for name, value in asking.items() if value is not None), None)
    if named is not None:
        raise ConfigError(
            f"--{named.replace('_', '-')} is about models, but '{task}' builds rows without any.",
            "The option would have no effect.",
            f"Leave the option out; see: soul tasks show {task}",
        )


def write_drafts(
    target: Path, about: dict[str, Any], asking: Asking, as_json: bool, read: Callable[[], Drafts],
    command: str = "data build",
) -> None:  # fmt: skip
    """Have models draft what `read` makes of a source, and write it; `about` are the settings task,
    source and options, `asking` the options of the models."""
    from soulkit.cli.plan import show_plan
    from soulkit.data.files import check_target, refuse_same
    from soulkit.eval.drafted_rows import Build, BuildConfig, build_drafted_rows

    refuse_same(Path(about["source"]), target)
    check_target(target)
    folder, dry_run = asking.pop("folder"), asking.pop("dry_run")
    flags = {name: str(v) if isinstance(v, Path) else v for name, v in asking.items()}
    build = Build.of(BuildConfig.load(flags={**flags, **about}), read, command)
    if dry_run:
        show_plan(build.plan(), as_json)
        return
    for remark in build.remarks():
        print_note(f"note: {remark}")
    say_bad_rows(build.drafts.bad)
    done = build_drafted_rows(build, folder, reporter=ConsoleReporter("build"))
    warn_unsealed()
    _write(done, target, as_json)
    if build.drafts.bad:
        raise typer.Exit(2)


def _write(done: BuildResult, target: Path, as_json: bool) -> None:
    """Write the rows and their origin; writes no rows and exits with 1 if replies are missing."""
    from soulkit.data.files import write_rows
    from soulkit.eval.drafted_rows import unreadable_records
    from soulkit.runs.jsonl import write_json

    lines = unreadable_records(done.run.path)
    for line in lines[:SHOWN]:
        print_note(line)
    if len(lines) > SHOWN:
        print_note(f"… and {len(lines) - SHOWN} more: {done.run.path / 'outcomes.jsonl'}")
    counts = done.report["counts"]
    if not done.complete:
        print_note(
            f"{counts['no_answer']} records got no reply, so no rows were written; the same "
            "command retries them"
        )
        raise typer.Exit(1)
    if done.rows:
        task = done.report["task"]
        write_rows(target, done.rows, data_source=task, replace=False)
        write_json(target.with_suffix(".provenance.json"), done.report)
    if as_json:
        print_json({**done.report, "file": str(target), "folder": str(done.run.path)})
    else:
        _print(done, target)
    if not done.rows:
        print_note("the filter kept no draft, so no rows were written")
        raise typer.Exit(1)
    if not as_json:
        say_next_of(done.report["task"], target)


def _print(done: BuildResult, target: Path) -> None:
    report, counts = done.report, done.report["counts"]
    rejected = _listed(counts["rejected"])
    unreadable = _listed(counts["unreadable"])
    cost = f"; cost {dollars(report['cost'])}" if report["cost"] is not None else ""
    for line in (
        f"{report['rows']} rows of {report['task']} → {target}",
        f"{counts['asked']} records drafted: {counts['kept']} kept, rejected {rejected}, "
        f"unreadable {unreadable}{cost}",
    ):
        console().print(safe(line), soft_wrap=True)


def _listed(counts: dict[str, int]) -> str:
    """`3 (quotes 2, unsafe 1)`."""
    parts = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"{sum(counts.values())}" + (f" ({parts})" if parts else "")


def plant(
    path: Annotated[Path, typer.Argument(help="Conversations.", readable=False)],
    output: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", readable=False,
        help="File to write (.jsonl).")],
    canaries: Annotated[int, typer.Option("--canaries", metavar="N",
        help="Number of secrets to plant; as many more are listed and never planted.")] = 20,
    side: Annotated[str, typer.Option("--side", metavar="human|assistant|NAME",
        help="Who says the secrets: the side that will be learned.")] = "human",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Random seed.")] = 0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Plant made secrets, to measure what a model remembers of chats.

    Each stands in 1, 2, 4 or 8 different conversations, as a message of its own. They are listed
    in FILE.canaries.jsonl, readable only by you. Train on FILE, then use soul people memory RUN.
    """
    from soulkit.data.privacy.canaries import canary_list, plant_canaries

    planted = plant_canaries(path, output, canaries, side, seed)
    carriers = sum(one.repeats for one in planted)
    if as_json:
        print_json({"file": str(output), "list": str(canary_list(output)), "planted": canaries,
                    "controls": canaries, "conversations": carriers})  # fmt: skip
        return
    line = f"{canaries} canaries in {carriers} conversations → {output}; {canaries} never planted"
    console().print(safe(line), soft_wrap=True)
    console().print(safe(f"list: {canary_list(output)}"), soft_wrap=True)
    name, who = shlex.quote(str(output)), shlex.quote(side)
    print_next(f"soul train sft --model MODEL --data {name} --side {who}", "soul people memory RUN")


def redact(
    path: Annotated[str, typer.Argument(help="Conversations: a file, a folder or a glob pattern.")],
    output: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", readable=False,
        help="File to write (.jsonl).")],
    patterns: Annotated[list[str] | None, typer.Option("--pattern", metavar="NAME=REGEX",
        help="Also replace what matches, such as customer=KD-[0-9]+. Repeatable.")] = None,
    regions: Annotated[str | None, typer.Option(metavar="CC,CC",
        help="Countries whose telephone numbers are written without a country code, such as "
        "ES,FR. [default: 15 countries of Europe and America, and India]")] = None,
    names: Annotated[str | None, typer.Option(metavar="MODEL",
        help="spaCy model that finds names and places, such as en_core_web_sm. Without it only "
        "the names of speakers are replaced.")] = None,
    review: Annotated[Path | None, typer.Option(metavar="FILE", readable=False,
        help="CSV sheet with everything found. A new FILE is written for you to correct; a "
        "corrected FILE is applied.")] = None,
    key: Annotated[Path | None, typer.Option("--map", metavar="FILE", readable=False,
        help="Write the originals of all pseudonyms to FILE, readable only by you.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Replace private data in chats by pseudonyms of the same form.

    Replaces e-mails, telephone, card and account numbers, national IDs, addresses of machines,
    links with a query, keys, ids of people and the names of speakers, in every text of a row. One
    original has one pseudonym in the whole file. Check the result: no search finds everything.
    """
    from soulkit.data.privacy.finders import NOUNS, REGIONS
    from soulkit.data.privacy.redaction import Redaction, compiled, redact_chats
    from soulkit.report.grid import plain_table

    places = [one.strip().upper() for one in regions.split(",")] if regions else REGIONS
    done = Redaction(patterns=compiled(patterns or ()), regions=tuple(places), model=names or "")
    reporter = ConsoleReporter("redact")
    written = redact_chats(path, output, done, review=review, key=key, reporter=reporter)
    say_bad_rows(done.bad)
    if as_json:
        print_json({"file": str(output) if written else None, "rows": done.rows,
                    "changed": done.changed, "private": done.counts, "samples": done.samples,
                    "speakers": dict(done.speakers.most_common()),
                    "bad": [asdict(one) for one in done.bad]})  # fmt: skip
        return
    table = plain_table("private data", ">found", "for example")
    for kind, count in done.counts.items():
        example = one_line(done.samples[kind], 48)
        table.add_row(safe(NOUNS.get(kind, kind)), str(count), safe(example))
    console().print(table if done.counts else "no private data found in the texts")
    name, file = shlex.quote(str(output)), shlex.quote(path)
    if written:
        line = f"{done.changed} of {done.rows} conversations changed → {output}"
        console().print(safe(line), soft_wrap=True)
        side = _say_speakers(done.speakers)
        print_next(
            f"soul data show {name}{side}", f"soul train sft --model MODEL --data {name}{side}"
        )
    else:
        console().print(safe(f"sheet to correct → {review}"), soft_wrap=True)
        sheet = shlex.quote(str(review))
        print_next(f"soul data redact {file} -o {name} --review {sheet}")


def _say_speakers(speakers: Counter[str]) -> str:
    """Print the new names of speakers; the option that selects the most frequent one."""
    if not speakers:
        return " --side human"
    first = speakers.most_common(5)
    names = ", ".join(f"{who} ({counted(n, 'message')})" for who, n in first)
    more = ", …" if len(speakers) > len(first) else ""
    console().print(safe(f"speakers now: {names}{more}"), soft_wrap=True)
    return f" --side {shlex.quote(first[0][0])}"


OWN_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that pass options on to the task's own function."""


def synth(
    context: typer.Context, task: SomeTask,
    n: Annotated[int | None, typer.Option("-n", "--rows", metavar="N",
    help="Number of rows to generate. [default: 100]")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N",
    help="Random seed; the same seed makes the same rows.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", readable=False,
    help="File to write. [default: TASK_synth_N_sSEED.jsonl]")] = None, tasks: TaskFiles = None,
    trust: Trust = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Generate rows; the same seed makes the same rows.

    A task may have more options, such as --stories: see soul tasks show TASK.
    """
    from soulkit.data.files import write_rows
    from soulkit.tasks.kit.made_rows import make_rows

    live = registry_of(tasks, trust=trust).task(task)
    rows = make_rows(live, n, seed, own_options(context))
    path = output or Path(f"{task}_synth_{len(rows)}_s{seed}.jsonl")
    written = write_rows(path, rows, data_source=task, replace=False)
    _say_rows(task, path, written, (), (), as_json)


def import_(
    context: typer.Context,
    task: Annotated[str, typer.Argument(autocompletion=COMPLETERS["tasks"],
        help="chats, or the task of the rows; `soul tasks list` shows which tasks support this.")],
    path: Annotated[Path, typer.Argument(readable=False,
        help="File of the original release; for chats also a folder or .zip file.")],
    output: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", readable=False,
        help="File to write. [default: TASK_NAME.jsonl; for chats chats.jsonl]")] = None,
    branches: Annotated[bool, typer.Option("--branches",
        help="For chats: also write the replies that were regenerated or not chosen.")] = False,
    columns: Annotated[str | None, typer.Option("--columns", metavar="KEY=COLUMN,…",
        help="For chats in a table with one message per row: "
        "id=…,role=…,text=…,person=…,time=….")] = None,
    tasks: TaskFiles = None, trust: Trust = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Convert a benchmark file to rows, or an export to conversations.

    `soul data import chats FILE` recognises the exports of ChatGPT, Claude, Gemini, Slack, Discord,
    Telegram and WhatsApp, request logs, tickets, and the layouts of data sets. A task may have more
    options, such as --half: see soul tasks show TASK. The exit code is 2 if some records are
    malformed; the others are written.
    """
    from soulkit.tasks.kit.importing import import_rows

    if task == "chats":
        import_export(path, output, branches, columns, context.args, as_json)
        return
    if branches or columns:
        raise ConfigError(
            f"--{'branches' if branches else 'columns'} has no effect on rows of '{task}'.",
            "It selects what is read from an export of chats.",
            "Leave it out, or import conversations: soul data import chats FILE",
        )
    live, options = registry_of(tasks, trust=trust).task(task), own_options(context)
    write_original(task, path, output, lambda: import_rows(live, path, options), as_json)


def own_options(context: typer.Context) -> dict[str, str]:
    """The task's own options on the command line: flag → value."""
    options: dict[str, str] = {}
    words = iter(context.args)
    for word in words:
        flag, equals, text = word.partition("=")
        value = text if equals else next(words, None)
        if not flag.startswith("--") or value is None:
            raise ConfigError(
                f"Unexpected argument '{word}'.",
                "Options of a task have the form --NAME VALUE.",
                "Remove the word, or list the options: soul tasks show TASK",
            )
        if flag in options:
            raise given_twice(flag)
        options[flag] = value
    return options


def write_original(
    task: str, path: Path, output: Path | None, read: Callable[[], Imported], as_json: bool
) -> None:
    """Write the rows that `read` makes from original files and print the records it left out; exit
    2 if there are any."""
    from soulkit.data.files import check_target, refuse_same, write_rows

    target = output or Path(f"{task}_{path.stem}.jsonl")
    refuse_same(path, target)
    check_target(target)
    imported = read()
    if not imported.rows:
        say_bad_rows(imported.bad)
    written = write_rows(target, imported.rows, data_source=task, replace=False)
    _say_rows(task, target, written, imported.bad, imported.notes, as_json)
    if imported.bad:
        raise typer.Exit(2)


def _say_rows(
    task: str, path: Path, rows: int, bad: Sequence[BadRow], notes: Sequence[str], as_json: bool
) -> None:
    for remark in notes:
        print_note(f"note: {remark}")
    if as_json:
        listed = [asdict(b) for b in bad]
        print_json({"task": task, "file": str(path), "rows": rows, "bad": listed})
        return
    console().print(f"{rows} rows of {safe(task)} → {safe(str(path))}", soft_wrap=True)
    say_bad_rows(bad)
    say_next_of(task, path)


def say_next_of(task: str, path: Path) -> None:
    """Print the next commands for a built-in task; other tasks would need their --tasks file."""
    from soulkit.tasks.kit.registry import load_registry

    spec, name = load_registry().specs.get(task), shlex.quote(str(path))
    if spec is not None:
        play = [f"soul eval api --model MODEL --task {task} --data {name}"] if spec.module else []
        print_next(f"soul data check {name}", *play)


# -- exports of chats ------------------------------------------------------------------------------

COLUMN_KEYS = ("id", "role", "text", "person", "time")
SHOWN_NAMES = 8


def import_export(
    path: Path, output: Path | None, branches: bool, columns: str | None, rest: Sequence[str],
    as_json: bool,
) -> None:  # fmt: skip
    """Write the conversations of an export; exits with 2 if some are malformed."""
    from soulkit.data.exports.layouts import ReadOptions
    from soulkit.data.exports.reading import import_chats
    from soulkit.data.files import check_target, refuse_same

    if rest:
        raise ConfigError(
            f"Unexpected argument '{rest[0]}'.",
            "Chats are imported from one file, folder or .zip file.",
            "Remove it, or see: soul data import --help",
        )
    target = output or Path("chats.jsonl")
    check_target(target, (".jsonl",))
    refuse_same(path, target)
    options = ReadOptions(branches, named_columns(columns or ""))
    done = import_chats(path, target, options, ConsoleReporter("import"))
    if as_json:
        counts = {"conversations": done.conversations, "messages": done.messages,
                  "persons": len(done.people), "speakers": done.speakers}  # fmt: skip
        print_json({"file": str(target), "layouts": done.layouts, **counts,
                    "left_out": done.left_out, "skipped_files": done.skipped,
                    "bad": [asdict(b) for b in done.bad]})  # fmt: skip
    else:
        _print_import(done, path, target)
    if done.bad:
        raise typer.Exit(2)


def named_columns(text: str) -> dict[str, str]:
    """`id=chat,text=body` as key → column; ConfigError for another form."""
    columns: dict[str, str] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        key, equals, column = (word.strip() for word in part.partition("="))
        if key not in COLUMN_KEYS or not equals or not column:
            raise ConfigError(
                f"--columns cannot use '{part}'.",
                f"It takes KEY=COLUMN with the keys {', '.join(COLUMN_KEYS)}.",
                did_you_mean(key, COLUMN_KEYS),
            )
        columns[key] = column
    return columns


def _print_import(done: ChatImport, path: Path, target: Path) -> None:
    names = ", ".join(f"{n} ({counted(f, 'file')})" for n, f in done.layouts.items())
    people = counted(len(done.people), "person") if done.people else "no person's id"
    if done.speakers:
        people = counted(len(done.speakers), "speaker")
    lines = [
        f"{path}: {names}",
        f"{counted(done.conversations, 'conversation')}, {people}, "
        f"{counted(done.messages, 'message')} → {target}",
    ]
    if done.speakers:
        common = done.speakers.most_common(SHOWN_NAMES)
        more = f", and {len(done.speakers) - SHOWN_NAMES} more" * (len(done.speakers) > SHOWN_NAMES)
        named = ", ".join(f"{one_line(name, 40)} {count}" for name, count in common)
        lines.append(f"messages by speaker: {named}{more}")
    if done.left_out:
        lines.append(f"left out: {listed(done.left_out)}")
    if done.skipped:
        skipped = ", ".join(f"{count:,} {ending}" for ending, count in done.skipped.items())
        lines.append(f"files without conversations: {skipped}")
    for line in lines:
        console().print(safe(line), soft_wrap=True)
    say_bad_rows(done.bad)
    speaker = next((name for name, _ in done.speakers.most_common(1)), "human")
    name, side = shlex.quote(str(target)), shlex.quote(speaker)
    print_next(f"soul data show {name} --side {side}", f"soul data redact {name} -o safe.jsonl")
