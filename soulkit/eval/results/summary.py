"""Compute `summary.json` from the records in `episodes.jsonl`.

Recorded scores are counted and averaged; nothing is scored again. A mean covers the scored
episodes. Its cell also counts the scored episodes, gives reasons for the unscored ones and, if the
scale is known, bounds for the mean. Breakdowns are metrics named `value/<tag>=<v>`. `value` covers
drafts only; refined episodes are reported under `value/kind=refined`, because they got feedback.

One cell of a task is its headline: `value`, or the batch statistic that the task declares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from soulkit.data.rows import row_id
from soulkit.errors import DataError
from soulkit.eval.results.batch_statistics import Summariser, batch_cells
from soulkit.eval.results.cells import DEV as DEV
from soulkit.eval.results.cells import UNDEFINED
from soulkit.eval.results.cells import VALUE as VALUE
from soulkit.eval.results.cells import Cell as Cell
from soulkit.eval.results.cells import Cells as Cells
from soulkit.eval.results.cells import cluster_of as cluster_of
from soulkit.eval.results.cells import headline as headline
from soulkit.eval.results.cells import headline_name as headline_name
from soulkit.eval.results.cells import headline_shown as headline_shown
from soulkit.eval.results.cells import metric_name as metric_name
from soulkit.eval.results.warnings import (
    TRUNCATED,
    dropped_by_actor,
    ignored_parameters,
    limit_counts,
    uniform_verdicts,
    word_cuts,
)
from soulkit.judge.reliability import dimensions
from soulkit.judge.verdict import spoken
from soulkit.metrics.intervals import Interval, bounds, estimate, finite_value
from soulkit.metrics.repeats import repeat_statistics
from soulkit.runs.jsonl import (
    SUMMARY_SCHEMA,
    read_object,
    read_value,
    refuse_other_schema,
    sparse,
)
from soulkit.runs.records import drafts, without_tokens
from soulkit.tasks.kit.scoring import of_one_origin, of_origin, origins_of, without_origins
from soulkit.types import COACH_FAILURE, Completion, Failure, Record, Score, Turn, Usage, unscored

NO_ROW_COUNTS = "none of these rows counts for this metric"
SEVERAL_ORIGINS = "rows from several of your files are not averaged; each file has its own value"
"""Reasons for a headline without rows, if the task gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The contents of `summary.json`."""

    command: str = ""
    model: str = ""
    protocol: str = ""
    seconds: float | None = None
    """Wall time."""
    cost: float | None = None
    """US dollars; None if no price is known."""
    n: int = 0
    n_scored: int = 0
    unscored_share: float | None = None
    tasks: Cells = field(default_factory=dict)
    statuses: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task → status → episodes."""
    prompts: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    """Task → template → its hashes; more than one if it changed during the run."""
    cuts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task → number of `episodes` whose texts were cut to their word budgets, and of `words`
    cut."""
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task → number of the actor's `replies`, of those that ended `at_limit`, and of those that
    were `silent` (no visible text, and no refusal)."""
    ignored: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task → player and sampling parameter that a server accepted but ignored → count."""
    uniform_verdicts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task → `judge: question` → number of episodes, if the judge gave all the same verdict."""
    dropped_settings: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]] = field(
        default_factory=dict
    )
    """Task → role → model → sampling setting that its server rejected → share of calls that were
    sent without it, in (0, 1]."""
    unpriced_calls: int = 0
    """Calls that `cost` does not include because they have no price."""
    rescored_from: str = ""
    suite: str = ""
    """The suite that was played."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Task of the suite that was not played → why."""
    costs: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Task → role → `calls`, `tokens` and `cost` (US dollars, None if no price is known) of every
    player that was asked over HTTP."""
    origins: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task → user's own file → number of rows made from it; other rows are not listed."""
    repeats: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Task with several episodes per row → `statistics` of the repeats by name; `variances` of a
    score and `sizes` (numbers) of rows, repeats and judge samples."""
    controls: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Task → control → `n`, `n_scored`, and `unscored` by reason."""

    def to_json(self) -> dict[str, Any]:
        always = (
            "command", "model", "protocol", "seconds", "cost", "n", "n_scored", "unscored_share",
            "tasks", "statuses", "prompts",
        )  # fmt: skip
        line = sparse(self, always)
        line["tasks"] = {
            task: {metric: cell.to_json() for metric, cell in cells.items()}
            for task, cells in self.tasks.items()
        }
        return {one.name: line[one.name] for one in fields(Summary) if one.name in line}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        """Parse `summary.json`; DataError if it is damaged."""
        return read_value(cls, line, "The summary")


class Condenser:
    """Makes small records with the same summary: without prompts, token ids, feedback and long
    texts, and with one object for equal parts. Records of tasks for which `reads_texts` is true
    keep their texts."""

    LONGEST, MOST = 80, 20_000  # characters of a text, and shared objects

    def __init__(self, reads_texts: Callable[[str], bool]) -> None:
        self._reads_texts, self._shared = reads_texts, dict[object, Any]()

    def __call__(self, record: Record) -> Record:
        if self._reads_texts(record.task):
            return without_tokens(record)
        old, score, share = record.episode, record.score, self._share
        if len(score.words) > self.LONGEST:  # a vote compares answers
            score = replace(score, words=sha256(score.words.encode(errors="replace")).hexdigest())
        parts = {name: share(getattr(old, name)) for name in ("traces", "transcript", "notes")}
        return replace(
            record, episode=replace(old, **parts, usage=share(Usage(cost=old.usage.cost))),
            score=share(score), tags=self._shared.setdefault((repr(record.tags),), record.tags),
            gold=share(record.gold), prompt="", given=None, received=None,
        )  # fmt: skip

    def _share(self, value: Any) -> Any:
        """The first object that was equal to `value` without its long texts."""
        kind = type(value)
        key: Any = (kind, value)
        if kind is str:
            key = value = value if len(value) <= self.LONGEST else "long text"
        elif kind in (tuple, list):
            value = kind(map(self._share, value))
            key = (kind, *map(id, value))
        elif kind is dict:
            value = {name: self._share(part) for name, part in value.items()}
            key = (kind, *value, *map(id, value.values()))
        elif kind is Turn:
            reply, text = value.completion, value.completion.text
            if not spoken(text, "paper"):  # nothing, or only a thought
                text = "<think>" * bool(text.strip())
            key = (kind, self._share(text), reply.stop_reason, reply.dropped)
            value = Turn((), Completion(text=key[1], stop_reason=key[2], dropped=key[3]))
        elif kind.__module__ == "soulkit.types":
            parts = {name: self._share(getattr(value, name)) for name in kind.__slots__}
            value, key = kind(**parts), (kind, *map(id, parts.values()))
        elif kind not in (bool, int, float):
            key = (kind, id(value))  # is not looked into, and kept, so that no other gets its id
        if len(self._shared) > self.MOST:
            self._shared.clear()
        return self._shared.setdefault(key, value)


def unscored_share(records: Sequence[Record]) -> float:
    """Share of episodes without a score, in [0, 1]; DataError if there are no episodes."""
    if not records:
        raise DataError(
            "There are no episodes.",
            "The share of unscored episodes is undefined.",
            "Check --limit and the task's files with `soul tasks show TASK`.",
        )
    return sum(not r.score.scored for r in records) / len(records)


def summarise(
    records: Sequence[Record], *, command: str, model: str, protocol: str, seconds: float,
    cost: float | None, batch: Mapping[str, Summariser] | None = None, training: bool = False,
    headlines: Mapping[str, str] | None = None, scale: Mapping[str, Interval] | None = None,
    beside: Mapping[str, Sequence[str]] | None = None, names: Mapping[str, str] | None = None,
    categories: Collection[str] = (),
) -> Summary:  # fmt: skip
    """Summarise records. `seconds` is wall time, `cost` US dollars.

    Arguments by task: `batch` computes its batch statistics; `headlines` names its headline if that
    is not `value`; `scale` is the (lowest, highest) score, or under `task/metric` that of another
    metric (binary metrics default to [0, 1]); `beside` lists metrics to show next to the headline;
    `names` is the name of its mean score. `categories` are tasks whose answers can be put to a
    vote. In `training`, a mean with missing parts is the mean of the other parts.
    """
    groups = records_by_task(records)
    if training:  # one batch, whatever the origins of its rows
        groups = {name: without_origins(rows) for name, rows in groups.items()}
    tasks = {name: _task(name, rows, scale or {}) for name, rows in groups.items()}
    for name, summariser in (batch or {}).items():
        tasks.setdefault(name, {}).update(
            batch_cells(groups.get(name, []), summariser, incomplete=training)
        )
    for name, together in (beside or {}).items():
        for metric in set(together) & set(tasks.get(name, {})):
            tasks[name][metric] = replace(tasks[name][metric], beside=True)
    for name, cells in tasks.items():
        _mark_headline(cells, (headlines or {}).get(name) or VALUE, groups.get(name, []))
        called = (names or {}).get(name, "")
        if VALUE in cells and called not in cells:  # else another number has that name
            cells[VALUE] = replace(cells[VALUE], name=called)
    return Summary(
        command=command,
        model=model,
        protocol=protocol,
        seconds=seconds,
        cost=cost,
        n=len(records),
        n_scored=sum(r.score.scored for r in records),
        unscored_share=unscored_share(records) if records else None,
        tasks=tasks,
        statuses={name: _statuses(rows) for name, rows in groups.items()},
        prompts={name: _prompts(rows) for name, rows in groups.items()},
        cuts={name: cuts for name, rows in groups.items() if (cuts := word_cuts(rows))},
        limits={name: ends for name, rows in groups.items() if (ends := limit_counts(rows))},
        origins=_origins(records),
        repeats={} if training else _repeats(groups, scale or {}, categories),
        ignored={n: lost for n, rows in groups.items() if (lost := ignored_parameters(rows))},
        uniform_verdicts={n: one for n, rows in groups.items() if (one := uniform_verdicts(rows))},
        dropped_settings={
            name: cut for name, rows in groups.items() if (cut := dropped_by_actor(rows, model))
        },
    )


def records_by_task(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by task, in alphabetical order so that the order of playing does not matter."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.task, []).append(record)
    return dict(sorted(groups.items()))


def _repeats(
    tasks: Mapping[str, Sequence[Record]], scale: Mapping[str, Interval],
    categories: Collection[str],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """The statistics of the repeats of each task in which a row has two scores."""
    made = {}
    for task, records in tasks.items():
        rows: dict[str, list[Record]] = {}
        for record in drafts(records):
            rows.setdefault(record.example_id, []).extend([record] if record.score.scored else ())
        if max(map(len, rows.values()), default=0) < 2:
            continue
        clusters, several = {r.example_id: cluster_of(r) for r in records}, rows.values()
        made[task] = repeat_statistics(
            [[r.score.value or 0.0 for r in one] for one in several],
            [clusters[row] for row in rows], scale.get(task),
            answers=[[r.score.words for r in one] for one in several if task in categories],
            opinions=[[_opinions(r.score) for r in one] for one in several],
        )  # fmt: skip
    return made


def _opinions(score: Score) -> list[float]:
    """For each judge sample the mean of all numbers in its verdicts."""
    numbers: dict[tuple[str, int], list[float]] = {}
    for one in score.verdicts:
        rated = [x for x in dimensions(one).values() if not isinstance(x, str)]
        numbers.setdefault((one.judge, one.sample), []).extend(rated)
    most = max(map(len, numbers.values()), default=0)
    return [fmean(rated) for rated in numbers.values() if rated and len(rated) == most]


def _origins(records: Iterable[Record]) -> dict[str, dict[str, int]]:
    files: dict[str, dict[str, str]] = {}
    for record in records:
        if record.origin:
            files.setdefault(record.task, {})[row_id(record.example_id)] = record.origin
    return {task: dict(sorted(Counter(files[task].values()).items())) for task in sorted(files)}


def metric_values(records: Sequence[Record], metric: str) -> list[tuple[Record, float | None]]:
    """The records that `metric` applies to, with its value (None if unscored or undefined).

    `value` applies to all records. Another metric applies to the records that have it, and also to
    unscored records if every scored record has it. A value that is not finite counts as undefined.
    """
    if metric == "value":
        return [(r, finite_value(r.score.value)) for r in records]
    scored = [r for r in records if r.score.scored]
    everywhere = bool(scored) and all(metric in r.score.metrics for r in scored)
    return [
        (r, finite_value(r.score.metrics.get(metric)))
        for r in records
        if metric in r.score.metrics or (everywhere and not r.score.scored)
    ]


def worst_case(
    task: str, cells: Mapping[str, Cell], records: Sequence[Record], end: int
) -> dict[str, Cell]:
    """A task's cells as if every missing value were the lowest (`end` 0) or highest (1) of its
    scale. A batch statistic has no such values: it gets its recorded bound, without an interval."""
    scales = {f"{task}/{name}": cell.scale for name, cell in cells.items() if cell.scale}
    scales |= {task: scales[f"{task}/{VALUE}"]} if f"{task}/{VALUE}" in scales else {}
    filled = _task(task, records, scales, end)
    made = dict(cells)
    for name, cell in cells.items():
        if cell.n_scored < cell.n:
            rows = name in filled and cell.scale is not None and not cell.of_batch
            new = filled[name] if rows else Cell(mean=(cell.worst, cell.best)[end])
            made[name] = replace(cell, mean=new.mean, ci_low=new.ci_low, ci_high=new.ci_high,
                                 variance=new.variance, df=new.df)  # fmt: skip
    return made


def _task(
    name: str, records: Sequence[Record], scale: Mapping[str, Interval], end: int | None = None
) -> dict[str, Cell]:
    origins, everything = origins_of(records), drafts(records)
    if len(origins) > 1:
        records = of_origin(records, "")
    main = drafts(records)
    cell = partial(_cell, end=end)
    cells = {"value": cell(metric_values(main, "value"), scale.get(name), hides=True)}
    for metric in sorted({m for r in main for m in r.score.metrics} - {"value"}):
        ends = scale.get(f"{name}/{metric}")
        cells[metric] = cell(metric_values(main, metric), ends, hides=ends is not None)
    for label, rows in _breakdowns(main, records).items():
        pairs = metric_values(rows, "value")
        cells[f"value/{label}"] = cell(pairs, scale.get(name), hides=True)
    limits = scale.get(name)
    widest = None if limits is None else (limits[0] - limits[1], limits[1] - limits[0])
    for number, replies in _rounds(records).items():
        pairs = metric_values([last for _, last in replies], "value")
        cells[f"value/round={number}"] = replace(cell(pairs, limits, hides=True), beside=True)
        pairs = [(draft, _gain(draft, last)) for draft, last in replies]
        cells[f"gain/round={number}"] = replace(cell(pairs, widest), beside=True)
    for origin in filter(None, origins if len(origins) > 1 else ()):
        pairs = metric_values(of_origin(everything, origin), "value")
        own = cell(pairs, scale.get(name), hides=True)
        cells[of_one_origin("value", origin)] = replace(own, origin=origin)
    return cells


def _breakdowns(main: Sequence[Record], records: Sequence[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in main:
        for tag, value in record.tags.items():
            groups.setdefault(f"{tag}={value}", []).append(record)
    parts = dict(sorted(groups.items()))
    for kind in ("refined", "gold"):
        rows = [r for r in records if r.kind == kind]
        if rows and len(rows) < len(records):
            parts[f"kind={kind}"] = rows
    return parts


def _rounds(records: Sequence[Record]) -> dict[int, list[tuple[Record, Record]]]:
    """Round of an evaluation with `refine` → every draft with its newest reply in that round: a
    draft without usable feedback keeps its reply, one whose coach failed is unscored."""
    latest = {(r.example_id, r.rollout): r for r in records if r.kind == "draft"}
    first, refined = dict(latest), [r for r in records if r.kind == "refined"]
    if any(draft.step for draft in latest.values()):  # steps of a training
        return {}
    failed = [_next_round(r) for r in records if COACH_FAILURE in r.episode.notes]
    rounds = {}
    for number in range(1, max([*failed, *(r.step + 1 for r in refined)], default=0) + 1):
        latest |= {(r.example_id, r.rollout): r for r in refined if r.step + 1 == number}
        latest |= {place: without_coach(r) for place, r in latest.items()
                   if _next_round(r) <= number}  # fmt: skip
        rounds[number] = [(first[place], latest[place]) for place in first]
    return rounds


def _next_round(record: Record) -> int:
    return 1 if record.kind == "draft" else record.step + 2


def without_coach(record: Record) -> Record:
    """The record, unscored if the coach failed on it."""
    if (words := record.episode.notes.get(COACH_FAILURE)) is None:
        return record
    why = Failure("coach_error", str(words))
    return replace(record, score=unscored(why, record.score.protocol))


def _gain(draft: Record, last: Record) -> float | None:
    if draft.score.value is None or last.score.value is None:
        return None
    return last.score.value - draft.score.value


def _cell(
    pairs: Sequence[tuple[Record, float | None]], scale: Interval | None, *, hides: bool = False,
    end: int | None = None,
) -> Cell:  # fmt: skip
    """The mean of a metric. With `hides`, truncated episodes count as unscored in its bounds,
    because the score of a cut dialogue may differ from that of a complete one. With `end`, missing
    values are that end of the scale."""
    if end is not None and scale is not None:
        pairs = [(r, scale[end] if v is None else v) for r, v in pairs]
    values = [v for _, v in pairs]
    scored = [v for v in values if v is not None]
    # Scores that are all 0 or 1 are not binary if the task declares a wider scale.
    binary = bool(scored) and set(scored) <= {0.0, 1.0} and scale in (None, (0.0, 1.0))
    limits = scale or ((0.0, 1.0) if binary else None)
    mean = estimate(values, [cluster_of(r) for r, _ in pairs], scale=limits)
    certain = [None if hides and r.score.status == TRUNCATED else v for r, v in pairs]
    incomplete = limits is not None and None in certain
    worst, best = bounds(certain, limits) if limits is not None and incomplete else (None, None)
    return Cell(
        mean=mean.mean,
        ci_low=mean.ci_low,
        ci_high=mean.ci_high,
        n_scored=mean.n_scored,
        n=mean.n,
        n_clusters=mean.n_clusters,
        method=mean.method,
        unscored=_reasons(pairs),
        worst=worst,
        best=best,
        variance=mean.variance,
        df=mean.df,
        scale=mean.scale,
        events=mean.events,
    )


def _reasons(pairs: Sequence[tuple[Record, float | None]]) -> dict[str, int]:
    missing = [r for r, v in pairs if v is None]
    named = Counter(r.score.reason or (UNDEFINED if r.score.scored else "unknown") for r in missing)
    return dict(sorted(named.items()))


def _mark_headline(cells: dict[str, Cell], name: str, records: Sequence[Record]) -> None:
    """Mark the headline. A declared headline that could not be computed gets a cell without a mean;
    if no row counts for it, the cell says why."""
    if name not in cells and name != VALUE:
        undefined = [(record, None) for record in drafts(records)]
        cells[name] = Cell(n=len(undefined), unscored=_reasons(undefined))
    if name in cells:
        cell = cells[name]
        played = bool(cell.n or cell.missing) or not records
        origins = origins_of(records)
        lacking = SEVERAL_ORIGINS if len(origins) > 1 and "" not in origins else NO_ROW_COUNTS
        why = "" if played else cell.not_applicable or lacking
        origin = origins[0] if len(origins) == 1 else ""
        cells[name] = replace(cell, headline=True, not_applicable=why, origin=origin)
        for origin in filter(None, origins):
            if (own := of_one_origin(name, origin)) in cells:
                cells[own] = replace(cells[own], beside=True)


def _statuses(records: Sequence[Record]) -> dict[str, int]:
    return dict(sorted(Counter(r.score.status for r in drafts(records)).items()))


def _prompts(records: Sequence[Record]) -> dict[str, list[str]]:
    """Template → its hashes; more than one if it changed during the run."""
    templates: dict[str, set[str]] = {}
    for record in records:
        for name, digest in record.score.prompts.items():
            templates.setdefault(name, set()).add(digest)
    return {name: sorted(hashes) for name, hashes in sorted(templates.items())}


def recorded_summary(folder: Path) -> Summary:
    """Read the `summary.json` of a run; empty if there is none, RunError or DataError if it is
    damaged."""
    return Summary.from_json(summary_line(folder))


def summary_line(folder: Path) -> dict[str, Any]:
    """The raw contents of a run's `summary.json`; empty if there is none. RunError if it is
    damaged, DataError for another schema."""
    line = read_object(folder / "summary.json")
    refuse_other_schema(line, SUMMARY_SCHEMA, f"'{folder / 'summary.json'}'")
    return line
