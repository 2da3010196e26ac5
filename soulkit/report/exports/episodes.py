"""The episodes of runs as one table, CSV or Parquet, for pandas, R, DuckDB and spreadsheets.

Every run is read twice: for its columns, then for its rows. Rows are written in batches, so memory
does not grow with the number of episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from soulkit.errors import DataError
from soulkit.metrics.intervals import finite_value
from soulkit.report.exports.suite import plain_cell
from soulkit.runs.jsonl import aside, has_lines
from soulkit.runs.records import stream_records
from soulkit.types import Record

BATCH = 2000
"""Rows in a row group."""
METRIC, TAG = "metric_", "tag_"
"""Prefixes of the columns for metrics (numbers) and tags (texts), which follow the fixed ones."""
Runs = Sequence[tuple[str, Path]]
"""(name, `episodes.jsonl`) of runs."""


def _feedback(name: str) -> Callable[[Record], Any]:
    return lambda record: getattr(record.given or record.received, name, None)


def _transcript(record: Record) -> str:
    lines = record.episode.transcript
    return "\n".join(f"{line.seat}: {line.text}" for line in lines) if len(lines) > 1 else ""


COLUMNS: Mapping[str, tuple[type, str | Callable[[Record], Any], str]] = {
    "task": (str, "task", ""),
    "example_id": (str, "example_id", "Content hash: equal rows have equal ids in every run."),
    "step": (int, "step", "Training step; 0 in an evaluation."),
    "rollout": (int, "rollout", ""),
    "kind": (str, "kind", "`draft`, `refined` (after feedback) or `gold`."),
    "status": (str, "score.status", "`ok`, `salvaged`, a failure of the model, or `unscored`."),
    "reason": (str, "score.reason", "Why the episode, or its reward, is unscored."),
    "value": (float, "score.value", "Score; empty if unscored."),
    "reward": (float, "score.reward", "Training reward; empty if unscored."),
    "cluster": (str, "cluster", "Rows of one cluster are resampled together."),
    "origin": (str, "origin", "Your own file that the row was made from."),
    "stop": (str, "episode.stop", "Why the episode ended."),
    "reply": (str, lambda r: getattr(r.episode.final, "text", ""), "The model's last reply."),
    "transcript": (str, _transcript, "A dialogue, one line `SEAT: TEXT` each; else empty."),
    "gold": (str, "gold", "Gold answer."),
    "words": (str, "score.words", "The judge's words, or the answer as parsed."),
    "feedback": (str, _feedback("text"), "Feedback on a draft, or before a refined episode."),
    "feedback_author": (str, _feedback("author"), "`symbolic`, or the model that wrote it."),
    "feedback_leak": (str, _feedback("leak"), "How the feedback gives the answer away."),
    "judges": (str, lambda r: "; ".join(dict.fromkeys(v.judge for v in r.score.verdicts)),
               "Names of the judges, separated by `; `."),
    "prompts": (str, lambda r: "; ".join(f"{n}={hash_}" for n, hash_ in r.score.prompts.items()),
                "`NAME=HASH` of the prompt templates, separated by `; `."),
    "calls": (int, "episode.usage.calls", "Calls of the model and its partners, not of judges."),
    "prompt_tokens": (int, "episode.usage.prompt_tokens", "Tokens sent in these calls."),
    "completion_tokens": (int, "episode.usage.completion_tokens", "Includes reasoning tokens."),
    "reasoning_tokens": (int, "episode.usage.reasoning_tokens", ""),
    "seconds": (float, "episode.usage.seconds", "Time of these calls."),
    "cost": (float, "episode.usage.cost", "US dollars; empty without known prices."),
}  # fmt: skip
"""Fixed column → its type, where its value is in a record, and its meaning. `run`, the name of the
run, comes first."""
_READ = {name: attrgetter(place) if isinstance(place, str) else place
         for name, (_, place, _) in COLUMNS.items()}  # fmt: skip


def episode_row(record: Record) -> dict[str, Any]:
    """The known values of a record by column, those of `run` excepted. Lone surrogates, which are
    not valid UTF-8, become question marks."""
    row = {name: read(record) for name, read in _READ.items()}
    row |= {METRIC + name: number for name, number in record.score.metrics.items()}
    row |= {TAG + name: text for name, text in record.tags.items()}
    for name, value in row.items():
        if isinstance(value, str):
            row[name] = value.encode("utf-8", "replace").decode() or None
        elif isinstance(value, float):
            row[name] = finite_value(value)
    return row


def write_episodes(runs: Runs, file: Path, *, parquet: bool) -> Path:
    """Write the newest record of every episode of `runs` to `file`, atomically; returns `file`.
    DataError if none of the runs has episodes, or if a line cannot be read."""
    import pyarrow as pa
    from pyarrow.csv import CSVWriter
    from pyarrow.parquet import ParquetWriter

    runs = [(name, path) for name, path in runs if has_lines(path)]
    if not runs:
        raise DataError(
            "There are no episodes to export.",
            "The table has one row for each episode of an evaluation or a training run.",
            "Give folders that `soul eval` or `soul train` wrote.",
        )
    newest, columns = _survey(runs)
    forms = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    schema = pa.schema([(name, forms[form]) for name, form in columns.items()])
    rows = _rows(runs, newest)
    with (
        aside(file) as stream,
        (ParquetWriter if parquet else CSVWriter)(stream, schema) as writer,
    ):
        while batch := list(islice(rows, BATCH)):
            if not parquet:
                batch = [{name: plain_cell(value) for name, value in row.items()} for row in batch]
            writer.write_table(pa.Table.from_pylist(batch, schema))
    return file


def _survey(runs: Runs) -> tuple[list[set[int]], dict[str, type]]:
    """For each run the places of the records that no later line replaces; all columns."""
    newest: list[set[int]] = []
    own: dict[str, type] = {}
    for _, path in runs:
        places: dict[str, int] = {}
        for place, record in enumerate(stream_records(path, light=True)):
            places[record.key] = place
            own |= {METRIC + name: float for name in record.score.metrics}
            own |= {TAG + name: str for name in record.tags}
        newest.append(set(places.values()))
    fixed = {"run": str, **{name: form for name, (form, _, _) in COLUMNS.items()}}
    return newest, {**fixed, **dict(sorted(own.items()))}


def _rows(runs: Runs, newest: Sequence[set[int]]) -> Iterator[dict[str, Any]]:
    for (name, path), places in zip(runs, newest, strict=True):
        for place, record in enumerate(stream_records(path, light=True)):
            if place in places:
                yield {"run": name, **episode_row(record)}
