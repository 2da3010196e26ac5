"""From replies to numbers: reply endings, batch means, and headlines composed of parts.

Endings: a single reply that hits its length limit scores the minimum (`truncated`); a dialogue is
scored as it is. Under `reference`, and with `grades_cut_replies`, readable cut replies are graded.

    metric:
      parts:
        macro: {quizzes: quiz_share, chats: chat_mean}
        chat_mean: {variety: variety, endings: ending_f1}       # a part may have parts itself

A part without a number is listed with the reason. Rows of different origins are never averaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from soulkit.data.rows import row_id
from soulkit.judge.verdict import spoken
from soulkit.runs.records import drafts
from soulkit.tasks.kit.user_code import finite_or_none
from soulkit.types import BatchMetric, Completion, Episode, Record, Score

READABLE = ("ok", "salvaged")
_UNREAD = ("empty", "no_tag", "malformed")
CUT_TURNS = "turns/cut"
"""Metric of a dialogue: the share of the actor's turns that hit their length limit."""


def reply_failure(completion: Completion, strict: bool) -> str:
    """`refusal` or `truncated` if the reply counts as such even when readable; else empty.

    Unless `strict`, only a filtered reply without any text is a refusal.
    """
    held_back = completion.stop_reason == "content_filter" and not completion.text.strip()
    if completion.stop_reason == "refusal" or held_back:
        return "refusal"
    if not strict:
        return ""
    return {"content_filter": "refusal", "length": "truncated"}.get(completion.stop_reason, "")


def actor_status(completion: Completion, parsed: str, strict: bool = True) -> str:
    """How a single reply was parsed (`parsed`), or the actor's failure that makes it invalid."""
    failure = reply_failure(completion, strict)
    if failure or parsed in READABLE:
        return failure or parsed
    if completion.stop_reason == "content_filter":
        return "refusal"
    if completion.stop_reason == "length":
        return "truncated"
    return parsed if completion.text.strip() else "empty"


def with_endings(
    score: Score, episode: Episode, low: float, *, strict: bool, dialogue: bool
) -> Score:
    """`score`, adjusted for how the actor's replies ended; `low` is the minimum."""
    replies = [turn.completion for trace in episode.traces for turn in trace.turns]
    if not score.scored or not replies:
        return score
    failures = [reply_failure(reply, strict) for reply in replies]
    cut = [reply for reply in replies if reply.stop_reason == "length"]
    if dialogue:
        score = replace(score, metrics={**score.metrics, CUT_TURNS: len(cut) / len(replies)})
    if score.status not in (*READABLE, *_UNREAD):
        return score
    if dialogue and "refusal" not in failures:
        return replace(score, status=_dialogue_status(score.status, replies))
    if cut and (score.status in _UNREAD or not all(reply.text.strip() for reply in cut)):
        failures.append("truncated")
    failure = next((name for name in ("refusal", "truncated") if name in failures), "")
    return replace(score, value=low, reward=low, status=failure) if failure else score


def _dialogue_status(status: str, replies: Sequence[Completion]) -> str:
    """`status`, or `truncated` or `empty` if a turn of the dialogue was cut or silent."""
    if any(reply.stop_reason == "length" for reply in replies):
        return "truncated"
    silent = status in READABLE and not all(spoken(reply.text, "paper") for reply in replies)
    return "empty" if silent else status


NO_ROWS, UNSCORED, UNDEFINED = "no rows", "unscored", "undefined"
"""Why a part has no number: it has no rows, none of its rows has a score, or these scores do not
define it (a single text has no diversity)."""
Parts = Mapping[str, Mapping[str, str]]
"""Name of a mean → label of each part → name of the metric that is the part."""
Metrics = Mapping[str, BatchMetric]
Numbers = Callable[[Sequence[Record]], dict[str, BatchMetric]]
Kept = Mapping[str, Mapping[str, str]]
"""Name of a mean → label → part, for the parts that the mean is taken over."""


def with_declared_means(
    declared: Parts, headline: str, numbers: Numbers, records: Sequence[Record]
) -> dict[str, BatchMetric]:
    """The metrics that `numbers` computes from the records, plus the declared means."""
    origins = origins_of(records)
    if len(origins) < 2:
        return with_means(declared, numbers(records), "".join(origins))
    made = with_means(declared, numbers(of_origin(records, "")))
    for origin in filter(None, origins):
        own = with_means(declared, numbers(of_origin(records, origin)), origin)
        if headline in own:
            mean = own[headline]
            # Its parts are metrics of these rows alone; `eval/batch_cells.py` computes them.
            value = None if mean.missing else mean.value
            made[of_one_origin(headline, origin)] = replace(
                mean, parts=(), value=value, beside=True, origin=origin
            )
    return made


def with_means(declared: Parts, metrics: Metrics, origin: str = "") -> dict[str, BatchMetric]:
    """`metrics` with the declared means; an inner mean is left out if none of its parts has rows.

    If `metrics` already has a mean, its unit, counts and scale are kept.
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
    with_rows = {label: part for label, part in found.items() if part is not None and part.n}
    # A user's own rows need not cover all parts, so absent parts are not missing.
    counted = with_rows if origin else found
    missing: dict[str, str] = {}
    for label, part in counted.items():
        if (why := why_missing(part)) is not None:
            missing[label] = why
        elif part is not None:
            missing |= {f"{label}/{inner}": why for inner, why in part.missing}
    values = [part.value for part in with_rows.values() if part.value is not None]
    return replace(
        _counted(frame, list(with_rows.values())),
        value=fmean(values) if values else None,
        parts=tuple((label, parts[label]) for label in counted),
        missing=tuple(missing.items()),
        origin=origin,
    )


def why_missing(part: BatchMetric | None) -> str | None:
    """Why a part has no number; None if it has one."""
    if part is None or not part.n:
        return NO_ROWS
    if part.value is not None:
        return None
    return UNDEFINED if part.n_scored else UNSCORED


def _counted(frame: BatchMetric | None, parts: Sequence[BatchMetric]) -> BatchMetric:
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
    """Names of the user's files that the drafts' rows come from; empty name for other rows."""
    return sorted({record.origin for record in drafts(records)})


def of_origin(records: Iterable[Record], origin: str) -> list[Record]:
    """The records whose rows come from this file."""
    return [record for record in records if record.origin == origin]


def of_one_origin(name: str, origin: str) -> str:
    """The name of a headline restricted to one of several origins."""
    return f"{name}/origin={origin}"


def without_origin(name: str, origin: str) -> str:
    """`name` without the suffix of `of_one_origin`; other names unchanged."""
    return name.removesuffix(of_one_origin("", origin)) if origin else name


def without_origins(records: Sequence[Record]) -> list[Record]:
    """The records with origins removed if there are several: training needs a single number."""
    if len(origins_of(records)) < 2:
        return list(records)
    return [replace(record, origin="") for record in records]


# -- several batches ------------------------------------------------------------------------------


def shared_parts(name: str, sides: Sequence[Metrics]) -> dict[str, dict[str, str]]:
    """The parts of the mean `name`, and of its inner means, that have a number on every side."""
    first = sides[0].get(name)
    if first is None or not first.parts or first.over:
        return {}
    kept: dict[str, dict[str, str]] = {name: {}}
    for label, part in first.parts:
        inner = shared_parts(part, sides)
        on_all_sides = all(part in side and side[part].value is not None for side in sides)
        if inner.get(part) if inner else on_all_sides:
            kept[name][label] = part
            kept |= inner
    return kept


def value_over(name: str, metrics: Metrics, kept: Kept) -> float | None:
    """The metric `name` as a mean over its kept parts; None if one of them has no number."""
    if name not in kept:
        return metrics[name].value if name in metrics else None
    values = [value_over(part, metrics, kept) for part in kept[name].values()]
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers and len(numbers) == len(values) else None


SHARE = (0.0, 1.0)
ROWS = "rows"


def mean_of(
    values: Sequence[float | None], unit: str = "episodes", scale: tuple[float, float] = SHARE
) -> BatchMetric:
    """The mean of the values that are not None; `scale` is its lowest and highest value."""
    scored = [value for value in values if value is not None]
    return BatchMetric(
        value=sum(scored) / len(scored) if scored else None,
        n=len(values), n_scored=len(scored), unit=unit, low=scale[0], high=scale[1],
        is_mean=True,
    )  # fmt: skip


def as_batch_metrics(
    metrics: Mapping[str, Any], records: Sequence[Record]
) -> dict[str, BatchMetric]:
    """What `summarise` returned, as metrics; plain numbers count all episodes and have no scale.

    A number that is not finite becomes a metric without a value and without scored units.
    """
    main = drafts(records)
    scored = sum(record.score.scored for record in main)
    numbers = {
        name: metric if isinstance(metric, BatchMetric)
        else BatchMetric(value=metric, n=len(main), n_scored=scored)
        for name, metric in metrics.items()
    }  # fmt: skip
    finite = {name: finite_or_none(metric.value) for name, metric in numbers.items()}
    return {
        name: replace(metric, value=finite[name])
        if finite[name] is not None or metric.value is None
        else replace(metric, value=None, n_scored=0)
        for name, metric in numbers.items()
    }


# -- rows ----------------------------------------------------------------------------------------


def row_plays(records: Sequence[Record]) -> dict[str, list[list[Record]]]:
    """Row → its plays, in order; a play is the list of records of the row's forms."""
    plays: dict[str, dict[tuple[Any, ...], list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in drafts(records):
        play = (record.kind, record.step, record.rollout)
        plays[row_id(record.example_id)][play].append(record)
    return {row: list(of_row.values()) for row, of_row in plays.items()}


def row_values(records: Sequence[Record]) -> dict[str, float | None]:
    """Row → the mean over its forms and over the plays in which every form is scored."""
    return {row: _row_value(plays) for row, plays in row_plays(records).items()}


def _row_value(plays: Sequence[Sequence[Record]]) -> float | None:
    means = []
    for play in plays:
        values = [record.score.value for record in play if record.score.value is not None]
        if len(values) == len(play):
            means.append(sum(values) / len(values))
    return sum(means) / len(means) if means else None


def row_mean(records: Sequence[Record]) -> BatchMetric:
    """The mean over rows; each row counts once, regardless of its number of forms."""
    return mean_of(list(row_values(records).values()), ROWS)


def macro(records: Sequence[Record], tag: str) -> BatchMetric | None:
    """The macro average over a tag: the mean of the mean scores per tag value. Counts are rows.

    None if no record has the tag. A tag value without a scored row is a missing part.
    """
    tagged: dict[str, list[Record]] = defaultdict(list)
    for record in drafts(records):
        if tag in record.tags:
            tagged[record.tags[tag]].append(record)
    if not tagged:
        return None
    groups = {value: row_mean(group) for value, group in sorted(tagged.items())}
    means = [group.value for group in groups.values() if group.value is not None]
    return BatchMetric(
        value=sum(means) / len(means) if means else None,
        n=sum(group.n for group in groups.values()),
        n_scored=sum(group.n_scored for group in groups.values()),
        unit=ROWS, low=SHARE[0], high=SHARE[1], over=tag,
        parts=tuple((value, "") for value in groups),
        missing=tuple((value, UNSCORED) for value, group in groups.items() if group.value is None),
    )  # fmt: skip
