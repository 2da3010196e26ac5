"""`soul data check`, `audit`, `contamination` and `dedupe`: checks of row files."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.panel import Panel

from soulkit.cli.console import ConsoleReporter, err, one_line, out, print_json, safe
from soulkit.cli.options import COMPLETERS, Json, TaskFiles, Trust, registry_of
from soulkit.errors import DataError
from soulkit.report.grid import plain_table

if TYPE_CHECKING:
    from soulkit.data.contamination import Overlap, Passage, RenamedRows
    from soulkit.data.corpora.lessons import Lesson
    from soulkit.data.files import BadRow, RawRow
    from soulkit.tasks.kit.base import Task
    from soulkit.tasks.kit.registry import Registry
    from soulkit.tasks.kit.row_checks import Bias, LabelAudit, RowAudit, RowCheck


RowsTask = Annotated[str | None, typer.Option("--task", metavar="TASK",
    autocompletion=COMPLETERS["tasks"],
    help="Task of rows that do not name their own.")]  # fmt: skip
RowFile = Annotated[Path, typer.Argument(readable=False,
    help="File with rows: .jsonl, .json, .parquet, .csv or .tsv.")]  # fmt: skip
LessonSide = Annotated[str | None, typer.Option("--side", metavar="SIDE",
    help="Show a conversation as training data for this side: human, assistant, or a speaker's "
    "name. `corpus` takes the side from corpora.yaml.")]  # fmt: skip
Threshold = Annotated[float, typer.Option("--threshold", metavar="X",
    help="Texts with at least this share of common word triples are "
    "near-duplicates.")]  # fmt: skip

SHOWN = 20
"""Findings printed one by one; --json has all of them."""
BY_TABLE = "corpus"
"""Value of --side for the side that corpora.yaml declares."""


def show_lesson(path: Path, side: str, row: int | None, as_json: bool) -> None:
    """Print the training example of row `row` (counted from 1), else the first one; DataError if
    the row has none."""
    from soulkit.data.corpora.stream import read_lessons

    rows = read_lessons(
        str(path), side=None if side == BY_TABLE else side, reporter=ConsoleReporter("show")
    )
    lesson = next(iter(rows)) if row is None else rows.at(row)
    if isinstance(lesson, str):
        raise DataError(
            f"'{path}' has no conversation {row}.",
            f"The row cannot be used for training: {lesson}." if lesson else
            "Rows are counted from 1, over all files.",
            "Choose another --row, or leave it out to show the first conversation.",
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
        err.print(f"left out before this row: {count} × {safe(one_line(why, 200))}", soft_wrap=True)


def chat_without_side(path: Path, named: int | None, row: int | None) -> DataError | None:
    """The error for a file of chats that was opened as task rows; None for other files. `named` is
    the row number in the path, `row` the requested one."""
    from soulkit.data.chats import holds_chats
    from soulkit.data.corpora.source import side_hint
    from soulkit.data.corpora.stream import read_lessons

    side, others = "human", ""
    try:
        people = read_lessons(str(path), side=side).speakers()
    except DataError:
        people = Counter()
    if not people and not holds_chats(path):
        return None
    if people and side not in people:
        side = shlex.quote(people.most_common(1)[0][0])
        others = f". {side_hint(people)}"
    where = shlex.quote(str(path) if named is None else f"{path}:{named}")
    number = f" --row {row}" if named is None and row is not None else ""
    return DataError(
        f"'{path}' holds chats, but without --side the command shows rows of a task.",
        "--side decides which messages of a chat are learned and which are only context.",
        "To see which messages are learned, write: "
        f"soul data show {where} --side {side}{number}{others}",
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
    path: Annotated[Path, typer.Argument(readable=False,
        help="Conversations: a file, a folder or a glob pattern.")],
    output: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", readable=False,
        help="Write the remaining rows to this file (.jsonl).")] = None,
    threshold: Threshold = 0.8,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Find duplicate and similar conversations in a corpus.

    With -o, the command writes the conversations without duplicates. The exit code is 2 if some
    rows are unreadable; they are not checked, and -o leaves them out.
    """
    from soulkit.data.corpora.duplicates import find_duplicates
    from soulkit.data.corpora.file_rows import write_clean

    if output is not None:
        _check_clean(path, output)
    _say_left_out(path)
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
    """Print the conversations in `train` that contain rows of `evaluation`.

    `bad` are unreadable evaluation rows. Clean conversations are written to `exclude`.
    """
    from soulkit.data.chats import people_on_both_sides
    from soulkit.data.corpora.duplicates import find_leaks
    from soulkit.data.corpora.file_rows import source_rows, write_clean

    _say_left_out(train)
    report = find_leaks(source_rows(str(train)), evaluation, threshold)
    written = None
    if exclude is not None:
        written = write_clean(str(train), exclude, report.left_out())
    everything = [*report.bad, *bad]
    if as_json:
        sets = {"evaluations": sorted(report.evaluations), "people": sorted(report.people)}
        print_json({**asdict(report), **sets, "train": str(train), "threshold": threshold,
                    "written": written, "bad": [asdict(b) for b in everything]})  # fmt: skip
    else:
        table = plain_table("overlap", ">conversations", ">of")
        for kind in ("holds", "part"):
            count = sum(match.kind == kind for match in report.matches)
            table.add_row(kind, str(count), str(report.chats))
        out.print(table)
        out.print(
            f"{len(report.evaluations)} of {report.evaluation_rows} evaluation rows are in the "
            f"training data; {report.short} are too short to check"
        )
        if line := people_on_both_sides(report.people, "evaluation rows"):
            out.print(safe(line), soft_wrap=True)
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


def _say_left_out(path: Path) -> None:
    from soulkit.data.corpora.settings import left_out_note

    if note := left_out_note(str(path)):
        err.print(safe(note), soft_wrap=True)


def _say_more(count: int) -> None:
    if count > SHOWN:
        out.print(f"… and {count - SHOWN} more; --json lists all")


def _say_written(written: int | None, path: Path | None) -> None:
    if written is not None:
        out.print(f"{written} clean rows → {safe(str(path))}", soft_wrap=True)


def audit(
    task: Annotated[str, typer.Argument(autocompletion=COMPLETERS["tasks"],
        help="Name of a task; `soul tasks list` shows them.")],
    path: Annotated[str, typer.Argument(
        help="File with rows, original file, or synth:N for N generated rows.")],
    output: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", readable=False,
        help="Write the suspicious rows to this file (.jsonl).")] = None,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Find suspicious rows: wrong labels, duplicates, shortcuts.

    Checks for duplicates, questions with two gold answers, gold answers that appear in the prompt
    or mostly at one position, and lengths; for stories also whether a belief tracker agrees with
    the labels. With -o, the command writes the suspicious rows; for disputed labels it writes both
    answers.
    """
    from soulkit.data.files import check_target, refuse_same
    from soulkit.tasks.kit.loading import examples_to_inspect
    from soulkit.tasks.kit.row_checks import LabelAudit, audit_rows

    if output is not None:
        refuse_same(Path(path), output)
        check_target(output, (".jsonl",))
    live = registry_of(tasks, trust=trust).task(task)
    loaded = examples_to_inspect(live, path, forms=False)
    rows = audit_rows(live, loaded)
    hook = live.spec.hook(task, "audit")
    report = hook.made(LabelAudit, Path(path), loaded.examples) if hook is not None else None
    if output is not None:
        _write_findings(rows, report, output)
    if as_json:
        tracker = {} if report is None else asdict(report)
        print_json({**tracker, "rows": asdict(rows), "file": path, "task": task})
    else:
        _print_rows(rows)
        if report is not None:
            _print_tracker(task, report)
        if output is not None:
            out.print(f"suspicious rows → {safe(str(output))}", soft_wrap=True)


def contamination(
    train: Annotated[Path, typer.Argument(readable=False,
        help="File with training rows.")],
    evaluation: Annotated[Path, typer.Argument(metavar="EVAL", readable=False,
        help="File with evaluation rows.")],
    task: RowsTask = None,
    chats: Annotated[bool, typer.Option("--chats",
        help="TRAIN contains conversations: a file, folder or glob pattern.")] = False,
    exclude: Annotated[Path | None, typer.Option("--exclude", metavar="FILE", readable=False,
        help="Write the clean training rows to this file.")] = None,
    drop: Annotated[str, typer.Option("--drop", metavar="KINDS",
        help="Kinds of overlap that --exclude removes: exact,near,persona.")] = "exact,near",
    threshold: Threshold = 0.8,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Find training rows that overlap with evaluation rows.

    Reports equal rows, near-duplicates, and rows with the same persona, character or scenario. The
    exit code is 2 if some rows are unreadable; they are not checked, and --exclude leaves them
    out.

    With --chats, it finds conversations that contain an evaluation row or are part of one.
    """
    from soulkit.data.contamination import clean_rows, find_overlap
    from soulkit.data.files import check_target, refuse_same, write_rows
    from soulkit.tasks.kit.loading import entity_kinds

    if exclude is not None:
        check_target(exclude, (".jsonl",) if chats else (".jsonl", ".parquet"))
        refuse_same(train, exclude)
        refuse_same(evaluation, exclude)
    registry = registry_of(tasks, trust=trust)
    if chats:
        eval_rows = _Side(registry, evaluation, task)
        report_leaks(train, eval_rows.passages, eval_rows.bad, threshold, exclude, as_json)
        return
    train_side, eval_side = (_Side(registry, path, task) for path in (train, evaluation))
    kinds = entity_kinds({**train_side.tasks, **eval_side.tasks}.values())
    overlap = find_overlap(
        train_side.passages, eval_side.passages, threshold=threshold, entities=kinds
    )
    clean = clean_rows(train_side.rows, overlap, [k.strip() for k in drop.split(",") if k.strip()])
    if not as_json:
        _print_overlap(overlap)
        say_bad_rows([*train_side.bad, *eval_side.bad])
    written = None
    if exclude is not None:
        fields = [row.fields for row in clean]
        written = write_rows(exclude, fields, data_source=task or "", replace=False)
    if as_json:
        print_json(_overlap_dict(train, evaluation, overlap, train_side, eval_side, written))
    elif exclude is not None:
        out.print(f"{written} clean rows → {safe(str(exclude))}", soft_wrap=True)
    if train_side.bad or eval_side.bad:
        raise typer.Exit(2)


# -- help for the commands -----------------------------------------------------------------------


def _write_findings(rows: RowAudit, report: LabelAudit | None, path: Path) -> None:
    from soulkit.data.files import write_objects
    from soulkit.tasks.kit.row_checks import write_disputed

    if report is not None:
        write_disputed(report, path, replace=False)
    else:
        write_objects(path, map(asdict, rows.remarks), replace=False)


class _Side:
    """The rows of one file as passages, and its unreadable rows."""

    def __init__(self, registry: Registry, path: Path, task: str | None) -> None:
        from soulkit.data.files import read_rows
        from soulkit.tasks.kit.loading import passages, rows_with_tasks

        rows, broken = read_rows(path)
        if task is not None:
            registry.spec(task)
        pairs, strays = rows_with_tasks(rows, registry.by_source(), task)
        self.tasks: dict[str, Task] = {name: registry.task(name) for name, _ in pairs}
        self.passages, unusable = passages(self.tasks, pairs)
        self.bad: list[BadRow] = [*broken, *strays, *unusable]
        if not self.passages:
            raise DataError(
                f"No row of '{path}' can be compared.",
                f"{self.bad[0].source}: {self.bad[0].why.rstrip('.')}.",
                "Name the task of the rows with --task, or check the file: soul data check FILE",
            )
        usable = {passage.source for passage in self.passages}
        self.rows: list[RawRow] = [row for row in rows if row.source in usable]


# -- printing ------------------------------------------------------------------------------------


def _print_rows(rows: RowAudit) -> None:
    out.print(
        f"{rows.rows} rows of {safe(rows.task)}, {rows.duplicates} duplicates, {len(rows.bad)} bad"
    )
    table = plain_table("field", ">words p50", ">p95", ">max", ">over budget")
    for name, words in rows.words.items():
        figures = (words.p50, words.p95, words.max, words.over_budget)
        table.add_row(safe(name), *map(str, figures))
    out.print(table)
    for line in _remarks_on_options(rows):
        out.print(safe(line), soft_wrap=True)
    for remark in rows.remarks[:SHOWN]:
        remark_line = f"{remark.what} {remark.source}: {one_line(remark.detail, 200)}"
        out.print(safe(remark_line), soft_wrap=True)
    if len(rows.remarks) > SHOWN:
        out.print(f"… and {len(rows.remarks) - SHOWN} more; --json and -o list all")
    say_bad_rows(rows.bad)


def _remarks_on_options(rows: RowAudit) -> list[str]:
    lines = []
    if rows.positions:
        counts = ", ".join(f"{letter} {count}" for letter, count in rows.positions.items())
        lines.append(f"letter of the gold answer: {counts}")
    if rows.position is not None:
        lines.append(f"always answering {rows.favourite} is right in {_against(rows.position)}")
    if rows.longest is not None:
        lines.append(f"the longest option is right in {_against(rows.longest)}")
    if rows.with_options:
        lines.append(
            "rows whose prompt contains the gold answer outside the options: "
            f"{rows.gold_in_prompt}; {rows.count('leak')} of them contain no other option"
        )
    lines.append(f"same question with different gold answers: {rows.count('contradiction')} rows")
    if rows.count("twin_options"):
        lines.append(f"options with the same text: {rows.count('twin_options')} rows")
    return lines


def _against(bias: Bias) -> str:
    chance = f"chance {100 * bias.chance:.1f} %, p {bias.p:.2g}"
    mark = "  ← more than chance" if bias.notable else ""
    return f"{bias.hits} of {bias.rows} rows ({100 * bias.share:.1f} %; {chance}){mark}"


def _print_tracker(task: str, report: LabelAudit) -> None:
    table = plain_table("group", "value", ">rows", ">agree", ">share", title="belief tracker")
    lines = [("all", "", report.overall)]
    lines += [(tag, v, a) for tag, values in report.by.items() for v, a in values.items()]
    for tag, value, agreement in lines:
        share = "–" if agreement.share is None else f"{100 * agreement.share:.1f} %"
        figures = (str(agreement.total), str(agreement.agreed), share)
        table.add_row(safe(tag), safe(value), *figures)
    out.print(table)
    out.print(
        f"{len(report.disputed)} disputed rows of {safe(task)}, {len(report.unread)} unreadable, "
        f"{report.contradictions} questions with two gold answers in the file"
    )


def _print_overlap(overlap: Overlap) -> None:
    table = plain_table("overlap", ">training rows", ">share", ">evaluation rows", ">share")
    for kind in overlap.kinds:
        touched = len(overlap.touched(kind))
        table.add_row(
            safe(kind),
            *_count_cells(touched, overlap.train_rows),
            *_count_cells(overlap.reached[kind], overlap.evaluation_rows),
        )
    out.print(table)
    out.print(f"{overlap.train_rows} training rows, {overlap.evaluation_rows} evaluation rows")
    for match in sorted(overlap.matches, key=lambda m: -m.similarity)[:SHOWN]:
        line = f"{match.kind} {match.train} = {match.evaluation} ({match.similarity:.2f})"
        out.print(safe(line), soft_wrap=True)
    for shared in overlap.shared[:SHOWN]:
        rows = f"{len(shared.train)} training and {len(shared.evaluation)} evaluation rows"
        out.print(safe(f"{shared.kind} in {rows}: {one_line(shared.value, 80)}"), soft_wrap=True)
    more = max(len(overlap.matches) - SHOWN, 0) + max(len(overlap.shared) - SHOWN, 0)
    if more:
        out.print(f"… and {more} more; --json lists all")


def _count_cells(rows: int, of: int) -> tuple[str, str]:
    return str(rows), f"{100 * rows / of:.1f} %"


def _overlap_dict(
    train: Path,
    evaluation: Path,
    overlap: Overlap,
    train_side: _Side,
    eval_side: _Side,
    written: int | None,
) -> Mapping[str, Any]:
    by_kind = {
        kind: {
            "training_rows": len(overlap.touched(kind)),
            "evaluation_rows": overlap.reached[kind],
        }
        for kind in overlap.kinds
    }
    return {
        "train": str(train),
        "evaluation": str(evaluation),
        **{k: v for k, v in asdict(overlap).items() if k != "reached"},
        "by_kind": by_kind,
        "written": written,
        "bad": [asdict(b) for b in (*train_side.bad, *eval_side.bad)],
    }


SHOWN_BAD = 50
"""Bad rows to print one by one; --json has all of them."""


def check(
    path: RowFile,
    task: RowsTask = None,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Count rows, columns and lengths, and list bad rows.

    Warns if rows of different clusters are equal except for names. The exit code is 2 if any row
    is bad.
    """
    from soulkit.tasks.kit.row_checks import check_row_file

    checks, strays = check_row_file(registry_of(tasks, trust=trust), path, task)
    if as_json:
        checked = [asdict(report) for report in checks]
        print_json({"file": str(path), "tasks": checked, "bad": [asdict(b) for b in strays]})
    else:
        for report in checks:
            _print_check(path, report)
        say_bad_rows(strays)
    if strays or any(report.bad or not report.usable for report in checks):
        raise typer.Exit(2)


def say_bad_rows(bad: Sequence[BadRow]) -> None:
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
    table = plain_table("field", ">rows", ">words p50", ">p95", ">max", ">over budget")
    for name, words in report.words.items():
        figures = (words.p50, words.p95, words.max, words.over_budget)
        table.add_row(safe(name), str(report.columns.get(name, "")), *map(str, figures))
    out.print(table)
    for tag, values in report.tags.items():
        counts = ", ".join(f"{safe(value)} ({count})" for value, count in values.items())
        out.print(f"{safe(tag)}: {counts}", soft_wrap=True)
    columns = ", ".join(f"{safe(name)} ({count})" for name, count in report.columns.items())
    out.print(f"columns: {columns}", soft_wrap=True)
    if report.ignored:
        out.print(f"ignored columns: {safe(', '.join(report.ignored))}", soft_wrap=True)
    if report.equal_up_to_names is not None:
        _warn_renamed(report.task, report.equal_up_to_names)
    say_bad_rows(report.bad)


def _warn_renamed(task: str, renamed: RenamedRows) -> None:
    first, second = map(safe, renamed.example)
    err.print(
        f"warning: {renamed.rows} rows in {renamed.clusters} clusters of {safe(task)} are equal "
        f"except for names; only {renamed.distinct} of them are distinct. Example: {first} and "
        f"{second}. Intervals and splits treat clusters as independent. If the answers depend on "
        "columns that these rows share, declare them as the task's 'cluster' in its tasks file.",
        soft_wrap=True,
    )
