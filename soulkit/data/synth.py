"""Rows made here: any number, from a seed, without network, licences or label noise.

Row i depends on the seed alone, so fewer rows are the beginning of more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from soulkit.data.files import RawRow
from soulkit.errors import ConfigError, did_you_mean

Row = dict[str, Any]

MADE = "synth:"
"""What stands before the number of rows to make, in the place of a file name."""


def synth(task_name: str, n: int, seed: int) -> list[Row]:
    """The first `n` rows of a task's endless data set; ConfigError for a task that has none."""
    if task_name not in _MAKERS:
        raise ConfigError(
            f"Rows of '{task_name}' cannot be made here.",
            "Only tasks whose answers follow from rules have a generator.",
            did_you_mean(task_name, _MAKERS),
        )
    if n < 1:
        raise ConfigError(
            f"{n} rows cannot be made.",
            "-n says how many rows to write.",
            "Give a number of at least 1.",
        )
    return _MAKERS[task_name](task_name, n, seed)


def split_seed(seed: int, split: Literal["train", "test"]) -> int:
    """The seed of a split: training rows come from even seeds, test rows from odd ones.

    So rows that are generated for a run and for its evaluation never are the same stories.
    """
    return 2 * seed + (split == "test")


def made_rows(
    task_name: str, given: str, seed: int, split: Literal["train", "test"]
) -> list[RawRow]:
    """The rows that `synth:N` stands for on a command line; ConfigError when N is no count."""
    number = given.removeprefix(MADE)
    if not number.isdecimal() or not int(number):
        raise ConfigError(
            f"'{given}' does not say how many rows to make.",
            f"Rows are made here when the data of a task is {MADE}N.",
            f"Write --data {task_name}={MADE}2000, for example.",
        )
    rows = synth(task_name, int(number), split_seed(seed, split))
    return [RawRow(row, f"{given}:{i}") for i, row in enumerate(rows, 1)]


def makeable() -> tuple[str, ...]:
    """The tasks whose rows can be made."""
    return tuple(_MAKERS)


def _stories(task_name: str, n: int, seed: int) -> list[Row]:
    from soulkit.data.stories.generate import synth_rows

    return [dict(row) for row in synth_rows(task_name, n, seed)]  # type: ignore[arg-type]


def _people(task_name: str, n: int, seed: int) -> list[Row]:
    from soulkit.data.people import secret_keeper_rows

    return secret_keeper_rows(n, seed)


_MAKERS: dict[str, Callable[[str, int, int], list[Row]]] = {
    "hitom": _stories,
    "paratomi": _stories,
    "secret_keeper": _people,
    "tomi": _stories,
}
