"""The rows of the demonstrations: plain stories of a small world, some facts, mostly beliefs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

from soulkit.data.files import write_rows
from soulkit.tasks.made import split_seed
from soulkit.tasks.tom.stories.events import Exit, decode
from soulkit.tasks.tom.stories.generate import synth_rows

TASK: Final = "tomi"
QUESTIONS = ("memory", "reality", "first_order_no_tom", "first_order_tom")
BELIEFS = "first_order_.*"
BELIEFS_PER_FACT = 2


def write_stories(path: Path, count: int, seed: int, split: Literal["train", "test"]) -> None:
    """Balanced rows out of `count` made ones, unless the file is there.

    The splits share no story, but they share their wording: up to names, places and things there
    are 28 different rows.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    made = synth_rows(TASK, count, split_seed(seed, split), world="small")
    write_rows(path, _choose_rows(made), data_source=TASK)


def _choose_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some facts, and beliefs of the one who leaves: before the move as often as after it.

    Most people in such stories know better, and the one who moves the object always does. Without
    the balance, naming where the object really is would look like understanding.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not row["order"] or _leaver(row) in row["question"]:
            kinds.setdefault(str(row["question_type"]), []).append(row)
    beliefs = min(len(kinds[kind]) for kind in QUESTIONS)
    chosen_rows = []
    for kind in QUESTIONS:
        size = beliefs if kind.startswith("first_order") else beliefs // BELIEFS_PER_FACT
        # Drawn, not every k-th: stories take turns by type, and a stride would pick one type alone.
        chosen_rows += random.Random(kind).sample(kinds[kind], size)
    return chosen_rows


def _leaver(row: dict[str, Any]) -> str:
    """Who leaves the room in a row's story."""
    return next(event.agent for event in decode(row["events"]) if isinstance(event, Exit))
