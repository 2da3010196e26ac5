"""`soul data audit` and `soul data contamination`: what is wrong with rows that load all right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import one_line, out, print_json, safe
from soulkit.cli.console import table as new_table
from soulkit.cli.data_chats import report_leaks, say_bad_rows
from soulkit.cli.options import COMPLETERS, Json, TaskFiles, Trust, registry_of
from soulkit.errors import DataError

if TYPE_CHECKING:
    from soulkit.data.contamination import Overlap
    from soulkit.data.files import BadRow, RawRow
    from soulkit.tasks.audit import Bias, RowAudit
    from soulkit.tasks.base import Task
    from soulkit.tasks.labels import LabelAudit
    from soulkit.tasks.registry import Registry

RowsTask = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="The task of rows that do not say so themselves.",
        autocompletion=COMPLETERS["tasks"],
    ),
]
CleanFile = Annotated[
    Path | None,
    typer.Option(
        "--exclude", metavar="OUT", help="Write the training rows that are clean.", readable=False
    ),
]

SHOWN = 20
"""Findings printed one by one; --json and -o have all of them."""


def audit(
    task: Annotated[
        str, typer.Argument(help="A task; see: soul tasks list", autocompletion=COMPLETERS["tasks"])
    ],
    path: Annotated[str, typer.Argument(help="Rows, an original file, or synth:N.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="Write the rows to look at here (.jsonl).", readable=False
        ),
    ] = None,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Look for rows that are wrong, or right for a bad reason.

    Duplicates, one question with two golds, golds that stand in the prompt or mostly at one place,
    lengths; for stories also whether a belief tracker agrees with the published labels. With -o,
    the rows to look at are written; those that the tracker disputes with both answers.
    """
    from soulkit.data.files import check_target, refuse_same
    from soulkit.tasks.audit import audit_rows
    from soulkit.tasks.loading import examples_from

    if output is not None:
        refuse_same(Path(path), output)
        check_target(output, (".jsonl",))
    live = registry_of(tasks, trust=trust).task(task)
    loaded = examples_from(live, path, forms=False)
    rows = audit_rows(live, loaded)
    hook = live.spec.hook(task, "audit")
    report = hook(Path(path), loaded.examples) if hook is not None else None
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
            out.print(f"rows to look at → {safe(str(output))}", soft_wrap=True)


def contamination(
    train: Annotated[Path, typer.Argument(help="Rows to train on.", readable=False)],
    evaluation: Annotated[
        Path, typer.Argument(help="Rows to evaluate on.", metavar="EVAL", readable=False)
    ],
    task: RowsTask = None,
    chats: Annotated[
        bool,
        typer.Option("--chats", help="TRAIN holds conversations: a file, folder or pattern."),
    ] = False,
    exclude: CleanFile = None,
    drop: Annotated[
        str, typer.Option("--drop", help="Kinds that --exclude leaves out: exact,near,persona")
    ] = "exact,near",
    threshold: Annotated[
        float, typer.Option("--threshold", help="Shared word triples of near-duplicates.")
    ] = 0.8,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Find training rows that give evaluation rows away.

    The same row, nearly the same row, or the same persona, character or scenario. The exit code is
    2 when some rows cannot be read: nothing is known about those, and --exclude leaves them out.

    With --chats: conversations that hold an evaluation row, or are a part of one.
    """
    from soulkit.data.contamination import clean_rows, find_overlap
    from soulkit.data.files import check_target, refuse_same, write_rows
    from soulkit.tasks.passages import entity_kinds

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
    from soulkit.tasks.labels import write_disputed

    if report is not None:
        write_disputed(report, path, replace=False)
    else:
        write_objects(path, map(asdict, rows.remarks), replace=False)


class _Side:
    """The rows of one file as passages, and what could not be read."""

    def __init__(self, registry: Registry, path: Path, task: str | None) -> None:
        from soulkit.data.files import read_rows
        from soulkit.tasks.loading import rows_with_tasks
        from soulkit.tasks.passages import passages

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
                "Name the task of the rows with --task, or see: soul data check FILE",
            )
        usable = {passage.source for passage in self.passages}
        self.rows: list[RawRow] = [row for row in rows if row.source in usable]


# -- printing ------------------------------------------------------------------------------------


def _print_rows(rows: RowAudit) -> None:
    out.print(
        f"{rows.rows} rows of {safe(rows.task)}, {rows.duplicates} duplicates, {len(rows.bad)} bad"
    )
    table = new_table("field", ">words p50", ">p95", ">max", ">over budget")
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
        lines.append(f"the gold's letter: {counts}")
    if rows.position is not None:
        lines.append(f"always answering {rows.favourite} is right in {_against(rows.position)}")
    if rows.longest is not None:
        lines.append(f"the longest option is right in {_against(rows.longest)}")
    if rows.with_options:
        lines.append(
            f"the prompt holds the gold's words outside its options in {rows.gold_in_prompt} rows, "
            f"and of all options only the gold's in {rows.count('leak')}"
        )
    lines.append(f"one question with several golds: {rows.count('contradiction')} rows")
    if rows.count("twin_options"):
        lines.append(f"two options that say the same: {rows.count('twin_options')} rows")
    return lines


def _against(bias: Bias) -> str:
    chance = f"chance {100 * bias.chance:.1f} %, p {bias.p:.2g}"
    mark = "  ← more than chance" if bias.notable else ""
    return f"{bias.hits} of {bias.rows} rows ({100 * bias.share:.1f} %; {chance}){mark}"


def _print_tracker(task: str, report: LabelAudit) -> None:
    table = new_table("group", "value", ">rows", ">agree", ">share", title="belief tracker")
    lines = [("all", "", report.overall)]
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


def _print_overlap(overlap: Overlap) -> None:
    table = new_table("overlap", ">training rows", ">share", ">evaluation rows", ">share")
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
