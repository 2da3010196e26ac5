"""Numbers over a batch that are means of other numbers: a headline and the parts it declares.

    metric:
      headline: macro
      parts:
        macro: {quizzes: quiz_share, chats: chat_mean}
        chat_mean: {variety: variety, endings: ending_f1}       # a part may have parts itself

Every part counts alike. A part without a number is named with the reason, and `value` is the mean
of the others: training uses it, and an evaluation shows the bounds alone (`eval/batch_cells.py`).

Rows of a person's own file name it as their `origin`. Where all rows have the same one, the mean is
over the parts that these rows have, under the name of the origin. Rows of several origins, or of an
origin and of none, are never averaged in an evaluation: those without an origin have the declared
numbers, and each origin has a headline of its own beside them. Training takes all as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from soulkit.runs.records import drafts
from soulkit.types import BatchMetric, Record

NO_ROWS, UNSCORED, UNDEFINED = "no rows", "unscored", "undefined"
"""Why a part has no number: no row belongs to it, none of its rows has a score, or these scores do
not define it (one text has no diversity)."""
Parts = Mapping[str, Mapping[str, str]]
"""Name of a mean → label of each part → name of the number that is the part."""
Metrics = Mapping[str, BatchMetric]
Numbers = Callable[[Sequence[Record]], dict[str, BatchMetric]]
Kept = Mapping[str, Mapping[str, str]]
"""Name of a mean → the parts, by label, that it is taken over."""


def with_declared_means(
    declared: Parts, headline: str, numbers: Numbers, records: Sequence[Record]
) -> dict[str, BatchMetric]:
    """What `numbers` makes of the records, and the declared means of it."""
    origins = origins_of(records)
    if len(origins) < 2:
        return with_means(declared, numbers(records), "".join(origins))
    made = with_means(declared, numbers(of_origin(records, "")))
    for origin in filter(None, origins):
        own = with_means(declared, numbers(of_origin(records, origin)), origin)
        if headline in own:
            mean = own[headline]
            # Its parts are numbers of these rows alone; `eval/batch_cells.py` asks these for them.
            value = None if mean.missing else mean.value
            made[of_one_origin(headline, origin)] = replace(
                mean, parts=(), value=value, beside=True, origin=origin
            )
    return made


def with_means(declared: Parts, metrics: Metrics, origin: str = "") -> dict[str, BatchMetric]:
    """`metrics` with the declared means.

    What `metrics` says of a mean is kept as far as it goes (what it counts, its scale); otherwise
    it counts what its parts count. An inner mean of which no part has any row is left out.
    """
    made = dict(metrics)
    inner = {name for parts in declared.values() for name in parts.values()}
    for name in _inner_first(declared):
        mean = _mean(declared[name], made, made.get(name), origin)
        if mean.n or name not in inner:
            made[name] = mean
        else:
            made.pop(name, None)
    return made


def _inner_first(declared: Parts) -> list[str]:
    """The names of the means, each after those that are parts of it."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        for part in declared[name].values():
            if part in declared and part not in order:
                visit(part)
        order[name] = None

    for name in declared:
        visit(name)
    return list(order)


def _mean(
    parts: Mapping[str, str], made: Metrics, frame: BatchMetric | None, origin: str
) -> BatchMetric:
    found = {label: made.get(name) for label, name in parts.items()}
    there = {label: part for label, part in found.items() if part is not None and part.n}
    # Rows of one's own have the parts that they have; nothing of the others is missing.
    counted = there if origin else found
    missing: dict[str, str] = {}
    for label, part in counted.items():
        if (why := why_missing(part)) is not None:
            missing[label] = why
        elif part is not None:
            missing |= {f"{label}/{inner}": why for inner, why in part.missing}
    values = [part.value for part in there.values() if part.value is not None]
    return replace(
        _counted(frame, list(there.values())),
        value=fmean(values) if values else None,
        parts=tuple((label, parts[label]) for label in counted),
        missing=tuple(missing.items()),
        origin=origin,
    )


def why_missing(part: BatchMetric | None) -> str | None:
    """Why a part has no number; None where it has one."""
    if part is None or not part.n:
        return NO_ROWS
    if part.value is not None:
        return None
    return UNDEFINED if part.n_scored else UNSCORED


def _counted(frame: BatchMetric | None, parts: Sequence[BatchMetric]) -> BatchMetric:
    """What a mean counts, and its scale."""
    if frame is not None:
        return frame
    units = dict.fromkeys(part.unit for part in parts)
    return BatchMetric(
        None, sum(part.n for part in parts), sum(part.n_scored for part in parts),
        " and ".join(units) or "episodes", _mean_end([part.low for part in parts]),
        _mean_end([part.high for part in parts]),
    )  # fmt: skip


def _mean_end(ends: Sequence[float | None]) -> float | None:
    known = [end for end in ends if end is not None]
    return fmean(known) if known and len(known) == len(ends) else None


# -- origins --------------------------------------------------------------------------------------


def origins_of(records: Sequence[Record]) -> list[str]:
    """The files of somebody's own that the rows of the drafts were made of; one is empty where
    some rows are of none."""
    return sorted({record.origin for record in drafts(records)})


def of_origin(records: Iterable[Record], origin: str) -> list[Record]:
    """The records whose rows were made of this file."""
    return [record for record in records if record.origin == origin]


def of_one_origin(name: str, origin: str) -> str:
    """The name of a headline over the rows of one of several origins."""
    return f"{name}/origin={origin}"


def without_origin(name: str, origin: str) -> str:
    """The headline of which `name` is that over the rows of one of several origins; otherwise the
    name as it is."""
    return name.removesuffix(of_one_origin("", origin)) if origin else name


def without_origins(records: Sequence[Record]) -> list[Record]:
    """The records as if their rows had no origin, where there are several: training has no
    published figures beside it, and needs one number of all its rows."""
    if len(origins_of(records)) < 2:
        return list(records)
    return [replace(record, origin="") for record in records]


# -- several batches ------------------------------------------------------------------------------


def shared_parts(name: str, sides: Sequence[Metrics]) -> dict[str, dict[str, str]]:
    """The parts of the mean `name`, and of its inner means, that have a number on every side; empty
    for a number that has no parts."""
    first = sides[0].get(name)
    if first is None or not first.parts or first.over:
        return {}
    kept: dict[str, dict[str, str]] = {name: {}}
    for label, part in first.parts:
        inner = shared_parts(part, sides)
        whole = all((one := side.get(part)) and one.value is not None for side in sides)
        if inner.get(part) if inner else whole:
            kept[name][label] = part
            kept |= inner
    return kept


def value_over(name: str, metrics: Metrics, kept: Kept) -> float | None:
    """The number `name`, a mean over those of its parts that are kept; None where one of them has
    no number here."""
    if name not in kept:
        return metrics[name].value if name in metrics else None
    values = [value_over(part, metrics, kept) for part in kept[name].values()]
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers and len(numbers) == len(values) else None
