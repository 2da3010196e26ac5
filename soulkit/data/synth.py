"""Rows made here: any number, from a seed, without network, licences or label noise.

Row i depends on the seed alone, so fewer rows are the beginning of more.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

from soulkit.data.files import RawRow
from soulkit.data.made.alignx import TASKS as ALIGNX
from soulkit.data.made.alignx import rows as _alignx
from soulkit.data.made.humanual import TASKS as HUMANUAL
from soulkit.data.made.humanual import rows as _humanual
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


def rows_wanted(task_name: str, rows: int | None, stories: int | None) -> int:
    """How many rows to make when `rows`, or `stories` of every kind, or neither (100) is asked for.

    ConfigError when both are, or when the task has no stories.
    """
    from soulkit.data.stories.generate import rows_of

    if stories is None:
        return 100 if rows is None else rows
    if rows is not None or stories < 1:
        raise ConfigError(
            f"{stories} stories of every kind cannot be made.",
            "--stories takes the place of -n, and both count from 1.",
            "Give one of the two.",
        )
    if _MAKERS.get(task_name) is not _stories:
        tasks = [name for name, make in _MAKERS.items() if make is _stories]
        raise ConfigError(
            f"Rows of '{task_name}' do not come from stories.",
            "--stories counts stories of every kind, which only story tasks have.",
            f"Give -n, or one of {', '.join(tasks)}.",
        )
    return rows_of(task_name, stories)  # type: ignore[arg-type]


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


def _made(task_name: str, n: int, seed: int) -> list[Row]:
    """Rows of the module in `soulkit/data/made/` that is called like the task."""
    module = import_module(f"soulkit.data.made.{task_name}")
    rows: list[Row] = module.rows(n, seed)
    return rows


_MAKERS: dict[str, Callable[[str, int, int], list[Row]]] = {
    "fantom": _made,
    **dict.fromkeys(ALIGNX, _alignx),
    "coser": _made,
    "hitom": _stories,
    **dict.fromkeys(HUMANUAL, _humanual),
    "humanllm": _made,
    "paratomi": _stories,
    "secret_keeper": _people,
    "tomi": _stories,
    "mmtom": _made,
    "social_r1": _made,
    "lifechoices": _made,
    "mistakes": _made,
    "mistakes_worked": lambda _, n, seed: _made("mistakes", n, seed),
    "socsci210": _made,
    "twinvoice": _made,
    "behaviorchain": _made,
    "sotopia": _made,
    "tombench": _made,
    "userllm": _made,
    "mirrorbench": _made,
    "sim_math": _made,
    "sim_doc": _made,
}
