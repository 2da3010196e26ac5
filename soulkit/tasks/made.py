"""Rows made here: any number, from a seed, without network, licences or label noise.

Row i depends on the seed alone, so fewer rows are the beginning of more. A task makes rows where
its declaration names a function for it (`synth: rows:rows`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from soulkit.data.files import RawRow
from soulkit.errors import ConfigError
from soulkit.tasks.base import Task

Row = dict[str, Any]
Split = Literal["train", "test"]

MADE = "synth:"
"""What stands before the number of rows to make, in the place of a file name."""
_WHOLE = re.compile(r"-?\d+")
DEFAULT_ROWS = 100
"""How many are made where nobody says."""


def make_rows(
    task: Task, n: int | None, seed: int, options: Mapping[str, str] | None = None
) -> list[Row]:
    """The first `n` rows of a task's endless data set; ConfigError for a task that has none.

    `options` are the task's own, as the command line gives them.
    """
    maker = task.spec.hook(task.name, "synth")
    if maker is None:
        raise ConfigError(
            f"Rows of '{task.name}' cannot be made here.",
            "Its declaration names no function that makes them ('synth:').",
            "Tasks that can make rows have 'synth' in the column rows of: soul tasks list",
        )
    if n is not None and n < 1:
        raise ConfigError(
            f"{n} rows cannot be made.",
            "-n says how many rows to write.",
            "Give a number of at least 1.",
        )
    if n is None and not maker.has_default("n"):
        n = DEFAULT_ROWS
    count = {} if n is None else {"n": n}
    return [dict(row) for row in maker(**count, seed=seed, options=options)]


def split_seed(seed: int, split: Split) -> int:
    """The seed of a split: training rows come from even seeds, test rows from odd ones.

    So rows that are generated for a run and for its evaluation never are the same stories.
    """
    return 2 * seed + (split == "test")


def made_rows(task: Task, source: str, seed: int, split: Split) -> list[RawRow]:
    """The rows that `synth:N` stands for on a command line, from `seed`, or `synth:N@SEED`, from a
    seed of its own; ConfigError when N is no count or SEED no whole number."""
    number, at, own_seed = source.removeprefix(MADE).partition("@")
    if not number.isdecimal() or not int(number) or (at and not _WHOLE.fullmatch(own_seed)):
        raise ConfigError(
            f"'{source}' does not say how many rows to make.",
            f"Rows are made here when the data of a task is {MADE}N.",
            f"Write --data {task.name}={MADE}2000, for example.",
        )
    rows = make_rows(task, int(number), split_seed(int(own_seed) if at else seed, split))
    return [RawRow(row, f"{source}:{i}") for i, row in enumerate(rows, 1)]
