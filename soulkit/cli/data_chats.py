"""`soul data` about conversations: one lesson shown, duplicates, leaks."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.panel import Panel

from soulkit.cli.console import err, one_line, out, print_json, safe
from soulkit.cli.console import table as new_table
from soulkit.cli.options import Json
from soulkit.errors import DataError

if TYPE_CHECKING:
    from soulkit.data.contamination import Passage
    from soulkit.data.corpora.lesson import Lesson
    from soulkit.data.files import BadRow

LessonSide = Annotated[
    str | None,
    typer.Option(
        "--side",
        help="Show what is learned of a conversation: human, assistant, or a speaker's name; "
        "`corpus` asks corpora.yaml.",
    ),
]
CleanChats = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", metavar="CLEAN", help="Write the rows that stay (.jsonl).", readable=False
    ),
]

SHOWN = 20
"""Findings printed one by one; --json has all of them."""
BY_TABLE = "corpus"
"""The word for the side that the data set of a row has."""


def show_lesson(path: Path, side: str, row: int | None, as_json: bool) -> None:
    """Print the lesson of row `row` (from 1), else the first one; DataError where it is none."""
    from soulkit.data.corpora.stream import read_lessons

    rows = read_lessons(str(path), side=None if side == BY_TABLE else side, say=err.print)
    lesson = next(iter(rows)) if row is None else rows.at(row)
    if isinstance(lesson, str):
        raise DataError(
            f"'{path}' has no conversation {row}.",
            f"That row cannot be learned from: {lesson}." if lesson else
            "Rows are counted from 1, as messages count them; in several files they go on.",
            "Give --row another number; without it the first conversation is shown.",
        )  # fmt: skip
    if as_json:
        print_json({
            "row": lesson.key, "source": lesson.source, "fact": lesson.fact,
            "tokenizer": lesson.tokenizer, "left_out": dict(rows.unusable),
            "segments": [
                {"role": s.role, "who": lesson.speaker(s), "text": s.text, "learned": learned,
                 "exact_ids": len(s.token_ids)}
                for s, learned in zip(lesson.segments, lesson.trained, strict=True)
            ],
        })  # fmt: skip
        return
    _print_lesson(lesson)
    for why, count in rows.unusable.most_common():
        err.print(f"left out before it: {count} × {safe(one_line(why, 200))}", soft_wrap=True)


def chat_without_side(path: Path, named: int | None, row: int | None) -> DataError | None:
    """The error of recorded chats that are to be shown as rows; None for anything else. `named` is
    the row that stands behind the path, `row` the one that is meant."""
    from soulkit.data.chats import holds_chats

    if not holds_chats(path):
        return None
    where = shlex.quote(str(path) if named is None else f"{path}:{named}")
    number = f" --row {row}" if named is None and row is not None else ""
    return DataError(
        f"'{path}' holds chats, and without --side a row of a task is shown.",
        "Which messages of a chat are learned, and which are only read, depends on the side.",
        f"Show what is learned of the people: soul data show {where} --side human{number}",
    )


def _print_lesson(lesson: Lesson) -> None:
    out.print(f"{safe(lesson.key)}, source {safe(lesson.source)}", soft_wrap=True)
    for segment, learned in zip(lesson.segments, lesson.trained, strict=True):
        words = sum(1 for _ in segment.text.split())
        who = safe(one_line(lesson.speaker(segment), 40))
        title = f"{who} (learned) · {words} words" if learned else f"{who} (read)"
        style = "bold green" if learned else "none"
        out.print(Panel(safe(segment.text), title=title, title_align="left", border_style=style))


def dedupe(
    path: Annotated[
        Path, typer.Argument(help="Conversations: a file, a folder, a pattern.", readable=False)
    ],
    output: CleanChats = None,
    threshold: Annotated[
        float, typer.Option("--threshold", help="Shared word triples of near-duplicates.")
    ] = 0.8,
    as_json: Json = False,
) -> None:
    """Find conversations that a corpus holds twice, or nearly so.

    With -o, the others are written. The exit code is 2 when some rows cannot be read: nothing is
    known about those, and -o leaves them out.
    """
    from soulkit.data.corpora.duplicates import find_duplicates
    from soulkit.data.corpora.store import write_clean

    if output is not None:
        _check_clean(path, output)
    report = find_duplicates(str(path), threshold)
    written = None
    if output is not None:
        written = write_clean(str(path), output, report.left_out())
    if as_json:
        print_json(
            {"file": str(path), "threshold": threshold, "written": written, **asdict(report)}
        )
    else:
        kinds = Counter(d.kind for d in report.duplicates)
        exact, near = kinds["exact"], kinds["near"]
        out.print(f"{report.rows} rows, {exact} exact and {near} near duplicates")
        for d in report.duplicates[:SHOWN]:
            out.print(safe(f"{d.kind} {d.row} = {d.first} ({d.similarity:.2f})"), soft_wrap=True)
        _say_more(len(report.duplicates))
        say_bad_rows(report.bad)
        _say_written(written, output)
    if report.bad:
        raise typer.Exit(2)


def report_leaks(
    train: Path, evaluation: Sequence[Passage], bad: Sequence[BadRow], threshold: float,
    exclude: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Find the conversations of `train` that give rows of `evaluation` away, and print them.

    `bad` are evaluation rows that cannot be read. Clean conversations go to `exclude`.
    """
    from soulkit.data.corpora.leaks import find_leaks
    from soulkit.data.corpora.store import source_rows, write_clean

    report = find_leaks(source_rows(str(train)), evaluation, threshold)
    written = None
    if exclude is not None:
        written = write_clean(str(train), exclude, report.left_out())
    everything = [*report.bad, *bad]
    if as_json:
        reached = sorted(report.evaluations)
        print_json({**asdict(report), "evaluations": reached, "train": str(train),
                    "threshold": threshold, "written": written,
                    "bad": [asdict(b) for b in everything]})  # fmt: skip
    else:
        table = new_table("overlap", ">conversations", ">of")
        for kind in ("holds", "part"):
            count = sum(match.kind == kind for match in report.matches)
            table.add_row(kind, str(count), str(report.chats))
        out.print(table)
        out.print(
            f"{len(report.evaluations)} of {report.evaluation_rows} evaluation rows are given "
            f"away; {report.short} are too short to be looked for"
        )
        for match in sorted(report.matches, key=lambda m: -m.similarity)[:SHOWN]:
            line = f"{match.train} {match.kind} {match.evaluation} ({match.similarity:.2f})"
            out.print(safe(line), soft_wrap=True)
        _say_more(len(report.matches))
        say_bad_rows(everything)
        _say_written(written, exclude)
    if everything:
        raise typer.Exit(2)


def _check_clean(path: Path, output: Path) -> None:
    from soulkit.data.files import check_target, refuse_same

    check_target(output, (".jsonl",))
    refuse_same(path, output)


def _say_more(count: int) -> None:
    if count > SHOWN:
        out.print(f"… and {count - SHOWN} more; --json lists all")


def _say_written(written: int | None, path: Path | None) -> None:
    if written is not None:
        out.print(f"{written} clean rows → {safe(str(path))}", soft_wrap=True)


def say_bad_rows(bad: Sequence[BadRow]) -> None:
    """The first bad rows, one a line."""
    for row in bad[:SHOWN]:
        err.print(f"bad row {safe(row.source)}: {safe(one_line(row.why, 400))}", soft_wrap=True)
    if len(bad) > SHOWN:
        err.print(f"… and {len(bad) - SHOWN} more bad rows; --json lists all")
