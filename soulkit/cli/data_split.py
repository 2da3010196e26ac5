"""`soul data split`: rows in two files by whole groups of equal values."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from soulkit.cli.console import console, print_json, safe
from soulkit.cli.options import Json

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
    from soulkit.cli.data import say_bad
    from soulkit.data.files import read_rows, write_rows
    from soulkit.data.splits import split_rows
    from soulkit.written import listed

    columns, out = listed(by), folder or Path(f"{path.stem}_split")
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
